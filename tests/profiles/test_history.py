import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from made_up import profile

import nearpeak
from nearpeak.errors import UsageError
from nearpeak.profiles import history


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NEARPEAK_CACHE_DIR", str(tmp_path / "cache"))


def keep(count):
    for number in range(count):
        history.add_run(dataclasses.replace(profile(), source=f"run {number}"))


def test_the_last_ten_are_kept_and_the_last_is_the_first():
    keep(12)
    assert len(list(history.folder().iterdir())) == 10
    assert [run.profile.source for run in history.past_runs()] == [f"run {number}" for number in range(11, 1, -1)]
    assert nearpeak.load("@last") == nearpeak.load("@1")
    assert nearpeak.load("@last").source == "run 11"
    assert nearpeak.load("@2").source == "run 10"
    assert nearpeak.load("@10").source == "run 2"
    assert nearpeak.load("@10").ops == profile().ops


def test_a_number_that_is_not_there_is_said():
    with pytest.raises(UsageError, match="no runs are kept"):
        nearpeak.load("@last")
    keep(1)
    with pytest.raises(UsageError, match="there is only @1"):
        nearpeak.load("@2")
    keep(2)
    for asked in ("@0", "@4"):
        with pytest.raises(UsageError, match="there are @1 to @3"):
            nearpeak.load(asked)
    with pytest.raises(UsageError, match="saved runs are @last"):
        nearpeak.load("@first")


def test_other_paths_stay_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert history.resolve("run.json") == Path("run.json")
    assert history.resolve("./@last") == Path("@last")
    assert history.resolve(Path("@last")) == Path("@last")


def test_a_damaged_run_is_listed_with_what_is_wrong():
    keep(2)
    path = history.resolve("@last")
    path.write_bytes(path.read_bytes()[:40])
    damaged, fine = history.past_runs()
    assert damaged.profile is None
    assert "cannot be read" in damaged.problem
    assert fine.profile.source == "run 0"


def test_other_files_in_the_folder_are_left_alone():
    keep(1)
    (history.folder() / "notes.txt").write_text("mine")
    (history.folder() / "mine.json.gz").write_text("mine")
    keep(11)
    assert (history.folder() / "notes.txt").exists()
    assert (history.folder() / "mine.json.gz").exists()
    assert len(history.past_runs()) == 10


def test_it_can_be_turned_off(monkeypatch):
    assert history.is_enabled()
    monkeypatch.setenv("NEARPEAK_KEEP", "0")
    assert not history.is_enabled()


def test_no_torch_is_needed():
    code = (
        "import sys; import nearpeak.profiles.history, nearpeak.render.views.history; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
