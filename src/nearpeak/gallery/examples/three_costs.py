"""The three costs of a kernel: moving bytes, doing operations, and being started at all.

Every kernel costs three times: what its bytes take through memory, what its operations take on the units that do them,
and a fixed time however little there is to do. The first two overlap, so the longer one is the bound. Which of the
three counts follows from sizes alone: adding matrices is memory, multiplying them is compute, small work is overhead.
The same product is both in a language model: a matrix times a matrix for a prompt, a vector times a matrix for each
token that is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from nearpeak.gallery.parts import Part, Prediction, StackedBars, prediction_table, prose
from nearpeak.gallery.run import Context
from nearpeak.render.document import Table
from nearpeak.render.picture.bars import Bar
from nearpeak.units import quantity, seconds, significant


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """A call, counted, and its three costs on a machine."""

    name: str
    fn: Callable[..., Any]
    args: tuple[torch.Tensor, ...]
    flops: float
    bytes: float
    memory: float
    compute: float
    overhead: float

    @property
    def limit(self) -> str:
        """The largest of the three."""
        return max(("memory", "compute", "overhead"), key=lambda name: getattr(self, name))


def example(context: Context) -> Iterator[Part]:
    """Four calls: predicted part by part, then measured."""
    side, tokens = context.pick(gpu=(8192, 4096), cpu=(2048, 128))
    half = context.pick(gpu=torch.bfloat16, cpu=torch.float32)
    added = context.pick(gpu=8192, cpu=2048)

    def draw(*shape: int, dtype: torch.dtype = half) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device=context.tensors)

    full = torch.float32
    weight = draw(side, side)
    calls = [
        _costs(context, "add", torch.add, draw(added, added, dtype=full), draw(added, added, dtype=full)),
        _costs(context, "add, small", torch.add, draw(16, 16, dtype=full), draw(16, 16, dtype=full)),
        _costs(context, "prefill", torch.mm, draw(tokens, side), weight),
        _costs(context, "decode", torch.mm, draw(1, side), weight),
    ]
    _, small, prefill, decode = calls
    yield from prose(
        f"Adding two matrices of {added} x {added} numbers of 4 bytes reads two and writes one: 12 bytes and 1"
        f" operation for each number. Multiplying {tokens} rows by a matrix of {side} x {side} does 2 operations"
        " for each row and each number of the matrix, which is read once. That is what a layer of a language model"
        f" does with a prompt of {tokens} tokens (prefill); when it writes, it does the same with the one row of the"
        " last token (decode)."
    )
    yield Table(
        title=f"Counted, and divided by what {context.machine.name} does in a second",
        headers=("", "FLOP", "bytes", "FLOP/B", "memory", "compute", "overhead", "largest"),
        align="lrrrrrrl",
        rows=tuple(
            (
                one.name,
                quantity(one.flops, ""),
                quantity(one.bytes, "B"),
                significant(one.flops / one.bytes),
                *(seconds(part) for part in (one.memory, one.compute, one.overhead)),
                one.limit,
            )
            for one in calls
        ),
        note="Overhead: what is expected of the same operation on a single number.",
    )
    yield StackedBars(
        title="The three costs of each call",
        subtitle="One after the other; in truth they overlap, and the longest is the bound",
        are_summed=False,
        bars=tuple(
            Bar(
                name=one.name,
                pieces=(("memory", one.memory), ("compute", one.compute), ("overhead", one.overhead)),
            )
            for one in calls
        ),
    )
    rows = {one.name: _row(context, one) for one in calls}
    yield prediction_table(
        "Expected of good kernels, and measured",
        list(rows.values()),
        note="Kernels do not reach the bound: what is predicted is the bound times what kernels of the same kind and"
        " size were seen to take.",
    )
    yield from _tokens(rows["prefill"], rows["decode"], prefill, decode, tokens)
    yield from prose(
        f"The small addition has {quantity(small.bytes, 'B')} to move, which takes {seconds(small.memory)}, and is"
        f" expected to take {seconds(small.overhead)}: nearly all of that is for starting it. Making it faster means"
        " not starting it: doing it inside another kernel, or many of them at once."
    )


def _costs(context: Context, name: str, fn: Callable[..., Any], *args: torch.Tensor) -> Costs:
    """Counted by `nearpeak.estimate`; the overhead is that of the same call on one number."""
    ceilings = context.machine.achievable or context.machine.theoretical
    assert ceilings is not None
    estimate = context.estimate(fn, *args)
    (op,) = estimate.ops
    table = ceilings.vector if op.engine == "vector" else ceilings.matrix
    peak = table.get(op.dtype) or ceilings.peak(op.dtype)
    return Costs(
        name=name,
        fn=fn,
        args=args,
        flops=estimate.flops,
        bytes=estimate.bytes,
        memory=estimate.bytes / ceilings.bandwidth,
        compute=estimate.flops / peak,
        overhead=context.predict(fn, *(one[:1, :1] for one in args)),
    )


def _row(context: Context, one: Costs) -> Prediction:
    # Some microseconds of fixed cost differ between kernels of one kind more than long times do.
    band = (0.5, 2.0) if one.limit == "overhead" else None
    return context.row(one.name, one.fn, *one.args, band=band)


def _tokens(prefill: Prediction, decode: Prediction, many: Costs, one: Costs, tokens: int) -> Iterator[Part]:
    """A token of a prompt against a token that is written, in what was predicted or measured."""
    measured = prefill.measured is not None and decode.measured is not None
    long, short = (row.measured if measured else row.predicted for row in (prefill, decode))
    assert long is not None and short is not None
    yield from prose(
        f"Prefill and decode multiply by the same matrix of {quantity(one.args[1].nbytes, 'B')}. The largest cost of"
        f" decode is {one.limit}: the matrix is read for a single row. That of prefill is {many.limit}: the matrix is"
        f" read once for {tokens} rows."
        f" {'Measured' if measured else 'Predicted'}, a token costs {seconds(short)} in decode and"
        f" {seconds(long / tokens)} in prefill, {significant(short * tokens / long, 2)} times less. Batches of requests"
        " make decode cheaper for the same reason: more rows for each time that the matrix is read."
    )
