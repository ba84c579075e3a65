"""`bench`: the time of one callable, its confidence interval, its bound and its quality flags."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gc
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

import nearpeak
from nearpeak.bound.roofline import bound
from nearpeak.devices.process_state import preserve_process_state
from nearpeak.errors import UntrustworthyMeasurement
from nearpeak.machines import catalogue
from nearpeak.machines.detect import detect_cpu
from nearpeak.machines.machine import Machine
from nearpeak.measure.case import Case, as_case, case_errors
from nearpeak.measure.inputs import describe
from nearpeak.measure.machine import known_machine
from nearpeak.measure.options import Options, Progress, options_from
from nearpeak.measure.prepared import PreparedCase, graph_seconds, prepare
from nearpeak.measure.quality import Counters, interval_of, quality_flags
from nearpeak.measure.samplers import WallSampler
from nearpeak.measure.statistics import median, quantile
from nearpeak.measure.timing import Block, Environment, Flag, Timing, make_flag
from nearpeak.ops.work import Work
from nearpeak.units import percent, seconds

CPU_BOUND_MARGIN = 1.1
ROOFLINE_SLACK = 0.97
"""A time below this share of its bound is impossible; less is the error of the two measurements."""
CHECK_EVERY = 4
"""Blocks between two looks at the interval."""
SUSTAINED_WARMUP_SECONDS = 2.0


@preserve_process_state()
def bench(
    fn: Callable[..., Any] | Case,
    *args: Any,
    work: Work | None = None,
    reset: Callable[[], Any] | None = None,
    name: str = "",
    on: str | Machine | None = None,
    strict: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Timing:
    """Times `fn(*args)`: the median, its confidence interval, which kind of time it is, and its quality flags.

    On a GPU the time is by default the device time of one call with the launch hidden; on the CPU it is wall time.

    Args:
        fn: What to call, or a `Case`.
        args: Its arguments. Tensors passed here are described in the result and can be rotated.
        work: The least work of a call; with it the result has a bound.
        reset: Called before each call, outside the timed region.
        name: For reports; the function's name otherwise.
        on: The machine whose ceilings give the bound: one of the catalogue by name, a `Machine`, or None for this
            machine's calibrated or catalogued ones.
        strict: Raise `UntrustworthyMeasurement` when the grade is C or F.
        progress: Called with a line of text now and then.
        options: kind ("auto", "device", "graph", "pipelined", "latency", "enqueue", "cpu"), method ("auto", "events",
            "graph"), cache ("cold", "hot"), evict ("flush", "rotate"), regime ("burst", "sustained"), precision
            (relative half-width of the interval, 0.005), max_seconds (2), warmup_seconds (0.2), min_blocks (12),
            max_blocks (400), confidence (0.95), seed, other_kinds (True: on a GPU, also take the other kinds of time,
            briefly).

    >>> import torch
    >>> timing = bench(torch.softmax, torch.randn(256, 256), -1, max_seconds=0.2)
    >>> timing.kind, timing.low <= timing.seconds <= timing.high
    ('cpu', True)
    """
    chosen = options_from(options)
    case = as_case(fn, args, {}, work=work, reset=reset, name=name)
    say = progress or (lambda line: None)
    say(f"{case.name}: probing")
    prepared = prepare(case, chosen)
    limit = case_bound(prepared, on)
    with _on_device(prepared), quiet_collector():
        say(f"{case.name}: warming up ({prepared.sampler.method})")
        with case_errors(case.name, "while warming up"):
            warm_up(prepared, chosen)
        before = Counters.now(prepared)
        with case_errors(case.name, "while it was timed"):
            blocks, converged, interrupted = _collect(prepared, chosen, say)
        after = Counters.now(prepared)
        if chosen.other_kinds and not interrupted:
            interrupted = not _take_other_times(prepared, chosen)
    flags = quality_flags(prepared, blocks, chosen, before, after, converged=converged)
    if interrupted:
        flags.append(make_flag("PARTIAL", f"stopped by hand after {len(blocks)} blocks"))
    timing = make_timing(prepared, blocks, chosen, flags, limit=limit, partial=interrupted)
    if strict and timing.grade in ("C", "F"):
        raise UntrustworthyMeasurement(explain(timing))
    return timing


def warm_up(prepared: PreparedCase, options: Options) -> None:
    """Runs blocks for the warm-up time, and until they no longer get faster."""
    wanted = max(options.warmup_seconds, SUSTAINED_WARMUP_SECONDS if options.regime == "sustained" else 0.0)
    start = time.perf_counter()
    recent: list[float] = []
    while True:
        recent.append(prepared.sampler.block().seconds)
        elapsed = time.perf_counter() - start
        settled = len(recent) >= 8 and median(recent[-4:]) > 0.98 * median(recent[-8:-4])
        if elapsed >= wanted and (settled or elapsed >= 3 * wanted or len(recent) >= 8 + 100 * wanted):
            return


def _collect(prepared: PreparedCase, options: Options, say: Progress) -> tuple[list[Block], bool, bool]:
    """Takes blocks until the interval is narrow enough or the time is up: the width decides, never a p-value."""
    blocks: list[Block] = []
    start = time.perf_counter()
    try:
        prepared.conditions.read()
        while len(blocks) < options.max_blocks:
            blocks.append(measured_block(prepared))
            elapsed = time.perf_counter() - start
            if len(blocks) < options.min_blocks and elapsed < 5 * options.max_seconds:
                continue
            if len(blocks) % CHECK_EVERY and elapsed < options.max_seconds:
                continue
            middle, interval = interval_of(blocks, options)
            half = interval.half_width(middle)
            if half <= options.precision and len(blocks) >= options.min_blocks:
                # The interval that happened to be narrow covers too little (92 %): the reported one has fresh blocks.
                for _ in range(CHECK_EVERY):
                    blocks.append(measured_block(prepared))
                return blocks, True, False
            say(f"{prepared.case.name}: {len(blocks)} blocks, {seconds(middle)} +- {percent(half, 2)}")
            if elapsed >= options.max_seconds:
                return blocks, False, False
    except KeyboardInterrupt:
        if not blocks:
            raise
        return blocks, False, True
    return blocks, False, False


def measured_block(prepared: PreparedCase) -> Block:
    """One block on freshly drawn `Resampled` inputs, with the conditions right after it."""
    if prepared.case.resampled:
        prepared.blocks += 1
        prepared.case.resample(prepared.blocks)
    return dataclasses.replace(prepared.sampler.block(), conditions=prepared.conditions.read())


def _take_other_times(prepared: PreparedCase, options: Options) -> bool:
    """Measures the other kinds of time, briefly: by the host's clock and in a CUDA graph. False if interrupted."""
    try:
        _other_times(prepared, options)
    except KeyboardInterrupt:
        return False
    return True


