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
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import product
from typing import NamedTuple, get_args

from nearpeak._display import Result, headline
from nearpeak.errors import UsageError
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.models.model import Model
from nearpeak.plan.training.efficiency import Efficiency
from nearpeak.plan.training.job import PRECISIONS, Job, Precision, Software
from nearpeak.plan.training.layout import (
    Layout,
    Schedule,
    Sharding,
    StageKind,
    deferred,
    groups_of_stages,
    in_flight,
    kinds_of_stages,
    output_layers,
    pipeline_stage,
    whole_model,
)
from nearpeak.plan.training.memory import (
    CONTEXT,
    SLACK,
    layer_bytes,
    memory_by_stage,
    pair_bytes,
    stage_bytes,
    states_of_rank,
)
from nearpeak.plan.training.plan import TrainingPlan, training_plan
from nearpeak.plan.training.time import Planner, TrainingTime, data_seconds, hidden_behind
from nearpeak.units import seconds

STEP_TOKENS = 2**22
"""Tokens of one training step where no batch is given."""
MOST_MESHES_TO_REPEAT = 2_000
"""A search of more combinations of degrees, which takes some seconds, is not repeated under other conditions."""
SLOWEST = 1.25
"""Layouts that take this many times the time of the fastest, and more, are not listed."""
LARGEST_MICROBATCH, MICROBATCH_TOKENS = 8, 2**15
"""Largest microbatch that is tried: in sequences, and in tokens where sequences are short."""
LARGEST_CP = 16
"""Largest degree of context parallelism that is tried."""
NO_OTHER = f"nothing else is legal, fits and takes less than {SLOWEST:g} times as long"
SCHEDULES: tuple[Schedule, ...] = ("1f1b", "interleaved")
"""Schedules that are tried without further ado: those of every framework with pipelines. "zero-bubble" and "dualpipe"
compute gradients of weights apart, which few offer."""
ALL_SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlan(Result):
    """The best layout of a model on a cluster: the search, and the winner as a plan."""

    model: Model
    cluster: Cluster
    sequence: int
    global_batch: int
    schedules: tuple[Schedule, ...]
    """Schedules of pipelines that were tried."""
    overlap_experts: bool
    """Whether layouts that overlap the exchange of experts were tried."""
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
        return headline(f"SearchPlan of {self.model.name} on {where}: {best}, of {self.search.legal:,} legal layouts")


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
    schedules: Sequence[Schedule] = SCHEDULES,
    overlap_experts: bool = False,
    price: float | None = None,
) -> SearchPlan:
    """The fastest layout that fits; without `global_batch`, for a step of about 4 million tokens.

    `schedules` are those of pipelines that are tried; with `overlap_experts`, layouts that overlap the exchange of
    experts are tried too.
    """
    batch = default_batch(cluster.gpus, sequence) if global_batch is None else global_batch

    def job_of(layout: Layout) -> Job:
        return Job(model=model, layout=layout, sequence=sequence, precision=precision, software=software)

    result = search(
        model,
        cluster,
        global_batch=batch,
        sequence=sequence,
        precision=precision,
        software=software,
        schedules=schedules,
        overlap_experts=overlap_experts,
    )
    plan = None if result.best is None else training_plan(job_of(result.best.layout), cluster, price=price)

    def is_safe(candidate: Candidate) -> bool:
        return max(stage.safe for stage in memory_by_stage(job_of(candidate.layout))) <= (
            cluster.machine.memory_bytes or 0
        )

    conditions: tuple[Condition, ...] = ()
    if result.best is not None and result.meshes <= MOST_MESHES_TO_REPEAT:
        best = result.best.layout

        def winner(
            what: str, changed: Cluster, length: int, sequences: int, tried: tuple[Schedule, ...], overlap: bool
        ) -> Condition:
            other = _Space(model, changed, sequences, length, precision, software, tried, overlap).fastest()
            if other is None:
                return Condition(what=what, layout=None, tokens_per_second=0.0, changed=True)
            return Condition(
                what=what,
                layout=other.layout,
                tokens_per_second=sequences * length / other.seconds,
                changed=replace(other.layout, global_batch=best.global_batch) != best,
            )

        conditions = tuple(
            winner(*condition)
            for condition in _conditions(model, cluster, sequence, batch, tuple(schedules), overlap_experts)
            if next(_meshes(model, condition[1], condition[3], condition[2]), None) is not None
        )
    return SearchPlan(
        model=model,
        cluster=cluster,
        sequence=sequence,
        global_batch=batch,
        schedules=tuple(schedules),
        overlap_experts=overlap_experts,
        search=result,
        plan=plan,
        with_margin=next((candidate for candidate in result.front if is_safe(candidate)), None),
        conditions=conditions,
    )


