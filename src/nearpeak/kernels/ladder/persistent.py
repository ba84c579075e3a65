"""Larger tiles, copied by TMA, in Triton: a program for each processor goes through the tiles in its turn."""

from __future__ import annotations

from torch import Tensor

from nearpeak.kernels.ladder.rung import PAST_L1, Rung, Tile

ROWS, COLUMNS = 128, 256


def multiply(a: Tensor, b: Tensor) -> Tensor:
    from nearpeak.kernels.jit.ladder_persistent import multiply as launched

    return launched(a, b)


RUNG = Rung(
    name="persistent",
    title="128 x 256 by TMA, persistent",
    kernel="ladder_persistent_kernel",
    counter=PAST_L1,
    multiply=multiply,
    tile=lambda m, n, k, kernel: Tile(rows=ROWS, columns=COLUMNS),
)
