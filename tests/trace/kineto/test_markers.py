"""Marker kernels, and losses that were planted in a recording: each is noticed, counted and said."""

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from nearpeak.trace.kineto.markers import Marker, StreamId, marker_losses
from nearpeak.trace.kineto.read import KinetoTrace, read_trace

Event = dict[str, Any]
STREAMS = {7: StreamId(0, 0, 1), 20: StreamId(3, 0, 1)}
STEPS = (1, 2, 3)
READ = 2
"""The step that is read: the median one."""
SIZE = [64, 64]


def recording(make: Any) -> tuple[list[Event], list[Marker]]:
    """Three steps of two products on one stream, and an addition on another, with markers between the steps."""
    events: list[Event] = []
    planted: list[Marker] = []
    ids = iter(range(1, 1000))

    def launch(op: Event | None, name: str, start: float, seconds: float, stream: int) -> None:
        number = next(ids)
        if op is not None:
            op["args"]["External id"] = number
            events.append(op)
        events.append(make.span("cudaLaunchKernel", start + 1, 2, "cuda_runtime", correlation=number))
        facts = {"correlation": number, "External id": number, "stream": stream}
        events.append(make.kernel(name, start + 10, seconds, **facts))

    def plant(start: float, step: int) -> None:
        for place, (stream, identity) in enumerate(STREAMS.items()):
            range_ = make.span(f"nearpeak: marker {len(planted)}", start + 10 * place, 8)
            launch(range_, "spin_kernel(long)", start + 10 * place, 1, stream)
            planted.append(Marker(number=len(planted), step=step, stream=identity))

    for step in STEPS:
        begin = 1000.0 * step
        plant(begin - 40, step)
        events.append(make.span(f"ProfilerStep#{step}", begin, 900, "user_annotation"))
        for place, name in enumerate(("aten::mm", "aten::mm", "aten::add")):
            start, stream = begin + 100 * place, 20 if name == "aten::add" else 7
            seconds = 50 + step
            launch(make.tensor_op(name, start, 20, SIZE, SIZE), f"kernel_of_{name[6:]}", start, seconds, stream)
    plant(3960, STEPS[-1] + 1)
    return events, planted


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., KinetoTrace]:
    def read(
        events: Sequence[Event], planted: Sequence[Marker], cut: int = 0, among: Sequence[int] = STEPS, **fields: Any
    ) -> KinetoTrace:
        path = tmp_path / "trace.json"
        text = json.dumps({"schemaVersion": 1, **fields, "traceEvents": list(events)})
        path.write_text(text[: len(text) - cut])
        return read_trace(path, among=among, markers=planted)

    return read


def in_read_step(event: Event) -> bool:
    return 1000 * READ - 50 <= event["ts"] < 1000 * (READ + 1) - 50


def is_kernel(event: Event) -> bool:
    return event["cat"] == "kernel"


def test_markers_are_no_part_of_the_step(read: Any, make: Any):
    found = read(*recording(make))
    assert found.step == READ
    assert [kernel.name for kernel in found.kernels] == ["kernel_of_mm", "kernel_of_mm", "kernel_of_add"]
    assert [op.packet for op in found.trace.ops] == ["aten.mm", "aten.mm", "aten.add"]
    assert found.completeness.markers == 8 and found.completeness.losses == ()
    assert found.free_from_s == 0.0


def test_a_stream_of_an_earlier_recording_is_not_lost(read: Any, make: Any):
    events, planted = recording(make)
    name = {"ph": "M", "name": "thread_name", "pid": 0, "tid": 99, "args": {"name": "stream 99 "}}
    assert read([*events, name], planted).completeness.losses == ()
    lossy = drop(lambda e: e["name"] == "kernel_of_add" and in_read_step(e))(events)
    assert {loss.kind for loss in read([*lossy, name], planted, among=[READ]).completeness.losses} == {"kernels"}


def drop(choose: Callable[[Event], bool]) -> Callable[[list[Event]], list[Event]]:
    return lambda events: [event for event in events if not choose(event)]


def correlation(event: Event) -> int | None:
    number: int | None = event["args"].get("correlation", event["args"].get("External id"))
    return number


