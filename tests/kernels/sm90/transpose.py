"""Launches of transposing copies to compile."""

import torch

from nearpeak.kernels.transpose import triton as transpose_triton


def launches():
    x = torch.empty(2048, 2048, dtype=torch.bfloat16)
    yield "bfloat16", lambda: transpose_triton.forward(x)
    tall = transpose_triton.TransposeConfig(rows=128, columns=64, group=8, warps=4)
    yield "bfloat16, 128 x 64", lambda: transpose_triton.forward(x, config=tall)
    yield "bfloat16, transposed already", lambda: transpose_triton.forward(x.t())
    yield "bfloat16, moved heads", lambda: transpose_triton.forward(x.view(2, 64, 16, 2048).transpose(1, 2))
    odd = torch.empty(1000, 1000, dtype=torch.bfloat16)
    yield "bfloat16, 1000 x 1000", lambda: transpose_triton.forward(odd)
    yield "float32", lambda: transpose_triton.forward(x.float())
    yield "float8", lambda: transpose_triton.forward(x.to(torch.float8_e4m3fn))
