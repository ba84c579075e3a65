"""Fits the constants of serving on measured runs and writes src/nearpeak/plan/serving/serving.json.

    python -m benchmarks.plan.fit_serving [--no-leave-out] [benchmarks/measurements/measured_inference.csv]

One set for all sources: shares by generation of GPUs and dtype, overheads by engine. The residual is the logarithm of
predicted over measured; the loss grows linearly beyond 10 %, so that runs with a fault of their own pull little. A
prior keeps constants that few rows determine near a plausible value. Each source is then left out in turn, for
validation.

`PRODUCTS` are products timed one by one, from aiconfigurator's tables for vLLM (bfloat16, n and k of 4096 and more):
the median rate at which weights are read with one token, and the median share of the datasheet's peak by tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nearpeak._files import replace_file
from nearpeak._records import to_json
from nearpeak.errors import UsageError
from nearpeak.machines import catalogue
from nearpeak.plan.serving.constants import EngineConstants, GenerationConstants, ServingConstants, serving_generation
from nearpeak.plan.serving.step import p_norm
from nearpeak.plan.validation.inference import MeasuredInference, predict_quantities, read_inference

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "benchmarks/measurements/measured_inference.csv"
OUT = ROOT / "src/nearpeak/plan/serving/serving.json"
KNEE = 0.10
WEIGHTS = {"decode": 2.0, "tpot": 1.0, "ttft": 0.4, "throughput": 0.5}
PRODUCT_WEIGHT = 6.0

STREAMED = {"a100-sxm-80gb": 1.41e12, "h100-sxm": 2.68e12, "h200-sxm": 3.57e12, "b200": 5.34e12}
PRODUCTS = {
    "a100-sxm-80gb": {128: 0.49, 512: 0.81, 4096: 0.90},
    "h100-sxm": {128: 0.35, 512: 0.82, 4096: 0.80},
    "h200-sxm": {128: 0.47, 512: 0.82, 4096: 0.78},
    "b200": {128: 0.31, 512: 0.66, 4096: 0.70},
    "gb200": {128: 0.29, 512: 0.64, 4096: 0.62},
}
SIDE = 8192
"""Of the square product that stands for those with n and k of 4096 and more."""

Path_ = tuple[str, ...]
US = 1e-6
START: dict[Path_, tuple[float, float]] = {
    ("generations", "ampere", "stream"): (0.72, 0.15),
    ("generations", "ampere", "gap"): (1.0, 0.1),
    ("generations", "ampere", "bfloat16"): (0.85, 0.1),
    ("generations", "hopper", "stream"): (0.78, 0.15),
    ("generations", "hopper", "gap"): (1.0, 0.1),
    ("generations", "hopper", "bfloat16"): (0.80, 0.1),
    ("generations", "hopper", "float8"): (0.60, 0.3),
    ("generations", "blackwell", "stream"): (0.68, 0.15),
    ("generations", "blackwell", "gap"): (1.0, 0.1),
    ("generations", "blackwell", "bfloat16"): (0.68, 0.1),
    ("generations", "blackwell", "float8"): (0.60, 0.3),
    ("generations", "blackwell", "float4"): (0.45, 0.3),
    ("generations", "blackwell-gddr", "stream"): (0.75, 0.08),
    ("generations", "blackwell-gddr", "gap"): (1.0, 0.1),
    ("generations", "blackwell-gddr", "bfloat16"): (0.70, 0.15),
    ("generations", "blackwell-gddr", "float8"): (0.60, 0.3),
    ("generations", "blackwell-gddr", "float4"): (0.45, 0.3),
    ("cache",): (0.9, 0.3),
    ("attention",): (0.50, 0.3),
    ("attention_narrow",): (1.5, 0.2),
    ("expert_stream",): (0.7, 0.3),
    ("expert_compute",): (0.6, 0.3),
    ("expert_rows",): (16.0, 0.2),  # the least rows of a tile
    ("expert_width",): (100.0, 0.7),
    ("narrow", "int8"): (0.85, 0.3),
    ("narrow", "int4"): (0.8, 0.3),
    ("narrow", "fp4"): (0.8, 0.15),
    ("narrow_compute",): (0.7, 0.15),
    ("variety",): (0.80, 0.10),
    ("skew",): (0.3, 0.7),
    ("occupancy",): (0.9, 0.1),
    ("burst",): (0.1, 0.7),
}
"""Where each constant starts, and the standard deviation of the prior on its logarithm."""
SERVERS = ("vllm", "sglang", "trtllm")
OVERHEADS = {
    "layer": (25 * US, 0.2),
    "expert_layer": (25 * US, 0.2),
    "step": (1e-3, 0.3),
    "sequence": (20 * US, 0.5),
    "launch": (300 * US, 0.5),
    "expert_launch": (300 * US, 0.5),
    "first": (20e-3, 0.7),
}
"""What servers have in common; each differs from it by a factor with its own, narrower prior."""
OWN = 0.3
for _name, _prior in OVERHEADS.items():
    START[("servers", _name)] = _prior
    START |= {("engines", _engine, _name): (1.0, OWN) for _engine in SERVERS}
START |= {
    ("engines", "gpt-fast", "layer"): (20 * US, 0.7),
    ("engines", "gpt-fast", "expert_layer"): (20 * US, 0.7),
    ("engines", "gpt-fast", "step"): (100 * US, 1.0),
    ("engines", "gpt-fast", "sequence"): (20 * US, 1.0),
    ("engines", "gpt-fast", "launch"): (300 * US, 0.7),
    ("engines", "gpt-fast", "expert_launch"): (300 * US, 0.7),
    ("engines", "gpt-fast", "first"): (1e-3, 1.0),
}
START[("collective",)] = (0.5, 0.5)
FIXED_COLLECTIVE = {"gpt-fast": 1.0}
"""gpt-fast reduces with NCCL; the others have kernels of their own, with one constant for all."""
OVERLAPPING = ("sglang", "trtllm")
"""Their schedulers work one step ahead; vLLM's did not in the versions of the rows."""
RESERVING = ("trtllm",)
"""Its default policy (GUARANTEED_NO_EVICT); the others take requests in and put some back when the cache is full."""
LIMITS = {
    "stream": 0.93,
    "cache": 1.2,
    "bfloat16": 0.95,
    "float8": 0.9,
    "float4": 0.85,
    "attention": 0.75,
    "variety": 1.0,
    "occupancy": 1.0,
    "attention_narrow": 2.0,
}
LIMITS |= {
    "expert_stream": 1.0,
    "expert_compute": 1.0,
    "narrow_compute": 1.0,
    "int8": 1.0,
    "int4": 1.0,
    "fp4": 1.0,
    "burst": 0.5,
    "collective": 1.0,
}


