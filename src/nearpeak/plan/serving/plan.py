"""`serving_plan`: everything about a served model in one record, for reports and for JSON.

Latency and throughput under a load, both phases and what limits each, the batch at which decode stops being limited by
memory, and the memory of a GPU.

>>> from nearpeak.plan.models.catalogue import get_model
>>> from nearpeak.plan.cluster.cluster import Cluster
>>> load = Load(prompt=1024, output=256, concurrency=16)
>>> plan = serving_plan(get_model("llama-3-8b"), Cluster.of("h100-sxm x 1"), load)
>>> plan.replica.limiter, plan.phases.prefill.limiter, plan.layout.gpus
('memory', 'compute', 1)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nearpeak._display import Result, headline
from nearpeak.errors import UsageError, did_you_mean
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.legal import require_positive
from nearpeak.plan.models.model import Model, forward_flops
from nearpeak.plan.serving.constants import ServingConstants, load_serving_constants
from nearpeak.plan.serving.deployment import (
    MEMORY_SHARE,
    Deployment,
    ServingLayout,
    ServingPrecision,
    cache_room,
    require_room,
)
from nearpeak.plan.serving.search import ServingOption, ServingSearch, search_serving, serving_layouts
from nearpeak.plan.serving.serve import (
    BATCHINGS,
    CHUNK,
    MOST_SEQUENCES,
    Batching,
    Disaggregated,
    Serving,
    Speculative,
    batch_of_step,
    serve,
    serve_disaggregated,
    speculate,
)
from nearpeak.plan.serving.simulate import LARGEST_WORKLOAD, Simulation, Workload, closed_loop, simulate
from nearpeak.plan.serving.step import StepTime, serving_rates, step_time
from nearpeak.units import seconds

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
LENGTH_SPREAD = 0.1
"""How far the lengths of simulated requests lie from their mean: benchmarks draw them from 80 to 100 % of the largest.
Of exactly equal lengths, requests would run in lock step."""
LARGEST_BATCH = 1 << 16
"""Largest batch at which the crossover to compute is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests to a served model. `concurrency` counts requests in flight on the whole cluster."""

    prompt: int
    output: int
    concurrency: float
    batching: Batching = "continuous"
    chunk: int = CHUNK
    most_sequences: int = MOST_SEQUENCES
    memory_share: float = MEMORY_SHARE

    def __post_init__(self) -> None:
        require_positive(prompt=self.prompt, output=self.output, chunk=self.chunk, most_sequences=self.most_sequences)
        if not 0 < self.concurrency <= LARGEST_WORKLOAD:
            near = LARGEST_WORKLOAD if self.concurrency > LARGEST_WORKLOAD else 1
            raise UsageError(
                f"concurrency={self.concurrency!r} must be above 0 and at most {LARGEST_WORKLOAD:,}. "
                f"Nearest: concurrency={near}."
            )
        if not 0 < self.memory_share <= 1:
            raise UsageError(
                f"memory_share={self.memory_share!r} must lie above 0 and at most at 1. Nearest: memory_share=1."
            )
        if self.batching not in BATCHINGS:
            raise UsageError(f"batching={self.batching!r} is not known. {did_you_mean(self.batching, BATCHINGS)}")

    def closed_loop(self) -> Workload:
        """As many clients as there are requests in flight, whose lengths vary a little, as those of benchmarks do."""
        return closed_loop(
            prompt=self.prompt, output=self.output, concurrency=max(1, round(self.concurrency)), spread=LENGTH_SPREAD
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan(Result):
    """A model served on a cluster: both phases, latency and throughput, room for the cache."""

    model: Model
    cluster: Cluster
    layout: ServingLayout
    replicas: int
    precision: ServingPrecision
    engine: str
    graphs: bool
    """Whether steps without a prompt are CUDA graphs."""
    load: Load
    replica: Serving
    """One replica under its share of the load."""
    curve: tuple[Serving, ...]
    """One replica against concurrency."""
    phases: Phases
    critical_batch: CriticalBatch
    memory: ServingMemory
    flops_per_token: float
    """Of one decoded token without attention, all GPUs together."""
    choices: tuple[ServingChoice, ...]
    """Layouts that were compared, best first; one where the layout was given."""
    front: tuple[ServingOption, ...] = ()
    """Layouts and loads that none beats both per GPU and per user; none where the layout was given."""
    disaggregated: Disaggregated | None = None
    speculative: Speculative | None = None
    simulation: Simulation
    """The scheduler of all replicas under the requests: the figures to go by."""
    price: float | None = None
    """Dollars per GPU and hour."""

    @property
    def dollars_per_million_tokens(self) -> float | None:
        """Cost of a million output tokens, all GPUs of the simulation paid for; None without a price."""
        if self.price is None:
            return None
        return self.price * self.simulation.gpus / 3600 / self.simulation.tokens_per_second * 1e6

    @property
    def ttft_range(self) -> tuple[float, float]:
        """80 % interval of the mean time to first token."""
        low, high = self.replica.spread.get("ttft", (1.0, 1.0))
        return self.simulation.ttft.mean * low, self.simulation.ttft.mean * high

    @property
    def tpot_range(self) -> tuple[float, float]:
        """80 % interval of the mean time per output token."""
        low, high = self.replica.spread.get("tpot", (1.0, 1.0))
        return self.simulation.tpot.mean * low, self.simulation.tpot.mean * high

    def __repr__(self) -> str:
        where = f"{self.cluster.gpus} x {self.cluster.machine.id}"
        rate = f"{self.simulation.tokens_per_second:,.0f} tokens/s"
        latency = f"first after {seconds(self.simulation.ttft.mean)}, then {seconds(self.simulation.tpot.mean)} each"
        return headline(f"ServingPlan of {self.model.name} on {where}: {rate}, {latency}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingChoice:
    """One layout of a replica under the load."""

    layout: ServingLayout
    replicas: int
    serving: Serving | None
    """One replica under its share of the load; None where it does not fit."""
    problem: str = ""

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of all replicas."""
        return 0.0 if self.serving is None else self.serving.tokens_per_second * self.replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingMemory:
    """Memory of one GPU in bytes, and the capacity of its KV cache."""

    memory: float
    weights: float
    reserved: float
    """CUDA context, graphs, buffers, and memory that the engine does not use."""
    cache: float
    bytes_per_token: float
    tokens: int
    """Capacity of the cache of one attention data parallel group in tokens."""
    sequences: float
    """Capacity in sequences of prompt and output."""


