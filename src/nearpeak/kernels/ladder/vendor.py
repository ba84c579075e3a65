"""cuBLAS, by `torch.matmul`. The names of its kernels for Hopper tell the tile."""

from __future__ import annotations

import re

import torch

from nearpeak.kernels.ladder.rung import PAST_L1, Rung, Tile

_NAME = re.compile(r"nvjet_(?:sm\d+_)?[a-z]+_(\d+)x(\d+)_\d+x\d+_\d+x\d+")
"""As in nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT: tile, depth x stages, cluster."""


def tile(m: int, n: int, k: int, kernel: str = "") -> Tile | None:
    """The tile of one processor: what its neighbours in a cluster loaded for it arrives at it all the same."""
    found = _NAME.search(kernel)
    if found is None:
        return None
    rows, columns = map(int, found.groups())
    return Tile(rows=rows, columns=columns)


RUNG = Rung(
    name="vendor", title="cuBLAS", kernel="nvjet|gemm|cutlass", counter=PAST_L1, multiply=torch.matmul, tile=tile
)
