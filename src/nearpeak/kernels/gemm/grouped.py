"""`grouped_gemm`: each row times the matrix of its expert, where the rows of one expert are contiguous.

Bytes moved: forward reads the rows and the matrices of the experts that have any, and writes one result per row.
Backward does the same for the gradient of the rows, and reads rows and gradients once more for that of the matrices,
which it writes in full. With an activation, gate and up are written if a backward pass follows, and read by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.kernels._runtime.operator import Operator
from nearpeak.kernels._runtime.policy import FLOATS, cannot_run, fused, too_old
from nearpeak.kernels.pointwise import apply_activation, gated_packed_backward
from nearpeak.kernels.quantize import dequantize_reference

GateActivation = Literal["silu", "gelu", "gelu_tanh"]
FP8 = torch.float8_e4m3fn
_TALLEST = 128
"""Rows of a tile, unless experts have few."""
_ENTRY_SIZE = 8
_TILES_PER_GROUP = 8
_MOST_EXPERTS = 4096
_OLDEST_FOR_FP8 = (8, 9)


def tile_height(rows: int, experts: int) -> int:
    """Rows of a tile, by the mean number of rows per expert."""
    for height in (16, 32, 64):
        if rows < experts * height // 2:
            return height
    return _TALLEST


def entries_offset(experts: int) -> int:
    """The offset of the list of tiles: after the first row of each expert, the end, and the number of tiles."""
    return (experts + 2 + _ENTRY_SIZE - 1) // _ENTRY_SIZE * _ENTRY_SIZE


def groups_size(experts: int, rows: int, height: int) -> int:
    """The length of the tensor of groups for so many rows.

    It holds the first row of each expert and of the rows after the last expert's; the number of tiles; and 8 numbers
    for each tile: its expert (-1 for rows without one), the first tile, the number of tiles and the first row of its
    group of up to 8 tiles of that expert, and the end of the expert's rows. The last three are padding.
    """
    return entries_offset(experts) + _ENTRY_SIZE * (rows // height + experts + 1)


def count_rows(rows: Tensor, sources: Tensor | None) -> int:
    """The number of products: one per row, or one per source."""
    return (rows if sources is None else sources).shape[0]


def build_groups(counts: Tensor, rows: int, height: int) -> Tensor:
    """The groups in plain torch, padded with zeros."""
    experts = counts.shape[0]
    if _without_data(counts):
        return counts.new_zeros(groups_size(experts, rows, height), dtype=torch.int32)
    ends = [*counts.clamp(min=0).cumsum(0).clamp(max=rows).tolist(), rows]
    starts = [0, *ends[:-1]]
    result = torch.zeros(groups_size(experts, rows, height), dtype=torch.int32)
    result[: experts + 1] = torch.tensor(starts)
    entries = _build_entries(starts, ends, height)
    result[experts + 1] = len(entries)
    offset, flat = entries_offset(experts), [number for entry in entries for number in entry]
    result[offset : offset + len(flat)] = torch.tensor(flat, dtype=torch.int32)
    return result.to(counts.device)


def _build_entries(starts: list[int], ends: list[int], height: int) -> list[list[int]]:
    entries: list[list[int]] = []
    for expert, (start, end) in enumerate(zip(starts, ends, strict=True)):
        tiles, first = -(-(end - start) // height), len(entries)
        for tile in range(tiles):
            leader = tile // _TILES_PER_GROUP * _TILES_PER_GROUP
            together = min(tiles - leader, _TILES_PER_GROUP)
            number = expert if expert < len(starts) - 1 else -1
            entries.append([number, first + leader, together, start + leader * height, end, 0, 0, 0])
    return entries


def matmul_by_expert(rows: Tensor, weight: Tensor, starts: Sequence[int]) -> Tensor:
    """Each row times the transposed matrix of its expert; zeros for rows without an expert."""
    parts = [rows[start:end] @ weight[expert].mT for expert, (start, end) in enumerate(pairwise(starts))]
    return torch.cat([*parts, rows.new_zeros(rows.shape[0] - starts[-1], weight.shape[1])])


def _without_data(tensor: Tensor) -> bool:
    return tensor.device.type == "meta" or isinstance(tensor, FakeTensor)


def _expert_starts(starts: Tensor, rows: int) -> list[int]:
    """The first row of each expert and the end. Tensors without data are divided evenly: the results have one shape."""
    if _without_data(starts):
        experts = starts.shape[0] - 1
        return [rows * expert // experts for expert in range(experts + 1)]
    return starts.tolist()


def multiply_reference(rows: Tensor, weight: Tensor, groups: Tensor, height: int, transposed: bool) -> Tensor:
    starts = _expert_starts(groups[: weight.shape[0] + 1], rows.shape[0])
    return matmul_by_expert(rows, weight.mT if transposed else weight, starts)


def multiply_gated_reference(
    rows: Tensor, weight: Tensor, groups: Tensor, height: int, activation: str, keep: bool
) -> tuple[Tensor, Tensor]:
    gate_up = matmul_by_expert(rows, weight, _expert_starts(groups[: weight.shape[0] + 1], rows.shape[0]))
    half = weight.shape[1] // 2
    result = (apply_activation(gate_up[:, :half], activation) * gate_up[:, half:]).contiguous()
    return result, gate_up if keep else gate_up.new_empty(0)


def _multiply_gathered_reference(
    tokens: Tensor, weight: Tensor, groups: Tensor, height: int, transposed: bool, activation: str, sources: Tensor
) -> Tensor:
    rows = tokens[sources.long()]
    if activation:
        return multiply_gated_reference(rows, weight, groups, height, activation, False)[0]
    return multiply_reference(rows, weight, groups, height, transposed)


def _fake_gathered(
    tokens: Tensor, weight: Tensor, groups: Tensor, height: int, transposed: bool, activation: str, sources: Tensor
) -> Tensor:
    columns = weight.shape[2 if transposed else 1] // (2 if activation else 1)
    return tokens.new_empty(sources.shape[0], columns)


def weight_gradient_reference(gradient: Tensor, rows: Tensor, groups: Tensor, experts: int) -> Tensor:
    starts = _expert_starts(groups[: experts + 1], rows.shape[0])
    return torch.stack([gradient[a:b].mT @ rows[a:b] for a, b in pairwise(starts)])


def dequantize_rows(rows: Tensor, scales: Tensor) -> Tensor:
    """fp8 rows times their scales, in float32."""
    return dequantize_reference(rows, scales, block="row" if scales.dim() == 1 else (1, 128), dtype=torch.float32)


def dequantize_weight(weight: Tensor, scales: Tensor) -> Tensor:
    """fp8 matrices times their scales, in float32."""
    if scales.dim() == 1:
        return weight.float() * scales[:, None, None]
    return dequantize_reference(weight, scales, block=(128, 128), dtype=torch.float32)


def _multiply_fp8_reference(
    rows: Tensor, weight: Tensor, row_scales: Tensor, weight_scales: Tensor, groups: Tensor, height: int,
    activation: str, dtype: torch.dtype, sources: Tensor | None,
) -> Tensor:  # fmt: skip
    wide, matrices = dequantize_rows(rows, row_scales), dequantize_weight(weight, weight_scales)
    wide = wide if sources is None else wide[sources.long()]
    if activation:
        return multiply_gated_reference(wide, matrices, groups, height, activation, False)[0].to(dtype)
    return multiply_reference(wide, matrices, groups, height, False).to(dtype)


def check_scales(rows: Tensor, weight: Tensor, row_scales: Tensor, weight_scales: Tensor) -> None:
    """Raises unless the scales are of all rows and experts, or of all blocks."""
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
    if rows.dtype != FP8 or weight.dtype != FP8:
        raise UsageError(f"Scales are for rows and a weight in {FP8}, and these are {rows.dtype}, {weight.dtype}.")


def multiply_why_not(rows: Tensor, weight: Tensor, *others: Any) -> str | None:
    """The reason why no kernel multiplies these, or None."""
    if rows.dtype != weight.dtype:
        return f"rows and weight need one dtype, and these are {rows.dtype} and {weight.dtype}"
    if rows.dtype not in FLOATS:
        return f"it takes float32, bfloat16 and float16, and this is {rows.dtype}"
    return cannot_run(rows, weight, *(tensor for tensor in others if isinstance(tensor, Tensor)))


def fp8_why_not(rows: Tensor, weight: Tensor, *others: Any) -> str | None:
    """The reason why no kernel multiplies these fp8 tensors, or None."""
    tensors = [tensor for tensor in others if isinstance(tensor, Tensor)]
    return cannot_run(rows, weight, *tensors, dtypes=(FP8, torch.float32)) or too_old(rows.device, _OLDEST_FOR_FP8)


def _setup_multiply(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weight, groups, ctx.height, ctx.transposed = inputs
    ctx.save_for_backward(rows, weight, groups)


def _multiply_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    rows, weight, groups = ctx.saved_tensors
    grad_rows = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_rows = multiply(gradient, weight, groups, ctx.height, not ctx.transposed)
    if ctx.needs_input_grad[1]:
        pair = (rows, gradient) if ctx.transposed else (gradient, rows)
        grad_weight = weight_gradient(*pair, groups, weight.shape[0])
    return grad_rows, grad_weight, None, None, None


def _setup_gated(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, weight, groups, ctx.height, ctx.activation, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(rows, weight, groups, output[1])


def _gated_backward(ctx: Any, gradient: Tensor | None, _: Any) -> tuple[Any, ...]:
    options = (None,) * 4
    if gradient is None:
        return None, None, *options
    rows, weight, groups, gate_up = ctx.saved_tensors
    grad_gate_up = gated_packed_backward(gradient, gate_up, ctx.activation, False)
    grad_rows = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_rows = multiply(grad_gate_up, weight, groups, ctx.height, True)
    if ctx.needs_input_grad[1]:
        grad_weight = weight_gradient(grad_gate_up, rows, groups, weight.shape[0])
    return grad_rows, grad_weight, *options


def _fake_gated(
    rows: Tensor, weight: Tensor, groups: Tensor, height: int, activation: str, keep: bool
) -> tuple[Tensor, Tensor]:
    shape = (rows.shape[0], weight.shape[1])
    return rows.new_empty(shape[0], shape[1] // 2), rows.new_empty(shape if keep else (0,))


group_rows = Operator(
    "group_rows(Tensor counts, SymInt rows, int height) -> Tensor",
    backends={"nvidia": "gemm.grouped_triton:group_rows"},
    reference=build_groups,
    fake=lambda counts, rows, height: counts.new_empty(groups_size(counts.shape[0], rows, height), dtype=torch.int32),
    why_not=lambda counts, rows, height: cannot_run(counts),
)
multiply = Operator(
    "grouped_gemm(Tensor rows, Tensor weight, Tensor groups, int height, bool transposed) -> Tensor",
    backends={"nvidia": "gemm.grouped_triton:multiply"},
    reference=multiply_reference,
    fake=lambda rows, weight, groups, height, transposed: rows.new_empty(
        rows.shape[0], weight.shape[2 if transposed else 1]
    ),
    why_not=multiply_why_not,
    setup_context=_setup_multiply,
    backward=_multiply_backward,
)
multiply_gated = Operator(
    "grouped_gemm_gated(Tensor rows, Tensor weight, Tensor groups, int height, str activation, bool keep)"
    " -> (Tensor, Tensor)",
    backends={"nvidia": "gemm.grouped_triton:multiply_gated"},
    reference=multiply_gated_reference,
    fake=_fake_gated,
    why_not=multiply_why_not,
    setup_context=_setup_gated,
    backward=_gated_backward,
)
weight_gradient = Operator(
    "grouped_weight_gradient(Tensor gradient, Tensor rows, Tensor groups, SymInt experts) -> Tensor",
    backends={"nvidia": "gemm.grouped_triton:weight_gradient"},
    reference=weight_gradient_reference,
    fake=lambda gradient, rows, groups, experts: rows.new_empty(experts, gradient.shape[1], rows.shape[1]),
    why_not=multiply_why_not,
)
multiply_gathered = Operator(
    "gathered_gemm(Tensor tokens, Tensor weight, Tensor groups, int height, bool transposed, str activation,"
    " Tensor sources) -> Tensor",
    backends={"nvidia": "gemm.grouped_triton:multiply_gathered"},
    reference=_multiply_gathered_reference,
    fake=_fake_gathered,
    why_not=multiply_why_not,
)
multiply_fp8 = Operator(
    "grouped_gemm_fp8(Tensor rows, Tensor weight, Tensor row_scales, Tensor weight_scales, Tensor groups, int height,"
    " str activation, ScalarType dtype, Tensor? sources) -> Tensor",
    backends={"nvidia": "gemm.grouped_triton:multiply_fp8"},
    reference=_multiply_fp8_reference,
    fake=lambda rows, weight, row_scales, weight_scales, groups, height, activation, dtype, sources: rows.new_empty(
        (count_rows(rows, sources), weight.shape[1] // (2 if activation else 1)), dtype=dtype
    ),
    why_not=fp8_why_not,
)

__all__ = [
    "GateActivation",
    "entries_offset",
    "grouped_gemm",
    "groups_size",
    "row_groups",
    "tile_height",
]


def grouped_gemm_reference(
    rows: Tensor, weight: Tensor, counts: Tensor, *, activation: GateActivation | None = None,
    groups: Tensor | None = None, sources: Tensor | None = None, row_scales: Tensor | None = None,
    weight_scales: Tensor | None = None, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    _check(rows, weight, counts, activation, sources, row_scales, weight_scales)
    if row_scales is not None and weight_scales is not None:
        rows = dequantize_rows(rows, row_scales)
        weight = dequantize_weight(weight, weight_scales)
    if sources is not None:
        rows = rows[sources.long()]
    ends = counts.cumsum(0).clamp(max=rows.shape[0])
    starts = torch.cat([ends.new_zeros(1), ends])
    result = matmul_by_expert(rows, weight, _expert_starts(starts, rows.shape[0]))
    if activation is not None:
        half = weight.shape[1] // 2
        result = apply_activation(result[:, :half], activation) * result[:, half:]
    return result if row_scales is None else result.to(dtype or torch.bfloat16)


def _check(
    rows: Tensor, weight: Tensor, counts: Tensor, activation: str | None, sources: Tensor | None,
    row_scales: Tensor | None, weight_scales: Tensor | None,
) -> None:  # fmt: skip
    if rows.dim() != 2 or weight.dim() != 3 or weight.shape[2] != rows.shape[1]:
        raise UsageError(
            "grouped_gemm takes rows of the shape (rows, depth) and a weight of (experts, columns, depth), and these"
            f" have {tuple(rows.shape)} and {tuple(weight.shape)}."
        )
    if counts.shape != weight.shape[:1] or counts.dtype not in (torch.int32, torch.int64):
        raise UsageError(
            f"grouped_gemm takes a count for each of {weight.shape[0]} experts, in int32 or int64, and these are"
            f" {tuple(counts.shape)} in {counts.dtype}."
        )
    if activation is not None:
        if activation not in get_args(GateActivation):
            raise UsageError(
                f"There is no activation {activation!r}. {did_you_mean(activation, get_args(GateActivation))}"
            )
        if weight.shape[1] % 2:
            raise UsageError(
                f"With an activation the weight needs an even number of columns, and not {weight.shape[1]}."
            )
    if sources is not None and (sources.dim() != 1 or sources.dtype != torch.int32):
        raise UsageError(
            f"grouped_gemm takes sources as indices of rows in int32, as sort_tokens returns them, and these are"
            f" {tuple(sources.shape)} in {sources.dtype}."
        )
    if (row_scales is None) != (weight_scales is None):
        raise UsageError("fp8 tensors need row_scales and weight_scales, and one of them is missing.")
    if row_scales is not None and weight_scales is not None:
        check_scales(rows, weight, row_scales, weight_scales)


def _why_not(
    rows: Tensor, weight: Tensor, counts: Tensor, *, activation: GateActivation | None = None,
    groups: Tensor | None = None, sources: Tensor | None = None, row_scales: Tensor | None = None,
    weight_scales: Tensor | None = None, dtype: torch.dtype | None = None,
) -> str | None:  # fmt: skip
    _check(rows, weight, counts, activation, sources, row_scales, weight_scales)
    if sources is not None and torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad):
        return "with sources it has no gradients: use moe, or permute_tokens"
    if weight.shape[0] > _MOST_EXPERTS:
        return f"it takes up to {_MOST_EXPERTS} experts, and these are {weight.shape[0]}"
    if row_scales is not None:
        return fp8_why_not(rows, weight, row_scales, weight_scales, sources)
    return multiply_why_not(rows, weight, counts, sources)


def _row_groups_reference(counts: Tensor, *, rows: int) -> Tensor:
    _check_counts(counts, rows)
    return build_groups(counts, rows, tile_height(rows, counts.shape[0]))


def _row_groups_why_not(counts: Tensor, *, rows: int) -> str | None:
    _check_counts(counts, rows)
    return cannot_run(counts) or (
        f"it takes up to {_MOST_EXPERTS} experts" if counts.shape[0] > _MOST_EXPERTS else None
    )


def _check_counts(counts: Tensor, rows: int) -> None:
    if counts.dim() != 1 or not counts.shape[0] or counts.dtype not in (torch.int32, torch.int64):
        raise UsageError(f"row_groups takes one count per expert, and these are {counts.dtype} {tuple(counts.shape)}.")
    if not 0 <= rows < 2**31:
        raise UsageError(f"row_groups takes from 0 to 2**31 - 1 rows, and not {rows}.")


@fused(reference=_row_groups_reference, why_not=_row_groups_why_not)
def row_groups(counts: Tensor, *, rows: int) -> Tensor:
    """The list of tiles of `grouped_gemm`, to be shared by several products of the same rows.

    One launch, without waiting for the device. Pass the result as `groups`; its contents are an implementation detail.

    Args:
        counts: The number of rows of each expert, in int32 or int64, as `permute_tokens` returns them. If they add up
            to more than `rows`, the last experts have fewer.
        rows: The number of rows.
    """
    return group_rows(counts, rows, tile_height(rows, counts.shape[0]))  # type: ignore[no-any-return]


@fused(reference=grouped_gemm_reference, why_not=_why_not)
def grouped_gemm(
    rows: Tensor, weight: Tensor, counts: Tensor, *, activation: GateActivation | None = None,
    groups: Tensor | None = None, sources: Tensor | None = None, row_scales: Tensor | None = None,
    weight_scales: Tensor | None = None, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Each row times the matrix of its expert, `row @ weight[expert].T`: (rows, columns) in the dtype of rows.

    The first `counts[0]` rows belong to the first expert, and so on; rows after the last expert's become zeros. Sums
    are in float32, and float32 is multiplied in full precision. Deterministic, without waiting for the device. The time
    depends on the number of rows, hardly on their distribution over experts. rows and weight have gradients, and are
    saved for them; experts without rows have a gradient of zeros. Rows that are not contiguous are copied.

    Args:
        rows: (rows, depth), in float32, bfloat16 or float16, or in torch.float8_e4m3fn with scales.
        weight: (experts, columns, depth) in the same dtype, with any strides.
        counts: The number of rows of each expert, (experts) in int32 or int64.
        activation: "silu", "gelu" or "gelu_tanh": the result is half as wide, the activation of the first half of the
            columns (gate) times the second half (up). Both are saved if a gradient is needed.
        groups: The result of `row_groups` for counts and as many rows; computed here by default.
        sources: Indices into `rows` in int32, one per product, as `sort_tokens` returns them: rows are then gathered
            without a copy. This has no gradients: plain torch runs if any are needed.
        row_scales: float32 scales of fp8 rows: (rows), or (rows, depth / 128) for each 128 of a row, as `quantize`
            returns them for blocks of "row" and (1, 128). fp8 products have no gradients.
        weight_scales: float32 scales of fp8 matrices: (experts), or (experts, columns / 128, depth / 128), rounded up,
            for blocks of 128 x 128. Either both scales are by block, or neither is.
        dtype: The dtype of the result of an fp8 product; bfloat16 by default.
    """
    count = count_rows(rows, sources)
    height = tile_height(count, weight.shape[0])
    if groups is None:
        groups = group_rows(counts, count, height)
    elif groups.shape[0] != groups_size(weight.shape[0], count, height):
        raise UsageError(f"These groups are not of {count} rows and {weight.shape[0]} experts: see row_groups.")
    sources = None if sources is None else sources.contiguous()
    if row_scales is not None:
        operands = rows, weight, row_scales, weight_scales
        return multiply_fp8(  # type: ignore[no-any-return]
            *operands, groups, height, activation or "", dtype or torch.bfloat16, sources
        )
    if sources is not None:
        return multiply_gathered(rows, weight, groups, height, False, activation or "", sources)  # type: ignore[no-any-return]
    if activation is None:
        return multiply(rows, weight, groups, height, False)  # type: ignore[no-any-return]
    keep = torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad)
    return multiply_gated(rows, weight, groups, height, activation, keep)[0]  # type: ignore[no-any-return]
