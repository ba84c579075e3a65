"""Launches of `mixture_of_experts` to compile, of what is not a product: see `grouped_product` for these."""

import torch

from nearpeak.kernels.moe import triton as moe_triton


def launches():
    tokens, k, inner = 1024, 8, 1536
    row_map, weights = torch.empty(tokens, k, dtype=torch.int32), torch.empty(tokens, k)
    for dtype in (torch.bfloat16, torch.float32):
        upstream, kept = (torch.empty(tokens * k, columns, dtype=dtype) for columns in (inner, 2 * inner))
        yield (
            f"backward of the gate, {dtype}",
            lambda given=(upstream, kept): moe_triton.gate_backward(*given, weights, row_map, "silu"),
        )
    narrow = torch.empty(tokens * k, 100, dtype=torch.bfloat16), torch.empty(tokens * k, 200, dtype=torch.bfloat16)
    yield (
        "backward of the gate, 100 columns, narrow",
        lambda: moe_triton.gate_backward(*narrow, weights, row_map, "gelu"),
    )
