"""`Team`: the ranks of one torch.distributed job, as far as a profile needs them.

Ranks exchange a few keys through the store that their process group was made with: when to begin, so that all of them
measure the same steps, and at the end what each has recorded, some hundred kilobytes. No collective of nearpeak's runs
among the program's own, and no rank waits for another while the program has steps to take.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nearpeak._records import from_json, to_json
from nearpeak.devices.host_load import ThreadSeconds
from nearpeak.errors import UsageError
from nearpeak.profiles.job import JobProfile, RankReport
from nearpeak.profiles.job_analysis import analyze_job
from nearpeak.profiles.profile import Profile
from nearpeak.profiles.rank_timeline import RankTimeline
from nearpeak.trace.kineto.rank_steps import GroupNumber, rank_timeline
from nearpeak.trace.kineto.recording import Recording, load_recording

LEAD_STEPS = 2
"""Steps from the agreement to the first one that counts: all ranks have read it by then."""
COLLECT_SECONDS = 30.0
"""How long rank 0 waits for what the others have recorded."""
_POLL_S = 0.05
_LARGEST_REPORT = 1 << 28
MOST_CAUSES = 6


def launched_rank() -> tuple[int, int]:
    """The rank and the number of ranks that a launcher gave this process; (0, 1) without one."""
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1


class Team:
    """The ranks of a job."""

    def __init__(self, rank: int, world_size: int, store: Any) -> None:
        self.rank, self.world_size = rank, world_size
        self._store = store
        self._is_ready = False
        self._published = 0

    @classmethod
    def join(cls) -> Team | None:
        """The team of this process; None if it has no process group, or is its only rank."""
        distributed = torch.distributed
        if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() < 2:
            return None
        store: Any = distributed.distributed_c10d._get_default_store()
        with suppress(Exception):  # a connection of its own: the program may be waiting for a key on the other
            store = store.clone()
        prefixed = distributed.distributed_c10d.PrefixStore("nearpeak", store)
        return cls(distributed.get_rank(), distributed.get_world_size(), prefixed)

    def agree(self, steps: int, step_s: float) -> tuple[int, float] | None:
        """The step from which all ranks measure, and the time of a step by which they count; None until all are ready.

        Args:
            steps: The number of steps that this rank has taken.
            step_s: The time of the last one.
        """
        if not self._is_ready:
            self._is_ready = True
            self._store.add("ready", 1)
        if self.rank == 0 and not self.has("start") and self._store.add("ready", 0) >= self.world_size:
            self._store.set("start", f"{steps + LEAD_STEPS} {step_s!r}")
        if not self.has("start"):
            return None
        start, pace = self._store.get("start").decode().split()
        return int(start), float(pace)

    def has(self, key: str) -> bool:
        """Whether a rank has written a key."""
        return bool(self._store.check([key]))

    def write(self, key: str, value: bytes) -> None:
        """Writes a key for all ranks."""
        self._store.set(key, value)

    def read(self, key: str) -> bytes:
        """The value of a key that a rank has written."""
        return bytes(self._store.get(key))

    def publish(self, report: RankReport) -> None:
        """Lets rank 0 have what this rank recorded."""
        self._published += 1
        packed = zlib.compress(json.dumps(to_json(report)).encode(), 6)
        self._store.set(f"report {self.rank}", packed)

    def collect(self, own: RankReport, timeout_s: float = COLLECT_SECONDS) -> list[RankReport]:
        """The reports of all ranks that published one in time."""
        reports = {self.rank: own}
        deadline = time.monotonic() + timeout_s
        while len(reports) < self.world_size:
            for rank in range(self.world_size):
                if rank not in reports and self.has(f"report {rank}"):
                    reports[rank] = _unpack(self._store.get(f"report {rank}"))
            if len(reports) == self.world_size or time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S)
        return list(reports.values())

    def job(self, own: RankReport, timeout_s: float = COLLECT_SECONDS) -> JobProfile:
        """The job, on rank 0."""
        reports = self.collect(own, timeout_s)
        missing = sorted(set(range(self.world_size)) - {report.timeline.rank for report in reports})
        notes = []
        if missing:
            names = ", ".join(map(str, missing))
            notes.append(f"Nothing came from rank{'s' * (len(missing) > 1)} {names} within {timeout_s:g} s.")
        return analyze_job(reports, self.world_size, notes=notes)


def _unpack(packed: bytes) -> RankReport:
    unpacker = zlib.decompressobj()
    text = unpacker.decompress(packed, _LARGEST_REPORT)
    if unpacker.unconsumed_tail:
        raise UsageError("A rank sent more than a report of its steps.")
    return from_json(RankReport, json.loads(text))


def rank_report(profile: Profile, timeline: RankTimeline) -> RankReport:
    """What a rank sends of its profile."""
    clock = None if profile.conditions is None else profile.conditions.clock_hz
    return RankReport(
        timeline=replace(timeline, clock_hz=clock),
        wall_s=profile.wall_s,
        waterfall=profile.waterfall,
        idle=profile.idle[:MOST_CAUSES],
        device=profile.device,
    )


def read_timeline(file: Path, team: Team, first_step: int, seconds: Mapping[int, ThreadSeconds]) -> RankTimeline:
    """The steps of this rank in what torch's profiler wrote."""
    recording = load_recording(file)
    timeline = rank_timeline(
        recording,
        rank=team.rank,
        world_size=team.world_size,
        numbers=_recorded_numbers(recording),
        thread_seconds=seconds,
        first_step=first_step,
    )
    # The first step starts the profiler.
    steps = [step for step in timeline.steps if step.number > first_step] or list(timeline.steps)
    return replace(timeline, steps=tuple(steps))


def _recorded_numbers(recording: Recording) -> list[GroupNumber]:
    """Groups and numbers of the collectives of a recording on a CPU, from torch's flight recorder."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None or recording.device_spans:
        return []
    try:
        entries = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    except (ValueError, TypeError, RuntimeError):
        return []
    base = recording.metadata.get("baseTimeNanoseconds") or 0
    starts = [spans[0].start for spans in recording.threads.values() if spans]
    ends = [max(span.end for span in spans[-100:]) for spans in recording.threads.values() if spans]
    if not starts:
        return []
    first, last = base + min(starts) * 1e3, base + max(ends) * 1e3
    inside = [
        entry for entry in entries if not entry.get("is_p2p") and first <= entry.get("time_created_ns", 0) <= last
    ]
    inside.sort(key=lambda entry: entry["time_created_ns"])
    return [GroupNumber(str(entry["process_group"][0]), int(entry["collective_seq_id"])) for entry in inside]
