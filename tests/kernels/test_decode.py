"""`decode_attention`, `append` and `KVCache`."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE, DTYPES, assert_as_exact
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from nearpeak import kernels
from nearpeak.errors import KernelUnavailable, UsageError

pytest.importorskip("triton")
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2


def config(**settings):
    from nearpeak.kernels.decode.tuning import DecodeConfig

    return DecodeConfig(**{"block": 16, "warps": 4, "stages": 2, "programs": 2, **settings})


def random_tensor(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def angles(length, pairs, twice=None):
    table = torch.arange(length, device=DEVICE)[:, None] * 0.7 ** torch.arange(pairs, device=DEVICE)
    if twice is not None:
        table = table.repeat_interleave(2, -1) if twice else torch.cat((table, table), -1)
    return table.cos(), table.sin()


def paged(cache, page, seed=0):
    """A cache in pages that are shuffled, with others between them that nobody may read, and their table."""
    batch, heads, capacity, dim = cache.shape
    each = -(-capacity // page)
    order = torch.randperm(2 * batch * each, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    table = order[: batch * each].view(batch, each)
    pages = torch.full((2 * batch * each, page, heads, dim), math.nan, device=DEVICE).to(cache.dtype)
    rows = torch.full((batch, each * page, heads, dim), math.nan, device=DEVICE).to(cache.dtype)
    rows[:, :capacity] = cache.transpose(1, 2)
    pages[table] = rows.view(batch, each, page, heads, dim)
    return pages, table.int()


def assert_attends(query, keys, values, lengths, kernel=None, **options):
    """The kernel's result and logarithms against those of the reference in float64."""
    with kernels.using("require"):
        run = kernel or kernels.decode_attention
        actual = run(query, keys, values, lengths, return_lse=True, **options)
    wide = {
        name: one.double() if isinstance(one, torch.Tensor) and one.is_floating_point() else one
        for name, one in options.items()
    }
    plain = kernels.decode_attention.reference
    exact = plain(query.double(), keys.double(), values.double(), lengths, return_lse=True, **wide)
    low = plain(query, keys, values, lengths, return_lse=True, **options)
    for name, *parts in zip(("result", "lse"), actual, exact, low, strict=True):
        assert_as_exact(*parts, name, by_exp=True)
    return actual


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "key_heads", "new"), [(2, 2, 1), (4, 2, 1), (8, 1, 1), (2, 1, 3), (3, 1, 16), (8, 1, 9)]
)
def test_groups_tokens_and_lengths(heads, key_heads, new, dtype):
    lengths = ints(50, 0, 1, 17)
    keys, values = (
        random_tensor(4, key_heads, 50, 24, dtype=dtype),
        random_tensor(4, key_heads, 50, 40, dtype=dtype, seed=1),
    )
    result, lse = assert_attends(random_tensor(4, heads, new, 24, dtype=dtype, seed=2), keys, values, lengths)
    assert not result[1].any()
    assert (lse[1] == -math.inf).all()


@pytest.mark.slow
@pytest.mark.parametrize(("page", "splits"), [(None, 1), (None, 7), (1, 2), (3, 7), (16, 2)])
def test_splits_and_pages(page, splits):
    from nearpeak.kernels._runtime.grid_counters import grid_counters
    from nearpeak.kernels.decode import triton as decode_triton

    def kernel(query, keys, values, lengths, return_lse, pages=None, sinks=None):
        options = (0.0, sinks, 1.0, None, 1.0, None)
        return decode_triton.decode_attention(
            query, keys, values, lengths, pages, 8**-0.5, -1, *options, config=config(splits=splits)
        )

    lengths, pages = ints(70, 17), None
    keys, values = random_tensor(2, 2, 70, 8), random_tensor(2, 2, 70, 8, seed=1)
    if page is not None:
        (keys, pages), (values, _) = paged(keys, page), paged(values, page)
    for heads, new in ((2, 1), (4, 2)):
        sinks = random_tensor(heads, seed=3)
        assert_attends(random_tensor(2, heads, new, 8, seed=2), keys, values, lengths, kernel, pages=pages, sinks=sinks)
    assert not grid_counters(1024, lengths.device).any()  # for those that come next


