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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

import nearpeak
from benchmarks.estimates import soundness
from benchmarks.estimates.expected_cases import draw_case
from benchmarks.estimates.expected_families import MODELS
from nearpeak.bound.dataflow import touches_in
from nearpeak.bound.expected import SHORTEST_KERNEL
from nearpeak.bound.floors import written_times
from nearpeak.bound.fusion import does_anything
from nearpeak.bound.kernel_models import Constants, Gpu, kernel_seconds
from nearpeak.calibrate.efficiency import kernel_probes
from nearpeak.machines.machine import Machine
from nearpeak.ops.cost import cost_of
from nearpeak.trace.cuda_ops.target import target_of
from nearpeak.trace.trace import trace

Place = tuple[str, str]
"""A group of constants and a name in it."""
FILE = Path(nearpeak.__file__).parent / "bound" / "kernel_constants.json"
RESULTS = Path(__file__).parents[1] / "results"
WORST, STEP, STEP_WIDTH, STEP_HEIGHT = 1.2, 0.2, 0.05, 0.3
STIFFNESS = 0.5
LEAST_GAIN = 1e-9
FORGOTTEN = 0.2
"""Standard deviation of the logarithm by which first values are off in a cross-validation."""
ROUNDS = 12
NOT_FITTED = {"depth", "clock", "enqueue", "on_chip", "cached", "nothing", "wait", "launch"}
GROUPS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("pointwise", "cast", "movement", "creation", "random", "activation"): (
        "elementwise", "vector", "mixed", "permuted", "transposed", "instructions", "fill", "cat", "rolled",
        "generated",
    ),
    ("reduction",): ("reduction",),
    ("normalization",): (
        "softmax", "columns", "layer_norm", "layer_norm_backward", "group_norm", "batch_norm",
        "batch_norm_backward", "cudnn_batch_norm", "cudnn_batch_norm_backward",
    ),
    ("loss",): ("picked", "loss"),
    ("indexing", "selection"): ("rows", "scattered", "embedding_backward", "selected", "bags"),
    ("scan", "sorting"): ("scan", "sort", "topk"),
    ("factorization",): ("factorization", "distance"),
    ("pooling", "resizing"): ("pooling",),
    ("recurrent",): ("recurrent",),
    ("fourier", "optimizer"): ("fourier", "foreach", "fused"),
    ("attention",): (
        "cudnn", "cudnn_backward", "efficient32", "efficient", "efficient_backward", "flash", "flash_backward",
        "attention",
    ),
    ("matrix", "contraction"): ("matrix", "matrix_narrow", "matrix_wide", "matrix_vector"),
    ("convolution", "spatial"): (
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
    file: str = ""


def row_of(family: str, seconds: float, case: nearpeak.Case, machine: Machine, file: str = "") -> Row:
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
    return Row(family=family, seconds=seconds, ops=ops, file=file)


def rows_of(files: Sequence[Path], machine: Machine) -> Iterator[Row]:
    for file in files:
        result = json.loads(file.read_text())
        for row in result["rows"]:
            drawn = draw_case(result["seed"], row["family"], row["number"])
            if "error" in row or drawn.name != row["name"] or row["kind"] == "latency" or row["family"] in MODELS:
                continue
            if "NO_KERNELS" in row["flags"]:
                continue
            with nearpeak.fake():
                case = drawn.build()
            yield row_of(row["family"], row["seconds"], case, machine, file.name)
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


def expected(row: Row, gpu: Gpu, constants: Constants) -> float:
    seconds = [kernel_seconds(op, cost, missed, gpu, constants) for op, cost, missed in row.ops]
    kernels = sum(value > SHORTEST_KERNEL for value in seconds)
    common = constants["gpu"]
    start = common["backward"] if any(op.phase == "backward" for op, _, _ in row.ops) else 0.0
    return sum(seconds) + start + common["gap"] * max(0, kernels - 1)


def error(row: Row, gpu: Gpu, constants: Constants) -> float:
    size = abs(math.log(expected(row, gpu, constants) / row.seconds))
    return min(size, WORST) + STEP_HEIGHT * min(1.0, max(0.0, size - STEP) / STEP_WIDTH)


class _Recorded(dict[str, float]):
    """The constants of one group, which writes down those that a model asks for."""

    def __init__(self, group: str, values: Mapping[str, float], places: set[Place]) -> None:
        super().__init__(values)
        self._group, self._places = group, places

    def __getitem__(self, key: str) -> float:
        self._places.add((self._group, key))
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._places.add((self._group, key))
        return super().get(key, default)


def rows_by_constant(rows: Sequence[Row], gpu: Gpu, constants: Constants) -> dict[Place, list[int]]:
    """The numbers of the rows whose expectation uses a constant."""
    users: dict[Place, list[int]] = {}
    for number, row in enumerate(rows):
        places: set[Place] = set()
        expected(row, gpu, {group: _Recorded(group, values, places) for group, values in constants.items()})
        for place in places:
            users.setdefault(place, []).append(number)
    return users


def fit(groups: Sequence[str], rows: Sequence[Row], machine: Machine, constants: dict[str, dict[str, float]]) -> None:
    """Changes the constants of some groups in place."""
    gpu = Gpu.of(machine, constants)
    assert gpu is not None
    places = [(group, key) for group in groups for key, value in constants[group].items() if value > 0]
    places = [place for place in places if place[1] not in NOT_FITTED]
    first = {place: constants[place[0]][place[1]] for place in places}
    factors = dict.fromkeys(places, 1.5)
    errors: list[float] = []
    for round_number in range(ROUNDS):
        if round_number % 3 == 0:  # which rows use a constant may depend on the others
            users = rows_by_constant(rows, gpu, constants)
            errors = [error(row, gpu, constants) for row in rows]
        for group, key in places:
            numbers, value = users.get((group, key), []), constants[group][key]
            if not numbers:
                continue
            moved = math.log(value / first[group, key])
            before = sum(errors[number] for number in numbers) + STIFFNESS * moved**2
            for factor in (factors[group, key], 1 / factors[group, key]):
                if key.startswith("bytes") and value * factor < 1.0:  # no kernel moves less than its bytes
                    continue
                constants[group][key] = value * factor
                changed = [error(rows[number], gpu, constants) for number in numbers]
                if sum(changed) + STIFFNESS * (moved + math.log(factor)) ** 2 < before - LEAST_GAIN:
                    for number, size in zip(numbers, changed, strict=True):
                        errors[number] = size
                    break
            else:
                constants[group][key] = value
                factors[group, key] = 1 + 0.6 * (factors[group, key] - 1)
    for group, key in places:
        constants[group][key] = float(f"{constants[group][key]:.3g}")


def near_and_far(rows: Sequence[Row], machine: Machine, constants: Constants) -> tuple[int, int]:
    """How many rows are within 25 %, and how many within a factor of 2."""
    gpu = Gpu.of(machine, constants)
    assert gpu is not None
    sizes = [abs(math.log(expected(row, gpu, constants) / row.seconds)) for row in rows]
    return sum(size <= math.log(1.25) for size in sizes), sum(size <= math.log(2.0) for size in sizes)


def cross_validate(files: Sequence[Path], rows: Sequence[Row], machine: Machine, first: Constants) -> None:
    """For each file: the constants are fitted without its rows, from first values that are off at random, and it is
    scored."""
    for left_out in files:
        near = far = count = 0
        for families, groups in GROUPS.items():
            constants = {group: dict(values) for group, values in first.items()}
            random = Random(left_out.name)
            for group in groups:
                for key, value in constants[group].items():
                    if key not in NOT_FITTED:
                        least = 1.0 if key.startswith("bytes") else 0.0
                        constants[group][key] = max(least, value * math.exp(random.gauss(0.0, FORGOTTEN)))
            own = [row for row in rows if row.family in families]
            fit(groups, [row for row in own if row.file != left_out.name], machine, constants)
            scored = [row for row in own if row.file == left_out.name]
            good, fair = near_and_far(scored, machine, constants)
            near, far, count = near + good, far + fair, count + len(scored)
        print(f"{left_out.name}: {count} rows, {near / count:.1%} within 25 %, {far / count:.1%} within 2 times")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="results of expected_families that were drawn for fitting")
    parser.add_argument("--write", type=Path, default=FILE, metavar="FILE", help="the constants (the package's own)")
    parser.add_argument(
        "--cross", action="store_true", help="fit without each file in turn and score it; write nothing"
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    machine = nearpeak.machine("h200-sxm")
    data = json.loads(FILE.read_text())
    rows = list(rows_of(arguments.files, machine))
    if arguments.cross:
        cross_validate(arguments.files, rows, machine, data["constants"])
        return
    for families, groups in GROUPS.items():
        own = [row for row in rows if row.family in families]
        if not own:
            continue
        fit(groups, own, machine, data["constants"])
        near, far = near_and_far(own, machine, data["constants"])
        share = f"{near / len(own):.0%} within 25 %, {far / len(own):.0%} within 2 times"
        print(f"{', '.join(families):50} {len(own):4} rows, {share}")
    data |= {"rows": len(rows), "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    arguments.write.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
