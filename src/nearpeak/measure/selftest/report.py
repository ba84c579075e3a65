"""What a self-test found, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One question with a known answer. `passed` is None where it could not be asked on this machine."""

    name: str
    question: str
    expected: str
    found: str
    passed: bool | None
    seconds: float = 0.0
    data: Mapping[str, Any] = field(default_factory=dict)
    """The raw figures behind `found`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All experiments of a run."""

    device: str
    torch: str
    date: str
    quick: bool
    experiments: tuple[Experiment, ...]
    schema: int = 1

    @property
    def passed(self) -> bool:
        """Whether none failed."""
        return all(experiment.passed is not False for experiment in self.experiments)
