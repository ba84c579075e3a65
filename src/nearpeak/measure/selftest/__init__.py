"""Experiments with a known answer, run on the user's own machine: does this harness measure here what it says?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nearpeak.measure.selftest.report import Report


def run(names: Sequence[str] = (), quick: bool = False, progress: Callable[[str], None] | None = None) -> Report:
    """Runs the named experiments, or all, and reports what was expected and what was found.

    `quick` takes fewer repetitions: enough to see that something is broken, too few to prove a rate of 5 %.
    """
    from nearpeak.measure.selftest.experiments import run_experiments

    return run_experiments(names, quick=quick, progress=progress or (lambda line: None))
