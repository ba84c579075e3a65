"""What docs/kernels.md shows of products, experts and linear attention: plots, and the texts and tables beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kernel_curves import curves
from kernel_plots import Axis, Bar, Group, Panel, panels
from kernel_product_tables import LINEAR, SOFTMAX, flops_table, linear_table, teraflops

from nearpeak.render.scene import Scene

Row = Mapping[str, Any]
PRODUCT_COLOURS = {
    "nearpeak": "0",
    "cublas": "5",
    "cublas fused": "5",
    "cublas + torch": "ink",
    "cublas + nearpeak": "4",
    "cublas + liger": "2",
    "compile": "1",
    "max-autotune": "3",
    "scaled_mm": "5",
}
EXPERT_COLOURS = {
    "nearpeak": "0",
    "torch": "5",
    "torch + nearpeak": "4",
    "compile": "1",
    "max-autotune": "3",
    "liger": "2",
    "scaled_grouped_mm": "5",
}
LINEAR_COLOURS = dict(zip((*LINEAR, *SOFTMAX), ("0", "2", "3", "4", "5"), strict=True))
SIXTEEN = Axis(highest=900.0, lines={400.0: "400", 800.0: "800"})
EIGHT = Axis(highest=1800.0, lines={800.0: "800", 1600.0: "1600"})


def bars_scene(title: str, content: Row, rows: Sequence[Row], colours: Mapping[str, str], axis: Axis) -> Scene:
    """TFLOP/s, a panel for each operation and pass, a group of bars for each size and kind."""
    by_panel: dict[str, list[Group]] = {}
    for row in rows:
        bars = {}
        for way in row["seconds"]:
            rate = teraflops(row, way) or 0.0
            bars[way] = Bar(value=rate, text=f"{rate:.0f}", title=f"{way}, {row['size']} {row['kind']}: {rate:.1f}")
        name = row["operation"].removeprefix("grouped_product ").removeprefix("experts ")
        name = name.replace("grouped_product", "product")
        if row["pass"].startswith("by "):  # a gradient of the product
            name = row["pass"]
        panel = f"{name}, both" if row["pass"] == "both" else name
        by_panel.setdefault(panel, []).append(Group(label=row["kind"] or row["size"], bars=bars))
    described = f"{title} on an {content['machine']}: {', '.join(by_panel)}."
    used = {way: colour for way, colour in colours.items() if any(way in row["seconds"] for row in rows)}
    return panels(title, described, used, axis, [Panel(name=name, groups=groups) for name, groups in by_panel.items()])


def linear_scene(content: Row) -> Scene:
    rows = content["linear_attention"]
    shown = {}
    for step, name in (("forward", "Forward"), ("both", "Both passes")):
        mine = [row for row in rows if row["pass"] == step]
        shown[name] = {
            way: {row["tokens"]: row["seconds"][way] for row in mine if way in row["seconds"]} for way in LINEAR_COLOURS
        }
    title = "Causal linear attention and attention: time by tokens of a sequence"
    return curves(title, f"{title}, on an {content['machine']}.", LINEAR_COLOURS, shown)


def product_plots(content: Row) -> dict[str, Scene]:
    """By name of the file, what there is to see of these results."""
    found = {}
    for section, name, colours in (
        ("products", "Products of matrices", PRODUCT_COLOURS),
        ("experts", "Experts", EXPERT_COLOURS),
    ):
        for end, kind in (("", ""), ("_fused", ", with what follows"), ("_float8", ", float8")):
            rows = [row for row in content.get(section, ()) if _file_end(row["operation"]) == end]
            if rows:
                axis = EIGHT if end == "_float8" else SIXTEEN
                scene = bars_scene(f"{name}{kind}: TFLOP/s", content, rows, colours, axis)
                found[f"kernels_{section}{end}"] = scene
    if content.get("linear_attention"):
        found["kernels_linear_attention"] = linear_scene(content)
    return found


def _file_end(operation: str) -> str:
    """In which file an operation is."""
    if "fp8" in operation:
        return "_float8"
    return "_fused" if operation in ("swiglu", "bias gelu", "residual") else ""


def product_parts(content: Row) -> list[str]:
    """Paragraphs and tables, of what was measured."""
    pictures = product_plots(content)

    def shown(section: str) -> list[str]:
        names = [name for name in pictures if name.startswith(f"kernels_{section}")]
        return [f"![TFLOP/s of {section}](images/{name}.svg)" for name in names]

    found = []
    if content.get("products"):
        found += [
            *shown("products"),
            "**Products** of matrices, in bfloat16 and in float8, beside cuBLAS and what else there is. `exact` adds"
            " sums of 128 products in float32, `fast` leaves sums to the tensor cores.",
            flops_table(content["products"]),
        ]
    if content.get("experts"):
        found += [
            *shown("experts"),
            "**Experts**: grouped products and whole layers. Tokens choose experts evenly, uniformly at random, or by"
            " chances from Beta(1, 5). What products need to know of the rows of experts is made before.",
            flops_table(content["experts"]),
        ]
    if content.get("linear_attention"):
        row = content["linear_attention"][0]
        found += [
            "![Time of linear attention and attention by tokens](images/kernels_linear_attention.svg)",
            f"**Linear attention**, causal, {row['heads']} heads of {row['dim']}, beside the same written as its"
            " formula reads, with all weights written out, and beside attention by softmax: that of nearpeak, and what"
            " torch picks. `-` does not fit into memory.",
            linear_table(content["linear_attention"]),
        ]
    return found
