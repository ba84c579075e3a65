"""Every training step computes what at most the host reads: metrics, histograms, and results that nobody wants."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.host_reads import is_read
from nearpeak.findings.liveness import left_storages
from nearpeak.findings.step import Step
from nearpeak.units import percent, seconds

_EVERY = 50
"""Steps after which a metric is computed in the remedy."""
_PRODUCTS = ("matrix", "convolution", "attention", "recurrent")


@rule("metrics-every-step", needs=["storages", "lines"])
def metrics_every_step(step: Step) -> Iterator[Waste]:
    """Forward ops of a training step whose results reach no gradient, parameter, state or tensor that is kept."""
    if not step.trains or step.trace.lives is None:
        return
    for members in _components(step, _unread_ops(step)):
        if any(_applies_weights(step, index) for index in members):
            continue  # what a network says may be what the program goes by: the next action, the next sample
        gains = {index: took * (1 - 1 / _EVERY) for index in members if (took := step.time(index))}
        if not gains:
            continue
        largest = max(gains, key=gains.__getitem__)
        reads = sum(is_read(step.ops[index]) for index in members)
        took_s = step.seconds(gains)
        ends = f"the host reads {reads} of their numbers" if reads else "no other op reads what comes of them"
        yield Waste(
            title="The step computes what only the host reads." if reads else "The step computes what no op reads.",
            op=largest,
            source=step.line_of_all(members, largest) or step.ops[largest].source,
            gains=gains,
            gone=members,
            evidence=f"{len(gains)} ops take {seconds(took_s)}, {percent(took_s / step.profile.wall_s, 1)} of the "
            f"step, most in {step.ops[largest].packet} at {step.ops[largest].source}. No gradient, parameter or kept "
            f"tensor depends on them; {ends}.",
            reasoning=f"If the program only shows or logs the result, every {_EVERY}th step is enough, and the others "
            "save this time. If it decides by the result, the ops have to stay.",
            remedy=f"if step % {_EVERY} == 0:\n    ...  # this line, with what prints or logs its result",
        )


def _unread_ops(step: Step) -> set[int]:
    """Ops of the forward pass without gradients, all of whose results end in numbers that are read, or unread.

    Memory of the host that no op reads may be read by other means, such as NumPy.
    """
    differentiated = {step.stack(index) for index, op in enumerate(step.ops) if op.phase == "backward"}
    kept = left_storages(step)
    unread: set[int] = set()

    def readers(index: int, storage: int) -> list[int]:
        return [other for other in step.touched_by[storage] if other > index]

    def ends_here(index: int, storage: int) -> bool:
        is_new = step.trace.storages[storage].kind == "intermediate" and storage not in step.flow.results
        return is_new and (index, storage) not in kept and unread.issuperset(readers(index, storage))

    for index in range(len(step.ops) - 1, -1, -1):
        op, writes = step.ops[index], step.touches[index].writes
        if op.phase != "forward" or op.recomputed or step.stack(index) in differentiated:
            continue
        if not writes:
            if is_read(op):
                unread.add(index)
        elif all(ends_here(index, storage) for storage in writes):
            on_device = not step.trace.on_host.intersection(writes)
            if on_device or any(readers(index, storage) for storage in writes):
                unread.add(index)
    return unread


def _components(step: Step, members: Collection[int]) -> Iterator[Sequence[int]]:
    """Ops that feed each other."""
    groups: dict[int, list[int]] = {}
    """By their first op."""
    group_of: dict[int, int] = {}
    for index in sorted(members):
        firsts = {group_of[other] for other in step.flow.producers[index].values() if other in group_of}
        first = min(firsts, default=index)
        merged = [other for each in sorted(firsts) for other in groups.pop(each)]
        groups[first] = [*merged, index]
        group_of.update(dict.fromkeys(groups[first], first))
    yield from (sorted(group) for group in groups.values())


def _applies_weights(step: Step, index: int) -> bool:
    return step.costs[index].family in _PRODUCTS and any(
        step.trace.storages[tensor.storage].kind == "parameter" for tensor in step.ops[index].inputs
    )
