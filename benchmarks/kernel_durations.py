"""Device times of 20 operations beside the profiler's kernel durations and three other harnesses, in one run.

    PYTHONPATH=src python benchmarks/kernel_durations.py --json benchmarks/results/kernel_durations.json

The referee is the profiler: the kernels of each call, run with the same eviction and pacing as nearpeak's own blocks.
Needs a GPU and triton. An operation agrees when nearpeak is within 3 % or 0.3 us of the referee.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.benchmark
import triton.testing

import nearpeak
from nearpeak.measure.cuda import Stage, cuda_device
from nearpeak.measure.profiler import busy_seconds, profile_calls
from nearpeak.measure.samplers import STAGE_SECONDS
from nearpeak.measure.statistics import median
from nearpeak.measure.subject import IDLE_SHARE

BF16, FP32 = torch.bfloat16, torch.float32
RELATIVE, ABSOLUTE = 0.03, 0.3e-6


def operations() -> dict[str, Callable[[], nearpeak.Case]]:
    def tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype)

    def product(m: int, k: int, n: int) -> nearpeak.Case:
        return nearpeak.Case(torch.mm, tensor(m, k), tensor(k, n))

    def pointwise(fn: Callable[..., Any], count: int, size: int, dtype: torch.dtype = FP32) -> nearpeak.Case:
        return nearpeak.Case(fn, *(tensor(size, dtype=dtype) for _ in range(count)))

    def attention() -> nearpeak.Case:
        return nearpeak.Case(F.scaled_dot_product_attention, *(tensor(4, 16, 4096, 128) for _ in range(3)))

    return {
        "relu 512k fp32": lambda: pointwise(torch.relu, 1, 2**19),
        "product 256": lambda: product(256, 256, 256),
        "product 512": lambda: product(512, 512, 512),
        "add 1M fp32": lambda: pointwise(torch.add, 2, 2**20),
        "layer norm 1k x 1k fp32": lambda: nearpeak.Case(F.layer_norm, tensor(1024, 1024, dtype=FP32), (1024,)),
        "embedding 4k of 32k x 1k": lambda: nearpeak.Case(
            F.embedding, nearpeak.inputs.token_ids(4096, vocabulary=32000), tensor(32000, 1024)
        ),
        "product 1024": lambda: product(1024, 1024, 1024),
        "standard deviation 4k x 1k": lambda: nearpeak.Case(torch.std, tensor(4096, 1024, dtype=FP32), -1),
        "softmax 2k x 2k": lambda: nearpeak.Case(torch.softmax, tensor(2048, 2048), -1),
        "gelu 16M": lambda: pointwise(F.gelu, 1, 2**24, BF16),
        "add 8M fp32": lambda: pointwise(torch.add, 2, 2**23),
        "clone 64 MB": lambda: pointwise(torch.clone, 1, 2**24),
        "cumulative sum 4k x 1k": lambda: nearpeak.Case(torch.cumsum, tensor(4096, 1024, dtype=FP32), -1),
        "product 2k x 4k x 2k": lambda: product(2048, 4096, 2048),
        "softmax 16k x 4k": lambda: nearpeak.Case(torch.softmax, tensor(16384, 4096), -1),
        "add 64M fp32": lambda: pointwise(torch.add, 2, 2**26),
        "clone 1 GiB": lambda: pointwise(torch.clone, 1, 2**28),
        "attention 4 x 16 x 4k x 128": attention,
        "product 8k x 8k x 8k": lambda: product(8192, 8192, 8192),
        "clone 8 GiB": lambda: pointwise(torch.clone, 1, 2**31),
    }


def referee(case: nearpeak.Case, seconds: float) -> tuple[float, int]:
    """The median of the kernels' busy time per call, and how many kernels a call has."""
    device = cuda_device(torch.cuda.current_device())
    stage = Stage(device, "cold", pace_seconds=max(0.0, IDLE_SHARE * seconds - STAGE_SECONDS))
    calls = max(5, min(60, int(0.2 / (4 * seconds + 60e-6))))
    runs: list[float] = []
    kernels = 0
    for _ in range(3):
        device.spin(2e-3)
        for call in profile_calls(case.call, calls, before=stage, synchronize=device.synchronize):
            runs.append(busy_seconds(call))
            kernels = len(call)
    return median(runs), kernels


def measure(name: str, case: nearpeak.Case) -> dict[str, Any]:
    timing = nearpeak.bench(case, name=name, max_seconds=1.0)
    truth, kernels = referee(case, timing.seconds)
    again = nearpeak.bench(case, name=name, max_seconds=1.0)
    others = {
        "do_bench": triton.testing.do_bench(case.call, return_mode="median") * 1e-3,
        "do_bench_cudagraph": triton.testing.do_bench_cudagraph(case.call, return_mode="median") * 1e-3,
        "torch.utils.benchmark": torch.utils.benchmark.Timer("call()", globals={"call": case.call})
        .blocked_autorange(min_run_time=0.2)
        .median,
    }
    error = timing.seconds - truth
    return {
        "name": name,
        "kernels": kernels,
        "referee": truth,
        "nearpeak": timing.seconds,
        "nearpeak again": again.seconds,
        "low": timing.low,
        "high": timing.high,
        "method": timing.method,
        "grade": timing.grade,
        "flags": [f"{flag.name}: {flag.evidence}" for flag in timing.flags],
        "other_seconds": dict(timing.other_seconds),
        "others": others,
        "agrees": abs(error) <= max(RELATIVE * truth, ABSOLUTE),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    header = f"{'operation':28} {'kernels':>8} {'nearpeak':>9} {'again':>9} {'do_bench':>9} {'cudagraph':>9} {'Timer':>9}  us"
    print(header)
    for name, build in operations().items():
        row = measure(name, build())
        rows.append(row)
        columns = [row["referee"], row["nearpeak"], row["nearpeak again"], *row["others"].values()]
        times = " ".join(f"{value * 1e6:9.2f}" for value in columns)
        mark = "" if row["agrees"] else " <-- differs"
        print(f"{name:28}{times} {row['grade']}{mark}", flush=True)
        torch.cuda.empty_cache()
    agreed = sum(row["agrees"] for row in rows)
    print(f"{agreed} of {len(rows)} within 3 % or 0.3 us of the kernel durations")
    if arguments.json:
        properties = torch.cuda.get_device_properties(0)
        result = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": properties.name,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
