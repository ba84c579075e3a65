"""How to measure: the options that bench, compare and sweep share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.measure.timing import Cache, Kind, Regime

Progress = Callable[[str], None]
"""Gets a line of text now and then; a `StatusLine` replaces the one before it."""

Method = Literal["auto", "events", "graph"]
Evict = Literal["flush", "rotate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """See `bench` for what each one means."""

    kind: Kind | Literal["auto"] = "auto"
    method: Method = "auto"
    cache: Cache = "cold"
    evict: Evict = "flush"
    regime: Regime = "burst"
    precision: float = 0.005
    max_seconds: float = 2.0
    warmup_seconds: float = 0.2
    min_blocks: int = 12
    max_blocks: int = 400
    confidence: float = 0.95
    seed: int = 0
    other_kinds: bool = True

    def __post_init__(self) -> None:
        _choice("kind", self.kind, (*get_args(Kind), "auto"))
        _choice("method", self.method, get_args(Method))
        _choice("cache", self.cache, get_args(Cache))
        _choice("evict", self.evict, get_args(Evict))
        _choice("regime", self.regime, get_args(Regime))
        for name in ("precision", "max_seconds", "warmup_seconds", "min_blocks", "max_blocks"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not value >= 0:
                raise UsageError(f"{name} is {value!r}; it is a number of at least 0.")
        if not isinstance(self.confidence, (int, float)) or not 0.5 <= self.confidence < 1:
            raise UsageError(f"confidence is {self.confidence!r}; it is a share from 0.5 to below 1.")
        if self.min_blocks < 6 or self.max_blocks < self.min_blocks:
            raise UsageError(
                f"min_blocks is {self.min_blocks} and max_blocks is {self.max_blocks}; a 95 % "
                "interval needs at least 6 blocks, and max_blocks is no smaller than min_blocks."
            )


def options_from(options: dict[str, Any]) -> Options:
    """Options from keyword arguments, with a helpful error for a name that does not exist."""
    valid = [field.name for field in fields(Options)]
    for name in options:
        if name == "machine":
            raise UsageError("The machine whose ceilings give the bound is `on`: bench(fn, x, on=machine).")
        if name not in valid:
            raise UsageError(
                f"There is no option {name!r}. {did_you_mean(name, valid)} Keyword arguments of the timed function go "
                "into a Case: bench(nearpeak.Case(fn, x, dim=-1))."
            )
    return Options(**options)


def _choice(name: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise UsageError(f"{name} is {value!r}. {did_you_mean(str(value), valid)}")
