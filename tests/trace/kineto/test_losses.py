"""What a recording lacks is noticed, counted and said; what does not belong to the step is not in it."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nearpeak.profiles.completeness import Completeness
from nearpeak.trace.kineto.read import read_trace

DATA = Path(__file__).parents[2] / "data"
Write = Callable[..., Path]
MATRIX = [64, 64]


def launch(make: Any, number: int, start: float, *, op: str = "aten::exp", stream: int = 7) -> list[dict[str, Any]]:
    """An op of 10 us that launches a kernel of 20 us, which begins 30 us later."""
    ids = {"External id": number}
    return [
        make.tensor_op(op, start, 10, MATRIX, **ids),
        make.span("cudaLaunchKernel", start + 2, 5, "cuda_runtime", correlation=number, **ids),
        make.kernel(f"k{number}", start + 30, 20, correlation=number, stream=stream, **ids) | {"tid": stream},
    ]


def kinds(completeness: Completeness) -> dict[str, tuple[int | None, bool]]:
    return {loss.kind: (loss.count, loss.in_step) for loss in completeness.losses}


def test_a_whole_recording_lacks_nothing(write_trace: Write, make: Any):
    found = read_trace(write_trace(*(event for n in range(1, 5) for event in launch(make, n, 100.0 * n))))
    assert found.completeness == Completeness(launches=4)
    assert found.completeness.complete
    assert found.completeness.lost_share == 0.0


@pytest.mark.parametrize("name", ["kineto_eager", "kineto_compiled"])
def test_the_sample_recordings_lack_nothing(name: str):
    completeness = read_trace(DATA / f"{name}.json.gz").completeness
    assert completeness.losses == ()
    assert completeness.launches > 100


def planted(name: str, lose: Callable[[dict[str, Any]], None], tmp_path: Path) -> Completeness:
    """A sample recording after a loss."""
    content = json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()))
    lose(content)
    path = tmp_path / "lossy.json"
    path.write_text(json.dumps(content))
    return read_trace(path).completeness


def on_device(event: dict[str, Any]) -> bool:
    return event.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy")


def lose_kernels(count: int) -> Callable[[dict[str, Any]], None]:
    """Every tenth kernel, as a full buffer does."""

    def lose(content: dict[str, Any]) -> None:
        events = content["traceEvents"]
        kernels = [event for event in events if event.get("cat") == "kernel"]
        lost = {id(event) for event in kernels[5 : 5 + 10 * count : 10]}
        content["traceEvents"] = [event for event in events if id(event) not in lost]

    return lose


def lose_calls_and_kernels(content: dict[str, Any]) -> None:
    """Launches and kernels of a stretch of time, as a lost buffer does."""
    events = content["traceEvents"]
    correlations = sorted(event["args"]["correlation"] for event in events if on_device(event))
    lost = set(correlations[40:60])
    content["traceEvents"] = [event for event in events if event.get("args", {}).get("correlation") not in lost]


def lose_end(content: dict[str, Any]) -> None:
    """The last kernels, which ran after the recording had stopped."""
    events = content["traceEvents"]
    kernels = sorted((event for event in events if event.get("cat") == "kernel"), key=lambda event: event["ts"])
    lost = {id(event) for event in kernels[-7:]}
    content["traceEvents"] = [event for event in events if id(event) not in lost]


def lose_calls(content: dict[str, Any]) -> None:
    """The launches of kernels, which stay without the ids of their ops."""
    events = content["traceEvents"]
    launched = [event for event in events if str(event.get("name")).startswith("cuLaunchKernel")]
    lost = {event["args"]["correlation"] for event in launched[:9]}
    for event in events:
        if on_device(event) and event["args"]["correlation"] in lost:
            del event["args"]["External id"]
    content["traceEvents"] = [event for event in events if id(event) not in {id(item) for item in launched[:9]}]


def name_streams(content: dict[str, Any]) -> None:
    """Two streams, of which one has events."""
    for stream in (7, 20):
        named = {"ph": "M", "name": "thread_name", "pid": 0, "tid": stream, "args": {"name": f"stream {stream} "}}
        content["traceEvents"].append(named)


def lose_stream(content: dict[str, Any]) -> None:
    """All kernels of a stream that the file names; their launches are there."""
    lose_kernels(4)(content)
    name_streams(content)


def test_a_stream_of_an_earlier_recording_is_not_lost(tmp_path: Path):
    assert planted("kineto_eager", name_streams, tmp_path).losses == ()


def say(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.update(fields)


LOSSES: dict[str, tuple[Callable[[dict[str, Any]], None], str, int | None]] = {
    "one kernel": (lose_kernels(1), "kernels", 1),
    "ten kernels": (lose_kernels(10), "kernels", 10),
    "a buffer": (lose_calls_and_kernels, "ops", None),
    "the end": (lose_end, "kernels", 7),
    "launches": (lose_calls, "launches", 9),
    "a stream": (lose_stream, "streams", 1),
    "messages of the profiler": (say(WARNING=["Dropped 12 activity records"]), "dropped", 12),
    "a field of the profiler": (say(droppedEvents=31), "dropped", 31),
    "stopped early": (say(INFO=["Record counts: Out-of-range = 3, CUPTI stopped early? = 1"]), "dropped", None),
}


@pytest.mark.parametrize("what", LOSSES)
def test_planted_losses_are_noticed(what: str, tmp_path: Path):
    lose, kind, count = LOSSES[what]
    completeness = planted("kineto_eager", lose, tmp_path)
    found = [loss for loss in completeness.losses if loss.kind == kind]
    assert found, completeness
    assert not completeness.complete
    assert found[0].text in completeness.notes
    if count is not None:
        assert found[0].count == count
    if kind == "kernels":
        assert completeness.lost_share == pytest.approx(found[0].count / completeness.launches)


def test_what_the_profiler_says_of_a_whole_recording_is_no_loss(write_trace: Write, make: Any):
    messages = ["Record counts: Out-of-range = 3, Blocklisted runtime = 20, CUPTI stopped early? = 0", "0 dropped"]
    found = read_trace(write_trace(*launch(make, 1, 0.0), INFO=messages, with_flops=1, record_shapes=1))
    assert found.completeness.complete


def test_a_file_that_ends_too_early(write_trace: Write, make: Any):
    path = write_trace(*launch(make, 1, 0.0), *launch(make, 2, 100.0))
    path.write_text(path.read_text()[:-40])
    completeness = read_trace(path).completeness
    assert kinds(completeness)["cut"] == (None, True)


def test_a_replay_that_lacks_kernels_of_its_graph(write_trace: Write, make: Any):
    events = []
    for number, kernels in ((1, 3), (2, 3), (3, 2)):
        start = 100.0 * number
        events += [
            make.span(f"ProfilerStep#{number}", start, 95, "user_annotation"),
            make.span("cudaGraphLaunch", start + 2, 5, "cuda_runtime", correlation=number),
            *(
                make.kernel(f"k{n}", start + 10 + 20 * n, 15, correlation=number, **{"graph id": 4})
                for n in range(kernels)
            ),
        ]
    path = write_trace(*events)
    assert read_trace(path, step=2).completeness.complete
    assert kinds(read_trace(path, step=3).completeness) == {"kernels": (1, True)}


def test_losses_outside_of_the_step_are_said_and_do_not_count(write_trace: Write, make: Any):
    events = [make.span(f"ProfilerStep#{n}", 100.0 * n, 95, "user_annotation") for n in (1, 2)]
    first = launch(make, 1, 100.0)[:2]  # without its kernel
    completeness = read_trace(write_trace(*events, *first, *launch(make, 2, 200.0))).completeness
    assert kinds(completeness) == {"kernels": (1, False)}
    assert completeness.complete
    assert len(completeness.notes) == 1


def test_a_runtime_call_with_the_call_of_the_driver_inside_is_one_launch(write_trace: Write, make: Any):
    op, outer, kernel = launch(make, 1, 0.0)
    inner = make.span("cuLaunchKernelEx", 3, 2, "cuda_driver", correlation=9)
    found = read_trace(write_trace(op, outer, inner, kernel))
    assert found.completeness.complete
    found = read_trace(write_trace(op, outer, inner, kernel | {"args": kernel["args"] | {"correlation": 9}}))
    assert found.completeness.complete


def test_kernels_that_were_launched_before_the_recording_are_not_in_the_step(write_trace: Write, make: Any):
    """The device is behind: at the start of the recorded step it runs kernels of the one before, without launches."""
    earlier = [make.kernel(f"before{n}", 20.0 * n, 19, correlation=900 + n) for n in range(5)]
    own = [event for n in (1, 2, 3) for event in launch(make, n, 10.0 + 12 * n)]
    for place, event in enumerate(event for event in own if event["cat"] == "kernel"):
        event["ts"] = 100.0 + 20 * place
    step = make.span("ProfilerStep#4", 0, 60, "user_annotation")
    for events, number in (([step], 4), ([], None)):
        found = read_trace(write_trace(*events, *earlier, *own))
        assert found.step == number
        assert [item.name for item in found.kernels] == ["k1", "k2", "k3"]
        assert all(item.op is not None for item in found.kernels)
        assert found.completeness.complete
        assert any("5 kernels of 0.095 ms were launched before the recording began" in n for n in found.notes)
    found = read_trace(write_trace(step, *earlier, *own))
    assert found.wall_s == pytest.approx(60e-6)  # 160 with what came before
    assert found.free_from_s == pytest.approx(99e-6)


def test_a_kernel_without_a_launch_is_of_the_step_of_the_kernel_before_it(write_trace: Write, make: Any):
    steps = [make.span(f"ProfilerStep#{n}", 100.0 * n, 95, "user_annotation") for n in (1, 2)]
    stray = make.kernel("stray", 185, 20, correlation=77)  # it runs into the second step
    path = write_trace(*steps, *launch(make, 1, 100.0), stray, *launch(make, 2, 210.0))
    assert [item.name for item in read_trace(path, step=1).kernels] == ["k1", "stray"]
    assert kinds(read_trace(path, step=1).completeness) == {"launches": (1, True)}
    assert [item.name for item in read_trace(path, step=2).kernels] == ["k2"]
    assert read_trace(path, step=2).completeness.complete


def test_an_op_without_a_launch_ran_on_the_host(write_trace: Write, make: Any):
    host = make.tensor_op("aten::add", 500, 10, MATRIX, MATRIX, **{"External id": 50})
    found = read_trace(write_trace(*launch(make, 1, 0.0), host))
    assert [op.name for op in found.trace.ops] == ["aten.exp.default", "host.add"]
    assert found.completeness.complete


def test_a_kernel_without_times_is_lost(write_trace: Write, make: Any):
    op, call, kernel = launch(make, 2, 1100.0)
    found = read_trace(write_trace(*launch(make, 1, 1000.0), op, call, kernel | {"ts": 0, "dur": 0}))
    assert kinds(found.completeness) == {"damaged": (1, True), "kernels": (1, True)}
    assert found.wall_s == pytest.approx(110e-6)


def test_another_stream_that_is_still_busy_with_what_came_before(write_trace: Write, make: Any):
    earlier = [make.kernel(f"nccl{n}", 30.0 * n, 29, correlation=900 + n, stream=20) | {"tid": 20} for n in range(5)]
    own = [event for n in (1, 2, 3) for event in launch(make, n, 10.0 + 25 * n)]
    found = read_trace(write_trace(make.span("ProfilerStep#4", 0, 120, "user_annotation"), *earlier, *own))
    assert [item.name for item in found.kernels] == ["k1", "k2", "k3"]


def test_a_large_op_on_the_host_among_equal_ones_of_the_device_is_no_loss(write_trace: Write, make: Any):
    events = [event for n in range(1, 6) for event in launch(make, n, 100.0 * n)]
    events.append(make.tensor_op("aten::exp", 700, 90, MATRIX, **{"External id": 50}))
    found = read_trace(write_trace(*events))
    assert found.completeness.complete
    assert [op.name for op in found.trace.ops][-1] == "host.exp"
