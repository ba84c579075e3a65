"""The achievable ceilings of this machine, measured: memory, caches, matrix and vector units, launches, transfers.

`calibrate_host` measures the CPU, `calibrate_gpu` a GPU.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

import torch

from nearpeak.machines.detect import detect_cpu
from nearpeak.machines.machine import Achievable, Ceiling, LaunchCost
from nearpeak.measure.gpu import GpuInstrument, Stage, gpu_instrument
from nearpeak.measure.instrument import zero_of
from nearpeak.measure.options import Progress
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
    rates = [amount / sampler.block().seconds for _ in range(blocks)]
    return Ceiling(value=max(rates), spread=(quantile(rates, 0.9) - quantile(rates, 0.1)) / median(rates), how=how)


def median_duration(sampler: Sampler, how: str, blocks: int = 9) -> Ceiling:
    """Seconds per call over some blocks."""
    sampler.block()
    times = [sampler.block().seconds for _ in range(blocks)]
    middle = median(times)
    return Ceiling(value=middle, spread=(quantile(times, 0.9) - quantile(times, 0.1)) / middle, how=how)


class CeilingCollector:
    """Collects measured ceilings by name: "bandwidth.copy", "matrix.bfloat16", "launch.enqueue", ..."""

    def __init__(self, progress: Progress | None) -> None:
        self.figures: dict[str, Ceiling] = {}
        self.clocks_hz: list[float] = []
        """Of the GPU's processors, right after products."""
        self._say = progress or (lambda line: None)

    def say(self, line: str) -> None:
        """Tells the user what is being measured."""
        self._say(line)

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
            self.say(f"memory: {name} of {quantity(size, 'B')}")
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