def build(values: dict[Path_, float], source: str, rows: Sequence[MeasuredInference]) -> ServingConstants:
    """The constants from a flat table."""
    names = dict.fromkeys(path[1] for path in values if path[0] == "generations")
    seen = counts(rows)
    generations = {}
    for name in names:
        compute = {
            path[2]: value
            for path, value in values.items()
            if path[:2] == ("generations", name) and path[2] not in ("stream", "gap")
        }
        generations[name] = GenerationConstants(
            stream=values["generations", name, "stream"],
            gap=values["generations", name, "gap"],
            compute=compute,
            rows={key: seen[name, key] for key in ("stream", *compute) if seen[name, key]},
        )
    engines = {}
    for name in dict.fromkeys(path[1] for path in values if path[0] == "engines"):
        fields = {path[2]: value for path, value in values.items() if path[:2] == ("engines", name)}
        if name in SERVERS:
            fields = {key: value * values["servers", key] for key, value in fields.items()}
        own = FIXED_COLLECTIVE.get(name, values[("collective",)])
        engines[name] = EngineConstants(
            **fields,
            collective=own,
            overlaps=name in OVERLAPPING,
            grouped=name in SERVERS,
            reserves=name in RESERVING,
            rows=seen[name, "engine"],
        )
    return ServingConstants(
        source=source,
        generations=generations,
        engines=engines,
        narrow={path[1]: value for path, value in values.items() if path[0] == "narrow"},
        **{path[0]: value for path, value in values.items() if len(path) == 1 and path[0] != "collective"},
        fitted_on=dict(Counter(row.source for row in rows)),
    )


def counts(rows: Sequence[MeasuredInference]) -> Counter[tuple[str, str]]:
    """Rows behind each share and each engine."""
    seen: Counter[tuple[str, str]] = Counter()
    for row in rows:
        name = serving_generation(row.deployment.cluster.machine)
        seen[name, "stream"] += 1
        for dtype in {row.deployment.precision.compute, row.deployment.precision.rest_compute}:
            seen[name, dtype] += 1
        seen[row.deployment.engine, "engine"] += 1
    return seen


