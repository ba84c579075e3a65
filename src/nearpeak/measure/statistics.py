"""The statistics of timing: exact, non-parametric, without dependencies.

The unit of replication is a block of calls, not a call: calls inside a block share clocks, caches and neighbors.
No value is ever removed.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A confidence interval and its exact coverage."""

    low: float
    high: float
    confidence: float

    def half_width(self, relative_to: float) -> float:
        """Half the width as a share of `relative_to`."""
        return (self.high - self.low) / 2 / abs(relative_to) if relative_to else math.inf


def median(values: Sequence[float]) -> float:
    """The middle value."""
    return statistics.median(values)


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile with linear interpolation."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def median_interval(values: Sequence[float], confidence: float = 0.95, *, inflate: float = 1.0) -> Interval:
    """The order-statistic interval of the median: ranks from the binomial distribution, no assumption of shape.

    `inflate` widens the ranks, for values that follow each other too closely (see `inflation`). Fewer than six values
    cannot reach 95 %: the interval is then the whole range, with the coverage that it has.

    >>> interval = median_interval(list(range(1, 21)))
    >>> interval.low, interval.high, round(interval.confidence, 3)
    (6, 15, 0.959)
    """
    ordered = sorted(values)
    n = len(ordered)
    low_rank = _lower_rank(n, confidence)
    # Of the ranks before they are widened: widening makes up for correlation, it does not add confidence.
    coverage = 1.0 - 2.0 * sum(math.comb(n, i) for i in range(low_rank)) / 2.0**n
    if inflate > 1.0:
        low_rank = max(1, math.floor((n + 1) / 2 - inflate * ((n + 1) / 2 - low_rank)))
    return Interval(low=ordered[low_rank - 1], high=ordered[n - low_rank], confidence=max(0.0, coverage))


@lru_cache(maxsize=1024)
def _lower_rank(n: int, confidence: float) -> int:
    tail, rank = 0.0, 0
    for i in range(n // 2 + 1):
        tail += math.comb(n, i) / 2.0**n
        if 2 * tail > 1 - confidence:
            break
        rank = i + 1
    return max(1, rank)


def lag1(values: Sequence[float]) -> float:
    """The correlation of ranks between neighbors in time: 0 for independent values."""
    n = len(values)
    if n < 4 or min(values) == max(values):
        return 0.0
    ranks = _ranks(values)
    mean = (n + 1) / 2
    centered = [rank - mean for rank in ranks]
    return sum(a * b for a, b in itertools.pairwise(centered)) / sum(a * a for a in centered)


def inflation(values: Sequence[float]) -> float:
    """The factor by which correlated neighbors widen an interval: sqrt((1 + r) / (1 - r)) for r above its noise."""
    correlation = lag1(values)
    if correlation < 1.0 / math.sqrt(max(1, len(values))):
        return 1.0
    correlation = min(correlation, 0.9)
    return math.sqrt((1 + correlation) / (1 - correlation))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """A drift over the run: relative change from first to last (Theil-Sen) and the p-value (Kendall)."""

    change: float
    p_value: float


def trend(values: Sequence[float]) -> Trend:
    """Whether the series climbs or falls over its length."""
    n = len(values)
    if n < 4:
        return Trend(change=0.0, p_value=1.0)
    slopes, score = [], 0
    for i in range(n):
        for j in range(i + 1, n):
            difference = values[j] - values[i]
            slopes.append(difference / (j - i))
            score += (difference > 0) - (difference < 0)
    variance = n * (n - 1) * (2 * n + 5) / 18
    z = (abs(score) - 1) / math.sqrt(variance) if score else 0.0
    p_value = math.erfc(max(0.0, z) / math.sqrt(2))
    middle = median(values)
    return Trend(change=median(slopes) * (n - 1) / middle if middle else 0.0, p_value=p_value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Center:
    """The Hodges-Lehmann center of paired differences and its exact signed-rank interval."""

    value: float
    interval: Interval


def signed_rank_center(differences: Sequence[float], confidence: float = 0.95) -> Center:
    """Center and interval of differences that are symmetric about it, as those of randomly ordered pairs are."""
    n = len(differences)
    walsh = sorted((differences[i] + differences[j]) / 2 for i in range(n) for j in range(i, n))
    rank, coverage = _signed_rank_cut(n, confidence)
    interval = Interval(low=walsh[rank], high=walsh[len(walsh) - 1 - rank], confidence=coverage)
    return Center(value=median(walsh), interval=interval)


@lru_cache(maxsize=256)
def _signed_rank_cut(n: int, confidence: float) -> tuple[int, float]:
    """How many Walsh averages fall outside on each side, and the coverage: the exact null distribution, counted."""
    counts = [1]
    for rank in range(1, n + 1):
        counts = [
            (counts[i] if i < len(counts) else 0) + (counts[i - rank] if i >= rank else 0)
            for i in range(len(counts) + rank)
        ]
    total, tail, cut = 2.0**n, 0.0, 0
    coverage = max(0.0, 1 - 2 / total)
    for i, count in enumerate(counts):
        tail += count / total
        if 2 * tail > 1 - confidence:
            break
        cut, coverage = i, 1 - 2 * tail
    return cut, coverage


def modality(values: Sequence[float]) -> float:
    """The m-value: 2 for one mode, 4 for two; above 2.8 a distribution is multimodal.

    The sum of the rises and falls of the histogram over its highest bin, with twenty values to a bin where there are
    enough, so that small samples do not look ragged.
    """
    n = len(values)
    low, high = quantile(values, 0.01), quantile(values, 0.99)
    bins = max(4, min(20, n // 20))
    if n < 40 or high <= low:
        return 2.0
    counts = [0] * bins
    for value in values:
        if low <= value <= high:
            counts[min(bins - 1, int((value - low) / (high - low) * bins))] += 1
    heights = [0, *counts, 0]
    # A rise or fall smaller than its counting noise is no mode.
    total, last = 0.0, 0
    for height in heights[1:]:
        if abs(height - last) > 2 * math.sqrt(max(height + last, 1)) or height == 0:
            total += abs(height - last)
            last = height
    return max(2.0, total / max(counts))


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for position in range(start, end + 1):
            ranks[order[position]] = (start + end) / 2 + 1
        start = end + 1
    return ranks
