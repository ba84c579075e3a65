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


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOperation:
    """An operation on rows: its ways, its inputs and its traffic, in tensors of rows x columns."""

    eager: Way
    nearpeak: Way
    forward: int
    """How many tensors the forward pass reads or writes at least."""
    backward: int
    tensors: int = 1
    weights: int = 0
    checked: bool = True


def row_operations() -> dict[str, RowOperation]:
    """All operations on rows, by name."""
    return {
        "softmax": RowOperation(eager=_eager_softmax, nearpeak=kernels.softmax, forward=2, backward=3),
        "rms_norm": RowOperation(eager=_eager_rms_norm, nearpeak=kernels.rms_norm, forward=2, backward=3, weights=1),
        "layer_norm": RowOperation(
            eager=_eager_layer_norm, nearpeak=kernels.layer_norm, forward=2, backward=3, weights=2
        ),
        "add_rms_norm": RowOperation(
            eager=_eager_add_rms_norm, nearpeak=kernels.add_rms_norm, forward=4, backward=4, tensors=2, weights=1
        ),
        "swiglu": RowOperation(eager=_eager_swiglu, nearpeak=kernels.swiglu, forward=3, backward=5, tensors=2),
        "dropout_add": RowOperation(
            eager=lambda x, residual: functional.dropout(x, DROPOUT) + residual,
            nearpeak=lambda x, residual: kernels.dropout_add(x, residual, DROPOUT),
            forward=3,
            backward=2,
            tensors=2,
            checked=False,  # each way draws another mask
        ),
        "log_softmax": RowOperation(
            eager=lambda x: torch.log_softmax(x, -1), nearpeak=kernels.log_softmax, forward=2, backward=3
        ),
        "add_layer_norm": RowOperation(
            eager=_eager_add_layer_norm, nearpeak=kernels.add_layer_norm, forward=4, backward=4, tensors=2, weights=2
        ),
        "geglu": RowOperation(eager=_eager_geglu, nearpeak=kernels.geglu, forward=3, backward=5, tensors=2),
        "bias_gelu": RowOperation(
            eager=lambda x, bias: functional.gelu(x + bias),
            nearpeak=kernels.bias_gelu,
            forward=2,
            backward=3,
            weights=1,
        ),
    }


DROPOUT = 0.1
FIXED_ROWS = ("softmax", "rms_norm", "layer_norm", "add_rms_norm", "swiglu", "dropout_add")
"""The operations of the section "rows"; the others are in random cells alone."""


def row_cases(sizes: Sequence[tuple[int, int]] = SIZES, device: str = "cuda") -> Iterator[KernelCase]:
    """The operations on rows in bfloat16."""
    for rows, columns in sizes:
        for operation in FIXED_ROWS:
            yield row_case(operation, rows, columns, device)
        heads = min(max(columns // HEAD, 1), MOST_HEADS)
        tokens = max(rows * columns // (heads * HEAD), 1)
        yield rotary_case(1, tokens, heads, max(heads // 4, 1), HEAD, device)


def row_case(operation: str, rows: int, columns: int, device: str, dtype: torch.dtype = torch.bfloat16) -> KernelCase:
    row_operation = row_operations()[operation]
    tensor_bytes = rows * columns * dtype.itemsize

    def inputs() -> list[Tensor]:
        shapes = [(rows, columns)] * row_operation.tensors + [(columns,)] * row_operation.weights
        return [random_tensor(*shape, device=device, dtype=dtype) for shape in shapes]

    return KernelCase(
        operation=operation,
        rows=rows,
        columns=columns,
        inputs=inputs,
        eager=row_operation.eager,
        nearpeak=row_operation.nearpeak,
        liger=liger(operation),
        forward_bytes=row_operation.forward * tensor_bytes,
        backward_bytes=row_operation.backward * tensor_bytes,
        checked=row_operation.checked,
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


def _eager_add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return functional.layer_norm(total, weight.shape, weight, bias), total


def _eager_geglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.gelu(gate) * up


def rotary_case(
    batch: int, tokens: int, heads: int, key_heads: int, dim: int, device: str, dtype: torch.dtype = torch.bfloat16
) -> KernelCase:
    """Queries and keys of [batch, heads, tokens, dim] with tokens before heads, as transformers rotates them."""
    bytes_moved = dtype.itemsize * (2 * batch * tokens * (heads + key_heads) * dim + 2 * tokens * dim)

    def inputs() -> list[Tensor]:
        exponents = torch.arange(0, dim, 2, device=device) / dim
        angles = torch.arange(tokens, device=device)[:, None] / 10000**exponents
        angles = torch.cat([angles, angles], -1)[None]
        pair = [
            random_tensor(batch, tokens, many, dim, device=device, dtype=dtype, grad=False)
            .transpose(1, 2)
            .requires_grad_()
            for many in (heads, key_heads)
        ]
        return [*pair, angles.cos().to(dtype), angles.sin().to(dtype)]

    return KernelCase(
        operation="rotary",
        rows=batch * tokens,
        columns=heads * dim,
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