def _other_times(prepared: PreparedCase, options: Options) -> None:
    device, case = prepared.device, prepared.case
    if device is None:
        return
    estimate = max(prepared.probe.enqueue_seconds, 2e-6)
    with case_errors(case.name, "while its host times were taken"):
        for kind in ("enqueue", "pipelined", "latency"):
            if kind == prepared.sampler.kind or (kind == "enqueue" and prepared.probe.synchronizes):
                continue
            sampler = WallSampler(device, case.call, kind, call_seconds=estimate, reset=case.reset)
            sampler.block()
            prepared.other_seconds[kind] = median([sampler.block().seconds for _ in range(7)])
    graph = graph_seconds(prepared, options)
    if graph is not None:
        prepared.other_seconds["graph"] = graph


@contextlib.contextmanager
def quiet_collector() -> Iterator[None]:
    """Inside, Python collects no garbage: a pause of the collector would be read as time of the case."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _on_device(prepared: PreparedCase) -> Iterator[None]:
    if prepared.device is None:
        yield
    else:
        with prepared.device.backend.selected(prepared.device.index):
            yield


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseBound:
    """The bound of a case on the machine that it runs on, and where that machine's ceilings come from."""

    seconds: float
    limiter: str
    ceilings: Literal["measured", "derated"]

    def beaten_by(self, high: float, options: Options) -> bool:
        """Whether a time is impossible: faster than a bound from measured ceilings, with a cold cache."""
        comparable = self.ceilings == "measured" and options.cache == "cold" and self.limiter != "launch"
        return comparable and high < ROOFLINE_SLACK * self.seconds


