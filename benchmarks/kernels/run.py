"""The kernels of nearpeak beside all alternatives, on this GPU, in one run.

    PYTHONPATH=src python -m benchmarks.kernels --json benchmarks/results/kernels_h200.json
    python -m benchmarks.kernels --show benchmarks/results/kernels_h200.json

Sections, all or those of `--only`: "losses" (both passes, with memory), "copies" (float8, transposes, tokens, AdamW),
"launch" (host time of calls), "rows" (operations on rows, each pass), "attention" (each pass), "decoding" (with all
kinds of caches), "attention_memory" (long sequences), "products" (GEMMs with epilogues), "experts" (grouped GEMMs and
MoE layers) and "linear_attention" (by sequence length). Several processes compile everything first. Then one process
times all implementations of an operation in turns: GPU time with cold caches, and in most sections the error against
float64. "Of copy" is the rate of the minimum traffic of an operation over the rate of a copy in the same run. Sections
of the file that are not measured are kept.

    python -m benchmarks.kernels --random 100 --cells 400 --limit 550 --leave-out liger,others --json random_100.json
    python -m benchmarks.kernels --show random_100.json random_101.json

measures random cells in place of sections: operations and shapes as models have them, drawn by a seed (`drawing` has
the ranges), each checked against float32 and beside every peer (`drawn_cases`) but for those of `--leave-out`. A run
that `--limit` ended goes on with `--without` its file, into another. A table
of choices is fitted to cells with all backends, "others"; a score needs none of them. `--show` merges the files of
several runs, and has a table by operation, one by size of heads, and the slowest cells (`score`).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib
import importlib.metadata
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.kernels import drawing, score
from benchmarks.kernels.jobs import (
    DONE,
    LATE,
    Jobs,
    run_workers,
    set_caches,
    set_compiler,
    without_failures,
    work_through,
)
from benchmarks.kernels.tables import TABLES, shown

COMPILED_WAYS = ("nearpeak", "compile", "liger", "portable", "flex")
SELF_MEASURED = ("attention", "decoding", "attention_memory", "products", "experts", "linear_attention")
"""Sections whose cases say what has to be compiled, `steps`, and measure themselves, `rows`."""
CASES = {
    "rows": "cases:row_cases",
    "copies": "copies:copy_cases",
    "losses": "losses:loss_cases",
    "attention": "attention:attention_cases",
    "decoding": "attention:decoding_cases",
    "attention_memory": "attention:memory_cases",
    "products": "gemm:product_cases",
    "experts": "moe:expert_cases",
    "linear_attention": "linear_attention:linear_cases",
}
"""By section, the module of this package and the function that makes its cases."""
Ways = dict[str, Callable[[], Any]]


class Setting:
    """What is measured, where, and what is known of it before."""

    def __init__(self, device: str = "cuda", jobs: Jobs | None = None, check: bool = True, **sizes: Any) -> None:
        self.device, self.jobs, self.check, self.sizes = device, jobs, check, sizes
        self.copy_rate = 1.0
        self.operations: set[str] | None = None
        self.left_out: set[str] = set()

    def wants(self, operation: str) -> bool:
        return self.operations is None or operation in self.operations or operation.split()[0] in self.operations

    def cases(self, section: str) -> Iterator[Any]:
        """The cases of a section; of "losses" what makes them."""
        module, _, name = CASES[section].partition(":")
        make: Any = getattr(importlib.import_module(f"benchmarks.kernels.{module}"), name)
        given = {section: self.sizes[section]} if section in self.sizes else {}
        return make(*given.values(), device=self.device)  # type: ignore[no-any-return]

    def allowed(self, ways: Ways, job: str, compiled: Sequence[str] = COMPILED_WAYS) -> tuple[Ways, dict[str, str]]:
        """The ways that were compiled, and why the others were not; `compiled` are those that had to be."""
        if self.jobs is None:
            return ways, {}
        failed = {}
        whole = self.jobs.outcome(job, "all")
        for name in compiled:
            outcome = whole or self.jobs.outcome(job, name)
            if name not in ways or outcome == DONE or (outcome is None and name == "nearpeak"):
                continue
            if name == "nearpeak":
                raise RuntimeError(outcome)
            failed[name] = outcome or LATE
        return {name: way for name, way in ways.items() if name not in failed}, failed


def rehearsal() -> dict[str, Any]:
    """Sizes at which all that is measured runs in seconds, also in Triton's interpreter: whether it runs at all."""
    from benchmarks.kernels.attention import AttentionSizes, DecodingSizes, MemorySizes
    from benchmarks.kernels.copies import CopySizes
    from benchmarks.kernels.gemm import ProductSizes
    from benchmarks.kernels.linear_attention import LinearSizes
    from benchmarks.kernels.losses import LossSizes
    from benchmarks.kernels.moe import ExpertSizes

    copies = CopySizes(side=128, tokens=6, choices=2, experts=4, hidden=32, width=8, layers=2, vocabulary=16)
    losses = LossSizes(tokens=6, hidden=16, vocabulary=96)
    return {
        "rows": [(4, 256)],
        "copies": copies,
        "losses": losses,
        "launch": {"side": 16},
        "attention": AttentionSizes(together=48, tokens=(24,), heads={16: 1}, repeats=2),
        "decoding": DecodingSizes(sequences=((1, 33), (2, 5)), heads=4, key_heads=2, dim=16),
        "attention_memory": MemorySizes(dim=16, beside_others=32, alone=64),
        "products": ProductSizes(cubes=(32, 48), gradients=32, tokens=24, features=32, hidden=40, eight=128),
        "experts": ExpertSizes(experts=4, tokens=10, choices=2, columns=64, inner=32, routings=("even", "uniform")),
        "linear_attention": LinearSizes(together=16, tokens=(8, 16), heads=1, dim=16),
    }


