"""`progress`: lines that tell what is being done; in a notebook one line that changes and is gone at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from nearpeak.render.html.markup import element, visible


@contextmanager
def progress(shell: Any = None) -> Iterator[Callable[[str], None]]:
    """What to pass as `progress` to `nearpeak.profile` or `nearpeak.bench`.

    In a notebook each line takes the place of the one before, in one place of the output, which is empty when the block
    ends, also by an error. Anywhere else lines go to stderr, as on the command line.

    >>> with progress() as say:
    ...     say("warming up")
    """
    if shell is None and "IPython" in sys.modules:  # which has been imported wherever there is a shell
        shell = sys.modules["IPython"].get_ipython()
    if getattr(shell, "kernel", None) is None:  # a terminal, or no IPython at all
        yield _narrate
        return
    line = _Line()
    try:
        yield line.say
    finally:
        line.clear()


def _narrate(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Line:
    """One place of a cell's output. It is made with the first line, so that nothing is left where none came."""

    def __init__(self) -> None:
        self._handle: Any = None

    def say(self, line: str) -> None:
        """Shows a line in the place of the last one."""
        text = visible(line)
        shown = element("div", text, style="opacity:.75")
        self._show({"text/plain": text, "text/html": str(shown)})

    def clear(self) -> None:
        """Leaves an empty place."""
        if self._handle is not None:
            self._show({"text/plain": "", "text/html": ""})

    def _show(self, forms: dict[str, str]) -> None:
        if self._handle is None:
            display = import_module("IPython.display").display  # no dependency, and there where a kernel is
            self._handle = display(forms, raw=True, display_id=True)
        else:
            self._handle.update(forms, raw=True)
