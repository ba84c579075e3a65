"""Measured collectives as a document: regimes against the link, every size, the patterns of training, and two plots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from nearpeak.comm.fit import BYTES_OF, CurveFit, factor_text
from nearpeak.comm.result import CommPoint, CommRun, PatternTiming
from nearpeak.errors import UsageError
from nearpeak.machines.catalogue import by_driver_name
from nearpeak.measure.timing import Flag
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.cluster.collectives import collective_seconds
from nearpeak.render.document import Block, Document, Fact, Facts, Items, Paragraph, Picture, Table
from nearpeak.render.picture.plot import Series, line_plot
from nearpeak.render.text import count
from nearpeak.render.views.plan.collectives import size
from nearpeak.units import percent, quantity, seconds

LABEL = 11
DEFINITIONS = (
    "in: in place, the part of this rank being a part of the whole buffer.",
    "time: of the slowest rank in each call, the median over calls; +- is half of its 95 % interval.",
    "skew: the longest rank's time of a call less the shortest's, the median over calls.",
    "algbw: bytes / time. busbw: algbw x the factor of nccl-tests, which is what one link carries in one direction.",
)


def document(run: CommRun) -> Document:
    """The report."""
    groups = list(dict.fromkeys(point.group for point in run.points))
    return Document(
        title=f"Collectives over {count(run.ranks, 'rank')} with {run.backend}",
        facts=(_measured(run),),
        parts=(
            *_verdict(run),
            Facts(facts=tuple(_facts(run)), width=LABEL),
            *((_regimes(run),) if run.fits else ()),
            *_pictures(run, groups),
            *(_points(run, group, dtype) for group in groups for dtype in _dtypes(run, group)),
            *_patterns(run.patterns),
            *_flags(run),
            Items(title="Definitions", items=(*_definitions(run), *_bytes_counted(run)), marker="- "),
        ),
    )


def _measured(run: CommRun) -> str:
    environment = run.environment
    driver = f", driver {environment.driver}" if environment.driver else ""
    hosts = count(run.nodes, "host")
    return f"{environment.date} on {hosts} with {environment.device}{driver}, torch {environment.torch}"


def _verdict(run: CommRun) -> Iterator[Block]:
    wrong = run.wrong_points()
    if wrong:
        names = ", ".join(
            f"{_name(point)} of {size(point.bytes)} (ranks {_listed(point.wrong_ranks)})" for point in wrong[:5]
        )
        yield Paragraph(text=f"WRONG RESULTS at {count(len(wrong), 'point')}: {names}.", kind="bad")
    elif run.points:
        yield Paragraph(
            text=f"The results of all {count(len(run.points), 'point')} were right, element by element, before and "
            "after they were timed.",
            kind="good",
        )
    for note in run.notes:
        yield Paragraph(text=note)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _facts(run: CommRun) -> Iterator[Fact]:
    yield Fact(label="method", text=run.method)
    for link in run.links:
        where = "" if len(run.links) == 1 else f"{link.group}: "
        yield Fact(label="link", text=f"{where}{quantity(link.bandwidth, 'B/s')} in one direction: {link.source}")
    for group in dict.fromkeys(point.group for point in run.points if point.group != "world"):
        point = next(point for point in run.points if point.group == group)
        text = f"{count(point.concurrent, 'group')} of {count(point.ranks, 'rank')}, all at once"
        yield Fact(label=group, text=text)
    for name, reason in run.missing.items():
        yield Fact(label="not run", text=f"{name}: {reason}")


def _regimes(run: CommRun) -> Table:
    rows = []
    for fit in run.fits:
        factor = _wire_share(run, fit)
        link = run.link_of(fit.group)
        if link is not None and link.kind == "measured":
            link = None  # the most that was reached, which the bandwidth of a regime is beyond
        for number, regime in enumerate(fit.regimes):
            bandwidth = None if regime.bandwidth is None or not factor else factor * regime.bandwidth
            share = bandwidth / link.bandwidth if bandwidth is not None and link is not None else None
            rows.append(
                (
                    _curve_name(run, fit) if number == 0 else "",
                    size(round(regime.from_bytes)),
                    seconds(regime.latency_s),
                    quantity(bandwidth, "B/s"),
                    percent(share, 0),
                    percent(fit.mean_error) if number == 0 else "-",
                )
            )
    return Table(
        title="Latency and bandwidth by size",
        headers=("", "from", "latency", "busbw", "of link", "error"),
        rows=tuple(rows),
        align="lrrrrr",
        note="In each range of sizes the time is latency + bytes / bandwidth; error: the mean of the fit's at the "
        "measured sizes.",
    ).without_empty_columns(3)


def _curve_name(run: CommRun, fit: CurveFit) -> str:
    extra = [fit.group] if fit.group != "world" else []
    extra += [fit.dtype] if len({point.dtype for point in run.points}) > 1 else []
    return ", ".join([_place(fit.op, fit.in_place), *extra])


def _name(point: CommPoint) -> str:
    return _place(point.op, point.in_place)


def _place(op: str, in_place: bool) -> str:
    """The name of an operation, with "in" for in place where torch also offers it out of place."""
    return f"{op} in" if in_place and op in ("all_gather", "reduce_scatter") else op


def _wire_share(run: CommRun, fit: CurveFit) -> float:
    point = max(
        (each for each in run.points if each.curve == (fit.op, fit.group, fit.dtype, fit.in_place)),
        key=lambda each: each.bytes,
    )
    return point.wire_bytes / point.bytes


def _dtypes(run: CommRun, group: str) -> list[str]:
    return list(dict.fromkeys(point.dtype for point in run.points if point.group == group))


def _points(run: CommRun, group: str, dtype: str) -> Table:
    rows = []
    for point in run.points:
        if (point.group, point.dtype) != (group, dtype):
            continue
        rows.append(
            (
                _name(point),
                size(point.bytes) if point.bytes else "-",
                seconds(point.seconds),
                percent((point.high - point.low) / 2 / point.seconds, 0) if point.seconds else "-",
                seconds(point.skew_s),
                seconds(model_seconds(run, point)),
                quantity(point.algorithm_bandwidth, "").strip(),
                quantity(point.bus_bandwidth, "").strip(),
                percent(run.share_of_link(point), 0),
                seconds(point.host_seconds),
                point.grade,
            )
        )
    ranks = next(point.ranks for point in run.points if point.group == group)
    table = Table(
        title=f"{group}, {count(ranks, 'rank')}, {dtype}",
        headers=("", "bytes", "time", "+-", "skew", "model", "algbw", "busbw", "link", "host", "grade"),
        rows=tuple(rows),
        align="lrrrrrrrrrr",
    ).without_empty_columns(5)
    wide = tuple(number for number, header in enumerate(table.headers) if header in ("+-", "host"))
    return replace(table, wide=wide)


def model_seconds(run: CommRun, point: CommPoint) -> float | None:
    """What the planner's model of NCCL predicts for GPUs of the catalogue in one host; None for everything else."""
    machine = by_driver_name(run.environment.device)
    if machine is None or not run.backend.startswith("nccl") or point.nodes > 1 or point.ranks == 1:
        return None
    try:
        cluster = Cluster.of(machine, gpus=run.ranks)
        ranks = 2 if point.op == "send_recv" else point.ranks
        return collective_seconds(point.op, point.bytes, ranks, cluster, concurrent_groups=point.concurrent).seconds
    except UsageError:  # an operation or a number of GPUs that the planner does not have
        return None


