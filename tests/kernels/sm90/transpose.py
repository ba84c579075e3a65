"""Launches of transposing copies to compile."""

import torch

from nearpeak.kernels.jit import transpose


def launches():
    x = torch.empty(2048, 2048, dtype=torch.bfloat16)
    yield "bfloat16", lambda: transpose.forward(x)
    tall = {"rows": 128, "columns": 64, "group": 8, "warps": 4}
    yield "bfloat16, 128 x 64", lambda: transpose.forward(x, config=tall)
    yield "bfloat16, transposed already", lambda: transpose.forward(x.t())
    yield "bfloat16, moved heads", lambda: transpose.forward(x.view(2, 64, 16, 2048).transpose(1, 2))
    odd = torch.empty(1000, 1000, dtype=torch.bfloat16)
    yield "bfloat16, 1000 x 1000", lambda: transpose.forward(odd)
    yield "float32", lambda: transpose.forward(x.float())
    yield "float8", lambda: transpose.forward(x.to(torch.float8_e4m3fn))
