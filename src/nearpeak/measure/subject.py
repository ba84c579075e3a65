"""A case made ready for measuring: probed, with the sampler that suits it and the reasons for that choice."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from nearpeak.errors import CaseError, UsageError
from nearpeak.measure.case import Case
from nearpeak.measure.conditions import ConditionsReader, CpuConditions
from nearpeak.measure.cuda import CudaDevice, Stage, cuda_device
from nearpeak.measure.flags import Flag, raise_flag
from nearpeak.measure.host import HostEviction, HostSampler
from nearpeak.measure.instrument import eviction_ratio, host_eviction_ratio, zero_of
from nearpeak.measure.options import Options
from nearpeak.measure.probe import Probe, device_of, probe_cuda, probe_host, reporting
from nearpeak.measure.samplers import GraphSampler, PairSampler, Sampler, WallSampler
from nearpeak.measure.statistics import median
from nearpeak.units import seconds as seconds_text

SMALL_SECONDS = 100e-6
"""Below this the overhead of an event pair is a visible share, and a graph is used where it can be."""

IDLE_SHARE = 3.0
"""In a burst the device idles this many times as long as it works, so that power does not limit its clocks."""

LONGEST_PACE_SECONDS = 0.05
PROVEN_EVICTION = 1.15
"""A read after eviction must take this many times as long as a repeated read, or the eviction did nothing."""


@dataclass(slots=True, kw_only=True)
class Subject:
    """What is being measured, and how."""

    case: Case
    probe: Probe
    sampler: Sampler
    device: CudaDevice | None
    conditions: ConditionsReader
    flags: list[Flag] = field(default_factory=list)
    other_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def device_name(self) -> str:
        """For messages and records."""
        return self.device.name if self.device is not None else "cpu"


def prepare(case: Case, options: Options) -> Subject:
    """Probes the case and chooses its sampler."""
    place = device_of(case)
    if place.type == "cpu":
        return _prepare_host(case, options)
    with torch.cuda.device(place):
        return _prepare_cuda(case, options, cuda_device(torch.cuda.current_device()))


def _prepare_host(case: Case, options: Options) -> Subject:
    if options.kind not in ("auto", "cpu"):
        raise UsageError(f"{case.name} runs on the CPU, which has no {options.kind} time: use kind='cpu' or 'auto'.")
    probe = probe_host(case)
    flags: list[Flag] = []
    call, evict = case.call, None
    if options.cache == "cold":
        if options.evict == "rotate":
            call = _rotating(case, _host_cache_bytes())
        else:
            evict = HostEviction()
            flags += _eviction_flags(host_eviction_ratio(), evict.cache_bytes)
    sampler = HostSampler(call, options.cache, call_seconds=probe.call_seconds, reset=case.reset, evict=evict)
    return Subject(case=case, probe=probe, sampler=sampler, device=None, conditions=CpuConditions(), flags=flags)


def _prepare_cuda(case: Case, options: Options, device: CudaDevice) -> Subject:
    if options.kind == "cpu":
        raise UsageError(f"{case.name} runs on {device.name}: kind='cpu' is for code on the CPU.")
    probe = probe_cuda(case, device)
    flags: list[Flag] = []
    subject = Subject(
        case=case,
        probe=probe,
        sampler=WallSampler(device, case.call, "latency", call_seconds=probe.call_seconds, reset=case.reset),
        device=device,
        conditions=device.conditions,
        flags=flags,
    )
    if options.kind in ("pipelined", "latency", "enqueue"):
        subject.sampler = WallSampler(
            device,
            case.call,
            options.kind,  # type: ignore[arg-type]  # narrowed by the line above
            call_seconds=probe.call_seconds,
            reset=case.reset,
        )
    elif probe.synchronises:
        flags.append(raise_flag("SYNC_IN_REGION", "behind a busy device the call returned only when it was done"))
    elif probe.off_stream:
        flags.append(raise_flag("OFF_STREAM", "work was still running after the current stream had finished the call"))
    else:
        _choose_device_sampler(subject, options, device)
        if options.cache == "cold" and options.evict == "flush":
            flags += _eviction_flags(eviction_ratio(device.index, device.sweep_bytes), device.cache_bytes)
    return subject


def _choose_device_sampler(subject: Subject, options: Options, device: CudaDevice) -> None:
    case, probe = subject.case, subject.probe
    call: Callable[[], Any] = case.call
    if options.cache == "cold" and options.evict == "rotate":
        call = _rotating(case, device.cache_bytes)
    zero = zero_of(device.index, options.cache)
    evict = options.evict == "flush"

    def stage(pace: float) -> Stage:
        return Stage(device, options.cache, reset=case.reset, pace_seconds=pace, evict=evict)

    rough = PairSampler(
        device,
        call,
        stage(0.0),
        call_seconds=probe.call_seconds,
        enqueue_seconds=probe.enqueue_seconds,
        zero_seconds=zero.pair,
    )
    with reporting(case, "while it was first timed"):
        rough_blocks = [rough.block() for _ in range(3)]
    estimate = max(1e-7, median([block.seconds for block in rough_blocks]))
    pace = 0.0
    if options.regime == "burst":
        pace = min(LONGEST_PACE_SECONDS, max(0.0, IDLE_SHARE * estimate - 35e-6))
    hidden = all(block.launch_hidden for block in rough_blocks)
    single = probe.kernels is not None and len(probe.kernels) == 1
    wants_graph = options.kind == "graph" or options.method == "graph"
    if wants_graph or (options.method == "auto" and ((single and estimate < SMALL_SECONDS) or not hidden)):
        kind: Literal["graph", "device"] = "graph" if options.kind == "graph" or not hidden else "device"
        gap = 0.0 if kind == "graph" else zero.gap
        try:
            subject.sampler = GraphSampler(
                device, call, stage(pace), call_seconds=estimate, gap_seconds=gap, kind=kind, seed=options.seed
            )
        except RuntimeError as error:
            device.synchronize()
            if wants_graph:
                raise CaseError(f"{case.name} cannot be captured in a CUDA graph: {_first_line(error)}") from error
            subject.flags.append(raise_flag("NO_GRAPH", _first_line(error)))
        else:
            _cross_check(subject, estimate, zero.pair, hidden)
            return
    subject.sampler = PairSampler(
        device,
        call,
        stage(pace),
        call_seconds=estimate,
        enqueue_seconds=max(probe.enqueue_seconds, 5e-6),
        zero_seconds=zero.pair,
    )
    if zero.uncertainty > 0.03 * estimate:
        evidence = f"the zero of the event pair is known to {seconds_text(zero.uncertainty, 2)}"
        subject.flags.append(raise_flag("BELOW_RESOLUTION", f"{evidence}, the call takes {seconds_text(estimate)}"))


def _cross_check(subject: Subject, by_events: float, zero: float, hidden: bool) -> None:
    """Events and graph measure the same kernel: a large difference means that capture changed the program."""
    by_graph = median([subject.sampler.block().seconds for _ in range(3)])
    tolerance = 0.15 * by_events + 0.5 * zero + 0.5e-6
    if hidden and subject.sampler.kind == "device" and abs(by_graph - by_events) > tolerance:
        evidence = f"events read {seconds_text(by_events)}, the graph {seconds_text(by_graph)}"
        subject.flags.append(raise_flag("METHODS_DISAGREE", evidence))


def _eviction_flags(ratio: float, cache_bytes: float | None) -> list[Flag]:
    if not cache_bytes:
        return [raise_flag("CACHE_STATE_UNPROVEN", "the system does not tell the size of the last-level cache")]
    if ratio < PROVEN_EVICTION:
        evidence = f"a read after the eviction took {ratio:.2f} times as long as a repeated read"
        return [raise_flag("CACHE_NOT_COLD", evidence)]
    return []


def _rotating(case: Case, cache_bytes: float) -> Callable[[], Any]:
    """The case's call on a new copy of its tensors each time, over at least three times the cache."""
    tensors = list(case.tensors())
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if not size:
        raise UsageError(f"{case.name} has no tensor arguments to rotate: pass them as arguments or use evict='flush'.")
    copies = math.ceil(3 * cache_bytes / size) + 1
    if copies > 256:
        raise UsageError(
            f"{case.name} would need {copies} copies of its inputs to leave the cache: use evict='flush' instead."
        )
    cases = [case, *(_copy(case) for _ in range(copies - 1))]
    position = 0

    def call() -> Any:
        nonlocal position
        position = (position + 1) % copies
        return cases[position].call()

    return call


def _copy(case: Case) -> Case:
    def copy(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().clone().requires_grad_(value.requires_grad)
        if isinstance(value, (list, tuple)):
            return type(value)(copy(item) for item in value)
        if isinstance(value, dict):
            return {key: copy(item) for key, item in value.items()}
        return value

    return case.with_arguments(copy(case.args), copy(dict(case.kwargs)))


def _host_cache_bytes() -> float:
    from nearpeak.machines.detect import cpu_facts
    from nearpeak.measure.host import UNKNOWN_CACHE_BYTES

    return cpu_facts().cache_bytes or UNKNOWN_CACHE_BYTES


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
