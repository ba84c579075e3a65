"""`Chooser`: which backend of an operation runs for the sizes of a call.

An operation has several backends: its kernel in Gluon, the portable one in Triton, and torch's own (cuBLAS, cuDNN,
FlashAttention). Which one is fastest was measured, and `tables/sm90_choices.json` has the measured cells of each
operation: the sizes and options of a call, and the time of each backend relative to the fastest one.

A call takes the backend that was fastest in the cells near to it. The distance of two calls is that of the logarithms
of their features, each with a weight; a cell counts by the inverse of the fourth power of its distance (Shepard's
interpolation, here of the logarithm of how much faster a backend is than the first candidate), so that a call that was
measured takes what was fastest. One further cell, in which all backends tie, counts everywhere: far from all cells the
first candidate runs. So it does without a table for this GPU. Operations name torch's own kernel first wherever there
is one: what was never measured is hardly ever slower than torch.

The cells are asked once for each kind of call, which takes some tens of microseconds, and never times anything.
`using` in `policy` forces a backend, `supports` shows the choice for some arguments, and `choices` all choices that
were made.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from math import exp, log, log2
from typing import Any, Literal

import torch

from nearpeak.errors import KernelUnavailable
from nearpeak.kernels._runtime.capability import cuda_capability
from nearpeak.kernels._runtime.replay import active_recording

BACKENDS = ("nearpeak", "gluon", "triton", "torch", "cudnn", "flash")
"""What may be forced. "nearpeak" is the faster one of "gluon" and "triton", "torch" that of "cudnn" and "flash", which
attention has."""
OF_TORCH = ("torch", "cudnn", "flash")
Basis = Literal["only", "measured", "not measured", "forced"]

_NOISE = 0.02
"""Keeps the weight of a cell finite: those nearer than 0.4 count alike."""
_TIE_WEIGHT = 0.3
"""Of the cell in which all backends tie: that of a cell at a distance of 1.3."""
_FAR_WEIGHT = 0.02
"""Cells of less weight than this, together, say nothing of a call: they are further away than 2.7."""
_LEAST_GAIN = 0.01
"""By so much another backend must be faster than the first candidate."""
_MOST_CHOICES = 4096
"""The choices of an operation are forgotten at this number: some sizes never come again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which backend of an operation runs, and why."""

    operation: str
    backend: str
    candidates: tuple[str, ...]
    """The backends that support the arguments; the first one runs if nothing is known."""
    basis: Basis
    """"only": it is the only candidate. "measured": in similar calls. "not measured": in none, or on no such GPU.
    "forced": by `using`."""
    relative: Mapping[str, float]
    """The expected time of each candidate over that of the fastest backend; empty if it was not measured."""
    features: Mapping[str, float]
    """The sizes and options that decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What was measured of one call."""

    place: tuple[float, ...]
    """The logarithms of its features, each times its weight."""
    losses: Mapping[str, float]
    """By backend, the logarithm of its time over that of the fastest one."""


Model = Sequence[Cell]
"""What was measured of one operation on one generation of GPUs."""


def place_of(values: Sequence[float], weights: Sequence[float]) -> tuple[float, ...]:
    """Where a call stands, for distances: one unit is far for some features, such as options, and near for others."""
    return tuple(weight * log2(1.0 + value) for value, weight in zip(values, weights, strict=True))


def log_ratios(model: Model, place: tuple[float, ...], candidates: Sequence[str]) -> dict[str, float]:
    """The logarithm of the time of each candidate over that of the first one, by the cells near to a place.

    A candidate is left out if no cell with it and the first one is near.
    """
    first, *others = candidates
    sums = dict.fromkeys(others, (0.0, 0.0))  # weights, and weighted logarithms
    for cell in model:
        if first in cell.losses:
            squared = sum((x - y) ** 2 for x, y in zip(cell.place, place, strict=True))
            weight = 1.0 / (_NOISE + squared * squared)
            for name in others:
                if name in cell.losses:
                    total, weighted = sums[name]
                    sums[name] = total + weight, weighted + weight * (cell.losses[name] - cell.losses[first])
    near = {name: weighted / (total + _TIE_WEIGHT) for name, (total, weighted) in sums.items() if total > _FAR_WEIGHT}
    return {first: 0.0, **near} if near else {}


class _ThreadState(threading.local):
    explains = False


class Explanation(Exception):
    """Raised in place of running a backend, by the call that `explained_choice` makes."""

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice.backend)
        self.choice = choice


_thread_state = _ThreadState()
_forced: str | None = None
_choosers: list[Chooser] = []


class Chooser:
    """Chooses the backend of one operation.

    Args:
        operation: Its name in the table of choices.
        features: The names of the numbers that decide, and the weight of each: the distance of two calls in one of
            which its number is twice as large, or in one of which an option is on.
    """

    def __init__(self, operation: str, features: Mapping[str, float]) -> None:
        self.operation, self.features = operation, features
        self._choices: dict[Hashable, Choice] = {}
        self._models: dict[int, Model] = {}
        _choosers.append(self)

    def measured(self, generation: int) -> Model:
        """The cells that were measured on a generation of GPUs, such as 90."""
        if generation not in self._models:
            self._models[generation] = read_model(
                _table(generation).get(self.operation, {"cells": ()})["cells"], self.features
            )
        return self._models[generation]

    def known(self, key: Hashable) -> str | None:
        """The backend that was chosen for this key; None if `choose` has to be asked."""
        choice = None if _forced or _thread_state.explains else self._choices.get(key)
        if choice is None:
            return None
        recording = active_recording()
        if recording is not None:
            recording.backends.add(choice.backend)
        return choice.backend

    def choose(self, key: Hashable, candidates: Sequence[str], values: Sequence[float], device: torch.device) -> str:
        """The backend for a call, which is remembered by the key: all that candidates and features depend on.

        Args:
            candidates: The backends that support the call. The first one runs if nothing is known.
            values: Of the features.
        """
        model = _model(self, device)
        choice = choose(self.operation, tuple(candidates), self.features, values, model, _forced)
        if _thread_state.explains:
            raise Explanation(choice)
        if _forced is None:
            if len(self._choices) >= _MOST_CHOICES:
                self._choices.clear()
            self._choices[key] = choice
        return choice.backend

    @property
    def choices(self) -> list[Choice]:
        """What was chosen so far."""
        return list(self._choices.values())


def choose(
    operation: str, candidates: tuple[str, ...], features: Mapping[str, float], values: Sequence[float],
    model: Model, forced: str | None = None,
) -> Choice:  # fmt: skip
    """The fastest candidate, as far as the model knows."""
    allowed = tuple(name for name in candidates if _is_allowed(name, forced))
    if not allowed:
        raise KernelUnavailable(
            f"{operation} has no backend {forced!r} for these arguments. It has {', '.join(map(repr, candidates))}."
        )
    ratios = log_ratios(model, place_of(values, tuple(features.values())), allowed)
    backend = allowed[0]
    basis: Basis = "measured" if ratios else "not measured"
    fastest = min(ratios, key=ratios.__getitem__, default=backend)
    if ratios and ratios[fastest] < log(1.0 - _LEAST_GAIN):
        backend = fastest
    if forced is not None:
        basis = "forced"
    elif len(candidates) == 1:
        basis = "only"
    return Choice(
        operation=operation, backend=backend, candidates=candidates, basis=basis,
        relative={name: exp(ratio - ratios[fastest]) for name, ratio in ratios.items()},
        features=dict(zip(features, values, strict=True)),
    )  # fmt: skip


def _is_allowed(name: str, forced: str | None) -> bool:
    if forced == "nearpeak":
        return name not in OF_TORCH
    return forced is None or name == forced or (forced == "torch" and name in OF_TORCH)


def torch_runs_on(device: torch.device) -> bool:
    """Whether backends of torch are candidates on a device: not where kernels are interpreted or compiled for tests."""
    return device.type == "cuda"


def forced_backend() -> str | None:
    """The backend that every operation must take, if it has a choice."""
    return _forced


def force_backend(name: str | None) -> None:
    """Makes every operation that has a choice take this backend; None lets them choose."""
    global _forced  # one for all threads: autograd runs a backward pass on its own threads
    _forced = name


@contextmanager
def own_backends() -> Iterator[None]:
    """Inside, no operation takes a backend of torch: for programs that check this package's kernels.

    Calls are replayed as ever, also outside, where torch might be faster.
    """
    before = _forced
    force_backend("nearpeak")
    try:
        yield
    finally:
        force_backend(before)


def choices() -> list[Choice]:
    """All choices between backends that were made in this process, by operation and kind of call; see `supports`."""
    return [choice for chooser in _choosers for choice in chooser.choices]


def explained_choice(function: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Choice | None:
    """The first choice that a call would make; None if it makes none. No kernel of an operation with a choice runs."""
    _thread_state.explains = True
    try:
        function(*args, **kwargs)
    except Explanation as explanation:
        return explanation.choice
    finally:
        _thread_state.explains = False
    return None


def _model(chooser: Chooser, device: torch.device) -> Model:
    """What was measured of an operation on GPUs of this generation."""
    capability = cuda_capability(device.index or 0) if device.type == "cuda" else None
    return () if capability is None else chooser.measured(10 * capability[0] + capability[1])


@functools.cache
def _table(generation: int) -> Mapping[str, Any]:
    """The operations that were measured on a generation of GPUs, such as 90; no neighbor's."""
    path = files("nearpeak.kernels").joinpath("tables", f"sm{generation}_choices.json")
    return json.loads(path.read_text())["operations"] if path.is_file() else {}


def read_model(cells: Sequence[Mapping[str, Any]], features: Mapping[str, float]) -> Model:
    """The model of an operation from its cells: features by name, if not 0, and times relative to the fastest."""
    return [
        Cell(
            place=place_of([cell["features"].get(name, 0.0) for name in features], tuple(features.values())),
            losses={name: log(relative) for name, relative in cell["relative"].items()},
        )
        for cell in cells
    ]
