"""Fits the constants of the kernel models to times that were measured on one GPU, and writes them into the package.

    PYTHONPATH=src:. python -m benchmarks.estimates.fit_expected benchmarks/results/expected_cases_h200_1.json ...

The rows are those of `expected_families` that were drawn for fitting, the cold times of `soundness` and the probes of
`calibrate.efficiency` (`benchmarks/results/kernel_probes_h200.json`). Each family of kernels is fitted by coordinate
descent: one constant after the other is made a little larger or smaller while the errors fall. An error is the
logarithm of expected over measured, at most `WORST`, with a step at `STEP` since what counts is the share of cases
within 25 %; a constant that leaves its first value pays for it, so that few rows do not bend it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import nearpeak
from benchmarks.estimates import soundness
from benchmarks.estimates.expected_cases import draw_case
from nearpeak.bound.dataflow import touches_in
from nearpeak.bound.expected import SHORTEST_KERNEL
from nearpeak.bound.floors import written_times
from nearpeak.bound.fusion import does_anything
from nearpeak.bound.kernel_models import Gpu, kernel_seconds
from nearpeak.calibrate.efficiency import kernel_probes
from nearpeak.machines.machine import Machine
from nearpeak.ops.cost import cost_of
from nearpeak.trace.cuda_ops.target import target_of
from nearpeak.trace.trace import trace

FILE = Path(nearpeak.__file__).parent / "bound" / "kernel_constants.json"
RESULTS = Path(__file__).parents[1] / "results"
WORST, STEP, STEP_WIDTH, STEP_HEIGHT = 1.2, 0.2, 0.05, 0.3
STIFFNESS = 0.5
ROUNDS = 12
NOT_FITTED = {"depth", "clock", "enqueue", "on_chip", "cached", "nothing"}
GROUPS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("pointwise", "cast", "movement", "creation", "random"): (
        "elementwise", "vector", "mixed", "permuted", "transposed", "instructions", "fill", "cat", "rolled",
        "generated",
    ),
    ("reduction",): ("reduction",),
    ("normalization",): (
        "softmax", "columns", "layer_norm", "layer_norm_backward", "group_norm", "batch_norm",
        "batch_norm_backward", "cudnn_batch_norm", "cudnn_batch_norm_backward",
    ),
    ("loss",): ("picked", "loss"),
    ("indexing",): ("rows", "scattered", "embedding_backward"),
    ("scan", "sorting"): ("scan", "sort", "topk"),
    ("pooling",): ("pooling",),
    ("recurrent",): ("recurrent",),
    ("fourier", "optimizer"): ("fourier", "foreach", "fused"),
    ("attention",): (
        "cudnn", "cudnn_backward", "efficient32", "efficient", "efficient_backward", "flash", "flash_backward",
        "attention",
    ),
    ("matrix",): ("matrix", "matrix_narrow", "matrix_wide", "matrix_vector"),
    ("convolution",): (
        "convolution", "convolution_narrow", "convolution_wide", "convolution_vector", "depthwise", "depthwise_last",
    ),
}  # fmt: skip
"""The constants that each family of rows decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The ops of one case as the models see them, and its time."""

    family: str
    seconds: float
    ops: tuple[tuple[Any, Any, float], ...]
    """Op, cost and bytes that the cache does not serve."""


def row_of(family: str, seconds: float, case: nearpeak.Case, machine: Machine) -> Row:
    recorded = trace(case.fn, *case.args, kwargs=dict(case.kwargs), target=target_of(machine))
    costs = [cost_of(op) for op in recorded.ops]
    times = written_times(recorded, costs, machine, "achievable", touches_in(recorded, costs))
    assert machine.achievable is not None
    bandwidth = machine.achievable.bandwidth
    ops = tuple(
        (op, cost, one[0] * bandwidth)
        for op, cost, one in zip(recorded.ops, costs, times, strict=True)
        if does_anything(cost)
    )
    return Row(family=family, seconds=seconds, ops=ops)


def rows_of(files: Sequence[Path], machine: Machine) -> Iterator[Row]:
    for file in files:
        result = json.loads(file.read_text())
        for row in result["rows"]:
            drawn = draw_case(result["seed"], row["family"], row["number"])
            if "error" in row or drawn.name != row["name"] or row["kind"] == "latency" or row["family"] == "model":
                continue
            if "NO_KERNELS" in row["flags"]:
                continue
            with nearpeak.fake():
                case = drawn.build()
            yield row_of(row["family"], row["seconds"], case, machine)
    known = {
        (row["family"], row["name"], row["dtype"]): row
        for row in json.loads((RESULTS / "soundness_h200.json").read_text())["rows"]
    }
    for call in soundness.calls():
        row = known.get((call.family, call.name, call.dtype), {})
        if "times" in row:
            try:
                with nearpeak.fake():
                    case = call.build()
                yield row_of(call.family, row["times"]["cold"]["seconds"], case, machine)
            except Exception as error:  # a backend or a shape that needs a GPU
                print(f"left out: {call.family} {call.name}: {str(error).splitlines()[0][:80]}")
    probes = json.loads((RESULTS / "kernel_probes_h200.json").read_text())
    with nearpeak.fake():
        named = {probe.name: probe for probe in kernel_probes(torch.device("cuda"))}
    for probe in probes["rows"]:
        with nearpeak.fake(), torch.no_grad():
            call_of_probe = named[probe["name"]].build(probe["size"])
        yield row_of(probe["family"], probe["seconds"], nearpeak.Case(lambda call=call_of_probe: call()), machine)


def expected(row: Row, gpu: Gpu, constants: dict[str, dict[str, float]]) -> float:
    seconds = [kernel_seconds(op, cost, missed, gpu, constants) for op, cost, missed in row.ops]
    kernels = sum(value > SHORTEST_KERNEL for value in seconds)
    common = constants["gpu"]
    start = common["backward"] if any(op.phase == "backward" for op, _, _ in row.ops) else 0.0
    return sum(seconds) + start + common["gap"] * max(0, kernels - 1)


def error(rows: Sequence[Row], gpu: Gpu, constants: dict[str, dict[str, float]]) -> float:
    total = 0.0
    for row in rows:
        size = abs(math.log(expected(row, gpu, constants) / row.seconds))
        total += min(size, WORST) + STEP_HEIGHT * min(1.0, max(0.0, size - STEP) / STEP_WIDTH)
    return total


def fit(groups: Sequence[str], rows: Sequence[Row], machine: Machine, constants: dict[str, dict[str, float]]) -> None:
    """Changes the constants of some groups in place."""
    gpu = Gpu.of(machine, constants)
    assert gpu is not None
    places = [(group, key) for group in groups for key, value in constants[group].items() if value > 0]
    places = [place for place in places if place[1] not in NOT_FITTED]
    first = {place: constants[place[0]][place[1]] for place in places}
    factors = dict.fromkeys(places, 1.5)

    def cost() -> float:
        moved = sum(math.log(constants[group][key] / first[group, key]) ** 2 for group, key in places)
        return error(rows, gpu, constants) + STIFFNESS * moved

    best = cost()
    for _ in range(ROUNDS):
        for group, key in places:
            value = constants[group][key]
            for factor in (factors[group, key], 1 / factors[group, key]):
                constants[group][key] = value * factor
                if key.startswith("bytes") and constants[group][key] < 1.0:  # no kernel moves less than its bytes
                    continue
                now = cost()
                if now < best:
                    best, value = now, constants[group][key]
                    break
            else:
                factors[group, key] = 1 + 0.6 * (factors[group, key] - 1)
            constants[group][key] = value
    for group, key in places:
        constants[group][key] = float(f"{constants[group][key]:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="results of expected_families that were drawn for fitting")
    parser.add_argument("--write", type=Path, default=FILE, metavar="FILE", help="the constants (the package's own)")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    machine = nearpeak.machine("h200-sxm")
    data = json.loads(FILE.read_text())
    rows = list(rows_of(arguments.files, machine))
    for families, groups in GROUPS.items():
        own = [row for row in rows if row.family in families]
        fit(groups, own, machine, data["constants"])
        gpu = Gpu.of(machine, data["constants"])
        assert gpu is not None
        near = sum(abs(math.log(expected(row, gpu, data["constants"]) / row.seconds)) < math.log(1.25) for row in own)
        print(f"{', '.join(families):50} {len(own):4} rows, {near / len(own):.0%} within 25 %")
    data |= {"rows": len(rows), "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    arguments.write.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
