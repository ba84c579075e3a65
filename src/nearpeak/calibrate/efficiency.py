"""`measure_efficiency`: what kernels reach of the ceilings on this machine, by kind of op and size.

Each `KernelProbe` is one operator at some sizes. It stands for the kind of op that it runs, under the most special
name that `bound.expected` has for it, and for more general kinds where it says so. Every call is one op, so that its
time belongs to that op alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from nearpeak.bound.expected import CACHED, NARROW, kinds_of
from nearpeak.bound.floors import as_written
from nearpeak.devices.backends import is_gpu
from nearpeak.errors import UsageError
from nearpeak.machines.machine import EfficiencyPoint, Machine
from nearpeak.measure.gpu import GpuInstrument, Stage, current_gpu
from nearpeak.measure.instrument import zero_of
from nearpeak.measure.options import Progress
from nearpeak.measure.page_faults import MANY_FAULTS, freed_memory_kept, page_faults
from nearpeak.measure.samplers import EventSampler, HostEviction, HostSampler
from nearpeak.measure.statistics import median
from nearpeak.ops.cost import cost_of
from nearpeak.trace.cuda_ops.target import Target
from nearpeak.trace.trace import trace

BLOCKS = 5
HOST_CALLS = 5
MAX_SETTLING_CALLS = 10
"""Calls of a probe on a host before it is timed, at most."""
HOST_ROUNDS = 5
"""Rounds through all probes on a host, which other processes slow down for seconds at a time."""

aten = torch.ops.aten
BF16, FP32 = torch.bfloat16, torch.float32

Call = Callable[[], Any]
Timer = Callable[[Call, Callable[[], Call]], tuple[float, float | None]]
"""Takes a call, and a function that builds a second call of the same operator on other tensors.

Gives the seconds of the call with cold caches, and with its operands in the caches where that is measured.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelProbe:
    """A call that is built for a size: about how many elements it works on, or the edge of a matrix product."""

    name: str
    sizes: Sequence[int]
    build: Callable[[int], Call]
    stands_for: tuple[str, ...] = ()
    """More general kinds that it is the best example of."""


def measure_efficiency(machine: Machine, progress: Progress | None = None) -> Machine:
    """This machine with the efficiency of its kernels; `machine` has its ceilings. Caches are cold before each call.

    Everything runs in a burst, as the ceilings were measured. An operator that this torch lacks is left out.
    """
    say = progress or (lambda line: None)
    device = current_gpu() if machine.kind == "gpu" else None
    timer = _host_timer() if device is None else partial(_gpu_seconds, device)
    measurement = _Measurement(machine, timer)
    with freed_memory_kept() if device is None else nullcontext(), torch.no_grad():
        for number in range(HOST_ROUNDS if device is None else 1):
            suffix = f", round {number + 1}" if number else ""
            for probe in kernel_probes(torch.device("cpu") if device is None else device.device):
                say(f"kernels: {probe.name}{suffix}")
                try:
                    for size in probe.sizes:
                        measurement.add(probe, size)
                except (RuntimeError, NotImplementedError, UsageError) as error:
                    say(f"kernels: {probe.name} is left out: {str(error).splitlines()[0][:100]}{suffix}")
    assert machine.achievable is not None
    achievable = dataclasses.replace(machine.achievable, efficiency=measurement.efficiency())
    return dataclasses.replace(machine, achievable=achievable)


class _ProbeBounds(NamedTuple):
    """The bounds of one call of a probe."""

    kinds: tuple[str, ...]
    seconds: float
    cached_seconds: float | None
    """With its operands in the cache; None where they do not fit, or the call is not limited by memory."""


