"""`World`: the ranks of a job that torchrun started, what they agree on, and the report of a rank that does not come.

Figures, flags and decisions are made once, on rank 0, and shared: ranks that decided for themselves would leave a loop
at different calls, and wait for each other for ever. They travel over gloo, whatever carries the collectives.

A `Watchdog` runs in a thread of each rank, as the main thread cannot act while it waits inside of a collective. If a
call takes longer than the timeout, if it fails, or if torchrun ends the job because another rank died, each rank writes
into the store how far it is; the lowest rank that is left reports who has not come, and where they are.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed
from torch._C._distributed_c10d import HashStore

from nearpeak.devices.backends import gpu_backend
from nearpeak.errors import EnvironmentProblem, UsageError, message_of

T = TypeVar("T")
TIMEOUT_S = 20.0
"""Seconds that one call may take before the ranks that are missing are named."""
ANSWER_S = 3.0
"""Seconds that ranks have to write how far they are."""
BACKEND_GRACE_S = 30.0
"""Seconds by which the timeout of torch's own backends is longer: they end the process without naming a rank."""
BACKENDS = ("gloo", "nccl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that communicate. Groups of one dimension of a mesh run at the same time."""

    label: str
    """"world", or "mesh[0]" for the first dimension of a mesh."""
    ranks: tuple[int, ...]
    """Of this process's group, by their numbers in the world."""
    concurrent: int
    nodes: int
    handle: Any

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)


_EXCHANGE = "the exchange after "


