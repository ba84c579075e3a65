"""The rates and the memory of a profiled step, as text."""

from __future__ import annotations

from nearpeak.diagnose.memory import Memory
from nearpeak.diagnose.rates import Rates
from nearpeak.render.profile_card import filled
from nearpeak.render.table import table
from nearpeak.render.timing import plain
from nearpeak.units import GIB, gibibytes, percent, quantity, significant

_UNITS = ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def rates_text(rates: Rates | None) -> str:
    """MFU and HFU with their convention, and what was achieved of the ceilings."""
    if rates is None:
        return ""
    lines = [_utilisation(rates)] if rates.hardware_flops else []
    achieved = []
    if rates.hardware_flops:
        achieved.append(
            f"{quantity(rates.flops_per_s, 'FLOP/s')} of products"
            + _shares(rates.compute_share, rates.kernel_compute_share)
        )
    if rates.memory_bytes:
        achieved.append(
            f"at least {quantity(rates.bytes_per_s, 'B/s')} of memory traffic"
            + _shares(rates.bandwidth_share, rates.kernel_bandwidth_share)
        )
    if achieved:
        lines.append(f"Achieved: {', '.join(achieved)}.")
    return "\n".join(filled(line) for line in lines)


def _utilisation(rates: Rates) -> str:
    if rates.mfu is None or rates.hfu is None:
        return "MFU and HFU are not known: the machine has no datasheet peak for these dtypes."
    convention = "of the dense datasheet peak (model and hardware FLOPs of products, convolutions and attention)"
    if not rates.recompute_known:
        return (
            f"MFU at most {percent(rates.mfu)}, HFU {percent(rates.hfu)} {convention}; a trace file does not tell "
            "which ops were computed again."
        )
    return f"MFU {percent(rates.mfu)}, HFU {percent(rates.hfu)} {convention}."


def _shares(wall: float | None, kernels: float | None) -> str:
    if wall is None:
        return ""
    while_kernels = "" if kernels is None else f", {percent(kernels)} while kernels ran"
    return f" ({percent(wall)} of the achievable{while_kernels})"


def memory_text(memory: Memory | None) -> str:
    """How much of the memory is used at the peak, where that is, and by what."""
    if memory is None:
        return ""
    return "\n".join([filled(memory_head(memory)), "", table(["memory", "size", "share"], memory_rows(memory), "lrr")])


def memory_head(memory: Memory) -> str:
    """How much is used at the peak, and where that is."""
    where = ", ".join(plain(part, 40) for part in (memory.phase, memory.module, memory.source) if part)
    return f"Memory: {_of(memory.peak_bytes, memory.capacity_bytes)} at the peak" + (f" ({where}):" if where else ":")


def memory_rows(memory: Memory) -> list[list[str]]:
    """Each category with its size and its share of the peak."""
    sizes = {
        "parameters": memory.parameters_bytes,
        "gradients": memory.gradients_bytes,
        "optimizer state": memory.optimizer_bytes,
        "activations": memory.activations_bytes,
        "used by no op": memory.other_bytes,
        "workspace, at most": memory.workspace_bytes,
        "reserved, unused": memory.unused_bytes,
    }
    return [
        [name, _size(value), "" if name == "reserved, unused" else percent(value / memory.peak_bytes)]
        for name, value in sizes.items()
        if value is not None and memory.peak_bytes
    ]


def _of(value: float, capacity: float | None) -> str:
    if capacity is None:
        return _size(value)
    used = significant(value / GIB) if value >= GIB else _size(value)
    return f"{used} of {gibibytes(capacity)}"


def _size(value: float) -> str:
    for unit, name in _UNITS:
        if value >= unit:
            return f"{significant(value / unit)} {name}"
    return f"{value:.0f} B"
