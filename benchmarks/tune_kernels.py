"""Measures which configuration of each kernel is fastest on this GPU, and writes the table that the kernels use.

    PYTHONPATH=src python benchmarks/tune_kernels.py --table src/nearpeak/kernels/tables/sm90.json

Kernels of different candidates are compiled by several processes first. Then all candidates for one size are measured
in turns. One that does not reproduce the result of the default is left out and named. Entries of the table for
operations or sizes that are not measured now stay as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kernel_cases import KernelCase, row_cases
from kernel_timing import in_turns
from kernels import backward_ways, forward_ways

from nearpeak.kernels import configs
from nearpeak.kernels.jit import dropout, gated, norms, norms_backward, rotary, softmax_configs

ROUNDS = 5
MARGIN = 0.005
"""A candidate must be faster than the default by this share."""
SAME = 2e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Tunable:
    """One entry of the table: a kernel at a size, measured through an operation."""

    kernel: str
    size: int
    candidates: list[dict[str, Any]]
    case: KernelCase
    backward: bool


def tunables(operations: Sequence[str] | None) -> Iterator[Tunable]:
    for case in row_cases():
        if operations is not None and case.operation not in operations:
            continue
        for kernel, backward, size, candidates in _kernels(case):
            yield Tunable(kernel=kernel, size=size, candidates=candidates, case=case, backward=backward)


def _kernels(case: KernelCase) -> Iterator[tuple[str, bool, int, list[dict[str, Any]]]]:
    columns, elements = case.columns, case.rows * case.columns
    if case.operation == "softmax":
        yield "softmax", False, columns, softmax_configs.candidates(columns)
        yield "softmax_backward", True, columns, softmax_configs.candidates(columns, backward=True)
    elif case.operation == "rms_norm":  # the others have the same kernels
        yield "norm_forward", False, columns, norms.candidates(columns)
        yield "norm_backward", True, columns, norms_backward.candidates(columns)
    elif case.operation == "swiglu":
        # contiguous tensors are one row to these kernels
        yield "gated_forward", False, elements, gated.candidates(elements)
        yield "gated_backward", True, elements, gated.candidates(elements)
    elif case.operation == "dropout_add":
        yield "dropout_add", False, elements, dropout.candidates(elements)
    elif case.operation == "rotary":
        yield "rotary", False, 128, rotary.candidates(128, columns // 128)


def using(kernel: str, candidate: dict[str, Any] | None) -> None:
    """From now on a kernel is launched with this candidate, whatever its size; None: by its heuristic."""
    table = configs._table(_generation())
    if candidate is None:
        table.pop(kernel, None)
    else:
        table[kernel] = [{"up_to": float("inf"), **candidate}]
    configs._tuned.cache_clear()


def _generation() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def compile_share(wanted: Sequence[Tunable], share: int, shares: int) -> None:
    """Runs every so many-th candidate once, so that its kernel is in Triton's cache."""
    number = 0
    for tunable in wanted:
        inputs: list[torch.Tensor] | None = None
        for candidate in tunable.candidates:
            number += 1
            if number % shares != share:
                continue
            inputs = inputs or tunable.case.inputs()
            using(tunable.kernel, candidate)
            try:
                _way(tunable, inputs)()
            except Exception as error:
                print(f"{tunable.kernel} {tunable.size} {candidate}: {str(error)[:120]}", file=sys.stderr)
    torch.cuda.synchronize()


def _way(tunable: Tunable, inputs: Sequence[torch.Tensor]) -> Callable[[], Any]:
    make = backward_ways if tunable.backward else forward_ways
    return make(tunable.case, inputs, only="nearpeak")["nearpeak"]


def measured(tunable: Tunable) -> dict[str, Any]:
    """The times of all candidates of one entry, the fastest first."""
    inputs = tunable.case.inputs()
    using(tunable.kernel, None)
    way = _way(tunable, inputs)
    right = _tensors(way())
    ways: dict[str, Callable[[], Any]] = {"default": _with(tunable.kernel, None, way)}
    failed = []
    for candidate in tunable.candidates:
        one = _with(tunable.kernel, candidate, way)
        try:
            found = _tensors(one())
            torch.cuda.synchronize()
        except Exception as error:
            failed.append({"candidate": candidate, "why": str(error)[:200]})
            continue
        if tunable.case.operation != "dropout_add" and not all(map(_alike, found, right)):
            failed.append({"candidate": candidate, "why": "another result than the default"})
            continue
        ways[json.dumps(candidate)] = one
    del right
    seconds = in_turns(ways, ROUNDS)
    order = sorted(seconds, key=lambda name: seconds[name])
    return {
        "kernel": tunable.kernel,
        "size": tunable.size,
        "rows": tunable.case.rows,
        "default_s": seconds["default"],
        "best_s": seconds[order[0]],
        "best": None if order[0] == "default" else json.loads(order[0]),
        "of_peak": (tunable.case.backward_bytes if tunable.backward else tunable.case.forward_bytes)
        / seconds[order[0]]
        / 1e12,
        "seconds": {name: seconds[name] for name in order},
        "failed": failed,
    }


def _with(kernel: str, candidate: dict[str, Any] | None, way: Callable[[], Any]) -> Callable[[], Any]:
    def call() -> Any:
        using(kernel, candidate)
        return way()

    return call


def _tensors(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    difference = (one.float() - other.float()).abs().max()
    return bool(difference <= SAME * other.float().abs().max())


def merged(table: dict[str, list[dict[str, Any]]], rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The table with what was measured; a default that nothing beats has no entry."""
    for row in rows:
        entries = {entry["up_to"]: entry for entry in table.get(row["kernel"], [])}
        entries.pop(row["size"], None)
        if row["best"] is not None and row["best_s"] < (1 - MARGIN) * row["default_s"]:
            entries[row["size"]] = {"up_to": row["size"], **row["best"]}
        table[row["kernel"]] = [entries[size] for size in sorted(entries)]
    return {kernel: table[kernel] for kernel in sorted(table) if table[kernel]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, help="the table to renew")
    parser.add_argument("--json", type=Path, help="write all times here")
    parser.add_argument("--operations", help="only these, with commas between")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 14), help="that compile")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    wanted = list(tunables(arguments.operations.split(",") if arguments.operations else None))
    if arguments.share:
        compile_share(wanted, *map(int, arguments.share.split("/")))
        return 0
    start = time.perf_counter()
    command = [sys.executable, __file__, *(["--operations", arguments.operations] if arguments.operations else [])]
    shares = [f"{share}/{arguments.processes}" for share in range(arguments.processes)]
    for process in [subprocess.Popen([*command, "--share", share]) for share in shares]:
        process.wait()
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    rows = []
    for tunable in wanted:
        row = measured(tunable)
        rows.append(row)
        gained = row["default_s"] / row["best_s"] - 1
        print(
            f"{row['kernel']} {row['rows']} x {row['size']}: {row['best_s'] * 1e6:.1f} us, {row['of_peak']:.2f} TB/s, "
            f"{gained * 100:.1f} % over the default, {len(row['failed'])} failed: {row['best']}",
            flush=True,
        )
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        torch.cuda.empty_cache()
    if arguments.table:
        table = json.loads(arguments.table.read_text(encoding="utf-8"))
        arguments.table.write_text(json.dumps(merged(table, rows), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
