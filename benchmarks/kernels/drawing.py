"""Shapes at random, as models have them: the cells of `benchmarks.kernels --random SEED`.

A cell is an operation with a shape and a dtype. What the cells are follows from the seed alone: the first cells of a
longer run are those of a shorter one, and a selection of operations has those cells that these have without it.

Sizes are log-uniform between the limits of `RANGES`, so that each doubling is as likely as any other. Where a size has
a granularity, it is drawn with it: most widths in models are multiples of 64 or 128, some of 8, and lengths may be odd.
A shape whose work or memory is above the limit of its operation is drawn again. bfloat16 in 4 of 5 cells, float16 in
the others; operations on rows are in float32 in 1 of 10.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

Shape = dict[str, Any]
T = TypeVar("T")

HEAD_SIZES: Mapping[tuple[int, int], int] = {
    (64, 64): 4,
    (80, 80): 2,
    (96, 96): 2,
    (128, 128): 5,
    (192, 192): 1,
    (192, 128): 1,
    (256, 256): 2,
}
"""Sizes of heads of queries and keys, and of values, with how often each comes."""
VOCABULARIES = (30522, 32000, 50257, 65024, 100352, 128256, 151936, 201088, 262144)
"""Of BERT, Llama 2, GPT-2, ChatGLM, OLMo 2, Llama 3, Qwen, gpt-oss and Gemma 3."""
RANGES: Mapping[str, str] = {
    "attention": "1024 to 32768 tokens, in sequences of 64 to 16384, half of the lengths odd; 4 to 64"
    " heads, 1 to 16 for each head of keys; 3 of 5 causal, of these 1 of 6 with a window of 128 to 4096; 3 of 4 with"
    " tokens before heads in memory; of the others than causal, 1 of 5 with other keys",
    "attention packed": "2 to 64 sequences of 16 to 8192 tokens, one after another; heads as above",
    "decode": "1 to 128 sequences of 128 to 131072 tokens in the cache; 1 of 5 in pages, 1 of 8 in float8",
    "gemm, gemm backward, gemm swiglu": "128 to 16384 rows (swiglu from 16 on); 768 to 16384 features and results",
    "gemm few rows": "1 to 96 rows, the same features and results",
    "gemm fp8": "16 to 16384 rows; scales of tensors, of rows, or of blocks of 128",
    "grouped_gemm, moe": "4 to 128 experts, 1 to 8 for a token, 64 to 16384 tokens, widths of 512 to 4096",
    "norms, activations": "1024 to 131072 rows, in 1 of 5 cells 16 to 1024, of 512 to 16384; a quarter of RMSNorm and"
    " LayerNorm is of heads, 256 to 262144 rows of 64 to 256",
    "softmax, log_softmax": "the same rows, of 512 to 131072",
    "cross_entropy": "64 to 16384 tokens; vocabularies of models, and a third of 1000 to 262144",
    "linear_cross_entropy": "256 to 16384 tokens of 512 to 5120 features, the same vocabularies",
    "rotary": "1 to 16 sequences of 64 to 32768 tokens; heads of 64 to 256",
    "quantize, transpose_copy": "matrices of 128 to 16384 rows and columns, multiples of 128",
    "permute_tokens, unpermute_tokens": "64 to 16384 tokens of 512 to 8192, 1 to 8 of 8 to 128 experts",
    "linear_attention": "1 to 16 sequences of 256 to 8192 tokens, heads of 64 and 128",
    "adamw": "2 to 64 tensors of 1024 to 16777216 elements",
}
"""What is drawn, by operation; heads are of `HEAD_SIZES`."""
FEW_ROWS = 96
MOST_ELEMENTS = 2**27
"""Of a tensor of rows: 256 MiB in bfloat16, five times the L2 cache."""
MOST_ATTENTION_FLOPS = 4e12
MOST_PRODUCT_FLOPS = 4e12
MOST_LOSS_FLOPS = 1.2e13
MOST_LOGITS = 2**30
MOST_CACHE_BYTES = 2**32
MOST_EXPERT_WEIGHTS = 2**29
LARGEST_DRAWS = 1000
"""A shape that is too large so often is an error of the ranges."""


class Draw:
    """Numbers at random, by a seed that may be any text."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def size(self, least: int, most: int, multiple: int = 1) -> int:
        """Log-uniform from least to most, both included, rounded to a multiple within."""
        number = math.exp(self._random.uniform(math.log(least), math.log(most)))
        low, high = -(-least // multiple), most // multiple
        return multiple * min(max(round(number / multiple), low), high)

    def width(self, least: int, most: int) -> int:
        """Of features: a multiple of 128, 64 or 8, or any number."""
        return self.size(least, most, self.weighted({128: 8, 64: 5, 8: 6, 1: 1}))

    def length(self, least: int, most: int) -> int:
        """Of sequences: any number in half of the cases, or a multiple of 64."""
        return self.size(least, most, self.weighted({1: 1, 64: 1}))

    def weighted(self, weights: Mapping[T, int]) -> T:
        return self._random.choices(list(weights), list(weights.values()))[0]

    def among(self, choices: Sequence[T]) -> T:
        return self._random.choice(choices)

    def one_of(self, number: int) -> bool:
        """True once in so many times."""
        return self._random.randrange(number) == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """An operation to be measured, as plain data."""

    seed: int
    number: int
    operation: str
    dtype: str
    shape: Shape
    passes: tuple[str, ...]

    @property
    def job(self) -> str:
        return f"random-{self.number}"

    @property
    def text(self) -> str:
        """The shape in words."""
        return OPERATIONS[self.operation].text(self.shape) + ("" if self.dtype == "bfloat16" else f", {self.dtype}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What is drawn of an operation."""

    weight: int
    """How many cells it has in each round of draws."""
    draw: Callable[[Draw], Shape | None]
    """A shape; None for one that is too large, which is drawn again."""
    text: Callable[[Shape], str]
    passes: tuple[str, ...] = ("forward",)
    dtypes: Mapping[str, int] | None = None


SIXTEEN_BITS = {"bfloat16": 4, "float16": 1}
ROW_DTYPES = {"bfloat16": 14, "float16": 4, "float32": 2}
BOTH = ("forward", "backward")


def cells(seed: int, count: int, operations: Sequence[str] | None = None) -> list[Cell]:
    """The first cells of a seed that make `count` rows of results: each pass of a cell is a row."""
    unknown = set(operations or ()) - set(OPERATIONS)
    if unknown:
        raise ValueError(f"no such operations: {', '.join(sorted(unknown))}; there are {', '.join(OPERATIONS)}")
    drawn: list[Cell] = []
    rows = 0
    for cell in _endless(seed, operations):
        if rows >= count:
            break
        drawn.append(cell)
        rows += len(cell.passes)
    return drawn


def tiny_cells(seed: int, operations: Sequence[str] | None = None) -> list[Cell]:
    """A cell of each operation, small enough for Triton's interpreter."""
    return [
        replace(draw_cell(seed, number, name), shape=dict(TINY[name]))
        for number, name in enumerate(OPERATIONS)
        if operations is None or name in operations
    ]


def _endless(seed: int, operations: Sequence[str] | None) -> Iterator[Cell]:
    """Cells in rounds: each has every operation as often as its weight says, in an order of its own."""
    number = 0
    round_number = 0
    while True:
        names = [name for name, operation in OPERATIONS.items() for _ in range(operation.weight)]
        random.Random(f"{seed} round {round_number}").shuffle(names)
        for name in names:
            if operations is None or name in operations:
                yield draw_cell(seed, number, name)
            number += 1
        round_number += 1


def draw_cell(seed: int, number: int, name: str) -> Cell:
    operation = OPERATIONS[name]
    draw = Draw(f"{seed} cell {number} {name}")
    for _ in range(LARGEST_DRAWS):
        shape = operation.draw(draw)
        if shape is not None:
            break
    else:
        raise AssertionError(f"every shape of {name} is too large")
    dtype = draw.weighted(operation.dtypes) if operation.dtypes else "bfloat16"
    return Cell(seed=seed, number=number, operation=name, dtype=dtype, shape=shape, passes=operation.passes)


def _heads(draw: Draw) -> tuple[int, int]:
    """Of queries and of keys, which divide them."""
    heads = draw.among((4, 8, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64))
    groups = [group for group in (1, 1, 2, 4, 4, 7, 8, 8, 16) if heads % group == 0]
    return heads, heads // draw.among(groups)


def _attention(draw: Draw) -> Shape | None:
    dim, value_dim = draw.weighted(HEAD_SIZES)
    heads, key_heads = _heads(draw)
    together = draw.size(1024, 32768)
    queries = draw.length(64, min(together, 16384))
    batch = max(together // queries, 1)
    causal = draw.among((True, True, True, False, False))
    window = draw.size(128, 4096, 128) if causal and draw.one_of(6) else None
    layout = draw.among(("tokens first", "tokens first", "tokens first", "heads first"))
    keys = draw.length(16, 4096) if not causal and draw.one_of(5) else queries
    pairs = queries * keys / (2 if causal else 1)
    flops = 2.0 * batch * heads * pairs * (dim + value_dim)
    if flops > MOST_ATTENTION_FLOPS or (window is not None and window >= keys):
        return None
    return {
        "batch": batch, "heads": heads, "key_heads": key_heads, "queries": queries, "keys": keys, "dim": dim,
        "value_dim": value_dim, "causal": causal, "window": window, "layout": layout,
    }  # fmt: skip


def _head_text(shape: Shape) -> str:
    number = f"{shape['heads']}/{shape['key_heads']}" if shape["heads"] != shape["key_heads"] else f"{shape['heads']}"
    values = shape.get("value_dim", shape["dim"])
    return f"{number} heads of {shape['dim']}" + (f"/{values}" if values != shape["dim"] else "")


def _attention_text(shape: Shape) -> str:
    tokens = f"{shape['queries']} tokens"
    if shape["keys"] != shape["queries"]:
        tokens = f"{shape['queries']} tokens to {shape['keys']} keys"
    mask = ("causal" if shape["causal"] else "full") + (f", window {shape['window']}" if shape["window"] else "")
    return f"{shape['batch']} x {tokens}, {_head_text(shape)}, {mask}, {shape['layout']}"


def _packed(draw: Draw) -> Shape | None:
    dim, value_dim = draw.weighted({sizes: weight for sizes, weight in HEAD_SIZES.items() if sizes[0] == sizes[1]})
    heads, key_heads = _heads(draw)
    lengths = [draw.size(16, 8192) for _ in range(draw.size(2, 64))]
    causal = draw.among((True, True, True, False))
    flops = 2.0 * heads * sum(length**2 for length in lengths) * (dim + value_dim) / (2 if causal else 1)
    if sum(lengths) > 32768 or flops > MOST_ATTENTION_FLOPS:
        return None
    return {
        "sequences": len(lengths), "longest": max(lengths), "tokens": sum(lengths), "lengths": lengths, "heads": heads,
        "key_heads": key_heads, "dim": dim, "value_dim": value_dim, "causal": causal,
    }  # fmt: skip


def _packed_text(shape: Shape) -> str:
    lengths = shape["lengths"]
    mask = "causal" if shape["causal"] else "full"
    return f"{len(lengths)} sequences of {min(lengths)} to {max(lengths)} tokens, {_head_text(shape)}, {mask}"


def _decode(draw: Draw) -> Shape | None:
    heads, key_heads = _heads(draw)
    dim = draw.weighted({64: 3, 128: 6, 96: 1, 256: 1})
    batch, tokens = draw.size(1, 128), draw.length(128, 131072)
    page = draw.among((16, 64, 256)) if draw.one_of(5) else None
    cache = "float8" if draw.one_of(8) else "bfloat16"
    if 4 * batch * tokens * key_heads * dim > MOST_CACHE_BYTES:
        return None
    return {
        "batch": batch, "tokens": tokens, "heads": heads, "key_heads": key_heads, "dim": dim, "page": page,
        "cache": cache,
    }  # fmt: skip


def _decode_text(shape: Shape) -> str:
    kind = ("" if shape["page"] is None else f", pages of {shape['page']}") + (
        ", float8" if shape["cache"] == "float8" else ""
    )
    return f"{shape['batch']} x {shape['tokens']} tokens, {_head_text(shape)}{kind}"


def _product(least_rows: int, most_rows: int, factor: int = 1) -> Callable[[Draw], Shape | None]:
    """Rows between these, and a weight with so many results for each of the shape."""

    def draw_product(draw: Draw) -> Shape | None:
        rows = draw.length(least_rows, most_rows) if most_rows > FEW_ROWS else draw.size(least_rows, most_rows)
        features, results = draw.width(768, 16384), draw.width(768, 16384)
        if 2.0 * rows * features * results * factor > MOST_PRODUCT_FLOPS:
            return None
        return {"rows": rows, "features": features, "results": results}

    return draw_product


def _product_text(shape: Shape) -> str:
    scales = f", scales of {shape['scales']}" if "scales" in shape else ""
    scales += ", fast" if shape.get("fast") else ""
    return f"{shape['rows']} x {shape['features']} x {shape['results']}{scales}"


def _fp8(draw: Draw) -> Shape | None:
    """Of sizes that torch takes: multiples of 16, and of 128 for scales of blocks."""
    scales = draw.among(("tensor", "row", "blocks of 128"))
    multiple = 128 if scales.startswith("blocks") else 16
    rows = draw.size(16, 16384, 4 if multiple == 128 else 1)
    features, results = draw.size(768, 16384, multiple), draw.size(768, 16384, multiple)
    if 2.0 * rows * features * results > 2 * MOST_PRODUCT_FLOPS:
        return None
    fast = multiple == 16 and draw.one_of(2)
    return {"rows": rows, "features": features, "results": results, "scales": scales, "fast": fast}


def _experts(draw: Draw) -> Shape | None:
    experts = draw.among((4, 8, 16, 32, 60, 64, 128))
    choices = draw.among([number for number in (1, 2, 4, 6, 8) if number <= experts // 2])
    tokens = draw.length(64, 16384)
    columns, inner = draw.size(512, 4096, 128), draw.size(512, 4096, 64)
    routing = draw.among(("uniform", "beta"))
    if 2.0 * tokens * choices * columns * inner > MOST_PRODUCT_FLOPS or experts * columns * inner > MOST_EXPERT_WEIGHTS:
        return None
    return {
        "experts": experts, "choices": choices, "tokens": tokens, "columns": columns, "inner": inner,
        "routing": routing,
    }  # fmt: skip


def _experts_text(shape: Shape) -> str:
    return (
        f"{shape['tokens']} tokens, {shape['choices']} of {shape['experts']} x {shape['columns']} x {shape['inner']},"
        f" {shape['routing']}"
    )


def _rows(most_columns: int = 16384, heads: bool = False) -> Callable[[Draw], Shape | None]:
    def draw_rows(draw: Draw) -> Shape | None:
        if heads and draw.one_of(4):  # a norm of heads
            rows, columns = draw.size(256, 262144), draw.among((64, 96, 128, 192, 256))
        else:
            rows = draw.size(16, 1024) if draw.one_of(5) else draw.size(1024, 131072)
            columns = draw.width(512, most_columns)
        return {"rows": rows, "columns": columns} if rows * columns <= MOST_ELEMENTS else None

    return draw_rows


def _rows_text(shape: Shape) -> str:
    block = f", {shape['block']}" if "block" in shape else ""
    return f"{shape['rows']} x {shape['columns']}{block}"


def _vocabulary(draw: Draw) -> int:
    return draw.size(1000, 262144) if draw.one_of(3) else draw.among(VOCABULARIES)


def _cross_entropy(draw: Draw) -> Shape | None:
    tokens, vocabulary = draw.length(64, 16384), _vocabulary(draw)
    return {"tokens": tokens, "vocabulary": vocabulary} if tokens * vocabulary <= MOST_LOGITS else None


def _linear_cross_entropy(draw: Draw) -> Shape | None:
    tokens, hidden, vocabulary = draw.length(256, 16384), draw.size(512, 5120, 64), _vocabulary(draw)
    vocabulary = -(-vocabulary // 8) * 8  # models pad their matrix
    if tokens * vocabulary > MOST_LOGITS or 6.0 * tokens * hidden * vocabulary > MOST_LOSS_FLOPS:
        return None
    return {"tokens": tokens, "hidden": hidden, "vocabulary": vocabulary}


def _loss_text(shape: Shape) -> str:
    return " x ".join(str(shape[name]) for name in ("tokens", "hidden", "vocabulary") if name in shape)


def _rotary(draw: Draw) -> Shape | None:
    heads, key_heads = _heads(draw)
    dim = draw.among((64, 96, 128, 256))
    batch, tokens = draw.size(1, 16), draw.length(64, 32768)
    if batch * tokens * heads * dim > MOST_ELEMENTS:
        return None
    return {"batch": batch, "tokens": tokens, "heads": heads, "key_heads": key_heads, "dim": dim}


def _tokens_text(shape: Shape) -> str:
    return f"{shape['batch']} x {shape['tokens']} tokens, {_head_text(shape)}"


def _matrix(draw: Draw) -> Shape | None:
    rows, columns = draw.size(128, 16384, 128), draw.size(128, 16384, 128)
    return {"rows": rows, "columns": columns} if rows * columns <= MOST_ELEMENTS else None


def _quantize(draw: Draw) -> Shape | None:
    shape = _matrix(draw)
    return None if shape is None else {**shape, "block": draw.among(("tensor", "row", "1x128", "128x128"))}


def _permutation(draw: Draw) -> Shape | None:
    experts = draw.among((8, 32, 64, 128))
    choices = draw.among([number for number in (1, 2, 4, 8) if number <= experts // 2])
    tokens, columns = draw.length(64, 16384), draw.size(512, 8192, 128)
    if tokens * choices * columns > MOST_ELEMENTS:
        return None
    return {"tokens": tokens, "choices": choices, "experts": experts, "columns": columns}


def _permutation_text(shape: Shape) -> str:
    return f"{shape['tokens']} tokens of {shape['columns']}, {shape['choices']} of {shape['experts']} experts"


def _linear_attention(draw: Draw) -> Shape | None:
    batch, heads, tokens, dim = draw.size(1, 16), draw.among((4, 8, 16)), draw.length(256, 8192), draw.among((64, 128))
    # what is beside it writes all weights of a head
    if batch * heads * tokens * dim > MOST_ELEMENTS or batch * heads * tokens**2 > 2**30:
        return None
    return {"batch": batch, "tokens": tokens, "heads": heads, "key_heads": heads, "dim": dim}


def _adamw(draw: Draw) -> Shape | None:
    sizes = [draw.size(2**10, 2**24) for _ in range(draw.size(2, 64))]
    return {"sizes": sizes} if sum(sizes) <= 2**28 else None


def _adamw_text(shape: Shape) -> str:
    return f"{len(shape['sizes'])} tensors, {sum(shape['sizes'])} elements"


def _row_operation(weight: int, most_columns: int = 16384, heads: bool = False) -> Operation:
    draw = _rows(most_columns, heads)
    return Operation(weight=weight, draw=draw, text=_rows_text, passes=BOTH, dtypes=ROW_DTYPES)


OPERATIONS: dict[str, Operation] = {
    "attention": Operation(weight=28, draw=_attention, text=_attention_text, passes=BOTH, dtypes=SIXTEEN_BITS),
    "attention packed": Operation(weight=5, draw=_packed, text=_packed_text, passes=BOTH, dtypes=SIXTEEN_BITS),
    "decode": Operation(weight=9, draw=_decode, text=_decode_text),
    "gemm": Operation(weight=12, draw=_product(128, 16384), text=_product_text, dtypes=SIXTEEN_BITS),
    "gemm few rows": Operation(weight=9, draw=_product(1, FEW_ROWS), text=_product_text, dtypes=SIXTEEN_BITS),
    "gemm backward": Operation(
        weight=5, draw=_product(128, 16384, 2), text=_product_text, passes=("backward",), dtypes=SIXTEEN_BITS
    ),
    "gemm swiglu": Operation(weight=12, draw=_product(16, 16384, 2), text=_product_text, dtypes=SIXTEEN_BITS),
    "gemm fp8": Operation(weight=7, draw=_fp8, text=_product_text),
    "grouped_gemm": Operation(
        weight=4, draw=_experts, text=_experts_text, passes=("forward", "by rows", "by matrices")
    ),
    "moe": Operation(weight=3, draw=_experts, text=_experts_text, passes=("forward", "both")),
    "rms_norm": _row_operation(8, heads=True),
    "layer_norm": _row_operation(7, heads=True),
    "add_rms_norm": _row_operation(5),
    "add_layer_norm": _row_operation(3),
    "softmax": _row_operation(5, 131072),
    "log_softmax": _row_operation(2, 131072),
    "swiglu": _row_operation(3),
    "geglu": _row_operation(2),
    "bias_gelu": _row_operation(2),
    "dropout_add": _row_operation(2),
    "rotary": Operation(weight=4, draw=_rotary, text=_tokens_text, passes=BOTH, dtypes=SIXTEEN_BITS),
    "cross_entropy": Operation(
        weight=7, draw=_cross_entropy, text=_loss_text, passes=("both",), dtypes={"bfloat16": 4, "float32": 1}
    ),
    "linear_cross_entropy": Operation(weight=5, draw=_linear_cross_entropy, text=_loss_text, passes=("both",)),
    "quantize": Operation(weight=3, draw=_quantize, text=_rows_text),
    "transpose_copy": Operation(weight=2, draw=_matrix, text=_rows_text, dtypes=ROW_DTYPES),
    "permute_tokens": Operation(weight=2, draw=_permutation, text=_permutation_text),
    "unpermute_tokens": Operation(weight=2, draw=_permutation, text=_permutation_text),
    "linear_attention": Operation(weight=2, draw=_linear_attention, text=_tokens_text),
    "adamw": Operation(weight=2, draw=_adamw, text=_adamw_text, dtypes={"bfloat16": 1, "float32": 1}),
}
"""By name. Weights are about as often as a model spends its time there."""

_TINY_ROWS = {"rows": 3, "columns": 72}
_TINY_PRODUCT = {"rows": 5, "features": 32, "results": 48}
_TINY_EXPERTS = {"experts": 4, "choices": 2, "tokens": 10, "columns": 64, "inner": 32, "routing": "uniform"}
_TINY_PERMUTATION = {"tokens": 6, "choices": 2, "experts": 4, "columns": 16}
TINY: dict[str, Shape] = {
    "attention": {
        "batch": 2, "heads": 4, "key_heads": 2, "queries": 20, "keys": 20, "dim": 16, "value_dim": 16, "causal": True,
        "window": 5, "layout": "tokens first",
    },
    "attention packed": {
        "sequences": 2, "longest": 17, "tokens": 20, "lengths": [3, 17], "heads": 2, "key_heads": 1, "dim": 16,
        "value_dim": 16, "causal": True,
    },
    "decode": {"batch": 2, "tokens": 33, "heads": 4, "key_heads": 2, "dim": 16, "page": None, "cache": "bfloat16"},
    **dict.fromkeys(("gemm", "gemm few rows", "gemm backward", "gemm swiglu"), _TINY_PRODUCT),
    "gemm fp8": {**_TINY_PRODUCT, "scales": "row", "fast": False},
    **dict.fromkeys(("grouped_gemm", "moe"), _TINY_EXPERTS),
    "rotary": {"batch": 2, "tokens": 5, "heads": 2, "key_heads": 1, "dim": 16},
    "cross_entropy": {"tokens": 6, "vocabulary": 96},
    "linear_cross_entropy": {"tokens": 6, "hidden": 16, "vocabulary": 96},
    "quantize": {"rows": 128, "columns": 128, "block": "1x128"},
    "transpose_copy": {"rows": 32, "columns": 48},
    **dict.fromkeys(("permute_tokens", "unpermute_tokens"), _TINY_PERMUTATION),
    "linear_attention": {"batch": 1, "tokens": 16, "heads": 1, "key_heads": 1, "dim": 16},
    "adamw": {"sizes": [24, 100]},
    **dict.fromkeys(
        (
            "rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "softmax", "log_softmax", "swiglu", "geglu",
            "bias_gelu", "dropout_add",
        ),
        _TINY_ROWS,
    ),
}  # fmt: skip
"""By operation, a shape for tests."""
