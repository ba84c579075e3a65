"""`--open`: the report in the browser of the user, or where it is."""

import os
import sys
import webbrowser
from urllib.parse import unquote, urlparse

import pytest
from made_up import profile  # type: ignore[import-not-found]

from nearpeak.cli.verbs import profile as verbs_profile
from nearpeak.errors import EnvironmentProblem
from nearpeak.render.views.profile import ReportOptions


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NEARPEAK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def opened(monkeypatch):
    found = []
    monkeypatch.setattr(webbrowser, "open", lambda address: found.append(address) or True)
    for name in ("BROWSER", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(sys, "platform", "linux")
    return found


def test_the_address_is_that_of_the_file(opened, tmp_path):
    path = tmp_path / "a b#c?.html"
    path.write_text("x")
    verbs_profile.open_page(path)
    address = urlparse(opened[0])
    assert address.scheme == "file" and not address.netloc
    assert unquote(address.path) == str(path)


def test_without_a_screen_no_browser_is_started(opened, monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("DISPLAY")
    verbs_profile.open_page(tmp_path / "x.html")
    assert opened == []
    assert (tmp_path / "x.html").as_uri() in capsys.readouterr().err
    monkeypatch.setenv("BROWSER", "firefox")
    verbs_profile.open_page(tmp_path / "x.html")
    assert len(opened) == 1


def test_a_browser_that_does_not_start_costs_a_line(opened, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(webbrowser, "open", lambda address: False)
    verbs_profile.open_page(tmp_path / "x.html")
    assert "no browser" in capsys.readouterr().err


def test_without_a_file_the_page_is_in_the_cache_and_old_ones_go(cache):
    (cache / "reports").mkdir(parents=True)
    for number in range(12):
        old = cache / "reports" / f"{number}.html"
        old.write_text("old")
        os.utime(old, (number, number))
    path = verbs_profile.cached_page(profile(), ReportOptions())
    assert path.parent == cache / "reports"
    assert path.name.startswith("train-")
    assert path.read_text().startswith("<!DOCTYPE html>")
    assert len(list((cache / "reports").iterdir())) == verbs_profile.MOST_PAGES
    assert not (cache / "reports" / "2.html").exists()
    assert verbs_profile.cached_page(profile(), ReportOptions()) == path
    assert verbs_profile.cached_page(profile(wall_s=11.0), ReportOptions()) != path


def test_a_cache_that_cannot_be_written_says_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NEARPEAK_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(EnvironmentProblem, match=r"-o FILE\.html"):
        verbs_profile.cached_page(profile(), ReportOptions())