class _Measurement:
    """The ratios of measured times to bounds, one per round, by kind of op and by bound."""

    def __init__(self, machine: Machine, timer: Timer) -> None:
        self._machine = machine
        self._timer = timer
        self._bounds: dict[tuple[str, int], _ProbeBounds] = {}
        """By name and size of the probe: a later round times the same calls."""
        self._ratios: dict[str, dict[float, list[float]]] = {}

    def add(self, probe: KernelProbe, size: int) -> None:
        """Times a probe at one size."""
        call = probe.build(size)
        bounds = self._bounds.get((probe.name, size))
        if bounds is None:
            bounds = self._bounds[probe.name, size] = self._bound(probe, call)
        cold, hot = self._timer(call, lambda: probe.build(probe.sizes[0]))
        self._add_ratio(bounds.kinds, bounds.seconds, cold)
        if hot is not None and bounds.cached_seconds is not None:
            self._add_ratio([f"{kind}{CACHED}" for kind in bounds.kinds], bounds.cached_seconds, hot)

    def efficiency(self) -> dict[str, tuple[EfficiencyPoint, ...]]:
        """The median ratio of all rounds, by kind, in the order of bounds."""
        return {
            kind: tuple(
                EfficiencyPoint(bound_seconds=bound, ratio=median(ratios)) for bound, ratios in sorted(points.items())
            )
            for kind, points in self._ratios.items()
        }

    def _bound(self, probe: KernelProbe, call: Call) -> _ProbeBounds:
        machine = self._machine
        recorded = trace(call, live=True, target=Target(kind="cpu") if machine.kind == "cpu" else None)
        costs = [cost_of(op) for op in recorded.ops]
        bounds = as_written(recorded, costs, machine)
        slowest = max(range(len(bounds)), key=lambda index: bounds[index].seconds)
        limiter = "compute" if bounds[slowest].limiter == "compute" else "memory"
        moved = sum(access.bytes for cost in costs for access in (*cost.reads, *cost.writes))
        cached = None
        if limiter == "memory" and moved <= (machine.cache_bytes or 0.0) / 2:
            cached = sum(max(bound.cache_seconds, bound.compute_seconds) for bound in bounds)
        return _ProbeBounds(
            kinds=(next(kinds_of(recorded.ops[slowest], costs[slowest], limiter)), *probe.stands_for),
            seconds=sum(bound.seconds for bound in bounds),
            cached_seconds=cached,
        )

    def _add_ratio(self, kinds: Iterable[str], bound: float, seconds: float) -> None:
        for kind in kinds:
            self._ratios.setdefault(kind, {}).setdefault(bound, []).append(seconds / bound)


def _host_timer() -> Timer:
    """The median of a few calls, cold and hot.

    The sweep evicts the operator's code as well. An op of a step finds its code in the cache, so a second call of the
    operator follows the sweep.
    """
    sweep = HostEviction()

    def seconds(call: Call, build_second: Callable[[], Call]) -> tuple[float, float | None]:
        second = build_second()

        def evict() -> None:
            sweep()
            second()

        _settle_memory(call)
        cold = HostSampler(call, "cold", call_seconds=0.0, evict=evict, calls=HOST_CALLS).block().seconds
        hot = HostSampler(call, "hot", call_seconds=cold)
        return cold, median([hot.block().seconds for _ in range(3)])

    return seconds


def _settle_memory(call: Call) -> None:
    """Calls until no more pages are mapped: a heap that keeps freed memory grows during the first calls."""
    for _ in range(MAX_SETTLING_CALLS):
        before = page_faults()
        call()
        if page_faults() - before < MANY_FAULTS:
            return


def _gpu_seconds(device: GpuInstrument, call: Call, _build_second: Callable[[], Call]) -> tuple[float, float | None]:
    """The median over a few blocks of cold calls. Eviction leaves the code of kernels where it is."""
    for _ in range(2):
        call()
    stage = Stage(device, "cold")
    first = EventSampler(device, call, stage, call_seconds=1e-3, enqueue_seconds=3e-5, calls=2).block().seconds
    zero = zero_of(device.index, "cold").events
    paced = Stage(device, "cold", pace_seconds=3 * first)
    sampler = EventSampler(device, call, paced, call_seconds=first, enqueue_seconds=3e-5, zero_seconds=zero)
    sampler.block()
    return median([sampler.block().seconds for _ in range(BLOCKS)]), None


