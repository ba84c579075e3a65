"""`Job`: a model to train, the batch and sequence, the number formats and the kind of software."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.plan.models.model import Model
from nearpeak.plan.training.layout import Layout

Software = Literal["eager", "fused", "unfused"]
FIRST_YEAR, LAST_YEAR = 2017, 2100
"""Years of software that a job may have: since the first GPUs with matrix engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The dtype of GEMMs, and the bytes of each weight in every state."""

    name: str
    gemm_dtype: str
    """dtype of the GEMMs of layers; the output layer stays in 16 bits."""
    parameters: float = 2
    gradients: float = 2
    master: float = 0
    """A float32 copy of the weights, where there is one."""
    moments: float = 8
    """Both moments of AdamW."""
    saved: float = 2
    """Bytes of an activation that is saved for the backward pass of a GEMM."""
    activation: float = 2
    """Bytes of an input of a feed's activation that is saved for its backward pass."""
    scaling: Literal["none", "tensor", "block", "fine"] = "none"
    """How numbers of 8 and 4 bits are scaled: per tensor, in blocks (MXFP8), or in fine blocks (NVFP4)."""
    microscaled: bool = False
    """Whether GEMMs take a scale for each block of 32 values (OCP MX): GPUs that have 4-bit GEMMs do."""

    @property
    def wire(self) -> float:
        """Bytes of a weight in an all-gather."""
        return min(self.parameters, 2.0)

    @property
    def optimizer(self) -> float:
        """Bytes per weight of the optimizer states, which sharding spreads over ranks."""
        return self.master + self.moments


PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision(name="bf16", gemm_dtype="bfloat16"),
        Precision(name="bf16-master", gemm_dtype="bfloat16", master=4),
        Precision(name="bf16-fp32-grads", gemm_dtype="bfloat16", gradients=4, master=4),
        Precision(name="fp16-fp32-grads", gemm_dtype="float16", gradients=4, master=4),
        Precision(name="bf16-low-moments", gemm_dtype="bfloat16", master=4, moments=4),
        # both moments in 8 bits, with a float32 scale for each block of 256 (arXiv:2110.02861)
        Precision(name="bf16-adam8bit", gemm_dtype="bfloat16", moments=2 * (1 + 4 / 256)),
        # one momentum; embeddings and norms, which have AdamW's two, are not told apart (arXiv:2502.16982)
        Precision(name="bf16-muon", gemm_dtype="bfloat16", moments=4),
        # frozen weights in 4 bits, 4.127 with their scales quantized too (arXiv:2305.14314); needs a small `trainable`
        Precision(name="qlora", gemm_dtype="bfloat16", parameters=4.127 / 8),
        Precision(name="fp32", gemm_dtype="tfloat32", parameters=4, gradients=4, saved=4),
        Precision(name="fp8", gemm_dtype="float8", master=4, saved=1, scaling="tensor"),
        Precision(name="fp8-fp32-grads", gemm_dtype="float8", gradients=4, master=4, saved=1, scaling="tensor"),
        Precision(name="fp8-low-moments", gemm_dtype="float8", master=4, moments=4, saved=1, scaling="tensor"),
        Precision(name="fp8-row", gemm_dtype="float8", master=4, saved=1, scaling="block"),
        # inputs of GEMMs and of activations saved in 8 bits, moments in 16 (arXiv:2412.19437, section 3.3)
        Precision(
            name="fp8-compact",
            gemm_dtype="float8",
            gradients=4,
            master=4,
            moments=4,
            saved=1,
            activation=1,
            scaling="block",
        ),
        Precision(name="mxfp8", gemm_dtype="float8", master=4, saved=1.03125, scaling="block", microscaled=True),
        Precision(name="fp4", gemm_dtype="float4", master=4, saved=0.5625, scaling="fine"),
    )
}
"""By name. "bf16" has weights and gradients in 16 bits and both moments in 32: 2 + 2 + 8 bytes per weight."""


def precision_named(name: str) -> Precision:
    """The precision of this name."""
    if name not in PRECISIONS:
        raise UsageError(f"precision={name!r} is not known. {did_you_mean(name, PRECISIONS)}")
    return PRECISIONS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model to train, and how: everything but the hardware."""

    model: Model
    layout: Layout
    sequence: int
    precision: Precision = PRECISIONS["bf16-master"]
    software: Software = "fused"
    """"fused": kernels that keep little for the backward pass (Megatron with Transformer Engine, compiled code);
    "eager": one kernel per operator but for attention; "unfused": fused, but attention writes its scores (before
    FlashAttention)."""
    year: float = 2026.6
    """Release date of the software, as a fractional year: kernels for experts got faster every few months."""
    dropless: bool = True
    """No token is dropped, so that shapes depend on routing."""
    trainable: float = 1.0
    """Share of the weights that have gradients and optimizer states; small for adapters (LoRA)."""

    def __post_init__(self) -> None:
        if self.sequence < 1:
            raise UsageError(f"sequence={self.sequence} must be at least 1. Nearest: sequence=1.")
        if self.software not in get_args(Software):
            raise UsageError(
                f"software={self.software!r} is not known. {did_you_mean(self.software, get_args(Software))}"
            )
        if not FIRST_YEAR <= self.year <= LAST_YEAR:
            near = LAST_YEAR if self.year > LAST_YEAR else FIRST_YEAR
            raise UsageError(f"year={self.year} must lie between {FIRST_YEAR} and {LAST_YEAR}. Nearest: year={near}.")
        if self.precision.name == "qlora" and self.trainable == 1:
            raise UsageError(
                "precision='qlora' has weights in 4 bits, which cannot be trained: give the share of the adapters. "
                "Nearest: trainable=0.01."
            )
        if not 0 < self.trainable <= 1:
            raise UsageError(f"trainable={self.trainable} must lie above 0 and at most at 1. Nearest: trainable=1.")
        self.layout.check(self.model, self.sequence)

    @property
    def tokens(self) -> int:
        """Tokens of one step on all GPUs."""
        return self.layout.global_batch * self.sequence

    @property
    def microbatch_tokens(self) -> int:
        """Tokens of one microbatch on one rank, after context parallelism."""
        return self.layout.microbatch * self.sequence // self.layout.cp

    @property
    def trains_weights(self) -> bool:
        """Whether GEMMs have gradients of their weights; beside adapters the weights are frozen."""
        return self.trainable > 0.5

    def with_layout(self, layout: Layout) -> Job:
        """The same job with another layout."""
        return replace(self, layout=layout)
