"""GEMMs read large weights for few rows: they are memory-bound, and more rows would cost almost nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from nearpeak.bound.tiles import FACTORS, product_sizes
from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step
from nearpeak.findings.what_if import gemm_op, slowness
from nearpeak.ops.formulas.matrix import result
from nearpeak.ops.tensor import Tensor
from nearpeak.units import percent, quantity, seconds

_MOST = 0.5
"""Of the wall time. The GEMMs must take at least this share."""
_FAR = 2
"""The factor by which the number of rows must be below the ridge of the roofline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Few:
    """A GEMM with few rows: its sizes, the position of the rows among them, and how many rows would suffice."""

    sizes: tuple[int, int, int]
    place: int
    enough: int
    weight: Tensor

    @property
    def rows(self) -> int:
        return self.sizes[self.place]


@rule("batch-too-small", needs=["storages"])
def batch_too_small(step: Step) -> Iterator[Waste]:
    """Steps that spend most of their time in GEMMs with few rows whose weights come from memory."""
    gemms = {index: few for index in range(len(step.ops)) if (few := _few(step, index)) is not None}
    took = step.seconds(gemms)
    if not gemms or took < _MOST * step.profile.wall_s:
        return
    gains = {index: _gain(step, index, few) for index, few in gemms.items()}
    largest = max(gemms, key=step.time)
    few = gemms[largest]
    times = few.enough / few.rows
    wall, saved = step.profile.wall_s, sum(max(0.0, gain) for gain in gains.values())
    yield Waste(
        title=f"{len(gemms)} products have {few.rows} rows each, too few to be worth reading their weights.",
        op=largest,
        gains=gains,
        launch_s=dict.fromkeys(gains, 0.0),  # a launch serves many more samples
        evidence=f"They take {seconds(took)}, {percent(took / wall, 0)} of the step, and read or write "
        f"{quantity(sum(item.weight.bytes for item in gemms.values()), 'B')} of weights. {step.machine.name} computes "
        f"as long as it reads with {few.enough} rows (batch x tokens).",
        reasoning=f"A step of {few.enough} rows in place of {few.rows} takes "
        f"{seconds((wall - saved) * times)} at the best, which is {seconds(wall - saved)} for each {few.rows} rows: "
        f"the saving is per sample.",
        remedy=f"Run up to {math.floor(times)} times as many samples in a step ({few.enough} rows in all), or join "
        "requests to one batch. Where only one sample is to be answered fast, weights of fewer bits are the way.",
    )


def _few(step: Step, index: int) -> _Few | None:
    """A GEMM whose largest matrix is a weight or its gradient, and that is far from compute-bound."""
    op = step.ops[index]
    all_sizes = product_sizes(op) if op.packet in FACTORS and step.measured[index].limiter == "memory" else None
    limits = step.machine.achievable
    if all_sizes is None or all_sizes[0] > 1 or limits is None:
        return None
    m, n, k = all_sizes[1:]
    left, right = op.tensors(*FACTORS[op.packet])
    # The weight is the matrix without the dimension of the rows: in m x k by k x n, that can be any of the three.
    area, place, weight = max((n * k, 0, right), (m * k, 1, left), (m * n, 2, result(op)), key=lambda one: one[0])
    if place == 2:
        mine = op.phase == "backward" and (
            weight.storage in step.flow.results
            or any(step.ops[reader].phase == "optimizer" for reader in step.flow.consumers[index])
        )
    else:
        mine = _is_weight(step, index, weight)
    cost = step.costs[index]
    dtype = next(iter((*cost.flops, *cost.vector_flops)), "")
    rate = limits.matrix.get(dtype) or limits.vector.get(dtype)
    if not mine or not rate or not area:
        return None
    enough = 8 * math.ceil(rate / limits.bandwidth * weight.item_bytes / 2 / 8)
    few = _Few(sizes=(m, n, k), place=place, enough=enough, weight=weight)
    return few if few.rows * _FAR <= enough else None


def _is_weight(step: Step, index: int, tensor: Tensor) -> bool:
    """Whether it is a parameter, or a cast or copy of one."""
    storage, reader = tensor.storage, index
    for _ in range(3):
        known = step.trace.storages.get(storage)
        if known is not None and known.kind in ("parameter", "buffer"):
            return True
        producer = step.flow.producers[reader].get(storage)
        if producer is None or step.costs[producer].family != "movement" or not step.ops[producer].inputs:
            return False
        reader, storage = producer, step.ops[producer].inputs[0].storage
    return False


def _gain(step: Step, index: int, few: _Few) -> float:
    """The measured time minus the share of these rows in a GEMM with enough rows."""
    op = step.ops[index]
    more = [few.enough if place == few.place else size for place, size in enumerate(few.sizes)]
    then = step.expected(gemm_op(1, *more, dtype=few.weight.dtype, tf32=op.tf32_products))
    if then is None:
        return 0.0
    return step.time(index) - then * slowness(step, index) * few.rows / few.enough
