"""Does `nearpeak diff` say that nothing changed when nothing did, and name a kernel that is 3 % slower?

    PYTHONPATH=src python -m benchmarks.profiles.diff --json benchmarks/results/diff.json
    python -m benchmarks.profiles.diff --show benchmarks/results/diff_h200.json

Profiles `benchmarks/profiles/diff_steps.py` in separate processes, many times unchanged and a few times with a kernel
that is 3 % slower. Compares each run with the next one, and each slower run with the unchanged one before it.
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
from nearpeak.diffs.difference import difference

SCRIPT = Path(__file__).with_name("diff_steps.py")
KERNEL = "scaled_kernel"
AHEAD = 2
"""Processes that get ready while another one has its turn."""


# imports first, and waits for its turn: nothing of it meets the run before
STARTER = "import sys, torch, nearpeak.profiling.session; input(); from nearpeak.cli.main import main; sys.exit(main())"


class Waiting:
    """A process of its own that is ready to profile; while one has its turn, the next gets ready."""

    def __init__(self, saved: Path, slower: float, steps: int) -> None:
        self.saved = saved
        self.command = ["profile", "--no-keep", "--save", str(saved), str(SCRIPT)]
        self.command += ["--steps", str(steps), "--slower", str(slower)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", STARTER, *self.command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def profile(self) -> nearpeak.Profile:
        """Its turn."""
        said, _ = self._process.communicate("\n")
        if self._process.returncode:
            raise RuntimeError(f"{' '.join(self.command)} failed:\n{said[-2000:]}")
        return nearpeak.load(self.saved)


def compared(kind: str, before: nearpeak.Profile, after: nearpeak.Profile) -> dict[str, Any]:
    diff = difference(before, after)
    return {
        "kind": kind,
        "before_s": before.wall_s,
        "after_s": after.wall_s,
        "verdict": diff.verdict,
        "ops": [
            {
                "name": " ".join(op.names_after or op.names_before),
                "change": op.after_s / op.before_s - 1 if op.before_s else None,
            }
            for op in diff.ops
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
    parser.add_argument("--folder", type=Path, help="keep the profiles here")
    parser.add_argument("--show", type=Path, help="print the table of an earlier run")
    arguments = parser.parse_args()
    if arguments.show:
        print(summary(json.loads(arguments.show.read_text(encoding="utf-8"))["rows"]))
        return
    machine = nearpeak.machine()
    rows: list[dict[str, Any]] = []
    every = max(1, arguments.runs // max(1, arguments.slow_runs))
    plan: list[tuple[str, float]] = []
    for number in range(arguments.runs):
        plan.append((f"run{number}", 0.0))
        if number % every == every - 1 and number // every < arguments.slow_runs:
            plan.append((f"slow{number}", arguments.slower))
    with tempfile.TemporaryDirectory() as temporary:
        folder, before = arguments.folder or Path(temporary), None
        waiting = [Waiting(folder / f"{name}.json.gz", slower, arguments.steps) for name, slower in plan[:AHEAD]]
        for number, (_, slower) in enumerate(plan):
            now = waiting.pop(0).profile()
            if number + AHEAD < len(plan):
                name, slower_then = plan[number + AHEAD]
                waiting.append(Waiting(folder / f"{name}.json.gz", slower_then, arguments.steps))
            if before is not None:
                rows.append(compared("slower" if slower else "same", before, now))
            before = before if slower else now
            print(f"{number + 1} of {len(plan)}: {rows[-1:]}", file=sys.stderr)
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
