"""How long a large trace file takes to read, and how much memory: `python benchmarks/trace_file.py [FILE] [MEGABYTES]`.

Slow: it writes a file of that size, by default 300 MB, into a temporary folder. The events of FILE, by default a part
of a training step on a GPU, are repeated as the steps of a schedule, with later times and other numbers.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from nearpeak.capture.kineto.events import EventFile
from nearpeak.capture.kineto.read import read_trace

SAMPLE = Path(__file__).parent.parent / "tests" / "data" / "kineto_eager.json.gz"
NUMBERS = ("External id", "correlation", "Sequence number")
APART = 1_000_000
"""Between the numbers of one step and the next."""


def write(source: Path, target: Path, size: float) -> int:
    """Repeats the events of a file until it has this size; returns how many events it has."""
    file = EventFile(source)
    events = [event for event in file if event.get("ph") == "X"]
    first = min(event["ts"] for event in events)
    length = max(event["ts"] + event.get("dur", 0.0) for event in events) - first + 1000.0
    threads = [(event["pid"], event["tid"]) for event in events if event.get("cat") == "cpu_op"]
    count = step = 0
    with target.open("w", encoding="utf-8") as out:
        out.write(json.dumps(file.metadata)[:-1] + ', "traceEvents": [\n')
        while out.tell() < size:
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


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else SAMPLE
    megabytes = float(sys.argv[2]) if len(sys.argv) > 2 else 300.0
    read_trace(source)  # torch's own imports are not what is measured
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "large.json"
        count = write(source, target, megabytes * 1e6)
        started, used = time.perf_counter(), time.process_time()
        found = read_trace(target)
        print(
            f"{target.stat().st_size / 1e6:.0f} MB, {count} events, {len(found.steps)} steps: "
            f"{time.perf_counter() - started:.1f} s, of which {time.process_time() - used:.1f} s on the CPU; "
            f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB at the most (on Linux); "
            f"{len(found.trace.ops)} ops and {len(found.kernels)} kernels in the last step"
        )


if __name__ == "__main__":
    main()
