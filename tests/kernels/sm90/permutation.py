"""Launches of `permute_tokens` and `unpermute_tokens` to compile."""

import torch

from nearpeak.kernels.moe import triton as moe_triton


def launches():
    experts = torch.zeros(16384, 8, dtype=torch.int64)
    yield "sort, 256 experts, narrow: single numbers", lambda: moe_triton.sort_tokens(experts, 256)
    yield "sort, 8 experts, narrow: single numbers", lambda: moe_triton.sort_tokens(experts[:, :2], 8)
    row_map = torch.empty(16384, 8, dtype=torch.int32)
    weights = torch.empty(16384, 8)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.empty(16384, 7168, dtype=dtype)
        rows = torch.empty(16384 * 8, 7168, dtype=dtype)
        yield f"copies, {dtype}", lambda x=x: moe_triton.permute_rows(x, row_map)
        yield f"sums, {dtype}", lambda rows=rows: moe_triton.unpermute_rows(rows, row_map, weights)
    small = torch.empty(1024 * 8, 4096, dtype=torch.bfloat16)
    yield (
        "backward of sums, bfloat16",
        lambda: moe_triton.unpermute_rows_backward(small[:1024], small, row_map[:1024], weights[:1024]),
    )
