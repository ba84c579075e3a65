"""`Finding`: a named waste, where it is, what it costs, and what to write instead.

Plain data, part of a saved profile. Rules make `Waste`s of a step; `findings.py` makes findings of these.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

MIN_SHOWN_SHARE = 0.01
"""Of the wall time: what saves less is not shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One waste, at one line of the user's code, in as many places as that line runs."""

    rule: str
    """The name of the rule that found it: "zeroed-then-overwritten"."""
    title: str
    """What is wrong, in one sentence."""
    source: str
    """The line to change: "train.py:41"; "" where it is not known."""
    module: str
    """The module that it is in; with `*` for what differs where there are several."""
    places: int
    """How often it was seen in the step."""
    saving_s: float
    """What the step would gain, less what another finding already claims of the same ops."""
    share: float
    """The saving over the wall time."""
    evidence: str
    """What was seen: the ops, their times and bytes."""
    reasoning: str
    """How the saving was predicted."""
    remedy: str
    """What to write instead: a few lines of code, or what to set."""
    fix: str = ""
    """What of nearpeak does it, where there is something."""
    ops: tuple[int, ...] = ()
    """Indices into the ops of the profile."""


def is_ignored(rule: str, source: str, ignore: Collection[str]) -> bool:
    """Whether a rule is to be ignored, everywhere ("NAME") or at this line ("NAME@train.py:41")."""
    return rule in ignore or f"{rule}@{source}" in ignore


@dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    """What a rule sees in one place of a step.

    What it predicts is said op by op, so that two rules never claim the same time: `gains` are seconds by the index of
    the op, at most what the op took. `gone` are ops that would not run any more: what the device waited for their
    launches is saved too. Other time in which nothing ran is claimed from `idle`, by the name of the cause;
    "communication" is that in which nothing else ran.
    """

    title: str
    at: int | None
    """The op whose line is to be changed; None where no op has it."""
    gains: Mapping[int, float] = field(default_factory=dict)
    gone: Collection[int] = ()
    """An op of which all time is gained need not be named here."""
    idle: Mapping[str, float] = field(default_factory=dict)
    evidence: str
    reasoning: str
    remedy: str
    fix: str = ""
    source: str = ""
    """The line to change, where it is not that of `at`."""

    @property
    def saving_s(self) -> float:
        """Before any other claim."""
        return sum(self.gains.values()) + sum(self.idle.values())
