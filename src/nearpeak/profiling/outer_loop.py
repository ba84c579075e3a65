"""`OuterLoop`: the loop of a program each turn of which is a step, where models are called in loops inside of it.

A server reads a request and samples 24 values for it, one call of a model after the other; a solver takes as many steps
as its error asks for. What runs once in a request is in no call and recurs after any number of them, so that no period
of the calls shows it (`PeriodFinder`). The loops do: where the calls come from is compared from one to the next, as it
is for the ops of a trace (`LoopTurns`).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from types import FrameType

from nearpeak.trace.guard import OwnThread
from nearpeak.trace.loop_turns import LoopTurn, LoopTurns

MAX_CALLS = 128
"""In a turn: a step of more cannot be recorded."""
MAX_TURN_S = 10.0
"""A longer turn cannot be afforded: a profile needs about ten of them."""
MIN_REST_SHARE = 0.2
"""Of the time of a turn that loops inside of it must leave: otherwise their turns are the step."""
TURNS = 2
"""So many must have ended: what is recorded meanwhile makes one of them longer."""
LONELY_CALLS = 64
"""After so many calls that no two loops are around, none is expected any more."""


@dataclass(slots=True)
class _Turn:
    """A turn of a loop, from its first call to that of the next turn."""

    inner: dict[int, list[float]] = field(default_factory=dict)
    """Seconds from call to call, by the run of the loop inside of it that both are in."""
    rest_s: float = 0.0
    """From other calls to the next one."""
    calls: int = 0

    @property
    def rest(self) -> float:
        """Without the last call of each run of a loop inside of it, which is that loop's."""
        return self.rest_s - sum(statistics.median(gaps) for gaps in self.inner.values())

    @property
    def inside(self) -> float:
        """In loops inside of it."""
        return sum(sum(gaps) + statistics.median(gaps) for gaps in self.inner.values())


class OuterLoop:
    """Is told where each call begins."""

    def __init__(self) -> None:
        self._turns = LoopTurns()
        self._thread: OwnThread | None = None
        """That of the first call: those of others come in any order."""
        self._path: tuple[LoopTurn, ...] = ()
        """The loops around the last call, the outermost first."""
        self._now = 0.0
        self._open: dict[int, _Turn] = {}
        """The turns around the last call, by the runs of their loops."""
        self._ended: dict[int, list[_Turn]] = {}
        self._around: set[int] = set()
        """Loops that calls were in within another loop."""
        self._refused: set[int] = set()
        self._calls = 0
        self.found: int | None = None
        """The number of the loop each turn of which is a step."""
        self.line = ""
        """Its line."""
        self.calls_in_turn = 0
        """Of that loop."""

    def call_begins(self, frame: FrameType, now: float) -> None:
        """A call begins, below `frame`. `now` is in seconds of any clock."""
        if self._thread is None:
            self._thread = OwnThread()
        if not self._thread:
            return
        path = self._turns.around(frame)
        before, after = self._path, path
        gap, self._path, self._now = now - self._now, path, now
        self._calls += 1
        self._around.update(each.loop for each in path[:-1])
        common = 0
        while common < min(len(before), len(after)) and before[common].run == after[common].run:
            common += 1
        for depth, item in enumerate(after):
            if depth >= common:
                self._open[item.run] = _Turn(calls=1)
                continue
            turn = self._open[item.run]
            if turn.calls > MAX_CALLS:
                self._refused.add(item.loop)
            elif depth + 1 < common:
                turn.inner.setdefault(after[depth + 1].run, []).append(gap)
            else:
                turn.rest_s += gap
            if item.turn == before[depth].turn:
                turn.calls += 1
                continue
            self._open[item.run] = _Turn(calls=1)
            if not any(each.loop == self.found for each in after[:depth]):
                self._turn_ended(item.loop, turn)
        for item in before[common:]:
            self._open.pop(item.run, None)

    @property
    def turn(self) -> tuple[int, int] | None:
        """The turn of the loop that was found: its run and its number; None outside of the loop."""
        return next(((each.run, each.turn) for each in self._path if each.loop == self.found), None)

    @property
    def awaited(self) -> str:
        """The line of the outermost loop that may be the step, which more of its turns will show; "" if none."""
        for item in self._path[:-1] if self.found is None else ():
            if item.loop not in self._refused:
                return self._turns.line_of(item.loop)
        return ""

    @property
    def is_settled(self) -> bool:
        """Whether nothing more will be found."""
        return self.found is None and self._around <= self._refused and self._calls > LONELY_CALLS

    def refuse(self) -> None:
        """The loop that was found shall be none."""
        if self.found is not None:
            self._refused.add(self.found)
            self.found = None

    def _turn_ended(self, loop: int, turn: _Turn) -> None:
        if loop == self.found or loop in self._refused:
            return
        turns = self._ended.setdefault(loop, [])
        turns.append(turn)
        if len(turns) < TURNS:
            return
        rest, inside = min(each.rest for each in turns), min(each.inside for each in turns)
        if (
            all(each.inner for each in turns)
            and rest >= MIN_REST_SHARE * (rest + inside)
            and rest + inside <= MAX_TURN_S
        ):
            self.found, self.line = loop, self._turns.line_of(loop)
            self.calls_in_turn = min(each.calls for each in turns)
        else:
            self._refused.add(loop)
