"""Launches of `gemm` for Hopper to compile."""

import torch

from nearpeak.kernels._runtime import gluon
from nearpeak.kernels.gemm import triton as gemm_triton
from nearpeak.kernels.gemm.triton import Epilogue, Scales
from nearpeak.kernels.gemm.tuning import sm90_candidates

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def launches():
    if not gluon.runs_on(torch.device("cpu")):
        return  # another version of Triton
    multiply, candidates = gemm_triton.multiply_sm90, sm90_candidates
    a, b, wide = torch.empty(4096, 2048, dtype=BF16), torch.empty(4096, 2048, dtype=BF16), torch.empty(4096, 4096)
    wide, half, bias = wide.to(BF16), torch.empty(4096, 2048, dtype=BF16), torch.empty(4096, dtype=BF16)
    for config in candidates()[::3]:
        yield f"tile {config}", lambda config=config: multiply(a, b, wide, None, Epilogue(), None, config)
    yield "across", lambda: multiply(half.t(), half.t(), torch.empty(2048, 2048, dtype=BF16), None, Epilogue(), None)
    for name, options in (
        ("gelu, kept", {"activation": "gelu", "keep": True}),
        ("residual", {"residual": wide}),
        ("gelu, kept, residual", {"activation": "gelu", "keep": True, "residual": wide}),
    ):
        epilogue = Epilogue(bias=bias, **options)
        kept = wide.clone() if epilogue.keep else None
        yield name, lambda epilogue=epilogue, kept=kept: multiply(a, b, wide, kept, epilogue, None)
    for config in candidates("16_bits_gated")[:1]:
        swiglu = Epilogue(activation="silu", gated=True)
        yield f"swiglu {config}", lambda config=config, swiglu=swiglu: multiply(a, b, half, None, swiglu, None, config)
    kept = Epilogue(bias=bias, activation="gelu", gated=True, keep=True)
    yield "geglu, kept", lambda: multiply(a, b, half, wide, kept, None)
    left, right = a.to(E4M3), b.to(E4M3)
    rows = torch.empty(4096)
    by_row, fast = (Scales(left, rows, right, rows, one) for one in (False, True))
    by_block = Scales(left, torch.empty(4096, 16), right, torch.empty(32, 16), False)
    yield "fp8, fast", lambda: multiply(left, right, wide, None, Epilogue(), fast)
    yield "fp8 by rows", lambda: multiply(left, right, wide, None, Epilogue(), by_row)
    for config in candidates("8_bits"):
        given = (left, right, wide, None, Epilogue(), by_block, config)
        yield f"fp8 by blocks {config}", lambda given=given: multiply(*given)
    swiglu = Epilogue(activation="silu", gated=True)
    yield "fp8 by blocks, swiglu", lambda: multiply(left, right, half, None, swiglu, by_block)
