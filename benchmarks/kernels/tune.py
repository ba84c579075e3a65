"""Measures which configuration of each kernel is fastest on this GPU, and writes the table that the kernels use.

    PYTHONPATH=src python -m benchmarks.kernels.tune --table src/nearpeak/kernels/tables/sm90.json

Several processes compile all candidates first; a candidate that is not compiled in time is left out. Then all
candidates for one size are measured in turns. A candidate whose result differs from that of the default, or between
runs, is rejected and reported. Entries of the table for other operations or sizes are kept.

    PYTHONPATH=src python -m benchmarks.kernels.tune --random 4,5 --json drawn.json

measures kernels over rows at the shapes of random cells, for heuristics: see `drawn_tunables`.

    PYTHONPATH=src python -m benchmarks.kernels.tune --spread 4 --rounds 2 --most 12 --limit 130 --compile-seconds 90 \
        --json spread.json

measures them at sizes of all kinds, of which `benchmarks.kernels.fit_rows` makes rows of the table.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from benchmarks.kernels.attention import portable
from benchmarks.kernels.cases import SIZES, KernelCase, random_tensor, row_cases
from benchmarks.kernels.copies import CopySizes, copy_cases
from benchmarks.kernels.drawn_tunables import DrawnEntry, drawn_entries, spread_entries
from benchmarks.kernels.jobs import DONE, Jobs, run_workers, set_caches, work_through
from benchmarks.kernels.run import backward_ways, forward_ways
from nearpeak import kernels
from nearpeak.kernels._runtime.choice import own_backends
from nearpeak.kernels._runtime.tuning import BUSY_WARPS, to_row
from nearpeak.kernels.attention import tuning as attention_tuning
from nearpeak.kernels.decode import tuning as decode_tuning
from nearpeak.kernels.gemm import tuning as gemm_tuning
from nearpeak.kernels.linear_attention import tuning as linear_attention_tuning
from nearpeak.kernels.losses import triton as losses_triton
from nearpeak.kernels.moe import triton as moe_triton
from nearpeak.kernels.norms import tuning as norms_tuning
from nearpeak.kernels.norms.tuning import table_key
from nearpeak.kernels.optimizer import triton as optimizer_triton
from nearpeak.kernels.pointwise import triton as pointwise_triton
from nearpeak.kernels.quantize import triton as quantize_triton
from nearpeak.kernels.rotary import triton as rotary_triton
from nearpeak.kernels.softmax import tuning as softmax_tuning
from nearpeak.kernels.transpose import triton as transpose_triton

if TYPE_CHECKING:
    import torch

PROCESSORS = 132
"""Of an H200."""
MANY = 2**40
"""Up to so many: no end."""
LONGEST_TILE = 16384
"""Of a row in registers; longer ones are in parts, which have any length."""
FEW = 2**22
"""Elements from which on a GPU is busy, and their number no longer matters."""


class Where(NamedTuple):
    """The size at which an entry is measured, and for which it holds: above one, up to the other."""

    size: int
    above: int
    up_to: int


def near_of(size: int) -> Where:
    """An entry that holds for sizes whose next power of 2 is that of this one."""
    longest = 1 << (size - 1).bit_length()
    return Where(size, longest // 2, longest)


def width_of(size: int) -> Where:
    """An entry that holds for rows of nearly this length: tiles are powers of 2, and masks leave some of them empty."""
    longest = 1 << (size - 1).bit_length()
    if longest > LONGEST_TILE:
        return near_of(size)
    step = max(longest // 8, 1)
    up_to = -(-size // step) * step
    return Where(size, up_to - step, up_to)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tunable:
    """One entry of the table: a kernel at a size, measured through an operation."""

    kernel: str
    operation: str
    where: Where
    candidates: Sequence[Any]
    """Configurations of the kernel; rows of the table where `tunables` returns them."""
    make: Callable[[], Callable[[], Any]]
    """Makes inputs, and what to call."""
    least_bytes: int
    checked: bool = True
    """Whether all candidates give the same numbers."""
    label: Mapping[str, Any] = field(default_factory=dict)
    """Of a random cell, what it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedSizes:
    """At which kernels are tuned."""

    rows: Sequence[tuple[int, int]] = SIZES
    activations: Sequence[tuple[int, int]] = ((16384, 4096), (4096, 16384))
    quantized_rows: Sequence[tuple[int, int]] = ((16384, 4096), (8192, 8192))
    long_rows: tuple[int, int] = (2048, 65536)
    losses: Sequence[tuple[int, int]] = ((8192, 32000), (2048, 128256))
    odd_losses: Sequence[tuple[int, int]] = ((8192, 30522), (4096, 50257), (2048, 100277))
    """Vocabularies whose rows do not begin at multiples of 16 bytes."""
    copies: CopySizes = field(default_factory=CopySizes)
    caches: Sequence[tuple[int, int, int, int]] = ((1, 8, 131072, 128), (32, 4, 8192, 64), (7, 16, 28544, 128))
    """Sequences, heads of keys, capacity, numbers of a head: of 8 programs, which share all multiprocessors, of 128 and
    of 112, which leave some without one."""
    attention: Sequence[int] = (2048, 4096, 8192, 16384)
    """Tokens of a sequence, of as many sequences as have the most of these tokens together."""
    attention_heads: int = 16
    portable_attention: int = 8192
    products: Sequence[tuple[int, int]] = ((4096, 4096), (8192, 8192))
    """Rows and columns of the result, and the depth."""
    experts: Sequence[tuple[int, int, int, int]] = ((128, 512, 1536, 2048), (8, 4096, 8192, 4096))
    """How many, rows of each, and columns and depth of their matrices."""
    experts_of_few: tuple[int, int, int] = (128, 1536, 2048)
    """How many, and columns and depth, where each has but a few rows."""
    routed: tuple[int, Sequence[int]] = (65536, (8, 128))
    """Tokens, and numbers of experts."""
    linear_attention: tuple[int, int, int, Sequence[int]] = (2, 16, 8192, (64, 128))
    """Sequences, heads, tokens, and numbers of a head."""

    @classmethod
    def tiny(cls) -> TunedSizes:
        """At which every kernel runs in a moment, also in Triton's interpreter."""
        return cls(
            rows=[(268, 64), (4, 1024)],  # many, and few, in tiles of several widths
            activations=[(4, 256)],
            quantized_rows=[(4, 128)],
            long_rows=(2, 16_400),
            losses=[(3, 4160)],
            odd_losses=[(3, 4161)],
            copies=CopySizes(side=128, tokens=6, choices=2, experts=4, hidden=1024, width=8, layers=2, vocabulary=16),
            caches=((1, 1, 128, 64), (1, 70, 32, 64)),
            attention=(32, 64),
            attention_heads=1,
            portable_attention=64,
            products=[(768, 64)],  # as many tiles as the kernel for Hopper wants to have
            experts=[(2, 64, 64, 64)],
            experts_of_few=(4, 64, 64),
            routed=(5, (8,)),
            linear_attention=(1, 1, 300, (64,)),  # of two segments
        )


