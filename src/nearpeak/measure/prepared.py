"""`PreparedCase`: a case that was probed, with the sampler that suits it.

The probe comes before any time is taken: does the call run, where, does it wait for the device, keep memory, change its
inputs? The sampler follows from what it found and from the options. A cold cache is made by eviction, or by rotation:
every call then works on another copy of the inputs, until all of them have left the cache.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from nearpeak.devices.backends import CPU, backend_of, gpu_backend
from nearpeak.devices.device import ConditionsReader, GpuBackend
from nearpeak.errors import CaseError, EnvironmentProblem, UsageError
from nearpeak.machines.detect import detect_cpu
from nearpeak.measure.case import Case, case_errors
from nearpeak.measure.gpu import GpuInstrument, Stage, gpu_instrument, host_seconds
from nearpeak.measure.instrument import InstrumentZero, eviction_ratio, host_eviction_ratio, zero_of
from nearpeak.measure.kernel_times import busy_seconds, profile_calls
from nearpeak.measure.options import Options
from nearpeak.measure.page_faults import page_faults
from nearpeak.measure.samplers import (
    STAGE_SECONDS,
    UNKNOWN_CACHE_BYTES,
    EventSampler,
    GraphSampler,
    HostEviction,
    HostSampler,
    RegressionSampler,
    Sampler,
    WallSampler,
)
from nearpeak.measure.statistics import median
from nearpeak.measure.timing import Flag, make_flag
from nearpeak.units import seconds as seconds_text

SMALL_SECONDS = 100e-6
"""A single kernel shorter than this is timed in a CUDA graph, where the zero of events is known better."""
RESOLUTION = 0.1
"""A time whose zero has an uncertainty above this share of it is flagged."""
IDLE_SHARE = 3.0
"""In a burst the device idles this many times as long as it works, so that power does not limit its clocks."""
LONGEST_PACE_SECONDS = 0.05
PROVEN_EVICTION = 1.15
"""A read after eviction must take this many times as long as a repeated read, or the eviction did nothing."""
PROBE_CALLS = 4
MOST_COPIES = 256


@dataclass(slots=True, kw_only=True)
class PreparedCase:
    """A case that was probed, with its sampler, its device and its flags."""

    case: Case
    probe: Probe
    sampler: Sampler
    device: GpuInstrument | None
    conditions: ConditionsReader
    flags: list[Flag] = field(default_factory=list)
    other_seconds: dict[str, float] = field(default_factory=dict)
    blocks: int = 0
    """The number of blocks so far: the seed of resampled inputs."""

    @property
    def device_name(self) -> str:
        """For messages and records."""
        return self.device.name if self.device is not None else "cpu"


def prepare(case: Case, options: Options, calls: int | None = None) -> PreparedCase:
    """Probes the case and chooses its sampler; `calls` is the number of calls per block, chosen to fit by default."""
    place = device_of(case)
    if place.type == "cpu":
        return _prepare_host(case, options, calls)
    backend = backend_of(place)
    assert isinstance(backend, GpuBackend)
    index = backend.current() if place.index is None else place.index
    with backend.selected(index):
        return _prepare_gpu(case, options, gpu_instrument(index), calls)


def prepare_pair(a: Case, b: Case, options: Options) -> tuple[PreparedCase, PreparedCase]:
    """Two prepared cases for a comparison, exchangeable if their code is the same.

    Two captures of one call have their own memory and differ by some ten nanoseconds, so a CUDA graph is used only on
    request. Loops of different length differ by more than 1 % on a CPU, so cases of similar duration get blocks with
    the same number of calls.
    """
    if options.method == "auto" and options.kind != "graph":
        options = replace(options, method="events")
    first, second = prepare(a, options), prepare(b, options)
    calls = (first.sampler.calls, second.sampler.calls)
    if calls[0] != calls[1] and max(calls) < 2 * min(calls):
        second = prepare(b, options, calls[0])
    return first, second


def _prepare_host(case: Case, options: Options, calls: int | None) -> PreparedCase:
    if options.kind not in ("auto", "cpu"):
        raise UsageError(f"{case.name} runs on the CPU, which has no {options.kind} time: use kind='cpu' or 'auto'.")
    probe = probe_host(case)
    flags: list[Flag] = []
    call, evict = case.call, None
    if options.cache == "cold":
        if options.evict == "rotate":
            call = rotating(case, detect_cpu().cache_bytes or UNKNOWN_CACHE_BYTES)
        else:
            evict = HostEviction()
            flags += _eviction_flags(host_eviction_ratio(), evict.cache_bytes)
    sampler = HostSampler(
        call, options.cache, call_seconds=probe.call_seconds, reset=case.reset, evict=evict, calls=calls
    )
    return PreparedCase(case=case, probe=probe, sampler=sampler, device=None, conditions=CPU.conditions(0), flags=flags)


def _prepare_gpu(case: Case, options: Options, device: GpuInstrument, calls: int | None) -> PreparedCase:
    if options.kind == "cpu":
        raise UsageError(f"{case.name} runs on {device.name}: kind='cpu' is for code on the CPU.")
    probe = probe_gpu(case, device)
    flags: list[Flag] = []
    prepared = PreparedCase(
        case=case,
        probe=probe,
        sampler=WallSampler(device, case.call, "latency", call_seconds=probe.call_seconds, reset=case.reset),
        device=device,
        conditions=device.conditions,
        flags=flags,
    )
    if options.kind in ("pipelined", "latency", "enqueue"):
        prepared.sampler = WallSampler(
            device,
            case.call,
            options.kind,
            call_seconds=probe.call_seconds,
            reset=case.reset,
            calls=calls,
        )
    elif probe.synchronizes and "graph" in (options.kind, options.method):
        raise CaseError(f"{case.name} cannot be captured in a CUDA graph: it waits for the device.")
    elif probe.synchronizes:
        flags.append(make_flag("SYNC_IN_REGION", "behind a busy device the call returned only when it was done"))
    elif probe.kernels == () and (options.kind, options.method) == ("auto", "auto"):
        prepared.sampler = WallSampler(
            device, case.call, "enqueue", call_seconds=probe.call_seconds, reset=case.reset, calls=calls
        )
        flags.append(make_flag("NO_KERNELS", "the call returned, and nothing had run on the device"))
    elif probe.off_stream:
        flags.append(make_flag("OFF_STREAM", "work was still running after the current stream had finished the call"))
    else:
        _choose_device_sampler(prepared, options, device, calls)
        if options.cache == "cold" and options.evict == "flush":
            flags += _eviction_flags(eviction_ratio(device.index, device.sweep_bytes), device.cache_bytes)
    return prepared


def _choose_device_sampler(prepared: PreparedCase, options: Options, device: GpuInstrument, calls: int | None) -> None:
    """Events behind a spin; a CUDA graph for small single kernels, and where a spin cannot hide the launches."""
    case, probe = prepared.case, prepared.probe
    call: Callable[[], Any] = case.call
    rotates = options.cache == "cold" and options.evict == "rotate"
    if rotates:
        call = rotating(case, device.cache_bytes)
    zero = zero_of(device.index, options.cache)
    estimate, hidden = _first_estimate(prepared, call, options, zero)
    if probe.kernel_seconds is not None and estimate < 0.5 * probe.kernel_seconds - 2e-6:
        evidence = f"the current stream is done in {seconds_text(estimate)}, the kernels run for "
        prepared.flags.append(make_flag("OFF_STREAM", evidence + seconds_text(probe.kernel_seconds)))
        return
    stage = _stage(prepared, options, estimate)
    single = probe.kernels is not None and len(probe.kernels) == 1
    # A graph replays the copies that it captured, and these are too few to leave the cache.
    small = options.method == "auto" and single and estimate < SMALL_SECONDS and not rotates
    wants_graph = options.kind == "graph" or options.method == "graph"
    if wants_graph and rotates:
        raise UsageError("A CUDA graph replays the same inputs: use evict='flush' for a cold graph time.")
    uncertainty = zero.uncertainty
    try:
        if wants_graph or (options.method == "auto" and options.kind == "auto" and not hidden):
            prepared.sampler = _graph_sampler(device, call, stage, estimate, zero, "graph", calls)
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
            prepared.sampler = candidate
            _flag_resolution(prepared, uncertainty if zero.proven else zero.events, estimate)
            return
    except RuntimeError as error:
        device.recover_from_capture()
        if wants_graph:
            raise CaseError(f"{case.name} cannot be captured in a CUDA graph: {_first_line(error)}") from error
        prepared.flags.append(make_flag("NO_GRAPH", _first_line(error)))
    prepared.sampler = EventSampler(
        device,
        call,
        stage,
        call_seconds=estimate,
        enqueue_seconds=max(probe.enqueue_seconds, 5e-6),
        zero_seconds=zero.events,
        calls=calls,
    )
    _flag_resolution(prepared, zero.uncertainty if zero.proven else zero.events, estimate)


def _stage(prepared: PreparedCase, options: Options, estimate: float) -> Stage:
    """The stage before a call; in a burst it idles in proportion to the call's time."""
    assert prepared.device is not None
    pace = 0.0
    if options.regime == "burst":
        pace = min(LONGEST_PACE_SECONDS, max(0.0, IDLE_SHARE * estimate - STAGE_SECONDS))
    evict = options.evict == "flush"
    return Stage(prepared.device, options.cache, reset=prepared.case.reset, pace_seconds=pace, evict=evict)


