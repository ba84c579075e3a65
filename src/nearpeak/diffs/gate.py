"""`gate`: whether a later run passes, given how much slower a step may become."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from nearpeak.diffs.difference import Difference
from nearpeak.units import percent

Outcome = Literal["passed", "failed", "not known"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The outcome, and its reason in one sentence."""

    outcome: Outcome
    reason: str


def gate(difference: Difference, limit: float) -> Gate:
    """Fails a step that is significantly slower by more than `limit`, a share; not known if noise hides that much."""
    slower = difference.change >= 0.0
    change = f"a step takes {percent(abs(difference.change))} {'longer' if slower else 'less'}"
    allowed = f"{percent(limit)} is allowed"
    if difference.doubts:
        return Gate(outcome="not known", reason=f"{change}, but {'; '.join(difference.doubts)}")
    if difference.verdict == "different programs":
        return Gate(outcome="not known", reason="the runs are of different programs")
    noise = math.expm1(difference.noise)
    if difference.change > limit and difference.verdict == "slower":
        return Gate(outcome="failed", reason=f"{change}, and {allowed}; noise is {percent(noise)} at most")
    if difference.change > limit and difference.by_clock:
        return Gate(
            outcome="not known",
            reason=f"{change}, {allowed}, and no op and no idle time accounts for it: it may be the clock of the GPU",
        )
    low, high = difference.interval
    if difference.change > limit or (noise > limit and high > limit):
        return Gate(
            outcome="not known",
            reason=f"{change}, {allowed}, and runs this noisy may differ by {percent(noise)}: the change is between "
            f"{percent(low)} and {percent(high)}",
        )
    return Gate(outcome="passed", reason=f"{change}, and {allowed}")