def test_programs_that_do_not_fill_a_wave_are_in_few_waves():
    """More waves would keep all multiprocessors busy to the end; each of them takes its time to start."""
    from nearpeak.kernels.decode import tuning

    one = tuning.DecodeConfig(block=128, warps=4, stages=3, programs=1)

    def chosen(programs, tokens, config=one):
        most, token_bytes = tokens // 256, 512
        config = tuning.faster_of((config, config.halved()), programs, most, token_bytes, tokens, 132)
        slots, in_flight = 132 * config.programs, config.bytes_in_flight(token_bytes)
        return config.programs, tuning.choose_splits(programs, slots, most, tokens * token_bytes, in_flight)

    assert chosen(105, 2816) == chosen(112, 28544) == (1, 1), "memory has its bandwidth for 105 programs too"
    assert chosen(156, 10236) == (2, 1), "all at a time, and not 24 in a second wave"
    assert chosen(64, 45136) == (1, 2), "a full wave"
    assert chosen(1, 131072) == (1, 132)
    assert chosen(48, 11392)[1] > 1, "too few bytes on their way"
    assert (one.halved().block, one.halved().warps) == (64, 4)
    assert tuning.launch_seconds(264, 132, 2**20, 2**17) > tuning.launch_seconds(132, 132, 2**21, 2**17)


def test_any_number_of_splits_gives_about_the_same():
    query, keys, values = (
        random_tensor(1, 1, 1, 16),
        random_tensor(1, 1, 130, 16, seed=1),
        random_tensor(1, 1, 130, 16, seed=2),
    )
    from nearpeak.kernels.decode import triton as decode_triton

    rest = (None, 0.25, -1, 0.0, None, 1.0, None, 1.0, None)
    results = [
        decode_triton.decode_attention(query, keys, values, ints(130), *rest, config=config(splits=splits))[0]
        for splits in (1, 3, 9)
    ]
    for one in results[1:]:
        torch.testing.assert_close(one, results[0], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@given(
    st.sampled_from([(1, 1), (2, 1), (1, 3), (5, 2)]),
    st.integers(1, 3),
    st.sampled_from([1, 7, 16, 33]),
    st.sampled_from([4, 16, 20]),
    st.sampled_from(DTYPES),
    st.sampled_from([None, 1, 3, 16]),
    st.sampled_from([None, 0, 1, 5, 100]),
    st.sampled_from([None, 0.5, 30.0]),
    st.booleans(),
    st.data(),
)
@settings(max_examples=10)
def test_options(group_and_new, key_heads, capacity, dim, dtype, page, window, softcap, has_sinks, data):
    group, new = group_and_new
    lengths = ints(*(data.draw(st.integers(0, capacity)) for _ in range(2)))
    query = random_tensor(2, group * key_heads, new, dim, dtype=dtype)
    keys, values = (
        random_tensor(2, key_heads, capacity, dim, dtype=dtype, seed=1),
        random_tensor(2, key_heads, capacity, 8, dtype=dtype),
    )
    options = {"window": window, "softcap": softcap, "sinks": random_tensor(group * key_heads) if has_sinks else None}
    if page is not None:
        (keys, options["pages"]), (values, _) = paged(keys, page), paged(values, page)
    assert_attends(query, keys, values, lengths, **options)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [2, 4])
def test_strides(heads):
    query, lengths = random_tensor(3, 1, heads, 16).transpose(1, 2), ints(30, 30, 9)[[0, 2, 1]]
    tokens_first = [random_tensor(3, 33, 2, 16, seed=seed).transpose(1, 2) for seed in (1, 2)]
    packed = random_tensor(3, 2, 33, 32, seed=3).chunk(2, -1)
    apart = [one[..., ::2] for one in random_tensor(3, 2, 33, 64, seed=4).chunk(2, -1)]
    expanded = [random_tensor(1, 2, 33, 16, seed=seed).expand(3, -1, -1, -1) for seed in (5, 6)]
    odd = [random_tensor(3, 2, 33, 17, seed=seed)[..., 1:] for seed in (7, 8)]
    for keys, values in (tokens_first, packed, apart, expanded, odd):
        assert_attends(query, keys, values, lengths)
    assert_attends(random_tensor(3, heads, 1, 32)[..., ::2], *tokens_first, lengths.long())


def test_what_lies_behind_the_end_does_not_matter():
    keys, values = random_tensor(2, 2, 40, 16), random_tensor(2, 2, 40, 16, seed=1)
    for cache in (keys, values):
        cache[0, :, 20:], cache[1, :, 3:] = math.nan, math.inf
    for heads in (2, 6):
        assert_attends(random_tensor(2, heads, 1, 16, seed=2), keys, values, ints(20, 3))
    with kernels.using("require"):
        pages = ints(0, -7, 1, 99).view(2, 2)
        shape = (4, 20, 2, 16)
        result = kernels.decode_attention(
            random_tensor(2, 2, 1, 16), random_tensor(*shape), random_tensor(*shape), ints(20, 20), pages=pages
        )
    assert result.isfinite().all()


def test_rows_of_several_tiles():
    keys, values = random_tensor(2, 1, 20, 8), random_tensor(2, 1, 20, 8, seed=1)
    assert_attends(random_tensor(2, 12, 11, 8, seed=2), keys, values, ints(20, 12))


