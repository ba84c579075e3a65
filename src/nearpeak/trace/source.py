"""The line of the user's code that an op comes from."""

from __future__ import annotations

import ast
import dis
import functools
import linecache
import re
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward

from nearpeak.profiles.excerpt import MOST_EXCERPTS, SourceExcerpt, excerpt

_LIBRARY_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
_STANDARD = sysconfig.get_paths()["stdlib"]
_SCRIPTS = sysconfig.get_paths()["scripts"]
AUTOGRAD_ENGINE_CODE = _engine_run_backward.__code__
_user_file_names: dict[str, str] = {}
"""Results of `_user_file`, which is asked for every frame of every op."""
_user_lines: dict[tuple[int, int], tuple[CodeType, str, bool]] = {}
"""Lines by code and instruction, since `f_lineno` searches a table, and whether they are of the user's own. The code is
stored to keep its id unique."""
_own_file_names: dict[str, str] = {}
"""As `_user_file_names`, without files of installed packages; `_ENGINE` for the file in which backward passes start."""
_ENGINE = "<autograd>"


def _user_file(filename: str) -> str:
    """The name of a file with user code.

    "" for torch, nearpeak, the standard library, installed commands and generated code.
    """
    if filename.startswith(("<frozen", "<string", "<eval_with_key", "<__array_function__")):
        return ""
    if any(filename.startswith(folder + "/") for folder in _LIBRARY_FOLDERS):
        return ""
    if _is_inductor_file(filename):
        return ""
    if "/triton/runtime/" in filename:  # launches the user's kernels
        return ""
    if filename.startswith(_STANDARD + "/") and "-packages" not in filename:
        return ""
    if filename.startswith(_SCRIPTS + "/"):  # the entry point of a command, our own among them
        return ""
    return Path(filename).name


_PACKAGE_FILE = re.compile(r".*[/\\\\](?:site|dist)-packages[/\\\\]([^/\\\\]+)")


def package_files(sources: Iterable[str]) -> dict[str, str]:
    """Which files of source lines belong to an installed package, with the name of the package.

    A name that a file of the user's own has too is left out.
    """
    files = {source.rpartition(":")[0] for source in sources} - {""}
    packages: dict[str, set[str]] = {}
    for path, name in _user_file_names.items():
        if name in files:
            package = _PACKAGE_FILE.match(path)
            packages.setdefault(name, set()).add(package[1].removesuffix(".py") if package else "")
    return {name: found.pop() for name, found in packages.items() if len(found) == 1 and "" not in found}


def read_excerpts(sources: Iterable[str]) -> tuple[SourceExcerpt, ...]:
    """The text around source lines, as far as their files can be read and their names are those of one file."""
    paths: dict[str, list[str]] = {}
    for path, name in _user_file_names.items():
        paths.setdefault(name, []).append(path)
    excerpts = []
    for source in dict.fromkeys(sources):
        same_name = paths.get(source.rpartition(":")[0], [])
        found = excerpt(source, linecache.getlines(same_name[0])) if len(same_name) == 1 else None
        if found is not None:
            excerpts.append(found)
    return tuple(excerpts[:MOST_EXCERPTS])


_SETTING = "cudnn.benchmark"
_MAX_PARSED_FILES = 200
"""Files of the user's own that are searched: with more of them the search would take seconds."""


