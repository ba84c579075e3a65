"""`PeriodFinder`: the repeating unit of a sequence of marks, found while the marks come.

A mark is the end of a training step, or of a call without gradients. A program may repeat several of them as one: a
rollout before many optimizer steps, five steps of a critic and one of a generator, a guided and a free pass of a
denoiser. The period is the number of marks that explains most of the sequence so far, back from its last mark.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from nearpeak.units import seconds

MAX_MARKS = 128
"""Of a period, and more cannot be told from epochs."""
MAX_PERIOD_S = 10.0
"""A longer period cannot be afforded: a profile needs about ten of them."""
MIN_REST_SHARE = 0.2
"""Of the time of a period that marks of its most frequent kind must leave: otherwise these are the step, and the rest
is an exception, such as an evaluation once in an epoch."""
_SHORT = 8
"""Periods of fewer marks are seen three times before they count, longer ones twice."""
_HISTORY = 8 * MAX_MARKS


class PeriodFinder:
    """Is told of each mark, and knows the period as soon as it was seen often enough.

    >>> finder = PeriodFinder()
    >>> [finder.add(symbol, float(second)) for second, symbol in enumerate("xabbabbabb")][-2:]
    [(), ('a', 'b', 'b')]
    """

    def __init__(self) -> None:
        self._symbols: list[Hashable] = []
        self._ends: list[float] = []
        self._agreeing: list[int] = [0]
        """For each distance: how many of the last marks are the same as the one so many before them."""
        self._constant = 0
        """The marks of one kind before any other."""
        self.refused = ""
        """Why a period is not the step, for people."""

    @property
    def count(self) -> int:
        """The number of marks so far."""
        return len(self._symbols)

    def add(self, symbol: Hashable, now: float) -> tuple[Hashable, ...]:
        """The marks of a period that ends with this one, if it is to be the step; () if each mark is a step of its own.

        `now` is in seconds of any clock.
        """
        symbols = self._symbols
        if len(symbols) >= _HISTORY:
            return ()
        symbols.append(symbol)
        self._ends.append(now)
        if self._constant == len(symbols) - 1 and symbol == symbols[0]:
            self._constant += 1
            return ()
        if len(self._agreeing) == 1:  # the first of another kind: so far every distance agreed
            self._agreeing += [max(0, self._constant - distance) for distance in range(1, MAX_MARKS + 1)]
        best, explained = 0, 0
        for distance in range(1, min(MAX_MARKS, len(symbols) - 1) + 1):
            agreeing = self._agreeing[distance] + 1 if symbols[-1 - distance] == symbol else 0
            self._agreeing[distance] = agreeing
            if agreeing >= distance and agreeing + distance > explained:
                best, explained = distance, agreeing + distance
        times = 3 if best < _SHORT else 2
        if best < 2 or explained < times * best or explained % best:
            return ()
        self.refused = self._refusal(best, times)
        return () if self.refused else tuple(symbols[-best:])

    def _refusal(self, period: int, times: int) -> str:
        """Why a period is not the step: it is too long, or its most frequent mark is nearly all of it."""
        if len(self._ends) <= times * period:  # the first mark has no beginning
            times -= 1
        took = [
            min(self._took(len(self._ends) - 1 - place - turn * period) for turn in range(times))
            for place in range(period)
        ]  # what nearpeak records in some of them makes those longer
        marks = self._symbols[-period:][::-1]
        whole_s = sum(took)
        if whole_s > MAX_PERIOD_S:
            return (
                f"The program repeats every {period} steps: {seconds(whole_s)} are too long to be profiled as one step."
            )
        frequent = Counter(marks).most_common(1)[0][0]
        rest_s = sum(taken for taken, mark in zip(took, marks, strict=True) if mark != frequent)
        if rest_s >= MIN_REST_SHARE * whole_s:
            return ""
        return (
            f"Once in {period} steps the program does something else, which is not in the step: "
            f"{rest_s / whole_s:.0%} of the time."
        )

    def _took(self, index: int) -> float:
        return self._ends[index] - self._ends[index - 1]
