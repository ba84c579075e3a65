"""`Channel`: a process that runs a candidate or the reference, as the judge talks to it: commands, replies, limits."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from nearpeak.errors import EnvironmentProblem

START_SECONDS = 120.0
WATCH_S, LOOK_S = 0.004, 0.5
"""Between the looks at a process that is watched, and at the children of one whose reply takes long."""
MOST_PATIENCE = 3.0
"""Times the limit of a reply, which waiting for a processor may add to it."""
RUNS = 1 << 20
"""What the server says of a runner that has not ended: no exit code."""
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
LAST_WORDS = 2000
"""Characters of what a process wrote before it ended."""


class ProcessEnded(Exception):
    """The process crashed or hung; `words` is what it wrote last."""

    def __init__(self, charge: str, evidence: str, words: str) -> None:
        super().__init__(evidence)
        self.charge, self.evidence, self.words = charge, evidence, words


class CandidateError(Exception):
    """The code of the process raised an error of this kind; afterwards its device may be unusable."""

    def __init__(self, message: str, kind: str, *, is_device_lost: bool = False) -> None:
        super().__init__(message)
        self.kind, self.is_device_lost = kind, is_device_lost


class Reply(NamedTuple):
    """What came back, and the seconds that it took on the judge's clock."""

    content: dict[str, Any]
    seconds: float


def write_message(descriptor: int, message: dict[str, Any]) -> None:
    """Writes one message as a line."""
    content = json.dumps(message).encode() + b"\n"
    while content:
        content = content[os.write(descriptor, content) :]


