"""The same small op runs for one tensor after another, although there is an op for lists of tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.regions import launch_wait_seconds, launches_removed, proportional_gains
from nearpeak.findings.step import Step
from nearpeak.findings.updates import SINGLE_OPS, updates
from nearpeak.ops.cost import Access
from nearpeak.ops.formulas.optimizer import FOREACH_POINTWISE
from nearpeak.ops.op import Op
from nearpeak.units import seconds

LEAST = 16
"""Ops in a row. A shorter run may be an unrolled formula."""
SHORT = 1e-4
"""Seconds. Longer ops are large enough on their own."""
FOREACH = {
    **{f"aten.{name}{end}": f"torch._foreach_{name}{end}" for name in FOREACH_POINTWISE for end in ("", "_")},
    "aten.linalg_vector_norm": "torch._foreach_norm",
    "aten.norm": "torch._foreach_norm",
    "aten.zero_": "torch._foreach_zero_",
    "aten.copy_": "torch._foreach_copy_",
}
"""Operators with a variant for lists."""
PIECE = 65536
"""Elements per thread block of a list op (torch, MultiTensorApply.cuh: kChunkSize)."""
MOST_PIECES, MOST_TENSORS = 320, 110
"""The limits per kernel of a list op (depth_to_max_blocks, and depth_to_max_tensors for a single list) in torch 2.11;
those of torch 2.13 for CUDA 13 are seven times as large, which saves a little more."""
NOT_CHANGED = ("dtype", "dim", "keepdim", "ord", "value", "alpha", "p")


@rule("per-tensor-loop", needs=["storages"])
def per_tensor_loop(step: Step) -> Iterator[Waste]:
    """Runs of one op at one line on independent tensors."""
    for members in _runs(step):
        op = step.ops[members[0]]
        reads, writes = _distinct(step, members)
        took = step.seconds(members)
        launches = _launches(step, members)
        one_op = step.expected_for_lists(
            reads,
            writes,
            item_bytes=op.inputs[0].item_bytes,
            kind="foreach",
            launches=launches,
            cpu_kind="reduction" if "norm" in op.packet else "optimizer",
        )
        # If the ops ran from cache, so does one list op, and it takes no longer than they did.
        listed = min(one_op, took)
        joined = launches_removed(step, members, listed)[launches - 1 :]
        if took + launch_wait_seconds(step, joined) <= listed:
            continue
        yield Waste(
            title="One small op runs for one tensor after another, where one op takes them all as a list.",
            op=members[0],
            gains=proportional_gains(step, members, listed),
            gone=joined,
            evidence=f"{op.packet} runs {len(members)} times in a row, on another tensor each time: {seconds(took)}, "
            f"{seconds(took / len(members))} each.",
            reasoning=f"One pass over all of the tensors takes {seconds(listed)}"
            + (f", in {launches} kernels." if launches > 1 else "."),
            remedy=_remedy(op),
        )


def _runs(step: Step) -> Iterator[list[int]]:
    """Ops of one name, line and phase in a row, apart from views, each on storages of its own.

    Those of an update of parameters are named as a whole by "unfused-optimizer".
    """
    run: list[int] = []
    written: set[int] = set()
    in_updates = {index for members in updates(step) if len(members) >= SINGLE_OPS for index in members}
    for index, op in enumerate(step.ops):
        if step.costs[index].family == "view" or not (step.touches[index].reads or step.touches[index].writes):
            continue
        reads, writes = step.touches[index]
        joins = bool(run) and _alike(op, step.ops[run[0]]) and not written.intersection((*reads, *writes))
        if not joins:
            if _counts(step, run):
                yield run
            run, written = [], set()
        if index not in in_updates and _can_be_listed(step, index):
            run.append(index)
            written.update(writes)
    if _counts(step, run):
        yield run


def _alike(op: Op, first: Op) -> bool:
    return (op.name, op.source, op.phase) == (first.name, first.source, first.phase) and all(
        op.arguments.get(name) == first.arguments.get(name) for name in NOT_CHANGED
    )


def _can_be_listed(step: Step, index: int) -> bool:
    op = step.ops[index]
    if op.packet not in FOREACH or op.phase == "optimizer":
        return False
    return "norm" not in op.packet or not op.arguments.get("dim")


def _counts(step: Step, run: Sequence[int]) -> bool:
    """Whether a run is long, of short ops, and on different tensors."""
    firsts = {step.ops[index].inputs[0].storage for index in run}
    return len(run) >= LEAST and len(firsts) == len(run) and step.seconds(run) < SHORT * len(run)


def _launches(step: Step, members: Sequence[int]) -> int:
    """The number of kernels that a list op launches for the tensors of these ops."""
    if step.machine.kind != "gpu":
        return 1
    pieces = sum(math.ceil(step.ops[index].inputs[0].elements / PIECE) for index in members)
    return max(math.ceil(pieces / MOST_PIECES), math.ceil(len(members) / MOST_TENSORS))


def _distinct(step: Step, members: Sequence[int]) -> tuple[list[Access], list[Access]]:
    accesses_by_storage: tuple[dict[int, Access], dict[int, Access]] = ({}, {})
    for index in members:
        for known, accesses in zip(
            accesses_by_storage, (step.costs[index].reads, step.costs[index].writes), strict=True
        ):
            known.update((access.storage, access) for access in accesses)
    return list(accesses_by_storage[0].values()), list(accesses_by_storage[1].values())


def _remedy(op: Op) -> str:
    call = FOREACH[op.packet]
    if call.endswith("norm"):
        return f"norms = {call}(tensors)  # a list of norms; torch.nn.utils.clip_grad_norm_(..., foreach=True) uses it"
    if call.endswith("zero_"):
        return f"{call}(tensors)"
    return f"{call}(tensors, ...)  # in place of a loop over tensors with {op.packet.rpartition('.')[2]}"
