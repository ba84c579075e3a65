"""Does a profile notice what torch's profiler loses?

    PYTHONPATH=src python -m benchmarks.robustness.profiler_losses --json profiler_losses.json

Records steps on two streams on a GPU, with a CUDA graph in each. Of the file, events are dropped as profilers lose
them: single ones, the end or the beginning of a buffer, a stream, a window of time, a part of a graph, the end of the
file. Each must be noticed, and a recording that nobody touched must be complete.
"""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from nearpeak.errors import UsageError
from nearpeak.profiles.completeness import Completeness
from nearpeak.profiling import torch_profiler
from nearpeak.profiling.assemble import add_graph_loss, match_graph_kernels
from nearpeak.profiling.torch_profiler import Profiler, synchronize
from nearpeak.trace.graphs import remember_graphs
from nearpeak.trace.kineto.read import KinetoTrace, read_trace
from nearpeak.trace.live import LiveTrace

Event = dict[str, Any]
STEPS = (1, 2, 3)


def record(change: Callable[[str], str]) -> tuple[KinetoTrace, Completeness]:
    """Steps of products on one stream, an addition on another and a graph, read from a changed file."""

    def read(path: Path, **options: Any) -> KinetoTrace:
        path.write_text(change(path.read_text()))
        return read_trace(path, **options)

    x = torch.randn(512, 512, device="cuda")
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    original = torch_profiler.read_trace
    torch_profiler.read_trace = read  # type: ignore[assignment]
    try:
        with remember_graphs():
            (x @ x).relu_()
            with torch.cuda.graph(graph):
                (x @ x).sigmoid().sum()
            live = LiveTrace()
            graph.replay()
            replays = live.stop().replays
            profiler = Profiler()
            for step in range(STEPS[-1] + 1):
                for _ in range(4):
                    (x @ x).relu_()
                with torch.cuda.stream(side):
                    torch.add(x, 1)
                graph.replay()
                synchronize()
                if step < STEPS[-1]:
                    profiler.next_step()
            found = profiler.stop(among=STEPS)
    finally:
        torch_profiler.read_trace = original
    return found, add_graph_loss(found.completeness, match_graph_kernels(found.kernels, replays))


def on_events(change: Callable[[list[Event]], list[Event]]) -> Callable[[str], str]:
    def changed(text: str) -> str:
        content = json.loads(text)
        content["traceEvents"] = change(content["traceEvents"])
        return json.dumps(content)

    return changed


def is_kernel(event: Event) -> bool:
    return event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")


def is_call(event: Event) -> bool:
    return event.get("cat") in ("cuda_runtime", "cuda_driver")


def step_start(events: Sequence[Event], number: int) -> float:
    return float(min(event["ts"] for event in events if event.get("name") == f"ProfilerStep#{number}"))


def drop(choose: Callable[[Event], bool]) -> Callable[[list[Event]], list[Event]]:
    return lambda events: [event for event in events if not choose(event)]


def drop_one(*, with_launch: bool) -> Callable[[list[Event]], list[Event]]:
    """Drops the kernel of an op, with its launch or not."""

    def dropped(events: list[Event]) -> list[Event]:
        op = next(e for e in events if e.get("name") == "aten::relu_" and e["ts"] > step_start(events, 1))
        launch = next(e for e in events if is_call(e) and op["ts"] <= e["ts"] <= op["ts"] + op["dur"])
        gone = launch["args"]["correlation"]
        return drop(lambda e: (is_kernel(e) or (with_launch and is_call(e))) and e["args"].get("correlation") == gone)(
            events
        )

    return dropped


def drop_between(kinds: Callable[[Event], bool], first: float, last: float) -> Callable[[list[Event]], list[Event]]:
    """Drops events by their time, in microseconds from the start of the second step."""

    def dropped(events: list[Event]) -> list[Event]:
        start = step_start(events, 2)
        return drop(lambda e: kinds(e) and start + first < e["ts"] < start + last)(events)

    return dropped


def drop_stream(events: list[Event]) -> list[Event]:
    streams = [event["args"]["stream"] for event in events if is_kernel(event) and "spin" in event["name"]]
    return drop(lambda e: is_kernel(e) and e["args"]["stream"] == max(streams))(events)


def drop_from_graphs(*, replays: int) -> Callable[[list[Event]], list[Event]]:
    """Drops the first kernel of so many replays."""

    def dropped(events: list[Event]) -> list[Event]:
        launches = [e["args"]["correlation"] for e in events if is_call(e) and "GraphLaunch" in e["name"]]
        gone = []
        for launch in launches[-replays:]:
            kernels = [e for e in events if is_kernel(e) and e["args"]["correlation"] == launch]
            gone.append(id(min(kernels, key=lambda event: event["ts"])))
        return drop(lambda e: id(e) in gone)(events)

    return dropped


CHANGES: dict[str, Callable[[str], str]] = {
    "a kernel": on_events(drop_one(with_launch=False)),
    "a kernel with its launch": on_events(drop_one(with_launch=True)),
    "the end of a buffer": on_events(drop_between(is_kernel, 100, 1e9)),
    "the beginning of a buffer": on_events(drop_between(is_kernel, -1e9, 100)),
    "a window of time": on_events(drop_between(lambda e: is_kernel(e) or is_call(e), -300, 50)),
    "a stream": on_events(drop_stream),
    "a kernel of one replay": on_events(drop_from_graphs(replays=1)),
    "a kernel of each replay": on_events(drop_from_graphs(replays=10)),
    "all kernels": on_events(drop(is_kernel)),
    "the end of the file": lambda text: text[: len(text) * 2 // 3],
    "a damaged event": lambda text: text.replace('"dur": ', '"dur": "x', 1),
}


def losses(completeness: Completeness) -> list[list[Any]]:
    return [[loss.kind, loss.count, loss.in_step, loss.text] for loss in completeness.losses]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}

    def note(name: str, result: dict[str, Any]) -> None:
        results[name] = result
        noticed = [key for key, value in results.items() if value.get("losses") or "refused" in value]
        planted = [key for key in results if key != "nothing"]
        summary = {"planted": len(planted), "noticed": len(set(noticed) & set(planted)), "results": results}
        print(name, json.dumps(result), flush=True)
        if options.json:
            options.json.write_text(json.dumps(summary, indent=1))

    for name, change in {"nothing": lambda text: text, **CHANGES}.items():
        try:
            found, completeness = record(change)
            facts = {"kernels": len(found.kernels), "markers": completeness.markers, "step": found.step}
            note(name, {**facts, "losses": losses(completeness)})
        except UsageError as error:
            note(name, {"refused": str(error)})
        except Exception:
            note(name, {"error": traceback.format_exc()})


if __name__ == "__main__":
    main()
