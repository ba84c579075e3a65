"""Long stretches of Python in the step, in which the device is idle."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.host_reads import MIN_STRETCH_S, reads_for_python
from nearpeak.findings.step import Step, is_recurring_stall, is_source_line
from nearpeak.units import seconds

LEAST = 0.03
"""Of the step, at one line. Less may be the overhead of calling ops, or another process."""
LOOP, STRETCH_IN_LOOP = 4, 1.5e-4
"""So many stretches at one line are a loop, of which shorter ones count; on a GPU, whose host shows each of them."""


@rule("python-stretch", needs=["host"])
def python_stretch(step: Step) -> Iterator[Waste]:
    """Idle time in stretches of code outside of any op, by the line of the next op.

    Where the stretch works on what was copied to the host right before it, the wait for the copy is part of it.
    """
    profile = step.profile
    reads = reads_for_python(step)
    for cause in profile.idle:
        if cause.cause != "python" or cause.what or not cause.where:
            continue  # without a next op it may be the end of the step
        each = cause.seconds / max(1, cause.count)
        places = [place for place, following in reads.items() if following == cause.where]
        waits = [idle for idle in profile.idle if idle.cause == "synchronization" and idle.where in places]
        waited_s = sum(wait.seconds for wait in waits)
        is_loop = step.machine.kind == "gpu" and cause.count >= LOOP
        shortest_s = STRETCH_IN_LOOP if is_loop else MIN_STRETCH_S
        if each < shortest_s or cause.seconds + waited_s < LEAST * profile.wall_s:
            continue
        if step.machine.kind == "cpu" and not is_recurring_stall(profile, cause.seconds):
            continue
        where = places[0] if places else cause.where
        lines = is_source_line(where)
        on_cpu = step.machine.kind == "cpu"
        title = "Python runs for long outside of any op, and the device is idle."
        seen = "no op ran on the host, and nothing on the device."
        if on_cpu:  # there the host is the device, and other libraries compute on it too
            title = "Code outside of torch runs for long."
            seen = "no op of torch's ran. Whether Python ran or another library computed cannot be told."
        yield Waste(
            title=title,
            op=next((index for index, op in enumerate(step.ops) if op.source == where), None) if lines else None,
            idle={"python": cause.seconds} | ({"synchronization": waited_s} if waited_s else {}),
            causes=[cause, *waits],
            evidence=f"{cause.count} {'stretch' if cause.count == 1 else 'stretches'} of {seconds(each)} in the step, "
            f"before {cause.where}: {seen}"
            + (
                f" The code waits for a copy to the host at {', '.join(places)}: {seconds(waited_s)}."
                if waited_s
                else ""
            ),
            reasoning="Work that is not in the step costs it nothing: all of the stretch is saved.",
            remedy=(
                "Compute it with ops on the device, before the copy, or one step later in a thread. " if places else ""
            )
            + f"Look at what runs before {cause.where}. Take it out of the step: compute it once before the first "
            "step, or in the data loader's workers; log and save once in many steps, in a thread. Loops over "
            "elements become ops on whole tensors.",
        )
