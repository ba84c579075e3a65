r"""Device times of 20 operations beside the profiler's kernel durations and three other harnesses, in one run.

    PYTHONPATH=src python -m benchmarks.accuracy.durations --json benchmarks/results/kernel_durations.json

The referee is the profiler: the kernels of each call, run with the same eviction and pacing as nearpeak's own blocks.
Needs a GPU and triton. An operation agrees when nearpeak is within 3 % or 0.3 us of the referee.

A second referee is Nsight Compute, which times each kernel alone. It needs a run of its own, whose table is then given
to the first:

    ncu --csv --nvtx --nvtx-include "call/" --clock-control none --cache-control all \
        --metrics gpu__time_duration.sum python -m benchmarks.accuracy.durations --calls 5 > ncu.csv
    python -m benchmarks.accuracy.durations --ncu ncu.csv --json ...
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils.benchmark
import triton.testing
from torch.nn import functional

import nearpeak
from nearpeak.measure.gpu import Stage, gpu_instrument
from nearpeak.measure.instrument import calibration_kernels
from nearpeak.measure.kernel_times import busy_seconds, profile_calls
from nearpeak.measure.prepared import IDLE_SHARE
from nearpeak.measure.samplers import STAGE_SECONDS
from nearpeak.measure.statistics import median

BF16, FP32 = torch.bfloat16, torch.float32
RELATIVE, ABSOLUTE = 0.03, 0.3e-6
NCU_CALLS = 5
REPEATS = 8
NO_KERNEL = ("clone 64 MB", "clone 1 GiB", "clone 8 GiB")
"""Copies by the driver: the profiler times them, ncu lists kernels only."""


def operations() -> dict[str, Callable[[], nearpeak.Case]]:
    def tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype)

    def product(m: int, k: int, n: int) -> nearpeak.Case:
        return nearpeak.Case(torch.mm, tensor(m, k), tensor(k, n))

    def pointwise(fn: Callable[..., Any], count: int, size: int, dtype: torch.dtype = FP32) -> nearpeak.Case:
        return nearpeak.Case(fn, *(tensor(size, dtype=dtype) for _ in range(count)))

    def attention() -> nearpeak.Case:
        return nearpeak.Case(functional.scaled_dot_product_attention, *(tensor(4, 16, 4096, 128) for _ in range(3)))

    return {
        "relu 512k fp32": lambda: pointwise(torch.relu, 1, 2**19),
        "product 256": lambda: product(256, 256, 256),
        "product 512": lambda: product(512, 512, 512),
        "add 1M fp32": lambda: pointwise(torch.add, 2, 2**20),
        "layer norm 1k x 1k fp32": lambda: nearpeak.Case(
            functional.layer_norm, tensor(1024, 1024, dtype=FP32), (1024,)
        ),
        "embedding 4k of 32k x 1k": lambda: nearpeak.Case(
            functional.embedding, nearpeak.inputs.token_ids(4096, vocabulary=32000), tensor(32000, 1024)
        ),
        "product 1024": lambda: product(1024, 1024, 1024),
        "standard deviation 4k x 1k": lambda: nearpeak.Case(torch.std, tensor(4096, 1024, dtype=FP32), -1),
        "softmax 2k x 2k": lambda: nearpeak.Case(torch.softmax, tensor(2048, 2048), -1),
        "gelu 16M": lambda: pointwise(functional.gelu, 1, 2**24, BF16),
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


@dataclass(frozen=True, kw_only=True)
class Refereed:
    """One session of the profiler: what it reports for the calls, and what our events read around the same calls."""

    profiler: float
    events: float
    kernels: int


def referee(case: nearpeak.Case, seconds: float, spin_seconds: float = 0.05) -> Refereed:
    """Runs small kernels of known zero and the case in one session of the profiler, with events around every call.

    The profiler slows some kernels down, and the pauses around all of them. So the events' zero is taken in the same
    session, and their reading is of the very calls that the profiler timed.
    """
    device = gpu_instrument(torch.cuda.current_device())
    paced = Stage(device, "cold", pace_seconds=max(0.0, IDLE_SHARE * seconds - STAGE_SECONDS))
    plain = Stage(device, "cold")
    calls = max(7, min(40, int(0.3 / (4 * seconds + 60e-6))))
    # Few enough that the launch queue, of about a thousand entries, holds them all behind the spin.
    schedule = [(kernel, plain) for kernel in calibration_kernels(device) for _ in range(REPEATS)]
    schedule += [(case.call, paced)] * calls
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * len(schedule))]
    turns = iter(range(len(schedule)))
    position = 0
    hidden = False

    def before() -> None:
        nonlocal position
        position = next(turns)
        schedule[position][1]()

    def call() -> None:
        nonlocal hidden
        events[2 * position].record()
        schedule[position][0]()
        events[2 * position + 1].record()
        hidden = not events[1].query()

    for event in events:
        event.record()
    device.spin(spin_seconds)
    profiled = profile_calls(call, len(schedule), before=before, synchronize=device.synchronize)
    if not hidden and spin_seconds < 0.5:  # under the profiler the host is slower; the events must see no host delays
        return referee(case, seconds, 2 * spin_seconds)
    busy = [busy_seconds(kernels) for kernels in profiled]
    read = [a.elapsed_time(b) * 1e-3 for a, b in zip(events[::2], events[1::2], strict=True)]
    groups = [slice(start, start + REPEATS) for start in range(0, len(schedule) - calls, REPEATS)]
    zero = median([median(read[group]) - median(busy[group]) for group in groups])
    return Refereed(profiler=median(busy[-calls:]), events=median(read[-calls:]) - zero, kernels=len(profiled[-1]))


def within(seconds: float, truth: float) -> bool:
    return abs(seconds - truth) <= max(RELATIVE * truth, ABSOLUTE)


def measure(name: str, case: nearpeak.Case) -> dict[str, Any]:
    timing = nearpeak.bench(case, name=name, max_seconds=1.0)
    refereed = [referee(case, timing.seconds) for _ in range(3)]
    truth = median([session.profiler for session in refereed])
    events = median([session.events for session in refereed])
    again = nearpeak.bench(case, name=name, max_seconds=1.0)
    others = {
        "do_bench": triton.testing.do_bench(case.call, return_mode="median") * 1e-3,
        "do_bench_cudagraph": triton.testing.do_bench_cudagraph(case.call, return_mode="median") * 1e-3,
        "torch.utils.benchmark": torch.utils.benchmark.Timer("call()", globals={"call": case.call})
        .blocked_autorange(min_run_time=0.2)
        .median,
    }
    return {
        "name": name,
        "kernels": refereed[-1].kernels,
        "referee": truth,
        "events under the profiler": events,
        "nearpeak": timing.seconds,
        "nearpeak again": again.seconds,
        "low": timing.low,
        "high": timing.high,
        "method": timing.method,
        "grade": timing.grade,
        "flags": [f"{flag.name}: {flag.evidence}" for flag in timing.flags],
        "other_seconds": dict(timing.other_seconds),
        "others": others,
        "agrees": within(timing.seconds, truth),
        "agrees on the same calls": within(events, truth),
    }


def only_call(calls: int) -> None:
    """Each operation a few times in a named range, for a profiler that wraps this process."""
    for build in {"empty": lambda: nearpeak.Case(torch.cuda._sleep, 1), **operations()}.values():
        case = build()
        case.call()
        torch.cuda.synchronize()
        for _ in range(calls):
            torch.cuda.nvtx.range_push("call")
            case.call()
            torch.cuda.nvtx.range_pop()
        torch.cuda.synchronize()
        del case
        torch.cuda.empty_cache()


def read_ncu(path: Path, calls: int) -> dict[str, float]:
    """Seconds of each operation's kernel from ncu's table, the median over its calls."""
    lines = [line for line in path.read_text().splitlines() if line.startswith('"')]
    durations = [
        float(row["Metric Value"].replace(",", "")) * {"ns": 1e-9, "us": 1e-6, "ms": 1e-3}[row["Metric Unit"]]
        for row in csv.DictReader(lines)
        if row["Metric Name"] == "gpu__time_duration.sum"
    ]
    names = ["empty", *(name for name in operations() if name not in NO_KERNEL)]
    if len(durations) != calls * len(names):
        raise SystemExit(f"{path}: {len(durations)} kernels, expected {calls * len(names)}")
    return {name: median(durations[calls * i : calls * (i + 1)]) for i, name in enumerate(names)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--ncu", type=Path, help="the table of a run under ncu")
    parser.add_argument("--calls", type=int, help="only run each operation so often, for a run under ncu")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.calls:
        only_call(arguments.calls)
        return
    second = read_ncu(arguments.ncu, NCU_CALLS) if arguments.ncu else {}
    rows = []
    columns = ("profiler", "events*", "nearpeak", "again", "do_bench", "cudagraph", "Timer")
    print(f"{'operation, times in us':28}" + " ".join(f"{column:>9}" for column in columns))
    for name, build in operations().items():
        row = {**measure(name, build()), "ncu": second.get(name)}
        rows.append(row)
        values = [
            row["referee"],
            row["events under the profiler"],
            row["nearpeak"],
            row["nearpeak again"],
            *row["others"].values(),
        ]
        times = " ".join(f"{value * 1e6:9.2f}" for value in values)
        mark = "" if row["agrees"] else " <-- differs"
        print(f"{name:28}{times} {row['grade']}{mark}", flush=True)
        torch.cuda.empty_cache()
    for key, text in (("agrees", "nearpeak"), ("agrees on the same calls", "events* (around the profiled calls)")):
        agreed = sum(row[key] for row in rows)
        print(f"{text}: {agreed} of {len(rows)} within 3 % or 0.3 us of the profiler's kernel durations")
    if arguments.json:
        properties = torch.cuda.get_device_properties(0)
        result = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": properties.name,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "ncu_empty": second.get("empty"),
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
