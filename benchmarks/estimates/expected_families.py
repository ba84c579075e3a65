"""How good is `expected_s`? Drawn ops and small models on a GPU, timed, beside what is expected of them, by family.

    PYTHONPATH=src python -m benchmarks.estimates.expected_families --seed 1 --json FILE     # on the GPU
    PYTHONPATH=src python -m benchmarks.estimates.expected_families --score FILE [FILE ...]  # anywhere
    PYTHONPATH=src python -m benchmarks.estimates.expected_families --seed 1 --dry           # on fake tensors, no GPU

An op is timed as `nearpeak.bench` does by default: device time with a cold last-level cache, which is what the estimate
assumes. A model is timed by the host's clock as well, call after call ("pipelined"): the host may limit it. The file
has times, the seed and what the host took to enqueue one op, beside each model; expectations are computed when it is
scored, so that one file serves every version of the model. The host of the scored machine is the one that was measured
with the times: hosts of the same GPU differ by a factor of 1.8. Files without it are scored with the reference host.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import nearpeak
from benchmarks.estimates.expected_cases import COUNTS, DrawnCase, cases, draw_case
from nearpeak.measure.gpu import gpu_instrument
from nearpeak.measure.kernel_times import profile_calls
from nearpeak.measure.samplers import WallSampler
from nearpeak.measure.statistics import median

FAST = {"max_seconds": 0.05, "warmup_seconds": 0.01, "min_blocks": 6, "precision": 0.02, "other_kinds": False}
MOST_KERNELS = 400
"""Kernels of a call that are written down one by one."""
MODELS = ("model", "network")
"""Families that are timed by the host's clock."""
NEAR, FAR = 1.25, 2.0


def measure(drawn: DrawnCase) -> dict[str, Any]:
    """One case: its device time, its kernels, and for a model the times of the host's clock."""
    case = drawn.build()
    timing = nearpeak.bench(case, name=drawn.name, **FAST)
    row: dict[str, Any] = {
        "family": drawn.family,
        "number": drawn.number,
        "name": drawn.name,
        "seconds": timing.seconds,
        "low": timing.low,
        "high": timing.high,
        "kind": timing.kind,
        "method": timing.method.partition(",")[0],
        "flags": [flag.name for flag in timing.flags],
    }
    device = gpu_instrument(torch.cuda.current_device())

    def call() -> None:
        if case.reset is not None:
            case.reset()
        case.call()

    if drawn.family in MODELS:
        row["host_enqueue"] = host_enqueue_seconds()
    kernels = profile_calls(call, 2, synchronize=torch.cuda.synchronize)[-1]
    row["kernels"] = [[kernel.name[:90], round(kernel.seconds * 1e6, 2)] for kernel in kernels[:MOST_KERNELS]]
    row["kernel_count"] = len(kernels)
    if drawn.family in (*MODELS, "optimizer", "recurrent"):
        for kind in ("pipelined", "enqueue"):
            sampler = WallSampler(device, case.call, kind, call_seconds=max(timing.seconds, 5e-5), reset=case.reset)
            sampler.block()
            row[kind] = median([sampler.block().seconds for _ in range(5)])
    return row


def host_enqueue_seconds() -> float:
    """What this host takes to enqueue an addition of 16 numbers now, as a calibration measures it."""
    small = torch.randn(16, device="cuda")
    out = torch.empty_like(small)
    device = gpu_instrument(torch.cuda.current_device())
    sampler = WallSampler(device, lambda: torch.add(small, small, out=out), "enqueue", call_seconds=1e-5)
    sampler.block()
    return median([sampler.block().seconds for _ in range(5)])


def with_host_of(rows: Sequence[dict[str, Any]], machine: nearpeak.Machine) -> nearpeak.Machine:
    """The machine with the host that the rows were measured on; as it is where they do not say."""
    measured = [row["host_enqueue"] for row in rows if "host_enqueue" in row]
    if not measured or machine.achievable is None:
        return machine
    launch = dataclasses.replace(machine.achievable.launch, enqueue=median(measured))
    return dataclasses.replace(machine, achievable=dataclasses.replace(machine.achievable, launch=launch))


def run(seed: int, share: float, limit_seconds: float, file: Path | None) -> list[dict[str, Any]]:
    """All cases of a seed, until the time is up. What is there is written every fifty cases."""
    rows: list[dict[str, Any]] = []
    start = time.perf_counter()
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "seed": seed,
        "rows": rows,
    }
    for number, drawn in enumerate(cases(seed, share)):
        if time.perf_counter() - start > limit_seconds:
            print(f"the time is up before {drawn.family} {drawn.name}", file=sys.stderr)
            break
        torch.manual_seed(seed)
        try:
            rows.append(measure(drawn))
        except Exception as error:  # one case that this torch cannot run must not lose the others
            line = (str(error).splitlines() or [type(error).__name__])[0][:200]
            rows.append({"family": drawn.family, "number": drawn.number, "name": drawn.name, "error": line})
            print(f"{drawn.family} {drawn.name}: {line}", file=sys.stderr)
        torch.cuda.empty_cache()
        if file is not None and number % 50 == 0:
            _write(file, result)
    result["seconds"] = time.perf_counter() - start
    if file is not None:
        _write(file, result)
    return rows


