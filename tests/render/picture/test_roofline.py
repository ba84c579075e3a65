"""The roofline: what it shows, where, and that it is safe and readable."""

import dataclasses
import xml.etree.ElementTree as ElementTree
from collections import Counter
from typing import get_args

import pytest
from estimates import addition, copy, estimate, machine, op, product

from nearpeak.ops.cost import Family
from nearpeak.render.picture.roofline import BOTTOM, FAMILIES, RIGHT, TOP, WIDTH, estimate_points, estimate_roofs
from nearpeak.render.picture.scene import Circle, Line, Text, text_width
from nearpeak.render.picture.svg import svg
from nearpeak.render.text import packet_name
from nearpeak.render.views.estimate import roofline

SPACE = "{http://www.w3.org/2000/svg}"


def texts(scene):
    return [shape.text for shape in scene.shapes if isinstance(shape, Text)]


def circles(scene):
    return [shape for shape in scene.shapes if isinstance(shape, Circle) and shape.opacity < 1 and shape.title]


def test_layers_are_one_point():
    ops = [product(module=f"layers.{i}.mlp.up") for i in range(3)] + [product(module="layers.0.mlp.down")]
    found = estimate_points(estimate(ops))
    assert [(one.place, one.count) for one in found] == [("layers.*.mlp.up", 3), ("layers.*.mlp.down", 1)]
    assert [one.share for one in found] == pytest.approx([0.75, 0.25])


def test_a_point_is_at_its_intensity_and_its_rate():
    (found,) = estimate_points(estimate([product(), product()]))
    assert found.intensity == pytest.approx(1000)
    assert found.rate == pytest.approx(1e14)


def test_ops_beyond_the_most_are_one_for_each_family():
    ops = [product(module=f"a{chr(97 + i)}", seconds=1e-3 - i * 1e-5) for i in range(20)]
    found = estimate_points(estimate([*ops, addition(seconds=1e-9)]), most=5)
    assert len(found) == 5 + 2
    assert sum(one.count for one in found) == 21
    assert {"other matrix", "other pointwise"} <= {one.name for one in found}
    assert sum(one.share for one in found) == pytest.approx(1)


def test_roofs_of_one_rate_are_one_and_unused_ones_are_known():
    limits = machine().achievable
    found = [(roof.name, roof.used) for roof in estimate_roofs(estimate([product()]), limits)]
    assert found == [("float8 matrix", False), ("bfloat16, float16 matrix", True), ("float32 vector", False)]


def test_a_dtype_without_a_matrix_engine_uses_the_vector_units():
    found = estimate_roofs(estimate([product(dtype="float32")]), machine().achievable)
    assert [roof.name for roof in found if roof.used] == ["float32 vector"]


def test_what_is_drawn_lies_on_its_roof():
    scene = roofline(estimate([product(), addition()]), machine())
    matrix, vector = circles(scene)
    lines = [shape for shape in scene.shapes if isinstance(shape, Line) and shape.title]
    flat = next(line for line in lines if "bfloat16" in line.title)
    assert matrix.y == pytest.approx(flat.points[0][1])
    slope = next(line for line in lines if line.title.startswith("memory"))
    (x0, y0), (x1, y1) = slope.points
    assert vector.y == pytest.approx(y0 + (vector.x - x0) / (x1 - x0) * (y1 - y0), abs=0.1)


def test_areas_are_shares():
    scene = roofline(estimate([product(seconds=9e-3), addition()]), machine())
    large, small = (circle.radius for circle in circles(scene))
    assert (large / small) ** 2 == pytest.approx(9)


def test_ops_without_flops_have_a_column_and_their_share_is_said():
    scene = roofline(estimate([product(), copy()]), machine())
    assert {"no FLOP", "clone", "50.0 %"} <= set(texts(scene))
    assert "50.0 % of the time goes to ops that compute nothing" in " ".join(texts(scene))
    assert "no FLOP" not in texts(roofline(estimate([product()]), machine()))


def test_only_ops_without_flops():
    assert "clone" in texts(roofline(estimate([copy()]), machine()))


def test_the_cache_has_a_roof_where_it_is_known():
    titles = [
        shape.title for shape in roofline(estimate([addition()]), machine(4e12)).shapes if isinstance(shape, Line)
    ]
    assert "last-level cache: 4.00 TB/s" in titles
    titles = [shape.title for shape in roofline(estimate([addition()]), machine()).shapes if isinstance(shape, Line)]
    assert not any("cache" in title for title in titles)


