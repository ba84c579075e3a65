"""`bench`: one honest time for one callable."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nearpeak.errors import UntrustworthyMeasurement
from nearpeak.machines.model import Machine
from nearpeak.measure.assess import Counters, assess, interval_of
from nearpeak.measure.case import Case, as_case
from nearpeak.measure.flags import raise_flag
from nearpeak.measure.options import Options, Progress, options_from
from nearpeak.measure.probe import reporting
from nearpeak.measure.result import explain, limit_of, make_timing
from nearpeak.measure.samplers import WallSampler
from nearpeak.measure.statistics import median
from nearpeak.measure.subject import Subject, graph_seconds, prepare
from nearpeak.measure.timing import Block, Timing
from nearpeak.units import percent, seconds
from nearpeak.work.model import Work

CHECK_EVERY = 4
SUSTAINED_WARMUP_SECONDS = 2.0


def bench(
    fn: Callable[..., Any] | Case,
    *args: Any,
    work: Work | None = None,
    reset: Callable[[], Any] | None = None,
    name: str = "",
    machine: Machine | None = None,
    strict: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Timing:
    """Times `fn(*args)` and says which time it is, how sure it is, and what is doubtful about it.

    On a GPU the time is by default the device time of one call with the launch hidden; on the CPU it is wall time.

    Args:
        fn: What to call, or a `Case`.
        args: Its arguments. Tensors passed here are described in the result and can be rotated.
        work: What a call must do at the least; with it the result has a bound.
        reset: Called before each call, outside the timed region.
        name: For reports; the function's name otherwise.
        machine: Whose ceilings give the bound; this machine's calibrated or catalogued ones otherwise.
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
    subject = prepare(case, chosen)
    limit = limit_of(subject, machine)
    with _on_device(subject), quiet_collector():
        say(f"{case.name}: warming up ({subject.sampler.method})")
        with reporting(case, "while warming up"):
            warm_up(subject, chosen)
        before = Counters.now(subject)
        with reporting(case, "while it was timed"):
            blocks, converged, interrupted = _collect(subject, chosen, say)
        after = Counters.now(subject)
        if chosen.other_kinds and not interrupted:
            interrupted = not _take_other_times(subject, chosen)
    flags = assess(subject, blocks, chosen, before, after, converged=converged)
    if interrupted:
        flags.append(raise_flag("PARTIAL", f"stopped by hand after {len(blocks)} blocks"))
    timing = make_timing(subject, blocks, chosen, flags, limit=limit, partial=interrupted)
    if strict and timing.grade in ("C", "F"):
        raise UntrustworthyMeasurement(explain(timing))
    return timing


def warm_up(subject: Subject, options: Options) -> None:
    """Blocks as they will be timed, for a while and until they no longer get faster."""
    wanted = max(options.warmup_seconds, SUSTAINED_WARMUP_SECONDS if options.regime == "sustained" else 0.0)
    start = time.perf_counter()
    recent: list[float] = []
    while True:
        recent.append(subject.sampler.block().seconds)
        elapsed = time.perf_counter() - start
        settled = len(recent) >= 8 and median(recent[-4:]) > 0.98 * median(recent[-8:-4])
        if elapsed >= wanted and (settled or elapsed >= 3 * wanted or len(recent) >= 8 + 100 * wanted):
            return


def _collect(subject: Subject, options: Options, say: Progress) -> tuple[list[Block], bool, bool]:
    """Blocks until the interval is narrow enough or the time is up: the width decides, never a p-value."""
    blocks: list[Block] = []
    start = time.perf_counter()
    try:
        subject.conditions.read()
        while len(blocks) < options.max_blocks:
            blocks.append(measured_block(subject))
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
                    blocks.append(measured_block(subject))
                return blocks, True, False
            say(f"{subject.case.name}: {len(blocks)} blocks, {seconds(middle)} +- {percent(half, 2)}")
            if elapsed >= options.max_seconds:
                return blocks, False, False
    except KeyboardInterrupt:
        if not blocks:
            raise
        return blocks, False, True
    return blocks, False, False


def measured_block(subject: Subject) -> Block:
    """One block, on a new draw of the inputs that are redrawn, with the conditions right after it."""
    if subject.case.redrawn:
        subject.blocks += 1
        subject.case.redraw(subject.blocks)
    return dataclasses.replace(subject.sampler.block(), conditions=subject.conditions.read())


def _take_other_times(subject: Subject, options: Options) -> bool:
    """The other kinds of time, more briefly: what the host sees, and what a graph would give. False if interrupted."""
    try:
        _other_times(subject, options)
    except KeyboardInterrupt:
        return False
    return True


def _other_times(subject: Subject, options: Options) -> None:
    device, case = subject.device, subject.case
    if device is None:
        return
    estimate = max(subject.probe.enqueue_seconds, 2e-6)
    with reporting(case, "while its host times were taken"):
        for kind in ("enqueue", "pipelined", "latency"):
            if kind == subject.sampler.kind or (kind == "enqueue" and subject.probe.synchronises):
                continue
            sampler = WallSampler(device, case.call, kind, call_seconds=estimate, reset=case.reset)
            sampler.block()
            subject.other_seconds[kind] = median([sampler.block().seconds for _ in range(7)])
    graph = graph_seconds(subject, options)
    if graph is not None:
        subject.other_seconds["graph"] = graph


@contextlib.contextmanager
def quiet_collector() -> Iterator[None]:
    """No garbage collection inside: a pause of the collector would be read as the subject's time."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _on_device(subject: Subject) -> Iterator[None]:
    if subject.device is None:
        yield
    else:
        with torch.cuda.device(subject.device.device):
            yield
