"""The experts of one MoE layer split two ways: memory, compute and communication time by degree.

Tensor parallel (TP): every GPU has a slice of every expert and gets all tokens; the slices are narrow. Expert parallel
(EP): every GPU has whole experts and gets the tokens that are routed to them; some GPUs get more than others. Both read
the same bytes of weights per GPU. They differ in activations (TP does not divide those of the hidden size), in padding
(TP pads columns), in balance (EP) and in communication: an all-reduce of all tokens, or two all-to-alls of the routed
ones.

>>> from nearpeak.plan.cluster.cluster import Cluster
>>> layer = MoeLayer(experts=256, active=8, hidden=4096, intermediate=1536)
>>> tensor, expert = degrees(layer, 8192, Cluster.of("h100-sxm x 64"), at=(8,))
>>> tensor.weight_bytes == expert.weight_bytes, expert.seconds < tensor.seconds
(True, True)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nearpeak.errors import UsageError
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.cluster.collectives import collective_seconds
from nearpeak.plan.legal import nearest_divisor, require_positive
from nearpeak.plan.provenance import Provenance, weakest
from nearpeak.units import DTYPE_BYTES

TILE_ROWS = 64
"""Rows of one tile of a grouped GEMM: fewer tokens per expert are padded to it."""
TILE_COLUMNS = 64
DEGREES = (2, 4, 8, 16, 32, 64)
"""Degrees that are compared by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeLayer:
    """The routed experts of one layer."""

    experts: int
    active: int
    """Experts that a token visits."""
    hidden: int
    intermediate: int
    """Width of one expert."""
    gated: bool = True
    """Whether an expert has three matrices (SwiGLU) or two."""

    def __post_init__(self) -> None:
        require_positive(experts=self.experts, active=self.active, hidden=self.hidden, intermediate=self.intermediate)
        if self.active > self.experts:
            raise UsageError(f"active={self.active} is above experts={self.experts}. Nearest: active={self.experts}.")

    def experts_hit(self, tokens: int) -> float:
        """Expected number of experts with at least one token, when all are equally likely."""
        return self.experts * (1 - (1 - self.active / self.experts) ** tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeDegree:
    """One split at one degree; all figures are for the busiest GPU."""

    split: Literal["tensor", "expert"]
    degree: int
    tokens: int
    experts_per_gpu: float
    experts_hit_per_gpu: float
    tokens_per_expert: float
    """Mean over the experts that are hit."""
    imbalance: float
    """Tokens of the busiest GPU over the mean."""
    weight_bytes: float
    activation_bytes: float
    flops: float
    padded_flops: float
    """FLOPs with the padding of tiles."""
    memory_seconds: float
    compute_seconds: float
    communication_seconds: float
    communication: str
    """The collectives and their algorithm."""
    provenance: Provenance

    @property
    def seconds(self) -> float:
        """Time of the layer: memory and compute overlap, communication follows."""
        return max(self.memory_seconds, self.compute_seconds) + self.communication_seconds

    @property
    def limiter(self) -> Literal["memory", "compute", "communication"]:
        """The largest of the three."""
        parts = (self.memory_seconds, self.compute_seconds, self.communication_seconds)
        names: tuple[Literal["memory", "compute", "communication"], ...] = ("memory", "compute", "communication")
        return names[parts.index(max(parts))]


def degrees(
    layer: MoeLayer,
    tokens: int,
    cluster: Cluster,
    *,
    at: Sequence[int] = DEGREES,
    dtype: str = "bfloat16",
    skew: float = 1.0,
) -> tuple[MoeDegree, ...]:
    """Both splits at each degree: tensor, expert, tensor, expert, ...

    `tokens` are those of the whole group. `skew` is the load of the busiest expert-parallel GPU over the mean, beyond
    chance (1: balanced routing, as with a balancing loss).
    """
    require_positive(tokens=tokens)
    if not (math.isfinite(skew) and skew >= 1):
        raise UsageError(f"skew={skew!r} must be at least 1. Nearest: skew=1.")
    splits = []
    for degree in at:
        _check(layer, degree, cluster)
        splits.append(_tensor_parallel(layer, tokens, cluster, degree, dtype))
        splits.append(_expert_parallel(layer, tokens, cluster, degree, dtype, skew))
    return tuple(splits)


def crossover(splits: Sequence[MoeDegree]) -> int | None:
    """The smallest degree from which on expert parallel is the faster split; None where it never is."""
    times: dict[int, dict[str, float]] = {}
    for item in splits:
        times.setdefault(item.degree, {})[item.split] = item.seconds
    smallest = None
    for degree in sorted(times, reverse=True):
        if len(times[degree]) < 2 or times[degree]["expert"] >= times[degree]["tensor"]:
            break
        smallest = degree
    return smallest


def _tensor_parallel(layer: MoeLayer, tokens: int, cluster: Cluster, degree: int, dtype: str) -> MoeDegree:
    size = DTYPE_BYTES[dtype]
    reduce = collective_seconds("all_reduce", tokens * layer.hidden * max(size, 2), degree, cluster)
    return _degree(
        layer,
        cluster,
        dtype,
        split="tensor",
        degree=degree,
        tokens=tokens,
        routed=tokens * layer.active,
        width=layer.intermediate / degree,
        hit=layer.experts_hit(tokens),
        experts=layer.experts,
        imbalance=1.0,
        communication_seconds=reduce.seconds,
        communication=f"all-reduce, {reduce.algorithm}",
        provenance=reduce.provenance,
    )


def _expert_parallel(layer: MoeLayer, tokens: int, cluster: Cluster, degree: int, dtype: str, skew: float) -> MoeDegree:
    routed = tokens * layer.active / degree
    # the largest of `degree` Poisson counts lies about sqrt(2 ln(degree)) standard deviations above their mean
    imbalance = min(float(degree), skew * (1 + math.sqrt(2 * math.log(degree) / routed)))
    size = DTYPE_BYTES[dtype]
    # a token goes once to each GPU that has one of its experts, its own among them
    gpus_per_token = degree * (1 - (1 - 1 / degree) ** layer.active)
    rows = tokens / degree * gpus_per_token * imbalance
    dispatch = collective_seconds("all_to_all", rows * layer.hidden * size, degree, cluster)
    combine = collective_seconds("all_to_all", rows * layer.hidden * max(size, 2), degree, cluster)
    return _degree(
        layer,
        cluster,
        dtype,
        split="expert",
        degree=degree,
        tokens=tokens,
        routed=routed * imbalance,
        width=float(layer.intermediate),
        hit=layer.experts_hit(tokens) / degree,
        experts=layer.experts / degree,
        imbalance=imbalance,
        communication_seconds=dispatch.seconds + combine.seconds,
        communication=f"2 all-to-alls, {dispatch.algorithm}",
        provenance=weakest(dispatch.provenance, combine.provenance),
    )


def _degree(
    layer: MoeLayer,
    cluster: Cluster,
    dtype: str,
    *,
    split: Literal["tensor", "expert"],
    degree: int,
    tokens: int,
    routed: float,
    width: float,
    hit: float,
    experts: float,
    imbalance: float,
    communication_seconds: float,
    communication: str,
    provenance: Provenance,
) -> MoeDegree:
    """The split in which `routed` tokens visit `hit` of `experts` experts of this width on the busiest GPU."""
    ceilings = cluster.machine.achievable or cluster.machine.theoretical
    assert ceilings is not None, "every GPU of the catalogue has ceilings"
    size = DTYPE_BYTES[dtype]
    matrices = 3 if layer.gated else 2
    weights = hit * matrices * layer.hidden * width * size
    # hidden side: gathered in, GEMM out, read to combine; inner side: GEMM out and in, activation out and in
    activations = routed * (3 * layer.hidden + 2 * matrices * width) * max(size, 1)
    per_expert = routed / hit
    flops = 2.0 * routed * matrices * layer.hidden * width
    rows = max(float(TILE_ROWS), per_expert + TILE_ROWS / 2)  # counts vary: the last tile is half full on average
    columns = math.ceil(width / TILE_COLUMNS) * TILE_COLUMNS
    padded = 2.0 * hit * rows * matrices * layer.hidden * columns
    peak = ceilings.peak(dtype)
    assumed = Provenance(kind="assumed", text="GEMMs at the peak rate, except for the padding of tiles")
    return MoeDegree(
        split=split,
        degree=degree,
        tokens=tokens,
        experts_per_gpu=experts,
        experts_hit_per_gpu=hit,
        tokens_per_expert=per_expert,
        imbalance=imbalance,
        weight_bytes=weights,
        activation_bytes=activations,
        flops=flops,
        padded_flops=padded,
        memory_seconds=(weights + activations) / ceilings.bandwidth,
        compute_seconds=padded / peak,
        communication_seconds=communication_seconds,
        communication=communication,
        provenance=weakest(provenance, assumed),
    )


def _check(layer: MoeLayer, degree: int, cluster: Cluster) -> None:
    if isinstance(degree, bool) or not isinstance(degree, int) or not 1 < degree <= cluster.gpus:
        nearest = min(max(2, int(degree)), cluster.gpus)
        raise UsageError(f"degree={degree!r} is not between 2 and the {cluster.gpus} GPUs. Nearest: degree={nearest}.")
    for name, value in (("experts", layer.experts), ("intermediate", layer.intermediate)):
        if value % degree:
            nearest = nearest_divisor(degree, value)
            raise UsageError(f"degree={degree} does not divide {name}={value}. Nearest: degree={nearest}.")
