"""`Step`: what is known about a profiled step, as rules see it: ops, costs, times, and the data flow between ops."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from statistics import median
from typing import Literal

from nearpeak.bound.dataflow import Touches, touches_in
from nearpeak.bound.expected import OpExpectations, interpolate, is_like_measured
from nearpeak.bound.kernel_models import Gpu, kernel_constants, list_seconds, work_seconds
from nearpeak.bound.roofline import KernelStream, ResourceSeconds, limiting_resource
from nearpeak.findings.loops import Loop, find_loops
from nearpeak.findings.replay import StepReplay
from nearpeak.machines.machine import EfficiencyPoint, Machine
from nearpeak.machines.reference import reference_efficiency
from nearpeak.ops.cost import Access, Cost, cost_of, costs_of
from nearpeak.ops.op import Op, Trace
from nearpeak.ops.tensor import Tensor
from nearpeak.profiles.finding import Fix
from nearpeak.profiles.idle import CauseName, IdleCause
from nearpeak.profiles.profile import Profile, ProfiledOp

StepFact = Literal["storages", "lines", "host", "memory"]
"""What can be known about a step: which tensors share memory, the source lines of ops, what the host did, the peak
memory."""
_LARGE_GROUP, _LEAST_GROUPS = 0.01, 3
"""Ops of one kind that take this share of the step tell its pace, if there are so many kinds."""
FULL_MEMORY = 0.85
"""The share of the memory that a step may need; the rest allows for fragmentation."""
PROFILER_SECONDS_PER_OP = 2e-5
"""The time that the profiler adds to an op on the host, at most."""
READS = ("aten._local_scalar_dense", "aten.item", "aten.is_nonzero")
"""Operators that read a number of a tensor."""
_NO_TOUCHES = Touches((), ())
_NO_MODULE = frozenset({""})
_ANOMALY_CHECKS = ("aten.isnan", "aten._is_any_true", "aten._local_scalar_dense")
"""The ops of a check in their order, each of which reads what the one before it wrote."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A profiled step, op by op: what it computes and moves, and the time of each op.

    `ops`, `costs` and `measured` have one entry per op, and rules refer to ops by their index.
    """

    trace: Trace
    profile: Profile
    machine: Machine
    knows: frozenset[StepFact]
    claimed: frozenset[int] = frozenset()
    """For a general rule, which runs last: the ops that other rules claim."""
    replay: StepReplay | None = None
    """The model of the host and the device; None if what the host did is not known, or if the host is the device."""

    def after(self, claimed: Iterable[int]) -> Step:
        """The same step after other rules have run. Cached properties are shared."""
        later = copy.copy(self)
        object.__setattr__(later, "claimed", frozenset(claimed))
        return later

    @property
    def ops(self) -> Sequence[Op]:
        """The traced ops: arguments, tensors, phase, module and line."""
        return self.trace.ops

    @property
    def measured(self) -> Sequence[ProfiledOp]:
        """The same ops with `measured_s`, `bound_s` and `expected_s`."""
        return self.profile.ops

    @cached_property
    def trains(self) -> bool:
        """Whether the step has a backward pass or an optimizer; otherwise it is inference."""
        return any(op.phase != "forward" for op in self.trace.ops)

    @cached_property
    def callers(self) -> Mapping[str, str]:
        """The line of the user's own that calls an installed package, by the line in that package."""
        return {op.source: op.caller for op in self.trace.ops if op.caller}

    def calling_line(self, index: int) -> str:
        """The line of the user's own that calls the model which an op is in; "" for an op in no model."""
        module = self.trace.ops[index].module
        lines = {line for path, line in self.trace.calls if not path or (module + ".").startswith(path + ".")}
        stack = self.trace.stacks[index] if self.trace.stacks else ()
        return next((line for line in stack if line in lines), "")

    def stack(self, index: int) -> tuple[str, ...]:
        """The lines of the user's own that led to an op, the outermost first; of an op without a line, none."""
        op = self.trace.ops[index]
        own = self.trace.stacks[index] if self.trace.stacks else ()
        return own or ((op.caller or op.source,) if op.source else ())

    def line_of_all(self, members: Collection[int], index: int) -> str:
        """The outermost line on the stack of an op that computes nothing but these ops."""
        inside = set(members)
        others = {
            stack[:depth]
            for other, touches in enumerate(self.touches)
            if touches.writes and other not in inside
            for stack in [self.stack(other)]
            for depth in range(1, len(stack) + 1)
        }
        stack = self.stack(index)
        return next((line for depth, line in enumerate(stack, 1) if stack[:depth] not in others), "")

    @cached_property
    def modules_of_calls(self) -> Mapping[tuple[str, ...], frozenset[str]]:
        """The modules that a function on the stack belongs to, by the lines that lead to it: several if one line calls
        several. Modules below one of them are called by the function."""
        modules: dict[tuple[str, ...], set[str]] = {}
        for index, op in enumerate(self.ops):
            modules.setdefault(self.stack(index)[:-1], set()).add(op.module)
        return {
            calls: frozenset(name for name in names if not any(is_below(name, other) for other in names))
            for calls, names in modules.items()
        }

    def caller_of(self, line: str, members: Iterable[int]) -> str:
        """The line that calls the function which a line is in, for ops below it; "" if several do, if the function is
        the forward pass of a module, or if all of the step is below the call, as below that of `main`."""
        found: set[str] = set()
        for index in members:
            stack = self.stack(index)
            for depth in range(1, len(stack)):
                if depth <= self._depth_of_step:
                    continue
                if stack[depth] == line:
                    inner, outer = (self.modules_of_calls.get(stack[:end], _NO_MODULE) for end in (depth, depth - 1))
                    found.add(stack[depth - 1] if inner & outer else "")
                    break
        return found.pop() if len(found) == 1 else ""

    @cached_property
    def _depth_of_step(self) -> int:
        """How many lines the stacks of all ops begin with."""
        stacks = [stack for index in range(len(self.ops)) if (stack := self.stack(index))]
        alike = takewhile(lambda lines: len(set(lines)) == 1, zip(*stacks, strict=False))
        return sum(1 for _ in alike) if len(set(stacks)) > 1 else 0

    def line_that_writes(self, *names: str) -> str:
        """The one line of the user's own that calls a class or sets an option of these names; "" if there are several.

        Of several lines, one in a file of the step's ops is meant.
        """
        lines = [line for name in names for line in self.trace.written_at.get(name, ())]
        files = {(op.caller or op.source).rpartition(":")[0] for op in self.trace.ops}
        near = [line for line in lines if line.rpartition(":")[0] in files] if len(lines) > 1 else lines
        return near[0] if len(near) == 1 else ""

    @cached_property
    def costs(self) -> tuple[Cost, ...]:
        """The least work of each op: family, reads and writes by storage, FLOPs."""
        return costs_of(self.trace.ops)

    @cached_property
    def touches(self) -> tuple[Touches, ...]:
        """The storages that each op reads and writes; none for a view, and for a check of anomaly mode, which is no
        part of what the program computes."""
        touches = touches_in(self.trace, self.costs)
        checks = self.anomaly_checks
        return tuple([_NO_TOUCHES if i in checks else item for i, item in enumerate(touches)]) if checks else touches

    @cached_property
    def anomaly_checks(self) -> frozenset[int]:
        """Ops with which the anomaly mode of autograd reads whether gradients have a NaN."""
        return frozenset(_anomaly_checks(self.trace)) if "anomaly mode" in self.trace.settings else frozenset()

    @cached_property
    def anomaly_places(self) -> frozenset[str]:
        """The lines at which numbers are read for these checks alone."""
        reads = {op.place for i, op in enumerate(self.ops) if op.packet in READS and i not in self.anomaly_checks}
        return frozenset({self.ops[index].place for index in self.anomaly_checks} - reads)

    @cached_property
    def flow(self) -> DataFlow:
        """Which op wrote what another one reads."""
        return data_flow(self.trace, self.touches)

    @cached_property
    def touched_by(self) -> Mapping[int, Sequence[int]]:
        """For each storage, the ops that read or write it, in order."""
        ops: dict[int, list[int]] = {}
        for index, (reads, writes) in enumerate(self.touches):
            for storage in {*reads, *writes}:
                ops.setdefault(storage, []).append(index)
        return ops

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """The loops of the user's code whose ops the step has."""
        return find_loops(self.trace.ops)

    def forward_readers(self, index: int) -> list[int]:
        """The ops of the forward pass that read what an op wrote."""
        return [reader for reader in self.flow.consumers[index] if self.ops[reader].phase == "forward"]

    @cached_property
    def views_of(self) -> Mapping[int, Sequence[int]]:
        """The views of what an op wrote."""
        writer: dict[int, int] = {}
        views: dict[int, list[int]] = {}
        for index, (op, cost) in enumerate(zip(self.ops, self.costs, strict=True)):
            if cost.family == "view" and op.inputs and op.inputs[0].storage in writer:
                views.setdefault(writer[op.inputs[0].storage], []).append(index)
            writer.update(dict.fromkeys(self.touches[index].writes, index))
        return views

    @cached_property
    def called_before(self) -> Mapping[int, Sequence[int]]:
        """For each op that launches kernels, the ops since the launch before that launch nothing."""
        calls: dict[int, list[int]] = {}
        pending: list[int] = []
        for index, op in enumerate(self.measured):
            if op.kernels:
                calls[index], pending = pending, []
            else:
                pending.append(index)
        return calls

    @cached_property
    def derivatives(self) -> Mapping[int, Sequence[int]]:
        """The ops of backward passes that compute the derivative of an op, where the ops really ran."""
        found: dict[int, list[int]] = {}
        for index, behind in self.trace.derivative_of.items():
            found.setdefault(behind, []).append(index)
        return found

    def idle_causes(self, cause: CauseName) -> list[IdleCause]:
        """The idle time of one cause, by place."""
        return [idle for idle in self.profile.idle if idle.cause == cause]

    def time(self, index: int) -> float:
        """The measured time of an op."""
        return self.measured[index].measured_s

    def seconds(self, indices: Iterable[int]) -> float:
        """The measured time of some ops."""
        return sum(self.measured[index].measured_s for index in indices)

    def bytes(self, indices: Iterable[int]) -> float:
        """The least bytes that some ops move, each on its own."""
        return sum(self.measured[index].bytes for index in indices)

    def nearpeak_kernel(self, name: str, arguments: str) -> Fix | None:
        """The fix that a function of `nearpeak.kernels` offers; None if the machine does not run these kernels."""
        return Fix(id=name, usage=f"nearpeak.kernels.{name}{arguments}") if self.machine.kind == "gpu" else None

    @cached_property
    def idle_value(self) -> float:
        """What a second of idle time is worth: less than 1 if GEMMs run above the rate that the machine sustains.

        A GPU at its power limit lowers its clock. In a step with many rests, GEMMs may run above the sustained rate;
        without the rests they do not, to the extent that GEMMs are what the device does. They lose no more than the
        rests allow: power grows with the third power of the clock, so that the clock at a power limit is as the third
        root of the share of rests would have it.
        """
        limits = self.machine.achievable
        idle_s = sum(cause.seconds for cause in self.profile.idle)
        if limits is None or not limits.matrix_sustained or not idle_s or not self.profile.kernel_s:
            return 1.0
        rates = limits.matrix_sustained
        longest = ((self.profile.kernel_s + idle_s) / self.profile.kernel_s) ** (1 / 3)
        slower_s = 0.0
        for cost, op in zip(self.costs, self.measured, strict=True):
            sustained_s = sum(count / rates[dtype] for dtype, count in cost.flops.items() if dtype in rates)
            if sustained_s and op.measured_s:
                slower_s += max(0.0, min(sustained_s, longest * op.measured_s) - op.measured_s)
        return max(0.0, 1.0 - slower_s * self.matrix_time_share / idle_s)

    @cached_property
    def clean_over_seen(self) -> float:
        """On a CPU, the time of a clean step over that of all which the profiled one shows: what is not seen there is
        that everything took longer. 1 if all is seen; and on a GPU, where a replay tells."""
        unseen_s = sum(cause.seconds for cause in self.idle_causes("unknown"))
        seen_s = self.profile.wall_s - unseen_s
        return self.profile.wall_s / seen_s if self.machine.kind == "cpu" and seen_s > 0.0 else 1.0

    @cached_property
    def matrix_time_share(self) -> float:
        """The share of the kernel time that ops of the matrix engine take."""
        matrix_s = sum(op.measured_s for cost, op in zip(self.costs, self.measured, strict=True) if cost.flops)
        return matrix_s / self.profile.kernel_s if self.profile.kernel_s else 0.0

    @cached_property
    def pace(self) -> float:
        """By what factor all kernels of a step on a CPU take longer than good ones, at least 1.

        On a machine that is busy, or was calibrated when it was faster, what replaces an op takes longer as well. It is
        the median over kinds of ops that take a part of the step, and are like a kernel that was measured.
        """
        if self.machine.kind != "cpu":
            return 1.0
        groups: dict[tuple[str, str], list[ProfiledOp]] = {}
        for op in self.measured:
            if op.expected_s and op.measured_s and is_like_measured(op.name, op.family):
                groups.setdefault((op.name, op.phase), []).append(op)
        ratios = [
            took_s / sum(op.expected_s or 0.0 for op in ops)
            for ops in groups.values()
            if (took_s := sum(op.measured_s for op in ops)) >= _LARGE_GROUP * self.profile.wall_s
        ]
        return max(1.0, median(ratios)) if len(ratios) >= _LEAST_GROUPS else 1.0

    def expected(self, op: Op) -> float | None:
        """The time of a good kernel on this machine, for an op that need not be in the step, at the pace of the step.
        Its inputs are not in cache."""
        cost = cost_of(op)
        stream = KernelStream(self.trace, self.machine, "achievable")
        times = stream.seconds(cost.reads, cost.writes, cost.flops, cost.vector_flops, launches=True, op=0)
        seconds = self._expectations.seconds(op, cost, times) if self._expectations is not None else None
        return None if seconds is None else self.pace * seconds

    def expected_fused(self, members: Collection[int], *, kind: str = "pointwise", keep: Collection[int] = ()) -> float:
        """The time of a good kernel that does the work of several ops at once.

        It reads what comes from outside of them and writes what is needed outside, each once. FLOPs count too, at the
        matrix rate if the ops run there.

        Args:
            members: Indices of the ops.
            kind: The kind of kernels to compare with: "pointwise", "reduction", "normalization", ...
            keep: Storages to write even if nothing outside reads them.
        """
        reads, writes = self.border(members, keep=keep)
        flops: dict[str, float] = {}
        vector: dict[str, float] = {}
        for index in members:
            for total, part in ((flops, self.costs[index].flops), (vector, self.costs[index].vector_flops)):
                for dtype, count in part.items():
                    total[dtype] = total.get(dtype, 0.0) + count
        return self.expected_for_work(reads, writes, flops, vector, kind=kind)

    def expected_for_work(
        self,
        reads: Sequence[Access],
        writes: Sequence[Access],
        flops: Mapping[str, float] | None = None,
        vector_flops: Mapping[str, float] | None = None,
        *,
        kind: str = "pointwise",
    ) -> float:
        """The time of a good kernel for an amount of work, at the efficiency of some kind and the pace of the step."""
        if self.machine.kind == "gpu":
            memory, cache, compute, launch = self._least_times(reads, writes, flops, vector_flops)
            seconds = work_seconds(max(memory, cache), compute, kind, kernel_constants().constants)
            return max(seconds, launch)
        bound = self.least(reads, writes, flops, vector_flops)
        points = self._efficiency.get(kind) or self._efficiency.get("any")
        return self.pace * (interpolate(points, bound) if points else bound)

    def expected_for_lists(
        self,
        reads: Sequence[Access],
        writes: Sequence[Access],
        *,
        item_bytes: float,
        kind: Literal["foreach", "fused"],
        launches: int = 1,
        cpu_kind: str = "optimizer",
    ) -> float:
        """The time of kernels over lists of tensors: one op on all of them, or all of an optimizer's step.

        Args:
            reads: What they read.
            writes: What they write.
            item_bytes: Of an element.
            kind: The kind of kernel on a GPU.
            launches: The number of kernels there.
            cpu_kind: The kind of kernels to compare with on a CPU.
        """
        gpu = None if self.machine.kind != "gpu" else Gpu.of(self.machine, kernel_constants().constants)
        if gpu is None:
            return self.expected_for_work(reads, writes, kind=cpu_kind)
        memory, cache, _, _ = self._least_times(reads, writes, None, None)
        accesses = sum(access.bytes for access in (*reads, *writes)) / item_bytes
        return list_seconds(max(memory, cache), accesses, launches, kind, gpu, kernel_constants().constants)

    def least(
        self,
        reads: Sequence[Access],
        writes: Sequence[Access],
        flops: Mapping[str, float] | None = None,
        vector_flops: Mapping[str, float] | None = None,
    ) -> float:
        """The bound for an amount of work: no kernel is faster."""
        return limiting_resource(self._least_times(reads, writes, flops, vector_flops))[0]

    def _least_times(
        self,
        reads: Sequence[Access],
        writes: Sequence[Access],
        flops: Mapping[str, float] | None,
        vector_flops: Mapping[str, float] | None,
    ) -> ResourceSeconds:
        stream = KernelStream(self.trace, self.machine, "achievable")
        return stream.seconds(
            tuple(reads), tuple(writes), dict(flops or {}), dict(vector_flops or {}), launches=True, op=0
        )

    def border(
        self, members: Collection[int], *, keep: Collection[int] = ()
    ) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
        """What ops read that none of them wrote before, and what they write that is needed outside."""
        private = self.flow.private(members) - set(keep)
        reads: dict[int, float] = {}
        writes: dict[int, float] = {}
        inside: set[int] = set()
        for index in sorted(members):
            for access in self.costs[index].reads:
                if access.storage not in inside:
                    reads[access.storage] = max(reads.get(access.storage, 0.0), access.bytes)
            for access in self.costs[index].writes:
                inside.add(access.storage)
                if access.storage not in private:
                    writes[access.storage] = max(writes.get(access.storage, 0.0), access.bytes)
        return (
            tuple(Access(storage=storage, bytes=size) for storage, size in reads.items()),
            tuple(Access(storage=storage, bytes=size) for storage, size in writes.items()),
        )

    @cached_property
    def _expectations(self) -> OpExpectations | None:
        return None if self.machine.achievable is None else OpExpectations(self.machine)

    @cached_property
    def _efficiency(self) -> Mapping[str, Sequence[EfficiencyPoint]]:
        achievable = self.machine.achievable
        if achievable is not None and achievable.efficiency:
            return achievable.efficiency
        return reference_efficiency().efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFlow:
    """The data flow of a trace, by the index of the op. It goes by storages, so that views do not matter."""

    producers: Sequence[dict[int, int]]
    """For each storage that an op reads, the op that wrote it last. There is no entry for what existed before the
    step."""
    consumers: Sequence[tuple[int, ...]]
    """The ops that read what an op wrote, before it was overwritten, in order."""
    written_by: Sequence[tuple[int, ...]]
    """The storages that an op writes."""
    read_by: Sequence[tuple[int, ...]]
    """The storages that an op reads."""
    results: frozenset[int]
    """Storages that outlive the step."""

    def private(self, members: Collection[int]) -> set[int]:
        """Storages that only ops of `members` write and read: one kernel would not need them."""
        inside = set(members)
        private: set[int] = set()
        shared: set[int] = set()
        for index in inside:
            if all(reader in inside for reader in self.consumers[index]):
                private |= {storage for storage in self.written_by[index] if storage not in self.results}
            else:
                shared.update(self.written_by[index])
        return private - shared


