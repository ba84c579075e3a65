"""Launches of the ladder's rungs in Triton to compile."""

import torch

from nearpeak.kernels.jit import ladder_persistent, ladder_tensor_cores


def launches():
    x = torch.empty(4096, 4096, dtype=torch.bfloat16)
    yield "tensor cores", lambda: ladder_tensor_cores.multiply(x, x)
    yield "persistent", lambda: ladder_persistent.multiply(x, x)
