"""Keys and values of 8 bits as float16, which holds them exactly, at little more than an instruction for two of them.

They are loaded as pairs, as numbers of 16 bits. The product of weights and values is over tokens, of which a thread
needs several for each column, and the instruction that takes these from shared memory is for 16 bits: single bytes
would be loaded one by one. So even and odd columns are multiplied apart.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels.policy import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)
_DTYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


def paired(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, tl.dtype] | None:
    """Both as pairs, and what these consist of; None where bytes of a pair are not beside each other."""
    for cache in (keys, values):
        offsets = (cache.shape[-1], cache.storage_offset(), *cache.stride()[:-1])
        if cache.stride(-1) != 1 or cache.data_ptr() % 2 or any(offset % 2 for offset in offsets):
            return None
    return keys.view(torch.int16), values.view(torch.int16), _DTYPES[keys.dtype]


@triton.jit
def halves(pairs, DTYPE: tl.constexpr):
    """The first and the second of each pair, in float16.

    Two pairs at a time, by instructions that do what the interpreter is told: of that, Triton would make eight for each
    two pairs, and not two or three.
    """
    if _INTERPRETED:
        first = pairs.to(tl.uint8).to(DTYPE, bitcast=True).to(tl.float16)
        second = (pairs >> 8).to(tl.uint8).to(DTYPE, bitcast=True).to(tl.float16)
    elif tl.float8e5 == DTYPE:  # the upper half of a float16
        first, second = tl.inline_asm_elementwise(
            """{
            prmt.b32 $0, $2, 0, 0x2404;
            and.b32 $1, $2, 0xff00ff00;
            }""",
            "=&r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        first, second = tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 firsts, seconds;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {firsts, seconds}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, firsts;
            cvt.rn.f16x2.e4m3x2 $1, seconds;
            }""",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return first, second


@triton.jit
def fitted(asked):
    """Queries as float16, and the powers of 2 that they are to be multiplied by: bfloat16 has a larger range."""
    wide = asked.to(tl.float32)
    exponent = tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    up, down = (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return (wide * down[:, None]).to(tl.float16), up
