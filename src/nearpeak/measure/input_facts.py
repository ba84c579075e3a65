"""`InputStatistics`: what is kept of a tensor beside a result. Plain data, no torch; `inputs.statistics` fills it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class InputStatistics:
    """The statistics of one tensor, by a sample where it is large. `None`: there was nothing to compute it from.

    Mean, standard deviation and range are those of the finite values; of a complex tensor, of its real and imaginary
    parts.
    """

    shape: tuple[int, ...]
    dtype: str
    device: str
    mean: float | None
    std: float | None
    minimum: float | None
    maximum: float | None
    zero_fraction: float | None
    nonfinite_fraction: float | None
    distinct: int
    """Distinct finite values among at most 4096 sampled ones."""
    sampled: bool
    """Whether only a sample of the tensor was looked at."""

    @property
    def degenerate(self) -> str | None:
        """Why this data would flatter (or spoil) a benchmark, or None.

        Masks (bool) and single numbers are what they are: never degenerate.
        """
        elements = math.prod(self.shape)
        if elements <= 1 or self.dtype == "bool":
            return None
        values = "sampled values" if self.sampled else "values"
        if self.nonfinite_fraction:
            return f"{100 * self.nonfinite_fraction:.3g} % of the {values} are infinite or NaN"
        if self.zero_fraction == 1:
            return f"all {values} are zero"
        if self.minimum == self.maximum:
            return f"all {values} are {self.minimum:g}"
        if self.zero_fraction is not None and self.zero_fraction > 0.9:
            return f"{100 * self.zero_fraction:.3g} % of the {values} are zero"
        if self.dtype.startswith(("float", "bfloat", "complex")) and elements > 1024 and self.distinct < 8:
            return f"only {self.distinct} distinct values"
        return None
