"""The plot is valid XML, escapes everything, and shows what it was given."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import pytest

from nearpeak.render.picture.axis import Axis
from nearpeak.render.picture.plot import Band, Series, line_plot

SPACE = "{http://www.w3.org/2000/svg}"


def draw(*series: Series, **options: object) -> ElementTree.Element:
    text = line_plot(series, **{"title": "title", "x_label": "x", "y_label": "y", **options})
    assert "<script" not in text
    assert "nan" not in text
    assert "inf" not in text
    return ElementTree.fromstring(text)


def texts(plot: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in plot.iter(f"{SPACE}text")]


def marks(plot: ElementTree.Element, kind: str = "np-mark") -> list[ElementTree.Element]:
    named = (element for element in plot.iter(f"{SPACE}path") if element.find(f"{SPACE}title") is not None)
    return [element for element in named if kind in element.attrib["class"].split()]


def classed(plot: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [element for element in plot.iter() if name in element.attrib.get("class", "").split()]


def test_a_line_with_bars():
    plot = draw(Series(name="a", points=((1, 2), (2, 4), (3, 3)), bars=((1, 3), (3, 5), (2, 4))))
    assert len(marks(plot)) == 3
    assert len(classed(plot, "np-bar")) == 3
    assert len(classed(plot, "np-line")) == 2  # the line and its entry in the legend
    assert {"title", "x", "y", "a"} <= set(texts(plot))


def test_points_only():
    plot = draw(Series(name="a", points=((1, 2), (2, 4)), line=False))
    assert len(marks(plot)) == 2
    assert not classed(plot, "np-line")


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("series", [(), (Series(name="empty", points=()),)])
def test_nothing_to_show_is_said(series, log):
    assert "nothing to show" in texts(draw(*series, log_x=log, log_y=log))


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("point", [(3, 4), (0, 0), (1e-9, 1e9), (5, -2)])
def test_a_single_point(point, log):
    assert len(marks(draw(Series(name="a", points=(point,)), log_x=log, log_y=log))) == 1


def test_markup_and_control_characters_are_escaped():
    hostile = "</script><b>&\"'\x00\x1b\ud800\uffff"
    plot = draw(
        Series(name=hostile, points=((1, 1),), labels=(hostile,)),
        title=hostile,
        x_label=hostile,
        y_label=hostile,
        x_ticks=[(1, hostile)],
        y_format=lambda value: hostile,
        bands=[Band(name=hostile, low=0, high=1)],
    )
    assert "</script><b>&\"'\\x00\\x1b\\ud800\\uffff" in texts(plot)
    assert not list(plot.iter(f"{SPACE}b"))


def test_what_an_axis_cannot_show_is_hollow_at_its_edge():
    plot = draw(Series(name="a", points=((1, 0.0), (2, 1e-9), (3, 0.1), (4, 50.0))), log_y=True, y_limits=(1e-4, 1.0))
    assert len(marks(plot, "np-hollow")) == 3
    assert len(marks(plot)) == 4


def test_values_that_are_no_numbers_are_left_out():
    plot = draw(Series(name="a", points=((1, 1), (2, math.nan), (3, math.inf), (4, 2))))
    assert len(marks(plot)) == 2


def test_a_band_is_shaded_and_named():
    plot = draw(Series(name="a", points=((1, 0.5),)), bands=[Band(name="within 3 %", low=0, high=0.03)])
    assert len(classed(plot, "np-band")) == 2
    assert "within 3 %" in texts(plot)


def test_ticks_are_round():
    plot = draw(
        Series(name="a", points=((1e-6, 1e-6), (1e-2, 1e-2))),
        log_x=True,
        log_y=True,
        y_format=lambda v: f"{v * 1e6:.2f} us",
    )
    assert {"1 us", "10 us", "100 us", "1000 us", "10000 us"} <= set(texts(plot))


def test_ticks_of_a_narrow_logarithmic_axis():
    found = texts(draw(Series(name="a", points=((1, 31.0), (2, 32.0))), log_y=True))
    assert sum(text.replace(".", "").isdigit() for text in found) >= 6


def test_many_series_differ_by_color_or_marker():
    plot = draw(*(Series(name=f"s{i}", points=((i, i),)) for i in range(12)))
    looks = {(mark.attrib["class"], mark.attrib["d"].partition("m")[2]) for mark in marks(plot)}
    assert len(looks) == 12


def test_bars_or_labels_of_the_wrong_length_are_our_mistake():
    with pytest.raises(ValueError, match="2 bars for 1 points"):
        draw(Series(name="a", points=((1, 1),), bars=((1, 2), (3, 4))))


def test_light_and_dark():
    text = line_plot([], title="t", x_label="x", y_label="y")
    assert "prefers-color-scheme:dark" in text


def test_counts_have_no_ticks_between_them():
    plot = draw(Series(name="a", points=tuple((count, 0.5) for count in range(1, 17))))
    assert {"2", "4", "16"} <= set(texts(plot)) and "2.5" not in texts(plot)
    assert "2.5" in texts(draw(Series(name="a", points=((1.5, 0.5), (17, 0.5)))))


@pytest.mark.parametrize("last", [1, 2, 3, 17, 400, 100_000])
def test_counts_of_any_size_have_ticks(last):
    axis = Axis.around([1, last], log=False, start=0, end=100, limits=None)
    found = axis.ticks(whole=True)
    assert 1 <= len(found) <= 10 and all(value.is_integer() for value in found)


def test_texts_of_points_are_beside_each_other():
    points = ((1.0, 1.0), (1.0, 1.0), (1.2, 1.0), (10.0, 1.0))
    plot = draw(Series(name="a", points=points, texts=("first of two", "second of two", "near", "last"), line=False))
    where = [
        (element.text, float(element.attrib["x"]), float(element.attrib["y"]), element.attrib["text-anchor"])
        for element in plot.iter(f"{SPACE}text")
        if element.text in ("first of two", "second of two", "near", "last")
    ]
    assert len(where) == 4
    assert len({(round(y), anchor, round(x)) for _, x, y, anchor in where}) == 4
    rows = [round(y) for _, x, y, _ in where[:3]]
    assert len(set(rows)) > 1  # not over each other
    with pytest.raises(ValueError, match="1 texts for 2 points"):
        draw(Series(name="a", points=((1, 2), (2, 3)), texts=("one",)))
