"""The operators of torch behind `grouped_product`, each with the same in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from nearpeak.errors import UsageError
from nearpeak.kernels.operations.activations import apply
from nearpeak.kernels.operations.gated import packed_backward
from nearpeak.kernels.operations.quantise import dequantise_reference
from nearpeak.kernels.operator import Operator
from nearpeak.kernels.policy import FLOATS, cannot_run, too_old

Activation = Literal["silu", "gelu", "gelu_tanh"]
EIGHT = torch.float8_e4m3fn
_TALLEST = 128
"""The rows of a tile of most experts."""
_ENTRY = 8
_TOGETHER = 8


def height_of(rows: int, experts: int) -> int:
    """The rows of a tile, by how many an expert has on average."""
    for height in (16, 32, 64):
        if rows < experts * height // 2:
            return height
    return _TALLEST


def entries_at(experts: int) -> int:
    """Where the list of tiles begins: behind the first row of each expert, the end, and the number of tiles."""
    return (experts + 2 + _ENTRY - 1) // _ENTRY * _ENTRY


def groups_size(experts: int, rows: int, height: int) -> int:
    """The numbers of the groups of so many rows.

    These are the first row of each expert and of the rows behind the last, the number of tiles, and for each tile, at
    most, 8 numbers: its expert (-1 for rows of nobody), of its group of up to 8 tiles of that expert the first tile,
    how many they are and the first row, and where the rows of the expert end.
    """
    return entries_at(experts) + _ENTRY * (rows // height + experts + 1)


def number_of(rows: Tensor, sources: Tensor | None) -> int:
    """Of products: one for each row, or for each that sources name."""
    return (rows if sources is None else sources).shape[0]


def plain_groups(counts: Tensor, rows: int, height: int) -> Tensor:
    """The groups in plain torch; what is behind the last tile is zeros."""
    experts = counts.shape[0]
    ends = [*counts.clamp(min=0).cumsum(0).clamp(max=rows).tolist(), rows]
    starts = [0, *ends[:-1]]
    result = torch.zeros(groups_size(experts, rows, height), dtype=torch.int32)
    result[: experts + 1] = torch.tensor(starts)
    entries = _plain_entries(starts, ends, height)
    result[experts + 1] = len(entries)
    at, flat = entries_at(experts), [number for entry in entries for number in entry]
    result[at : at + len(flat)] = torch.tensor(flat, dtype=torch.int32)
    return result.to(counts.device)


def _plain_entries(starts: list[int], ends: list[int], height: int) -> list[list[int]]:
    entries: list[list[int]] = []
    for expert, (start, end) in enumerate(zip(starts, ends, strict=True)):
        tiles, first = -(-(end - start) // height), len(entries)
        for tile in range(tiles):
            leader = tile // _TOGETHER * _TOGETHER
            together = min(tiles - leader, _TOGETHER)
            number = expert if expert < len(starts) - 1 else -1
            entries.append([number, first + leader, together, start + leader * height, end, 0, 0, 0])
    return entries


def by_expert(rows: Tensor, weight: Tensor, starts: Sequence[int]) -> Tensor:
    """Each row by the matrix of its expert, transposed; zeros for rows of nobody."""
    parts = [rows[start:end] @ weight[at].mT for at, (start, end) in enumerate(pairwise(starts))]
    return torch.cat([*parts, rows.new_zeros(rows.shape[0] - starts[-1], weight.shape[1])])


def _starts(groups: Tensor, experts: int) -> list[int]:
    return groups[: experts + 1].tolist()


def plain_product(rows: Tensor, weight: Tensor, groups: Tensor, height: int, transposed: bool) -> Tensor:
    return by_expert(rows, weight.mT if transposed else weight, _starts(groups, weight.shape[0]))


def plain_gated(
    rows: Tensor, weight: Tensor, groups: Tensor, height: int, activation: str, keep: bool
) -> tuple[Tensor, Tensor]:
    kept = by_expert(rows, weight, _starts(groups, weight.shape[0]))
    half = weight.shape[1] // 2
    result = (apply(kept[:, :half], activation) * kept[:, half:]).contiguous()
    return result, kept if keep else kept.new_empty(0)


def _plain_gathered(
    tokens: Tensor, weight: Tensor, groups: Tensor, height: int, transposed: bool, activation: str, sources: Tensor
) -> Tensor:
    rows = tokens[sources.long()]
    if activation:
        return plain_gated(rows, weight, groups, height, activation, False)[0]
    return plain_product(rows, weight, groups, height, transposed)


def _fake_gathered(
    tokens: Tensor, weight: Tensor, groups: Tensor, height: int, transposed: bool, activation: str, sources: Tensor
) -> Tensor:
    columns = weight.shape[2 if transposed else 1] // (2 if activation else 1)
    return tokens.new_empty(sources.shape[0], columns)


def plain_weight_gradient(gradient: Tensor, rows: Tensor, groups: Tensor, experts: int) -> Tensor:
    starts = _starts(groups, experts)
    return torch.stack([gradient[a:b].mT @ rows[a:b] for a, b in pairwise(starts)])


def widened_rows(rows: Tensor, scales: Tensor) -> Tensor:
    """Rows of 8 bits in float32."""
    return dequantise_reference(rows, scales, block="row" if scales.dim() == 1 else (1, 128), dtype=torch.float32)


def widened_matrices(weight: Tensor, scales: Tensor) -> Tensor:
    """Matrices of 8 bits in float32."""
    if scales.dim() == 1:
        return weight.float() * scales[:, None, None]
    return dequantise_reference(weight, scales, block=(128, 128), dtype=torch.float32)


def _plain_eight(
    rows: Tensor, weight: Tensor, row_scales: Tensor, weight_scales: Tensor, groups: Tensor, height: int,
    activation: str, dtype: torch.dtype, sources: Tensor | None,
) -> Tensor:  # fmt: skip
    given, matrices = widened_rows(rows, row_scales), widened_matrices(weight, weight_scales)
    given = given if sources is None else given[sources.long()]
    if activation:
        return plain_gated(given, matrices, groups, height, activation, False)[0].to(dtype)
    return plain_product(given, matrices, groups, height, False).to(dtype)


def check_scales(rows: Tensor, weight: Tensor, row_scales: Tensor, weight_scales: Tensor) -> None:
    """Raises unless the scales are those of all rows and experts, or of all blocks."""
    experts, columns, depth = weight.shape
    blocks = -(-columns // 128), -(-depth // 128)
    shapes = tuple(row_scales.shape), tuple(weight_scales.shape)
    whole = (rows.shape[0],), (experts,)
    by_block = (rows.shape[0], blocks[1]), (experts, *blocks)
    if shapes not in (whole, by_block):
        raise UsageError(
            f"The scales of {rows.shape[0]} rows and {experts} matrices of {columns} x {depth} have the shapes {whole},"
            f" or {by_block} by blocks, and these have {shapes}."
        )
    if rows.dtype != EIGHT or weight.dtype != EIGHT:
        raise UsageError(f"Scales are for rows and a weight in {EIGHT}, and these are {rows.dtype}, {weight.dtype}.")


def why_not(rows: Tensor, weight: Tensor, *others: Any) -> str | None:
    """Why no kernel multiplies these."""
    if rows.dtype != weight.dtype:
        return f"it takes rows and a weight of one dtype, and these are {rows.dtype} and {weight.dtype}"
    if rows.dtype not in FLOATS:
        return f"it takes float32, bfloat16 and float16, and this is {rows.dtype}"
    return cannot_run(rows, weight, *(one for one in others if isinstance(one, Tensor)))


def why_not_eight(rows: Tensor, weight: Tensor, *others: Any) -> str | None:
    """Why no kernel multiplies these numbers of 8 bits."""
    tensors = [one for one in others if isinstance(one, Tensor)]
    return cannot_run(rows, weight, *tensors, dtypes=(EIGHT, torch.float32)) or too_old(rows.device, (8, 9))


def _setup_product(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weight, groups, ctx.height, ctx.transposed = inputs
    ctx.save_for_backward(rows, weight, groups)


def _product_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    rows, weight, groups = ctx.saved_tensors
    by_rows = by_weight = None
    if ctx.needs_input_grad[0]:
        by_rows = product(gradient, weight, groups, ctx.height, not ctx.transposed)
    if ctx.needs_input_grad[1]:
        pair = (rows, gradient) if ctx.transposed else (gradient, rows)
        by_weight = weight_gradient(*pair, groups, weight.shape[0])
    return by_rows, by_weight, None, None, None


def _setup_gated(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, weight, groups, ctx.height, ctx.activation, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(rows, weight, groups, output[1])


def _gated_backward(ctx: Any, gradient: Tensor | None, _: Any) -> tuple[Any, ...]:
    rest = (None,) * 4
    if gradient is None:
        return None, None, *rest
    rows, weight, groups, kept = ctx.saved_tensors
    by_factors = packed_backward(gradient, kept, ctx.activation, False)
    by_rows = by_weight = None
    if ctx.needs_input_grad[0]:
        by_rows = product(by_factors, weight, groups, ctx.height, True)
    if ctx.needs_input_grad[1]:
        by_weight = weight_gradient(by_factors, rows, groups, weight.shape[0])
    return by_rows, by_weight, *rest


def _fake_gated(
    rows: Tensor, weight: Tensor, groups: Tensor, height: int, activation: str, keep: bool
) -> tuple[Tensor, Tensor]:
    shape = (rows.shape[0], weight.shape[1])
    return rows.new_empty(shape[0], shape[1] // 2), rows.new_empty(shape if keep else (0,))


group = Operator(
    "group_rows(Tensor counts, SymInt rows, int height) -> Tensor",
    launch="grouped_product:group",
    reference=plain_groups,
    fake=lambda counts, rows, height: counts.new_empty(groups_size(counts.shape[0], rows, height), dtype=torch.int32),
    why_not=lambda counts, rows, height: cannot_run(counts),
)
product = Operator(
    "grouped_product(Tensor rows, Tensor weight, Tensor groups, int height, bool transposed) -> Tensor",
    launch="grouped_product:product",
    reference=plain_product,
    fake=lambda rows, weight, groups, height, transposed: rows.new_empty(
        rows.shape[0], weight.shape[2 if transposed else 1]
    ),
    why_not=why_not,
    setup_context=_setup_product,
    backward=_product_backward,
)
gated = Operator(
    "grouped_gated(Tensor rows, Tensor weight, Tensor groups, int height, str activation, bool keep)"
    " -> (Tensor, Tensor)",
    launch="grouped_product:gated",
    reference=plain_gated,
    fake=_fake_gated,
    why_not=why_not,
    setup_context=_setup_gated,
    backward=_gated_backward,
)
weight_gradient = Operator(
    "grouped_weight_gradient(Tensor gradient, Tensor rows, Tensor groups, SymInt experts) -> Tensor",
    launch="grouped_product:weight_gradient",
    reference=plain_weight_gradient,
    fake=lambda gradient, rows, groups, experts: rows.new_empty(experts, gradient.shape[1], rows.shape[1]),
    why_not=why_not,
)
gathered = Operator(
    "gathered_product(Tensor tokens, Tensor weight, Tensor groups, int height, bool transposed, str activation,"
    " Tensor sources) -> Tensor",
    launch="grouped_product:gathered",
    reference=_plain_gathered,
    fake=_fake_gathered,
    why_not=why_not,
)
eight = Operator(
    "grouped_eight(Tensor rows, Tensor weight, Tensor row_scales, Tensor weight_scales, Tensor groups, int height,"
    " str activation, ScalarType dtype, Tensor? sources) -> Tensor",
    launch="grouped_product:eight",
    reference=_plain_eight,
    fake=lambda rows, weight, row_scales, weight_scales, groups, height, activation, dtype, sources: rows.new_empty(
        (number_of(rows, sources), weight.shape[1] // (2 if activation else 1)), dtype=dtype
    ),
    why_not=why_not_eight,
)
