"""`calibration_doubts`: why the measured ceilings of a machine are not to be trusted, if they are not.

A calibration is wrong where it contradicts what every machine has in common: a cache is at least as fast as the memory
behind it, nothing is faster than its datasheet. It is doubtful where repeats of one figure lie far apart, or other work
ran meanwhile. Bounds from too low a ceiling lie above measured times, and the fault looks like one of the bounds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from nearpeak.machines.machine import Machine
from nearpeak.units import percent, quantity

CACHE_TOLERANCE = 0.95
"""A last-level cache that gave less than this share of the memory's bandwidth was not alone."""
MEMORY_EXCESS = 1.03
"""More than this multiple of a datasheet's bandwidth was never moved: something stayed in a cache."""
COMPUTE_EXCESS = 1.25
"""The same of FLOP/s; wider, as a datasheet's figure is for a clock that many boards exceed."""
LARGEST_SPREAD = 0.5
"""Of the repeats of one ceiling. A ceiling is the best of them, so that less is harmless."""
OTHERS = {"cpu": 0.1, "gpu": 0.5}
"""Other work on the cores lowers the ceilings of a CPU, and of a GPU only the times of launches."""
COMMON_DTYPES = {"cpu": ("float32",), "gpu": ("bfloat16", "float32")}
"""Those that nearly all code computes in."""


def calibration_doubts(machine: Machine, dtypes: Collection[str] | None = None) -> tuple[str, ...]:
    """Sentences without a period, the worst first; none for a machine that was not measured.

    Of peaks, only those of `dtypes` count: bounds of code that does not compute in a dtype do not depend on its peak.
    """
    return tuple(_doubts(machine, dtypes))


def is_worth_repeating(machine: Machine) -> bool:
    """Whether a doubtful calibration may become a better one: if it is not known that nothing else ran meanwhile."""
    measured = machine.achievable
    if measured is None or not calibration_doubts(machine, COMMON_DTYPES[machine.kind]):
        return False
    return measured.others_share is None or measured.others_share > OTHERS[machine.kind]


def _doubts(machine: Machine, dtypes: Collection[str] | None) -> Iterator[str]:
    measured, datasheet = machine.achievable, machine.theoretical
    if measured is None or measured.how != "measured":
        return
    cache = measured.cache_bandwidth
    if cache is not None and cache < CACHE_TOLERANCE * measured.bandwidth:
        yield f"the cache was slower than the memory ({quantity(cache, 'B/s')}, {quantity(measured.bandwidth, 'B/s')})"
    if datasheet is not None and measured.bandwidth > MEMORY_EXCESS * datasheet.bandwidth:
        yield f"the memory was faster than its datasheet by {percent(measured.bandwidth / datasheet.bandwidth - 1.0)}"
    if datasheet is not None:
        pairs = ((measured.matrix, datasheet.matrix), (measured.vector, datasheet.vector))
        for dtype, rate, peak in ((d, r, known[d]) for rates, known in pairs for d, r in rates.items() if d in known):
            if rate > COMPUTE_EXCESS * peak and (dtypes is None or dtype in dtypes):
                yield f"{dtype} was faster than its datasheet by {percent(rate / peak - 1.0)}"
    others = measured.others_share
    if others is not None and others > OTHERS[machine.kind]:
        yield f"other work used {percent(others, 0)} of the cores meanwhile"
    decisive = [
        (name, ceiling.spread)
        for name, ceiling in measured.ceilings.items()
        if _is_decisive(name, ceiling.value, measured.bandwidth, dtypes)
    ]
    name, spread = max(decisive, key=lambda entry: entry[1], default=("", 0.0))
    if spread > LARGEST_SPREAD:
        yield f"repeats of {name} lay {percent(spread, 0)} apart"


def _is_decisive(name: str, value: float, bandwidth: float, dtypes: Collection[str] | None) -> bool:
    """Whether bounds are computed with a ceiling. Of the ways to use the memory, the best is the ceiling."""
    group, _, dtype = name.partition(".")
    if group == "bandwidth":
        return value == bandwidth
    return group == "cache_bandwidth" or (group in ("matrix", "vector") and (dtypes is None or dtype in dtypes))
