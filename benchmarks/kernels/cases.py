"""`KernelCase`, an operation with all its implementations, and the section "rows" of `benchmarks.kernels`.

Implementations by name: "nearpeak", "eager" (plain torch), "compile" (the same through torch.compile) and, where it is
installed and has the operation, "liger". All take the same inputs and return the same results.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nearpeak import kernels

SIZES = ((16384, 4096), (4096, 16384), (32768, 1024), (2048, 65536), (1024, 262144))
HEAD, MOST_HEADS = 128, 128
BACKEND = "inductor"
"""Backend of torch.compile; tests use one that needs no compiler."""
HAS_LIGER = importlib.util.find_spec("liger_kernel") is not None
Way = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """An operation at one size."""

    operation: str
    rows: int
    columns: int
    inputs: Callable[[], list[Tensor]]
    """New inputs; those that require gradients get them in the backward pass."""
    eager: Way
    nearpeak: Way
    liger: Way | None = None
    others: Mapping[str, Way] = field(default_factory=dict)
    """Further implementations, by name."""
    forward_bytes: int
    """Minimum bytes read and written by the forward pass."""
    backward_bytes: int | None = None
    """The same for the backward pass; None where there is none."""
    compiled: bool = True
    checked: bool = True
    """Whether results are compared with float64."""
    note: str = ""

    def ways(self, only: str | None = None) -> dict[str, Way]:
        ways = {"nearpeak": self.nearpeak, "eager": self.eager}
        if self.compiled:
            ways["compile"] = torch.compile(self.eager, dynamic=False, fullgraph=True, backend=BACKEND)
        if self.liger is not None:
            ways["liger"] = self.liger
        ways.update(self.others)
        return ways if only is None else {only: ways[only]}


def random_tensor(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> Tensor:
    return torch.randn(*shape, device=device, dtype=dtype).requires_grad_(grad)


def row_cases(sizes: Sequence[tuple[int, int]] = SIZES, device: str = "cuda") -> Iterator[KernelCase]:
    """The operations on rows in bfloat16."""
    for rows, columns in sizes:
        one = rows * columns * 2
        tensors = _Maker(rows, columns, device)
        yield tensors.case("softmax", _eager_softmax, kernels.softmax, (2 * one, 3 * one), tensors=1)
        yield tensors.case("rms_norm", _eager_rms_norm, kernels.rms_norm, (2 * one, 3 * one), tensors=1, weights=1)
        yield tensors.case(
            "layer_norm", _eager_layer_norm, kernels.layer_norm, (2 * one, 3 * one), tensors=1, weights=2
        )
        yield tensors.case(
            "add_rms_norm", _eager_add_rms_norm, kernels.add_rms_norm, (4 * one, 4 * one), tensors=2, weights=1
        )
        yield tensors.case("swiglu", _eager_swiglu, kernels.swiglu, (3 * one, 5 * one), tensors=2)
        yield tensors.case(
            "dropout_add",
            lambda x, residual: functional.dropout(x, 0.1) + residual,
            lambda x, residual: kernels.dropout_add(x, residual, 0.1),
            (3 * one, 2 * one),
            tensors=2,
            checked=False,  # each way draws another mask
        )
        yield _rotary(rows, columns, device)


class _Maker:
    """Cases at one size."""

    def __init__(self, rows: int, columns: int, device: str) -> None:
        self.rows, self.columns, self.device = rows, columns, device

    def case(
        self,
        operation: str,
        eager: Way,
        own: Way,
        least_bytes: tuple[int, int],
        *,
        tensors: int,
        weights: int = 0,
        checked: bool = True,
    ) -> KernelCase:
        def inputs() -> list[Tensor]:
            activations = [random_tensor(self.rows, self.columns, device=self.device) for _ in range(tensors)]
            return activations + [random_tensor(self.columns, device=self.device) for _ in range(weights)]

        return KernelCase(
            operation=operation,
            rows=self.rows,
            columns=self.columns,
            inputs=inputs,
            eager=eager,
            nearpeak=own,
            liger=liger(operation),
            forward_bytes=least_bytes[0],
            backward_bytes=least_bytes[1],
            checked=checked,
        )


def _eager_softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def _eager_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, 1e-6)


def _eager_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, weight.shape, weight, bias)


def _eager_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def _eager_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return functional.rms_norm(total, weight.shape, weight, 1e-6), total


def _rotary(rows: int, columns: int, device: str) -> KernelCase:
    """Queries of as many elements, and keys of a quarter of as many heads, as transformers rotates them."""
    heads = min(max(columns // HEAD, 1), MOST_HEADS)
    rows, keys = max(rows * columns // (heads * HEAD), 1), max(heads // 4, 1)
    bytes_moved = 2 * (2 * rows * (heads + keys) * HEAD) + 2 * (2 * rows * HEAD)

    def inputs() -> list[Tensor]:
        exponents = torch.arange(0, HEAD, 2, device=device) / HEAD
        angles = torch.arange(rows, device=device)[:, None] / 10000**exponents
        angles = torch.cat([angles, angles], -1)[None]
        pair = [
            random_tensor(1, rows, many, HEAD, device=device, grad=False).transpose(1, 2).requires_grad_()
            for many in (heads, keys)
        ]
        return [*pair, angles.cos().bfloat16(), angles.sin().bfloat16()]

    return KernelCase(
        operation="rotary",
        rows=rows,
        columns=heads * HEAD,
        inputs=inputs,
        eager=lambda q, k, cos, sin: (_rotated(q, cos, sin), _rotated(k, cos, sin)),
        nearpeak=lambda q, k, cos, sin: kernels.rotary_pair(q, k, cos, sin, seq_dim=-2),
        liger=liger("rotary"),
        forward_bytes=bytes_moved,
        backward_bytes=bytes_moved,
    )


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos[:, None] + torch.cat([-x[..., half:], x[..., :half]], -1) * sin[:, None]


LIGER = {
    "softmax": "softmax:LigerSoftmaxFunction",
    "rms_norm": "rms_norm:LigerRMSNormFunction",
    "layer_norm": "layer_norm:LigerLayerNormFunction",
    "add_rms_norm": "fused_add_rms_norm:LigerFusedAddRMSNormFunction",
    "swiglu": "swiglu:LigerSiLUMulFunction",
    "rotary": "rope:LigerRopeFunction",
    "cross_entropy": "cross_entropy:LigerCrossEntropyFunction",
    "linear_cross_entropy": "fused_linear_cross_entropy:LigerFusedLinearCrossEntropyFunction",
}
"""The functions of Liger: modules of `liger_kernel.ops`, and classes in them."""
LIGER_CALLS: dict[str, Callable[[Any], Way]] = {
    "softmax": lambda liger: liger.apply,
    "rms_norm": lambda liger: lambda x, w: liger.apply(x, w, 1e-6, 0.0, "llama", False),
    "layer_norm": lambda liger: lambda x, w, b: liger.apply(x, w, b, 1e-5),
    "add_rms_norm": lambda liger: lambda x, r, w: liger.apply(x, r, w, 1e-6, 0.0, "llama", False),
    "swiglu": lambda liger: lambda gate, up: liger.apply(gate, up),
    # where its inputs are: it is called on the same ones again and again
    "rotary": lambda liger: lambda q, k, cos, sin: liger.apply(q, k, cos, sin),
    "cross_entropy": lambda liger: lambda logits, target: liger.apply(logits, target, None)[0],
    "linear_cross_entropy": lambda liger: lambda hidden, weight, target: liger.apply(hidden, weight, target)[0],
}


@cache
def liger(operation: str) -> Way | None:
    """How Liger does an operation; None where it does not, or is not installed."""
    if not HAS_LIGER or operation not in LIGER:
        return None
    module, _, name = LIGER[operation].partition(":")
    try:
        function = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)
    except Exception as error:  # whatever it is, the others can be measured
        print(f"Liger's {operation} cannot be imported: {error}", file=sys.stderr)
        return None
    return LIGER_CALLS[operation](function)
