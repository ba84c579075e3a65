"""The error of attention and of all its gradients against float64, beside that of plain torch at the same precision.

    PYTHONPATH=src python -m benchmarks.numerics.attention --json benchmarks/results/attention_numerics_h200.json
    python -m benchmarks.numerics.attention --show benchmarks/results/attention_numerics_h200.json

A thousand calls, drawn at random: kinds that have to be compiled apart (dtype, size of heads, masks, window, softcap,
bias, slopes, sinks, dropout, packed sequences) from a list, and everything else freely: how many sequences, heads and
heads that share keys, queries and keys, how long windows are, scales. First several processes compile what the calls
need. A call is within the rule if the largest error of its result, of the logarithms and of each gradient is at most
twice torch's, and 1.5 units in the last place more, for cases in which torch happens to be exact. How many calls need
no such unit is shown too. Exit code 1 if one is not within the rule.
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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.kernels.jobs import Jobs, run_workers, set_caches, work_through
from benchmarks.markdown_table import table

MOST_PAIRS = 3_000_000
"""Of queries and keys of all heads: references have all of them in memory, in float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a kernel is compiled for."""

    dtype: str = "bfloat16"
    dim: int = 64
    value_dim: int = 64
    causal: bool = False
    alignment: str = "bottom right"
    window: str = ""
    """Which of its sides have a limit: "left", "right", "both" or none."""
    softcap: bool = False
    bias: str = ""
    """Its shape: "full", "keys" (of each batch, for all queries), "heads"; or "mask" of booleans."""
    slopes: bool = False
    sinks: bool = False
    dropout: bool = False
    packed: bool = False

    def described(self) -> str:
        """What is not as in others."""
        values = asdict(self)
        first = f"{self.dtype} {self.dim}" + (f"/{self.value_dim}" if self.value_dim != self.dim else "")
        rest = [name if values[name] is True else f"{name} {values[name]}" for name in list(values)[3:] if values[name]]
        return ", ".join([first, *(one for one in rest if one != "alignment bottom right")])


KINDS = (
    Kind(),
    Kind(causal=True),
    Kind(dim=128, value_dim=128),
    Kind(dim=128, value_dim=128, causal=True),
    Kind(dim=128, value_dim=128, causal=True, alignment="top left"),
    Kind(dim=128, value_dim=128, causal=True, sinks=True, window="left"),
    Kind(dim=128, value_dim=128, causal=True, softcap=True, window="left"),
    Kind(dim=128, value_dim=128, causal=True, packed=True),
    Kind(dim=64, value_dim=64, packed=True, window="both"),
    Kind(dim=64, value_dim=64, packed=True, causal=True, slopes=True, softcap=True),
    Kind(dim=64, value_dim=64, packed=True, causal=True, sinks=True, alignment="top left"),
    Kind(dim=32, value_dim=32, window="both"),
    Kind(dim=32, value_dim=32, bias="mask", sinks=True),
    Kind(dim=64, value_dim=64, bias="full"),
    Kind(dim=64, value_dim=64, bias="heads", causal=True, softcap=True),
    Kind(dim=128, value_dim=128, bias="keys"),
    Kind(dim=64, value_dim=64, slopes=True, causal=True),
    Kind(dim=64, value_dim=64, dropout=True, causal=True),
    Kind(dim=256, value_dim=256, causal=True),
    Kind(dim=192, value_dim=128, causal=True),
    Kind(dim=96, value_dim=40, window="right"),
    Kind(dtype="float16", causal=True, sinks=True),
    Kind(dtype="float16", dim=128, value_dim=128, softcap=True),
    Kind(dtype="float32", causal=True, bias="full"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """A call of a kind."""

    kind: Kind
    seed: int
    batch: int
    key_heads: int
    group: int
    queries: int
    keys: int
    left: int | None
    right: int | None
    scale: float | None
    softcap: float | None
    dropout: float
    lengths: tuple[tuple[int, int], ...]
    """Of packed sequences, those of queries and of keys."""


def drawn(kind: Kind, seed: int, most_tokens: int) -> AttentionCall:
    at_random = random.Random(seed)
    lengths: tuple[tuple[int, int], ...] = ()
    if kind.packed:
        each = max(2, most_tokens // 3)
        lengths = tuple(
            (at_random.randint(0, each), at_random.randint(0, each)) for _ in range(at_random.randint(1, 4))
        )
    queries, keys = (at_random.randint(1, most_tokens) for _ in "qk")
    if at_random.random() < 0.5:  # as mostly
        keys = queries
    batch, key_heads, group = at_random.randint(1, 3), at_random.randint(1, 4), at_random.choice((1, 1, 2, 3, 4, 8))
    while batch * key_heads * group * queries * keys > MOST_PAIRS:
        batch, key_heads, group = max(1, batch - 1), max(1, key_heads - 1), max(1, group // 2)
    left, right = (at_random.randint(0, most_tokens) for _ in range(2))
    return AttentionCall(
        kind=kind,
        seed=seed,
        batch=batch,
        key_heads=key_heads,
        group=group,
        queries=queries,
        keys=keys,
        left=left if kind.window in ("left", "both") else None,
        right=right if kind.window in ("right", "both") else None,
        scale=at_random.choice((None, at_random.uniform(0.02, 0.5))),
        softcap=at_random.uniform(1.0, 30.0) if kind.softcap else None,
        dropout=at_random.uniform(0.05, 0.6) if kind.dropout else 0.0,
        lengths=lengths,
    )


def random_calls(calls: int, most_tokens: int, kinds: Sequence[Kind] = KINDS) -> list[AttentionCall]:
    return [drawn(kinds[number % len(kinds)], number, most_tokens) for number in range(calls)]


def make_inputs(call: AttentionCall, device: str) -> tuple[list[Any], dict[str, Any]]:
    """Query, key and value, and the options of the function."""
    import torch

    kind, dtype = call.kind, getattr(torch, call.kind.dtype)
    torch.manual_seed(call.seed)
    heads = call.key_heads * call.group

    def randn(*shape: int, of: Any = dtype) -> Any:
        return torch.randn(shape, device=device).to(of)

    options: dict[str, Any] = {
        "causal": kind.causal,
        "alignment": kind.alignment,
        "window": (call.left, call.right) if kind.window else None,
        "scale": call.scale,
        "softcap": call.softcap,
        "dropout": call.dropout,
        "seed": call.seed,
        "slopes": torch.rand(heads, device=device) if kind.slopes else None,
        "sinks": randn(heads, of=torch.float32) if kind.sinks else None,
    }
    if kind.packed:
        query_tokens, key_tokens = (sum(one[place] for one in call.lengths) + 3 for place in (0, 1))
        for place, name in enumerate(("query", "key")):
            ends = torch.tensor([0, *(one[place] for one in call.lengths)]).cumsum(0)
            options[f"{name}_starts"] = ends.to(device, torch.int32)
            options[f"longest_{name}"] = max(one[place] for one in call.lengths)
        shapes = [(query_tokens, heads, kind.dim), (key_tokens, call.key_heads, kind.dim)]
        shapes.append((key_tokens, call.key_heads, kind.value_dim))
        return [randn(*shape) for shape in shapes], options
    if kind.bias:
        sizes = (call.batch, heads, call.queries, call.keys)
        kept = {"full": (0, 1, 2, 3), "mask": (0, 2, 3), "heads": (1, 2, 3), "keys": (0, 3)}[kind.bias]
        shape = [size if place in kept else 1 for place, size in enumerate(sizes)]
        wide = -(-call.keys // 16) * 16  # rows begin at multiples of 16, so that one variant serves all sizes
        bias = randn(*shape[:3], wide)[..., : call.keys]
        options["bias"] = bias > -1.0 if kind.bias == "mask" else bias
    shapes = [
        (call.batch, heads, call.queries, kind.dim),
        (call.batch, call.key_heads, call.keys, kind.dim),
        (call.batch, call.key_heads, call.keys, kind.value_dim),
    ]
    return [randn(*shape) for shape in shapes], options


CALLS = 1000
TIMES, ROUNDINGS = 2.0, 1.5
COMPILE_SECONDS = 90.0
TENSORS = ("result", "lse", "query", "key", "value", "bias", "sinks")


def passes(
    function: Callable[..., Any], tensors: Sequence[Any], options: Mapping[str, Any], above: Sequence[Any] | None
) -> tuple[dict[str, Any], list[Any]]:
    """The result, the logarithms and all gradients, by name; and what came from above."""
    import torch

    leaves = dict(zip(("query", "key", "value"), (one.detach().requires_grad_() for one in tensors), strict=True))
    named = dict(options)
    for name in ("bias", "sinks"):
        if named.get(name) is not None and named[name].is_floating_point():
            leaves[name] = named[name] = named[name].detach().requires_grad_()
    result, lse = function(*list(leaves.values())[:3], return_lse=True, **named)
    if above is None:
        above = [torch.randn_like(result), torch.randn_like(lse)]
    above = [one.to(like.dtype) for one, like in zip(above, (result, lse), strict=True)]
    gradients = torch.autograd.grad((result, lse), list(leaves.values()), above)
    return {"result": result.detach(), "lse": lse.detach(), **dict(zip(leaves, gradients, strict=True))}, above


def function_of(call: AttentionCall) -> Any:
    from nearpeak import kernels

    return kernels.attention_packed if call.kind.packed else kernels.attention


def compared(call: AttentionCall, device: str) -> dict[str, dict[str, float]]:
    """Of the result and each gradient: its error, torch's, and how much more than twice that is allowed."""
    import torch

    tensors, options = make_inputs(call, device)
    function = function_of(call)
    actual, above = passes(function, tensors, options, None)

    def wide(one: Any) -> Any:
        return one.double() if isinstance(one, torch.Tensor) and one.is_floating_point() else one

    wide_options = {name: wide(one) for name, one in options.items()}
    exact, _ = passes(function.reference, [wide(one) for one in tensors], wide_options, above)
    low, _ = passes(function.reference, tensors, options, above)
    # weights, and gradients of scores, are rounded before the second product, as torch's are: where a sum of such is
    # near 0, a unit in the last place is that of what was summed up
    value, upper = (float(one.abs().max()) for one in (tensors[2], above[0]))
    rows = tensors[0][..., 0].numel()
    summed = {"result": value, "lse": 0.0, **dict.fromkeys(("query", "key", "value"), upper * max(value, 1.0))}
    summed |= dict.fromkeys(("bias", "sinks"), upper * value * rows**0.5)
    unit = torch.finfo(tensors[0].dtype).eps
    errors = {}
    for name, one in actual.items():
        right, torchs = exact[name], low[name]
        hidden = ~right.isfinite()
        same = bool(torch.equal(one.isfinite(), ~hidden)) and one.shape == right.shape
        right, one, torchs = (x.double().masked_fill(hidden, 0.0) for x in (right, one, torchs))
        differences = torch.stack(((one - right).abs().max(), (torchs - right).abs().max(), right.abs().max()))
        error, of_torch, size = differences.tolist() if same else (float("inf"), 0.0, 0.0)
        more = ROUNDINGS * (torch.finfo(actual[name].dtype).eps * size + unit * summed[name])
        errors[name] = {"error": error, "torch": of_torch, "more": more}
    return errors


