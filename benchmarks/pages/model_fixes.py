"""The table of predicted against realized savings of real models, as docs/findings.md has it.

python -m benchmarks.pages.model_fixes benchmarks/results/model_fixes_h200.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One row for each fix: what was predicted, and what was realized, the median round and all of them."""
    lines = [
        "| model | finding | step, ms | predicted, ms | realized, ms | least to most | predicted / realized | |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        predicted = "-" if row["predicted_s"] is None else f"{row['predicted_s'] * 1e3:.2f}"
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        finding = " and ".join(row["answered"]) or row["rule"]
        rounds = sorted((plain - fixed) * 1e3 for plain, fixed in row["rounds_s"])
        times = f"{row['step_s'] * 1e3:.2f} | {predicted} | {row['realized_s'] * 1e3:.2f}"
        remark = "" if row["same_losses"] else "another loss"
        spread = f"{rounds[0]:.2f} to {rounds[-1]:.2f}"
        lines.append(f"| {row['model']} | {finding} | {times} | {spread} | {ratio} | {remark} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="what benchmarks.models.fixes --json wrote")
    print(table(json.loads(parser.parse_args().results.read_text(encoding="utf-8"))["rows"]))


if __name__ == "__main__":
    main()
