"""Launches of the ladder's rungs in Triton to compile."""

import torch

from nearpeak.kernels.ladder import triton as ladder_triton


def launches():
    x = torch.empty(4096, 4096, dtype=torch.bfloat16)
    yield "tensor cores", lambda: ladder_triton.multiply_tensor_cores(x, x)
    yield "persistent", lambda: ladder_triton.multiply_persistent(x, x)
