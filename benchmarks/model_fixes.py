"""Predicted against realised savings of real models: each fix that `nearpeak profile` proposes, made by hand and timed.

    PYTHONPATH=src python benchmarks/model_fixes.py --profiles FOLDER --json benchmarks/results/model_fixes.json
    python benchmarks/model_fixes.py --show benchmarks/results/model_fixes_h200.json

The models are those of `benchmarks/model_steps.py`, training eager, as `transformers` has them. A fix is switched on
and off on one model, so that both ways are measured in turns on the same weights; what is realised is the median of
what the rounds saved. FOLDER has the profiles of the plain steps, MODEL_train.json.gz, as `benchmarks/model_profiles.py
--folder FOLDER` keeps them. `benchmarks/model_fixes_page.py` prints the table without transformers.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from findings import block_seconds
from model_fixes_cases import FIXES, Patch, patched
from model_fixes_page import table
from model_steps import Steps, make_steps

import nearpeak
from nearpeak.measure.statistics import median

SECONDS = 0.3
ROUNDS = 5
CHECKED_STEPS = 3
SAME_LOSS = 0.03
"""Losses that differ by less than this share are the same: a fix may round in another place."""


def losses(steps: Steps) -> list[float]:
    """Of the first steps: those after the first also say whether gradients and updates are right."""
    torch.manual_seed(0)
    steps.optimizer.state.clear()
    found = []
    for _ in range(CHECKED_STEPS):
        loss = steps.loss()
        found.append(loss.item())
        loss.backward()
        steps.optimizer.step()
        steps.optimizer.zero_grad()
    return found


def in_turns(steps: Steps, patches: Sequence[Patch], small: bool) -> list[tuple[float, float]]:
    """The wall times of the plain step and of the fixed one, a pair of each round, so that a drift meets both."""
    ways: tuple[Sequence[Patch], ...] = ((), patches)
    calls = []
    for way in ways:
        with patched(way):
            calls.append(1 if small else max(1, round(SECONDS / block_seconds(steps.train, 2))))
    rounds = []
    for _ in range(1 if small else ROUNDS):
        times = []
        for way, count in zip(ways, calls, strict=True):
            with patched(way):
                times.append(block_seconds(steps.train, count))
        rounds.append((times[0], times[1]))
    return rounds


@torch.no_grad()
def restore(steps: Steps, weights: Sequence[torch.Tensor]) -> None:
    for parameter, weight in zip(steps.model.parameters(), weights, strict=True):
        parameter.copy_(weight)


def rows_of(model: str, device: str, small: bool, profile: nearpeak.Profile | None) -> Iterator[dict[str, Any]]:
    """A row for each fix of a model."""
    steps = make_steps(model, "train", device, small)
    weights = [parameter.detach().clone() for parameter in steps.model.parameters()]
    plain_losses = losses(steps)
    for fix in FIXES[model]:
        restore(steps, weights)
        try:
            patches = fix.patches(steps)
            with patched(patches):
                fixed_losses = losses(steps)
            rounds = in_turns(steps, patches, small)
        except Exception as error:  # one that fails must not end the others
            print(f"{model}, {fix.rules[0]}: {type(error).__name__}: {error}", flush=True)
            traceback.print_exc()
            continue
        step_s, fixed_s = (median(list(times)) for times in zip(*rounds, strict=True))
        realised_s = median([plain - fixed for plain, fixed in rounds])
        answered = [] if profile is None else [finding for finding in profile.findings if fix.answers(finding)]
        predicted = None if profile is None else sum(finding.saving_s for finding in answered)
        yield {
            "model": model,
            "rule": fix.rules[0],
            "answered": [f"{finding.rule}@{finding.source}" for finding in answered],
            "step_s": step_s,
            "fixed_s": fixed_s,
            "realised_s": realised_s,
            "predicted_s": predicted,
            "ratio": predicted / realised_s if predicted and realised_s > 0.0 else None,
            "rounds_s": rounds,
            "losses": plain_losses,
            "fixed_losses": fixed_losses,
            "same_losses": all(
                abs(one - other) <= SAME_LOSS * abs(one) for one, other in zip(plain_losses, fixed_losses, strict=True)
            ),
        }
        del patches
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(FIXES))
    parser.add_argument("--profiles", type=Path, help="a folder with MODEL_train.json.gz: what was predicted")
    parser.add_argument("--small", action="store_true", help="tiny configurations, to try this on a CPU")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path, help="print the table of an earlier run")
    arguments = parser.parse_args()
    if arguments.show:
        print(table(json.loads(arguments.show.read_text(encoding="utf-8"))["rows"]))
        return
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    machine = nearpeak.machine()
    rows: list[dict[str, Any]] = []
    for model in arguments.models.split(","):
        saved = arguments.profiles and arguments.profiles / f"{model}_train.json.gz"
        profile = nearpeak.load(saved) if saved and saved.exists() else None
        for row in rows_of(model, device, arguments.small, profile):
            rows.append(row)
            print(table(rows[-1:]).splitlines()[-1], flush=True)
            if arguments.json:
                result = {
                    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                    "machine": machine.name,
                    "torch": torch.__version__,
                    "transformers": transformers.__version__,
                    "rows": rows,
                }
                arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
