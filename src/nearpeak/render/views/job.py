"""The ranks of a job: who is late and why, ranks side by side, collectives, and what each cause costs."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.profiles.job import JobCollective, JobProfile, RankParts
from nearpeak.profiles.rank_timeline import ACTIVITIES
from nearpeak.render.document import Block, Cell, Document, Items, Paragraph, Picture, Section, Table, Time
from nearpeak.render.picture.bars import Bar, stacked_bars
from nearpeak.render.picture.scene import Scene
from nearpeak.render.picture.svg import svg
from nearpeak.units import percent, quantity
from nearpeak.units import seconds as seconds_text

MOST_RANKS = 16
"""Rows of the table of ranks: the slowest ones, and rank 0."""
MOST_COLLECTIVES = 12


def document(job: JobProfile) -> Document:
    """The whole job."""
    return Document(
        title=f"Job of {job.world_size} ranks",
        parts=tuple(job_sections(job, full=True)),
        is_titled=False,
    )


def job_sections(job: JobProfile, *, full: bool) -> Iterator[Section]:
    """The sections of a report about a job; not `full`, those of one screen."""
    pictures = _pictures(job) if full else ()
    yield Section(id="job", title="Ranks", blocks=(*_summary(job), *pictures))
    yield Section(id="ranks", title="Ranks side by side", blocks=(_ranks(job),))
    if not full:
        return
    if any(parts.waterfall is not None for parts in job.ranks):
        yield Section(id="rank-parts", title="The step of each rank", blocks=(_waterfalls(job),), is_folded=True)
    if job.collectives:
        yield Section(id="collectives", title="Collectives", blocks=(_collectives(job),))
    spread = _spread(job)
    if spread.rows:
        yield Section(id="rank-spread", title="Own time of ranks over steps", blocks=(spread,), is_folded=True)


def job_sentences(job: JobProfile) -> list[str]:
    """Who is late, or that nobody is; what each cause costs; what is missing."""
    said = [late.text for late in job.late]
    if not said and job.steps >= 2 and job.collectives:
        said.append(f"No rank stands out in {job.steps} steps: none is late by more than ranks and steps scatter.")
    for item in job.what_ifs:
        if item.saved_s >= 0.01 * job.wall_s:
            said.append(
                f"Without {item.what} the step takes {seconds_text(item.step_s)} instead of {seconds_text(job.wall_s)}."
            )
    if job.missing:
        listed = ", ".join(map(str, job.missing[:20])) + (" ..." if len(job.missing) > 20 else "")
        said.append(f"Missing: rank{'s' * (len(job.missing) > 1)} {listed} of {job.world_size}.")
    said += job.notes
    said += [f"Rank {parts.rank}: {note}." for parts in job.ranks for note in parts.notes][:8]
    return said


def _summary(job: JobProfile) -> Iterator[Block]:
    clean = "" if job.wall_s == job.step_s else f" A step takes {seconds_text(job.wall_s)} without the profiler."
    recorded = f"Job: {job.world_size} ranks, {job.steps} steps of {seconds_text(job.step_s)} recorded."
    yield Paragraph(text=recorded + clean)
    yield Items(items=tuple(job_sentences(job)), marker="- ")


def _shown(job: JobProfile) -> list[RankParts]:
    """All ranks, or of many those that wait least for others, and rank 0."""
    if len(job.ranks) <= MOST_RANKS:
        return list(job.ranks)
    late = {item.rank for item in job.late}
    ordered = sorted(job.ranks, key=lambda parts: (parts.rank not in late, parts.rank != 0, parts.waited_s))
    return sorted(ordered[:MOST_RANKS], key=lambda parts: parts.rank)


def _ranks(job: JobProfile) -> Table:
    shown = _shown(job)
    used = [place for place in range(len(ACTIVITIES)) if any(parts.seconds[place] > 0.0 for parts in shown)]
    short = {"garbage collection": "garbage", "communication": "comm."}
    rows: list[tuple[Cell, ...]] = [
        (
            str(parts.rank),
            *(Time(parts.seconds[place]) for place in used),
            Time(parts.waited_s),
            "-" if parts.preempted_s is None else Time(parts.preempted_s),
        )
        for parts in shown
    ]
    notes = ["Medians over steps. Arrival wait: until the last rank came to its collectives."]
    if any(parts.preempted_s for parts in shown):
        notes.append("Preempted: other work had its processor, inside the other times.")
    if hidden := len(job.ranks) - len(shown):
        notes.append(f"{hidden} ranks that wait longer are not shown.")
    return Table(
        headers=(
            "rank",
            *(short.get(ACTIVITIES[place], ACTIVITIES[place]) for place in used),
            "arrival wait",
            "preempted",
        ),
        rows=tuple(rows),
        note=" ".join(notes),
    ).without_empty_columns(1)


def _pictures(job: JobProfile) -> Iterator[Picture]:
    if job.ranks:
        yield Picture(title="Where the step of each rank goes", svg=svg(ranks_picture(job)))


def ranks_picture(job: JobProfile) -> Scene:
    """A bar of each rank: its own activities, and then what it only waits for."""
    shown = _shown(job)
    late = {item.rank for item in job.late}
    bars = [
        Bar(
            name=f"rank {parts.rank}{' (late)' * (parts.rank in late)}",
            pieces=tuple(zip(ACTIVITIES, parts.seconds, strict=True)),
        )
        for parts in shown
    ]
    said = job_sentences(job)
    return stacked_bars(
        bars,
        title=f"Where a step of each of {job.world_size} ranks goes",
        subtitle=said[0] if said else "",
        shown=seconds_text,
    )


def _waterfalls(job: JobProfile) -> Table:
    shown = [parts for parts in _shown(job) if parts.waterfall is not None]
    names = [part.name for part in shown[0].waterfall.parts] if shown[0].waterfall is not None else []
    return Table(
        headers=("rank", *names, "step"),
        rows=tuple(
            (
                str(parts.rank),
                *(Time(max(0.0, part.seconds)) for part in parts.waterfall.parts),
                Time(parts.waterfall.wall_s),
            )
            for parts in shown
            if parts.waterfall is not None
        ),
    )


def _collectives(job: JobProfile) -> Table:
    def bandwidth(row: JobCollective) -> str:
        return "-" if row.bus_bandwidth is None else f"{row.bus_bandwidth / 1e9:.3g} GB/s"

    return Table(
        headers=("collective", "size", "a step", "arrival wait", "transfer", "tail", "bus bandwidth", "last rank"),
        rows=tuple(
            (
                f"{row.kind}{f' ({row.group})' if row.group else ''}",
                "-" if row.bytes is None else quantity(row.bytes, "B"),
                f"{row.per_step:.3g}",
                Time(row.wait_s),
                Time(row.transfer_s),
                Time(row.tail_s),
                bandwidth(row),
                f"{row.last_rank} ({percent(row.last_share)})",
            )
            for row in job.collectives[:MOST_COLLECTIVES]
        ),
        note="Means over ranks and calls. Bus bandwidth: bytes over the transfer, with the factors of nccl-tests.",
    )


def _spread(job: JobProfile) -> Table:
    """The own time of each rank over the steps: least, quartiles, most."""
    rows: list[tuple[Cell, ...]] = []
    for parts in _shown(job):
        values = sorted(parts.own_s)
        if values:
            places = (0, len(values) // 4, len(values) // 2, 3 * len(values) // 4, len(values) - 1)
            rows.append((str(parts.rank), *(Time(values[place]) for place in places)))
    return Table(headers=("rank", "least", "quarter", "median", "three quarters", "most"), rows=tuple(rows))
