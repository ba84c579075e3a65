"""Stacked bars: names have room, and what one color is needs saying only where there are two."""

from __future__ import annotations

from nearpeak.render.picture.bars import MARGIN, WIDTH, Bar, stacked_bars
from nearpeak.render.picture.scene import Polygon, Scene, Text, text_width
from nearpeak.units import seconds


def drawn(*bars: Bar) -> Scene:
    return stacked_bars(bars, title="title", subtitle="", shown=seconds)


def test_a_long_name_is_inside_of_the_picture():
    scene = drawn(Bar(name="ZeRO 3, checkpoint", pieces=(("a", 1.0), ("b", 2.0))))
    (name,) = (shape for shape in scene.shapes if isinstance(shape, Text) and shape.text == "ZeRO 3, checkpoint")
    assert name.anchor == "end" and name.x - text_width(name.text, 12) >= MARGIN
    boxes = [shape for shape in scene.shapes if isinstance(shape, Polygon)]
    assert all(name.x < x < WIDTH for box in boxes[2:] for x, _ in box.points)  # the first two are the legend's


def test_one_piece_has_no_legend():
    one = drawn(Bar(name="bar", pieces=(("seconds", 1.0),)))
    assert "seconds" not in {shape.text for shape in one.shapes if isinstance(shape, Text)}
    two = drawn(Bar(name="bar", pieces=(("a", 1.0), ("b", 1.0))))
    assert {"a", "b"} <= {shape.text for shape in two.shapes if isinstance(shape, Text)}


def test_sums_of_bars_are_inside_of_the_picture():
    bars = (Bar(name="long", pieces=(("a", 0.2), ("b", 0.3))), Bar(name="short", pieces=(("a", 0.1), ("b", 0.1))))
    scene = stacked_bars(bars, title="title", subtitle="", shown=seconds, totals=True)
    sums = [shape for shape in scene.shapes if isinstance(shape, Text) and shape.bold and shape.halo]
    assert [one.text for one in sums] == ["500 ms", "200 ms"]
    assert all(one.x + text_width(one.text, 12) < WIDTH for one in sums)
