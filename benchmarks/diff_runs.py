"""Does `nearpeak diff` say that nothing changed when nothing did, and name a kernel that is 3 % slower?

    PYTHONPATH=src python benchmarks/diff_runs.py --json benchmarks/results/diff.json
    python benchmarks/diff_runs.py --show benchmarks/results/diff_h200.json

Profiles `benchmarks/diff_steps.py` in processes of their own, many times as it is and some times with a kernel that is
3 % slower, and compares: each run with the next one, and each slower run with the plain one before it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nearpeak
from nearpeak.diagnose.difference import difference

SCRIPT = Path(__file__).with_name("diff_steps.py")
KERNEL = "scaled_kernel"


def profiled(folder: Path, name: str, slower: float, steps: int) -> nearpeak.Profile:
    """The profile of a process of its own."""
    saved = folder / f"{name}.json.gz"
    command = [sys.executable, "-m", "nearpeak", "profile", "--no-keep", "--save", str(saved)]
    command += [str(SCRIPT), "--steps", str(steps), "--slower", str(slower)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return nearpeak.load(saved)


def compared(kind: str, before: nearpeak.Profile, after: nearpeak.Profile) -> dict[str, Any]:
    found = difference(before, after)
    return {
        "kind": kind,
        "before_s": before.wall_s,
        "after_s": after.wall_s,
        "verdict": found.verdict,
        "ops": [
            {
                "name": " ".join(op.names_after or op.names_before),
                "change": op.after_s / op.before_s - 1 if op.before_s else None,
            }
            for op in found.ops
        ],
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    plain = [row for row in rows if row["kind"] == "same"]
    slow = [row for row in rows if row["kind"] == "slower"]
    quiet = sum(row["verdict"] == "same" and not row["ops"] for row in plain)
    named = sum(any(KERNEL in op["name"] for op in row["ops"]) for row in slow)
    wrong = sum(any(KERNEL not in op["name"] for op in row["ops"]) for row in slow)
    ratios = [row["after_s"] / row["before_s"] - 1 for row in plain]
    return "\n".join(
        [
            "| pairs of runs | pairs | |",
            "| --- | ---: | --- |",
            f"| nothing changed | {len(plain)} | {quiet} with nothing named; steps differ by "
            f"{min(ratios, default=0.0):+.1%} to {max(ratios, default=0.0):+.1%} |",
            f"| one kernel 3 % slower | {len(slow)} | {named} name it, {wrong} name another op |",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=21, help="as it is")
    parser.add_argument("--slow-runs", type=int, default=5, help="with the slower kernel, spread among the others")
    parser.add_argument("--slower", type=float, default=0.03)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path, help="print the table of an earlier run")
    arguments = parser.parse_args()
    if arguments.show:
        print(summary(json.loads(arguments.show.read_text(encoding="utf-8"))["rows"]))
        return
    machine = nearpeak.machine()
    rows: list[dict[str, Any]] = []
    every = max(1, arguments.runs // max(1, arguments.slow_runs))
    slow_left = arguments.slow_runs
    with tempfile.TemporaryDirectory() as temporary:
        folder, before = Path(temporary), None
        for number in range(arguments.runs):
            now = profiled(folder, f"run{number}", 0.0, arguments.steps)
            if before is not None:
                rows.append(compared("same", before, now))
            if number % every == every - 1 and slow_left:
                slow_left -= 1
                slow = profiled(folder, f"slow{number}", arguments.slower, arguments.steps)
                rows.append(compared("slower", now, slow))
            before = now
            print(f"{number + 1} of {arguments.runs}: {rows[-1:]}", file=sys.stderr)
            if arguments.json:
                result = {
                    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                    "machine": machine.name,
                    "slower": arguments.slower,
                    "rows": rows,
                }
                arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(summary(rows))


if __name__ == "__main__":
    main()