COPY_BYTES = 2**30


def forward_ways(case: Any, inputs: Sequence[Any], only: str | None = None) -> Ways:
    import torch

    def bound(way: Any, given: Sequence[Any]) -> Callable[[], Any]:
        def call() -> Any:
            with torch.no_grad():
                return way(*given)

        return call

    return {name: bound(way, _given(name, inputs)) for name, way in case.ways(only).items()}


def backward_ways(case: Any, inputs: Sequence[Any], only: str | None = None) -> Ways:
    """A way that fails in its forward pass raises that error when it is called."""
    import torch

    def bound(way: Any, given: Sequence[Any]) -> Callable[[], Any]:
        wanted = [one for one in given if one.requires_grad]
        kept: list[Any] = []

        def call() -> Any:
            if not kept:
                results = way(*given)
                results = results if isinstance(results, tuple) else (results,)
                results = [one for one in results if one.requires_grad]
                kept.extend([results, [torch.randn_like(one) for one in results]])
            return torch.autograd.grad(kept[0], wanted, kept[1], retain_graph=True)

        return call

    return {name: bound(way, _given(name, inputs)) for name, way in case.ways(only).items()}


def _given(name: str, inputs: Sequence[Any]) -> Sequence[Any]:
    """Liger overwrites its inputs in some passes: it has its own."""
    if name != "liger":
        return inputs
    return [one.detach().clone().requires_grad_(one.requires_grad) for one in inputs]


PASSES: dict[str, Callable[..., Ways]] = {"forward": forward_ways, "backward": backward_ways}


def least_bytes(case: Any, name: str) -> int | None:
    minimum: int | None = case.forward_bytes if name == "forward" else case.backward_bytes
    return minimum


def errors(case: Any, without: Mapping[str, str]) -> dict[str, float]:
    """The largest error of the first result of each way against float64, relative to the largest value."""
    import torch

    inputs = case.inputs()
    wide = [one.detach().double() if one.is_floating_point() else one for one in inputs]
    with torch.no_grad():
        exact = case.eager(*wide)
        exact = exact[0] if isinstance(exact, tuple) else exact
        by_way = {}
        for name, way in case.ways().items():
            if name == "compile" or name in without:
                continue
            try:
                result = way(*[one.detach().clone() for one in inputs])
            except Exception:  # said where it is timed
                continue
            result = result[0] if isinstance(result, tuple) else result
            by_way[name] = float((result.double() - exact).abs().max() / exact.abs().max())
    return by_way


