"""`load`: a profile from a file: a saved profile, or a trace of torch.profiler."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path
from typing import Literal

from nearpeak._files import InputFile
from nearpeak.bound.estimate import estimate_trace
from nearpeak.bound.roofline import Ceilings
from nearpeak.errors import NearpeakError, UsageError
from nearpeak.findings.engine import add_findings
from nearpeak.findings.step import StepFact
from nearpeak.machines.machine import Machine
from nearpeak.profiles import file as profile_file
from nearpeak.profiles import history
from nearpeak.profiles.job import JobProfile, RankReport
from nearpeak.profiles.job_analysis import analyze_job
from nearpeak.profiles.profile import Profile, add_idle, build_profile, computed_dtypes, profile_ceilings
from nearpeak.profiles.rates import step_rates


def load(path: str | Path) -> Profile:
    """Reads a saved profile, which needs no torch; or profiles a trace file of torch.profiler.

    "@last" is the last run of the command line, "@2" the one before.
    """
    with InputFile(history.resolve(path)) as file:
        return profile_file.read(file) if profile_file.is_profile_file(file) else profile_trace(file)


def profile_trace(
    path: str | Path | InputFile,
    *,
    on: str | Machine | None = None,
    step: int | Literal["all"] | None = None,
    ceilings: Ceilings = "achievable",
) -> Profile:
    """The profile of a trace file: its measured kernels and the bounds of its ops.

    Args:
        path: A Chrome trace of torch.profiler with shapes, as .json or .json.gz.
        on: The machine that the bounds are for; None for the one that the file names.
        step: The number of a step of the profiler's schedule, "all", or None for the last step.
        ceilings: The achievable ceilings of the machine, or those of its datasheet.
    """
    from nearpeak.calibrate.machine import machine_of_file
    from nearpeak.profiling.assemble import attribute_idle, device_kernels, without_costs
    from nearpeak.trace.kineto.read import read_trace  # a saved profile needs no torch
    from nearpeak.trace.recorder import ops_on

    recorded = read_trace(path, step=step, storages="likely")  # with "least", most traffic would count as lost
    if not recorded.kernels:
        raise UsageError(
            f"{path} has no kernels of a device, so there is no measured time to account for. `nearpeak estimate "
            "--trace` gives the bounds of its ops."
        )
    machine = machine_of_file(path, recorded.device, on)
    trace = without_costs(recorded.trace, recorded.partial)
    trace = dataclasses.replace(trace, ops=ops_on(machine, trace.ops))
    estimate = estimate_trace(trace, machine, ceilings=ceilings)
    profile = build_profile(
        estimate,
        device_kernels(recorded),
        wall_s=recorded.wall_s,
        source=str(path),
        date=_date_of(Path(path)),
        device=recorded.device,
        ceilings=profile_ceilings(machine, ceilings, computed_dtypes(estimate)),
    )
    times = {"wall_s": profile.wall_s, "kernel_s": profile.kernel_s}
    idle = attribute_idle(recorded, idle_s=profile.waterfall.seconds("idle"), clean=False)
    profile = dataclasses.replace(
        add_idle(profile, idle),
        completeness=recorded.completeness,
        rates=step_rates(trace, estimate, machine, **times, recompute_known=False),
    )
    lines: frozenset[StepFact] = frozenset({"lines"}) if any(op.source for op in trace.ops) else frozenset()
    return add_findings(profile, trace, machine, lines | {"host"})


def profile_folder(
    folder: str | Path, *, on: str | Machine | None = None, ceilings: Ceilings = "achievable"
) -> Profile | JobProfile:
    """The job of a folder of trace files, one for each rank, in the profile of its first rank.

    The job alone if that rank cannot be profiled, because its file has no shapes or its device is not known.
    """
    from nearpeak.trace.kineto.rank_folder import read_ranks

    read = read_ranks(Path(folder))
    reports = [RankReport(timeline=timeline) for timeline in read.timelines]
    job = analyze_job(reports, read.world_size, notes=read.notes)
    first = read.timelines[0].rank
    try:
        profile = profile_trace(read.files[first], on=on, ceilings=ceilings)
    except (NearpeakError, ValueError) as error:
        return dataclasses.replace(job, notes=(*job.notes, f"Rank {first} has no profile of its own: {error}"))
    return dataclasses.replace(profile, job=job, rank=first, world_size=job.world_size)


def _date_of(path: Path) -> str:
    try:
        return datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC).isoformat(timespec="seconds")
    except (OSError, ValueError, OverflowError):  # it is gone, or its date is none
        return ""