def serving_plan(
    model: Model,
    cluster: Cluster,
    load: Load,
    layout: ServingLayout | None = None,
    precision: str = "bf16",
    *,
    kv: str | None = None,
    engine: str = "vllm",
    graphs: bool = True,
    disaggregate: tuple[int, int] | None = None,
    guesses: tuple[int, float] | None = None,
    workload: Workload | None = None,
    price: float | None = None,
) -> ServingPlan:
    """The model under a load; without a layout, the one with the most tokens per second of those that fit.

    `disaggregate` is a number of prefill and of decode replicas; `guesses` is how many are verified at once, and the
    share that is accepted. `workload` has the requests to simulate; without one they are a closed loop of the load.
    Layouts are compared by formulas, and the best one is simulated. `price` is dollars per GPU and hour.
    """
    if price is not None and not 0 <= price < float("inf"):
        raise UsageError(f"price={price!r} must be at least 0 dollars per GPU and hour. Nearest: price=0.")
    tried = [layout] if layout is not None else whole_layouts(model, cluster)

    def deployed(one: ServingLayout) -> Deployment:
        """A deployment of its own for each: it remembers where the times of its collectives come from."""
        return Deployment.of(model, cluster, one, precision, kv=kv, engine=engine, graphs=graphs)

    requests = workload or load.closed_loop()
    longest = max(request.prompt + request.output for request in requests.requests)
    options = (_serving_choice(deployed(one), load, longest) for one in tried)
    choices = sorted(options, key=lambda item: -item.tokens_per_second)
    best = choices[0]
    if best.serving is None:
        if layout is None:
            widest = max(choices, key=lambda item: item.layout.gpus)
            raise UsageError(f"No layout of {cluster.gpus} GPUs fits. {widest.problem}")
        raise UsageError(best.problem)
    deployment = deployed(best.layout)
    pools = disaggregate
    batch, in_flight = batch_of_step(best.serving.running, best.layout)
    context = load.prompt + load.output // 2
    return ServingPlan(
        model=model,
        cluster=cluster,
        layout=best.layout,
        replicas=best.replicas,
        precision=deployment.precision,
        engine=engine,
        graphs=graphs,
        load=load,
        replica=best.serving,
        curve=tuple(_curve(deployment, load)),
        phases=phases(deployment, prompt=load.prompt, context=context, batch=batch, in_flight=in_flight),
        critical_batch=critical_batch(deployment, context=context, memory_share=load.memory_share),
        memory=_serving_memory(deployment, load),
        flops_per_token=forward_flops(model, 1).gemm,
        choices=tuple(choices),
        front=() if layout is not None else _front(model, cluster, load, precision, kv, engine, graphs),
        disaggregated=None
        if pools is None
        else serve_disaggregated(
            deployment,
            deployment,
            prompt=load.prompt,
            output=load.output,
            concurrency=load.concurrency,
            prefill_replicas=pools[0],
            decode_replicas=pools[1],
            memory_share=load.memory_share,
        ),
        speculative=None
        if guesses is None
        else speculate(
            deployment,
            batch=batch,
            context=context,
            guesses=guesses[0],
            acceptance=guesses[1],
            in_flight=in_flight,
        ),
        simulation=simulate(
            deployment,
            requests,
            replicas=best.replicas if pools is None else pools[1],
            prefill=None if pools is None else deployment,
            prefill_replicas=1 if pools is None else pools[0],
            guesses=0 if guesses is None else guesses[0],
            acceptance=0.0 if guesses is None else guesses[1],
            chunk=load.chunk,
            most_sequences=load.most_sequences,
            memory_share=load.memory_share,
            static=load.batching == "static",
        ),
        price=price,
    )


