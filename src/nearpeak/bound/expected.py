"""The expected time of an op with the kernels that torch runs.

A bound is what no kernel beats; an expectation is the time to expect. An expectation enters no floor and is not
below the bound.

On a GPU each family of kernels has a physical model: see `bound.kernel_models`. On a CPU each kind of op has measured
points: the bound of an op, and the ratio of its time to that bound. Between two points the ratio is interpolated on
logarithmic scales. Beyond the last point the ratio is constant. Before the first point the time is constant: a kernel
with next to no work takes its fixed time. Kinds go from special to general ("aten.cat", then "movement"); the first
that was measured counts. An op with a transcendental function takes at least the time of its arithmetic, at the rate of
torch's kernel: no bound has that, since other libraries may be faster.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nearpeak.bound.fusion import does_anything
from nearpeak.bound.kernel_models import (
    Gpu,
    access_order,
    kernel_constants,
    kernel_count,
    kernel_seconds,
    stores_unchanged,
)
from nearpeak.bound.roofline import ResourceSeconds, limiting_resource
from nearpeak.machines.machine import EfficiencyPoint, Machine
from nearpeak.machines.reference import reference_efficiency
from nearpeak.ops.cost import Cost
from nearpeak.ops.op import Op, Trace
from nearpeak.ops.op_classes import OpClasses, classify_ops

Efficiency = Mapping[str, Sequence[EfficiencyPoint]]
CACHED = "/cached"
"""Suffix of a kind that was measured with its operands in the cache."""
NEAR_RIDGE = 2.0
"""A product whose memory and compute times differ by less than this ratio is limited by both."""
HOST_CALL = 3e-4
"""An op whose host time is longer than this launches many kernels, the first of them within it."""
SHORTEST_KERNEL = 1e-7
"""No kernel takes less than this many seconds: what does is a copy of some bytes, or nothing."""
NARROW = 32
"""A compute-bound product with at most so many rows or columns is a kind of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """The expected seconds of each op, None where nothing like it was measured; and the machine that was measured."""

    seconds: tuple[float | None, ...]
    measured_on: str
    start: float = 0.0
    """Of a step: on a CPU the first op finds its code in no cache, on a GPU a backward pass waits for its streams."""
    gap: float = 0.0
    """Between the end of one op's kernels and the start of the next one's, on a GPU."""
    host: tuple[float, ...] = ()
    """On a GPU, the seconds that the host takes to call each op."""
    call: float = math.inf
    """The part of them after which the first kernel of an op with many is launched."""

    @property
    def device(self) -> float | None:
        """The sum over the ops with an expectation, and the cold start; None where no op has one."""
        seconds = [value for value in self.seconds if value is not None]
        if not seconds:
            return None if self.seconds else 0.0
        ops = sum(seconds)
        kernels = sum(value > SHORTEST_KERNEL for value in seconds)
        return ops + self.start + self.gap * max(0, kernels - 1) if ops else 0.0

    @property
    def total(self) -> float | None:
        """The time of an eager call: each kernel starts when the host has called it and the one before it has ended.

        A kernel that is alone is timed behind other work, which hides its launch, and has no time of the host.
        """
        device = self.device
        kernels = [seconds if seconds and seconds > SHORTEST_KERNEL else 0.0 for seconds in self.seconds]
        if not device or not self.host or sum(map(bool, kernels)) <= 1:
            return device
        called = ended = 0.0
        for host, seconds in zip(self.host, kernels, strict=True):
            started, called = called + min(host, self.call), called + host
            if seconds:
                ended = max(called, max(started, ended + self.gap) + seconds)
        return max(called, ended)


