"""`LoopTurns`: which turn of which loop each op of a trace ran in.

A function goes back to an earlier instruction only in a loop, and begins again only if its caller runs its call again.
So the positions of all functions on the stack, compared from one op to the next, tell the turns of every loop; where
the loops of a function are follows from its bytecode. Nothing of the program is instrumented.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import NamedTuple

from nearpeak.ops.op import Turn
from nearpeak.trace.source import is_nearpeak_file, own_file_name, user_file_name


class _LoopCode(NamedTuple):
    """The instructions of a loop, from its beginning to before its end, and its line."""

    start: int
    end: int
    line: int
    number: int


class LoopTurn(NamedTuple):
    """A turn of a loop by numbers alone."""

    loop: int
    run: int
    turn: int


@dataclass(slots=True)
class _Running:
    loop: _LoopCode
    run: int
    turn: int


@dataclass(slots=True)
class _Level:
    """A function on the stack."""

    code: CodeType
    instruction: int
    file: str
    """Its name; "" for torch and for other code that is not the user's."""
    loops: list[_Running]
    """Those around the instruction, the outermost first."""
    has_moved: bool = False
    """Whether it has run ops at another instruction before, in this turn."""


@dataclass(slots=True)
class _Stretch:
    """Ops that one instruction ran, of a function that is called once or several times."""

    path: tuple[Turn, ...]
    run: int | None
    """The run of the innermost loop around it."""
    place: tuple[int, ...]
    """The instructions that it is at, from that of the loop's function on, with the ids of their codes."""
    ops: list[int]
    names: list[str]