def data_flow(trace: Trace, touches: Sequence[Touches]) -> DataFlow:
    """The data flow of a trace, in one pass over its ops."""
    writer: dict[int, int] = {}
    producers: list[dict[int, int]] = []
    consumers: list[list[int]] = [[] for _ in touches]
    for index, (reads, writes) in enumerate(touches):
        writers = {storage: writer[storage] for storage in reads if storage in writer}
        producers.append(writers)
        for producer in dict.fromkeys(writers.values()):
            if producer != index:
                consumers[producer].append(index)
        for storage in writes:
            writer[storage] = index
    return DataFlow(
        producers=producers,
        consumers=[tuple(readers) for readers in consumers],
        written_by=[tuple(touch.writes) for touch in touches],
        read_by=[tuple(touch.reads) for touch in touches],
        results=frozenset(trace.results),
    )


def is_recurring_stall(profile: Profile, seconds: float) -> bool:
    """Whether a stall of the profiled step is in clean steps too.

    A garbage collection, a slow batch or another process may affect one step of many: then the profiled step is longer
    than the clean ones by the stall, and by more than the overhead of the profiler.
    """
    if profile.profiled_s is None:
        return True
    longer_s = profile.profiled_s - profile.wall_s - PROFILER_SECONDS_PER_OP * len(profile.ops)
    return longer_s < 0.5 * seconds


