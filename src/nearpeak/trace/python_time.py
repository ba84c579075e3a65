"""`PythonTime`: the stretches of Python between the ops of a live trace, and the lines that ran in them.

An op tells when it ran, and nothing of what came before it. The recorder therefore reads the clocks of the thread at
each op, and a second thread looks at the stack of the program twice a millisecond: no function, line or signal of the
program is instrumented.

A call of C code that keeps Python's lock, such as that which makes a tensor of a list, lets no other thread look. What
is seen right after it, or where it calls its first op, therefore counts for all of the time since the last look.
"""

from __future__ import annotations

import _thread
import functools
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

import torch

from nearpeak.ops.op import PythonStretch, StackLine
from nearpeak.trace.guard import undone_in_child
from nearpeak.trace.source import is_nearpeak_file, is_torch_file, own_line
from nearpeak.trace.threads import collection_is_due, current_frames

try:
    from resource import RUSAGE_THREAD, getrusage
except ImportError:  # not on every system
    getrusage = None  # type: ignore[assignment]

SAMPLE_INTERVAL_S = 5e-4
MIN_UNSEEN_S = 2e-3
"""After so long without a look, a call of C code kept Python's lock."""
MAX_STACK = 8
"""Lines of a sample."""
MIN_STRETCH_S = 1e-4
"""Shorter times between ops are those of calling them."""


class PythonTime:
    """Is told when ops begin and end on the thread that created it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._running = _thread.allocate_lock()
        """Held while the stack is to be sampled."""
        self._has_ended = False
        self._interval = self._shorter = 0.0
        """Seconds after which a thread must give way to another: the program's, and while it is sampled."""
        self._op = 0
        """The index of the next op."""
        self._seconds: dict[int, float] = {}
        self._stacks: dict[int, dict[tuple[StackLine, ...], float]] = {}
        """For each op, the seconds for which stacks were seen before it."""
        self._left = _read_clocks()
        self._looked_s = self._left[0]
        """When the stack was seen last."""

    def op_begins(self, index: int) -> None:
        """An op begins, which will have this index if it is recorded."""
        wall_s = time.perf_counter() - self._left[0]
        if wall_s >= MIN_STRETCH_S and threading.get_ident() == self._thread and not _in_backward():
            before, now = self._left, _read_clocks()
            if now[0] - max(self._looked_s, before[0]) >= MIN_UNSEEN_S:
                self._saw(index, sampled_stack(_caller()), now[0])
            self._left = now
            self._seconds[index] = self._seconds.get(index, 0.0) + own_seconds(before, now)

    def program_resumes(self) -> None:
        """What nearpeak did since the op began is over: reading values and digests is no time of the program's."""
        if threading.get_ident() == self._thread:
            self._left = _read_clocks()

    def op_ended(self, index: int) -> None:
        """The op is over; the next one has this index."""
        if threading.get_ident() == self._thread:
            self._op = index
            self._left = _read_clocks()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Inside, the stack of the thread is sampled."""
        self._interval = sys.getswitchinterval()
        self._shorter = min(self._interval, SAMPLE_INTERVAL_S)
        sys.setswitchinterval(self._shorter)  # pure Python gives way to the sampler only so often
        self._left = _read_clocks()
        self._running.acquire()
        _thread.start_new_thread(self._sample, ())
        with undone_in_child(self._restore_interval):
            try:
                yield
            finally:
                self.end()

    def end(self) -> None:
        """Ends the sampling, on any thread."""
        if not self._has_ended:
            self._has_ended = True
            self._restore_interval()
            self._running.release()

    def _restore_interval(self) -> None:
        if abs(sys.getswitchinterval() - self._shorter) < 1e-6:  # else the program has set another one
            sys.setswitchinterval(self._interval)

    def stretches(self) -> dict[int, PythonStretch]:
        """The stretches before ops, by the index of the op."""
        return {
            op: PythonStretch(seconds=seconds, stacks=dict(self._stacks.get(op, {})))
            for op, seconds in self._seconds.items()
        }

    def _sample(self) -> None:
        while not self._running.acquire(timeout=SAMPLE_INTERVAL_S):
            now = time.perf_counter()  # first: the thread runs on while its stack is read
            self._saw(self._op, sampled_stack(current_frames().get(self._thread), is_running=True), now)
        self._running.release()

    def _saw(self, op: int, stack: tuple[StackLine, ...] | None, now: float) -> None:
        """A stack was seen, which counts since the last one, or since the last op."""
        if stack is not None:
            since = max(self._looked_s, self._left[0])
            self._looked_s = max(self._looked_s, now)
            if now > since:  # not where an op has ended while this thread waited to look
                stacks = self._stacks.setdefault(op, {})
                stacks[stack] = stacks.get(stack, 0.0) + now - since


def _caller() -> FrameType | None:
    """The function that runs, nearpeak's own left out."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_nearpeak_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def sampled_stack(frame: FrameType | None, is_running: bool = False) -> tuple[StackLine, ...] | None:
    """The lines of the user's own that run, the innermost first; () if it is torch that runs, and None if nearpeak.

    The stack of a thread that `is_running` is None too where it could not be read to its end.
    """
    if frame is None or is_nearpeak_file(frame.f_code.co_filename):
        return None
    stack: list[StackLine] = []
    in_torch = is_torch_file(frame.f_code.co_filename)
    while frame is not None and len(stack) < MAX_STACK and not in_torch:
        line = own_line(frame)
        if line:
            stack.append(StackLine(line, _lines_of(frame.f_code)))
        if is_running and collection_is_due():
            return None
        frame = frame.f_back
    return tuple(stack)


@functools.lru_cache(maxsize=512)
def _lines_of(code: CodeType) -> frozenset[int]:
    """Its own lines: those of functions inside of it are theirs."""
    return frozenset(line for _, _, line in code.co_lines() if line is not None)


Clocks = tuple[float, float, int]
"""Seconds of the wall, seconds of the thread on a processor, and how often another thread took its processor."""


def own_seconds(before: Clocks, after: Clocks) -> float:
    """The time that a thread ran or waited by its own will.

    A thread whose processor was taken waits for it, which is nothing that the program does.

    >>> own_seconds((0.0, 0.0, 0), (10.0, 2.0, 3)), own_seconds((0.0, 0.0, 0), (10.0, 2.0, 0))
    (2.0, 10.0)
    """
    return after[1] - before[1] if after[2] > before[2] else after[0] - before[0]


def _read_clocks() -> Clocks:
    preempted = 0 if getrusage is None else getrusage(RUSAGE_THREAD).ru_nivcsw
    return time.perf_counter(), time.thread_time(), preempted


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
