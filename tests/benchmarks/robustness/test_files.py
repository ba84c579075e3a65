"""Some of the mutated files and hostile names of `benchmarks.robustness`, in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.robustness import files, names


@pytest.mark.slow
def test_mutated_files_give_a_result_or_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEARPEAK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("NEARPEAK_DEBUG", raising=False)
    known = files.kinds(tmp_path)
    found = [files.run_one(number, 0, known, tmp_path) for number in range(25)]
    assert [each for each in found if each[1] in files.FAILURES] == []
    assert {outcome for _, outcome, _ in found} == {"result", "error"}


@pytest.mark.slow
def test_hostile_names_are_only_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    harmless: dict[str, object] = {}
    every = "".join(piece for piece in names.PIECES if len(piece) < 50)
    found = [
        (name, *problem)
        for name in (names.HARMLESS, every, *names.draw_names(0, 3))
        for problem in names.problems(name, harmless, tmp_path)
    ]
    assert found == []


def test_a_draw_is_the_same_each_time() -> None:
    assert names.draw_names(3, 20) == names.draw_names(3, 20) != names.draw_names(4, 20)
