"""Everything that nearpeak raises on purpose.

    NearpeakError
    ├── UsageError                a call or a command line that cannot be understood      (exit 2)
    │   ├── UnknownMachine        a name that is not in the catalogue
    │   ├── FileProblem           a file that cannot be read, or does not hold what it should
    │   └── CaseError             a case that cannot be loaded, built or run
    ├── UntrustworthyMeasurement  `strict` and the grade is too low                       (exit 3)
    └── EnvironmentProblem        something that this machine lacks                       (exit 4)
        └── KernelUnavailable     a kernel that needs triton or another GPU

A message says what was asked, what was found and what to do. The command line prints it without a traceback and
ends with `exit_code`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from difflib import get_close_matches

EXIT_INTERRUPTED = -signal.SIGINT
"""The exit code after Ctrl-C, as `subprocess` has it: the interpreter ends by the signal."""


class NearpeakError(Exception):
    """The root of the tree above."""

    exit_code = 1


class UsageError(NearpeakError):
    """What was asked cannot be done as asked."""

    exit_code = 2


class UnknownMachine(UsageError):
    """A machine that the catalogue does not have."""


class FileProblem(UsageError):
    """A file that cannot be read, or does not hold what it should; `reason` is a clause that says why."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"{path}: {reason}.")
        self.path = str(path)
        self.reason = reason


class CaseError(UsageError):
    """A case that cannot be loaded, built or run; `__cause__` is the original error where there is one."""


class UntrustworthyMeasurement(NearpeakError):
    """A measurement was taken, and its flags say that it should not be used."""

    exit_code = 3


class EnvironmentProblem(NearpeakError):
    """Something is missing on this machine."""

    exit_code = 4


class KernelUnavailable(EnvironmentProblem):
    """A kernel cannot run here."""


def message_of(error: BaseException) -> str:
    """The message of any error on one line. A class of the user's may not have one."""
    try:
        return " ".join(str(error).split())[:400]
    except Exception:
        return "its message cannot be shown"


def did_you_mean(asked: str, valid: Iterable[str]) -> str:
    """A sentence with the nearest valid names, or with all of them when none is near.

    >>> did_you_mean("bfloat15", ["bfloat16", "float32"])
    "Did you mean 'bfloat16'?"
    >>> did_you_mean("x", ["bfloat16", "float32"])
    "Valid: 'bfloat16', 'float32'."
    """
    names = sorted(valid)
    near = get_close_matches(asked[:100].lower(), names, n=3, cutoff=0.7)
    if near:
        return "Did you mean " + " or ".join(repr(name) for name in near) + "?"
    return "Valid: " + ", ".join(repr(name) for name in names) + "."
