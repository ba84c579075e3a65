"""The error of products, experts and linear attention and of all gradients against float64, beside that of plain torch.

    PYTHONPATH=src python benchmarks/product_numerics.py --json benchmarks/results/product_numerics_h200.json
    python benchmarks/product_numerics.py --show benchmarks/results/product_numerics_h200.json

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
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attention_numerics import ROUNDINGS, judged, shown, summary
from kernel_jobs import Jobs, compiled_by, set_caches, work
from product_calls import Drawn, Prepared, all_drawn, made

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
    found = torch.autograd.grad(result, list(leaves.values()), above.to(result.dtype))
    return {"result": result.detach(), **dict(zip(leaves, found, strict=True))}, above


def compared(call: Drawn, device: str) -> dict[str, dict[str, float]]:
    """Of the result and each gradient: its error, torch's, and how much more than twice that is allowed."""
    import torch

    from nearpeak import kernels

    prepared = made(call, device)
    actual, above = passes(prepared, prepared.function, prepared.tensors, None)
    with kernels.using("off"):
        low, _ = passes(prepared, prepared.function, prepared.tensors, above)
        wide = {name: one.double() for name, one in prepared.tensors.items()}
        exact, _ = passes(prepared, prepared.exact or prepared.function, wide, above)
    summed = linear_sums(wide, above, exact["result"], call.kind.causal) if call.kind.operation == "linear" else {}
    found = {}
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
        found[name] = {"error": error, "torch": of_torch, "more": more}
    return found


def linear_sums(wide: Mapping[str, Any], above: Any, result: Any, causal: bool) -> dict[str, float]:
    """The largest sums of absolute values that gradients of linear attention are made of, in float64.

    A gradient of weights is a difference, of `above @ value` and `above @ result`, which is near 0 where a query sees
    few keys, and with it gradients of queries and keys. That of values has shares of weights, which torch knows to the
    last place where they are 1: it divides a number by itself.
    """
    from nearpeak.kernels.operations.linear_attention import features

    query, key, value = (wide[name] for name in ("query", "key", "value"))
    above = above.double()
    group = query.shape[1] // key.shape[1]
    keys, values = (one.repeat_interleave(group, 1) for one in (features(key), value))
    weights = features(query) @ keys.mT
    sizes = (above @ values.mT).abs() + (above * result).sum(-1, keepdim=True).abs()
    if causal:
        weights, sizes = weights.tril(), sizes.tril()
    sums = weights.sum(-1, keepdim=True)
    sizes = sizes / sums
    slopes = {name: (one.clamp(max=0.0)).exp() for name, one in (("query", query), ("key", key))}
    by_key, by_value = (
        one.unflatten(1, (key.shape[1], group)).sum(2)
        for one in (sizes.mT @ features(query), (weights / sums).mT @ above.abs())
    )
    return {
        "query": float((sizes @ keys * slopes["query"]).max()),
        "key": float((by_key * slopes["key"]).max()),
        "value": float(by_value.max()),
    }


def different_runs(call: Drawn, device: str, runs: int) -> int:
    """How many of these runs had a result or a gradient that was not that of the first."""
    import torch

    prepared = made(call, device)
    first, above = passes(prepared, prepared.function, prepared.tensors, None)
    different = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(runs - 1):
        found, _ = passes(prepared, prepared.function, prepared.tensors, above)
        changed = [(one != first[name]).any() for name, one in found.items() if one.numel()]
        different += torch.stack(changed).any() if changed else 0
    return int(different)


def repeated(calls: Sequence[Drawn], device: str, runs: int) -> dict[str, Any]:
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
    calls: Sequence[Drawn], device: str
) -> Iterator[tuple[str, Callable[[], dict[str, Callable[[], Any]]]]]:
    """A job for each kind: all of its calls, without references."""
    for number, kind in enumerate(dict.fromkeys(call.kind for call in calls)):
        mine = [call for call in calls if call.kind == kind]

        def both(mine: Sequence[Drawn] = mine) -> None:
            for call in mine:
                prepared = made(call, device)
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
    given = parsed(arguments)
    if given.show:
        content = json.loads(given.show.read_text(encoding="utf-8"))
        print(report(content))
        return 1 if wrong(content) else 0
    set_caches()
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
        given.processes = 0
    from nearpeak import kernels

    start = time.perf_counter()
    calls = all_drawn(given.number, given.most or (MOST if device == "cuda" else MOST_ON_CPU))
    with kernels.using("require"):
        if given.work:
            work(Jobs(given.work), compile_jobs(calls, device), lambda: None)
            return 0
        if given.processes:
            with tempfile.TemporaryDirectory(prefix="nearpeak-jobs-") as folder:
                command = [sys.executable, __file__, "--number", str(given.number), "--work", folder]
                command += ["--most", str(given.most)] if given.most else []
                took = compiled_by(command, given.processes, COMPILE_SECONDS)
                print(f"compiled in {took:.0f} s", file=sys.stderr, flush=True)
        rows = []
        for number, call in enumerate(calls):
            _progress("compared", number, len(calls))
            rows.append(judged(call, compared(call, device)))
        runs = repeated(calls, device, given.repeats or (REPEATS if device == "cuda" else 2))
    content = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": str(torch.__version__),
        "seconds": time.perf_counter() - start,
        **summary(rows, TENSORS),
        "repeated": runs,
    }
    print(report(content))
    if given.json:
        given.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong(content) else 0


if __name__ == "__main__":
    raise SystemExit(main())
