"""`Captured`: what the steps of a run gave, and the profile that is made of it."""

from __future__ import annotations

import dataclasses
import datetime
import tempfile
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from nearpeak.bound.estimate import estimate_trace
from nearpeak.bound.times import Ceilings
from nearpeak.capture.kineto.read import KinetoTrace, read_trace
from nearpeak.capture.precision import without_tf32
from nearpeak.diagnose.alignment import align
from nearpeak.diagnose.profile import DeviceKernel, Profile, profile_of
from nearpeak.machines.model import Machine
from nearpeak.measure.statistics import median
from nearpeak.units import percent, seconds
from nearpeak.work.op import Op, Trace

COMMUNICATION = ("nccl", "rccl", "oneccl")
"""How kernels of communication libraries are named, in any spelling of case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """Clean steps by their wall times, one step under torch's profiler, and the same step traced."""

    source: str
    walls: Sequence[float]
    recorded: KinetoTrace
    profiled_wall: float
    traced: Trace

    def profile(self, machine: Machine, *, ceilings: Ceilings = "achievable") -> Profile:
        """The times of the profiled step at the ops of the traced one."""
        to_traced = align([_key(op) for op in self.recorded.trace.ops], [_key(op) for op in self.traced.ops])
        wall = median(list(self.walls))
        traced = self.traced
        if machine.kind == "cpu":
            traced = dataclasses.replace(traced, ops=without_tf32(traced.ops))
        kernels = device_kernels(self.recorded, to_traced)
        if not kernels:
            kernels = _cpu_kernels(self.recorded, to_traced, min(1.0, wall / self.profiled_wall))
        found = profile_of(
            estimate_trace(traced, machine, ceilings=ceilings),
            kernels,
            wall_s=wall,
            source=self.source,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            device=self.recorded.device,
        )
        return dataclasses.replace(found, notes=(*found.notes, self._quality(to_traced)))

    def _quality(self, to_traced: Sequence[int | None]) -> str:
        middle = median(list(self.walls))
        spread = (max(self.walls) - min(self.walls)) / middle
        matched = sum(at is not None for at in to_traced) / len(to_traced) if to_traced else 1.0
        return (
            f"{len(self.walls)} clean steps, the slowest and the fastest {percent(spread)} apart; under the profiler a "
            f"step took {seconds(self.profiled_wall)}; {percent(matched)} of its ops were found again in the trace."
        )


class Profiler:
    """torch's profiler around some code; what it saw goes through a file that is deleted at once."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = torch_profile(activities=activities, record_shapes=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its notes about its own cycles
            self._profiler.start()

    def stop(self) -> KinetoTrace:
        """What ran since then."""
        with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
            warnings.simplefilter("ignore")
            self._profiler.stop()
            file = Path(folder) / "step.json"
            self._profiler.export_chrome_trace(str(file))
            return read_trace(file)


def synchronize() -> None:
    """Waits for the GPU, where one is in use."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def device_kernels(recorded: KinetoTrace, to_traced: Sequence[int | None] | None = None) -> list[DeviceKernel]:
    """What ran on the device, at the ops of another trace where that is given."""
    return [
        DeviceKernel(
            name=kernel.name,
            start_s=kernel.start_s,
            seconds=kernel.seconds,
            op=kernel.op if to_traced is None or kernel.op is None else to_traced[kernel.op],
            communication=any(name in kernel.name.lower() for name in COMMUNICATION),
        )
        for kernel in recorded.kernels
    ]


def _cpu_kernels(recorded: KinetoTrace, to_traced: Sequence[int | None], share: float) -> list[DeviceKernel]:
    """Ops are the kernels of a CPU. The profiler makes them longer, as it does the step: `share` undoes that."""
    return [
        DeviceKernel(name=op.name, start_s=start * share, seconds=took * share, op=at)
        for op, (start, took), at in zip(recorded.trace.ops, recorded.spans, to_traced, strict=True)
        if took > 0.0
    ]


def _key(op: Op) -> Hashable:
    """What the same op has in common in both runs. Under a trace autograd adds gradients up out of place."""
    return op.packet.rstrip("_"), tuple(tensor.shape for tensor in op.inputs)
