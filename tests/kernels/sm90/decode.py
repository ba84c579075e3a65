"""Launches of decode attention and of writing to its cache to compile."""

import torch

from nearpeak.kernels.decode import triton as decode_triton


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype)


def call(query, keys, values, pages=None, window=-1, softcap=0.0, sinks=None, shared=False):
    lengths, scales = torch.zeros(query.shape[0], dtype=torch.int32), (1.0, None, 1.0, None)
    return lambda: decode_triton.decode_attention(
        query, keys, values, lengths, pages, 0.1, window, softcap, sinks, *scales, shared
    )


def launches():
    """A result is small where there are few queries: it is not stored by 128 bits."""
    cache, few = empty(4, 8, 8192, 128), "small result"
    yield f"a query alone, {few}", call(empty(4, 8, 1, 128), cache, cache)
    group = empty(4, 32, 1, 128)
    yield f"4 heads to a head of keys, {few}", call(group, cache, cache)
    yield f"8 heads, 8 tokens, {few}", call(empty(4, 64, 8, 128), cache, cache)
    paged, table = empty(512, 16, 8, 128), torch.zeros(4, 512, dtype=torch.int32)
    yield f"pages of 16, {few}", call(group, paged, paged, table)
    single, longer = empty(8192, 1, 8, 128), torch.zeros(4, 8192, dtype=torch.int32)
    yield f"pages of 1, {few}", call(group, single, single, longer)
    eight = empty(4, 8, 8192, 128, dtype=torch.float8_e4m3fn)
    yield f"8 bits, {few}", call(group, eight, eight)
    paged_eight = paged.to(torch.float8_e5m2)
    yield f"8 bits in pages of 16, {few}", call(group, paged_eight, paged_eight, table)
    # programs that do not fit into one wave: twice as many at a time, with half as many keys each
    for heads, dim in ((14, 64), (14, 128), (48, 256)):
        short = empty(59, heads, 768, dim)
        yield f"{heads} heads of {dim}, {few}", call(empty(59, heads, 1, dim), short, short)
    short = empty(13, 12, 10236, 128)
    yield f"4 heads to a head of keys, several waves, {few}", call(empty(13, 48, 1, 128), short, short)
    for kind in (torch.bfloat16, torch.float8_e4m3fn):
        latent = empty(512, 64, 1, 576, dtype=kind)
        yield f"latent, {kind}, {few}", call(empty(4, 16, 1, 576), latent, latent[..., :512], table, shared=True)
    yield f"float32, {few}", call(group.float(), cache.float(), cache.float())

    lengths, angles, scales = torch.zeros(4, dtype=torch.int32), empty(8192, 64, dtype=torch.float32), (1.0, None) * 2
    query, key = empty(4, 32, 4096, 128), empty(4, 8, 4096, 128)
    turned = (key, key, lengths, None, angles, angles, False, 128, *scales, query)
    yield "append, with a query", lambda: decode_triton.append_with_query(cache, cache, *turned)
    rest = (key, key, lengths, table, angles, angles, True, 128, *scales)
    yield "append to pages, interleaved", lambda: decode_triton.append(paged, paged, *rest)
    yield "append", lambda: decode_triton.append(cache, cache, key, key, lengths, None, None, None, False, 0, *scales)
    eights = (eight, eight, key, key, lengths, None, angles, angles, False, 128, *scales)
    yield f"append in 8 bits, {few}", lambda: decode_triton.append(*eights)
