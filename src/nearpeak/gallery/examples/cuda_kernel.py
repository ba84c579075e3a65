"""CUDA from the start: one loop, a grid of threads, and what makes threads slow.

A kernel is the body of a loop. The loop itself is the grid: every thread computes its own index and does one turn, or
every so-many-th turn. Kernels of the same arithmetic differ in speed many times, for four reasons: how the addresses of
neighboring threads lie in memory (coalescing), whether they take the same branch (divergence), how many of them are in
flight while memory answers (occupancy), and which bank of shared memory they address. Each reason is a pair of kernels
in CUDA C++ here, compiled on your machine, with the ratio predicted before it is measured. The same loop runs in C on
the CPU, with the two effects that a core has as well.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nearpeak.gallery import native
from nearpeak.gallery.parts import Drawing, Part, Plot, Prediction, prediction_table, prose
from nearpeak.gallery.run import Context
from nearpeak.render.document import CodeBlock
from nearpeak.render.picture.plot import Series
from nearpeak.render.picture.scene import Polygon, Scene, Shape, Text, rectangle
from nearpeak.render.picture.svg import svg
from nearpeak.units import quantity, significant

CUDA_LOOP = """
extern "C" __global__ void saxpy(const float* x, float* y, int n) {
    int first = blockIdx.x * blockDim.x + threadIdx.x;
    int threads = gridDim.x * blockDim.x;
    for (int i = first; i < n; i += threads)
        y[i] = 2.0f * x[i] + y[i];
}
"""
WIDE_LOOP = """
extern "C" __global__ void saxpy4(const float4* x, float4* y, int n) {
    int first = blockIdx.x * blockDim.x + threadIdx.x;
    int threads = gridDim.x * blockDim.x;
    for (int i = first; i < n / 4; i += threads) {  // 16 bytes at once
        float4 a = x[i], b = y[i];
        b.x += 2.0f * a.x; b.y += 2.0f * a.y;
        b.z += 2.0f * a.z; b.w += 2.0f * a.w;
        y[i] = b;
    }
}
"""
C_LOOP = """
void saxpy(const float *x, float *y, long n) {
    for (long i = 0; i < n; ++i)
        y[i] = 2.0f * x[i] + y[i];
}
"""
C_PAIRS = """
/* Every element once: along a line, or one of each line at a time. */
float in_steps(const float *x, long n, long step) {
    float sums[8] = {0};
    for (long start = 0; start < step; ++start)
        for (long i = start; i < n; i += 8 * step)
            for (int k = 0; k < 8; ++k) sums[k] += x[i + k * step];
    float sum = 0.0f;
    for (int k = 0; k < 8; ++k) sum += sums[k];
    return sum;
}
/* One sum: each addition waits for the one before. */
float one_chain(const float *x, long n, long turns) {
    float sum = 0.0f;
    for (long turn = 0; turn < turns; ++turn)
        for (long i = 0; i < n; ++i) sum += x[i];
    return sum;
}
/* Eight sums: additions that do not wait for each other. */
float eight_chains(const float *x, long n, long turns) {
    float sums[8] = {0};
    for (long turn = 0; turn < turns; ++turn)
        for (long i = 0; i < n; i += 8)
            for (int k = 0; k < 8; ++k) sums[k] += x[i + k];
    float sum = 0.0f;
    for (int k = 0; k < 8; ++k) sum += sums[k];
    return sum;
}
"""
COALESCING = """
// Every element is read once. With step 1 a warp reads 128 adjacent
// bytes, with step 32 one element of 32 different lines.
extern "C" __global__ void gather(
    const float* x, float* y, int n, int step, int bits
) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int line = i & ((1 << bits) - 1);  // 2^bits * step = n
    y[i] = x[line * step + (i >> bits)];
}
"""
DIVERGENCE = """
// Two branches of the same length. With shift 5 a warp takes one of
// them, with shift 0 every other thread does.
extern "C" __global__ void branches(float* y, int n, int shift, int turns) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float value = y[i];
    if ((i >> shift) & 1)
        for (int turn = 0; turn < turns; ++turn)
            value = fmaf(value, 0.999f, 0.1f);
    else
        for (int turn = 0; turn < turns; ++turn)
            value = fmaf(value, value, -0.3f);
    y[i] = value;
}
"""
BANKS = """
// With step 1 a warp reads 32 banks, with step 32 one bank 32 times.
extern "C" __global__ void banks(float* y, int step, int turns) {
    __shared__ float tile[4096];
    for (int i = threadIdx.x; i < 4096; i += blockDim.x) tile[i] = i;
    __syncthreads();
    int place = threadIdx.x * step;
    float sum = 0.0f;
    #pragma unroll 16
    for (int turn = 0; turn < turns; ++turn)
        sum += tile[(place + 32 * turn) & 4095];
    if (sum < 0.0f) y[0] = sum;
}
"""
WARP, ITEM = 32, 4
MEMORY_BYTES = 64
"""Bytes that the memory of an NVIDIA data center GPU gives at the least: two sectors of 32."""
MEMORY_CYCLES = {"load": 479, "turn": 850}
"""Cycles of a load from memory (H100: Luo et al., "Dissecting the NVIDIA Hopper Architecture through Microbenchmarking
and Multiple Level Analysis", 2025), and of a turn of the loop, which also stores (measured on an H200)."""
NARROW = (0.9, 2.2)
"""Band of kernels that load 4 bytes at a time: their bytes are the least that they take."""
WARPS = (1, 2, 4, 8, 16, 32, 64)
"""Of each multiprocessor, for the picture of occupancy."""
LINE_BYTES = 64
"""A cache line of a CPU."""
CORE_HZ = 3e9
"""About the clock of a core under load; its system does not tell the one that it has."""
ADD_CYCLES = 4
"""Latency of a float addition on current cores: uops.info."""


def example(context: Context) -> Iterator[Part]:
    """The loop, its grid, and the pairs."""
    yield from prose("The loop in C, for one core, and the same loop in CUDA C++, for any number of threads:")
    yield CodeBlock(text=C_LOOP.strip(), language="c")
    yield CodeBlock(text=CUDA_LOOP.strip(), language="cpp")
    yield from prose(
        "Threads are numbered in blocks, and blocks in a grid. A block runs on one multiprocessor, where its threads"
        " share memory and may wait for each other; blocks run in any order. 32 threads with adjacent numbers are a"
        " warp, and execute the same instruction at the same time. Where there are fewer threads than elements, each"
        " takes further turns of the loop; where there are more, some take none."
    )
    yield draw_grid()
    yield from (_on_gpu(context) if context.gpu else _on_cpu(context))


def _on_gpu(context: Context) -> Iterator[Part]:
    problem = native.cuda_problem() if context.measures else ""
    runs = context.measures and not problem
    here = context if runs else Context(machine=context.machine, device=context.device, measures=False)
    if problem:
        yield from prose(f"The kernels cannot be compiled here, as {problem}; predictions only.")
    machine = context.machine
    ceilings = machine.achievable or machine.theoretical
    processors, clock = machine.processors, machine.clock_boost_hz
    if ceilings is None or not processors or not clock:
        yield from prose("The number of multiprocessors or the clock of this GPU is not known: no predictions.")
        return
    n = 2**26
    size = n * ITEM
    x, y = (torch.randn(n if here.measures else 0, device=here.tensors) for _ in range(2))

    def call(source: str, name: str, blocks: int, block: int, *args: Any) -> Callable[[], None]:
        kernel = native.cuda_kernel(source, name) if here.measures else None
        return partial(_launch, kernel, (blocks, 1, 1), (block, 1, 1), args)

    blocks = math.ceil(n / 256)
    whole = 3 * size / ceilings.bandwidth
    rows = [
        here.row("torch, y.add_(x, alpha=2)", partial(_torch_saxpy, y, x), predicted=whole),
        here.row(
            "CUDA C++, 4 bytes a load", call(CUDA_LOOP, "saxpy", blocks, 256, x, y, n), predicted=whole, band=NARROW
        ),
        here.row("CUDA C++, 16 bytes a load", call(WIDE_LOOP, "saxpy4", blocks // 4, 256, x, y, n), predicted=whole),
    ]
    yield from prose("The same with 16 bytes per load, as torch's kernels have it:")
    yield CodeBlock(text=WIDE_LOOP.strip(), language="cpp")
    yield prediction_table(
        f"The loop over {n} elements: 12 bytes for each at the machine's bandwidth",
        rows,
        note="With 4 bytes per load there are four times as many loads, and too few bytes in flight; with 16 a few"
        " lines reach what torch reaches, and there is nothing left to win but bytes.",
    )

    coalesced = 2 * size / ceilings.bandwidth
    apart = (MEMORY_BYTES + ITEM) * n / ceilings.bandwidth
    pairs = [
        here.row(
            "coalesced: step 1",
            call(COALESCING, "gather", blocks, 256, x, y, n, 1, 26),
            predicted=coalesced,
            band=NARROW,
        ),
        here.row(
            "not coalesced: step 32",
            call(COALESCING, "gather", blocks, 256, x, y, n, 32, 21),
            predicted=apart,
            band=(0.45, 1.25),
        ),
    ]
    turns = 4096
    threads = processors * 2048
    one_way = threads * turns / (processors * 128 * clock)
    floats = torch.zeros(threads if here.measures else 0, device=here.tensors)
    pairs += [
        here.row(
            "one branch for a warp",
            call(DIVERGENCE, "branches", threads // 256, 256, floats, threads, 5, turns),
            predicted=one_way,
            band=(0.9, 2.0),
        ),
        here.row(
            "two branches in a warp",
            call(DIVERGENCE, "branches", threads // 256, 256, floats, threads, 0, turns),
            predicted=2 * one_way,
            band=(0.9, 2.0),
        ),
    ]
    loads = 2 * 32 * 2048  # of warps on one multiprocessor: two blocks of 32 warps
    pairs += [
        here.row(
            f"shared memory, {banks}",
            call(BANKS, "banks", 2 * processors, 1024, floats, step, 2048),
            predicted=loads * conflicts / clock,
            band=band,
        )
        for banks, step, conflicts, band in (
            ("32 banks", 1, 1, (0.9, 2.5)),
            ("one bank", 32, 32, (0.8, 1.3)),
        )
    ]
    yield from prose(
        f"Coalescing: a warp that reads adjacent elements needs {WARP * ITEM} bytes, in four sectors of 32."
        f" With its elements in 32 lines, memory gives {MEMORY_BYTES} bytes for each {ITEM}: with the result"
        f" {MEMORY_BYTES + ITEM} bytes in place of {2 * ITEM}. Divergence: a warp with two branches executes both, each"
        " with half of its threads switched off. Banks: shared memory has 32, each of which gives 4 bytes per"
        " cycle; threads that address different words of one bank take turns."
    )
    yield CodeBlock(text=COALESCING.strip(), language="cpp")
    yield CodeBlock(text=DIVERGENCE.strip(), language="cpp")
    yield CodeBlock(text=BANKS.strip(), language="cpp")
    yield prediction_table("Three pairs of kernels that do the same work", pairs)
    named = zip(("coalescing", "divergence", "banks"), zip(pairs[::2], pairs[1::2], strict=True), strict=True)
    yield from _ratios(dict(named))

    yield from _occupancy(here, call, ceilings.bandwidth, processors, clock)


def _launch(kernel: Any, grid: tuple[int, int, int], block: tuple[int, int, int], args: tuple[Any, ...]) -> None:
    kernel(grid=grid, block=block, args=list(args))


def _ratios(pairs: dict[str, tuple[Prediction, Prediction]]) -> Iterator[Part]:
    """The slower of each pair against the faster."""
    said = []
    for name, (fast, slow) in pairs.items():
        assert fast.predicted and slow.predicted
        text = f"{name} {significant(slow.predicted / fast.predicted, 2)} times predicted"
        if fast.measured and slow.measured:
            text += f", {significant(slow.measured / fast.measured, 2)} measured"
        said.append(text)
    yield from prose(f"The slower of each pair against the faster: {'; '.join(said)}.")


def _occupancy(
    context: Context, call: Callable[..., Callable[[], None]], bandwidth: float, processors: int, clock: float
) -> Iterator[Part]:
    """The loop with more and more warps: bytes in flight over the latency, until the bandwidth is reached."""
    n = 2**24
    x, y = (torch.randn(n if context.measures else 0, device=context.tensors) for _ in range(2))
    rows, moved = [], 3 * n * ITEM
    for warps in WARPS:
        in_flight = processors * warps * WARP * 3 * ITEM
        rate = min(bandwidth, in_flight / (MEMORY_CYCLES["turn"] / clock))
        block = min(warps, 8) * WARP
        launched = call(CUDA_LOOP, "saxpy", processors * warps * WARP // block, block, x, y, n)
        rows.append(context.row(f"{warps} warps", launched, predicted=moved / rate, band=(0.6, 1.6), max_seconds=0.2))
    needed = bandwidth * MEMORY_CYCLES["turn"] / clock
    yield from prose(
        f"Occupancy: a load takes about {MEMORY_CYCLES['load']} cycles, a turn of the loop about"
        f" {MEMORY_CYCLES['turn']}, and a thread waits meanwhile. To keep {quantity(bandwidth, 'B/s')} busy,"
        f" {quantity(needed, 'B')} must be in flight (Little's law), {quantity(needed / processors, 'B')} on each of"
        f" {processors} multiprocessors. With 12 bytes for a thread that takes"
        f" {needed / processors / (12 * WARP):.0f} warps of the 64 that a multiprocessor holds."
    )
    yield prediction_table("The loop with a fixed number of warps on each multiprocessor", rows)
    ways = ("predicted", "measured") if context.measures else ("predicted",)
    yield Plot(
        title="Latency hiding",
        series=tuple(
            Series(
                name=how,
                points=tuple(
                    (float(warps), moved / time)
                    for warps, row in zip(WARPS, rows, strict=True)
                    if (time := getattr(row, how))
                ),
                line=how == "predicted",
            )
            for how in ways
        ),
        x_label="warps per multiprocessor",
        y_label="B/s",
        y_unit="B/s",
        log_x=True,
        log_y=True,
    )


def _on_cpu(context: Context) -> Iterator[Part]:
    """The loop in C beside torch, and the two effects that a core shares with a GPU."""
    ceilings = context.machine.achievable or context.machine.theoretical
    assert ceilings is not None
    library = native.compile_c(C_LOOP + C_PAIRS) if context.measures else None
    if context.measures and library is None:
        yield from prose("There is no C compiler here (cc, gcc or clang): predictions only.")
        context = Context(machine=context.machine, device=context.device, measures=False)
    n = 2**23
    x, y = (torch.randn(n) for _ in range(2))

    def call(name: str, *args: Any) -> Callable[[], Any]:
        if library is None:
            return lambda: None
        function = getattr(library, name)
        return partial(function, *(native.pointer(arg) if isinstance(arg, Tensor) else arg for arg in args))

    count = ctypes.c_long(n)
    whole = 3 * n * ITEM / ceilings.bandwidth
    yield prediction_table(
        f"The loop over {n} elements: 12 bytes for each at the machine's bandwidth",
        [
            context.row("torch, all threads", partial(_torch_saxpy, y, x), predicted=whole, band=(0.5, 3.0)),
            context.row("saxpy in C, one thread", call("saxpy", x, y, count), predicted=whole, band=(0.5, 4.0)),
        ],
        note="One core may not reach the bandwidth of all of them.",
    )
    small, turns = 2048, 512
    short = torch.randn(small)
    lines = [
        context.row(
            f"step {step}",
            call("in_steps", x, count, ctypes.c_long(step)),
            predicted=n * min(LINE_BYTES, ITEM * step) / ceilings.bandwidth,
            band=(0.3, 4.0),
        )
        for step in (1, 16)
    ]
    cycle = 1 / CORE_HZ
    chains = [
        context.row(
            name,
            call(function, short, ctypes.c_long(small), ctypes.c_long(turns)),
            predicted=small * turns * ADD_CYCLES / independent * cycle,
            band=(0.4, 2.5),
            cache="hot",
        )
        for name, function, independent in (("one sum", "one_chain", 1), ("eight sums", "eight_chains", 8))
    ]
    yield from prose(
        f"A core has cache lines of {LINE_BYTES} bytes where a warp has sectors: a loop with a step of 16 elements"
        " takes a whole line for each element. It also has latency to hide: an addition takes about"
        f" {ADD_CYCLES} cycles, and a sum in which each addition waits for the one before takes all of them. Eight sums"
        " beside each other are eight additions in flight, in one vector. The kernels for coalescing, divergence, banks"
        " and occupancy need an NVIDIA GPU; `nearpeak gallery cuda_kernel --on h100-sxm` predicts them."
    )
    yield CodeBlock(text=C_PAIRS.strip(), language="c")
    yield prediction_table("Two pairs of loops that do the same work", [*lines, *chains])
    yield from _ratios({"lines": (lines[0], lines[1]), "chains": (chains[1], chains[0])})


def _torch_saxpy(y: Tensor, x: Tensor) -> Tensor:
    return y.add_(x, alpha=2.0)


def draw_grid() -> Drawing:
    """A grid of three blocks of 64 threads over 170 elements: two warps each, the last of them partly without work."""
    width, left, cell = 860, 30, 12.2
    shapes: list[Shape] = [Text(x=left, y=30, text="170 elements, blocks of 64 threads", size=17, bold=True)]
    for block in range(3):
        begin = left + block * (22 * cell)
        shapes += [
            Polygon(points=rectangle(begin, 48, 20.5 * cell, 116), fill="page", stroke="muted"),
            Text(x=begin + 8, y=66, text=f"blockIdx.x = {block}", size=12, bold=True),
        ]
        for thread in range(64):
            index = 64 * block + thread
            x = begin + 8 + (thread % 16) * (cell + 2.6)
            y = 78 + thread // 16 * 20
            fill = str(thread // WARP) if index < 170 else "faint"
            title = f"threadIdx.x = {thread}, element {index}" if index < 170 else "no element: the loop has no turn"
            shapes.append(Polygon(points=rectangle(x, y, cell, 15), fill=fill, opacity=0.8, stroke="page", title=title))
    legend = (("0", "warp 0: threads 0 to 31"), ("1", "warp 1: threads 32 to 63"), ("faint", "no element left"))
    for number, (fill, text) in enumerate(legend):
        x = left + 210 * number
        shapes += [
            Polygon(points=rectangle(x, 180, 14, 14), fill=fill, opacity=0.8),
            Text(x=x + 20, y=192, text=text, size=12),
        ]
    shapes.append(
        Text(x=left, y=220, text="i = blockIdx.x * blockDim.x + threadIdx.x: block 1, thread 5 has element 69", size=13)
    )
    described = (
        "Three blocks of 64 threads, drawn as squares in two warps each; 22 threads of the last have no element."
    )
    return Drawing(
        title="Grid, blocks, warps, threads",
        described=described,
        svg=svg(Scene(width=width, height=236, described=described, shapes=tuple(shapes))),
    )