def case_bound(prepared: PreparedCase, on: str | Machine | None = None) -> CaseBound | None:
    """The bound of the stated work; None where no work is stated or the machine is not known."""
    machine = catalogue.find(on) if isinstance(on, str) else on  # a misspelled name is an error, with work and without
    work = prepared.case.work
    if work is None:
        return None
    machine = machine or known_machine(prepared.device)
    if machine is None or machine.achievable is None:
        return None
    roofline = bound(work, machine)
    return CaseBound(seconds=roofline.seconds, limiter=roofline.limiter, ceilings=machine.achievable.how)


def make_timing(
    prepared: PreparedCase,
    blocks: list[Block],
    options: Options,
    flags: list[Flag],
    *,
    limit: CaseBound | None = None,
    partial: bool = False,
) -> Timing:
    """The result: median, interval, bound, flags, and whether the case is CPU-bound."""
    middle, interval = interval_of(blocks, options)
    case, kind = prepared.case, prepared.sampler.kind
    cpu_bound = None
    enqueue = prepared.other_seconds.get("enqueue")
    if enqueue is not None and kind in ("device", "graph"):
        cpu_bound = enqueue > CPU_BOUND_MARGIN * middle
        if cpu_bound:
            evidence = f"the host needs {seconds(enqueue)} to enqueue what the device does in {seconds(middle)}"
            idle = f"the device idles {percent(1 - middle / enqueue, 0)} of the time"
            flags = [*flags, make_flag("CPU_BOUND", f"{evidence}: {idle}")]
    dense = (t for t in case.tensors() if t.layout == torch.strided and t.device.type != "meta" and not t.is_quantized)
    inputs = tuple(describe(tensor) for tensor in dense)
    for statistics in inputs:
        if statistics.degenerate:
            shape = "x".join(map(str, statistics.shape))
            flags = [*flags, make_flag("DEGENERATE_INPUT", f"{statistics.dtype} {shape}: {statistics.degenerate}")]
    if limit is not None and limit.beaten_by(interval.high, options):
        evidence = f"{seconds(middle)} measured, {seconds(limit.seconds)} is the {limit.limiter} bound"
        flags = [*flags, make_flag("ABOVE_ROOFLINE", evidence)]
    return Timing(
        name=case.name,
        seconds=middle,
        low=interval.low,
        high=interval.high,
        confidence=interval.confidence,
        kind=kind,
        method=prepared.sampler.method,
        cache=options.cache if kind in ("device", "graph", "cpu") else "hot",
        regime=options.regime if prepared.device is not None else "sustained",
        blocks=tuple(blocks),
        flags=tuple(flags),
        environment=environment(prepared),
        other_seconds=dict(prepared.other_seconds),
        quantiles=call_quantiles(blocks, prepared.sampler.calls),
        cpu_bound=cpu_bound,
        kernels=prepared.probe.kernels or (),
        parameters=dict(case.parameters),
        inputs=inputs,
        work=case.work,
        bound_seconds=limit.seconds if limit is not None else None,
        bound_limiter=limit.limiter if limit is not None else None,
        bound_ceilings=limit.ceilings if limit is not None else None,
        partial=partial,
    )


def call_quantiles(blocks: Sequence[Block], calls: int) -> dict[str, float]:
    """Quantiles of the times of single calls; none where a reading stands for a loop of calls."""
    readings = [reading for block in blocks if len(block.readings) >= calls for reading in block.readings]
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    # A quantile has some calls beyond it: of fewer, the slowest one would be all that is known.
    return {name: quantile(readings, share) for name, share in shares.items() if len(readings) * (1 - share) >= 0.999}


def environment(prepared: PreparedCase) -> Environment:
    """The environment of a measurement: device, software, date."""
    device = prepared.device
    return Environment(
        device=prepared.device_name if device is not None else detect_cpu().name,
        driver=device.conditions.driver() if device is not None else None,
        torch=torch.__version__,
        python=platform.python_version(),
        nearpeak=nearpeak.__version__,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        threads=torch.get_num_threads(),
    )


def explain(timing: Timing) -> str:
    """Why a measurement should not be used, with the remedies."""
    reasons = [f"  {flag.name}: {flag.evidence}. {flag.remedy}" for flag in timing.flags if flag.severity != "note"]
    return f"{timing.name}: grade {timing.grade}.\n" + "\n".join(reasons)
