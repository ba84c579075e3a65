"""The error of products, experts and linear attention and of all gradients against float64, beside that of plain torch.

    PYTHONPATH=src python -m benchmarks.numerics.gemm --json benchmarks/results/product_numerics_h200.json
    python -m benchmarks.numerics.gemm --show benchmarks/results/product_numerics_h200.json

Five hundred calls, drawn at random: kinds that have to be compiled apart (dtype, 8 bits with scales of all sorts,
activation, gate, bias, residual, factors that lie across, experts, linear attention causal or not) from a list, and
sizes, numbers of experts and rows of each, heads that share keys and the size of numbers freely. First several
processes compile what the calls need. A call is within the rule if the largest error of its result and of each gradient
is at most twice that of the same maths in torch at the same precision, and 1.5 units in the last place more, for cases
in which torch happens to be exact; for gradients of linear attention also 1.5 units in float32 of what is summed up in
them. Numbers of 8 bits are beside their product in float32, rounded once. Some calls are made a hundred times over:
results and gradients are to be the same to the last bit. Exit code 1 where that, or the rule, does not hold.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.kernels.jobs import Jobs, run_workers, set_caches, work_through
from benchmarks.numerics.attention import ROUNDINGS, judged, shown, summary

FLOAT8_BLOCKS: dict[str, tuple[Any, Any]] = {
    "tensor": ("tensor", "tensor"),
    "row": ("row", "row"),
    "128": ((1, 128), (128, 128)),
}
EPS = 1e-6
STEP = 7
"""From kind to kind; it has no divisor in common with their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a kernel is compiled for."""

    operation: str = "product"
    """Or "grouped" (product), "experts" (a layer), "linear" (attention)."""
    dtype: str = "bfloat16"
    aligned: bool = True
    """Whether rows of matrices begin at multiples of 16 bytes; large sizes of these have kernels of Hopper."""
    activation: str = ""
    gated: bool = False
    bias: str = ""
    """Its dtype."""
    residual: bool = False
    across: str = ""
    """Which factor has columns, and not rows, next to each other: "x", "weight" or "both"."""
    recompute: bool = False
    scales: str = ""
    """Of 8 bits: "tensor", "row" or "128"."""
    fast: bool = False
    out_dtype: str = ""
    causal: bool = False
    dim: int = 0
    value_dim: int = 0

    def described(self) -> str:
        """What is not as in others."""
        values = asdict(self)
        rest = [name if values[name] is True else f"{name} {values[name]}" for name in list(values)[3:] if values[name]]
        return ", ".join([f"{self.operation} {self.dtype}{'' if self.aligned else ' odd'}", *rest])


KINDS = (
    Kind(),
    Kind(aligned=False),
    Kind(dtype="float16"),
    Kind(dtype="float32", aligned=False),
    Kind(dtype="float32", activation="gelu_tanh", bias="float32"),
    Kind(across="x"),
    Kind(across="weight", residual=True),
    Kind(across="both", aligned=False, bias="bfloat16"),
    Kind(activation="silu", gated=True),
    Kind(activation="silu", gated=True, aligned=False, residual=True),
    Kind(activation="gelu", gated=True, bias="float32", recompute=True),
    Kind(activation="gelu_tanh", bias="bfloat16"),
    Kind(activation="gelu", bias="float32", residual=True, dtype="float16"),
    Kind(activation="relu_squared", aligned=False, bias="bfloat16", recompute=True),
    Kind(activation="silu", residual=True),
    Kind(out_dtype="float32", residual=True),
    Kind(dtype="float8", scales="tensor"),
    Kind(dtype="float8", scales="row", fast=True, bias="bfloat16"),
    Kind(dtype="float8", scales="row", aligned=False),
    Kind(dtype="float8", scales="128"),
    Kind(dtype="float8", scales="128", activation="silu", gated=True),
    Kind(operation="grouped"),
    Kind(operation="grouped", aligned=False),
    Kind(operation="grouped", dtype="float16", activation="gelu"),
    Kind(operation="grouped", activation="silu"),
    Kind(operation="grouped", activation="gelu_tanh", aligned=False),
    Kind(operation="grouped", across="weight"),
    Kind(operation="grouped", dtype="float32", aligned=False),
    Kind(operation="grouped", dtype="float8", scales="row"),
    Kind(operation="grouped", dtype="float8", scales="128", activation="silu"),
    Kind(operation="experts", activation="silu"),
    Kind(operation="experts", activation="gelu", aligned=False),
    Kind(operation="linear", causal=True, dim=128, value_dim=128),
    Kind(operation="linear", dim=128, value_dim=128),
    Kind(operation="linear", causal=True, dim=64, value_dim=64),
    Kind(operation="linear", causal=True, dim=40, value_dim=72, aligned=False),
    Kind(operation="linear", dtype="float16", causal=True, dim=64, value_dim=128),
    Kind(operation="linear", dtype="float32", dim=36, value_dim=36),
    Kind(operation="linear", dtype="float32", causal=True, dim=64, value_dim=64),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmCall:
    """A call of a kind."""

    kind: Kind
    seed: int
    rows: int
    columns: int
    depth: int
    counts: tuple[int, ...] = ()
    """Rows of experts."""
    behind: int = 0
    """Rows that no expert has."""
    choices: int = 0
    batch: int = 0
    heads: int = 0
    group: int = 0
    """Heads of queries that share keys."""
    spread: float = 1.0
    """How large numbers are."""


def drawn(kind: Kind, seed: int, most: int) -> GemmCall:
    """A call whose matrices have up to `most` rows and columns."""
    at_random = random.Random(seed)

    def size(least: int, largest: int, step: int = 1) -> int:
        return at_random.randint(max(1, least // step), max(1, largest // step)) * step

    if kind.operation == "linear":
        return GemmCall(
            kind=kind,
            seed=seed,
            rows=size(1, most),
            columns=size(1, most),
            depth=kind.dim,
            batch=at_random.randint(1, 2),
            heads=at_random.randint(1, 3),
            group=at_random.choice((1, 1, 2, 4)),
            spread=at_random.choice((0.3, 1.0, 2.0)),
        )
    # half of the aligned ones are large enough for the kernels of Hopper
    least = most // 2 if kind.aligned and at_random.random() < 0.5 else 1
    step = (16 if kind.aligned else 1) * (2 if kind.aligned and kind.gated else 1)
    rows, columns, depth = size(least, most), size(least, most, step), size(least // 2, most // 2, step)
    if kind.aligned:  # two variants of rows, and no more to compile
        rows = at_random.choice((-(-rows // 16) * 16, rows | 1))
    else:
        columns, depth = columns | 1, depth | 1
    counts: tuple[int, ...] = ()
    if kind.operation in ("grouped", "experts"):
        counts = _counts(at_random, rows, at_random.choice((1, 3, 4, 8, 11)))
    return GemmCall(
        kind=kind,
        seed=seed,
        rows=rows,
        columns=columns,
        depth=depth,
        counts=counts,
        behind=at_random.choice((0, 0, 5)),
        choices=at_random.randint(1, min(3, max(1, len(counts)))),
        spread=at_random.choice((0.5, 1.0, 2.0)),
    )


def _counts(at_random: random.Random, rows: int, experts: int) -> tuple[int, ...]:
    """Some even, some skewed, and some with experts that have no rows."""
    chances = [at_random.choice((1.0, at_random.betavariate(1, 5) + 1e-3, 0.0)) for _ in range(experts)]
    chances = chances if any(chances) else [1.0] * experts
    counts = [0] * experts
    for expert in at_random.choices(range(experts), chances, k=rows):
        counts[expert] += 1
    return tuple(counts)


def random_calls(number: int, most: int, kinds: Sequence[Kind] = KINDS) -> list[GemmCall]:
    """Calls of all kinds in turn, in an order in which few calls are of all operations too."""
    return [drawn(kinds[seed * STEP % len(kinds)], seed, most) for seed in range(number)]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call with its tensors."""

    function: Callable[..., Any]
    """Of the tensors, by name."""
    tensors: Mapping[str, Any]
    """Those of floating point have gradients, unless `differentiable` is off."""
    differentiable: bool
    exact: Callable[..., Any] | None = None
    """The same for tensors in float64, where the function does not take them."""