def shape_text(shape: Sequence[int]) -> str:
    """A shape as reports show it.

    >>> shape_text((4, 1024))
    '4 x 1024'
    """
    return " x ".join(map(str, shape))


def is_below(module: str, other: str) -> bool:
    """Whether a module is a part of another one.

    >>> is_below("model.layers.0", "model.layers"), is_below("model", "model"), is_below("model", "")
    (True, False, True)
    """
    return module != other and (not other or module.startswith(other + "."))


def is_source_line(where: str) -> bool:
    """Whether a place is a line of code, not a module.

    >>> is_source_line("train.py:41"), is_source_line("model.layers.0")
    (True, False)
    """
    return where.rpartition(":")[2].isdigit()


def is_kept(step: Step, index: int, tensor: Tensor) -> bool:
    """Whether a result of an op outlives the step: returned, stored, or saved by autograd. What a variable of a loop
    holds until the next step makes it anew does not."""
    if step.trace.next_step is not None and tensor.storage in step.trace.next_step.dropped:
        return False
    size = step.trace.storages[tensor.storage].bytes
    lives = step.trace.lives.lives if step.trace.lives is not None else ()
    return tensor.storage in step.flow.results or any(
        life.born == index and life.died is None and life.bytes == size for life in lives
    )


def is_unchanged_copy(step: Step, index: int) -> bool:
    """Whether a copy is read in this step alone, and nothing writes to it, or to the original while it is read."""
    original, copy = step.ops[index].inputs[0], step.ops[index].outputs[0]
    later = [other for other in step.touched_by[copy.storage] if other > index]
    if not later or is_kept(step, index, copy):
        return False
    return not any(copy.storage in step.touches[other].writes for other in later) and not any(
        original.storage in step.touches[other].writes
        for other in step.touched_by[original.storage]
        if index < other <= later[-1]
    )


def _anomaly_checks(trace: Trace) -> Iterator[int]:
    read: dict[int, list[int]] = {}
    """By a result of checks that are not complete: their ops so far."""
    for index, op in enumerate(trace.ops):
        if op.phase != "backward" or op.packet not in _ANOMALY_CHECKS or not op.inputs:
            continue
        before = read.pop(op.inputs[0].storage, []) if op.packet != _ANOMALY_CHECKS[0] else []
        if op.packet != _ANOMALY_CHECKS[len(before)]:
            continue
        if len(before) == len(_ANOMALY_CHECKS) - 1:
            yield from (*before, index)
        else:
            read[op.outputs[0].storage] = [*before, index]
