"""Ranges that nearpeak adds to what torch.profiler records: garbage collections, data loading, replays of graphs."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast

from nearpeak.trace.graphs import number_of
from nearpeak.trace.guard import Guard, OwnThread, undone_in_child
from nearpeak.trace.kineto.collectives import COMMUNICATION_WAIT
from nearpeak.trace.kineto.host import (
    DATA_LOADER_RANGE,
    GARBAGE_COLLECTION,
    GRAPH_REPLAY,
    LINE_SEPARATOR,
    NEW_TENSOR,
    PRINTED_TENSOR,
)
from nearpeak.trace.patches.shared_patch import SharedPatch, patch_attribute
from nearpeak.trace.source import user_line


@contextmanager
def mark_garbage_collections() -> Iterator[None]:
    """Inside, each garbage collection on a profiled thread is a range with its generation and the user's line.

    The kind of range is one that bypasses the dispatcher: a collection can begin in the middle of anything, where
    running an operator would not be safe.
    """
    open_ranges: list[_RecordFunctionFast] = []
    guard, thread = Guard(), OwnThread()

    def mark(phase: str, facts: Mapping[str, int]) -> None:
        if thread:  # others have no profiler, nor has a forked worker of a data loader
            guard.call(mark_phase, phase, facts["generation"])

    def mark_phase(phase: str, generation: int) -> None:
        if phase == "start":
            line = user_line()[0]
            name = f"{GARBAGE_COLLECTION} {generation}"
            entered = _RecordFunctionFast(f"{name}{LINE_SEPARATOR}{line}" if line else name)
            entered.__enter__()
            open_ranges.append(entered)
        elif open_ranges:
            open_ranges.pop().__exit__(None, None, None)

    gc.callbacks.append(mark)
    try:
        with undone_in_child(lambda: gc.callbacks.remove(mark)):
            yield
    finally:
        if mark in gc.callbacks:  # not in a child
            gc.callbacks.remove(mark)
        while open_ranges:  # a finalizer ended the profile during a collection
            guard.call(open_ranges.pop().__exit__, None, None, None)


@SharedPatch
@contextmanager
def mark_replays() -> Iterator[None]:
    """Inside, each replay of a CUDA graph whose ops are known is a range with the number of the graph."""
    kind: Any = torch.cuda.CUDAGraph
    original = kind.replay
    guard = Guard()

    @functools.wraps(original)
    def replay(self: Any) -> Any:
        number = guard.call(number_of, self)
        if number is None:
            return original(self)
        with _RecordFunctionFast(f"{GRAPH_REPLAY}{number}"):
            return original(self)

    with patch_attribute(kind, "replay", replay):
        yield


@contextmanager
def mark_communication_waits() -> Iterator[None]:
    """Inside, each `wait` of the program for a collective is a range; on a CPU, nothing else shows it."""
    distributed = sys.modules.get("torch.distributed")
    work: Any = getattr(distributed, "Work", None)
    if work is None:
        yield
        return
    original = work.wait

    @functools.wraps(original)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _RecordFunctionFast(COMMUNICATION_WAIT):
            return original(self, *args, **kwargs)

    with patch_attribute(work, "wait", wait):
        yield


@contextmanager
def mark_data_loading() -> Iterator[None]:
    """Inside, each batch of a DataLoader is a range around torch's own, with the user's line that requested it."""
    module = sys.modules.get("torch.utils.data.dataloader")
    if module is None:  # then no loader exists
        yield
        return
    loader_iterator: Any = module._BaseDataLoaderIter
    original = loader_iterator.__next__

    def marked(self: Any) -> Any:
        line = user_line(sys._getframe(1))[0]
        with _RecordFunctionFast(  # no operator of torch's, which a function mode of the program's would see
            f"{DATA_LOADER_RANGE}{type(self).__name__}.__next__" + (f"{LINE_SEPARATOR}{line}" if line else "")
        ):
            return original(self)

    loader_iterator.__next__ = marked
    try:
        yield
    finally:
        loader_iterator.__next__ = original


@contextmanager
def mark_unseen_ops(*, constructors: bool = True) -> Iterator[None]:
    """Inside, printing a device's tensor and `torch.tensor` are ranges with the user's line: traces do not see the ops
    of these.

    Without `constructors`, `torch.tensor` stays as it is: torch.compile must not meet another function in its place.
    """
    guard = Guard()

    def marked(function: Any, name: str, *, prints: bool) -> Any:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if prints and args[0].device.type == "cpu":
                return function(*args, **kwargs)
            found = guard.call(user_line, sys._getframe(1))
            if not found or not found[0]:
                return function(*args, **kwargs)
            with _RecordFunctionFast(f"{name}{LINE_SEPARATOR}{found[0]}"):
                return function(*args, **kwargs)

        return run

    printing: Any = torch._tensor_str
    with ExitStack() as patches:
        patches.enter_context(patch_attribute(printing, "_str", marked(printing._str, PRINTED_TENSOR, prints=True)))
        for name in ("tensor", "as_tensor") if constructors else ():
            function = marked(getattr(torch, name), NEW_TENSOR, prints=False)
            patches.enter_context(patch_attribute(torch, name, function))
        yield
