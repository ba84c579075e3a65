"""Communication as training has it, run for real: data parallel with buckets, FSDP2, tensor parallel, experts.

Each pattern is a step with its collectives, the same computation without them, and the same collectives without the
computation. What the step takes beyond the computation is exposed; the rest of the communication is hidden behind it.
The gradients or outputs are compared with those of one rank that computes everything. The prediction has the measured
computation and the fitted times of the collectives, in the order in which the pattern issues them.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch._C._distributed_c10d import GradBucket

from nearpeak._display import StatusLine
from nearpeak.comm.clock import Clock
from nearpeak.comm.collectives import all_gather_single, busiest_bytes, reduce_scatter_single
from nearpeak.comm.fit import CurveFit
from nearpeak.comm.result import PatternTiming
from nearpeak.comm.world import World
from nearpeak.devices.process_state import preserve_process_state
from nearpeak.errors import EnvironmentProblem, message_of
from nearpeak.measure.options import Options, Progress
from nearpeak.measure.statistics import median
from nearpeak.units import quantity

TOLERANCE = 1e-3
"""Of the largest difference over the largest value: sums in float32 whose order differs."""
LARGEST_DIFFERENCE = 1e9
"""Of a result that is not finite."""
FORWARD_SHARE = 1 / 3
"""Of the computation of a step: the backward pass has two products for each of the forward's."""
PRECISION = 0.03
PARTS = 4
"""A pattern has so many times the seconds of a point: it is timed in three ways, and has more to show."""

