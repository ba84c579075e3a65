"""A Python loop reads tensors element by element, where one copy of the whole would do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.host_reads import is_read, reading_loops
from nearpeak.findings.loops import batched_seconds, line_range, replacement_claims
from nearpeak.findings.regions import launch_wait_seconds
from nearpeak.findings.step import Step
from nearpeak.profiles.idle import IdleCause
from nearpeak.units import seconds


@rule("reads-in-a-loop", needs=["storages", "lines"])
def reads_in_a_loop(step: Step) -> Iterator[Waste]:
    """Loops whose turns read numbers, and whose other ops serve only these reads."""
    for loop in reading_loops(step):
        members = [index for index in loop.members if step.costs[index].family != "view"]
        reads = [index for index in loop.members if is_read(step.ops[index])]
        places = {step.ops[index].place for index in loop.members}
        waits = [cause for cause in step.profile.idle if cause.cause == "synchronization" and cause.where in places]
        waited_s = sum(cause.seconds * (cause.count - 1) / cause.count for cause in waits if cause.count)
        backward = loop.backward_members
        gains, gone = replacement_claims(step, backward, batched_seconds(step, backward)) if backward else ({}, [])
        took = step.seconds(members)
        between_s = launch_wait_seconds(step, members)
        stretch = None if took else _stretch_of(step, loop.members)
        fills = any(step.ops[index].mutated for index in loop.members)
        yield Waste(
            title="A Python loop reads a tensor element by element.",
            op=reads[0],
            gains={index: step.time(index) for index in loop.members if step.time(index)} | gains,
            gone=[*loop.members, *gone],
            idle=({"synchronization": waited_s} if waited_s else {})
            | ({"python": stretch.seconds} if stretch is not None else {}),
            causes=waits if stretch is None else [*waits, stretch],
            evidence=f"The loop at {line_range([step.ops[index].source for index in loop.members])} reads "
            f"{len(reads):,} numbers, one at a time: "
            + (
                f"{seconds(took)} in ops, {seconds(between_s)} between them"
                if stretch is None
                else f"{seconds(stretch.seconds)} on the host, in which nothing runs on the device"
            )
            + (f", {seconds(waited_s)} of waiting" if waited_s else "")
            + (f". The backward pass of its turns takes {seconds(step.seconds(backward))}." if backward else "."),
            reasoning="One call of `tolist()` copies all of them; a loop over a list of Python numbers takes a "
            "hundredth of that. With ops on whole tensors there is no loop"
            + (", and one op in backward for each of a turn." if backward else "."),
            remedy="values = tensor.tolist()  # before the loop, which then works on Python's numbers\n"
            + ("results = torch.tensor(numbers)  # once, from a list that the loop fills\n" if fills else "")
            + "# or without a loop: arithmetic, comparisons, masks, topk, argmax on whole tensors",
        )


def _stretch_of(step: Step, members: Sequence[int]) -> IdleCause | None:
    """The stretch on the host that a loop over tensors in its memory is, before the next op of the device."""
    following = next((index for index in range(max(members) + 1, len(step.ops)) if step.time(index) > 0.0), None)
    place = "" if following is None else step.ops[following].place
    causes = [cause for cause in step.idle_causes("python") if place and cause.where == place and not cause.what]
    return causes[0] if causes and all(step.ops[index].origin == "host" for index in members) else None
