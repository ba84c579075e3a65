"""`Chooser`: which backend of an operation runs for the sizes of a call.

An operation has several backends: its kernel in Gluon, the portable one in Triton, and torch's own (cuBLAS, cuDNN,
FlashAttention). Which one is fastest was measured, and `benchmarks/kernels/fit_choices.py` fits a decision tree on the
measured cells of each operation, `tables/sm90_choices.json`. A node of the tree compares one feature of a call, such as
its number of rows, and a leaf has the mean time of each backend relative to the fastest one.

For sizes outside of the measured ones, each backend has a formula that was fitted on all of its cells: seconds of a
launch, and seconds for each unit of an operation's work. Without a table for this GPU, and unless the formulas promise
a good deal more, the first candidate runs. Operations name torch's own kernel first wherever there is one, so that what
was never measured is hardly ever slower than torch.

The tree is asked once for each kind of call, which takes a few microseconds, and never times anything. `using` in
`policy` forces a backend, `supports` shows the choice for some arguments, and `choices` all choices that were made.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

import torch

from nearpeak.errors import KernelUnavailable
from nearpeak.kernels._runtime.policy import cuda_capability
from nearpeak.kernels._runtime.replay import active_recording

BACKENDS = ("nearpeak", "gluon", "triton", "torch", "cudnn", "flash")
"""What may be forced. "nearpeak" is the faster one of "gluon" and "triton", "torch" that of "cudnn" and "flash", which
attention has."""
OF_TORCH = ("torch", "cudnn", "flash")
Basis = Literal["only", "measured", "estimated", "not measured", "forced"]
Tree = Mapping[str, Any]
"""A node {"feature", "at_most", "below", "above"}, or a leaf {"cells", "relative"}."""
Work = Callable[[Mapping[str, float]], float]

_SLACK = 1.5
"""Sizes up to so many times beyond the measured ones are like these."""
_LEAST_GAIN = 0.01
"""By so much another backend must be faster than the first candidate."""
_LEAST_ESTIMATED_GAIN = 0.1
"""The same where it is estimated for sizes that were not measured."""
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
    """"only": it is the only candidate. "measured": of similar calls. "estimated": from those of other sizes. "not
    measured": on no such GPU. "forced": by `using`."""
    relative: Mapping[str, float]
    """The expected time of each candidate over that of the fastest backend; empty if it was not measured."""
    features: Mapping[str, float]
    """The sizes and options that decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceModel:
    """What was measured of one operation on one generation of GPUs."""

    ranges: Mapping[str, tuple[float, float]]
    """The smallest and the largest value of each feature in the measured cells."""
    tree: Tree
    costs: Mapping[str, tuple[float, float]]
    """By backend, the seconds of a call without work, and those of a unit of work."""

    def has_measured(self, features: Mapping[str, float]) -> bool:
        """Whether calls like this one were measured."""
        return all(low / _SLACK <= features[name] <= high * _SLACK for name, (low, high) in self.ranges.items())

    def relative_times(self, features: Mapping[str, float], work: float) -> Mapping[str, float]:
        """The time of each backend over that of the fastest one."""
        if not self.has_measured(features):
            seconds = {name: launch + unit * work for name, (launch, unit) in self.costs.items()}
            fastest = min(seconds.values(), default=0.0)
            return {name: time / fastest for name, time in seconds.items()} if fastest > 0.0 else {}
        node = self.tree
        while "feature" in node:
            node = node["below" if features[node["feature"]] <= node["at_most"] else "above"]
        relative: Mapping[str, float] = node["relative"]
        return relative


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
        features: The names of the numbers by which trees decide.
        work: What the time of a large call is proportional to, such as bytes, from the features.
    """

    def __init__(self, operation: str, features: tuple[str, ...], work: Work) -> None:
        self.operation, self.features, self.work = operation, features, work
        self._choices: dict[Hashable, Choice] = {}
        _choosers.append(self)

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
        features = dict(zip(self.features, values, strict=True))
        model = _model(self.operation, device)
        choice = choose(self.operation, tuple(candidates), features, self.work(features), model, _forced)
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
    operation: str, candidates: tuple[str, ...], features: Mapping[str, float], work: float,
    model: ChoiceModel | None, forced: str | None = None,
) -> Choice:  # fmt: skip
    """The fastest candidate, as far as the model knows."""
    allowed = tuple(name for name in candidates if _is_allowed(name, forced))
    if not allowed:
        raise KernelUnavailable(
            f"{operation} has no backend {forced!r} for these arguments. It has {', '.join(map(repr, candidates))}."
        )
    known = {} if model is None or len(allowed) == 1 else model.relative_times(features, work)
    relative = {name: known[name] for name in allowed if name in known}
    backend = allowed[0]
    basis: Basis = "not measured"
    if backend in relative:
        basis = "measured" if model is not None and model.has_measured(features) else "estimated"
        fastest = min(relative, key=relative.__getitem__)
        gain = _LEAST_GAIN if basis == "measured" else _LEAST_ESTIMATED_GAIN
        if relative[fastest] < (1.0 - gain) * relative[backend]:
            backend = fastest
    if forced is not None:
        basis = "forced"
    elif len(candidates) == 1:
        basis = "only"
    return Choice(
        operation=operation, backend=backend, candidates=candidates, basis=basis, relative=relative, features=features
    )


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


def _model(operation: str, device: torch.device) -> ChoiceModel | None:
    """What was measured of an operation on GPUs of this generation."""
    capability = cuda_capability(device.index or 0) if device.type == "cuda" else None
    return None if capability is None else measured_models(10 * capability[0] + capability[1]).get(operation)


@functools.cache
def measured_models(generation: int) -> Mapping[str, ChoiceModel]:
    """The models of all operations that were measured on a generation of GPUs, such as 90; no neighbour's."""
    path = files("nearpeak.kernels").joinpath("tables", f"sm{generation}_choices.json")
    return read_models(json.loads(path.read_text())) if path.is_file() else {}


def read_models(table: Mapping[str, Any]) -> dict[str, ChoiceModel]:
    """The models in a table of choices."""
    return {
        name: ChoiceModel(
            ranges={key: (low, high) for key, (low, high) in one["ranges"].items()},
            tree=one["tree"],
            costs={key: (launch, unit) for key, (launch, unit) in one["costs"].items()},
        )
        for name, one in table["operations"].items()
    }