def _first_estimate(
    prepared: PreparedCase, call: Callable[[], Any], options: Options, zero: InstrumentZero
) -> tuple[float, bool]:
    """An estimate of the time per call, and whether a spin can hide its launches."""
    assert prepared.device is not None
    rough = EventSampler(
        prepared.device,
        call,
        Stage(prepared.device, options.cache, reset=prepared.case.reset, evict=options.evict == "flush"),
        call_seconds=prepared.probe.call_seconds,
        enqueue_seconds=prepared.probe.enqueue_seconds,
        zero_seconds=zero.events,
    )
    with case_errors(prepared.case.name, "while it was first timed"):
        blocks = [rough.block() for _ in range(3)]
    return max(1e-7, median([block.seconds for block in blocks])), all(block.launch_hidden for block in blocks)


def _agrees(candidate: Sampler, by_events: float, zero: float) -> bool:
    """Whether a captured call takes as long as the same call in a stream: capture can change the program.

    A clone, for example, becomes a copy node that runs at two thirds of the speed of the kernel.
    """
    by_graph = median([candidate.block().seconds for _ in range(3)])
    return abs(by_graph - by_events) <= 0.15 * by_events + 0.5 * zero


def _flag_resolution(prepared: PreparedCase, uncertainty: float, estimate: float) -> None:
    if uncertainty > RESOLUTION * estimate:
        evidence = f"the instrument's zero is known to {seconds_text(uncertainty, 2)}"
        prepared.flags.append(make_flag("BELOW_RESOLUTION", f"{evidence}, the call takes {seconds_text(estimate)}"))


