"""`Job`: a model to train, the batch and sequence, the number formats and the kind of software."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.plan.models.model import Model
from nearpeak.plan.training.layout import Layout

Software = Literal["eager", "fused", "unfused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Number formats: of products, and the bytes that each weight takes in every state."""

    name: str
    products: str
    """dtype of the matrix products of layers; the output layer stays in 16 bits."""
    parameters: float = 2
    gradients: float = 2
    master: float = 0
    """A float32 copy of the weights, where there is one."""
    moments: float = 8
    """Both moments of AdamW."""
    saved: float = 2
    """Bytes of an activation that is kept for a product's backward pass."""
    scaling: Literal["none", "tensor", "block", "fine"] = "none"
    """How numbers of 8 and 4 bits are scaled: per tensor, in blocks (MXFP8), or in fine blocks (NVFP4)."""

    @property
    def wire(self) -> float:
        """Bytes of a weight on its way to ranks that gather it."""
        return min(self.parameters, 2.0)

    @property
    def optimizer(self) -> float:
        """Bytes per weight that a sharded optimizer spreads."""
        return self.master + self.moments


PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision(name="bf16", products="bfloat16"),
        Precision(name="bf16-master", products="bfloat16", master=4),
        Precision(name="bf16-fp32-grads", products="bfloat16", gradients=4, master=4),
        Precision(name="fp16-fp32-grads", products="float16", gradients=4, master=4),
        Precision(name="bf16-low-moments", products="bfloat16", master=4, moments=4),
        Precision(name="fp32", products="tfloat32", parameters=4, gradients=4, saved=4),
        Precision(name="fp8", products="float8", master=4, saved=1, scaling="tensor"),
        Precision(name="fp8-fp32-grads", products="float8", gradients=4, master=4, saved=1, scaling="tensor"),
        Precision(name="fp8-low-moments", products="float8", master=4, moments=4, saved=1, scaling="tensor"),
        Precision(name="mxfp8", products="float8", master=4, saved=1.03125, scaling="block"),
        Precision(name="fp4", products="float4", master=4, saved=0.5625, scaling="fine"),
    )
}
"""Named ones. "bf16" keeps weights and gradients in 16 bits and the moments in 32: 2 + 2 + 8 bytes a weight."""


def precision_named(name: str) -> Precision:
    """The precision of this name."""
    if name not in PRECISIONS:
        raise UsageError(f"precision={name!r} is not known. {did_you_mean(name, PRECISIONS)}")
    return PRECISIONS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained and how, but for the hardware."""

    model: Model
    layout: Layout
    sequence: int
    precision: Precision = PRECISIONS["bf16-master"]
    software: Software = "fused"
    """"fused": kernels that keep little for the backward pass (Megatron with Transformer Engine, compiled code);
    "eager": one kernel per operator but for attention; "unfused": fused, but attention writes its scores (before
    FlashAttention)."""
    year: float = 2026.6
    """When the software was released, as a year with a fraction: kernels for experts got faster every few months."""
    dropless: bool = True
    """Experts take all tokens that are sent to them, so that shapes depend on routing."""
    trainable: float = 1.0
    """Share of the weights that have gradients and an optimizer; small for adapters (LoRA)."""

    def __post_init__(self) -> None:
        if self.sequence < 1:
            raise UsageError(f"sequence={self.sequence} must be at least 1. Nearest: sequence=1.")
        if self.software not in get_args(Software):
            raise UsageError(
                f"software={self.software!r} is not known. {did_you_mean(self.software, get_args(Software))}"
            )
        if not 0 < self.trainable <= 1:
            raise UsageError(f"trainable={self.trainable} must lie above 0 and at most at 1. Nearest: trainable=1.")
        self.layout.check(self.model, self.sequence)

    @property
    def tokens(self) -> int:
        """Tokens of one step over all GPUs."""
        return self.layout.global_batch * self.sequence

    @property
    def microbatch_tokens(self) -> int:
        """Tokens of one microbatch that one rank has, after context parallelism."""
        return self.layout.microbatch * self.sequence // self.layout.cp

    def with_layout(self, layout: Layout) -> Job:
        """The same job laid out otherwise."""
        return replace(self, layout=layout)
