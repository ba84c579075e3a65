"""The ceilings of this CPU: what its memory, its caches and its vector or matrix units reach in PyTorch."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from nearpeak.machines.detect import cpu_facts
from nearpeak.machines.model import Achievable, Ceiling
from nearpeak.measure.ceilings import Ceilings, duration, reach
from nearpeak.measure.host import UNKNOWN_CACHE_BYTES, HostEviction, HostSampler
from nearpeak.measure.options import Progress
from nearpeak.units import quantity

SIZES = (256, 512, 1024, 2048, 4096)
LONGEST_PRODUCT_SECONDS = 0.2
SUSTAINED_SECONDS = 1.0


def calibrate_host(progress: Progress | None = None) -> Achievable:
    """Measures this CPU, with the threads that torch uses now. A few seconds on two cores."""
    facts = cpu_facts()
    ceilings = Ceilings(progress)
    cache = facts.cache_bytes or UNKNOWN_CACHE_BYTES
    small = [_small_operation(ceilings)]
    _bandwidths(ceilings, int(max(4 * cache, 2**27)))
    _cache_bandwidth(ceilings, int(cache))
    small.append(_small_operation(ceilings))
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8):
        _products(ceilings, dtype, facts.matrix_engine)
    small.append(_small_operation(ceilings))
    for name, measured in zip(("launch.host_call", "launch.cold_start"), zip(*small, strict=True), strict=True):
        # in seconds that are apart: what else runs on the host slows down all that is timed within one
        ceilings.set(name, sorted(measured, key=lambda ceiling: ceiling.value)[len(measured) // 2])
    return ceilings.achievable()


def _small_operation(ceilings: Ceilings) -> tuple[Ceiling, Ceiling]:
    """What a tiny one takes, and what more with cold caches."""
    ceilings.say("one small operation")
    small = torch.randn(16)
    out = torch.empty_like(small)
    call = HostSampler(lambda: torch.add(small, small, out=out), "hot", call_seconds=2e-6)
    return duration(call, "torch.add of 16 elements"), _cold_start()


def _cold_start() -> Ceiling:
    """What a tiny operation takes longer when the caches were swept before it than when another one came between."""
    sweep, small, other = HostEviction(), torch.randn(16), torch.randn(16)

    def after_another() -> None:
        sweep()
        torch.add(other, other)

    def after(evict: Callable[[], Any], how: str) -> Ceiling:
        return duration(HostSampler(lambda: torch.add(small, small), "cold", call_seconds=0.0, evict=evict), how)

    first = after(sweep, "torch.add of 16 elements after a sweep of the caches, less the same after another one")
    second = after(after_another, "")
    return dataclasses.replace(first, value=max(0.0, first.value - second.value))


def _hot(call: Callable[[], Any]) -> HostSampler:
    call()
    start = time.perf_counter()
    call()
    return HostSampler(call, "hot", call_seconds=time.perf_counter() - start)


def _bandwidths(ceilings: Ceilings, size: int) -> None:
    a, b, c = (torch.randn(size // 4) for _ in range(3))
    ways: dict[str, tuple[Callable[[], Any], int]] = {
        "copy": (lambda: a.copy_(b), 2),
        "read": (lambda: torch.sum(a), 1),
        "fill": (lambda: a.fill_(1.0), 1),
        "triad": (lambda: torch.add(b, c, alpha=2.0, out=a), 3),
    }
    for name, (call, passes) in ways.items():
        ceilings.say(f"memory: {name} of {quantity(size, 'B')}")
        how = f"{name} of {quantity(size, 'B')} per tensor, {passes} pass{'es' if passes > 1 else ''}"
        ceilings.set(f"bandwidth.{name}", reach(_hot(call), passes * size, how, blocks=5))


def _cache_bandwidth(ceilings: Ceilings, cache: int) -> None:
    ceilings.say("last-level cache")
    for divisor in (2, 4, 8):
        size = max(2**16, cache // divisor)
        a, b, whole = torch.randn(size // 8), torch.empty(size // 8), torch.empty(size // 4)
        for name, call in (("copy", partial(b.copy_, a)), ("fill", partial(whole.fill_, 1.0))):
            how = f"repeated {name} within {quantity(size, 'B')}"
            ceilings.best("cache_bandwidth", reach(_hot(call), size, how, blocks=5))


def _products(ceilings: Ceilings, dtype: torch.dtype, engine: str | None) -> None:
    """The best product over growing sizes, as far as one stays short: some types are only emulated on a CPU."""
    name = str(dtype).removeprefix("torch.")
    room = "matrix" if engine is not None and name in ("bfloat16", "int8", "float16") else "vector"
    ceilings.say(f"matrix product in {name}")
    rate, best_size = 0.0, SIZES[0]
    for size in SIZES:
        flops = 2.0 * size**3
        if rate and flops / rate > LONGEST_PRODUCT_SECONDS:
            break
        try:
            ceiling = reach(_hot(_product(size, dtype)), flops, f"product of {size} x {size} matrices", blocks=5)
        except RuntimeError:  # this build of torch has no such product on the CPU
            return
        ceilings.best(f"{room}.{name}", ceiling)
        if ceiling.value > rate:
            rate, best_size = ceiling.value, size
    if name == "float32":
        ceilings.say(f"the same, sustained for {SUSTAINED_SECONDS:g} s")
        sampler = _hot(_product(best_size, dtype))
        flops = 2.0 * best_size**3
        blocks = max(5, int(SUSTAINED_SECONDS * rate / flops / sampler.calls))
        how = f"product of {best_size} x {best_size} matrices for {SUSTAINED_SECONDS:g} s"
        ceilings.set("matrix_sustained.float32", reach(sampler, flops, how, blocks=blocks))


def _product(size: int, dtype: torch.dtype) -> Callable[[], Any]:
    if dtype == torch.int8:
        a, b = (torch.randint(-128, 128, (size, size), dtype=dtype) for _ in range(2))
        return lambda: torch._int_mm(a, b)
    x, y = (torch.randn(size, size).to(dtype) for _ in range(2))
    out = torch.empty(size, size, dtype=dtype)
    return lambda: torch.mm(x, y, out=out)
