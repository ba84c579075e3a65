"""`SharedPatch`: a monkeypatch of the whole process that lasts while anyone needs it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any


class SharedPatch:
    """A context manager that the first user enters and the last one leaves.

    Two traces on two threads may overlap in any order: what one of them patched, the other must not restore.
    """

    def __init__(self, patch: Callable[[], AbstractContextManager[Any]]) -> None:
        self._patch = patch
        self._lock = threading.RLock()
        self._users = 0
        self._entered = ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, the patch holds."""
        with self._lock:
            if self._users == 0:
                self._entered.enter_context(self._patch())
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._entered.close()


class ThreadCounter(threading.local):
    """How often something happened on this thread."""

    count = 0

    def since(self) -> Since:
        """Whether it happens from now on."""
        return Since(self)


class Since:
    """Whether something happened since this was made, on the thread that asks."""

    def __init__(self, counter: ThreadCounter) -> None:
        self._counter = counter
        self._before = counter.count

    @property
    def happened(self) -> bool:
        """Whether the counter has grown."""
        return self._counter.count > self._before


@contextmanager
def patch_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, an attribute of a module or class has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if getattr(owner, name) is value:  # else the program has replaced it meanwhile, and calls ours from there
            setattr(owner, name, before)


@contextmanager
def no_warnings() -> Iterator[None]:
    """Inside, nothing is warned of.

    The filter is added past the functions of `warnings`: these make Python forget which warnings it has shown, and a
    program would show again what it shows once.
    """
    everything = ("ignore", None, Warning, None, 0)
    filters: Any = warnings.filters
    filters.insert(0, everything)
    try:
        yield
    finally:
        if everything in filters:
            filters.remove(everything)
