"""Tiles for the tensor cores, in Triton: 128 x 128 numbers, copied to shared memory ahead of their use."""

from __future__ import annotations

from torch import Tensor

from nearpeak.kernels.ladder.rung import PAST_L1, Rung, Tile

SIDE = 128


def multiply(a: Tensor, b: Tensor) -> Tensor:
    from nearpeak.kernels.jit.ladder_tensor_cores import multiply as launched

    return launched(a, b)


RUNG = Rung(
    name="tensor cores",
    title="128 x 128 by tensor cores",
    kernel="ladder_tensor_cores_kernel",
    counter=PAST_L1,
    multiply=multiply,
    tile=lambda m, n, k, kernel: Tile(rows=SIDE, columns=SIDE),
)
