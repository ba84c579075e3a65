"""`measure_efficiency`: what kernels reach of the ceilings on this CPU, by kind of op and size.

Each `KernelProbe` is one operator at some sizes. It stands for the kind of op that it runs, under the most special
name that `bound.expected` has for it, and for more general kinds where it says so. Every call is one op, so that its
time belongs to that op alone. The probes of a GPU serve the fit of its kernel models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from nearpeak.bound.expected import CACHED, NARROW, kinds_of
from nearpeak.bound.floors import as_written
from nearpeak.calibrate.ceilings import Call
from nearpeak.calibrate.progress import CalibrationProgress, Task
from nearpeak.devices.backends import is_gpu
from nearpeak.errors import UsageError
from nearpeak.machines.machine import EfficiencyPoint, Machine
from nearpeak.measure.page_faults import MANY_FAULTS, freed_memory_kept, page_faults
from nearpeak.measure.samplers import HostEviction, HostSampler
from nearpeak.measure.statistics import median
from nearpeak.ops.cost import cost_of
from nearpeak.trace.cuda_ops.target import Target
from nearpeak.trace.trace import trace

HOST_CALLS = 5
MAX_SETTLING_CALLS = 10
"""Calls of a probe on a host before it is timed, at most."""
PROBE_SECONDS = 0.25
"""About how long one round through the sizes of a probe takes on two quiet cores."""
HOST_ROUNDS = 5
"""Rounds through all probes on a host, which other processes slow down for seconds at a time."""

aten = torch.ops.aten
BF16, FP32 = torch.bfloat16, torch.float32

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


def measure_efficiency(machine: Machine, progress: CalibrationProgress | None = None) -> Machine:
    """This CPU with the efficiency of its kernels; `machine` has its ceilings. Caches are cold before each call.

    An operator that this torch lacks is left out.
    """
    progress = progress or CalibrationProgress()
    measurement = _Measurement(machine, _host_timer())
    missing: set[str] = set()

    def measure(probe: KernelProbe) -> None:
        if probe.name in missing:
            return
        try:
            for size in probe.sizes:
                measurement.add(probe, size)
        except (RuntimeError, NotImplementedError, UsageError) as error:
            missing.add(probe.name)
            progress.say(f"kernels: {probe.name} is left out: {str(error).splitlines()[0][:100]}")

    with freed_memory_kept(), torch.no_grad():
        for _ in range(HOST_ROUNDS):
            progress.run(
                Task(name=f"kernels: {probe.name}", seconds=PROBE_SECONDS, measure=partial(measure, probe))
                for probe in kernel_probes(torch.device("cpu"))
            )
    assert machine.achievable is not None
    achievable = dataclasses.replace(machine.achievable, efficiency=measurement.efficiency())
    return dataclasses.replace(machine, achievable=achievable)


def efficiency_seconds() -> float:
    """About how long `measure_efficiency` takes on two quiet cores."""
    return HOST_ROUNDS * PROBE_SECONDS * sum(1 for _ in kernel_probes(torch.device("cpu")))


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
        recorded = trace(call, live=True, target=Target(kind="cpu"))
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


class _Operands:
    """Random operands of probes on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.gpu = is_gpu(device)
        self.dtype = BF16 if self.gpu else FP32
        """The dtype that models run in on the device."""

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Random numbers."""
        return torch.randn(*shape, device=self.device, dtype=dtype or self.dtype)

    def many(self, count: int, *shape: int, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """Several tensors of one shape."""
        return [self(*shape, dtype=dtype) for _ in range(count)]

    def indices(self, limit: int, count: int) -> torch.Tensor:
        """Random integers below a limit."""
        return torch.randint(limit, (count,), device=self.device)


def kernel_probes(device: torch.device) -> Iterator[KernelProbe]:
    """All probes for a device."""
    draw = _Operands(device)
    # On a host no result is so large that the C library would map its memory anew for each call.
    few = (2**18, 2**23, 2**27) if draw.gpu else (2**15, 2**18, 2**21)
    yield from _memory_probes(draw, few)
    yield from _row_probes(draw, few)
    yield from _optimizer_probes(draw, (2**20, 2**25, 2**29) if draw.gpu else few)
    yield from _gemm_probes(draw)
    yield from _convolution_probes(draw)
    yield from _attention_probes(draw) if draw.gpu else _host_attention_probes(draw)


def _probe(
    name: str,
    sizes: Sequence[int],
    operands: Callable[[int], Iterable[Any]],
    function: Callable[..., Any],
    *stands_for: str,
) -> KernelProbe:
    """A probe that calls a function on operands that are made for a size."""
    return KernelProbe(
        name=name, sizes=sizes, build=lambda size: partial(function, *operands(size)), stands_for=stands_for
    )


def _rows(size: int, width: int) -> tuple[int, int]:
    return max(1, size // width), width


def _memory_probes(draw: _Operands, few: Sequence[int]) -> Iterator[KernelProbe]:
    """Pointwise ops, copies, creation, indexing."""
    sizes = (2**14, 2**18, 2**22, 2**24, 2**27) if draw.gpu else (2**12, 2**16, 2**20, 2**22)
    words = 32000 if draw.gpu else 4000

    def flat(size: int) -> list[torch.Tensor]:
        return draw.many(1, size)

    def pair(size: int) -> list[torch.Tensor]:
        return draw.many(2, size)

    def matrix(width: int, dtype: torch.dtype | None = None) -> Callable[[int], list[torch.Tensor]]:
        return lambda size: draw.many(1, *_rows(size, width), dtype=dtype)

    def transposed(size: int) -> list[torch.Tensor]:
        return [draw(*_rows(size, 1024)).t()]

    def heads_first(size: int) -> list[torch.Tensor]:
        return [draw(max(1, size // 2048), 32, 64).transpose(0, 1)]

    def broadcast(size: int) -> list[torch.Tensor]:
        tokens = max(1, size // 1024)
        return [draw(tokens, 16, 64).transpose(0, 1), draw(1, tokens, 64)]  # heads before tokens, as attention has them

    def lookup(size: int) -> tuple[Any, ...]:
        return draw.indices(words, max(1, size // 1024)), draw(words, 1024)

    def lookup_backward(size: int) -> tuple[Any, ...]:
        count, width = _rows(size, 1024)
        return draw(count, width), draw.indices(words, count), words, -1, False

    def scatter(size: int) -> tuple[Any, ...]:
        table, source = draw.many(2, *_rows(size, 1024), dtype=FP32)
        return table, 0, draw.indices(len(table), len(table)), source

    def images(size: int) -> list[torch.Tensor]:
        return [draw(max(1, size // 2**14), 16, 32, 32)]

    def contiguous(x: torch.Tensor) -> torch.Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    permuted = ("pointwise/permuted", "pointwise/transposed")
    yield _probe("add", sizes, pair, torch.add, "pointwise", "any")
    yield _probe("in-place add", few, pair, torch.Tensor.add_)
    yield _probe("product with a broadcast factor", few, broadcast, torch.mul, *permuted)
    yield _probe("copy", sizes, flat, torch.clone, "movement")
    yield _probe("cast up", few, flat, lambda x: x.to(torch.float64 if x.dtype is FP32 else FP32))
    yield _probe("copy with heads first", few, heads_first, contiguous, "movement/permuted")
    yield _probe("transposing copy", few, transposed, contiguous, "movement/transposed")
    yield _probe("swapped halves", few, matrix(64), lambda x: torch.cat((x[:, 32:], x[:, :32]), -1))
    yield _probe("sum", few, lambda size: [draw(size, dtype=FP32)], torch.sum)
    yield _probe("zeros", sizes, flat, torch.zeros_like, "creation")
    yield _probe("random numbers", few, flat, lambda x: x.bernoulli_(0.9), "random")
    yield _probe("dropout", few, flat, lambda x: aten.native_dropout(x, 0.1, True))
    yield _probe("embedding", few, lookup, functional.embedding, "indexing")
    yield _probe("gradient of an embedding", few, lookup_backward, aten.embedding_dense_backward)
    yield _probe("index add", few, scatter, torch.Tensor.index_add_)
    yield _probe("Fourier transform", few, matrix(1024, FP32), torch.fft.rfft, "fourier")
    yield _probe("cumulative sum", few, matrix(1024), lambda x: torch.cumsum(x, -1))
    yield _probe("largest few", few, matrix(128), lambda x: torch.topk(x, 8), "sorting")
    yield _probe("pooling", few, images, lambda x: functional.avg_pool2d(x, 2), "pooling")


def _row_probes(draw: _Operands, sizes: Sequence[int]) -> Iterator[KernelProbe]:
    """Reductions, normalizations and losses: whole rows."""

    def hidden(count: int, dtype: torch.dtype | None = None) -> Callable[[int], list[torch.Tensor]]:
        return lambda size: draw.many(count, *_rows(size, 2048), dtype=dtype)

    def vocabulary(count: int) -> Callable[[int], list[torch.Tensor]]:
        return lambda size: draw.many(count, *_rows(size, 32000), dtype=FP32)

    def norm(size: int) -> tuple[Any, ...]:
        return draw(*_rows(size, 2048)), [2048], draw(2048), draw(2048), 1e-5

    def norm_backward(size: int) -> tuple[Any, ...]:
        x, shape, weight, bias, eps = norm(size)
        _, mean, deviation = aten.native_layer_norm(x, shape, weight, bias, eps)
        return torch.randn_like(x), x, shape, mean, deviation, weight, bias, [True, True, True]

    def loss(size: int) -> tuple[Any, ...]:
        count, width = _rows(size, 32000)
        return draw(count, width, dtype=FP32), draw.indices(width, count), None, 1, -100

    def loss_backward(size: int) -> tuple[Any, ...]:
        weight = draw(1, dtype=FP32)[0]
        return weight, *loss(size), weight

    def softmax_backward(gradient: torch.Tensor, out: torch.Tensor) -> Any:
        return aten._softmax_backward_data(gradient, out, -1, out.dtype)

    def log_softmax_backward(gradient: torch.Tensor, out: torch.Tensor) -> Any:
        return aten._log_softmax_backward_data(gradient, out, -1, FP32)

    yield _probe("mean", sizes, hidden(1, FP32), lambda x: x.mean(-1, keepdim=True), "reduction")
    yield _probe("sum of columns", sizes, hidden(1), lambda x: aten.sum.dim_IntList(x, [0]))
    yield _probe("softmax", sizes, hidden(1), lambda x: torch.softmax(x, -1), "normalization")
    yield _probe("softmax backward", sizes, hidden(2), softmax_backward)
    yield _probe("log-softmax", sizes, vocabulary(1), lambda x: torch.log_softmax(x, -1))
    yield _probe("log-softmax backward", sizes, vocabulary(2), log_softmax_backward)
    yield _probe("layer norm", sizes, norm, aten.native_layer_norm)
    yield _probe("layer norm backward", sizes, norm_backward, aten.native_layer_norm_backward)
    yield _probe("negative log-likelihood", sizes, loss, aten.nll_loss_forward, "loss")
    yield _probe("negative log-likelihood backward", sizes, loss_backward, aten.nll_loss_backward)


def _optimizer_probes(draw: _Operands, sizes: Sequence[int]) -> Iterator[KernelProbe]:
    """Ops on lists of tensors."""

    def lists(count: int) -> Callable[[int], list[list[torch.Tensor]]]:
        return lambda size: [[draw(size // 16).abs_() for _ in range(16)] for _ in range(count)]

    yield _probe("lists times a number", sizes, lists(1), lambda a: torch._foreach_mul_(a, 0.999), "optimizer")
    yield _probe("lists plus a number", sizes, lists(1), lambda a: torch._foreach_add_(a, 1e-8))
    yield _probe("lists interpolation", sizes, lists(2), lambda a, b: torch._foreach_lerp_(a, b, 0.1))
    yield _probe("lists plus a product", sizes, lists(2), lambda a, b: torch._foreach_addcmul_(a, b, b, 1e-3))
    yield _probe("lists plus a quotient", sizes, lists(3), lambda a, b, c: torch._foreach_addcdiv_(a, b, c, 1e-3))
    yield _probe("lists square root", sizes, lists(1), torch._foreach_sqrt)
    yield _probe("lists divided by a number", sizes, lists(1), lambda a: torch._foreach_div_(a, 1.001))


def _gemm_probes(draw: _Operands) -> Iterator[KernelProbe]:
    """Matrix products, square and with few rows."""
    edges = (256, 1024, 2048, 4096, 8192) if draw.gpu else (64, 256, 1024)

    def square(dtype: torch.dtype) -> Callable[[int], list[torch.Tensor]]:
        return lambda edge: draw.many(2, edge, edge, dtype=dtype)

    def vector(edge: int) -> list[torch.Tensor]:
        return [draw(1, edge), draw(edge, edge)]

    def few_rows(edge: int) -> list[torch.Tensor]:
        return [draw(NARROW, edge), draw(edge, edge).t()]  # by transposed weights, as layers have them

    general = ("matrix/compute", "matrix")
    if draw.gpu:
        yield _probe("product bfloat16", edges, square(BF16), torch.mm, *general)
        yield _probe("product float16", edges[1:4], square(torch.float16), torch.mm)
        yield _probe("product float32", edges[1:4], square(FP32), torch.mm)
    else:
        yield _probe("product float32", edges, square(FP32), torch.mm, *general)
        yield _probe("product of few rows", edges, few_rows, torch.mm, "matrix/compute/narrow")
    yield _probe("product float64", edges[1:3], square(torch.float64), torch.mm)
    yield _probe("row times matrix", edges, vector, torch.mm, "matrix/memory")


def _convolution_probes(draw: _Operands) -> Iterator[KernelProbe]:
    channel_counts = (32, 128, 256) if draw.gpu else (8, 32)

    def inputs(channels: int) -> list[torch.Tensor]:
        shapes = ((32 if draw.gpu else 1, channels, 56, 56), (channels, channels, 3, 3))
        return [draw(*shape).to(memory_format=torch.channels_last) for shape in shapes]

    def backward(channels: int) -> tuple[Any, ...]:
        x, weight = inputs(channels)
        sizes = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
        return torch.randn_like(x), x, weight, *sizes

    def convolve(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.conv2d(x, weight, padding=1)

    yield _probe("convolution", channel_counts, inputs, convolve, "convolution")
    yield _probe("convolution backward", channel_counts, backward, aten.convolution_backward, "convolution/backward")


def _host_attention_probes(draw: _Operands) -> Iterator[KernelProbe]:
    """Attention of the one backend of a CPU, whose blocks are so wide that a causal mask saves little.

    Heads of half the width need twice the exponentials.
    """
    lengths, packet = (64, 256, 1024), "aten._scaled_dot_product_flash_attention_for_cpu"
    attention = aten._scaled_dot_product_flash_attention_for_cpu

    def forward(width: int, causal: bool) -> Callable[[int], tuple[Any, ...]]:
        return lambda length: (*draw.many(3, 1, 4, length, width), 0.0, causal)

    def backward(length: int) -> tuple[Any, ...]:
        inputs = draw.many(3, 1, 4, length, 64)
        return draw(1, 4, length, 64), *inputs, *attention(*inputs, 0.0, True), 0.0, True

    yield _probe("attention of width 64", lengths, forward(64, False), attention, packet, "attention")
    for width in (32, 64):
        yield _probe(f"causal attention of width {width}", lengths, forward(width, True), attention)
    gradient = aten._scaled_dot_product_flash_attention_for_cpu_backward
    yield _probe("attention backward", lengths, backward, gradient, f"{packet}_backward", "attention/backward")


def _attention_probes(draw: _Operands) -> Iterator[KernelProbe]:
    """Causal attention of each CUDA backend, by width of head."""
    lengths = (256, 1024, 4096)

    def both(
        name: str, packet: str, width: int, options: tuple[Any, ...], saved: Callable[..., tuple[Any, ...]], *kinds: str
    ) -> Iterator[KernelProbe]:
        """The forward and the backward of one backend. `kinds` are more general ones."""
        forward, gradient = getattr(aten, packet), getattr(aten, f"{packet}_backward")

        def operands(length: int) -> tuple[Any, ...]:
            return *draw.many(3, 4, 16, length, width), *options

        def backward(length: int) -> tuple[Any, ...]:
            inputs = draw.many(3, 4, 16, length, width)
            return draw(4, 16, length, width), *inputs, *saved(*forward(*inputs, *options))

        name = f"{name} of width {width}"
        yield _probe(name, lengths, operands, forward, f"aten.{packet}/{width}", *kinds)
        kinds = tuple(f"{kind}_backward" if kind.startswith("aten.") else f"{kind}/backward" for kind in kinds)
        yield _probe(f"{name} backward", lengths, backward, gradient, f"aten.{packet}_backward/{width}", *kinds)

    # From the results of the forward, what the backward takes after the gradient, queries, keys and values.
    def cudnn(out: Any, logsumexp: Any, *rest: Any) -> tuple[Any, ...]:
        ends, key_ends, longest, key_longest, seed, offset, _ = rest
        return out, logsumexp, seed, offset, None, ends, key_ends, longest, key_longest, 0.0, True

    def flash(out: Any, logsumexp: Any, *rest: Any) -> tuple[Any, ...]:
        ends, key_ends, longest, key_longest, seed, offset, _ = rest
        return out, logsumexp, ends, key_ends, longest, key_longest, 0.0, True, seed, offset

    def efficient(out: Any, logsumexp: Any, seed: Any, offset: Any) -> tuple[Any, ...]:
        return None, out, logsumexp, seed, offset, 0.0, [True, True, True, False], True

    masked = (None, True, 0.0, True)
    for width in (64, 128):
        packet = "_scaled_dot_product_cudnn_attention"
        yield from both("cuDNN attention", packet, width, masked, cudnn, *((f"aten.{packet}",) if width == 128 else ()))
    for width in (64, 128):
        packet = "_scaled_dot_product_flash_attention"
        general = (f"aten.{packet}", "attention") if width == 128 else ()
        yield from both("attention", packet, width, (0.0, True), flash, *general)
    yield from both("efficient attention", "_scaled_dot_product_efficient_attention", 64, masked, efficient)