def measured(case: Any, setting: Setting, section: str, number: int) -> list[dict[str, Any]]:
    """The rows of a case, one for each pass."""
    from benchmarks.kernels.timing import in_turns

    rows = []
    inputs = case.inputs()
    for name, make in PASSES.items():
        least = least_bytes(case, name)
        if least is None:
            continue
        ways, late = setting.allowed(make(case, inputs), f"{section}-{number}-{name}")
        ways, failed = without_failures(ways)
        waiting: list[str] = []
        seconds = in_turns(ways, waiting=waiting)
        checked = setting.check and case.checked and name == "forward"
        rows.append(
            {
                "operation": case.operation,
                "pass": name,
                "rows": case.rows,
                "columns": case.columns,
                "bytes": least,
                "seconds": seconds,
                "of_copy": least / seconds["nearpeak"] / setting.copy_rate,
                "errors": errors(case, {**late, **failed}) if checked else {},
                "waiting": waiting,
                "failed": {**late, **failed},
                "note": case.note,
            }
        )
        del ways
    return rows


def measured_loss(case: Any, setting: Setting, number: int) -> list[dict[str, Any]]:
    from benchmarks.kernels import timing
    from benchmarks.kernels.timing import extra_bytes, in_turns

    ways, late = setting.allowed(case.ways, f"losses-{number}-both")
    ways, failed = without_failures(ways, case.resets)
    extra = {}
    for name, way in ways.items():
        memory = extra_bytes(way, case.resets.get(name))
        if memory is not None and name != "three products":
            extra[name] = max(memory - case.given_bytes, 0)
    waiting: list[str] = []
    # a block is one call of these: twice as many blocks
    seconds = in_turns(ways, 2 * timing.ROUNDS, resets=case.resets, waiting=waiting)
    products = seconds.get("three products")
    row = {
        "operation": case.operation,
        "tokens": case.tokens,
        "vocabulary": case.vocabulary,
        "seconds": seconds,
        "of_products": {} if products is None else {name: value / products for name, value in seconds.items()},
        "extra_bytes": extra,
        "bar_seconds": case.bar_seconds,
        "waiting": waiting,
        "failed": {**late, **failed},
    }
    return [row]


def measured_launch(case: Any) -> dict[str, Any]:
    import torch

    from benchmarks.kernels.timing import host_in_turns

    with torch.no_grad():
        seconds = host_in_turns({"nearpeak": case.nearpeak, "eager": case.eager})
    ratio = seconds["nearpeak"] / seconds["eager"]
    return {"operation": case.operation, "torch_ops": case.torch_ops, "seconds": seconds, "ratio": ratio}


