"""Measures which configuration of each kernel is fastest on this GPU, and writes the table that the kernels use.

    PYTHONPATH=src python benchmarks/tune_kernels.py --table src/nearpeak/kernels/tables/sm90.json

Kernels of different candidates are compiled by several processes first; what is not compiled in time is left out. Then
all candidates for one size are measured in turns. One that does not reproduce the result of the default, or its own, is
left out and named. Entries of the table for operations or sizes that are not measured now stay as they are.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_jobs import DONE, Jobs, compiled_by, set_caches, work

if TYPE_CHECKING:
    import torch
    from kernel_tunable import Tunable

SOURCE = Path(__file__).resolve().parent.parent / "src"
ROUNDS = 4
MOST = 16
"""Candidates of an entry that are measured, at most."""
TOGETHER = 4
"""Candidates that a process compiles before it looks for others."""
COMPILE_SECONDS = 170.0
MARGIN = 0.005
"""A candidate must be faster than the default by this share."""
SAME = 2e-2
REPEATS = 3
"""How often a candidate must give the same to the last bit: some products of many warps do not."""


def wanted_tunables(
    operations: Sequence[str] | None, at: Sequence[int] | None = None, variant: str | None = None, **given: Any
) -> list[Tunable]:
    """Those of these operations, and of kernels by name, and of these sizes.

    With a variant, only candidates of it, and what the table has now.
    """
    from kernel_tunables import tunables

    found = [
        one
        for one in tunables(**given)
        if (operations is None or one.operation in operations or one.kernel in operations)
        and (at is None or one.where.size in at)
    ]
    if variant is None:
        return found
    return [
        replace(one, candidates=some + _present(one))
        for one in found
        if (some := [candidate for candidate in one.candidates if candidate.get("variant") == variant])
    ]


def _present(tunable: Tunable) -> list[dict[str, Any]]:
    """What the table has for an entry."""
    import torch

    from nearpeak.kernels.configs import tuned

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    found = tuned(tunable.kernel, tunable.where.size, device)
    return [] if found is None else [found]


def spread(candidates: Sequence[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """As many as allowed, from the first to the last."""
    if len(candidates) <= most:
        return list(candidates)
    step = (len(candidates) - 1) / max(most - 1, 1)
    return [candidates[round(number * step)] for number in range(most)]


def using(kernel: str, candidate: dict[str, Any] | None) -> None:
    """From now on a kernel is launched with this candidate, whatever its size; None: by its heuristic."""
    from nearpeak.kernels import configs

    table = configs._table(_generation())
    if candidate is None:
        table.pop(kernel, None)
    else:
        table[kernel] = [{"up_to": float("inf"), **candidate}]
    configs._tuned.cache_clear()


def _generation() -> int:
    import torch

    if not torch.cuda.is_available():
        return 90
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def compile_jobs(
    wanted: Sequence[Tunable], most: int
) -> Iterator[tuple[str, Callable[[], dict[str, Callable[[], Any]]]]]:
    """All candidates, some at a time."""
    for number, tunable in enumerate(wanted):
        candidates = spread(tunable.candidates, most)
        for first in range(0, len(candidates), TOGETHER):
            some = dict(enumerate(candidates[first : first + TOGETHER], first))
            yield f"{number}-{first}", lambda tunable=tunable, some=some: _steps(tunable, some)  # type: ignore[misc]


def _steps(tunable: Tunable, candidates: dict[int, dict[str, Any]]) -> dict[str, Callable[[], Any]]:
    from nearpeak.kernels import configs

    configs._table(_generation()).clear()  # what another job left there
    using(tunable.kernel, None)
    way = tunable.make()
    return {str(number): _with(tunable.kernel, candidate, way) for number, candidate in candidates.items()}


def compiled(tunable: Tunable, number: int, most: int, jobs: Jobs | None) -> tuple[list[Any], list[Any]]:
    """The candidates that can be measured, and those that failed with why."""
    found, failed = [], []
    for place, candidate in enumerate(spread(tunable.candidates, most)):
        name = f"{number}-{place // TOGETHER * TOGETHER}"
        outcome = DONE if jobs is None else jobs.outcome(name, "all") or jobs.outcome(name, str(place))
        if outcome == DONE:
            found.append(candidate)
        else:
            failed.append({"candidate": candidate, "why": outcome or "was not compiled in time"})
    return found, failed


def measured(tunable: Tunable, candidates: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The times of candidates of one entry, the fastest first."""
    from kernel_timing import in_turns

    using(tunable.kernel, None)
    way = tunable.make()
    right = _tensors(way())
    if tunable.kernel == "adamw":
        right = []
    ways: dict[str, Callable[[], Any]] = {"default": _with(tunable.kernel, None, way)}
    failed = []
    for candidate in candidates:
        one = _with(tunable.kernel, candidate, way)
        try:
            found = _tensors(one())
            if tunable.checked and not all(map(_alike, found, right)):
                failed.append({"candidate": candidate, "why": "another result than the default"})
                continue
            if tunable.checked and right and not all(_repeats(found, one) for _ in range(REPEATS)):
                failed.append({"candidate": candidate, "why": "another result in each run"})
                continue
        except Exception as error:
            failed.append({"candidate": candidate, "why": str(error)[:200]})
            continue
        ways[json.dumps(candidate)] = one
    del right
    seconds = in_turns(ways, ROUNDS, may_wait=False)
    using(tunable.kernel, None)
    order = sorted(seconds, key=lambda name: seconds[name])
    return {
        "kernel": tunable.kernel,
        **tunable.where._asdict(),
        "default_s": seconds["default"],
        "best_s": seconds[order[0]],
        "best": None if order[0] == "default" else json.loads(order[0]),
        "terabytes_per_second": tunable.least_bytes / seconds[order[0]] / 1e12,
        "seconds": {name: seconds[name] for name in order},
        "failed": failed,
    }


