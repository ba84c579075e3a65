"""`hang_in_dumps`: which rank did not come to a collective, from the files that torch's flight recorder wrote.

A process group that times out dumps the collectives of each rank (TORCH_FR_DUMP_TEMP_FILE, one file for each rank). The
files are pickles of plain data. They are not unpickled, since a pickle may run any code: their opcodes are read one by
one, and those that make anything but numbers, texts, lists and dictionaries are refused.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nearpeak._files import MOST_CONTAINERS, InputFile, read_bytes, read_json
from nearpeak.errors import FileProblem
from nearpeak.profiling.hang import hang_lines, state_of
from nearpeak.trace.source import is_user_file

LARGEST_DUMP = 2**27
_PICKLE = b"\x80"
_RANK = re.compile(r"(\d+)(?:\.\w+)?$")


def hang_in_dumps(folder: Path) -> list[str] | None:
    """What the dumps of a folder say, in sentences; None if it has none."""
    dumps = dict(_dumps(folder))
    if not dumps:
        return None
    sizes = [rank for dump in dumps.values() for rank in _ranks_of_groups(dump)]
    world_size = 1 + max([*dumps, *sizes])
    entries = {rank: _entries(dump) for rank, dump in dumps.items()}
    states = {rank: state_of(calls, line=_line_of_last(calls)) for rank, calls in entries.items()}
    lines = [f"Dumps of torch's flight recorder: {len(dumps)} of {world_size} ranks."]
    if not any(state.kind for state in states.values()):
        lines.append("No collective was under way in any of them.")
    return lines + hang_lines(states, world_size, dumped=True)


def _dumps(folder: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for path in sorted(folder.iterdir()):
        number = _RANK.search(path.name)
        if number is None or not path.is_file():
            continue
        with InputFile(path) as file:
            is_pickle = file.head(1) == _PICKLE
            if is_pickle:
                dump: Any = plain_pickle(read_bytes(file, largest=LARGEST_DUMP), path)
            elif path.suffix in ("", ".json") and b'"collective_seq_id"' in file.head(4096):
                dump = read_json(file, largest=LARGEST_DUMP)
            else:
                continue
        if not isinstance(dump, dict) or not isinstance(dump.get("entries"), list):
            raise FileProblem(path, "no dump of torch's flight recorder: it has no entries")
        yield int(number[1]), dump


def _entries(dump: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The collectives of a dump that have what is needed of them."""
    return [
        entry
        for entry in dump["entries"]
        if isinstance(entry, dict)
        and isinstance(entry.get("process_group"), (list, tuple))
        and entry["process_group"]
        and all(isinstance(entry.get(key), int) for key in ("collective_seq_id", "time_created_ns"))
    ]


def _ranks_of_groups(dump: Mapping[str, Any]) -> Iterator[int]:
    """The ranks that the dump knows, which are written as the text of a list."""
    groups = dump.get("pg_config")
    for group in groups.values() if isinstance(groups, dict) else ():
        text = group.get("ranks", "") if isinstance(group, dict) else ""
        yield from (int(number) for number in re.findall(r"\d{1,7}", text if isinstance(text, str) else ""))


def _line_of_last(entries: list[dict[str, Any]]) -> str:
    """The line of the user's own that called the last collective, if the recorder kept stacks."""
    for entry in reversed(entries):
        frames = entry.get("frames")
        for frame in frames if isinstance(frames, list) else ():
            name, line = (frame.get("filename"), frame.get("line")) if isinstance(frame, dict) else (None, None)
            if isinstance(name, str) and isinstance(line, int) and is_user_file(name):
                return f"{Path(name).name}:{line}"
    return ""


def plain_pickle(content: bytes, path: Path | str = "dump") -> Any:
    """The data of a pickle that has only numbers, texts, lists, tuples and dictionaries; else FileProblem.

    >>> import pickle
    >>> plain_pickle(pickle.dumps({"a": [1, -2.5, None, True, (3, "b")]}, protocol=2))
    {'a': [1, -2.5, None, True, (3, 'b')]}
    >>> plain_pickle(pickle.dumps(print, protocol=2))
    Traceback (most recent call last):
    nearpeak.errors.FileProblem: dump: refused: a pickle with GLOBAL is not plain data.
    """
    stack: list[Any] = []
    marks: list[int] = []
    """Where the items of containers begin on the stack."""
    memo: dict[int, Any] = {}
    containers = 0

    def items() -> list[Any]:
        start = marks.pop()
        found = stack[start:]
        del stack[start:]
        return found

    try:
        argument: Any
        for opcode, argument, _ in pickletools.genops(content):
            name = opcode.name
            if name in ("PROTO", "FRAME"):
                continue
            if name == "STOP":
                (result,) = stack
                return result
            if name == "MARK":
                marks.append(len(stack))
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name in _VALUES:
                stack.append(argument)
            elif name in ("EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE"):
                stack.append([] if name == "EMPTY_LIST" else {} if name == "EMPTY_DICT" else ())
                containers += 1
            elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
                size = int(name[-1])
                stack[-size:] = [tuple(stack[-size:])]
            elif name == "TUPLE":
                stack.append(tuple(items()))
            elif name == "APPEND":
                stack[-2].append(stack.pop())
            elif name == "APPENDS":
                added = items()
                stack[-1].extend(added)
            elif name in ("SETITEM", "SETITEMS"):
                pairs = items() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
                stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))
            elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
                memo[int(argument)] = stack[-1]
            elif name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET", "GET"):
                stack.append(memo[int(argument)])
            else:
                raise FileProblem(path, f"refused: a pickle with {name} is not plain data")
            if containers > MOST_CONTAINERS:
                raise FileProblem(path, f"it has more than {MOST_CONTAINERS:,} lists and dictionaries")
    except (AttributeError, IndexError, KeyError, TypeError, UnicodeError, ValueError) as error:
        raise FileProblem(path, "damaged: no whole pickle") from error
    raise FileProblem(path, "damaged: no whole pickle")


_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = frozenset(
    {"BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT"}
    | {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"}
)
