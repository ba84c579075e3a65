"""The experiments by name, and how they are run."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.measure.selftest import caches, comparisons, faults, linearity, referee, waiting
from nearpeak.measure.selftest.bench_place import Place, place
from nearpeak.measure.selftest.report import Experiment, Report

EXPERIMENTS: dict[str, Callable[[Place, bool], Experiment]] = {
    "spin": linearity.spin,
    "sleep": linearity.sleep,
    "waiting": waiting.waiting,
    "copy": caches.copy,
    "eviction": caches.eviction,
    "referee": referee.referee,
    "ratio": comparisons.ratio,
    "coverage": comparisons.coverage,
    "same": comparisons.same,
    "drift": comparisons.drift,
    "faults": faults.faults,
}


def run_experiments(names: Sequence[str], *, quick: bool, progress: Callable[[str], None]) -> Report:
    """Runs them one after the other; an experiment that cannot run here says why."""
    for name in names:
        if name not in EXPERIMENTS:
            raise UsageError(f"There is no experiment {name!r}. {did_you_mean(name, EXPERIMENTS)}")
    here = place()
    done = []
    for name in names or EXPERIMENTS:
        progress(f"self-test: {name}")
        start = time.perf_counter()
        experiment = EXPERIMENTS[name](here, quick)
        done.append(replace(experiment, seconds=time.perf_counter() - start))
        progress(f"self-test: {name}: {experiment.found}")
    return Report(
        device=here.name,
        torch=torch.__version__,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        quick=quick,
        experiments=tuple(done),
    )
