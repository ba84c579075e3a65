"""The intensities of an estimate's ops as text: FLOPs, bytes, and the ridge that decides what limits them."""

from __future__ import annotations

from nearpeak.bound.estimate import Estimate, EstimatedOp
from nearpeak.machines.model import Machine
from nearpeak.render.roofline_points import limits_of, rate_of, short_name
from nearpeak.render.table import table
from nearpeak.units import percent, quantity, seconds, significant

NAME = 28
"""How wide the column of names is at most, so that all fits in 80 columns."""

_Key = tuple[str, tuple[tuple[int, ...], ...], str, str, str]


def text(estimate: Estimate, machine: Machine, top: int = 12) -> str:
    """Ops merged by operator and shapes, those that take most of the time first."""
    limits = limits_of(machine, estimate)
    merged: dict[_Key, list[EstimatedOp]] = {}
    for op in estimate.ops:
        if op.seconds > 0:
            merged.setdefault((op.name, op.shapes, op.limiter, op.engine, op.dtype), []).append(op)
    ranked = sorted(merged.items(), key=lambda item: -sum(op.seconds for op in item[1]))
    rows, operands = [], []
    for (name, shapes, limiter, engine, dtype), ops in ranked[:top]:
        rate = rate_of(limits, engine, dtype) if dtype else None
        rows.append(_row(name, ops, rate / limits.bandwidth if rate else None, limiter))
        operands.append("  " + _shapes(shapes, 78))
    headers = ["op and its operands", "FLOPs", "bytes", "FLOP/B", "ridge", "limit", "bound"]
    heading, rule, *lines = table(headers, rows, "lrrrrlr").splitlines()
    parts = ["\n".join([heading, rule, *(line for pair in zip(lines, operands, strict=True) for line in pair)])]
    left = sum(op.seconds for _, ops in ranked[top:] for op in ops)
    if left:
        share = percent(left / estimate.as_written_s)
        parts.append(f"And {len(ranked) - top} more, {share} of the as-written time; --top shows them.")
    parts.append(
        "Below its ridge an op is limited by memory, above it by compute, unless a cache\n"
        "serves it. Bytes are all that it moves, wherever they are served from."
    )
    return "\n\n".join(parts)


def _row(name: str, ops: list[EstimatedOp], ridge: float | None, limiter: str) -> list[str]:
    count = f" x{len(ops)}" if len(ops) > 1 else ""
    shown = short_name(name)
    if len(shown) + len(count) > NAME:
        shown = shown[: NAME - len(count) - 3] + "..."
    flops = sum(op.flops for op in ops)
    moved = sum(op.bytes_read + op.bytes_written for op in ops)
    return [
        shown + count,
        quantity(flops, "").strip() if flops else "-",
        quantity(moved, "B"),
        significant(flops / moved) if flops and moved else "-",
        significant(ridge) if ridge and flops else "-",
        limiter,
        seconds(sum(op.seconds for op in ops)),
    ]


def _shapes(shapes: tuple[tuple[int, ...], ...], longest: int) -> str:
    """ "8192x1024, 1024x4096": those with most dimensions first, and dots for what does not fit."""
    ordered = sorted(shapes, key=len, reverse=True)
    written = ["x".join(map(str, shape)) or "scalar" for shape in ordered]
    for count in range(len(written), 0, -1):
        found = ", ".join(written[:count]) + (", ..." if count < len(written) else "")
        if len(found) <= longest:
            return found
    return f"{len(written)} tensors" if written else ""
