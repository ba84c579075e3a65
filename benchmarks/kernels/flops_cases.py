"""`FlopsCase`, an operation whose FLOPs are counted: implementations timed in turns, with their errors.

A case may have several kinds of inputs of the same shapes, which share compiled code. Errors are those of some rows of
the result against float64, relative to the largest value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels import cases
from benchmarks.kernels.jobs import DONE, LATE, Steps, without_failures

Call = Callable[[], Any]
CHECKED_ROWS = 64
"""Rows of a result that are compared with float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """The ways with their inputs, and what is right."""

    ways: Mapping[str, Call]
    exact: Callable[[], Tensor] | None = None
    """Some rows of the result, in float64."""
    looked_at: Callable[[Any], Tensor] = lambda result: result[:CHECKED_ROWS]
    """The same rows of what a way returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsCase:
    """An operation at one size."""

    operation: str
    step: str = "forward"
    """Which pass: "forward", "both", or the gradient by something."""
    size: str
    flops: float
    make: Callable[[str], Made]
    """What is measured of a kind of inputs."""
    kinds: Sequence[str] = ("",)
    compiled: Sequence[str] = ("nearpeak",)
    """The ways that have to be compiled before they are timed."""
    apart: Mapping[str, Callable[[], Mapping[str, Steps]]] = field(default_factory=dict)
    """Ways that take long to compile: by way, what makes its jobs."""

    @property
    def name(self) -> str:
        kind = f", {self.kinds[0]}" if len(self.kinds) == 1 and self.kinds[0] else ""
        return f"{self.operation} {self.step} {self.size}{kind}"

    def steps(self) -> dict[str, Call]:
        ways = self.make(self.kinds[0]).ways
        return {name: ways[name] for name in self.compiled if name in ways}

    def jobs_apart(self) -> dict[str, Callable[[], Steps]]:
        """By name, what makes the steps of a job; cases of one operation have the same."""
        return {
            self._job(way, name): lambda steps=steps: steps  # type: ignore[misc]
            for way, make in self.apart.items()
            for name, steps in make().items()
        }

    def _job(self, way: str, name: str) -> str:
        return f"{self.operation}-{way}-{name}".replace(" ", "_")

    def late(self, setting: Any, job: str) -> dict[str, str]:
        """The ways that are compiled apart and were not, with the reason."""
        reasons: dict[str, str] = {}
        if setting.jobs is None:
            return reasons
        section = job.rpartition("-")[0]
        for way, make in self.apart.items():
            for name, steps in make().items():
                whole = f"{section}-{self._job(way, name)}"
                for step in steps:
                    outcome = setting.jobs.outcome(whole, "all") or setting.jobs.outcome(whole, step)
                    if outcome != DONE:
                        reasons[way] = outcome or LATE
        return reasons

    def rows(self, setting: Any, job: str) -> list[dict[str, Any]]:
        """One for each kind."""
        from benchmarks.kernels.timing import in_turns

        late = self.late(setting, job)
        rows = []
        for kind in self.kinds:
            made = self.make(kind)
            ways = {name: way for name, way in made.ways.items() if name not in late}
            allowed, missing = setting.allowed(ways, job, self.compiled)
            running, failed = without_failures(allowed)
            waiting: list[str] = []
            row = {
                "operation": self.operation,
                "pass": self.step,
                "size": self.size,
                "kind": kind,
                "flops": self.flops,
                "seconds": in_turns(running, waiting=waiting),
                "errors": errors(made, running) if setting.check else {},
                "waiting": waiting,
                "failed": {**late, **missing, **failed},
            }
            rows.append(row)
            del made, ways, allowed, running
        return rows


def errors(made: Made, ways: Mapping[str, Call]) -> dict[str, float]:
    if made.exact is None:
        return {}
    with torch.no_grad():
        exact = made.exact()
        largest = exact.abs().max()
    by_way = {}
    for name, way in ways.items():
        result = made.looked_at(way()).detach().double()
        by_way[name] = float((result - exact).abs().max() / largest)
    return by_way


def forward_call(way: Callable[..., Any], *given: Any) -> Call:
    """A call without gradients."""

    def call() -> Any:
        with torch.no_grad():
            return way(*given)

    return call


class GradientCall:
    """The backward pass alone, over results that are kept.

    Args:
        way: What is differentiated; it may have several results.
        above: The gradient of each result that has one.
        wanted: The tensors whose gradients are computed.
        given: The arguments of the way.
    """

    def __init__(self, way: Callable[..., Any], above: Sequence[Tensor], wanted: Sequence[Tensor], *given: Any) -> None:
        self._way, self._above, self._wanted, self._given = way, above, wanted, given
        self._results: list[Tensor] = []

    def __call__(self) -> tuple[Tensor, ...]:
        if not self._results:
            results = self._way(*self._given)
            results = results if isinstance(results, tuple) else (results,)
            self._results = [result for result in results if result.requires_grad]
        return torch.autograd.grad(self._results, self._wanted, self._above, retain_graph=True)


def gradient_call(way: Callable[..., Any], above: Tensor, wanted: Sequence[Tensor], *given: Any) -> Call:
    """The backward pass of a way with one result."""
    return GradientCall(way, [above], wanted, *given)


def both_call(way: Callable[..., Any], above: Tensor, wanted: Sequence[Tensor], *given: Any) -> Call:
    """Both passes, and all gradients that are wanted."""

    def call() -> tuple[Tensor, ...]:
        return torch.autograd.grad(way(*given), wanted, above)

    return call


def compiled_way(way: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(way, dynamic=False, fullgraph=True, backend=cases.BACKEND)
    return compiled


def tuned_way(way: Callable[..., Any]) -> Callable[..., Any]:
    """The same with torch's own kernels for products tried too ("max-autotune").

    The fastest is chosen by the process that measures, which has the GPU for itself: so graphs that others compiled are
    not taken; their kernels are.
    """
    backend = cases.BACKEND
    options: Any = {"max_autotune": True, "fx_graph_cache": False} if backend == "inductor" else None
    compiled: Callable[..., Any] = torch.compile(way, dynamic=False, fullgraph=True, backend=backend, options=options)
    return compiled
