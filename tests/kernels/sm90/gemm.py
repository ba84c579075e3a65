"""Launches of the portable kernel of `gemm` to compile."""

import torch

from nearpeak.kernels.gemm import triton as gemm_triton
from nearpeak.kernels.gemm.triton import Epilogue, Scales

E4M3 = torch.float8_e4m3fn


def launches():
    x, weight = torch.empty(4096, 4096, dtype=torch.bfloat16), torch.empty(8192, 4096, dtype=torch.bfloat16)
    wide, half = torch.empty(4096, 8192, dtype=torch.bfloat16), torch.empty(4096, 4096, dtype=torch.bfloat16)
    bias = torch.empty(8192, dtype=torch.bfloat16)
    multiply = gemm_triton.multiply_portable
    yield "bfloat16", lambda: multiply(x, weight, wide, None, Epilogue(), None, False)
    across = x.t(), weight[:4096].t(), half
    yield "factors across", lambda: multiply(*across, None, Epilogue(), None, False)
    gelu = Epilogue(bias=bias, activation="gelu", keep=True, residual=wide)
    yield "bias, gelu, kept, residual", lambda: multiply(x, weight, wide, wide.clone(), gelu, None, False)
    swiglu = Epilogue(activation="silu", gated=True)
    yield "swiglu", lambda: multiply(x, weight, half, None, swiglu, None, False)
    floats = x.float(), weight.float(), wide.float()
    yield "float32", lambda: multiply(*floats, None, Epilogue(), None, False)
    yield "float32 by TF32", lambda: multiply(*floats, None, Epilogue(), None, True)
    small, other = x.to(E4M3), weight.to(E4M3)
    blocks = Scales(small, torch.empty(4096, 32), other, torch.empty(64, 32), False)
    yield "fp8 by blocks", lambda: multiply(small, other, wide, None, Epilogue(), blocks, False)
    odd = torch.empty(4096, 4099, dtype=torch.bfloat16), torch.empty(8192, 4099, dtype=torch.bfloat16)
    yield "odd sizes, narrow", lambda: multiply(*odd, wide, None, Epilogue(), None, False)
