"""Is every bound a bound? Hundreds of calls on a GPU, measured with a cold and a hot cache, against their bounds.

    PYTHONPATH=src python benchmarks/soundness.py --json benchmarks/results/soundness.json

The bound of a call is the sum over the ops that it really ran (a live trace), against the datasheet's ceilings and
against those that are measured at the start of the run. A call breaks its bound where even the upper end of its
measured interval lies below, with the error to which the events' zero is known added. The tightness of a call is its
time over its bound at the measured ceilings.

    python benchmarks/soundness.py --dry             # builds and estimates all calls on fake tensors; needs no GPU
    python benchmarks/soundness.py --show FILE       # the tables of a run again
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from soundness_cases import FAMILIES, Call, calls

import nearpeak
from nearpeak.bound.cache import Residency
from nearpeak.bound.floors import as_written
from nearpeak.capture.trace import trace
from nearpeak.machines.model import Machine
from nearpeak.measure.instrument import zero_of
from nearpeak.measure.machine import this_machine
from nearpeak.work.cost import cost_of
from nearpeak.work.op import Trace

CEILINGS: tuple[Literal["theoretical", "achievable"], ...] = ("theoretical", "achievable")
ALLOWED_SHARE, ALLOWED_EXCESS = 0.01, 0.03
HOT_BYTES = 400e6
"""Calls that move more than this see no difference between a cold and a hot cache; they are measured cold only."""
FAST = {"max_seconds": 0.06, "warmup_seconds": 0.02, "min_blocks": 8, "precision": 0.01, "other_kinds": False}


def bounds_of(recorded: Trace, machine: Machine) -> dict[str, dict[str, float]]:
    """Seconds by cache and ceilings: a first run of the trace, and one that finds the cache as the first left it."""
    costs = [cost_of(op) for op in recorded.ops]
    found: dict[str, dict[str, float]] = {"cold": {}, "hot": {}}
    for ceilings in CEILINGS:
        residency = Residency(machine.cache_bytes or 0.0)
        for cache in found:
            bounds = as_written(recorded, costs, machine, ceilings=ceilings, residency=residency)
            found[cache][ceilings] = sum(bound.seconds for bound in bounds)
    return found


def zero_error(method: str, cache: Literal["cold", "hot"]) -> float:
    """How well the zero of the events is known that a method takes off; a regression takes none off."""
    zero = zero_of(torch.cuda.current_device(), cache)
    if method.startswith("CUDA events around each call in a CUDA graph"):
        return zero.graph_uncertainty
    return zero.uncertainty if method.startswith("CUDA events") else 0.0


def measure(call: Call, machine: Machine) -> dict[str, Any]:
    """One call: its ops, its bounds, its times."""
    case = call.build()
    row: dict[str, Any] = {"family": call.family, "name": call.name, "dtype": call.dtype}
    case.call()
    recorded = trace(case.fn, *case.args, kwargs=dict(case.kwargs), live=True)
    costs = [cost_of(op) for op in recorded.ops]
    row["ops"] = [op.name for op, cost in zip(recorded.ops, costs, strict=True) if cost.family != "view"]
    row["unmodelled"] = sorted(
        {op.name for op, cost in zip(recorded.ops, costs, strict=True) if cost.model != "formula"}
    )
    row["bytes"] = sum(cost.work.bytes for cost in costs)
    row["bounds"] = bounds_of(recorded, machine)
    row["times"] = {}
    caches: tuple[Literal["cold", "hot"], ...] = ("cold", "hot") if row["bytes"] <= HOT_BYTES else ("cold",)
    for cache in caches:
        timing = nearpeak.bench(case, name=call.name, cache=cache, **FAST)
        row["times"][cache] = {
            "seconds": timing.seconds,
            "low": timing.low,
            "high": timing.high + zero_error(timing.method, cache),
            "method": timing.method,
            "flags": [flag.name for flag in timing.flags],
        }
    return row


def run(families: Sequence[str], machine: Machine, limit_seconds: float) -> list[dict[str, Any]]:
    """All calls, until the time is up."""
    rows = []
    start = time.perf_counter()
    for call in calls():
        if call.family not in families:
            continue
        if time.perf_counter() - start > limit_seconds:
            print(f"the time is up before {call.family} {call.name}", file=sys.stderr)
            break
        try:
            rows.append(measure(call, machine))
        except Exception as error:  # one call that this torch does not have must not lose the others
            rows.append({"family": call.family, "name": call.name, "dtype": call.dtype, "error": str(error)[:300]})
            print(f"{call.family} {call.name} {call.dtype}: {str(error).splitlines()[0][:150]}", file=sys.stderr)
        torch.cuda.empty_cache()
    return rows


def dry(families: Sequence[str], machine: Machine) -> None:
    """Builds every call on fake tensors and estimates it."""
    failed = unmodelled = total = 0
    for call in calls():
        if call.family not in families:
            continue
        total += 1
        try:
            with nearpeak.fake():
                case = call.build()
            found = nearpeak.estimate(case, on=machine)
        except Exception as error:
            failed += 1
            print(f"{call.family} {call.name} {call.dtype}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            continue
        if found.coverage.unmodelled:
            unmodelled += 1
            print(f"{call.family} {call.name} {call.dtype}: without a formula {dict(found.coverage.unmodelled)}")
    print(f"{total} calls, {failed} failed, {unmodelled} with ops that have no formula")


def ratios(
    rows: Sequence[dict[str, Any]], ceilings: str, end: str = "seconds"
) -> list[tuple[float, str, dict[str, Any]]]:
    """Time over bound with the state of the cache and the row, the smallest first."""
    found = [
        (row["times"][cache][end] / row["bounds"][cache][ceilings], cache, row)
        for row in rows
        for cache in row.get("times", {})
        if row["bounds"][cache][ceilings] > 0
    ]
    return sorted(found, key=lambda item: item[0])


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures that decide."""
    result: dict[str, Any] = {
        "calls": sum("times" in row for row in rows),
        "measurements": sum(len(row.get("times", {})) for row in rows),
        "errors": sum("error" in row for row in rows),
    }
    for ceilings in CEILINGS:
        upper = ratios(rows, ceilings, "high")
        below = [item for item in upper if item[0] < 1.0]
        result[ceilings] = {
            "below": len(below),
            "share": len(below) / len(upper) if upper else 0.0,
            "worst": upper[0][0] if upper else None,
            "names": [
                f"{row['family']} {row['name']} {row['dtype']} {cache}: {ratio:.3f}" for ratio, cache, row in below
            ],
        }
    return result


