"""`skip_shape_inference`: what a library runs on fake tensors of its own is no part of a trace.

Tensors that are distributed over devices find the shape of a result this way, and remember it: the ops would be in the
first trace alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from nearpeak.trace.patches.shared_patch import SharedPatch, patch_attribute
from nearpeak.trace.recorder import Recorder, active_recorder


class _Entered(threading.local):
    """For each fake mode that was entered on this thread, the recorder that pauses for it and whether it did before."""

    def __init__(self) -> None:
        self.recorders: list[tuple[Recorder, bool] | None] = []


_entered = _Entered()


@SharedPatch
@contextmanager
def skip_shape_inference() -> Iterator[None]:
    """Inside, ops are not recorded while code that is traced has entered a fake mode."""
    kind: Any = FakeTensorMode
    enter, leave = kind.__enter__, kind.__exit__

    def paused_enter(self: Any) -> Any:
        recorder = active_recorder()
        result = enter(self)
        _entered.recorders.append(None if recorder is None else (recorder, recorder.paused))
        if recorder is not None:
            recorder.paused = True
        return result

    def resuming_leave(self: Any, *error: Any) -> Any:
        entered = _entered.recorders.pop() if _entered.recorders else None
        if entered is not None:
            entered[0].paused = entered[1]
        return leave(self, *error)

    with patch_attribute(kind, "__enter__", paused_enter), patch_attribute(kind, "__exit__", resuming_leave):
        yield
