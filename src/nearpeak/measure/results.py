"""Results in files: `save`, `load_result`, and `compare_to_baseline`. Plain data, no torch.

A file is one JSON object. Its field `nearpeak` names the result (timing, comparison or sweep), `schema` its version;
the other fields are those of the result. Reading builds declared fields from plain data and executes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nearpeak._files import read_json, write_file
from nearpeak._records import brief, from_json, to_json
from nearpeak.errors import FileProblem, UsageError
from nearpeak.measure.timing import SCHEMA, Comparison, Environment, Sweep, Timing

Result = Timing | Comparison | Sweep

_KINDS: dict[str, type[Result]] = {"timing": Timing, "comparison": Comparison, "sweep": Sweep}


def as_json(result: Result) -> dict[str, Any]:
    """The result as plain JSON data, its type and schema first."""
    kind = next(name for name, cls in _KINDS.items() if isinstance(result, cls))
    return {"nearpeak": kind, "schema": SCHEMA, **to_json(result)}


def save(result: Result, path: str | Path) -> None:
    """Writes the result to a file that `load_result` reads."""
    write_file(path, json.dumps(as_json(result), indent=1, allow_nan=False) + "\n")


def load_result(path: str | Path) -> Result:
    """The timing, comparison or sweep in a file that `save` wrote; FileProblem for anything else."""
    data = read_json(path)
    kind = data.get("nearpeak") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        holds = f'it says "nearpeak": {brief(kind)}' if kind is not None else 'it has no field "nearpeak"'
        raise FileProblem(
            path,
            f"it is not a result of nearpeak: {holds}. Files with a {', '.join(_KINDS)} are written by "
            "`nearpeak bench ... --json FILE`",
        )
    if data.get("schema") != SCHEMA:
        raise FileProblem(
            path,
            f"it has schema {brief(data.get('schema'))} and this version reads {SCHEMA}: measure it again, or use the "
            "nearpeak that wrote it",
        )
    try:
        return from_json(_KINDS[kind], {key: value for key, value in data.items() if key != "nearpeak"})
    except ValueError as error:
        raise FileProblem(path, f"it is damaged: {error}") from None


def as_sweep(result: Result) -> Sweep:
    """A sweep itself, or a timing as a sweep of one point: either can be a baseline."""
    if isinstance(result, Sweep):
        return result
    if isinstance(result, Timing):
        grid = {key: (value,) for key, value in result.parameters.items()}
        return Sweep(name=result.name, parameters=grid, timings=(result,), partial=result.partial)
    raise UsageError("A comparison is no baseline: save a timing or a sweep, `nearpeak bench CASE --json FILE`.")


def label(parameters: Mapping[str, Any]) -> str:
    """A grid point as text: "rows=4096, dtype=float16"."""
    return ", ".join(f"{name}={value}" for name, value in parameters.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One grid point in two runs. The runs were not interleaved, so this is no verdict."""

    point: str
    old: Timing
    new: Timing
    ratio: float | None
    """The new time over the old one; None where the two are not the same kind of time."""
    state: Literal["apart", "overlap", "not comparable"]
    """Whether the intervals of the two runs are apart."""
    reason: str = ""
    """Why the two are not comparable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineComparison:
    """A run compared to a saved one."""

    rows: tuple[Change, ...]
    environment: tuple[str, ...]
    """The differences of the two environments; empty where device, driver, torch and threads agree."""
    only_old: tuple[str, ...]
    only_new: tuple[str, ...]


def compare_to_baseline(new: Sweep | Timing, old: Sweep | Timing) -> BaselineComparison:
    """The ratio of the times at each point, and whether the intervals overlap.

    Two runs differ by heat, clocks and neighbors as well as by the code, and an interval covers only its own run. Use
    `compare` for a verdict.
    """
    new_points = {label(timing.parameters): timing for timing in as_sweep(new).timings}
    old_points = {label(timing.parameters): timing for timing in as_sweep(old).timings}
    both = [point for point in new_points if point in old_points]
    differences: dict[str, None] = {}
    for point in both:
        differences |= dict.fromkeys(_differences(old_points[point].environment, new_points[point].environment))
    return BaselineComparison(
        rows=tuple(_change(point, old_points[point], new_points[point]) for point in both),
        environment=tuple(differences),
        only_old=tuple(point for point in old_points if point not in new_points),
        only_new=tuple(point for point in new_points if point not in old_points),
    )


def _change(point: str, old: Timing, new: Timing) -> Change:
    for name in ("kind", "cache", "regime"):
        old_value, new_value = getattr(old, name), getattr(new, name)
        if old_value != new_value:
            reason = f"{name} {old_value} then, {new_value} now"
            return Change(point=point, old=old, new=new, ratio=None, state="not comparable", reason=reason)
    if old.seconds <= 0:
        reason = "the old time is not above zero"
        return Change(point=point, old=old, new=new, ratio=None, state="not comparable", reason=reason)
    apart = new.high < old.low or new.low > old.high
    ratio = new.seconds / old.seconds
    return Change(point=point, old=old, new=new, ratio=ratio, state="apart" if apart else "overlap")


def _differences(old: Environment, new: Environment) -> Iterator[str]:
    for name in ("device", "driver", "torch", "threads"):
        old_value, new_value = getattr(old, name), getattr(new, name)
        if old_value != new_value:
            yield f"{name}: {old_value} then, {new_value} now"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One experiment of the self-test. `passed` is None where it could not run on this machine."""

    name: str
    question: str
    expected: str
    found: str
    passed: bool | None
    seconds: float = 0.0
    data: Mapping[str, Any] = field(default_factory=dict)
    """The raw figures behind `found`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestReport:
    """All experiments of a self-test."""

    device: str
    torch: str
    date: str
    quick: bool
    experiments: tuple[Experiment, ...]
    schema: int = 1

    @property
    def passed(self) -> bool:
        """Whether no experiment failed."""
        return all(experiment.passed is not False for experiment in self.experiments)