@pytest.mark.parametrize(("page", "dtype"), [(None, torch.float32), (16, torch.bfloat16)], ids=str)
def test_many_new_tokens(page, dtype):
    """More than the kernel of this operation takes: by another, over the same cache."""
    lengths, options = ints(40, 5), {"window": 9, "softcap": 20.0, "sinks": random_tensor(2, seed=3)}
    keys, values = (random_tensor(2, 1, 40, 16, dtype=dtype, seed=seed) for seed in (1, 2))
    for cache in (keys, values):
        cache[1, :, 5:] = math.nan
    if page is not None:
        (keys, options["pages"]), (values, _) = paged(keys, page), paged(values, page)
    query = random_tensor(2, 2, 17, 16, dtype=dtype)
    assert_attends(query, keys, values, lengths, **options)
    eights = [cache.nan_to_num().to(E4M3) for cache in (keys, values)]
    scales = {"key_scale": random_tensor(1).abs() + 0.5, "value_scale": 0.3, "pages": options.get("pages")}
    with kernels.using("require"):
        actual = kernels.decode_attention(query, *eights, lengths, **scales)
    expected = kernels.decode_attention.reference(query, *eights, lengths, **scales)
    torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.02)


def test_many_new_tokens_of_caches_of_all_kinds():
    query, lengths = random_tensor(2, 2, 17, 8), ints(20, 19)
    tokens_first = [random_tensor(2, 33, 2, 8, seed=seed).transpose(1, 2) for seed in (1, 2)]
    expanded = [random_tensor(1, 2, 33, 8, seed=seed).expand(2, -1, -1, -1) for seed in (5, 6)]
    unlike = [tokens_first[0], random_tensor(2, 2, 33, 8, seed=4)]
    for keys, values in (tokens_first, expanded, unlike):
        assert_attends(query, keys, values, lengths)


@pytest.mark.parametrize(("heads", "page", "kind"), [(2, 3, E4M3), (4, None, E4M3), (4, 8, E5M2)])
def test_fp8(heads, page, kind):
    scales = torch.tensor([0.5, 0.25], device=DEVICE)
    keys, values = (random_tensor(2, 2, 40, 16, seed=seed, dtype=kind) for seed in (1, 2))
    pages = None
    if page is not None:
        bits, pages = paged(keys.view(torch.int8).float().nan_to_num(), page)
        keys = bits.nan_to_num().to(torch.int8).view(kind)
        values = paged(values.view(torch.int8).float(), page)[0].nan_to_num().to(torch.int8).view(kind)
    for dtype, key_scale, value_scale in zip(DTYPES, (0.3, scales, scales[0]), (scales, 2.0, scales[1]), strict=True):
        options = {"pages": pages, "key_scale": key_scale, "value_scale": value_scale}
        assert_attends(random_tensor(2, heads, 1, 16, dtype=dtype), keys, values, ints(40, 11), **options)


@pytest.mark.parametrize(
    ("heads", "new", "page", "kind"),
    [(4, 1, None, torch.bfloat16), (1, 1, 3, torch.float16), (20, 1, 16, E4M3), (2, 3, None, E5M2), (2, 2, 8, E4M3)],
    ids=str,
)
def test_values_that_are_columns_of_keys(heads, new, page, kind):
    """As in multi-head latent attention: one head of keys, and a few columns more than values."""
    keys, pages = random_tensor(2, 1, 40, 24, seed=1, dtype=kind), None
    if page is not None:
        bits, pages = paged(keys.view(torch.int8 if keys.element_size() == 1 else torch.int16).float(), page)
        keys = bits.nan_to_num().to(torch.int8 if keys.element_size() == 1 else torch.int16).view(kind)
    query = random_tensor(2, heads, new, 24, dtype=kind if keys.element_size() == 2 else torch.bfloat16)
    options = {"pages": pages, "key_scale": 0.5 if keys.element_size() == 1 else None}
    actual = kernels.decode_attention(query, keys, 16, ints(40, 11), **options)
    separate = (
        keys[..., :16].view(torch.uint8).clone().view(kind) if keys.element_size() == 1 else keys[..., :16].clone()
    )
    options["value_scale"] = options["key_scale"]
    for other in (separate, keys[..., :16]):
        expected = kernels.decode_attention.reference(query.float(), keys, other, ints(40, 11), **options)
        torch.testing.assert_close(actual.float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.bfloat16, E4M3])
def test_latent_attention_at_its_size(kind):
    keys = random_tensor(1, 1, 70, 576, seed=1, dtype=kind)
    query = random_tensor(1, 16, 1, 576, dtype=torch.bfloat16)
    with kernels.using("require"):
        actual = kernels.decode_attention(query, keys, 512, ints(70))
    expected = kernels.decode_attention.reference(query.double(), keys, 512, ints(70))
    torch.testing.assert_close(actual.double(), expected, rtol=0.02, atol=0.02)


