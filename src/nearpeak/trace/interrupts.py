"""`defer_signals`: Ctrl-C in a trace waits until an exception can be raised; SIGTERM, until a profile is saved.

Python runs a signal's handler between any two instructions. Inside a trace, these are often instructions of code that
torch's dispatcher calls and from which it expects no exception: it ends the process (`terminate called`). And an
exception between a change and its `try` would leave the change. So a handler runs at once only where the user's own
code is, and else after the op, or when everything is put back.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from nearpeak.trace.source import is_standard_file, is_user_file

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP") if hasattr(signal, name)]

pending: list[Callable[[], Any]] = []
"""The handlers that wait."""
_depth: list[None] = []
"""How many traces defer: the outermost runs what is left."""


@contextmanager
def defer_signals(*, deadly: bool = False) -> Iterator[None]:
    """Inside, on the main thread, handlers of signals run where their exceptions do no harm.

    Args:
        deadly: Signals without a handler, which end the process, wait too. A second one does not.
    """
    if threading.current_thread() is not threading.main_thread():  # handlers run on that one alone
        yield
        return
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    ours = {number: _deferring(handler) for number, handler in handlers.items() if callable(handler)}
    if deadly:
        ours |= {number: _deferring(_die) for number, handler in handlers.items() if handler == signal.SIG_DFL}
    _depth.append(None)
    try:
        for number, handler in ours.items():
            signal.signal(number, handler)
        yield
    finally:
        for number, handler in ours.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, handlers[number])
        _depth.pop()
        if not _depth:
            run_pending()


def _deferring(handler: Callable[[int, FrameType | None], Any]) -> Callable[[int, FrameType | None], Any]:
    def handle(number: int, frame: FrameType | None) -> None:
        if pending or _is_in_user_code(frame):  # a second Ctrl-C does not wait
            handler(number, frame)
        else:
            pending.append(lambda: handler(number, None))

    return handle


def _die(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def run_pending() -> None:
    """Runs the handlers that wait."""
    while pending:
        pending.pop(0)()


def _is_in_user_code(frame: FrameType | None) -> bool:
    while frame is not None and is_standard_file(frame.f_code.co_filename):  # which waits for a queue or a process
        frame = frame.f_back
    return frame is not None and is_user_file(frame.f_code.co_filename)
