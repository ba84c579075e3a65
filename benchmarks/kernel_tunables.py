"""What `benchmarks/tune_kernels.py` measures: every kernel that asks the table, at sizes that stand for others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from kernel_attention_ways import portable
from kernel_cases import KernelCase, random_tensor, row_cases
from kernel_copies import copy_cases
from kernel_measured import backward_ways, forward_ways
from kernel_tunable import FEW, MANY, Config, Tunable, TunedSizes, Where, near_of
from kernel_tunables_products import product_tunables

from nearpeak import kernels
from nearpeak.kernels.jit import (
    activations,
    adamw,
    attention_configs,
    attention_hopper_launch,
    attention_launch,
    cache_append,
    cross_entropy,
    decode,
    dropout,
    gated,
    norms,
    norms_configs,
    permutation,
    quantise,
    rotary,
    softmax_configs,
    transpose,
)
from nearpeak.kernels.jit.norms_configs import table_key

REHEARSAL = TunedSizes.tiny()
"""Sizes at which every kernel runs in a moment, also in Triton's interpreter."""


def tunables(sizes: TunedSizes | None = None, device: str = "cuda") -> Iterator[Tunable]:
    sizes = sizes or TunedSizes()
    yield from _rows(sizes, device)
    yield from _activations(sizes, device)
    yield from _copies(sizes, device)
    for side_bytes, dtype in ((1, torch.int8), (4, torch.float32), (8, torch.float64)):
        yield _transpose(sizes.copies.side, side_bytes, dtype, device)
    yield from _quantised(sizes, device)
    yield from _losses(sizes, device)
    yield from _caches(sizes, device)
    yield from _attention(sizes, device)
    yield from _portable_attention(sizes, device)
    yield from product_tunables(sizes, device)


def _from(case: KernelCase, kernel: str, backward: bool, candidates: list[Config], where: Where) -> Tunable:
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
        yield _from(case, "softmax", False, softmax_configs.candidates(columns), near)
        yield _from(case, "softmax_backward", True, softmax_configs.candidates(columns, backward=True), near)
        yield from _norms([cases[name] for name in ("rms_norm", "layer_norm", "add_rms_norm")], device)
        if number:
            continue
        elements = rows * columns
        # contiguous tensors are one row to these kernels
        flat = Where(elements, FEW, MANY)
        yield _from(cases["swiglu"], "gated_forward", False, gated.candidates(elements), flat)
        yield _from(cases["swiglu"], "gated_backward", True, gated.candidates(elements), flat)
        yield _from(cases["dropout_add"], "dropout_add", False, dropout.candidates(elements), flat)
        heads = cases["rotary"].columns // 128
        yield _from(cases["rotary"], "rotary", False, rotary.candidates(128, heads), near_of(128))


def _norms(cases: Sequence[KernelCase], device: str) -> Iterator[Tunable]:
    """RMSNorm, LayerNorm, RMSNorm after an addition, and LayerNorm after one, which is measured for this alone."""
    alone, centred, added = cases
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
    for case in (alone, centred, added, both):
        is_centred, is_added = case in (centred, both), case in (added, both)
        forward, backward = (table_key(name, is_centred, is_added) for name in ("norm_forward", "norm_backward"))
        yield _from(case, forward, False, norms.candidates(columns), near_of(columns))
        found = norms_configs.candidates(columns, centred=is_centred, added=is_added)
        yield _from(case, backward, True, found, near_of(columns))


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
        for case, kernel, backward in (
            (with_bias, "activation_forward", False),
            (without, "activation_backward", True),
            (with_bias, "activation_backward_bias", True),
        ):
            yield _from(case, kernel, backward, activations.candidates(columns, kernel), near_of(columns))


def _copies(sizes: TunedSizes, device: str) -> Iterator[Tunable]:
    cases = {case.operation: case for case in copy_cases(sizes.copies, device)}
    side, hidden = sizes.copies.side, sizes.copies.hidden
    flat = Where(side * side, FEW, MANY)
    for name, kernel, backward, found in (
        ("permute_tokens", "permute_copy", False, permutation.candidates(hidden)),
        ("unpermute_tokens", "unpermute_sum", False, permutation.candidates(hidden)),
        ("unpermute_tokens", "unpermute_backward", True, permutation.backward_candidates(hidden)),
    ):
        yield _from(cases[name], kernel, backward, found, near_of(hidden))
    elements = cases["adamw bfloat16"].columns
    step = cases["adamw bfloat16"]
    yield _from(step, "adamw", False, adamw.candidates(elements), Where(elements, FEW, MANY))
    found = transpose.candidates(side, 2)
    yield _from(cases["transpose_copy"], "transpose_2", False, found, Where(side, 512, MANY))
    found = quantise.candidates(128)
    yield _from(cases["quantise 1x128"], "quantise_pieces", False, found, Where(128, 64, 128))
    tiles = quantise.other_candidates("quantise_tiles")
    yield _from(cases["quantise 128x128"], "quantise_tiles", False, tiles, near_of(128 * 128))
    whole = quantise.other_candidates("quantise_whole")
    yield _from(cases["quantise tensor"], "quantise_whole", False, whole, flat)
    back = quantise.other_candidates("dequantise")
    yield _from(cases["dequantise 1x128"], "dequantise", False, back, flat)
    yield _from(cases["dequantise 128x128"], "dequantise", False, back, near_of(side))


