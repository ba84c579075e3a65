"""`measure_collectives`: times every operation at every size, and checks its result before and after.

All ranks meet at a barrier before each timed call. On a CPU the time of a rank is that of the host's clock around the
call. On a GPU the stream gets, in this order, a spin, an all-reduce of one element, an event, the call and an event:
the spin hides the launches, the small all-reduce lets all GPUs begin at once, and the events are read afterwards.

The unit is a call, and its time that of the slowest rank. Rank 0 decides when to stop, as `bench` does: when the
interval of the median is narrow enough, or the time is up.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import itertools
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

import nearpeak
from nearpeak._display import StatusLine
from nearpeak.comm.collectives import PLACES, REMARKS, Case, Operation, buffers_needed, build
from nearpeak.comm.fit import BYTES_OF
from nearpeak.comm.result import CommPoint, CommRun, LinkLimit, PatternTiming, fit_points
from nearpeak.comm.world import Group, World
from nearpeak.devices.backends import backend_of, gpu_backend
from nearpeak.errors import EnvironmentProblem, message_of
from nearpeak.machines import catalogue
from nearpeak.measure.bench import quiet_collector
from nearpeak.measure.gpu import GpuInstrument, current_gpu
from nearpeak.measure.options import Options, Progress
from nearpeak.measure.quality import THROTTLE_FLAGS, launch_flags, series_flags
from nearpeak.measure.statistics import Interval, inflation, median, median_interval
from nearpeak.measure.timing import Environment, Flag, make_flag
from nearpeak.units import percent, quantity, seconds

WARMUP_CALLS = 3
BLOCK_S = 0.02
"""Seconds of calls between two exchanges of times."""
MOST_CALLS_AT_ONCE = 32
SPIN_S = 300e-6
"""Time on the GPU in which the host enqueues a barrier and a call; longer from then on where it was too short."""
LONGEST_SPIN_S = 10e-3
HOST_CALLS = 7
SKEW_SHARE = 0.25
"""Of a call's time: a larger skew is worth a note."""
MUTUAL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_v", "barrier")
"""Operations that no rank leaves before all have entered: the shortest time is that of the last."""
MEMORY_SHARE = 0.6
"""Of the free memory that messages may take."""
CPU_LARGEST = 64 * 2**20
GPU_LARGEST = 16 * 2**30
SMALLEST = 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """What is measured."""

    ops: tuple[str, ...] = tuple(BYTES_OF)
    sizes: tuple[int, ...] = ()
    """Bytes; empty: from 1 KiB by factors of 4 to what memory and time allow."""
    dtypes: tuple[str, ...] = ("float32",)
    mesh: tuple[int, ...] = ()
    precision: float = 0.05
    """Half of the interval over the median at which a point is done."""
    max_seconds: float = 0.5
    """For one point."""
    patterns: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Calls that all ranks timed: [rank][call]."""

    by_rank: list[list[float]]
    launches_hidden: tuple[bool, ...] = ()
    """On a GPU, for each call of this rank."""

    @property
    def slowest(self) -> list[float]:
        """The slowest rank's time of each call."""
        return [max(call) for call in zip(*self.by_rank, strict=True)]

    @property
    def skews(self) -> list[float]:
        """The longest less the shortest time of each call."""
        return [max(call) - min(call) for call in zip(*self.by_rank, strict=True)]


