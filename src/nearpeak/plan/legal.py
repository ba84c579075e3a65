"""Checks of arguments, with errors that name the field and the nearest legal value."""

from __future__ import annotations

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
    return min((n for n in range(1, number + 1) if number % n == 0), key=lambda n: (abs(n - value), n))
