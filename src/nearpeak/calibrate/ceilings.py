"""The achievable ceilings of this machine, measured: memory, caches, matrix and vector units, launches, transfers.

`calibrate_host` measures the CPU, `calibrate_gpu` a GPU. A quick calibration of a GPU takes fewer sizes and
repeats, and leaves out what there is no time for.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from nearpeak.calibrate.progress import CalibrationProgress, Task
from nearpeak.machines.detect import detect_cpu
from nearpeak.machines.machine import Achievable, Ceiling, LaunchCost
from nearpeak.measure.gpu import GpuInstrument, Stage, gpu_instrument
from nearpeak.measure.instrument import zero_of
from nearpeak.measure.samplers import (
    UNKNOWN_CACHE_BYTES,
    EventSampler,
    HostEviction,
    HostSampler,
    RegressionSampler,
    Sampler,
    WallSampler,
)
from nearpeak.measure.statistics import median, quantile
from nearpeak.units import quantity

Call = Callable[[], Any]


def best_rate(sampler: Sampler, amount: float, how: str, blocks: int = 9) -> Ceiling:
    """The best rate at which `amount` was done over some blocks, after a first one that is not counted.

    A ceiling is what can be reached, so it is the best block and not the middle one: a neighbor that takes the memory
    for a while does not lower it.
    """
    sampler.block()
    return _best([amount / sampler.block().seconds for _ in range(blocks)], how)


def _best(rates: list[float], how: str) -> Ceiling:
    return Ceiling(value=max(rates), spread=(quantile(rates, 0.9) - quantile(rates, 0.1)) / median(rates), how=how)


def median_duration(sampler: Sampler, how: str, blocks: int = 9) -> Ceiling:
    """Seconds per call over some blocks."""
    sampler.block()
    times = [sampler.block().seconds for _ in range(blocks)]
    middle = median(times)
    return Ceiling(value=middle, spread=(quantile(times, 0.9) - quantile(times, 0.1)) / middle, how=how)


class CeilingCollector:
    """Collects measured ceilings by name: "bandwidth.copy", "matrix.bfloat16", "launch.enqueue", ..."""

    def __init__(self) -> None:
        self.figures: dict[str, Ceiling] = {}
        self.clocks_hz: list[float] = []
        """Of the GPU's processors, right after products."""

    def best(self, name: str, ceiling: Ceiling) -> None:
        """Keeps the highest of several ways to reach one ceiling."""
        if name not in self.figures or ceiling.value > self.figures[name].value:
            self.figures[name] = ceiling

    def set(self, name: str, ceiling: Ceiling) -> None:
        """Records one figure."""
        self.figures[name] = ceiling

    def measure_bandwidths(
        self, ways: Mapping[str, tuple[Call, int]], size: int, sampler: Callable[[Call], Sampler], blocks: int = 9
    ) -> None:
        """Records the bandwidth of calls, each with the number of its passes over `size` bytes of memory."""
        for name, (call, passes) in ways.items():
            how = f"{name} of {quantity(size, 'B')} per tensor, {passes} pass{'es' if passes > 1 else ''}"
            self.set(f"bandwidth.{name}", best_rate(sampler(call), passes * size, how, blocks))

    def value(self, name: str) -> float | None:
        """The figure, or None if it was not measured."""
        ceiling = self.figures.get(name)
        return None if ceiling is None else ceiling.value

    def group(self, name: str) -> Mapping[str, float]:
        """All figures under a prefix, by what follows it."""
        prefix = name + "."
        return {key[len(prefix) :]: c.value for key, c in self.figures.items() if key.startswith(prefix)}

    def achievable(self) -> Achievable:
        """The figures as the ceilings of a machine."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return Achievable(
            how="measured",
            note=f"{now} with torch {torch.__version__}, {torch.get_num_threads()} threads",
            bandwidth=max(self.group("bandwidth").values()),
            cache_bandwidth=self.value("cache_bandwidth"),
            matrix=self.group("matrix"),
            matrix_random=self.group("matrix_random"),
            matrix_sustained=self.group("matrix_sustained"),
            vector=self.group("vector"),
            host_to_device=self.value("host_to_device.pinned"),
            device_to_host=self.value("device_to_host.pinned"),
            host_to_device_pageable=self.value("host_to_device.pageable"),
            device_to_host_pageable=self.value("device_to_host.pageable"),
            device_to_device=self.value("device_to_device"),
            launch=LaunchCost(
                enqueue=self.value("launch.enqueue"),
                in_graph=self.value("launch.in_graph"),
                event_pair=self.value("launch.event_pair"),
                event_tick=self.value("launch.event_tick"),
                host_call=self.value("launch.host_call"),
                cold_start=self.value("launch.cold_start"),
            ),
            ceilings=dict(self.figures),
            clock_hz=max(self.clocks_hz, default=None),
        )


HOST_GEMM_SIZES = (256, 512, 1024, 2048, 4096)
MAX_HOST_GEMM_SECONDS = 0.2
HOST_SUSTAINED_SECONDS = 1.0
HOST_DTYPES = {
    torch.float32: 2.5,
    torch.float64: 1.2,
    torch.bfloat16: 1.2,
    torch.float16: 0.6,
    torch.int8: 1.0,
}
"""The dtypes whose products are measured, and the seconds that this takes."""


def calibrate_host(progress: CalibrationProgress | None = None) -> Achievable:
    """Measures this CPU, with the threads that torch uses now. Some ten seconds on two cores."""
    facts = detect_cpu()
    ceilings = CeilingCollector()
    cache = facts.cache_bytes or UNKNOWN_CACHE_BYTES
    sweep = HostEviction()
    small: list[tuple[Ceiling, Ceiling]] = []
    call = Task(name="small ops", seconds=0.7, measure=lambda: small.append(_host_call_cost(sweep)))
    memory = partial(_host_bandwidths, ceilings, int(max(4 * cache, 2**27)))
    functions = partial(_host_transcendental, ceilings)
    products = [
        Task(
            name=f"GEMM {_name(dtype)}",
            seconds=seconds,
            measure=partial(_host_gemms, ceilings, dtype, facts.matrix_engine),
        )
        for dtype, seconds in HOST_DTYPES.items()
    ]
    (progress or CalibrationProgress()).run(
        [
            call,
            Task(name="memory", seconds=2.5, measure=memory),
            Task(name="cache", seconds=0.7, measure=partial(_host_cache_bandwidth, ceilings, int(cache))),
            Task(name="exp, tanh ...", seconds=0.4, measure=functions),
            call,
            *products,
            call,
        ]
    )
    for name, measured in zip(("launch.host_call", "launch.cold_start"), zip(*small, strict=True), strict=True):
        # in seconds that are apart: what else runs on the host slows down all that is timed within one
        ceilings.set(name, sorted(measured, key=lambda ceiling: ceiling.value)[len(measured) // 2])
    return ceilings.achievable()


def _host_call_cost(sweep: HostEviction) -> tuple[Ceiling, Ceiling]:
    """The time of a tiny operation, and the time that cold caches add."""
    small = torch.randn(16)
    out = torch.empty_like(small)
    call = HostSampler(lambda: torch.add(small, small, out=out), "hot", call_seconds=2e-6)
    return median_duration(call, "torch.add of 16 elements"), _host_cold_start(sweep)


def _host_cold_start(sweep: HostEviction) -> Ceiling:
    """The time that a tiny operation takes longer right after a sweep of the caches than after another operation."""
    small, other = torch.randn(16), torch.randn(16)

    def after_another() -> None:
        sweep()
        torch.add(other, other)

    def after(evict: Call, how: str) -> Ceiling:
        return median_duration(HostSampler(lambda: torch.add(small, small), "cold", call_seconds=0.0, evict=evict), how)

    first = after(sweep, "torch.add of 16 elements after a sweep of the caches, less the same after another one")
    second = after(after_another, "")
    return dataclasses.replace(first, value=max(0.0, first.value - second.value))


def _hot_sampler(call: Call) -> HostSampler:
    call()
    start = time.perf_counter()
    call()
    return HostSampler(call, "hot", call_seconds=time.perf_counter() - start)


def _host_bandwidths(ceilings: CeilingCollector, size: int) -> None:
    a, b, c = (torch.randn(size // 4) for _ in range(3))
    ways: dict[str, tuple[Call, int]] = {
        "copy": (lambda: a.copy_(b), 2),
        "read": (lambda: torch.sum(a), 1),
        "fill": (lambda: a.fill_(1.0), 1),
        "triad": (lambda: torch.add(b, c, alpha=2.0, out=a), 3),
    }
    ceilings.measure_bandwidths(ways, size, _hot_sampler, blocks=5)


def _host_cache_bandwidth(ceilings: CeilingCollector, cache: int) -> None:
    for divisor in (2, 4, 8):
        size = max(2**16, cache // divisor)
        a, b, whole = torch.randn(size // 8), torch.empty(size // 8), torch.empty(size // 4)
        for name, call in (("copy", partial(b.copy_, a)), ("fill", partial(whole.fill_, 1.0))):
            how = f"repeated {name} within {quantity(size, 'B')}"
            # A block is short, and threads that wait for a busy core spoil many of them.
            ceilings.best("cache_bandwidth", best_rate(_hot_sampler(call), size, how, blocks=25))


TRANSCENDENTAL_ELEMENTS = 2**17
"""Of the tensors of these kernels: more than one thread takes, and few enough to stay in a cache."""
TRANSCENDENTAL_ROUNDS = 6


def _host_transcendental(ceilings: CeilingCollector) -> None:
    """Elements per second of kernels with transcendental functions, in float32 and in the cache."""
    x, gradient = torch.randn(2, TRANSCENDENTAL_ELEMENTS)
    aten = torch.ops.aten
    kernels: dict[str, Call] = {
        "exp": partial(torch.exp, x),
        "log": partial(torch.log, x.abs()),
        "sin": partial(torch.sin, x),
        "tanh": partial(torch.tanh, x),
        "erf": partial(torch.erf, x),
        "sigmoid": partial(torch.sigmoid, x),
        "silu": partial(aten.silu, x),
        "silu_backward": partial(aten.silu_backward, gradient, x),
    }
    for approximate, suffix in (("none", ""), ("tanh", "_tanh")):
        kernels[f"gelu{suffix}"] = partial(aten.gelu, x, approximate=approximate)
        kernels[f"gelu_backward{suffix}"] = partial(aten.gelu_backward, gradient, x, approximate=approximate)
    with torch.no_grad():
        samplers = {name: _hot_sampler(call) for name, call in kernels.items()}
        # In rounds: what else runs on the host spoils all that is timed within some hundredths of a second.
        rounds = [
            {name: TRANSCENDENTAL_ELEMENTS / sampler.block().seconds for name, sampler in samplers.items()}
            for _ in range(TRANSCENDENTAL_ROUNDS)
        ]
    for name in kernels:
        how = f"{name} of {TRANSCENDENTAL_ELEMENTS} elements"
        ceilings.set(f"transcendental.{name}", _best([rates[name] for rates in rounds], how))


def _host_gemms(ceilings: CeilingCollector, dtype: torch.dtype, engine: str | None) -> None:
    """The best product over growing sizes, as far as one stays short: some types are only emulated on a CPU."""
    name = _name(dtype)
    room = "matrix" if engine is not None and name in ("bfloat16", "int8", "float16") else "vector"
    rate, best_size = 0.0, HOST_GEMM_SIZES[0]
    for size in HOST_GEMM_SIZES:
        flops = 2.0 * size**3
        if rate and flops / rate > MAX_HOST_GEMM_SECONDS:
            break
        try:
            ceiling = best_rate(
                _hot_sampler(_host_gemm(size, dtype)), flops, f"product of {size} x {size} matrices", blocks=5
            )
        except RuntimeError:  # this build of torch has no such product on the CPU
            return
        ceilings.best(f"{room}.{name}", ceiling)
        if ceiling.value > rate:
            rate, best_size = ceiling.value, size
    if name == "float32":
        sampler = _hot_sampler(_host_gemm(best_size, dtype))
        flops = 2.0 * best_size**3
        blocks = max(5, int(HOST_SUSTAINED_SECONDS * rate / flops / sampler.calls))
        how = f"product of {best_size} x {best_size} matrices for {HOST_SUSTAINED_SECONDS:g} s"
        ceilings.set("matrix_sustained.float32", best_rate(sampler, flops, how, blocks=blocks))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _host_gemm(size: int, dtype: torch.dtype) -> Call:
    if dtype == torch.int8:
        a, b = (torch.randint(-128, 128, (size, size), dtype=dtype) for _ in range(2))
        return lambda: torch._int_mm(a, b)
    x, y = (torch.randn(size, size).to(dtype) for _ in range(2))
    out = torch.empty(size, size, dtype=dtype)
    return lambda: torch.mm(x, y, out=out)


GPU_GEMM_SHAPES = ((4096, 4096, 4096), (8192, 4096, 8192), (8192, 8192, 8192), (2048, 4096, 2048))
"""Rows, depth, columns. Which is fastest depends on tiles, waves and power."""
GPU_SUSTAINED_SECONDS = 1.5
TRANSFER_BYTES = 2**28
QUICK_GPU_SECONDS = 5.0
"""When a quick calibration of a GPU begins nothing more that is not needed. The process that does it takes some
seconds to start."""
COMMON_DTYPES = ("bfloat16", "float16", "tfloat32")
"""The dtypes of most products on a GPU: a quick calibration measures them first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEffort:
    """How much of a GPU is measured."""

    memory_bytes: int
    """Of each of the tensors that memory is measured with, at most. Large, because what a write leaves in the cache
    when its kernel ends has not reached the memory."""
    cache_divisors: tuple[float, ...]
    """Which parts of the cache are used."""
    shapes: tuple[tuple[int, int, int], ...]
    """Rows, depth and columns of products."""
    blocks: int
    """Repeats of each ceiling."""
    memory_s: float
    """About how long memory takes on an H200, the zero of the instrument and the start of the profiler included; the
    following are for the cache, and for the products of one dtype."""
    cache_s: float
    gemm_s: float