class Clock:
    """Times calls that all ranks begin together."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.gpu: GpuInstrument | None = current_gpu() if world.device.type != "cpu" else None
        self._token = torch.zeros(1, device=world.device)
        self._spin_s = SPIN_S
        self.method = (
            "the host's clock around each call, after a barrier"
            if self.gpu is None
            else "CUDA events around each call, behind a spin and an all-reduce of one element"
        )

    def synchronize(self) -> None:
        """Waits for this rank's device."""
        if self.gpu is not None:
            self.gpu.synchronize()

    def calls(
        self, what: str, call: Callable[[], object], before: Callable[[], object], count: int, *, on_host: bool = False
    ) -> Times:
        """Times `count` calls; `before` runs before each one, outside of its time."""
        by_events = self.gpu is not None and not on_host
        read = self._event_time if by_events else self._host_time
        times, hidden = [], []
        for _ in range(count):
            with self.world.watchdog.call(what):
                taken, was_hidden = read(call, before)
            times.append(taken)
            hidden.append(was_hidden)
        by_rank = self.world.gather_times(times)
        return Times(by_rank=by_rank, launches_hidden=tuple(hidden) if by_events else ())

    def _host_time(self, call: Callable[[], object], before: Callable[[], object]) -> tuple[float, bool]:
        before()
        self.synchronize()
        self.world.barrier()
        start = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - start, True

    def _event_time(self, call: Callable[[], object], before: Callable[[], object]) -> tuple[float, bool]:
        assert self.gpu is not None
        first, last = self.gpu.events(2)
        before()
        self.gpu.spin(self._spin_s)
        distributed.all_reduce(self._token)
        first.record()
        call()
        last.record()
        was_hidden = not first.query()
        if not was_hidden:
            self._spin_s = min(2 * self._spin_s, LONGEST_SPIN_S)
        self.gpu.synchronize()
        return float(first.elapsed_time(last)) * 1e-3, was_hidden

    def host_seconds(self, what: str, call: Callable[[], object], before: Callable[[], object]) -> float | None:
        """On a GPU, the slowest rank's median by the host's clock; None elsewhere, where that is the time itself."""
        if self.gpu is None:
            return None
        times = []
        for _ in range(HOST_CALLS):
            with self.world.watchdog.call(what):
                times.append(self._host_time(call, before)[0])
        return max(self.world.gather(median(times)))

    def series(
        self,
        what: str,
        call: Callable[[], object],
        before: Callable[[], object],
        options: Options,
        *,
        on_host: bool = False,
    ) -> Series:
        """Times calls until rank 0 has a narrow interval, or no time left; `on_host` by its clock also on a GPU."""
        started = time.perf_counter()
        first = self.calls(what, call, before, WARMUP_CALLS, on_host=on_host)
        count = self.world.decide(lambda: _calls_at_once(first.slowest))
        by_rank: list[list[float]] = [[] for _ in range(self.world.size)]
        hidden: list[bool] = []
        while True:
            block = self.calls(what, call, before, count, on_host=on_host)
            for series, new in zip(by_rank, block.by_rank, strict=True):
                series += new
            hidden += block.launches_hidden
            slowest = Times(by_rank=by_rank).slowest
            elapsed = time.perf_counter() - started
            state = self.world.decide(lambda: _state(slowest, elapsed, options))  # noqa: B023  # called at once
            if state != "continue":
                times = Times(by_rank=by_rank, launches_hidden=tuple(hidden))
                return Series(times=times, converged=state == "narrow")

    def in_turns(
        self, what: str, calls: Mapping[str, Callable[[], object]], before: Callable[[], object], options: Options
    ) -> dict[str, list[float]]:
        """The slowest rank's times of several calls that take turns, so that a drift affects all alike."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        for name, call in calls.items():
            self.calls(f"{what}, {name}", call, before, WARMUP_CALLS)
        started = time.perf_counter()
        while True:
            for name, call in calls.items():
                times[name] += self.calls(f"{what}, {name}", call, before, 1).slowest
            first, elapsed = next(iter(times.values())), time.perf_counter() - started
            if self.world.decide(lambda: _state(first, elapsed, options)) != "continue":  # noqa: B023  # called at once
                return times


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """All timed calls of one point."""

    times: Times
    converged: bool

    def interval(self, options: Options) -> tuple[float, Interval]:
        """Median and interval of the slowest rank's times."""
        return _interval(self.times.slowest, options)


def _calls_at_once(times: Sequence[float]) -> int:
    return max(1, min(MOST_CALLS_AT_ONCE, int(BLOCK_S / max(min(times), 1e-6))))


def _interval(values: Sequence[float], options: Options) -> tuple[float, Interval]:
    return median(values), median_interval(values, options.confidence, inflate=inflation(values))


def _state(values: Sequence[float], elapsed: float, options: Options) -> str:
    """What rank 0 decides: "continue", or why not."""
    if len(values) >= options.min_blocks:
        middle, interval = _interval(values, options)
        if interval.half_width(middle) <= options.precision:
            return "narrow"
    if len(values) >= options.max_blocks or elapsed >= options.max_seconds:
        return "time is up"
    return "continue"


def measure_collectives(world: World, options: SweepOptions, say: Progress) -> CommRun:
    """Every operation at every size, in and out of place, over the world and every dimension of a mesh."""
    clock = Clock(world)
    groups = world.groups(options.mesh)
    sizes, notes = message_sizes(world, options)
    notes += world_notes(world)
    points: list[CommPoint] = []
    missing: dict[str, str] = {}
    cases = list(_cases(world, options, groups, sizes, missing))
    with quiet_collector():
        for number, case in enumerate(cases, start=1):
            say(StatusLine(f"{number}/{len(cases)}  {case}"))
            name = f"{case.op}, {case.dtype}"
            if name in missing:
                continue
            point = measure_point(clock, case, options)
            if isinstance(point, str):
                missing[name] = point
            else:
                points.append(point)
    links = find_links(world, groups, points)
    points = [_with_link_flag(point, links) for point in points]
    fits = fit_points(points)
    patterns: tuple[PatternTiming, ...] = ()
    if options.patterns:
        from nearpeak.comm.patterns import run_patterns

        patterns = run_patterns(clock, fits, options.max_seconds, say)
    for op in dict.fromkeys(point.op for point in points):
        if (world.backend, op) in REMARKS:
            notes.append(f"{op}: {REMARKS[world.backend, op]}.")
    return CommRun(
        backend=backend_text(world.backend),
        ranks=world.size,
        nodes=len(set(world.hosts)),
        mesh=options.mesh,
        environment=environment(world),
        method=clock.method,
        points=tuple(points),
        fits=fits,
        links=links,
        patterns=patterns,
        missing=missing,
        notes=tuple(notes),
    )