def _patterns(patterns: Sequence[PatternTiming]) -> Iterator[Block]:
    if not patterns:
        return
    run = [pattern for pattern in patterns if not pattern.problem]
    yield Table(
        title="Patterns of training",
        headers=("", "step", "compute", "comm", "exposed", "hidden", "predicted", "result"),
        rows=tuple(
            (
                pattern.name,
                seconds(pattern.step_s),
                seconds(pattern.compute_s),
                seconds(pattern.communication_s),
                seconds(pattern.exposed_s),
                percent(pattern.hidden_s / pattern.communication_s, 0) if pattern.communication_s else "-",
                seconds(pattern.predicted_s),
                "right" if pattern.is_right else "WRONG",
            )
            for pattern in run
        ),
        align="lrrrrrrl",
        note="compute: the step without communication. comm: its collectives one after the other. exposed: step less "
        "compute, with what the framework adds. hidden: the share of comm that is not exposed. predicted: the step "
        "from compute and the fitted times. result: against one rank that computes all of it.",
    )
    yield Items(
        title="",
        items=tuple(
            f"{pattern.name}: {pattern.problem}"
            if pattern.problem
            else f"{pattern.name}: {pattern.what}. Its collectives alone: {seconds(pattern.communication_s)} measured, "
            f"{seconds(pattern.predicted_communication_s)} predicted. Largest difference from one rank: "
            f"{pattern.difference:.1e}."
            for pattern in patterns
        ),
        marker="- ",
    )


