"""Marker kernels in live recordings."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nearpeak.profiling import torch_profiler
from nearpeak.profiling.torch_profiler import Profiler, synchronize
from nearpeak.trace.kineto import markers
from nearpeak.trace.kineto.markers import MarkerPlanter
from nearpeak.trace.kineto.read import KinetoTrace, read_trace


class Backend:
    """A device that notes on which stream it was asked for a delay."""

    def __init__(self) -> None:
        self.delays: list[int] = []
        self.stream = 0

    @contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        self.stream = stream.stream_id
        yield

    def delay(self, cycles: int) -> None:
        self.delays.append(self.stream)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    backend = Backend()
    monkeypatch.setattr(markers, "gpu_in_use", lambda: backend)
    monkeypatch.setattr(markers, "is_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "_set_stream_by_id", lambda *ids, **named: None)
    default = SimpleNamespace(stream_id=0, device_index=0, device_type=1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: default)
    monkeypatch.setattr(torch.cuda, "Stream", SimpleNamespace)
    return backend


def use(stream: int) -> None:
    torch.cuda.set_stream(SimpleNamespace(stream_id=stream, device_index=0, device_type=1))  # type: ignore[arg-type]


def test_markers_are_planted_on_each_stream_that_was_used(backend: Backend):
    planter = MarkerPlanter()
    with planter.watch_streams():
        planter.plant(0)
        use(5)
        planter.plant(1)
        use(0x7F00)  # of another library, which may destroy it
    use(7)
    planter.plant(2)
    assert backend.delays == [0, 0, 5, 0, 5]
    assert [(marker.number, marker.step, marker.stream.number) for marker in planter.planted] == [
        (0, 0, 0),
        (1, 1, 0),
        (2, 1, 5),
        (3, 2, 0),
        (4, 2, 5),
    ]


def test_no_marker_is_planted_while_a_graph_is_captured(backend: Backend, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(markers, "is_capturing", lambda: True)
    planter = MarkerPlanter()
    planter.plant(0)
    assert (backend.delays, planter.planted) == ([], [])


def test_a_device_that_fails_does_not_reach_the_program(backend: Backend, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backend, "delay", lambda cycles: 1 / 0)
    planter = MarkerPlanter()
    planter.plant(0)
    assert planter.planted == []


def test_without_a_gpu_there_are_none():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    profiler = Profiler()
    torch.ones(64, 64) @ torch.ones(64, 64)
    found = profiler.stop()
    assert (found.completeness.markers, found.completeness.losses) == (0, ())


Event = dict[str, Any]


def record(monkeypatch: pytest.MonkeyPatch, tamper: Callable[[list[Event]], list[Event]]) -> KinetoTrace:
    """Three steps on two streams, recorded on the GPU, and read from a file that was tampered with."""

    def tampered(path: Path, **options: Any) -> KinetoTrace:
        content = json.loads(path.read_text())
        content["traceEvents"] = tamper(content["traceEvents"])
        path.write_text(json.dumps(content))
        return read_trace(path, **options)

    monkeypatch.setattr(torch_profiler, "read_trace", tampered)
    x = torch.randn(512, 512, device="cuda")
    side = torch.cuda.Stream()
    profiler = Profiler()
    for _ in range(4):
        (x @ x).relu_()
        with torch.cuda.stream(side):
            torch.add(x, 1)
        synchronize()
        profiler.next_step()
    (x @ x).relu_()
    synchronize()
    return profiler.stop(among=(1, 2, 3))


def is_kernel(event: Event) -> bool:
    return event.get("cat") == "kernel"


def last_step(events: list[Event]) -> float:
    return float(max(event["ts"] for event in events if event.get("name") == "ProfilerStep#3"))


def without_the_end(events: list[Event]) -> list[Event]:
    end = last_step(events)
    return [event for event in events if not (is_kernel(event) and event["ts"] > end)]


def without_a_stream(events: list[Event]) -> list[Event]:
    streams = sorted({event["args"]["stream"] for event in events if is_kernel(event)})
    return [event for event in events if not (is_kernel(event) and event["args"]["stream"] == streams[-1])]


def without_the_beginning(events: list[Event]) -> list[Event]:
    begin = min(event["ts"] for event in events if event.get("name") == "ProfilerStep#2")
    return [event for event in events if not (is_kernel(event) and event["ts"] < begin)]


@pytest.mark.gpu
def test_a_recording_on_a_gpu_is_complete(monkeypatch: pytest.MonkeyPatch):
    found = record(monkeypatch, lambda events: events)
    assert found.completeness.losses == ()
    assert found.completeness.markers >= 8
    assert not any("spin" in kernel.name for kernel in found.kernels)
    assert len({kernel.op for kernel in found.kernels}) == 3  # a product may take two kernels


@pytest.mark.gpu
@pytest.mark.parametrize("tamper", [without_the_end, without_a_stream, without_the_beginning])
def test_a_planted_loss_on_a_gpu_is_noticed(monkeypatch: pytest.MonkeyPatch, tamper: Any):
    found = record(monkeypatch, tamper)
    assert "markers" in {loss.kind for loss in found.completeness.losses}
