"""The tables of docs/fix.md, from what the benchmarks of `nearpeak.fix` wrote; `--page` writes them into the page.

    python -m benchmarks.pages.fix benchmarks/results/fix_h200.json benchmarks/results/fix_architectures_h200.json
    python -m benchmarks.pages.fix --page

A file of `benchmarks.models.fix` gives the table of steps and that of its fixes, one of
`benchmarks.models.fix_architectures` that of models and that of its fixes.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "fix.md"
RESULTS = ROOT / "benchmarks" / "results"
BLOCKS = {"steps": RESULTS / "fix_h200.json", "models": RESULTS / "fix_architectures_h200.json"}
"""The blocks of the page, `<!-- steps -->` to `<!-- end of steps -->`, and their files."""
STEP_WAYS = ("eager", "liger", "compiled", "fixed", "hand")
MODEL_WAYS = ("eager", "liger", "compiled", "fixed")
NEAR = 0.2
"""A prediction within this share of the realized saving is right."""


def step_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Milliseconds and GB of each way, for each model."""
    lines = [
        f"| model | {' | '.join(STEP_WAYS)} | fixed / eager |",
        f"| --- |{' ---: |' * (len(STEP_WAYS) + 1)}",
    ]
    for row in rows:
        cells = []
        for way in STEP_WAYS:
            result = row.get(way) or {}
            memory = result.get("peak_bytes")
            memory_text = "" if memory is None else f", {memory / 1e9:.0f} GB"
            cells.append(f"{1e3 * result['step_s']:.0f} ms{memory_text}" if "step_s" in result else "-")
        share = row["fixed"]["step_s"] / row["eager"]["step_s"] if "fixed" in row and "eager" in row else None
        lines.append(f"| {row['model']} | {' | '.join(cells)} | {'-' if share is None else f'{share:.2f}'} |")
    return "\n".join(lines)


def model_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Milliseconds of each way, the best other way, and what was kept, for each model in each mode."""
    lines = [
        f"| model | mode | {' | '.join(MODEL_WAYS)} | fixed / best other | kept |",
        f"| --- | --- |{' ---: |' * (len(MODEL_WAYS) + 1)} --- |",
    ]
    for row in sorted(rows, key=lambda each: str(each["mode"]), reverse=True):
        steps = {way: median(each["rounds_s"]) for way, each in row["ways"].items() if each.get("rounds_s")}
        cells = [f"{1e3 * steps[way]:.2f}" if way in steps else "-" for way in MODEL_WAYS]
        kept = [each["id"] for each in row.get("report", {}).get("fixes", ()) if each["status"] == "kept"]
        problem = row["ways"].get("fixed", {}).get("problem")
        ratio = ratio_to_best(row)
        cells.append("-" if ratio is None else f"{ratio:.2f}")
        lines.append(
            f"| {row['model']} | {row['mode']} | {' | '.join(cells)} | {problem or ', '.join(kept) or 'none'} |"
        )
    return "\n".join(lines)


def ratio_to_best(row: Mapping[str, Any]) -> float | None:
    """Of the fixed step to the best other one, the median of the rounds."""
    rounds = {way: each["rounds_s"] for way, each in row["ways"].items() if each.get("rounds_s")}
    others = [way for way in rounds if way != "fixed"]
    if "fixed" not in rounds or not others:
        return None
    best = min(others, key=lambda way: median(rounds[way]))
    return median(now / was for now, was in zip(rounds["fixed"], rounds[best], strict=True))


def fix_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """What was predicted and realized, for each fix that was kept; and how many predictions are right."""
    lines = [
        "| model | fix | sites | predicted, ms | realized, ms | predicted / realized |",
        "| --- | --- |" + " ---: |" * 4,
    ]
    ratios = []
    for row in rows:
        report = row.get("report") or {"fixes": [], "sites": []}
        for each in report["fixes"]:
            if each["status"] != "kept" or each["speed"] is None:
                continue
            speed = each["speed"]
            saved = speed["before_s"] * (1.0 - speed["ratio"])
            predicted = each["predicted_s"]
            ratio = None if predicted is None else predicted / saved
            ratios.append(ratio)
            sites = sum(site["fix"] == each["id"] and site["status"] == "replaced" for site in report["sites"])
            shown = ("-", "-") if predicted is None or ratio is None else (f"{1e3 * predicted:.2f}", f"{ratio:.2f}")
            where = f"{row['model']}, {row['mode']}" if "mode" in row else row["model"]
            lines.append(f"| {where} | `{each['id']}` | {sites} | {shown[0]} | {1e3 * saved:.2f} | {shown[1]} |")
    right = sum(ratio is not None and abs(ratio - 1.0) <= NEAR for ratio in ratios)
    predicted_count = sum(ratio is not None for ratio in ratios)
    lines += [
        "",
        f"{right} of {predicted_count} predictions are within {NEAR:.0%}, of {len(ratios)} fixes that were kept.",
    ]
    return "\n".join(lines)


def text_of(result: Mapping[str, Any]) -> str:
    """All tables of a file."""
    rows = result["rows"]
    first = model_table(rows) if all("ways" in row for row in rows) else step_table(rows)
    where = f"{result['machine']}, torch {result['torch']}, transformers {result['transformers']}"
    return f"{first}\n\n{fix_table(rows)}\n\n{where}."


def updated(page: str) -> str:
    """The page with the blocks of the files that there are."""
    for name, file in BLOCKS.items():
        if file.exists():
            text = text_of(json.loads(file.read_text(encoding="utf-8")))
            block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
            page = block.sub(lambda match, text=text: f"{match[1]}\n{text}\n\n{match[2]}", page)  # type: ignore[misc]
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="*")
    parser.add_argument("--page", action="store_true", help=f"write the blocks of {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args()
    for file in arguments.results:
        print(text_of(json.loads(file.read_text(encoding="utf-8"))))
    if arguments.page:
        PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
