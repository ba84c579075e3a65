"""`HangWatch`: says which rank of a job did not come to a collective, where the ranks are, and which have ended.

torch's flight recorder knows the collectives that a rank has called and those that have ended. A thread looks at it now
and then. If one has not ended for `STALL_S`, all ranks that still run write down where they are, into the store of the
job, and the first of them reports. The same happens when a launcher ends the job because one of its ranks has died.
"""

from __future__ import annotations

import _thread
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from nearpeak.measure.options import Progress
from nearpeak.profiling.job import Team, launched_rank
from nearpeak.trace.source import user_line
from nearpeak.trace.threads import current_frames

STALL_S = 12.0
"""A collective that has not ended for so long is a hang, until it ends."""
ANSWER_S = 4.0
"""How long ranks are given to say where they are."""
LAST_ANSWER_S = 1.5
"""The same where the job is being ended."""
TICK_S = 1.0
END_S = 5.0
"""How long the end of the program waits for the thread that watches."""
_STALLED = "stalled"
_FAILED, _END = b"\xff", b"\xfe"
"""Written beside the numbers of signals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """Where a rank is."""

    line: str = ""
    """Of the user's code, on the main thread."""
    kind: str = ""
    """The collective that it has called and that has not ended; "" if there is none."""
    group: str = ""
    sequence: int = 0
    seconds: float = 0.0
    """For how long it has been under way."""
    called: Mapping[str, int] | None = None
    """The number of the last collective that it called, by group."""
    failed: bool = False
    """Whether its program has ended with an error, at this line."""


def hang_lines(states: Mapping[int, RankState], world_size: int, *, dumped: bool = False) -> list[str]:
    """Which collective is waited for, by whom, and where the others are.

    In states that were `dumped`, lines are those of the last collectives: where a rank went from there is not known.

    >>> states = {0: RankState(kind="all_reduce", group="0", sequence=7, called={"0": 7}, line="train.py:9")}
    >>> states[1] = RankState(called={"0": 6}, line="train.py:4")
    >>> for line in hang_lines(states, 3):
    ...     print(line)
    all_reduce 7 of group 0 has not ended: rank 0 has called it, at train.py:9.
    Rank 1 has not called it: it is at train.py:4, after number 6.
    Rank 2 does not answer: its process has ended, or it is stopped.
    """
    lines = []
    waiting = {rank: state for rank, state in states.items() if state.kind}
    if waiting:
        first = min(waiting.values(), key=lambda state: state.sequence)
        same = [
            rank
            for rank, state in waiting.items()
            if (state.group, state.sequence, state.kind) == (first.group, first.sequence, first.kind)
        ]
        places = ", ".join(dict.fromkeys(waiting[rank].line for rank in same if waiting[rank].line))
        lines.append(
            f"{first.kind} {first.sequence} of group {first.group} has not ended: {_ranks(same)} "
            f"{'has' if len(same) == 1 else 'have'} called it{f', at {places}' if places else ''}."
        )
        for rank, state in sorted(states.items()):
            place = "its last one was called at" if dumped else "it is at"
            at = f"{place} {state.line}" if state.line else "where it is, is not known"
            number = (state.called or {}).get(first.group, 0)
            if rank in same:
                continue
            if state.kind and (state.group, state.sequence) == (first.group, first.sequence):
                lines.append(f"Rank {rank} has called {state.kind} in its place: {at}.")
            elif number < first.sequence:
                lines.append(f"Rank {rank} has not called it: {at}, after number {number}.")
            else:
                lines.append(f"Rank {rank} is past it: {at}, after number {number}.")
    else:
        for rank, state in states.items():
            last = ", ".join(f"number {number} of group {group}" for group, number in (state.called or {}).items())
            after = f", after collective {last}" if last else ""
            how = "has failed" if state.failed else "was last" if dumped else "is"
            lines.append(f"Rank {rank} {how} at {state.line or 'a line that is not known'}{after}.")
    silent = sorted(set(range(world_size)) - set(states))
    if silent:
        many = len(silent) > 1
        if dumped:
            return [*lines, f"{_ranks(silent).capitalize()} {'have' if many else 'has'} no dump."]
        ended = "their processes have ended, or they are stopped" if many else "its process has ended, or it is stopped"
        lines.append(f"{_ranks(silent).capitalize()} {'do' if many else 'does'} not answer: {ended}.")
    return lines


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def own_state(now_s: float | None = None) -> RankState:
    """Where this rank is now."""
    frame = current_frames().get(threading.main_thread().ident or 0)
    line = ""
    with suppress(Exception):
        line = user_line(frame)[0] if frame is not None else ""
    entries: list[dict[str, Any]] = []
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is not None:
        with suppress(Exception):
            entries = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    return state_of(entries, line=line, now_s=now_s)


