"""What docs/kernels.md shows of attention and decoding: plots, and the texts and tables beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernel_attention_tables import WAYS, attention_table, cell, decoding_table, memory_table, teraflops
from kernel_plots import Axis, Bar, Group, Panel, panels

from nearpeak.render.scene import Scene

Row = Mapping[str, Any]
COLOURS = dict(zip(WAYS, ("0", "4", "1", "2", "5"), strict=True))
RATES = Axis(highest=750.0, lines={300.0: "300", 600.0: "600"})
SHARES = Axis(highest=1.1, lines={0.5: "50 %", 1.0: "100 %"})
CACHES = {"one piece": "0", "pages of 1": "1", "pages of 16": "2", "pages of 256": "3", "sdpa of torch": "5"}


def attention_scene(content: Row, name: str) -> Scene:
    """TFLOP/s of one pass, a panel for each size of heads and mask."""
    rows = [row for row in content["attention"] if row["pass"] == name]
    by_panel: dict[str, list[Group]] = {}
    for row in rows:
        rates = {way: teraflops(row, way) for way in WAYS}
        bars = {
            way: Bar(value=rate, text=f"{rate:.0f}", title=f"{way}, {cell(row)}: {rate:.1f} TFLOP/s")
            for way, rate in rates.items()
            if rate is not None
        }
        group = Group(label=f"{row['batch']} x {row['tokens']}", bars=bars)
        by_panel.setdefault(f"{row['dim']} {'causal' if row['causal'] else 'full'}", []).append(group)
    title = f"Attention, {name} pass: TFLOP/s"
    described = f"{title} in bfloat16 on an {content['machine']}, for heads of {', '.join(by_panel)}."
    shown = [Panel(name=panel, groups=groups) for panel, groups in by_panel.items()]
    return panels(title, described, COLOURS, RATES, shown)


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
            groups.append(Group(label=f"{row['batch']} x {row['tokens']}", bars=bars))
        shown.append(Panel(name=dtype, groups=groups))
    title = "Decoding: bytes of the cache, by time, as a share of a copy"
    described = f"{title}, on an {content['machine']}, by dtype of the cache and number of tokens."
    return panels(title, described, CACHES, SHARES, shown)


def attention_plots(content: Row) -> dict[str, Scene]:
    """By name of the file, what there is to see of these results."""
    found = {}
    if content.get("attention"):
        found = {f"kernels_attention_{name}": attention_scene(content, name) for name in ("forward", "backward")}
    if content.get("decoding"):
        found["kernels_decoding"] = decoding_scene(content)
    return found


def attention_parts(content: Row) -> list[str]:
    """Paragraphs and tables, of what was measured."""
    found = []
    if content.get("attention"):
        found += [
            f"![TFLOP/s of attention, {name} pass](images/kernels_attention_{name}.svg)"
            for name in ("forward", "backward")
        ]
        repeats = {row["repeated"]["runs"] for row in content["attention"]}
        different = sum(row["repeated"]["different"] for row in content["attention"] if row["pass"] == "forward")
        found += [
            "**Attention**, in bfloat16: TFLOP/s of nearpeak, of its portable kernels, and in torch of cuDNN,"
            " FlashAttention-2 and FlexAttention. Causal attention counts as half. The gradients of nearpeak are summed"
            f" in a fixed order: of {max(repeats)} runs of both passes in each cell {different or 'none'} had another"
            " result than the first.",
            attention_table(content["attention"]),
        ]
    if content.get("decoding"):
        row = content["decoding"][0]
        found += [
            "![Share of a copy of decoding, by kind of cache](images/kernels_decoding.svg)",
            f"**Decoding**, one new token for each sequence: {row['heads']} heads of queries and {row['key_heads']} of"
            f" keys, of {row['dim']}. Pages lie in memory in a random order. The error of float8 is that of its keys"
            " and values.",
            decoding_table(content["decoding"]),
        ]
    if content.get("attention_memory"):
        found += [
            "**Memory** of causal attention of one head beyond its inputs: results and gradients count.",
            memory_table(content["attention_memory"]),
        ]
    return found
