"""The memory hierarchy, measured: registers, shared memory and L1, L2, memory, host.

Every level of memory is a trade: the nearer to the arithmetic, the faster and the smaller. Two numbers describe a
level. The latency is how long one load takes, measured by a chain of loads in which each address is the result of the
load before. The bandwidth is how much arrives per second when as many loads as possible are in flight. A kernel is fast
if most of its loads end high up, and good kernels are mostly arrangements for that. Both numbers of every level are
predicted from datasheets and published measurements, and then measured here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nearpeak.gallery import native
from nearpeak.gallery.parts import Drawing, Part, Prediction, prediction_table, prose
from nearpeak.gallery.run import Context
from nearpeak.machines.machine import Machine
from nearpeak.render.document import CodeBlock, Table
from nearpeak.render.picture.axis import Axis
from nearpeak.render.picture.scene import Line, Polygon, Scene, Shape, Text, rectangle
from nearpeak.render.picture.svg import svg
from nearpeak.units import quantity, seconds, significant

CHASE = """
// One thread follows a chain of indices, in memory or in shared memory.
extern "C" __global__ void chase(const int* next, int* out, int steps) {
    int place = 0;
    for (int step = 0; step < steps; ++step) place = next[place];
    *out = place;
}
extern "C" __global__ void chase_shared(int* out, int steps) {
    __shared__ int next[1024];
    for (int i = threadIdx.x; i < 1024; ++i) next[i] = (i + 33) & 1023;
    int place = 0;
    for (int step = 0; step < steps; ++step) place = next[place];
    *out = place;
}
"""
BANDWIDTH = """
// Every block reads its own `words` vectors of 16 bytes, `turns` times: through L1 (ca), or from L2 on (cg).
extern "C" __global__ void read_again(const float4* x, float* out, int words, int turns) {
    const float4* first = x + (size_t)blockIdx.x * words;
    float sum = 0.0f;
    for (int turn = 0; turn < turns; ++turn) {
        #pragma unroll 4
        for (int i = threadIdx.x; i < words; i += blockDim.x) {
            float a, b, c, d;
            asm volatile("ld.global.ca.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(a), "=f"(b), "=f"(c), "=f"(d) : "l"(first + i));
            sum += (a + b) + (c + d);
        }
    }
    if (sum == 1.2345f) *out = sum;
}
extern "C" __global__ void read_shared(float* out, int turns) {
    __shared__ float4 tile[2048];
    for (int i = threadIdx.x; i < 2048; i += blockDim.x) tile[i] = make_float4(i, i, i, i);
    __syncthreads();
    float4 sum = make_float4(0, 0, 0, 0);
    for (int turn = 0; turn < turns; ++turn) {
        #pragma unroll 4
        for (int i = threadIdx.x; i < 2048; i += blockDim.x) {
            float4 four = tile[i ^ (turn & 3)];
            sum.x += four.x; sum.y += four.y; sum.z += four.z; sum.w += four.w;
        }
    }
    if (sum.x + sum.y + sum.z + sum.w == 1.2345f) *out = sum.x;
}
extern "C" __global__ void registers(float* out, double x, int turns) {
    float a[8], f = x;
    for (int k = 0; k < 8; ++k) a[k] = threadIdx.x + k;
    for (int turn = 0; turn < turns; ++turn)
        #pragma unroll
        for (int k = 0; k < 8; ++k) a[k] = fmaf(a[k], f, a[k]);
    float sum = 0.0f;
    for (int k = 0; k < 8; ++k) sum += a[k];
    if (sum == 1.2345f) *out = sum;
}
"""
C_SOURCE = """
long chase(const int *next, long steps) {
    int place = 0;
    for (long step = 0; step < steps; ++step) place = next[place];
    return place;
}
float read_again(const float *x, long n, long turns) {
    float sums[64] = {0};
    for (long turn = 0; turn < turns; ++turn)
        for (long i = 0; i < n; i += 64)
            for (int k = 0; k < 64; ++k) sums[k] += x[i + k];
    float sum = 0.0f;
    for (int k = 0; k < 64; ++k) sum += sums[k];
    return sum;
}
"""
PAPER = (
    "Luo et al., Dissecting the NVIDIA Hopper Architecture through Microbenchmarking and Multiple Level Analysis, 2025"
)
GPU_CYCLES = {"shared memory": 29.0, "L1": 40.7, "L2": 263.0, "memory": 478.8}
"""Latencies of an H100 in cycles: `PAPER`."""
HOST_SECONDS = 1.0e-6
"""About a round trip over PCIe: Neugebauer et al., "Understanding PCIe performance for end host networking", 2018."""
CPU_SECONDS = {"L1d": 1.7e-9, "L2": 5e-9, "L3": 25e-9, "memory": 100e-9}
"""5 and 14 cycles at 3 GHz, and what current server processors take beyond: chipsandcheese.com."""
LINE = {"gpu": 128, "cpu": 64}
"""Bytes between the places of a chain, so that each is in a cache line of its own."""
LANES = 128
"""Multiply-adds of a multiprocessor per cycle, and bytes of its L1 and shared memory: NVIDIA H100 whitepaper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of memory, predicted and measured."""

    name: str
    capacity: float | None
    latency: Prediction | None
    bandwidth: Prediction | None


def example(context: Context) -> Iterator[Part]:
    """How it is measured, the levels, and the picture."""
    yield from prose(
        "A latency is the time per step of a chain: the next address is what the last load returned, so that no two"
        " loads overlap. A bandwidth is measured with all threads and 16 bytes per load."
    )
    yield CodeBlock(text=(CHASE if context.gpu else C_SOURCE).strip(), language="cpp" if context.gpu else "c")
    reason = ""
    if context.measures:
        reason = (
            native.cuda_problem() if context.gpu else "" if native.compile_c(C_SOURCE) else "there is no C compiler"
        )
    if reason:
        yield from prose(f"The loops cannot be compiled here, as {reason}: predictions only.")
        context = Context(machine=context.machine, device=context.device, measures=False)
    levels = list(_gpu_levels(context) if context.gpu else _cpu_levels(context))
    yield prediction_table(
        "Latency of a load",
        [level.latency for level in levels if level.latency],
        note=f"Predicted: cycles of an H100 ({PAPER}) at the clock of this GPU."
        if context.gpu
        else "Predicted: what current server processors take when nothing else runs; what other cores share may take"
        " longer.",
    )
    yield prediction_table(
        "Bandwidth",
        [level.bandwidth for level in levels if level.bandwidth],
        unit="B/s",
        note="Predicted: registers, three operands and a result of each multiply-add; shared memory and L1, 128 bytes"
        " per cycle and multiprocessor; the rest as calibrated or from the datasheet."
        if context.gpu
        else "Predicted: as calibrated, with all threads; here one core reads.",
    )
    yield draw(levels, context.measures)
    yield from _lesson(levels)


def chain(size: float, line: int, device: str) -> Tensor:
    """Indices that lead through all lines of `size` bytes once and back to the first.

    The order is random within 256 KiB at a time, so that no prefetcher guesses it and few pages are in use at once.
    """
    count, step = max(2, int(size) // line), line // 4
    generator = torch.Generator().manual_seed(0)
    pieces = torch.arange(count).split(2**18 // line)
    order = torch.cat([piece[torch.randperm(len(piece), generator=generator)] for piece in pieces]) * step
    indices = torch.zeros(count * step, dtype=torch.int32)
    indices[order] = order.roll(-1).to(torch.int32)
    return indices.to(device)


def _per_step(row: Prediction, steps: int) -> Prediction:
    """The time of one step, of a measurement of all of them."""
    measured = None if row.measured is None else row.measured / steps
    predicted = None if row.predicted is None else row.predicted / steps
    return Prediction(what=row.what, predicted=predicted, measured=measured, low=row.low, high=row.high)


def _rate(row: Prediction, moved: float) -> Prediction:
    """Bytes over time, the band turned around."""
    return Prediction(
        what=row.what,
        predicted=moved / row.predicted if row.predicted else None,
        measured=moved / row.measured if row.measured else None,
        low=1 / row.high if row.high else None,
        high=1 / row.low if row.low else None,
    )


def _gpu_levels(context: Context) -> Iterator[Level]:
    machine = context.machine
    ceilings = machine.achievable or machine.theoretical
    clock, processors = machine.clock_boost_hz or 1.5e9, machine.processors or 100
    assert ceilings is not None
    runs = context.measures
    out = torch.zeros(4, dtype=torch.int32, device=context.tensors)

    def call(source: str, name: str, blocks: int, block: int, *args: Any) -> Callable[[], None]:
        return partial(_launch, native.cuda_kernel(source, name) if runs else None, blocks, block, args)

    def latency(name: str, size: float, steps: int, predicted: float, **options: Any) -> Prediction:
        indices = chain(size, LINE["gpu"], context.device) if runs else None
        row = context.row(
            name,
            call(CHASE, "chase", 1, 1, indices, out, steps),
            predicted=predicted * steps,
            band=(0.6, 2.2),
            max_seconds=0.2,
            min_blocks=6,
            **options,
        )
        return _per_step(row, steps)

    def reading(name: str, size: float, blocks: int, turns: int, rate: float, **options: Any) -> Prediction:
        """The blocks read `size` bytes together, again and again."""
        words = int(size) // (16 * blocks)
        source = BANDWIDTH if name == "L1" else BANDWIDTH.replace("ld.global.ca", "ld.global.cg")
        data = torch.zeros(blocks * words * 4, device=context.tensors) if runs else None
        moved = float(blocks * words * 16 * turns)
        row = context.row(
            name,
            call(source, "read_again", blocks, 1024, data, out, words, turns),
            predicted=moved / rate,
            max_seconds=0.2,
            **options,
        )
        return _rate(row, moved)

    turns = 512
    threads = processors * 2048
    used = threads * 8 * turns * 16.0  # three operands and a result of 4 bytes
    registers = LANES * processors * clock * 16
    row = context.row(
        "registers",
        call(BANDWIDTH, "registers", threads // 512, 512, out, 0.5, turns),
        predicted=used / registers,
        band=(0.8, 1.4),
        max_seconds=0.2,
    )
    yield Level(name="registers", capacity=processors * 65536 * 4.0, latency=None, bandwidth=_rate(row, used))

    steps = 4096
    row = context.row(
        "shared memory",
        call(CHASE, "chase_shared", 1, 1, out, steps),
        predicted=GPU_CYCLES["shared memory"] / clock * steps,
        band=(0.6, 1.7),
        max_seconds=0.2,
    )
    near = LANES * processors * clock
    moved = 2 * processors * 32768.0 * turns
    wide = context.row(
        "shared memory",
        call(BANDWIDTH, "read_shared", 2 * processors, 512, out, turns),
        predicted=moved / near,
        band=(0.8, 1.6),
        max_seconds=0.2,
    )
    yield Level(
        name="shared memory",
        capacity=machine.shared_memory_bytes and processors * machine.shared_memory_bytes,
        latency=_per_step(row, steps),
        bandwidth=_rate(wide, moved),
    )
    yield Level(
        name="L1",
        capacity=None,
        latency=latency("L1", 16384, 16384, GPU_CYCLES["L1"] / clock),
        bandwidth=reading("L1", 65536 * processors, processors, 256, near, band=(0.8, 2.5)),
    )
    cached = (machine.achievable and machine.achievable.cache_bandwidth) or 2.0 * ceilings.bandwidth
    yield Level(
        name="L2",
        capacity=machine.cache_bytes,
        latency=latency("L2", 2**21, 16384, GPU_CYCLES["L2"] / clock, cache="hot"),
        bandwidth=reading("L2", 2**24, 2 * processors, 16, cached, band=(0.5, 1.6), cache="hot"),
    )
    yield Level(
        name="memory",
        capacity=machine.memory_bytes,
        latency=latency("memory", 2**28, 4096, GPU_CYCLES["memory"] / clock),
        bandwidth=reading("memory", 2**30, 16 * processors, 1, ceilings.bandwidth),
    )
    yield _host(context, machine)


def _host(context: Context, machine: Machine) -> Level:
    """Memory of the host, over PCIe: a chain by a thread of the GPU, and a copy."""
    runs, steps, size = context.measures, 256, 2**28
    ceilings = machine.achievable
    rate = (ceilings and ceilings.host_to_device) or (0.85 * machine.pcie.bandwidth if machine.pcie else 2e10)
    out = torch.zeros(4, dtype=torch.int32, device=context.tensors)
    indices = chain(2**22, LINE["gpu"], "cpu").pin_memory() if runs else None
    kernel = native.cuda_kernel(CHASE, "chase") if runs else None
    row = context.row(
        "host",
        partial(_launch, kernel, 1, 1, (indices, out, steps)),
        predicted=HOST_SECONDS * steps,
        band=(0.5, 2.5),
        max_seconds=0.2,
    )
    if runs:
        source, target = torch.empty(size, dtype=torch.uint8).pin_memory(), torch.empty(size, dtype=torch.uint8).cuda()
        copied = context.row("host", partial(_copy, target, source), predicted=size / rate, max_seconds=0.2)
    else:
        copied = Prediction(what="host", predicted=size / rate, measured=None)
    return Level(name="host", capacity=None, latency=_per_step(row, steps), bandwidth=_rate(copied, size))


def _launch(kernel: Any, blocks: int, block: int, args: tuple[Any, ...]) -> None:
    kernel(grid=(blocks, 1, 1), block=(block, 1, 1), args=list(args))


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _cpu_levels(context: Context) -> Iterator[Level]:
    machine = context.machine
    ceilings = machine.achievable or machine.theoretical
    assert ceilings is not None
    library = native.compile_c(C_SOURCE) if context.measures else None
    sizes = dict(machine.cache_levels) or {"L1d": 32768.0, "L2": 1048576.0}
    last = max(sizes.values())
    cached = machine.achievable.cache_bandwidth if machine.achievable is not None else None
    rates = {list(sizes)[-1]: cached, "memory": ceilings.bandwidth}
    previous = 0.0
    for name, size in {**sizes, "memory": 4 * last}.items():
        used = size if name in ("L1d", "memory") else min(size / 2, 4 * previous)
        used, previous = used / 2 if name == "L1d" else used, size
        steps, moved = 200_000, 2.0**26
        indices, data = chain(used, LINE["cpu"], "cpu"), torch.zeros(int(used) // 256 * 64)
        turns = max(1, int(moved / data.nbytes))
        walk: Callable[[], Any] = (
            (lambda: None) if library is None else partial(library.chase, native.pointer(indices), ctypes.c_long(steps))
        )
        read: Callable[[], Any] = (
            (lambda: None)
            if library is None
            else partial(library.read_again, native.pointer(data), ctypes.c_long(data.numel()), ctypes.c_long(turns))
        )
        # Other cores, and other virtual machines, share the last cache and the memory: only the least is known.
        band = (0.3, 3.0) if name in ("L1d", "L2") else (0.5, None)
        hot = {"cache": "hot", "max_seconds": 0.2, "min_blocks": 6}
        row = context.row(name, walk, predicted=CPU_SECONDS.get(name, 25e-9) * steps, band=band, **hot)
        moved = float(data.nbytes * turns)
        rate = rates.get(name)
        predicted = None if rate is None else moved / rate
        if predicted is None:
            measured = context.measure(read, **hot)
            reading = Prediction(what=name, predicted=None, measured=measured and moved / measured)
        else:
            reading = _rate(context.row(name, read, predicted=predicted, band=(0.4, 8.0), **hot), moved)
        del indices, data
        yield Level(
            name=name,
            capacity=machine.memory_bytes if name == "memory" else size,
            latency=_per_step(row, steps),
            bandwidth=reading if reading.predicted or reading.measured else None,
        )


def _value(row: Prediction | None) -> float | None:
    return None if row is None else row.measured or row.predicted


def draw(levels: list[Level], measured: bool) -> Drawing:
    """A row for each level: its size, its latency and its bandwidth on logarithmic scales."""
    top, height, left = 92, 40, 200
    shapes: list[Shape] = [
        Text(x=28, y=32, text="The memory hierarchy", size=17, bold=True),
        Text(
            x=28,
            y=52,
            text="bars: measured; lines: predicted; logarithmic scales"
            if measured
            else "predicted; logarithmic scales",
            color="muted",
        ),
        Text(x=left, y=top - 12, text="latency", bold=True),
        Text(x=left + 330, y=top - 12, text="bandwidth", bold=True),
    ]
    for column, key, write in (
        (0, "latency", seconds),
        (1, "bandwidth", partial(quantity, unit="B/s")),
    ):
        rows = [getattr(level, key) for level in levels]
        values = [value for row in rows if row for value in (row.predicted, row.measured) if value]
        begin = left + 330 * column
        axis = Axis.around([min(values) / 3, *values], log=True, start=begin, end=begin + 210, limits=None)
        for number, row in enumerate(rows):
            value = _value(row)
            if value is None:
                continue
            y = top + height * number
            end = axis.place(value)[0]
            shapes.append(
                Polygon(points=rectangle(begin, y, max(2.0, end - begin), 22), fill=str(column), opacity=0.75)
            )
            if row.predicted and row.measured:
                mark = axis.place(row.predicted)[0]
                shapes.append(Line(points=((mark, y - 4), (mark, y + 26)), stroke="ink", width=1.5))
                end = max(end, mark)
            shapes.append(Text(x=end + 6, y=y + 16, text=write(value), size=12, halo=True))
    for number, level in enumerate(levels):
        y = top + height * number
        shapes.append(Text(x=28, y=y + 12, text=level.name, size=13, bold=True))
        if level.capacity:
            shapes.append(Text(x=28, y=y + 27, text=quantity(level.capacity, "B"), size=11, color="muted"))
    described = "; ".join(
        f"{level.name}: latency {seconds(_value(level.latency))}, bandwidth {quantity(_value(level.bandwidth), 'B/s')}"
        for level in levels
    )
    height_of_all = top + height * len(levels) + 16
    scene = Scene(width=860, height=height_of_all, described=described, shapes=tuple(shapes))
    return Drawing(title="The memory hierarchy", described=described, svg=svg(scene))


def _lesson(levels: list[Level]) -> Iterator[Part]:
    """The bytes in flight that a level needs, by Little's law."""
    rows = []
    for level in levels:
        latency, bandwidth = _value(level.latency), _value(level.bandwidth)
        if latency and bandwidth:
            rows.append((level.name, seconds(latency), quantity(bandwidth, "B/s"), quantity(latency * bandwidth, "B")))
    yield Table(
        title="Bytes in flight: latency times bandwidth",
        headers=("", "latency", "bandwidth", "in flight"),
        rows=tuple(rows),
    )
    first, last = levels[0], next(level for level in levels if level.name == "memory")
    fast, slow = _value(first.bandwidth), _value(last.bandwidth)
    if fast and slow:
        yield from prose(
            f"From {first.name} to memory the bandwidth falls {significant(fast / slow, 2)} times. A level is used well"
            " if as many bytes are in flight as the last column says: fewer loads at once leave it waiting, however"
            " fast it is."
        )