class LoopTurns:
    """Is told of every op that the program calls, in order.

    Args:
        dispatcher: The function of the recorder that torch calls for an op. What runs below it is no code of the
            program's.
    """

    def __init__(self, dispatcher: CodeType | None = None) -> None:
        self._dispatcher = dispatcher
        self._levels: list[_Level] = []
        """The stack at the last op, the outermost function first."""
        self._codes: list[CodeType] = []
        self._instructions: list[int] = []
        self._stretches: list[_Stretch] = []
        self._numbers = itertools.count()
        self._has_yielded = False
        """Whether the last op ran for a generator that is suspended, whose levels are still there."""

    def note_op(self, index: int, name: str, frame: FrameType | None) -> None:
        """An op that the program calls runs below `frame`."""
        if self._arrive(frame):
            self._stretches.append(self._stretch())
        self._stretches[-1].ops.append(index)
        self._stretches[-1].names.append(name)

    def around(self, frame: FrameType | None) -> tuple[LoopTurn, ...]:
        """The turns that whatever runs below `frame` is in, the outermost loop first.

        Loops of libraries that call the user's own code, such as those of a notebook, are no loops of the program's.
        """
        self._arrive(frame)
        first = next((depth for depth, level in enumerate(self._levels) if own_file_name(level.code.co_filename)), None)
        if first is None:
            return ()
        return tuple(
            LoopTurn(item.loop.number, item.run, item.turn)
            for level in self._levels[first:]
            if level.file
            for item in level.loops
        )

    def line_of(self, loop: int) -> str:
        """The line of a loop that is around the last place."""
        lines = (
            f"{level.file}:{item.loop.line}"
            for level in self._levels
            for item in level.loops
            if item.loop.number == loop
        )
        return next(lines, "")

    def _arrive(self, frame: FrameType | None) -> bool:
        """The program has come to another place, below `frame`; False if it is the same as the last one."""
        codes: list[CodeType] = []
        instructions: list[int] = []
        while frame is not None and is_nearpeak_file(frame.f_code.co_filename):
            frame = frame.f_back
        while frame is not None:
            code = frame.f_code
            if code is self._dispatcher:
                codes.clear()
                instructions.clear()
            else:
                codes.append(code)
                instructions.append(frame.f_lasti)
            frame = frame.f_back
        codes.reverse()
        instructions.reverse()
        if instructions == self._instructions and codes == self._codes:
            return False
        self._move(codes, instructions)
        self._codes, self._instructions = codes, instructions
        return True

    def turns(self) -> dict[int, tuple[Turn, ...]]:
        """The turns that ops ran in, by the index of the op; the outermost loop first.

        A loop that returns to the instruction of its last op cannot be told from an instruction that runs several ops:
        an ordinary turn shows how many it runs. If the loop has no other instruction, its ops repeat.
        """
        stretches = [stretch for stretch in self._stretches if stretch.path]
        in_run = Counter(turn.run for stretch in stretches for turn in stretch.path)
        shortest: dict[tuple[int, ...], list[str]] = {}
        for stretch in stretches:
            if len(stretch.names) < len(shortest.get(stretch.place, stretch.names * 2)):
                shortest[stretch.place] = stretch.names
        found: dict[int, tuple[Turn, ...]] = {}
        added: dict[int, int] = {}
        """Turns that were found only here, by the number of the run."""
        for stretch in stretches:
            length = len(shortest[stretch.place])
            if stretch.run is not None and in_run[stretch.run] == 1:
                length = _period(stretch.names)
            if stretch.run is None or not _repeats(stretch.names, length):
                length = len(stretch.names)
            for number, index in enumerate(stretch.ops):
                if number and number % length == 0 and stretch.run is not None:
                    added[stretch.run] = added.get(stretch.run, 0) + 1
                found[index] = tuple(turn._replace(turn=turn.turn + added.get(turn.run, 0)) for turn in stretch.path)
        return found

    def _move(self, codes: Sequence[CodeType], instructions: Sequence[int]) -> None:
        levels = self._levels
        common = 0
        for level, code, instruction in zip(levels, codes, instructions, strict=False):
            if level.code is not code:
                break
            if level.instruction != instruction:
                if _start_of(code, level.instruction) != _start_of(code, instruction):
                    break
                level.instruction = instruction
            common += 1
        if common == len(codes) < len(levels) and levels[common].code.co_flags & inspect.CO_GENERATOR:
            self._has_yielded = True  # what takes its values runs: the turn of the generator goes on
            return
        if common == len(levels) and self._has_yielded:
            self._repeat(common - 1)
        self._has_yielded = False
        if common < min(len(levels), len(codes)):
            level, instruction = levels[common], instructions[common]
            around = [item for item in level.loops if item.loop.start <= instruction < item.loop.end]
            if level.code is codes[common] and (around or instruction > level.instruction):
                if instruction < level.instruction:
                    around[-1].turn += 1
                known = {item.loop for item in around}
                entered = [item for item in self._enter(level.code, instruction) if item.loop not in known]
                level.has_moved = instruction > level.instruction and not entered
                level.loops = around + entered
                level.instruction = instruction
                common += 1
            else:  # another call, from the same instruction
                self._repeat(common - 1)
        del levels[common:]
        for code, instruction in zip(codes[common:], instructions[common:], strict=True):
            loops = self._enter(code, instruction)
            levels.append(_Level(code, instruction, user_file_name(code.co_filename), loops))

    def _enter(self, code: CodeType, instruction: int) -> list[_Running]:
        return [
            _Running(loop, next(self._numbers), 0) for loop in _loops_of(code) if loop.start <= instruction < loop.end
        ]

    def _repeat(self, position: int) -> None:
        """A function runs the same instruction again: it or the nearest of its callers with a loop takes a turn.

        A function whose ops before the instruction did not run again has called something that loops, such as `map`.
        """
        for level in reversed(self._levels[: position + 1]):
            if level.has_moved and not (level.loops and level.loops[-1].loop.number < 0):
                place = id(level.code), level.instruction
                number = _call_numbers.setdefault(place, -1 - len(_call_numbers))
                line = _line_of(level.code, level.instruction)
                loop = _LoopCode(level.instruction, level.instruction + 1, line, number)
                level.loops.append(_Running(loop, next(self._numbers), 0))
                return
            if level.loops:
                level.loops[-1].turn += 1
                level.has_moved &= level.loops[-1].loop.number < 0
                return

    def _stretch(self) -> _Stretch:
        """A new one at the stack as it is now."""
        path = self._turns()
        if not path:
            return _Stretch((), None, (), [], [])
        below = self._levels[max(number for number, level in enumerate(self._levels) if level.loops) :]
        place = (*(id(level.code) for level in below), *(level.instruction for level in below))
        return _Stretch(path, below[0].loops[-1].run, place, [], [])

    def _turns(self) -> tuple[Turn, ...]:
        turns: list[Turn] = []
        torchs: list[_Running] = []
        """Loops of torch's own since the last function of the user's."""
        for level in self._levels:
            if level.file:
                line = f"{level.file}:{_line_of(level.code, level.instruction)}"
                function = f"{level.file}:{level.code.co_firstlineno}"
                turns += [Turn(function, item.loop.number, item.run, item.turn, line) for item in torchs if turns]
                torchs = []
                turns += [
                    Turn(f"{level.file}:{item.loop.line}", item.loop.number, item.run, item.turn, line)
                    for item in level.loops
                ]
            else:
                torchs += level.loops
        return tuple(turns)


