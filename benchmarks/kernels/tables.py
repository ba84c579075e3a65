"""The results of `benchmarks.kernels` as tables of Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.markdown_table import table

Row = Mapping[str, Any]
ATTENTION_WAYS = ("nearpeak", "portable", "cudnn", "flash", "flex")
FASTER, FASTER_CELLS = 1.05, 10
"""Of the forward pass beside cuDNN: so many times its rate, in at least so many cells."""
BACKWARD_LEAST, BACKWARD_CELLS = 0.95, 8
"""Of the backward pass: this share of its rate everywhere, and above it in so many cells."""
RATES = {(128, False, 16384): 640e12, (128, True, 16384): 600e12}
"""FLOP/s of the forward pass, by size of heads, mask and tokens."""
DECODING_BAR, PAGES_BAR = 0.9, 1.1
PAIRS_BAR = 1 / 8
"""Bytes of memory for each pair of a query and a key: a mask in bits would be as much."""
ERRORS_BAR = 2.0
"""Times the largest error of the ways of torch."""


def teraflops(row: Row, way: str) -> float | None:
    seconds = row["seconds"].get(way)
    return None if seconds is None else float(row["flops"] / seconds / 1e12)


def cell(row: Row) -> str:
    return f"{row['dim']} {'causal' if row['causal'] else 'full'} {row['tokens']}"


def attention_table(rows: Sequence[Row]) -> str:
    """TFLOP/s. `of cuDNN` is how many times its rate nearpeak has, and `of flash` that of the portable kernels."""
    head = [
        "pass",
        "heads",
        "mask",
        "tokens",
        *(f"{way}, TFLOP/s" for way in ATTENTION_WAYS),
        "of cuDNN",
        "portable of flash",
    ]
    body = [
        [
            row["pass"],
            f"{row['heads']} x {row['dim']}",
            "causal" if row["causal"] else "full",
            f"{row['batch']} x {row['tokens']}",
            *(_number(teraflops(row, way)) for way in ATTENTION_WAYS),
            _times(row, "nearpeak", "cudnn"),
            _times(row, "portable", "flash"),
        ]
        for row in rows
    ]
    return table(head, body, 4)


def decoding_table(rows: Sequence[Row]) -> str:
    """TB/s of the bytes of the cache, and what share of a copy that is."""
    head = ["sequences", "cache", "us", "TB/s", "of copy", "of one piece", "error"]
    body = []
    for row in rows:
        for way, seconds in row["seconds"].items():
            whole = row["seconds"].get("float8" if way.startswith("float8") else "nearpeak")
            error = row["errors"].get(way)
            body.append(
                [
                    f"{row['batch']} x {row['tokens']}",
                    {"nearpeak": "one piece", "float8": "float8, one piece", "sdpa": "sdpa of torch"}.get(way, way),
                    f"{seconds * 1e6:.1f}",
                    f"{row['bytes'][way] / seconds / 1e12:.2f}",
                    f"{row['of_copy'][way] * 100:.0f} %",
                    "-" if whole is None or way == "sdpa" else f"{seconds / whole:.2f}",
                    "-" if error is None else f"{error:.1e}",
                ]
            )
    return table(head, body, 2)


def memory_table(rows: Sequence[Row]) -> str:
    head = ["tokens", "pass", "way", "more memory, MiB", "a byte for each pair, MiB", "ms", "error"]
    body = []
    for row in rows:
        for way, seconds in row["seconds"].items():
            extra, error = row["extra_bytes"].get(way), row["errors"].get(way)
            body.append(
                [
                    str(row["tokens"]),
                    row["pass"],
                    way,
                    "-" if extra is None else f"{extra / 2**20:.0f}",
                    f"{row['pair_bytes'] / 2**20:.0f}",
                    f"{seconds * 1e3:.1f}",
                    "-" if error is None else f"{error:.1e}",
                ]
            )
    return table(head, body, 3)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _times(row: Row, way: str, other: str) -> str:
    if way not in row["seconds"] or other not in row["seconds"]:
        return "-"
    return f"{row['seconds'][other] / row['seconds'][way]:.2f}"


def attention_short(content: Row) -> list[str]:
    """What was wanted, and is not there."""
    sentences = []
    for name in ("forward", "backward"):
        sentences += _pass_short(name, [row for row in content.get("attention", ()) if row["pass"] == name])
    for row in content.get("decoding", ()):
        what = f"decoding {row['batch']} x {row['tokens']}"
        for way, share in row["of_copy"].items():
            if way in ("nearpeak", "float8") and share < DECODING_BAR:
                sentences.append(f"{what}, {way}: {share * 100:.0f} % of a copy")
            whole = row["seconds"]["float8" if way.startswith("float8") else "nearpeak"]
            if "pages" in way and row["seconds"][way] > PAGES_BAR * whole:
                sentences.append(f"{what}, {way}: {row['seconds'][way] / whole:.2f} times one piece")
    for row in content.get("attention_memory", ()):
        extra = row["extra_bytes"].get("nearpeak")
        if extra is not None and extra > PAIRS_BAR * row["pair_bytes"]:
            sentences.append(f"attention to {row['tokens']} tokens: {extra / 2**20:.0f} MiB more memory")
    return sentences


def _pass_short(name: str, rows: Sequence[Row]) -> list[str]:
    sentences, ratios = [], []
    for row in rows:
        what = f"attention {name} {cell(row)}"
        own, rate = teraflops(row, "nearpeak"), RATES.get((row["dim"], row["causal"], row["tokens"]))
        if name == "forward" and rate and own and own * 1e12 < rate:
            sentences.append(f"{what}: {own:.0f} TFLOP/s, and not {rate / 1e12:.0f}")
        if row["repeated"]["different"]:
            sentences.append(f"{what}: {row['repeated']['different']} of {row['repeated']['runs']} runs differ")
        portable, flash = teraflops(row, "portable"), teraflops(row, "flash")
        if portable and flash and portable < flash:
            sentences.append(f"{what}: the portable kernel has {portable / flash:.2f} of the rate of FlashAttention-2")
        errors = row["errors"]
        of_torch = [error for way, error in errors.items() if way not in ("nearpeak", "portable")]
        if of_torch and errors.get("nearpeak", 0.0) > ERRORS_BAR * max(of_torch):
            sentences.append(f"{what}: an error of {errors['nearpeak']:.1e}, and torch's is {max(of_torch):.1e}")
        cudnn = teraflops(row, "cudnn")
        if own and cudnn:
            ratios.append(own / cudnn)
            if ratios[-1] < (1.0 if name == "forward" else BACKWARD_LEAST):
                sentences.append(f"{what}: {ratios[-1]:.2f} of the rate of cuDNN")
    wanted, cells = (FASTER, FASTER_CELLS) if name == "forward" else (1.0, BACKWARD_CELLS)
    better = sum(ratio >= wanted for ratio in ratios)
    if ratios and better < min(cells, len(ratios)):
        sentences.append(f"attention {name}: {better} cells at {wanted:.2f} of the rate of cuDNN, and not {cells}")
    return sentences


PRODUCT_BAR, EIGHT_BAR = 1.03, 1.05
"""Times what torch takes, at the most: products beside cuBLAS, and those of 8 bits beside `_scaled_mm`."""
UNIFORM_BAR, SKEWED_BAR = 600e12, 0.95
"""FLOP/s of grouped products where tokens choose experts uniformly; and the share of that under Beta(1, 5)."""
LAYER_BAR = 1.4
"""Times the rate of the fastest other layer of experts, both passes."""
LINEAR = ("nearpeak", "naive", "quadratic")
SOFTMAX = ("attention", "sdpa")
"""Ways to attention by softmax; the faster of them is what linear attention is beside."""


def others(row: Row) -> dict[str, float]:
    """Seconds of all ways but nearpeak's."""
    return {name: seconds for name, seconds in row["seconds"].items() if name != "nearpeak"}