def expected_times(
    trace: Trace,
    costs: Sequence[Cost],
    times: Sequence[ResourceSeconds],
    machine: Machine,
    kinds: OpClasses | None = None,
) -> Expectation:
    """The expected times of the ops as written.

    `times` are those of each op at the achievable ceilings of `machine`; `kinds` is the result of `classify_ops`, for a
    caller that has it. A CPU whose kernels were not measured is assumed to be as efficient as the reference machine. On
    a CPU no op, not even a view, takes less than its call: no host runs ahead there.
    """
    if machine.achievable is None:
        return Expectation(seconds=(None,) * len(costs), measured_on="")
    classes = kinds or classify_ops(trace.ops)
    expectations = OpExpectations(machine)
    launch = machine.achievable.launch
    shortest = launch.host_call or 0.0 if machine.kind == "cpu" else 0.0
    memo: dict[tuple[int, ResourceSeconds], float | None] = {}
    seconds = []
    for index, key in enumerate(zip(classes.kinds, times, strict=True)):
        value = memo.get(key, math.nan)
        if value is math.nan:
            value = expectations.seconds(trace.ops[index], costs[index], key[1])
            value = memo[key] = None if value is None else max(value, shortest)
        seconds.append(value)
    host = _host_seconds(trace.ops, seconds, machine) if machine.kind == "gpu" else ()
    gap, start = 0.0, launch.cold_start or 0.0
    if machine.kind == "gpu":
        common = kernel_constants().constants["gpu"]
        gap = common["gap"]
        start = common["backward"] if any(op.phase == "backward" for op in trace.ops) else 0.0
    return Expectation(
        seconds=tuple(seconds),
        measured_on=expectations.measured_on,
        start=start,
        gap=gap,
        host=host,
        call=HOST_CALL,
    )


def _host_seconds(ops: Sequence[Op], seconds: Sequence[float | None], machine: Machine) -> tuple[float, ...]:
    """What the host takes to call each op eagerly, Python and autograd included.

    The constants are those of the reference machine's host; where the machine's own was measured, they are scaled by
    what it takes to enqueue one op. Python and autograd vary less between hosts than that does: the scale is a power of
    the ratio, `host.pace`. A backward pass and a step of an optimizer each have a start of their own, which their first
    op carries.
    """
    constants = kernel_constants().constants
    enqueue = machine.achievable.launch.enqueue if machine.achievable is not None else None
    scale = (enqueue / constants["host"]["enqueue"]) ** constants["host"]["pace"] if enqueue else 1.0
    times = []
    before = "forward"
    for op, value in zip(ops, seconds, strict=True):
        start = _PASS_START.get(op.phase) if op.phase != before else None
        called = _call_seconds(op, bool(value), constants["host"]) + (constants["host"][start] if start else 0.0)
        times.append(scale * (called + (kernel_count(op, constants) - 1) * constants["host"]["launch"]))
        before = op.phase
    return tuple(times)


_PASS_START = {"backward": "backward_pass", "optimizer": "optimizer_step"}
"""The constant that is the host time to start a pass, by phase."""


def _call_seconds(op: Op, launches: bool, host: Mapping[str, float]) -> float:
    """The host time to call one op, which launches a kernel or makes a view alone."""
    if op.packet == "aten.detach":
        return 0.0  # autograd saves a result without its history: no call of an operator
    if op.phase == "optimizer":
        return host["optimizer"] + host["optimizer_tensor"] * len(op.inputs)
    kind = "view"
    if launches:
        kind = next((kind for part, kind in _HOST_KINDS.items() if part in op.packet), "call")
    return host[f"backward_{kind}" if op.phase == "backward" else kind]


_HOST_KINDS = {
    "conv": "convolution",
    "scaled_dot_product": "attention",
    "layer_norm": "norm",
    "rms_norm": "norm",
    "batch_norm": "norm",
    "group_norm": "norm",
}
"""Kinds of ops whose calls take the host longer than others, by a part of their names: they choose a kernel among
several, look up a plan of cuDNN, or allocate more than one result."""


