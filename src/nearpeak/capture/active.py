"""`active_recorder`: which recorder sees the ops of this thread."""

from __future__ import annotations

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from nearpeak.capture.recorder import Recorder


def active_recorder() -> Recorder | None:
    """The innermost recorder that sees what runs here; None outside of traces and inside of an op.

    Asked of torch, which hands its modes on to the threads of autograd.
    """
    modes = _get_current_dispatch_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, Recorder)), None)
