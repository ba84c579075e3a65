"""Idle time as plain data: its causes, the gaps of a step, and what of it ops are to blame for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from nearpeak.ops.fast_init import fast_init

CauseName = Literal[
    "synchronization",
    "input",
    "allocator",
    "garbage collection",
    "compilation",
    "profiler",
    "launching",
    "python",
    "unknown",
]
CAUSE_MEANINGS: Mapping[CauseName, str] = {
    "synchronization": "the host waited for the device, and had to catch up",
    "input": "the host waited for a data loader",
    "allocator": "the host asked the driver for memory",
    "garbage collection": "Python collected garbage",
    "compilation": "code was compiled, or a kernel loaded",
    "profiler": "the profiler itself; not in a run without it",
    "launching": "ops are launched more slowly than they run",
    "python": "the host ran code outside of any op",
    "unknown": "not seen in the profiled step",
}
LAUNCHED_LATE = "launched late"
BETWEEN_QUEUED_KERNELS = "between queued kernels"
BETWEEN_OPS = "between ops"
AFTER_LAST_KERNEL = "after the last kernel"
PROFILER_SLOWDOWN = 2.5
"""How many times as long ops of the host take under the profiler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleCause:
    """Idle time of one cause."""

    cause: CauseName
    seconds: float
    count: int
    """How often: calls of the host, or gaps."""
    where: str
    """The source line or module behind it; that with most of it where there are several; "" where it is not known. Of
    launching and Python, that of the op which came next."""
    what: str
    """The op or call, or the kind of gap."""


@fast_init
@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A time in which nothing ran on the device, in the profiled step."""

    start_s: float
    seconds: float
    cause: CauseName
    """The one that has most of it."""
    where: str
    """The source line or module behind that; "" where it is not known."""


class IdleTime(NamedTuple):
    """Idle time, explained."""

    causes: tuple[IdleCause, ...]
    """The largest first; they sum to the idle time."""
    launch_wait_s: Mapping[int, float]
    """Of ops by their index: the idle time before their kernels that their launches are to blame for."""
    gaps: tuple[Gap, ...]
    """In the order of time, as the profiled step had them."""