def state_of(entries: Sequence[Mapping[str, Any]], *, line: str, now_s: float | None = None) -> RankState:
    """Where a rank is, by what the flight recorder has of it, in the order of the calls."""
    entries = [entry for entry in entries if not entry.get("is_p2p")]
    called: dict[str, int] = {}
    for entry in entries:
        group = str(entry["process_group"][0])
        called[group] = max(called.get(group, 0), int(entry["collective_seq_id"]))
    active = [entry for entry in entries if not entry.get("retired") and entry.get("state") != "completed"]
    if not active:
        return RankState(line=line, called=called)
    first = min(active, key=lambda entry: entry["time_created_ns"])
    name = str(first.get("profiling_name", ""))
    return RankState(
        line=line,
        kind=name.partition(":")[2] or name or "a collective",
        group=str(first["process_group"][0]),
        sequence=int(first["collective_seq_id"]),
        seconds=(now_s or time.time()) - first["time_created_ns"] / 1e9,
        called=called,
    )


class HangWatch:
    """Watches this rank while the program runs; nothing in a job of one rank.

    SIGTERM, with which a launcher ends a job one of whose ranks has died, still ends the process, `LAST_ANSWER_S`
    later; where the program handles it itself, nothing is changed.
    """

    def __init__(self, say: Progress, keep: Callable[[], object] = lambda: None) -> None:
        self._say, self._keep = say, keep
        self._team: Team | None = None
        self._told = False
        self._reported, self._ended = threading.Event(), threading.Event()
        self._has_failed, self._failed_line = False, ""
        self._pipe: tuple[int, int] | None = None
        self._wakeup = -1
        self._is_active = launched_rank()[1] > 1
        self._process = os.getpid()

    def __enter__(self) -> Self:
        if not self._is_active:
            return self
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            signal.signal(signal.SIGTERM, _wait_for_report)
        _thread.start_new_thread(self._watch, ())
        return self

    def __exit__(self, *error: object) -> None:
        self._is_active = False
        if self._pipe is not None and os.getpid() == self._process:
            # A thread that returns from a store of torch while Python ends takes the process with it (SIGABRT).
            with suppress(OSError):  # it is full of signals
                os.write(self._pipe[1], _END)
            self._ended.wait(END_S)
        if self._pipe is not None and signal.getsignal(signal.SIGTERM) is _wait_for_report:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(self._wakeup)

    def failed(self, error: BaseException) -> None:
        """The program of this rank has ended with an error: another one may have died."""
        frames = error.__traceback__
        while frames is not None:
            with suppress(Exception):
                self._failed_line = user_line(frames.tb_frame)[0] or self._failed_line
            frames = frames.tb_next
        self._has_failed = True
        if self._pipe is not None and self._join() is not None:
            os.write(self._pipe[1], _FAILED)
            self._reported.wait(LAST_ANSWER_S + TICK_S)

    def _join(self) -> Team | None:
        if self._team is None:
            with suppress(Exception):
                self._team = Team.join()
        return self._team

    def _watch(self) -> None:
        assert self._pipe is not None
        with suppress(Exception):  # nobody could be told
            self._watch_until_end(self._pipe[0])
        self._ended.set()

    def _watch_until_end(self, pipe: int) -> None:
        while self._is_active and os.getpid() == self._process:
            if select.select([pipe], [], [], TICK_S)[0]:
                signals = os.read(pipe, 512)
                if signal.SIGTERM in signals or _FAILED in signals:
                    with suppress(Exception):
                        self._report(LAST_ANSWER_S)
                    self._keep()
                if signal.SIGTERM in signals:
                    end_by_term()
                continue
            team = self._join()
            if team is None or self._told:
                continue
            if own_state().seconds >= STALL_S or team.has(_STALLED):
                self._report(ANSWER_S)
                self._keep()

    def _report(self, answer_s: float) -> None:
        """Writes down where this rank is; the first rank that did so tells what all wrote."""
        team = self._join()
        if team is None or self._told:
            return
        self._told = True
        team.write(_STALLED, b"1")
        state = own_state()
        if self._has_failed:
            state = replace(state, line=self._failed_line, failed=True, kind="")
        team.write(f"state {team.rank}", json.dumps(_to_json(state)).encode())
        time.sleep(answer_s)
        states = {
            rank: _from_json(json.loads(team.read(f"state {rank}")))
            for rank in range(team.world_size)
            if team.has(f"state {rank}")
        }
        if min(states, default=team.rank) == team.rank:
            for line in hang_lines(states, team.world_size):
                self._say(line)
        self._reported.set()


def _to_json(state: RankState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in RankState.__slots__}


def _from_json(fields: dict[str, Any]) -> RankState:
    return RankState(**{name: fields[name] for name in RankState.__slots__})


def _wait_for_report(number: int, frame: Any) -> None:
    """The thread of `HangWatch` ends the process."""
    time.sleep(LAST_ANSWER_S + 3.0)


def end_by_term() -> None:
    """Ends the process as an unhandled SIGTERM does, from any thread."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(128 + signal.SIGTERM)