FULL_EFFORT = GpuEffort(
    memory_bytes=2**33,
    cache_divisors=(1.5, 2, 2.5, 3, 4, 8),
    shapes=GPU_GEMM_SHAPES,
    blocks=9,
    memory_s=1.5,
    cache_s=0.8,
    gemm_s=0.7,
)
QUICK_EFFORT = GpuEffort(
    memory_bytes=2**32,
    cache_divisors=(2, 3),
    shapes=GPU_GEMM_SHAPES[:2],
    blocks=5,
    memory_s=1.0,
    cache_s=0.3,
    gemm_s=0.3,
)


def calibrate_gpu(
    index: int, progress: CalibrationProgress | None = None, *, quick: bool = False, all_dtypes: bool = False
) -> Achievable:
    """Measures GPU `index`, on an H200 in some 16 s, or quickly in some 5 s.

    With `all_dtypes`, a quick calibration measures the products of each, whatever time that takes: there is no
    datasheet to derate.
    """
    device = gpu_instrument(index)
    progress = progress or CalibrationProgress()
    effort = QUICK_EFFORT if quick else FULL_EFFORT
    with device.backend.selected(index):
        ceilings = CeilingCollector()
        progress.run(_gpu_tasks(ceilings, device, effort, all_dtypes=all_dtypes or not quick))
        device.backend.release_cached_memory()
        return ceilings.achievable()