def make_inputs(call: GemmCall, device: str) -> Prepared:
    import torch

    torch.manual_seed(call.seed)
    operation = {"grouped": _grouped, "experts": _experts, "linear": _linear}.get(call.kind.operation, _product)
    dtype = torch.bfloat16 if call.kind.scales else getattr(torch, call.kind.dtype)

    def randn(*shape: int, of: Any = dtype, spread: float = 1.0, across: bool = False) -> Any:
        tensor = (torch.randn(shape, device=device) * spread).to(of)
        return tensor.mT.contiguous().mT if across else tensor

    return operation(call, randn, device)


def _product(call: GemmCall, randn: Callable[..., Any], device: str) -> Prepared:
    import torch

    from nearpeak import kernels

    kind = call.kind
    lines = call.columns * (2 if kind.gated else 1)
    x = randn(call.rows, call.depth, spread=call.spread, across=kind.across in ("x", "both"))
    weight = randn(lines, call.depth, spread=call.depth**-0.5, across=kind.across in ("weight", "both"))
    tensors = {"x": x, "weight": weight}
    if kind.bias:
        tensors["bias"] = randn(lines, of=getattr(torch, kind.bias))
    if kind.residual:
        tensors["residual"] = randn(call.rows, call.columns)
    options: dict[str, Any] = {"activation": kind.activation or None, "gated": kind.gated, "recompute": kind.recompute}
    if kind.out_dtype:
        options["out_dtype"] = getattr(torch, kind.out_dtype)
    if kind.scales:
        return _product_of_eight(call, tensors, options)

    def function(x: Any, weight: Any, bias: Any = None, residual: Any = None) -> Any:
        given = dict(options)
        if x.dtype == torch.float64:
            given.pop("out_dtype", None)
        return kernels.gemm(x, weight, bias=bias, residual=residual, **given)

    return Prepared(function, tensors, True)


