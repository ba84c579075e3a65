"""The picture of README.md: a training step of a real model before and after `nearpeak fix`, by parts of its wall time.

    PYTHONPATH=src python -m benchmarks.pages.before_after --json OUT/before_after.json
    python -m benchmarks.pages.before_after --show benchmarks/results/before_after_h200.json

The model is one of `benchmarks.models.fix`. The step is profiled, the model is fixed, and the same step is profiled
again. `--show` draws docs/images/before_after.svg and writes it into README.md, with the sentence below it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import textwrap
from pathlib import Path
from typing import Any

import torch

import nearpeak
from nearpeak.gallery import pages
from nearpeak.gallery.examples.optimization import stacked_waterfalls
from nearpeak.units import seconds

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "images" / "before_after.svg"
BEFORE, AFTER = "<!-- before and after -->\n", "<!-- end of before and after -->\n"


def run(name: str, device: str, small: bool, without: list[str]) -> dict[str, Any]:
    """Both profiles of a step, and the fixes that were kept."""
    from benchmarks.models.fix import Program  # transformers takes seconds to import, and drawing needs none of it

    program = Program(name, device, small)
    parameters = sum(each.numel() for each in program.model.parameters())
    before = nearpeak.profile(program.step)
    fixed = program.fix(without)
    after = nearpeak.profile(program.step)
    return {
        "title": f"{type(program.model).__name__} ({parameters / 1e9:.1f} B parameters)",
        "machine": nearpeak.machine().name,
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "kept": [each.id for each in fixed.report.fixes if each.status == "kept"],
        "profiles": {
            "as it is": [[part.name, part.seconds] for part in before.waterfall.parts],
            "after nearpeak fix": [[part.name, part.seconds] for part in after.waterfall.parts],
        },
    }


def show(result: dict[str, Any]) -> str:
    """Draws the picture, and returns it as Markdown, with a sentence below it."""
    waterfalls = {name: {part: value for part, value in parts} for name, parts in result["profiles"].items()}
    title = f"A training step of {result['title']} on {result['machine']}"
    PICTURE.write_text(pages.picture(stacked_waterfalls(waterfalls, title)), encoding="utf-8")
    before, after = (seconds(sum(parts.values())) for parts in waterfalls.values())
    date = datetime.date.fromisoformat(result["date"])
    sentence = (
        f"A training step of {result['title']} on an {result['machine']}, before and after"
        " [`nearpeak fix`](docs/fix.md)"
        f" (`python -m benchmarks.pages.before_after`, torch {result['torch']}, {date.day} {date:%B %Y})."
    )
    picture = f"![{before} by parts of the wall time, and {after} after the fix]({PICTURE.relative_to(ROOT)})"
    return f"{picture}\n\n{textwrap.fill(sentence, 120, break_on_hyphens=False)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-1b")
    parser.add_argument("--without", default="torch-compile", help="ids of fixes to leave out")
    parser.add_argument("--small", action="store_true", help="a tiny configuration, to try this on a CPU")
    parser.add_argument("--json", type=Path, help="where the result is written")
    parser.add_argument("--show", type=Path, help="draws a result that was written before")
    arguments = parser.parse_args()
    if arguments.show is not None:
        readme = ROOT / "README.md"
        head, _, rest = readme.read_text(encoding="utf-8").partition(BEFORE)
        shown = show(json.loads(arguments.show.read_text(encoding="utf-8")))
        readme.write_text(f"{head}{BEFORE}\n{shown}\n{AFTER}{rest.partition(AFTER)[2]}", encoding="utf-8")
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result = run(arguments.model, device, arguments.small, [one for one in arguments.without.split(",") if one])
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
