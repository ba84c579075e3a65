"""The results of `benchmarks.kernels` in docs/kernels.md, and their plots.

    python -m benchmarks.pages.kernels benchmarks/results/kernels_h200.json

writes docs/images/kernels_forward.svg, kernels_backward.svg and those of attention, products, experts and linear
attention, and replaces what stands between the marks of the page, from benchmarks/results/kernels_random_h200.json what
random cells gave. A test holds the page to the data.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kernels import score
from benchmarks.kernels.drawing import HEAD_SIZES, RANGES
from benchmarks.kernels.tables import (
    ATTENTION_WAYS,
    LINEAR,
    SOFTMAX,
    attention_table,
    cell,
    copies_table,
    decoding_table,
    flops_table,
    head_line,
    launches_table,
    linear_table,
    losses_table,
    memory_table,
    rows_table,
    teraflops,
)
from benchmarks.markdown_table import table
from benchmarks.pages.plots import Bar, BarAxis, BarGroup, BarPanel, bar_panels, curves
from nearpeak.render.picture.scene import Scene
from nearpeak.render.picture.svg import svg

Row = Mapping[str, Any]
COLORS = dict(zip(ATTENTION_WAYS, ("0", "4", "1", "2", "5"), strict=True))
RATES = BarAxis(highest=750.0, lines={300.0: "300", 600.0: "600"})
SHARES = BarAxis(highest=1.1, lines={0.5: "50 %", 1.0: "100 %"})
CACHES = {"one piece": "0", "pages of 1": "1", "pages of 16": "2", "pages of 256": "3", "sdpa of torch": "5"}


def attention_scene(content: Row, name: str) -> Scene:
    """TFLOP/s of one pass, a panel for each size of heads and mask."""
    rows = [row for row in content["attention"] if row["pass"] == name]
    by_panel: dict[str, list[BarGroup]] = {}
    for row in rows:
        rates = {way: teraflops(row, way) for way in ATTENTION_WAYS}
        bars = {
            way: Bar(value=rate, text=f"{rate:.0f}", title=f"{way}, {cell(row)}: {rate:.1f} TFLOP/s")
            for way, rate in rates.items()
            if rate is not None
        }
        group = BarGroup(label=f"{row['batch']} x {row['tokens']}", bars=bars)
        by_panel.setdefault(f"{row['dim']} {'causal' if row['causal'] else 'full'}", []).append(group)
    title = f"Attention, {name} pass: TFLOP/s"
    described = f"{title} in bfloat16 on an {content['machine']}, for heads of {', '.join(by_panel)}."
    shown = [BarPanel(name=panel, groups=groups) for panel, groups in by_panel.items()]
    return bar_panels(title, described, COLORS, RATES, shown)


def decoding_scene(content: Row) -> Scene:
    """Shares of a copy, a panel for each dtype of the cache."""
    shown = []
    for dtype, start in (("bfloat16", ""), ("float8", "float8, ")):
        groups = []
        for row in content["decoding"]:
            bars = {}
            for way in CACHES:
                key = {"one piece": "float8" if start else "nearpeak", "sdpa of torch": "sdpa"}.get(way, start + way)
                share = row["of_copy"].get(key)
                if share is not None and not (start and key == "sdpa"):
                    title = f"{start}{way}, {row['batch']} x {row['tokens']}: {row['seconds'][key] * 1e6:.1f} us"
                    bars[way] = Bar(value=share, text=f"{share * 100:.0f}", title=title)
            groups.append(BarGroup(label=f"{row['batch']} x {row['tokens']}", bars=bars))
        shown.append(BarPanel(name=dtype, groups=groups))
    title = "Decoding: bytes of the cache, by time, as a share of a copy"
    described = f"{title}, on an {content['machine']}, by dtype of the cache and number of tokens."
    return bar_panels(title, described, CACHES, SHARES, shown)


def attention_plots(content: Row) -> dict[str, Scene]:
    """By name of the file, what there is to see of these results."""
    plots = {}
    if content.get("attention"):
        plots = {f"kernels_attention_{name}": attention_scene(content, name) for name in ("forward", "backward")}
    if content.get("decoding"):
        plots["kernels_decoding"] = decoding_scene(content)
    return plots


def attention_parts(content: Row) -> list[str]:
    """Paragraphs and tables, of what was measured."""
    parts = []
    if content.get("attention"):
        parts += [
            f"![TFLOP/s of attention, {name} pass](images/kernels_attention_{name}.svg)"
            for name in ("forward", "backward")
        ]
        repeats = {row["repeated"]["runs"] for row in content["attention"]}
        different = sum(row["repeated"]["different"] for row in content["attention"] if row["pass"] == "forward")
        parts += [
            "**Attention**, in bfloat16: TFLOP/s of nearpeak, of its portable kernels, and in torch of cuDNN,"
            " FlashAttention-2 and FlexAttention. Causal attention counts as half. The gradients of nearpeak are summed"
            f" in a fixed order: of {max(repeats)} runs of both passes in each cell {different or 'none'} had another"
            " result than the first.",
            attention_table(content["attention"]),
        ]
    if content.get("decoding"):
        row = content["decoding"][0]
        parts += [
            "![Share of a copy of decoding, by kind of cache](images/kernels_decoding.svg)",
            f"**Decoding**, one new token for each sequence: {row['heads']} heads of queries and {row['key_heads']} of"
            f" keys, of {row['dim']}. Pages lie in memory in a random order. The error of float8 is that of its keys"
            " and values.",
            decoding_table(content["decoding"]),
        ]
    if content.get("attention_memory"):
        parts += [
            "**Memory** of causal attention of one head beyond its inputs: results and gradients count.",
            memory_table(content["attention_memory"]),
        ]
    return parts


PRODUCT_COLORS = {
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
EXPERT_COLORS = {
    "nearpeak": "0",
    "torch": "5",
    "torch + nearpeak": "4",
    "compile": "1",
    "max-autotune": "3",
    "liger": "2",
    "scaled_grouped_mm": "5",
}
LINEAR_COLORS = dict(zip((*LINEAR, *SOFTMAX), ("0", "2", "3", "4", "5"), strict=True))
SIXTEEN = BarAxis(highest=900.0, lines={400.0: "400", 800.0: "800"})
EIGHT = BarAxis(highest=1800.0, lines={800.0: "800", 1600.0: "1600"})


def bars_scene(title: str, content: Row, rows: Sequence[Row], colors: Mapping[str, str], axis: BarAxis) -> Scene:
    """TFLOP/s, a panel for each operation and pass, a group of bars for each size and kind."""
    by_panel: dict[str, list[BarGroup]] = {}
    for row in rows:
        bars = {}
        for way in row["seconds"]:
            rate = teraflops(row, way) or 0.0
            bars[way] = Bar(value=rate, text=f"{rate:.0f}", title=f"{way}, {row['size']} {row['kind']}: {rate:.1f}")
        name = row["operation"].removeprefix("grouped_gemm ").removeprefix("experts ")
        name = name.replace("grouped_gemm", "gemm")
        if row["pass"].startswith("by "):  # a gradient of the product
            name = row["pass"]
        panel = f"{name}, both" if row["pass"] == "both" else name
        by_panel.setdefault(panel, []).append(BarGroup(label=row["kind"] or row["size"], bars=bars))
    described = f"{title} on an {content['machine']}: {', '.join(by_panel)}."
    used = {way: color for way, color in colors.items() if any(way in row["seconds"] for row in rows)}
    return bar_panels(
        title, described, used, axis, [BarPanel(name=name, groups=groups) for name, groups in by_panel.items()]
    )


def linear_scene(content: Row) -> Scene:
    rows = content["linear_attention"]
    shown = {}
    for step, name in (("forward", "Forward"), ("both", "Both passes")):
        mine = [row for row in rows if row["pass"] == step]
        shown[name] = {
            way: {row["tokens"]: row["seconds"][way] for row in mine if way in row["seconds"]} for way in LINEAR_COLORS
        }
    title = "Causal linear attention and attention: time by tokens of a sequence"
    return curves(title, f"{title}, on an {content['machine']}.", LINEAR_COLORS, shown)


def product_plots(content: Row) -> dict[str, Scene]:
    """By name of the file, what there is to see of these results."""
    plots = {}
    for section, name, colors in (
        ("products", "Products of matrices", PRODUCT_COLORS),
        ("experts", "Experts", EXPERT_COLORS),
    ):
        for end, kind in (("", ""), ("_fused", ", with what follows"), ("_float8", ", float8")):
            rows = [row for row in content.get(section, ()) if _file_end(row["operation"]) == end]
            if rows:
                axis = EIGHT if end == "_float8" else SIXTEEN
                scene = bars_scene(f"{name}{kind}: TFLOP/s", content, rows, colors, axis)
                plots[f"kernels_{section}{end}"] = scene
    if content.get("linear_attention"):
        plots["kernels_linear_attention"] = linear_scene(content)
    return plots


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

    parts = []
    if content.get("products"):
        parts += [
            *shown("products"),
            "**Products** of matrices, in bfloat16 and in float8, beside cuBLAS and what else there is. `exact` adds"
            " sums of 128 products in float32, `fast` leaves sums to the tensor cores.",
            flops_table(content["products"]),
        ]
    if content.get("experts"):
        parts += [
            *shown("experts"),
            "**Experts**: grouped products and whole layers. Tokens choose experts evenly, uniformly at random, or by"
            " chances from Beta(1, 5). What products need to know of the rows of experts is made before.",
            flops_table(content["experts"]),
        ]
    if content.get("linear_attention"):
        row = content["linear_attention"][0]
        parts += [
            "![Time of linear attention and attention by tokens](images/kernels_linear_attention.svg)",
            f"**Linear attention**, causal, {row['heads']} heads of {row['dim']}, beside the same written as its"
            " formula reads, with all weights written out, and beside attention by softmax: that of nearpeak, and what"
            " torch picks. `-` does not fit into memory.",
            linear_table(content["linear_attention"]),
        ]
    return parts


ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "kernels.md"
RESULT = ROOT / "benchmarks" / "results" / "kernels_h200.json"
IMAGES = ROOT / "docs" / "images"
BEGIN, END = "<!-- results -->", "<!-- /results -->"
RANDOM_RESULT = ROOT / "benchmarks" / "results" / "kernels_random_h200.json"
RANDOM_BEGIN, RANDOM_END = "<!-- random cells -->", "<!-- /random cells -->"
RANDOM_NOT_YET = "Not measured yet."
NOT_YET = "Not on this page yet: results will be here, each with the command that gave it."
PASSES = ("forward", "backward")
ROW_WAYS = {"nearpeak": "0", "eager": "5", "compile": "1", "liger": "2"}
"""The ways of the plot, with the numbers of their colors."""


def plot(content: Row, name: str) -> str:
    """The plot of one pass, as an SVG file."""
    return svg(scene(content, name))


def scene(content: Row, name: str) -> Scene:
    """Shares of a copy, one panel for each operation, a group of bars for each size, a bar for each way."""
    rows = [row for row in content["rows"] if row["pass"] == name]
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    title = f"{name.capitalize()} pass: bytes that must move, by time, as a share of a copy"
    described = f"{title}, of {len(operations)} operations on an {content['machine']}: {', '.join(operations)}."
    shown = [
        BarPanel(name=operation, groups=[_group(row, content) for row in rows if row["operation"] == operation])
        for operation in operations
    ]
    return bar_panels(title, described, ROW_WAYS, SHARES, shown)


def _group(row: Row, content: Row) -> BarGroup:
    size = f"{row['rows']} x {row['columns']}"
    bars = {}
    for way, seconds in row["seconds"].items():
        share = row["bytes"] / seconds / content["copy_bytes_per_second"]
        title = f"{way}, {row['operation']} {size}: {seconds * 1e6:.1f} us, {share * 100:.0f} %"
        bars[way] = Bar(value=share, text=f"{share * 100:.0f}", title=title)
    return BarGroup(label=size, bars=bars)


def part(content: Row | None) -> str:
    """What stands between the marks."""
    if content is None:
        return NOT_YET
    pictures = [
        f"![Share of a copy of each operation on rows, {name} pass](images/kernels_{name}.svg)" for name in PASSES
    ]
    return "\n\n".join(
        [
            head_line(content) + ".",
            *pictures,
            "**Operations on rows**, in bfloat16. The last column is how many times as long the fastest of the others"
            " takes; `-` is what a library does not take.",
            rows_table(content["rows"]),
            "**Losses**, both passes together, in bfloat16. Memory is what is taken beyond inputs, and beyond gradients"
            " where the logits are no input.",
            losses_table(content["losses"]),
            "**Copies.** Of a tensor with one scale for the whole, which is read twice, 5 bytes are counted for each"
            " element; of AdamW, 7 numbers for each parameter.",
            copies_table(content["copies"]),
            *attention_parts(content),
            *product_parts(content),
            "**Calls** of operations on 256 x 256 without gradients, on the host.",
            launches_table(content["launch"]),
        ]
    )


def page_with_results(text: str, content: Row | None) -> str:
    """The page with what stands between the marks replaced."""
    return _replaced(text, BEGIN, END, part(content))


def page_with_random(text: str, content: Row | None) -> str:
    return _replaced(text, RANDOM_BEGIN, RANDOM_END, random_part(content))


def _replaced(text: str, begin: str, end: str, content: str) -> str:
    before, rest = text.split(begin, 1)
    after = rest.split(end, 1)[1]
    return f"{before}{begin}\n\n{content}\n\n{end}{after}"


def random_results() -> Row | None:
    """The published results of random cells, if there are any."""
    if not RANDOM_RESULT.exists():
        return None
    content: Row = json.loads(RANDOM_RESULT.read_text(encoding="utf-8"))
    return content


def random_part(content: Row | None) -> str:
    """What is drawn, which seeds are for what, and the results."""
    heads = ", ".join(f"{dim}" if dim == values else f"{dim} (values of {values})" for dim, values in HEAD_SIZES)
    parts = [
        "Sizes are log-uniform within these ranges, heads are of " + heads + ". Work and memory of a cell are limited.",
        table(["operation", "what is drawn"], [[f"`{names}`", what] for names, what in RANGES.items()], 2),
        f"Kernels and the choice between backends are tuned on cells of seeds {min(score.TUNING_SEEDS)} to"
        f" {max(score.TUNING_SEEDS)}; the cells here are of other seeds. The ratio of a cell is the time of the fastest"
        " peer over that of nearpeak. Cells that no peer runs are counted apart; `short` are those where nearpeak or"
        " the fastest peer takes less than 10 us.",
    ]
    if content is None:
        return "\n\n".join([*parts, RANDOM_NOT_YET])
    rows = content["cells"]
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    parts += [
        f"{content['machine']}, {versions}, {content['date'][:10]}; {score.runs_text(content)}.",
        score.operations_table(rows),
    ]
    if any(score.head_name(row) for row in rows):
        parts += ["Attention by size of heads:", score.heads_table(rows)]
    parts += ["The slowest cells:", score.worst_table(rows)]
    parts += [
        "In how many cells each peer ran, could not, was not compiled in time, and was the fastest peer:",
        score.peers_table(rows),
    ]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="what benchmarks.kernels --json wrote")
    content = json.loads(parser.parse_args().results.read_text(encoding="utf-8"))
    IMAGES.mkdir(exist_ok=True)
    for name in PASSES:
        (IMAGES / f"kernels_{name}.svg").write_text(plot(content, name), encoding="utf-8")
    for file, picture in (attention_plots(content) | product_plots(content)).items():
        (IMAGES / f"{file}.svg").write_text(svg(picture), encoding="utf-8")
    text = page_with_results(PAGE.read_text(encoding="utf-8"), content)
    PAGE.write_text(page_with_random(text, random_results()), encoding="utf-8")


if __name__ == "__main__":
    main()
