"""A case made ready for measuring: probed, with the sampler that suits it and the reasons for that choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from nearpeak.errors import CaseError, EnvironmentProblem, UsageError
from nearpeak.machines.detect import cpu_facts
from nearpeak.measure.case import Case
from nearpeak.measure.conditions import ConditionsReader, CpuConditions
from nearpeak.measure.cuda import CudaDevice, Stage, cuda_device
from nearpeak.measure.flags import Flag, raise_flag
from nearpeak.measure.host import UNKNOWN_CACHE_BYTES, HostEviction, HostSampler
from nearpeak.measure.instrument import Zero, eviction_ratio, host_eviction_ratio, zero_of
from nearpeak.measure.options import Options
from nearpeak.measure.probe import Probe, device_of, probe_cuda, probe_host, reporting
from nearpeak.measure.rotation import rotating
from nearpeak.measure.samplers import (
    STAGE_SECONDS,
    EventSampler,
    GraphSampler,
    RegressionSampler,
    Sampler,
    WallSampler,
)
from nearpeak.measure.statistics import median
from nearpeak.units import seconds as seconds_text

SMALL_SECONDS = 100e-6
"""Below this a single kernel is timed in a CUDA graph, where the zero of the events is better known."""

RESOLUTION = 0.1
"""A zero that is known no better than this share of the time is flagged."""

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
    blocks: int = 0
    """How many blocks were taken: the seed of inputs that are redrawn."""

    @property
    def device_name(self) -> str:
        """For messages and records."""
        return self.device.name if self.device is not None else "cpu"


def prepare(case: Case, options: Options, calls: int | None = None) -> Subject:
    """Probes the case and chooses its sampler; `calls` per block are chosen to fit unless they are given."""
    place = device_of(case)
    if place.type == "cpu":
        return _prepare_host(case, options, calls)
    with torch.cuda.device(place):
        return _prepare_cuda(case, options, cuda_device(torch.cuda.current_device()), calls)


def prepare_alike(a: Case, b: Case, options: Options) -> tuple[Subject, Subject]:
    """Two subjects for a comparison, exchangeable if their code is the same.

    Two captures of one call have their own memory and differ by some ten nanoseconds, so a graph is used only where it
    is asked for. Loops of different length differ by more than 1 % on a CPU, so subjects of similar length get blocks
    of the same number of calls.
    """
    if options.method == "auto" and options.kind != "graph":
        options = replace(options, method="events")
    first, second = prepare(a, options), prepare(b, options)
    calls = (first.sampler.calls, second.sampler.calls)
    if calls[0] != calls[1] and max(calls) < 2 * min(calls):
        second = prepare(b, options, calls[0])
    return first, second


def _prepare_host(case: Case, options: Options, calls: int | None) -> Subject:
    if options.kind not in ("auto", "cpu"):
        raise UsageError(f"{case.name} runs on the CPU, which has no {options.kind} time: use kind='cpu' or 'auto'.")
    probe = probe_host(case)
    flags: list[Flag] = []
    call, evict = case.call, None
    if options.cache == "cold":
        if options.evict == "rotate":
            call = rotating(case, cpu_facts().cache_bytes or UNKNOWN_CACHE_BYTES)
        else:
            evict = HostEviction()
            flags += _eviction_flags(host_eviction_ratio(), evict.cache_bytes)
    sampler = HostSampler(
        call, options.cache, call_seconds=probe.call_seconds, reset=case.reset, evict=evict, calls=calls
    )
    return Subject(case=case, probe=probe, sampler=sampler, device=None, conditions=CpuConditions(), flags=flags)


def _prepare_cuda(case: Case, options: Options, device: CudaDevice, calls: int | None) -> Subject:
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
            options.kind,
            call_seconds=probe.call_seconds,
            reset=case.reset,
            calls=calls,
        )
    elif probe.synchronises and "graph" in (options.kind, options.method):
        raise CaseError(f"{case.name} cannot be captured in a CUDA graph: it waits for the device.")
    elif probe.synchronises:
        flags.append(raise_flag("SYNC_IN_REGION", "behind a busy device the call returned only when it was done"))
    elif probe.off_stream:
        flags.append(raise_flag("OFF_STREAM", "work was still running after the current stream had finished the call"))
    else:
        _choose_device_sampler(subject, options, device, calls)
        if options.cache == "cold" and options.evict == "flush":
            flags += _eviction_flags(eviction_ratio(device.index, device.sweep_bytes), device.cache_bytes)
    return subject


def _choose_device_sampler(subject: Subject, options: Options, device: CudaDevice, calls: int | None) -> None:
    """Events behind a spin; a graph for small single kernels, and where a spin cannot hide the launches."""
    case, probe = subject.case, subject.probe
    call: Callable[[], Any] = case.call
    rotates = options.cache == "cold" and options.evict == "rotate"
    if rotates:
        call = rotating(case, device.cache_bytes)
    zero = zero_of(device.index, options.cache)
    estimate, hidden = _first_estimate(subject, call, options, zero)
    if probe.kernel_seconds is not None and estimate < 0.5 * probe.kernel_seconds - 2e-6:
        evidence = f"the current stream is done in {seconds_text(estimate)}, the kernels run for "
        subject.flags.append(raise_flag("OFF_STREAM", evidence + seconds_text(probe.kernel_seconds)))
        return
    stage = _stage(subject, options, estimate)
    single = probe.kernels is not None and len(probe.kernels) == 1
    # A graph replays the copies that it captured: too few of them would stay in the cache.
    small = options.method == "auto" and single and estimate < SMALL_SECONDS and not rotates
    wants_graph = options.kind == "graph" or options.method == "graph"
    if wants_graph and rotates:
        raise UsageError("A CUDA graph replays the same inputs: use evict='flush' for a cold graph time.")
    uncertainty = zero.uncertainty
    try:
        if wants_graph or (options.method == "auto" and options.kind == "auto" and not hidden):
            subject.sampler = _graph_sampler(device, call, stage, estimate, zero, "graph", calls)
            return
        candidate: Sampler | None = None
        if small and options.cache == "hot":
            candidate = RegressionSampler(
                device,
                call,
                call_seconds=estimate,
                gap_seconds=zero.gap,
                reset=case.reset,
                calls=calls,
                seed=options.seed,
            )
        elif small and zero.graph_events is not None:
            candidate = _graph_sampler(device, call, stage, estimate, zero, "device", calls)
            uncertainty = zero.graph_uncertainty
        if candidate is not None and _agrees(candidate, estimate, zero.events):
            subject.sampler = candidate
            _flag_resolution(subject, uncertainty if zero.proven else zero.events, estimate)
            return
    except RuntimeError as error:
        device.recover_from_capture()
        if wants_graph:
            raise CaseError(f"{case.name} cannot be captured in a CUDA graph: {_first_line(error)}") from error
        subject.flags.append(raise_flag("NO_GRAPH", _first_line(error)))
    subject.sampler = EventSampler(
        device,
        call,
        stage,
        call_seconds=estimate,
        enqueue_seconds=max(probe.enqueue_seconds, 5e-6),
        zero_seconds=zero.events,
        calls=calls,
    )
    _flag_resolution(subject, zero.uncertainty if zero.proven else zero.events, estimate)


def _stage(subject: Subject, options: Options, estimate: float) -> Stage:
    """What stands before a call; in a burst it idles in proportion to the call's time."""
    assert subject.device is not None
    pace = 0.0
    if options.regime == "burst":
        pace = min(LONGEST_PACE_SECONDS, max(0.0, IDLE_SHARE * estimate - STAGE_SECONDS))
    evict = options.evict == "flush"
    return Stage(subject.device, options.cache, reset=subject.case.reset, pace_seconds=pace, evict=evict)