def _cases(
    world: World, options: SweepOptions, groups: Sequence[Group], sizes: Sequence[int], missing: dict[str, str]
) -> Iterator[Case]:
    for group, dtype, op in itertools.product(groups, options.dtypes, options.ops):
        if op == "send_recv" and group.size == 1:
            missing["send_recv"] = "it needs two ranks"
            continue
        for in_place in PLACES[op]:
            for size in sizes if op != "barrier" else [0]:
                if op != "barrier" or dtype == options.dtypes[0]:
                    yield Case(op=op, group=group, dtype=dtype, in_place=in_place, size=size)


def measure_point(clock: Clock, case: Case, options: SweepOptions) -> CommPoint | str:
    """The point of a case, the same on all ranks; or why the backend cannot run it."""
    world, what = clock.world, str(case)
    operation = build(case, world.rank, world.device)
    problem = ""
    with world.watchdog.call(what):
        try:
            wrong = _wrong_elements(clock, operation)
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            problem, wrong = message_of(error), 0
        problems = world.gather(problem)  # fails where a rank has gone
    if all(problems):
        return f"not offered by {world.backend}: {problems[0]}"
    if any(problems):
        rank = next(rank for rank, text in enumerate(problems) if text)
        raise EnvironmentProblem(f"{what} failed on rank {rank} and not on all: {problems[rank]}")
    before = operation.reset if operation.resets_each_call else _nothing
    timing = Options(precision=options.precision, max_seconds=options.max_seconds)
    conditions = backend_of(world.device).conditions(world.device.index or 0)
    conditions.read()
    series = clock.series(what, operation.call, before, timing, on_host=operation.waits)
    throttle = conditions.read().throttle
    host = None if operation.waits else clock.host_seconds(what, operation.call, before)
    with world.watchdog.call(f"the check after {what}"):
        wrong += _wrong_elements(clock, operation)
        states = world.gather((wrong, throttle, series.times.launches_hidden))
    return world.decide(lambda: _point(case, operation, series, host, states, timing))


def _nothing() -> None:
    """What has to be done before a call that changes nothing."""


def _wrong_elements(clock: Clock, operation: Operation) -> int:
    operation.reset()
    operation.call()
    clock.synchronize()
    return operation.wrong_elements()


def _point(
    case: Case,
    operation: Operation,
    series: Series,
    host: float | None,
    states: Sequence[tuple[int, tuple[str, ...], tuple[bool, ...]]],
    options: Options,
) -> CommPoint:
    slowest, skew = series.times.slowest, median(series.times.skews)
    middle, interval = series.interval(options)
    wrong = {rank: count for rank, (count, _, _) in enumerate(states) if count}
    shortest = [min(range(len(call)), key=call.__getitem__) for call in zip(*series.times.by_rank, strict=True)]
    rank, often = collections.Counter(shortest).most_common(1)[0]
    share = often / len(shortest)
    last = f"; rank {rank} had the shortest time in {percent(share, 0)} of the calls" if case.op in MUTUAL else ""
    flags = list(series_flags(slowest, slowest, options, converged=series.converged, unit="call"))
    flags += launch_flags([hidden for _, _, calls in states for hidden in calls], "calls")
    flags += _rank_flags(wrong, [reasons for _, reasons, _ in states])
    if skew > SKEW_SHARE * middle:
        flags.append(make_flag("RANKS_SKEWED", f"{seconds(skew)} between ranks in a call of {seconds(middle)}{last}"))
    return CommPoint(
        op=case.op,
        group=case.group.label,
        ranks=case.group.size,
        concurrent=case.group.concurrent,
        nodes=case.group.nodes,
        dtype=case.dtype,
        in_place=case.in_place,
        bytes=operation.bytes,
        wire_bytes=operation.wire_bytes,
        seconds=middle,
        low=interval.low,
        high=interval.high,
        confidence=interval.confidence,
        skew_s=skew,
        shortest_rank=rank,
        shortest_share=share,
        host_seconds=host,
        readings=tuple(slowest),
        wrong_ranks=tuple(wrong),
        flags=tuple(flags),
    )