def plan_within(
    search: ServingSearch,
    planned: Callable[[ServingOption], ServingPlan],
    *,
    most_ttft: float | None = None,
    most_tpot: float | None = None,
) -> ServingPlan | None:
    """The plan of the first option of `search` whose simulated means keep the limits, too; None where none does.

    The search goes by formulas. What a simulation takes longer than they say, the next options are expected to.
    """
    ttft_ratio = tpot_ratio = 1.0
    for option in search.within:
        expected = option.serving
        if most_ttft is not None and ttft_ratio * expected.ttft > most_ttft:
            continue
        if most_tpot is not None and tpot_ratio * expected.tpot > most_tpot:
            continue
        plan = planned(option)
        ttft, tpot = plan.simulation.ttft.mean, plan.simulation.tpot.mean
        if (most_ttft is None or ttft <= most_ttft) and (most_tpot is None or tpot <= most_tpot):
            return plan
        ttft_ratio, tpot_ratio = max(ttft_ratio, ttft / expected.ttft), max(tpot_ratio, tpot / expected.tpot)
    return None


def whole_layouts(model: Model, cluster: Cluster) -> list[ServingLayout]:
    """Layouts whose replicas fill the cluster."""
    layouts = serving_layouts(model, cluster.gpus, domain=cluster.domain)
    return [layout for layout in layouts if cluster.gpus % layout.gpus == 0]


