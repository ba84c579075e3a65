"""`SharedPatch`: a monkeypatch of the whole process that lasts while anyone needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any


class SharedPatch:
    """Enters a context with the first who ask for it and leaves it with the last.

    Two traces on two threads may overlap in any order: what one of them replaced, the other must not restore.
    """

    def __init__(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self._context = context
        self._lock = threading.RLock()
        self._users = 0
        self._entered: ExitStack | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, the context is entered."""
        with self._lock:
            if self._users == 0:
                self._entered = ExitStack()
                self._entered.enter_context(self._context())
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0 and self._entered is not None:
                    self._entered.close()
                    self._entered = None


class ThreadCounter(threading.local):
    """How often something happened on this thread."""

    times = 0

    def since(self) -> Since:
        """Tells whether it happens from now on."""
        return Since(self)


class Since:
    """Tells whether something happened since this was made, on the thread that asks."""

    def __init__(self, tally: ThreadCounter) -> None:
        self._tally = tally
        self._before = tally.times

    @property
    def asked(self) -> bool:
        """Whether it did."""
        return self._tally.times > self._before


@contextmanager
def patch_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, an attribute of a module or class has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