def test_what_the_cache_serves_is_explained():
    served = addition(seconds=1e-4)
    assert any("above the memory's roof" in text for text in texts(roofline(estimate([served]), machine())))
    assert not any("above the memory's roof" in text for text in texts(roofline(estimate([addition()]), machine())))


def test_ridges_are_written_at_the_foot():
    assert "ridge 100" in texts(roofline(estimate([product()]), machine()))


def test_families_differ_by_color_or_form():
    families = set(get_args(Family)) - {"view"}  # a view takes no time
    assert families == set(FAMILIES)
    text = svg(roofline(estimate([addition(family=family) for family in FAMILIES]), machine()))
    tree = ElementTree.fromstring(text)
    legend = [
        (shape.tag, shape.attrib["class"], _form(shape))
        for shape in tree.iter()
        if "np-s-page" in shape.attrib.get("class", "") and shape.tag != f"{SPACE}text"
        if shape.find(f"{SPACE}title") is None
    ]
    assert len(legend) == len(FAMILIES)
    assert max(Counter(legend).values()) == 1


def _form(shape):
    """The corners relative to the first, so that the place does not matter."""
    if "d" not in shape.attrib:
        return "circle"
    corners = [tuple(map(float, pair.split())) for pair in shape.attrib["d"].strip("MZ").split("L")]
    return tuple((round(x - corners[0][0]), round(y - corners[0][1])) for x, y in corners)


@pytest.mark.parametrize("count", [0, 1, 60])
def test_names_do_not_cover_each_other(count):
    ops = [
        product(module=f"block{chr(97 + i % 26)}.part{i // 26}x", flops=1e11 * (1 + i % 7), seconds=1e-3 * (1 + i % 5))
        for i in range(count)
    ]
    ops += [addition(module=f"other{chr(97 + i)}", seconds=1e-3 + 1e-4 * i) for i in range(count and 8)]
    scene = roofline(estimate(ops), machine())
    boxes = []
    for shape in scene.shapes:
        if isinstance(shape, Text) and shape.halo and not shape.angle and TOP < shape.y < BOTTOM:
            wide = text_width(shape.text, shape.size)
            left = shape.x - (wide if shape.anchor == "end" else 0)
            boxes.append((left, shape.y - shape.size, left + wide, shape.y))
    assert count < 2 or len(boxes) >= 3
    for i, a in enumerate(boxes):
        for b in boxes[i + 1 :]:
            assert not (a[0] < b[2] and b[0] < a[2] and a[1] < b[3] - 1 and b[1] < a[3] - 1), (a, b)


def test_hostile_names_are_escaped():
    hostile = "</script><b>&\"'\x00\x1b"
    scene = roofline(
        estimate([op(f"mine.{hostile}.default", module=hostile), copy(name=hostile)]), machine(), title=hostile
    )
    text = svg(scene)
    tree = ElementTree.fromstring(text)
    assert not list(tree.iter(f"{SPACE}b"))
    assert "<script" not in text
    assert "nan" not in text.lower().replace("bf16", "")


def test_it_says_so_when_there_is_nothing():
    assert "nothing to show" in texts(roofline(estimate([]), machine()))


def test_work_without_bytes_is_at_the_right_edge():
    scene = roofline(estimate([product(), product(bytes_read=0.0, bytes_written=0.0, module="inside")]), machine())
    inside, beyond = sorted(circle.x for circle in circles(scene))
    assert beyond == WIDTH - RIGHT
    assert inside < beyond


def test_light_dark_and_print():
    text = svg(roofline(estimate([product()]), machine()))
    assert "@media screen and (prefers-color-scheme:dark)" in text


@pytest.mark.parametrize(
    ("name", "short"),
    [("aten.mul.Tensor", "mul"), ("mine.kernel.default", "mine.kernel"), ("plain", "plain"), ("a.b", "a.b")],
)
def test_short_names(name, short):
    assert packet_name(name) == short


def test_circles_stay_inside_the_frame():
    for circle in circles(roofline(estimate([product(engine="matrix", dtype="float8", flops=2e11)]), machine())):
        assert circle.y - circle.radius > TOP
        assert circle.x + circle.radius < WIDTH - RIGHT


def test_a_slow_roof_that_nobody_uses_does_not_stretch_the_picture():
    slow = dataclasses.replace(machine().achievable, vector={"float32": 1e13, "int8": 1e3})
    scene = roofline(estimate([product()]), dataclasses.replace(machine(), achievable=slow))
    assert not any("int8" in text for text in texts(scene))
    assert any("fp32" in text for text in texts(scene)) is False  # below the only point too
    assert any("fp8" in text for text in texts(scene))
