"""Files: `read_json`, `read_text` and `InputFile` read them within limits, `write_file` and `replace_file` write them.

Every file that is no part of the package is read here. What comes back is plain data of a limited size and depth;
anything else is one error, a `FileProblem`, which names the file and what is wrong with it.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import itertools
import json
import os
import re
import select
import stat
import sys
import time
import tomllib
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from nearpeak.errors import EnvironmentProblem, FileProblem, UsageError

LARGEST_BYTES = 2**29
"""The most bytes that are read of one file, after decompression: two million ops of a saved profile."""
LARGEST_RATIO = 200
"""Of decompressed to compressed bytes, beyond `_ANY_RATIO_BYTES`. A trace has 10 to 40; gzip can reach 1000."""
DEEPEST = 64
"""Lists and objects inside each other. Ours have up to eight."""
MOST_CONTAINERS = 2**22
"""Lists and objects in one file: an empty one is three characters, and takes twenty times as much memory."""
NO_WRITER_S = 2.0
"""Seconds until a pipe that nobody writes to counts as empty."""
SILENT_WRITER_S = 60.0
"""Seconds that a writer of a pipe may pause."""
NO_READER_S = 60.0
"""Seconds until a pipe that nobody reads from is an error."""

_ANY_RATIO_BYTES = 2**23
_CHUNK = 1 << 20
_GZIP = b"\x1f\x8b"
_GZIP_FORMAT = 16 + zlib.MAX_WBITS
_NO_BRACKETS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[^\[\]{}"]+', re.DOTALL)
"""Strings, and everything else that is no bracket."""
_OWN_DESCRIPTOR = re.compile(r"/(?:dev|proc/(self|thread-self|\d+))/fd/(\d+)")
_IN_PLACE_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV)
"""Why a file cannot be replaced although it may be writable: its folder is not, or it is a mount of its own."""
_ENVIRONMENT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG)
"""Errors in writing a file that are not the fault of its path."""


class InputFile:
    """One file, plain or gzip, that is read once from its start to its end; a pipe too.

    What is no file at all (a folder, a device) is refused, and so is a pipe that nothing comes from.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.truncated = False
        """Whether compressed content ends early, or is damaged from some place on."""
        self._descriptor: int | None = None
        self._is_pipe = False
        self._has_begun = False
        self._head: list[bytes] = []
        self._content = self._pieces()

    def __str__(self) -> str:
        return str(self.path)

    def __fspath__(self) -> str:
        return str(self.path)

    def __enter__(self) -> InputFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._content.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def head(self, size: int) -> bytes:
        """The first bytes of the content, or fewer where there are no more; `pieces` has them too."""
        while sum(map(len, self._head)) < size and (piece := next(self._content, None)) is not None:
            self._head.append(piece)
        return b"".join(self._head)[:size]

    def pieces(self, largest: int = LARGEST_BYTES) -> Iterator[bytes]:
        """The content, decompressed, piece by piece; at most `largest` bytes."""
        head, self._head = self._head, []
        total = 0
        for piece in itertools.chain(head, self._content):
            total += len(piece)
            if total > largest:
                raise FileProblem(self, f"it holds more than {largest:,} bytes, and is not read")
            yield piece

    def _pieces(self) -> Generator[bytes, None, None]:
        self._open()
        first = self._read(_CHUNK)
        while 0 < len(first) < len(_GZIP) and (more := self._read(_CHUNK)):  # a pipe may give a byte at a time
            first += more
        packed = first.startswith(_GZIP)
        raw = itertools.chain([first] if first else [], iter(lambda: self._read(_CHUNK), b""))
        yield from self._unpacked(raw) if packed else raw

    def _open(self) -> None:
        try:
            mode = self.path.stat().st_mode
            self._is_pipe = stat.S_ISFIFO(mode)
            if stat.S_ISREG(mode) or self._is_pipe:
                # without waiting: to open a pipe would wait for its writer, for ever
                self._descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
                return
            reason = "it is a folder" if stat.S_ISDIR(mode) else "it is a device"
        except FileNotFoundError:
            raise FileProblem(self, "there is no such file") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
        raise FileProblem(self, f"it cannot be read: {reason}") from None

    def _read(self, size: int) -> bytes:
        assert self._descriptor is not None
        until = time.monotonic() + NO_WRITER_S
        while True:
            try:
                piece = os.read(self._descriptor, size)
            except BlockingIOError:  # a pipe with a writer that has written nothing yet
                if not self._is_pipe or not select.select([self._descriptor], [], [], SILENT_WRITER_S)[0]:
                    reason = f"it cannot be read: nothing came for {SILENT_WRITER_S:.0f} s"
                    raise FileProblem(self, reason) from None
                until = -1.0
                continue
            except OSError as error:
                raise FileProblem(self, f"it cannot be read: {error.strerror or error}") from None
            if piece or not self._is_pipe or self._has_begun or time.monotonic() > until:
                self._has_begun = True
                return piece
            time.sleep(0.01)

    def _unpacked(self, raw: Iterator[bytes]) -> Iterator[bytes]:
        """The content of a gzip file. The standard library's reader gives nothing of a truncated last part."""
        unpacker = zlib.decompressobj(_GZIP_FORMAT)
        packed = unpacked = 0
        for piece in raw:
            packed += len(piece)
            rest = piece
            while rest:
                if unpacker.eof:  # several files, one after the other, or zeros that fill a block
                    rest = rest.lstrip(b"\0")
                    if not rest:
                        break
                    unpacker = zlib.decompressobj(_GZIP_FORMAT)
                try:
                    content = unpacker.decompress(rest, _CHUNK)
                except zlib.error:
                    self.truncated = True
                    return
                unpacked += len(content)
                if unpacked > max(_ANY_RATIO_BYTES, LARGEST_RATIO * packed):
                    raise FileProblem(self, f"it expands to more than {LARGEST_RATIO} times its size, and is not read")
                yield content
                rest = unpacker.unconsumed_tail or unpacker.unused_data
        while not unpacker.eof and (content := unpacker.decompress(b"", _CHUNK)):  # it may hold some back
            yield content
        self.truncated = not unpacker.eof


