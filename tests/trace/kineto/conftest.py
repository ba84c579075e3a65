"""Trace files, written by hand and recorded live."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile


@pytest.fixture
def write_trace(tmp_path: Path) -> Callable[..., Path]:
    """Writes events into a file, compressed if asked for."""

    def write(*events: dict[str, Any], packed: bool = False, **fields: Any) -> Path:
        text = json.dumps({"schemaVersion": 1, **fields, "traceEvents": list(events)})
        path = tmp_path / ("trace.json.gz" if packed else "trace.json")
        path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
        return path

    return write


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., Path]:
    """Runs a function once below torch's profiler and gives the file."""

    def run(fn: Callable[..., Any], *args: Any, **options: Any) -> Path:
        with profile(activities=[ProfilerActivity.CPU], **{"record_shapes": True, **options}) as profiler:
            fn(*args)
        path = tmp_path / "recorded.json"
        profiler.export_chrome_trace(str(path))
        return path

    torch.manual_seed(0)
    return run


def span(name: str, start: float, seconds: float, category: str = "cpu_op", **args: Any) -> dict[str, Any]:
    """One complete event on thread 1."""
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": seconds, "args": args}


def tensor_op(name: str, start: float, seconds: float, *shapes: list[int], **args: Any) -> dict[str, Any]:
    """An op on contiguous float32 tensors."""
    strides = [[int(torch.empty(shape, device="meta").stride(i)) for i in range(len(shape))] for shape in shapes]
    inputs = {
        "Input Dims": list(shapes),
        "Input Strides": strides,
        "Input type": ["float"] * len(shapes),
        "Concrete Inputs": [""] * len(shapes),
    }
    return span(name, start, seconds, **{**inputs, **args})


def kernel(name: str, start: float, seconds: float, category: str = "kernel", **args: Any) -> dict[str, Any]:
    """One event on stream 7 of device 0."""
    facts = {"device": 0, "stream": 7, **args}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 7, "ts": start, "dur": seconds, "args": facts}


@pytest.fixture
def make() -> Any:
    """The builders of events."""

    class Make:
        pass

    for function in (span, tensor_op, kernel):
        setattr(Make, function.__name__, staticmethod(function))
    return Make
