"""`Completeness`: whether the recording behind a profile has everything that ran, and what it is known to lack.

A recording loses events where a buffer overflows, a file is cut off, or a stream is not recorded. What is lost cannot
be seen, but the rest tells of it: a launch whose kernel is not there, a kernel that nobody launched, a marker kernel
that was planted and is gone, the counts of the profiler itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nearpeak._records import Count, Share

LossKind = Literal["cut", "damaged", "dropped", "kernels", "launches", "ops", "streams", "markers"]
"""The file ends before its JSON does; events are not valid; the profiler says that it dropped events or stopped early;
launches have no kernel; kernels have no launch; ops have no launch although equal ones do; a stream has no kernels
although the file names it; marker kernels are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What a recording is known to lack."""

    kind: LossKind
    count: Count | None
    """The number of events, streams or markers; None if it is not known."""
    in_step: bool
    """Whether it is of the step that the profile is of. False: it is elsewhere in the recording, and the step is as it
    was recorded."""
    text: str
    """A sentence for reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completeness:
    """What a recording has, and what it is known to lack."""

    launches: Count = 0
    """Launches of the step that must have made something run on the device."""
    markers: Count = 0
    """Marker kernels that were planted around and inside of the step; 0 for a file from elsewhere."""
    losses: tuple[Loss, ...] = ()

    @property
    def of_step(self) -> tuple[Loss, ...]:
        """The losses of the step itself."""
        return tuple(loss for loss in self.losses if loss.in_step)

    @property
    def complete(self) -> bool:
        """Whether the step has lost nothing, as far as the recording tells."""
        return not self.of_step

    @property
    def lost_share(self) -> Share | None:
        """The share of the step's launches whose kernels are lost, at the least; None if no launch is known."""
        lost = max((loss.count or 0 for loss in self.of_step if loss.kind in ("kernels", "ops")), default=0)
        return min(1.0, lost / max(self.launches, lost)) if self.launches or lost else None

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each loss, those of the step first."""
        return tuple(loss.text for loss in sorted(self.losses, key=lambda loss: not loss.in_step))