class OpExpectations:
    """The expected time of any op on a machine that has ceilings."""

    def __init__(self, machine: Machine) -> None:
        assert machine.achievable is not None
        self._machine = machine
        self._efficiency: Efficiency = machine.achievable.efficiency
        self.measured_on = machine.id
        self._gpu: Gpu | None = None
        if machine.kind == "gpu":
            constants = kernel_constants()
            self._gpu = Gpu.of(machine, constants.constants)
            self.measured_on = constants.machine
        elif not self._efficiency:
            measured = reference_efficiency()
            self._efficiency, self.measured_on = measured.efficiency, measured.machine

    def seconds(self, op: Op, cost: Cost, times: ResourceSeconds) -> float | None:
        """Its time, at least its bound; 0 for an op that costs nothing, None where nothing like it was measured."""
        if self._gpu is None:
            if stores_unchanged(op):
                times = (times[0] + self._store_seconds(op), *times[1:])
            value = expected_seconds(op, cost, times, self._efficiency)
            return None if value is None else max(value, transcendental_seconds(op, self._machine))
        if not does_anything(cost):
            return 0.0
        missed = times[0] * self._gpu.bandwidth
        try:
            value = kernel_seconds(op, cost, missed, self._gpu, kernel_constants().constants)
        except (KeyError, IndexError, TypeError, ValueError):
            return None  # its arguments are not as torch's schema has them, as in a trace of another release
        return max(value, *times)

    def _store_seconds(self, op: Op) -> float:
        """The time of the bytes that an op stores and its bound does not charge, as far as they leave the cache."""
        assert self._machine.achievable is not None
        stored = sum(tensor.bytes for tensor in op.written) - (self._machine.cache_bytes or 0.0)
        return max(0.0, stored) / self._machine.achievable.bandwidth


def kinds_of(op: Op, cost: Cost, limiter: str) -> Iterator[str]:
    """The kinds under which the efficiency of an op may be measured, the most special first.

    Where its operands are in the cache, each kind is preceded by its form with the suffix `CACHED`.
    """
    for kind in _kinds(op, cost, limiter):
        if limiter == "cache":
            yield f"{kind}{CACHED}"
        yield kind


def _kinds(op: Op, cost: Cost, limiter: str) -> Iterator[str]:
    if cost.family == "matrix":
        dtype = next(iter((*cost.flops, *cost.vector_flops)), "")
        bound = "compute" if limiter == "compute" else "memory"
        if bound == "compute" and op.outputs and min(op.outputs[0].shape[-2:], default=0) <= NARROW:
            yield "matrix/compute/narrow"
        yield f"matrix/{bound}/{dtype}"
        yield f"matrix/{bound}"
    elif cost.family in ("attention", "convolution"):
        width = op.inputs[0].shape[-1] if cost.family == "attention" and op.inputs and op.inputs[0].shape else None
        if width is not None and op.arguments.get("is_causal"):
            yield f"{op.packet}/{width}/causal"
        if width is not None:
            yield f"{op.packet}/{width}"
        yield op.packet
        if "backward" in op.packet:
            yield f"{cost.family}/backward"
    elif cost.family in ("pointwise", "movement"):
        order = access_order(op)
        if order:
            yield f"{op.packet}/{order}"
            yield f"{cost.family}/{order}"
    yield op.packet
    yield cost.family
    yield "any"


_LIKE_ADDITION = frozenset(
    f"aten.{name}"
    for name in """add add_ sub sub_ rsub mul mul_ neg neg_ abs relu relu_ clamp clamp_ clamp_min clamp_min_ maximum
    minimum where threshold_backward hardtanh hardtanh_ eq ne lt le gt ge logical_and logical_or logical_not bitwise_and
    bitwise_or masked_fill masked_fill_ addcmul addcmul_ lerp lerp_ square leaky_relu leaky_relu_""".split()
)
_OWN_PROBE = frozenset(
    f"aten.{name}"
    for name in """bernoulli_ native_dropout embedding embedding_dense_backward index_add_ cumsum topk avg_pool2d mean
    sum _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data native_layer_norm
    native_layer_norm_backward nll_loss_forward nll_loss_backward""".split()
)


