"""Python's garbage collector runs during the step, and the device is idle."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step, is_recurring_stall, is_source_line
from nearpeak.units import seconds

EVERY = 100
"""Steps between two collections, with the remedy."""


@rule("garbage-collection", needs=["host"])
def garbage_collection(step: Step) -> Iterator[Waste]:
    """Idle time in garbage collections that clean steps have too."""
    causes = step.idle_causes("garbage collection")
    idle_s = sum(cause.seconds for cause in causes)
    if not causes or not is_recurring_stall(step.profile, idle_s):
        return
    places = sorted((cause for cause in causes if is_source_line(cause.where)), key=lambda cause: -cause.seconds)
    count = sum(cause.count for cause in causes)
    yield Waste(
        title="Python collects garbage during the step.",
        op=None,
        source=places[0].where if places else "",
        idle={"garbage collection": idle_s * (1.0 - 1.0 / EVERY)},
        evidence=f"{count} {'collection' if count == 1 else 'collections'} in the step, in which the device was idle "
        f"for {seconds(idle_s)}.",
        reasoning=f"One collection in {EVERY} steps remains, and what exists before the first step is not looked at.",
        remedy="import gc\n"
        "gc.collect(); gc.freeze(); gc.disable()   # after the first steps; no gc.collect() in the others\n"
        f"if number % {EVERY} == 0:\n"
        "    gc.collect()                          # between steps",
    )