def fastest_other(row: Row) -> str:
    seconds = others(row)
    return min(seconds, key=lambda name: seconds[name]) if seconds else ""


def flops_table(rows: Sequence[Row]) -> str:
    """A line for each way: TFLOP/s, and how many times the rate of the fastest other nearpeak has."""
    head = ["operation", "pass", "size", "kind", "way", "ms", "TFLOP/s", "nearpeak / best other", "error"]
    body = []
    for row in rows:
        best = fastest_other(row)
        for way, seconds in row["seconds"].items():
            error = row["errors"].get(way)
            ratio = row["seconds"][best] / seconds if way == "nearpeak" and best else None
            body.append(
                [
                    row["operation"],
                    row["pass"],
                    row["size"],
                    row["kind"] or "-",
                    way + (" (waits for the GPU)" if way in row["waiting"] else ""),
                    f"{seconds * 1e3:.3f}",
                    f"{row['flops'] / seconds / 1e12:.0f}",
                    "-" if ratio is None else f"{ratio:.3f}",
                    "-" if error is None else f"{error:.1e}",
                ]
            )
    return table(head, body, 5)


def linear_table(rows: Sequence[Row]) -> str:
    """Milliseconds; `-` is what does not fit into memory, or does not run."""
    ways = (*LINEAR, *SOFTMAX)
    head = ["pass", "sequences", *(f"{way}, ms" for way in ways), "softmax / nearpeak"]
    body = []
    for row in rows:
        fastest = softmax_seconds(row)
        body.append(
            [
                row["pass"],
                f"{row['batch']} x {row['tokens']}",
                *(_milliseconds(row["seconds"].get(way)) for way in ways),
                "-" if fastest is None else f"{fastest / row['seconds']['nearpeak']:.2f}",
            ]
        )
    return table(head, body, 2) + "\n\n" + " ".join(crossover_text(rows, step) for step in ("forward", "both"))


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"


