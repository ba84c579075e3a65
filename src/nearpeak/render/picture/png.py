"""A scene as a PNG, drawn by Pillow, which is optional: `pip install 'nearpeak[png]'`.

Shapes are drawn several times larger and then reduced, which is what makes their edges smooth.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nearpeak.errors import EnvironmentProblem
from nearpeak.render.picture.scene import PALETTE, Circle, Line, Point, Polygon, Scene, Shape, Text

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

SMOOTHING = 2
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}
_DASH, _GAP = 6.0, 4.0


def png(scene: Scene, *, scale: int = 2, dark: bool = False) -> bytes:
    """The file, with `scale` pixels for each of the scene's; for a dark page if asked."""
    try:
        from PIL import Image
    except ImportError:
        raise EnvironmentProblem(
            "A PNG is drawn by Pillow, which is not installed. Install it with `pip install 'nearpeak[png]'`, or "
            "write an .svg, which needs nothing."
        ) from None
    canvas = _Canvas(scene, scale * SMOOTHING, dark)
    for shape in scene.shapes:
        canvas.draw(shape)
    size = (scene.width * scale, scene.height * scale)
    reduced = canvas.image.resize(size, Image.Resampling.LANCZOS).convert("RGB")
    stream = io.BytesIO()
    reduced.save(stream, format="PNG", optimize=True)
    return stream.getvalue()


class _Canvas:
    """An image that is `scale` times as large as the scene."""

    def __init__(self, scene: Scene, scale: int, dark: bool) -> None:
        from PIL import Image

        self.scale = scale
        self.dark = dark
        size = (scene.width * scale, scene.height * scale)
        self.image = Image.new("RGBA", size, self._color("page"))

    def draw(self, shape: Shape) -> None:
        if isinstance(shape, Text):
            self._text(shape)
        elif isinstance(shape, Line):
            self._line(shape)
        elif isinstance(shape, Circle):
            x, y, radius = shape.x, shape.y, shape.radius
            box = (x - radius, y - radius, x + radius, y + radius)
            layer, draw, (left, top) = self._layer(box, shape.width)
            scaled = tuple(value * self.scale - start for value, start in zip(box, (left, top) * 2, strict=True))
            draw.ellipse(
                scaled,
                fill=self._color(shape.fill, shape.opacity),
                outline=self._color(shape.stroke) if shape.stroke else None,
                width=self._pixels(shape.width) if shape.stroke else 0,
            )
            self.image.alpha_composite(layer, (left, top))
        else:
            self._polygon(shape)

    def _polygon(self, shape: Polygon) -> None:
        columns, rows = [x for x, _ in shape.points], [y for _, y in shape.points]
        layer, draw, (left, top) = self._layer((min(columns), min(rows), max(columns), max(rows)), shape.width)
        scaled = [(x * self.scale - left, y * self.scale - top) for x, y in shape.points]
        draw.polygon(scaled, fill=self._color(shape.fill, shape.opacity))
        if shape.stroke:
            width = self._pixels(shape.width)
            draw.line([*scaled, *scaled[:2]], fill=self._color(shape.stroke), width=width, joint="curve")
        self.image.alpha_composite(layer, (left, top))

    def _line(self, shape: Line) -> None:
        from PIL import ImageDraw

        draw = ImageDraw.Draw(self.image)
        for piece in _dashes(shape.points) if shape.dashed else [shape.points]:
            scaled = [(x * self.scale, y * self.scale) for x, y in piece]
            draw.line(scaled, fill=self._color(shape.stroke), width=self._pixels(shape.width), joint="curve")

    def _text(self, text: Text) -> None:
        from PIL import Image, ImageDraw, ImageFont

        font = ImageFont.load_default(text.size * self.scale)
        color, halo = self._color(text.color), self._color("page")
        width = self._pixels(1.5) if text.halo else self._pixels(0.25) if text.bold else 0
        edge = halo if text.halo else color
        place, anchor = (text.x * self.scale, text.y * self.scale), _ANCHORS[text.anchor]
        content = "".join(c if " " <= c <= "~" else "?" for c in text.text)  # what the font is sure to have
        if not text.angle:
            draw = ImageDraw.Draw(self.image)
            draw.text(place, content, fill=color, font=font, anchor=anchor, stroke_width=width, stroke_fill=edge)
            return
        reach = math.ceil(font.getlength(content) + 2 * text.size * self.scale)
        layer = Image.new("RGBA", (2 * reach, 2 * reach), (*halo[:3], 0))
        ImageDraw.Draw(layer).text(
            (reach, reach), content, fill=color, font=font, anchor=anchor, stroke_width=width, stroke_fill=edge
        )
        turned = layer.rotate(text.angle, resample=Image.Resampling.BICUBIC)
        left, top = round(place[0]) - reach, round(place[1]) - reach
        inside = turned.crop((max(0, -left), max(0, -top), turned.width, turned.height))
        self.image.alpha_composite(inside, (max(0, left), max(0, top)))

    def _layer(
        self, box: tuple[float, float, float, float], width: float
    ) -> tuple[Image.Image, ImageDraw.ImageDraw, tuple[int, int]]:
        """A transparent image around a box, and where its corner lies: what is translucent is laid over the rest."""
        from PIL import Image, ImageDraw

        left, top = (max(0, math.floor((value - width) * self.scale)) for value in box[:2])
        right, bottom = (math.ceil((value + width) * self.scale) for value in box[2:])
        layer = Image.new("RGBA", (max(1, right - left), max(1, bottom - top)), (0, 0, 0, 0))
        return layer, ImageDraw.Draw(layer), (left, top)

    def _pixels(self, width: float) -> int:
        return max(1, round(width * self.scale))

    def _color(self, name: str, opacity: float = 1.0) -> tuple[int, int, int, int]:
        text = PALETTE[name][self.dark]
        red, green, blue = (int(text[digit : digit + 2], 16) for digit in (1, 3, 5))
        return red, green, blue, round(255 * opacity)


def _dashes(points: tuple[Point, ...]) -> Iterator[tuple[Point, Point]]:
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        length = math.hypot(x1 - x0, y1 - y0)
        reached = 0.0
        while reached < length:
            ends = (reached / length, min(1.0, (reached + _DASH) / length))
            start, end = ((x0 + (x1 - x0) * share, y0 + (y1 - y0) * share) for share in ends)
            yield start, end
            reached += _DASH + _GAP
