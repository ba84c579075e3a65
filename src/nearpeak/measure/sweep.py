"""`sweep`: a case over a grid of parameters, one timing per point."""

from __future__ import annotations

import gc
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nearpeak.devices.backends import gpu_in_use
from nearpeak.devices.process_state import preserve_process_state
from nearpeak.errors import CaseError, UsageError, did_you_mean
from nearpeak.machines.machine import Machine
from nearpeak.measure.bench import bench
from nearpeak.measure.case import CaseBuilder
from nearpeak.measure.options import Progress, options_from
from nearpeak.measure.results import label
from nearpeak.measure.timing import Sweep, Timing

PointDone = Callable[[int, int, str], None]


@preserve_process_state()
def sweep(
    build: Callable[..., Any] | CaseBuilder,
    grid: Mapping[str, Sequence[Any]],
    *,
    name: str = "",
    on: str | Machine | None = None,
    strict: bool = False,
    progress: Progress | None = None,
    point: PointDone | None = None,
    **options: Any,
) -> Sweep:
    """Times what `build` returns for every combination of the grid's values, in the grid's order.

    A point that cannot be built or run, or that runs out of memory, is in `failures` with its reason, and the sweep
    goes on. Ctrl-C ends it: the result then has what was measured, marked partial. Memory is freed between
    points.

    Args:
        build: Takes the parameters and returns what to time: a `Case`, a callable, or a tuple (callable, *arguments).
        grid: The values of each parameter.
        name: For reports; the function's name otherwise.
        on: The machine whose ceilings give the bounds, as in `bench`.
        strict: Raise `UntrustworthyMeasurement` at the first point whose grade is C or F.
        progress: Called with a line of text now and then.
        point: Called before each point and after the last with how many are done, how many there are, and the point.
        options: Those of `bench`.

    Examples:
        >>> import torch
        >>> def ones(n): return torch.sin, torch.rand(n)
        >>> result = sweep(ones, {"n": [64, 4096]}, max_seconds=0.05, warmup_seconds=0.01)
        >>> [timing.parameters["n"] for timing in result.timings]
        ['64', '4096']
    """
    options_from(options)  # a misspelled option is one error here, and not a failure at every point
    builder = build if isinstance(build, CaseBuilder) else _builder(build)
    points = _points(builder, grid)
    say = progress or (lambda line: None)
    tell = point or (lambda done, count, text: None)
    timings: list[Timing] = []
    failures: dict[str, str] = {}
    partial = False
    for done, parameters in enumerate(points):
        where = label(parameters)
        tell(done, len(points), where)
        say(f"[{done + 1}/{len(points)}] {where}")
        try:
            # The case is not stored: its tensors are freed before the next point is built.
            timings.append(bench(builder.build(**parameters), on=on, strict=strict, progress=progress, **options))
        except KeyboardInterrupt:
            if not timings:
                raise
            partial = True
        except (UsageError, torch.OutOfMemoryError, MemoryError) as error:
            failures[where] = " ".join(str(error).split()) or type(error).__name__
            say(f"[{done + 1}/{len(points)}] {where}: {failures[where]}")
        _free()
        if partial or (timings and timings[-1].partial):
            partial = True
            break
    else:
        tell(len(points), len(points), "")
    return Sweep(
        name=name or builder.name,
        parameters={key: tuple(str(value) for value in values) for key, values in grid.items()},
        timings=tuple(timings),
        failures=failures,
        partial=partial,
    )


def _points(builder: CaseBuilder, grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination, the last parameter fastest."""
    if not isinstance(grid, Mapping) or not grid:
        raise UsageError('A sweep needs a grid of at least one parameter: sweep(build, {"rows": [1024, 4096]}).')
    accepted = inspect.signature(builder.function).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    for key, values in grid.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise UsageError(f"The grid's values of {key!r} are {values!r}; give a list of at least one value.")
        if key not in accepted and not open_ended:
            hint = did_you_mean(key, accepted) if accepted else "It takes none."
            raise CaseError(f"{builder.name} has no parameter {key!r}. {hint}")
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _builder(build: Any) -> CaseBuilder:
    if not callable(build):
        raise CaseError(
            f"A sweep needs a function from parameters to what is timed, and got {type(build).__name__}: "
            'sweep(lambda n: (torch.sin, torch.rand(n)), {"n": [1024, 4096]}).'
        )
    code = getattr(build, "__code__", None)
    path = Path(code.co_filename) if code is not None else Path(type(build).__module__)
    return CaseBuilder(path=path, name=getattr(build, "__name__", type(build).__name__), function=build)


def _free() -> None:
    gc.collect()
    backend = gpu_in_use()
    if backend is not None:
        backend.release_cached_memory()