Cost = Callable[[str, float], float | None]
"""Fitted seconds of a collective of so many bytes over all ranks; None without a fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The model of the patterns."""

    hidden: int
    layers: int
    rows: int
    """Of the batch of each rank."""

    @classmethod
    def of(cls, device: torch.device) -> Sizes:
        """Steps of some milliseconds."""
        if device.type == "cpu":
            return cls(hidden=256, layers=4, rows=128)
        return cls(hidden=4096, layers=6, rows=4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """One pattern, built on this rank."""

    name: str
    what: str
    step: Callable[[], object]
    compute: Callable[[], object]
    communicate: Callable[[], object]
    before: Callable[[], object]
    """Runs before each call, outside of its time."""
    difference: Callable[[], float]
    """After a step: the largest difference from one rank's result, over the largest value."""
    predict: Callable[[float, Cost], tuple[float, float] | None]
    """The step and its communication from the time of the computation; None without the fits."""


@preserve_process_state()
def run_patterns(
    clock: Clock, fits: Sequence[CurveFit], max_seconds: float, say: Progress
) -> tuple[PatternTiming, ...]:
    """All patterns, the same on all ranks; `max_seconds` is the time of a point."""
    options = Options(precision=PRECISION, max_seconds=PARTS * max_seconds)
    torch.set_float32_matmul_precision("high")  # on a GPU float32 without tensor cores would hide everything
    return tuple(_run(clock, build, fits, options, say) for build in PATTERNS)


def _run(
    clock: Clock,
    build: Callable[[World, Sizes], Pattern],
    fits: Sequence[CurveFit],
    options: Options,
    say: Progress,
) -> PatternTiming:
    world = clock.world
    name = build.__name__.replace("_", " ")
    say(StatusLine(f"pattern: {name}"))
    problem, pattern, difference = "", None, 0.0
    with world.watchdog.call(f"pattern {name}"):
        try:
            torch.manual_seed(0)  # the same weights on all ranks
            pattern = build(world, Sizes.of(world.device))
            pattern.before()
            pattern.step()
            difference = pattern.difference()
        except (ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            problem = f"it does not run here: {message_of(error)}"
        problems = world.gather(problem)
    if all(problems):
        return PatternTiming(
            name=name,
            what="",
            step_s=0.0,
            compute_s=0.0,
            communication_s=0.0,
            predicted_s=None,
            predicted_communication_s=None,
            difference=None,
            tolerance=TOLERANCE,
            steps=0,
            problem=problems[0],
        )
    if any(problems) or pattern is None:
        rank = next(rank for rank, text in enumerate(problems) if text)
        raise EnvironmentProblem(f"The pattern {name} failed on rank {rank} and not on all: {problems[rank]}")
    parts = {"step": pattern.step, "compute": pattern.compute, "comm": pattern.communicate}
    times = clock.in_turns(f"pattern {name}", parts, pattern.before, options)
    middle = {part: median(series) for part, series in times.items()}
    difference = max(world.gather(difference))
    made = pattern

    def timing() -> PatternTiming:
        predicted = made.predict(middle["compute"], fitted_cost(fits))
        return PatternTiming(
            name=name,
            what=made.what,
            step_s=middle["step"],
            compute_s=middle["compute"],
            communication_s=middle["comm"],
            predicted_s=None if predicted is None else predicted[0],
            predicted_communication_s=None if predicted is None else predicted[1],
            difference=difference,
            tolerance=TOLERANCE,
            steps=len(times["step"]),
        )

    return world.decide(timing)


def fitted_cost(fits: Sequence[CurveFit]) -> Cost:
    """Times of collectives over the whole world in float32, from the fits; out of place where there are both."""
    curves = {fit.op: fit for fit in sorted(fits, key=lambda fit: not fit.in_place) if fit.group == "world"}

    def cost(op: str, size: float) -> float | None:
        fit = curves.get(op)
        return None if fit is None else fit.seconds(size) if size else 0.0

    return cost


def _layers(sizes: Sizes, device: torch.device) -> nn.Sequential:
    layers = [nn.Linear(sizes.hidden, sizes.hidden, bias=False, device=device) for _ in range(sizes.layers)]
    return nn.Sequential(*itertools.chain(*((layer, nn.Tanh()) for layer in layers)))


def _batch(rank: int, sizes: Sizes, device: torch.device) -> torch.Tensor:
    """The inputs of a rank, which every rank can draw: (rows, hidden)."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(sizes.rows, sizes.hidden, generator=generator).to(device)


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean() * output.shape[-1]


def _largest_difference(pairs: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> float:
    worst = 0.0
    for result, wanted in pairs:
        error, scale = float((result - wanted).abs().max()), float(wanted.abs().max())
        error = error / scale if scale else error
        worst = max(worst, error if math.isfinite(error) else LARGEST_DIFFERENCE)
    return worst


def _gradients_of_one_rank(model: nn.Module, world: World, sizes: Sizes) -> list[torch.Tensor]:
    """Gradients of the mean loss over the batches of all ranks."""
    reference = copy.deepcopy(model)
    for rank in range(world.size):
        (_loss(reference(_batch(rank, sizes, world.device))) / world.size).backward()
    return [parameter.grad for parameter in reference.parameters() if parameter.grad is not None]


def data_parallel(world: World, sizes: Sizes) -> Pattern:
    """DistributedDataParallel: gradients are all-reduced in buckets while the backward pass goes on."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    model = _layers(sizes, world.device)
    wanted = _gradients_of_one_rank(model, world, sizes)
    layer_bytes = sizes.hidden**2 * 4
    parallel = DistributedDataParallel(model, bucket_cap_mb=layer_bytes / 2**20)
    buckets: list[int] = []  # elements, in the order in which they become ready

    def hook(state: Any, bucket: Any) -> Any:
        buckets.append(bucket.buffer().numel())
        return allreduce_hook(state, bucket)

    # DDP checks that these are the types themselves, and not their names
    hook.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]}
    parallel.register_comm_hook(None, hook)
    batch = _batch(world.rank, sizes, world.device)
    buffer = torch.zeros(sizes.layers * sizes.hidden**2, device=world.device)

    def step() -> None:
        buckets.clear()
        _loss(parallel(batch)).backward()

    def compute() -> None:
        with parallel.no_sync():
            _loss(parallel(batch)).backward()

    def communicate() -> None:
        for part in buffer.split(buckets):
            distributed.all_reduce(part)

    def predict(compute_s: float, cost: Cost) -> tuple[float, float] | None:
        costs = [cost("all_reduce", 4.0 * count) for count in buckets]
        known = [each for each in costs if each is not None]
        if len(known) < len(costs):
            return None
        end = 0.0
        for done, each in zip(itertools.accumulate(buckets), known, strict=True):
            ready = compute_s * (FORWARD_SHARE + (1 - FORWARD_SHARE) * done / sum(buckets))
            end = max(end, ready) + each
        return max(end, compute_s), sum(known)

    for _ in range(2):  # buckets are arranged anew after the first
        step()
    return Pattern(
        name="data parallel",
        what=f"DDP over {sizes.layers} layers of {sizes.hidden} x {sizes.hidden}, {sizes.rows} rows on each rank; "
        f"all-reduces of {', '.join(quantity(4 * count, 'B') for count in buckets)}",
        step=step,
        compute=compute,
        communicate=communicate,
        before=lambda: parallel.zero_grad(set_to_none=True),
        difference=lambda: _largest_difference(
            (parameter.grad, want)
            for parameter, want in zip(model.parameters(), wanted, strict=True)
            if parameter.grad is not None
        ),
        predict=predict,
    )