class Channel:
    """A process of `runner`, started at once; the first command waits until it is ready."""

    def __init__(self, folder: Path, device: str, *, timeout: float, prefix: Sequence[str] = ()) -> None:
        self.folder, self.timeout = folder, timeout
        self.forged: str = ""
        """A line that the runner did not write."""
        self._children_waited = 0.0
        """Seconds in which processes that it started waited for a processor, as far as commands were waited for."""
        self.stops = 0
        """How often the process was seen stopped while it was watched."""
        self._log = folder / f"log-{secrets.token_hex(4)}"
        commands_read, self._commands = os.pipe()
        self._replies, replies_write = os.pipe()
        arguments = [str(folder), device]
        with self._log.open("wb") as log:
            descriptors = (commands_read, replies_write, log.fileno())
            if not prefix:
                self._process: Process = _server_process(arguments, descriptors)
            else:
                self._process = _own_process(prefix, arguments, descriptors)
        self._server_waited = self._server_seconds()
        os.close(commands_read)
        os.close(replies_write)
        self._buffer = b""
        self._ready = self._closed = False

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def ask(self, do: str, timeout: float | None = None, *, watched: bool = False, **content: Any) -> Reply:
        """Gives a command and waits for its reply; `watched` also looks whether somebody stops the process."""
        if not self._ready:
            self._read("", START_SECONDS)
            self._ready = True
        start = time.perf_counter()
        reply = self.answer(self.command(do, **content), timeout, watched=watched)
        return Reply(reply, time.perf_counter() - start)

    def command(self, do: str, **content: Any) -> str:
        """Gives a command, and returns the token that `answer` waits for."""
        token = secrets.token_hex(8)
        try:
            write_message(self._commands, {"do": do, "token": token, **content})
        except BrokenPipeError:
            raise self._ended() from None
        return token

    def answer(self, token: str, timeout: float | None = None, *, watched: bool = False) -> dict[str, Any]:
        """The reply to a command, of which only one is under way."""
        if not self._ready:
            self._read("", START_SECONDS)
            self._ready = True
        reply = self._read(token, timeout or self.timeout, watched=watched)
        if "error" in reply:
            message, kind = str(reply["error"])[:400], str(reply.get("kind"))[:100]
            raise CandidateError(message, kind, is_device_lost=reply.get("device_lost") is True)
        return reply

    def _read(self, token: str, timeout: float, *, watched: bool = False) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        before = self.waited_seconds() if token else 0.0
        last: tuple[float, float] | None = None
        pause_s = WATCH_S if watched else LOOK_S
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
            while token and left > 0 and not select.select([self._replies], [], [], min(left, pause_s))[0]:
                if watched:
                    self.stops += _is_stopped(self.pid)
                else:
                    last = self._look_at_children(last, time.monotonic())
                # Waiting for a processor on a busy machine is not hanging.
                waited = min(MOST_PATIENCE * timeout, max(0.0, self.waited_seconds() - before))
                left = deadline + waited - time.monotonic()
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

    def words(self) -> str:
        """What the process wrote to stdout and stderr."""
        try:
            return self._log.read_bytes().decode("utf-8", "replace")
        except OSError:
            return ""

    def last_words(self) -> str:
        """The end of that."""
        return self.words()[-LAST_WORDS:]

    def processor_seconds(self) -> tuple[float, float] | None:
        """Time in which threads of the process ran, and waited for a processor; None where the system does not tell."""
        ran = waited = 0
        try:
            for task in Path(f"/proc/{self.pid}/task").iterdir():
                fields = (task / "schedstat").read_text().split()
                ran, waited = ran + int(fields[0]), waited + int(fields[1])
        except (OSError, ValueError, IndexError):
            return None
        return ran * 1e-9, waited * 1e-9

    def waited_seconds(self) -> float:
        """Time in which the process, and the one that forked it, waited for a processor since this was made."""
        own = waited_seconds(self.pid) + self._server_seconds() - self._server_waited
        return own + self._children_waited

    def _look_at_children(self, last: tuple[float, float] | None, now: float) -> tuple[float, float]:
        """Adds the time since the last look in which processes that it started had less than a processor and wanted it.

        A compiler that the first call runs is such a process.
        """
        worked, wants = self._children()
        if last is not None and wants:
            self._children_waited += max(0.0, (now - last[0]) - (worked - last[1]))
        return now, worked

    def _children(self) -> tuple[float, bool]:
        """Processor time of the processes that it started, and whether one of them wants a processor now."""
        times, children, running = _process_times()
        todo, wants = list(children.get(self.pid, ())), False
        total = times.get(self.pid, (0.0, 0.0))[1]
        while todo:
            child = todo.pop()
            total += sum(times[child])
            wants = wants or child in running
            todo += children.get(child, ())
        return total, wants

    def _server_seconds(self) -> float:
        """Time in which the process that forks waited for a processor."""
        return waited_seconds(self._process.server.process.pid) if isinstance(self._process, _ForkedProcess) else 0.0

    def has_children(self) -> bool:
        """Whether it has started processes that are there, or that it waited for."""
        times, children, _ = _process_times()
        return bool(children.get(self.pid)) or times.get(self.pid, (0.0, 0.0))[1] > 0

    def child_seconds(self) -> float:
        """Processor time of the processes that it started: those that ended and were waited for, and those there are.

        The process adopts what its children leave behind (see `runner.adopt_orphans`), so that nobody gets away.
        """
        return self._children()[0]

    def finish(self, timeout: float) -> None:
        """Lets the process end by itself, which it does where no more commands come."""
        if not self._closed:
            os.close(self._commands)
            deadline = time.monotonic() + timeout
            while self._process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            self._commands = -1
        self.close()

    def close(self) -> None:
        """Ends the process and those that it started."""
        if self._process.poll() is None:
            for kill in (os.killpg, os.kill):  # a process that was forked just now has no group of its own yet
                with contextlib.suppress(ProcessLookupError, PermissionError):  # it may have ended just now
                    kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if not self._closed:
            self._closed = True
            for descriptor in (self._commands, self._replies):
                if descriptor >= 0:
                    os.close(descriptor)


class Process(Protocol):
    """What a channel needs of a process."""

    @property
    def pid(self) -> int:
        """Its number."""

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""

    def wait(self) -> int:
        """Waits for its end, and gives its exit code."""