def judged(call: Any, errors: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """What is kept of a call: by tensor its error by torch's, and whether all are within the rule."""
    within = all(one["error"] <= TIMES * one["torch"] + one["more"] for one in errors.values())
    strictly = all(one["error"] <= TIMES * one["torch"] for one in errors.values())
    ratios = {name: one["error"] / one["torch"] for name, one in errors.items() if one["torch"] > 0.0}
    # of the rule: 2 where an error is all that is allowed
    used = {
        name: one["error"] / (one["torch"] + one["more"] / TIMES) for name, one in errors.items() if one["error"] > 0.0
    }
    return {"within": within, "strictly": strictly, "ratios": ratios, "used": used, "call": call, "found": errors}


def summary(rows: Sequence[Mapping[str, Any]], names: Sequence[str] = TENSORS) -> dict[str, Any]:
    by_tensor = {}
    for name in names:
        mine = [row for row in rows if name in row["ratios"]]
        if not mine:
            continue
        ratios = sorted(row["ratios"][name] for row in mine)
        worst = max(mine, key=lambda row: row["used"].get(name, 0.0))
        by_tensor[name] = {
            "calls": len(mine),
            "median": ratios[len(ratios) // 2],
            "largest": ratios[-1],
            "above_2": sum(ratio > TIMES for ratio in ratios),
            "most_of_rule": worst["used"].get(name, 0.0),
            "there": worst["call"].kind.described(),
        }
    failures = [
        {"call": asdict(row["call"]), "found": {name: dict(one) for name, one in row["found"].items()}}
        for row in rows
        if not row["within"]
    ]
    return {
        "calls": len(rows),
        "within": sum(row["within"] for row in rows),
        "within_without_units": sum(row["strictly"] for row in rows),
        "kinds": dict(Counter(row["call"].kind.described() for row in rows)),
        "tensors": by_tensor,
        "failures": failures,
    }


def shown(content: Mapping[str, Any]) -> str:
    head = ["tensor", "calls", "median", "largest", "above 2", "of the rule", "where"]
    body = [
        [
            name,
            str(one["calls"]),
            *(f"{one[number]:.2f}" for number in ("median", "largest")),
            str(one["above_2"]),
            f"{one['most_of_rule']:.2f}",
            one["there"],
        ]
        for name, one in content["tensors"].items()
    ]
    return (
        f"{content['machine']}, torch {content['torch']}, {content['date'][:10]}: {content['within']} of"
        f" {content['calls']} calls are within the rule, {content['within_without_units']} of these without units in"
        f" the last place, in {content['seconds']:.0f} s.\n\nErrors by those of torch:\n\n" + table(head, body, 1)
    )


def compile_jobs(
    calls: Sequence[AttentionCall], device: str
) -> Iterator[tuple[str, Callable[[], dict[str, Callable[[], Any]]]]]:
    """A job for each kind: all of its calls, without references."""
    for number, kind in enumerate(dict.fromkeys(call.kind for call in calls)):
        mine = [call for call in calls if call.kind == kind]

        def both(mine: Sequence[AttentionCall] = mine) -> None:
            for call in mine:
                tensors, options = make_inputs(call, device)
                passes(function_of(call), tensors, options, None)

        yield f"kind-{number}", lambda both=both: {"all": both}  # type: ignore[misc]


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--most-tokens", type=int, default=400, help="of a sequence")
    parser.add_argument("--json", type=Path, help="write what was found here")
    parser.add_argument("--show", type=Path, help="print what was written, and compute nothing")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 14), help="that compile; 0: none")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    if options.show:
        content = json.loads(options.show.read_text(encoding="utf-8"))
        print(shown(content))
        return 1 if content["failures"] else 0
    set_caches()
    import torch

    from nearpeak import kernels
    from nearpeak.kernels._runtime.choice import own_backends

    start = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    calls = random_calls(options.calls, options.most_tokens)
    with kernels.using("require"), own_backends():
        if options.work:
            work_through(Jobs(options.work), compile_jobs(calls, device), lambda: None)
            return 0
        if options.processes:
            with tempfile.TemporaryDirectory(prefix="nearpeak-jobs-") as folder:
                command = [sys.executable, "-m", "benchmarks.numerics.attention", "--work", folder]
                command += ["--calls", str(options.calls)]
                command += ["--most-tokens", str(options.most_tokens)]
                took = run_workers(command, options.processes, COMPILE_SECONDS)
                print(f"compiled in {took:.0f} s", file=sys.stderr, flush=True)
        rows = [judged(call, compared(call, device)) for call in calls]
    content = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": str(torch.__version__),
        "seconds": time.perf_counter() - start,
        **summary(rows),
    }
    print(shown(content))
    if options.json:
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 1 if content["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
