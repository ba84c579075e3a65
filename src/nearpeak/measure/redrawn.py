"""`Redrawn`: an argument that is drawn again for each block of a measurement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from nearpeak.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Redrawn(Generic[T]):
    """Inputs that are drawn again for each block of a measurement, so that one lucky draw does not decide the result.

    `make` gets the number of the block as its seed, so that a run can be repeated value by value. Every draw has the
    same shapes: the values change in place, outside the timed region.

    >>> inputs = Redrawn(lambda seed: [seed, seed + 1])
    >>> inputs.draw(0), inputs.draw(3)
    ([0, 1], [3, 4])
    """

    make: Callable[[int], T]

    def __post_init__(self) -> None:
        if not callable(self.make):
            raise UsageError(f"Redrawn takes a function of a seed, found {type(self.make).__name__}.")

    def draw(self, block: int) -> T:
        """The inputs of that block."""
        if block < 0:
            raise UsageError(f"block is {block}; it must be at least 0.")
        return self.make(block)
