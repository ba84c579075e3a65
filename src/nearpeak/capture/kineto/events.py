"""The events of a Chrome trace, one at a time: the file is never held whole, and nothing in it is executed."""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from nearpeak.errors import UsageError

_CHUNK = 1 << 20
"""Bytes read at a time."""
_LONGEST = 1 << 26
"""Characters that one event may have; what is longer is damaged."""
_LONGEST_WORD = len("-Infinity")
_GZIP = b"\x1f\x8b"
_GZIP_FORMAT = 16 + zlib.MAX_WBITS
_SPACE = re.compile(r"[\s,]*")
_NEXT = re.compile(r"\}\s*,\s*(?=\{)")
"""Where one event ends and the next begins. Inside of events, objects never follow each other."""
_BARE = re.compile(r"(?<=[:,\[])\s*-?(?:nan|inf|infinity)(?:\([^)]*\))?\s*(?=[,}\]])", re.IGNORECASE)
"""Numbers that C++ writes and JSON does not have."""


class EventFile:
    """The events of one file in its order; afterwards `metadata` has its other fields, and the flags what was wrong.

    A file that ends in the middle, as one of a job that was killed does, gives the events up to there.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self.truncated = False
        """The file ends before its JSON does."""
        self.damaged = 0
        """Events that are no JSON, and were left out."""
        self._decoder = json.JSONDecoder()
        self._buffer = ""
        self._at = 0
        self._text: Iterator[str] = iter(())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            with self.path.open("rb") as raw:
                self._text = self._decoded(raw)
                yield from self._document()
        except FileNotFoundError:
            raise UsageError(f"{self.path}: there is no such file.") from None
        except (IsADirectoryError, PermissionError) as error:
            raise UsageError(f"{self.path} cannot be read: {error.strerror}.") from None

    def _decoded(self, raw: BinaryIO) -> Iterator[str]:
        """The text of the file in pieces, up to where a compressed one was cut off."""
        decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
        packed = raw.read(len(_GZIP)) == _GZIP
        raw.seek(0)
        for piece in self._unpacked(raw) if packed else iter(lambda: raw.read(_CHUNK), b""):
            yield decoder.decode(piece)

    def _unpacked(self, raw: BinaryIO) -> Iterator[bytes]:
        """What a gzip file holds. The standard library's reader gives nothing of a last part that is not whole."""
        unpacker = zlib.decompressobj(_GZIP_FORMAT)
        rest = b""
        while piece := rest or raw.read(_CHUNK):
            if unpacker.eof:  # several files, one after the other
                unpacker = zlib.decompressobj(_GZIP_FORMAT)
            try:
                yield unpacker.decompress(piece, _CHUNK)
            except zlib.error:
                break
            rest = unpacker.unconsumed_tail or unpacker.unused_data
        if not unpacker.eof:
            self.truncated = True

    def _document(self) -> Iterator[dict[str, Any]]:
        first = self._peek()
        if first == "[":  # Chrome's other form: the array alone
            self._at += 1
            yield from self._events()
            return
        if first != "{":
            raise self._no_trace(f"it starts with {first!r}" if first else self._why_empty())
        self._at += 1
        found = False
        while (key := self._value()) is not None:
            if self._peek() == ":":
                self._at += 1
            if key == "traceEvents" and self._peek() == "[":
                self._at += 1
                found = True
                yield from self._events()
            else:
                self.metadata[str(key)] = self._value()
        if not found and not self.truncated:
            fields = ", ".join([*self.metadata][:8]) or "none"
            raise self._no_trace(f"it has no list of traceEvents. Its fields: {fields}")

    def _why_empty(self) -> str:
        if not self.path.stat().st_size:
            return "it is empty"
        return "nothing of it can be unpacked" if self.truncated else "there is nothing in it"

    def _no_trace(self, why: str) -> UsageError:
        return UsageError(
            f"{self.path} is no Chrome trace: {why}. Pass a file that torch.profiler's export_chrome_trace wrote, as "
            ".json or .json.gz."
        )

    def _events(self) -> Iterator[dict[str, Any]]:
        while True:
            following = self._peek()
            if following == "]":
                self._at += 1
                return
            if not following:
                self.truncated = True
                return
            event = self._value()
            if isinstance(event, dict):
                yield event

    def _peek(self) -> str:
        """The next character that is neither space nor comma; nothing at the end."""
        while True:
            match = _SPACE.match(self._buffer, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._fill():
                return ""

    def _value(self) -> Any:
        """The next value; None at the end of the object or the file, and for an event that is damaged."""
        if self._peek() in ("", "}", "]"):
            if not self._peek():
                self.truncated = True
            self._at += 1
            return None
        wanted = _CHUNK
        while True:
            try:
                value, end = self._decoder.raw_decode(self._buffer, self._at)
            except json.JSONDecodeError as error:
                if not self._unfinished(error) or len(self._buffer) - self._at > _LONGEST:
                    return self._repaired()
                if not self._fill(wanted):
                    return self._repaired()
                wanted *= 2  # so that a long event is not decoded again for every piece
                continue
            if isinstance(value, (int, float)) and end >= len(self._buffer) - len(".e-") and self._fill():
                continue  # a number may go on
            self._at = end
            return value

    def _unfinished(self, error: json.JSONDecodeError) -> bool:
        """Whether an error only says that the buffer ends too early. The place of a string's is where it starts."""
        return error.msg.startswith("Unterminated string") or error.pos >= len(self._buffer) - _LONGEST_WORD

    def _repaired(self) -> Any:
        """A value that is no JSON, up to where the next one begins, with bare NaN and infinity replaced."""
        match = _NEXT.search(self._buffer, self._at)
        while match is None and len(self._buffer) - self._at <= _LONGEST and self._fill():
            match = _NEXT.search(self._buffer, self._at)
        end = match.start() + 1 if match else len(self._buffer)
        text = _BARE.sub("null", self._buffer[self._at : end])
        try:
            value, used = self._decoder.raw_decode(text)
        except json.JSONDecodeError:
            if match is None:
                self.truncated = True
            else:
                self.damaged += 1
            self._at = end
            return None
        self._at = end if match else end - (len(text) - used)
        return value

    def _fill(self, size: int = 1) -> bool:
        """Reads on, at least `size` characters where there are as many, and forgets what has been used."""
        pieces = [self._buffer[self._at :]]
        added = 0
        for piece in self._text:
            pieces.append(piece)
            added += len(piece)
            if added >= size:
                break
        if not added:
            return False
        self._buffer = "".join(pieces)
        self._at = 0
        return True
