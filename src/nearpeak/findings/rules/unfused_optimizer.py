"""An optimizer updates its state in many ops; one fused kernel would read and write everything once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.regions import launches_removed
from nearpeak.findings.step import Step
from nearpeak.units import quantity, seconds

PASSES = 1.3
"""The least ratio of the traffic to one pass over the state; with momentum alone it is 1.6."""
SINGLE_OPS = 8
"""The number of ops on single tensors from which lists of tensors are worth it."""
FAMILIES = ("pointwise", "optimizer", "movement", "creation", "view")
"""Families that a fused optimizer can do in one pass; norms and GEMMs need their results first."""


@rule("unfused-optimizer", needs=["storages"])
def unfused_optimizer(step: Step) -> Iterator[Waste]:
    """Optimizer steps whose ops move far more than one pass over parameters, gradients and states."""
    for members in _steps(step):
        if any(step.costs[index].family not in FAMILIES for index in members):
            continue
        passing = [index for index in members if any(len(tensor.shape) for tensor in step.ops[index].inputs)]
        passing = [index for index in passing if step.costs[index].family in ("pointwise", "optimizer")]
        reads, writes = step.border(passing)
        needed_bytes = sum(access.bytes for access in (*reads, *writes))
        moved_bytes = step.bytes(passing)
        alone = [index for index in passing if len(step.touches[index].writes) == 1]
        if not needed_bytes or (moved_bytes < PASSES * needed_bytes and len(alone) < SINGLE_OPS):
            continue
        took = step.seconds(passing)
        expected = sum(step.measured[index].expected_s or 0.0 for index in passing)
        one_pass = step.expected_for_work(reads, writes, kind=_kind(step, passing))
        if expected <= one_pass:
            continue
        share = 1 - one_pass / expected
        yield Waste(
            title="The optimizer goes over its state in many ops; a fused one does it in one pass.",
            op=max(passing, key=step.time),
            gains={index: share * step.time(index) for index in passing},
            gone=launches_removed(step, members, one_pass),
            evidence=f"{len(passing)} ops of the optimizer move {quantity(moved_bytes, 'B')} in {seconds(took)}; the "
            f"parameters, gradients and states that they read and write are {quantity(needed_bytes, 'B')}"
            + (f"; {len(alone)} of the ops are on one tensor each." if len(alone) > len(passing) / 2 else "."),
            reasoning=f"Good kernels take {seconds(expected)} for these ops as they are, and {seconds(one_pass)} for "
            f"one pass over {quantity(needed_bytes, 'B')}; what the ops took shrinks as much.",
            remedy=_remedy(step),
        )


def _steps(step: Step) -> list[list[int]]:
    """The ops of each optimizer: of one line, and of lines that write the same storages."""
    lines: dict[str, list[int]] = {}
    for index, op in enumerate(step.ops):
        if op.phase == "optimizer":
            lines.setdefault(op.source, []).append(index)
    groups: list[tuple[list[int], set[int]]] = []
    for members in lines.values():
        written = {storage for index in members for storage in step.touches[index].writes}
        related = [group for group in groups if group[1] & written]
        groups = [group for group in groups if not group[1] & written]
        groups.append(
            (
                sorted([*members, *(index for group in related for index in group[0])]),
                written.union(*(group[1] for group in related)),
            )
        )
    return [members for members, _ in groups]


def _kind(step: Step, members: Sequence[int]) -> str:
    """List kernels load few elements at once: with 2-byte elements they are further from the bandwidth."""
    sizes = {tensor.item_bytes for index in members for tensor in step.ops[index].inputs if tensor.elements > 1}
    return "aten._foreach_addcdiv_" if min(sizes, default=4) >= 4 else "optimizer"


def _remedy(step: Step) -> str:
    if len(step.trace.optimizers) != 1:
        return (
            "fused=True for the optimizer, where it has it (Adam, AdamW, SGD, Adagrad of torch.optim); else "
            "foreach=True, or torch.compile(optimizer.step)"
        )
    (optimizer,) = step.trace.optimizers
    for option in ("fused", "foreach"):
        if option in optimizer.options:
            return f"{optimizer.name}(parameters, lr=..., {option}=True)"
    return f"step = torch.compile(optimizer.step)  # {optimizer.name} has neither fused=True nor foreach=True"
