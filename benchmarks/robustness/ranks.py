"""Faults in ranks: are they found? And folders of traces: how fast are they read?

    python -m benchmarks.robustness.ranks faults --runs 100      # injected faults of four kinds on 2 to 4 gloo ranks
    python -m benchmarks.robustness.ranks clean --runs 20        # runs without a fault: nobody may be accused
    python -m benchmarks.robustness.ranks what-if --runs 10      # the step without a delay, predicted and measured
    python -m benchmarks.robustness.ranks folder --ranks 256 --megabytes 20

Each run is `torchrun -m nearpeak profile` of a small script with DistributedDataParallel on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SCRIPT = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
width = int(os.environ["WIDTH"])
layers = [torch.nn.Linear(width, width) for _ in range(int(os.environ["LAYERS"]))]
model = DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(64 * 150, width))
for (batch,) in torch.utils.data.DataLoader(data, batch_size=64):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
KINDS = {"delay": "python", "input": "input", "work": "more work", "gc": "garbage collection"}


def run_job(folder: Path, ranks: int, width: int, layers: int, fault: str = "") -> dict[str, Any]:
    """The `job` of a run, as JSON; raises if there is none."""
    script, result = folder / "train.py", folder / "run.json"
    script.write_text(SCRIPT)
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    command += ["-m", "nearpeak", "profile", "--stop", "--no-keep", "-o", str(result)]
    command += [*(["--inject", fault] if fault else []), str(script)]
    environment = {**os.environ, "WIDTH": str(width), "LAYERS": str(layers), "OMP_NUM_THREADS": "1"}
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


def faults(arguments: argparse.Namespace) -> None:
    """Counts right ranks and causes."""
    rank_right = cause_right = cannot = done = 0
    with tempfile.TemporaryDirectory() as name:
        for seed in range(arguments.first, arguments.first + arguments.runs):
            ranks, width, layers, rank, kind, amount = draw(seed)
            late = run_job(Path(name), ranks, width, layers, f"rank={rank},{kind}={amount}ms")["late"]
            found = [(item["rank"], item["cause"]) for item in late]
            done += 1
            rank_right += bool(found) and found[0][0] == rank
            cause_right += bool(found) and found[0] == (rank, KINDS[kind])
            cannot += not found or found[0][1] == "cannot tell"
            print(f"{seed}: rank {rank} of {ranks}, {kind} {amount} ms -> {found}", flush=True)
    print(f"{done} faults: right rank {rank_right}, right cause {cause_right}, cannot tell {cannot}")


def clean(arguments: argparse.Namespace) -> None:
    """Counts accusations."""
    accused = 0
    with tempfile.TemporaryDirectory() as name:
        for seed in range(arguments.first, arguments.first + arguments.runs):
            ranks, width, layers, *_ = draw(seed)
            late = run_job(Path(name), ranks, width, layers)["late"]
            accused += bool(late)
            print(f"{seed}: {ranks} ranks -> {[(item['rank'], item['cause']) for item in late]}", flush=True)
    print(f"{arguments.runs} clean runs: {accused} with an accusation")


def what_if(arguments: argparse.Namespace) -> None:
    """The step without an injected delay, as predicted, beside a run without it."""
    with tempfile.TemporaryDirectory() as name:
        for seed in range(arguments.first, arguments.first + arguments.runs):
            ranks, width, layers, rank, _, amount = draw(seed)
            healthy = run_job(Path(name), ranks, width, layers)["wall_s"]
            job = run_job(Path(name), ranks, width, layers, f"rank={rank},delay={amount}ms")
            predicted = [item["step_s"] for item in job["what_ifs"] if item["what"].startswith(f"rank {rank}'s")]
            error = f"{predicted[0] / healthy - 1:+.1%}" if predicted else "cannot tell"
            print(
                f"{seed}: {ranks} ranks, {amount} ms: {1e3 * job['wall_s']:.1f} ms, without "
                f"{1e3 * healthy:.1f} ms, predicted {error}",
                flush=True,
            )


def write_trace(path: Path, rank: int, ranks: int, megabytes: float, late_rank: int) -> None:
    """A made-up trace of a data-parallel rank with NCCL; one rank is late by its input."""
    dims = '"Input Dims": [[4096, 4096], [4096, 4096]], "Input Strides": [[4096, 1], [4096, 1]], '
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


def folder(arguments: argparse.Namespace) -> None:
    """Writes a folder of traces and reads it."""
    with tempfile.TemporaryDirectory() as name:
        for rank in range(arguments.ranks):
            write_trace(
                Path(name) / f"rank{rank}.json", rank, arguments.ranks, arguments.megabytes, arguments.ranks // 3
            )
        size = sum(file.stat().st_size for file in Path(name).iterdir())
        begun = time.monotonic()
        command = [sys.executable, "-m", "nearpeak", "profile", "--trace", name]
        ended = subprocess.run(command, capture_output=True, text=True)
        took = time.monotonic() - begun
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(ended.stdout, ended.stderr[-2000:], sep="\n")
        print(
            f"{arguments.ranks} traces, {size / 1e6:,.0f} MB: {took:.1f} s, {used.ru_utime + used.ru_stime:.1f} s of "
            f"processors, largest process {used.ru_maxrss / 2**20:.2f} GiB"
        )


def main() -> None:
    """Runs one of the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("faults", "clean", "what-if", "folder"))
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--megabytes", type=float, default=20.0)
    arguments = parser.parse_args()
    {"faults": faults, "clean": clean, "what-if": what_if, "folder": folder}[arguments.what](arguments)


if __name__ == "__main__":
    main()