def touches(path: Path_, row: MeasuredInference) -> bool:
    """Whether a constant can matter for a row."""
    here = row.deployment
    if path[0] == "generations":
        chosen = here.precision
        used = ("stream", "gap", "bfloat16", chosen.compute, chosen.rest_compute)
        return serving_generation(here.cluster.machine) == path[1] and path[2] in used
    if path[0] == "engines":
        return here.engine == path[1] and (here.model.is_moe or not path[2].startswith("expert"))
    if path[0] == "servers":
        return here.engine in SERVERS and (here.model.is_moe or not path[1].startswith("expert"))
    if path[0].startswith("expert") or path[0] in ("skew", "variety"):
        return here.model.is_moe
    if path[0] == "narrow_compute":
        return here.precision.weight_only
    if path[0] == "narrow":
        return here.precision.name == path[1] and here.precision.weight_only
    return True


def row_residuals(row: MeasuredInference, constants: ServingConstants) -> list[float]:
    """log(predicted / measured) of each quantity; infinite where the planner says that it does not fit."""
    try:
        answers = predict_quantities(row, constants)
    except UsageError:
        return [math.nan] * len(row.quantities())
    return [math.log(answers[name][0] / actual) for name, actual in row.quantities()]


def product_residuals(constants: ServingConstants) -> list[float]:
    """The same for single products."""
    residuals = []
    for name, shares in PRODUCTS.items():
        machine = catalogue.find(name)
        assert machine.theoretical is not None
        reached = constants.generations[serving_generation(machine)]
        bandwidth = machine.theoretical.bandwidth * reached.stream
        peak = machine.theoretical.peak("bfloat16")
        if name in STREAMED:
            residuals.append(math.log(STREAMED[name] / bandwidth))
        for tokens, share in shares.items():
            flops = 2.0 * tokens * SIDE * SIDE
            seconds = p_norm(
                (SIDE * SIDE + 2 * tokens * SIDE) * 2 / bandwidth, flops / peak / reached.compute["bfloat16"]
            )
            residuals.append(math.log(seconds * share / (flops / peak)))
    return residuals


def fit(rows: Sequence[MeasuredInference], source: str, start: dict[Path_, float], rounds: int) -> dict[Path_, float]:
    """Gauss-Newton with weights that make the loss linear beyond the knee."""
    paths = list(START)
    prior = np.array([math.log(START[path][0]) for path in paths])
    loose = np.array([START[path][1] for path in paths])
    limit = np.array([math.log(LIMITS.get(path[-1], 1e9)) for path in paths])
    vector = np.minimum(np.array([math.log(start[path]) for path in paths]), limit)
    weights = np.array([WEIGHTS[name] for row in rows for name, _ in row.quantities()])
    offsets = np.cumsum([0, *(len(row.quantities()) for row in rows)])
    affected = [[i for i, row in enumerate(rows) if touches(path, row)] for path in paths]

    def table(point: np.ndarray) -> dict[Path_, float]:
        return {path: math.exp(value) for path, value in zip(paths, point, strict=True)}

    def residuals(point: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        constants = build(table(point), source, ())
        flat = [value for row in rows for value in row_residuals(row, constants)]
        return np.array(flat), np.array(product_residuals(constants))

    def cost(run: np.ndarray, product: np.ndarray, point: np.ndarray) -> float:
        size = np.abs(np.nan_to_num(run))
        huber = np.where(size < KNEE, size**2 / 2, KNEE * (size - KNEE / 2)) / KNEE**2
        pull = ((point - prior) / loose) ** 2 / 2
        return float((weights * huber).sum() + PRODUCT_WEIGHT * (product**2).sum() / 2 / KNEE**2 + pull.sum())

    run, product = residuals(vector)
    best = cost(run, product, vector)
    damping = 1e-2
    for turn in range(rounds):
        jacobian = np.zeros((len(run), len(paths)))
        of_products = np.zeros((len(product), len(paths)))
        for column, path in enumerate(paths):
            moved = vector.copy()
            moved[column] += 0.02
            constants = build(table(moved), source, ())
            for index in affected[column]:
                new = row_residuals(rows[index], constants)
                span = slice(offsets[index], offsets[index + 1])
                jacobian[span, column] = (np.array(new) - run[span]) / 0.02
            if path[0] == "generations":
                of_products[:, column] = (np.array(product_residuals(constants)) - product) / 0.02
        good = np.isfinite(run) & np.isfinite(jacobian).all(axis=1)
        size = np.maximum(np.abs(run[good]), KNEE)
        w = weights[good] * KNEE / size / KNEE**2
        j, r = jacobian[good], run[good]
        hessian = (
            j.T @ (w[:, None] * j) + PRODUCT_WEIGHT / KNEE**2 * of_products.T @ of_products + np.diag(1 / loose**2)
        )
        slope = j.T @ (w * r) + PRODUCT_WEIGHT / KNEE**2 * of_products.T @ product + (vector - prior) / loose**2
        improved = False
        for _ in range(6):
            move = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), -slope)
            candidate = np.minimum(vector + np.clip(move, -0.7, 0.7), limit)
            new_run, new_product = residuals(candidate)
            new = cost(new_run, new_product, candidate)
            if new < best:
                improved = True
                break
            damping *= 5
        if not improved:
            break
        gain, best, vector, run, product = best - new, new, candidate, new_run, new_product
        damping = max(damping / 5, 1e-4)
        print(f"  {source}: round {turn + 1}, loss {best:.1f}", file=sys.stderr, flush=True)
        if gain < 1e-3 * best:
            break
    return table(vector)


