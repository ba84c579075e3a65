"""KV cache or recompute: what a token costs with and without.

A decoder that generates a token needs the keys and values of all tokens before. Kept in a cache, they are read; without
one, all tokens go through the whole model again. With a cache a token costs the weights once and attention that grows
with its place; without, it costs as many times more as there are tokens. Over a whole text that is linear against
quadratic, for the projections. The price is the memory of the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from nearpeak.gallery.parts import Part, Plot, Prediction, prediction_table, prose
from nearpeak.gallery.run import Context
from nearpeak.render.document import Table
from nearpeak.render.picture.plot import Series
from nearpeak.units import quantity, significant

Layer = dict[str, Tensor]
HEAD = 64


def layers(context: Context, number: int, width: int, dtype: torch.dtype) -> list[Layer]:
    """Attention and an MLP of four times the width."""
    sizes = {"qkv": (3 * width, width), "out": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
    scale = 1 / math.sqrt(width)
    return [
        {name: torch.randn(size, dtype=dtype, device=context.tensors) * scale for name, size in sizes.items()}
        for _ in range(number)
    ]


def heads_of(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as [batch, heads, tokens, dim]."""
    query, key, value = x.unflatten(-1, (3, -1, HEAD)).transpose(1, 3).unbind(2)
    return query, key, value


def after_attention(x: Tensor, attended: Tensor, layer: Layer) -> Tensor:
    """The rest of a layer."""
    x = x + functional.linear(attended.transpose(1, 2).flatten(2), layer["out"])
    return x + functional.linear(functional.gelu(functional.linear(x, layer["up"])), layer["down"])


def without_cache(x: Tensor, weights: list[Layer]) -> Tensor:
    """All tokens through all layers, for the last of them."""
    for layer in weights:
        query, key, value = heads_of(functional.linear(x, layer["qkv"]))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = after_attention(x, attended, layer)
    return x[:, -1]


def with_cache(x: Tensor, weights: list[Layer], caches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The last token alone; keys and values of those before are in the caches, where its own are written."""
    for layer, (keys, values) in zip(weights, caches, strict=True):
        query, key, value = heads_of(functional.linear(x, layer["qkv"]))
        keys[:, :, -1:] = key
        values[:, :, -1:] = value
        weight = torch.softmax(query @ keys.mT * HEAD**-0.5, -1)
        x = after_attention(x, weight @ values, layer)
    return x[:, -1]


def waiting(context: Context, caches: list[tuple[Tensor, Tensor]]) -> float:
    """Seconds that a token with a cache takes longer because a head's weighted sum has one processor.

    Its result is one tile, so that there are as many tiles as heads. Where those are fewer than the processors, the
    product takes as long as one with a head for each of them: the others wait, and ask memory for nothing.
    """
    _, heads, tokens, _ = caches[0][1].shape
    dtype, processors = caches[0][1].dtype, context.machine.processors
    if not context.gpu or not processors:
        return 0.0

    def weighted_sum(number: int) -> float:
        sizes = ((number, 1, tokens), (number, tokens, HEAD))
        return context.predict(torch.bmm, *(torch.empty(size, dtype=dtype, device="meta") for size in sizes))

    full = math.ceil(heads / processors) * processors
    return len(caches) * (weighted_sum(full) - weighted_sum(heads))


def example(context: Context) -> Iterator[Part]:
    """Operations and seconds of the token at each place."""
    width, number = context.pick(gpu=(2048, 8), cpu=(256, 2))
    lengths = context.pick(gpu=(512, 1024, 2048, 4096), cpu=(32, 64, 128, 256))
    dtype = context.pick(gpu=torch.bfloat16, cpu=torch.float32)
    weights = layers(context, number, width, dtype)
    parameters = sum(one.numel() for layer in weights for one in layer.values())
    yield from prose(
        f"A decoder of {number} layers of width {width}, {quantity(parameters, '')} parameters, without its embeddings."
        " For the token at each place: its operations, and the time of one pass for it."
    )
    flops: list[tuple[int, float, float]] = []
    predictions: list[tuple[int, Prediction, Prediction]] = []
    for length in lengths:
        x = torch.randn(1, length, width, dtype=dtype, device=context.tensors)
        shape = (1, width // HEAD, length, HEAD)
        caches = [
            (
                torch.randn(shape, dtype=dtype, device=context.tensors),
                torch.randn(shape, dtype=dtype, device=context.tensors),
            )
            for _ in range(number)
        ]
        last = x[:, -1:].contiguous()
        counts = (
            context.estimate(with_cache, last, weights, caches).flops,
            context.estimate(without_cache, x, weights).flops,
        )
        flops.append((length, *counts))
        expected = context.predict(with_cache, last, weights, caches) + waiting(context, caches)
        kept = context.row(f"token {length}, cache", with_cache, last, weights, caches, predicted=expected)
        predictions.append((length, kept, context.row(f"token {length}, none", without_cache, x, weights)))
    yield Table(
        title="Operations for one more token",
        headers=("place", "with a cache", "without", "times as many", "cache"),
        rows=tuple(
            (
                f"{length}",
                quantity(kept, "FLOP"),
                quantity(again, "FLOP"),
                significant(again / kept),
                quantity(2 * number * width * length * dtype.itemsize, "B"),
            )
            for length, kept, again in flops
        ),
    )
    (first, kept_first, again_first), (last_one, kept_last, again_last) = flops[0], flops[-1]
    yield from prose(
        f"From place {first} to place {last_one}, {last_one // first} times as far, a token's operations become"
        f" {significant(kept_last / kept_first)} times as many with the cache and"
        f" {significant(again_last / again_first)} times without. Summed over a text, the projections of all its"
        " tokens are linear in its length with the cache and quadratic without."
    )
    yield prediction_table(
        "Time of one more token", [row for _, *pair in predictions for row in pair], note=_note(context, width)
    )

    ways = ("predicted", "measured") if context.measures else ("predicted",)
    series = []
    for how in ways:
        for place, name in ((1, "with a cache"), (2, "without")):
            points = tuple((float(one[0]), getattr(one[place], how)) for one in predictions)
            series.append(Series(name=f"{name}, {how}", points=points, color=place - 1, dashed=how != "measured"))
    yield Plot(
        title="One more token",
        series=tuple(series),
        x_label="place of the token",
        y_label="time",
        log_x=True,
        log_y=True,
    )
    _, kept_row, again_row = predictions[-1]
    shares = [getattr(again_row, how) / getattr(kept_row, how) for how in ways]
    said = ", ".join(f"{significant(share)} as {how}" for share, how in zip(shares, ways, strict=True))
    yield from prose(
        f"At place {last_one} recomputing does {significant(again_last / kept_last)} times the operations and takes"
        f" this many times as long: {said}."
        + (
            " Time differs less than operations, since one token cannot keep the machine busy: it reads all weights"
            " for one row, and is limited by memory and by fixed costs."
            if shares[-1] < again_last / kept_last
            else ""
        )
    )


def _note(context: Context, width: int) -> str:
    heads, processors = width // HEAD, context.machine.processors
    if not context.gpu or not processors or heads >= processors:
        return ""
    return (
        f"With a cache the weighted sum of each head's values is one tile of results: {heads} tiles on {processors}"
        " processors, of which the others wait. That is in the predictions, and grows with the place; a library that"
        " cuts the sum into parts is faster."
    )
