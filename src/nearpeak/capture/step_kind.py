"""`StepKind`: what tells a step from one that does something else, without looking at its time."""

from __future__ import annotations

from dataclasses import dataclass

GROWTH = 0.25
"""Sizes that differ by less than this are alike: a text grows by a token, a batch is padded to another length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKind:
    """What was called in a step. Steps of one kind are alike: a decoded token is no prompt, an evaluation no training.

    >>> StepKind(shape=(1, 1)).alike(StepKind(shape=(1, 32))), StepKind(shape=(1, 32)).alike(StepKind(shape=(1, 33)))
    (False, True)
    """

    trained: int = 0
    """Calls of outermost modules with gradients."""
    evaluated: int = 0
    """Those without."""
    module: int = 0
    """Which module was called, where each call is a step."""
    shape: tuple[int, ...] = ()
    """Of the smallest tensor that it was given: new tokens, where everything else grows with the text."""
    recorded: bool = False
    """Whether a profiler of the code's own was running."""

    def alike(self, other: StepKind) -> bool:
        """Whether a step of this kind may stand for one of the other."""
        if (self.module, self.recorded, len(self.shape)) != (other.module, other.recorded, len(other.shape)):
            return False
        sizes = zip(
            (self.trained, self.evaluated, *self.shape), (other.trained, other.evaluated, *other.shape), strict=True
        )
        return all(_near(one, another) for one, another in sizes)


def _near(one: int, another: int) -> bool:
    """Nothing is near to none or one: a step with one evaluation is not like a step without."""
    low, high = min(one, another), max(one, another)
    return low == high or (low > 1 and high - low <= max(1.0, GROWTH * high))
