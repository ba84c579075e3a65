"""Launches of `grouped_gemm` to compile, of the sizes of a layer of 128 experts."""

from functools import partial

import torch

from nearpeak.kernels.gemm import grouped_triton
from nearpeak.kernels.gemm.grouped import groups_size
from nearpeak.kernels.gemm.tuning import grouped_gradient_heuristic, grouped_heuristic

BF16 = torch.bfloat16


def gathered(name, tokens, up, upstream, inside, groups, sources, plain, two, gradient):
    """Launches with rows of tokens, which `sources` name, by these configurations."""
    across = (up.mT.contiguous(), groups, 128, True, sources)
    yield f"tokens, transposed, {name}", lambda: grouped_triton.multiply(tokens, *across, config=plain)
    gated = (up, groups, 128, "silu", True, sources)
    yield f"tokens, gated and kept, {name}", lambda: grouped_triton.multiply_gated(tokens, *gated, config=two)
    for what, pair in (("rows", (upstream, tokens)), ("gradient", (tokens, inside))):
        call = partial(grouped_triton.weight_gradient, *pair, groups, up.shape[0], sources, what, config=gradient)
        yield f"gradient of matrices, {what} of tokens, {name}", call


def launches():
    experts, tokens, wide, inner = 8, 2048, 512, 256
    groups = torch.empty(groups_size(experts, tokens, 128), dtype=torch.int32)
    rows, up = torch.empty(tokens, wide, dtype=BF16), torch.empty(experts, 2 * inner, wide, dtype=BF16)
    upstream, inside = torch.empty(tokens, 2 * inner, dtype=BF16), torch.empty(tokens, inner, dtype=BF16)
    sources, few_tokens = torch.empty(tokens, dtype=torch.int32), rows[: tokens // 2]
    if grouped_triton.takes_sm90(rows, up, 128, False, False):  # else another version of Triton
        yield "plain, Hopper", lambda: grouped_triton.multiply(rows, up, groups, 128, False)
        yield "transposed, Hopper", lambda: grouped_triton.multiply(rows, up.mT.contiguous(), groups, 128, True)
        yield "gated and kept, Hopper", lambda: grouped_triton.multiply_gated(rows, up, groups, 128, "silu", True)
        fp8 = rows.to(torch.float8_e4m3fn), up.to(torch.float8_e4m3fn)
        whole = torch.empty(tokens), torch.empty(experts)
        blocks = torch.empty(tokens, wide // 128), torch.empty(experts, 2 * inner // 128, wide // 128)
        for name, scales in (("", whole), ("silu", blocks)):
            given = (*fp8, *scales, groups, 128, name, BF16)
            yield f"fp8 {name}, Hopper", lambda given=given: grouped_triton.multiply_fp8(*given)
            yield f"fp8 {name}, tokens, Hopper", lambda given=given: grouped_triton.multiply_fp8(*given, sources)
        yield "gradient of matrices, Hopper", lambda: grouped_triton.weight_gradient(upstream, rows, groups, experts)
        yield from gathered("Hopper", few_tokens, up, upstream, inside, groups, sources, None, None, None)
    portable = grouped_heuristic(128, 2, False)
    yield "plain", lambda: grouped_triton.multiply(rows, up, groups, 128, False, config=portable)
    two = grouped_heuristic(128, 2, True)
    yield "gated and kept", lambda: grouped_triton.multiply_gated(rows, up, groups, 128, "silu", True, config=two)
    few = torch.empty(groups_size(experts, 64, 16), dtype=torch.int32)
    yield "a few rows", lambda: grouped_triton.multiply(rows[:64], up, few, 16, False)
    yield "float32", lambda: grouped_triton.multiply(rows.float(), up.float(), groups, 128, False)
    config = grouped_gradient_heuristic(2)
    yield from gathered("portable", few_tokens, up, upstream, inside, groups, sources, portable, two, config)
    yield (
        "gradient of matrices",
        lambda: grouped_triton.weight_gradient(rows, rows, groups, experts, config=config),
    )
    yield "groups, narrow", lambda: grouped_triton.group_rows(torch.empty(experts, dtype=torch.int32), tokens, 128)
