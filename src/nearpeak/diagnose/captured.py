"""`Captured`: what the steps of a run gave, and the profile that is made of it."""

from __future__ import annotations

import dataclasses
import datetime
import tempfile
import warnings
from collections.abc import Collection, Hashable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from nearpeak.bound.estimate import estimate_trace
from nearpeak.bound.times import Ceilings
from nearpeak.capture.garbage import marking_collections
from nearpeak.capture.kineto.host import OWN_WAIT
from nearpeak.capture.kineto.read import KinetoTrace, read_trace
from nearpeak.capture.loading import marking_loaders
from nearpeak.capture.precision import without_tf32
from nearpeak.capture.step_kind import StepKind
from nearpeak.diagnose.alignment import align_between, align_by
from nearpeak.diagnose.compiler import CompilerFacts
from nearpeak.diagnose.examined import Known
from nearpeak.diagnose.findings import with_findings
from nearpeak.diagnose.launched import at_their_launches
from nearpeak.diagnose.marks import has_gpu
from nearpeak.diagnose.memory import memory_of
from nearpeak.diagnose.profile import DeviceKernel, Profile, profile_of, with_idle
from nearpeak.diagnose.rates import rates_of
from nearpeak.diagnose.repeats import with_repeats
from nearpeak.diagnose.stalls import explained
from nearpeak.machines.model import Machine
from nearpeak.measure.statistics import median
from nearpeak.work.cost import costs_of
from nearpeak.work.op import Op, Trace
from nearpeak.work.tensor import Tensor

KNOWN: frozenset[Known] = frozenset({"storages", "lines", "host", "memory"})
"""What a run tells of its steps."""
COMMUNICATION = ("nccl", "rccl", "oneccl")
"""How kernels of communication libraries are named, in any spelling of case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """Clean steps by their wall times, one step of those under torch's profiler, and the same step traced."""

    source: str
    walls: Sequence[float]
    recorded: KinetoTrace
    profiled_wall: float
    traced: Trace
    wall_s: float | None = None
    """Of a clean step, where their median is not the best figure for it."""
    notes: tuple[str, ...] = ()
    host_ahead: bool = False
    """Whether clean steps began while the device was still at work on the one before."""
    compiler: CompilerFacts | None = None
    """What torch.compile did so far; None where it was not used."""

    def profile(self, machine: Machine, *, ceilings: Ceilings = "achievable") -> Profile:
        """The times of the profiled step at the ops of the traced one."""
        to_traced, matched = self._aligned()
        wall = self.wall_s or median(list(self.walls))
        traced = self.traced
        if machine.kind == "cpu":
            traced = dataclasses.replace(traced, ops=without_tf32(traced.ops))
        traced = dataclasses.replace(
            traced, shapes_before=_shapes_before(self.recorded.trace.ops, traced.ops, to_traced)
        )
        kernels = at_their_launches(device_kernels(self.recorded, to_traced), traced.ops)
        if not kernels:
            kernels = _cpu_kernels(self.recorded, to_traced, min(1.0, wall / self.profiled_wall))
        estimate = estimate_trace(traced, machine, ceilings=ceilings)
        found = profile_of(
            estimate,
            kernels,
            wall_s=wall,
            source=self.source,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            device=self.recorded.device,
        )
        found = with_repeats(found, kernels, self.recorded.repeats)
        idle = explained(
            self.recorded,
            idle_s=found.waterfall.seconds("idle"),
            clean=True,
            host_ahead=self.host_ahead,
            traced=traced.ops,
            to_traced=to_traced,
        )
        found = dataclasses.replace(
            with_idle(found, idle),
            steps=len(self.walls),
            walls=tuple(self.walls),
            spread=(max(self.walls) - min(self.walls)) / wall,
            matched=matched,
            profiled_s=self.profiled_wall,
            notes=(*found.notes, *self.notes),
            rates=rates_of(traced, estimate, machine, wall_s=found.wall_s, kernel_s=found.kernel_s),
            memory=None if traced.lives is None else memory_of(traced.lives, traced.ops),
            compiler=self.compiler,
        )
        return with_findings(found, traced, machine, KNOWN)

    def _aligned(self) -> tuple[list[int | None], float | None]:
        """Of each op of the profiled step its index in the traced one, and the share of those that have one.

        Where there is a device, only ops that launched something count: views and what the host does are in neither,
        and a trace sees no launches of CUDA graphs.
        """
        on_device = bool(self.recorded.kernels)
        launched = {kernel.op for kernel in self.recorded.kernels if not kernel.in_graph}
        wanted = [index for index in range(len(self.recorded.trace.ops)) if not on_device or index in launched]
        views = [cost.family == "view" for cost in costs_of(self.traced.ops)]
        there = [index for index, view in enumerate(views) if not on_device or not view]
        ops, keys = self.recorded.trace.ops, [_key(op) for op in self.traced.ops]
        light = {key for key, view in zip(keys, views, strict=True) if view}
        here = [_key(ops[index]) for index in wanted]
        found = align_by(here, [keys[index] for index in there], light)
        if None in found:  # a text may have grown between the two, a batch been padded to another length
            loose = align_between(found, [_loose(key) for key in here], [_loose(keys[index]) for index in there])
            found = [
                now if was is None and now is not None and _near(here[at], keys[there[now]]) else was
                for at, (was, now) in enumerate(zip(found, loose, strict=True))
            ]
        to_traced: list[int | None] = [None] * len(ops)
        for index, at in zip(wanted, found, strict=True):
            to_traced[index] = None if at is None else there[at]
        return to_traced, sum(at is not None for at in found) / len(found) if found else None


