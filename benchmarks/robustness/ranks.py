"""Faults in ranks: are they found? And folders of traces: how fast are they read?

    python -m benchmarks.robustness.ranks faults --runs 100 --json F   # faults of four kinds on 2 to 4 gloo ranks
    python -m benchmarks.robustness.ranks clean --runs 20              # without a fault: nobody may be accused
    python -m benchmarks.robustness.ranks what-if --runs 10            # the step without a delay, also measured
    python -m benchmarks.robustness.ranks what-if-asleep --runs 10     # the same where the work is nearly all sleep
    python -m benchmarks.robustness.ranks hangs --runs 6               # a rank is killed, stuck, or leaves its loop
    python -m benchmarks.robustness.ranks folder --ranks 256 --megabytes 20

Each run is `torchrun -m nearpeak profile` of a small script with DistributedDataParallel on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.robustness.programs import processor

SCRIPT = """
import os, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

class Sleep(torch.autograd.Function):  # as long on a busy machine as on an idle one
    @staticmethod
    def forward(context, tensor, seconds):
        context.seconds = seconds
        time.sleep(seconds)
        return tensor.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(2.0 * context.seconds)
        return gradient, None

class SleepingLinear(torch.nn.Linear):
    def forward(self, tensor):
        tensor = super().forward(tensor)
        return Sleep.apply(tensor, asleep_s) if asleep_s else tensor

dist.init_process_group("gloo")
torch.manual_seed(0)
width, asleep_s = int(os.environ["WIDTH"]), float(os.environ["ASLEEP_S"])
layers = [SleepingLinear(width, width) for _ in range(int(os.environ["LAYERS"]))]
model = DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(64 * 150, width))
for (batch,) in torch.utils.data.DataLoader(data, batch_size=64):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
HANGING_SCRIPT = """
import os, signal, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
ending = os.environ["ENDING"] if dist.get_rank() == int(os.environ["ENDING_RANK"]) else ""
model = DistributedDataParallel(torch.nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(150):
    if step == 145 and ending:
        with open(os.environ["BEGUN"], "w") as file:
            file.write(str(time.time()))
        if ending == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if ending == "stuck":
            time.sleep(10000)
        if ending == "left":
            break
    model(torch.randn(64, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
"""
ENDINGS = ("killed", "stuck", "left")
"""Of a rank: SIGKILL, an endless wait, and a loop that ends before that of the other ranks."""
HANG_GRACE_S = 10.0
"""From the report of a hang until the job is ended."""
ACCUSED = re.compile(r"Ranks? ([\d, ]+?) (?:has not called|has called|is past|does not answer|do not answer)")
KINDS = {"delay": "python", "input": "input", "work": "more work", "gc": "garbage collection"}


def run_job(
    folder: Path, ranks: int, width: int, layers: int, fault: str = "", *, asleep_s: float = 0.0
) -> dict[str, Any]:
    """The `job` of a run, as JSON; raises if there is none. Each layer sleeps in its passes, besides its work."""
    script, result = folder / "train.py", folder / "run.json"
    script.write_text(SCRIPT)
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    command += ["-m", "nearpeak", "profile", "--stop", "--no-keep", "-o", str(result)]
    command += [*(["--inject", fault] if fault else []), str(script)]
    environment = {**os.environ, "WIDTH": str(width), "LAYERS": str(layers), "OMP_NUM_THREADS": "1"}
    environment["ASLEEP_S"] = str(asleep_s)
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if not result.exists() or (job := json.loads(result.read_text())["profile"].get("job")) is None:
        raise RuntimeError(ended.stderr[-2000:])
    return dict(job)


def draw(seed: int) -> tuple[int, int, int, int, str, float]:
    """Ranks, width, layers, the faulty rank, its kind and seconds."""
    dice = random.Random(seed)
    ranks = dice.choice((2, 3, 4))
    kind = list(KINDS)[seed % len(KINDS)]
    return (
        ranks,
        dice.choice((256, 384, 512)),
        dice.choice((3, 5)),
        dice.randrange(ranks),
        kind,
        dice.choice((8, 12, 20)),
    )


