"""Checks of arguments, with errors that name the field and the nearest legal value."""

from __future__ import annotations

import math

from nearpeak.errors import UsageError


def require_positive(**values: object) -> None:
    """Raise UsageError for the first value that is not an integer of at least 1."""
    for name, value in values.items():
        if type(value) is not int or value < 1:
            raise UsageError(f"{name}={value!r} must be a whole number of at least 1. Nearest: {name}=1.")


def nearest_divisor(value: int, number: int) -> int:
    """The divisor of `number` nearest to `value`; the smaller one of two equally near.

    >>> nearest_divisor(5, 32), nearest_divisor(6, 32)
    (4, 4)
    """
    return min(divisors(number), key=lambda n: (abs(n - value), n))


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`, or 1.

    >>> largest_divisor(32, 6)
    4
    """
    return max((n for n in divisors(number) if n <= limit), default=1)


def divisors(number: int) -> list[int]:
    """All divisors, in a time that grows with the root of the number."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return [*low, *(number // n for n in reversed(low) if n * n != number)]
