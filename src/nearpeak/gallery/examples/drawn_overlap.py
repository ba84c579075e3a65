"""A drawing for `flash_attention`: products and exponentials one after the other, and overlapped."""

from __future__ import annotations

from nearpeak.gallery.parts import Drawing
from nearpeak.render.scene import Polygon, Scene, Shape, Text
from nearpeak.render.svg import svg


def timeline(products: float, exponentials: float) -> Drawing:
    """One after the other, and two groups in turns; widths are as the times."""
    scale = 640 / (4 * (products + exponentials))
    wide, narrow = products * scale, exponentials * scale
    period = max(wide, narrow)
    shapes: list[Shape] = [Text(x=28, y=32, text="Products and exponentials of four blocks", size=17, bold=True)]
    plans = [("in turn", [number * (wide + narrow) for number in range(4)])]
    plans += [(f"group {group + 1}", [(2 * turn + group) * period for turn in range(2)]) for group in range(2)]
    for row, (name, starts) in enumerate(plans):
        top = 56 + 44 * row
        shapes.append(Text(x=28, y=top + 19, text=name, colour="muted"))
        for start in starts:
            for left, width, colour, text in ((0.0, wide, "0", "products"), (wide, narrow, "1", "exp")):
                begin = 110 + start + left
                corners = ((begin, top), (begin + width, top), (begin + width, top + 28), (begin, top + 28))
                shapes.append(Polygon(points=corners, fill=colour, opacity=0.8, stroke="page", title=text))
                if width > 8 * len(text):
                    shapes.append(Text(x=begin + width / 2, y=top + 18, text=text, size=11, anchor="middle", halo=True))
    described = "Products and exponentials of four blocks: in turn, and of two groups, one's below the other's."
    return Drawing(
        title="Overlap of two groups",
        described=described,
        svg=svg(Scene(width=800, height=200, described=described, shapes=tuple(shapes))),
    )
