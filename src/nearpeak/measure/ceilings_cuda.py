"""The ceilings of this GPU: memory, cache, matrix and vector units, launches, and the way to the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nearpeak.machines.model import Achievable, Ceiling
from nearpeak.measure.ceilings import Ceilings, duration, reach
from nearpeak.measure.cuda import CudaDevice, Stage, cuda_device
from nearpeak.measure.instrument import zero_of
from nearpeak.measure.options import Progress
from nearpeak.measure.samplers import EventSampler, RegressionSampler, WallSampler
from nearpeak.measure.spin import fma_kernel
from nearpeak.measure.statistics import median, quantile
from nearpeak.units import quantity

PRODUCTS = ((4096, 4096, 4096), (8192, 4096, 8192), (8192, 8192, 8192), (2048, 4096, 2048))
"""Rows, depth, columns. Which is fastest depends on tiles, waves and power."""
SUSTAINED_SECONDS = 1.5
TRANSFER_BYTES = 2**28


def calibrate_cuda(index: int, progress: Progress | None = None) -> Achievable:
    """Measures GPU `index`, in under a minute on an H200."""
    with torch.cuda.device(index):
        device = cuda_device(index)
        ceilings = Ceilings(progress)
        _bandwidths(ceilings, device)
        _cache_bandwidth(ceilings, device)
        _launches(ceilings, device)
        for name, products in _products(device):
            _matrix(ceilings, device, name, products)
        _vector(ceilings, device)
        _transfers(ceilings, device)
        torch.cuda.empty_cache()
        return ceilings.achievable()


def _pairs(device: CudaDevice, call: Callable[[], Any], *, pace: bool = True) -> EventSampler:
    """Events around hot calls, in bursts unless `pace` is off; sized by a first look."""
    for _ in range(2):
        call()
    first = EventSampler(device, call, Stage(device, "hot"), call_seconds=1e-3, enqueue_seconds=2e-5, calls=2)
    estimate = first.block().seconds
    stage = Stage(device, "hot", pace_seconds=3 * estimate if pace else 0.0)
    return EventSampler(device, call, stage, call_seconds=estimate, enqueue_seconds=2e-5, zero_seconds=_zero(device))


def _zero(device: CudaDevice) -> float:
    return zero_of(device.index, "hot").events


def _bandwidths(ceilings: Ceilings, device: CudaDevice) -> None:
    free = torch.cuda.mem_get_info(device.device)[0]
    # Large, because what a write leaves in the cache when its kernel ends has not reached the memory.
    size = int(min(2**33, free // 5)) // 4096 * 4096
    a, b, c = (torch.randn(size // 4, device=device.device) for _ in range(3))
    out = torch.zeros((), device=device.device)
    ways: dict[str, tuple[Callable[[], Any], int]] = {
        "copy": (lambda: a.copy_(b), 2),
        "read": (lambda: torch.sum(a, dim=0, out=out), 1),
        "fill": (lambda: a.fill_(1.0), 1),
        "triad": (lambda: torch.add(b, c, alpha=2.0, out=a), 3),
    }
    for name, (call, passes) in ways.items():
        ceilings.say(f"memory: {name} of {quantity(size, 'B')}")
        how = f"{name} of {quantity(size, 'B')} per tensor, {passes} pass{'es' if passes > 1 else ''}"
        ceilings.set(f"bandwidth.{name}", reach(_pairs(device, call), passes * size, how))


def _cache_bandwidth(ceilings: Ceilings, device: CudaDevice) -> None:
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
        ways: dict[str, Callable[[], Any]] = {
            "copy": lambda a=half, b=other_half: b.copy_(a),  # type: ignore[misc]
            "read": lambda whole=whole, out=out: torch.sum(whole, dim=0, out=out),  # type: ignore[misc]
            "add": lambda a=a, b=b, c=c: torch.add(a, b, out=c),  # type: ignore[misc]
        }
        for name, call in ways.items():
            call()
            sampler = RegressionSampler(device, call, call_seconds=10e-6, gap_seconds=gap)
            how = f"repeated {name} within {quantity(size, 'B')}"
            ceilings.best("cache_bandwidth", reach(sampler, size, how, blocks=5))


def _launches(ceilings: Ceilings, device: CudaDevice) -> None:
    ceilings.say("launch cost")
    small = torch.randn(16, device=device.device)
    out = torch.empty_like(small)

    def call() -> None:
        torch.add(small, small, out=out)

    def empty() -> None:
        torch.cuda._sleep(1)

    enqueue = WallSampler(device, call, "enqueue", call_seconds=1e-5)
    ceilings.set("launch.enqueue", duration(enqueue, "torch.add of 16 elements, host time behind a busy device"))
    graph = RegressionSampler(device, empty, call_seconds=2e-6)
    ceilings.set("launch.in_graph", duration(graph, "what one more empty kernel adds to a CUDA graph"))
    pairs = [device.event_pair_seconds() for _ in range(5)]
    spread = (max(pairs) - min(pairs)) / median(pairs)
    ceilings.set("launch.event_pair", Ceiling(value=median(pairs), spread=spread, how="two events, nothing between"))
    tick = Ceiling(value=device.event_tick(), spread=0.0, how="greatest common step of event times")
    ceilings.set("launch.event_tick", tick)


Draw = Callable[..., torch.Tensor]
"""Numbers of a shape: `torch.randn`, or `torch.zeros`."""
Product = Callable[[int, int, int, Draw], Callable[[], Any]]
"""Makes a call from rows, depth, columns and what draws the numbers."""


def _products(device: CudaDevice) -> Iterator[tuple[str, Product]]:
    """For each dtype, what makes its products."""

    def plain(dtype: torch.dtype) -> Product:
        def make(m: int, k: int, n: int, draw: Draw) -> Callable[[], Any]:
            a, b = (draw(shape, device=device.device).to(dtype) for shape in ((m, k), (k, n)))
            out = torch.empty(m, n, device=device.device, dtype=dtype)
            return lambda: torch.mm(a, b, out=out)

        return make

    def tensor_float(m: int, k: int, n: int, draw: Draw) -> Callable[[], Any]:
        product = plain(torch.float32)(m, k, n, draw)

        def call() -> None:
            before = torch.backends.cuda.matmul.allow_tf32
            torch.backends.cuda.matmul.allow_tf32 = True
            product()
            torch.backends.cuda.matmul.allow_tf32 = before

        return call

    def eight_bit(m: int, k: int, n: int, draw: Draw) -> Callable[[], Any]:
        a = draw((m, k), device=device.device).to(torch.float8_e4m3fn)
        b = draw((n, k), device=device.device).to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=device.device)
        return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    def integer(m: int, k: int, n: int, draw: Draw) -> Callable[[], Any]:
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


def _matrix(ceilings: Ceilings, device: CudaDevice, name: str, make: Product) -> None:
    """The ceiling is reached with zeros: a GPU at its power limit clocks higher when fewer bits flip.

    Real numbers come between those and random ones, which run 10 to 14 % slower in 16 bits on an H200: the gradient of
    a language model's logits, whose values are nearly equal, runs at 845 of 902 TFLOP/s.
    """
    room = "vector" if name == "float32" else "matrix"  # without tf32 a float32 product runs on the vector units
    best: tuple[float, Callable[[], Any], tuple[int, int, int]] | None = None
    for shape in PRODUCTS if name not in ("float32", "float64") else PRODUCTS[:1]:
        m, k, n = shape
        flops = 2.0 * m * k * n
        ceilings.say(f"matrix product in {name}, {m} x {k} x {n}")
        try:
            zeros, call = make(m, k, n, torch.zeros), make(m, k, n, torch.randn)
            ceiling = reach(_pairs(device, zeros), flops, f"product of {m} x {k} x {n}, zeros, burst")
            random = reach(_pairs(device, call), flops, f"product of {m} x {k} x {n}, random numbers, burst")
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
    ceilings.say(f"the same, sustained for {SUSTAINED_SECONDS:g} s")
    rates = _sustained(device, call, 2.0 * m * k * n)
    spread = (quantile(rates, 0.9) - quantile(rates, 0.1)) / median(rates)
    how = f"product of {m} x {k} x {n}, random numbers, last half of {SUSTAINED_SECONDS:g} s"
    ceilings.set(f"matrix_sustained.{name}", Ceiling(value=median(rates), spread=spread, how=how))


def _sustained(device: CudaDevice, call: Callable[[], Any], flops: float, batch: int = 20) -> list[float]:
    """Rates of back-to-back batches; the first half of the time only brings power and heat to their plateau."""
    rates: list[float] = []
    start = time.perf_counter()
    events = device.events(2)
    while (elapsed := time.perf_counter() - start) < SUSTAINED_SECONDS:
        events[0].record()
        for _ in range(batch):
            call()
        events[1].record()
        device.synchronize()
        if elapsed > SUSTAINED_SECONDS / 2:
            rates.append(flops * batch / (events[0].elapsed_time(events[1]) * 1e-3))
    return rates


def _vector(ceilings: Ceilings, device: CudaDevice) -> None:
    """A loop of multiply-adds in registers; needs triton. A float32 product is the other way to that ceiling."""
    ceilings.say("vector units")
    kernel = fma_kernel(device.device)
    if kernel is None:
        return
    how = "multiply-adds in registers"
    ceilings.best("vector.float32", reach(_pairs(device, kernel.launch), kernel.flops, how))


def _transfers(ceilings: Ceilings, device: CudaDevice) -> None:
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
            ceilings.set(f"{direction}.{name}", reach(sampler, TRANSFER_BYTES, f"copy of {size}", blocks=3))
    if torch.cuda.device_count() > 1:
        other = torch.empty_like(on_device, device=torch.device("cuda", (device.index + 1) % torch.cuda.device_count()))
        ceilings.say("copies to another GPU")
        sampler = WallSampler(device, lambda: other.copy_(on_device), "latency", call_seconds=1e-3)
        ceilings.set("device_to_device", reach(sampler, TRANSFER_BYTES, f"copy of {size} to {other.device}"))
