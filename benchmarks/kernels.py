"""The kernels of nearpeak beside everything that a user could call instead: on this GPU, in one run.

    PYTHONPATH=src python benchmarks/kernels.py --json benchmarks/results/kernels.json
    python benchmarks/kernels.py --show benchmarks/results/kernels_h200.json

For each operation and size all ways are checked against torch in float64, and timed in turns: device time with cold
caches. "Of copy" is the rate at which a way moves the bytes that the operation must move at the least, as a share of
the rate of a copy, as the calibration of this machine has it.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

COLUMNS = ("operation", "pass", "rows x columns", "us", "of copy", "best other", "us", "times faster")


def forward_ways(case: Any, inputs: Sequence[Any], only: str | None = None) -> dict[str, Callable[[], Any]]:
    import torch

    def bound(way: Any) -> Callable[[], Any]:
        def call() -> Any:
            with torch.no_grad():
                return way(*inputs)

        return call

    return {name: bound(way) for name, way in case.ways(only).items()}


def backward_ways(case: Any, inputs: Sequence[Any], only: str | None = None) -> dict[str, Callable[[], Any]]:
    import torch

    found = {}
    wanted = [one for one in inputs if one.requires_grad]
    for name, way in case.ways(only).items():
        results = way(*inputs)
        results = [one for one in (results if isinstance(results, tuple) else (results,)) if one.requires_grad]
        upstream = [torch.randn_like(one) for one in results]
        found[name] = lambda results=results, upstream=upstream: torch.autograd.grad(
            results, wanted, upstream, retain_graph=True
        )
    return found


def without_failures(ways: Mapping[str, Callable[[], Any]]) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """The ways that run at all, and why the others do not: a peer may have a largest size."""
    running, failed = {}, {}
    for name, way in ways.items():
        try:
            way()
            running[name] = way
        except Exception as error:
            if name == "nearpeak":
                raise
            failed[name] = f"{type(error).__name__}: {str(error)[:200]}"
    return running, failed


def errors(case: Any) -> dict[str, float]:
    """The largest error of the first result of each way against float64, relative to the largest value."""
    import torch

    inputs = case.inputs()
    wide = [one.detach().double() if one.is_floating_point() else one for one in inputs]
    with torch.no_grad():
        exact = case.eager(*wide)
        exact = exact[0] if isinstance(exact, tuple) else exact
        found = {}
        for name, way in case.ways().items():
            if name == "compile":
                continue
            try:
                result = way(*[one.detach().clone() for one in inputs])
            except Exception:
                continue
            result = result[0] if isinstance(result, tuple) else result
            found[name] = float((result.double() - exact).abs().max() / exact.abs().max())
    return found


def measured(case: Any, copy_rate: float, check: bool) -> list[dict[str, Any]]:
    import torch
    from kernel_timing import in_turns

    rows = []
    is_random = case.operation == "dropout_add"
    found = errors(case) if check and not is_random else {}
    inputs = case.inputs()
    for name, make, least in (
        ("forward", forward_ways, case.forward_bytes),
        ("backward", backward_ways, case.backward_bytes),
    ):
        if least is None:
            continue
        ways, failed = without_failures(make(case, inputs))
        seconds = in_turns(ways)
        rows.append(
            {
                "operation": case.operation,
                "pass": name,
                "rows": case.rows,
                "columns": case.columns,
                "bytes": least,
                "seconds": seconds,
                "of_copy": least / seconds["nearpeak"] / copy_rate,
                "errors": found if name == "forward" else {},
                "failed": failed,
            }
        )
    del inputs
    gc.collect()
    torch.cuda.empty_cache()
    return rows


def line(row: Mapping[str, Any]) -> str:
    seconds = dict(row["seconds"])
    own = seconds.pop("nearpeak")
    best = min(seconds, key=lambda name: seconds[name]) if seconds else ""
    beside = (best, f"{seconds[best] * 1e6:.0f}", f"{seconds[best] / own:.2f}") if best else ("", "", "")
    size = f"{row['rows']} x {row['columns']}"
    cells = (row["operation"], row["pass"], size, f"{own * 1e6:.0f}", f"{row['of_copy'] * 100:.0f}%", *beside)
    return "| " + " | ".join(cells) + " |"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = "| " + " | ".join(COLUMNS) + " |\n| --- | --- | --- | ---: | ---: | --- | ---: | ---: |"
    return "\n".join([head, *map(line, rows)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--show", type=Path, help="print the table of results that were written, and measure nothing")
    parser.add_argument("--operations", help="only these, with commas between")
    parser.add_argument("--no-check", action="store_true", help="leave the comparison with float64 out")
    arguments = parser.parse_args()
    if arguments.show:
        print(table(json.loads(arguments.show.read_text(encoding="utf-8"))["rows"]))
        return 0

    from kernel_cases import row_cases

    import nearpeak

    machine = nearpeak.machine()
    copy_rate = machine.achievable.ceilings["bandwidth.copy"].value
    wanted = set(arguments.operations.split(",")) if arguments.operations else None
    rows = []
    for case in row_cases():
        if wanted is not None and case.operation not in wanted:
            continue
        try:
            fresh = measured(case, copy_rate, not arguments.no_check)
        except Exception:
            traceback.print_exc()
            print(f"{case.operation} at {case.rows} x {case.columns} failed", file=sys.stderr)
            continue
        rows += fresh
        for row in fresh:
            print(line(row), flush=True)
        if arguments.json:
            date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            content = {"date": date, "machine": machine.name, "copy_bytes_per_second": copy_rate, "rows": rows}
            arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