class Profiler:
    """torch's profiler around steps of some code; what it saw goes through a file that is deleted at once."""

    running: ClassVar[bool] = False
    """Whether there is one that was not stopped."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = torch_profile(activities=activities, record_shapes=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its notes about its own cycles
            self._profiler.start()
        Profiler.running = True
        self._undo = ExitStack()
        self._undo.enter_context(marking_collections())
        self._undo.enter_context(marking_loaders())
        self.number = -1
        """Of the step that began last."""
        self._step = ExitStack()
        self.next_step()

    def next_step(self) -> None:
        """A step begins now, before its first op."""
        self.end_step()
        self.number += 1
        self._step.enter_context(record_function(f"ProfilerStep#{self.number}"))

    def end_step(self) -> None:
        """The step is over; what runs until the next one begins is part of none."""
        self._step.close()

    def discard(self) -> None:
        """Ends it without a look at what it saw."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._step.close()
            self._undo.close()
            Profiler.running = False
            self._profiler.stop()

    def stop(self, among: Collection[int] = ()) -> KinetoTrace:
        """What ran in the middle one of these steps, or in the last step, where none are named or no device ran."""
        with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
            warnings.simplefilter("ignore")
            self._step.close()
            self._undo.close()
            Profiler.running = False
            self._profiler.stop()
            file = Path(folder) / "step.json"
            self._profiler.export_chrome_trace(str(file))
            return read_trace(file, among=among)


def synchronize() -> None:
    """Waits for the GPU, where one is in use."""
    if has_gpu():
        with record_function(OWN_WAIT) if Profiler.running else nullcontext():
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
            stream=kernel.stream,
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


_IN_PLACE = {"aten._index_put_impl": "aten.index_put"}
"""What autograd calls, and what it calls instead under a trace."""


def _shapes_before(
    earlier: Sequence[Op], ops: Sequence[Op], to_ops: Sequence[int | None]
) -> dict[int, dict[str, tuple[int, ...]]]:
    """The shapes that arguments had when an op ran the time before, where these were others; by the index of the op."""
    found = {}
    for op, to in zip(earlier, to_ops, strict=True):
        if to is not None and _key(op) != _key(ops[to]):
            now = ops[to].arguments
            found[to] = {
                name: value.shape
                for name, value in op.arguments.items()
                if isinstance(value, Tensor) and isinstance(now.get(name), Tensor) and now[name].shape != value.shape
            }
    return found


def _loose(key: Hashable) -> Hashable:
    """The name of an op, and how many dimensions its tensors have."""
    return (key[0], tuple(len(shape) for shape in key[1])) if isinstance(key, tuple) else key


def _near(one: Hashable, other: Hashable) -> bool:
    """Whether two ops of one name have sizes as those of steps that are alike."""
    if not isinstance(one, tuple) or not isinstance(other, tuple):
        return one == other
    pairs = zip(one[1], other[1], strict=True)
    return all(StepKind(shape=shape).alike(StepKind(shape=another)) for shape, another in pairs)


def _key(op: Op) -> Hashable:
    """What the same op has in common in both runs.

    Under a trace autograd adds gradients up out of place. The profiler leaves out members of long lists, and a compiled
    kernel is known by its name.
    """
    kind, _, rest = op.name.partition(".")
    if kind in ("inductor", "triton"):
        return rest
    name = rest.replace("::", ".") if kind in ("least", "unknown") else op.packet
    name = name.rstrip("_")
    shapes = [value.shape for key, value in op.arguments.items() if isinstance(value, Tensor) and key != "out"]
    return _IN_PLACE.get(name, name), tuple(shapes)
