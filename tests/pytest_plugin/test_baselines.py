"""Files of baselines: one figure for each machine, and none that is damaged."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from figures import KEY  # type: ignore[import-not-found]

from nearpeak.errors import EnvironmentProblem, UsageError
from nearpeak.pytest_plugin.measured_test import Baseline, baseline_path, read_baselines, write_baseline

ONE = Baseline(key=KEY, seconds=2.0, low=1.9, high=2.1, kind="step", date="2026-01-02", nearpeak="0.1.0")
OTHER = dataclasses.replace(ONE, key=dataclasses.replace(KEY, torch="2.14.0"), seconds=1.95)


def test_written_and_read_back(tmp_path: Path):
    path = baseline_path(tmp_path / "new" / "folder", "step")
    write_baseline(path, ONE)
    assert read_baselines(path).of(KEY) == ONE
    assert [each.name for each in path.parent.iterdir()] == ["step.json"]


def test_no_file_has_no_figure(tmp_path: Path):
    assert read_baselines(tmp_path / "none.json").of(KEY) is None


def test_another_torch_is_another_machine(tmp_path: Path):
    path = tmp_path / "step.json"
    write_baseline(path, OTHER)
    assert read_baselines(path).of(KEY) is None


def test_machines_have_a_figure_each_and_the_order_of_writing_does_not_matter(tmp_path: Path):
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    for path, order in ((one, (ONE, OTHER)), (two, (OTHER, ONE))):
        for each in order:
            write_baseline(path, each)
    assert one.read_text() == two.read_text()
    assert (read_baselines(one).of(KEY), read_baselines(one).of(OTHER.key)) == (ONE, OTHER)


def test_a_new_figure_replaces_that_of_the_same_machine(tmp_path: Path):
    path = tmp_path / "step.json"
    write_baseline(path, ONE)
    write_baseline(path, dataclasses.replace(ONE, seconds=2.05))
    assert [each.seconds for each in read_baselines(path).baselines] == [2.05]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(schema=99),
        lambda data: data.update(extra=1),
        lambda data: data["baselines"][0].update(seconds="2"),
        lambda data: data["baselines"][0].update(seconds=-1.0),
        lambda data: data["baselines"][0].update(low=3.0),
        lambda data: data["baselines"][0].update(high=float("inf")),
        lambda data: data["baselines"][0].pop("key"),
    ],
)
def test_a_damaged_file_is_an_error_that_says_what_to_do(tmp_path: Path, change):
    path = tmp_path / "step.json"
    write_baseline(path, ONE)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(UsageError, match="Delete it, and run with --nearpeak-update"):
        read_baselines(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b" " * (2**20 + 1)])
def test_what_is_no_baseline(tmp_path: Path, content: bytes):
    path = tmp_path / "step.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="cannot be used"):
        read_baselines(path)


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises((EnvironmentProblem, UsageError), match="cannot be"):
        write_baseline(tmp_path / "file" / "step.json", ONE)