def _period(names: Sequence[str]) -> int:
    """The smallest number of names of which all others are a repetition.

    >>> _period(["t", "addmm", "t", "addmm"]), _period(["t", "addmm", "relu"])
    (2, 3)
    """
    return next(length for length in range(1, len(names) + 1) if _repeats(names, length))


def _repeats(names: Sequence[str], length: int) -> bool:
    return len(names) % length == 0 and names[length:] == names[: len(names) - length]


_loops: dict[int, tuple[CodeType, tuple[_LoopCode, ...]]] = {}
"""Results of `_loops_of` by the ids of the codes, which are stored to keep the ids unique."""
_loop_numbers = itertools.count()
_call_numbers: dict[tuple[int, int], int] = {}
"""The numbers of loops inside of what an instruction calls, by the id of the code and the instruction."""
_lines: dict[tuple[int, int], tuple[CodeType, int]] = {}


def _loops_of(code: CodeType) -> tuple[_LoopCode, ...]:
    """The loops of a function, an outer one before its inner ones.

    The body of a `for` ends where its iterator is used up. A `while` ends with the last jump back to its beginning.
    """
    cached = _loops.get(id(code))
    if cached is None:
        ends: dict[int, int] = {}
        lines: dict[int, int] = {}
        """Of the statements: a `while` is tested at the end of a turn, and its line is that of the jump."""
        exits: dict[int, int] = {}
        for item in dis.get_instructions(code):
            if item.opname == "FOR_ITER":
                exits[item.offset] = item.argval
            elif "JUMP_BACKWARD" in item.opname and "NO_INTERRUPT" not in item.opname:  # that one waits for a generator
                ends[item.argval] = max(ends.get(item.argval, 0), item.offset + 1)
                first = lines.get(item.argval, _line_of(code, item.argval))
                lines[item.argval] = min(first, _line_of(code, item.offset))
        found = [
            _LoopCode(start, exits.get(start, end), lines[start], next(_loop_numbers)) for start, end in ends.items()
        ]
        cached = _loops[id(code)] = code, tuple(sorted(found, key=lambda loop: (loop.start, -loop.end)))
    return cached[1]


@functools.lru_cache(maxsize=4096)
def _start_of(code: CodeType, position: int) -> int:
    """Where the instruction at a position starts: after some runs the interpreter calls from the space behind it."""
    return max((item.offset for item in dis.get_instructions(code) if item.offset <= position), default=position)


def _line_of(code: CodeType, instruction: int) -> int:
    cached = _lines.get((id(code), instruction))
    if cached is None:
        lines = [line for start, _, line in code.co_lines() if start <= instruction and line is not None]
        cached = _lines[id(code), instruction] = code, lines[-1] if lines else code.co_firstlineno
    return cached[1]
