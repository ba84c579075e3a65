"""Idle time as plain data: its causes, the gaps of a step, and the launches that caused it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from nearpeak._records import Count, Seconds, SignedSeconds
from nearpeak.ops.fast_init import fast_init

CauseName = Literal[
    "synchronization",
    "input",
    "host ops",
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
    "host ops": "the host computed on tensors in its own memory",
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
WORKERS_STARTED = "workers are started"
"""What an idle cause is called whose count is the number of steps of an epoch."""
PROFILER_SLOWDOWN = 2.5
"""The factor by which the profiler slows down ops on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleCause:
    """Idle time of one cause."""

    cause: CauseName
    seconds: Seconds
    count: Count
    """The number of host calls, or of gaps."""
    where: str
    """The source line or module that causes it, or causes most of it; "" if it is not known. For launching and Python,
    that of the next op."""
    what: str
    """The op or call, or the kind of gap."""


@fast_init
@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A time in which nothing ran on the device, in the profiled step."""

    start_s: SignedSeconds
    seconds: Seconds
    cause: CauseName
    """The cause of most of it."""
    where: str
    """The source line or module of that cause; "" if it is not known."""


class IdleTime(NamedTuple):
    """The idle time of a step with its causes."""

    causes: tuple[IdleCause, ...]
    """The largest first; they sum to the idle time."""
    launch_wait_s: Mapping[int, float]
    """The idle time that the launches of an op cause, by the index of the op."""
    gaps: tuple[Gap, ...]
    """Of the profiled step, in order."""