def damage(events: list[Event]) -> list[Event]:
    next(event for event in events if is_kernel(event) and in_read_step(event))["ts"] = "never"
    return events


def first_id(name: str, events: Sequence[Event]) -> int | None:
    return next(correlation(event) for event in events if event["name"] == name and in_read_step(event))


def drop_launched(events: list[Event]) -> list[Event]:
    """A kernel of the step with its launch: the op is there."""
    number = first_id("kernel_of_add", events)
    return [event for event in events if correlation(event) != number or event["cat"] == "cpu_op"]


def swap_streams(events: list[Event]) -> list[Event]:
    spin = [event for event in events if event["name"].startswith("spin") and in_read_step(event)]
    for event in spin:
        event["args"]["stream"] = 27 - event["args"]["stream"]
    return events


PLANTED: dict[str, tuple[Callable[[list[Event]], list[Event]], str]] = {
    "a kernel is dropped": (drop(lambda e: e["name"] == "kernel_of_add" and in_read_step(e)), "kernels"),
    "a kernel and its launch are dropped": (drop_launched, "ops"),
    "a launch is dropped": (
        drop(lambda e: e["cat"] == "cuda_runtime" and 1000 * READ + 100 < e["ts"] < 1000 * READ + 102),
        "launches",
    ),
    "the buffer overflows at the end": (drop(lambda e: is_kernel(e) and e["ts"] > 1000 * READ + 150), "markers"),
    "the buffer keeps the latest events": (drop(lambda e: is_kernel(e) and e["ts"] < 1000 * READ + 50), "markers"),
    "a buffer is lost between two steps": (
        drop(lambda e: e["cat"] in ("kernel", "cuda_runtime") and 2900 < e["ts"] < 3050),
        "markers",
    ),
    "everything between two steps is lost": (drop(lambda e: 2900 < e["ts"] < 2999), "markers"),
    "a stream is not recorded": (drop(lambda e: is_kernel(e) and e["args"]["stream"] == 20), "markers"),
    "a stream is gone with its launches and ops": (
        drop(lambda e: e["name"] == "aten::add" or e["args"].get("stream") == 20),
        "markers",
    ),
    "streams are mixed up": (swap_streams, "markers"),
    "an event is damaged": (damage, "damaged"),
}


@pytest.mark.parametrize("loss", PLANTED)
def test_a_planted_loss_is_noticed_counted_and_said(loss: str, read: Any, make: Any):
    events, planted = recording(make)
    tamper, kind = PLANTED[loss]
    found = read(tamper(copy.deepcopy(events)), planted, among=[READ])
    losses = [item for item in found.completeness.of_step if item.kind == kind]
    assert losses and all(item.count for item in losses), found.completeness
    assert not found.completeness.complete
    assert losses[0].text in found.notes


@pytest.mark.parametrize("loss", [loss for loss in PLANTED if loss != "a launch is dropped"])  # no time is lost with it
def test_a_planted_loss_is_noticed_if_another_step_is_read(loss: str, read: Any, make: Any):
    events, planted = recording(make)
    assert read(PLANTED[loss][0](copy.deepcopy(events)), planted).completeness.losses


@pytest.mark.parametrize("cut", [100, 1000, 4000])
def test_a_cut_file_is_noticed(read: Any, make: Any, cut: int):
    found = read(*recording(make), cut=cut)
    assert {item.kind for item in found.completeness.losses} >= {"cut", "markers"}


def test_events_that_the_profiler_says_it_dropped_are_counted(read: Any, make: Any):
    found = read(*recording(make), WARNING=["CUPTI dropped 17 activity records"])
    assert [(item.kind, item.count) for item in found.completeness.of_step] == [("dropped", 17)]


def test_a_loss_around_another_step_is_said_and_not_of_this_one(read: Any, make: Any):
    events, planted = recording(make)
    found = read(drop(lambda e: e["name"].startswith("spin") and e["ts"] < 1000)(events), planted)
    assert found.completeness.complete
    assert [(item.kind, item.count, item.in_step) for item in found.completeness.losses] == [("markers", 2, False)]


def test_no_markers_tell_nothing():
    assert marker_losses((), {}, 1) == ()