KINDS = ("16_bits", "16_bits_gated", "8_bits", "8_bits_gated", "8_bits_fast", "8_bits_fast_gated")
HEIGHTS = (16, 64)
"""Rows of tiles of experts that have few rows."""


def product_tunables(sizes: TunedSizes, device: str) -> Iterator[Tunable]:
    for side, depth in sizes.products:
        for kind in KINDS:
            yield _product(side, depth, kind, False, device)
        for kind in KINDS[:2]:
            yield _product(side, depth, kind, True, device)
    yield from _experts(sizes, device)
    yield from _experts_of_few(sizes, device)
    yield from _routed(sizes, device)
    yield from _linear_attention(sizes, device)


def _product(side: int, depth: int, kind: str, keep: bool, device: str) -> Tunable:
    gated, eight = kind.endswith("_gated"), kind.startswith("8_bits")
    results = 2 * side if gated else side
    activation = "silu" if gated or keep else None

    def make() -> Callable[[], Any]:
        x, weight = (random_tensor(lines, depth, device=device, grad=keep) for lines in (side, results))
        if not eight:
            return lambda: kernels.gemm(x, weight, activation=activation, gated=gated)
        x, weight = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
        scale = torch.ones((), device=device)
        options = {"activation": activation, "gated": gated, "fast_accumulate": "fast" in kind}
        return lambda: kernels.gemm(x, weight, scale_x=scale, scale_weight=scale, **options)

    # tiles that are left over at the end decide, so that an entry holds for results of nearly this size alone
    numbers = side * side
    return Tunable(
        kernel=f"gemm_sm90_{kind}" + ("_kept" if keep else ""),
        operation="gemm",
        where=Where(numbers, numbers - numbers // 32, numbers + numbers // 32),
        candidates=gemm_tuning.sm90_candidates(kind, keep=keep),
        make=make,
        least_bytes=(side + results) * depth * (1 if eight else 2) + 2 * numbers * (1 + (2 if gated else 1) * keep),
    )


def _grouped(experts: int, rows: int, columns: int, depth: int, device: str, **options: Any) -> Callable[[], Any]:
    """The product of as many rows for each expert."""
    x = random_tensor(experts * rows, depth, device=device, grad=False)
    weight = random_tensor(experts, columns, depth, device=device, grad=False)
    counts = torch.full((experts,), rows, dtype=torch.int32, device=device)
    groups = kernels.row_groups(counts, rows=experts * rows)
    return lambda: kernels.grouped_gemm(x, weight, counts, groups=groups, **options)


def _experts(sizes: TunedSizes, device: str) -> Iterator[Tunable]:
    for number, (experts, rows, columns, depth) in enumerate(sizes.experts):

        def gradient(
            experts: int = experts, rows: int = rows, columns: int = columns, depth: int = depth
        ) -> Callable[[], Any]:
            x = random_tensor(experts * rows, depth, device=device, grad=False)
            weight = random_tensor(experts, columns, depth, device=device)
            counts = torch.full((experts,), rows, dtype=torch.int32, device=device)
            result = kernels.grouped_gemm(x, weight, counts)
            upstream = torch.randn_like(result)
            return lambda: torch.autograd.grad(result, weight, upstream, retain_graph=True)

        def forward(shape: tuple[int, int, int, int] = (experts, rows, columns, depth), **options: Any) -> Any:
            return _grouped(*shape, device, **options)

        where = near_of(rows)
        if number == len(sizes.experts) - 1:
            where = where._replace(up_to=MANY)
        least = 2 * experts * (rows * depth + columns * depth + rows * columns)
        kernels_and_calls: list[tuple[str, Any, Callable[[], Any]]] = [
            ("grouped_gemm_sm90", gemm_tuning.SM90_GROUPED_CONFIGS, forward),
            (
                "grouped_gemm_sm90_gated",
                gemm_tuning.SM90_GROUPED_CONFIGS,
                lambda forward=forward: forward(activation="silu"),
            ),
            ("grouped_weight_gradient_sm90", gemm_tuning.SM90_GROUPED_GRADIENT_CONFIGS, gradient),
        ]
        for kernel, candidates, make in kernels_and_calls:
            yield Tunable(
                kernel=kernel,
                operation="grouped_gemm",
                where=where,
                candidates=list(candidates),
                make=make,
                least_bytes=least,
            )


def _experts_of_few(sizes: TunedSizes, device: str) -> Iterator[Tunable]:
    experts, columns, depth = sizes.experts_of_few
    for height in HEIGHTS:
        for gated in (False, True):

            def make(height: int = height, gated: bool = gated) -> Callable[[], Any]:
                options = {"activation": "silu"} if gated else {}
                return _grouped(experts, 3 * height // 8, columns, depth, device, **options)

            yield Tunable(
                kernel="grouped_gemm" + ("_gated" if gated else ""),
                operation="grouped_gemm",
                where=near_of(height),
                candidates=gemm_tuning.grouped_candidates(height, gated),
                make=make,
                least_bytes=2 * experts * columns * depth,
            )


def _routed(sizes: TunedSizes, device: str) -> Iterator[Tunable]:
    tokens, numbers = sizes.routed
    for experts in numbers:

        def forward(experts: int = experts) -> Callable[[], Any]:
            logits = random_tensor(tokens, experts, device=device, grad=False)
            return lambda: kernels.route(logits, min(8, experts // 4), renormalize=True)

        def backward(experts: int = experts) -> Callable[[], Any]:
            logits = random_tensor(tokens, experts, device=device)
            weights, _ = kernels.route(logits, min(8, experts // 4), renormalize=True)
            upstream = torch.randn_like(weights)
            return lambda: torch.autograd.grad(weights, logits, upstream, retain_graph=True)

        for kernel, make, passes in (("route", forward, 1), ("route_backward", backward, 2)):
            yield Tunable(
                kernel=kernel,
                operation="route",
                where=near_of(experts),
                candidates=moe_triton.route_candidates(experts),
                make=make,
                least_bytes=2 * passes * tokens * experts,
            )


def _linear_attention(sizes: TunedSizes, device: str) -> Iterator[Tunable]:
    sequences, heads, tokens, dims = sizes.linear_attention
    for dim in dims:
        shape = (sequences, heads, tokens, dim)
        one = 2 * sequences * heads * tokens * dim

        def forward(shape: tuple[int, ...] = shape) -> Callable[[], Any]:
            given = [random_tensor(*shape, device=device, grad=False) for _ in "qkv"]
            return lambda: kernels.linear_attention(*given)

        def backward(wanted: str, shape: tuple[int, ...] = shape) -> Callable[[], Any]:
            given = [random_tensor(*shape, device=device, grad=name == wanted) for name in ("query", "key", "value")]
            result = kernels.linear_attention(*given)
            (of,) = (tensor for tensor in given if tensor.requires_grad)
            upstream = torch.randn_like(result)
            return lambda: torch.autograd.grad(result, of, upstream, retain_graph=True)

        for name in ("", "_states", "_query", "_key", "_value"):
            is_forward = name in ("", "_states")
            kernel = f"linear_attention{name}"
            yield Tunable(
                kernel=kernel,
                operation="linear_attention",
                where=near_of(dim),
                candidates=linear_attention_tuning.candidates(dim, kernel),
                make=forward if is_forward else lambda name=name, backward=backward: backward(name[1:]),  # type: ignore[misc]
                least_bytes=(4 if is_forward else 6) * one,
            )


REHEARSAL = TunedSizes.tiny()
"""Sizes at which every kernel runs in a moment, also in Triton's interpreter."""


def tunables(sizes: TunedSizes | None = None, device: str = "cuda") -> Iterator[Tunable]:
    for tunable in _all_tunables(sizes or TunedSizes(), device):
        rows = [config if isinstance(config, dict) else to_row(config) for config in tunable.candidates]
        yield replace(tunable, candidates=rows)


def drawn_tunables(
    seeds: Sequence[int], count: int, device: str, operations: Sequence[str] | None = None, *, tiny: bool = False
) -> list[Tunable]:
    """Kernels over rows at the shapes of random cells."""
    return _of_entries(drawn_entries(seeds, count, device, operations=operations, tiny=tiny))


def spread_tunables(seeds: Sequence[int], device: str, operations: Sequence[str] | None = None) -> list[Tunable]:
    """The same at sizes of all kinds."""
    return _of_entries(spread_entries(seeds, device, operations))


def _of_entries(entries: Sequence[DrawnEntry]) -> list[Tunable]:
    return [
        Tunable(
            kernel=entry.kernel,
            operation=entry.cell.operation,
            where=Where(entry.size, entry.size - 1, entry.size),
            candidates=[to_row(config) for config in entry.candidates],
            make=entry.make,
            least_bytes=entry.least_bytes,
            checked=entry.cell.operation != "dropout_add",
            label=entry.label,
        )
        for entry in entries
    ]


def _all_tunables(sizes: TunedSizes, device: str) -> Iterator[Tunable]:
    yield from _rows(sizes, device)
    yield from _activations(sizes, device)
    yield from _copies(sizes, device)
    for side_bytes, dtype in ((1, torch.int8), (4, torch.float32), (8, torch.float64)):
        yield _transpose(sizes.copies.side, side_bytes, dtype, device)
    yield from _quantized(sizes, device)
    yield from _losses(sizes, device)
    yield from _caches(sizes, device)
    yield from _attention(sizes, device)
    yield from _portable_attention(sizes, device)
    yield from product_tunables(sizes, device)


def _from(case: KernelCase, kernel: str, backward: bool, candidates: Sequence[Any], where: Where) -> Tunable:
    ways = backward_ways if backward else forward_ways
    least = case.backward_bytes if backward else case.forward_bytes
    assert least is not None
    return Tunable(
        kernel=kernel,
        operation=case.operation.split()[0],
        candidates=candidates,
        make=lambda: ways(case, case.inputs(), only="nearpeak")["nearpeak"],
        least_bytes=least,
        checked=case.operation != "dropout_add",
        where=where,
    )


def _rows(sizes: TunedSizes, device: str) -> Iterator[Tunable]:
    for number, (rows, columns) in enumerate(sizes.rows):
        cases = {case.operation: case for case in row_cases([(rows, columns)], device)}
        near = near_of(columns)
        case = cases["softmax"]
        yield _from(case, "softmax", False, softmax_tuning.candidates(columns), near)
        yield _from(case, "softmax_backward", True, softmax_tuning.candidates(columns, backward=True), near)
        yield from _norms([cases[name] for name in ("rms_norm", "layer_norm", "add_rms_norm")], device)
        if number:
            continue
        elements = rows * columns
        # contiguous tensors are one row to these kernels
        flat = Where(elements, FEW, MANY)
        yield _from(cases["swiglu"], "gated_forward", False, pointwise_triton.tile_candidates(elements), flat)
        yield _from(cases["swiglu"], "gated_backward", True, pointwise_triton.tile_candidates(elements), flat)
        yield _from(cases["dropout_add"], "dropout_add", False, pointwise_triton.dropout_candidates(elements), flat)
        heads = cases["rotary"].columns // 128
        yield _from(cases["rotary"], "rotary", False, rotary_triton.candidates(128, heads), near_of(128))


def _norms(cases: Sequence[KernelCase], device: str) -> Iterator[Tunable]:
    """RMSNorm, LayerNorm, RMSNorm after an addition, and LayerNorm after one, which is measured for this alone."""
    alone, centered, added = cases
    rows, columns = alone.rows, alone.columns

    def inputs() -> list[torch.Tensor]:
        tensors = [random_tensor(rows, columns, device=device) for _ in range(2)]
        return tensors + [random_tensor(columns, device=device) for _ in range(2)]

    both = KernelCase(
        operation="add_layer_norm",
        rows=rows,
        columns=columns,
        inputs=inputs,
        eager=kernels.add_layer_norm.reference,  # type: ignore[attr-defined]
        nearpeak=kernels.add_layer_norm,
        forward_bytes=added.forward_bytes,
        backward_bytes=added.backward_bytes,
    )
    for case in (alone, centered, added, both):
        is_centered, is_added = case in (centered, both), case in (added, both)
        forward, backward = (table_key(name, is_centered, is_added) for name in ("norm_forward", "norm_backward"))
        yield _from(case, forward, False, norms_tuning.forward_candidates(columns), width_of(columns))
        if norms_tuning.is_few(columns, rows, PROCESSORS):
            some = norms_tuning.few_backward_candidates(columns)
            yield _from(case, backward + norms_tuning.FEW, True, some, width_of(columns))
            continue
        candidates = norms_tuning.backward_candidates(columns, centered=is_centered, added=is_added)
        yield _from(case, backward, True, candidates, width_of(columns))


def _activations(sizes: TunedSizes, device: str) -> Iterator[Tunable]:
    for rows, columns in sizes.activations:
        one = 2 * rows * columns

        def inputs(rows: int = rows, columns: int = columns, grad: bool = True) -> list[torch.Tensor]:
            return [random_tensor(rows, columns, device=device), random_tensor(columns, device=device, grad=grad)]

        with_bias, without = (
            KernelCase(
                operation="bias_gelu",
                rows=rows,
                columns=columns,
                inputs=lambda inputs=inputs, grad=grad: inputs(grad=grad),  # type: ignore[misc]
                eager=lambda x, bias: torch.nn.functional.gelu(x + bias),
                nearpeak=lambda x, bias: kernels.bias_gelu(x, bias),
                forward_bytes=2 * one,
                backward_bytes=3 * one,
            )
            for grad in (True, False)
        )
        tiles, near = pointwise_triton.tile_candidates(columns), near_of(columns)
        yield _from(with_bias, "activation_forward", False, tiles, near)
        yield _from(without, "activation_backward", True, tiles, near)
        sums = pointwise_triton.column_sum_candidates(columns)
        yield _from(with_bias, "activation_backward_bias", True, sums, near)


def _copies(sizes: TunedSizes, device: str) -> Iterator[Tunable]:
    cases = {case.operation: case for case in copy_cases(sizes.copies, device)}
    side, hidden = sizes.copies.side, sizes.copies.hidden
    flat = Where(side * side, FEW, MANY)
    for name, kernel, backward, candidates in (
        ("permute_tokens", "permute_copy", False, moe_triton.permute_candidates(hidden)),
        ("unpermute_tokens", "unpermute_sum", False, moe_triton.permute_candidates(hidden)),
        ("unpermute_tokens", "unpermute_backward", True, moe_triton.unpermute_backward_candidates(hidden)),
    ):
        yield _from(cases[name], kernel, backward, candidates, near_of(hidden))
    elements = cases["adamw bfloat16"].columns
    step = cases["adamw bfloat16"]
    yield _from(step, "adamw", False, optimizer_triton.candidates(elements), Where(elements, FEW, MANY))
    candidates = transpose_triton.candidates(side, 2)
    yield _from(cases["transpose_copy"], "transpose_2", False, candidates, Where(side, 512, MANY))
    candidates = quantize_triton.candidates(128)
    yield _from(cases["quantize 1x128"], "quantize_pieces", False, candidates, Where(128, 64, 128))
    tiles = quantize_triton.tiles_candidates()
    yield _from(cases["quantize 128x128"], "quantize_tiles", False, tiles, near_of(128 * 128))
    whole = quantize_triton.loop_candidates()
    yield _from(cases["quantize tensor"], "quantize_whole", False, whole, flat)
    back = quantize_triton.dequantize_candidates()
    yield _from(cases["dequantize 1x128"], "dequantize", False, back, flat)
    yield _from(cases["dequantize 128x128"], "dequantize", False, back, near_of(side))


def _transpose(side: int, side_bytes: int, dtype: torch.dtype, device: str) -> Tunable:
    def make() -> Callable[[], Any]:
        # numbers of any dtype are moved as integers of their size
        x = torch.randint(-128, 128, (side, side * side_bytes), dtype=torch.int8, device=device).view(dtype)
        return lambda: kernels.transpose_copy(x)

    return Tunable(
        kernel=f"transpose_{side_bytes}",
        operation="transpose_copy",
        where=Where(side, 512, MANY),
        candidates=transpose_triton.candidates(side, side_bytes),
        make=make,
        least_bytes=2 * side * side * side_bytes,
        checked=False,  # among random bits are some that are not a number
    )


def _quantized(sizes: TunedSizes, device: str) -> Iterator[Tunable]:
    def entry(rows: int, columns: int, kernel: str, candidates: Sequence[Any], where: Where) -> Tunable:
        def make() -> Callable[[], Any]:
            x = random_tensor(rows, columns, device=device, grad=False)
            return lambda: kernels.quantize(x, block="row")

        return Tunable(
            kernel=kernel,
            operation="quantize",
            candidates=candidates,
            make=make,
            least_bytes=3 * rows * columns,
            where=where,
        )

    for rows, columns in sizes.quantized_rows:
        near = near_of(columns)
        yield entry(rows, columns, "quantize_pieces", quantize_triton.candidates(near.up_to), near)
    rows, columns = sizes.long_rows
    found = quantize_triton.loop_candidates()
    yield entry(rows, columns, "quantize_long_rows", found, Where(columns, quantize_triton.MAX_REGISTER_ROW, MANY))


def _losses(sizes: TunedSizes, device: str) -> Iterator[Tunable]:
    shapes = [(*shape, shape is sizes.losses[-1]) for shape in sizes.losses]
    shapes += [(*shape, shape is sizes.odd_losses[-1]) for shape in sizes.odd_losses]
    for rows, columns, is_last in shapes:
        near, wide = near_of(columns), columns % 16 == 0
        if is_last:
            near = near._replace(up_to=MANY)

        def given(rows: int = rows, columns: int = columns) -> tuple[torch.Tensor, torch.Tensor]:
            return random_tensor(rows, columns, device=device), torch.randint(columns, (rows,), device=device)

        def mean(given: Callable[[], Any] = given) -> Callable[[], Any]:
            logits, target = given()
            return lambda: torch.autograd.grad(kernels.cross_entropy(logits, target), logits)

        def by_rows(given: Callable[[], Any] = given) -> Callable[[], Any]:
            logits, target = given()
            losses = kernels.cross_entropy(logits, target, reduction="none")
            upstream = torch.rand_like(losses)
            return lambda: torch.autograd.grad(losses, logits, upstream, retain_graph=True)

        yield Tunable(
            kernel="cross_entropy" if wide else "cross_entropy_narrow",
            operation="cross_entropy",
            candidates=losses_triton.cross_entropy_candidates(columns),
            make=mean,
            least_bytes=4 * rows * columns,
            where=near,
        )
        if is_last and wide:
            yield Tunable(
                kernel="cross_entropy_gradient",
                operation="cross_entropy",
                where=Where(columns, losses_triton.LONGEST_WHOLE_ROW, MANY),
                candidates=[
                    losses_triton.GradientConfig(elements=elements, warps=warps)
                    for elements in (2048, 4096, 8192, 16384)
                    for warps in (4, 8, 16)
                    if 8 <= elements // (32 * warps) <= 64
                ],
                make=by_rows,
                least_bytes=4 * rows * columns,
            )


def _caches(sizes: TunedSizes, device: str) -> Iterator[Tunable]:
    for cache in sizes.caches:
        yield from _attention_to(*cache, device)
    batch, key_heads, capacity, dim = sizes.caches[0]

    def write() -> Callable[[], Any]:
        cache = kernels.KVCache.create(batch, capacity, key_heads, dim, torch.bfloat16, device)
        key, query = (random_tensor(batch, heads, 1, dim, device=device, grad=False) for heads in (key_heads, 32))
        angles = random_tensor(capacity, dim // 2, device=device, grad=False)
        options = {"cosines": angles, "sines": angles, "query": query}
        return lambda: kernels.append(cache.keys, cache.values, key, key, cache.lengths, **options)

    yield Tunable(
        kernel="cache_append",
        operation="append",
        where=near_of(dim),
        candidates=decode_tuning.append_candidates(dim, key_heads),
        make=write,
        least_bytes=4 * batch * (2 * key_heads + 32) * dim,
    )


def _attention_to(batch: int, key_heads: int, capacity: int, dim: int, device: str) -> Iterator[Tunable]:
    """Attention of one token to a cache, of one head for each of its heads and of four, with pages and without."""
    row, several = 2 * dim, decode_tuning.takes_several_waves(batch * key_heads, PROCESSORS)

    def attend(heads: int, page_size: int | None) -> Callable[[], Any]:
        cache = kernels.KVCache.create(batch, capacity, key_heads, dim, torch.bfloat16, device, page_size)
        for tensor in (cache.keys, cache.values):
            tensor.normal_()
        if cache.pages is not None:
            cache.pages.copy_(torch.randperm(cache.pages.numel(), device=device).view(cache.pages.shape))
        cache.lengths.fill_(capacity)
        query = random_tensor(batch, heads, 1, dim, device=device, grad=False)
        return lambda: cache.attend(query)

    for alone, page_size in ((False, None), (False, 16), (True, None), (True, 16)):
        heads = key_heads if alone else 4 * key_heads
        yield Tunable(
            kernel=decode_tuning.decode_table_key(alone, page_size is not None, several),
            operation="decode_attention",
            where=near_of(row),
            candidates=decode_tuning.decode_candidates(row, alone),
            make=lambda heads=heads, page_size=page_size: attend(heads, page_size),  # type: ignore[misc]
            least_bytes=2 * batch * key_heads * capacity * row,
        )


def _attention(sizes: TunedSizes, device: str) -> Iterator[Tunable]:
    most = max(sizes.attention)
    for dim, heads in ((128, sizes.attention_heads), (64, 2 * sizes.attention_heads)):
        for causal in (False, True):
            for tokens in sizes.attention:

                def make(tokens: int = tokens, dim: int = dim, heads: int = heads, causal: bool = causal) -> Any:
                    shape = most // tokens, heads, tokens, dim
                    given = [random_tensor(*shape, device=device, grad=False) for _ in range(3)]
                    return lambda: kernels.attention(*given, causal=causal)

                where = near_of(tokens)
                if tokens == most:
                    where = where._replace(up_to=MANY)
                yield Tunable(
                    kernel=attention_tuning.sm90_table_key(dim, causal),
                    operation="attention",
                    where=where,
                    candidates=attention_tuning.sm90_candidates(dim, causal),
                    make=make,
                    least_bytes=8 * most * heads * dim,
                )


def _portable_attention(sizes: TunedSizes, device: str) -> Iterator[Tunable]:
    """The kernels in plain Triton, each through the pass that it is in, at a size that fills a GPU."""
    tokens = sizes.portable_attention
    for dim, heads in ((128, sizes.attention_heads), (64, 2 * sizes.attention_heads)):
        for causal in (False, True):

            def make(wanted: Sequence[int], dim: int = dim, heads: int = heads, causal: bool = causal) -> Any:
                given = [
                    random_tensor(1, heads, tokens, dim, device=device, grad=number in wanted) for number in range(3)
                ]
                if not wanted:
                    return lambda: portable(*given, causal)
                result = portable(*given, causal)
                above = torch.randn_like(result)
                leaves = [given[number] for number in wanted]
                return lambda: torch.autograd.grad(result, leaves, above, retain_graph=True)

            for kernel, wanted in (("forward", ()), ("keys", (1, 2)), ("queries", (0,))):
                name = f"attention_{kernel}"
                yield Tunable(
                    kernel=attention_tuning.tile_table_key(name, causal),
                    operation="portable_attention",
                    where=near_of(dim),
                    candidates=attention_tuning.candidates(name, dim),
                    make=lambda wanted=wanted, make=make: make(wanted),  # type: ignore[misc]
                    least_bytes=8 * tokens * heads * dim,
                )


SOURCE = Path(__file__).resolve().parents[2] / "src"
ROUNDS = 4
MOST = 16
"""Candidates of an entry that are measured, at most."""
TOGETHER = 4
"""Candidates that a process compiles before it looks for others."""
COMPILE_SECONDS = 170.0
REHEARSED_BYTES = 2**18
"""Of spread cells that are rehearsed."""
FULL_BYTES = 2**35
"""Of memory that torch holds."""
MARGIN = 0.005
"""A candidate must be faster than the default by this share."""
SAME = 2e-2
REPEATS = 3
"""How often a candidate must give the same to the last bit: some products of many warps do not."""


def wanted_tunables(
    operations: Sequence[str] | None, at: Sequence[int] | None = None, variant: str | None = None, **given: Any
) -> list[Tunable]:
    """Those of these operations, and of kernels by name, and of these sizes.

    With a variant, only candidates of it, and what the table has now.
    """

    wanted = [
        one
        for one in tunables(**given)
        if (operations is None or one.operation in operations or one.kernel in operations)
        and (at is None or one.where.size in at)
    ]
    if variant is None:
        return wanted
    return [
        replace(one, candidates=some + _present(one))
        for one in wanted
        if (some := [candidate for candidate in one.candidates if candidate.get("variant") == variant])
    ]


def _present(tunable: Tunable) -> list[dict[str, Any]]:
    """What the table has for an entry."""
    import torch

    from nearpeak.kernels._runtime.tuning import tuned

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    config = tuned(tunable.kernel, tunable.where.size, device)
    return [] if config is None else [config]


def spread(candidates: Sequence[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """As many as allowed, from the first to the last."""
    if len(candidates) <= most:
        return list(candidates)
    step = (len(candidates) - 1) / max(most - 1, 1)
    return [candidates[round(number * step)] for number in range(most)]


def using(kernel: str, candidate: dict[str, Any] | None) -> None:
    """From now on a kernel is launched with this candidate, whatever its size; None: by its heuristic."""
    from nearpeak.kernels._runtime import tuning as _runtime_tuning

    table = _runtime_tuning._table(_generation())
    _runtime_tuning.BUSY_WARPS = BUSY_WARPS if candidate is None else 0  # whatever the number of rows, too
    if candidate is None:
        table.pop(kernel, None)
    else:
        table[kernel] = [{"up_to": float("inf"), **candidate}]
    _runtime_tuning._tuned.cache_clear()


def _generation() -> int:
    import torch

    if not torch.cuda.is_available():
        return 90
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def compile_jobs(
    wanted: Sequence[Tunable], most: int
) -> Iterator[tuple[str, Callable[[], dict[str, Callable[[], Any]]]]]:
    """All candidates, some at a time."""
    for number, tunable in enumerate(wanted):
        candidates = spread(tunable.candidates, most)
        for first in range(0, len(candidates), TOGETHER):
            some = dict(enumerate(candidates[first : first + TOGETHER], first))
            also = first == 0
            yield f"{number}-{first}", lambda tunable=tunable, some=some, also=also: _steps(tunable, some, also)  # type: ignore[misc]


def _steps(
    tunable: Tunable, candidates: dict[int, dict[str, Any]], default: bool = False
) -> dict[str, Callable[[], Any]]:
    from nearpeak.kernels._runtime import tuning as _runtime_tuning

    _runtime_tuning._table.cache_clear()  # what another job left there
    using(tunable.kernel, None)
    way = tunable.make()
    steps = {"default": _with(tunable.kernel, None, way)} if default else {}
    return steps | {str(number): _with(tunable.kernel, candidate, way) for number, candidate in candidates.items()}


def compiled(tunable: Tunable, number: int, most: int, jobs: Jobs | None) -> tuple[list[Any], list[Any]]:
    """The candidates that can be measured, and those that failed with why."""
    done, failed = [], []
    for place, candidate in enumerate(spread(tunable.candidates, most)):
        name = f"{number}-{place // TOGETHER * TOGETHER}"
        outcome = DONE if jobs is None else jobs.outcome(name, "all") or jobs.outcome(name, str(place))
        if outcome == DONE:
            done.append(candidate)
        else:
            failed.append({"candidate": candidate, "why": outcome or "was not compiled in time"})
    return done, failed


def measured(tunable: Tunable, candidates: Sequence[dict[str, Any]], rounds: int = ROUNDS) -> dict[str, Any]:
    """The times of candidates of one entry, the fastest first."""
    from benchmarks.kernels.timing import in_turns

    using(tunable.kernel, None)
    way = tunable.make()
    right = _tensors(way())
    if tunable.kernel == "adamw":
        right = []
    ways: dict[str, Callable[[], Any]] = {"default": _with(tunable.kernel, None, way)}
    failed = []
    for candidate in candidates:
        one = _with(tunable.kernel, candidate, way)
        try:
            tensors = _tensors(one())
            if tunable.checked and not all(map(_alike, tensors, right)):
                failed.append({"candidate": candidate, "why": "another result than the default"})
                continue
            if tunable.checked and right and not all(_repeats(tensors, one) for _ in range(REPEATS)):
                failed.append({"candidate": candidate, "why": "another result in each run"})
                continue
        except Exception as error:
            failed.append({"candidate": candidate, "why": str(error)[:200]})
            continue
        ways[json.dumps(candidate)] = one
    del right
    seconds = in_turns(ways, rounds, may_wait=False)
    using(tunable.kernel, None)
    order = sorted(seconds, key=lambda name: seconds[name])
    return {
        "kernel": tunable.kernel,
        **tunable.label,
        **tunable.where._asdict(),
        "default_s": seconds["default"],
        "best_s": seconds[order[0]],
        "best": None if order[0] == "default" else json.loads(order[0]),
        "terabytes_per_second": tunable.least_bytes / seconds[order[0]] / 1e12,
        "seconds": {name: seconds[name] for name in order},
        "failed": failed,
    }


def _with(kernel: str, candidate: dict[str, Any] | None, way: Callable[[], Any]) -> Callable[[], Any]:
    def call() -> Any:
        using(kernel, candidate)
        return way()

    return call


def _tensors(result: Any) -> list[torch.Tensor]:
    if result is None:
        return []
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _repeats(tensors: Sequence[torch.Tensor], way: Callable[[], Any]) -> bool:
    import torch

    return all(map(torch.equal, tensors, _tensors(way())))


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    difference = (one.float() - other.float()).abs().max()
    return bool(difference <= SAME * other.float().abs().max())


def merged(table: dict[str, list[dict[str, Any]]], rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The table with what was measured; a default that nothing beats has no entry."""
    for row in rows:
        entries = {entry["up_to"]: entry for entry in table.get(row["kernel"], [])}
        entries.pop(row["up_to"], None)
        if row["best"] is not None and row["best_s"] < (1 - MARGIN) * row["default_s"]:
            entries[row["up_to"]] = {"above": row["above"], "up_to": row["up_to"], **row["best"]}
        table[row["kernel"]] = [entries[size] for size in sorted(entries)]
    return {kernel: table[kernel] for kernel in sorted(table) if table[kernel]}


def line(row: dict[str, Any]) -> str:
    gained = row["default_s"] / row["best_s"] - 1
    where = row.get("text", row["size"])
    return (
        f"{row['kernel']} {where}: {row['best_s'] * 1e6:.1f} us, {row['terabytes_per_second']:.2f} TB/s, "
        f"{gained * 100:.1f} % over the default, {len(row['seconds']) - 1} measured, {len(row['failed'])} failed: "
        f"{row['best']}"
    )


def tuned_rows(
    wanted: Sequence[Tunable], most: int, jobs: Jobs | None, rounds: int = ROUNDS, limit_seconds: float = float("inf")
) -> Iterator[dict[str, Any]]:
    start = time.perf_counter()
    for number, tunable in enumerate(wanted):
        if time.perf_counter() - start > limit_seconds:
            print(f"{len(wanted) - number} entries are left", file=sys.stderr, flush=True)
            return
        candidates, failed = compiled(tunable, number, most, jobs)
        try:
            row = measured(tunable, candidates, rounds)
        except Exception as error:
            print(f"{tunable.kernel} {tunable.where.size} failed: {error}", file=sys.stderr, flush=True)
            continue
        row["failed"] += failed
        yield row
        if not tunable.label or (torch.cuda.is_available() and torch.cuda.memory_reserved() > FULL_BYTES):
            clean()  # takes longer than an entry of a random cell is measured


def clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, help="the table to renew")
    parser.add_argument("--json", type=Path, help="write all times here")
    parser.add_argument("--operations", help="only these, or kernels, with commas between")
    parser.add_argument("--sizes", help="only these, with commas between")
    parser.add_argument(
        "--rows", help="operations on rows at these, such as 16384x1536,8192x5120, in place of the usual"
    )
    parser.add_argument("--random", help="kernels over rows at cells of these seeds, in place of all")
    parser.add_argument("--spread", help="the same at sizes of all kinds, by these seeds")
    parser.add_argument("--cells", type=int, default=60, help="passes of each seed, of the operations asked for")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of all candidates of an entry")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for measuring")
    parser.add_argument("--variant", help="only candidates of this variant, beside what the table has")
    parser.add_argument("--most", type=int, default=MOST, help="candidates of an entry")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on a CPU too: whether everything runs")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 14), help="that compile; 0: none")
    parser.add_argument("--compile-seconds", type=float, default=COMPILE_SECONDS, help="for compiling, at most")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rehearse and arguments.table and arguments.table.resolve().is_relative_to(SOURCE):
        parser.error("--rehearse is not for the table of the package")
    if (arguments.random or arguments.spread) and arguments.table:
        parser.error("--random and --spread write no table")
    set_caches()
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.rehearse and device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

    from nearpeak import kernels
    from nearpeak.kernels._runtime.replay import ReplayCache

    ReplayCache.enabled = False  # a call that is remembered would not look at another candidate
    sizes = {"sizes": REHEARSAL} if arguments.rehearse else {}
    if arguments.rows:
        shapes = [tuple(map(int, shape.split("x"))) for shape in arguments.rows.split(",")]
        sizes = {"sizes": replace(sizes.get("sizes", TunedSizes()), rows=shapes)}
    operations = arguments.operations.split(",") if arguments.operations else None
    at = [int(size) for size in arguments.sizes.split(",")] if arguments.sizes else None
    if arguments.spread:
        seeds = [int(seed) for seed in arguments.spread.split(",")]
        wanted = spread_tunables(seeds, device, operations)
        if arguments.rehearse:
            wanted = [one for one in wanted if one.least_bytes <= REHEARSED_BYTES]
    elif arguments.random:
        seeds = [int(seed) for seed in arguments.random.split(",")]
        wanted = drawn_tunables(seeds, arguments.cells, device, operations, tiny=arguments.rehearse)
    else:
        wanted = wanted_tunables(operations, at, arguments.variant, device=device, **sizes)
    with kernels.using("require"), own_backends():
        if arguments.work:
            work_through(Jobs(arguments.work), compile_jobs(wanted, arguments.most), clean)
            return 0
        start = time.perf_counter()
        rows = []
        with tempfile.TemporaryDirectory(prefix="nearpeak-jobs-") as folder:
            if arguments.processes:
                command = [sys.executable, "-m", "benchmarks.kernels.tune", "--work", folder]
                command += ["--most", str(arguments.most)]
                command += ["--operations", arguments.operations] if arguments.operations else []
                command += ["--sizes", arguments.sizes] if arguments.sizes else []
                command += ["--rows", arguments.rows] if arguments.rows else []
                command += ["--variant", arguments.variant] if arguments.variant else []
                command += ["--random", arguments.random, "--cells", str(arguments.cells)] if arguments.random else []
                command += ["--spread", arguments.spread] if arguments.spread else []
                command += ["--rehearse"] if arguments.rehearse else []
                took = run_workers(command, arguments.processes, arguments.compile_seconds)
                print(f"compiled in {took:.0f} s", flush=True)
            jobs = Jobs(Path(folder)) if arguments.processes else None
            for row in tuned_rows(wanted, arguments.most, jobs, arguments.rounds, arguments.limit):
                rows.append(row)
                print(f"{time.perf_counter() - start:6.1f} s  {line(row)}", flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
                if arguments.table:  # after each: what was measured is kept if the rest is not
                    table = json.loads(arguments.table.read_text(encoding="utf-8"))
                    arguments.table.write_text(json.dumps(merged(table, rows), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
