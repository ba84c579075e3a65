"""Timing done wrong and right.

How long does a matrix product take? Two products of very different size are timed in every way that one finds in
scripts: with and without waiting for the device, without a warm-up, once and many times, with data that is still in
the cache. On a GPU a clock that does not wait gives the same answer for both, and one look at the number of operations
says that this cannot be. Each clock measures something; the question is what.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median

import torch

from nearpeak.gallery.parts import Drawing, Part, Prediction, prediction_table, prose
from nearpeak.gallery.run import Context
from nearpeak.render.document import Table
from nearpeak.render.picture.scene import Line, Polygon, Scene, Shape, Text
from nearpeak.render.picture.svg import svg
from nearpeak.units import quantity, seconds, significant

Pair = tuple[torch.Tensor, torch.Tensor]
Clock = Callable[[torch.Tensor, torch.Tensor], float | None]
REPEATS = 20


def naive(a: torch.Tensor, b: torch.Tensor) -> float:
    """The host's clock around one call. On a GPU nothing waits for the product."""
    start = time.perf_counter()
    a @ b
    return time.perf_counter() - start


def synchronized(a: torch.Tensor, b: torch.Tensor) -> float:
    """The host's clock from an idle device to an idle device."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    a @ b
    torch.cuda.synchronize()
    return time.perf_counter() - start


def events(a: torch.Tensor, b: torch.Tensor) -> float:
    """The device's clock, read before and after the call."""
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    a @ b
    after.record()
    torch.cuda.synchronize()
    return float(before.elapsed_time(after)) * 1e-3


def repeated(clock: Callable[..., float]) -> Clock:
    """The median of some readings, the device idle before each."""

    def several(a: torch.Tensor, b: torch.Tensor) -> float:
        readings = []
        for _ in range(REPEATS):
            readings.append(clock(a, b))
            if a.is_cuda:
                torch.cuda.synchronize()
        return median(readings)

    return several


def many(a: torch.Tensor, b: torch.Tensor) -> float:
    """The host's clock around a loop of calls."""
    start = time.perf_counter()
    for _ in range(REPEATS):
        a @ b
    return (time.perf_counter() - start) / REPEATS


def example(context: Context) -> Iterator[Part]:
    """Both products with every clock."""
    dtype = context.pick(gpu=torch.bfloat16, cpu=torch.float32)
    sizes = ((16, 32), context.pick(gpu=(4096, 8192), cpu=(512, 1024)))
    small, large = (
        (
            torch.randn(rows, inner, dtype=dtype, device=context.tensors),
            torch.randn(inner, rows, dtype=dtype, device=context.tensors),
        )
        for rows, inner in sizes
    )
    names = [f"{rows} x {inner}" for rows, inner in sizes]
    flops = [2 * rows * rows * inner for rows, inner in sizes]
    expected = [context.predict(torch.mm, *pair) for pair in (small, large)]
    yield from prose(
        f"A product of {names[0]} by {sizes[0][1]} x {sizes[0][0]} does {quantity(flops[0], 'FLOP')}, one of {names[1]}"
        f" by {sizes[1][1]} x {sizes[1][0]} does {quantity(flops[1], 'FLOP')}, {flops[1] / flops[0]:,.0f} times as"
        " many. They are expected to take"
        f" {seconds(expected[0])} and {seconds(expected[1])} here, a ratio of {significant(expected[1] / expected[0])};"
        " the small one takes what it costs to start anything at all."
    )
    clocks = _gpu_clocks(context) if context.gpu else _cpu_clocks(context)
    found: dict[str, list[float | None]] = {}
    for name, (_, clock) in clocks.items():
        context.progress(name)
        found[name] = [clock(*pair) if context.measures else None for pair in (small, large)]
    times = {name: tuple(map(seconds, readings)) if context.measures else () for name, readings in found.items()}
    yield Table(
        title="One product, many clocks",
        headers=("clock", *(names if context.measures else ()), "what it reads"),
        align="lrrl" if context.measures else "ll",
        rows=tuple((name, *times[name], meaning) for name, (meaning, _) in clocks.items()),
        below=3 if context.measures else 1,
    )
    yield from (_gpu_text if context.gpu else _cpu_text)(found, expected)
    low, high = context.band
    right = found["bench"]
    yield prediction_table(
        "The right clock: nearpeak.bench, after a warm-up, many times, with data from memory",
        [
            # All of the small one is fixed cost, which differs between kernels of one kind more than long times do.
            Prediction(what=names[0], predicted=expected[0], measured=right[0], low=min(low, 0.5), high=max(high, 2.0)),
            Prediction(what=names[1], predicted=expected[1], measured=right[1], low=low, high=high),
        ],
    )
    ratio = expected[1] / expected[0]
    rows = [Prediction(what="bench", predicted=ratio, measured=_ratio(right), low=0.4, high=2.5)]
    if context.gpu:  # without a wait both readings are those of a launch
        rows.insert(0, Prediction(what="naive", predicted=1.0, measured=_ratio(found["naive"]), low=0.5, high=2.0))
    yield prediction_table("How many times as long as the small product the large one seems to take", rows, unit="x")