def _serving_choice(deployment: Deployment, load: Load, longest: int) -> ServingChoice:
    layout = deployment.layout
    # a replica without a request does no work
    replicas = max(1, min(deployment.cluster.gpus // layout.gpus, int(load.concurrency)))
    try:
        require_room(deployment, longest, memory_share=load.memory_share)
        serving = _serve_load(deployment, load, load.concurrency / replicas)
    except UsageError as problem:
        return ServingChoice(layout=layout, replicas=replicas, serving=None, problem=str(problem))
    return ServingChoice(layout=layout, replicas=replicas, serving=serving)


def _front(
    model: Model, cluster: Cluster, load: Load, precision: str, kv: str | None, engine: str, graphs: bool
) -> tuple[ServingOption, ...]:
    return search_load(model, cluster, load, precision, kv=kv, engine=engine, graphs=graphs).front


def search_load(
    model: Model,
    cluster: Cluster,
    load: Load,
    precision: str = "bf16",
    *,
    kv: str | None = None,
    engine: str = "vllm",
    graphs: bool = True,
    most_ttft: float | None = None,
    most_tpot: float | None = None,
) -> ServingSearch:
    """`search_serving` for requests and an engine like those of `load`, at any concurrency."""
    return search_serving(
        model,
        cluster,
        precision,
        prompt=load.prompt,
        output=load.output,
        kv=kv,
        engine=engine,
        graphs=graphs,
        batching=load.batching,
        chunk=load.chunk,
        most_sequences=load.most_sequences,
        memory_share=load.memory_share,
        most_ttft=most_ttft,
        most_tpot=most_tpot,
    )


def _serve_load(deployment: Deployment, load: Load, concurrency: float) -> Serving:
    return serve(
        deployment,
        prompt=load.prompt,
        output=load.output,
        concurrency=concurrency,
        batching=load.batching,
        chunk=load.chunk,
        most_sequences=load.most_sequences,
        memory_share=load.memory_share,
    )


def _curve(deployment: Deployment, load: Load) -> Iterator[Serving]:
    """To the first concurrency that no longer fits into the cache, and that one."""
    for number in CONCURRENCIES:
        serving = _serve_load(deployment, load, float(number))
        yield serving
        if serving.running < number:
            return


def _serving_memory(deployment: Deployment, load: Load) -> ServingMemory:
    room = cache_room(deployment, memory_share=load.memory_share)
    length = load.prompt + load.output
    return ServingMemory(
        memory=room.memory_bytes,
        weights=room.weight_bytes,
        reserved=room.reserved_bytes,
        cache=room.cache_bytes,
        bytes_per_token=deployment.cache_bytes(length) / length,
        tokens=room.tokens,
        sequences=room.sequences(length),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase on one GPU: its work, its arithmetic intensity, and its limiter."""

    name: str
    tokens: float
    """Tokens of one pass in one attention data parallel group."""
    flops: float
    """FLOPs of the pass, per GPU."""
    bytes_moved: float
    """Memory traffic of weights, cache and activations in the pass, per GPU."""
    ridge: float
    """FLOP per byte at which GEMMs in this precision turn from memory-bound to compute-bound."""
    step: StepTime

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.bytes_moved

    @property
    def limiter(self) -> str:
        """Memory or compute."""
        return "compute" if self.step.compute_seconds > self.step.memory_seconds else "memory"

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.tokens:.0f} tokens move {self.bytes_moved / 1e9:.1f} GB for "
            f"{self.flops / 1e12:.2f} TFLOP per GPU, {self.intensity:.0f} FLOP per byte; "
            f"the GPU needs {self.ridge:.0f} to be busy: limited by "
            f"{self.limiter}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """The two phases of one deployment."""

    prefill: Phase
    decode: Phase


def phases(
    deployment: Deployment,
    *,
    prompt: int,
    context: int,
    batch: float = 1.0,
    in_flight: float = 1.0,
    constants: ServingConstants | None = None,
) -> Phases:
    """One prompt of `prompt` tokens, and one step in which `batch` sequences of `context` tokens decode."""
    constants = constants or load_serving_constants()
    rates = serving_rates(deployment, constants)
    prefill = step_time(deployment, sequences=0, prompt_tokens=prompt, prompt_length=prompt, constants=constants)
    decode = step_time(deployment, sequences=batch, context=context, in_flight=in_flight, constants=constants)
    ridge = rates.rest_compute / rates.rest_stream
    stages = deployment.layout.pp  # a step is the pass through all of them, and a GPU has the layers of one
    gpus = deployment.layout.tp * stages
    return Phases(
        prefill=Phase(
            name="prefill",
            tokens=prompt,
            flops=prompt * forward_flops(deployment.model, prompt).total / gpus,
            bytes_moved=prefill.memory_seconds * rates.rest_stream / stages,
            ridge=ridge,
            step=prefill,
        ),
        decode=Phase(
            name="decode",
            tokens=batch,
            flops=batch * forward_flops(deployment.model, 2 * context).total / gpus,  # the last token sees all keys
            bytes_moved=decode.memory_seconds * rates.rest_stream / stages,
            ridge=ridge,
            step=decode,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalBatch:
    """The batch at which a decode step turns from memory-bound to compute-bound."""

    batch: float | None
    """Sequences per attention data parallel group; None where decode is memory-bound at every batch."""
    fits: float
    """Sequences of this context that fit into the KV cache."""
    context: int
    weights_only: float
    """The same batch without a KV cache to read."""

    @property
    def reached(self) -> bool:
        """Whether so many sequences fit."""
        return self.batch is not None and self.batch <= self.fits

    def __str__(self) -> str:
        if self.batch is None:
            return (
                f"decode at {self.context} tokens stays limited by memory at every batch: each sequence brings its own "
                f"cache to read; without a cache it would change at {self.weights_only:.0f}"
            )
        room = "there is room for so many" if self.reached else f"the cache has room for {self.fits:.0f}"
        return f"decode at {self.context} tokens is limited by memory below {self.batch:.0f} sequences; {room}"


def critical_batch(
    deployment: Deployment,
    *,
    context: int,
    memory_share: float = MEMORY_SHARE,
    constants: ServingConstants | None = None,
) -> CriticalBatch:
    """The smallest batch at which a decode step at `context` tokens is no longer limited by memory."""
    require_positive(context=context)
    constants = constants or load_serving_constants()
    room = cache_room(deployment, memory_share=memory_share)
    stages = deployment.layout.pp  # each works on another batch of the group
    batch = _crossover_batch(deployment, float(context), constants)
    return CriticalBatch(
        batch=None if batch is None else stages * batch,
        fits=room.sequences(context),
        context=context,
        weights_only=stages * (_crossover_batch(deployment, 0.0, constants) or float(LARGEST_BATCH)),
    )


def _crossover_batch(deployment: Deployment, context: float, constants: ServingConstants) -> float | None:
    """Bisect: compute grows with the batch, the reading of weights does not."""
    rates = serving_rates(deployment, constants)

    def computes(batch: float) -> bool:
        step = step_time(deployment, sequences=batch, context=context, constants=constants, rates=rates)
        return step.compute_seconds >= step.memory_seconds

    high = 1.0
    while not computes(high):
        high *= 2
        if high > LARGEST_BATCH:
            return None
    low = high / 2
    while high - low > max(0.5, 0.005 * high):
        middle = (low + high) / 2
        low, high = (low, middle) if computes(middle) else (middle, high)
    return high
