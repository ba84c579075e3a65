"""`--random SEED` of `benchmarks.kernels`: the cells of `drawing`, measured one by one until a time limit.

Several processes compile first, in the order of the draws, each cell as a whole: cells that share compiled kernels come
at different times then, and find them. Cells that were compiled are measured first; what is left is compiled by the
process that measures, as long as there is time.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.drawing import Cell
from benchmarks.kernels.drawn_cases import (
    CellPass,
    choice_of,
    other_backends,
    passes_of,
    worst_row_error,
)
from benchmarks.kernels.flops_cases import Call
from benchmarks.kernels.jobs import DONE, Steps, without_failures
from benchmarks.kernels.score import FORMAT

COMPILED = ("nearpeak", "compile", "liger")
"""The ways that have to be compiled before they are timed."""
OTHERS = "others"
"""In `Setting.left_out`: the backends of nearpeak that it did not choose."""
ROUNDS = 5
ENOUGH_ROUNDS, ENOUGH_SPREAD = 3, 0.004
"""No further rounds after so many in which each way is so close to its median."""
FULL_BYTES = 2**35
"""Of memory that torch holds: it is freed after a cell that leaves more."""
ERROR_LIMITS = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 1e-4}
"""Of the worst row, by dtype; larger where twice the error of torch's own is."""
QUANTIZED_LIMIT = 8e-2
"""Of float8 beside what was quantized: it has 3 bits after the first."""
TRUSTED = ("eager", "cublas", "cudnn", "flash", "efficient", "varlen", "torch", "scaled_mm")
"""The peers whose errors are a measure for others."""


def compile_jobs(cells: Sequence[Cell], setting: Any) -> Iterator[tuple[str, Callable[[], Steps]]]:
    for cell in cells:
        yield cell.job, partial(_steps, cell, setting)


def _steps(cell: Cell, setting: Any) -> dict[str, Call]:
    """What has to be compiled of a cell, by way: all its passes."""
    passes = {name: one for name, one in passes_of(cell, setting.device).items() if name in cell.passes}

    def run(name: str) -> None:
        for one in passes.values():
            if name in one.ways:
                call = after_reset(one, name)
                call()
                if name == "nearpeak" and OTHERS not in setting.left_out:
                    other_backends(call, choice_of(call), one.peer_backends)

    names = dict.fromkeys(name for one in passes.values() for name in one.ways if name in COMPILED)
    return {name: partial(run, name) for name in names if name not in setting.left_out}


def after_reset(one: CellPass, name: str) -> Call:
    """A way with its inputs put back before."""
    way, reset = one.ways[name], one.resets.get(name)
    if reset is None:
        return way

    def call() -> Any:
        reset()
        return way()

    return call


def measured_cell(cell: Cell, setting: Any) -> list[dict[str, Any]]:
    """The rows of a cell, one for each pass."""
    from benchmarks.kernels import timing

    rows = []
    begin = time.perf_counter()
    for name, one in passes_of(cell, setting.device).items():
        if name not in cell.passes:
            continue
        wanted = {way: call for way, call in one.ways.items() if way not in setting.left_out}
        allowed, late = setting.allowed(wanted, cell.job, COMPILED)
        running, failed = without_failures(allowed, one.resets)
        choice = choice_of(after_reset(one, "nearpeak"))
        others, refused = {}, {}
        if OTHERS not in setting.left_out:
            others, refused = other_backends(running["nearpeak"], choice, one.peer_backends)
        ways = {**running, **others}
        resets = {way: one.resets[base] for way in ways if (base := "nearpeak" if way in others else way) in one.resets}
        ready = time.perf_counter()
        errors = errors_of(one, ways, resets) if setting.check else {}
        checked = time.perf_counter()
        waiting: list[str] = []
        spread: dict[str, float] = {}
        rounds = min(ROUNDS, timing.ROUNDS)
        seconds = timing.in_turns(
            ways, rounds, resets=resets, may_wait=one.may_wait, waiting=waiting, spread=spread,
            enough=(ENOUGH_ROUNDS, ENOUGH_SPREAD), compared="nearpeak",
        )  # fmt: skip
        end = time.perf_counter()
        rows.append(
            {
                "seed": cell.seed,
                "number": cell.number,
                "operation": cell.operation,
                "pass": name,
                "dtype": cell.dtype,
                "shape": cell.shape,
                "text": cell.text,
                "bytes": one.bytes,
                "flops": one.flops,
                "seconds": seconds,
                "spread": spread,
                "backend": choice.backend,
                "candidates": choice.candidates,
                "errors": errors,
                "error_limit": error_limit(cell, errors),
                "waiting": waiting,
                "failed": {**late, **failed, **refused},
                "took": {"made": ready - begin, "checked": checked - ready, "timed": end - checked},
            }
        )
        begin = end
    return rows


def error_limit(cell: Cell, errors: Mapping[str, float]) -> float:
    """What the error of nearpeak may be: twice that of torch, or what rounding explains."""
    least = QUANTIZED_LIMIT if cell.operation == "quantize" else ERROR_LIMITS[cell.dtype]
    of_torch = [error for way, error in errors.items() if way in TRUSTED and error < float("inf")]
    return max(least, 2 * max(of_torch, default=0.0))


def errors_of(one: CellPass, ways: Mapping[str, Call], resets: Mapping[str, Call]) -> dict[str, float]:
    exact = one.exact()
    errors = {}
    for name in ways:
        if name in ("liger", "compile"):  # Liger overwrites what it is given; compiled code is eager code
            continue
        if one.checked_ways is not None:
            result = one.checked_ways[name]() if name in one.checked_ways else None
        else:
            if name in resets:
                resets[name]()
            result = ways[name]()
        if result is not None:
            errors[name] = worst_row_error(one.looked_at(result), exact)
    return errors


def new_random_content(head: Mapping[str, Any]) -> dict[str, Any]:
    return {"format": FORMAT, **head, "runs": [], "cells": []}


def measure_cells(
    cells: Sequence[Cell],
    setting: Any,
    content: dict[str, Any],
    write: Callable[[], Any],
    clean: Callable[[], Any],
    until: float | None = None,
) -> bool:
    """Measures into `content`, which is written after each cell; whether the time was enough for all."""
    start = time.perf_counter()
    jobs = setting.jobs
    # what is compiled comes first
    for cell in sorted(cells, key=lambda cell: jobs is not None and jobs.outcome(cell.job, "nearpeak") != DONE):
        if until is not None and time.perf_counter() > until:
            return False
        name = f"{cell.operation}: {cell.text}"
        print(f"{time.perf_counter() - start:6.1f} s  {cell.number:4d} {name}", file=sys.stderr, flush=True)
        try:
            content["cells"] += measured_cell(cell, setting)
        except Exception as error:
            traceback.print_exc()
            content["failed"][f"{cell.seed}/{cell.number} {name}"] = f"{type(error).__name__}: {str(error)[:300]}"
            if "CUDA error" in str(error):
                return False  # nothing runs in this process any more
        torch.compiler.reset()  # it keeps no more than 8 variants of a function
        if torch.cuda.is_available() and torch.cuda.memory_reserved() > FULL_BYTES:
            clean()
        write()
    return True
