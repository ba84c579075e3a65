"""`middle_of`: of several steps that run the same kernels, the one in the middle, and how long each kernel took in all.

The clock of a GPU at the limit of its power moves from step to step, by some percent: one step may show it at any time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from nearpeak.capture.kineto.calls import Call, Calls, Step
from nearpeak.capture.kineto.kernels import launched_at
from nearpeak.capture.kineto.recording import DeviceSpan

Launched = tuple[DeviceSpan, Call | None]


class Middle(NamedTuple):
    """A step, and of each of its kernels, by its identity, the seconds in all steps with the same kernels."""

    step: Step
    seconds: Mapping[int, tuple[float, ...]]


def middle_of(steps: Sequence[Step], spans: Sequence[Launched], calls: Calls) -> Middle | None:
    """The step whose kernels take the median time, of the steps that run what most of them run.

    None where no kernels are known. Where as many steps run something else, the later ones count.
    """
    ran = _by_step(steps, spans, calls)
    alike: dict[tuple[tuple[int, str], ...], list[Step]] = {}
    for step in reversed(steps):  # max() takes the first of those that are as many
        if ran[step.number]:
            alike.setdefault(tuple((span.stream, span.name) for span in ran[step.number]), []).append(step)
    if not alike:
        return None
    most = max(alike.values(), key=len)
    chosen = sorted(most)
    totals = {step.number: sum(span.duration for span in ran[step.number]) for step in chosen}
    middle = sorted(chosen, key=lambda step: totals[step.number])[(len(chosen) - 1) // 2]
    columns = zip(*(ran[step.number] for step in chosen), strict=True)
    seconds = [tuple(span.duration / 1e6 for span in column) for column in columns]
    return Middle(middle, {id(span): row for span, row in zip(ran[middle.number], seconds, strict=True)})


def _by_step(steps: Sequence[Step], spans: Sequence[Launched], calls: Calls) -> dict[int, list[DeviceSpan]]:
    """What each step launched, in an order that is the same whichever stream is ahead."""
    ordered = sorted(steps, key=lambda step: step.start)
    starts = [step.start for step in ordered]
    found: dict[int, list[tuple[float, int, float, DeviceSpan]]] = {step.number: [] for step in steps}
    for span, owner in spans:
        when = launched_at(span, calls, owner)
        at = bisect_right(starts, when) - 1
        if at >= 0 and when < ordered[at].end:
            found[ordered[at].number].append((when, span.stream, span.start, span))
    return {
        number: [span for *_, span in sorted(launched, key=lambda item: item[:3])] for number, launched in found.items()
    }
