"""Wave quantization: the tiles of a GEMM do not fill the multiprocessors in the last wave."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nearpeak.bound.tiles import Tiling, tiling
from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step
from nearpeak.findings.what_if import gemm_op
from nearpeak.units import percent, seconds

_FULL_ENOUGH = 0.8
"""The occupancy of all waves above which nothing is reported."""
_SLOWER = 1.15
"""The least ratio to the time of a good kernel for a product of one wave."""
_LEAST_LOST = 1 / 3
"""Of what a good kernel loses in the last wave, the least share that a product lost: a library may fill the GPU by
other means, such as split-K."""


@rule("wave-quantization")
def wave_quantization(step: Step) -> Iterator[Waste]:
    """Compute-bound GEMMs whose tiles do not fill all waves, and that take longer than a good kernel."""
    for index, op in enumerate(step.ops):
        measured = step.measured[index]
        if measured.limiter != "compute":
            continue
        tiles = tiling(op, step.machine)
        if tiles is None or tiles.fill > _FULL_ENOUGH:
            continue
        expected = step.expected(op)
        took = measured.measured_s
        if not expected:
            continue
        few = tiles.waves == 1
        if few:
            filled_s, least_s = expected, _SLOWER * expected
        else:
            filled_s = _filled_seconds(step, index, tiles) or expected
            least_s = filled_s + _LEAST_LOST * max(0.0, expected - filled_s)
        if took < least_s:
            continue
        emptier = tiles.fill / (1.0 if few else _fill_with_remedy(tiles))
        gain = min(took - (expected if few else measured.bound_s), took * (1 - emptier))
        power_s = _power_loss(step, index, gain, emptier)
        shape = f"{tiles.batch} x " if tiles.batch > 1 else ""
        yield Waste(
            title="A matrix product has fewer tiles than the GPU has multiprocessors."
            if few
            else "The last wave of a matrix product's tiles leaves most multiprocessors without work.",
            op=index,
            gains={index: gain - power_s},
            idle=_at_lower_clock(step, gain - power_s) if power_s else {},
            evidence=f"{op.packet} of {shape}{tiles.m} x {tiles.k} by {tiles.k} x {tiles.n} is {tiles.tiles} tiles of "
            f"{tiles.tile[0]} x {tiles.tile[1]} for {tiles.processors} multiprocessors: {tiles.waves} "
            f"wave{'s' if tiles.waves > 1 else ''}, {percent(tiles.fill, 0)} full. It took {seconds(took)}, a product "
            f"that fills the machine {seconds(filled_s)} for as much work.",
            reasoning="Its time in the empty places, or what it took beyond "
            + ("a good kernel, if that is less." if few else "its bound, if that is less.")
            + (
                f" {percent(power_s / gain, 0)} of it is lost to a lower clock: so fast, products draw more power than "
                "the machine can have for long."
                if power_s
                else ""
            ),
            remedy=_remedy(tiles),
        )


def _power_loss(step: Step, index: int, gain: float, emptier: float) -> float:
    """The part of a gain that is lost if the filled GEMM would run above the rate that the machine sustains.

    A GPU at its power limit lowers its clock. Power is proportional to the number of active multiprocessors and to the
    third power of the clock, since the voltage falls with it: at the limit, the clock falls by the third root of the
    additional occupancy. The gain is reduced by this, to the extent that GEMMs are what the device does; but the GEMM
    does reach the sustained rate.
    """
    limits, took = step.machine.achievable, step.time(index)
    rates = {} if limits is None else limits.matrix_sustained
    sustained = sum(count / rates[dtype] for dtype, count in step.costs[index].flops.items() if dtype in rates)
    if took - gain >= sustained:
        return 0.0
    at_limit = max(took - sustained, took * (1 - math.pow(emptier, 2 / 3)))
    return max(0.0, gain - at_limit) * step.matrix_time_share


def _at_lower_clock(step: Step, gain: float) -> dict[str, float]:
    """The part of a gain that was not seen: clean steps take longer than the profiled one, whose clock was higher."""
    unknown_s = sum(cause.seconds for cause in step.idle_causes("unknown"))
    return {"unknown": unknown_s * gain / step.profile.kernel_s} if unknown_s else {}


def _filled_seconds(step: Step, index: int, tiles: Tiling) -> float | None:
    """The time of a good kernel for as much work as part of a product whose waves are full."""
    per_row = tiles.batch * math.ceil(tiles.n / tiles.tile[1])
    rows = max(tiles.waves * tiles.processors // per_row * tiles.tile[0], tiles.m)
    op = step.ops[index]
    filled = gemm_op(tiles.batch, rows, tiles.n, tiles.k, dtype=op.outputs[0].dtype, tf32=op.tf32_products)
    expected = step.expected(filled)
    return None if expected is None else expected * tiles.m / rows


def _fill_with_remedy(tiles: Tiling) -> float:
    """The occupancy with the number of rows of the remedy."""
    per_row = tiles.batch * math.ceil(tiles.n / tiles.tile[1])
    places = tiles.waves * tiles.processors
    return max(places // per_row * per_row / places, tiles.fill)


def _remedy(tiles: Tiling) -> str:
    """The nearest sizes with full waves."""
    per_row = tiles.batch * math.ceil(tiles.n / tiles.tile[1])
    rows = tiles.waves * tiles.processors // per_row * tiles.tile[0]
    fewer = (tiles.waves - 1) * tiles.processors // per_row * tiles.tile[0]
    if tiles.waves == 1:
        return (
            f"Join it with products of the same input (their weights side by side: torch.cat), or give it more rows: "
            f"{max(rows, tiles.tile[0])} of them would take about as long as {tiles.m} do now."
        )
    also = f", or {fewer} rows for {tiles.waves - 1} full waves" if fewer >= tiles.tile[0] else ""
    return (
        f"Choose the batch so that the waves are full: {max(rows, tiles.m)} rows would take as long as {tiles.m} "
        f"do now{also}."
    )
