"""`search_plan`: the fastest legal layout of a model on a cluster that fits, as a plan, and why it wins.

`layouts` enumerates the legal layouts, `search` ranks those that fit, and `search_plan` adds the plan of the winner and
the conditions that would change it.

>>> from nearpeak.plan.models.catalogue import get_model
>>> from nearpeak.plan.cluster.cluster import Cluster
>>> best = search_plan(get_model("llama-3-8b"), Cluster.of("h100-sxm x 8"), global_batch=64, sequence=8192)
>>> best.plan is not None and best.plan.memory.fits
True
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from nearpeak._display import Result, headline
from nearpeak.errors import UsageError
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.models.model import Model
from nearpeak.plan.training.efficiency import Efficiency
from nearpeak.plan.training.job import PRECISIONS, Job, Precision, Software
from nearpeak.plan.training.layout import (
    Layout,
    Sharding,
    Stage,
    StageKind,
    groups_of_stages,
    in_flight,
    output_layers,
    pipeline_stage,
)
from nearpeak.plan.training.memory import memory_by_stage, stage_bytes
from nearpeak.plan.training.plan import TrainingPlan, training_plan
from nearpeak.plan.training.time import Planner, TrainingTime
from nearpeak.units import seconds

STEP_TOKENS = 2**22
"""Tokens of one training step where no batch is given."""
MOST_LAYOUTS_TO_REPEAT = 50_000
"""A search of more, which takes a second or longer, is not repeated under other conditions."""
SLOWEST = 1.5
"""Layouts that take this many times the time of the fastest, and more, are not listed."""
LARGEST_MICROBATCH, MICROBATCH_TOKENS = 8, 2**15
"""Largest microbatch that is tried: in sequences, and in tokens where sequences are short."""
LARGEST_CP = 16
"""Largest degree of context parallelism that is tried."""
NO_OTHER = f"nothing else is legal, fits and takes less than {SLOWEST:g} times as long"
FIELDS = ("tp", "cp", "pp", "virtual", "ep", "microbatch", "sharding", "recompute")
"""Fields of a layout that reasons compare, one at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlan(Result):
    """The best layout of a model on a cluster: the search, and the winner as a plan."""

    model: Model
    cluster: Cluster
    sequence: int
    global_batch: int
    search: SearchResult
    plan: TrainingPlan | None
    """None where nothing fits."""
    with_margin: Candidate | None = None
    """The fastest layout of the front whose `StageMemory.safe` fits, too; None where none does."""
    conditions: tuple[Condition, ...] = ()
    """Winners under other conditions that have a legal layout; empty where the search takes long."""

    def __repr__(self) -> str:
        where = f"{self.cluster.gpus} x {self.cluster.machine.id}"
        best = "no layout fits" if self.search.best is None else f"{seconds(self.search.best.seconds)} a step at best"
        return headline(
            f"SearchPlan of {self.model.name} on {where}: {best}, {self.search.fitting:,} of {self.search.legal:,} "
            "layouts fit"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """The winner of the same search under one other condition."""

    what: str
    layout: Layout | None
    """None where nothing fits."""
    tokens_per_second: float
    """Throughput of the winner under this condition."""
    changed: bool
    """Whether another layout wins."""


def search_plan(
    model: Model,
    cluster: Cluster,
    *,
    sequence: int,
    global_batch: int | None = None,
    precision: Precision = PRECISIONS["bf16-master"],
    software: Software = "fused",
    price: float | None = None,
) -> SearchPlan:
    """The fastest layout that fits; without `global_batch`, for a step of about 4 million tokens."""
    batch = default_batch(cluster.gpus, sequence) if global_batch is None else global_batch

    def job_of(layout: Layout) -> Job:
        return Job(model=model, layout=layout, sequence=sequence, precision=precision, software=software)

    result = search(model, cluster, global_batch=batch, sequence=sequence, precision=precision, software=software)
    plan = None if result.best is None else training_plan(job_of(result.best.layout), cluster, price=price)

    def is_safe(candidate: Candidate) -> bool:
        return max(stage.safe for stage in memory_by_stage(job_of(candidate.layout))) <= (
            cluster.machine.memory_bytes or 0
        )

    conditions: tuple[Condition, ...] = ()
    if result.best is not None and result.legal <= MOST_LAYOUTS_TO_REPEAT:
        best = result.best.layout

        def winner(what: str, changed: Cluster, length: int, sequences: int) -> Condition:
            other = search(
                model, changed, global_batch=sequences, sequence=length, precision=precision, software=software
            ).best
            if other is None:
                return Condition(what=what, layout=None, tokens_per_second=0.0, changed=True)
            same = replace(other.layout, global_batch=best.global_batch, recompute=best.recompute) == best
            return Condition(
                what=what,
                layout=other.layout,
                tokens_per_second=sequences * length / other.seconds,
                changed=not same or other.layout.recompute != best.recompute,
            )

        conditions = tuple(
            winner(*condition)
            for condition in _conditions(cluster, sequence, batch)
            if next(_meshes(model, condition[1], condition[3], condition[2]), None) is not None
        )
    return SearchPlan(
        model=model,
        cluster=cluster,
        sequence=sequence,
        global_batch=batch,
        search=result,
        plan=plan,
        with_margin=next((candidate for candidate in result.front if is_safe(candidate)), None),
        conditions=conditions,
    )


def _conditions(cluster: Cluster, sequence: int, batch: int) -> Iterator[tuple[str, Cluster, int, int]]:
    """Other conditions: a name, and the cluster, the sequence and the batch."""
    machine = cluster.machine
    if machine.memory_bytes is not None:
        larger = replace(machine, memory_bytes=int(1.5 * machine.memory_bytes))
        yield "memory x 1.5", replace(cluster, machine=larger), sequence, batch
    if cluster.domains > 1:
        for factor, words in ((2.0, "x 2"), (0.5, "/ 2")):
            network = factor * cluster.network_bandwidth
            yield f"network {words}", replace(cluster, network_bandwidth=network), sequence, batch
    yield "sequence x 4", cluster, 4 * sequence, max(1, batch // 4)
    yield "batch / 4", cluster, sequence, max(1, batch // 4)


def default_batch(gpus: int, sequence: int) -> int:
    """Sequences of a step of about 4 million tokens, a number that many layouts divide.

    >>> default_batch(64, 8192), default_batch(72, 4096), default_batch(16384, 8192)
    (512, 1080, 512)
    """
    sequences = max(1, STEP_TOKENS // max(1, sequence))
    if gpus > sequences or not gpus & (gpus - 1):
        return 1 << (sequences - 1).bit_length()
    return gpus * -(-sequences // gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Result of a search over all legal layouts."""

    best: Candidate | None
    time: TrainingTime | None
    front: tuple[Candidate, ...]
    """The Pareto front of time against memory, fastest first, up to `SLOWEST` times the time of the fastest."""
    reasons: tuple[Reason, ...]
    legal: int
    computed: int
    """Layouts that were computed one by one; a bound shows that the others are too slow."""
    fitting: int
    """Layouts that fit and take at most `SLOWEST` times the time of the fastest."""
    smallest: float
    """Bytes of the layout that needs the least memory, of those computed: of all where nothing fits."""
    search_seconds: float
    """Duration of the search itself."""


@dataclass(slots=True, kw_only=True)
class Candidate:
    """One layout that fits, with its step time and memory."""

    mesh: Layout
    """The layout without interleaving."""
    virtual: int
    seconds: float
    memory: float
    """Bytes that the fullest rank needs."""

    @property
    def layout(self) -> Layout:
        """The layout."""
        return _interleaved(self.mesh, self.virtual)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """The best layout with another value of one field, and why it is slower."""

    field: str
    value: object
    """The value of the winner."""
    other: Candidate | None
    """The best layout with another value; None where none fits."""
    slower: float | None
    """Relative growth of the step time."""
    because: str


def search(
    model: Model,
    cluster: Cluster,
    *,
    global_batch: int,
    sequence: int,
    precision: Precision = PRECISIONS["bf16-master"],
    software: Software = "fused",
    efficiency: Efficiency | None = None,
) -> SearchResult:
    """The fastest layout that fits, the Pareto front of time against memory, and reasons."""
    start = time.perf_counter()
    capacity = cluster.machine.memory_bytes
    if capacity is None:
        raise UsageError(f"{cluster.machine.name} has no memory size in the catalogue to plan with.")
    planner = Planner(cluster, efficiency)

    def job_of(layout: Layout) -> Job:
        return Job(model=model, layout=layout, sequence=sequence, precision=precision, software=software)

    candidates: list[Candidate] = []
    legal = computed = 0
    smallest = fastest = float("inf")
    recomputes = recomputations(model, software)
    # Recomputation takes time, so a mesh is bounded by its time without: meshes come in the order of this bound.
    meshes: list[tuple[float, int, Layout]] = []
    for mesh in _meshes(model, cluster, global_batch, sequence):
        legal += len(recomputes) * len(_virtual(model.layers, mesh.pp, mesh.microbatches))
        bound = min(step for _, _, step in _pieces(job_of(mesh), planner, float("inf")))
        meshes.append((bound, len(meshes), mesh))
    for bound, _, mesh in sorted(meshes):
        if bound > SLOWEST * fastest:
            break
        for recompute in recomputes:
            layout = replace(mesh, recompute=recompute)
            for virtual, memory, step in _pieces(job_of(layout), planner, capacity):
                computed += 1
                smallest = min(smallest, memory)
                if memory <= capacity:
                    fastest = min(fastest, step)
                    if step <= SLOWEST * fastest:
                        candidates.append(Candidate(mesh=layout, virtual=virtual, seconds=step, memory=memory))
    candidates = [candidate for candidate in candidates if candidate.seconds <= SLOWEST * fastest]
    if not legal:
        raise UsageError(
            f"global_batch={global_batch} cannot be spread over gpus={cluster.gpus} in any legal way. "
            f"Nearest: global_batch={max(1, round(global_batch / cluster.gpus)) * cluster.gpus}."
        )
    candidates.sort(key=lambda candidate: (candidate.seconds, candidate.memory))
    best = candidates[0] if candidates else None
    return SearchResult(
        best=best,
        time=planner.time(job_of(best.layout)) if best else None,
        front=tuple(_front(candidates)),
        reasons=tuple(_reasons(best, candidates, planner, job_of)) if best else (),
        legal=legal,
        computed=computed,
        fitting=len(candidates),
        smallest=smallest,
        search_seconds=time.perf_counter() - start,
    )


def _front(candidates: list[Candidate]) -> Iterator[Candidate]:
    smallest = float("inf")
    for candidate in candidates:
        if candidate.memory < smallest:
            smallest = candidate.memory
            yield candidate


def _reasons(
    best: Candidate, candidates: list[Candidate], planner: Planner, job_of: Callable[[Layout], Job]
) -> Iterator[Reason]:
    winner = planner.time(job_of(best.layout))
    for field in FIELDS:
        value = getattr(best.layout, field)
        other = next((item for item in candidates if getattr(_holder(item, field), field) != value), None)
        if other is None:
            yield Reason(field=field, value=value, other=None, slower=None, because=NO_OTHER)
            continue
        loser = planner.time(job_of(other.layout))
        growth = {name: loser.parts[name] - winner.parts[name] for name in winner.parts}
        worst = max(growth, key=lambda name: growth[name])
        because = f"{worst} takes {growth[worst] / winner.seconds:.1%} of a step more"
        slower = other.seconds / best.seconds - 1
        yield Reason(field=field, value=value, other=other, slower=slower, because=because)


def _holder(candidate: Candidate, field: str) -> Candidate | Layout:
    return candidate if field == "virtual" else candidate.mesh


def _pieces(job: Job, planner: Planner, capacity: float) -> Iterator[tuple[int, float, float]]:
    """Each legal number of pieces of a stage, with the memory and the step time; of those that fit, else 0 seconds.

    What a stage needs depends on its kind alone, so it is computed once, for all numbers of pieces.
    """
    model, layout = job.model, job.layout
    sizes: dict[StageKind, tuple[float, float]] = {}
    times: dict[StageKind, tuple[float, float]] = {}
    pipeline = planner.pipeline_exposed(job)
    pp, microbatches, outputs = layout.pp, layout.microbatches, output_layers(model)
    for virtual in _virtual(model.layers, pp, microbatches):
        groups = groups_of_stages(model.mixers, model.feeds, pp, virtual, (), outputs)
        memory = 0.0
        for kind, index, _ in groups:
            if kind not in sizes:
                sizes[kind] = stage_bytes(job, _stage_of(job, virtual, index))
            fixed, each = sizes[kind]
            memory = max(memory, fixed + in_flight(pp, virtual, microbatches, index) * each)
        if memory > capacity:
            yield virtual, memory, 0.0
            continue
        kinds = []
        for kind, index, count in groups:
            if kind not in times:
                stage = planner.stage(job, _stage_of(job, virtual, index))
                times[kind] = (stage.microbatch - pipeline, stage.data_once + stage.optimizer)
            kinds.append((*times[kind], count))
        yield virtual, memory, planner.step_seconds(job, kinds, virtual * pipeline, virtual)


def _stage_of(job: Job, virtual: int, index: int) -> Stage:
    return pipeline_stage(job.model, _interleaved(job.layout, virtual), index)


def _interleaved(layout: Layout, virtual: int) -> Layout:
    return layout if virtual == 1 else replace(layout, virtual=virtual, schedule="interleaved")


def recomputations(model: Model, software: Software) -> list[tuple[str, ...]]:
    """All sets of modules of `model` that may be recomputed and save memory; none, single ops and whole layers, too.

    >>> from nearpeak.plan.models.catalogue import get_model
    >>> recomputations(get_model("llama-3-8b"), "fused")[2:5]
    [('feed_activation',), ('norm', 'feed_activation'), ('feed',)]
    """
    free = [("norm",)]
    if model.kv_rank:
        free.append(("mla_up",))
    if software == "unfused":
        free.append(("attention",))
    feeds: list[tuple[str, ...]] = [(), ("feed_activation",)]
    if "D" in model.feeds:
        feeds += [("feed",), ("feed_activation", "feed")] if model.is_moe else [("feed",)]
    if model.is_moe:
        feeds += [(*modules, "experts") for modules in feeds if "D" in model.feeds or not modules]
        feeds.remove(("feed_activation", "feed", "experts")) if "D" in model.feeds else None
    sets = [
        tuple(module for each, used in zip(free, chosen, strict=True) if used for module in each) + modules
        for modules in feeds
        for chosen in product((False, True), repeat=len(free))
    ]
    return [*sets, ("ops",), ("layer",)]


def layouts(
    model: Model, cluster: Cluster, global_batch: int, sequence: int, software: Software = "fused"
) -> Iterator[Layout]:
    """Every legal layout of all GPUs of the cluster, with tensor parallelism inside a link domain."""
    for mesh in _meshes(model, cluster, global_batch, sequence):
        for recompute in recomputations(model, software):
            for virtual in _virtual(model.layers, mesh.pp, mesh.microbatches):
                yield _interleaved(replace(mesh, recompute=recompute), virtual)


def _meshes(model: Model, cluster: Cluster, global_batch: int, sequence: int) -> Iterator[Layout]:
    """Every legal layout without interleaving and recomputation."""
    gpus = cluster.gpus
    for tp in _degrees(min(cluster.domain, 64), model.heads or model.ssm_heads, gpus):
        if ("D" in model.feeds and model.intermediate % tp) or ("M" in model.mixers and model.ssm_heads % tp):
            continue
        for cp in _degrees(LARGEST_CP, sequence // 2 if sequence > 1 else 1, gpus // tp):
            if sequence % (cp * tp) or (cp > 1 and sequence % (2 * cp)):
                continue
            for pp in _divisors(gpus // (tp * cp), model.layers):
                dp = gpus // (tp * cp * pp)
                for ep in _expert_degrees(model, gpus // pp):
                    yield from _layouts_of_mesh(cluster, global_batch, sequence, tp, cp, pp, dp, ep)


def _layouts_of_mesh(
    cluster: Cluster, global_batch: int, sequence: int, tp: int, cp: int, pp: int, dp: int, ep: int
) -> Iterator[Layout]:
    gpus, domain = cluster.gpus, max(1, cluster.domain // tp)
    most = max(LARGEST_MICROBATCH, MICROBATCH_TOKENS // max(1, sequence))
    for microbatch in _degrees(most, global_batch // dp, global_batch // dp):
        if global_batch % (dp * microbatch):
            continue
        for sharding, group in _shardings(dp, cp, pp, domain):
            yield Layout(
                gpus=gpus,
                global_batch=global_batch,
                microbatch=microbatch,
                tp=tp,
                cp=cp,
                pp=pp,
                ep=ep,
                sharding=sharding,
                shard_group=group,
                overlap_tensor=tp > 1,
            )


def _degrees(limit: int, divides: int, gpus: int) -> list[int]:
    """Powers of two that divide both, up to a limit."""
    degrees, degree = [], 1
    while degree <= limit and gpus % degree == 0 and (not divides or divides % degree == 0):
        degrees.append(degree)
        degree *= 2
    return degrees


def _divisors(gpus: int, layers: int) -> list[int]:
    """Pipelines: degrees that divide the GPUs, with a layer for every stage."""
    return [pp for pp in range(1, min(gpus, layers) + 1) if gpus % pp == 0]


def _expert_degrees(model: Model, gpus: int) -> list[int]:
    if not model.is_moe:
        return [1]
    return [ep for ep in range(1, model.experts + 1) if model.experts % ep == 0 and gpus % ep == 0]


def _virtual(layers: int, pp: int, pieces: int) -> range:
    """Pieces of a stage: one; and where the microbatches allow interleaving, up to a layer each.

    The first and the last piece may have no layer, but the embedding and the output layer.
    """
    return range(1, (layers + 2) // pp + 1) if pp > 1 and pieces % pp == 0 else range(1, 2)


def _shardings(dp: int, cp: int, pp: int, domain: int) -> list[tuple[Sharding, int]]:
    """Kinds of sharding, with the size of a group; weights are not gathered microbatch by microbatch in a pipeline."""
    if dp * cp == 1:
        return [("none", 0)]
    if pp > 1:
        return [("zero1", 0)]
    groups = [size for size in (domain, 8 * domain) if size < dp and dp % size == 0]
    return [("zero1", 0), ("zero3", 0), *(("hsdp", size) for size in groups)]
