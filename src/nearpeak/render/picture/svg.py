"""A scene as one SVG file: light and dark, light in print, everything escaped, no script."""

from __future__ import annotations

from nearpeak.render.picture.scene import PALETTE, Circle, Line, Point, Polygon, Scene, Shape, Text, escape_xml


def svg(scene: Scene) -> str:
    """The whole file."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {scene.width} {scene.height}" width="{scene.width}" '
        f'height="{scene.height}" role="img" aria-label="{escape_xml(scene.described)}" '
        'font-family="system-ui, sans-serif" style="max-width:100%;height:auto">'
    )
    page = f'<rect class="np-f-page" width="{scene.width}" height="{scene.height}"/>'
    return "\n".join([head, _style(), page, *map(_shape, scene.shapes), "</svg>"]) + "\n"


def _style() -> str:
    def rules(dark: int) -> str:
        return "".join(
            f".np-f-{name}{{fill:{pair[dark]}}}.np-s-{name}{{stroke:{pair[dark]}}}" for name, pair in PALETTE.items()
        )

    halo = ".np-halo{paint-order:stroke;stroke-width:3px;stroke-linejoin:round}"
    return f"<style>{rules(0)}{halo}@media screen and (prefers-color-scheme:dark){{{rules(1)}}}</style>"


def _shape(shape: Shape) -> str:
    if isinstance(shape, Text):
        return _text(shape)
    title = f"<title>{escape_xml(shape.title)}</title>" if shape.title else ""
    if isinstance(shape, Line):
        dashes = ' stroke-dasharray="6 4"' if shape.dashed else ""
        return (
            f'<path class="np-s-{shape.stroke}" fill="none" stroke-width="{_number(shape.width)}"{dashes} '
            f'd="M{_path(shape.points)}">{title}</path>'
        )
    edge = f' stroke-width="{_number(shape.width)}"' if shape.stroke else ""
    names = f"np-f-{shape.fill}" + (f" np-s-{shape.stroke}" if shape.stroke else "")
    inside = f' fill-opacity="{_number(shape.opacity, 2)}"' if shape.opacity < 1 else ""
    if isinstance(shape, Circle):
        place = f'cx="{_number(shape.x)}" cy="{_number(shape.y)}" r="{_number(shape.radius)}"'
        return f'<circle class="{names}"{inside}{edge} {place}>{title}</circle>'
    assert isinstance(shape, Polygon)
    return f'<path class="{names}"{inside}{edge} d="M{_path(shape.points)}Z">{title}</path>'


def _text(text: Text) -> str:
    names = f"np-f-{text.color}" + (" np-halo np-s-page" if text.halo else "")
    weight = ' font-weight="600"' if text.bold else ""
    turn = f' transform="rotate({_number(-text.angle)} {_number(text.x)} {_number(text.y)})"' if text.angle else ""
    anchor = f' text-anchor="{text.anchor}"' if text.anchor != "start" else ""
    return (
        f'<text class="{names}" x="{_number(text.x)}" y="{_number(text.y)}" font-size="{_number(text.size)}"'
        f"{anchor}{weight}{turn}>{escape_xml(text.text)}</text>"
    )


def _path(points: tuple[Point, ...]) -> str:
    return "L".join(f"{_number(x)} {_number(y)}" for x, y in points)


def _number(value: float, digits: int = 1) -> str:
    """Rounded, without an end that says nothing: 12.0 is "12", -0.0 is "0"."""
    text = f"{value:.{digits}f}".rstrip("0").rstrip(".") if digits else f"{value:.0f}"
    return "0" if text in ("-0", "") else text
