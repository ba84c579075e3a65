"""Fits the constants of eager code's memory on published peaks, where too low weighs more than too high.

    python -m benchmarks.plan.fit_memory [--weight 4]

Prints the constants of `nearpeak.plan.training.memory` and their errors, by source, and with each source left out. The
rest of the memory model has no fitted constants: `measurements/peer_predictions.json` has 43 peaks that were in no fit,
and this prints the errors there too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.plan.peers import own_row
from nearpeak.plan.training import memory
from nearpeak.plan.validation.training import MeasuredTraining, read_training

DATA = Path(__file__).resolve().parents[1] / "measurements"
NAMES = ("EAGER_BLOCK", "EAGER_ACTIVATION", "EAGER_RUNNING", "EAGER_LOGITS")
START, LEAST, MOST = (6.5, 2.0, 40.0, 8.0), (0.0, 2.0, 0.0, 6.5), (20.0, 3.0, 60.0, 12.0)
"""A gated feed keeps at least its activated half; logits take at least what fused losses do."""
STEPS = (4.0, 0.5, 20.0, 1.0)
ALLOWED = 0.03
"""What a prediction may lie below the measured peak."""


def use(values: Sequence[float]) -> None:
    """Replace the constants of the memory model."""
    for name, value in zip(NAMES, values, strict=True):
        setattr(memory, name, value)
    memory._layer_bytes.cache_clear()


def errors(runs: Sequence[MeasuredTraining]) -> list[float]:
    return [memory.memory_by_stage(run.job)[0].reserved / (run.memory or 1.0) - 1 for run in runs]


def cost(runs: Sequence[MeasuredTraining], values: Sequence[float], weight: float) -> float:
    use(values)
    run_errors = errors(runs)
    return sum(abs(error) + weight * max(0.0, -ALLOWED - error) for error in run_errors) / len(run_errors)


def fit(runs: Sequence[MeasuredTraining], weight: float) -> list[float]:
    """One constant after the other, in steps that shrink."""
    values, best, scale = list(START), cost(runs, START, weight), 1.0
    for _ in range(6):
        for index, step in enumerate(STEPS):
            for sign in (1, -1):
                while True:
                    tried = list(values)
                    tried[index] = min(MOST[index], max(LEAST[index], tried[index] + sign * scale * step))
                    loss = cost(runs, tried, weight)
                    if loss >= best - 1e-6:
                        break
                    values, best = tried, loss
        scale /= 2
    return values


def show(title: str, run_errors: Sequence[float]) -> None:
    low = sum(error < -ALLOWED for error in run_errors)
    mean = sum(map(abs, run_errors)) / len(run_errors)
    print(f"  {title:44}{len(run_errors):4}  mean {mean:5.1%}  lowest {min(run_errors):+6.1%}  too low {low}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weight", type=float, default=4.0, help="of what is too low, against too high")
    weight = parser.parse_args().weight
    now = [getattr(memory, name) for name in NAMES]
    runs = [run for run in read_training(DATA / "measured_training.csv")[0] if run.memory is not None]
    print("in the package:", dict(zip(NAMES, now, strict=True)))
    show("all", errors(runs))
    for source in sorted({run.source for run in runs}):
        show(source, errors([run for run in runs if run.source == source]))
    published = json.loads((DATA / "peer_predictions.json").read_text(encoding="utf-8"))["published"]["rows"]
    show("SimuMax's rows, in no fit", [own_row(row)[1] / row["memory_bytes"] - 1 for row in published])
    print("fitted:", dict(zip(NAMES, fit(runs, weight), strict=True)))
    show("all", errors(runs))
    eager = [run for run in runs if run.job.software == "eager"]
    for model in sorted({run.job.model.name for run in eager}):
        use(fit([run for run in runs if run.job.model.name != model], weight))
        show(f"{model}, fitted on the others", errors([run for run in eager if run.job.model.name == model]))


if __name__ == "__main__":
    main()