def faults(folder: Path, seed: int) -> dict[str, Any]:
    """A fault in a rank, and who is named for it."""
    ranks, width, layers, rank, kind, amount = draw(seed)
    late = run_job(folder, ranks, width, layers, f"rank={rank},{kind}={amount}ms")["late"]
    return {"ranks": ranks, "rank": rank, "fault": kind, "ms": amount, "named": _named(late)}


def clean(folder: Path, seed: int) -> dict[str, Any]:
    """A run without a fault, and who is named."""
    ranks, width, layers, *_ = draw(seed)
    return {"ranks": ranks, "named": _named(run_job(folder, ranks, width, layers)["late"])}


def what_if(folder: Path, seed: int, *, asleep_s: float = 0.0) -> dict[str, Any]:
    """The step without an injected delay, as predicted, beside runs without it, before and after.

    Asleep, layers have little work, and there are no more ranks than processors: a rank that waits leaves its core, and
    half of a hyperthreaded one, to the others, which are then faster than they will be without the delay.
    """
    ranks, width, layers, rank, _, amount = draw(seed)
    if asleep_s:
        ranks, width = min(ranks, os.cpu_count() or ranks), width // 8
        rank %= ranks
    before = run_job(folder, ranks, width, layers, asleep_s=asleep_s)["wall_s"]
    job = run_job(folder, ranks, width, layers, f"rank={rank},delay={amount}ms", asleep_s=asleep_s)
    after = run_job(folder, ranks, width, layers, asleep_s=asleep_s)["wall_s"]
    predicted = [item["step_s"] for item in job["what_ifs"] if item["what"].startswith(f"rank {rank}'s")]
    return {
        "ranks": ranks,
        "ms": amount,
        "with_s": job["wall_s"],
        "without_s": [before, after],
        "predicted_s": predicted[0] if predicted else None,
        "notes": job["notes"],
    }