_TRANSCENDENTAL: Mapping[str, str] = {
    f"aten.{name}": kernel
    for kernel, names in {
        "exp": "exp exp_ exp2 expm1 elu elu_ elu_backward",
        "log": "log log_ log2 log10 log1p log1p_",
        "sin": "sin sin_ cos cos_",
        "tanh": "tanh tanh_",
        "erf": "erf erf_ erfc",
        "sigmoid": "sigmoid sigmoid_ softplus softplus_backward log_sigmoid_forward logit",
        "silu": "silu silu_",
        "silu_backward": "silu_backward",
        "gelu": "gelu gelu_",
        "gelu_backward": "gelu_backward",
    }.items()
    for name in names.split()
}
"""Pointwise ops by the kernel with the same transcendental function, whose rate a calibration of a CPU has."""


def transcendental_seconds(op: Op, machine: Machine) -> float:
    """The time of the arithmetic of a pointwise op with a transcendental function on a CPU; 0 where it is not known.

    On a GPU such functions hide behind memory.
    """
    kernel = _TRANSCENDENTAL.get(op.packet)
    if kernel is None or machine.kind != "cpu" or machine.achievable is None or not op.outputs:
        return 0.0
    if op.arguments.get("approximate") == "tanh":
        kernel = f"{kernel}_tanh"
    rate = machine.achievable.ceilings.get(f"transcendental.{kernel}")
    return 0.0 if rate is None else op.outputs[0].elements / rate.value


def is_like_measured(name: str, family: str) -> bool:
    """Whether the expectation of an op on a CPU is that of a kernel that does the same work.

    An expectation comes from a kernel that stands for many: an addition for all pointwise ops, an average for all
    pooling. Kernels with more arithmetic per element, such as gelu_backward, take many times as long, and are not slow.

    >>> is_like_measured("aten.mul.Tensor", "pointwise"), is_like_measured("aten.gelu_backward.default", "pointwise")
    (True, False)
    """
    packet = name.rpartition(".")[0]
    if family == "attention":
        return "scaled_dot_product" in packet
    return family in ("matrix", "convolution", "movement", "creation") or packet in _LIKE_ADDITION | _OWN_PROBE


def expected_seconds(op: Op, cost: Cost, times: ResourceSeconds, efficiency: Efficiency) -> float | None:
    """The time of a good kernel; 0 for an op that costs nothing, None where nothing like it was measured.

    A product near the ridge is limited by both memory and compute: the longer of both expectations counts.
    """
    bound_seconds, limiter = limiting_resource(times)
    if bound_seconds <= 0.0:
        return 0.0
    value = _expected_from_kinds(op, cost, bound_seconds, limiter, efficiency)
    if value is not None and cost.family == "matrix":
        memory, cache, compute, _ = times
        second = ("memory", max(memory, cache)) if limiter == "compute" else ("compute", compute)
        if second[1] > bound_seconds / NEAR_RIDGE:
            value = max(value, _expected_from_kinds(op, cost, second[1], second[0], efficiency) or 0.0)
    return value


def _expected_from_kinds(
    op: Op, cost: Cost, bound_seconds: float, limiter: str, efficiency: Efficiency
) -> float | None:
    for kind in kinds_of(op, cost, limiter):
        points = efficiency.get(kind)
        if points:
            return interpolate(points, bound_seconds)
    return None


def interpolate(points: Sequence[EfficiencyPoint], bound_seconds: float) -> float:
    """The expected time for a bound.

    >>> points = (EfficiencyPoint(bound_seconds=1e-6, ratio=4.0), EfficiencyPoint(bound_seconds=1e-4, ratio=1.0))
    >>> [round(interpolate(points, bound) * 1e6, 3) for bound in (1e-7, 1e-6, 1e-5, 1e-4, 1e-3)]
    [4.0, 4.0, 20.0, 100.0, 1000.0]
    """
    position = bisect_right(points, bound_seconds, key=lambda point: point.bound_seconds)
    if position == 0:
        return points[0].ratio * points[0].bound_seconds
    if position == len(points):
        return points[-1].ratio * bound_seconds
    low, high = points[position - 1], points[position]
    share = math.log(bound_seconds / low.bound_seconds) / math.log(high.bound_seconds / low.bound_seconds)
    return bound_seconds * math.exp((1 - share) * math.log(low.ratio) + share * math.log(high.ratio))
