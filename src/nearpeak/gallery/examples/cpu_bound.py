"""A Python loop in front of a product: who waits for whom, and five clocks that disagree.

A GPU works through a queue, and Python fills it. As long as Python is faster, what it does costs nothing; when it is
slower, the GPU waits, and the time of a step is Python's. Which of the two is timed depends on the clock: there are
five, their answers for the same call differ, and all are right. On a CPU there is no queue, and both times add up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from nearpeak.gallery.parts import Part, Plot, Prediction, prediction_table, prose
from nearpeak.gallery.run import Context
from nearpeak.render.picture.plot import Series
from nearpeak.units import percent, seconds

SHARES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
"""How long Python is busy before each product, as a share of the product's time."""


def busy(duration: float) -> None:
    """A loop that keeps Python busy for so long: it stands for whatever a program does between two launches."""
    until = time.perf_counter() + duration
    while time.perf_counter() < until:
        pass


def behind(duration: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A product behind a loop of so many seconds."""

    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        busy(duration)
        return a @ b

    return step


def example(context: Context) -> Iterator[Part]:
    """A loop that grows, then the clocks."""
    side = context.pick(gpu=4096, cpu=256)
    dtype = context.pick(gpu=torch.bfloat16, cpu=torch.float32)
    a, b = (torch.randn(side, side, dtype=dtype, device=context.tensors) for _ in range(2))
    product = context.predict(torch.mm, a, b)
    yield from prose(
        f"The product of two matrices of {side} x {side} is expected to take {seconds(product)} here. Before each one,"
        " Python is kept busy for a while by a loop that watches the clock, so that its time is known."
    )
    yield from (_with_queue if context.gpu else _without_queue)(context, a, b, product)


def _with_queue(context: Context, a: torch.Tensor, b: torch.Tensor, product: float) -> Iterator[Part]:
    # Many products without a pause may draw so much power that the clock falls: they may take longer than one alone.
    without_rest = (0.8, 1.4)
    rows = [
        context.row(
            f"loop of {seconds(share * product)}",
            behind(share * product),
            a,
            b,
            predicted=max(1.0, share) * product,
            band=without_rest if share <= 1 else None,
            kind="pipelined",
        )
        for share in SHARES
    ]
    yield prediction_table("Time of a step with many steps in flight: the longer of the two", rows)
    yield _picture(context, product, rows, "the longer of the two", max)
    yield from prose(
        f"Up to a loop of {seconds(product)} the steps are to take no longer than the product alone: Python is ahead,"
        " and its work is hidden. Beyond that every microsecond of Python is a microsecond of the step, and the GPU"
        " idles in between: the program is CPU-bound. A faster kernel would change nothing there."
    )
    host = SHARES[-1] * product
    # A launch takes microseconds itself, which is little beside this loop: it is left out.
    clocks = {
        "device": ("the GPU works on a call", product),
        "graph": ("a call replayed in a CUDA graph", product),
        "pipelined": ("many calls, one wait at the end", max(host, product)),
        "latency": ("one call, from idle to idle", host + product),
        "enqueue": ("until the call returns", host),
    }
    yield prediction_table(
        f"Five clocks, one call: a loop of {seconds(host)} and the product",
        [
            context.row(f"{kind}: {what}", behind(host), a, b, predicted=predicted, kind=kind)
            for kind, (what, predicted) in clocks.items()
        ],
    )
    yield from prose(
        f"Two numbers give all five: the loop, {seconds(host)}, and the product, {seconds(product)}. A host clock"
        " without a wait sees the loop alone; with a wait after each call it sees the sum; with one wait after many"
        " calls the longer of the two. The GPU's own clock sees the product alone, and would praise a program that"
        f" uses the GPU {percent(product / host, 0)} of the time.",
        "A CUDA graph keeps the launches and leaves Python out: the loop ran once, while the graph was recorded. What"
        f" is replayed takes {seconds(product)}, {host / product:.0f} times less than the step in Python. The loop's"
        " work is not done again either, so a graph suits code whose Python does nothing but launch.",
    )


def _without_queue(context: Context, a: torch.Tensor, b: torch.Tensor, product: float) -> Iterator[Part]:
    rows = [
        context.row(
            f"loop of {seconds(share * product)}",
            behind(share * product),
            a,
            b,
            predicted=(1 + share) * product,
        )
        for share in SHARES
    ]
    yield prediction_table("Time of a step on a CPU: the sum of the two", rows)
    yield _picture(context, product, rows, "the sum of the two", lambda one, other: one + other)
    host = SHARES[-1] * product
    share = product / (host + product)
    yield from prose(
        "A call on a CPU returns when its work is done, so there is one clock, and no loop is ever hidden: each second"
        f" of Python is a second of the step. With the longest loop the product is {percent(share, 0)} of the step,"
        " and the fastest product there can be saves no more than that. A GPU with a product of the same length would"
        f" hide loops of up to {seconds(product)}: the second line."
    )
    yield prediction_table(
        "With a product that takes next to nothing",
        [context.row(f"loop of {seconds(host)}, 1 x 1", behind(host), a[:1, :1], b[:1, :1], predicted=host)],
    )


def _picture(
    context: Context, product: float, rows: Sequence[Prediction], name: str, together: Callable[[float, float], float]
) -> Plot:
    ends = [SHARES[-1] * product * step / 32 for step in range(33)]
    series = [
        Series(name=f"predicted: {name}", points=tuple((at, together(at, product)) for at in ends), markers=False),
        Series(
            name="predicted: a CUDA graph" if context.gpu else "with a queue: the longer of the two",
            points=tuple((at, product if context.gpu else max(at, product)) for at in ends),
            markers=False,
            dashed=True,
        ),
    ]
    if context.measures:
        bars = tuple(
            (share * product, row.measured) for share, row in zip(SHARES, rows, strict=True) if row.measured is not None
        )
        series.append(Series(name="measured", points=bars, line=False))
    return Plot(
        title="A loop in front of a product",
        series=tuple(series),
        x_label="Python before each product",
        y_label="time of a step",
        x_unit="s",
    )