def read_bytes(path: str | Path | InputFile, *, largest: int = LARGEST_BYTES) -> bytes:
    """The whole content, decompressed."""
    with path if isinstance(path, InputFile) else InputFile(path) as file:
        content = b"".join(file.pieces(largest))
        if file.truncated:
            raise FileProblem(file, "it cannot be read: its compressed content is truncated or damaged")
        return content


def read_text(path: str | Path | InputFile, *, largest: int = LARGEST_BYTES) -> str:
    """The whole content as text in UTF-8, without a byte order mark."""
    try:
        return read_bytes(path, largest=largest).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileProblem(path, f"it is no text in UTF-8 (byte {error.start:,})") from None


def read_json(path: str | Path | InputFile, *, largest: int = LARGEST_BYTES) -> Any:
    """The content as plain data. NaN and infinities are no JSON; what a number means is for its reader to check."""
    text = read_text(path, largest=largest)
    brackets = _NO_BRACKETS.sub("", text)  # before parsing, whose depth and memory they decide
    if len(brackets) > 2 * MOST_CONTAINERS:
        raise FileProblem(path, f"it has more than {MOST_CONTAINERS:,} lists and objects, and is not read")
    depths = itertools.accumulate(1 if bracket in "[{" else -1 for bracket in brackets)
    if len(brackets) > DEEPEST and max(depths) > DEEPEST:
        raise FileProblem(path, f"its lists and objects are nested more than {DEEPEST} deep, and it is not read")
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise FileProblem(path, f"it is not valid JSON: {error}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def read_csv(path: str | Path) -> tuple[tuple[str, ...], list[dict[str, str]]]:
    """The names of the columns, and the rows; a cell that a row lacks is empty."""
    lines = io.StringIO(read_text(path), newline="")
    reader = csv.DictReader(lines, restkey="", restval="")
    try:
        return tuple(reader.fieldnames or ()), [{key: row[key] for key in row if key} for row in reader]
    except csv.Error as error:
        raise FileProblem(path, f"it is not valid CSV: {error} after line {reader.line_num}") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Text as TOML; ValueError where it is none."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("its arrays and tables are nested too deep") from None


def write_file(path: str | Path, content: str | bytes) -> None:
    """Writes a file that the user named; the error says whether the path or the machine is at fault."""
    try:
        # a text may hold half a character, of a file that does
        replace_file(Path(path), content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)
    except (OSError, ValueError) as error:
        fault = EnvironmentProblem if getattr(error, "errno", None) in _ENVIRONMENT_ERRORS else UsageError
        raise fault(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}.") from None


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file whole: a reader sees the old content or the new one, and after an error the old one. OSError.

    * A link stays, and the file behind it is written, also where there is none yet.
    * A device or a pipe is written to. /dev/stdout and /dev/fd/N are the open file of this process, at its position.
    * A file keeps its permissions and its owner; a file that is protected against writing is an error.
    * Otherwise the file is written beside and renamed. Where that would break a hard link or change the owner, or where
      the folder cannot be written, it is overwritten in place.
    """
    descriptor = _own_descriptor(path)
    if descriptor is not None:
        for stream in (sys.stdout, sys.stderr):  # what was printed before comes before
            with contextlib.suppress(AttributeError, ValueError):  # there may be none, or a closed one
                stream.flush()
        write_all(descriptor, content)
        return
    try:
        status = path.stat()
    except FileNotFoundError:
        status = None
    if status is not None and stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    if status is not None and not stat.S_ISREG(status.st_mode):
        _write_to_device(path, content, is_pipe=stat.S_ISFIFO(status.st_mode))
        return
    target = Path(os.path.realpath(path))
    if status is None:
        _write_beside(target, content, None)
        return
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, "it is protected against writing")
    if status.st_nlink > 1:
        _overwrite(target, content)
        return
    try:
        _write_beside(target, content, status)
    except OSError as error:
        if error.errno not in _IN_PLACE_ERRORS:
            raise
        _overwrite(target, content)


def _own_descriptor(path: Path) -> int | None:
    """The number of the open file that a path means: /dev/stdout, /dev/fd/3, or a link to one of them."""
    place = path.absolute()
    for _ in range(10):
        if match := _OWN_DESCRIPTOR.fullmatch(str(place)):
            return int(match[2]) if match[1] in (None, "self", "thread-self", str(os.getpid())) else None
        try:
            place = Path(os.path.normpath(place.parent / place.readlink()))
        except OSError:
            return None
    return None


def write_all(descriptor: int, content: bytes) -> None:
    """Writes all of it to a descriptor."""
    rest = memoryview(content)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # somebody else's pipe, and it is full
            select.select([], [descriptor], [])


def _write_to_device(path: Path, content: bytes, *, is_pipe: bool) -> None:
    until = time.monotonic() + NO_READER_S
    while True:
        try:
            descriptor = os.open(path, os.O_WRONLY | (getattr(os, "O_NONBLOCK", 0) if is_pipe else 0))
            break
        except OSError as error:
            if not is_pipe or error.errno != errno.ENXIO:
                raise
            if time.monotonic() > until:
                raise OSError(errno.ENXIO, f"nobody read from this pipe for {NO_READER_S:.0f} s") from None
            time.sleep(0.01)
    try:
        os.set_blocking(descriptor, True)
        write_all(descriptor, content)
    finally:
        os.close(descriptor)


def _write_beside(target: Path, content: bytes, status: os.stat_result | None) -> None:
    temporary = target.with_name(f".{target.name[:100]}.{os.urandom(4).hex()}.tmp")
    # os.open and not tempfile: who may read a new file is for the user's umask to say
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if status is not None and hasattr(os, "fchown"):
                mine = os.fstat(descriptor)
                if (mine.st_uid, mine.st_gid) != (status.st_uid, status.st_gid):
                    os.fchown(descriptor, status.st_uid, status.st_gid)
                os.fchmod(descriptor, stat.S_IMODE(status.st_mode))
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # some file systems say only here that the disk is full
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _overwrite(target: Path, content: bytes) -> None:
    """Writes into the file that is there; after an error it has its old content again."""
    with os.fdopen(os.open(target, os.O_RDWR), "r+b") as file:
        old = file.read()
        try:
            _fill(file.fileno(), content)
        except BaseException:
            _fill(file.fileno(), old)
            raise


def _fill(descriptor: int, content: bytes) -> None:
    os.lseek(descriptor, 0, os.SEEK_SET)
    write_all(descriptor, content)
    os.ftruncate(descriptor, len(content))
    os.fsync(descriptor)


class _FixedFolder:
    path: ClassVar[Path | None] = None


@contextlib.contextmanager
def fixed_cache_folder() -> Iterator[None]:
    """Inside, the cache folder is the one of now: a script may change the environment and the working folder."""
    before, _FixedFolder.path = _FixedFolder.path, cache_folder().absolute()
    try:
        yield
    finally:
        _FixedFolder.path = before


def cache_folder() -> Path:
    """NEARPEAK_CACHE_DIR where it is set, else the user's cache folder of this system."""
    if _FixedFolder.path is not None:
        return _FixedFolder.path
    chosen = os.environ.get("NEARPEAK_CACHE_DIR")
    if chosen:
        with contextlib.suppress(RuntimeError):  # ~name of a user that is not known
            return Path(chosen).expanduser()
        return Path(chosen)
    import platformdirs

    return Path(platformdirs.user_cache_dir("nearpeak", appauthor=False))