def test_values_that_are_columns_of_keys_and_what_kernels_do_not_take():
    query, keys = random_tensor(1, 2, 1, 700, dtype=torch.bfloat16), random_tensor(1, 1, 9, 700, dtype=torch.bfloat16)
    assert "up to 512" in kernels.supports(kernels.decode_attention, query, keys, 640, ints(9)).reason
    assert "16 bits" in kernels.supports(kernels.decode_attention, query.float(), keys.float(), 600, ints(9)).reason
    for value in (0, 700):
        with pytest.raises(UsageError, match="columns of keys"):
            kernels.decode_attention(query, keys, value, ints(9))
    with pytest.raises(UsageError, match="no value_scale"):
        kernels.decode_attention(query, keys, 512, ints(9), value_scale=2.0)


def test_fp8_that_does_not_come_in_pairs():
    odd = [random_tensor(2, 2, 20, 17, seed=seed, dtype=E4M3)[..., 1:] for seed in (1, 2)]
    apart = [random_tensor(2, 2, 20, 32, seed=seed, dtype=E4M3)[..., ::2] for seed in (1, 2)]
    for keys, values in (odd, apart):
        assert_attends(random_tensor(2, 4, 1, 16, dtype=torch.bfloat16), keys, values, ints(20, 7))
    assert_attends(random_tensor(2, 4, 1, 16, dtype=torch.float16), odd[0], odd[1][..., 1:], ints(20, 7))


@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_all_numbers_of_fp8(kind):
    """As values of one key, with a weight of 1; also infinities, and what is no number."""
    numbers = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(kind).view(1, 1, 1, 256)
    keys = torch.zeros(1, 1, 1, 16, device=DEVICE).to(kind)
    with kernels.using("require"):
        result = kernels.decode_attention(random_tensor(1, 2, 1, 16, dtype=torch.bfloat16), keys, numbers, ints(1))
    expected = numbers.to(torch.bfloat16).expand(-1, 2, -1, -1)
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


def test_fp8_and_queries_of_any_size():
    keys, values = (random_tensor(1, 1, 20, 16, seed=seed, dtype=E4M3) for seed in (1, 2))
    query, results = random_tensor(1, 2, 1, 16, dtype=torch.bfloat16), []
    for power in (0, 90, -90):
        with kernels.using("require"):
            scale = 0.25 * 2.0**-power
            results.append(kernels.decode_attention(query * 2.0**power, keys, values, ints(20), scale=scale))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("kind", [E4M3, torch.float16])
def test_many_small_weights_count(kind):
    """Of each 2**-27, which float16 does not have, and together 2**-15."""
    from nearpeak.kernels.decode import triton as decode_triton

    keys, values = torch.zeros(1, 1, 4097, 16, device=DEVICE), torch.zeros(1, 1, 4097, 16, device=DEVICE)
    keys[:, :, 0], values[:, :, 1:] = 1.0, 1.0
    query = torch.ones(1, 2, 1, 16, dtype=torch.float16, device=DEVICE)
    scale, rest = 27.0 * math.log(2.0) / 16, (-1, 0.0, None, 1.0, None, 1.0, None)
    settings = config(block=128, splits=3)
    result, _ = decode_triton.decode_attention(
        query, keys.to(kind), values.to(kind), ints(4097), None, scale, *rest, config=settings
    )
    torch.testing.assert_close(result, torch.full_like(result, 2.0**-15), rtol=0.01, atol=0)


def test_mixed_dtypes():
    keys, values = (
        random_tensor(2, 1, 20, 16, dtype=torch.bfloat16),
        random_tensor(2, 1, 20, 16, dtype=torch.bfloat16, seed=1),
    )
    for heads in (1, 2):
        assert_attends(random_tensor(2, heads, 1, 16), keys, values, ints(20, 7))
        assert_attends(random_tensor(2, heads, 1, 16, dtype=torch.bfloat16), keys.float(), values.float(), ints(20, 7))


def test_offsets_of_64_bits():
    """Strides of a cache so large that offsets pass 2**31; memory of which only few rows are touched."""
    far = 2**31 // 4 + 8  # in the fifth row the offset is beyond 2**31
    memory = torch.empty(6 * far, dtype=E4M3, device=DEVICE)  # what nobody touches takes no memory of a CPU
    cache = torch.as_strided(memory, (1, 1, 6, 16), (6 * far, 6 * far, far, 1))
    cache.view(torch.uint8).copy_(random_tensor(1, 1, 6, 16, dtype=E4M3).view(torch.uint8))
    for heads in (1, 2):
        assert_attends(random_tensor(1, heads, 1, 16), cache, cache, ints(6))
    in_pages, table = cache.view(6, 1, 1, 16), ints(0, 1, 2, 3, 4, 5)[None, :]
    for query in (random_tensor(1, 1, 1, 16), random_tensor(1, 2, 1, 16, dtype=torch.bfloat16)):
        assert_attends(query, in_pages, in_pages, ints(6), pages=table)
    new = random_tensor(1, 1, 1, 16, seed=3)
    with kernels.using("require"):
        kernels.append(cache, cache, new, new, ints(5))
    assert torch.equal(cache[0, 0, 5].float(), new[0, 0, 0].to(E4M3).float())


