"""`marking_collections`: Python's garbage collections as ranges in what torch's profiler records."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch._C._profiler import _RecordFunctionFast

from nearpeak.capture.kineto.host import GARBAGE_COLLECTION, MARKED_AT
from nearpeak.capture.source import user_line


@contextmanager
def marking_collections() -> Iterator[None]:
    """Inside, each collection on a thread that is profiled is a range named `GARBAGE_COLLECTION` and the user's line.

    The range is one that Inductor uses too: it goes through no dispatcher. A collection can begin in the middle of
    anything, where running an operator would not be safe.
    """
    open_ranges: list[_RecordFunctionFast] = []
    process = os.getpid()

    def mark(phase: str, _facts: Mapping[str, int]) -> None:
        if os.getpid() != process:  # a worker of a data loader has the callback too, and no profiler
            return
        if phase == "start":
            line = user_line()[0]
            entered = _RecordFunctionFast(f"{GARBAGE_COLLECTION}{MARKED_AT}{line}" if line else GARBAGE_COLLECTION)
            entered.__enter__()
            open_ranges.append(entered)
        elif open_ranges:
            open_ranges.pop().__exit__(None, None, None)

    gc.callbacks.append(mark)
    try:
        yield
    finally:
        gc.callbacks.remove(mark)
        while open_ranges:  # left inside of a collection: by a finalizer that ends the profile
            open_ranges.pop().__exit__(None, None, None)
