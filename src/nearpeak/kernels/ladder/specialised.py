"""`nearpeak.kernels.product`: one warp copies, warpgroups multiply, others write, in Gluon."""

from __future__ import annotations

import torch
from torch import Tensor

from nearpeak.kernels.ladder.rung import PAST_L1, Rung, Tile


def multiply(a: Tensor, b: Tensor) -> Tensor:
    from nearpeak.kernels import product, using

    with using("require"):
        return product(a, b.T)


def tile(m: int, n: int, k: int, kernel: str = "") -> Tile:
    """That of the configuration that the kernel is launched with."""
    from nearpeak.kernels.configs import tuned
    from nearpeak.kernels.jit import product_hopper_launch as launcher
    from nearpeak.kernels.jit.product_portable import Epilogue

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    config = tuned("product_hopper_16_bits", m * n, device)
    if config is None:
        a, result = (torch.empty(m, size, dtype=torch.bfloat16, device="meta") for size in (k, n))
        config = launcher.tile(a, result, Epilogue(), None)
    return Tile(rows=config["rows"] * config["consumers"], columns=config["block_n"])


RUNG = Rung(
    name="specialised",
    title="warps with roles, Gluon",
    kernel="product_hopper_kernel",
    counter=PAST_L1,
    multiply=multiply,
    tile=tile,
)
