"""Progress in a notebook: one place of the output, which changes and is empty at the end."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from nearpeak.notebook import progress


class Place:
    """What IPython's display gives: a handle on one place of the output."""

    def __init__(self, forms):
        self.lines = [forms]

    def update(self, forms, raw):
        assert raw
        self.lines.append(forms)


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[Place]:
    """A stand-in for IPython's display."""
    made: list[Place] = []

    def display(forms, raw, display_id):
        assert raw and display_id
        made.append(Place(forms))
        return made[-1]

    module = ModuleType("IPython.display")
    module.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return made


NOTEBOOK = SimpleNamespace(kernel=object())


def test_lines_take_the_place_of_each_other_and_are_gone_at_the_end(places: list[Place], capsys):
    with progress(NOTEBOOK) as say:
        say("warming up")
        say("profiling")
        (place,) = places
        assert [forms["text/plain"] for forms in place.lines] == ["warming up", "profiling"]
    assert place.lines[-1] == {"text/plain": "", "text/html": ""}
    assert capsys.readouterr() == ("", "")


def test_they_are_gone_after_an_error_too(places: list[Place]):
    with pytest.raises(KeyboardInterrupt), progress(NOTEBOOK) as say:
        say("warming up")
        raise KeyboardInterrupt
    assert places[0].lines[-1]["text/html"] == ""


def test_nothing_said_leaves_nothing(places: list[Place]):
    with progress(NOTEBOOK):
        pass
    assert places == []


def test_a_line_is_text(places: list[Place]):
    with progress(NOTEBOOK) as say:
        say("</script><img src=x onerror=alert(1)>")
        assert "<img" not in places[0].lines[0]["text/html"]


@pytest.mark.parametrize("shell", [None, SimpleNamespace(), SimpleNamespace(kernel=None)])
def test_on_a_terminal_they_are_lines_on_stderr(places: list[Place], shell, capsys):
    with progress(shell) as say:
        say("warming up")
        say("profiling")
    assert capsys.readouterr() == ("", "warming up\nprofiling\n")
    assert places == []


def test_the_package_needs_neither_ipython_nor_torch():
    code = "import sys, nearpeak.notebook\nprint(sorted({'IPython', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
