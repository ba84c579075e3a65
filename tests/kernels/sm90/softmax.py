"""Launches of softmax and log-softmax to compile."""

import torch

from nearpeak.kernels.softmax import triton as softmax_triton
from nearpeak.kernels.softmax.tuning import TileConfig


def launches():
    dtype = torch.bfloat16
    for columns in (1024, 4096, 16384, 65536):
        x = torch.empty(256, columns, dtype=dtype)
        yield f"forward, {columns}", lambda x=x: softmax_triton.forward(x, None, 1.0, False, dtype)
        yield f"backward, {columns}", lambda x=x: softmax_triton.backward(x, x, 1.0, False, dtype)
    packed = TileConfig(rows=1, warps=32, packed=True)
    x = torch.empty(256, 32768, dtype=dtype)
    yield "backward, packed", lambda: softmax_triton.backward(x, x, 1.0, False, dtype, config=packed)
    long = torch.empty(1024, 262144, dtype=dtype)
    yield "forward, split", lambda: softmax_triton.forward(long, None, 1.0, False, dtype)
    yield "backward, split", lambda: softmax_triton.backward(long, long, 1.0, False, dtype)
    wide = torch.empty(256, 16384)
    yield "forward, float32", lambda: softmax_triton.forward(wide, None, 1.0, False, torch.float32)
    scores = torch.empty(2, 4, 1000, 1000, dtype=dtype)
    keep = torch.empty(2, 1, 1, 1000, dtype=torch.bool)
    yield "causal with a mask, 1000", lambda: softmax_triton.log_forward(scores, keep, 0.1, True, dtype)
    yield "causal, backward, 1000", lambda: softmax_triton.log_backward(scores, scores, 0.1, True, dtype)
