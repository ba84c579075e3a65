"""Output of the command line: results as text or JSON on stdout, files, and progress on stderr."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TextIO

from nearpeak import _files
from nearpeak._display import StatusLine, printable
from nearpeak.errors import EnvironmentProblem

if TYPE_CHECKING:
    from nearpeak.render.text import Style

_LOWEST_COPY = 200
"""Copies of descriptors get higher numbers, so that the files that a script opens have their usual ones."""


class TextStream(Protocol):
    """What is written to: a file of Python's, or a copy of one."""

    def write(self, text: str, /) -> object:
        """Writes a text."""

    def flush(self) -> object:
        """Makes sure that it is written."""

    def isatty(self) -> bool:
        """Whether it is a terminal."""


class Streams:
    """Where the command line writes to: stdout and stderr, or copies of them while a script may close its own."""

    _copies: ClassVar[tuple[StreamCopy | None, StreamCopy | None]] = None, None

    @classmethod
    def stdout(cls) -> TextStream | None:
        """For results; None where the process has no stdout."""
        copy = cls._copies[0]
        return copy if copy is not None and copy.is_open() else sys.stdout

    @classmethod
    def stderr(cls) -> TextStream | None:
        """For progress and errors."""
        copy = cls._copies[1]
        return copy if copy is not None and copy.is_open() else sys.stderr

    @classmethod
    @contextmanager
    def own(cls) -> Iterator[None]:
        """Inside, results and progress reach the terminal whatever a script does to its own stdout and stderr."""
        before = cls._copies
        cls._copies = StreamCopy.of(sys.stdout), StreamCopy.of(sys.stderr)
        try:
            yield
        finally:
            for copy in cls._copies:
                if copy is not None and copy.is_open():
                    os.close(copy.descriptor)
            cls._copies = before


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCopy:
    """A descriptor of our own to the file of a stream, without a buffer."""

    descriptor: int
    file: tuple[int, int]
    """Device and inode, by which the file is known again: a script may close all descriptors, and open others."""
    encoding: str
    is_terminal: bool

    @classmethod
    def of(cls, stream: TextIO | None) -> StreamCopy | None:
        """None for a stream that is no file."""
        try:
            import fcntl

            assert stream is not None
            stream.flush()
            descriptor = fcntl.fcntl(stream.fileno(), fcntl.F_DUPFD_CLOEXEC, _LOWEST_COPY)
        except (AssertionError, ImportError, OSError, ValueError):
            return None
        return cls(
            descriptor=descriptor,
            file=_file_of(descriptor),
            encoding=stream.encoding or "utf-8",
            is_terminal=stream.isatty(),
        )

    def is_open(self) -> bool:
        """Whether its descriptor is still that of the file."""
        with suppress(OSError):
            return _file_of(self.descriptor) == self.file
        return False

    def write(self, text: str, /) -> None:
        """Writes at once."""
        _files.write_all(self.descriptor, text.encode(self.encoding, "backslashreplace"))

    def flush(self) -> None:
        """Nothing is left to write."""

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self.is_terminal


def _file_of(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


STATUS_INTERVAL_S = 15.0
"""Between two status lines where they cannot replace each other, such as in a file."""


class _Status:
    """The last status line."""

    stands: ClassVar[bool] = False
    """Whether it is the last line of the terminal."""
    printed_at: ClassVar[float] = float("-inf")
    """When one was written as a line of its own."""


def narrate(line: str) -> None:
    """Prints a line of progress to stderr; nothing where that cannot be written.

    A `StatusLine` replaces the one before it on a terminal, and is replaced by what follows. Elsewhere there is one now
    and then.
    """
    with suppress(OSError, ValueError):
        if isinstance(line, StatusLine):
            _write_status(Streams.stderr(), printable(line))
        else:
            narrate_text(printable(line))


def narrate_text(text: str) -> None:
    """Prints text that is for a terminal, such as a report, to stderr; nothing where that cannot be written."""
    with suppress(OSError, ValueError):
        _clear_status()
        _write_line(Streams.stderr(), text)


def _write_status(stream: TextStream | None, line: str) -> None:
    if stream is None:
        return
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        now = time.monotonic()
        if now - _Status.printed_at >= STATUS_INTERVAL_S:
            _Status.printed_at = now
            _write_line(stream, line)
        return
    stream.write(f"\r\x1b[2K{line[: shutil.get_terminal_size().columns - 1]}")
    stream.flush()
    _Status.stands = True


def _clear_status() -> None:
    if _Status.stands:
        _Status.stands = False
        stream = Streams.stderr()
        if stream is not None:
            stream.write("\r\x1b[2K")
            stream.flush()


def _write_line(stream: TextStream | None, text: str) -> None:
    """Past `print`, which a script may have replaced."""
    if stream is not None:
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        stream.flush()


def terminal_style(stream: TextStream | None) -> Style:
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


def write_file(destination: str, content: str | bytes, say: Callable[[str], object] = narrate) -> None:
    """Writes a file and names it on stderr."""
    _files.write_file(destination, content)
    say(f"wrote {destination}")


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
    with suppress(OSError, ValueError):
        _clear_status()
    try:
        _write_line(Streams.stdout(), text)
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk, for example
        raise EnvironmentProblem(f"stdout cannot be written: {error.strerror}.") from None


def json_text(value: Any) -> str:
    """A result as JSON."""
    from nearpeak._records import to_json

    return json.dumps(to_json(value), indent=1)
