"""What `benchmarks/kernels.py` measures: operations, their inputs at a size, and everything that a user could call.

A case has the ways to do an operation, by name: "nearpeak", "eager" (torch as users write it), "compile" (the same
through torch.compile) and, where it is installed and has the operation, "liger". All take the same inputs and return
the same results.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nearpeak import kernels

SIZES = ((16384, 4096), (4096, 16384), (32768, 1024), (2048, 65536), (1024, 262144))
HEAD = 128
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
    forward_bytes: int
    """What the forward pass must read and write at the least."""
    backward_bytes: int | None
    """The same of the backward pass; None where there is none."""
    compiled: bool = True

    def ways(self, only: str | None = None) -> dict[str, Way]:
        found = {"nearpeak": self.nearpeak, "eager": self.eager}
        if self.compiled:
            found["compile"] = torch.compile(self.eager, dynamic=False)
        if self.liger is not None and HAS_LIGER:
            found["liger"] = self.liger
        return found if only is None else {only: found[only]}


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype).requires_grad_(grad)


def row_cases(sizes: Sequence[tuple[int, int]] = SIZES) -> Iterator[KernelCase]:
    """The operations on rows in bfloat16."""
    for rows, columns in sizes:
        one = rows * columns * 2
        tensors = _Maker(rows, columns)
        yield tensors.case(
            "softmax", 1, lambda x: torch.softmax(x, -1), kernels.softmax, _liger("softmax"), 2 * one, 3 * one
        )
        yield tensors.case(
            *(
                "rms_norm",
                1,
                lambda x, w: functional.rms_norm(x, w.shape, w, 1e-6),
                lambda x, w: kernels.rms_norm(x, w),
            ),
            *(_liger("rms_norm"), 2 * one, 3 * one),
            weights=1,
        )
        yield tensors.case(
            *("layer_norm", 1, lambda x, w, b: functional.layer_norm(x, w.shape, w, b)),
            *(lambda x, w, b: kernels.layer_norm(x, w, b), _liger("layer_norm"), 2 * one, 3 * one),
            weights=2,
        )
        yield tensors.case(
            *("add_rms_norm", 2, _add_rms_norm, lambda x, r, w: kernels.add_rms_norm(x, r, w)),
            *(_liger("add_rms_norm"), 4 * one, 4 * one),
            weights=1,
        )
        yield tensors.case(
            *("swiglu", 2, lambda gate, up: functional.silu(gate) * up, kernels.swiglu, _liger("swiglu")),
            *(3 * one, 5 * one),
        )
        yield tensors.case(
            *("dropout_add", 2, lambda x, r: functional.dropout(x, 0.1) + r),
            *(lambda x, r: kernels.dropout_add(x, r, 0.1), None, 3 * one, 2 * one),
        )
        yield _rotary(rows, columns)


class _Maker:
    """Cases at one size."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns

    def case(
        self,
        operation: str,
        tensors: int,
        eager: Way,
        own: Way,
        liger: Way | None,
        forward_bytes: int,
        backward_bytes: int,
        weights: int = 0,
    ) -> KernelCase:
        def inputs() -> list[Tensor]:
            activations = [_random(self.rows, self.columns) for _ in range(tensors)]
            return activations + [_random(self.columns) for _ in range(weights)]

        return KernelCase(
            operation=operation,
            rows=self.rows,
            columns=self.columns,
            inputs=inputs,
            eager=eager,
            nearpeak=own,
            liger=liger,
            forward_bytes=forward_bytes,
            backward_bytes=backward_bytes,
        )


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return functional.rms_norm(total, weight.shape, weight, 1e-6), total


def _rotary(rows: int, columns: int) -> KernelCase:
    """Queries and keys of `rows` tokens, a quarter of as many heads for keys, as transformers rotates them."""
    heads, keys = columns // HEAD * 4 // 5 or 1, max(columns // HEAD // 5, 1)
    one = rows * (heads + keys) * HEAD * 2 + 2 * rows * HEAD * 2

    def inputs() -> list[Tensor]:
        angles = torch.arange(rows, device="cuda")[:, None] / 10000 ** (torch.arange(0, HEAD, 2, device="cuda") / HEAD)
        angles = torch.cat([angles, angles], -1)[None]
        queries = _random(1, rows, heads, HEAD).detach().transpose(1, 2).requires_grad_()
        return [
            queries,
            _random(1, rows, keys, HEAD).detach().transpose(1, 2).requires_grad_(),
            angles.cos().bfloat16(),
            angles.sin().bfloat16(),
        ]

    return KernelCase(
        operation="rotary",
        rows=rows,
        columns=columns,
        inputs=inputs,
        eager=lambda q, k, cos, sin: (_rotated(q, cos, sin), _rotated(k, cos, sin)),
        nearpeak=lambda q, k, cos, sin: kernels.rotary_pair(q, k, cos, sin),
        liger=_liger("rotary"),
        forward_bytes=2 * one,
        backward_bytes=2 * one,
    )


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos[:, None] + torch.cat([-x[..., half:], x[..., :half]], -1) * sin[:, None]


def _liger(operation: str) -> Way | None:
    if not HAS_LIGER:
        return None
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.softmax import LigerSoftmaxFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return {
        "softmax": LigerSoftmaxFunction.apply,
        "rms_norm": lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False),
        "layer_norm": lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, 1e-5),
        "add_rms_norm": lambda x, r, w: LigerFusedAddRMSNormFunction.apply(x, r, w, 1e-6, 0.0, "llama", False),
        "swiglu": LigerSiLUMulFunction.apply,
        "rotary": lambda q, k, cos, sin: LigerRopeFunction.apply(q.clone(), k.clone(), cos, sin),
    }.get(operation)
