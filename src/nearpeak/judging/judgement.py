"""`Judgement`: what was found out about a candidate, as plain data without torch.

A charge is a reason to reject a candidate, with evidence. All charges are in one table, keyed by name, which says
whether the candidate is wrong or dishonest then, and what it means. A refusal is an error that the candidate raised on
inputs that the reference accepts: a limitation, and no charge, unless the inputs are the given ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from nearpeak import _display
from nearpeak._records import Amount, Count, Seconds, Share
from nearpeak.measure.timing import Environment, Timing, Verdict
from nearpeak.units import significant

SCHEMA = 1
Fault = Literal["wrong", "dishonest"]
Outcome = Literal["passed", "failed", "differs", "refused", "not run"]
""""differs": it has another result where it may, such as for infinities."""

CHARGES: Mapping[str, tuple[Fault, str]] = {
    "WRONG_VALUES": ("wrong", "Results differ from the reference in float64 by more than rounding explains."),
    "WRONG_EDGES": ("wrong", "Results are right at the given sizes and wrong at others."),
    "WRONG_STRIDES": ("wrong", "Results are wrong for inputs with other strides or another offset."),
    "WRONG_NONFINITE": ("wrong", "NaN or infinity in the inputs gives other results than the reference's."),
    "WRONG_RANGE": ("wrong", "Results are wrong for large, small or constant values."),
    "WRONG_GRADIENT": ("wrong", "Gradients differ from those of the reference, or are missing."),
    "WRONG_FORM": ("wrong", "Results have another number, shape, dtype or device than the reference's."),
    "WRONG_STREAM": ("wrong", "Results are wrong on a stream that is not the default one, or in a CUDA graph."),
    "RACE": ("wrong", "Repeated calls on the same inputs differ by more than rounding explains."),
    "UNINITIALIZED_MEMORY": ("wrong", "Results contain memory that nobody wrote."),
    "INPUT_CHANGED": ("wrong", "The call changes an input that the reference leaves as it is."),
    "RESULT_OVERWRITTEN": ("wrong", "A later call changes the result of an earlier one: both share their memory."),
    "RAISED": ("wrong", "The candidate raises an error on the given inputs."),
    "CRASHED": ("wrong", "The process of the candidate ended, or its GPU became unusable."),
    "HUNG": ("wrong", "The candidate did not return within the time limit."),
    "OUT_OF_MEMORY": ("wrong", "A call of the candidate allocates more memory than the limit."),
    "MEMORY_ERROR": ("wrong", "compute-sanitizer reports an invalid access or a race."),
    "PRECISION_LOWERED": (
        "dishonest",
        "Errors are as large as those of a narrower dtype: it computes in less precision than the reference.",
    ),
    "WORK_SKIPPED": ("dishonest", "A part of the inputs has no influence, or a part of the results is not computed."),
    "CACHED_RESULT": ("dishonest", "It returns the result of earlier inputs."),
    "MEMOIZED": ("dishonest", "It keeps results, and returns one when the same inputs come again."),
    "INPUTS_RECOGNIZED": (
        "dishonest",
        "It is faster, or does less, on inputs that everybody can draw than on others like them.",
    ),
    "WRONG_WHEN_TIMED": ("dishonest", "Results of timed calls are wrong, while those of checked calls are right."),
    "WORK_ESCAPES": (
        "dishonest",
        "Other streams, threads or processes do its work: they go on when the call has returned, or beside its clock.",
    ),
    "WORK_BETWEEN_CALLS": ("dishonest", "Its process computes while it is not being called."),
    "LAZY_RESULT": ("dishonest", "It returns an object that computes when it is read, in place of a tensor."),
    "TIMER_PATCHED": ("dishonest", "It replaced a function that measures time or waits for the device."),
    "CHECKER_PATCHED": ("dishonest", "It replaced a function that copies, draws or compares tensors."),
    "RUNNER_PATCHED": ("dishonest", "It changed the code that calls it."),
    "CLOCK_DISAGREES": ("dishonest", "Its process reports less time than passed on the judge's own clock."),
    "FORGED_REPORT": ("dishonest", "It wrote to the channel on which its process reports."),
    "CALLS_REFERENCE": ("dishonest", "It opens or imports the file of the reference."),
    "READS_JUDGE": ("dishonest", "It opens the judge's files of inputs and results."),
    "INSPECTS_CALLER": (
        "dishonest",
        "It looks at the frames or the objects of the code that calls it, or prepares to.",
    ),
    "DISTURBS_RIVAL": ("dishonest", "It ends or slows down other processes, such as the one that times the reference."),
    "BELOW_FLOOR": ("dishonest", "It takes less time than a right result takes at the least on this machine."),
}
"""By name: whether the candidate is wrong or dishonest then, and what the charge says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """A reason to reject the candidate."""

    name: str
    evidence: str

    def check(self) -> None:
        """ValueError for a name that is not in the table."""
        if self.name not in CHARGES:
            raise ValueError(f"{self.name!r} is no charge")

    @property
    def fault(self) -> Fault:
        """Whether the candidate is wrong or dishonest."""
        return CHARGES[self.name][0]

    @property
    def meaning(self) -> str:
        """What the charge says."""
        return CHARGES[self.name][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One call of the candidate whose result was compared."""

    kind: str
    """What was varied: "given", "sizes", "values", "strides", "nonfinite", "stream" and so on."""
    inputs: str
    """The inputs in words: shapes, dtype, and how they differ from the given ones."""
    outcome: Outcome
    error: Amount | None = None
    """The largest error over its tolerance; at most 1 passes. None where nothing was compared."""
    rms_ratio: Amount | None = None
    """The typical error over that of the reference in its own dtype."""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """What the candidate was timed against, in turns."""

    name: str
    timing: Timing
    hot_seconds: Seconds | None = None
    ratio: Amount | None = None
    """The time of the candidate over that of the rival; None for the candidate itself."""
    low: Amount | None = None
    high: Amount | None = None
    verdict: Verdict | None = None
    """Of the candidate against the rival."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The times at one set of sizes."""

    sizes: str
    candidate: Rival
    rivals: tuple[Rival, ...]
    enqueue_seconds: Seconds | None = None
    """Host time of the candidate until the call returns, on a GPU: its launch overhead."""
    floor_seconds: Seconds | None = None
    """The least time of a right result, where it can be proved; None where the machine is not known."""
    bound_seconds: Seconds | None = None
    """The floor of the reference's work: its memory traffic, or its FLOPs as written."""
    bound_limiter: str | None = None
    ceilings: str = ""
    """Where the machine's figures come from."""

    @property
    def share_of_bound(self) -> float | None:
        """The bound over the candidate's time."""
        seconds = self.candidate.timing.seconds
        return self.bound_seconds / seconds if self.bound_seconds and seconds > 0 else None

    @property
    def speedup(self) -> float | None:
        """The time of the reference over that of the candidate."""
        ratio = next((rival.ratio for rival in self.rivals if rival.name == "reference"), None)
        return 1 / ratio if ratio else None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelShare:
    """A kernel, or an operator of torch, that runs inside of the candidate."""

    name: str
    calls: Count
    seconds: Seconds
    share: Share
    library: str = ""
    """The library that it belongs to, such as "cuBLAS"; empty for the candidate's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement(_display.Result):
    """The verdict on one candidate, with everything that led to it."""

    candidate: str
    reference: str
    charges: tuple[Charge, ...]
    checks: tuple[Check, ...]
    speeds: tuple[Speed, ...] = ()
    kernels: tuple[KernelShare, ...] = ()
    deterministic: bool | None = None
    """Whether two calls on the same inputs gave the same bits."""
    bytes_held: Amount | None = None
    """Memory that the candidate keeps between calls."""
    last_words: str = ""
    """What its process wrote before it ended, where it crashed or hung."""
    notes: tuple[str, ...] = ()
    environment: Environment
    seconds: Seconds
    """How long the judgement took."""
    untimed: str = ""
    """Why times are missing that were asked for: a candidate without charges is not accepted then."""
    schema: int = SCHEMA

    @property
    def is_right(self) -> bool:
        """Whether no charge says that results are wrong."""
        return all(charge.fault != "wrong" for charge in self.charges)

    @property
    def is_honest(self) -> bool:
        """Whether no charge says that it cheats."""
        return all(charge.fault != "dishonest" for charge in self.charges)

    @property
    def is_accepted(self) -> bool:
        """Whether there is no charge, and all was done that could have led to one."""
        return not self.charges and not self.untimed

    @property
    def is_undecided(self) -> bool:
        """Whether there is no charge, and times are missing: what shows in timed calls alone was not looked for."""
        return not self.charges and bool(self.untimed)

    @property
    def refusals(self) -> tuple[Check, ...]:
        """Inputs that the reference accepts and the candidate raises an error on."""
        return tuple(check for check in self.checks if check.outcome == "refused")

    @property
    def speedups(self) -> tuple[float, ...]:
        """Over the reference, one for each set of sizes that was timed."""
        return tuple(speed.speedup for speed in self.speeds if speed.speedup is not None)

    def __repr__(self) -> str:
        verdict = ", ".join(charge.name for charge in self.charges)
        verdict = verdict or ("undecided" if self.is_undecided else "accepted")
        speed = f", {significant(geometric_mean(self.speedups))} x as fast" if self.speedups else ""
        return _display.headline(f"Judgement of {self.candidate}: {verdict}{speed}")


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean of positive numbers.

    >>> round(geometric_mean([1.0, 4.0]), 6)
    2.0
    """
    return math.exp(sum(math.log(value) for value in values) / len(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteJudgement(_display.Result):
    """The judgements of a folder of candidates, in the order of their names."""

    folder: str
    judgements: tuple[Judgement, ...]
    failures: Mapping[str, str] = field(default_factory=dict)
    """Candidates that could not be judged, with the reason."""
    schema: int = SCHEMA

    @property
    def is_accepted(self) -> bool:
        """Whether every candidate was judged and has no charge."""
        return not self.failures and all(judgement.is_accepted for judgement in self.judgements)

    @property
    def is_undecided(self) -> bool:
        """Whether nothing was rejected, and something is undecided."""
        accepted = all(judgement.is_accepted or judgement.is_undecided for judgement in self.judgements)
        return not self.failures and accepted and not self.is_accepted

    @property
    def speedups(self) -> tuple[float, ...]:
        """Of the accepted candidates, over their references."""
        return tuple(
            speedup for judgement in self.judgements if judgement.is_accepted for speedup in judgement.speedups
        )

    def __repr__(self) -> str:
        accepted = sum(judgement.is_accepted for judgement in self.judgements)
        return _display.headline(f"Judgements of {self.folder}: {accepted} of {len(self.judgements)} accepted")