def _write(file: Path, result: dict[str, Any]) -> None:
    text = json.dumps(result, separators=(",", ":")).replace('{"family"', '\n{"family"')
    file.write_text(text + "\n")


def fake_estimate(drawn: DrawnCase, machine: nearpeak.Machine) -> nearpeak.Estimate:
    """The estimate of a case from fake tensors."""
    with nearpeak.fake():
        case = drawn.build()
        if case.reset is not None:
            case.reset()
    return nearpeak.estimate(case, on=machine)


def dry(seed: int, share: float, machine: nearpeak.Machine) -> int:
    """Builds and estimates every case on fake tensors; the number that could not be."""
    failed = 0
    for drawn in cases(seed, share):
        try:
            estimate = fake_estimate(drawn, machine)
        except Exception:
            failed += 1
            print(f"{drawn.family} {drawn.name}: {traceback.format_exc().splitlines()[-1][:200]}")
            continue
        expected, unmodeled = estimate.expected_s, dict(estimate.coverage.unmodeled)
        shown = "-" if expected is None else f"{expected * 1e6:10.1f} us"
        print(f"{shown} {len(estimate.ops):4} ops  {drawn.family} {drawn.name} {unmodeled or ''}")
    return failed


def measured_and_expected(row: dict[str, Any], estimate: nearpeak.Estimate) -> tuple[float, float | None]:
    """What is compared: the wall time of a model, the device time of anything else.

    Where the host cannot launch ahead of the device, as with the thousands of kernels of some recurrent networks,
    `bench` has a wall time alone.
    """
    if row["family"] in MODELS:
        return row["pipelined"], estimate.expected_s
    if row["kind"] == "latency":
        return row["seconds"], estimate.expected_s
    return row["seconds"], estimate.expected_device_s


def score(files: Sequence[Path], machine: nearpeak.Machine, *, every: bool, family: str | None) -> list[dict[str, Any]]:
    """The rows of some files with what is expected of them."""
    scored = []
    for file in files:
        result = json.loads(file.read_text())
        on = with_host_of(result["rows"], machine)
        for row in result["rows"]:
            if "error" in row or (family and row["family"] != family):
                continue
            drawn = draw_case(result["seed"], row["family"], row["number"])
            if drawn.name != row["name"]:
                print(f"{row['family']} {row['name']} is drawn otherwise by now and left out")
                continue
            estimate = fake_estimate(drawn, on)
            measured, expected = measured_and_expected(row, estimate)
            scored.append(
                {
                    "family": row["family"],
                    "name": row["name"],
                    "seed": result["seed"],
                    "bound_s": estimate.as_written_s,
                    "expected_s": expected,
                    "measured_s": measured,
                    "ratio": None if expected is None else expected / measured,
                }
            )
    if every:
        for row in sorted(scored, key=lambda row: (row["family"], row["ratio"] or 0.0)):
            print(
                f"{row['ratio'] or 0.0:7.2f}  bound {row['bound_s'] * 1e6:9.1f}  expected "
                f"{(row['expected_s'] or 0.0) * 1e6:9.1f}  measured {row['measured_s'] * 1e6:9.1f} us  "
                f"{row['family']}: {row['name']}"
            )
    print(table(scored))
    return scored


def shares(rows: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    """The share of rows within 25 %, the share within 2 times, and the median ratio of expected to measured."""
    ratios = [row["ratio"] or 1e-9 for row in rows]
    near = sum(1 / NEAR <= ratio <= NEAR for ratio in ratios) / len(ratios)
    far = sum(1 / FAR <= ratio <= FAR for ratio in ratios) / len(ratios)
    return near, far, statistics.median(ratios)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The table of the documentation, by family."""
    lines = [
        "| family | cases | within 25 % | within 2 times | median of expected / measured |",
        "| --- |" + " ---: |" * 4,
    ]
    for family in (*COUNTS, "all"):
        own = [row for row in rows if family in (row["family"], "all")]
        if own:
            near, far, middle = shares(own)
            lines.append(f"| {family} | {len(own)} | {near:.0%} | {far:.0%} | {middle:.2f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--share", type=float, default=1.0, help="of the cases of each family (1)")
    parser.add_argument("--limit", type=float, default=200.0, metavar="SECONDS", help="stop after this time (200)")
    parser.add_argument("--json", type=Path, help="where the times are written")
    parser.add_argument("--dry", action="store_true", help="on fake tensors, without timing")
    parser.add_argument("--score", type=Path, nargs="+", metavar="FILE", help="score the times of earlier runs")
    parser.add_argument("--family", choices=tuple(COUNTS), help="with --score: only this family")
    parser.add_argument("--every", action="store_true", help="with --score: print every case")
    parser.add_argument("--on", default="h200-sxm", help="the machine of --dry and --score (h200-sxm)")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.score:
        rows = score(arguments.score, nearpeak.machine(arguments.on), every=arguments.every, family=arguments.family)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=0) + "\n")
        return 0
    if arguments.dry:
        return min(1, dry(arguments.seed, arguments.share, nearpeak.machine(arguments.on)))
    rows = run(arguments.seed, arguments.share, arguments.limit, arguments.json)
    failed = sum("error" in row for row in rows)
    print(f"{len(rows)} cases, {failed} could not run")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
