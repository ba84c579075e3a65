"""Runs an example, and keeps what it showed."""

from __future__ import annotations

import datetime
import importlib
import inspect
import platform
import time
from collections.abc import Callable, Iterable

import torch

import nearpeak
from nearpeak.errors import UsageError
from nearpeak.gallery import NAMES
from nearpeak.gallery.here import Here
from nearpeak.gallery.parts import Part, Result
from nearpeak.machines.model import Machine
from nearpeak.measure.heap import keep_freed_memory


class Skip(Exception):
    """An example that a machine cannot run, and why."""


def here(on: str | None = None, progress: Callable[[str], None] | None = None) -> Here:
    """This machine, or one of the catalogue, for which nothing is measured.

    On a CPU the process keeps what it frees from here on, as it does on a GPU: otherwise large results would cost page
    faults besides, or not, as earlier examples left the heap.
    """
    machine = nearpeak.machine(on, progress=progress)
    device = "cuda" if (torch.cuda.is_available() if on is None else is_gpu(machine)) else "cpu"
    if on is None and device == "cpu":
        keep_freed_memory()
    return Here(machine=machine, device=device, measures=on is None, progress=progress or (lambda line: None))


def is_gpu(machine: Machine) -> bool:
    """Whether a machine of the catalogue is a GPU."""
    return machine.kind == "gpu"


def described(name: str) -> tuple[str, str]:
    """The title and the lesson of an example: the first line of its docstring, and the rest."""
    title, _, lesson = (inspect.getdoc(_module(name)) or "").partition("\n\n")
    return title.removesuffix("."), " ".join(lesson.split())


def source(name: str) -> str:
    """The text of an example."""
    return inspect.getsource(_module(name))


def run(name: str, here: Here) -> Result:
    """Runs one example."""
    module = _module(name)
    title, lesson = described(name)
    start = time.perf_counter()
    parts: list[Part] = []
    skipped = ""
    try:
        for part in module.example(here):
            parts += part if isinstance(part, Iterable) else [part]
    except Skip as why:
        skipped = str(why)
    return Result(
        name=name,
        number=NAMES.index(name) + 1,
        title=title,
        lesson=lesson,
        machine=here.machine.name,
        measured=here.measures,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        versions=(
            ("nearpeak", nearpeak.__version__),
            ("torch", torch.__version__),
            ("Python", platform.python_version()),
        ),
        seconds=time.perf_counter() - start,
        parts=tuple(parts),
        skipped=skipped,
    )


def _module(name: str):  # type: ignore[no-untyped-def]
    if name not in NAMES:
        raise UsageError(f"There is no example {name!r}. There are: {', '.join(NAMES)}.")
    return importlib.import_module(f"nearpeak.gallery.examples.{name}")
