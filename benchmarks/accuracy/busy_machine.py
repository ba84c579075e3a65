"""Profiles of three scripts beside other work on all cores: what is graded A or B is what a quiet machine shows.

    PYTHONPATH=src python -m benchmarks.accuracy.busy_machine --json busy_machine.json

Profiles each script on the machine as it is, then starts a process on each core that does nothing but compute, and
profiles the scripts again, 20 times in all. A profile that is graded A or B must have the step time of the quiet ones
within 10 %, the same largest loss, and a share of that within 10 points. Ends with 1 where one does not. The quiet
profiles are only worth as much as the machine is quiet: their grades are in the result.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOLERANCE = 0.10
SCRIPTS = {
    "training": """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 256))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(60):
    rows = torch.randn(128, 256)
    optimizer.zero_grad()
    (model(rows) - rows).square().mean().backward()
    optimizer.step()
""",
    "python": """
import random
import torch
from torch import nn

model = nn.Linear(64, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(80):
    rows = torch.tensor([[random.gauss(0.0, 1.0) for _ in range(64)] for _ in range(32)])
    optimizer.zero_grad()
    model(rows).logsumexp(1).mean().backward()
    optimizer.step()
""",
    "inference": """
import torch
from torch import nn

model = nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 4, 512, batch_first=True), 4).eval()
rows = torch.randn(4, 96, 128)
with torch.no_grad():
    for _ in range(60):
        model(rows)
""",
}
BUSY = """
import array
values = array.array("d", range(1 << 20))
while True:
    total = sum(values)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20, help="profiles beside other work")
    parser.add_argument("--quiet-runs", type=int, default=3, help="profiles of each script without")
    parser.add_argument("--busy", type=int, default=len(os.sched_getaffinity(0)), help="processes of other work")
    parser.add_argument("--on", help="a machine of the catalogue (this one)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    began = time.perf_counter()
    results: dict[str, Any] = {"tolerance": TOLERANCE, "busy": arguments.busy, "load": os.getloadavg(), "scripts": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in SCRIPTS.items():
            (Path(folder) / f"{name}.py").write_text(text)
        for name in SCRIPTS:
            runs = [_profile(Path(folder) / f"{name}.py", arguments.on) for _ in range(arguments.quiet_runs)]
            results["scripts"][name] = {"quiet": runs, "busy": []}
            print(f"{name:10} quiet: {', '.join(map(_described, runs))}", flush=True)
        with _other_work(arguments.busy):
            for number in range(arguments.runs):
                name = list(SCRIPTS)[number % len(SCRIPTS)]
                entry = results["scripts"][name]
                found = _profile(Path(folder) / f"{name}.py", arguments.on)
                found["differs"] = _difference(found, entry["quiet"])
                entry["busy"].append(found)
                wrong = found["differs"] if found["grade"] in "AB" else ""
                print(f"{name:10} busy: {_described(found)}{f'  WRONG: {wrong}' if wrong else ''}", flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    busy = [found for entry in results["scripts"].values() for found in entry["busy"]]
    wrong = [found for found in busy if found["grade"] in "AB" and found["differs"]]
    grades = {letter: sum(found["grade"] == letter for found in busy) for letter in "ABCF"}
    results |= {"grades": grades, "wrong": len(wrong), "seconds": time.perf_counter() - began}
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{len(busy)} profiles beside other work: {grades}; graded A or B and different: {len(wrong)}")
    sys.exit(1 if wrong else 0)


@contextlib.contextmanager
def _other_work(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        time.sleep(1.0)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _profile(script: Path, on: str | None) -> dict[str, Any]:
    command = [sys.executable, "-m", "nearpeak", "profile", "--no-keep", "--json", "-"]
    command += [*(["--on", on] if on else []), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    profile = json.loads(done.stdout[done.stdout.index("{") :])
    parts = {part["name"]: part["seconds"] / profile["wall_s"] for part in profile["waterfall"]["parts"]}
    loss = max((name for name in parts if name != "ideal"), key=lambda name: parts[name])
    return {
        "grade": profile["grade"]["letter"],
        "reasons": profile["grade"]["reasons"],
        "wall_s": profile["wall_s"],
        "loss": loss,
        "loss_share": parts[loss],
        "conditions": profile["conditions"],
    }


def _difference(found: dict[str, Any], quiet: list[dict[str, Any]]) -> str:
    """What is not as on a quiet machine; "" where nothing is."""
    wall = statistics.median(each["wall_s"] for each in quiet)
    if abs(found["wall_s"] / wall - 1.0) > TOLERANCE:
        return f"a step of {found['wall_s']:.3g} s and not of {wall:.3g} s"
    alike = [each for each in quiet if each["loss"] == found["loss"]]
    if not alike:
        return f"most is lost to {found['loss']} and not to {quiet[0]['loss']}"
    share = statistics.median(each["loss_share"] for each in alike)
    if abs(found["loss_share"] - share) > TOLERANCE:
        return f"{found['loss_share']:.0%} and not {share:.0%} is lost to {found['loss']}"
    return ""


def _described(found: dict[str, Any]) -> str:
    return (
        f"{1e3 * found['wall_s']:.3g} ms {found['loss']} {found['loss_share']:.0%} grade {found['grade']} "
        f"({'; '.join(found['reasons'])})"
    )


if __name__ == "__main__":
    main()
