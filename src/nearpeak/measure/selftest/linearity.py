"""Is a millisecond a millisecond? Spins and sleeps of known length."""

from __future__ import annotations

import time
from typing import Any

import torch

from nearpeak.measure.bench import bench
from nearpeak.measure.case import Case
from nearpeak.measure.selftest.bench_place import Place
from nearpeak.measure.selftest.report import Experiment
from nearpeak.units import percent, seconds

LENGTHS = (2e-6, 5e-6, 10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3)


def spin(place: Place, quick: bool) -> Experiment:
    """Reported time against the spun time, from 2 us to 20 ms."""
    question = "does the reported time grow as the true time does?"
    expected = "slope 1 within 1 % from 2 us to 20 ms"
    if place.spin is None:
        return Experiment(name="spin", question=question, expected=expected, found="needs triton", passed=None)
    rows: list[dict[str, float]] = []
    for length in LENGTHS[:: 3 if quick else 1]:
        case = place.spin_case(round(length * 1e9), name=f"spin {seconds(length)}")
        timing = bench(case, cache="hot" if place.cuda is None else "cold", max_seconds=0.3, warmup_seconds=0.05)
        rows.append({"true": length, "reported": timing.seconds, "low": timing.low, "high": timing.high})
    slope, intercept = relative_fit([row["true"] for row in rows], [row["reported"] for row in rows])
    worst = max(abs(row["reported"] - intercept - slope * row["true"]) / row["true"] for row in rows)
    found = f"slope {slope:.4f}, intercept {seconds(intercept)}, worst point off the line by {percent(worst, 2)}"
    return Experiment(
        name="spin",
        question=question,
        expected=expected,
        found=found,
        passed=abs(slope - 1) <= 0.01,
        data={"rows": rows, "slope": slope, "intercept": intercept},
    )


def relative_fit(xs: list[float], ys: list[float]) -> tuple[float, float]:
    """Slope and intercept of y = a + b x, with every point weighing by its relative error.

    >>> slope, intercept = relative_fit([1.0, 10.0, 100.0], [1.5, 10.5, 100.5])
    >>> round(slope, 6), round(intercept, 6)
    (1.0, 0.5)
    """
    weights = [1 / x**2 for x in xs]
    total = sum(weights)
    mean_x = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
    mean_y = sum(w * y for w, y in zip(weights, ys, strict=True)) / total
    covariance = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in zip(weights, xs, ys, strict=True))
    variance = sum(w * (x - mean_x) ** 2 for w, x in zip(weights, xs, strict=True))
    slope = covariance / variance
    return slope, mean_y - slope * mean_x


def sleep(place: Place, quick: bool) -> Experiment:
    """A sleep on the host, beside an independent clock."""
    length = 2e-3
    anchor = torch.zeros(1)

    def call(anchor: Any) -> None:
        time.sleep(length)

    timing = bench(Case(call, anchor, name="sleep"), cache="hot", max_seconds=0.5, warmup_seconds=0.02)
    count = 50 if quick else 150
    start = time.monotonic_ns()
    for _ in range(count):
        time.sleep(length)
    independent = (time.monotonic_ns() - start) / count * 1e-9
    off = timing.seconds / independent - 1
    return Experiment(
        name="sleep",
        question="does CPU time agree with another clock?",
        expected="at least 2 ms, and within 5 % of the monotonic clock",
        found=f"{seconds(timing.seconds)}, the other clock says {seconds(independent)} ({percent(off, 2)})",
        passed=timing.seconds >= length and abs(off) <= 0.05,
        data={"reported": timing.seconds, "independent": independent},
    )