def calibrate_host(progress: Progress | None = None) -> Achievable:
    """Measures this CPU, with the threads that torch uses now. A few seconds on two cores."""
    facts = detect_cpu()
    ceilings = CeilingCollector(progress)
    cache = facts.cache_bytes or UNKNOWN_CACHE_BYTES
    sweep = HostEviction()
    small = [_host_call_cost(ceilings, sweep)]
    _host_bandwidths(ceilings, int(max(4 * cache, 2**27)))
    _host_cache_bandwidth(ceilings, int(cache))
    small.append(_host_call_cost(ceilings, sweep))
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8):
        _host_gemms(ceilings, dtype, facts.matrix_engine)
    small.append(_host_call_cost(ceilings, sweep))
    for name, measured in zip(("launch.host_call", "launch.cold_start"), zip(*small, strict=True), strict=True):
        # in seconds that are apart: what else runs on the host slows down all that is timed within one
        ceilings.set(name, sorted(measured, key=lambda ceiling: ceiling.value)[len(measured) // 2])
    return ceilings.achievable()


def _host_call_cost(ceilings: CeilingCollector, sweep: HostEviction) -> tuple[Ceiling, Ceiling]:
    """The time of a tiny operation, and the time that cold caches add."""
    ceilings.say("one small operation")
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
    ceilings.say("last-level cache")
    for divisor in (2, 4, 8):
        size = max(2**16, cache // divisor)
        a, b, whole = torch.randn(size // 8), torch.empty(size // 8), torch.empty(size // 4)
        for name, call in (("copy", partial(b.copy_, a)), ("fill", partial(whole.fill_, 1.0))):
            how = f"repeated {name} within {quantity(size, 'B')}"
            ceilings.best("cache_bandwidth", best_rate(_hot_sampler(call), size, how, blocks=5))


def _host_gemms(ceilings: CeilingCollector, dtype: torch.dtype, engine: str | None) -> None:
    """The best product over growing sizes, as far as one stays short: some types are only emulated on a CPU."""
    name = str(dtype).removeprefix("torch.")
    room = "matrix" if engine is not None and name in ("bfloat16", "int8", "float16") else "vector"
    ceilings.say(f"matrix product in {name}")
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
        ceilings.say(f"the same, sustained for {HOST_SUSTAINED_SECONDS:g} s")
        sampler = _hot_sampler(_host_gemm(best_size, dtype))
        flops = 2.0 * best_size**3
        blocks = max(5, int(HOST_SUSTAINED_SECONDS * rate / flops / sampler.calls))
        how = f"product of {best_size} x {best_size} matrices for {HOST_SUSTAINED_SECONDS:g} s"
        ceilings.set("matrix_sustained.float32", best_rate(sampler, flops, how, blocks=blocks))


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


def calibrate_gpu(index: int, progress: Progress | None = None) -> Achievable:
    """Measures GPU `index`, in under a minute on an H200."""
    device = gpu_instrument(index)
    with device.backend.selected(index):
        ceilings = CeilingCollector(progress)
        _gpu_bandwidths(ceilings, device)
        _gpu_cache_bandwidth(ceilings, device)
        _gpu_launch_cost(ceilings, device)
        for name, products in _gpu_gemms(device):
            _measure_gpu_gemm(ceilings, device, name, products)
        _measure_fma(ceilings, device)
        _measure_transfers(ceilings, device)
        device.backend.release_cached_memory()
        return ceilings.achievable()


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


def _gpu_bandwidths(ceilings: CeilingCollector, device: GpuInstrument) -> None:
    free = device.backend.available_bytes(device.index) or device.properties.memory_bytes or 0
    # Large, because what a write leaves in the cache when its kernel ends has not reached the memory.
    size = int(min(2**33, free // 5)) // 4096 * 4096
    a, b, c = (torch.randn(size // 4, device=device.device) for _ in range(3))
    out = torch.zeros((), device=device.device)
    ways: dict[str, tuple[Call, int]] = {
        "copy": (lambda: a.copy_(b), 2),
        "read": (lambda: torch.sum(a, dim=0, out=out), 1),
        "fill": (lambda: a.fill_(1.0), 1),
        "triad": (lambda: torch.add(b, c, alpha=2.0, out=a), 3),
    }
    ceilings.measure_bandwidths(ways, size, partial(event_sampler, device))


def _gpu_cache_bandwidth(ceilings: CeilingCollector, device: GpuInstrument) -> None:
    if not device.cache_bytes:
        return
    ceilings.say("last-level cache")
    gap = zero_of(device.index, "hot").gap
    for divisor in (1.5, 2, 2.5, 3, 4, 8):
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
    ceilings.say("launch cost")
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


def _gpu_gemms(device: GpuInstrument) -> Iterator[tuple[str, MakeGemm]]:
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

    yield "bfloat16", plain(torch.bfloat16)
    yield "float16", plain(torch.float16)
    yield "tfloat32", tensor_float
    yield "float8", eight_bit
    yield "int8", integer
    yield "float64", plain(torch.float64)
    yield "float32", plain(torch.float32)


def _measure_gpu_gemm(ceilings: CeilingCollector, device: GpuInstrument, name: str, make: MakeGemm) -> None:
    """The ceiling is reached with zeros: a GPU at its power limit clocks higher when fewer bits flip.

    Real numbers come between those and random ones, which run 10 to 14 % slower in 16 bits on an H200: the gradient of
    a language model's logits, whose values are nearly equal, runs at 845 of 902 TFLOP/s.
    """
    room = "vector" if name == "float32" else "matrix"  # without tf32 a float32 product runs on the vector units
    best: tuple[float, Call, tuple[int, int, int]] | None = None
    for shape in GPU_GEMM_SHAPES if name not in ("float32", "float64") else GPU_GEMM_SHAPES[:1]:
        m, k, n = shape
        flops = 2.0 * m * k * n
        ceilings.say(f"matrix product in {name}, {m} x {k} x {n}")
        try:
            zeros, call = make(m, k, n, torch.zeros), make(m, k, n, torch.randn)
            ceiling = best_rate(event_sampler(device, zeros), flops, f"product of {m} x {k} x {n}, zeros, burst")
            clock = device.conditions.read().clock_hz
            ceilings.clocks_hz += [] if clock is None else [clock]
            random = best_rate(event_sampler(device, call), flops, f"product of {m} x {k} x {n}, random numbers, burst")
        except (RuntimeError, NotImplementedError):  # this GPU or this build has no such product
            return
        ceilings.best(f"{room}.{name}", ceiling)
        if room == "matrix":
            ceilings.best(f"matrix_random.{name}", random)
        if best is None or random.value > best[0]:
            best = (random.value, call, shape)
    if best is None or name in ("float32", "float64"):
        return
    _, call, (m, k, n) = best
    ceilings.say(f"the same, sustained for {GPU_SUSTAINED_SECONDS:g} s")
    rates = _sustained_rates(device, call, 2.0 * m * k * n)
    spread = (quantile(rates, 0.9) - quantile(rates, 0.1)) / median(rates)
    how = f"product of {m} x {k} x {n}, random numbers, last half of {GPU_SUSTAINED_SECONDS:g} s"
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

    ceilings.say("vector units")
    kernel = fma_kernel(device.device)
    how = "multiply-adds in registers"
    ceilings.best("vector.float32", best_rate(event_sampler(device, kernel.launch), kernel.flops, how))


def _measure_transfers(ceilings: CeilingCollector, device: GpuInstrument) -> None:
    on_device = torch.randn(TRANSFER_BYTES // 4, device=device.device)
    size = quantity(TRANSFER_BYTES, "B")
    pageable = torch.randn(TRANSFER_BYTES // 4)
    pinned = pageable.pin_memory()
    for name, host, asynchronous in (("pinned", pinned, True), ("pageable", pageable, False)):
        ceilings.say(f"copies to and from {name} host memory")
        for direction, call in (
            ("host_to_device", lambda host=host, a=asynchronous: on_device.copy_(host, non_blocking=a)),
            ("device_to_host", lambda host=host, a=asynchronous: host.copy_(on_device, non_blocking=a)),
        ):
            sampler = WallSampler(device, call, "latency", call_seconds=1e-2)
            ceilings.set(f"{direction}.{name}", best_rate(sampler, TRANSFER_BYTES, f"copy of {size}", blocks=3))
    gpus = device.backend.count()
    if gpus > 1:
        on_peer = torch.empty_like(on_device, device=device.backend.device((device.index + 1) % gpus))
        ceilings.say("copies to another GPU")
        sampler = WallSampler(device, lambda: on_peer.copy_(on_device), "latency", call_seconds=1e-3)
        ceilings.set("device_to_device", best_rate(sampler, TRANSFER_BYTES, f"copy of {size} to {on_peer.device}"))
