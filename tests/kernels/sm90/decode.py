"""Launches of decode attention and of writing to its cache to compile."""

import torch

from nearpeak.kernels.jit import cache_append, decode


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype)


def call(query, keys, values, pages=None, window=-1, softcap=0.0, sinks=None):
    lengths, scales = torch.zeros(query.shape[0], dtype=torch.int32), (1.0, None, 1.0, None)
    return lambda: decode.forward(query, keys, values, lengths, pages, 0.1, window, softcap, sinks, *scales)


def launches():
    """A result is small where there are few queries: it is not stored by 128 bits."""
    cache, few = empty(4, 8, 8192, 128), "small result"
    yield f"a query alone, {few}", call(empty(4, 8, 1, 128), cache, cache)
    group = empty(4, 32, 1, 128)
    yield f"4 heads to a head of keys, {few}", call(group, cache, cache)
    yield f"window, softcap and sinks, {few}", call(group, cache, cache, window=99, softcap=9.0, sinks=empty(32))
    yield f"8 heads, 8 tokens, {few}", call(empty(4, 64, 8, 128), cache, cache)
    for page in (1, 16, 256):
        paged, table = empty(8192 // page, page, 8, 128), torch.zeros(4, 2048 // page, dtype=torch.int32)
        yield f"pages of {page}, {few}", call(group, paged, paged, table)
        yield f"pages of {page}, a query alone, {few}", call(empty(4, 8, 1, 128), paged, paged, table)
    eight = empty(4, 8, 8192, 128, dtype=torch.float8_e4m3fn)
    yield f"8 bits, {few}", call(group, eight, eight)
    yield f"8 bits, a query alone, {few}", call(empty(4, 8, 1, 128), eight, eight)
    wide = empty(4, 8, 4096, 256)
    yield f"heads of 256, {few}", call(empty(4, 64, 8, 256), wide, wide)
    yield f"heads of 72, {few}", call(empty(4, 32, 1, 72), *[empty(4, 8, 4096, 72)] * 2)
    yield f"float32, {few}", call(group.float(), cache.float(), cache.float())
    yield f"float32 with 16 bits, {few}", call(group.float(), cache, cache)
    yield f"float32, a query alone, {few}", call(empty(4, 8, 1, 128).float(), cache.float(), cache.float())

    lengths, angles, scales = torch.zeros(4, dtype=torch.int32), empty(8192, 64, dtype=torch.float32), (1.0, None) * 2
    for new in (1, 4096):
        query, key = empty(4, 32, new, 128), empty(4, 8, new, 128)
        rest = (key, key, lengths, None, angles, angles, False, 128, *scales, query)
        yield f"append {new}", lambda rest=rest: cache_append.with_query(cache, cache, *rest)
    rest = (key, key, lengths, table, angles, angles, True, 128, *scales)
    yield "append to pages, interleaved", lambda: cache_append.in_place(paged, paged, *rest)
    yield "append", lambda: cache_append.in_place(cache, cache, key, key, lengths, None, None, None, False, 0, *scales)
    eights = (eight, eight, key, key, lengths, None, angles, angles, False, 128, *scales)
    yield f"append in 8 bits, {few}", lambda: cache_append.in_place(*eights)
