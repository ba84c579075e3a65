"""The text of source lines, read while the code runs."""

import sys

from nearpeak.trace import source
from nearpeak.trace.source import read_excerpts, user_line


def test_lines_are_read_from_the_files_that_ran(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "_user_file_names", {})
    line = user_line(sys._getframe())[0]  # this line is named
    (found,) = read_excerpts([line, "elsewhere.py:3", "", "aten.mm"])
    assert found.source == line and "# this line is named" in found.lines[2]


def test_a_name_that_two_files_have_is_not_guessed(tmp_path, monkeypatch):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.py").write_text(f"{folder} = 1\n")
    names = {str(tmp_path / folder / "model.py"): "model.py" for folder in ("a", "b")}
    monkeypatch.setattr(source, "_user_file_names", names)
    assert read_excerpts(["model.py:1"]) == ()
    monkeypatch.setattr(source, "_user_file_names", dict([*names.items()][:1]))
    assert read_excerpts(["model.py:1"])[0].lines == ("a = 1",)