def softmax_seconds(row: Row) -> float | None:
    """Of the faster way to attention by softmax."""
    return min((row["seconds"][way] for way in SOFTMAX if way in row["seconds"]), default=None)


def crossover(rows: Sequence[Row], step: str) -> float | None:
    """From how many tokens on linear attention is faster than softmax, between sizes by logarithms of both.

    The smallest size where it is faster from there on at every size; None where it is not so even at the largest.
    """
    found: float | None = None
    before: tuple[float, float] | None = None
    for row in sorted((row for row in rows if row["pass"] == step), key=lambda row: row["tokens"]):
        softmax = softmax_seconds(row)
        if softmax is None:
            continue
        gain, tokens = math.log(softmax / row["seconds"]["nearpeak"]), math.log(row["tokens"])
        if gain <= 0.0:
            found = None
        elif found is None:
            found = row["tokens"]
            if before is not None and before[1] <= 0.0:
                share = -before[1] / (gain - before[1])
                found = math.exp(before[0] + share * (tokens - before[0]))
        before = tokens, gain
    return found


def crossover_text(rows: Sequence[Row], step: str) -> str:
    what = "Forward" if step == "forward" else "With the backward pass"
    tokens = crossover(rows, step)
    if tokens is None:
        return f"{what}, linear attention is not faster at the largest size."
    if tokens <= min(row["tokens"] for row in rows if row["pass"] == step):
        return f"{what}, linear attention is faster at every size."
    return f"{what}, linear attention is faster from {tokens:.0f} tokens on."


def products_short(content: Row) -> list[str]:
    """What was wanted of the three sections, and is not there."""
    sentences = []
    for row in content.get("products", ()):
        what = _what(row)
        own = row["seconds"]["nearpeak"]
        if row["operation"] == "gemm":
            sentences += _behind(what, own, row["seconds"].get("cublas"), PRODUCT_BAR, "cuBLAS")
        elif row["operation"] == "fp8":
            sentences += _behind(what, own, row["seconds"].get("scaled_mm"), EIGHT_BAR, "_scaled_mm")
        else:
            best = fastest_other(row)
            sentences += _behind(what, own, row["seconds"].get(best), 1.0, best or "another way")
        sentences += _error_short(what, row)
    return sentences + _experts_short(content.get("experts", ())) + _linear_short(content.get("linear_attention", ()))


def _what(row: Row) -> str:
    return f"{row['operation']} {row['pass']} {row['size']}" + (f", {row['kind']}" if row["kind"] else "")


def _behind(what: str, own: float, other: float | None, bar: float, name: str) -> list[str]:
    if other is None:
        return [f"{what}: {name} did not run, and nothing is known of this bar"]
    return [f"{what}: {own / other:.3f} times as long as {name}"] if own > bar * other else []


def _error_short(what: str, row: Row) -> list[str]:
    errors = row["errors"]
    of_others = [error for way, error in errors.items() if way != "nearpeak"]
    if of_others and errors.get("nearpeak", 0.0) > ERRORS_BAR * max(of_others):
        return [f"{what}: an error of {errors['nearpeak']:.1e}, and the others' is {max(of_others):.1e}"]
    return []