WIDTHS = (12, 9, 9, 12, 9, 9)


def tightness(rows: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """By family: the number of calls; the best, median and worst time over bound, with a cold and with a hot cache."""
    table = []
    for family in FAMILIES:
        own = [row for row in rows if row["family"] == family and "times" in row]
        figures: list[float] = []
        for cache in ("cold", "hot"):
            found = sorted(ratio for ratio, state, _ in ratios(own, "achievable") if state == cache)
            figures += [found[0], statistics.median(found), found[-1]] if found else []
        table.append((family, len(own), *figures))
    return table


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table of the documentation."""
    lines = ["| family | calls | cold: best | median | worst | hot: best | median | worst |", "| --- |" + " ---: |" * 7]
    for family, count, *figures in tightness(rows):
        lines.append(f"| {family} | {count} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |")
    return "\n".join(lines)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The tightness by family, what breaks its bound, and the nearest to it."""
    columns = "".join(f"{f'{cache}: best':>12}{'median':>9}{'worst':>9}" for cache in ("cold", "hot"))
    print(f"{'family':15}{'calls':>6}{columns}")
    for family, count, *figures in tightness(rows):
        print(
            f"{family:15}{count:6}"
            + "".join(f"{figure:{width}.2f}" for figure, width in zip(figures, WIDTHS, strict=False))
        )
    for row in rows:
        if row.get("unmodelled"):
            print(f"without a formula: {row['family']} {row['name']}: {', '.join(row['unmodelled'])}")
    found = summary(rows)
    print(f"\n{found['calls']} calls, {found['measurements']} measurements, {found['errors']} could not run")
    for ceilings in CEILINGS:
        part = found[ceilings]
        smallest = f"smallest ratio {part['worst']:.3f}" if part["worst"] is not None else "nothing measured"
        print(f"below the bound at {ceilings} ceilings: {part['below']} ({part['share']:.2%}), {smallest}")
        for name in part["names"]:
            print(f"    {name}")
    print("nearest to the bound at achievable ceilings:")
    for ratio, cache, row in ratios(rows, "achievable")[:12]:
        print(f"    {ratio:.3f}  {row['family']} {row['name']} {row['dtype']} {cache}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", action="append", choices=tuple(FAMILIES), help="only this family (may be repeated)")
    parser.add_argument("--dry", action="store_true", help="on fake tensors, without timing")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the tables of a run")
    parser.add_argument("--markdown", action="store_true", help="with --show: the table of the documentation")
    parser.add_argument("--limit", type=float, default=540.0, metavar="SECONDS", help="stop after this time (540)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    families = arguments.family or tuple(FAMILIES)
    if arguments.show:
        rows = json.loads(arguments.show.read_text())["rows"]
        print(markdown(rows)) if arguments.markdown else show(rows)
        return 0
    if arguments.dry:
        dry(families, nearpeak.machine("h200-sxm"))
        return 0
    torch.manual_seed(0)
    machine = this_machine(calibrate=True)
    start = time.perf_counter()
    rows = run(families, machine, arguments.limit)
    if arguments.json:
        result = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine.name,
            "torch": torch.__version__,
            "bandwidth": machine.achievable.bandwidth,
            "matrix": dict(machine.achievable.matrix),
            "cache_bandwidth": machine.achievable.cache_bandwidth,
            "seconds": time.perf_counter() - start,
            "summary": summary(rows),
            "rows": rows,
        }
        arguments.json.write_text(
            json.dumps(result, indent=None, separators=(",", ":")).replace('{"family"', '\n{"family"') + "\n"
        )
    show(rows)
    found = summary(rows)
    sound = not found["theoretical"]["below"] and found["achievable"]["share"] <= ALLOWED_SHARE
    return 0 if sound and (found["achievable"]["worst"] or 1.0) >= 1 - ALLOWED_EXCESS else 1


if __name__ == "__main__":
    raise SystemExit(main())
