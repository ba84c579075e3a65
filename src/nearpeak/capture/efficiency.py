"""`measure_efficiency`: what kernels reach on the machine at hand, by kind of op and size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from nearpeak.bound.expected import CACHED, kinds_of
from nearpeak.bound.floors import as_written
from nearpeak.capture.lowering.target import target_of
from nearpeak.capture.probes import Probe, probes
from nearpeak.capture.trace import trace
from nearpeak.errors import UsageError
from nearpeak.machines.model import Machine, Reached
from nearpeak.measure.assess import MANY_FAULTS
from nearpeak.measure.cuda import CudaDevice, Stage, cuda_device
from nearpeak.measure.heap import memory_kept, page_faults
from nearpeak.measure.host import HostEviction, HostSampler
from nearpeak.measure.instrument import zero_of
from nearpeak.measure.options import Progress
from nearpeak.measure.samplers import EventSampler
from nearpeak.measure.statistics import median
from nearpeak.work.cost import cost_of

BLOCKS = 5
HOST_CALLS = 5
SETTLING = 10
"""Calls before those, at most."""
HOST_ROUNDS = 5
"""Through all kernels: a host is slower for seconds at a time, by what else runs there or on a core's other thread."""


def measure_efficiency(machine: Machine, progress: Progress | None = None) -> Machine:
    """`machine`, which is this one with its ceilings, with what its kernels reach. Caches are cold before each call.

    Everything runs in a burst, as the ceilings were measured. An operator that this torch lacks is left out.
    """
    say = progress or (lambda line: None)
    device = cuda_device(torch.cuda.current_device()) if machine.kind == "gpu" else None
    found: Found = {}
    timer = _host_timer() if device is None else partial(_device_seconds, device)
    with memory_kept() if device is None else nullcontext():
        for number in range(HOST_ROUNDS if device is None else 1):
            suffix = f", round {number + 1}" if number else ""
            _round(machine, device, timer, lambda line, suffix=suffix: say(line + suffix), found)  # type: ignore[misc]
    assert machine.achievable is not None
    efficiency = {
        kind: tuple(Reached(bound_seconds=bound, ratio=median(ratios)) for bound, ratios in sorted(points.items()))
        for kind, points in found.items()
    }
    return dataclasses.replace(machine, achievable=dataclasses.replace(machine.achievable, efficiency=efficiency))


Found = dict[str, dict[float, list[float]]]
"""By kind, and by what the bound of a call is, how many times as long it took in each round."""
Timer = Callable[[Callable[[], Any], Callable[[], Any]], tuple[float, float | None]]
"""Seconds of a call with cold caches, and with its operands in them, where that is measured.

A second call of the same operator, on other tensors, is there to bring back its code.
"""


def _round(machine: Machine, device: CudaDevice | None, timer: Timer, say: Progress, found: Found) -> None:
    with torch.no_grad():
        for probe in probes(torch.device("cpu") if device is None else device.device):
            say(f"kernels: {probe.name}")
            for size in probe.sizes:
                try:
                    _measure(probe, size, machine, timer, found)
                except (RuntimeError, NotImplementedError, UsageError) as error:
                    say(f"kernels: {probe.name} is left out: {str(error).splitlines()[0][:100]}")
                    break


def _measure(probe: Probe, size: int, machine: Machine, timer: Timer, found: Found) -> None:
    call = probe.build(size)
    recorded = trace(call, live=True, target=target_of(machine))
    costs = [cost_of(op) for op in recorded.ops]
    bounds = as_written(recorded, costs, machine)
    index = max(range(len(bounds)), key=lambda at: bounds[at].seconds)
    limiter = "compute" if bounds[index].limiter == "compute" else "memory"
    kinds = (next(kinds_of(recorded.ops[index], costs[index], limiter)), *probe.stands_for)
    cold, hot = timer(call, probe.build(probe.sizes[0]))
    _keep(found, kinds, sum(bound.seconds for bound in bounds), cold)
    moved = sum(access.bytes for cost in costs for access in (*cost.reads, *cost.writes))
    if hot is not None and limiter == "memory" and moved <= (machine.cache_bytes or 0.0) / 2:
        cached = sum(max(bound.cache_seconds, bound.compute_seconds) for bound in bounds)
        _keep(found, [f"{kind}{CACHED}" for kind in kinds], cached, hot)


def _keep(found: Found, kinds: Iterable[str], bound: float, seconds: float) -> None:
    for kind in kinds:
        found.setdefault(kind, {}).setdefault(bound, []).append(seconds / bound)


def _host_timer() -> Timer:
    """The median of a few calls, cold and hot.

    The sweep takes the operator's code out of the caches too. An op of a step finds it there, so the other call follows
    the sweep.
    """
    sweep = HostEviction()

    def seconds(call: Callable[[], Any], other: Callable[[], Any]) -> tuple[float, float | None]:
        def evict() -> None:
            sweep()
            other()

        _settle(call)
        cold = HostSampler(call, "cold", call_seconds=0.0, evict=evict, calls=HOST_CALLS)
        usual = cold.block().seconds
        hot = HostSampler(call, "hot", call_seconds=usual)
        return usual, median([hot.block().seconds for _ in range(3)])

    return seconds


def _settle(call: Callable[[], Any]) -> None:
    """Calls until its memory is there: a heap that keeps what is freed grows for some calls."""
    for _ in range(SETTLING):
        before = page_faults()
        call()
        if page_faults() - before < MANY_FAULTS:
            return


def _device_seconds(
    device: CudaDevice, call: Callable[[], Any], other: Callable[[], Any]
) -> tuple[float, float | None]:
    """The median over a few blocks of cold calls; the code stays where it is."""
    for _ in range(2):
        call()
    stage = Stage(device, "cold")
    first = EventSampler(device, call, stage, call_seconds=1e-3, enqueue_seconds=3e-5, calls=2).block().seconds
    zero = zero_of(device.index, "cold").events
    paced = Stage(device, "cold", pace_seconds=3 * first)
    sampler = EventSampler(device, call, paced, call_seconds=first, enqueue_seconds=3e-5, zero_seconds=zero)
    sampler.block()
    return median([sampler.block().seconds for _ in range(BLOCKS)]), None
