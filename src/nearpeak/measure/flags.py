"""Quality flags: what is doubtful about a measurement, with evidence and a remedy, and the grade they add up to.

One table, keyed by the flag's name. A severity of `note` does not lower the grade: it says what the number is, not
that it is doubtful. `doubt` means that the figure may be off or not reproducible, `wrong` that it does not measure
what was asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["note", "doubt", "wrong"]
Grade = Literal["A", "B", "C", "F"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One finding about a measurement."""

    name: str
    severity: Severity
    evidence: str
    remedy: str


_FLAGS: dict[str, tuple[Severity, str]] = {
    "CPU_BOUND": ("note", "Capture it in a CUDA graph, use torch.compile, or do more work per call."),
    "CLOSURE_INPUTS": ("note", "Pass tensors as arguments, so that they can be described and watched."),
    "NO_GRAPH": ("note", "Avoid host synchronisation and host-side state in the call to make it capturable."),
    "LAUNCH_NOT_HIDDEN": ("wrong", "The time contains host delays: lower the host work per call or use a CUDA graph."),
    "SYNC_IN_REGION": ("doubt", "Remove .item(), .cpu(), nonzero or synchronize() from the call for a device time."),
    "OFF_STREAM": ("doubt", "Make the current stream wait for the side stream before the call returns."),
    "BELOW_RESOLUTION": ("doubt", "Time more work per call: the instrument's own uncertainty is a large share."),
    "CACHE_NOT_COLD": ("wrong", "The flush did not evict the inputs: enlarge it, or report a hot time."),
    "CACHE_STATE_UNPROVEN": ("note", "The cache size is unknown here, so the flush could not be sized."),
    "ABOVE_ROOFLINE": ("wrong", "Check the stated work, the calibration, and that the call really does the work."),
    "POWER_CAP": ("doubt", "Use regime='burst', or report it as a sustained time."),
    "THERMAL": ("doubt", "Let the device cool, and check its fans and its neighbours."),
    "HARDWARE_SLOWDOWN": ("doubt", "The board throttles itself: check power supply and cooling."),
    "CLOCK_VARIED": ("doubt", "Use regime='burst', or lock the clocks if you may."),
    "CPU_THROTTLED": ("doubt", "The container's CPU quota was exhausted: raise it or use fewer threads."),
    "CPU_CONTENDED": ("doubt", "Other work shares the cores: stop it, or pin this process."),
    "GPU_SHARED": ("doubt", "Another process computes on this GPU: stop it."),
    "DRIFT": ("doubt", "The time was still moving: warm up longer, or use compare() for differences."),
    "MULTIMODAL": ("doubt", "Two or more speeds alternate: look at the raw series, fix the seed, pin the threads."),
    "HEAVY_TAIL": ("note", "Rare calls take much longer: look at the raw series before promising a latency."),
    "MEMORY_ALLOCATED": (
        "doubt",
        "The allocator asked the system for memory while timing: warm up longer, reuse buffers.",
    ),
    "PAGE_FAULTS": (
        "note",
        "The C library gives memory back and maps it anew: reuse buffers, or have it keep 1 GB with "
        "MALLOC_TOP_PAD_=1000000000 in the environment.",
    ),
    "MEMORY_GROWS": ("doubt", "Each call keeps memory: do not store results between calls."),
    "COMPILED_DURING_TIMING": ("wrong", "Compilation ran inside the timed region: keep shapes fixed, warm up longer."),
    "DEGENERATE_INPUT": (
        "doubt",
        "Use random data of the real distribution: constant data runs faster than real data.",
    ),
    "INPUT_MUTATED": ("doubt", "The call changes its inputs: pass `reset` to restore them outside the timed region."),
    "OUTPUT_NONFINITE": ("doubt", "The result has infinities or NaNs: check the inputs, or pass `reset`."),
    "PRECISION_NOT_REACHED": ("doubt", "Give it more time with max_seconds, or accept a wider interval."),
    "PARTIAL": ("doubt", "The run was interrupted: measure again."),
}


def raise_flag(name: str, evidence: str) -> Flag:
    """The flag `name` with this evidence."""
    severity, remedy = _FLAGS[name]
    return Flag(name=name, severity=severity, evidence=evidence, remedy=remedy)


def flag_names() -> tuple[str, ...]:
    """All flags that a measurement can carry."""
    return tuple(_FLAGS)


def grade(flags: Iterable[Flag]) -> Grade:
    """A: nothing doubtful. B: one doubt. C: several. F: the figure is not what was asked for."""
    severities = [flag.severity for flag in flags]
    if "wrong" in severities:
        return "F"
    doubts = severities.count("doubt")
    return "A" if doubts == 0 else "B" if doubts == 1 else "C"
