"""Launches of `quantize` and `dequantize` to compile."""

import torch

from nearpeak.kernels.quantize import triton as quantize_triton

E4M3 = torch.float8_e4m3fn


def launches():
    x = torch.empty(8192, 4096, dtype=torch.bfloat16)
    yield "blocks of 1 x 128", lambda: quantize_triton.quantize(x, 1, 128, E4M3, False)
    yield (
        "blocks of 1 x 128, powers of two, float8_e5m2",
        lambda: quantize_triton.quantize(x, 1, 128, torch.float8_e5m2, True),
    )
    yield "blocks of 1 x 128, float32", lambda: quantize_triton.quantize(x.float(), 1, 128, E4M3, False)
    yield "blocks of 128 x 128", lambda: quantize_triton.quantize(x, 128, 128, E4M3, False)
    yield "rows", lambda: quantize_triton.quantize(x, 1, 0, E4M3, False)
    yield "rows of 16384", lambda: quantize_triton.quantize(x.view(-1, 16384), 1, 0, E4M3, False)
    yield "rows of 131072", lambda: quantize_triton.quantize(x.view(-1, 131072), 1, 0, E4M3, False)
    yield "a tensor, the first launch is narrow: it stores its maximum alone", lambda: _whole(x)
    values, scales = torch.empty(8192, 4096, dtype=E4M3), torch.empty(64, 32)
    yield "back from blocks of 128 x 128", lambda: quantize_triton.dequantize(values, scales, 128, 128, torch.bfloat16)


def _whole(x):
    quantize_triton.quantize(x, 0, 0, E4M3, False)
