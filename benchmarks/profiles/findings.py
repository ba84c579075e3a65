"""Predicted against realized savings: every planted waste of the corpus, and its clean twin, on this machine.

    PYTHONPATH=src python -m benchmarks.profiles.findings --json benchmarks/results/findings.json
    python -m benchmarks.profiles.findings --show benchmarks/results/findings_h200.json

Each file of tests/corpus has a step with one planted waste and the same step without it. The waste is profiled, and
what its finding predicts, as a share of the step, is held against what the step without it saves of the wall time, both
measured in turns. Where the device waits for the host, whose speed changes from second to second, the median of several
profiles and measurements counts.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import nearpeak
from nearpeak.measure.statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from planted import CASES, load

CLOSE = 0.2
"""A prediction is right that is within this share of what was realized."""
SECONDS = 0.15
ROUNDS = 5
REPEATS = 3
WAITING = 0.15
"""Of the step: with more idle time the host counts."""


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def block_seconds(step: Callable[[], Any], calls: int) -> float:
    """The wall time of one step, of some in a row."""
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        step()
    synchronize()
    return (time.perf_counter() - start) / calls


def wall_seconds(steps: Sequence[Callable[[], Any]]) -> list[float]:
    """The wall times of steps, measured in turns, so that a drift meets all of them."""
    calls = []
    for step in steps:
        block_seconds(step, 2)
        calls.append(max(2, round(SECONDS / block_seconds(step, 3))))
    rounds = [[block_seconds(step, count) for step, count in zip(steps, calls, strict=True)] for _ in range(ROUNDS)]
    return [median(list(times)) for times in zip(*rounds, strict=True)]


def one(name: str, device: str, folder: Path | None) -> dict[str, Any]:
    """A planted waste: what was found, what it predicts, and what its twin saves."""
    module = load(name)
    torch.set_float32_matmul_precision("high")  # "highest" is a waste of its own
    waste, clean = module.waste(device), module.clean(device)
    work = getattr(module, "work", lambda device: 1.0)(device)
    twin = nearpeak.profile(clean)
    predicted, realized = [], []
    for number in range(REPEATS):
        profile = nearpeak.profile(waste)
        findings = [finding for finding in shown(profile) if finding.rule == module.RULE]
        wasted_s, clean_s = wall_seconds((waste, clean))
        predicted.append(sum(map(profile.share_of, findings)))  # the sizes of the corpus never recur
        realized.append((wasted_s - clean_s / work) / wasted_s)
        if folder:
            profile.save(folder / f"{name}_waste{number}.json.gz")
        if profile.waterfall.seconds("idle") < WAITING * profile.wall_s:
            break
    if folder:
        twin.save(folder / f"{name}_clean.json.gz")
    return {
        "name": name,
        "rule": module.RULE,
        "wasted_s": wasted_s,
        "clean_s": clean_s,
        "work": work,
        "predicted": median(predicted),
        "realized": median(realized),
        "ratio": median(predicted) / median(realized) if median(realized) > 0 else None,
        "each": list(zip(predicted, realized, strict=True)),
        "residual": None if profile.replayed_s is None else profile.replayed_s / profile.wall_s - 1.0,
        "found": median(predicted) > 0.0,
        "source": findings[0].source if findings else "",
        "others": [finding.rule for finding in shown(profile) if finding not in findings],
        "twin": [finding.rule for finding in shown(twin)],
    }


def shown(profile: nearpeak.Profile) -> list[nearpeak.Finding]:
    return [finding for finding in profile.findings if profile.share_of(finding) >= 0.01]


def is_close(row: Mapping[str, Any]) -> bool:
    return bool(row["found"]) and abs(row["predicted"] - row["realized"]) <= CLOSE * abs(row["realized"])


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| planted waste | rule | step, ms | predicted | realized | predicted / realized | |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        remark = "" if is_close(row) else "missed" if row["found"] else "not found"
        if row["twin"]:
            remark += f" twin has {', '.join(row['twin'])}"
        shares = [f"{row[key]:.1%}" for key in ("predicted", "realized")]
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        cells = [row["name"], row["rule"], f"{row['wasted_s'] * 1e3:.3f}", *shares, ratio, remark.strip()]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of files of the corpus (all)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="keep the profiles here")
    parser.add_argument("--show", type=Path, help="print the table of an earlier run")
    arguments = parser.parse_args()
    if arguments.show:
        print(table(json.loads(arguments.show.read_text(encoding="utf-8"))["rows"]))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    machine = nearpeak.machine()
    if arguments.folder:
        arguments.folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for name in arguments.names or CASES:
        if device not in load(name).DEVICES:
            continue
        try:
            rows.append(one(name, device, arguments.folder))
        except Exception as error:  # one that fails must not end the others
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            traceback.print_exc()
            continue
        print(table(rows[-1:]).splitlines()[-1], flush=True)
        if arguments.json:
            result = {
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "machine": machine.name,
                "torch": torch.__version__,
                "rows": rows,
            }
            arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if device == "cuda":
            torch.cuda.empty_cache()
    close = sum(is_close(row) for row in rows)
    quiet = sum(not row["twin"] for row in rows)
    print(
        f"{len(rows)} planted: {sum(row['found'] for row in rows)} found, {close} predicted right, {quiet} twins quiet"
    )


if __name__ == "__main__":
    main()