def _transpose(side: int, side_bytes: int, dtype: torch.dtype, device: str) -> Tunable:
    def make() -> Callable[[], Any]:
        # numbers of any dtype are moved as integers of their size
        x = torch.randint(-128, 128, (side, side * side_bytes), dtype=torch.int8, device=device).view(dtype)
        return lambda: kernels.transpose_copy(x)

    return Tunable(
        kernel=f"transpose_{side_bytes}",
        operation="transpose_copy",
        where=Where(side, 512, MANY),
        candidates=transpose.candidates(side, side_bytes),
        make=make,
        least_bytes=2 * side * side * side_bytes,
        checked=False,  # among random bits are some that are not a number
    )


def _quantised(sizes: TunedSizes, device: str) -> Iterator[Tunable]:
    def entry(rows: int, columns: int, kernel: str, candidates: list[Config], where: Where) -> Tunable:
        def make() -> Callable[[], Any]:
            x = random_tensor(rows, columns, device=device, grad=False)
            return lambda: kernels.quantise(x, block="row")

        return Tunable(
            kernel=kernel,
            operation="quantise",
            candidates=candidates,
            make=make,
            least_bytes=3 * rows * columns,
            where=where,
        )

    for rows, columns in sizes.quantised_rows:
        near = near_of(columns)
        yield entry(rows, columns, "quantise_pieces", quantise.candidates(near.up_to), near)
    rows, columns = sizes.long_rows
    found = quantise.other_candidates("quantise_long_rows")
    yield entry(rows, columns, "quantise_long_rows", found, Where(columns, quantise.LONGEST, MANY))


def _losses(sizes: TunedSizes, device: str) -> Iterator[Tunable]:
    for number, (rows, columns) in enumerate(sizes.losses):
        is_last = number == len(sizes.losses) - 1
        near = near_of(columns)
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
            kernel="cross_entropy",
            operation="cross_entropy",
            candidates=cross_entropy.candidates(columns),
            make=mean,
            least_bytes=4 * rows * columns,
            where=near,
        )
        if is_last:
            yield Tunable(
                kernel="cross_entropy_gradient",
                operation="cross_entropy",
                where=Where(columns, cross_entropy.WHOLE, MANY),
                candidates=[
                    {"elements": elements, "warps": warps}
                    for elements in (2048, 4096, 8192, 16384)
                    for warps in (4, 8, 16)
                    if 8 <= elements // (32 * warps) <= 64
                ],
                make=by_rows,
                least_bytes=4 * rows * columns,
            )


def _caches(sizes: TunedSizes, device: str) -> Iterator[Tunable]:
    batch, key_heads, capacity, dim = sizes.cache
    row, near = 2 * dim, near_of(2 * dim)

    def attend(heads: int, page_size: int | None) -> Callable[[], Any]:
        cache = kernels.KVCache.create(batch, capacity, key_heads, dim, torch.bfloat16, device, page_size)
        for tensor in (cache.keys, cache.values):
            tensor.normal_()
        if cache.pages is not None:
            cache.pages.copy_(torch.randperm(cache.pages.numel(), device=device).view(cache.pages.shape))
        cache.lengths.fill_(capacity)
        query = random_tensor(batch, heads, 1, dim, device=device, grad=False)
        return lambda: cache.attend(query)

    def write() -> Callable[[], Any]:
        cache = kernels.KVCache.create(batch, capacity, key_heads, dim, torch.bfloat16, device)
        key, query = (random_tensor(batch, heads, 1, dim, device=device, grad=False) for heads in (key_heads, 32))
        angles = random_tensor(capacity, dim // 2, device=device, grad=False)
        options = {"cosines": angles, "sines": angles, "query": query}
        return lambda: kernels.append(cache.keys, cache.values, key, key, cache.lengths, **options)

    for alone, page_size in ((False, None), (False, 16), (True, None), (True, 16)):
        heads = key_heads if alone else 4 * key_heads
        yield Tunable(
            kernel=("decode_row" if alone else "decode") + ("" if page_size is None else "_paged"),
            operation="decode_attention",
            where=near,
            candidates=decode.candidates(row, alone, page_size is not None),
            make=lambda heads=heads, page_size=page_size: attend(heads, page_size),  # type: ignore[misc]
            least_bytes=2 * batch * key_heads * capacity * row,
        )
    yield Tunable(
        kernel="cache_append",
        operation="append",
        where=near_of(dim),
        candidates=cache_append.candidates(dim, key_heads),
        make=write,
        least_bytes=2 * batch * (2 * key_heads + 32) * row,
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
                    kernel=attention_hopper_launch.kernel_name(dim, causal),
                    operation="attention",
                    where=where,
                    candidates=attention_hopper_launch.candidates(dim, causal),
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
                    kernel=attention_launch.kernel_name(name, causal),
                    operation="portable_attention",
                    where=near_of(dim),
                    candidates=attention_configs.candidates(name, dim),
                    make=lambda wanted=wanted, make=make: make(wanted),  # type: ignore[misc]
                    least_bytes=8 * tokens * heads * dim,
                )