def fully_sharded(world: World, sizes: Sizes) -> Pattern:
    """FSDP2: weights are gathered for the forward and for the backward pass, gradients reduced and scattered."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = _layers(sizes, world.device)
    wanted = _gradients_of_one_rank(model, world, sizes)
    plain = copy.deepcopy(model)
    mesh = init_device_mesh(world.device.type, (world.size,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    batch = _batch(world.rank, sizes, world.device)
    part = -(-(sizes.hidden**2) // world.size)
    whole = torch.zeros(part * world.size, device=world.device)
    mine = torch.zeros(part, device=world.device)
    size = 4.0 * part * world.size
    has_streams = world.device.type != "cpu"

    def communicate() -> None:
        for _ in range(sizes.layers):
            all_gather_single(whole, mine)
        for _ in range(sizes.layers):
            all_gather_single(whole, mine)
            reduce_scatter_single(mine, whole)

    def predict(compute_s: float, cost: Cost) -> tuple[float, float] | None:
        gather, scatter = cost("all_gather", size), cost("reduce_scatter", size)
        if gather is None or scatter is None:
            return None
        alone = sizes.layers * (2 * gather + scatter)
        if not has_streams:
            return compute_s + alone, alone
        return fsdp_seconds(sizes.layers, compute_s, gather, scatter), alone

    def gathered() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for parameter, want in zip(model.parameters(), wanted, strict=True):
            gradient: Any = parameter.grad
            yield gradient.full_tensor(), want

    def clear() -> None:
        model.zero_grad(set_to_none=True)
        plain.zero_grad(set_to_none=True)

    issue = "on a stream of their own" if has_streams else "one after the other with the computation, as CPUs do it"
    return Pattern(
        name="fully sharded",
        what=f"FSDP2 over {sizes.layers} layers of {sizes.hidden} x {sizes.hidden}, {sizes.rows} rows on each rank; "
        f"two all-gathers and a reduce-scatter of {quantity(size, 'B')} for each layer, {issue}",
        step=lambda: _loss(model(batch)).backward(),
        compute=lambda: _loss(plain(batch)).backward(),
        communicate=communicate,
        before=clear,
        difference=lambda: _largest_difference(gathered()),
        predict=predict,
    )


def fsdp_seconds(layers: int, compute_s: float, gather_s: float, scatter_s: float) -> float:
    """The step of FSDP2 with equal layers: the weights of the next layer are gathered while one is computed.

    Exposed are the first gather of each pass and the last scatter, where the others are short enough.

    >>> fsdp_seconds(4, 12.0, 0.0, 0.0), fsdp_seconds(4, 12.0, 0.5, 0.5)
    (12.0, 13.5)
    """
    link = computed = 0.0
    for share, scattered_s in ((FORWARD_SHARE, 0.0), (1 - FORWARD_SHARE, scatter_s)):
        link = gathered = max(link, computed) + gather_s
        for layer in range(layers):
            start = max(computed, gathered)
            if layer < layers - 1:
                link = gathered = max(link, start) + gather_s
            computed = start + share * compute_s / layers
            if scattered_s:
                link = max(link, computed) + scattered_s
    return max(link, computed)


def tensor_parallel(world: World, sizes: Sizes) -> Pattern:
    """A column-parallel layer, then a row-parallel one: an all-reduce in each pass of a block."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    inner = -(-2 * sizes.hidden // world.size) * world.size
    model = nn.Sequential(*(_Block(sizes.hidden, inner, world.device) for _ in range(sizes.layers)))
    batch = _batch(0, sizes, world.device).requires_grad_()  # the same on all ranks
    reference, reference_batch = copy.deepcopy(model), batch.detach().clone().requires_grad_()
    _loss(reference(reference_batch)).backward()
    shard = nn.Sequential(*(_Block(sizes.hidden, inner // world.size, world.device) for _ in range(sizes.layers)))
    mesh = init_device_mesh(world.device.type, (world.size,))
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    activations = torch.zeros_like(batch)
    size = 4.0 * batch.numel()

    def communicate() -> None:
        for _ in range(2 * sizes.layers):
            distributed.all_reduce(activations)

    def predict(compute_s: float, cost: Cost) -> tuple[float, float] | None:
        each = cost("all_reduce", size)
        return None if each is None else (compute_s + 2 * sizes.layers * each, 2 * sizes.layers * each)

    def clear() -> None:
        batch.grad = None
        activations.zero_()
        for module in (model, shard):
            module.zero_grad(set_to_none=True)

    def difference() -> float:
        assert batch.grad is not None and reference_batch.grad is not None
        return _largest_difference(iter([(batch.grad, reference_batch.grad)]))

    return Pattern(
        name="tensor parallel",
        what=f"{sizes.layers} blocks {sizes.hidden} -> {inner} -> {sizes.hidden}, the first layer by columns and the "
        f"second by rows, {sizes.rows} rows; two all-reduces of {quantity(size, 'B')} for each block",
        step=lambda: _loss(model(batch)).backward(),
        compute=lambda: _loss(shard(batch)).backward(),
        communicate=communicate,
        before=clear,
        difference=difference,
        predict=predict,
    )


class _Block(nn.Module):
    """Two layers with an activation between them."""

    def __init__(self, hidden: int, inner: int, device: torch.device) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, inner, bias=False, device=device)
        self.down = nn.Linear(inner, hidden, bias=False, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        change: torch.Tensor = self.down(torch.relu(self.up(x)))
        return x + change


def expert_parallel(world: World, sizes: Sizes) -> Pattern:
    """Tokens are sent to the rank of their expert (dispatch), and the results back (combine); the forward pass."""
    experts = [_Block(sizes.hidden, 2 * sizes.hidden, world.device).requires_grad_(False) for _ in range(world.size)]
    tokens = _batch(world.rank, sizes, world.device)  # (rows, hidden)
    choices = [_choices(rank, world.size, sizes.rows) for rank in range(world.size)]
    parts = [torch.bincount(chosen, minlength=world.size).tolist() for chosen in choices]
    order = torch.argsort(choices[world.rank], stable=True).to(world.device)
    send, receive = parts[world.rank], [row[world.rank] for row in parts]
    counts = torch.tensor(send, device=world.device)
    results: list[torch.Tensor] = []
    local = torch.randn(sum(receive), sizes.hidden, device=world.device)
    sorted_tokens = tokens[order]

    def exchange(source: torch.Tensor, target: torch.Tensor, out: list[int], into: list[int]) -> torch.Tensor:
        distributed.all_to_all_single(target, source, into, out)
        return target

    def step() -> None:
        arriving = torch.empty_like(counts)
        distributed.all_to_all_single(arriving, counts)
        into = arriving.tolist()
        mine = exchange(tokens[order], tokens.new_empty(sum(into), sizes.hidden), send, into)
        back = exchange(experts[world.rank](mine), torch.empty_like(tokens), into, send)
        results[:] = [torch.empty_like(back).index_copy_(0, order, back)]

    def compute() -> None:
        experts[world.rank](local)
        torch.empty_like(tokens).index_copy_(0, order, tokens[order])

    def communicate() -> None:
        distributed.all_to_all_single(torch.empty_like(counts), counts)
        mine = exchange(sorted_tokens, torch.empty_like(local), send, receive)
        exchange(mine, torch.empty_like(tokens), receive, send)

    def difference() -> float:
        chosen = choices[world.rank].to(world.device)
        wanted = torch.empty_like(tokens)
        for number, expert in enumerate(experts):
            wanted[chosen == number] = expert(tokens[chosen == number])
        return _largest_difference(iter([(results[0], wanted)]))

    def predict(compute_s: float, cost: Cost) -> tuple[float, float] | None:
        # the busiest link has as many bytes in an even exchange of this size
        share = (world.size - 1) / world.size
        even = busiest_bytes(parts, 4 * sizes.hidden) / share if share else 0.0
        small, each = cost("all_to_all", 8.0 * world.size), cost("all_to_all", even)
        return None if small is None or each is None else (compute_s + small + 2 * each, small + 2 * each)

    busiest = max(sum(row[rank] for row in parts) for rank in range(world.size))
    return Pattern(
        name="expert parallel",
        what=f"one expert of {sizes.hidden} -> {2 * sizes.hidden} -> {sizes.hidden} on each rank, {sizes.rows} tokens "
        f"from each, {busiest} for the busiest; an exchange of counts, dispatch and combine",
        step=step,
        compute=compute,
        communicate=communicate,
        before=contextlib.nullcontext,
        difference=difference,
        predict=predict,
    )


def _choices(rank: int, experts: int, tokens: int) -> torch.Tensor:
    """The expert of each token of a rank: (tokens,). The first are the most popular."""
    weights = torch.tensor([1 / (number + 1) for number in range(experts)])
    return torch.multinomial(weights, tokens, replacement=True, generator=torch.Generator().manual_seed(2000 + rank))


PATTERNS: tuple[Callable[[World, Sizes], Pattern], ...] = (
    data_parallel,
    fully_sharded,
    tensor_parallel,
    expert_parallel,
)
