"""A scene as PNG: the shapes are where they should be, in their colors."""

import builtins
import io
import sys

import pytest

from nearpeak.errors import EnvironmentProblem
from nearpeak.render.picture.png import png
from nearpeak.render.picture.scene import Circle, Line, Polygon, Scene, Text

SHAPES = (
    Polygon(points=((10, 10), (30, 10), (30, 30), (10, 30)), fill="0"),
    Circle(x=60, y=20, radius=12, fill="1", opacity=0.5, stroke="1"),
    Line(points=((5, 50), (95, 50)), stroke="ink", width=4),
    Line(points=((5, 60), (95, 60)), stroke="ink", width=2, dashed=True),
    Text(x=50, y=80, text="words \u2713", anchor="middle", bold=True),
    Text(x=90, y=40, text="turned", angle=90, halo=True),
)
SCENE = Scene(width=100, height=90, described="shapes", shapes=SHAPES)


def drawn(**options):
    image = pytest.importorskip("PIL.Image")
    return image.open(io.BytesIO(png(SCENE, **options))).convert("RGB")


def near(found, expected):
    return all(abs(one - other) <= 3 for one, other in zip(found, expected, strict=True))


def test_size_and_page():
    image = drawn()
    assert image.size == (200, 180)
    assert drawn(scale=1).size == (100, 90)
    assert near(image.getpixel((2, 2)), (255, 255, 255))
    assert near(drawn(dark=True).getpixel((2, 2)), (0x16, 0x19, 0x1D))


def test_shapes_have_their_colors():
    image = drawn()
    assert near(image.getpixel((40, 40)), (0x00, 0x72, 0xB2))
    assert near(image.getpixel((120, 40)), (234, 174, 127))  # half of the color on white
    assert near(image.getpixel((100, 100)), (0x1F, 0x23, 0x28))


@pytest.mark.slow
def test_dashes_have_gaps():
    row = [sum(drawn(scale=1).getpixel((x, 60))) < 300 for x in range(5, 95)]
    assert any(row)
    assert not all(row)


def test_text_leaves_ink():
    image = drawn()
    assert any(sum(image.getpixel((x, y))) < 300 for x in range(60, 140) for y in range(140, 165))
    assert any(sum(image.getpixel((x, y))) < 400 for x in range(160, 185) for y in range(20, 80))


def test_without_pillow_it_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name == "PIL" or name.startswith("PIL."):
            raise ImportError(name)
        return real(name, *rest)

    for name in [name for name in sys.modules if name.split(".")[0] == "PIL"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(EnvironmentProblem, match=r"pip install 'nearpeak\[png\]'"):
        png(SCENE)
