"""Several small GEMMs of one input have too few tiles each to fill a GPU; one GEMM would fill it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from nearpeak.bound.tiles import FACTORS, product_sizes, tiling
from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.regions import launch_wait_seconds, launches_removed, proportional_gains
from nearpeak.findings.step import Step
from nearpeak.findings.what_if import gemm_op, slowness
from nearpeak.units import seconds

LEAST_RATIO = 1.2
"""The least ratio of the measured time to that of one GEMM."""


@rule("few-tiles", needs=["storages"])
def few_tiles(step: Step) -> Iterator[Waste]:
    """Small GEMMs of one input with several weights, which could be one GEMM."""
    for members in _of_one_input(step):
        waste = _as_one(step, members)
        if waste is not None:
            yield waste


def _of_one_input(step: Step) -> Iterator[list[int]]:
    """GEMMs whose left factor is the same tensor with the same values, each with a weight of its own."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, op in enumerate(step.ops):
        tiles = tiling(op, step.machine)
        if tiles is None or tiles.batch > 1 or tiles.tiles >= tiles.processors or op.phase != "forward":
            continue
        left = op.tensor(FACTORS[op.packet][0])
        if _is_weight(step, index):
            written = step.flow.producers[index].get(left.storage)
            key = (left.storage, left.offset, left.elements, tiles.m, tiles.k, left.dtype, written, op.source)
            groups.setdefault(key, []).append(index)
    yield from (members for members in groups.values() if len(members) > 1)


def _is_weight(step: Step, index: int) -> bool:
    """Whether the right factor existed before the step."""
    op = step.ops[index]
    storage = op.tensor(FACTORS[op.packet][1]).storage
    return storage not in step.flow.producers[index] and step.trace.storages[storage].kind != "intermediate"


def _as_one(step: Step, members: Sequence[int]) -> Waste | None:
    sizes = [size for index in members if (size := product_sizes(step.ops[index]))]
    op, (_, m, _, k) = step.ops[members[0]], sizes[0]
    columns = sum(size[2] for size in sizes)
    joined_gemm = gemm_op(1, m, columns, k, dtype=op.inputs[-1].dtype, tf32=op.tf32_products)
    good = step.expected(joined_gemm)
    took = step.seconds(members)
    if good is None:
        return None
    after = good * median(slowness(step, index) for index in members)
    first, whole = tiling(op, step.machine), tiling(joined_gemm, step.machine)
    joined = launches_removed(step, members, after)
    waited = launch_wait_seconds(step, joined)
    if first is None or whole is None or took + waited < LEAST_RATIO * after:
        return None
    return Waste(
        title=f"{len(members)} products of the same input have too few tiles each to fill the GPU.",
        op=members[0],
        gains=proportional_gains(step, members, after),
        gone=joined,
        evidence=f"{len(members)} products of {m} rows, like {m} x {k} by {k} x {sizes[0][2]}, take {seconds(took)}. "
        f"Each has {first.tiles} tiles of {first.tile[0]} x {first.tile[1]} for {first.processors} multiprocessors.",
        reasoning=f"One product with all {columns} columns has {whole.tiles} tiles and takes {seconds(after)}.",
        remedy=f"weight = torch.cat(weights)  # once: {columns} x {k}\n"
        f"parts = F.linear(x, weight).split({[size[2] for size in sizes]}, -1)",
    )
