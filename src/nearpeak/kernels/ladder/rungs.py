"""All rungs, from the lowest."""

from __future__ import annotations

from nearpeak.kernels.ladder import lines, naive, persistent, specialised, tensor_cores, tiles, vendor

RUNGS = (
    naive.RUNG,
    lines.RUNG,
    tiles.RUNG,
    tensor_cores.RUNG,
    persistent.RUNG,
    specialised.RUNG,
    vendor.RUNG,
)