def assert_appends(cache_dtype, page, new, *, query=True, seed=0, dtype=torch.float32, dims=(8, 5), **options):
    """Caches and the query against those of the reference; both begin alike."""
    key_dim, value_dim = dims
    lengths = ints(0, 5, 18)
    key, value = (
        random_tensor(3, 2, new, key_dim, seed=seed, dtype=dtype),
        random_tensor(3, 2, new, value_dim, seed=seed + 1, dtype=dtype),
    )
    query = random_tensor(3, 4, new, key_dim, seed=seed + 2, dtype=dtype) if query else None
    results = []
    for mode in ("require", "off"):
        caches = [torch.zeros(3, 2, 20, size, device=DEVICE).to(cache_dtype) for size in dims]
        pages = None
        if page is not None:
            caches = [torch.zeros(24, page, 2, size, device=DEVICE).to(cache_dtype) for size in dims]
            pages = torch.randperm(24, generator=torch.Generator().manual_seed(1)).view(3, 8).int().to(DEVICE)
        with kernels.using(mode):
            rotated = kernels.append(*caches, key, value, lengths, pages=pages, query=query, **options)
        results.append((*caches, rotated))
    for actual, expected in zip(*results, strict=True):
        if actual is None:
            assert expected is None
        elif actual.dtype == E4M3:
            assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
        else:
            torch.testing.assert_close(actual, expected, rtol=torch.finfo(actual.dtype).eps, atol=1e-6)
    assert results[0][0].float().any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache_dtype", "page", "interleaved"),
    [(torch.float32, None, False), (torch.bfloat16, 3, True), (E4M3, None, True), (E4M3, 1, False)],
    ids=str,
)
def test_append(cache_dtype, page, interleaved):
    """Behind 18 tokens there is room for 2 where there are no pages, for none where they are of 1."""
    scales = torch.tensor([0.5, 0.3], device=DEVICE)
    cosines, sines = angles(40, 4)
    options = {"cosines": cosines, "sines": sines, "interleaved": interleaved}
    assert_appends(cache_dtype, page, 3, key_scale=scales, value_scale=0.7, **options)
    options["cosines"], options["sines"] = angles(40, 4, interleaved)
    assert_appends(cache_dtype, page, 1, key_scale=0.1, dtype=torch.bfloat16, **options)
    assert_appends(cache_dtype, page, 2, query=False, dims=(12, 16), rotary_dim=8, **options)
    assert_appends(cache_dtype, page, 1)


def test_append_rotates_as_rotary_does():
    cosines, sines = angles(40, 4)
    key, query, lengths = random_tensor(3, 2, 2, 8), random_tensor(3, 4, 2, 8, seed=1), ints(0, 5, 18)
    caches = [torch.zeros(3, 2, 20, 8, device=DEVICE) for _ in range(2)]
    rotated = kernels.append(*caches, key, key, lengths, cosines=cosines, sines=sines, query=query)
    positions = lengths[:, None] + torch.arange(2, device=DEVICE)
    options = {"positions": positions, "seq_dim": -2}
    torch.testing.assert_close(rotated, kernels.rotary(query, cosines, sines, **options))
    for sequence, length in enumerate(lengths.tolist()):
        expected = kernels.rotary(key, cosines, sines, **options)[sequence]
        torch.testing.assert_close(caches[0][sequence, :, length : length + 2], expected)
        assert torch.equal(caches[1][sequence, :, length : length + 2], key[sequence])


def test_append_to_strides_of_all_kinds():
    key, value, lengths = (
        random_tensor(2, 4, 2, 8).transpose(1, 2),
        random_tensor(2, 2, 4, 16, seed=1)[..., ::2],
        ints(3, 5),
    )
    for layout in (lambda x: x, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: x[..., ::2]):
        results = []
        for mode in ("require", "off"):
            caches = [layout(torch.zeros(2, 2, 9, 16, device=DEVICE)) for _ in range(2)]
            caches = [cache[..., :8] for cache in caches]
            with kernels.using(mode):
                kernels.append(*caches, key, value, lengths)
            results.append(caches)
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_pages_that_do_not_exist_are_not_written():
    cache, key = torch.zeros(4, 2, 1, 4, device=DEVICE), random_tensor(2, 1, 2, 4)
    with kernels.using("require"):
        kernels.append(cache, cache.clone(), key, key, ints(0, 0), pages=ints(-1, 99)[:, None])
    assert not cache.any()