def _experts_short(rows: Sequence[Row]) -> list[str]:
    sentences, rates = [], {}
    for row in rows:
        what = _what(row)
        sentences += _error_short(what, row)
        if row["operation"] == "grouped_gemm" and row["pass"] == "forward":
            rates[row["kind"]] = row["flops"] / row["seconds"]["nearpeak"]
        if row["operation"] == "experts layer" and row["pass"] == "both":
            best = fastest_other(row)
            if not best:
                sentences.append(f"{what}: nothing else ran, and nothing is known of this bar")
            elif row["seconds"][best] < LAYER_BAR * row["seconds"]["nearpeak"]:
                ratio = row["seconds"][best] / row["seconds"]["nearpeak"]
                sentences.append(f"{what}: {ratio:.2f} times the rate of {best}, and not {LAYER_BAR}")
    uniform, skewed = rates.get("uniform"), rates.get("beta")
    if uniform is not None and uniform < UNIFORM_BAR:
        sentences.append(f"grouped_gemm, uniform: {uniform / 1e12:.0f} TFLOP/s, and not {UNIFORM_BAR / 1e12:.0f}")
    if uniform is not None and skewed is not None and skewed < SKEWED_BAR * uniform:
        sentences.append(f"grouped_gemm, beta: {skewed / uniform * 100:.0f} % of the rate with uniform choices")
    return sentences


def _linear_short(rows: Sequence[Row]) -> list[str]:
    sentences = []
    for step in dict.fromkeys(row["pass"] for row in rows):
        mine = [row for row in rows if row["pass"] == step]
        where = crossover(mine, step)
        if where is None:
            sentences.append(f"linear_attention {step}: not faster than attention at the largest size")
        for row in mine:
            naive, softmax = row["seconds"].get("naive"), softmax_seconds(row)
            below = where is None or row["tokens"] < where
            if below and naive is not None and softmax is not None and naive < softmax:
                sentences.append(f"linear_attention {step} {row['tokens']}: the naive form is faster than attention")
    for row in rows:
        sentences += _error_short(f"linear_attention {row['pass']} {row['tokens']}", row)
    return sentences


COPY_BARS = {"forward": 0.92, "backward": 0.85, "eight bits": 0.9}
SAME = 1.02
"""What takes so many times as long as another is as fast."""
TRANSPOSE_BAR, PRODUCTS_BAR, MEMORY_BAR, LAUNCH_BAR = 5.0, 1.25, 2**30, 1.5


def microseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e6:.0f}" if seconds >= 100e-6 else f"{seconds * 1e6:.1f}"


def best_other(row: Row) -> str:
    """The fastest way beside nearpeak; empty where there is none."""
    others = {name: value for name, value in row["seconds"].items() if name != "nearpeak"}
    return min(others, key=lambda name: others[name]) if others else ""


def times_faster(row: Row) -> str:
    best = best_other(row)
    return f"{row['seconds'][best] / row['seconds']['nearpeak']:.2f}" if best else "-"


def _moved(rows: Sequence[Row], ways: Sequence[str], label: str) -> str:
    head = ["operation", "pass", label, "nearpeak, us", "of copy", *(f"{way}, us" for way in ways), "best other"]
    body = [
        [
            row["operation"],
            row["pass"],
            f"{row['rows']} x {row['columns']}",
            microseconds(row["seconds"]["nearpeak"]),
            f"{row['of_copy'] * 100:.0f} %",
            *(microseconds(row["seconds"].get(way)) for way in ways),
            times_faster(row),
        ]
        for row in rows
    ]
    return table(head, body, 3)


def rows_table(rows: Sequence[Row]) -> str:
    """`best other` is how many times as long the fastest of the others takes."""
    return _moved(rows, ("eager", "compile", "liger"), "rows x columns")


def copies_table(rows: Sequence[Row]) -> str:
    return _moved(rows, ("eager", "compile", "index_select"), "size")


def losses_table(rows: Sequence[Row]) -> str:
    head = ["operation", "way", "ms", "of three products", "more memory, MiB"]
    body = []
    for row in rows:
        for way, seconds in row["seconds"].items():
            ratio = row["of_products"].get(way)
            extra = row["extra_bytes"].get(way)
            body.append(
                [
                    f"{row['operation']}, {row['tokens']} x {row['vocabulary']}",
                    way + (" (waits for the GPU)" if way in row["waiting"] else ""),
                    f"{seconds * 1e3:.2f}",
                    "-" if ratio is None else f"{ratio:.2f}",
                    "-" if extra is None else f"{extra / 2**20:.1f}",
                ]
            )
    return table(head, body, 2)