def kernel_probes(device: torch.device) -> Iterator[KernelProbe]:
    """All probes for a device."""
    gpu = is_gpu(device)
    # On a host no result is so large that the C library would map its memory anew for each call.
    sizes = (2**14, 2**18, 2**22, 2**24, 2**27) if gpu else (2**12, 2**16, 2**20, 2**22)
    few = (2**18, 2**23, 2**27) if gpu else (2**15, 2**18, 2**21)
    many = (2**20, 2**25, 2**29) if gpu else few

    half = BF16 if gpu else FP32  # what models run in there

    def draw(*shape: int, dtype: torch.dtype = half) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    def whole(size: int, *shape: int) -> torch.Tensor:
        return torch.randint(size, shape, device=device)

    def rows(size: int, width: int) -> tuple[int, int]:
        return max(1, size // width), width

    yield from _memory_probes(draw, whole, rows, sizes, few, words=32000 if gpu else 4000)
    yield from _row_probes(draw, whole, rows, few)
    yield from _optimizer_probes(draw, many)
    yield from _gemm_probes(draw, gpu=gpu)
    yield from _convolution_probes(draw, gpu=gpu)
    yield from _attention_probes(draw) if gpu else _host_attention_probes(draw)


DrawTensor = Callable[..., torch.Tensor]
RowsOfSize = Callable[[int, int], tuple[int, int]]


def _memory_probes(
    draw: DrawTensor, whole: DrawTensor, rows: RowsOfSize, sizes: Sequence[int], few: Sequence[int], words: int
) -> Iterator[KernelProbe]:
    def probe(name: str, build: Callable[[int], Call], *stands_for: str, all_sizes: bool = False) -> KernelProbe:
        return KernelProbe(name=name, sizes=sizes if all_sizes else few, build=build, stands_for=stands_for)

    def unary(function: Callable[..., Any], dtype: torch.dtype | None = None) -> Callable[[int], Call]:
        def build(size: int) -> Call:
            x = draw(size) if dtype is None else draw(size, dtype=dtype)
            return lambda: function(x)

        return build

    def binary(function: Callable[..., Any]) -> Callable[[int], Call]:
        def build(size: int) -> Call:
            x, y = draw(size), draw(size)
            return lambda: function(x, y)

        return build

    def broadcast(size: int) -> Call:
        count, width = rows(size, 64)
        x = draw(max(1, count // 16), 16, width).transpose(0, 1)  # heads before tokens, as attention has them
        y = draw(1, max(1, count // 16), width)
        return lambda: torch.mul(x, y)

    def halves(size: int) -> Call:
        x = draw(*rows(size, 64))
        return lambda: torch.cat((x[:, 32:], x[:, :32]), -1)

    def heads_first(size: int) -> Call:
        x = draw(max(1, size // 2048), 32, 64).transpose(0, 1)
        return lambda: x.clone(memory_format=torch.contiguous_format)

    def transposed(size: int) -> Call:
        x = draw(*rows(size, 1024)).t()
        return lambda: x.clone(memory_format=torch.contiguous_format)

    def lookup(size: int) -> Call:
        count, width = rows(size, 1024)
        table, ids = draw(words, width), whole(words, count)
        return lambda: functional.embedding(ids, table)

    def lookup_backward(size: int) -> Call:
        count, width = rows(size, 1024)
        gradient, ids = draw(count, width), whole(words, count)
        return lambda: aten.embedding_dense_backward(gradient, ids, words, -1, False)

    def scattered(size: int) -> Call:
        count, width = rows(size, 1024)
        table, ids, source = draw(count, width, dtype=FP32), whole(count, count), draw(count, width, dtype=FP32)
        return lambda: table.index_add_(0, ids, source)

    def in_place(size: int) -> Call:
        x, y = draw(size), draw(size)
        return lambda: x.add_(y)

    yield probe("add", binary(torch.add), "pointwise", "any", all_sizes=True)
    yield probe("in-place add", in_place)
    yield probe("product with a broadcast factor", broadcast, "pointwise/permuted", "pointwise/transposed")
    yield probe("copy", unary(torch.clone), "movement", all_sizes=True)
    yield probe("cast up", unary(lambda x: x.to(torch.float64 if x.dtype is FP32 else FP32)))
    yield probe("copy with heads first", heads_first, "movement/permuted")
    yield probe("transposing copy", transposed, "movement/transposed")
    yield probe("swapped halves", halves)
    yield probe("sum", unary(torch.sum, FP32))
    yield probe("zeros", unary(torch.zeros_like), "creation", all_sizes=True)
    yield probe("random numbers", unary(lambda x: x.bernoulli_(0.9)), "random")
    yield probe("dropout", unary(lambda x: aten.native_dropout(x, 0.1, True)))
    yield probe("embedding", lookup, "indexing")
    yield probe("gradient of an embedding", lookup_backward)
    yield probe("index add", scattered)
    yield probe("Fourier transform", lambda size: _rfft_call(draw(*rows(size, 1024), dtype=FP32)), "fourier")
    yield probe("cumulative sum", lambda size: _row_call(torch.cumsum, draw(*rows(size, 1024))))
    yield probe("largest few", lambda size: _row_call(lambda x, _: torch.topk(x, 8), draw(*rows(size, 128))), "sorting")
    yield probe("pooling", lambda size: _pool_call(draw(max(1, size // 2**14), 16, 32, 32)), "pooling")


def _rfft_call(x: torch.Tensor) -> Call:
    return lambda: torch.fft.rfft(x)


def _row_call(function: Callable[..., Any], x: torch.Tensor) -> Call:
    return lambda: function(x, -1)


def _pool_call(x: torch.Tensor) -> Call:
    return lambda: functional.avg_pool2d(x, 2)


def _row_probes(draw: DrawTensor, whole: DrawTensor, rows: RowsOfSize, sizes: Sequence[int]) -> Iterator[KernelProbe]:
    """Reductions, normalizations and losses: whole rows."""

    def of_rows(function: Callable[..., Any], *, width: int = 2048, count: int = 1, **options: Any) -> Any:
        def build(size: int) -> Call:
            tensors = [draw(*rows(size, width), **options) for _ in range(count)]
            return lambda: function(*tensors)

        return build

    def norm(size: int) -> Call:
        x, weight, bias = draw(*rows(size, 2048)), draw(2048), draw(2048)
        return lambda: aten.native_layer_norm(x, [2048], weight, bias, 1e-5)

    def norm_backward(size: int) -> Call:
        x, gradient, weight, bias = draw(*rows(size, 2048)), draw(*rows(size, 2048)), draw(2048), draw(2048)
        _, mean, deviation = aten.native_layer_norm(x, [2048], weight, bias, 1e-5)
        return lambda: aten.native_layer_norm_backward(
            gradient, x, [2048], mean, deviation, weight, bias, [True, True, True]
        )

    def negative_log(size: int) -> Call:
        count, width = rows(size, 32000)
        x, target = draw(count, width, dtype=FP32), whole(width, count)
        return lambda: aten.nll_loss_forward(x, target, None, 1, -100)

    def negative_log_backward(size: int) -> Call:
        count, width = rows(size, 32000)
        x, target, weight = draw(count, width, dtype=FP32), whole(width, count), draw(1, dtype=FP32)[0]
        return lambda: aten.nll_loss_backward(weight, x, target, None, 1, -100, weight)

    vocabulary: dict[str, Any] = {"width": 32000, "dtype": FP32}
    yield KernelProbe(
        name="mean",
        sizes=sizes,
        build=of_rows(lambda x: x.mean(-1, keepdim=True), dtype=FP32),
        stands_for=("reduction",),
    )
    yield KernelProbe(name="sum of columns", sizes=sizes, build=of_rows(lambda x: aten.sum.dim_IntList(x, [0])))
    yield KernelProbe(
        name="softmax", sizes=sizes, build=of_rows(lambda x: torch.softmax(x, -1)), stands_for=("normalization",)
    )
    yield KernelProbe(
        name="softmax backward",
        sizes=sizes,
        build=of_rows(lambda g, y: aten._softmax_backward_data(g, y, -1, g.dtype), count=2),
    )
    yield KernelProbe(name="log-softmax", sizes=sizes, build=of_rows(lambda x: torch.log_softmax(x, -1), **vocabulary))
    yield KernelProbe(
        name="log-softmax backward",
        sizes=sizes,
        build=of_rows(lambda g, y: aten._log_softmax_backward_data(g, y, -1, FP32), count=2, **vocabulary),
    )
    yield KernelProbe(name="layer norm", sizes=sizes, build=norm)
    yield KernelProbe(name="layer norm backward", sizes=sizes, build=norm_backward)
    yield KernelProbe(name="negative log-likelihood", sizes=sizes, build=negative_log, stands_for=("loss",))
    yield KernelProbe(name="negative log-likelihood backward", sizes=sizes, build=negative_log_backward)


def _optimizer_probes(draw: DrawTensor, sizes: Sequence[int]) -> Iterator[KernelProbe]:
    def lists(function: Callable[..., Any], count: int) -> Callable[[int], Call]:
        def build(size: int) -> Call:
            tensors = [[draw(size // 16).abs_() for _ in range(16)] for _ in range(count)]
            return lambda: function(*tensors)

        return build

    named: dict[str, tuple[Callable[..., Any], int]] = {
        "times a number": (lambda a: torch._foreach_mul_(a, 0.999), 1),
        "plus a number": (lambda a: torch._foreach_add_(a, 1e-8), 1),
        "interpolation": (lambda a, b: torch._foreach_lerp_(a, b, 0.1), 2),
        "plus a product": (lambda a, b: torch._foreach_addcmul_(a, b, b, 1e-3), 2),
        "plus a quotient": (lambda a, b, c: torch._foreach_addcdiv_(a, b, c, 1e-3), 3),
        "square root": (torch._foreach_sqrt, 1),
        "divided by a number": (lambda a: torch._foreach_div_(a, 1.001), 1),
    }
    for name, (function, count) in named.items():
        general = ("optimizer",) if name == "times a number" else ()
        yield KernelProbe(name=f"lists {name}", sizes=sizes, build=lists(function, count), stands_for=general)


def _gemm_probes(draw: DrawTensor, *, gpu: bool) -> Iterator[KernelProbe]:
    edges = (256, 1024, 2048, 4096, 8192) if gpu else (64, 256, 1024)

    def square(dtype: torch.dtype) -> Callable[[int], Call]:
        def build(edge: int) -> Call:
            a, b = draw(edge, edge, dtype=dtype), draw(edge, edge, dtype=dtype)
            return lambda: torch.mm(a, b)

        return build

    def vector(edge: int) -> Call:
        a, b = draw(1, edge), draw(edge, edge)
        return lambda: torch.mm(a, b)

    def few_rows(edge: int) -> Call:
        a, b = draw(NARROW, edge), draw(edge, edge).t()  # by transposed weights, as layers have them
        return lambda: torch.mm(a, b)

    general = ("matrix/compute", "matrix")
    if gpu:
        yield KernelProbe(name="product bfloat16", sizes=edges, build=square(BF16), stands_for=general)
        yield KernelProbe(name="product float16", sizes=edges[1:4], build=square(torch.float16))
        yield KernelProbe(name="product float32", sizes=edges[1:4], build=square(FP32))
    else:
        yield KernelProbe(name="product float32", sizes=edges, build=square(FP32), stands_for=general)
    yield KernelProbe(name="product float64", sizes=edges[1:3], build=square(torch.float64))
    if not gpu:
        yield KernelProbe(
            name="product of few rows", sizes=edges, build=few_rows, stands_for=("matrix/compute/narrow",)
        )
    yield KernelProbe(name="row times matrix", sizes=edges, build=vector, stands_for=("matrix/memory",))


def _convolution_probes(draw: DrawTensor, *, gpu: bool) -> Iterator[KernelProbe]:
    def build(channels: int) -> Call:
        x = draw(32 if gpu else 1, channels, 56, 56).to(memory_format=torch.channels_last)
        weight = draw(channels, channels, 3, 3).to(memory_format=torch.channels_last)
        return lambda: functional.conv2d(x, weight, padding=1)

    def backward(channels: int) -> Call:
        x = draw(32 if gpu else 1, channels, 56, 56).to(memory_format=torch.channels_last)
        weight = draw(channels, channels, 3, 3).to(memory_format=torch.channels_last)
        gradient = torch.randn_like(x)
        sizes: tuple[Any, ...] = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
        return lambda: aten.convolution_backward(gradient, x, weight, *sizes)

    yield KernelProbe(
        name="convolution", sizes=(32, 128, 256) if gpu else (8, 32), build=build, stands_for=("convolution",)
    )
    yield KernelProbe(
        name="convolution backward",
        sizes=(32, 128, 256) if gpu else (8, 32),
        build=backward,
        stands_for=("convolution/backward",),
    )


def _host_attention_probes(draw: DrawTensor) -> Iterator[KernelProbe]:
    """Attention of the one backend that a CPU has, whose blocks are so wide that a causal mask saves little of it.

    Heads that are half as wide have twice the exponentials.
    """
    packet = "aten._scaled_dot_product_flash_attention_for_cpu"

    def forward(width: int, causal: bool) -> Callable[[int], Call]:
        def build(length: int) -> Call:
            q, k, v = (draw(1, 4, length, width) for _ in range(3))
            return lambda: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)

        return build

    def backward(length: int) -> Call:
        q, k, v, gradient = (draw(1, 4, length, 64) for _ in range(4))
        out, statistics = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        saved = (out, statistics, 0.0, True)
        return lambda: aten._scaled_dot_product_flash_attention_for_cpu_backward(gradient, q, k, v, *saved)

    def probe(name: str, build: Callable[[int], Call], *stands_for: str) -> KernelProbe:
        return KernelProbe(name=name, sizes=(64, 256, 1024), build=build, stands_for=stands_for)

    yield probe("attention of width 64", forward(64, False), packet, "attention")
    for width in (32, 64):
        yield probe(f"causal attention of width {width}", forward(width, True))
    yield probe("attention backward", backward, f"{packet}_backward", "attention/backward")


def _attention_probes(draw: DrawTensor) -> Iterator[KernelProbe]:
    """Causal attention of each backend, by width of head."""

    def forward(width: int) -> Callable[[int], Call]:
        def build(length: int) -> Call:
            q, k, v = (draw(4, 16, length, width) for _ in range(3))
            return lambda: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)

        return build

    def backward(width: int) -> Callable[[int], Call]:
        def build(length: int) -> Call:
            q, k, v, gradient = (draw(4, 16, length, width) for _ in range(4))
            out, statistics, ends, key_ends, most, key_most, seed, offset, _ = aten._scaled_dot_product_flash_attention(
                q, k, v, 0.0, True
            )
            saved = (out, statistics, ends, key_ends, most, key_most, 0.0, True, seed, offset)
            return lambda: aten._scaled_dot_product_flash_attention_backward(gradient, q, k, v, *saved)

        return build

    def efficient(length: int) -> Call:
        q, k, v = (draw(4, 16, length, 64) for _ in range(3))
        return lambda: aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)

    def efficient_backward(length: int) -> Call:
        q, k, v, gradient = (draw(4, 16, length, 64) for _ in range(4))
        out, statistics, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)
        saved = (None, out, statistics, seed, offset, 0.0, [True, True, True, False], True)
        return lambda: aten._scaled_dot_product_efficient_attention_backward(gradient, q, k, v, *saved)

    def cudnn(width: int) -> Callable[[int], Call]:
        def build(length: int) -> Call:
            q, k, v = (draw(4, 16, length, width) for _ in range(3))
            return lambda: aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)

        return build

    def cudnn_backward(width: int) -> Callable[[int], Call]:
        def build(length: int) -> Call:
            q, k, v, gradient = (draw(4, 16, length, width) for _ in range(4))
            out, statistics, ends, key_ends, most, key_most, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, True
            )
            saved = (out, statistics, seed, offset, None, ends, key_ends, most, key_most, 0.0, True)
            return lambda: aten._scaled_dot_product_cudnn_attention_backward(gradient, q, k, v, *saved)

        return build

    lengths = (256, 1024, 4096)
    general: tuple[str, ...]
    for width in (64, 128):
        packet = "aten._scaled_dot_product_cudnn_attention"
        general = (packet,) if width == 128 else ()
        yield KernelProbe(
            name=f"cuDNN attention of width {width}",
            sizes=lengths,
            build=cudnn(width),
            stands_for=(f"{packet}/{width}", *general),
        )
        yield KernelProbe(
            name=f"cuDNN attention of width {width} backward",
            sizes=lengths,
            build=cudnn_backward(width),
            stands_for=(f"{packet}_backward/{width}", *(f"{name}_backward" for name in general)),
        )
    for width in (64, 128):
        packet = "aten._scaled_dot_product_flash_attention"
        general = (packet, "attention") if width == 128 else ()
        yield KernelProbe(
            name=f"attention of width {width}",
            sizes=lengths,
            build=forward(width),
            stands_for=(f"{packet}/{width}", *general),
        )
        general = (f"{packet}_backward", "attention/backward") if width == 128 else ()
        yield KernelProbe(
            name=f"attention of width {width} backward",
            sizes=lengths,
            build=backward(width),
            stands_for=(f"{packet}_backward/{width}", *general),
        )
    packet = "aten._scaled_dot_product_efficient_attention"
    yield KernelProbe(name="efficient attention", sizes=lengths, build=efficient, stands_for=(f"{packet}/64",))
    yield KernelProbe(
        name="efficient attention backward",
        sizes=lengths,
        build=efficient_backward,
        stands_for=(f"{packet}_backward/64",),
    )