@pytest.mark.slow
@pytest.mark.parametrize("page", [None, 4])
def test_generating_with_a_cache_is_attention_to_all_before(page):
    """Tokens come one by one and in groups, and see what a causal attention of all of them sees."""
    tokens, heads, key_heads, dim = 19, 4, 2, 16
    query, key, value = (
        random_tensor(2, heads, tokens, dim),
        random_tensor(2, key_heads, tokens, dim, seed=1),
        random_tensor(2, key_heads, tokens, 8),
    )
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    cache = kernels.KVCache.create(2, 20, key_heads, dim, device=DEVICE, page_size=page, value_dim=8)
    first = 0
    for new in (7, 1, 1, 4, 6):
        part = slice(first, first + new)
        cache.append(key[:, :, part], value[:, :, part])
        torch.testing.assert_close(cache.attend(query[:, :, part]), expected[:, :, part], rtol=1e-4, atol=1e-5)
        first += new
    assert cache.lengths.tolist() == [19, 19]
    assert cache.fits(1)
    assert not cache.fits(2)


def test_a_full_cache_says_so():
    cache, key = kernels.KVCache.create(2, 4, 1, 8, device=DEVICE), random_tensor(2, 1, 3, 8)
    cache.append(key, key)
    with pytest.raises(UsageError, match="room for 4 tokens per sequence, holds up to 3, and 3 are to be appended"):
        cache.append(key, key)
    cache.truncate([1, 3])
    assert cache.lengths.tolist() == [1, 3]
    assert not cache.fits(2)
    cache.reset([1])
    assert cache.lengths.tolist() == [1, 0]
    cache.append(key, key)
    assert cache.lengths.tolist() == [4, 3]
    cache.truncate(ints(2, 1))
    assert cache.lengths.tolist() == [2, 1]
    cache.reset()
    assert cache.lengths.tolist() == [0, 0]
    assert cache.fits(4)


def test_a_cache_in_fp8():
    query, key, value = (
        random_tensor(2, 4, 3, 16),
        random_tensor(2, 2, 3, 16, seed=1),
        random_tensor(2, 2, 3, 16, seed=2),
    )
    options = {"key_scale": 0.01, "value_scale": torch.tensor([0.01, 0.02], device=DEVICE)}
    cache = kernels.KVCache.create(2, 8, 2, 16, E4M3, DEVICE, page_size=2, **options)
    cache.append(key, value)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(cache.attend(query), expected, rtol=0.1, atol=0.1)


@pytest.mark.slow
def test_operators():
    query, keys, lengths = random_tensor(2, 4, 2, 8), random_tensor(2, 2, 10, 8, seed=1), ints(10, 3)
    decode = torch.ops.nearpeak.decode_attention.default
    opcheck(decode, (query, keys, keys + 1, lengths, None, 0.3, -1, 0.0, None, 1.0, None, 1.0, None))
    pages = ints(0, 1, 2, 3).view(2, 2)
    scales = random_tensor(2).abs() + 1
    in_pages = random_tensor(4, 5, 2, 8)
    some = {"test_utils": ("test_schema", "test_faketensor")}  # the rest takes long, and does not depend on arguments
    paged_arguments = (lengths, pages, 0.3, 4, 9.0, random_tensor(4), 2.0, scales, 1.0, scales)
    opcheck(decode, (query, in_pages, in_pages + 1, *paged_arguments), **some)
    key, (cosines, sines) = random_tensor(2, 2, 2, 8), angles(20, 4)
    rest = (False, 8, 1.0, None, 1.0, scales)
    opcheck(
        torch.ops.nearpeak.append_.default, (keys, keys + 1, key, key + 1, lengths, None, None, None, *rest), **some
    )  # fmt: skip
    opcheck(
        torch.ops.nearpeak.append_with_query_.default,
        (keys, keys + 1, key, key + 1, lengths, None, cosines, sines, *rest, query),
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["require", "off"])
def test_compiled(mode):
    cosines, sines = angles(20, 4)

    def step(cache, query, key):
        query = cache.append(key, key * 2, cosines=cosines, sines=sines, query=query * 2)
        return cache.attend(query) + 1

    query, key = random_tensor(2, 4, 1, 8), random_tensor(2, 2, 1, 8, seed=1)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    caches = [kernels.KVCache.create(2, 16, 2, 8, device=DEVICE) for _ in range(2)]
    with kernels.using(mode):
        for _ in range(4):
            torch.testing.assert_close(compiled(caches[0], query, key), step(caches[1], query, key))
    assert counter.frame_count <= 2  # for a cache that is empty, and for others
    assert caches[0].lengths.tolist() == [4, 4]
    torch.testing.assert_close(caches[0].keys[:, :, :4], caches[1].keys[:, :, :4])