def _with(kernel: str, candidate: dict[str, Any] | None, way: Callable[[], Any]) -> Callable[[], Any]:
    def call() -> Any:
        using(kernel, candidate)
        return way()

    return call


def _tensors(result: Any) -> list[torch.Tensor]:
    if result is None:
        return []
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _repeats(found: Sequence[torch.Tensor], way: Callable[[], Any]) -> bool:
    import torch

    return all(map(torch.equal, found, _tensors(way())))


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    difference = (one.float() - other.float()).abs().max()
    return bool(difference <= SAME * other.float().abs().max())


def merged(table: dict[str, list[dict[str, Any]]], rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The table with what was measured; a default that nothing beats has no entry."""
    for row in rows:
        entries = {entry["up_to"]: entry for entry in table.get(row["kernel"], [])}
        entries.pop(row["up_to"], None)
        if row["best"] is not None and row["best_s"] < (1 - MARGIN) * row["default_s"]:
            entries[row["up_to"]] = {"above": row["above"], "up_to": row["up_to"], **row["best"]}
        table[row["kernel"]] = [entries[size] for size in sorted(entries)]
    return {kernel: table[kernel] for kernel in sorted(table) if table[kernel]}


def line(row: dict[str, Any]) -> str:
    gained = row["default_s"] / row["best_s"] - 1
    return (
        f"{row['kernel']} {row['size']}: {row['best_s'] * 1e6:.1f} us, {row['terabytes_per_second']:.2f} TB/s, "
        f"{gained * 100:.1f} % over the default, {len(row['seconds']) - 1} measured, {len(row['failed'])} failed: "
        f"{row['best']}"
    )


def tuned_rows(wanted: Sequence[Tunable], most: int, jobs: Jobs | None) -> Iterator[dict[str, Any]]:
    for number, tunable in enumerate(wanted):
        candidates, failed = compiled(tunable, number, most, jobs)
        try:
            row = measured(tunable, candidates)
        except Exception as error:
            print(f"{tunable.kernel} {tunable.where.size} failed: {error}", file=sys.stderr, flush=True)
            continue
        row["failed"] += failed
        yield row
        clean()


def clean() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, help="the table to renew")
    parser.add_argument("--json", type=Path, help="write all times here")
    parser.add_argument("--operations", help="only these, or kernels, with commas between")
    parser.add_argument("--sizes", help="only these, with commas between")
    parser.add_argument("--variant", help="only candidates of this variant, beside what the table has")
    parser.add_argument("--most", type=int, default=MOST, help="candidates of an entry")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on a CPU too: whether everything runs")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 14), help="that compile; 0: none")
    parser.add_argument("--compile-seconds", type=float, default=COMPILE_SECONDS, help="for compiling, at most")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rehearse and arguments.table and arguments.table.resolve().is_relative_to(SOURCE):
        parser.error("--rehearse is not for the table of the package")
    set_caches()
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.rehearse and device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    from kernel_tunables import REHEARSAL

    from nearpeak import kernels
    from nearpeak.kernels.plans import Plans

    Plans.enabled = False  # a call that is remembered would not look at another candidate
    sizes = {"sizes": REHEARSAL} if arguments.rehearse else {}
    operations = arguments.operations.split(",") if arguments.operations else None
    at = [int(size) for size in arguments.sizes.split(",")] if arguments.sizes else None
    wanted = wanted_tunables(operations, at, arguments.variant, device=device, **sizes)
    with kernels.using("require"):
        if arguments.work:
            work(Jobs(arguments.work), compile_jobs(wanted, arguments.most), clean)
            return 0
        start = time.perf_counter()
        rows = []
        with tempfile.TemporaryDirectory(prefix="nearpeak-jobs-") as folder:
            if arguments.processes:
                command = [sys.executable, __file__, "--most", str(arguments.most), "--work", folder]
                command += ["--operations", arguments.operations] if arguments.operations else []
                command += ["--sizes", arguments.sizes] if arguments.sizes else []
                command += ["--variant", arguments.variant] if arguments.variant else []
                command += ["--rehearse"] if arguments.rehearse else []
                took = compiled_by(command, arguments.processes, arguments.compile_seconds)
                print(f"compiled in {took:.0f} s", flush=True)
            for row in tuned_rows(wanted, arguments.most, Jobs(Path(folder)) if arguments.processes else None):
                rows.append(row)
                print(f"{time.perf_counter() - start:6.1f} s  {line(row)}", flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
                if arguments.table:  # after each: what was measured is kept if the rest is not
                    table = json.loads(arguments.table.read_text(encoding="utf-8"))
                    arguments.table.write_text(json.dumps(merged(table, rows), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