def _flags(run: CommRun) -> Iterator[Block]:
    """Each flag once, with how many points have it."""
    numbers: dict[str, int] = {}
    first: dict[str, tuple[CommPoint, Flag]] = {}
    for point in run.points:
        for flag in point.flags:
            numbers[flag.name] = numbers.get(flag.name, 0) + 1
            first.setdefault(flag.name, (point, flag))
    order = {"wrong": 0, "doubt": 1, "note": 2}
    facts = tuple(
        Fact(
            label=flag.severity,
            text=f"{name} at {numbers[name]} of {count(len(run.points), 'point')}, first at {_name(point)} of "
            f"{size(point.bytes)}: {flag.evidence}",
            advice=flag.remedy,
        )
        for name, (point, flag) in sorted(first.items(), key=lambda item: order[item[1][1].severity])
    )
    if facts:
        yield Facts(facts=facts, width=7)


def _definitions(run: CommRun) -> Iterator[str]:
    yield from DEFINITIONS
    if any(model_seconds(run, point) is not None for point in run.points):
        yield "model: the time that the planner's model of NCCL gives for these GPUs."


def _bytes_counted(run: CommRun) -> Iterator[str]:
    ops = [op for op in BYTES_OF if op != "barrier" and any(point.op == op for point in run.points)]
    if ops:
        yield "bytes and factor, n ranks: " + "; ".join(f"{op}: {BYTES_OF[op]}, {factor_text(op)}" for op in ops) + "."


def _pictures(run: CommRun, groups: Sequence[str]) -> Iterator[Picture]:
    for group in groups:
        dtype = _dtypes(run, group)[0]
        fits = [fit for fit in run.fits if (fit.group, fit.dtype) == (group, dtype)]
        if any(point.wire_bytes for point in run.points):
            yield Picture(title=f"Bus bandwidth by size, {group}", svg=_bandwidth_plot(run, fits, group))
        if fits:
            yield Picture(title=f"Time by size, {group}", svg=_time_plot(run, fits, group))


def _curve(run: CommRun, fit: CurveFit) -> list[CommPoint]:
    return [point for point in run.points if point.curve == (fit.op, fit.group, fit.dtype, fit.in_place)]


def _bandwidth_plot(run: CommRun, fits: Sequence[CurveFit], group: str) -> str:
    series = []
    for number, fit in enumerate(fits):
        points = [(float(point.bytes), point.bus_bandwidth, point) for point in _curve(run, fit)]
        known = [(x, y, point) for x, y, point in points if y is not None]
        series.append(
            Series(
                name=_place(fit.op, fit.in_place),
                points=tuple((x, y) for x, y, _ in known),
                labels=tuple(f"{_name(point)} of {size(point.bytes)}: {quantity(y, 'B/s')}" for _, y, point in known),
                color=number,
            )
        )
    link = run.link_of(group)
    if link is not None:
        ends = (min(x for each in series for x, _ in each.points), max(x for each in series for x, _ in each.points))
        series.append(
            Series(
                name=f"link, {link.kind}",
                points=tuple((end, link.bandwidth) for end in ends),
                markers=False,
                dashed=True,
                color=len(fits),
            )
        )
    return line_plot(
        series,
        title=f"Bus bandwidth, {group}",
        x_label="bytes",
        y_label="bus bandwidth",
        log_x=True,
        log_y=True,
        x_ticks=_ticks(run, group),
        y_format=lambda value: quantity(value, "B/s"),
    )


def _time_plot(run: CommRun, fits: Sequence[CurveFit], group: str) -> str:
    series = []
    for number, fit in enumerate(fits):
        points = _curve(run, fit)
        series.append(
            Series(
                name=_place(fit.op, fit.in_place),
                points=tuple((float(point.bytes), point.seconds) for point in points),
                bars=tuple((point.low, point.high) for point in points),
                line=False,
                color=number,
            )
        )
        series.append(
            Series(
                name=f"{_place(fit.op, fit.in_place)}, fit",
                points=tuple((float(point.bytes), fit.seconds(point.bytes)) for point in points),
                markers=False,
                color=number,
            )
        )
    return line_plot(
        series,
        title=f"Measured and fitted times, {group}",
        x_label="bytes",
        y_label="time of the slowest rank",
        log_x=True,
        log_y=True,
        x_ticks=_ticks(run, group),
        y_format=seconds,
    )


def _ticks(run: CommRun, group: str) -> list[tuple[float, str]]:
    amounts = sorted({point.bytes for point in run.points if point.group == group and point.bytes})
    round_ones = [amount for amount in amounts if amount & (amount - 1) == 0] or amounts
    return [(float(amount), size(amount)) for amount in round_ones]
