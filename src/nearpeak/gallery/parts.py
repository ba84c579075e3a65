"""The parts of an example: prose, tables, plots, bars, drawings, and predictions beside measurements.

All are plain data: a result is saved as JSON, and every page is rendered from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from nearpeak.render.document import CodeBlock, Table
from nearpeak.render.picture.bars import Bar
from nearpeak.render.picture.plot import Series

Unit = Literal["s", "B", "B/s", "FLOP", "FLOP/s", "FLOP/B", "%", "x", ""]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prose:
    """A paragraph."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A prediction and its measurement. The ratio measured / predicted is expected between `low` and `high`.

    A lower bound has no `high`.
    """

    what: str
    predicted: float | None
    measured: float | None
    low: float | None = None
    high: float | None = None

    @property
    def ratio(self) -> float | None:
        """Measured / predicted; None where one of them is missing."""
        if not self.predicted or self.measured is None:
            return None
        return self.measured / self.predicted

    @property
    def holds(self) -> bool | None:
        """Whether the ratio is within the band; None without a band or a measurement."""
        if self.ratio is None or self.low is None:
            return None
        return self.low <= self.ratio and (self.high is None or self.ratio <= self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionTable:
    """Predictions and measurements of one unit."""

    title: str
    rows: tuple[Prediction, ...]
    unit: Unit = "s"
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Lines and points on two axes."""

    title: str
    series: tuple[Series, ...]
    x_label: str
    y_label: str
    x_unit: Unit = ""
    y_unit: Unit = "s"
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedBars:
    """Stacked bars, against a limit where there is one."""

    title: str
    bars: tuple[Bar, ...]
    subtitle: str = ""
    unit: Unit = "s"
    limit: float | None = None
    limit_name: str = ""
    are_summed: bool = True
    """Whether the sum of a bar's pieces says something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """An SVG picture, such as `svg(scene)` or a roofline, with a description in words."""

    title: str
    described: str
    svg: str


Part = Prose | Table | PredictionTable | Plot | StackedBars | Drawing | CodeBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleResult:
    """Result of one run of an example."""

    name: str
    number: int
    title: str
    lesson: str
    machine: str
    """Name of the machine, such as "NVIDIA H200"."""
    measured: bool
    date: str
    versions: tuple[tuple[str, str], ...]
    seconds: float
    parts: tuple[Part, ...]
    skipped: str = ""
    """The reason where this machine cannot run it."""
    doubts: tuple[str, ...] = ()
    """What is doubtful about its measurements: flags, and the calibration behind predictions."""

    @property
    def rows(self) -> tuple[Prediction, ...]:
        """All predictions."""
        return tuple(row for part in self.parts if isinstance(part, PredictionTable) for row in part.rows)

    @property
    def missed(self) -> tuple[Prediction, ...]:
        """Predictions outside of their bands."""
        return tuple(row for row in self.rows if row.holds is False)


def prose(*paragraphs: str) -> Iterable[Prose]:
    """Paragraphs; a line break within one is a space."""
    return [Prose(text=" ".join(one.split())) for one in paragraphs]


def prediction_table(title: str, rows: Sequence[Prediction], *, unit: Unit = "s", note: str = "") -> PredictionTable:
    """Predictions under a title."""
    return PredictionTable(title=title, rows=tuple(rows), unit=unit, note=note)