class World:
    """This process as one rank of a job."""

    def __init__(self, *, backend: str, device: torch.device, timeout_s: float) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self.backend, self.device = backend, device
        wait = timedelta(seconds=timeout_s + BACKEND_GRACE_S)
        self.control = distributed.new_group(backend="gloo", timeout=wait)
        self.watchdog = Watchdog(self.rank, self.size, timeout_s)
        self.hosts: list[str] = self.gather(socket.gethostname())
        self.local_size = self.hosts.count(self.hosts[self.rank])

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on all ranks.

        `distributed.all_gather_object` does the same with numpy, which torch can do without.
        """
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        with self.watchdog.exchange():
            distributed.all_gather(sizes, torch.tensor([len(mine)]), group=self.control)
        longest = int(max(sizes))
        rows = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        padded = torch.nn.functional.pad(mine, (0, longest - len(mine)))
        with self.watchdog.exchange():
            distributed.all_gather(rows, padded, group=self.control)
        return [pickle.loads(bytes(row[: int(size)].tolist())) for row, size in zip(rows, sizes, strict=True)]

    def decide(self, value: Callable[[], T]) -> T:
        """What rank 0 computes, on all ranks."""
        result: T = self.gather(value() if self.rank == 0 else None)[0]  # type: ignore[assignment]
        return result

    def gather_times(self, times: Sequence[float]) -> list[list[float]]:
        """The times of all ranks: [rank][call]."""
        mine = torch.tensor(times, dtype=torch.float64)  # (calls,)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        with self.watchdog.exchange():
            distributed.all_gather(rows, mine, group=self.control)
        return [[float(each) for each in row] for row in rows]

    def barrier(self) -> None:
        """Waits for all ranks, on the host."""
        with self.watchdog.exchange():
            distributed.barrier(group=self.control)

    def groups(self, mesh: Sequence[int] = ()) -> list[Group]:
        """The whole world, and the groups of every dimension of a mesh that have more than one rank."""
        world = Group(
            label="world",
            ranks=tuple(range(self.size)),
            concurrent=1,
            nodes=len(set(self.hosts)),
            handle=distributed.group.WORLD,
        )
        if not mesh:
            return [world]
        from torch.distributed.device_mesh import init_device_mesh

        device_mesh = init_device_mesh(self.device.type, tuple(mesh))
        groups = [world]
        for dimension, length in enumerate(mesh):
            if length > 1:
                handle = device_mesh.get_group(dimension)
                ranks = tuple(distributed.get_process_group_ranks(handle))
                spans = self.gather(len({self.hosts[rank] for rank in ranks}))
                groups.append(
                    Group(
                        label=f"mesh[{dimension}]",
                        ranks=ranks,
                        concurrent=self.size // length,
                        nodes=max(spans),
                        handle=handle,
                    )
                )
        return groups


def check_mesh(mesh: Sequence[int], size: int) -> None:
    """UsageError where a mesh has not as many places as there are ranks."""
    places = 1
    for length in mesh:
        places *= length
    if mesh and places != size:
        shape = "x".join(map(str, mesh))
        ranks = f"{size} rank{'s' if size > 1 else ''}"
        raise UsageError(f"--mesh {shape} has {places} places, and the world has {ranks}. Both must be the same.")


@contextmanager
def join(backend: str | None = None, timeout_s: float = TIMEOUT_S) -> Iterator[World]:
    """This process as a rank of the job that torchrun started; a world of one where nothing did."""
    name, device = _backend_and_device(backend)
    wait = timedelta(seconds=timeout_s + BACKEND_GRACE_S)
    hook = sys.excepthook  # a process group puts its rank before errors, and does not put the hook back
    try:
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            distributed.init_process_group(name, timeout=wait)
        else:
            distributed.init_process_group(name, store=HashStore(), rank=0, world_size=1, timeout=wait)
    except (distributed.DistError, RuntimeError, ValueError) as error:
        raise EnvironmentProblem(_join_text(name, message_of(error))) from error
    world = None
    try:
        world = World(backend=name, device=device, timeout_s=timeout_s)
        with world.watchdog:
            try:
                yield world
            except RuntimeError as error:  # gloo has no class of its own for a peer that has gone
                if not world.watchdog.in_call:
                    raise
                raise EnvironmentProblem(world.watchdog.explain(error)) from error
    except distributed.DistError as error:
        raise EnvironmentProblem(f"The ranks could not be joined: {message_of(error)}.") from error
    finally:
        if world is None or not world.watchdog.has_failed:
            distributed.destroy_process_group()
            sys.excepthook = hook


def _join_text(backend: str, problem: str) -> str:
    host, port = os.environ.get("MASTER_ADDR", "localhost"), os.environ.get("MASTER_PORT", "of the job")
    remedy = "`torchrun --standalone` takes a free port on one machine; --master-port names another."
    if "EADDRINUSE" in problem or "already in use" in problem:
        return f"Port {port} of {host} is taken by another program. {remedy}"
    return f"The ranks could not meet at {host}:{port} with {backend}: {problem}. {remedy}"


def _backend_and_device(asked: str | None) -> tuple[str, torch.device]:
    if not distributed.is_available():
        raise EnvironmentProblem(f"torch {torch.__version__} was built without torch.distributed.")
    if asked is not None and asked not in BACKENDS:
        raise UsageError(f"--backend {asked!r} is not known. Valid: {', '.join(BACKENDS)}.")
    gpus = gpu_backend()
    name = asked or ("nccl" if gpus is not None and distributed.is_nccl_available() else "gloo")
    if name == "gloo":
        return name, torch.device("cpu")
    if gpus is None:
        raise EnvironmentProblem("--backend nccl needs GPUs, and torch can use none here. Use --backend gloo.")
    local, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks > gpus.count():
        raise EnvironmentProblem(
            f"{ranks} ranks were started on a machine with {gpus.count()} GPUs, and NCCL needs one for each rank. "
            f"Use --nproc-per-node {gpus.count()}, or --backend gloo for the processors."
        )
    device = gpus.device(local)
    torch.accelerator.set_device_index(local)
    return name, device


def launch(ranks: int, command: Sequence[str]) -> int:
    """Runs a command as `ranks` ranks on this machine, by the code of torchrun and on a free port; its exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="nearpeak",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # ranks say what is wrong themselves
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        if first.exitcode < 0:
            name = signal.Signals(-first.exitcode).name
            raise EnvironmentProblem(f"Rank {rank} was ended by {name}, and the others with it.") from None
        return int(first.exitcode)
    except SignalException:
        raise KeyboardInterrupt from None
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far a rank is."""

    call: int
    what: str
    line: str

    @classmethod
    def read(cls, text: str) -> Position:
        """From the store."""
        data = json.loads(text)
        return cls(call=int(data["call"]), what=str(data["what"]), line=str(data["line"]))


class Watchdog:
    """Reports the ranks that have not come to a call; see above. A context manager: inside, the thread runs."""

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.has_failed = False
        self._call, self._what = 0, "the start"
        self._since: float | None = None
        self._main = threading.get_ident()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._store = _store_connection()
        self._thread = threading.Thread(target=self._watch, name="nearpeak watchdog", daemon=True)
        self._ends = os.pipe()

    def __enter__(self) -> Watchdog:
        os.set_blocking(self._ends[1], False)
        # Python runs handlers in the main thread, which may be inside of a collective; the number of a signal is
        # written to this pipe at once.
        self._old_handler = signal.signal(signal.SIGTERM, lambda *_: None)
        self._old_descriptor = signal.set_wakeup_fd(self._ends[1], warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        os.write(self._ends[1], b"\0")
        self._thread.join()
        signal.set_wakeup_fd(self._old_descriptor)
        if not self.has_failed:  # torchrun ends the other ranks of a failed job: they have something to say first
            signal.signal(signal.SIGTERM, self._old_handler)
        for end in self._ends:
            os.close(end)

    @property
    def in_call(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._since is not None

    @contextmanager
    def call(self, what: str) -> Iterator[None]:
        """Around everything that waits for other ranks; `what` is for the report."""
        self._call += 1
        self._what, self._since = what, time.monotonic()
        yield  # where it fails, the call has not ended
        self._since = None

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Around what ranks tell each other: part of a call, or one of its own after the last call."""
        if self.in_call:
            yield
        else:
            with self.call(_EXCHANGE + self._what.removeprefix(_EXCHANGE)):
                yield

    def _watch(self) -> None:
        import select

        while not self._stop.is_set():
            readable, _, _ = select.select([self._ends[0]], [], [], 0.2)
            since = self._since
            if readable:
                numbers = os.read(self._ends[0], 64)
                if signal.SIGTERM in numbers:
                    self._end("the job is being ended, as it is when a rank dies", 128 + signal.SIGTERM)
            elif since is not None and time.monotonic() - since > self.timeout_s:
                self._end(f"it did not end within {self.timeout_s:g} s", EnvironmentProblem.exit_code)

    def _end(self, reason: str, code: int) -> None:
        if not self._begin_report():
            return  # the main thread reports
        with suppress(OSError):
            sys.stderr.write(f"nearpeak: {self._explain(reason)}\n")
            sys.stderr.flush()
        os._exit(code)  # the main thread cannot be woken from a collective

    def explain(self, error: Exception) -> str:
        """Which ranks have come to the call that failed, and which have not; higher ranks refer to the lowest."""
        if not self._begin_report():
            time.sleep(2 * ANSWER_S)  # the watchdog reports, and ends the process
        # gloo begins with a line of its own source, and ends with advice
        message = re.sub(r"^\[\S+\] ", "", message_of(error)).partition(". This is typically")[0]
        return self._explain(f"it failed: {message}", _line(traceback.extract_tb(error.__traceback__)))

    def _begin_report(self) -> bool:
        """Whether nobody has begun to report."""
        with self._lock:
            is_first, self.has_failed = not self.has_failed, True
        return is_first

    def _explain(self, reason: str, line: str = "") -> str:
        positions = self._positions(line or _line_of(self._main))
        if min(positions) < self.rank:
            return f"rank {self.rank}: {reason}. Rank {min(positions)} says more."
        return explain_positions(positions, self.size, reason)

    def _positions(self, line: str) -> dict[int, Position]:
        mine = Position(call=self._call, what=self._what, line=line)
        positions = {self.rank: mine}
        with suppress(distributed.DistError, RuntimeError):  # the store may have gone with its rank
            record = {"call": mine.call, "what": mine.what, "line": mine.line}
            self._store.set(f"nearpeak/position/{self.rank}", json.dumps(record))
            until = time.monotonic() + ANSWER_S
            while len(positions) < self.size and time.monotonic() < until:
                for rank in range(self.size):
                    key = f"nearpeak/position/{rank}"
                    if rank not in positions and self._store.check([key]):
                        positions[rank] = Position.read(self._store.get(key).decode())
                time.sleep(0.05)
        return positions


