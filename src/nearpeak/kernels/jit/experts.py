"""A layer of experts from one launch to the next, and what its backward pass needs between two products.

That is one pass over rows as wide as the inner size: from the gradients by what experts gave, before they are weighted,
the gradients of both factors, of weights, and the weighted inner rows, by which the second matrices get theirs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels.jit.activations import value_and_derivative
from nearpeak.kernels.jit.grouped_product import gated, product
from nearpeak.kernels.jit.launch import launch, next_power_of_2
from nearpeak.kernels.jit.permutation import sum_rows
from nearpeak.kernels.jit.rows import common_width


@triton.jit
def gate_backward_kernel(
    upstream, kept, weights, row_map, by_factors, weighted, by_weights, columns,
    NAME: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One choice: of a token and one of its experts. Rows of dropped choices are left as they are."""
    columns = columns // WIDTH * WIDTH
    choice = tl.program_id(0).to(tl.int64)
    row = tl.load(row_map + choice).to(tl.int64)
    weight = tl.load(weights + choice).to(tl.float32)
    product = tl.zeros([COLUMNS], tl.float32)
    if row >= 0:
        upstream += row * columns
        weighted += row * columns
        kept += row * 2 * columns
        by_factors += row * 2 * columns
        for begin in range(0, columns, COLUMNS):
            at = begin + tl.arange(0, COLUMNS)
            inside = at < columns
            given = tl.load(upstream + at, mask=inside, other=0.0).to(tl.float32)
            gate = tl.load(kept + at, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(kept + columns + at, mask=inside, other=0.0).to(tl.float32)
            value, slope = value_and_derivative(gate, NAME)
            inner = value * up
            product += given * inner
            given *= weight
            tl.store(by_factors + at, (given * up * slope).to(by_factors.dtype.element_ty), mask=inside)
            tl.store(by_factors + columns + at, (given * value).to(by_factors.dtype.element_ty), mask=inside)
            tl.store(weighted + at, (inner * weight).to(weighted.dtype.element_ty), mask=inside)
    tl.store(by_weights + choice, tl.sum(product, 0).to(by_weights.dtype.element_ty))


def forward(
    x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, groups: Tensor, row_map: Tensor, sources: Tensor,
    height: int, activation: str, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The results of tokens, and both factors of the inner rows if they are to be kept, else nothing."""
    inner, kept = gated(x, gate_up, groups, height, activation, keep, sources)
    return sum_rows(product(inner, down, groups, height, False), row_map, weights), kept


def gate_backward(
    upstream: Tensor, kept: Tensor, weights: Tensor, row_map: Tensor, activation: str,
    *, config: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of the factors, the weighted inner rows, and the gradients of weights."""
    by_factors, weighted = torch.empty_like(kept), torch.empty_like(upstream)
    by_weights = torch.empty(weights.shape, dtype=weights.dtype, device=weights.device)
    columns = upstream.shape[1]
    if not upstream.numel():
        return by_factors, weighted, by_weights.zero_()
    chosen = config or heuristic(columns)
    launch(
        gate_backward_kernel, (row_map.numel(), 1, 1), upstream, kept, weights.contiguous(), row_map.contiguous(),
        by_factors, weighted, by_weights, columns, activation, common_width(columns), chosen["columns"],
        warps=chosen["warps"],
    )  # fmt: skip
    return by_factors, weighted, by_weights


def heuristic(columns: int) -> dict[str, Any]:
    block = min(next_power_of_2(columns), 512)
    return {"columns": block, "warps": max(1, block // 256)}