def _rank_flags(wrong: dict[int, int], reasons: Sequence[tuple[str, ...]]) -> Iterator[Flag]:
    if wrong:
        counts = ", ".join(f"{count:,} elements on rank {rank}" for rank, count in wrong.items())
        yield make_flag("WRONG_RESULT", counts)
    for reason in dict.fromkeys(itertools.chain(*reasons)):
        ranks = [str(rank) for rank, given in enumerate(reasons) if reason in given]
        yield make_flag(THROTTLE_FLAGS[reason], f"{reason} on rank {', '.join(ranks)}")


def message_sizes(world: World, options: SweepOptions) -> tuple[list[int], list[str]]:
    """The sizes of messages that fit into memory on every rank, and what was left out."""
    free = backend_of(world.device).available_bytes(world.device.index or 0)
    sharing = world.local_size if world.device.type == "cpu" else 1
    room = math.inf if free is None else MEMORY_SHARE * free / sharing / max(map(buffers_needed, PLACES))
    room = min(world.gather(room))
    largest = CPU_LARGEST if world.device.type == "cpu" else GPU_LARGEST
    asked = options.sizes or _powers(SMALLEST, largest)
    sizes = [size for size in asked if size <= room]
    if len(sizes) < len(asked):
        return sizes, [f"Sizes above {quantity(room, 'B')} are left out: their buffers would not fit into memory."]
    return sizes, []


def _powers(first: int, last: int) -> tuple[int, ...]:
    count = int(math.log(last / first, 4)) + 1
    return tuple(first * 4**power for power in range(count))


def world_notes(world: World) -> list[str]:
    """What to know about these ranks before reading their times."""
    notes = []
    if world.size == 1:
        notes.append(
            "A world of one rank: nothing crosses a link, and the times are those of calls and local copies. Start "
            "more with `torchrun --nproc-per-node N -m nearpeak comm`, or `nearpeak comm --ranks N`."
        )
    if world.device.type == "cpu":
        cores = backend_of(world.device).properties(0).processors or 1
        if world.local_size > cores:
            notes.append(
                f"{world.local_size} ranks share {cores} processors: they wait for each other, and times vary."
            )
    return notes


def find_links(world: World, groups: Sequence[Group], points: Sequence[CommPoint]) -> tuple[LinkLimit, ...]:
    """The link of each group: that of the GPU in the catalogue inside of a host, otherwise the most that was seen."""
    links = []
    for group in groups:
        link = _catalogue_link(world) if group.nodes == 1 else None
        mine = [point for point in points if point.group == group.label]
        fastest = max(mine, key=lambda point: point.bus_bandwidth or 0.0, default=None)
        if group.size == 1:
            continue
        if link is not None:
            bandwidth, source = link
            links.append(LinkLimit(group=group.label, bandwidth=bandwidth, kind="catalogue", source=source))
        elif fastest is not None and fastest.bus_bandwidth:
            links.append(
                LinkLimit(
                    group=group.label,
                    bandwidth=fastest.bus_bandwidth,
                    kind="measured",
                    source=f"the most that this run reached, {fastest.op} of {quantity(fastest.bytes, 'B')}",
                )
            )
    return tuple(links)


def _catalogue_link(world: World) -> tuple[float, str] | None:
    gpus = gpu_backend()
    if world.device.type == "cpu" or gpus is None:
        return None
    machine = catalogue.by_driver_name(gpus.properties(world.device.index or 0).name)
    link = machine and (machine.link or machine.pcie)
    return (link.bandwidth, f"{link.name} of {machine.id} in the catalogue") if machine and link else None


def _with_link_flag(point: CommPoint, links: Sequence[LinkLimit]) -> CommPoint:
    link = next((link for link in links if link.group == point.group), None)
    rate = point.bus_bandwidth
    if link is None or link.kind == "measured" or rate is None or rate <= link.bandwidth:
        return point
    evidence = f"{quantity(rate, 'B/s')} of bus bandwidth, {percent(rate / link.bandwidth, 0)} of the link"
    return dataclasses.replace(point, flags=(*point.flags, make_flag("ABOVE_LINK", evidence)))


def environment(world: World) -> Environment:
    """Where and when; of rank 0."""
    backend: Any = backend_of(world.device)
    index = world.device.index or 0
    return world.decide(
        lambda: Environment(
            device=backend.properties(index).name,
            driver=backend.conditions(index).driver(),
            torch=torch.__version__,
            python=platform.python_version(),
            nearpeak=nearpeak.__version__,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            threads=torch.get_num_threads(),
        )
    )


def backend_text(name: str) -> str:
    """The backend with its version where it has one of its own: "nccl 2.27.3"."""
    if name != "nccl":
        return name
    version = torch.cuda.nccl.version()
    return f"{name} {'.'.join(map(str, version))}" if isinstance(version, tuple) else name
