"""Random calls of every operation and each of its own backends: whether results are right, and the same in each run.

    PYTHONPATH=src python -m benchmarks.kernels.random_calls --seed 12 --calls 1000 --json calls.json
    compute-sanitizer --tool memcheck --target-processes all \\
        python -m benchmarks.kernels.random_calls --seed 13 --calls 60 --processes 1 --own-memory

A call is a pass of a random cell (`drawing`) by one backend of nearpeak. Its result is compared with float32 as in
`random_run`, and to the last bit with that of a second call, unless it is torch's kernel or draws random numbers.
Nothing is timed, so that several processes compile and check at the same time. Exits with 1 if a call is wrong, differs
or fails.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__" and "--own-memory" in sys.argv:
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # before torch is imported: each tensor has its own

from benchmarks.kernels.jobs import Jobs, error_text, run_workers, set_caches, without_failures

MOST_BYTES = 2**29
"""Of the least traffic of a pass: larger ones would take the memory that several processes share."""
RANDOM = ("dropout_add",)
"""Operations that draw other numbers at each call."""
CHANGES_INPUTS = ("adamw", "cross_entropy", "linear_cross_entropy")
"""Operations whose calls are made with new inputs, or write to them: a second call has others."""
OWN = ("gluon", "triton")
Row = Mapping[str, Any]


def checked_cell(cell: Any, device: str) -> list[dict[str, Any]]:
    """A row for each call: of each pass, by what nearpeak chooses and by its other backends."""
    from benchmarks.kernels.drawn_cases import choice_of, other_backends, passes_of
    from benchmarks.kernels.random_run import COMPILED, after_reset, error_limit, errors_of
    from nearpeak.kernels._runtime.choice import OF_TORCH

    rows = []
    for name, one in passes_of(cell, device).items():
        if name not in cell.passes or one.bytes > MOST_BYTES:
            continue
        call = after_reset(one, "nearpeak")
        choice = choice_of(call)
        others, refused = other_backends(call, choice, OF_TORCH)
        peers = {way: peer for way, peer in one.ways.items() if way not in COMPILED or way == "nearpeak"}
        running, _ = without_failures(peers, one.resets)
        resets = {**one.resets, **{way: one.resets["nearpeak"] for way in others if "nearpeak" in one.resets}}
        errors = errors_of(one, {**running, **others}, resets)
        backends = {"nearpeak": choice.backend, **{way: way.partition("/")[2] for way in others}}
        for way, backend in backends.items():
            repeats = None
            if backend in OWN and cell.operation not in (*RANDOM, *CHANGES_INPUTS):
                run = call if way == "nearpeak" else others[way]
                repeats = _same_bits(run(), run())
            rows.append(
                {
                    "operation": cell.operation,
                    "pass": name,
                    "text": cell.text,
                    "seed": cell.seed,
                    "number": cell.number,
                    "backend": backend,
                    "error": errors.get(way),
                    "limit": error_limit(cell, errors),
                    "repeats": repeats,
                    "failed": refused,
                }
            )
    return rows


def _same_bits(one: Any, other: Any) -> bool:
    import torch

    if isinstance(one, (tuple, list)):
        return all(map(_same_bits, one, other))
    if not isinstance(one, torch.Tensor):
        return True
    return torch.equal(*(tensor.detach().contiguous().view(torch.uint8) for tensor in (one, other)))


def is_wrong(row: Row) -> bool:
    """Also where there is a NaN, which is no smaller than anything."""
    return row["error"] is not None and not row["error"] <= row["limit"]


def problems(rows: Sequence[Row], failed: Mapping[str, str]) -> list[str]:
    """What should not be, in sentences."""
    sentences = [f"{name}: {why}" for name, why in failed.items()]
    for row in rows:
        name = f"{row['operation']} {row['pass']}, {row['text']}, {row['backend']} ({row['seed']}/{row['number']})"
        if is_wrong(row):
            sentences.append(f"{name}: an error of {row['error']:.1e}, and the limit is {row['limit']:.1e}")
        if row["repeats"] is False:
            sentences.append(f"{name}: another result in the second call")
        sentences += [f"{name}: {way} failed: {why}" for way, why in row["failed"].items()]
    return sentences


def summary(rows: Sequence[Row]) -> str:
    """How many calls there were of each operation and backend, and the largest error relative to its limit."""
    from benchmarks.markdown_table import table

    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((f"{row['operation']} {row['pass']}", row["backend"]), []).append(row)
    body = [
        [
            operation,
            backend,
            str(len(some)),
            str(sum(map(is_wrong, some))),
            str(sum(row["repeats"] is not None for row in some)),
            str(sum(row["repeats"] is False for row in some)),
            f"{max((row['error'] / row['limit'] for row in some if row['error'] is not None), default=0.0):.2f}",
        ]
        for (operation, backend), some in sorted(groups.items())
    ]
    return table(["operation", "backend", "calls", "wrong", "repeated", "differ", "worst of limit"], body, 2)


def cells_for(seed: int, calls: int) -> Iterator[Any]:
    """Random cells, more than are needed: those that are too large have no calls."""
    from benchmarks.kernels.drawing import cells

    return iter(cells(seed, 2 * calls))


def work(folder: Path, seed: int, calls: int, device: str) -> None:
    """Checks cells that no other process has, until there are enough calls of all together."""
    import torch

    jobs, rows, failed = Jobs(folder), [], {}
    file = folder / f"rows-{os.getpid()}.json"
    for cell in cells_for(seed, calls):
        if len(list(folder.glob("call-*"))) >= calls:
            break
        if not jobs.take(cell.job):
            continue
        try:
            found = checked_cell(cell, device)
        except torch.OutOfMemoryError:  # others have the memory now
            found = []
        except Exception as error:
            failed[f"{cell.operation}: {cell.text} ({cell.seed}/{cell.number})"] = error_text(error)
            found = []
        for place, _ in enumerate(found):
            (folder / f"call-{cell.number}-{place}").touch()
        rows += found
        file.write_text(json.dumps({"rows": rows, "failed": failed}), encoding="utf-8")
        if any("CUDA error" in why for why in failed.values()):
            return  # nothing runs in this process any more
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def collected(folder: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for file in sorted(folder.glob("rows-*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        rows += content["rows"]
        failed |= content["failed"]
    return rows, failed


def main(words: Sequence[str] | None = None, run: Callable[..., float] = run_workers) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=12)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--json", type=Path, help="write all calls here")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 16))
    parser.add_argument("--limit", type=float, default=550.0, metavar="SECONDS", help="end what takes longer")
    parser.add_argument("--own-memory", action="store_true", help="memory of its own for each tensor: for memcheck")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    set_caches()
    import torch

    from nearpeak import kernels

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.work:
        with kernels.using("require"):
            work(arguments.work, arguments.seed, arguments.calls, device)
        return 0
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="nearpeak-calls-") as name:
        folder = Path(name)
        if arguments.processes > 1:
            command = [sys.executable, "-m", "benchmarks.kernels.random_calls", "--work", name]
            command += ["--seed", str(arguments.seed), "--calls", str(arguments.calls)]
            command += ["--own-memory"] if arguments.own_memory else []
            run(command, arguments.processes, arguments.limit)
        else:
            with kernels.using("require"):
                work(folder, arguments.seed, arguments.calls, device)
        rows, failed = collected(folder)
    wrong = problems(rows, failed)
    print(summary(rows))
    print(f"\n{len(rows)} calls in {time.perf_counter() - start:.0f} s; {len(wrong)} problems")
    print("\n".join(f"- {sentence}" for sentence in wrong))
    if arguments.json:
        content = {"machine": torch.cuda.get_device_name() if device == "cuda" else "CPU", "seed": arguments.seed}
        text = json.dumps({**content, "calls": rows, "failed": failed}, indent=1)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    raise SystemExit(main())
