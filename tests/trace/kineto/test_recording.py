import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearpeak.errors import UsageError
from nearpeak.trace.kineto import recording
from nearpeak.trace.kineto.recording import EventFile

NAMES = ["a", 'quote " and } , { brace', "ünïcode", "[0]"]
EVENTS = [{"ph": "X", "name": name, "args": {"Input Dims": [[1, 2], []], "x": None}} for name in NAMES]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_all_events_and_the_fields_around_them(
    write_trace: Callable[..., Path], packed: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(recording, "_CHUNK", chunk)
    file = EventFile(write_trace(*EVENTS, packed=packed, deviceProperties=[{"name": "H200"}], n=1.25))
    assert list(file) == EVENTS
    assert file.metadata == {"schemaVersion": 1, "deviceProperties": [{"name": "H200"}], "n": 1.25}
    assert (file.truncated, file.damaged) == (False, 0)


def test_fields_after_the_events_and_a_second_reading(tmp_path: Path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": EVENTS, "traceName": "x"}))
    file = EventFile(path)
    assert list(file) == EVENTS
    assert file.metadata == {"traceName": "x"}


def test_an_array_alone_is_a_trace_too(tmp_path: Path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(EVENTS))
    assert list(EventFile(path)) == EVENTS


@given(cut=st.integers(min_value=30, max_value=200))
def test_a_file_that_was_cut_off_gives_what_is_whole(tmp_path_factory: pytest.TempPathFactory, cut: int):
    text = json.dumps({"traceEvents": EVENTS})
    path = tmp_path_factory.mktemp("cut") / "trace.json"
    path.write_text(text[:cut])
    file = EventFile(path)
    whole = list(file)
    assert whole == EVENTS[: len(whole)]
    assert file.truncated


def test_a_gzip_file_that_was_cut_off(tmp_path: Path):
    many = [{"ph": "X", "name": str(index * 7919)} for index in range(20000)]
    packed = gzip.compress(json.dumps({"traceEvents": many}).encode())
    path = tmp_path / "trace.json.gz"
    path.write_bytes(packed[: len(packed) // 2])
    file = EventFile(path)
    whole = list(file)
    assert 5000 < len(whole) < 15000
    assert whole == many[: len(whole)]
    assert file.truncated


def test_numbers_that_json_does_not_have(tmp_path: Path):
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": [{"name": "a", "bw": inf}, {"name": "b", "bw": -nan}, {"name": "c", "bw": NaN}]}')
    file = EventFile(path)
    found = list(file)
    assert [event["name"] for event in found] == ["a", "b", "c"]
    assert found[0]["bw"] is None
    assert file.damaged == 0


@pytest.mark.parametrize("chunk", [5, 1 << 20])
def test_an_event_that_is_damaged_is_left_out_and_counted(tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recording, "_CHUNK", chunk)
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": [{"name": "a"}, {"name": "b", "x": oops}, {"name": "c"}, 5], "after": 1}')
    file = EventFile(path)
    assert [event["name"] for event in file] == ["a", "c"]
    assert file.damaged == 1
    assert file.metadata == {"after": 1}


@pytest.mark.parametrize("content", [b"", b"hello", b"\x80\x04pickle", b"PK\x03\x04"])
def test_what_is_no_trace_is_an_error(tmp_path: Path, content: bytes):
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="export_chrome_trace"):
        list(EventFile(path))


def test_a_missing_file_is_an_error(tmp_path: Path):
    with pytest.raises(UsageError, match="no such file"):
        list(EventFile(tmp_path / "none.json"))
    with pytest.raises(UsageError, match="cannot be read"):
        list(EventFile(tmp_path))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "there is nothing in it"),
        (b" \n", "there is nothing in it"),
        (gzip.compress(b"", mtime=0), "there is nothing in it"),
        (b"\x1f\x8bgarbage", "nothing of it can be unpacked"),
        (b'{"model": "x", "layers": [1, 2]}', "no list of traceEvents. Its fields: model, layers"),
        (b'{"traceEvents": {}}', "no list of traceEvents"),
        (b"{}", "Its fields: none"),
    ],
)
def test_an_error_says_what_was_found(tmp_path: Path, content: bytes, why: str):
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=why):
        list(EventFile(path))


