"""`Guard`: the wall between a program and the code of nearpeak that runs inside it.

nearpeak watches a program from hooks, patched calls, a dispatch mode and the ends of steps. All of that is called
through a guard, so that three rules hold everywhere:

- An exception of nearpeak's code ends the watching, and never the program.
- Nothing of it runs in a forked child, which has a copy of everything but the threads of the profiler. What a child
  would still see of the profiler is undone in it (`undone_in_child`).
- Nothing of it calls the device while a stream is being captured into a graph (`is_capturing`): such a call would end
  the capture with an error.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, ParamSpec, TypeVar

import torch

from nearpeak.devices.backends import gpu_in_use
from nearpeak.trace.patches.shared_patch import SharedPatch

P = ParamSpec("P")
T = TypeVar("T")


class Guard:
    """Calls nearpeak's own code inside a program. `failed` is told of its exceptions; the first is in `failure`.

    >>> guard = Guard()
    >>> guard.call(lambda: 1 / 0) is None, guard.failure
    (True, ZeroDivisionError('division by zero'))
    """

    def __init__(self, failed: Callable[[Exception], object] = lambda error: None) -> None:
        self.failure: Exception | None = None
        self._failed = failed
        self._process = os.getpid()
        self._own_time = OwnTime()

    @property
    def in_child(self) -> bool:
        """Whether this is a forked child of the process that is watched."""
        return os.getpid() != self._process

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """The result of `function`; None if it raises an exception, and in a forked child.

        What is no `Exception` passes: it ends the program on purpose. Function modes and subclasses of the program do
        not see what is asked of tensors here.
        """
        if os.getpid() != self._process:
            return None
        with self._own_time:
            try:
                with torch._C.DisableTorchFunction():
                    return function(*args, **kwargs)
            except Exception as error:
                self._note_failure(error)
                return None

    def own_time(self) -> OwnTime:
        """A context in which code of nearpeak runs: `program_time` stands still. Contexts may be nested."""
        return self._own_time

    @contextmanager
    def as_program(self) -> Iterator[None]:
        """Inside, what runs counts as the program, also where code of nearpeak calls it."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            if self._own_time.depth:
                self._own_time.entered += time.perf_counter() - begun

    def program_time(self, *, now: bool = False) -> float:
        """A clock in seconds that runs while the program does, and not while code of nearpeak runs inside it.

        With `now`, what the running code of nearpeak has taken counts as well: it waited for work of the program.
        """
        own = self._own_time
        return (time.perf_counter() if now or own.depth == 0 else own.entered) - own.seconds

    def wrap(self, function: Callable[P, T]) -> Callable[P, T | None]:
        """`function`, called through the guard; not while torch.compile traces the caller, which would compile it."""

        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
            if torch.compiler.is_compiling():
                return None
            return self.call(function, *args, **kwargs)

        return guarded

    def _note_failure(self, error: Exception) -> None:
        self.failure = self.failure or error.with_traceback(None)  # a frame would keep tensors alive
        with suppress(Exception):
            self._failed(error)


_undo: list[Callable[[], object]] = []
"""What a child that is forked now undoes, in the order in which it was done."""


@contextmanager
def undone_in_child(undo: Callable[[], object]) -> Iterator[None]:
    """Inside, a child that is forked calls `undo` as it begins: the latest change of the program is undone first."""
    _undo.append(undo)
    try:
        yield
    finally:
        if undo in _undo:  # not in a child, which has called it
            _undo.remove(undo)


def _undo_in_child() -> None:
    while _undo:
        with suppress(Exception):
            _undo.pop()()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_undo_in_child)


class OwnTime:
    """A context manager that adds up the time inside of it; nested and on several threads, each instant counts once."""

    __slots__ = ("depth", "entered", "seconds")

    def __init__(self) -> None:
        self.depth = 0
        self.entered = 0.0
        """When the outermost context that is open was entered."""
        self.seconds = 0.0
        """The sum over those that were left."""

    def __enter__(self) -> None:
        if self.depth == 0:
            self.entered = time.perf_counter()
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        if self.depth == 1:  # before the clock goes on: a thread that reads it now sees it stand, or step back
            now = time.perf_counter()
            self.seconds += now - self.entered
            self.entered = now
        self.depth -= 1


class OwnThread:
    """True on the thread that created it, and on no other: ids are those of threads that have ended, given again.

    >>> bool(OwnThread())
    True
    """

    def __init__(self) -> None:
        self._mark = threading.local()
        self._mark.is_own = True

    def __bool__(self) -> bool:
        return getattr(self._mark, "is_own", False)


class _Captures:
    """What `watch_captures` has seen."""

    open: ClassVar[set[int]] = set()
    """Graphs that are being captured, by id."""
    begun: ClassVar[int] = 0


def capture_count() -> int:
    """How many captures have begun, as far as `watch_captures` saw them."""
    return _Captures.begun


def is_capturing() -> bool:
    """Whether a stream is being captured: the current one, or any while `watch_captures` is open."""
    if _Captures.open:
        return True
    backend = gpu_in_use()
    return backend is not None and backend.is_capturing()


@SharedPatch
@contextmanager
def watch_captures() -> Iterator[None]:
    """Inside, captures on other threads are known too: in torch's default mode they forbid calls on all threads."""
    kind: Any = torch.cuda.CUDAGraph
    before = {name: vars(kind).get(name) for name in ("capture_begin", "capture_end")}
    begin, end = kind.capture_begin, kind.capture_end

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        _Captures.open.add(id(self))
        _Captures.begun += 1
        try:
            return begin(self, *args, **kwargs)
        except BaseException:
            _Captures.open.discard(id(self))
            raise

    @functools.wraps(end)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return end(self, *args, **kwargs)
        finally:
            _Captures.open.discard(id(self))

    kind.capture_begin, kind.capture_end = capture_begin, capture_end
    try:
        yield
    finally:
        _Captures.open.clear()
        for name, original in before.items():
            if original is None:
                delattr(kind, name)
            else:
                setattr(kind, name, original)
