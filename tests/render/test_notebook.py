"""Fragments of HTML for a notebook: what they show, and that nothing from outside becomes markup."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from estimates import addition, estimate, product  # type: ignore[import-not-found]

sys.path.insert(0, str(Path(__file__).parents[1] / "pytest_plugin"))

from figures import timing  # type: ignore[import-not-found]
from synthetic import profile  # type: ignore[import-not-found]

from nearpeak.measure.timing import Environment, Flag
from nearpeak.profiles.waterfall import build_waterfall

HOSTILE = [
    "</script><img src=x onerror=alert(1)>",
    "\"'`><svg onload=alert(1)>",
    "</td></table></div><style>*{display:none}</style>",
    "&lt;b&gt;",
    "<!--",
    "a\nb\r\nc\td",
    "\u202eabc\u2066\u200b\x00\x1b[31m",
    "\ud800",
    "x" * 10_000,
    "$$\\href{javascript:alert(1)}{x}$$",
    "",
]
ALLOWED = {"div", "b", "table", "tr", "th", "td", "details", "summary", "pre"}


class Reader(HTMLParser):
    """All tags, attributes and text; fails where tags do not close as they opened."""

    def __init__(self, fragment: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.styles: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(fragment)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self._open.append(tag)
        self.attributes.update(name for name, _ in attributes)
        self.styles += [value for name, value in attributes if name == "style"]

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data!r}")

    handle_decl = handle_pi = unknown_decl = handle_comment


def named_estimate(name: str):
    ops = [product(name=name, family=name, module=name, source=name), addition()]
    return estimate(
        ops,
        {name: 3},
        machine=name,
        how=name,
        notes=(name,),
        expected_s=3e-3,
        expected_device_s=3e-3,
        expected_from=name,
    )


def named_timing(name: str):
    environment = Environment(device=name, driver=name, torch=name, python=name, nearpeak=name, date=name, threads=1)
    return timing(
        name=name,
        method=name,
        environment=environment,
        kernels=(name,),
        parameters={name: name},
        bound_limiter=name,
        other_seconds={name: 1e-6},
        flags=(Flag(name=name, severity="doubt", evidence=name, remedy=name),),
    )


def named_profile(name: str):
    return profile(60, name=name.replace("{", "").replace("}", "") + "{}")


MADE: list[Callable[[str], object]] = [named_profile, named_estimate, named_timing]


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: repr(name[:20]))
def test_names_are_text_and_nothing_else(make: Callable[[str], object], name: str):
    plain, hostile = Reader(make("name")._repr_html_()), Reader(make(name)._repr_html_())
    assert set(hostile.tags) <= ALLOWED
    assert hostile.tags == plain.tags
    assert hostile.attributes == {"class", "style"}
    assert set(hostile.styles) == set(plain.styles)


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_what_cannot_be_seen_is_shown_escaped(make: Callable[[str], object]):
    fragment = make("a\u202e\u200b\x00b")._repr_html_()
    assert not re.search("[\u202e\u200b\x00]", fragment)
    assert "\\u202e" in fragment


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_long_names_do_not_make_it_large(make: Callable[[str], object]):
    assert len(make("x" * 10_000)._repr_html_()) < 40_000


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_it_has_no_color_of_its_own_and_loads_nothing(make: Callable[[str], object]):
    fragment = make("name")._repr_html_()
    assert "currentColor" in fragment
    assert not re.search(r"url\(|https?:|<script|<style|<link|\bon\w+=|#[0-9a-f]{3}|[^-]color:(?!inherit)", fragment)


def test_a_profile_shows_verdict_waterfall_and_findings():
    made = profile()
    read = Reader(made._repr_html_())
    for text in (
        "Profile of train.py on NVIDIA H200",
        "Verdict",
        "Why",
        "Next",
        "slow kernels",
        "idle",
        "Grade: C (88.0 %",
    ):
        assert text in read.text
    assert read.tags.count("details") > 2
    assert "unfused-norm at modeling.py:113, 12 places" in read.text
    assert "x = norm(x)\n    # indented" in read.text


def bars(fragment: str) -> list[tuple[float, float]]:
    found = re.findall(r"margin-left:([\d.]+)%;width:([\d.]+)%", fragment)
    return [(float(left), float(width)) for left, width in found]


def test_each_bar_begins_where_the_one_before_ended():
    made = bars(profile()._repr_html_())
    assert len(made) == 7
    reached = 0.0
    for left, width in made:
        assert left == pytest.approx(min(reached, 100.0), abs=0.05)
        reached += width
    assert reached == pytest.approx(100.0, abs=0.1)


def test_a_part_below_zero_is_called_wrong_and_has_no_bar():
    made = profile()
    wrong = build_waterfall(wall_s=10.0, ideal_s=5.0, fused_s=6.0, as_written_s=7.0, modeled_s=3.0, kernel_s=3.0)
    fragment = dataclasses.replace(made, wall_s=10.0, waterfall=wrong)._repr_html_()
    assert "below zero: measure this machine again" in Reader(fragment).text
    assert len(bars(fragment)) == 6
    assert all(0.0 <= left <= 100.0 and 0.0 <= width <= 100.0 - left + 0.01 for left, width in bars(fragment))


def test_a_profile_without_findings():
    assert "No finding saves enough" in dataclasses.replace(profile(), findings=())._repr_html_()


def test_an_estimate_shows_its_floors_and_families():
    read = Reader(
        estimate(
            [product(), addition()], {"mine.op": 2}, expected_s=3e-3, expected_device_s=3e-3, expected_from="toy"
        )._repr_html_()
    )
    for text in ("Estimate on toy", "measured ceilings: 2 ops", "as written2.00 ms", "fused500 us", "ideal250 us"):
        assert text in read.text
    assert "Expected: 3.00 ms" in read.text and "mine.op x2" in read.text
    assert "matrix11.00 ms50.0 %" in read.text


def test_an_estimate_of_nothing():
    made = estimate([], as_written_s=0.0, fused_s=0.0, ideal_s=0.0)
    assert "0 ops" in Reader(made._repr_html_()).text


def test_a_timing_shows_its_interval_bound_and_flags():
    read = Reader(
        timing(flags=(Flag(name="DRIFT", severity="doubt", evidence="it moved", remedy="Wait"),))._repr_html_()
    )
    for text in ("softmax", "10.00 us [9.90, 10.10]  grade B", "memory limits: 5.00 us", "DRIFT", "Wait"):
        assert text in read.text
    assert bars(timing()._repr_html_()) == [(0.0, 50.0)]


def test_a_timing_without_a_bound_says_how_to_get_one():
    assert "nearpeak machine --calibrate" in timing(bound_seconds=None)._repr_html_()
    assert "bound" not in timing(bound_seconds=None, work=None)._repr_html_()
