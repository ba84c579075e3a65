"""The line of the user's code that an op comes from."""

from __future__ import annotations

import functools
import sys
import sysconfig
from pathlib import Path
from types import TracebackType

import torch
from torch.autograd.graph import _engine_run_backward

_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
_STANDARD = sysconfig.get_paths()["stdlib"]
_SCRIPTS = sysconfig.get_paths()["scripts"]
_ENGINE = _engine_run_backward.__code__


@functools.cache
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
        name = _user_file(code.co_filename)
        if name:
            return f"{name}:{frame.f_lineno}", crossed
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
