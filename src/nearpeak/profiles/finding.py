"""`Finding`: wasted time in a step: what it is, where, what it costs and how to avoid it. Part of a saved profile."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from nearpeak._display import Result, headline
from nearpeak._records import Amount, Count, Seconds
from nearpeak.units import percent, seconds

MIN_SHOWN_SHARE = 0.01
"""Of the wall time. Findings that save less are not shown."""

LEAST_ODDS, MOST_ODDS, MOST_POWER = 0.5, 2.2, 0.7
"""The range of a prediction, as odds: what goes of a step, over what stays. From this multiple of the predicted odds to
this multiple of their power, since a change at a line often does more than a small finding there says. Fitted by
`benchmarks.profiles.likely_shares` to programs by others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """What nearpeak offers in place of the ops of a finding."""

    id: str
    """The function of `nearpeak.kernels`: "rms_norm"."""
    usage: str
    """How to call it: "nearpeak.kernels.rms_norm(x, weight)"."""
    ops: tuple[Count, ...] = ()
    """The ops that it replaces, as indices into the ops of the profile."""
    modules: tuple[str, ...] = ()
    """The paths of the modules to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(Result):
    """One kind of waste at one line of the user's code, at all places where that line runs."""

    rule: str
    """The name of the rule that found it: "zeroed-then-overwritten"."""
    title: str
    """What is wrong, in one sentence."""
    source: str
    """The line to change, or the line of the user's own that calls a library: "train.py:41"; "" if it is not known."""
    modules: tuple[str, ...]
    """The paths of the modules that it is in, in the order of the step."""
    places: Count
    """The number of occurrences in the step."""
    saving_s: Seconds
    """The predicted saving per step if this alone is changed."""
    share: Amount
    """The saving over the wall time of a step in the long run: without what findings have as `once_s`."""
    evidence: str
    """What was observed: the ops, their times and bytes."""
    reasoning: str
    """How the saving was predicted."""
    remedy: str
    """What to write instead: a few lines of code, or a setting."""
    fix: Fix | None = None
    """What nearpeak offers for it."""
    ops: tuple[Count, ...] = ()
    """Indices into the ops of the profile."""
    together_s: Seconds | None = None
    """The saving of this finding and of all larger ones at once, less than their sum where they shorten the same ops;
    None for profiles that were saved before they had it."""
    idle_s: Seconds = 0.0
    """The part of the saving in which nothing ran on the device."""
    once_s: Seconds = 0.0
    """What it takes of the profiled step for sizes that came for the first time. Steps whose sizes recur do not spend
    it, and it is not part of the saving."""
    library: str = ""
    """Whose code it is in: an installed package, or a class of torch's ("torch.nn.LSTMCell"); "" for the user's own."""
    inside: str = ""
    """The line of that package: "modeling_llama.py:210"."""
    called_at: str = ""
    """The one line that calls the function of `source`, where the change may belong as well; "" if there are several,
    or if it is the forward pass of a module."""

    def __repr__(self) -> str:
        return headline(f"{self.rule} at {self.where}: saves {self.saving_text}")

    @property
    def where(self) -> str:
        """The line and the one that calls its function, or else the module: "model.py:29, called at line 46"."""
        if not self.source:
            return self.module or "the step"
        if not self.called_at:
            return self.source
        name, _, line = self.called_at.rpartition(":")
        is_near = name == self.source.rpartition(":")[0]
        return f"{self.source}, called at {f'line {line}' if is_near else self.called_at}"

    @property
    def found_s(self) -> float:
        """What it takes of the profiled step."""
        return self.saving_s + self.once_s

    @property
    def saving_text(self) -> str:
        """The saving with its share, or what is spent once."""
        if self.once_s:
            return f"{seconds(self.once_s)} once for each new size"
        return f"{seconds(self.saving_s)}, {percent(self.share)}"

    @property
    def waits(self) -> bool:
        """Whether most of the saving is idle time."""
        return 2.0 * self.idle_s > self.saving_s

    @property
    def likely_shares(self) -> tuple[float, float]:
        """Between which shares of a step the change is likely to save, as eight of ten changes did."""
        return likely_shares(self.share)

    @property
    def module(self) -> str:
        """The modules as one path for display, with a star for the parts that differ."""
        return common_module(self.modules)


def likely_shares(share: float) -> tuple[float, float]:
    """The likely range of a predicted share.

    >>> [[round(end, 2) for end in likely_shares(share)] for share in (0.02, 0.5, 1.0)]
    [[0.01, 0.13], [0.33, 0.69], [1.0, 1.0]]
    """
    if share >= 1.0:
        return 1.0, 1.0
    odds = share / (1.0 - share)
    low, high = LEAST_ODDS * odds, max(odds, MOST_ODDS * odds**MOST_POWER)
    return low / (1.0 + low), high / (1.0 + high)


def saved_together(findings: Collection[Finding]) -> float:
    """What findings of one profile save at once, in seconds: no more than with all that are larger than them."""
    sum_s = sum(finding.saving_s for finding in findings)
    known = [finding.together_s for finding in findings if finding.together_s is not None]
    return min(sum_s, max(known)) if known and len(known) == len(findings) else sum_s


def is_ignored(rule: str, source: str, ignore: Collection[str]) -> bool:
    """Whether `ignore` has the rule ("NAME") or the rule at this line ("NAME@train.py:41")."""
    return rule in ignore or f"{rule}@{source}" in ignore


def common_module(modules: Sequence[str]) -> str:
    """One path for several, with a star for the parts that differ.

    >>> common_module(["model.layers.0.mlp", "model.layers.1.mlp"])
    'model.layers.*.mlp'
    >>> common_module(["model.norm", "model.layers.1.norm"])
    'model.*'
    """
    paths = [module.split(".") for module in dict.fromkeys(modules)]
    if not paths:
        return ""
    if len({len(path) for path in paths}) == 1:
        return ".".join(parts[0] if len(set(parts)) == 1 else "*" for parts in zip(*paths, strict=True))
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join([*shared, "*"])
