"""Files that end in the middle, as those of a job that was killed do."""

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import nearpeak
from nearpeak.bound.estimate import estimate_trace
from nearpeak.errors import UsageError
from nearpeak.trace.kineto.read import read_trace

DATA = Path(__file__).parents[2] / "data"
MATRIX = [8, 8]
Write = Callable[..., Path]


def whole_events(text: str) -> list[dict[str, Any]]:
    """What is whole of a text that was cut off, by the standard library alone."""
    decoder, found = json.JSONDecoder(), []
    place = text.index("[", text.index('"traceEvents"')) + 1
    while True:
        try:
            event, place = decoder.raw_decode(text, place)
        except json.JSONDecodeError:
            return found
        found.append(event)
        place += len(", ") if text[place : place + 2] == ", " else 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kineto_eager", "kineto_compiled"])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9, 0.99])
@pytest.mark.parametrize("packed", [False, True])
def test_the_time_of_what_is_there_is_right(tmp_path: Path, name: str, share: float, packed: bool):
    content = (DATA / f"{name}.json.gz").read_bytes()
    if not packed:
        content = gzip.decompress(content)
    content = content[: int(share * len(content))]
    path = tmp_path / "cut"
    path.write_bytes(content)
    text = zlib.decompressobj(31).decompress(content) if packed else content
    events = whole_events(text.decode(errors="replace"))
    kernels = [event for event in events if event["cat"] in ("kernel", "gpu_memset", "gpu_memcpy")]

    found = read_trace(path)
    assert sum(kernel.seconds for kernel in found.kernels) == pytest.approx(sum(e["dur"] for e in kernels) / 1e6)
    assert len(found.kernels) == len(kernels)
    assert found.trace.truncated
    assert any("is incomplete" in note for note in found.notes)
    assert found.partial or not kernels
    bound = estimate_trace(found.trace, nearpeak.machine("h200-sxm"), ceilings="theoretical")
    for index, seconds in found.device_seconds.items():
        assert index is not None
        assert index in found.partial or bound.ops[index].seconds <= seconds, bound.ops[index].name


def steps(make: Any) -> list[dict[str, Any]]:
    """Three steps with an op in each of two threads: first all ops, then what ran on the device, thread by thread."""
    ops, device = [], []
    for thread in (1, 2):
        for number in range(3):
            start, key = 100 * number + 10 * thread, 10 * number + thread
            if thread == 1:
                ops.append(make.span(f"ProfilerStep#{number}", 100 * number, 90, "user_annotation"))
            op = make.tensor_op("aten::exp", start, 8, MATRIX, **{"External id": key})
            launch = make.span("cudaLaunchKernel", start + 1, 2, "cuda_runtime", correlation=key)
            ops.append(op | {"tid": thread})
            device.append(make.kernel("k", start + 5, 3, correlation=key, **{"External id": key}))
            device.append(launch | {"tid": thread})
    return [*ops, *device]


@pytest.mark.parametrize(
    ("missing", "step", "whole"),
    [
        (0, 1, True),  # only the brackets at the end: what came after the last step is not known
        (1, 1, True),  # the launch of the last kernel
        (2, 0, True),
        (4, 0, False),
        (6, 0, False),  # nothing of the second thread
    ],
)
def test_the_last_step_is_read_that_is_whole(write_trace: Write, make: Any, missing: int, step: int, whole: bool):
    events = steps(make)
    path = write_trace(*events)
    text = path.read_text()
    assert read_trace(path).step == 2
    kept = events[: len(events) - missing]
    end = text.rindex("]") if not missing else len(json.dumps({"schemaVersion": 1, "traceEvents": kept})) - len("]}")
    path.write_text(text[:end])
    found = read_trace(path)
    assert found.trace.truncated
    assert found.step == step
    assert any("is incomplete" in note for note in found.notes) != whole
    asked = read_trace(path, step=2)
    assert asked.step == 2
    assert any("Step 2 is incomplete" in note for note in asked.notes)


def test_a_file_that_was_cut_off_before_its_first_op(tmp_path: Path):
    path = tmp_path / "cut.json"
    path.write_text('{"schemaVersion": 1, "deviceProperties": [{"id": 0')
    with pytest.raises(UsageError, match="cut off before its first op"):
        read_trace(path)


def test_without_its_kernels_a_file_says_so(write_trace: Write, make: Any):
    path = write_trace(make.tensor_op("aten::exp", 0, 8, MATRIX), deviceProperties=[{"id": 0, "name": "NVIDIA H200"}])
    assert not any("no kernels" in note for note in read_trace(path).notes)
    path.write_text(path.read_text()[:-2])
    assert any("no kernels" in note for note in read_trace(path).notes)


def test_a_launch_whose_kernel_is_not_there(write_trace: Write, make: Any):
    path = write_trace(
        make.tensor_op("aten::exp", 0, 8, MATRIX, **{"External id": 1}),
        make.span("cudaLaunchKernel", 1, 2, "cuda_runtime", correlation=1),
        make.span("cudaLaunchKernel", 4, 2, "cuda_runtime", correlation=2),
        make.kernel("k", 10, 3, correlation=1),
        make.tensor_op("aten::exp", 20, 8, MATRIX, **{"External id": 2}),
        make.span("cudaLaunchKernel", 21, 2, "cuda_runtime", correlation=3),
        make.kernel("k", 30, 3, correlation=3),
    )
    found = read_trace(path)
    assert [kernel.op for kernel in found.kernels] == [0, 1]
    assert found.partial == {0}