def _product_of_eight(call: GemmCall, tensors: dict[str, Any], options: dict[str, Any]) -> Prepared:
    from nearpeak import kernels
    from nearpeak.kernels.gemm import dequantize_operand

    (x, scale_x), (weight, scale_weight) = (
        kernels.quantize(tensors.pop(name), block=block)
        for name, block in zip(("x", "weight"), FLOAT8_BLOCKS[call.kind.scales], strict=True)
    )
    scales: dict[str, Any] = {"scale_x": scale_x, "scale_weight": scale_weight}

    def function(bias: Any = None) -> Any:
        return kernels.gemm(x, weight, bias=bias, fast_accumulate=call.kind.fast, **scales, **options)

    def exact(bias: Any = None) -> Any:
        wide = dequantize_operand(x, scale_x, 1).double(), dequantize_operand(weight, scale_weight, 128).double()
        return kernels.gemm(*wide, bias=bias, **options)

    return Prepared(function, tensors, False, exact)


def _grouped(call: GemmCall, randn: Callable[..., Any], device: str) -> Prepared:
    import torch

    from nearpeak import kernels
    from nearpeak.kernels.gemm.grouped import dequantize_rows, dequantize_weight

    kind, experts = call.kind, len(call.counts)
    lines = call.columns * (2 if kind.activation else 1)
    counts = torch.tensor(call.counts, dtype=torch.int32, device=device)
    rows = randn(call.rows + call.behind, call.depth, spread=call.spread)
    weight = randn(experts, lines, call.depth, spread=call.depth**-0.5, across=kind.across == "weight")
    activation: Any = kind.activation or None
    if not kind.scales:
        return Prepared(
            lambda rows, weight: kernels.grouped_gemm(rows, weight, counts, activation=activation),
            {"rows": rows, "weight": weight},
            True,
        )
    eight, row_scales = kernels.quantize(rows, block=(1, 128) if kind.scales == "128" else "row")
    matrices, scales = kernels.quantize(weight, block=(128, 128) if kind.scales == "128" else "tensor")
    scales = scales if kind.scales == "128" else scales.expand(experts).contiguous()
    given: dict[str, Any] = {"row_scales": row_scales, "weight_scales": scales}
    wide = dequantize_rows(eight, row_scales).double(), dequantize_weight(matrices, scales).double()
    return Prepared(
        lambda: kernels.grouped_gemm(eight, matrices, counts, activation=activation, **given),
        {},
        False,
        lambda: kernels.grouped_gemm(*wide, counts, activation=activation),
    )


def _experts(call: GemmCall, randn: Callable[..., Any], device: str) -> Prepared:
    import torch

    from nearpeak import kernels

    experts = len(call.counts)
    logits = torch.randn(call.rows, experts, device=device)
    chosen = logits.topk(call.choices)[1].to(torch.int32)
    chosen[torch.rand(chosen.shape, device=device) < 0.05] = -1  # some are dropped
    activation: Any = call.kind.activation
    return Prepared(
        lambda x, weights, gate_up, down: kernels.moe(x, weights, chosen, gate_up, down, activation=activation),
        {
            "x": randn(call.rows, call.depth, spread=call.spread),
            "weights": torch.rand(call.rows, call.choices, device=device),
            "gate_up": randn(experts, 2 * call.columns, call.depth, spread=call.depth**-0.5),
            "down": randn(experts, call.depth, call.columns, spread=call.columns**-0.5),
        },
        True,
    )


