"""Does someone else read the same? Device times beside the profiler's kernels; on a CPU beside torch's own timer."""

from __future__ import annotations

from typing import Any

import torch

from nearpeak.measure.bench import bench
from nearpeak.measure.case import Case
from nearpeak.measure.cuda import Stage
from nearpeak.measure.instrument import profiled_seconds
from nearpeak.measure.samplers import STAGE_SECONDS
from nearpeak.measure.selftest.bench_place import Place
from nearpeak.measure.selftest.report import Experiment
from nearpeak.measure.subject import IDLE_SHARE
from nearpeak.units import percent


def referee(place: Place, quick: bool) -> Experiment:
    """Single-kernel operations of several sizes."""
    return _by_profiler(place, quick) if place.cuda is not None else _by_timer(place, quick)


def _by_profiler(place: Place, quick: bool) -> Experiment:
    assert place.cuda is not None
    question = "do device times agree with the profiler's kernel durations?"
    expected = "all within 3 % or 0.3 us"
    rows: list[dict[str, Any]] = []
    for case in _cases(place)[:: 2 if quick else 1]:
        timing = bench(case, max_seconds=0.5)
        stage = Stage(place.cuda, "cold", pace_seconds=max(0.0, IDLE_SHARE * timing.seconds - STAGE_SECONDS))
        truth = profiled_seconds(case.call, stage, place.cuda)
        if truth is None:
            found = "the profiler sees no kernels here"
            return Experiment(name="referee", question=question, expected=expected, found=found, passed=None)
        rows.append({"name": case.name, "profiler": truth, "nearpeak": timing.seconds})
    agree = [abs(row["nearpeak"] - row["profiler"]) <= max(0.03 * row["profiler"], 0.3e-6) for row in rows]
    small = [row for row in rows if row["profiler"] < 2e-5]
    worst = max((abs(row["nearpeak"] - row["profiler"]) for row in small), default=0.0)
    found = f"{sum(agree)} of {len(rows)} agree; below 20 us off by at most {worst * 1e6:.2f} us"
    return Experiment(
        name="referee", question=question, expected=expected, found=found, passed=all(agree), data={"rows": rows}
    )


def _by_timer(place: Place, quick: bool) -> Experiment:
    import torch.utils.benchmark

    rows = []
    for case in _cases(place)[:: 2 if quick else 1]:
        timing = bench(case, cache="hot", max_seconds=0.5)
        timer = torch.utils.benchmark.Timer("call()", globals={"call": case.call}, num_threads=torch.get_num_threads())
        rows.append((case.name, timer.blocked_autorange(min_run_time=0.3).median, timing.seconds))
    off = [ours / theirs - 1 for _, theirs, ours in rows]
    worst = max(off, key=abs)
    return Experiment(
        name="referee",
        question="do hot CPU times agree with torch.utils.benchmark?",
        expected="within 10 %, as both are subject to the machine's noise",
        found=f"worst of {len(rows)}: {percent(worst, 1)}",
        passed=abs(worst) <= 0.1,
        data={"rows": [list(row) for row in rows]},
    )


def _cases(place: Place) -> list[Case]:
    device = place.device
    scale = 1 if place.cuda is not None else 8
    x = torch.randn(2048 // scale, 2048 // scale, device=device)
    vector = torch.randn(2**22 // scale, device=device)
    small = torch.randn(2**16, device=device)
    return [
        Case(torch.exp, small, name="exponential 64k"),
        Case(torch.softmax, x, -1, name="softmax"),
        Case(torch.add, vector, vector, name="add"),
        Case(torch.mm, x, x, name="product"),
    ]
