"""`gate`: whether a later run may pass, given how much slower a step may get."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from nearpeak.diffs.difference import Difference
from nearpeak.units import percent

Outcome = Literal["passed", "failed", "not known"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """What came out, and why, in one sentence."""

    outcome: Outcome
    reason: str


def gate(found: Difference, limit: float) -> Gate:
    """Fails a step that is really slower by more than `limit`, a share; not known where noise hides as much."""
    change = f"a step takes {percent(abs(found.change))} {'longer' if found.change >= 0.0 else 'less'}"
    allowed = f"{percent(limit)} is allowed"
    if found.doubts:
        return Gate(outcome="not known", reason=f"{change}, but {'; '.join(found.doubts)}")
    noise = math.expm1(found.noise)
    if found.change > limit and found.verdict == "slower":
        return Gate(outcome="failed", reason=f"{change}, and {allowed}; noise is {percent(noise)} at most")
    if found.change > limit and found.by_clock:
        return Gate(
            outcome="not known",
            reason=f"{change}, {allowed}, and no op and no idle time accounts for it: it may be the clock of the GPU",
        )
    low, high = found.interval
    if found.change > limit or (noise > limit and high > limit):
        return Gate(
            outcome="not known",
            reason=f"{change}, {allowed}, and runs this noisy may differ by {percent(noise)}: the change is between "
            f"{percent(low)} and {percent(high)}",
        )
    return Gate(outcome="passed", reason=f"{change}, and {allowed}")