def measured_copy(device: str, size: int = COPY_BYTES) -> float:
    """The rate of a copy, in bytes that are read or written in a second."""
    import torch

    from benchmarks.kernels.timing import in_turns

    source, target = (torch.randn(size // 2, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size / in_turns({"copy": lambda: target.copy_(source)})["copy"]


SECTIONS = tuple(TABLES)
LOSSES = ("cross_entropy", "linear_cross_entropy")
COMPILE_SECONDS = 150.0
COMPILE_SHARE = 0.4
"""Of the time limit of random cells."""
RANDOM_CELLS = 400


def run_section(section: str, setting: Setting) -> Iterator[tuple[str, Callable[[], list[dict[str, Any]]]]]:
    """Of each case its name, and what measures it."""
    if section == "launch":
        from benchmarks.kernels.launches import launch_cases

        for case in launch_cases(**setting.sizes.get("launch", {}), device=setting.device):
            if setting.wants(case.operation):
                yield case.operation, lambda case=case: [measured_launch(case)]  # type: ignore[misc]
        return
    for number, case in enumerate(setting.cases(section)):
        if section == "losses":
            name = LOSSES[number]
            if setting.wants(name):
                yield name, lambda case=case, number=number: measured_loss(case(), setting, number)  # type: ignore[misc]
        elif section in SELF_MEASURED:
            if setting.wants(case.operation):
                yield case.name, partial(case.rows, setting, f"{section}-{number}")
        elif setting.wants(case.operation):
            yield (
                f"{case.operation} {case.rows} x {case.columns}",
                lambda case=case, number=number: measured(case, setting, section, number),  # type: ignore[misc]
            )


def compile_jobs(sections: Sequence[str], setting: Setting) -> Iterator[tuple[str, Callable[[], Ways]]]:
    """All that has to be compiled: names as `measured` has them, and what makes their steps."""
    for section in sections:
        if section == "launch":
            continue
        for number, case in enumerate(setting.cases(section)):
            if section == "losses":
                if not setting.wants(LOSSES[number]):
                    continue
                yield f"losses-{number}-both", lambda case=case: _reset_first(case())  # type: ignore[misc]
            elif section in SELF_MEASURED:
                if setting.wants(case.operation):
                    yield f"{section}-{number}", case.steps
                    for name, steps in getattr(case, "jobs_apart", dict)().items():
                        yield f"{section}-{name}", steps
            elif setting.wants(case.operation):
                for name, make in PASSES.items():
                    if least_bytes(case, name) is not None:
                        yield (
                            f"{section}-{number}-{name}",
                            lambda case=case, make=make: _compiled(make(case, case.inputs())),  # type: ignore[misc]
                        )


def _compiled(ways: Ways) -> Ways:
    return {name: way for name, way in ways.items() if name in COMPILED_WAYS}


def _reset_first(case: Any) -> Ways:
    def bound(name: str, way: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> None:
            case.resets.get(name, lambda: None)()
            way()

        return call

    return {name: bound(name, way) for name, way in _compiled(case.ways).items()}


def clean() -> None:
    """Forgets what torch compiled for a case, as it keeps no more than 8 variants of a function, and frees memory."""
    import torch

    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure(sections: Sequence[str], setting: Setting, content: dict[str, Any], write: Callable[[], Any]) -> None:
    """Measures into `content`, which is written after each case."""
    start = time.perf_counter()
    for section in sections:
        content[section] = []
        for name, rows in run_section(section, setting):
            print(f"{time.perf_counter() - start:6.1f} s  {section}: {name}", file=sys.stderr, flush=True)
            try:
                content[section] += rows()
            except Exception as error:
                traceback.print_exc()
                content["failed"][f"{section}: {name}"] = f"{type(error).__name__}: {str(error)[:300]}"
            clean()
            write()


def new_content(copy_rate: float) -> dict[str, Any]:
    import torch

    versions = {"torch": str(torch.__version__)}
    for name in ("triton", "liger_kernel"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": versions,
        "copy_bytes_per_second": copy_rate,
        "failed": {},
    }


def started(file: Path | None, fresh: dict[str, Any], sections: Sequence[str]) -> dict[str, Any]:
    """What the file has of other sections of the same machine, with a new head."""
    if file is None or not file.exists():
        return fresh
    before = json.loads(file.read_text(encoding="utf-8"))
    if before.get("machine") != fresh["machine"]:
        return fresh
    return {**fresh, **{name: before[name] for name in SECTIONS if name in before and name not in sections}}


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument(
        "--show", type=Path, nargs="+", help="print the tables of results that were written, and measure nothing"
    )
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between")
    parser.add_argument("--operations", help="only these, with commas between")
    parser.add_argument("--random", type=int, metavar="SEED", help="measure random cells in place of sections")
    parser.add_argument("--cells", type=int, default=RANDOM_CELLS, help="how many of them; a pass of a shape is a cell")
    parser.add_argument(
        "--leave-out", default="", help='of random cells: peers, and "others", the backends that were not chosen'
    )
    parser.add_argument("--without", type=Path, nargs="+", default=[], help="random cells that these files have")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="stop after a random cell that ends later")
    parser.add_argument("--no-check", action="store_true", help="leave the comparison with float64 out")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on a CPU too: whether everything runs")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 16), help="that compile; 0: none")
    parser.add_argument("--compile-seconds", type=float, default=COMPILE_SECONDS, help="for compiling, at most")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    arguments.sections = [name for name in SECTIONS if name in arguments.only.split(",")]
    unknown = set(arguments.only.split(",")) - set(SECTIONS)
    if unknown:
        parser.error(f"there is no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if arguments.random is not None and arguments.operations:
        missing = set(arguments.operations.split(",")) - set(drawing.OPERATIONS)
        if missing:
            parser.error(f"no such operations: {', '.join(sorted(missing))}; there are {', '.join(drawing.OPERATIONS)}")
    return arguments


def show(files: Sequence[Path], only: Sequence[str]) -> str:
    """The tables of a file, or of the random cells of several."""
    contents = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    if all(content.get("format") == score.FORMAT for content in contents):
        return score.shown(score.merged(contents))
    if len(contents) > 1:
        raise SystemExit("--show takes one file of sections, or several of random cells")
    return shown(contents[0], only)


def main() -> int:
    arguments = parsed()
    if arguments.show:
        only = arguments.sections if len(arguments.sections) < len(SECTIONS) else ()
        print(show(arguments.show, only))
        return 0
    start = time.perf_counter()
    set_caches()
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.rehearse and device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    set_compiler()
    setting = Setting(device, check=not arguments.no_check, **(rehearsal() if arguments.rehearse else {}))
    setting.operations = set(arguments.operations.split(",")) if arguments.operations else None
    setting.left_out = set(filter(None, arguments.leave_out.split(",")))
    from benchmarks.kernels import timing
    from nearpeak import kernels

    if arguments.rehearse:
        timing.ROUNDS, timing.CALLS, timing.IN_A_ROW = 1, 4, 2
    with kernels.using("require"):  # a reference that runs in place of a kernel is an error
        return run(arguments, setting) if arguments.random is None else run_random(arguments, setting, start)


def not_in(cells: Sequence[drawing.Cell], contents: Sequence[Mapping[str, Any]]) -> list[drawing.Cell]:
    """The cells that earlier runs did not measure."""
    measured = {(row["seed"], row["number"]) for content in contents for row in content["cells"]}
    return [cell for cell in cells if (cell.seed, cell.number) not in measured]


def run_random(arguments: argparse.Namespace, setting: Setting, start: float) -> int:
    """Random cells until the limit, counted from `start`."""
    from benchmarks.kernels.random_run import compile_jobs, measure_cells, new_random_content

    operations = arguments.operations.split(",") if arguments.operations else None
    if arguments.rehearse:
        cells = drawing.tiny_cells(arguments.random, operations)
    else:
        cells = drawing.cells(arguments.random, arguments.cells, operations)
    cells = not_in(cells, [json.loads(file.read_text(encoding="utf-8")) for file in arguments.without])
    if arguments.work:
        work_through(Jobs(arguments.work), compile_jobs(cells, setting), clean)
        return 0
    with tempfile.TemporaryDirectory(prefix="nearpeak-jobs-") as folder:
        if arguments.processes:
            command = [sys.executable, "-m", "benchmarks.kernels", "--work", folder]
            command += ["--random", str(arguments.random), "--cells", str(arguments.cells)]
            command += ["--leave-out", arguments.leave_out] if arguments.leave_out else []
            command += ["--operations", arguments.operations] if arguments.operations else []
            command += ["--without", *map(str, arguments.without)] if arguments.without else []
            command += ["--rehearse"] if arguments.rehearse else []
            most = min(arguments.compile_seconds, COMPILE_SHARE * (arguments.limit or float("inf")))
            took = run_workers(command, arguments.processes, most)
            print(f"compiled in {took:.0f} s", file=sys.stderr, flush=True)
            setting.jobs = Jobs(Path(folder))
        setting.copy_rate = measured_copy(setting.device, 2**16 if arguments.rehearse else COPY_BYTES)
        content = new_random_content(new_content(setting.copy_rate))
        record = {"seed": arguments.random, "cells": arguments.cells, "operations": operations, "date": content["date"]}
        record["left_out"] = sorted(setting.left_out)
        content["runs"].append(record)

        def write() -> None:
            record["seconds"], record["measured"] = time.perf_counter() - start, len(content["cells"])
            if arguments.json:
                arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

        write()
        until = None if arguments.limit is None else start + arguments.limit
        if not measure_cells(cells, setting, content, write, clean, until):
            print("stopped before the last cell", file=sys.stderr)
    print(score.shown(content))
    return 1 if content["failed"] else 0


def run(arguments: argparse.Namespace, setting: Setting) -> int:
    if arguments.work:
        work_through(Jobs(arguments.work), compile_jobs(arguments.sections, setting), clean)
        return 0
    with tempfile.TemporaryDirectory(prefix="nearpeak-jobs-") as folder:
        if arguments.processes and set(arguments.sections) != {"launch"}:
            command = [sys.executable, "-m", "benchmarks.kernels", "--work", folder]
            command += ["--only", ",".join(arguments.sections)]
            command += ["--operations", arguments.operations] if arguments.operations else []
            command += ["--rehearse"] if arguments.rehearse else []
            took = run_workers(command, arguments.processes, arguments.compile_seconds)
            print(f"compiled in {took:.0f} s", file=sys.stderr, flush=True)
            setting.jobs = Jobs(Path(folder))
        setting.copy_rate = measured_copy(setting.device, 2**16 if arguments.rehearse else COPY_BYTES)
        content = started(arguments.json, new_content(setting.copy_rate), arguments.sections)

        def write() -> None:
            if arguments.json:
                arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

        measure(arguments.sections, setting, content, write)
    print(shown(content, arguments.sections))
    return 1 if content["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