def test_the_reference_has_gradients_and_the_kernel_says_that_it_has_none():
    query, cache = (
        random_tensor(1, 2, 1, 4).double().requires_grad_(),
        random_tensor(1, 1, 6, 4, seed=1).double().requires_grad_(),
    )
    reference = kernels.decode_attention.reference
    assert torch.autograd.gradcheck(lambda query, cache: reference(query, cache, cache, ints(5)), (query, cache))
    narrow = query.detach().float().requires_grad_()
    answer = kernels.supports(kernels.decode_attention, narrow, cache.float(), cache.float(), ints(5))
    assert "no derivatives" in answer.reason
    assert kernels.decode_attention(narrow, cache.float(), cache.float(), ints(5)).requires_grad
    with torch.no_grad():
        assert kernels.supports(kernels.decode_attention, narrow, cache.float(), cache.float(), ints(5))


def test_what_kernels_do_not_take():
    query, cache, lengths = random_tensor(1, 2, 17, 4), random_tensor(1, 2, 20, 4), ints(20)
    for given_query, keys, values, reason in (
        (query, cache[:, :, :0], cache[:, :, :0], "nothing to attend to"),
        (query[:, :, :1], cache, cache.half(), "one dtype"),
        (random_tensor(1, 2, 1, 300), random_tensor(1, 2, 3, 300), cache[:, :, :3], "1 to 256"),
        (query[:, :, :1].double(), cache, cache, "float64"),
    ):
        assert reason in kernels.supports(kernels.decode_attention, given_query, keys, values, lengths).reason
        with kernels.using("require"), pytest.raises(KernelUnavailable):
            kernels.decode_attention(given_query, keys, values, lengths)
        assert kernels.decode_attention(given_query, keys, values, lengths).isfinite().all()
    expanded = cache[:, :1].expand(1, 2, 20, 4)
    key = random_tensor(1, 2, 1, 4)
    assert "one address" in kernels.supports(kernels.append, expanded, expanded, key, key, ints(3)).reason


def test_usage():
    query, cache, lengths, pages = random_tensor(2, 4, 1, 8), random_tensor(2, 2, 6, 8), ints(1, 2), ints(0, 1)[:, None]
    decode, append = kernels.decode_attention, kernels.append
    key = random_tensor(2, 2, 1, 8)
    table = angles(4, 4)[0]
    for message, call in (
        ("query is \\[batch", lambda: decode(query[0], cache, cache, lengths)),
        ("alike but", lambda: decode(query, cache, cache[:, :1], lengths)),
        ("lengths are", lambda: decode(query, cache, cache, lengths.float())),
        ("sequences", lambda: decode(query, cache, cache, lengths[:1])),
        ("sequences", lambda: decode(query[:1], cache, cache, lengths)),
        ("keys 8", lambda: decode(query[..., :4], cache, cache, lengths)),
        ("no multiple", lambda: decode(query[:, :3], cache, cache, lengths)),
        ("window", lambda: decode(query, cache, cache, lengths, window=-1)),
        ("softcap", lambda: decode(query, cache, cache, lengths, softcap=0.0)),
        ("sinks", lambda: decode(query, cache, cache, lengths, sinks=random_tensor(3))),
        ("key_scale", lambda: decode(query, cache, cache, lengths, key_scale=random_tensor(3))),
        ("pages are", lambda: decode(query, cache, cache, lengths, pages=pages.float())),
        ("at least 1", lambda: decode(query, cache[:, :0], cache[:, :0], lengths, pages=pages)),
        ("key is", lambda: append(cache, cache, key[:, :1], key, lengths)),
        ("as many", lambda: append(cache, cache, key, random_tensor(2, 2, 2, 8), lengths)),
        ("together", lambda: append(cache, cache, key, key, lengths, cosines=table)),
        ("positions", lambda: append(cache, cache, key, key, lengths, cosines=table[None], sines=table[None])),
        (
            "columns",
            lambda: append(cache, cache, key, key, lengths, cosines=table[:, :3], sines=table[:, :3], rotary_dim=8),
        ),
        ("query is", lambda: append(cache, cache, key, key, lengths, query=random_tensor(2, 4, 3, 8))),
        ("1 or more", lambda: kernels.KVCache.create(0, 1, 1, 1)),
        ("2 sequences", lambda: kernels.KVCache.create(2, 1, 1, 1).truncate([1])),
    ):
        with pytest.raises(UsageError, match=message):
            call()


