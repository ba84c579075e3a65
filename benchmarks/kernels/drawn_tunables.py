"""Entries of `benchmarks.kernels.tune --random SEEDS` and `--spread SEEDS`: configurations of kernels over rows.

At random cells they show how heuristics should depend on the number of rows as well as on their length. Cells that are
spread have one for each power of 2 of columns and each power of 4 of rows, with sizes at random between them: of these
`benchmarks.kernels.fit_rows` makes rows of the table. Each entry has few candidates: the one that the kernel takes now
("default"), that as it would be without one of its settings, and others with 4 to 32 elements for each thread.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.kernels.cases import KernelCase, random_tensor, rotary_case, row_case
from benchmarks.kernels.copies import quantize_case
from benchmarks.kernels.drawing import BOTH, Cell, Draw, cells, tiny_cells
from benchmarks.kernels.run import backward_ways, forward_ways
from nearpeak import kernels
from nearpeak.kernels._runtime.launch import next_power_of_2
from nearpeak.kernels._runtime.ring_buffer import ring_backward_candidates, ring_forward_candidates
from nearpeak.kernels._runtime.row_barrier import SplitConfig
from nearpeak.kernels._runtime.tuning import BY_ROWS
from nearpeak.kernels.losses import triton as losses_triton
from nearpeak.kernels.norms import tuning as norms_tuning
from nearpeak.kernels.pointwise import triton as pointwise_triton
from nearpeak.kernels.quantize import triton as quantize_triton
from nearpeak.kernels.rotary import triton as rotary_triton
from nearpeak.kernels.softmax import tuning as softmax_tuning

Way = Callable[[], Any]
CPU = torch.device("cpu")
"""For which the kernels choose as for an H200."""
PROCESSORS = 132
FEW_ROWS = 2 * PROCESSORS
FEW_ELEMENTS = 2**22
"""Up to so many, the number of elements matters to pointwise kernels."""
NORMS = {"rms_norm": (False, False), "layer_norm": (True, False), "add_rms_norm": (False, True),
         "add_layer_norm": (True, True)}  # fmt: skip
"""Whether a norm is centered, and whether it comes after an addition."""
GATED = ("swiglu", "geglu")
SOFTMAX = ("softmax", "log_softmax")
SPREAD_BLOCKS = (512, 1024, 2048, 4096, 8192, 16384)
"""Powers of 2 up to which columns are spread; and for norms of heads:"""
SPREAD_HEADS = (64, 128, 256)
SPREAD_ROWS = (16, 64, 256, 1024, 4096, 16384, 65536)
"""Between which rows are; heads have 16 times as many."""
SPREAD_ELEMENTS = tuple(2**bits for bits in range(13, 23))
SPREAD_TOKENS = tuple(4**exponent for exponent in range(5, 11))
"""Heads of tokens that are rotated."""
MOST_SPREAD_ELEMENTS = 2**25
FEWEST_SUMS = 2048
"""Rows from which on sums over rows are not worth a second read of all."""
OPERATIONS = (*NORMS, *SOFTMAX, *GATED, "bias_gelu", "dropout_add", "rotary", "quantize", "cross_entropy")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnEntry:
    """A kernel in a pass of a cell."""

    cell: Cell
    part: str
    """The pass."""
    kernel: str
    size: int
    """By which the table has it."""
    candidates: Sequence[Any]
    make: Callable[[], Way]
    """Makes inputs, and what to call."""
    least_bytes: int

    @property
    def label(self) -> dict[str, Any]:
        cell = self.cell
        return {"seed": cell.seed, "number": cell.number, "operation": cell.operation, "pass": self.part,
                "dtype": cell.dtype, "shape": cell.shape, "text": cell.text}  # fmt: skip


def drawn_entries(
    seeds: Sequence[int], count: int, device: str, *, operations: Sequence[str] | None = None, tiny: bool = False
) -> list[DrawnEntry]:
    """Those of the first passes of these operations of each seed: seeds in this order, each at random."""
    names = [name for name in OPERATIONS if operations is None or name in operations]
    found = []
    for seed in seeds:
        drawn = tiny_cells(seed, names) if tiny else cells(seed, count, names)
        entries = [entry for cell in drawn for entry in _entries(cell, device) if entry.candidates]
        found += random.Random(seed).sample(entries, len(entries))
    return found


def spread_entries(seeds: Sequence[int], device: str, operations: Sequence[str] | None = None) -> list[DrawnEntry]:
    """Those of spread cells, in random order: what a run leaves out is of all kinds."""
    found = []
    for seed in seeds:
        drawn = [cell for cell in spread_cells(seed) if operations is None or cell.operation in operations]
        entries = [entry for cell in drawn for entry in _entries(cell, device) if len(entry.candidates) > 1]
        found += random.Random(seed).sample(entries, len(entries))
    return found


def spread_cells(seed: int) -> list[Cell]:
    """Sizes of all kinds: widths are multiples of 64, so that cells share most compiled kernels."""
    draw = Draw(f"{seed} spread")
    found: list[tuple[str, dict[str, Any], tuple[str, ...]]] = []
    for name in (*NORMS, "softmax"):
        heads = SPREAD_HEADS if name in ("rms_norm", "layer_norm") else ()
        for block in (*heads, *SPREAD_BLOCKS):
            scale = 16 if block in heads else 1
            for least in SPREAD_ROWS[: -2 if block in heads else -1]:
                rows = draw.size(scale * least + 1, scale * 4 * least - 1) | 1
                columns = block if block in heads else draw.size(block // 2 + 1, block, 64)
                if rows * columns <= MOST_SPREAD_ELEMENTS:
                    found.append((name, {"rows": rows, "columns": columns}, BOTH))
    for elements in SPREAD_ELEMENTS:
        rows = draw.size(16, max(elements // 1024, 17))
        found.append(("swiglu", {"rows": rows, "columns": max(elements * 3 // 4 // rows // 8 * 8, 8)}, BOTH))
    for dim in (64, 128, 256):
        for least in SPREAD_TOKENS[:-1]:
            heads, batch = draw.among((8, 16, 32)), draw.size(1, 8)
            tokens = max(draw.size(least, 4 * least) // heads // batch, 1) | 1
            shape = {"batch": batch, "tokens": tokens, "heads": heads, "key_heads": heads // 4, "dim": dim}
            found.append(("rotary", shape, ("forward",)))
    return [
        Cell(seed=seed, number=number, operation=name, dtype="bfloat16", shape=shape, passes=passes)
        for number, (name, shape, passes) in enumerate(found)
    ]


def _entries(cell: Cell, device: str) -> Iterator[DrawnEntry]:
    dtype: torch.dtype = getattr(torch, cell.dtype)
    if cell.operation == "cross_entropy":
        yield _loss_entry(cell, dtype, device)
        return
    case = _case(cell, dtype, device)
    for part in cell.passes:
        backward = part == "backward"
        kernel = _kernel(cell, case, dtype, backward)
        if kernel is None:
            continue
        ways, least = (backward_ways, case.backward_bytes) if backward else (forward_ways, case.forward_bytes)

        def make(ways: Any = ways) -> Way:
            return ways(case, case.inputs(), only="nearpeak")["nearpeak"]  # type: ignore[no-any-return]

        name, size, candidates = kernel
        yield DrawnEntry(
            cell=cell, part=part, kernel=name, size=size, candidates=candidates, make=make, least_bytes=least or 0
        )


def _case(cell: Cell, dtype: torch.dtype, device: str) -> KernelCase:
    shape = cell.shape
    if cell.operation == "rotary":
        return rotary_case(*(shape[name] for name in ("batch", "tokens", "heads", "key_heads", "dim")), device, dtype)
    if cell.operation == "quantize":
        return quantize_case(shape["block"], shape["rows"], shape["columns"], device)
    return row_case(cell.operation, shape["rows"], shape["columns"], device, dtype)


def _loss_entry(cell: Cell, dtype: torch.dtype, device: str) -> DrawnEntry:
    tokens, vocabulary = cell.shape["tokens"], cell.shape["vocabulary"]

    def make() -> Way:
        logits = random_tensor(tokens, vocabulary, device=device, dtype=dtype)
        target = torch.randint(vocabulary, (tokens,), device=device)
        return lambda: torch.autograd.grad(kernels.cross_entropy(logits, target), logits)

    return DrawnEntry(
        cell=cell,
        part="both",
        kernel="cross_entropy" if vocabulary % 16 == 0 else "cross_entropy_narrow",
        size=vocabulary,
        candidates=losses_triton.cross_entropy_candidates(vocabulary),
        make=make,
        least_bytes=2 * tokens * vocabulary * dtype.itemsize,
    )


def _kernel(cell: Cell, case: KernelCase, dtype: torch.dtype, backward: bool) -> tuple[str, int, Sequence[Any]] | None:
    """The kernel, its size, and candidates; None where there is nothing to be learned."""
    operation, rows, columns = cell.operation, case.rows, case.columns
    if operation in NORMS:
        centered, added = NORMS[operation]
        size = columns * dtype.itemsize // 2
        pick = norm_backward_candidates if backward else norm_forward_candidates
        candidates = pick(size, rows, centered, added)
        name = "norm_backward" if backward else "norm_forward"
        return norms_tuning.table_key(name, centered, added) + BY_ROWS, size, candidates
    if operation in SOFTMAX:
        name = "softmax_backward" if backward else "softmax"
        return name + BY_ROWS, columns, softmax_candidates(columns, rows, backward)
    if operation in GATED:
        return "gated_backward" if backward else "gated_forward", rows * columns, flat_candidates(rows * columns)
    if operation == "bias_gelu":
        if backward:
            return "activation_backward_bias", columns, column_sum_candidates(columns)
        return "activation_forward", columns, tile_candidates(rows, columns)
    if operation == "dropout_add":
        return "dropout_add", rows * columns, dropout_candidates(rows * columns)
    if operation == "rotary":
        shape = cell.shape
        return "rotary" + BY_ROWS, shape["dim"], rotary_triton.few_candidates(shape["dim"], shape["heads"])
    block = cell.shape["block"]
    if block not in ("1x128", "row") or (block == "row" and columns > quantize_triton.MAX_REGISTER_ROW):
        return None
    width = 128 if block == "1x128" else next_power_of_2(columns)
    return "quantize_pieces", width, pieces_candidates(width)


def norm_forward_candidates(size: int, rows: int, centered: bool, added: bool) -> list[Any]:
    """Sizes are of 16 bits."""
    block = next_power_of_2(size)
    now = norms_tuning.forward_config(size, rows, CPU, centered=centered, added=added)
    configs: list[Any] = []
    if isinstance(now, norms_tuning.ForwardTileConfig):
        early = norms_tuning.reads_early(now, block, rows, PROCESSORS)
        configs.append(replace(now, early=not early))
    configs += [
        norms_tuning.ForwardTileConfig(rows=elements * 32 * warps // block, warps=warps, early=True)
        for warps in (1, 2, 4, 8, 16, 32)
        for elements in (4, 8, 16, 32)
        if elements * 32 * warps % block == 0
        and (elements * 32 * warps == block or (rows > FEW_ROWS and elements * 32 * warps <= 4096))
        and elements * 32 * warps // block <= norms_tuning.MAX_ROWS
        and block <= norms_tuning.MAX_FORWARD_TILE
    ]
    if block > norms_tuning.MAX_FORWARD_TILE // 2:
        configs += ring_forward_candidates(size, weights=True)
    return configs


def norm_backward_candidates(size: int, rows: int, centered: bool, added: bool) -> list[Any]:
    block = next_power_of_2(size)
    if norms_tuning.is_few(size, rows, PROCESSORS):
        return list(norms_tuning.few_backward_candidates(size))
    if block <= norms_tuning.MAX_BACKWARD_TILE:
        apart = [norms_tuning.few_backward_heuristic(size)] if rows <= FEWEST_SUMS and block <= FEWEST_SUMS * 4 else []
        tiles = [
            norms_tuning.BackwardTileConfig(
                rows=max(elements * 32 * warps // block, 1), warps=warps, stages=stages, programs=programs
            )
            for warps in (1, 2, 4, 8)
            for elements in (8, 16)
            for stages in (1, 3)
            for programs in {16 // warps, 24 // warps}
            if programs and elements * 32 * warps >= block and block <= 1024
        ]
        return [*apart, *tiles]
    rings = ring_backward_candidates(size, sums=True, added=added)
    return [norms_tuning.backward_heuristic(size, centered=centered), *rings]


def softmax_candidates(columns: int, rows: int, backward: bool) -> list[Any]:
    configs = softmax_tuning.candidates(columns, backward=backward)
    tiles: list[Any] = [config for config in configs if isinstance(config, softmax_tuning.TileConfig)]
    if rows <= FEW_ROWS:
        tiles = [config for config in tiles if config.rows == 1]
        if columns > 16384:
            # fewer than rings take: parts, each of a program
            return [*tiles, *(SplitConfig(warps=warps, steps=steps, kept=True) for warps, steps in ((8, 4), (16, 2)))]
    if columns <= 16384:
        return tiles
    rings = ring_backward_candidates(columns) if backward else ring_forward_candidates(columns, weights=False)
    return [*tiles[-4:], softmax_tuning.SplitConfig(), *rings]


def flat_candidates(elements: int) -> list[Any]:
    """Of pointwise kernels over contiguous tensors."""
    if elements > FEW_ELEMENTS:
        return []
    return [
        pointwise_triton.TileConfig(block=each * 32 * warps, rows=1, warps=warps)
        for warps in (1, 2, 4, 8)
        for each in (2, 4, 8, 16)
        if each * warps >= 4
    ]


def tile_candidates(rows: int, columns: int) -> list[Any]:
    return [
        pointwise_triton.TileConfig(block=block, rows=min(elements // block, next_power_of_2(rows)), warps=warps)
        for elements in (1024, 2048, 4096)
        for block in {pointwise_triton.fitting_block(columns, most) for most in (256, elements)}
        for warps in (elements // 512, elements // 256)
    ]


def column_sum_candidates(columns: int) -> list[Any]:
    return [
        pointwise_triton.ColumnSumConfig(block=block, rows=elements // block, warps=elements // each, programs=programs)
        for block in sorted({pointwise_triton.fitting_block(columns, most) for most in (256, 1024)})
        for elements, each in ((1024, 512), (2048, 512), (4096, 1024), (4096, 512))
        for programs in (1056, 2112)
    ]


def dropout_candidates(elements: int) -> list[Any]:
    if elements > FEW_ELEMENTS:
        return []
    return [pointwise_triton.DropoutConfig(chunks=1, warps=warps) for warps in (2, 4, 8, 16, 32)]


def pieces_candidates(width: int) -> list[Any]:
    return [
        quantize_triton.PiecesConfig(pieces=elements // width, warps=elements // (32 * each))
        for elements in (256, 512, 1024, 2048, 4096, 16384)
        for each in (8, 16, 32)
        if elements >= width and 1 <= elements // (32 * each) <= 16
    ]