def hangs(folder: Path, seed: int) -> dict[str, Any]:
    """A rank that is killed, skips a collective or stops, late in a run: who is named, when, and what is saved."""
    ranks, rank, ending = 2 + seed % 2, (seed // 2) % (2 + seed % 2), ENDINGS[seed % len(ENDINGS)]
    script, result, begun = folder / "train.py", folder / "run.json", folder / "begun"
    script.write_text(HANGING_SCRIPT)
    for path in folder.glob("run*.json"):
        path.unlink()
    begun.unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    command += ["-m", "nearpeak", "profile", "--no-keep", "-o", str(result), str(script)]
    environment = {"ENDING": ending, "ENDING_RANK": str(rank), "BEGUN": str(begun), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    timer = threading.Timer(600.0, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    named_s, accused = None, set[int]()
    for line in process.stderr:
        if not begun.exists() or not (match := ACCUSED.search(line)):
            continue
        accused.update(map(int, match[1].split(",")))
        if named_s is None:
            named_s = time.time() - float(begun.read_text())
            timer.cancel()
            timer = threading.Timer(HANG_GRACE_S, os.killpg, (process.pid, signal.SIGTERM))
            timer.start()
    process.wait()
    timer.cancel()
    saved = [path.name for path in sorted(folder.glob("run*.json")) if "profile" in json.loads(path.read_text())]
    return {
        "ranks": ranks,
        "rank": rank,
        "ending": ending,
        "named": sorted(accused),
        "named_s": named_s,
        "saved": saved,
    }


RUNS: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "faults": faults,
    "clean": clean,
    "what-if": what_if,
    "what-if-asleep": partial(what_if, asleep_s=6e-3),
    "hangs": hangs,
}


def write_result(path: Path, what: str, rows: Sequence[dict[str, Any]]) -> None:
    """The rows, with the machine and the date, beside those of the other benchmarks in the file."""
    results = json.loads(path.read_text()) if path.exists() else {}
    results[what] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{processor()}, {os.cpu_count()} processors, Python {platform.python_version()}",
        "torch": version("torch"),
        "summary": summary(what, rows),
        "rows": rows,
    }
    path.write_text(json.dumps(results, indent=1) + "\n")


def _named(late: Sequence[dict[str, Any]]) -> list[list[Any]]:
    return [[item["rank"], item["cause"]] for item in late]


def summary(what: str, rows: Sequence[dict[str, Any]]) -> str:
    """What the rows come to."""
    if what == "hangs":
        right = [row for row in rows if row["named"] == [row["rank"]]]
        slowest = max((row["named_s"] for row in right), default=0.0)
        kept = sum(bool(row["saved"]) for row in rows)
        return (
            f"{len(rows)} hangs and dead ranks: the right rank alone {len(right)}, at most {slowest:.0f} s later, "
            f"profiles kept {kept}"
        )
    if what.startswith("folder"):
        (row,) = rows
        return (
            f"{row['ranks']} traces, {row['bytes'] / 1e6:,.0f} MB, written in {row['written_s']:.0f} s: read in "
            f"{row['wall_s']:.1f} s with {row['processor_s']:.1f} s of processors and "
            f"{row['resident_bytes'] / 2**30:.2f} GiB in all processes, exit code {row['exit_code']}"
        )
    if what == "clean":
        return f"{len(rows)} clean runs: {sum(bool(row['named']) for row in rows)} with an accusation"
    if what == "faults":
        first = [row["named"][0] if row["named"] else [None, "cannot tell"] for row in rows]
        pairs = list(zip(rows, first, strict=True))
        rank = sum(named[0] == row["rank"] for row, named in pairs)
        cause = sum(named == [row["rank"], KINDS[row["fault"]]] for row, named in pairs)
        cannot = sum(named[1] == "cannot tell" for named in first)
        return f"{len(rows)} faults: right rank {rank}, right cause {cause}, cannot tell {cannot}"
    errors = [
        abs(row["predicted_s"] / (sum(row["without_s"]) / 2) - 1) for row in rows if row["predicted_s"] is not None
    ]
    apart = [abs(row["without_s"][1] / row["without_s"][0] - 1) for row in rows]
    within = sum(error <= 0.05 for error in errors)
    return (
        f"{len(rows)} delays: {within} predicted within 5 %, {len(rows) - len(errors)} cannot tell, median error "
        f"{median(errors or [0.0]):.1%}; the two runs without it are {median(apart):.1%} apart in the median"
    )


def write_trace(path: Path, rank: int, ranks: int, megabytes: float, late_rank: int) -> None:
    """A made-up trace of a data-parallel rank with NCCL; one rank is late by its input."""
    dims = '"Input Dims": [[1024, 1024], [1024, 1024]], "Input Strides": [[1024, 1], [1024, 1]], '
    types = '"Input type": ["c10::BFloat16", "c10::BFloat16"], "Concrete Inputs": ["", ""]'
    steps = 6
    per_step = max(8, int(megabytes * 1e6 / steps / 770))
    events, identity, sequence, time_us = [], 1, 0, 1e6
    for step in range(steps):
        begun = time_us
        stall = 3000.0 if rank == late_rank else 300.0
        events.append(
            f'{{"ph": "X", "cat": "user_annotation", "name": "enumerate(DataLoader)#_Iter.__next__", "pid": 1, '
            f'"tid": 1, "ts": {time_us:.3f}, "dur": {stall:.3f}}}'
        )
        time_us += stall
        for number in range(per_step):
            identity += 1
            events.append(
                f'{{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": {time_us:.3f}, '
                f'"dur": 8.0, "args": {{"External id": {identity}, {dims}{types}}}}}'
            )
            events.append(
                f'{{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, '
                f'"ts": {time_us + 2:.3f}, "dur": 4.0, '
                f'"args": {{"External id": {identity}, "correlation": {identity}}}}}'
            )
            events.append(
                f'{{"ph": "X", "cat": "kernel", "name": "sm90_xmma_gemm_bf16bf16_bf16f32", "pid": 0, "tid": 7, '
                f'"ts": {time_us + 5:.3f}, "dur": 9.5, "args": {{"External id": {identity}, "correlation": {identity}, '
                f'"device": 0, "stream": 7, "grid": [32, 32, 1], "block": [128, 1, 1], "registers per thread": 168}}}}'
            )
            time_us += 10.0
            if number % 200 == 199:
                sequence += 1
                identity += 1
                last = begun + 3000.0 + 10.0 * (number + 1)
                start = max(time_us, begun)
                events.append(
                    f'{{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": '
                    f'{time_us - 1:.3f}, "dur": 1.0, "args": {{"External id": {identity}, "correlation": {identity}}}}}'
                )
                events.append(
                    f'{{"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "pid": 0, '
                    f'"tid": 20, "ts": {start:.3f}, "dur": {max(last - start, 0) + 150.0:.3f}, "args": '
                    f'{{"External id": {identity}, "correlation": {identity}, "device": 0, "stream": 20, '
                    f'"Collective name": "allreduce", "Process Group Name": "0", "Seq": {sequence}, '
                    f'"Group size": {ranks}, "In msg nelems": 4194304, "dtype": "BFloat16"}}}}'
                )
        time_us = begun + 3000.0 + 10.0 * per_step + 500.0
        events.append(
            f'{{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#{step}", "pid": 1, "tid": 1, '
            f'"ts": {begun:.3f}, "dur": {time_us - begun:.3f}}}'
        )
    head = f'"distributedInfo": {{"backend": "nccl", "rank": {rank}, "world_size": {ranks}}}, "schemaVersion": 1'
    device = '"deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "computeMajor": 9, "computeMinor": 0}]'
    path.write_text(f'{{{head}, {device}, "traceEvents": [\n' + ",\n".join(events) + "\n]}")


def folder(ranks: int, megabytes: float) -> dict[str, Any]:
    """Writes a folder of traces, and reads it: seconds, processor seconds and memory of all processes together."""
    with tempfile.TemporaryDirectory() as name:
        begun = time.monotonic()
        for rank in range(ranks):
            write_trace(Path(name) / f"rank{rank}.json", rank, ranks, megabytes, ranks // 3)
        size, written_s = sum(file.stat().st_size for file in Path(name).iterdir()), time.monotonic() - begun
        begun = time.monotonic()
        command = [sys.executable, "-m", "nearpeak", "profile", "--no-keep", "--trace", name]
        with (Path(name) / "report.txt").open("w+") as report:
            process = subprocess.Popen(command, stdout=report)
            largest = 0
            while process.poll() is None:
                largest = max(largest, resident_bytes(process.pid))
                time.sleep(0.2)
            wall_s = time.monotonic() - begun
            report.seek(0)
            print(report.read())
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "ranks": ranks,
        "bytes": size,
        "written_s": written_s,
        "exit_code": process.returncode,
        "wall_s": wall_s,
        "processor_s": used.ru_utime + used.ru_stime,
        "resident_bytes": largest,
    }


def resident_bytes(pid: int) -> int:
    """The memory of a process and its children, with pages that they share counted for each; 0 if it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = [
            int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
        ]
    except OSError:
        return 0
    return pages * resource.getpagesize() + sum(map(resident_bytes, children))


def main() -> None:
    """Runs one of the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=(*RUNS, "folder"))
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the others count from it")
    parser.add_argument("--json", type=Path, help="write the results to this file, under the name of the benchmark")
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--megabytes", type=float, default=20.0)
    wanted = parser.parse_args()
    if wanted.what == "folder":
        row = folder(wanted.ranks, wanted.megabytes)
        if wanted.json:
            write_result(wanted.json, f"folder of {wanted.ranks} ranks", [row])
        print(summary("folder", [row]))
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for seed in range(wanted.seed, wanted.seed + wanted.runs):
            rows.append({"seed": seed, **RUNS[wanted.what](Path(name), seed)})
            print(*(f"{key} {value}" for key, value in rows[-1].items()), sep=", ", flush=True)
            if wanted.json:
                write_result(wanted.json, wanted.what, rows)
    print(summary(wanted.what, rows))


if __name__ == "__main__":
    main()
