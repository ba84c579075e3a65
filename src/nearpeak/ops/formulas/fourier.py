"""Fourier transforms: the input is read once, the output written once.

FLOPs: for n points (the product of the transformed sizes) a complex transform is charged 2 n log2 n real FLOPs on the
vector units, a real one n log2 n - n. The usual 5 n log2 n is what radix 2 does and no floor. The fewest known are
34/9 n log2 n, and for small powers of two 4 n log2 n - 6 n + 8 (split radix); real data need 2 n log2 n - 4 n + 6. The
charge is never above these, and equal for a complex transform of 2 or 4 points.
"""

from __future__ import annotations

import math

from nearpeak.ops.cost import Cost, accesses, formula
from nearpeak.ops.formulas.matrix import result, vector_dtype
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor


@formula("aten._fft_c2c")
def _complex(op: Op) -> Cost:
    return _transform(op, op.tensor("self"), real=False)


@formula("aten._fft_r2c")
def _from_real(op: Op) -> Cost:
    """The other half of a two-sided spectrum mirrors the first and takes no arithmetic."""
    return _transform(op, op.tensor("self"), real=True)


@formula("aten._fft_c2r")
def _to_real(op: Op) -> Cost:
    return _transform(op, result(op), real=True)


def _transform(op: Op, signal: Tensor, *, real: bool) -> Cost:
    if not signal.elements:
        return Cost(family="fourier")
    points = math.prod(signal.shape[dim] for dim in op.arguments["dim"])
    each = math.log2(points) - 1 if real else 2 * math.log2(points)
    flops = {vector_dtype(signal.dtype): signal.elements * each} if each > 0 else {}
    return Cost(family="fourier", reads=accesses(op.tensor("self")), writes=accesses(*op.written), vector_flops=flops)
