"""Long stretches of Python in the step, in which the device is idle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.host_reads import MIN_STRETCH_S, reads_for_python
from nearpeak.findings.step import Step, is_recurring_stall, is_source_line
from nearpeak.ops.op import StackLine
from nearpeak.profiles.idle import IdleCause
from nearpeak.units import percent, seconds

LEAST = 0.03
"""Of the step, at one line. Less may be the overhead of calling ops, or another process."""
LOOP, STRETCH_IN_LOOP = 4, 1.5e-4
"""So many stretches at one line are a loop, of which shorter ones count; on a GPU, whose host shows each of them."""


class _Seen(NamedTuple):
    """What the traced step had of a stretch."""

    seconds: float
    stacks: Mapping[tuple[StackLine, ...], float]
    """For how many seconds the user's lines were seen on the stack; () for torch's own code."""

    def line(self, following: str) -> str:
        """The line that ran for most of it, in the function that runs the next op: another one is called there."""
        lines: dict[str, float] = {}
        for stack, seen_s in self.stacks.items():
            if stack:
                here = next((item for item in stack if item.is_in_function_of(following)), stack[0])
                lines[here.line] = lines.get(here.line, 0.0) + seen_s
        return max(lines, key=lambda line: lines[line]) if lines else ""

    @property
    def is_users(self) -> bool:
        """Whether torch's own code was seen less often than everything else."""
        return 2 * self.stacks.get((), 0.0) < sum(self.stacks.values())

    @property
    def evidence(self) -> str:
        """What was seen, for people."""
        stack, seen_s = max((item for item in self.stacks.items() if item[0]), key=lambda seen: seen[1])
        lines = list(dict.fromkeys(item.line for item in stack))
        called = f", called from {lines[1]}" if len(lines) > 1 else ""
        share = percent(seen_s / sum(self.stacks.values()), 0)
        return (
            f"The traced step had it too, for {seconds(self.seconds)}, of which the stack was at {lines[0]} for {share}"
            f"{called}."
        )


@rule("python-stretch", needs=["host"])
def python_stretch(step: Step) -> Iterator[Waste]:
    """Idle time in stretches of code outside of any op, at the line that was seen to run in them.

    Of a live step only that counts which the traced step had too, and if the user's code ran then: another process may
    have had the processor, and what torch does before a compiled region is not the user's to move. Where the stretch
    works on what was copied to the host right before it, the wait for the copy is part of it.
    """
    profile = step.profile
    reads = reads_for_python(step)
    for cause, seen in _stretches(step):
        took = cause.seconds if seen is None else min(cause.seconds, seen.seconds)
        each = took / max(1, cause.count)
        places = [place for place, following in reads.items() if following == cause.where]
        waits = [idle for idle in profile.idle if idle.cause == "synchronization" and idle.where in places]
        waited_s = sum(wait.seconds for wait in waits)
        is_loop = step.machine.kind == "gpu" and cause.count >= LOOP
        shortest_s = STRETCH_IN_LOOP if is_loop else MIN_STRETCH_S
        if each < shortest_s or took + waited_s < LEAST * profile.wall_s:
            continue
        if seen is not None and not seen.is_users:
            continue
        on_cpu = step.machine.kind == "cpu"
        if seen is None and on_cpu and not is_recurring_stall(profile, cause.seconds):
            continue
        line = seen.line(cause.where) if seen is not None else ""
        where = line or (places[0] if places else cause.where)
        title = "Python runs for long outside of any op, and the device is idle."
        what = "no op ran on the host, and nothing on the device."
        if on_cpu:  # there the host is the device, and other libraries compute on it too
            title = "Code outside of torch runs for long."
            what = "no op of torch's ran. Whether Python ran or another library computed cannot be told."
        yield Waste(
            title=title,
            op=next((index for index, op in enumerate(step.ops) if op.source == where), None)
            if is_source_line(where)
            else None,
            source=where if is_source_line(where) else "",
            idle={"python": took} | ({"synchronization": waited_s} if waited_s else {}),
            causes=[cause, *waits],
            evidence=f"{cause.count} {'stretch' if cause.count == 1 else 'stretches'} of {seconds(each)} in the step, "
            f"before {cause.where}: {what}"
            + (f" {seen.evidence}" if seen is not None else "")
            + (
                f" The code waits for a copy to the host at {', '.join(places)}: {seconds(waited_s)}."
                if waited_s
                else ""
            ),
            reasoning="Work that is not in the step costs it nothing: all of the stretch is saved.",
            remedy=_FEWER_PARAMETERS
            if _is_optimizer(step, where)
            else (
                "Compute it with ops on the device, before the copy, or one step later in a thread. " if places else ""
            )
            + ("" if line else f"Look at what runs before {cause.where}. ")
            + "Take it out of the step: compute it once before the first "
            "step, or in the data loader's workers; log and save once in many steps, in a thread. Loops over "
            "elements become ops on whole tensors, and a list that becomes a tensor in each step is kept as a tensor.",
        )


_FEWER_PARAMETERS = (
    "An optimizer goes through its parameters in Python before its kernels run: have fewer and larger ones (one for "
    "all layers of a list, stacked),\nor step = torch.compile(optimizer.step), or record the step in a CUDA graph "
    "(capturable=True)."
)


def _is_optimizer(step: Step, line: str) -> bool:
    """Whether an optimizer runs at a line, and nothing else."""
    phases = {op.phase for op in step.ops if (op.caller or op.source) == line}
    return phases == {"optimizer"}


def _stretches(step: Step) -> Iterator[tuple[IdleCause, _Seen | None]]:
    """The causes that are stretches of Python, with what the traced step had of each; None if none was traced live."""
    causes = [
        cause for cause in step.profile.idle if cause.cause == "python" and not cause.what and cause.where
    ]  # without a next op it may be the end of the step
    python = step.trace.python
    if python is None:
        yield from ((cause, None) for cause in causes)
        return
    found: dict[str, set[int]] = {cause.where: set() for cause in causes}
    in_between: list[int] = []
    """Stretches since the last op that took time."""
    for index, op in enumerate(step.ops):
        if index in python:
            in_between.append(index)
        if op.place in found:
            found[op.place].update(in_between)
        if step.time(index) > 0.0:
            in_between = []
    begins = {passed.stack[-1] for passed in step.trace.passes if passed.stack}
    # Ops that a tensor is made with from a list are in no trace: the stretch is before a later op there.
    left = set(python) - set().union(*found.values())
    for cause in causes:
        if not found[cause.where]:
            longest = sorted(left, key=lambda index: -python[index].seconds)[: cause.count]
            found[cause.where].update(longest)
            left -= set(longest)
        longest = sorted(found[cause.where], key=lambda index: -python[index].seconds)[: max(1, cause.count)]
        stretches = [python[index] for index in longest]
        stacks: dict[tuple[StackLine, ...], float] = {}
        for stretch in stretches:
            for stack, seen_s in stretch.stacks.items():
                # Nothing but a call of torch's runs where a backward pass begins: it frees gradients, and starts.
                of_user = () if stack and stack[0].line in begins else stack
                stacks[of_user] = stacks.get(of_user, 0.0) + seen_s
        yield cause, _Seen(sum(stretch.seconds for stretch in stretches), stacks)