def _graph_sampler(
    device: GpuInstrument,
    call: Callable[[], Any],
    stage: Stage,
    estimate: float,
    zero: InstrumentZero,
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


def graph_seconds(prepared: PreparedCase, options: Options) -> float | None:
    """The time per call in a CUDA graph; None where it was measured already or the call cannot be captured."""
    device, probe = prepared.device, prepared.probe
    rotates = options.cache == "cold" and options.evict == "rotate"
    if device is None or prepared.sampler.kind != "device" or probe.synchronizes or rotates:
        return None
    estimate = max(1e-6, prepared.sampler.block().seconds)
    stage = _stage(prepared, options, estimate)
    zero = zero_of(device.index, options.cache)
    try:
        sampler = _graph_sampler(device, prepared.case.call, stage, estimate, zero, "graph")
    except (RuntimeError, EnvironmentProblem):
        device.recover_from_capture()
        return None
    return median([sampler.block().seconds for _ in range(5)])


def _eviction_flags(ratio: float, cache_bytes: float | None) -> list[Flag]:
    if not cache_bytes:
        return [make_flag("CACHE_STATE_UNPROVEN", "the system does not tell the size of the last-level cache")]
    if ratio < PROVEN_EVICTION:
        evidence = f"a read after the eviction took {ratio:.2f} times as long as a repeated read"
        return [make_flag("CACHE_NOT_COLD", evidence)]
    return []


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What the first calls of a case showed."""

    call_seconds: float
    """Wall time of one call, device idle before and after."""
    enqueue_seconds: float
    memory_growth: float
    """Bytes that every call leaks."""
    mutated: tuple[int, ...]
    """Positions of tensors whose values differ after every call."""
    nonfinite: bool
    """Whether the inputs are finite and the result is not."""
    synchronizes: bool = False
    kernels: tuple[str, ...] | None = None
    """Names, in order; empty where the call runs none, None where the profiler cannot see any."""
    kernel_seconds: float | None = None
    """The time during which at least one kernel ran, by the profiler."""
    off_stream: bool = False
    page_faults: float = 0.0
    """Page faults per call of a case on the CPU."""


def device_of(case: Case) -> torch.device:
    """The GPU that holds a tensor of the case, its result, or that runs its kernels; else the CPU.

    A case that creates its tensors has none before it runs, and one that allocates runs no kernel: what it returns
    tells. Tensors on the CPU alone do not tell, as the call may copy them to a GPU.
    """
    for tensors in (case.tensors(), case.hidden_tensors()):
        if (device := _one_gpu(case, tensors)) is not None:
            return device
    backend = gpu_backend()
    if backend is None:
        return torch.device("cpu")
    with case_errors(case.name, "on its first call"):
        if case.reset is not None:
            case.reset()
        result = case.call()
    if (device := _one_gpu(case, Case(lambda: None, result).tensors())) is not None:
        return device
    if backend.is_initialized():  # otherwise nothing in this process has run on a GPU
        del result
        with case_errors(case.name, "on its first call"):
            calls = profile_calls(case.call, 1, before=case.reset, synchronize=backend.synchronize)
        if calls and calls[0]:
            return backend.device(backend.current())
    return torch.device("cpu")


def _one_gpu(case: Case, tensors: Iterable[Any]) -> torch.device | None:
    """The GPU that holds some of the tensors; None where all are on the CPU."""
    on_gpu = sorted({tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}, key=str)
    if len(on_gpu) > 1:
        raise CaseError(
            f"{case.name} has tensors on several GPUs ({', '.join(map(str, on_gpu))}). Time one device at a time."
        )
    return on_gpu[0] if on_gpu else None


def probe_host(case: Case) -> Probe:
    """The probe of a case that runs on the CPU."""
    probe = _probe(case, synchronize=CPU.synchronize, memory=lambda: CPU.allocated_bytes(0))
    available = CPU.available_bytes(0) or math.inf
    _refuse_endless_growth(case, probe.memory_growth, available)
    with case_errors(case.name, "on a repeated call"):
        growth, faults = _steady_memory(case, probe.call_seconds)
    _refuse_endless_growth(case, growth, available)
    return replace(probe, memory_growth=growth, page_faults=faults)


def probe_gpu(case: Case, device: GpuInstrument, *, kernels: bool = True) -> Probe:
    """The probe of a case on a GPU: also whether it synchronizes, its kernels and its streams."""
    backend = device.backend
    probe = _probe(case, synchronize=device.synchronize, memory=lambda: backend.allocated_bytes(device.index))
    _refuse_endless_growth(case, probe.memory_growth, backend.available_bytes(device.index) or math.inf)
    with case_errors(case.name, "while it was probed"):
        probe = replace(probe, synchronizes=_synchronizes(case, device, probe.enqueue_seconds))
    try:
        profiled = profile_calls(case.call, 3, synchronize=device.synchronize) if kernels else []
    except RuntimeError:  # no CUPTI, or the caller is being profiled already
        return probe
    profiled_calls = [call for call in profiled if call]
    if not profiled_calls:
        return replace(probe, kernels=() if kernels and _profiler_sees_kernels(device) else None)
    seconds = median([busy_seconds(call) for call in profiled_calls])
    several_streams = len({kernel.stream for kernel in profiled_calls[-1]}) > 1
    return replace(
        probe,
        kernels=tuple(kernel.name for kernel in profiled_calls[-1]),
        kernel_seconds=seconds,
        off_stream=several_streams and _off_stream(case, device, seconds),
    )


def _profiler_sees_kernels(device: GpuInstrument) -> bool:
    """Whether the profiler records a kernel that certainly runs."""
    place = device.backend.device(device.index)
    calls = profile_calls(lambda: torch.ones(1, device=place), 1, synchronize=device.synchronize)
    return any(calls)


def _probe(case: Case, *, synchronize: Any, memory: Any) -> Probe:
    tensors = list(case.tensors())
    finite_before = all(_finite(tensor) for tensor in tensors)
    with case_errors(case.name, "on its first call"):
        if case.reset is not None:
            case.reset()
        result = case.call()
        synchronize()
    samples, sizes, walls, enqueues = [], [], [], []
    for _ in range(PROBE_CALLS):
        del result
        with case_errors(case.name, "on a repeated call"):
            if case.reset is not None:
                case.reset()
            synchronize()
            start = time.perf_counter()
            result = case.call()
            enqueues.append(time.perf_counter() - start)
            synchronize()
            walls.append(time.perf_counter() - start)
        samples.append([_sample(tensor) for tensor in tensors])
        sizes.append(memory())
    outputs_finite = all(_finite(tensor) for tensor in Case(lambda: None, result).tensors())
    growths = [b - a for a, b in itertools.pairwise(sizes)]
    mutated = tuple(i for i in range(len(tensors)) if all(_differ(a[i], b[i]) for a, b in itertools.pairwise(samples)))
    return Probe(
        call_seconds=median(walls),
        enqueue_seconds=min(enqueues),
        memory_growth=float(min(growths)) if min(growths) > 0 else 0.0,
        mutated=mutated,
        nonfinite=finite_before and not outputs_finite,
    )


def _steady_memory(case: Case, call_seconds: float) -> tuple[float, float]:
    """Resident bytes that a call adds, and its page faults, in the long run: the first calls may reuse freed memory."""
    calls = max(2, min(20, int(0.1 / max(call_seconds, 1e-6))))
    sizes, faults = [CPU.allocated_bytes(0)], [page_faults()]
    for _ in range(3):
        for _ in range(calls):
            if case.reset is not None:
                case.reset()
            case.call()
        sizes.append(CPU.allocated_bytes(0))
        faults.append(page_faults())
    growth, faulted = (min(b - a for a, b in itertools.pairwise(counts[1:])) / calls for counts in (sizes, faults))
    return max(0.0, growth), faulted


def _synchronizes(case: Case, device: GpuInstrument, enqueue_seconds: float) -> bool:
    """Whether the call waits for the device: behind a long spin it returns late."""
    spin = 0.02 + 2 * enqueue_seconds
    if spin > 0.3:  # a call that takes the host this long looks like one that waits
        return False
    device.synchronize()
    device.spin(spin)
    call_seconds = host_seconds(case.call)
    device.synchronize()
    return call_seconds > enqueue_seconds + 0.5 * spin


def _off_stream(case: Case, device: GpuInstrument, kernel_seconds: float) -> bool:
    """Whether another stream still runs work of the call when the current stream is done.

    Waking up from a wait takes the host some ten microseconds, so only a larger share of the call counts.
    """
    end = device.backend.event()
    late_calls = 0
    for _ in range(5):
        device.synchronize()
        case.call()
        end.record()
        end.synchronize()
        start = time.perf_counter()
        device.synchronize()
        late_calls += time.perf_counter() - start > max(50e-6, 0.1 * kernel_seconds)
    return late_calls >= 4


def _refuse_endless_growth(case: Case, growth: float, available: float) -> None:
    if growth * 200 > available:
        raise CaseError(
            f"{case.name} keeps {growth / 2**20:.0f} MiB more with every call; a few hundred calls would fill the "
            "memory. Do not append results to a list or keep graphs of autograd alive between calls."
        )


def _sample(tensor: torch.Tensor, size: int = 4096) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return torch.empty(0)  # sparse, nested or without data: not watched
    flat = tensor.detach()
    if not flat.is_contiguous() or flat.dtype.itemsize == 1:
        flat = flat.to(torch.float32) if flat.is_floating_point() else flat
    flat = flat.reshape(-1)
    step = max(1, flat.numel() // size)
    return flat[::step][:size].cpu().clone()


def _differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not torch.equal(a.view(torch.uint8), b.view(torch.uint8))  # by bits, as a NaN equals not even itself


def _finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    return bool(torch.isfinite(_sample(tensor).to(torch.float32)).all())


def rotating(case: Case, cache_bytes: float) -> Callable[[], Any]:
    """A call of the case that uses another copy of its tensors each time, over at least three times the cache."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in case.tensors())
    if not size:
        raise UsageError(f"{case.name} has no tensor arguments to rotate: pass them as arguments or use evict='flush'.")
    copies = math.ceil(3 * cache_bytes / size) + 1
    if copies > MOST_COPIES:
        raise UsageError(
            f"{case.name} would need {copies} copies of its inputs to leave the cache: use evict='flush' instead."
        )
    cases = [case, *(_copy_of(case) for _ in range(copies - 1))]
    position = 0

    def call() -> Any:
        nonlocal position
        position = (position + 1) % copies
        return cases[position].call()

    return call


def _copy_of(case: Case) -> Case:
    def copy(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().clone().requires_grad_(value.requires_grad)
        if isinstance(value, (list, tuple)):
            return type(value)(copy(item) for item in value)
        if isinstance(value, dict):
            return {key: copy(item) for key, item in value.items()}
        return value

    return case.with_arguments(copy(case.args), copy(dict(case.kwargs)))
