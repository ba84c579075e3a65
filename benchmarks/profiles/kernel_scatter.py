"""How far do times of the same kernels differ, from step to step and from process to process, on a GPU?

    PYTHONPATH=src python -m benchmarks.profiles.kernel_scatter --json benchmarks/results/kernel_scatter.json
    python -m benchmarks.profiles.kernel_scatter --show benchmarks/results/kernel_scatter_h200.json

Each process runs the network of `benchmarks/profiles/diff_steps.py`, unchanged or with a kernel that is 3 % slower:
three single steps under torch's profiler with others between them, and two blocks of six steps in a row. The result has
the median time of each kernel of a step.
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
from statistics import median
from typing import Any

PROCESSES, SLOWER = 6, 0.03
SINGLE, BLOCKS, IN_BLOCK, BETWEEN = 3, 2, 6, 5
Event = Sequence[Any]
"""Start and duration in nanoseconds, and the name of the kernel."""


def recorded(slower: float) -> dict[str, Any]:
    """The kernels of profiled steps of this process."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.profiles.diff_steps import Layer

    torch.manual_seed(0)
    rows, width, layers = 16384, 4096, 12
    model = torch.nn.Sequential(*(Layer(width, slower) for _ in range(layers))).to("cuda", torch.bfloat16)
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)

    def run(steps: int) -> list[Event]:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for _ in range(steps):
                model(x)
            torch.cuda.synchronize()
        events = profiler.profiler.kineto_results.events()
        return sorted(
            (event.start_ns(), event.duration_ns(), event.name())
            for event in events
            if "CUDA" in str(event.device_type())
        )

    times: dict[str, Any] = {"slower": slower, "single": [], "multi": []}
    with torch.no_grad():
        for _ in range(5 + 10):
            model(x)
        torch.cuda.synchronize()
        for _ in range(SINGLE):
            times["single"].append(run(1))
            for _ in range(BETWEEN):
                model(x)
            torch.cuda.synchronize()
        for _ in range(BLOCKS):
            times["multi"].append(run(IN_BLOCK))
    return times


def summary(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The median microseconds of each kernel, by step."""
    steps = [("single", events) for events in raw["single"]]
    for events in raw["multi"]:
        each = len(events) // IN_BLOCK
        steps += [("in a block", events[at * each : (at + 1) * each]) for at in range(IN_BLOCK)]
    rows = []
    for how, events in steps:
        by_name: dict[str, list[float]] = {}
        for _, nanoseconds, name in events:
            by_name.setdefault(name, []).append(nanoseconds / 1e3)
        rows.append({"how": how, "us": {name: median(times) for name, times in by_name.items() if len(times) > 1}})
    return {"slower": raw["slower"], "steps": rows}


def table(processes: Sequence[Mapping[str, Any]]) -> str:
    """The range of each kernel over all steps of processes that run the same code."""
    lines = ["| kernel | slower | steps | least, us | most, us |", "| --- | ---: | ---: | ---: | ---: |"]
    for slower in sorted({process["slower"] for process in processes}):
        steps = [step["us"] for process in processes if process["slower"] == slower for step in process["steps"]]
        for name in steps[0]:
            times = [step[name] for step in steps if name in step]
            lines.append(f"| {name[:60]} | {slower:.0%} | {len(times)} | {min(times):.1f} | {max(times):.1f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--show", type=Path, help="print the table of results that were written, and measure nothing")
    parser.add_argument("--raw", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--slower", type=float, default=0.0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.show:
        print(table(json.loads(arguments.show.read_text(encoding="utf-8"))["processes"]))
        return 0
    if arguments.raw:
        arguments.raw.write_text(json.dumps(recorded(arguments.slower)), encoding="utf-8")
        return 0
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(PROCESSES):
            file, slower = Path(folder) / f"{number}.json", SLOWER if number % 3 == 2 else 0.0
            command = [sys.executable, "-m", "benchmarks.profiles.kernel_scatter", "--raw", str(file)]
            command += ["--slower", str(slower)]
            subprocess.run(command, check=True)
            processes.append(summary(json.loads(file.read_text(encoding="utf-8"))))
            print(f"{number + 1} of {PROCESSES}", file=sys.stderr)
    print(table(processes))
    if arguments.json:
        import torch

        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        content = {"date": date, "machine": torch.cuda.get_device_name(), "processes": processes}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
