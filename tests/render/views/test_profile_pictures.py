"""The waterfall and the roofline of a profile as pictures."""

import dataclasses
import xml.etree.ElementTree as ElementTree

import pytest
from synthetic import profile  # type: ignore[import-not-found]

from nearpeak.errors import UsageError
from nearpeak.machines.catalogue import find
from nearpeak.profiles.waterfall import build_waterfall
from nearpeak.render.picture.roofline import BOTTOM, TOP
from nearpeak.render.picture.scene import Circle, Line, Polygon, Text, text_width
from nearpeak.render.picture.svg import svg
from nearpeak.render.views.profile import select_findings
from nearpeak.render.views.profile_pictures import LEFT, RIGHT, WIDTH, profile_roofline, profile_waterfall
from nearpeak.units import seconds


def bars(scene):
    """From where to where each bar goes, by what its title begins with."""
    found = {}
    for shape in scene.shapes:
        if isinstance(shape, Polygon):
            columns = [x for x, _ in shape.points]
            found[shape.title.partition(":")[0]] = (min(columns), max(columns))
    return found


def texts(scene):
    return [shape.text for shape in scene.shapes if isinstance(shape, Text)]


def test_bars_follow_each_other_and_fill_the_wall():
    made = profile(200)
    found = bars(profile_waterfall(made))
    assert found.pop("wall") == (LEFT, WIDTH - RIGHT)
    assert list(found) == [part.name for part in made.waterfall.parts if part.seconds > 0]
    reached = LEFT
    for name, (begin, end) in found.items():
        assert begin == pytest.approx(reached, abs=0.01)
        share = made.waterfall.seconds(name) / made.wall_s
        assert end - begin == pytest.approx(share * (WIDTH - RIGHT - LEFT), abs=0.01)
        reached = end
    assert reached == pytest.approx(WIDTH - RIGHT, abs=0.01)


def test_it_says_the_figures_and_why():
    made = profile(200)
    scene = profile_waterfall(made, select_findings(made))
    said = texts(scene)
    assert {part.name for part in made.waterfall.parts} | {"wall", "Why", "Next"} <= set(said)
    assert seconds(made.wall_s) in said
    assert "below." not in " ".join(said)
    assert f"idle {seconds(made.waterfall.seconds('idle'))}" in scene.described
    assert scene.described.startswith("Waterfall of a step of train.py: ")


def test_nothing_is_written_beyond_the_edge():
    made = profile(200, name="{} " + "wide " * 200)
    for scene in (profile_waterfall(made, select_findings(made)), profile_waterfall(profile(0))):
        for shape in scene.shapes:
            if isinstance(shape, Text) and shape.anchor == "start":
                assert shape.x + 0.9 * text_width(shape.text, shape.size) < WIDTH
            if isinstance(shape, Text):
                assert 0 < shape.y < scene.height


def test_a_part_below_zero_is_called_a_bug_and_has_no_bar():
    parts = {"wall_s": 1.0, "ideal_s": 0.5, "fused_s": 0.6, "as_written_s": 0.9, "modeled_s": 0.7, "kernel_s": 0.7}
    scene = profile_waterfall(dataclasses.replace(profile(50), wall_s=1.0, waterfall=build_waterfall(**parts)))
    assert "slow kernels" not in bars(scene)
    assert "below zero: measure this machine again" in texts(scene)


def test_points_are_where_they_were_measured_and_below_the_roofs():
    made = profile(200)
    scene = profile_roofline(made, find("h200-sxm"))
    circles = [shape for shape in scene.shapes if isinstance(shape, Circle) and shape.title and shape.opacity < 1]
    assert len(circles) > 10
    roof = next(
        shape for shape in scene.shapes if isinstance(shape, Line) and shape.title.startswith("memory: 4.70 TB/s")
    )
    (x0, y0), (x1, y1) = roof.points
    for circle in circles:
        if x0 < circle.x < x1:
            assert circle.y > y0 + (circle.x - x0) * (y1 - y0) / (x1 - x0)
        assert TOP <= circle.y <= BOTTOM
    assert "FLOP/s as measured" in texts(scene)
    assert any(text.endswith("of the kernel time") for text in texts(scene))


def test_the_roofs_that_bounds_are_against_are_drawn_as_used():
    scene = profile_roofline(profile(200), find("h200-sxm"))
    bold = {shape.text for shape in scene.shapes if isinstance(shape, Text) and shape.bold}
    assert "bf16, fp16 matrix 930 T" in bold
    assert not any(text.startswith("fp64") for text in bold)


def test_a_machine_that_only_the_rates_tell_of_has_a_roofline():
    made = dataclasses.replace(profile(200), machine="my-own")
    assert "memory: 4.70 TB/s" in texts(profile_roofline(made, None))


def test_without_ceilings_it_says_so():
    with pytest.raises(UsageError, match="no roofline for my-own"):
        profile_roofline(dataclasses.replace(profile(20), machine="my-own", ceilings=None), None)


@pytest.mark.parametrize("name", ["</svg><script>alert(1)</script>{}", "\u202e{}", '"{}\n&', "{}" + "x" * 10_000])
def test_hostile_names_are_only_text(name):
    made = profile(100, name=name)
    for scene in (profile_waterfall(made, select_findings(made)), profile_roofline(made, None)):
        written = svg(scene)
        tags = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(written).iter()}
        assert tags <= {"svg", "style", "rect", "path", "circle", "text", "title"}
        assert "\u202e" not in written
        assert len(written) < 300_000