def lines_that_write(names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The lines of the user's own files that call classes of these names, or set `cudnn.benchmark` to other than False.

    A function of one of these names counts unless its first argument is False, and so do an argument of that name that
    is True, and an environment variable that is set. As "collate_fn": where a function that a data loader was given for
    that, or `__getitem__`, first pads items.

    The remedy of some wastes is there, and no op runs there. All files are searched whose code ran or was imported.
    """
    # A lazy module may import, or fail, when it is asked for an attribute.
    modules = [vars(module).get("__file__") for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    imported = [path for path in modules if isinstance(path, str) and path.endswith(".py")]
    own = [path for path in dict.fromkeys([*_user_file_names, *imported]) if _is_own_file(path)]
    lines: dict[str, list[str]] = {}
    for path in own[:_MAX_PARSED_FILES]:
        text = "".join(linecache.getlines(path))
        if _SETTING in text or any(name in text for name in names):
            for name, number in _written_names(text):
                if name == _SETTING or name in names:
                    lines.setdefault(name, []).append(f"{Path(path).name}:{number}")
    return {name: tuple(found) for name, found in lines.items()}


@functools.cache  # asked for all imported modules after each traced step
def _is_own_file(filename: str) -> bool:
    """Whether a file has code of the user's, and not of an installed package."""
    return bool(_user_file(filename)) and _PACKAGE_FILE.match(filename) is None


COLLATE = "collate_fn"
_PADDING = frozenset({"pad_sequence", "pad", "full", "zeros", "empty", "new_full", "new_zeros"})
"""What makes a tensor of one length for items of many, by the last names of functions."""


@functools.lru_cache(maxsize=_MAX_PARSED_FILES)
def _written_names(text: str) -> tuple[tuple[str, int], ...]:
    """The last names of what a file calls, its settings of cuDNN, and where items of a data loader are padded; each
    with its line."""
    return tuple(_names_and_lines(text))


def _names_and_lines(text: str) -> Iterator[tuple[str, int]]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):  # a notebook's cell, with commands of its own
        return
    makers = {"__getitem__"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if not (node.args and _is_constant(node.args[0], (False, None))):
                yield _last_name(node.func), node.lineno
            if _last_name(node.func) in _ENVIRONMENT_SETTERS and node.args:
                yield _text_of(node.args[0]), node.lineno
            yield from (
                (keyword.arg, node.lineno)
                for keyword in node.keywords
                if keyword.arg and _is_constant(keyword.value, (True,))
            )
            given = [keyword.value for keyword in node.keywords if keyword.arg == COLLATE]
            makers |= {_last_name(part) for value in given for part in ast.walk(value)}
        elif isinstance(node, ast.Assign) and not (isinstance(node.value, ast.Constant) and not node.value.value):
            yield from ((_SETTING, node.lineno) for target in node.targets if ast.unparse(target).endswith(_SETTING))
            if not _is_constant(node.value, ("0",)):  # os.environ["NAME"] = "1"
                keys = [target.slice for target in node.targets if isinstance(target, ast.Subscript)]
                yield from ((text, node.lineno) for key in keys if (text := _text_of(key)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in makers:
            calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
            lines = [call.lineno for call in calls if _last_name(call.func) in _PADDING]
            yield from ((COLLATE, line) for line in sorted(lines)[:1])


_ENVIRONMENT_SETTERS = frozenset({"setdefault", "putenv", "setenv"})


def _is_constant(node: ast.AST, values: tuple[Any, ...]) -> bool:
    return isinstance(node, ast.Constant) and node.value in values


def _text_of(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _last_name(node: ast.AST) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


def is_standard_file(filename: str) -> bool:
    """Whether a file has code of Python's library."""
    return filename.startswith(("<frozen", _STANDARD + "/")) and "-packages" not in filename


def is_torch_file(filename: str) -> bool:
    """Whether a file has code of torch's, or code that torch made."""
    return filename.startswith((_LIBRARY_FOLDERS[0] + "/", "<eval_with_key")) or _is_inductor_file(filename)


def in_compiled_code() -> bool:
    """Whether code that torch made, of a compiled or traced function, runs below the nearest code of the user's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not user_file_name(frame.f_code.co_filename):
        filename = frame.f_code.co_filename
        if filename.startswith("<eval_with_key") or _is_inductor_file(filename):
            return True
        frame = frame.f_back
    return False


def is_nearpeak_file(filename: str) -> bool:
    """Whether a file has code of nearpeak's."""
    return filename.startswith(_LIBRARY_FOLDERS[1] + "/")


def user_file_name(filename: str) -> str:
    """The name of a file with code of the user's, or of an installed package other than torch; else ""."""
    name = _user_file_names.get(filename)
    if name is None:
        name = _user_file_names[filename] = _user_file(filename)
    return name


def is_user_file(filename: str) -> bool:
    """Whether a file has code of the user's."""
    return bool(_user_file(filename))


@functools.cache
def _is_inductor_file(filename: str) -> bool:
    """Whether it is in Inductor's cache, whose paths are two letters of a hash and the hash."""
    path = Path(filename)
    folder = path.parent.name
    return len(folder) == 2 and len(path.stem) > 40 and path.stem[1:3] == folder


def user_line(frame: FrameType | None = None) -> tuple[str, bool]:
    """The nearest line of user code at or above a frame, and whether autograd's engine lies between the two.

    Without a frame, the caller's.
    """
    return UserLines().nearest(frame or sys._getframe(1))[:2]


def _line_at(frame: FrameType, name: str) -> tuple[str, bool]:
    """The line of a frame, and whether it is of the user's own."""
    code = frame.f_code
    instruction = (id(code), frame.f_lasti)
    cached = _user_lines.get(instruction)
    if cached is None:
        is_own = _PACKAGE_FILE.match(code.co_filename) is None
        cached = _user_lines[instruction] = (code, f"{name}:{frame.f_lineno or _loop_line(frame)}", is_own)
    return cached[1], cached[2]


def _loop_line(frame: FrameType) -> int:
    """The line of a loop that goes back to its beginning: to the compiler, that jump is at no line."""
    code, jump = frame.f_code, frame.f_lasti
    target = next((item.argval for item in dis.get_instructions(code) if item.offset == jump), jump)
    at = target if isinstance(target, int) and 0 <= target <= jump else jump
    lines = [line for start, _, line in code.co_lines() if start <= at and line is not None]
    return lines[-1] if lines else code.co_firstlineno


def _own_file(filename: str) -> str:
    if filename == AUTOGRAD_ENGINE_CODE.co_filename:
        return _ENGINE
    return "" if _PACKAGE_FILE.match(filename) else _user_file(filename)


def own_file_name(filename: str) -> str:
    """The name of a file with code of the user's own; else ""."""
    name = _own_file_names.get(filename)
    if name is None:
        name = _own_file_names[filename] = _own_file(filename)
    return "" if name == _ENGINE else name


def own_line(frame: FrameType) -> str:
    """The line of a frame if its code is the user's own, not that of a library; else ""."""
    name = own_file_name(frame.f_code.co_filename)
    return _line_at(frame, name)[0] if name else ""


def own_stack(frame: FrameType | None) -> tuple[str, ...]:
    """The lines of the user's own at and above a frame, the outermost first; () inside of a backward pass."""
    lines = []
    own_name = _own_file_names.get
    while frame is not None:
        own = own_name(frame.f_code.co_filename)
        if own != "":
            code = frame.f_code
            if code is AUTOGRAD_ENGINE_CODE:
                return ()
            if own is None:
                own = _own_file_names[code.co_filename] = _own_file(code.co_filename)
            if own not in ("", _ENGINE):
                lines.append(_line_at(frame, own)[0])
        frame = frame.f_back
    return tuple(reversed(lines))


class UserLines:
    """Finds lines of user code for one op after the other."""

    def __init__(self) -> None:
        self._engine: FrameType | None = None
        self._above = ("", "")

    def nearest(self, frame: FrameType | None) -> tuple[str, bool, str]:
        """As `user_line`; and where that line is of an installed package, the nearest line of the user's own above it.

        The last is "" for a line of the user's own, and where no such line called the package.
        """
        while frame is not None:
            code = frame.f_code
            if code is AUTOGRAD_ENGINE_CODE:
                called, caller = self._above_engine(frame)
                return called, True, caller
            name = user_file_name(code.co_filename)
            if name:
                line, is_own = _line_at(frame, name)
                return line, False, "" if is_own else self._caller(frame.f_back)
            frame = frame.f_back
        return "", True, ""  # a thread of the engine

    def _caller(self, frame: FrameType | None) -> str:
        """The nearest line of the user's own; asked for every op of an installed package, through all its frames."""
        own_name = _own_file_names.get
        while frame is not None:
            own = own_name(frame.f_code.co_filename)
            if own != "":
                code = frame.f_code
                if code is AUTOGRAD_ENGINE_CODE:
                    called, caller = self._above_engine(frame)
                    return caller or called
                if own is None:
                    own = _own_file_names[code.co_filename] = _own_file(code.co_filename)
                if own not in ("", _ENGINE):
                    return _line_at(frame, own)[0]
            frame = frame.f_back
        return ""

    def _above_engine(self, frame: FrameType) -> tuple[str, str]:
        """The line that started a backward pass, and its caller; it stays at one line for the whole pass."""
        if frame is not self._engine:
            above = UserLines().nearest(frame.f_back)
            self._engine, self._above = frame, (above[0], above[2])
        return self._above

    def forget(self) -> None:
        """Drops the frame, which keeps its local variables alive."""
        self._engine = None


def failing_line(traceback: TracebackType | None) -> str:
    """The line of user code nearest to where an error was raised."""
    line = ""
    while traceback is not None:
        name = _user_file(traceback.tb_frame.f_code.co_filename)
        if name:
            line = f"{name}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return line
