"""Asymptotics against hardware: linear attention and softmax attention.

Softmax attention does operations that grow with the square of the tokens, linear attention operations that grow with
the tokens. So the linear one wins from some length on; which length, the hardware decides. As its formula reads, linear
attention has a state of its own for each token, and writes and reads all of them: the fewest operations, and by far the
most bytes. In chunks, it does more operations, as matrix products, and keeps its state on the chip or nearly so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from nearpeak import kernels
from nearpeak.gallery.parts import Part, Plot, Prediction, prediction_table, prose
from nearpeak.gallery.run import FLOOR, Context
from nearpeak.kernels.linear_attention import naive_linear_attention
from nearpeak.render.document import Table
from nearpeak.render.picture.plot import Series
from nearpeak.units import quantity, significant

CHUNK = 64
LONGEST_NAIVE = 4096
"""Its states are in memory: beyond this the naive form is not run."""


def softmax_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Fused, causal."""
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def chunked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Linear attention with the features 1 + elu(x), causal, in chunks: a product within each, and a state before."""
    shape = (*query.shape[:2], -1, CHUNK, query.shape[-1])
    q, k = (functional.elu(x).add(1).view(shape) for x in (query, key))
    v = value.view(shape)
    states, sums = (k.mT @ v).cumsum(2), k.sum(3).cumsum(2)
    weights = (q @ k.mT).tril()
    before, sums_before = (functional.pad(x[:, :, :-1], (0, 0) * (x.dim() - 3) + (1, 0)) for x in (states, sums))
    result = weights @ v + q @ before
    norms = weights.sum(-1, keepdim=True) + q @ sums_before[..., None]
    return (result / norms).view(value.shape)


def crossing(short: Sequence[tuple[float, float]], long: Sequence[tuple[float, float]]) -> float | None:
    """The length from which the second takes less time than the first, between points on logarithmic scales."""
    ratios = [(x, math.log(b / a)) for (x, a), (_, b) in zip(short, long, strict=True)]
    if ratios[0][1] <= 0:
        return ratios[0][0]
    for (x, one), (following, two) in itertools.pairwise(ratios):
        if two <= 0:
            return math.exp(math.log(x) + one / (one - two) * math.log(following / x))
    return None


def example(context: Context) -> Iterator[Part]:
    """Operations and bytes, then times by length."""
    heads, dim = context.pick(gpu=(16, 128), cpu=(4, 32))
    lengths = context.pick(gpu=(1024, 2048, 4096, 8192, 16384), cpu=(128, 256, 512, 1024, 2048))
    dtype = context.pick(gpu=torch.bfloat16, cpu=torch.float32)
    ways = {
        "softmax, fused": softmax_attention,
        "linear, in chunks": kernels.linear_attention if context.gpu else chunked,
        "linear, naive": naive_linear_attention,
    }

    def inputs(tokens: int) -> list[Tensor]:
        return [torch.randn(1, heads, tokens, dim, dtype=dtype, device=context.tensors) for _ in range(3)]

    tokens = min(lengths[-1], LONGEST_NAIVE)
    table = [(name, *_counts(name, heads, tokens, dim, dtype.itemsize)) for name in ways]
    yield Table(
        title=f"{tokens} tokens, {heads} heads of {dim}, causal",
        headers=("", "operations", "bytes", "FLOP per byte"),
        rows=tuple((name, quantity(a, "FLOP"), quantity(b, "B"), significant(a / b, 2)) for name, a, b in table),
        note=f"In chunks of {CHUNK}: within a chunk as softmax attention, and a state of {dim} x {dim} from one to the"
        " next. Naive: a state for each token, written, summed along tokens, and read.",
    )
    soft, _, plain = table
    ridge = context.machine.ridge(str(dtype).removeprefix("torch."))
    yield from prose(
        f"By operations the naive form is {significant(soft[1] / plain[1], 2)} times cheaper than softmax attention at"
        f" this length. By bytes it is {plain[2] / soft[2]:.0f} times dearer, with"
        f" {significant(plain[1] / plain[2], 2)} FLOP for a byte where the ridge here is at {significant(ridge, 2)}."
    )

    # On a CPU their steps wait for each other, and the naive one's fetch a line of the cache for each number: what is
    # predicted knows neither, and is the least that they take.
    bands = {} if context.gpu else {"linear, in chunks": FLOOR, "linear, naive": FLOOR}
    predictions: dict[str, list[tuple[int, Prediction]]] = {name: [] for name in ways}
    for length in lengths:
        for name, way in ways.items():
            if name == "linear, naive" and length > LONGEST_NAIVE:
                continue
            row = context.row(f"{name}, {length}", way, *inputs(length), band=bands.get(name), max_seconds=0.25)
            predictions[name].append((length, row))
    for name, rows in predictions.items():
        yield prediction_table(name, [row for _, row in rows])

    def times(name: str, measured: bool) -> list[tuple[float, float]]:
        pairs = ((length, row.measured if measured else row.predicted) for length, row in predictions[name])
        return [(float(length), value) for length, value in pairs if value is not None]

    series = [
        Series(
            name=f"{name}, {how}", points=tuple(times(name, how == "measured")), color=number, dashed=how != "measured"
        )
        for how in (("predicted", "measured") if context.measures else ("predicted",))
        for number, name in enumerate(ways)
    ]
    yield Plot(title="Time by length", series=tuple(series), x_label="tokens", y_label="time", log_x=True, log_y=True)
    for how in ("predicted", "measured") if context.measures else ("predicted",):
        curves = [times(name, how == "measured") for name in ways]
        where = crossing(curves[0], curves[1])
        losing = sum(naive > soft for (_, soft), (_, naive) in zip(curves[0], curves[2], strict=False))
        if where is None:
            said = f"softmax attention is the faster one up to {lengths[-1]} tokens"
        elif where <= lengths[0]:
            said = f"linear attention in chunks is the faster one from {lengths[0]} tokens on"
        else:
            said = f"linear attention in chunks overtakes softmax attention at about {significant(where, 2)} tokens"
        yield from prose(
            f"As {how}, {said}; the naive form is slower than softmax attention at {losing} of {len(curves[2])}"
            " lengths."
        )


def _counts(name: str, heads: int, tokens: int, dim: int, item: int) -> tuple[float, float]:
    """Operations and bytes of the products, and of what goes through memory."""
    through = 4 * heads * tokens * dim * item
    if name.startswith("softmax"):
        return 2.0 * heads * tokens * tokens * dim, float(through)
    states = heads * tokens * dim * dim
    if name.endswith("naive"):
        return 4.0 * states, float(through + 4 * states * item)
    return 4.0 * states + 2.0 * heads * tokens * CHUNK * dim, float(through)