def explain_positions(positions: dict[int, Position], size: int, reason: str) -> str:
    """What ranks that answered, and those that did not, say about a call that did not end."""
    last = max(position.call for position in positions.values())
    there = [rank for rank, position in sorted(positions.items()) if position.call == last]
    late = [rank for rank, position in sorted(positions.items()) if position.call < last]
    silent = [rank for rank in range(size) if rank not in positions]
    first = positions[there[0]]
    lines = [f"{first.what}: {reason}."]
    lines.append(f"  arrived: {_ranks_text(there)}, at {first.line}")
    lines += [f"  not arrived: rank {rank}, at {positions[rank].line} ({positions[rank].what})" for rank in late]
    if silent:
        lines.append(f"  no answer: {_ranks_text(silent)}, which died, is stopped, or cannot be reached")
    return "\n".join(lines)


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _line_of(thread: int) -> str:
    """The line that a thread is at."""
    frame = sys._current_frames().get(thread)
    return "an unknown line" if frame is None else _line(traceback.extract_stack(frame))


def _line(frames: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line outside of torch."""
    outside = [each for each in frames if f"{os.sep}torch{os.sep}" not in each.filename]
    return f"{Path(outside[-1].filename).name}:{outside[-1].lineno}" if outside else "an unknown line"


def _store_connection() -> Any:
    """The store of the job; a connection of its own where torch can open one, since one that waits is locked."""
    store: Any = distributed.distributed_c10d._get_default_store()
    with suppress(AttributeError, NotImplementedError, RuntimeError):
        return store.clone()
    return store
