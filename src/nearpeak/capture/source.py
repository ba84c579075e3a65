"""The line of the user's code that an op comes from."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import CodeType, TracebackType

import torch
from torch.autograd.graph import _engine_run_backward

_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
_STANDARD = sysconfig.get_paths()["stdlib"]
_SCRIPTS = sysconfig.get_paths()["scripts"]
_ENGINE = _engine_run_backward.__code__
_NAMES: dict[str, str] = {}
"""What `_user_file` said of files before: asked for every frame of every op."""
_LINES: dict[tuple[int, int], tuple[CodeType, str]] = {}
"""Lines by code and instruction, to find which goes through a table. The code is kept, so that its id stays its own."""


def _user_file(filename: str) -> str:
    """The name of a file of the user's.

    Nothing for torch's and ours, for the standard library, installed commands and generated code.
    """
    if filename.startswith(("<frozen", "<string", "<eval_with_key", "<__array_function__")):
        return ""
    if any(filename.startswith(folder + "/") for folder in _OURS):
        return ""
    if filename.startswith(_STANDARD + "/") and "-packages" not in filename:
        return ""
    if filename.startswith(_SCRIPTS + "/"):  # the entry point of a command, our own among them
        return ""
    return Path(filename).name


def user_line() -> tuple[str, bool]:
    """The nearest line of the user's code above the caller, and whether autograd's engine lies between the two."""
    frame = sys._getframe(1)
    crossed = False
    while frame is not None:
        code = frame.f_code
        if code is _ENGINE:
            crossed = True
        name = _NAMES.get(code.co_filename)
        if name is None:
            name = _NAMES[code.co_filename] = _user_file(code.co_filename)
        if name:
            at = (id(code), frame.f_lasti)
            known = _LINES.get(at)
            if known is None:
                known = _LINES[at] = (code, f"{name}:{frame.f_lineno}")
            return known[1], crossed
        frame = frame.f_back  # type: ignore[assignment]
    return "", True  # a thread of the engine's own


def failing_line(traceback: TracebackType | None) -> str:
    """The user's line that is nearest to where an error was raised."""
    line = ""
    while traceback is not None:
        name = _user_file(traceback.tb_frame.f_code.co_filename)
        if name:
            line = f"{name}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return line