def _conditions(
    model: Model, cluster: Cluster, sequence: int, batch: int, schedules: tuple[Schedule, ...], overlap: bool
) -> Iterator[tuple[str, Cluster, int, int, tuple[Schedule, ...], bool]]:
    """Other conditions: a name, the cluster, the sequence, the batch, the schedules, and whether experts overlap."""
    machine = cluster.machine
    if set(ALL_SCHEDULES) - set(schedules):
        yield "any schedule", cluster, sequence, batch, ALL_SCHEDULES, overlap
    if model.is_moe and not overlap:
        yield "experts overlapped", cluster, sequence, batch, schedules, True
    if machine.memory_bytes is not None:
        larger = replace(machine, memory_bytes=int(1.5 * machine.memory_bytes))
        yield "memory x 1.5", replace(cluster, machine=larger), sequence, batch, schedules, overlap
    if cluster.domains > 1:
        for factor, words in ((2.0, "x 2"), (0.5, "/ 2")):
            network = factor * cluster.network_bandwidth
            yield (
                f"network {words}", replace(cluster, network_bandwidth=network), sequence, batch, schedules, overlap,
            )  # fmt: skip
    yield "sequence x 4", cluster, 4 * sequence, max(1, batch // 4), schedules, overlap
    yield "batch / 4", cluster, sequence, max(1, batch // 4), schedules, overlap


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
    meshes: int
    """Combinations of degrees and microbatches among them."""
    computed: int
    """Layouts whose time was computed one by one; bounds show that the others are not better."""
    smallest: float
    """Bytes of the layout that needs the least memory, of those computed: of all where nothing fits."""
    search_seconds: float
    """Duration of the search itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One layout that fits, with its step time and memory."""

    base: Layout
    """The layout, but for the pieces of a stage."""
    virtual: int
    seconds: float
    memory: float
    """Bytes that the fullest rank needs."""

    @property
    def layout(self) -> Layout:
        """The layout."""
        return self.base if self.virtual == self.base.virtual else replace(self.base, virtual=self.virtual)

    def value(self, field: str) -> object:
        """A field of the layout."""
        return self.virtual if field == "virtual" else getattr(self.base, field)


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
    schedules: Sequence[Schedule] = SCHEDULES,
    overlap_experts: bool = False,
    efficiency: Efficiency | None = None,
) -> SearchResult:
    """The fastest layout that fits, the Pareto front of time against memory, and reasons.

    `schedules` are those of pipelines that are tried; with `overlap_experts`, layouts that overlap the exchange of
    experts are tried too.
    """
    start = time.perf_counter()
    space = _Space(
        model, cluster, global_batch, sequence, precision, software, tuple(schedules), overlap_experts, efficiency
    )
    best = space.fastest()
    others = {} if best is None else space.others(best)
    return SearchResult(
        best=best,
        time=None if best is None else space.planner.time(space.job_of(best.layout)),
        front=tuple(space.front),
        reasons=() if best is None else tuple(_reasons(best, others, space)),
        legal=space.legal,
        meshes=len(space.meshes),
        computed=space.computed,
        smallest=space.smallest,
        search_seconds=time.perf_counter() - start,
    )


class _Node(NamedTuple):
    """A mesh, a variant of it, or one with what it recomputes: in this order, fields are None until they are chosen."""

    mesh: Layout
    schedule: Schedule | None = None
    overlap: bool = False
    pieces: Sequence[int] = (1,)
    sharding: Sharding | None = None
    group: int = 0
    recompute: tuple[str, ...] | None = None
    memory: Sequence[float] = ()
    """Bytes of the fullest GPU for each number of pieces."""

    @property
    def layout(self) -> Layout:
        """The layout, in the fewest pieces."""
        assert self.sharding is not None and self.schedule is not None
        return replace(
            self.mesh,
            sharding=self.sharding,
            shard_group=self.group,
            schedule=self.schedule,
            overlap_experts=self.overlap,
            recompute=self.recompute or (),
            virtual=self.pieces[0],
        )

    def value(self, field: str) -> object:
        """A field of the layout, "virtual" excepted."""
        own = {
            "schedule": self.schedule,
            "sharding": self.sharding,
            "recompute": self.recompute,
            "overlap_experts": self.overlap,
        }
        return own[field] if field in own else getattr(self.mesh, field)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Totals:
    """What all stages of a variant have together, or less."""

    data: float
    """Seconds of the weights and gradients that are exchanged for every microbatch, in one message."""
    optimizer: float
    states: float
    """Bytes of parameters, gradients and optimizer states."""


class _Space:
    """All legal layouts of a model on a cluster, and an exact search through them by branch and bound.

    A mesh has the degrees and the microbatch. It branches into variants, which have the sharding, the schedule and the
    overlap too, and these into recomputation and pieces of a stage. A bound is a time that nothing below can beat, a
    floor is an amount of memory that everything below needs. The node with the least bound is next.
    """

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        global_batch: int,
        sequence: int,
        precision: Precision,
        software: Software,
        schedules: tuple[Schedule, ...],
        overlap_experts: bool,
        efficiency: Efficiency | None = None,
    ) -> None:
        if cluster.machine.memory_bytes is None:
            raise UsageError(f"{cluster.machine.name} has no memory size in the catalogue to plan with.")
        self.model, self.cluster, self.sequence = model, cluster, sequence
        self.precision, self.software = precision, software
        self.schedules, self.overlap_experts = schedules, overlap_experts
        self.capacity = cluster.machine.memory_bytes
        self.planner = Planner(cluster, efficiency)
        self.recomputes = recomputations(model, software)
        self.front: list[Candidate] = []
        self.legal = self.computed = 0
        self.smallest = float("inf")
        self._busy: dict[object, tuple[float, float]] = {}
        self._totals: dict[object, _Totals] = {}
        self._least: dict[object, float] = {}
        self._bytes: dict[object, float] = {}
        self._sends: dict[object, float] = {}
        self.meshes: list[tuple[float, int, _Node]] = []
        for mesh in _meshes(model, cluster, global_batch, sequence):
            shardings = _shardings(mesh, cluster)
            bound = float("inf")
            for schedule, overlap, pieces in _schedules(mesh, model.layers, schedules, overlap_experts):
                self.legal += len(shardings) * len(pieces) * len(_recomputes(self.recomputes, overlap))
                # gathered weights need no sums of gradients in memory
                busy, filled = self._busy_seconds(mesh, schedule, overlap, (), mesh.state_ranks > 1)
                bound = min(bound, self._step(mesh, schedule, busy / mesh.pp, 0.0, filled, pieces[-1]))
            if bound < float("inf"):
                self.meshes.append((bound, len(self.meshes), _Node(mesh)))
        if not self.legal:
            raise UsageError(
                f"global_batch={global_batch} cannot be spread over gpus={cluster.gpus} in any legal way. "
                f"Nearest: global_batch={max(1, round(global_batch / cluster.gpus)) * cluster.gpus}."
            )
        self.meshes.sort(key=lambda item: item[:2])

    def job_of(self, layout: Layout) -> Job:
        """The job with this layout."""
        return Job(
            model=self.model, layout=layout, sequence=self.sequence, precision=self.precision, software=self.software
        )

    def fastest(self) -> Candidate | None:
        """The fastest layout that fits."""
        best: Candidate | None = None
        limit = float("inf")

        def is_wanted(node: _Node, bound: float, floor: float) -> bool:
            return bound < limit and (floor <= self.capacity or (best is None and floor < self.smallest))

        def is_faster(bound: float, _: float) -> bool:
            return bound < limit

        for bound, node in self._in_order(is_wanted):
            if bound >= limit:
                break
            for candidate in self._candidates(node, is_faster):
                if candidate.seconds < limit:
                    best, limit = candidate, candidate.seconds
        return best

    def others(self, best: Candidate) -> dict[str, Candidate]:
        """The best layout with another value of each field. Fills `front` on the way."""
        self._offer(best)
        slowest = SLOWEST * best.seconds
        limits = dict.fromkeys(self.fields, slowest)
        winners: dict[str, Candidate] = {}
        here = {field: getattr(best.layout, field) for field in self.fields}

        def has_reason(node: _Node, bound: float) -> bool:
            """Whether the best layout with another value of a field may be below this node."""
            return any(
                bound < limit and (field == "virtual" or node.value(field) != here[field])
                for field, limit in limits.items()
            )

        def is_wanted(node: _Node, bound: float, floor: float) -> bool:
            if bound > slowest or floor > self.capacity:
                return False
            return floor < self._front_memory(bound) or has_reason(node, bound)

        def is_better(bound: float, memory: float) -> bool:
            return bound <= slowest and (reason or memory < self._front_memory(bound))

        for bound, node in self._in_order(is_wanted):
            reason = has_reason(node, bound)
            for candidate in self._candidates(node, is_better):
                if candidate.seconds > slowest:
                    continue
                self._offer(candidate)
                for field in self.fields:
                    if candidate.seconds < limits[field] and candidate.value(field) != here[field]:
                        winners[field], limits[field] = candidate, candidate.seconds
        return winners

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields of a layout that reasons compare: those of which other values may be legal."""
        fields = ["tp", "cp", "pp", "virtual", "ep", "microbatch", "sharding", "recompute"]
        if self.model.is_moe:
            fields.insert(5, "etp")
        if set(self.schedules) - set(SCHEDULES):
            fields.insert(4, "schedule")
        return (*fields, "overlap_experts") if self.overlap_experts and self.model.is_moe else tuple(fields)

    def _in_order(self, is_wanted: Callable[[_Node, float, float], bool]) -> Iterator[tuple[float, _Node]]:
        """Nodes with everything but the number of pieces, by their bounds, of those that are wanted."""
        count = len(self.meshes)
        queue = list(self.meshes)  # sorted, so a heap
        while queue:
            bound, _, node = heappop(queue)
            if node.recompute is not None:
                if is_wanted(node, bound, self._floor(node)):
                    yield bound, node
                continue
            if not is_wanted(node, bound, self._floor(node)):
                continue
            for child in self._children(node):
                below = max(bound, self._bound(child, child.pieces[0], child.pieces[-1]))
                if is_wanted(child, below, 0.0):
                    count += 1
                    heappush(queue, (below, count, child))

    def _children(self, node: _Node) -> Iterator[_Node]:
        if node.schedule is None:
            shardings = _shardings(node.mesh, self.cluster)
            schedules = _schedules(node.mesh, self.model.layers, self.schedules, self.overlap_experts)
            for schedule, overlap, pieces in schedules:
                for sharding, group in shardings:
                    yield _Node(node.mesh, schedule, overlap, pieces, sharding, group)
            return
        memory_of = self._memory(node)
        for recompute in _recomputes(self.recomputes, node.overlap):
            memory = memory_of(recompute)
            least = min(memory)
            self.smallest = min(self.smallest, least)
            if least <= self.capacity:
                yield node._replace(recompute=recompute, memory=memory)

    def _bound(self, node: _Node, least: int, most: int) -> float:
        """Seconds that nothing below this variant beats with stages in `least` to `most` pieces.

        The slowest stage takes no less than the mean: of what hides, less is exposed where all is together. Then it
        waits for the others.
        """
        mesh, schedule = node.mesh, node.schedule
        assert schedule is not None
        gathers = node.sharding in ("zero3", "hsdp")
        seconds, filled = self._busy_seconds(mesh, schedule, node.overlap, node.recompute or (), gathers)
        busy, totals = seconds / mesh.pp, self._totals_of(node)
        data = totals.data / mesh.pp
        stage = busy + data - hidden_behind(data, self.planner.efficiency.sharded_hidden * busy)
        stage += least * self._send_seconds(mesh)
        return self._step(mesh, schedule, stage, totals.optimizer / mesh.pp, filled, most)

    def _step(self, mesh: Layout, schedule: Schedule, stage: float, once: float, filled: float, pieces: int) -> float:
        """Seconds of a step of stages that take `stage` for a microbatch in the mean; `filled`: of all stages."""
        planner, microbatches, pp = self.planner, mesh.microbatches, mesh.pp
        share = (pp - 2) / (pp - 1) if schedule == "dualpipe" else 1.0
        waiting = max(0.0, share * ((pp - 1) * stage - once / microbatches) - filled) / pieces
        return (microbatches * stage + once + waiting + planner.efficiency.step) * (1 + planner.straggle(mesh))

    def _busy_seconds(
        self, mesh: Layout, schedule: Schedule, overlap: bool, recompute: tuple[str, ...], gathers: bool
    ) -> tuple[float, float]:
        """All layers for one microbatch, with what the device waits for the host, and `filled_seconds` at most."""
        special = schedule if schedule not in SCHEDULES else None
        key = (
            mesh.tp, mesh.cp, mesh.microbatch, mesh.ep, mesh.etp, recompute, gathers, mesh.microbatches == 1, overlap,
            special,
        )  # fmt: skip
        if key not in self._busy:
            sharding: Sharding = "zero3" if gathers else mesh.sharding
            layout = replace(mesh, sharding=sharding, overlap_experts=overlap, recompute=recompute, schedule=schedule)
            job, model = self.job_of(layout), self.model
            busy = self.planner.busy(job, model.mixers, model.feeds, True)
            launches = self.planner.launches(job, busy.seconds, model.layers, model.feeds.count("E"))
            most = {"zero-bubble": 2 * busy.weights, "dualpipe": (busy.forward + 3 * busy.weights) / 2}
            self._busy[key] = busy.seconds + launches, most.get(schedule, 0.0)
        return self._busy[key]

    def _send_seconds(self, mesh: Layout) -> float:
        """Exposed seconds of the sends of one microbatch between two pieces."""
        if mesh.pp == 1:
            return 0.0
        key = (mesh.tp, mesh.cp, mesh.pp, mesh.microbatch)
        if key not in self._sends:
            self._sends[key] = self.planner.pipeline_exposed(self.job_of(mesh))
        return self._sends[key]

    def _totals_of(self, node: _Node) -> _Totals:
        mesh = node.mesh
        key = (mesh.tp, mesh.cp, mesh.pp, mesh.ep, mesh.etp, node.sharding, node.group)
        if key not in self._totals:
            layout = node.layout
            whole, job = whole_model(self.model, layout), self.job_of(layout)
            data = 0.0
            if node.sharding in ("zero2", "shard_grad_op", "zero3", "hsdp"):
                traffic = data_seconds(job, self.planner.collectives, replace(whole, mixers="", feeds=""))
                data = traffic.gather_each + traffic.scatter_each
            self._totals[key] = _Totals(
                data=data,
                optimizer=self.planner.optimizer_seconds(job, whole),
                states=sum(states_of_rank(job, whole)),
            )
        return self._totals[key]

    def _floor(self, node: _Node) -> float:
        """Bytes that everything below this node needs on the fullest GPU: no fewer than the mean of all stages."""
        if node.memory:
            return min(node.memory)
        mesh = node.mesh
        key = (mesh.tp, mesh.etp, node.overlap)
        if key not in self._least:
            letters = self.model.mixers, self.model.feeds
            self._least[key] = min(
                self._saved(mesh, node.overlap, recompute, *letters)
                for recompute in _recomputes(self.recomputes, node.overlap)
            )
        tokens = mesh.microbatch * self.sequence // mesh.cp
        states = 0.0 if node.schedule is None else self._totals_of(node).states
        return (states + (1 + SLACK) * tokens * self._least[key]) / mesh.pp + CONTEXT

    def _saved(
        self, mesh: Layout, overlap: bool, recompute: tuple[str, ...], mixers: str, feeds: str, *, whole: bool = False
    ) -> float:
        """Bytes of a token that some layers save for the backward pass: `layer_bytes`."""
        key = (mesh.tp, mesh.etp, overlap, recompute, mixers, feeds, whole)
        if key not in self._bytes:
            job = self.job_of(replace(mesh, overlap_experts=overlap, recompute=recompute))
            self._bytes[key] = layer_bytes(job, mixers, feeds, whole=whole)[1]
        return self._bytes[key]

    def _memory(self, node: _Node) -> Callable[[tuple[str, ...]], list[float]]:
        """Bytes of the fullest GPU for each number of pieces, as a function of what is recomputed.

        What a stage needs depends on its kind; recomputation changes its activations alone.
        """
        layout, mesh = node.layout, node.mesh
        job = self.job_of(layout)
        ranks = [list(self._ranks(job, virtual)) for virtual in node.pieces]
        kinds = {kind for virtual in ranks for _, stages in virtual for kind, _, _ in stages}
        tokens = (1 + SLACK) * job.microbatch_tokens

        def memory_of(recompute: tuple[str, ...]) -> list[float]:
            each = {kind: tokens * self._saved(mesh, node.overlap, recompute, *kind[:2]) for kind in kinds}
            whole, running = each, dict.fromkeys(kinds, 0.0)
            if recompute:
                whole = {
                    kind: tokens * self._saved(mesh, node.overlap, recompute, *kind[:2], whole=True) for kind in kinds
                }
            if "layer" in recompute:
                running = {kind: whole[kind] / max(1, len(kind[0])) for kind in kinds}
            return [
                max(
                    fixed
                    + sum(count * each[kind] + waiting * whole[kind] for kind, count, waiting in stages)
                    + max(running[kind] for kind, _, _ in stages)
                    for fixed, stages in virtual
                )
                for virtual in ranks
            ]

        return memory_of

    def _ranks(self, job: Job, virtual: int) -> Iterator[tuple[float, list[tuple[StageKind, float, float]]]]:
        """Bytes of every kind of rank without activations, and its stages.

        A stage is its kind, its microbatches in flight, and those whose gradients of weights come later.
        """
        model, layout = self.model, job.layout
        pp, microbatches, dual = layout.pp, layout.microbatches, layout.schedule == "dualpipe"
        all_kinds = kinds_of_stages(model.mixers, model.feeds, pp, virtual, (), output_layers(model))
        # of ranks that are alike, the first has the most in flight; the last of a zero-bubble schedule, as many
        places: dict[object, int] = {}
        for index, kind in enumerate(all_kinds):
            place = (kind, all_kinds[-1 - index]) if dual else kind
            if layout.schedule == "zero-bubble" or place not in places:
                places[place] = index
        for index in places.values():
            stages = [index, pp - 1 - index] if dual else [index]
            fixed = (
                pair_bytes(job, index) if dual else stage_bytes(job, pipeline_stage(model, layout, index, virtual))[0]
            )
            later = deferred(pp, microbatches, index) if layout.schedule == "zero-bubble" else 0.0
            yield fixed, [(all_kinds[at], in_flight(pp, virtual, microbatches, at), later) for at in stages]

    def _candidates(self, node: _Node, is_wanted: Callable[[float, float], bool]) -> Iterator[Candidate]:
        """The layouts of a node, by the number of pieces, that fit, and whose bound and memory are wanted.

        What a stage needs depends on its kind alone, so it is computed once, for all numbers of pieces.
        """
        wanted = [
            (virtual, memory)
            for virtual, memory in zip(node.pieces, node.memory, strict=True)
            if memory <= self.capacity and is_wanted(self._bound(node, virtual, virtual), memory)
        ]
        if not wanted:
            return
        model, planner, layout = self.model, self.planner, node.layout
        job = self.job_of(layout)
        times: dict[StageKind, tuple[float, float, float]] = {}
        pipeline = self._send_seconds(node.mesh)
        for virtual, memory in wanted:
            kinds = []
            for kind, index, count in groups_of_stages(
                model.mixers, model.feeds, layout.pp, virtual, (), output_layers(model)
            ):
                if kind not in times:
                    stage = planner.stage(job, pipeline_stage(model, layout, index, virtual))
                    each = stage.microbatch - stage.pipeline_exposed
                    times[kind] = (each, stage.data_once + stage.optimizer, stage.filled)
                each, once, filled = times[kind]
                kinds.append((each, once, count, filled))
            self.computed += 1
            seconds = planner.step_seconds(layout, kinds, virtual * pipeline, virtual)
            yield Candidate(base=layout, virtual=virtual, seconds=seconds, memory=memory)

    def _front_memory(self, seconds: float) -> float:
        """Bytes of the smallest layout of the front that takes at most so long."""
        place = bisect_right(self.front, seconds, key=lambda candidate: candidate.seconds)
        return self.front[place - 1].memory if place else float("inf")

    def _offer(self, candidate: Candidate) -> None:
        """Put a layout on the front, unless another one is better in both."""
        if candidate.memory >= self._front_memory(candidate.seconds):
            return
        place = bisect_left(self.front, candidate.seconds, key=lambda other: other.seconds)
        end = place
        while end < len(self.front) and self.front[end].memory >= candidate.memory:
            end += 1
        self.front[place:end] = [candidate]


def _reasons(best: Candidate, others: Mapping[str, Candidate], space: _Space) -> Iterator[Reason]:
    winner = space.planner.time(space.job_of(best.layout))
    for field in space.fields:
        value, other = getattr(best.layout, field), others.get(field)
        if other is None:
            yield Reason(field=field, value=value, other=None, slower=None, because=NO_OTHER)
            continue
        loser = space.planner.time(space.job_of(other.layout))
        growth = {name: loser.parts[name] - winner.parts[name] for name in winner.parts}
        worst = max(growth, key=lambda name: growth[name])
        because = f"{worst} takes {growth[worst] / winner.seconds:.1%} of a step more"
        slower = other.seconds / best.seconds - 1
        yield Reason(field=field, value=value, other=other, slower=slower, because=because)


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
    model: Model,
    cluster: Cluster,
    global_batch: int,
    sequence: int,
    software: Software = "fused",
    schedules: Sequence[Schedule] = SCHEDULES,
    overlap_experts: bool = False,
) -> Iterator[Layout]:
    """Every legal layout of all GPUs of the cluster, with tensor parallelism inside a link domain."""
    recomputes = recomputations(model, software)
    for mesh in _meshes(model, cluster, global_batch, sequence):
        for schedule, overlap, pieces in _schedules(mesh, model.layers, schedules, overlap_experts):
            for sharding, group in _shardings(mesh, cluster):
                variant = replace(
                    mesh, sharding=sharding, shard_group=group, schedule=schedule, overlap_experts=overlap
                )
                for recompute in _recomputes(recomputes, overlap):
                    for virtual in pieces:
                        yield replace(variant, recompute=recompute, virtual=virtual)


def _recomputes(recomputes: list[tuple[str, ...]], overlap: bool) -> list[tuple[str, ...]]:
    """What may be recomputed: overlapped experts run the parts of a layer apart, which full recomputation does not."""
    return recomputes[:-1] if overlap else recomputes


def _meshes(model: Model, cluster: Cluster, global_batch: int, sequence: int) -> Iterator[Layout]:
    """Degrees and microbatches: every legal layout without a pipeline schedule, sharding and recomputation."""
    gpus = cluster.gpus
    most = max(LARGEST_MICROBATCH, MICROBATCH_TOKENS // max(1, sequence))
    for tp in _degrees(min(cluster.domain, 64), model.heads or model.ssm_heads, gpus):
        if ("D" in model.feeds and model.intermediate % tp) or ("M" in model.mixers and model.ssm_heads % tp):
            continue
        for cp in _degrees(LARGEST_CP, sequence // 2 if sequence > 1 else 1, gpus // tp):
            if sequence % (cp * tp) or (cp > 1 and sequence % (2 * cp)):
                continue
            for pp in _divisors(gpus // (tp * cp), model.layers):
                dp = gpus // (tp * cp * pp)
                for microbatch in _degrees(most, global_batch // dp, global_batch // dp):
                    if global_batch % (dp * microbatch):
                        continue
                    for ep, etp in _expert_degrees(model, gpus // pp, cluster.domain):
                        yield Layout(
                            gpus=gpus,
                            global_batch=global_batch,
                            microbatch=microbatch,
                            tp=tp,
                            cp=cp,
                            pp=pp,
                            ep=ep,
                            etp=etp,
                            sharding="none" if dp * cp == 1 else "zero1",
                            overlap_tensor=tp > 1,
                        )


def _expert_degrees(model: Model, gpus: int, domain: int) -> list[tuple[int, int]]:
    """Expert parallelism, and tensor parallelism inside an expert, which stays in a link domain."""
    if not model.is_moe:
        return [(1, 1)]
    parts = [ep for ep in range(1, model.experts + 1) if model.experts % ep == 0 and gpus % ep == 0]
    return [(ep, etp) for ep in parts for etp in _degrees(domain, model.expert_intermediate, gpus // ep)]


def _schedules(
    mesh: Layout, layers: int, schedules: Sequence[Schedule], overlap_experts: bool
) -> Iterator[tuple[Schedule, bool, Sequence[int]]]:
    """Schedules of a mesh: each with whether it overlaps the exchange of experts, and its numbers of pieces.

    Experts overlap between two microbatches; with a pipeline, those of an interleaved one (Megatron).
    """
    overlap = overlap_experts and mesh.ep > 1 and mesh.microbatches > 1
    if mesh.pp == 1:
        yield "1f1b", False, (1,)
        if overlap:
            yield "1f1b", True, (1,)
        return
    for schedule in schedules:
        if schedule == "interleaved":
            if pieces := range(2, _most_pieces(mesh, layers) + 1):
                yield schedule, False, pieces
                if overlap:
                    yield schedule, True, pieces
        elif schedule != "dualpipe" or (mesh.pp % 2 == 0 and mesh.microbatches >= 2 * mesh.pp):
            yield schedule, False, (1,)


def _most_pieces(mesh: Layout, layers: int) -> int:
    """Pieces of a stage: up to a layer each where the microbatches allow interleaving.

    The first and the last piece may have no layer, but the embedding and the output layer.
    """
    return (layers + 2) // mesh.pp if mesh.pp > 1 and mesh.microbatches % mesh.pp == 0 else 1


def _shardings(mesh: Layout, cluster: Cluster) -> list[tuple[Sharding, int]]:
    """Kinds of sharding, with the size of a group. No framework at large has ZeRO-2 or HSDP beside a pipeline."""
    if mesh.state_ranks == 1:
        return [("none", 0)]
    kinds: tuple[Sharding, ...] = ("none", "zero1", "shard_grad_op", "zero3")
    if mesh.pp > 1:
        return [(kind, 0) for kind in kinds]
    dp, domain = mesh.dp, max(1, cluster.domain // mesh.tp)
    groups = [size for size in (domain, 8 * domain) if size < dp and dp % size == 0]
    return [*((kind, 0) for kind in kinds), ("zero2", 0), *(("hsdp", size) for size in groups)]


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
