"""`grouped_gemm`: each row times the matrix of its expert, where the rows of one expert are contiguous.

Bytes moved: forward reads the rows and the matrices of the experts that have any, and writes one result per row. Backward does
the same for the gradient of the rows, and reads rows and gradients once more for that of the matrices, which it writes in full.
With an activation both factors are written if a backward pass follows, and read by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.kernels._runtime.operator import Operator
from nearpeak.kernels._runtime.policy import FLOATS, cannot_run, fused, too_old
from nearpeak.kernels.pointwise import apply_activation, gated_packed_backward
from nearpeak.kernels.quantize import dequantize_reference

GateActivation = Literal["silu", "gelu", "gelu_tanh"]
FP8 = torch.float8_e4m3fn
_TALLEST = 128
"""The rows of a tile of most experts."""
_ENTRY_SIZE = 8
_TILES_PER_GROUP = 8


def tile_height(rows: int, experts: int) -> int:
    """The rows of a tile, by how many an expert has on average."""
    for height in (16, 32, 64):
        if rows < experts * height // 2:
            return height
    return _TALLEST


def entries_offset(experts: int) -> int:
    """Where the list of tiles begins: behind the first row of each expert, the end, and the number of tiles."""
    return (experts + 2 + _ENTRY_SIZE - 1) // _ENTRY_SIZE * _ENTRY_SIZE


def groups_size(experts: int, rows: int, height: int) -> int:
    """The numbers of the groups of so many rows.

    These are the first row of each expert and of the rows behind the last, the number of tiles, and for each tile, at
    most, 8 numbers: its expert (-1 for rows of nobody), of its group of up to 8 tiles of that expert the first tile,
    how many they are and the first row, and where the rows of the expert end.
    """
    return entries_offset(experts) + _ENTRY_SIZE * (rows // height + experts + 1)


def count_rows(rows: Tensor, sources: Tensor | None) -> int:
    """Of products: one for each row, or for each that sources name."""
    return (rows if sources is None else sources).shape[0]


def build_groups(counts: Tensor, rows: int, height: int) -> Tensor:
    """The groups in plain torch; what is behind the last tile is zeros."""
    experts = counts.shape[0]
    ends = [*counts.clamp(min=0).cumsum(0).clamp(max=rows).tolist(), rows]
    starts = [0, *ends[:-1]]
    result = torch.zeros(groups_size(experts, rows, height), dtype=torch.int32)
    result[: experts + 1] = torch.tensor(starts)
    entries = _build_entries(starts, ends, height)
    result[experts + 1] = len(entries)
    at, flat = entries_offset(experts), [number for entry in entries for number in entry]
    result[at : at + len(flat)] = torch.tensor(flat, dtype=torch.int32)
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
    """Each row by the matrix of its expert, transposed; zeros for rows of nobody."""
    parts = [rows[start:end] @ weight[at].mT for at, (start, end) in enumerate(pairwise(starts))]
    return torch.cat([*parts, rows.new_zeros(rows.shape[0] - starts[-1], weight.shape[1])])


def _expert_starts(groups: Tensor, experts: int) -> list[int]:
    return groups[: experts + 1].tolist()


def multiply_reference(rows: Tensor, weight: Tensor, groups: Tensor, height: int, transposed: bool) -> Tensor:
    return matmul_by_expert(rows, weight.mT if transposed else weight, _expert_starts(groups, weight.shape[0]))


def multiply_gated_reference(
    rows: Tensor, weight: Tensor, groups: Tensor, height: int, activation: str, keep: bool
) -> tuple[Tensor, Tensor]:
    kept = matmul_by_expert(rows, weight, _expert_starts(groups, weight.shape[0]))
    half = weight.shape[1] // 2
    result = (apply_activation(kept[:, :half], activation) * kept[:, half:]).contiguous()
    return result, kept if keep else kept.new_empty(0)


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
    starts = _expert_starts(groups, experts)
    return torch.stack([gradient[a:b].mT @ rows[a:b] for a, b in pairwise(starts)])


def dequantize_rows(rows: Tensor, scales: Tensor) -> Tensor:
    """Rows of 8 bits in float32."""
    return dequantize_reference(rows, scales, block="row" if scales.dim() == 1 else (1, 128), dtype=torch.float32)


def dequantize_weight(weight: Tensor, scales: Tensor) -> Tensor:
    """Matrices of 8 bits in float32."""
    if scales.dim() == 1:
        return weight.float() * scales[:, None, None]
    return dequantize_reference(weight, scales, block=(128, 128), dtype=torch.float32)


def _multiply_fp8_reference(
    rows: Tensor, weight: Tensor, row_scales: Tensor, weight_scales: Tensor, groups: Tensor, height: int,
    activation: str, dtype: torch.dtype, sources: Tensor | None,
) -> Tensor:  # fmt: skip
    given, matrices = dequantize_rows(rows, row_scales), dequantize_weight(weight, weight_scales)
    given = given if sources is None else given[sources.long()]
    if activation:
        return multiply_gated_reference(given, matrices, groups, height, activation, False)[0].to(dtype)
    return multiply_reference(given, matrices, groups, height, False).to(dtype)


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
    if rows.dtype != FP8 or weight.dtype != FP8:
        raise UsageError(f"Scales are for rows and a weight in {FP8}, and these are {rows.dtype}, {weight.dtype}.")


def multiply_why_not(rows: Tensor, weight: Tensor, *others: Any) -> str | None:
    """Why no kernel multiplies these."""
    if rows.dtype != weight.dtype:
        return f"it takes rows and a weight of one dtype, and these are {rows.dtype} and {weight.dtype}"
    if rows.dtype not in FLOATS:
        return f"it takes float32, bfloat16 and float16, and this is {rows.dtype}"
    return cannot_run(rows, weight, *(one for one in others if isinstance(one, Tensor)))


def fp8_why_not(rows: Tensor, weight: Tensor, *others: Any) -> str | None:
    """Why no kernel multiplies these numbers of 8 bits."""
    tensors = [one for one in others if isinstance(one, Tensor)]
    return cannot_run(rows, weight, *tensors, dtypes=(FP8, torch.float32)) or too_old(rows.device, (8, 9))


def _setup_multiply(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weight, groups, ctx.height, ctx.transposed = inputs
    ctx.save_for_backward(rows, weight, groups)


def _multiply_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    rows, weight, groups = ctx.saved_tensors
    by_rows = by_weight = None
    if ctx.needs_input_grad[0]:
        by_rows = multiply(gradient, weight, groups, ctx.height, not ctx.transposed)
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
    by_factors = gated_packed_backward(gradient, kept, ctx.activation, False)
    by_rows = by_weight = None
    if ctx.needs_input_grad[0]:
        by_rows = multiply(by_factors, weight, groups, ctx.height, True)
    if ctx.needs_input_grad[1]:
        by_weight = weight_gradient(by_factors, rows, groups, weight.shape[0])
    return by_rows, by_weight, *rest


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

_MOST_EXPERTS = 4096


def grouped_gemm_reference(
    rows: Tensor, weight: Tensor, counts: Tensor, *, activation: GateActivation | None = None, groups: Tensor | None = None,
    sources: Tensor | None = None, row_scales: Tensor | None = None, weight_scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    _check(rows, weight, counts, activation, sources, row_scales, weight_scales)
    if row_scales is not None and weight_scales is not None:
        rows = dequantize_rows(rows, row_scales)
        weight = dequantize_weight(weight, weight_scales)
    if sources is not None:
        rows = rows[sources.long()]
    ends = counts.cumsum(0).clamp(max=rows.shape[0])
    starts = torch.cat([ends.new_zeros(1), ends])
    result = matmul_by_expert(rows, weight, starts.tolist())
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
            "grouped_product takes rows of the shape (rows, depth) and a weight of (experts, columns, depth), and these"
            f" have {tuple(rows.shape)} and {tuple(weight.shape)}."
        )
    if counts.shape != weight.shape[:1] or counts.dtype not in (torch.int32, torch.int64):
        raise UsageError(
            f"grouped_product takes a count for each of {weight.shape[0]} experts, in int32 or int64, and these are"
            f" {tuple(counts.shape)} in {counts.dtype}."
        )
    if activation is not None:
        if activation not in get_args(GateActivation):
            raise UsageError(
                f"There is no activation {activation!r}. {did_you_mean(activation, get_args(GateActivation))}"
            )
        if weight.shape[1] % 2:
            raise UsageError(f"With an activation a weight has an even number of columns, and not {weight.shape[1]}.")
    if sources is not None and (sources.dim() != 1 or sources.dtype != torch.int32):
        raise UsageError(
            f"grouped_product takes sources as numbers of rows in int32, as sort_tokens gives them, and these are"
            f" {tuple(sources.shape)} in {sources.dtype}."
        )
    if (row_scales is None) != (weight_scales is None):
        raise UsageError("Numbers of 8 bits need row_scales and weight_scales, and one of them is not there.")
    if row_scales is not None and weight_scales is not None:
        check_scales(rows, weight, row_scales, weight_scales)


def _why_not(
    rows: Tensor, weight: Tensor, counts: Tensor, *, activation: GateActivation | None = None, groups: Tensor | None = None,
    sources: Tensor | None = None, row_scales: Tensor | None = None, weight_scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> str | None:  # fmt: skip
    _check(rows, weight, counts, activation, sources, row_scales, weight_scales)
    if sources is not None and torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad):
        return "with sources it has no gradients: see mixture_of_experts, or permute_tokens"
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
    """What `grouped_product` needs to know of rows by experts, to be used for several products of the same rows.

    One launch; nothing waits for the device. Its contents are for `grouped_product` alone.

    Args:
        counts: How many rows each expert has, in int32 or int64, as `permute_tokens` gives them. Where they are more
            than there are rows, the last experts have less.
        rows: How many rows there are.
    """
    return group_rows(counts, rows, tile_height(rows, counts.shape[0]))  # type: ignore[no-any-return]


@fused(reference=grouped_gemm_reference, why_not=_why_not)
def grouped_gemm(
    rows: Tensor, weight: Tensor, counts: Tensor, *, activation: GateActivation | None = None, groups: Tensor | None = None,
    sources: Tensor | None = None, row_scales: Tensor | None = None, weight_scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Each row by the matrix of its expert, `row @ weight[expert].T`, in the dtype of rows: (rows, columns).

    The first `counts[0]` rows are those of the first expert, and so on; rows behind the last expert's become zeros.
    Added up in float32; float32 is multiplied in full precision. Deterministic, and nothing waits for the device. The
    time is that of the rows there are, however they are spread over experts. rows and weight have gradients, and are
    kept for them; experts without rows have a gradient of zeros. Rows with holes are copied.

    Args:
        rows: (rows, depth), in float32, bfloat16 or float16, or in torch.float8_e4m3fn with scales.
        weight: (experts, columns, depth) in the same dtype, with any strides.
        counts: How many rows each expert has, (experts) in int32 or int64.
        activation: "silu", "gelu" or "gelu_tanh": the result is half as wide, the activation of what the first half
            of a matrix gives, times what the second half gives. For the gradient both are written and kept.
        groups: What `row_groups` made of counts and as many rows; by default it is made here.
        sources: Which of `rows` each product takes, in int32, as `sort_tokens` names the token of each: then nothing
            is copied, and there are as many products as sources. They have no gradients by kernels; plain torch runs
            where there are any to come.
        row_scales: What rows in 8 bits are multiplied by, in float32: (rows), or (rows, depth / 128) for each 128 of a
            row, as `quantize` makes them with blocks of "row" and (1, 128). Numbers of 8 bits have no gradients.
        weight_scales: The same of matrices: (experts), or (experts, columns / 128, depth / 128) by blocks of 128 x 128,
            rounded up. Either both scales are by blocks, or none.
        dtype: That of a result of 8 bits; by default bfloat16.
    """
    number = count_rows(rows, sources)
    height = tile_height(number, weight.shape[0])
    if groups is None:
        groups = group_rows(counts, number, height)
    elif groups.shape[0] != groups_size(weight.shape[0], number, height):
        raise UsageError(f"These groups are not of {number} rows and {weight.shape[0]} experts: see row_groups.")
    sources = None if sources is None else sources.contiguous()
    if row_scales is not None:
        wanted = dtype or torch.bfloat16
        scaled = rows, weight, row_scales, weight_scales
        return multiply_fp8(*scaled, groups, height, activation or "", wanted, sources)  # type: ignore[no-any-return]
    if sources is not None:
        return multiply_gathered(rows, weight, groups, height, False, activation or "", sources)  # type: ignore[no-any-return]
    if activation is None:
        return multiply(rows, weight, groups, height, False)  # type: ignore[no-any-return]
    keep = torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad)
    return multiply_gated(rows, weight, groups, height, activation, keep)[0]  # type: ignore[no-any-return]