def _flag_resolution(subject: Subject, uncertainty: float, estimate: float) -> None:
    if uncertainty > RESOLUTION * estimate:
        evidence = f"the instrument's zero is known to {seconds_text(uncertainty, 2)}"
        subject.flags.append(raise_flag("BELOW_RESOLUTION", f"{evidence}, the call takes {seconds_text(estimate)}"))


def _agrees(candidate: Sampler, by_events: float, zero: float) -> bool:
    """Whether a captured call takes what the same call takes in a stream: capture can change the program.

    A clone, for example, becomes a copy node that runs at two thirds of the speed of the kernel.
    """
    by_graph = median([candidate.block().seconds for _ in range(3)])
    return abs(by_graph - by_events) <= 0.15 * by_events + 0.5 * zero


def _first_estimate(subject: Subject, call: Callable[[], Any], options: Options, zero: Zero) -> tuple[float, bool]:
    """About how long a call takes, and whether a spin can hide its launches."""
    assert subject.device is not None
    rough = EventSampler(
        subject.device,
        call,
        Stage(subject.device, options.cache, reset=subject.case.reset, evict=options.evict == "flush"),
        call_seconds=subject.probe.call_seconds,
        enqueue_seconds=subject.probe.enqueue_seconds,
        zero_seconds=zero.events,
    )
    with reporting(subject.case, "while it was first timed"):
        blocks = [rough.block() for _ in range(3)]
    return max(1e-7, median([block.seconds for block in blocks])), all(block.launch_hidden for block in blocks)


def _graph_sampler(
    device: CudaDevice,
    call: Callable[[], Any],
    stage: Stage,
    estimate: float,
    zero: Zero,
    kind: Literal["device", "graph"],
    calls: int | None = None,
) -> GraphSampler:
    if zero.graph_events is None:
        raise EnvironmentProblem(
            f"torch {torch.__version__} cannot record timing events inside a CUDA graph; torch 2.8 or later can."
        )
    return GraphSampler(
        device, call, stage, call_seconds=estimate, zero_seconds=zero.graph_events, kind=kind, calls=calls
    )


def graph_seconds(subject: Subject, options: Options) -> float | None:
    """What a call takes in a CUDA graph; None where it was measured already or cannot be captured."""
    device, probe = subject.device, subject.probe
    rotates = options.cache == "cold" and options.evict == "rotate"
    if device is None or subject.sampler.kind != "device" or probe.synchronises or rotates:
        return None
    estimate = max(1e-6, subject.sampler.block().seconds)
    stage = _stage(subject, options, estimate)
    zero = zero_of(device.index, options.cache)
    try:
        sampler = _graph_sampler(device, subject.case.call, stage, estimate, zero, "graph")
    except (RuntimeError, EnvironmentProblem):
        device.recover_from_capture()
        return None
    return median([sampler.block().seconds for _ in range(5)])


def _eviction_flags(ratio: float, cache_bytes: float | None) -> list[Flag]:
    if not cache_bytes:
        return [raise_flag("CACHE_STATE_UNPROVEN", "the system does not tell the size of the last-level cache")]
    if ratio < PROVEN_EVICTION:
        evidence = f"a read after the eviction took {ratio:.2f} times as long as a repeated read"
        return [raise_flag("CACHE_NOT_COLD", evidence)]
    return []


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
