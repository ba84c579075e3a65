"""How cases of rows, copies, losses and launches are measured: ways in turns, and a row of results for each pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kernel_jobs import without_failures
from kernel_setting import Setting, Ways

COPY_BYTES = 2**30


def forward_ways(case: Any, inputs: Sequence[Any], only: str | None = None) -> Ways:
    import torch

    def bound(way: Any, given: Sequence[Any]) -> Callable[[], Any]:
        def call() -> Any:
            with torch.no_grad():
                return way(*given)

        return call

    return {name: bound(way, _given(name, inputs)) for name, way in case.ways(only).items()}


def backward_ways(case: Any, inputs: Sequence[Any], only: str | None = None) -> Ways:
    """A way that fails in its forward pass raises that error when it is called."""
    import torch

    def bound(way: Any, given: Sequence[Any]) -> Callable[[], Any]:
        wanted = [one for one in given if one.requires_grad]
        kept: list[Any] = []

        def call() -> Any:
            if not kept:
                results = way(*given)
                results = results if isinstance(results, tuple) else (results,)
                results = [one for one in results if one.requires_grad]
                kept.extend([results, [torch.randn_like(one) for one in results]])
            return torch.autograd.grad(kept[0], wanted, kept[1], retain_graph=True)

        return call

    return {name: bound(way, _given(name, inputs)) for name, way in case.ways(only).items()}


def _given(name: str, inputs: Sequence[Any]) -> Sequence[Any]:
    """Liger overwrites its inputs in some passes: it has its own."""
    if name != "liger":
        return inputs
    return [one.detach().clone().requires_grad_(one.requires_grad) for one in inputs]


PASSES: dict[str, Callable[..., Ways]] = {"forward": forward_ways, "backward": backward_ways}


def least_bytes(case: Any, name: str) -> int | None:
    found: int | None = case.forward_bytes if name == "forward" else case.backward_bytes
    return found


def errors(case: Any, without: Mapping[str, str]) -> dict[str, float]:
    """The largest error of the first result of each way against float64, relative to the largest value."""
    import torch

    inputs = case.inputs()
    wide = [one.detach().double() if one.is_floating_point() else one for one in inputs]
    with torch.no_grad():
        exact = case.eager(*wide)
        exact = exact[0] if isinstance(exact, tuple) else exact
        found = {}
        for name, way in case.ways().items():
            if name == "compile" or name in without:
                continue
            try:
                result = way(*[one.detach().clone() for one in inputs])
            except Exception:  # said where it is timed
                continue
            result = result[0] if isinstance(result, tuple) else result
            found[name] = float((result.double() - exact).abs().max() / exact.abs().max())
    return found


def measured(case: Any, setting: Setting, section: str, number: int) -> list[dict[str, Any]]:
    """The rows of a case, one for each pass."""
    from kernel_timing import in_turns

    rows = []
    inputs = case.inputs()
    for name, make in PASSES.items():
        least = least_bytes(case, name)
        if least is None:
            continue
        ways, late = setting.allowed(make(case, inputs), f"{section}-{number}-{name}")
        ways, failed = without_failures(ways)
        waiting: list[str] = []
        seconds = in_turns(ways, waiting=waiting)
        checked = setting.check and case.checked and name == "forward"
        rows.append(
            {
                "operation": case.operation,
                "pass": name,
                "rows": case.rows,
                "columns": case.columns,
                "bytes": least,
                "seconds": seconds,
                "of_copy": least / seconds["nearpeak"] / setting.copy_rate,
                "errors": errors(case, {**late, **failed}) if checked else {},
                "waiting": waiting,
                "failed": {**late, **failed},
                "note": case.note,
            }
        )
        del ways
    return rows


def measured_loss(case: Any, setting: Setting, number: int) -> list[dict[str, Any]]:
    import kernel_timing
    from kernel_timing import extra_bytes, in_turns

    ways, late = setting.allowed(case.ways, f"losses-{number}-both")
    ways, failed = without_failures(ways, case.resets)
    extra = {}
    for name, way in ways.items():
        found = extra_bytes(way, case.resets.get(name))
        if found is not None and name != "three products":
            extra[name] = max(found - case.given_bytes, 0)
    waiting: list[str] = []
    # a block is one call of these: twice as many blocks
    seconds = in_turns(ways, 2 * kernel_timing.ROUNDS, resets=case.resets, waiting=waiting)
    products = seconds.get("three products")
    row = {
        "operation": case.operation,
        "tokens": case.tokens,
        "vocabulary": case.vocabulary,
        "seconds": seconds,
        "of_products": {} if products is None else {name: value / products for name, value in seconds.items()},
        "extra_bytes": extra,
        "bar_seconds": case.bar_seconds,
        "waiting": waiting,
        "failed": {**late, **failed},
    }
    return [row]


def measured_launch(case: Any) -> dict[str, Any]:
    import torch
    from kernel_timing import host_in_turns

    with torch.no_grad():
        seconds = host_in_turns({"nearpeak": case.nearpeak, "eager": case.eager})
    ratio = seconds["nearpeak"] / seconds["eager"]
    return {"operation": case.operation, "torch_ops": case.torch_ops, "seconds": seconds, "ratio": ratio}


def measured_copy(device: str, size: int = COPY_BYTES) -> float:
    """The rate of a copy, in bytes that are read or written in a second."""
    import torch
    from kernel_timing import in_turns

    source, target = (torch.randn(size // 2, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size / in_turns({"copy": lambda: target.copy_(source)})["copy"]