def waited_seconds(pid: int) -> float:
    """Time in which the first thread of a process waited for a processor; 0 where the system does not tell."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return 0.0


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def _process_times() -> tuple[dict[int, tuple[float, float]], dict[int, list[int]], set[int]]:
    """Of each process, the processor time of its own and of its children that ended; the children of each; who runs."""
    times: dict[int, tuple[float, float]] = {}
    running: set[int] = set()
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        own, ended = (sum(int(field) for field in fields[i : i + 2]) / _TICKS for i in (11, 13))
        times[int(folder.name)] = own, ended
        children.setdefault(int(fields[1]), []).append(int(folder.name))
        if fields[0] == "R":
            running.add(int(folder.name))
    return times, children, running


def _environment(device: str) -> dict[str, str]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    if device == "cpu":
        environment.setdefault("TRITON_INTERPRET", "1")
    return environment


def _own_process(prefix: Sequence[str], arguments: list[str], descriptors: tuple[int, int, int]) -> Process:
    commands, replies, log = descriptors
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "nearpeak.judging.runner", str(commands), str(replies), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(commands, replies),
        # Under a tool that checks addresses, each tensor has an allocation of its own.
        env=_environment(arguments[1]) | ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if prefix else {}),
        start_new_session=True,
    )


class _Server:
    """A process that has imported torch, and forks runners: a start takes milliseconds instead of seconds.

    It runs no code of candidates, and never uses a GPU, which nobody could use after a fork then.
    """

    current: ClassVar[dict[bool, _Server]] = {}
    """Whether its runners are for a CPU, and the server."""

    def __init__(self, is_cpu: bool) -> None:
        self.socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # a message is a message
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nearpeak.judging.runner", "--server", str(other.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(other.fileno(),),
            env=_environment("cpu" if is_cpu else "cuda"),
            start_new_session=True,
        )
        other.close()
        self.started: list[_ForkedProcess] = []
        """Processes whose number the server has not told yet."""

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Sends a request, whose number `receive` gives; OSError where the server has ended."""
        socket.send_fds(self.socket, [json.dumps(message).encode()], list(descriptors))

    def receive(self) -> int:
        """The number that the server replies with, for the requests in their order."""
        reply = self.socket.recv(64)
        if not reply:
            raise BrokenPipeError("the server has ended")
        return int(reply)

    def ask(self, message: dict[str, Any]) -> int:
        """The reply to a request, after those of the processes that were started before."""
        while self.started:
            self.started[0].read_pid()
        self.send(message)
        return self.receive()

    @classmethod
    def running(cls, device: str) -> _Server:
        """The server of this process for runners of a device, started where there is none."""
        is_cpu = device == "cpu"
        server = cls.current.get(is_cpu)
        if server is None or server.process.poll() is not None:
            server = cls.current[is_cpu] = cls(is_cpu)
            atexit.register(server.close)
        return server

    def close(self) -> None:
        """Ends the server."""
        self.socket.close()
        self.process.kill()
        self.process.wait()


class _ForkedProcess:
    """A runner that the server forks; the judge goes on while the server still imports torch."""

    def __init__(self, server: _Server) -> None:
        self.server = server
        self.code: int | None = None
        self._pid: int | None = None
        server.started.append(self)

    @property
    def pid(self) -> int:
        """Of the process; waits until the server has started it."""
        while self._pid is None:
            self.server.started[0].read_pid()
        return self._pid

    def read_pid(self) -> None:
        """Reads the number of this process, the first of those that the server has not told yet."""
        self._pid = self.server.receive()
        self.server.started.remove(self)

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        if self.code is None:
            self._ask("poll")
        return self.code

    def wait(self) -> int:
        """Waits for its end, and gives its exit code."""
        if self.code is None:
            self._ask("wait")
        return -signal.SIGKILL if self.code is None else self.code

    def _ask(self, do: str) -> None:
        try:
            code = self.server.ask({"do": do, "pid": self.pid})
        except OSError:
            code = -signal.SIGKILL  # the server has ended, and its runners with it
        self.code = None if code == RUNS else code


def _server_process(arguments: list[str], descriptors: tuple[int, int, int]) -> Process:
    message = {"do": "start", "arguments": arguments, "folder": str(Path.cwd())}
    server = _Server.running(arguments[1])
    try:
        server.send(message, descriptors)
    except OSError:  # it was ended between two judgements
        server.close()
        server = _Server.running(arguments[1])
        server.send(message, descriptors)
    return _ForkedProcess(server)


def start_server(device: str) -> None:
    """Begins to import torch in the process that runners are forked from, and does not wait for it."""
    _Server.running(device)


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        reply = json.loads(line)
    except ValueError:
        return None
    return reply if isinstance(reply, dict) else None


def sanitizer_prefix(tool: str) -> list[str]:
    """The command line that runs a process under compute-sanitizer."""
    path = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if path is None:
        raise EnvironmentProblem(
            f"--sanitize {tool} needs compute-sanitizer of the CUDA toolkit, which is not on the PATH. Install the "
            "toolkit, or leave the option out."
        )
    return [path, "--tool", tool, "--target-processes", "all", "--print-limit", "5"]


def sanitizer_report(words: str) -> tuple[int, str] | None:
    """The number of errors or hazards in what compute-sanitizer wrote, and the first of them; None without a summary.

    >>> sanitizer_report("========= Invalid __global__ write of size 4 bytes\\n========= ERROR SUMMARY: 1 error")
    (1, 'Invalid __global__ write of size 4 bytes')
    """
    lines = [line.removeprefix("=========").strip() for line in words.splitlines() if line.startswith("=========")]
    found = [match for line in lines if (match := re.match(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) ", line))]
    if not found:
        return None
    rest = [line for line in lines if line and "SUMMARY" not in line and "COMPUTE-SANITIZER" not in line]
    return int(found[-1].group(1)), rest[0] if rest else ""
