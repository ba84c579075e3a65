"""Latency and bandwidth of a collective by size regime, and the factors of bus bandwidth. Plain arithmetic, no torch.

A library of collectives changes its protocol and its algorithm with the size of a message, and each has its own latency
and bandwidth. `fit_curve` therefore finds the sizes at which the curve changes: within a regime the time is
`latency + bytes x seconds_per_byte`, and the number of regimes is the one that the scatter of the times justifies.

Bytes are counted as nccl-tests counts them (`BYTES_OF`). Algorithm bandwidth is bytes over time. Bus bandwidth is that
times `bus_factor`, which makes it comparable with the bandwidth of a link whatever the number of ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nearpeak._records import Amount, Count, Seconds
from nearpeak.errors import UsageError, did_you_mean

BYTES_OF: Mapping[str, str] = {
    "broadcast": "the buffer",
    "reduce": "the buffer",
    "all_reduce": "the buffer",
    "all_gather": "the gathered output, all parts",
    "reduce_scatter": "the input, all parts",
    "all_to_all": "all that a rank sends, its own part too",
    "all_to_all_v": "all that a rank sends, its own part too",
    "send_recv": "the message; every rank sends to the next",
    "barrier": "none",
}
"""The operations, and which bytes are counted."""
_FACTORS = {
    "all_reduce": "2(n-1)/n",
    "all_gather": "(n-1)/n",
    "reduce_scatter": "(n-1)/n",
    "all_to_all": "(n-1)/n",
    "all_to_all_v": "the busiest rank's share",
}
SCATTER = 0.03
"""Relative scatter of a time that no regime has to explain."""
REGIME_PENALTY = 9.0
"""What one more regime must save of the squared errors, in squares of `SCATTER`: it has three numbers of its own."""
LEAST_POINTS = 3
"""Of a regime: two numbers go through any two points."""


def factor_text(op: str) -> str:
    """The factor of bus bandwidth as a formula: "2(n-1)/n"."""
    return _FACTORS.get(op, "1")


def bus_factor(op: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests has it: the share of the bytes that crosses each link.

    >>> bus_factor("all_reduce", 8), bus_factor("all_gather", 8), bus_factor("broadcast", 8)
    (1.75, 0.875, 1.0)
    """
    if op not in BYTES_OF:
        raise UsageError(f"op={op!r} is not a collective. {did_you_mean(op, BYTES_OF)}")
    if op == "all_to_all_v":
        raise UsageError("An uneven all-to-all has no factor: its busiest rank sets the bytes that a link carries.")
    share = (ranks - 1) / ranks
    factors: dict[str, float] = {"2(n-1)/n": 2 * share, "(n-1)/n": share, "1": 1.0}
    return factors[factor_text(op)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Sizes from `from_bytes` on that have one latency and one bandwidth."""

    from_bytes: Amount
    latency_s: Seconds
    seconds_per_byte: Amount

    @property
    def bandwidth(self) -> float | None:
        """Bytes/s of the algorithm; None where the time does not depend on the size."""
        return 1 / self.seconds_per_byte if self.seconds_per_byte else None

    def seconds(self, size: float) -> float:
        """The time of a message of `size` bytes."""
        return self.latency_s + size * self.seconds_per_byte


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveFit:
    """The regimes of one operation over one group of ranks."""

    op: str
    group: str
    ranks: Count
    nodes: Count
    """Hosts that the ranks of a group are on."""
    concurrent: Count
    """Groups that ran at the same time."""
    dtype: str
    in_place: bool
    regimes: tuple[Regime, ...]
    mean_error: Amount
    """Mean of the relative errors at the measured sizes, without their signs."""
    worst_error: Amount
    points: Count
    largest_bytes: Amount
    """The largest measured size; the last regime holds beyond it as an extrapolation."""

    def check(self) -> None:
        """ValueError without regimes, or where they are not in order."""
        if not self.regimes:
            raise ValueError("it has no regimes")
        if any(a.from_bytes >= b.from_bytes for a, b in itertools.pairwise(self.regimes)):
            raise ValueError("its regimes are not in order of size")

    def seconds(self, size: float) -> float:
        """The time of a message of `size` bytes."""
        return regime_of(self.regimes, size).seconds(size)


def regime_of(regimes: Sequence[Regime], size: float) -> Regime:
    """The regime that a size belongs to: the first also for smaller ones."""
    return next((each for each in reversed(regimes) if each.from_bytes <= size), regimes[0])


def find_curve(curves: Sequence[CurveFit], op: str, ranks: int, nodes: int, concurrent: int = 1) -> CurveFit | None:
    """The fit of `op` over groups of so many ranks on so many hosts; that of 16 bits where there are several.

    Groups that run at the same time share the network between hosts, so that only a fit of as many holds for them.
    """
    fits = [
        fit
        for fit in curves
        if (fit.op, fit.ranks, fit.nodes) == (op, ranks, nodes) and (nodes == 1 or fit.concurrent == concurrent)
    ]

    def rank(fit: CurveFit) -> tuple[bool, bool, bool]:
        return fit.concurrent != concurrent, fit.dtype not in ("bfloat16", "float16"), fit.in_place

    return min(fits, key=rank, default=None)


def fit_curve(points: Sequence[tuple[float, float]], scatter: float = SCATTER) -> tuple[Regime, ...]:
    """The regimes of (bytes, seconds), at least one point; `scatter` is the relative error of a time.

    >>> slow = [(2.0**k, 1e-5 + 2.0**k / 1e8) for k in range(10, 16)]
    >>> fast = [(2.0**k, 5e-5 + 2.0**k / 1e10) for k in range(16, 22)]
    >>> [(round(regime.latency_s * 1e6), f"{regime.bandwidth:.2g}") for regime in fit_curve(slow + fast)]
    [(10, '1e+08'), (50, '1e+10')]
    """
    ordered = sorted(points)
    sizes = [size for size, _ in ordered]
    lines = _lines(ordered)
    count = len(ordered)
    least = min(LEAST_POINTS, count)
    # best[end]: the lowest cost of the points before `end`, and where its last regime starts
    best: list[tuple[float, int]] = [(0.0, 0)] + [(math.inf, 0)] * count
    for end in range(least, count + 1):
        for start in range(end - least + 1):
            if math.isfinite(best[start][0]):
                cost = best[start][0] + REGIME_PENALTY + lines[start, end][2] / scatter**2
                best[end] = min(best[end], (cost, start))
    regimes: list[Regime] = []
    end = count
    while end:
        start = best[end][1]
        latency, slope, _ = lines[start, end]
        # nothing was measured between two sizes: the change is put in their middle
        first = sizes[0] if start == 0 else math.sqrt(sizes[start - 1] * sizes[start])
        regimes.append(Regime(from_bytes=first, latency_s=latency, seconds_per_byte=slope))
        end = start
    return tuple(reversed(regimes))


Line = tuple[float, float, float]
"""Latency, seconds per byte, and the sum of squared relative errors."""


def _lines(points: Sequence[tuple[float, float]]) -> dict[tuple[int, int], Line]:
    """The best line through every run of points, by its start and its end."""
    lines = {}
    for start in range(len(points)):
        w = wx = wxx = wt = wxt = 0.0
        for end, (x, t) in enumerate(points[start:], start=start + 1):
            w, wx, wxx = w + 1 / t**2, wx + x / t**2, wxx + x * x / t**2  # errors are relative
            wt, wxt = wt + 1 / t, wxt + x / t
            lines[start, end] = _line(end - start, w, wx, wxx, wt, wxt)
    return lines


def _line(count: int, w: float, wx: float, wxx: float, wt: float, wxt: float) -> Line:
    """The line of weighted sums, of which neither latency nor slope is negative."""

    def with_error(latency: float, slope: float) -> Line:
        squares = latency * latency * w + 2 * latency * slope * wx + slope * slope * wxx
        return latency, slope, max(0.0, squares - 2 * latency * wt - 2 * slope * wxt + count)

    determinant = w * wxx - wx * wx
    if determinant > 1e-12 * w * wxx:
        latency, slope = (wt * wxx - wxt * wx) / determinant, (w * wxt - wx * wt) / determinant
        if latency >= 0 and slope >= 0:
            return with_error(latency, slope)
    return min(with_error(wt / w, 0.0), with_error(0.0, wxt / wxx), key=lambda line: line[2])
