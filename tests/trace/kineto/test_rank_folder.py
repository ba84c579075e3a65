import json
from pathlib import Path

import pytest

from benchmarks.robustness.ranks import write_trace
from nearpeak.errors import UsageError
from nearpeak.profiles.job import RankReport
from nearpeak.profiles.job_analysis import analyze_job
from nearpeak.trace.kineto import rank_folder, recording
from nearpeak.trace.kineto.rank_folder import read_ranks
from nearpeak.trace.kineto.recording import EventFile


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(rank_folder, "READERS", 100)  # no processes of their own for so few files
    for rank in (0, 1, 3):
        write_trace(tmp_path / f"rank{rank}.json", rank, 4, 1.0, late_rank=1)
    return tmp_path


def test_the_ranks_of_a_folder_and_the_late_one(folder: Path):
    read = read_ranks(folder)
    job = analyze_job([RankReport(timeline=timeline) for timeline in read.timelines], read.world_size)
    (late,) = job.late
    assert (late.rank, late.cause, late.pattern) == (1, "input", "always")
    assert (job.missing, job.matched, job.steps) == ((2,), 1.0, 6)
    assert job.collectives[0].bytes == 2 * 4194304
    assert job.what_ifs[0].what == "rank 1's input stall"


def test_truncated_and_unreadable_files_are_named(folder: Path):
    whole = (folder / "rank3.json").read_text()
    (folder / "rank3.json").write_text(whole[: len(whole) // 2])
    (folder / "rank2.json").write_text("{}")
    read = read_ranks(folder)
    assert any("truncated" in note for timeline in read.timelines for note in timeline.notes)
    assert len(read.notes) == 1 and "rank2.json cannot be used" in read.notes[0]


def test_a_folder_without_traces(tmp_path: Path):
    with pytest.raises(UsageError, match="has no trace"):
        read_ranks(tmp_path)


def test_ranks_by_the_names_of_files():
    paths = [Path(f"host-7.step_20.worker{number}.json") for number in (2, 0, 1)]
    assert rank_folder._ranks_by_name(paths) == [2, 0, 1]


@pytest.mark.parametrize("content", ['{"traceEvents": [{"ph": "X"}, 3]}', '{"traceEvents": [{"ph": "X", "dur": nan}]}'])
def test_what_cannot_be_read_at_once_is_read_event_by_event(tmp_path: Path, content: str):
    path = tmp_path / "trace.json"
    path.write_text(content)
    (event,) = list(EventFile(path))
    assert event["ph"] == "X"


def test_both_readers_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"a": 1, "traceEvents": [{"ph": "X", "ts": 1.5, "args": {"x": [1, None]}}] * 3}))
    fast, slow = EventFile(path), EventFile(path)
    events = list(fast)
    monkeypatch.setattr(recording, "msgspec", None)
    assert events == list(slow) and fast.metadata == slow.metadata == {"a": 1}
