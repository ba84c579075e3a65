"""The error of attention and of all its gradients against float64, beside that of plain torch at the same precision.

    PYTHONPATH=src python benchmarks/attention_numerics.py --json benchmarks/results/attention_numerics_h200.json
    python benchmarks/attention_numerics.py --show benchmarks/results/attention_numerics_h200.json

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
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attention_calls import Drawn, all_drawn, made
from kernel_jobs import Jobs, compiled_by, set_caches, work
from markdown_table import table

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
    found = torch.autograd.grad((result, lse), list(leaves.values()), above)
    return {"result": result.detach(), "lse": lse.detach(), **dict(zip(leaves, found, strict=True))}, above


def function_of(call: Drawn) -> Any:
    from nearpeak import kernels

    return kernels.attention_packed if call.kind.packed else kernels.attention


def compared(call: Drawn, device: str) -> dict[str, dict[str, float]]:
    """Of the result and each gradient: its error, torch's, and how much more than twice that is allowed."""
    import torch

    tensors, options = made(call, device)
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
    found = {}
    for name, one in actual.items():
        right, torchs = exact[name], low[name]
        hidden = ~right.isfinite()
        same = bool(torch.equal(one.isfinite(), ~hidden)) and one.shape == right.shape
        right, one, torchs = (x.double().masked_fill(hidden, 0.0) for x in (right, one, torchs))
        differences = torch.stack(((one - right).abs().max(), (torchs - right).abs().max(), right.abs().max()))
        error, of_torch, size = differences.tolist() if same else (float("inf"), 0.0, 0.0)
        more = ROUNDINGS * (torch.finfo(actual[name].dtype).eps * size + unit * summed[name])
        found[name] = {"error": error, "torch": of_torch, "more": more}
    return found


def judged(call: Any, found: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """What is kept of a call: by tensor its error by torch's, and whether all are within the rule."""
    within = all(one["error"] <= TIMES * one["torch"] + one["more"] for one in found.values())
    strictly = all(one["error"] <= TIMES * one["torch"] for one in found.values())
    ratios = {name: one["error"] / one["torch"] for name, one in found.items() if one["torch"] > 0.0}
    # of the rule: 2 where an error is all that is allowed
    used = {
        name: one["error"] / (one["torch"] + one["more"] / TIMES) for name, one in found.items() if one["error"] > 0.0
    }
    return {"within": within, "strictly": strictly, "ratios": ratios, "used": used, "call": call, "found": found}


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
    calls: Sequence[Drawn], device: str
) -> Iterator[tuple[str, Callable[[], dict[str, Callable[[], Any]]]]]:
    """A job for each kind: all of its calls, without references."""
    for number, kind in enumerate(dict.fromkeys(call.kind for call in calls)):
        mine = [call for call in calls if call.kind == kind]

        def both(mine: Sequence[Drawn] = mine) -> None:
            for call in mine:
                tensors, options = made(call, device)
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
    given = parsed(arguments)
    if given.show:
        content = json.loads(given.show.read_text(encoding="utf-8"))
        print(shown(content))
        return 1 if content["failures"] else 0
    set_caches()
    import torch

    from nearpeak import kernels

    start = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    calls = all_drawn(given.calls, given.most_tokens)
    with kernels.using("require"):
        if given.work:
            work(Jobs(given.work), compile_jobs(calls, device), lambda: None)
            return 0
        if given.processes:
            with tempfile.TemporaryDirectory(prefix="nearpeak-jobs-") as folder:
                command = [sys.executable, __file__, "--calls", str(given.calls), "--work", folder]
                command += ["--most-tokens", str(given.most_tokens)]
                took = compiled_by(command, given.processes, COMPILE_SECONDS)
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
    if given.json:
        given.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 1 if content["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