def test_nothing_to_do():
    with kernels.using("require"):
        cache = random_tensor(2, 2, 6, 8)
        assert kernels.decode_attention(random_tensor(2, 4, 0, 8), cache, cache, ints(1, 2)).shape == (2, 4, 0, 8)
        empty = random_tensor(2, 2, 0, 8)
        result, lse = kernels.decode_attention(random_tensor(2, 4, 1, 8), empty, empty, ints(0, 0), return_lse=True)
        assert not result.any()
        assert (lse == -math.inf).all()
        kernels.append(cache.clone(), cache.clone(), empty, empty, ints(1, 2))
    assert kernels.decode_attention.reference(random_tensor(2, 4, 1, 8), empty, empty, ints(0, 0)).shape == (2, 4, 1, 8)


def test_candidates_are_for_blocks_that_fit():
    from nearpeak.kernels.decode import tuning

    for size in (64, 128, 256, 512):
        for alone in (False, True):
            assert 4 <= len(tuning.decode_candidates(size, alone)) <= 40
    assert tuning.append_candidates(128)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "new", "page", "kind"),
    [
        (8, 1, None, torch.bfloat16), (32, 1, None, torch.bfloat16), (32, 1, 16, torch.bfloat16),
        (32, 1, 1, torch.bfloat16), (64, 8, 256, torch.bfloat16), (8, 1, None, E4M3), (32, 1, None, E4M3),
        (32, 1, 16, E4M3), (32, 1, 1, E5M2), (64, 8, 256, E5M2),
    ],
)  # fmt: skip
def test_exact_at_full_size_and_always_the_same(heads, new, page, kind):
    lengths = ints(8192, 8001, 1, 4097)
    keys, values = (random_tensor(4, 8, 8192, 128, dtype=kind, seed=seed) for seed in (1, 2))
    query, options = random_tensor(4, heads, new, 128, dtype=torch.bfloat16), {}
    if page is not None:
        (keys, options["pages"]), (values, _) = paged(keys, page), paged(values, page)
    first = assert_attends(query, keys, values, lengths, **options)
    with kernels.using("require"):
        for _ in range(100):
            again = kernels.decode_attention(query, keys, values, lengths, return_lse=True, **options)
            assert all(map(torch.equal, again, first))


@pytest.mark.gpu
def test_a_graph_for_all_lengths():
    cosines, sines = angles(512, 64)
    caches = [kernels.KVCache.create(4, 512, 2, 128, torch.bfloat16, DEVICE, page_size=16) for _ in range(2)]
    query, key = random_tensor(4, 8, 1, 128, dtype=torch.bfloat16), random_tensor(4, 2, 1, 128, dtype=torch.bfloat16)

    def step(cache):
        return cache.attend(cache.append(key, key, cosines=cosines, sines=sines, query=query))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(caches[0])
    torch.cuda.synchronize()
    caches[0].reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = step(caches[0])
    caches[0].reset()
    for number in range(300):
        query.copy_(random_tensor(4, 8, 1, 128, seed=number))
        key.copy_(random_tensor(4, 2, 1, 128, seed=number + 1))
        graph.replay()
        assert torch.equal(actual, step(caches[1]))
    assert caches[0].lengths.tolist() == [300] * 4


@pytest.mark.gpu
def test_streams_and_graphs_at_the_same_time():
    """Programs of one launch count each other, and nobody else's."""
    cases = [
        (random_tensor(1, 32, 1, 128, dtype=torch.bfloat16, seed=seed), ints(length))
        for seed, length in enumerate((30000, 8000))
    ]
    keys, values = (random_tensor(1, 8, 32768, 128, dtype=torch.bfloat16, seed=seed) for seed in (3, 4))
    expected = [kernels.decode_attention(query, keys, values, lengths) for query, lengths in cases]
    graphs, held = [torch.cuda.CUDAGraph() for _ in cases], []
    for graph, (query, lengths) in zip(graphs, cases, strict=True):
        with torch.cuda.graph(graph):
            held.append(kernels.decode_attention(query, keys, values, lengths))
    streams, actual = [torch.cuda.Stream() for _ in range(4)], []
    torch.cuda.synchronize()
    for _ in range(50):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if number < 2:
                    graphs[number].replay()
                    actual.append((number, held[number].clone()))
                else:
                    actual.append(
                        (number - 2, kernels.decode_attention(cases[number - 2][0], keys, values, cases[number - 2][1]))
                    )
    torch.cuda.synchronize()
    for number, one in actual:
        assert torch.equal(one, expected[number])


@pytest.mark.gpu
def test_compiled_by_inductor():
    query, key = random_tensor(2, 4, 1, 64), random_tensor(2, 2, 1, 64, seed=1)
    caches = [kernels.KVCache.create(2, 64, 2, 64, device=DEVICE) for _ in range(2)]

    def step(cache, query, key):
        cache.append(key * 2, key)
        return cache.attend(query * 2) + 1

    compiled = torch.compile(step, fullgraph=True)
    for _ in range(4):
        torch.testing.assert_close(compiled(caches[0], query, key), step(caches[1], query, key), rtol=1e-4, atol=1e-5)
