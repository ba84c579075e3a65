"""A trace file of steps that only replay a CUDA graph."""

import json
from pathlib import Path

H200 = {"id": 0, "name": "NVIDIA H200", "computeMajor": 9}
IN_GRAPH = {"device": 0, "stream": 7, "graph id": 3, "graph node id": 12884901888}


def write_replays(path: Path, *, launch: float = 5.0) -> Path:
    """Two steps of 100 us; each launches a graph of three kernels of 20 us, with 2 us between them."""
    events = []
    for number, start in ((1, 1000.0), (2, 1100.0)):
        facts = {"correlation": number}
        events += [
            event("user_annotation", f"ProfilerStep#{number}", start, 100.0, {"External id": number}),
            event("cuda_runtime", "cudaGraphLaunch", start + 10, launch, facts),
            *(event("kernel", f"k{place}", start + 20 + 22 * place, 20.0, IN_GRAPH | facts) for place in range(3)),
        ]
    return write_events(path, events)


def write_events(path: Path, events: list) -> Path:
    """A file of the profiler's, from an H200."""
    path.write_text(json.dumps({"schemaVersion": 1, "deviceProperties": [H200], "traceEvents": events}))
    return path


def event(category, name, start, took, facts):
    """One complete event; what is on the device has a thread of its own."""
    thread = 7 if category == "kernel" else 1
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": start, "dur": took, "args": facts}