def test_a_mark_of_the_byte_order_does_no_harm(tmp_path: Path):
    path = tmp_path / "trace.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"traceEvents": EVENTS}).encode())
    assert list(EventFile(path)) == EVENTS


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("depth", [100, 900, 980, 100_000])
@pytest.mark.parametrize("field", ["x", "Input Dims", "kernel_kwargs"])
def test_an_event_that_is_nested_deep_is_no_crash(tmp_path: Path, depth: int, field: str):
    path = tmp_path / "trace.json"
    event = '{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 1, "args": {"%s": %s}}'
    path.write_text(
        f'{{"traceEvents": [{event % (field, nested(depth))}, {event % ("x", 0)}], "after": {nested(depth)}}}'
    )
    found = recording.load_recording(path)
    assert sum(map(len, found.threads.values())) + found.damaged == 2


@pytest.mark.parametrize(
    "change",
    [
        {"ts": None}, {"ts": "soon"}, {"ts": 1e300}, {"ts": -1e19}, {"ts": 10**400}, {"ts": [1]}, {"ts": True},
        {"dur": "long"}, {"dur": 1e300}, {"dur": {"a": 1}}, {"name": None}, {"name": 5}, {"name": "x" * 200_000},
        {"pid": []}, {"tid": {"a": 1}}, {"cat": ["cpu_op"]},
    ],
)  # fmt: skip
def test_an_event_with_fields_that_cannot_be_is_left_out(write_trace: Callable[..., Path], change: dict[str, object]):
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1.0, "dur": 1.0}
    found = recording.load_recording(write_trace({**event, **change}, event))
    assert [span.name for spans in found.threads.values() for span in spans] == ["aten::mm"]
    assert found.damaged == (0 if "cat" in change else 1)


@pytest.mark.parametrize(
    "change",
    [
        {"External id": []}, {"correlation": "x"}, {"correlation": 10**30}, {"stream": {}}, {"device": -(10**40)},
        {"bytes": 1e999}, {"bytes": -5}, {"grid": [10**30, 10**30, 1]}, {"grid": ["a"]}, {"External id": 1e300},
    ],
)  # fmt: skip
def test_a_field_of_a_kernel_that_cannot_be_is_not_known(write_trace: Callable[..., Path], change: dict[str, object]):
    event = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1.0, "dur": 1.0, "args": change}
    (span,) = recording.load_recording(write_trace(event)).device_spans
    assert (span.stream, span.device, span.external, span.correlation) == (7, 0, None, None)
    assert (span.bytes, span.blocks) == (None, None)


@pytest.mark.parametrize("content", ["[" + "1," * 3000 + "1]", '{"traceEvents": [' + "{}," * 3000 + "{}]}"])
def test_a_list_of_other_things_is_no_trace(tmp_path: Path, content: str):
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(UsageError, match="what it lists are no events"):
        recording.load_recording(tmp_path / "other.json")


def test_operators_before_a_range_are_left_out(tmp_path: Path):
    def event(name: str, start: float, duration: float = 1.0, category: str = "cpu_op") -> dict[str, object]:
        return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "pid": 1, "tid": 1}

    path = tmp_path / "trace.json"
    events = [
        event("ProfilerStep#0", 0.0, 10.0, "user_annotation"),
        event("aten::mm", 1.0),
        event("cudaLaunchKernel", 1.5, 0.1, "cuda_runtime"),
        event("aten::late", 8.0, 5.0),  # still runs when the step begins
        event("ProfilerStep#1", 10.0, 10.0, "user_annotation"),
        event("aten::early", 3.0),  # events need not be in order
        event("aten::mm", 11.0),
    ]
    path.write_text(json.dumps({"traceEvents": events}))

    def names(since: str | None) -> list[str]:
        (spans,) = recording.load_recording(path, since=since).threads.values()
        return [span.name for span in spans]

    rest = ["ProfilerStep#0", "cudaLaunchKernel", "aten::late", "ProfilerStep#1", "aten::mm"]
    assert names("ProfilerStep#1") == rest
    assert len(names(None)) == len(names("ProfilerStep#7")) == len(events)  # a range that does not come
