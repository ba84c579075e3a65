"""`measure_collectives`: times every operation at every size, and checks its result before and after.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import nearpeak
from nearpeak._display import StatusLine
from nearpeak.comm.clock import Clock, Series
from nearpeak.comm.collectives import PLACES, REMARKS, Case, Operation, buffers_needed, build
from nearpeak.comm.fit import BYTES_OF
from nearpeak.comm.patterns import run_patterns
from nearpeak.comm.result import CommPoint, CommRun, LinkLimit, PatternTiming, fit_points
from nearpeak.comm.world import Group, World
from nearpeak.devices.backends import backend_of, gpu_backend
from nearpeak.errors import EnvironmentProblem, message_of
from nearpeak.machines import catalogue
from nearpeak.measure.bench import quiet_collector
from nearpeak.measure.options import Options, Progress
from nearpeak.measure.quality import THROTTLE_FLAGS, launch_flags, series_flags
from nearpeak.measure.statistics import median
from nearpeak.measure.timing import Environment, Flag, make_flag
from nearpeak.units import percent, quantity, seconds

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