def _gpu_tasks(
    ceilings: CeilingCollector, device: GpuInstrument, effort: GpuEffort, *, all_dtypes: bool
) -> Iterator[Task]:
    """What every bound needs, then the products that most steps have, then the rest."""
    full = effort is FULL_EFFORT
    gemms = _gpu_gemms(device)
    fastest: dict[str, FastestGemm] = {}

    def products(name: str) -> Iterator[Task]:
        first = name == COMMON_DTYPES[0]
        lasts = (full and name not in ("float32", "float64")) or first

        def burst() -> None:
            gemm = _measure_gpu_gemm(ceilings, device, name, gemms[name], effort)
            if gemm is not None and lasts:
                fastest[name] = gemm

        def sustained() -> None:
            if name in fastest:  # else this GPU has no such product; its operands are freed after it
                _measure_sustained(ceilings, device, name, fastest.pop(name))

        yield Task(name=f"GEMM {name}", seconds=effort.gemm_s, measure=burst, needed=all_dtypes or first)
        if lasts:
            yield Task(name=f"GEMM {name}, sustained", seconds=GPU_SUSTAINED_SECONDS, measure=sustained)

    yield Task(name="memory", seconds=effort.memory_s, measure=partial(_gpu_bandwidths, ceilings, device, effort))
    yield Task(name="cache", seconds=effort.cache_s, measure=partial(_gpu_cache_bandwidth, ceilings, device, effort))
    yield Task(name="launches", seconds=0.2, measure=partial(_gpu_launch_cost, ceilings, device))
    for name in COMMON_DTYPES:
        yield from products(name)
    yield Task(name="transfers", seconds=0.5, measure=partial(_measure_transfers, ceilings, device), needed=full)
    yield from products("float32")
    yield Task(name="vector units", seconds=1.0, measure=partial(_measure_fma, ceilings, device), needed=full)
    for name in gemms:
        if name not in (*COMMON_DTYPES, "float32"):
            yield from products(name)