def launches_table(rows: Sequence[Row]) -> str:
    head = ["operation", "nearpeak, us", "torch, us", "torch's operations", "nearpeak / torch"]
    body = [
        [
            row["operation"],
            f"{row['seconds']['nearpeak'] * 1e6:.2f}",
            f"{row['seconds']['eager'] * 1e6:.2f}",
            str(row["torch_ops"]),
            f"{row['ratio']:.2f}",
        ]
        for row in rows
    ]
    return table(head, body, 1)


TABLES = {
    "losses": losses_table,
    "copies": copies_table,
    "launch": launches_table,
    "attention": attention_table,
    "decoding": decoding_table,
    "attention_memory": memory_table,
    "products": flops_table,
    "experts": flops_table,
    "linear_attention": linear_table,
    "rows": rows_table,
}


def head_line(content: Row) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    rate = content["copy_bytes_per_second"] / 1e12
    return f"{content['machine']}, {versions}, {content['date'][:10]}; a copy moves {rate:.2f} TB/s"


def shown(content: Row, only: Sequence[str] = ()) -> str:
    """All tables, what failed, and what is short of a bar."""
    parts = [head_line(content)]
    parts += [TABLES[name](content[name]) for name in TABLES if content.get(name) and (not only or name in only)]
    lines = [f"- {text}" for text in short_of_bars(content)]
    parts.append("Short of a bar:\n" + "\n".join(lines) if lines else "No bar is missed.")
    failed = [f"- {name}: {why}" for name, why in content["failed"].items()]
    for row in (row for name in TABLES if name != "launch" for row in content.get(name, ())):
        size = next(row[name] for name in ("size", "columns", "vocabulary", "tokens") if name in row)
        failed += [
            f"- {row['operation']} {row.get('pass', '')} {size}, {way}: {why}" for way, why in row["failed"].items()
        ]
    if failed:
        parts.append("Failed:\n" + "\n".join(failed))
    return "\n\n".join(parts)


def short_of_bars(content: Row) -> list[str]:
    """What was wanted of the kernels, and is not there."""
    sentences = []
    for row in content.get("rows", ()):
        best = best_other(row)
        what = f"{row['operation']} {row['pass']} {row['rows']} x {row['columns']}"
        if row["of_copy"] < COPY_BARS[row["pass"]]:
            sentences.append(f"{what}: {row['of_copy'] * 100:.1f} % of a copy")
        if best and row["seconds"][best] * SAME < row["seconds"]["nearpeak"]:
            sentences.append(
                f"{what}: {best} takes {row['seconds'][best] / row['seconds']['nearpeak']:.2f} of its time"
            )
    for row in content.get("copies", ()):
        what = f"{row['operation']} {row['pass']}"
        if row["operation"].startswith(("quantize", "dequantize")) and row["of_copy"] < COPY_BARS["eight bits"]:
            sentences.append(f"{what}: {row['of_copy'] * 100:.0f} % of a copy")
        eager = row["seconds"].get("eager")
        if row["operation"] == "transpose_copy" and eager and eager < TRANSPOSE_BAR * row["seconds"]["nearpeak"]:
            sentences.append(f"{what}: {eager / row['seconds']['nearpeak']:.2f} times as fast as eager")
        if row["operation"].startswith("adamw") and eager and eager < row["seconds"]["nearpeak"]:
            sentences.append(f"{what}: eager takes {eager / row['seconds']['nearpeak']:.2f} of its time")
    for row in content.get("losses", ()):
        own, bar = row["seconds"]["nearpeak"], row["bar_seconds"]
        extra, ratio = row["extra_bytes"].get("nearpeak"), row["of_products"].get("nearpeak")
        if bar and own > bar:
            sentences.append(f"{row['operation']}: {own * 1e3:.2f} ms, and not {bar * 1e3:.2f}")
        if ratio is not None and ratio > PRODUCTS_BAR:
            sentences.append(f"{row['operation']}: {ratio:.2f} times the three products")
        allowed = MEMORY_BAR if ratio is not None else 2**20  # losses of rows and sums are some kilobytes
        if extra is not None and extra > allowed:
            sentences.append(f"{row['operation']}: {extra / 2**20:.0f} MiB more memory")
    for row in content.get("launch", ()):
        if row["ratio"] > LAUNCH_BAR:
            sentences.append(f"a call of {row['operation']}: {row['ratio']:.2f} times that of torch")
    return sentences + attention_short(content) + products_short(content)