def leave_out_campaigns(rows: Sequence[MeasuredInference], start: dict[Path_, float]) -> None:
    """Prints the errors of each model and engine of each source, predicted without any row of it."""
    for campaign in dict.fromkeys(row.campaign for row in rows):
        left = [row for row in rows if row.campaign == campaign]
        values = fit([row for row in rows if row.campaign != campaign], f"without {campaign}", start, 3)
        constants = build(values, campaign, ())
        errors: dict[str, list[float]] = {}
        for row in left:
            for (name, _), error in zip(row.quantities(), row_residuals(row, constants), strict=True):
                errors.setdefault(name, []).append(math.expm1(error))
        for name, found in errors.items():
            sizes = np.abs(found)
            print(f"{campaign:45s} {name:10s} {len(found):4d} mean {sizes.mean():6.1%} median {np.median(sizes):6.1%}")


def spread(rows: Sequence[MeasuredInference], constants: dict[str, ServingConstants]) -> dict[str, tuple[float, float]]:
    """Measured over predicted by quantity, each source with the constants that never saw it: 10th, 90th percentile."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        for (name, _), error in zip(row.quantities(), row_residuals(row, constants[row.source]), strict=True):
            ratios.setdefault(name, []).append(math.exp(-error))
    return {
        name: (round(float(np.percentile(values, 10)), 3), round(float(np.percentile(values, 90)), 3))
        for name, values in ratios.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="?", type=Path, default=ROWS, help="the CSV file of measurements")
    parser.add_argument("--campaigns", action="store_true", help="print errors of left-out campaigns, write nothing")
    parser.add_argument("--no-leave-out", action="store_true", help="do not fit without each source")
    parser.add_argument("--only", action="append", default=[], metavar="SOURCE", help="leave out these sources alone")
    arguments = parser.parse_args()
    path = arguments.rows
    rows, skipped = read_inference(path)
    print(f"{len(rows)} rows, {len(skipped)} skipped", file=sys.stderr)
    text = f"benchmarks.plan.fit_serving on {path.name}: {len(rows)} rows"
    values = fit(rows, text, {key: start for key, (start, _) in START.items()}, 12)
    if arguments.campaigns:
        leave_out_campaigns(rows, values)
        return
    whole = build(values, text, rows)
    data = to_json(whole)
    unseen: dict[str, ServingConstants] = {}
    if not arguments.no_leave_out:
        for source in arguments.only or dict.fromkeys(row.source for row in rows):
            kept = [row for row in rows if row.source != source]
            name = f"{text}, without {source}"
            large = len(rows) - len(kept) > 20  # a few rows move little: their fit starts where the whole one ended
            first = {key: start for key, (start, _) in START.items()} if large else values
            left = fit(kept, name, first, 8 if large else 3)
            unseen[source] = build(left, name, kept)
        data["without"] = to_json(unseen)
        if not arguments.only:
            data["spread"] = to_json(spread(rows, unseen))
    replace_file(OUT, (json.dumps(data, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
