"""`serving_plan`: a served model with all that is asked of it in one record, for reports and for JSON.

>>> from nearpeak.plan.models.catalogue import model
>>> from nearpeak.plan.network.cluster import Cluster
>>> load = Load(prompt=1024, output=256, concurrency=16)
>>> found = serving_plan(model("llama-3-8b"), Cluster.of("h100-sxm x 1"), load)
>>> found.at.limiter, found.phases.prefill.limiter, found.layout.gpus
('memory', 'compute', 1)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.plan.models.flops import forward_flops
from nearpeak.plan.models.model import Model
from nearpeak.plan.network.cluster import Cluster
from nearpeak.plan.serving.deployment import Deployment
from nearpeak.plan.serving.kv_cache import MEMORY_SHARE, cache_room
from nearpeak.plan.serving.layout import ServingLayout
from nearpeak.plan.serving.limits import CriticalBatch, Phases, critical_batch, phases
from nearpeak.plan.serving.modes import Disaggregated, Speculative, serve_disaggregated, speculate
from nearpeak.plan.serving.precision import Precision
from nearpeak.plan.serving.search import ServingOption, search_serving, serving_layouts
from nearpeak.plan.serving.serve import BATCHINGS, CHUNK, MOST_SEQUENCES, Batching, Serving, serve

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of a served model. `concurrency` counts requests in flight on all GPUs of the cluster."""

    prompt: int
    output: int
    concurrency: float
    batching: Batching = "continuous"
    chunk: int = CHUNK
    most_sequences: int = MOST_SEQUENCES
    memory_share: float = MEMORY_SHARE

    def __post_init__(self) -> None:
        for name in ("prompt", "output", "chunk", "most_sequences"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name}={value!r} must be a whole number of at least 1. Nearest: {name}=1.")
        if not 0 < self.concurrency < float("inf"):
            raise UsageError(f"concurrency={self.concurrency!r} must be above 0. Nearest: concurrency=1.")
        if not 0 < self.memory_share <= 1:
            raise UsageError(
                f"memory_share={self.memory_share!r} must lie above 0 and at most at 1. Nearest: memory_share=1."
            )
        if self.batching not in BATCHINGS:
            raise UsageError(f"batching={self.batching!r} is not known. {did_you_mean(self.batching, BATCHINGS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way to spread a replica, under the load."""

    layout: ServingLayout
    replicas: int
    serving: Serving | None
    """One replica under its share of the load; None where it does not fit."""
    problem: str = ""

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of all replicas."""
        return 0.0 if self.serving is None else self.serving.tokens_per_second * self.replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Memory of one GPU, in bytes, and what its KV cache holds."""

    memory: float
    weights: float
    reserved: float
    """Context, graphs, buffers, and what the engine leaves alone."""
    cache: float
    bytes_per_token: float
    tokens: int
    """Tokens that the cache of one attention data parallel group holds."""
    sequences: float
    """Sequences of prompt and output that it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """A model served on a cluster: both phases, latency and throughput, room for the cache."""

    model: Model
    cluster: Cluster
    layout: ServingLayout
    replicas: int
    precision: Precision
    engine: str
    load: Load
    at: Serving
    """One replica under its share of the load."""
    curve: tuple[Serving, ...]
    """One replica against concurrency."""
    phases: Phases
    critical: CriticalBatch
    room: Room
    flops_per_token: float
    """Of one decoded token without attention, all GPUs together."""
    choices: tuple[Choice, ...]
    """Layouts that were compared, best first; one where the layout was given."""
    front: tuple[ServingOption, ...] = ()
    """Layouts and loads that none beats both per GPU and per user; none where the layout was given."""
    disaggregated: Disaggregated | None = None
    speculative: Speculative | None = None


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
) -> ServingPlan:
    """The model under a load; without a layout, the one with the most tokens per second of those that fit.

    `disaggregate` is a number of prefill and of decode replicas; `guesses` is how many are verified at once, and the
    share that is accepted.
    """
    tried = [layout] if layout is not None else whole_layouts(model, cluster)

    def deployed(one: ServingLayout) -> Deployment:
        """A deployment of its own for each: it remembers where the times of its collectives come from."""
        return Deployment.of(model, cluster, one, precision, kv=kv, engine=engine, graphs=graphs)

    choices = sorted((_choice(deployed(one), load) for one in tried), key=lambda item: -item.tokens_per_second)
    best = choices[0]
    if best.serving is None:
        if layout is None:
            widest = max(choices, key=lambda item: item.layout.gpus)
            raise UsageError(f"No layout of {cluster.gpus} GPUs fits. {widest.problem}")
        raise UsageError(best.problem)
    here = deployed(best.layout)
    pools = disaggregate
    batch = max(1.0, best.serving.running / best.layout.dp)
    context = load.prompt + load.output // 2
    return ServingPlan(
        model=model,
        cluster=cluster,
        layout=best.layout,
        replicas=best.replicas,
        precision=here.precision,
        engine=engine,
        load=load,
        at=best.serving,
        curve=tuple(_curve(here, load)),
        phases=phases(here, prompt=load.prompt, context=context, batch=batch),
        critical=critical_batch(here, context=context, memory_share=load.memory_share),
        room=_room(here, load),
        flops_per_token=forward_flops(model, 1).products,
        choices=tuple(choices),
        front=() if layout is not None else _front(model, cluster, load, precision, kv, engine),
        disaggregated=None
        if pools is None
        else serve_disaggregated(
            here,
            here,
            prompt=load.prompt,
            output=load.output,
            concurrency=load.concurrency,
            prefill_replicas=pools[0],
            decode_replicas=pools[1],
            memory_share=load.memory_share,
        ),
        speculative=None
        if guesses is None
        else speculate(here, batch=batch, context=context, guesses=guesses[0], acceptance=guesses[1]),
    )


def whole_layouts(model: Model, cluster: Cluster) -> list[ServingLayout]:
    """Layouts whose replicas fill the cluster."""
    found = serving_layouts(model, cluster.gpus, domain=cluster.domain)
    return [layout for layout in found if cluster.gpus % layout.gpus == 0]


def _choice(here: Deployment, load: Load) -> Choice:
    layout = here.layout
    replicas = max(1, here.cluster.gpus // layout.gpus)
    try:
        found = _served(here, load, load.concurrency / replicas)
    except UsageError as problem:
        return Choice(layout=layout, replicas=replicas, serving=None, problem=str(problem))
    return Choice(layout=layout, replicas=replicas, serving=found)


def _front(
    model: Model, cluster: Cluster, load: Load, precision: str, kv: str | None, engine: str
) -> tuple[ServingOption, ...]:
    found = search_serving(model, cluster, precision, prompt=load.prompt, output=load.output, kv=kv, engine=engine)
    return found.front


def _served(here: Deployment, load: Load, concurrency: float) -> Serving:
    return serve(
        here,
        prompt=load.prompt,
        output=load.output,
        concurrency=concurrency,
        batching=load.batching,
        chunk=load.chunk,
        most_sequences=load.most_sequences,
        memory_share=load.memory_share,
    )


def _curve(here: Deployment, load: Load) -> Iterator[Serving]:
    """To the first concurrency that no longer fits into the cache, and that one."""
    for number in CONCURRENCIES:
        found = _served(here, load, float(number))
        yield found
        if found.running < number:
            return


def _room(here: Deployment, load: Load) -> Room:
    room = cache_room(here, memory_share=load.memory_share)
    length = load.prompt + load.output
    return Room(
        memory=room.memory_bytes,
        weights=room.weight_bytes,
        reserved=room.reserved_bytes,
        cache=room.cache_bytes,
        bytes_per_token=here.cache_bytes(length) / length,
        tokens=room.tokens,
        sequences=room.sequences(length),
    )