def _linear(call: GemmCall, randn: Callable[..., Any], device: str) -> Prepared:
    from nearpeak import kernels

    kind = call.kind
    queries = call.columns if kind.causal else call.rows
    tensors = {
        "query": randn(call.batch, call.heads * call.group, queries, kind.dim, spread=call.spread),
        "key": randn(call.batch, call.heads, call.columns, kind.dim, spread=call.spread),
        "value": randn(call.batch, call.heads, call.columns, kind.value_dim),
    }
    return Prepared(
        lambda query, key, value: kernels.linear_attention(query, key, value, causal=kind.causal, eps=EPS),
        tensors,
        True,
    )


CALLS, MOST, MOST_ON_CPU = 500, 1280, 40
REPEATS, REPEATED_CALLS = 100, 40
COMPILE_SECONDS = 80.0
TENSORS = (
    "result", "x", "weight", "bias", "residual", "rows", "weights", "gate_up", "down", "query", "key", "value",
)  # fmt: skip


def passes(
    prepared: Prepared, function: Callable[..., Any], tensors: Mapping[str, Any], above: Any
) -> tuple[dict[str, Any], Any]:
    """The result and all gradients, by name; and what came from above."""
    import torch

    if not prepared.differentiable:
        with torch.no_grad():
            return {"result": function(**tensors)}, above
    leaves = {name: one.detach().requires_grad_() for name, one in tensors.items()}
    result = function(**leaves)
    above = torch.randn_like(result) if above is None else above
    gradients = torch.autograd.grad(result, list(leaves.values()), above.to(result.dtype))
    return {"result": result.detach(), **dict(zip(leaves, gradients, strict=True))}, above


def compared(call: GemmCall, device: str) -> dict[str, dict[str, float]]:
    """Of the result and each gradient: its error, torch's, and how much more than twice that is allowed."""
    import torch

    from nearpeak import kernels

    prepared = make_inputs(call, device)
    actual, above = passes(prepared, prepared.function, prepared.tensors, None)
    with kernels.using("off"):
        low, _ = passes(prepared, prepared.function, prepared.tensors, above)
        wide = {name: one.double() for name, one in prepared.tensors.items()}
        exact, _ = passes(prepared, prepared.exact or prepared.function, wide, above)
    summed = linear_sums(wide, above, exact["result"], call.kind.causal) if call.kind.operation == "linear" else {}
    errors = {}
    for name, one in actual.items():
        right, torchs = exact[name].double(), low[name].double()
        same = one.shape == right.shape and bool(one.isfinite().all())
        if same and one.numel():
            differences = torch.stack(((one.double() - right).abs().max(), (torchs - right).abs().max()))
            error, of_torch = differences.tolist()
            size = float(right.abs().max())
        else:
            error, of_torch, size = 0.0 if same else float("inf"), 0.0, 0.0
        unit = torch.finfo(one.dtype).eps
        if name != "result":  # gradients of float32 are also made of numbers that were rounded to those of the result
            unit = max(unit, torch.finfo(actual["result"].dtype).eps)
        # sums of linear attention are made in float32, and what cancels out in them leaves its last place there
        more = ROUNDINGS * (unit * size + torch.finfo(torch.float32).eps * summed.get(name, 0.0))
        errors[name] = {"error": error, "torch": of_torch, "more": more}
    return errors


def linear_sums(wide: Mapping[str, Any], above: Any, result: Any, causal: bool) -> dict[str, float]:
    """The largest sums of absolute values that gradients of linear attention are made of, in float64.

    A gradient of weights is a difference, of `above @ value` and `above @ result`, which is near 0 where a query sees
    few keys, and with it gradients of queries and keys. That of values has shares of weights, which torch knows to the
    last place where they are 1: it divides a number by itself.
    """
    from nearpeak.kernels.linear_attention import feature_map

    query, key, value = (wide[name] for name in ("query", "key", "value"))
    above = above.double()
    group = query.shape[1] // key.shape[1]
    keys, values = (one.repeat_interleave(group, 1) for one in (feature_map(key), value))
    weights = feature_map(query) @ keys.mT
    sizes = (above @ values.mT).abs() + (above * result).sum(-1, keepdim=True).abs()
    if causal:
        weights, sizes = weights.tril(), sizes.tril()
    sums = weights.sum(-1, keepdim=True)
    sizes = sizes / sums
    slopes = {name: (one.clamp(max=0.0)).exp() for name, one in (("query", query), ("key", key))}
    by_key, by_value = (
        one.unflatten(1, (key.shape[1], group)).sum(2)
        for one in (sizes.mT @ feature_map(query), (weights / sums).mT @ above.abs())
    )
    return {
        "query": float((sizes @ keys * slopes["query"]).max()),
        "key": float((by_key * slopes["key"]).max()),
        "value": float(by_value.max()),
    }


