"""The picture of README.md: a training step of a real model before and after `nearpeak fix`, by parts of its wall time.

    PYTHONPATH=src python -m benchmarks.pages.before_after --json OUT/before_after.json
    python -m benchmarks.pages.before_after --show benchmarks/results/before_after_h200.json

The model is one of `benchmarks.models.fix`. The step is profiled, the model is fixed, and the same step is profiled
again. `--show` draws docs/images/before_after.svg and prints the sentence below it.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
from pathlib import Path
from typing import Any

import torch

import nearpeak
from nearpeak.gallery import pages
from nearpeak.gallery.examples.optimization import stacked_waterfalls
from nearpeak.units import seconds

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "images" / "before_after.svg"


def run(name: str, device: str, small: bool, without: list[str]) -> dict[str, Any]:
    """Both profiles of a step, and the fixes that were kept."""
    from benchmarks.models.fix import Program  # transformers takes seconds to import, and drawing needs none of it

    program = Program(name, device, small)
    before = nearpeak.profile(program.step)
    fixed = nearpeak.fix(
        program.model,
        input_ids=program.tokens,
        labels=program.tokens,
        use_cache=False,
        optimizer=program.optimizer,
        without=without,
        progress=lambda line: print(f"  {line}", flush=True),
    )
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    after = nearpeak.profile(program.step)
    return {
        "model": name,
        "machine": nearpeak.machine().name,
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "kept": [each.id for each in fixed.report.fixes if each.status == "kept"],
        "profiles": {
            "as it is": [[part.name, part.seconds] for part in before.waterfall.parts],
            "after nearpeak fix": [[part.name, part.seconds] for part in after.waterfall.parts],
        },
    }


def show(result: dict[str, Any], picture: Path) -> str:
    """Draws the picture, and returns the sentence below it."""
    waterfalls = {name: {part: value for part, value in parts} for name, parts in result["profiles"].items()}
    title = f"A training step of {result['model']} on {result['machine']}, by parts of its wall time"
    picture.write_text(pages.picture(stacked_waterfalls(waterfalls, title)), encoding="utf-8")
    before, after = (sum(parts.values()) for parts in waterfalls.values())
    return (
        f"{result['model']} on {result['machine']}, torch {result['torch']}, {result['date']}: {seconds(before)} a step"
        f" as it is, {seconds(after)} after `nearpeak fix` (kept: {', '.join(result['kept']) or 'nothing'})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-1b")
    parser.add_argument("--without", default="torch-compile", help="ids of fixes to leave out")
    parser.add_argument("--small", action="store_true", help="a tiny configuration, to try this on a CPU")
    parser.add_argument("--json", type=Path, help="where the result is written")
    parser.add_argument("--show", type=Path, help="draws a result that was written before")
    parser.add_argument("-o", type=Path, default=PICTURE, dest="picture", help="where --show draws")
    arguments = parser.parse_args()
    if arguments.show is not None:
        print(show(json.loads(arguments.show.read_text(encoding="utf-8")), arguments.picture))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result = run(arguments.model, device, arguments.small, [one for one in arguments.without.split(",") if one])
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
