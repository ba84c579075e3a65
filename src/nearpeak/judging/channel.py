"""`Channel`: a process that runs a candidate or the reference, as the judge talks to it: commands, replies, limits."""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nearpeak.errors import EnvironmentProblem
from nearpeak.judging.exchange import write_message

START_SECONDS = 120.0
LAST_WORDS = 2000
"""Characters of what a process wrote before it ended."""


class ProcessEnded(Exception):
    """The process crashed or hung; `words` is what it wrote last."""

    def __init__(self, charge: str, evidence: str, words: str) -> None:
        super().__init__(evidence)
        self.charge, self.evidence, self.words = charge, evidence, words


class CandidateError(Exception):
    """The code of the process raised an error of this kind."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class Reply(NamedTuple):
    """What came back, and the seconds that it took on the judge's clock."""

    content: dict[str, Any]
    seconds: float


class Channel:
    """A process of `runner`, started at once; the first command waits until it is ready."""

    def __init__(
        self, folder: Path, device: str, *, timeout: float, memory_bytes: int | None = None, prefix: Sequence[str] = ()
    ) -> None:
        self.folder, self.timeout = folder, timeout
        self.forged: str = ""
        """A line that the runner did not write."""
        self._log = folder / f"log-{secrets.token_hex(4)}"
        commands_read, self._commands = os.pipe()
        self._replies, replies_write = os.pipe()
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        if device == "cpu":
            environment.setdefault("TRITON_INTERPRET", "1")
        command = [*prefix, sys.executable, "-m", "nearpeak.judging.runner"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, str(commands_read), str(replies_write), str(folder), device],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(commands_read, replies_write),
                env=environment,
                start_new_session=True,
            )
        os.close(commands_read)
        os.close(replies_write)
        if memory_bytes is not None and device == "cpu":
            _limit_memory(self._process.pid, memory_bytes)
        self._buffer = b""
        self._ready = self._closed = False

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def ask(self, do: str, timeout: float | None = None, **content: Any) -> Reply:
        """Gives a command and waits for its reply."""
        if not self._ready:
            self._read("", START_SECONDS)
            self._ready = True
        token = secrets.token_hex(8)
        start = time.perf_counter()
        try:
            write_message(self._commands, {"do": do, "token": token, **content})
        except BrokenPipeError:
            raise self._ended() from None
        reply = self._read(token, timeout or self.timeout)
        seconds = time.perf_counter() - start
        if "error" in reply:
            raise CandidateError(str(reply["error"])[:400], str(reply.get("kind"))[:100])
        return Reply(reply, seconds)

    def _read(self, token: str, timeout: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while True:
            line, separator, rest = self._buffer.partition(b"\n")
            if separator:
                self._buffer = rest
                reply = _parsed(line)
                if reply is not None and reply.get("token") == token:
                    return reply
                self.forged = line[:100].decode("utf-8", "replace")
                continue
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._replies], [], [], left)[0]:
                self.close()
                raise ProcessEnded("HUNG", f"no reply within {timeout:g} s", self.last_words())
            content = os.read(self._replies, 1 << 16)
            if not content:
                raise self._ended()
            self._buffer += content

    def _ended(self) -> ProcessEnded:
        code = self._process.wait()
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        return ProcessEnded("CRASHED", f"the process ended with {how}", self.last_words())

    def last_words(self) -> str:
        """The end of what the process wrote to stdout and stderr."""
        try:
            return self._log.read_bytes()[-LAST_WORDS:].decode("utf-8", "replace")
        except OSError:
            return ""

    def cpu_seconds(self) -> float | None:
        """Processor time of all threads of the process, from the system; None where that is not told."""
        total = 0
        try:
            for task in Path(f"/proc/{self.pid}/task").iterdir():
                total += int((task / "schedstat").read_text().split()[0])
        except (OSError, ValueError, IndexError):
            return None
        return total * 1e-9

    def close(self) -> None:
        """Ends the process and those that it started."""
        if self._process.poll() is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                self._process.kill()
            self._process.wait()
        if not self._closed:
            self._closed = True
            os.close(self._commands)
            os.close(self._replies)


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        reply = json.loads(line)
    except ValueError:
        return None
    return reply if isinstance(reply, dict) else None


def _limit_memory(pid: int, limit: int) -> None:
    import resource

    resource.prlimit(pid, resource.RLIMIT_DATA, (limit, limit))


def sanitizer_prefix(tool: str) -> list[str]:
    """The command line that runs a process under compute-sanitizer."""
    path = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if path is None:
        raise EnvironmentProblem(
            f"--sanitize {tool} needs compute-sanitizer of the CUDA toolkit, which is not on the PATH. Install the "
            "toolkit, or leave the option out."
        )
    return [path, "--tool", tool, "--target-processes", "all", "--print-limit", "5"]
