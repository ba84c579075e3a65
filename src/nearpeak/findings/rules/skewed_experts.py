"""Experts run one after the other, some with few rows: their small GEMMs leave most of a GPU idle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nearpeak.bound.tiles import FACTORS, product_sizes
from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.regions import launch_wait_seconds, launches_removed, proportional_gains
from nearpeak.findings.step import Step
from nearpeak.ops.cost import Access
from nearpeak.ops.formulas.matrix import result
from nearpeak.units import quantity, seconds

_LEAST = 4
"""The least number of experts in a loop."""
_UNEVEN = 1.5
"""The least ratio of the largest number of rows to the mean."""
_GROUPED = {"compute": 1.7, "memory": 1.2}
"""The time of a grouped GEMM over that of a dense one with the same work. On an H200, 128 experts with 4096
tokens, 8 experts each: 461 TFLOP/s with even groups and 405 with uneven ones, against 780 of a dense product."""


@rule("skewed-experts", needs=["lines"])
def skewed_experts(step: Step) -> Iterator[Waste]:
    """GEMMs of one line with weights of one shape and uneven numbers of rows, compared with one grouped GEMM."""
    if step.machine.kind != "gpu" or step.machine.achievable is None:
        return
    for members, rows in _loops(step):
        took = step.seconds(members)
        grouped = _grouped(step, members)
        joined = launches_removed(step, members, grouped)
        if took + launch_wait_seconds(step, joined) <= grouped:
            continue
        ordered = sorted(rows)
        few = sum(count * 4 < sum(rows) / len(rows) for count in rows)
        m, n, k = (product_sizes(step.ops[members[0]]) or (1, 0, 0, 0))[1:]
        yield Waste(
            title=f"{len(members)} experts run one after the other, with {ordered[0]} to {ordered[-1]} rows each.",
            op=max(members, key=step.time),
            gains=proportional_gains(step, members, grouped),
            gone=joined,
            evidence=f"{len(members)} products like {m} x {k} by {k} x {n} take {seconds(took)} for {sum(rows)} rows: "
            f"{ordered[len(rows) // 2]} in the median, less than a quarter of the mean in {few} of them.",
            reasoning=f"One grouped product that reads and writes the same {quantity(step.bytes(members), 'B')} takes "
            f"{seconds(grouped)}.",
            remedy="order = expert_of_row.argsort()\n"
            "ends = torch.bincount(expert_of_row, minlength=experts).cumsum(0, dtype=torch.int32)\n"
            "out = torch._grouped_mm(x[order], weights, offs=ends)  # weights: experts x inputs x outputs, 16 bits\n"
            "and a loss that keeps the experts' loads even",
        )


def _loops(step: Step) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """GEMMs that differ only in their weights and numbers of rows, with these numbers."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, op in enumerate(step.ops):
        sizes = product_sizes(op) if op.packet in FACTORS else None
        if sizes is None or sizes[0] > 1 or not op.source or op.inputs[-1].dtype not in ("bfloat16", "float16"):
            continue
        _, m, n, k = sizes
        groups.setdefault((op.source, op.phase, op.packet, 0, n, k), []).append(index)
        if op.phase == "backward":  # gradients of weights
            groups.setdefault((op.source, op.phase, op.packet, 2, m, n), []).append(index)
    seen: set[int] = set()
    for (*_, place, _, _), members in groups.items():
        if len(members) < _LEAST or seen & set(members):
            continue
        rows = [(product_sizes(step.ops[index]) or (1, 0, 0, 0))[1:][int(str(place))] for index in members]
        weights = {_weight(step, index, place == 2) for index in members}
        if len(weights) == len(members) and max(rows) >= _UNEVEN * sum(rows) / len(rows):
            seen |= set(members)
            yield members, rows


def _weight(step: Step, index: int, gradient: bool) -> tuple[int, int]:
    op = step.ops[index]
    tensor = result(op) if gradient else op.tensor(FACTORS[op.packet][1])
    return tensor.storage, tensor.offset


def _grouped(step: Step, members: Sequence[int]) -> float:
    """The time of one grouped GEMM."""
    limits = step.machine.achievable
    assert limits is not None  # else there is nothing to expect
    reads: list[Access] = []
    writes: list[Access] = []
    flops: dict[str, float] = {}
    for index in members:
        cost = step.costs[index]
        reads.extend(Access(storage=-1 - len(reads), bytes=access.bytes) for access in cost.reads)
        writes.extend(Access(storage=10**9 + len(writes), bytes=access.bytes) for access in cost.writes)
        for dtype, count in cost.flops.items():
            flops[dtype] = flops.get(dtype, 0.0) + count
    computing = sum(count / limits.peak(dtype) for dtype, count in flops.items())
    moving = sum(access.bytes for access in (*reads, *writes)) / limits.bandwidth
    bound = "compute" if computing > moving else "memory"
    return _GROUPED[bound] * step.expected_for_work(reads, writes, flops, kind=f"matrix/{bound}")