def different_runs(call: GemmCall, device: str, runs: int) -> int:
    """How many of these runs had a result or a gradient that was not that of the first."""
    import torch

    prepared = make_inputs(call, device)
    first, above = passes(prepared, prepared.function, prepared.tensors, None)
    different = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(runs - 1):
        results, _ = passes(prepared, prepared.function, prepared.tensors, above)
        changed = [(one != first[name]).any() for name, one in results.items() if one.numel()]
        different += torch.stack(changed).any() if changed else 0
    return int(different)


def repeated(calls: Sequence[GemmCall], device: str, runs: int) -> dict[str, Any]:
    """Of the largest call of each kind, and no more than so many: how many runs there were, and which differed."""
    ordered = sorted(calls, key=lambda call: call.rows * call.columns)
    some = list({call.kind: call for call in ordered}.values())[:REPEATED_CALLS]
    different = {}
    for number, call in enumerate(some):
        _progress("repeated", number, len(some))
        found = different_runs(call, device, runs)
        if found:
            different[f"{call.kind.described()}, seed {call.seed}"] = found
    return {"calls": len(some), "runs": runs, "different": different}


def compile_jobs(
    calls: Sequence[GemmCall], device: str
) -> Iterator[tuple[str, Callable[[], dict[str, Callable[[], Any]]]]]:
    """A job for each kind: all of its calls, without references."""
    for number, kind in enumerate(dict.fromkeys(call.kind for call in calls)):
        mine = [call for call in calls if call.kind == kind]

        def both(mine: Sequence[GemmCall] = mine) -> None:
            for call in mine:
                prepared = make_inputs(call, device)
                passes(prepared, prepared.function, prepared.tensors, None)

        yield f"kind-{number}", lambda both=both: {"all": both}  # type: ignore[misc]


def _progress(what: str, number: int, whole: int) -> None:
    if number % 50 == 0:
        print(f"{what}: {number} of {whole}", file=sys.stderr, flush=True)


def report(content: Mapping[str, Any]) -> str:
    repeats = content["repeated"]
    lines = [f"- {name}: {number} runs differ" for name, number in repeats["different"].items()]
    text = f"Of {repeats['runs']} runs of each of {repeats['calls']} calls"
    text += ":\n" + "\n".join(lines) if lines else " all were the same to the last bit."
    return f"{shown(content)}\n\n{text}"


def wrong(content: Mapping[str, Any]) -> bool:
    return bool(content["failures"] or content["repeated"]["different"])


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=CALLS, help="of calls")
    parser.add_argument("--most", type=int, help="rows and columns of a matrix, and tokens")
    parser.add_argument("--repeats", type=int, help="runs of some calls, for results that are to be the same")
    parser.add_argument("--json", type=Path, help="write what was found here")
    parser.add_argument("--show", type=Path, help="print what was written, and compute nothing")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 14), help="that compile; 0: none")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    if options.show:
        content = json.loads(options.show.read_text(encoding="utf-8"))
        print(report(content))
        return 1 if wrong(content) else 0
    set_caches()
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
        options.processes = 0
    from nearpeak import kernels
    from nearpeak.kernels._runtime.choice import own_backends

    start = time.perf_counter()
    calls = random_calls(options.number, options.most or (MOST if device == "cuda" else MOST_ON_CPU))
    with kernels.using("require"), own_backends():
        if options.work:
            work_through(Jobs(options.work), compile_jobs(calls, device), lambda: None)
            return 0
        if options.processes:
            with tempfile.TemporaryDirectory(prefix="nearpeak-jobs-") as folder:
                command = [sys.executable, "-m", "benchmarks.numerics.gemm", "--work", folder]
                command += ["--number", str(options.number)]
                command += ["--most", str(options.most)] if options.most else []
                took = run_workers(command, options.processes, COMPILE_SECONDS)
                print(f"compiled in {took:.0f} s", file=sys.stderr, flush=True)
        rows = []
        for number, call in enumerate(calls):
            _progress("compared", number, len(calls))
            rows.append(judged(call, compared(call, device)))
        runs = repeated(calls, device, options.repeats or (REPEATS if device == "cuda" else 2))
    content = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": str(torch.__version__),
        "seconds": time.perf_counter() - start,
        **summary(rows, TENSORS),
        "repeated": runs,
    }
    print(report(content))
    if options.json:
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong(content) else 0


if __name__ == "__main__":
    raise SystemExit(main())
