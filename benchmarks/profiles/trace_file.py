"""How long a large trace file takes to read, and how much memory.

`python -m benchmarks.profiles.trace_file [FILE] [--megabytes N | --events N] [--step all]`

Slow: it writes a file of that size, by default 300 MB, into a temporary folder. The events of FILE, by default a part
of a training step on a GPU, are repeated as the steps of a schedule, with later times and other numbers. What is
written is read in a process of its own, so that the memory is that of reading alone.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

from nearpeak.trace.kineto.read import read_trace
from nearpeak.trace.kineto.recording import EventFile

SAMPLE = Path(__file__).resolve().parents[2] / "tests" / "data" / "kineto_eager.json.gz"
NUMBERS = ("External id", "correlation", "Sequence number")
APART = 1_000_000
"""Between the numbers of one step and the next."""


def write(source: Path, target: Path, size: float, most: float) -> int:
    """Repeats the events of a file until it has this size or as many events; returns how many it has."""
    file = EventFile(source)
    events = [event for event in file if event.get("ph") in ("X", "s", "f")]
    first = min(event["ts"] for event in events)
    length = max(event["ts"] + event.get("dur", 0.0) for event in events) - first + 1000.0
    threads = [(event["pid"], event["tid"]) for event in events if event.get("cat") == "cpu_op"]
    count = step = 0
    with target.open("w", encoding="utf-8") as out:
        out.write(json.dumps(file.metadata)[:-1] + ', "traceEvents": [\n')
        while out.tell() < size and count < most:
            mark: dict[str, Any] = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}"}
            mark |= {"pid": threads[-1][0], "tid": threads[-1][1], "ts": first + step * length - 1, "dur": length - 1}
            lines = [json.dumps(mark)]
            for event in events:
                args = dict(event.get("args") or {})
                args |= {name: args[name] + step * APART for name in NUMBERS if isinstance(args.get(name), int)}
                lines.append(json.dumps({**event, "ts": event["ts"] + step * length, "args": args}))
            out.write((",\n" if step else "") + ",\n".join(lines))
            count += len(lines)
            step += 1
        out.write("]}")
    return count


def measure(target: Path, count: int, step: Literal["all"] | None) -> None:
    """Reads the file and prints what that took."""
    read_trace(SAMPLE)  # torch's own imports are not what is measured
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, used = time.perf_counter(), time.process_time()
    trace = read_trace(target, step=step)
    print(
        f"{target.stat().st_size / 1e6:.0f} MB, {count} events, {len(trace.steps)} steps: "
        f"{time.perf_counter() - started:.1f} s, of which {time.process_time() - used:.1f} s on the CPU; "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB at the most (on Linux), of which "
        f"{before / 2**20:.2f} GiB before; {len(trace.trace.ops)} ops and {len(trace.kernels)} kernels in "
        + ("all of it" if step == "all" else "the last step"),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", nargs="?", type=Path, default=SAMPLE)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--megabytes", type=float, default=300.0)
    size.add_argument("--events", type=int)
    parser.add_argument("--step", choices=["last", "all", "both"], default="last")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "large.json"
        by_count = wanted.events is not None
        most = wanted.events if by_count else math.inf
        count = write(wanted.source, target, math.inf if by_count else wanted.megabytes * 1e6, most)
        for step in {"last": [None], "all": ["all"], "both": [None, "all"]}[wanted.step]:
            process = multiprocessing.get_context("spawn").Process(target=measure, args=(target, count, step))
            process.start()
            process.join()


if __name__ == "__main__":
    main()
