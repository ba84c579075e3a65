"""`measure_efficiency`: what kernels reach on the machine at hand, by kind of op and size."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch

from nearpeak.bound.expected import kinds_of
from nearpeak.bound.floors import as_written
from nearpeak.capture.lowering.target import target_of
from nearpeak.capture.probes import Probe, probes
from nearpeak.capture.trace import trace
from nearpeak.errors import UsageError
from nearpeak.machines.model import Machine, Reached
from nearpeak.measure.cuda import CudaDevice, Stage, cuda_device
from nearpeak.measure.host import HostEviction, HostSampler
from nearpeak.measure.instrument import zero_of
from nearpeak.measure.options import Progress
from nearpeak.measure.samplers import EventSampler, Sampler
from nearpeak.measure.statistics import median
from nearpeak.work.cost import cost_of

BLOCKS = 5
HOST_BLOCKS, HOST_CALLS = 2, 2
HOST_ROUNDS = 2
"""Through all kernels: on a host what else runs there, in other virtual machines too, takes seconds from some."""


def measure_efficiency(machine: Machine, progress: Progress | None = None) -> Machine:
    """`machine`, which is this one with its ceilings, with what its kernels reach. Caches are cold before each call.

    Everything runs in a burst, as the ceilings were measured. An operator that this torch lacks is left out.
    """
    say = progress or (lambda line: None)
    device = cuda_device(torch.cuda.current_device()) if machine.kind == "gpu" else None
    found = _round(machine, device, say)
    for number in range(1, 1 if device is not None else HOST_ROUNDS):
        again = _round(machine, device, lambda line, number=number: say(f"{line}, round {number + 1}"))  # type: ignore[misc]
        for kind, points in again.items():
            first = found.setdefault(kind, {})
            for bound, ratio in points.items():
                first[bound] = min(ratio, first.get(bound, ratio))
    assert machine.achievable is not None
    efficiency = {
        kind: tuple(Reached(bound_seconds=bound, ratio=ratio) for bound, ratio in sorted(points.items()))
        for kind, points in found.items()
    }
    return dataclasses.replace(machine, achievable=dataclasses.replace(machine.achievable, efficiency=efficiency))


def _round(machine: Machine, device: CudaDevice | None, say: Progress) -> dict[str, dict[float, float]]:
    """By kind, and by what the bound of a call is, how many times as long kernels took."""
    found: dict[str, dict[float, float]] = {}
    with torch.no_grad():
        for probe in probes(torch.device("cpu") if device is None else device.device):
            say(f"kernels: {probe.name}")
            for size in probe.sizes:
                try:
                    _measure(probe, size, machine, device, found)
                except (RuntimeError, NotImplementedError, UsageError) as error:
                    say(f"kernels: {probe.name} is left out: {str(error).splitlines()[0][:100]}")
                    break
    return found


def _measure(
    probe: Probe, size: int, machine: Machine, device: CudaDevice | None, found: dict[str, dict[float, float]]
) -> None:
    call = probe.build(size)
    recorded = trace(call, live=True, target=target_of(machine))
    costs = [cost_of(op) for op in recorded.ops]
    bounds = as_written(recorded, costs, machine)
    index = max(range(len(bounds)), key=lambda at: bounds[at].seconds)
    total = sum(bound.seconds for bound in bounds)
    seconds = _seconds(call, device)
    kinds = kinds_of(recorded.ops[index], costs[index], bounds[index].limiter)
    for kind in (next(kinds), *probe.stands_for):
        found.setdefault(kind, {})[total] = seconds / total


def _seconds(call: Callable[[], Any], device: CudaDevice | None) -> float:
    """Of a cold call: the median over a few blocks on a GPU, and the fastest of them on a host."""
    sampler: Sampler
    if device is None:
        call()
        start = time.perf_counter()
        call()
        sampler = HostSampler(
            call, "cold", call_seconds=time.perf_counter() - start, evict=HostEviction(), calls=HOST_CALLS
        )
    else:
        for _ in range(2):
            call()
        stage = Stage(device, "cold")
        first = EventSampler(device, call, stage, call_seconds=1e-3, enqueue_seconds=3e-5, calls=2).block().seconds
        zero = zero_of(device.index, "cold").events
        paced = Stage(device, "cold", pace_seconds=3 * first)
        sampler = EventSampler(device, call, paced, call_seconds=first, enqueue_seconds=3e-5, zero_seconds=zero)
    sampler.block()
    if device is None:
        return min(sampler.block().seconds for _ in range(HOST_BLOCKS))
    return median([sampler.block().seconds for _ in range(BLOCKS)])
