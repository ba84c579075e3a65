"""Output of the command line: results as text or JSON on stdout, files, and progress on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

from nearpeak import _files
from nearpeak._display import printable

if TYPE_CHECKING:
    from nearpeak.render.text import Style

_LOWEST_COPY = 200
"""Copies of descriptors get higher numbers, so that the files that a script opens have their usual ones."""


class Streams:
    """Where the command line writes to: stdout and stderr, or copies of them while a script may close its own."""

    _out: ClassVar[_Copy | None] = None
    _err: ClassVar[_Copy | None] = None

    @classmethod
    def stdout(cls) -> TextIO | None:
        """For results; None where the process has no stdout."""
        return cls._out.stream if cls._out is not None and cls._out.is_open() else sys.stdout

    @classmethod
    def stderr(cls) -> TextIO | None:
        """For progress and errors."""
        return cls._err.stream if cls._err is not None and cls._err.is_open() else sys.stderr

    @classmethod
    @contextmanager
    def own(cls) -> Iterator[None]:
        """Inside, results and progress reach the terminal whatever a script does to its own stdout and stderr."""
        before = cls._out, cls._err
        cls._out, cls._err = _Copy.of(sys.stdout), _Copy.of(sys.stderr)
        try:
            yield
        finally:
            for copy in (cls._out, cls._err):
                if copy is not None:
                    copy.close()
            cls._out, cls._err = before


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """A stream of our own to the file of another one."""

    stream: TextIO
    file: tuple[int, int]
    """Device and inode, by which the file is known again: a script may close all descriptors, and open others."""

    @classmethod
    def of(cls, stream: TextIO | None) -> _Copy | None:
        """None for a stream that is no file."""
        if stream is None:
            return None
        try:
            import fcntl

            stream.flush()
            descriptor = fcntl.fcntl(stream.fileno(), fcntl.F_DUPFD_CLOEXEC, _LOWEST_COPY)
        except (ImportError, OSError, ValueError):
            return None
        copy = os.fdopen(descriptor, "w", encoding=stream.encoding, errors=stream.errors, closefd=False)
        return cls(stream=copy, file=_file_of(descriptor))

    def is_open(self) -> bool:
        """Whether its descriptor is still that of the file."""
        with suppress(OSError, ValueError):
            return _file_of(self.stream.fileno()) == self.file
        return False

    def close(self) -> None:
        """Closes the descriptor, if it is still our own."""
        if self.is_open():
            with suppress(OSError):  # its reader has gone, which was said when it was written to
                self.stream.flush()
            os.close(self.stream.fileno())


def _file_of(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def narrate(line: str) -> None:
    """Prints a line of progress to stderr."""
    print(printable(line), file=Streams.stderr(), flush=True)


def terminal_style(stream: TextIO | None) -> Style:
    """Colors and block characters on a terminal that can show them; plain text for files and pipes.

    NO_COLOR (https://no-color.org) or TERM=dumb in the environment: no colors.
    """
    from nearpeak.render.text import Style

    terminal = stream is not None and stream.isatty()
    dumb = os.environ.get("TERM") == "dumb"
    encoding = (getattr(stream, "encoding", None) or "").lower().replace("-", "").replace("_", "")
    return Style(
        color=terminal and not dumb and not os.environ.get("NO_COLOR"),
        blocks=terminal and not dumb and encoding == "utf8",
    )


def write_file(destination: str, content: str | bytes) -> None:
    """Writes a file and names it on stderr."""
    _files.write_file(destination, content)
    narrate(f"wrote {destination}")


def print_result(text: str, value: Any, destination: str | None) -> None:
    """Writes a result as JSON to `destination`, and prints it as text; "-" prints JSON instead of text.

    The file comes first: a reader of stdout that has gone does not lose it. The text is printed even if the file cannot
    be written.
    """
    if destination == "-":
        print_text(json_text(value))
        return
    try:
        if destination:
            write_file(destination, json_text(value) + "\n")
    finally:
        print_text(text)


def print_text(text: str) -> None:
    """Prints a result; what the encoding of stdout lacks becomes an escape."""
    stream = Streams.stdout()
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def json_text(value: Any) -> str:
    """A result as JSON."""
    from nearpeak._records import to_json

    return json.dumps(to_json(value), indent=1)
