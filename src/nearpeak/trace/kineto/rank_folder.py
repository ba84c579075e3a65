"""`read_ranks`: the timelines of all ranks from a folder of trace files, one for each rank.

Files are read by two processes, which send back what they reduced a file to: neither all files nor all events of one
rank are held at once.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from nearpeak.errors import NearpeakError, UsageError
from nearpeak.profiles.rank_timeline import RankTimeline
from nearpeak.trace.kineto.rank_steps import rank_of, rank_timeline
from nearpeak.trace.kineto.recording import load_recording

READERS = 2
MOST_FILES = 16_384
_ENDINGS = (".json", ".json.gz")
_RANK = re.compile(r"rank[^0-9]{0,3}(\d{1,6})", re.IGNORECASE)
_NUMBER = re.compile(r"(\d{1,6})")


class RankFiles(NamedTuple):
    """What a folder has."""

    timelines: list[RankTimeline]
    world_size: int
    files: dict[int, Path]
    """The file of each rank."""
    notes: list[str]
    """Files that could not be read, and ranks of which there are two."""


def read_ranks(folder: Path) -> RankFiles:
    """The ranks of a folder; UsageError if it has no trace."""
    files = sorted(path for path in folder.iterdir() if path.name.lower().endswith(_ENDINGS) and path.is_file())[
        :MOST_FILES
    ]
    if not files:
        raise UsageError(f"{folder} has no trace: expected files that end with {' or '.join(_ENDINGS)}, one per rank.")
    named = _ranks_by_name(files)
    results: list[RankTimeline | str]
    work = [(str(path), rank) for path, rank in zip(files, named, strict=True)]
    if len(files) <= READERS:
        results = [_read(*item) for item in work]
    else:
        count = min(READERS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else READERS)
        context = multiprocessing.get_context("spawn")  # the libraries of this process have threads of their own
        with ProcessPoolExecutor(max(1, count), mp_context=context, initializer=gc.disable) as pool:
            results = list(pool.map(_read_all, work, chunksize=4))
    timelines: dict[int, RankTimeline] = {}
    notes: list[str] = []
    world_size = 0
    for path, result in zip(files, results, strict=True):
        if isinstance(result, str):
            notes.append(f"{path.name} cannot be used: {result}")
        elif result.rank in timelines:
            notes.append(f"{path.name} is of rank {result.rank} too, and is left out.")
        else:
            timelines[result.rank] = result
            world_size = max(world_size, result.world_size or 0, result.rank + 1)
    if not timelines:
        raise UsageError(f"{folder} has no trace that can be read. {notes[0]}")
    by_name = {path.name: path for path in files}
    used = {rank: by_name[timeline.source] for rank, timeline in timelines.items()}
    return RankFiles([timelines[rank] for rank in sorted(timelines)], world_size, used, notes)


def _ranks_by_name(files: Sequence[Path]) -> list[int]:
    """The ranks that names of files tell: after "rank", or the last number in which they differ; else their order."""
    found = [match[1] if (match := _RANK.search(path.name)) else None for path in files]
    if all(number is not None for number in found) and len(set(found)) == len(files):
        return [int(number or 0) for number in found]
    numbers = [_NUMBER.findall(path.name) for path in files]
    if len({len(each) for each in numbers}) == 1:
        for column in zip(*numbers, strict=True):
            if len(set(column)) == len(files) and max(map(int, column)) < MOST_FILES:
                return list(map(int, column))
    return list(range(len(files)))


def _read_all(item: tuple[str, int]) -> RankTimeline | str:
    return _read(*item)


def _read(path: str, rank: int) -> RankTimeline | str:
    """The timeline of one file, or why there is none."""
    try:
        recording = load_recording(path, only_sizes=True)
        known = rank_of(recording.metadata)
        timeline = rank_timeline(
            recording,
            rank=rank if known is None else known[0],
            world_size=None if known is None else known[1],
            source=Path(path).name,
        )
    except NearpeakError as error:
        return str(error)
    if not timeline.steps:
        return "it has no op and no kernel."
    return timeline
