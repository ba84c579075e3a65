"""The kernels of nearpeak beside everything that a user could call instead: on this GPU, in one run.

    PYTHONPATH=src python benchmarks/kernels.py --json benchmarks/results/kernels_h200.json
    python benchmarks/kernels.py --show benchmarks/results/kernels_h200.json

Sections, all or those of `--only`: "losses" (both passes, with memory), "copies" (float8, transposes, tokens, AdamW),
"launch" (what a call takes on the host), "rows" (operations on rows, each pass), "attention" (each pass), "decoding"
(with caches of all kinds), "attention_memory" (very many tokens), "products" (of matrices, with what follows them),
"experts" (grouped products and layers of experts) and "linear_attention" (beside attention, by tokens). First
everything is compiled by several processes. Then all ways to do the same are timed in turns by one process: device time
with cold caches, and mostly the error against float64. "Of copy" is the rate at which a way moves the bytes that the
operation must move at the least, as a share of the rate of a copy in the same run. Sections of the file that are not
measured now stay.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib.metadata
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kernel_jobs import Jobs, compiled_by, set_caches, set_compiler, work
from kernel_measured import COPY_BYTES, PASSES, least_bytes, measured, measured_copy, measured_launch, measured_loss
from kernel_setting import COMPILED_WAYS, OF_THEIR_OWN, Setting, Ways, rehearsal
from kernel_tables import TABLES, shown

SECTIONS = tuple(TABLES)
LOSSES = ("cross_entropy", "linear_cross_entropy")
COMPILE_SECONDS = 150.0


def run_section(section: str, setting: Setting) -> Iterator[tuple[str, Callable[[], list[dict[str, Any]]]]]:
    """Of each case its name, and what measures it."""
    if section == "launch":
        from kernel_launches import launch_cases

        for case in launch_cases(**setting.sizes.get("launch", {}), device=setting.device):
            if setting.wants(case.operation):
                yield case.operation, lambda case=case: [measured_launch(case)]  # type: ignore[misc]
        return
    for number, case in enumerate(setting.cases(section)):
        if section == "losses":
            name = LOSSES[number]
            if setting.wants(name):
                yield name, lambda case=case, number=number: measured_loss(case(), setting, number)  # type: ignore[misc]
        elif section in OF_THEIR_OWN:
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
            elif section in OF_THEIR_OWN:
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


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--show", type=Path, help="print the tables of results that were written, and measure nothing")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between")
    parser.add_argument("--operations", help="only these, with commas between")
    parser.add_argument("--no-check", action="store_true", help="leave the comparison with float64 out")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on a CPU too: whether everything runs")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 12), help="that compile; 0: none")
    parser.add_argument("--compile-seconds", type=float, default=COMPILE_SECONDS, help="for compiling, at most")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    found = parser.parse_args(arguments)
    found.sections = [name for name in SECTIONS if name in found.only.split(",")]
    unknown = set(found.only.split(",")) - set(SECTIONS)
    if unknown:
        parser.error(f"there is no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    return found


def main() -> int:
    arguments = parsed()
    if arguments.show:
        only = arguments.sections if len(arguments.sections) < len(SECTIONS) else ()
        print(shown(json.loads(arguments.show.read_text(encoding="utf-8")), only))
        return 0
    set_caches()
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.rehearse and device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    set_compiler()
    setting = Setting(device, check=not arguments.no_check, **(rehearsal() if arguments.rehearse else {}))
    setting.operations = set(arguments.operations.split(",")) if arguments.operations else None
    import kernel_timing

    from nearpeak import kernels

    if arguments.rehearse:
        kernel_timing.ROUNDS, kernel_timing.CALLS, kernel_timing.IN_A_ROW = 1, 4, 2
    with kernels.using("require"):  # a reference that runs in place of a kernel is an error
        return run(arguments, setting)


def run(arguments: argparse.Namespace, setting: Setting) -> int:
    if arguments.work:
        work(Jobs(arguments.work), compile_jobs(arguments.sections, setting), clean)
        return 0
    with tempfile.TemporaryDirectory(prefix="nearpeak-jobs-") as folder:
        if arguments.processes and set(arguments.sections) != {"launch"}:
            command = [sys.executable, __file__, "--only", ",".join(arguments.sections), "--work", folder]
            command += ["--operations", arguments.operations] if arguments.operations else []
            command += ["--rehearse"] if arguments.rehearse else []
            took = compiled_by(command, arguments.processes, arguments.compile_seconds)
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