def _ratio(readings: list[float | None]) -> float | None:
    first, second = readings
    return second / first if first and second else None


def _gpu_clocks(context: Context) -> dict[str, tuple[str, Clock]]:
    def bench(**options: str) -> Clock:
        return lambda a, b: context.measure(torch.mm, a, b, **options)

    return {
        "first call": ("no wait, no warm-up: with all that is done once, such as loading code", naive),
        "naive": ("no wait: the call has put the product into a queue and returned", repeated(naive)),
        "synchronized": ("launch, product and wait: what a single request sees", repeated(synchronized)),
        "events": ("the device's own clock: an idle device waits for the launch between the two", repeated(events)),
        "graph": ("replayed from a CUDA graph: no Python, hardly a launch", bench(kind="graph")),
        "bench, hot": ("the product alone, with what the call before it left in the cache", bench(cache="hot")),
        "bench": ("the product alone, with data from memory: the cache is swept first", bench()),
    }


def _cpu_clocks(context: Context) -> dict[str, tuple[str, Clock]]:
    def bench(**options: str) -> Clock:
        return lambda a, b: context.measure(torch.mm, a, b, **options)

    return {
        "first call": ("one call, no warm-up: with all that is done once, such as loading code", naive),
        "naive": ("the median of some calls: a call returns when it is done", repeated(naive)),
        "many": ("a loop of calls divided by their number: the clock is read once for all", many),
        "bench, hot": ("many loops of calls, with what the call before left in the cache", bench(cache="hot")),
        "bench": ("with data from memory: the cache is swept before each call", bench()),
    }


def _gpu_text(readings: dict[str, list[float | None]], expected: list[float]) -> Iterator[Part]:
    yield _lanes()
    text = (
        "The naive clock reads the same for both, because it never sees the product: a call on a GPU puts work into a"
        " queue and returns. What it reads is Python and the launch."
    )
    naive_ratio, waited = _ratio(readings["naive"]), readings["synchronized"][0]
    if naive_ratio is not None and waited is not None:
        text = (
            f"The naive clock reads {seconds(readings['naive'][0])} and {seconds(readings['naive'][1])}: it never sees"
            " the product. A call on a GPU puts work into a queue and returns; what is read is Python and the launch."
            f" With a wait the small product reads {seconds(waited)}, and is expected to take {seconds(expected[0])}:"
            " the rest is the way to the device and back."
        )
    yield from prose(
        text,
        "A wait makes the time right for a request that comes alone. For the time of the product the launch must be"
        " hidden behind other work or left out (a graph), the device must be warm, and the cache must hold what it"
        " would hold in the program: as a rule, not the operands.",
    )


def _cpu_text(readings: dict[str, list[float | None]], expected: list[float]) -> Iterator[Part]:
    start = time.perf_counter()
    for _ in range(1000):
        time.perf_counter()
    tick = (time.perf_counter() - start) / 1000
    text = "On a CPU there is no queue: a call returns when its work is done, and a plain clock does see it."
    first, naive_small, hot, cold = (readings[name][0] for name in ("first call", "naive", "bench, hot", "bench"))
    if first and naive_small and hot and cold:
        text += (
            f" What is left are three mistakes. The first call of the small product took {first / naive_small:.1f}"
            f" times as long as the median of {REPEATS}. Reading the clock takes {seconds(tick)} itself, which is"
            f" {100 * tick / hot:.1f} % of the small product. And with data from memory it takes {cold / hot:.1f} times"
            " as long as with data that the call before it left in the cache."
        )
    yield from prose(text)


def _lanes() -> Drawing:
    """Host above, device below, and from where to where each clock reads; not to scale."""
    host, device, top, height = (150.0, 290.0), (330.0, 640.0), 70.0, 30.0
    lanes = (("host", "call", host, "0", top), ("device", "product", device, "1", top + 50))
    shapes: list[Shape] = [Text(x=24, y=30, text="What each clock reads (not to scale)", size=16, bold=True)]
    for name, what, (start, end), color, y in lanes:
        box = ((start, y), (end, y), (end, y + height), (start, y + height))
        shapes.append(Text(x=24, y=y + 20, text=name))
        shapes.append(Polygon(points=box, fill=color, opacity=0.8))
        shapes.append(Text(x=(start + end) / 2, y=y + 20, text=what, anchor="middle", halo=True))
    clocks = {
        "naive": host,
        "synchronized": (host[0], device[1] + 60),
        "events": (host[0] + 40, device[1]),
        "graph, bench": device,
    }
    for number, (name, (start, end)) in enumerate(clocks.items()):
        y = top + 125 + 30 * number
        shapes.append(Text(x=24, y=y + 4, text=name))
        shapes.append(Line(points=((start, y), (end, y)), stroke="ink", width=2))
        shapes += [Line(points=((at, y - 6), (at, y + 6)), stroke="ink", width=2) for at in (start, end)]
    described = "A call on the host ends before the product on the device begins; the naive clock ends with the call."
    scene = Scene(width=760, height=330, described=described, shapes=tuple(shapes))
    return Drawing(title="What each clock reads", described=described, svg=svg(scene))