def event_sampler(
    device: GpuInstrument, call: Call, cache: Literal["hot", "cold"] = "hot", enqueue_seconds: float = 2e-5
) -> EventSampler:
    """Events around calls in bursts, sized by a first measurement."""
    for _ in range(2):
        call()
    first = EventSampler(
        device, call, Stage(device, cache), call_seconds=1e-3, enqueue_seconds=enqueue_seconds, calls=2
    )
    estimate = first.block().seconds
    return EventSampler(
        device,
        call,
        Stage(device, cache, pace_seconds=3 * estimate),
        call_seconds=estimate,
        enqueue_seconds=enqueue_seconds,
        zero_seconds=zero_of(device.index, cache).events,
    )


def _gpu_bandwidths(ceilings: CeilingCollector, device: GpuInstrument, effort: GpuEffort) -> None:
    free = device.backend.available_bytes(device.index) or device.properties.memory_bytes or 0
    size = int(min(effort.memory_bytes, free // 5)) // 4096 * 4096
    a, b, c = (torch.randn(size // 4, device=device.device) for _ in range(3))
    out = torch.zeros((), device=device.device)
    ways: dict[str, tuple[Call, int]] = {
        "copy": (lambda: a.copy_(b), 2),
        "read": (lambda: torch.sum(a, dim=0, out=out), 1),
        "fill": (lambda: a.fill_(1.0), 1),
        "triad": (lambda: torch.add(b, c, alpha=2.0, out=a), 3),
    }
    ceilings.measure_bandwidths(ways, size, partial(event_sampler, device), effort.blocks)


def _gpu_cache_bandwidth(ceilings: CeilingCollector, device: GpuInstrument, effort: GpuEffort) -> None:
    if not device.cache_bytes:
        return
    gap = zero_of(device.index, "hot").gap
    for divisor in effort.cache_divisors:
        size = int(device.cache_bytes / divisor) // 24576 * 24576
        whole, second = (torch.randn(size // 4, device=device.device) for _ in range(2))
        half, other_half = second[: size // 8], whole[: size // 8]
        a, b, c = torch.randn(3, size // 6, device=device.device, dtype=torch.bfloat16)
        out = torch.zeros((), device=device.device)
        ways: dict[str, Call] = {
            "copy": lambda a=half, b=other_half: b.copy_(a),  # type: ignore[misc]
            "read": lambda whole=whole, out=out: torch.sum(whole, dim=0, out=out),  # type: ignore[misc]
            "add": lambda a=a, b=b, c=c: torch.add(a, b, out=c),  # type: ignore[misc]
        }
        for name, call in ways.items():
            call()
            sampler = RegressionSampler(device, call, call_seconds=10e-6, gap_seconds=gap)
            how = f"repeated {name} within {quantity(size, 'B')}"
            ceilings.best("cache_bandwidth", best_rate(sampler, size, how, blocks=5))


def _gpu_launch_cost(ceilings: CeilingCollector, device: GpuInstrument) -> None:
    small = torch.randn(16, device=device.device)
    out = torch.empty_like(small)

    def call() -> None:
        torch.add(small, small, out=out)

    def empty() -> None:
        device.backend.delay(1)

    enqueue = WallSampler(device, call, "enqueue", call_seconds=1e-5)
    ceilings.set("launch.enqueue", median_duration(enqueue, "torch.add of 16 elements, host time behind a busy device"))
    graph = RegressionSampler(device, empty, call_seconds=2e-6)
    ceilings.set("launch.in_graph", median_duration(graph, "what one more empty kernel adds to a CUDA graph"))
    pairs = [device.event_pair_seconds() for _ in range(5)]
    spread = (max(pairs) - min(pairs)) / median(pairs)
    ceilings.set("launch.event_pair", Ceiling(value=median(pairs), spread=spread, how="two events, nothing between"))
    tick = Ceiling(value=device.event_tick(), spread=0.0, how="greatest common step of event times")
    ceilings.set("launch.event_tick", tick)


DrawOperand = Callable[..., torch.Tensor]
"""Numbers of a shape: `torch.randn`, or `torch.zeros`."""
MakeGemm = Callable[[int, int, int, DrawOperand], Call]
"""Makes a call from rows, depth, columns and what draws the numbers."""


def _gpu_gemms(device: GpuInstrument) -> dict[str, MakeGemm]:
    """For each dtype, what makes its products."""

    def plain(dtype: torch.dtype) -> MakeGemm:
        def make(m: int, k: int, n: int, draw: DrawOperand) -> Call:
            a, b = (draw(shape, device=device.device).to(dtype) for shape in ((m, k), (k, n)))
            out = torch.empty(m, n, device=device.device, dtype=dtype)
            return lambda: torch.mm(a, b, out=out)

        return make

    def tensor_float(m: int, k: int, n: int, draw: DrawOperand) -> Call:
        product = plain(torch.float32)(m, k, n, draw)

        def call() -> None:
            before = torch.backends.cuda.matmul.allow_tf32
            torch.backends.cuda.matmul.allow_tf32 = True
            product()
            torch.backends.cuda.matmul.allow_tf32 = before

        return call

    def eight_bit(m: int, k: int, n: int, draw: DrawOperand) -> Call:
        a = draw((m, k), device=device.device).to(torch.float8_e4m3fn)
        b = draw((n, k), device=device.device).to(torch.float8_e4m3fn).t()
        scale = torch.ones((), device=device.device)
        return lambda: torch._scaled_mm(
            a, b, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    def integer(m: int, k: int, n: int, draw: DrawOperand) -> Call:
        a = (64 * draw((m, k), device=device.device)).clamp(-128, 127).to(torch.int8)
        b = (64 * draw((n, k), device=device.device)).clamp(-128, 127).to(torch.int8).t()
        return lambda: torch._int_mm(a, b)

    return {
        "bfloat16": plain(torch.bfloat16),
        "float16": plain(torch.float16),
        "tfloat32": tensor_float,
        "float8": eight_bit,
        "int8": integer,
        "float64": plain(torch.float64),
        "float32": plain(torch.float32),
    }


class FastestGemm(NamedTuple):
    """The shape whose product of random numbers is the fastest."""

    flops: float
    call: Call
    shape: str
    rate: float


def _measure_gpu_gemm(
    ceilings: CeilingCollector, device: GpuInstrument, name: str, make: MakeGemm, effort: GpuEffort
) -> FastestGemm | None:
    """The ceiling is reached with zeros: a GPU at its power limit clocks higher when fewer bits flip.

    Real numbers come between those and random ones, which run 10 to 14 % slower in 16 bits on an H200: the gradient of
    a language model's logits, whose values are nearly equal, runs at 845 of 902 TFLOP/s.
    """
    room = "vector" if name == "float32" else "matrix"  # without tf32 a float32 product runs on the vector units
    best: FastestGemm | None = None
    for m, k, n in effort.shapes if name not in ("float32", "float64") else effort.shapes[:1]:
        flops, shape = 2.0 * m * k * n, f"product of {m} x {k} x {n}"
        try:
            zeros, call = make(m, k, n, torch.zeros), make(m, k, n, torch.randn)
            ceiling = best_rate(event_sampler(device, zeros), flops, f"{shape}, zeros, burst", effort.blocks)
            clock = device.conditions.read().clock_hz
            ceilings.clocks_hz += [] if clock is None else [clock]
            random = best_rate(event_sampler(device, call), flops, f"{shape}, random numbers, burst", effort.blocks)
        except (RuntimeError, NotImplementedError):  # this GPU or this build has no such product
            return None
        ceilings.best(f"{room}.{name}", ceiling)
        if room == "matrix":
            ceilings.best(f"matrix_random.{name}", random)
        if best is None or random.value > best.rate:
            best = FastestGemm(flops=flops, call=call, shape=shape, rate=random.value)
    return best


def _measure_sustained(ceilings: CeilingCollector, device: GpuInstrument, name: str, fastest: FastestGemm) -> None:
    """The rate that power and heat let last."""
    rates = _sustained_rates(device, fastest.call, fastest.flops)
    spread = (quantile(rates, 0.9) - quantile(rates, 0.1)) / median(rates)
    how = f"{fastest.shape}, random numbers, last half of {GPU_SUSTAINED_SECONDS:g} s"
    ceilings.set(f"matrix_sustained.{name}", Ceiling(value=median(rates), spread=spread, how=how))


def _sustained_rates(device: GpuInstrument, call: Call, flops: float, batch: int = 20) -> list[float]:
    """Rates of back-to-back batches; the first half of the time only brings power and heat to their plateau."""
    rates: list[float] = []
    start = time.perf_counter()
    events = device.events(2)
    while (elapsed := time.perf_counter() - start) < GPU_SUSTAINED_SECONDS:
        events[0].record()
        for _ in range(batch):
            call()
        events[1].record()
        device.synchronize()
        if elapsed > GPU_SUSTAINED_SECONDS / 2:
            rates.append(flops * batch / (events[0].elapsed_time(events[1]) * 1e-3))
    return rates


def _measure_fma(ceilings: CeilingCollector, device: GpuInstrument) -> None:
    """A loop of multiply-adds in registers; needs triton. A float32 product is the other way to that ceiling."""
    if importlib.util.find_spec("triton") is None:
        return
    from nearpeak.measure.delay_kernel import fma_kernel

    kernel = fma_kernel(device.device)
    how = "multiply-adds in registers"
    ceilings.best("vector.float32", best_rate(event_sampler(device, kernel.launch), kernel.flops, how))


def _measure_transfers(ceilings: CeilingCollector, device: GpuInstrument) -> None:
    on_device = torch.randn(TRANSFER_BYTES // 4, device=device.device)
    size = quantity(TRANSFER_BYTES, "B")
    pageable = torch.ones(TRANSFER_BYTES // 4)  # in memory that is mapped; random numbers take longer than the copies
    pinned = pageable.pin_memory()
    for name, host, asynchronous in (("pinned", pinned, True), ("pageable", pageable, False)):
        for direction, call in (
            ("host_to_device", lambda host=host, a=asynchronous: on_device.copy_(host, non_blocking=a)),
            ("device_to_host", lambda host=host, a=asynchronous: host.copy_(on_device, non_blocking=a)),
        ):
            sampler = WallSampler(device, call, "latency", call_seconds=1e-2)
            ceilings.set(f"{direction}.{name}", best_rate(sampler, TRANSFER_BYTES, f"copy of {size}", blocks=3))
    gpus = device.backend.count()
    if gpus > 1:
        on_peer = torch.empty_like(on_device, device=device.backend.device((device.index + 1) % gpus))
        sampler = WallSampler(device, lambda: on_peer.copy_(on_device), "latency", call_seconds=1e-3)
        ceilings.set("device_to_device", best_rate(sampler, TRANSFER_BYTES, f"copy of {size} to {on_peer.device}"))
