"""What every generator of inputs needs: seeded random numbers, a device, and checks of its arguments."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterable

import torch

from nearpeak.errors import EnvironmentProblem, UsageError


def generator(purpose: str, seed: int | None) -> torch.Generator:
    """A CPU generator for that purpose and seed; `None` gives one that was never used before.

    The purpose is part of the seed: activations and weights with the same seed must not be the same numbers, since a
    product of correlated matrices is no product of independent ones.
    """
    return torch.Generator(device="cpu").manual_seed(derived_seed(purpose, seed))


def derived_seed(purpose: str, seed: int | None) -> int:
    """63 bits that depend on the purpose and the seed, or on nothing when the seed is None."""
    if seed is None:
        return secrets.randbits(63)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UsageError(f"seed={seed!r}: expected an integer (the same values each time) or None (fresh values).")
    digest = hashlib.blake2b(f"{purpose}:{seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def device_for(device: str | torch.device | None) -> torch.device:
    """The device that was asked for; for None the GPU where there is one, else the CPU."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        raise UsageError(f"device={device!r} is not a device. Valid: 'cpu', 'cuda', 'cuda:0', None.") from None
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise EnvironmentProblem(f"device={str(place)!r}: this machine has {found} CUDA devices. Use 'cpu' or None.")
    return place


def one_of(name: str, value: str, valid: Iterable[str]) -> None:
    """Raise unless the argument called `name` is one of the valid names."""
    names = tuple(valid)
    if value not in names:
        raise UsageError(f"{name}={value!r} is not known. Valid: {', '.join(map(repr, names))}.")


def at_least(name: str, value: int, minimum: int) -> None:
    """Raise unless the argument called `name` is an integer, `minimum` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise UsageError(f"{name}: expected an integer of at least {minimum}, found {value!r}.")


def positive(name: str, value: float) -> None:
    """Raise unless the argument called `name` is a finite number above 0."""
    if not (_is_finite(value) and value > 0):
        raise UsageError(f"{name}={value!r}: expected a finite number above 0.")


def not_negative(name: str, value: float) -> None:
    """Raise unless the argument called `name` is a finite number, 0 or more."""
    if not (_is_finite(value) and value >= 0):
        raise UsageError(f"{name}={value!r}: expected a finite number, 0 or more.")


def _is_finite(value: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
