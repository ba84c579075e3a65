"""`Layout`: how a training run is spread over GPUs, whether that is legal, and what each pipeline stage holds.

Two meshes share the same GPUs: attention and dense feeds use TP x CP x DP, experts use ETP x EP x EDP, each times the
pipeline. So a run needs a multiple of PP x TP x CP GPUs and of PP x EP x ETP, never of their product.

>>> layout = Layout(gpus=64, tp=4, pp=4, virtual=5, global_batch=128)
>>> layout.dp, layout.microbatches
(4, 32)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.plan.legal import nearest_divisor, require_positive
from nearpeak.plan.models.model import Model, count_parameters

Schedule = Literal["1f1b", "interleaved", "zero-bubble", "dualpipe"]
Sharding = Literal["none", "zero1", "zero2", "shard_grad_op", "zero3", "hsdp"]
"""Of data-parallel ranks. "zero2" has all weights at all times and gathers them once per step; "shard_grad_op" (FSDP
without resharding after the forward pass) gathers them for every microbatch and keeps them until its backward pass."""
Offload = Literal["none", "optimizer", "optimizer+gradients", "all"]
RECOMPUTE_MODULES = ("attention", "mla_up", "norm", "feed", "feed_activation", "experts", "ops", "layer")
"""What the backward pass can recompute: modules; "ops": everything but attention and every second GEMM (op-level
selective checkpointing); "layer": all of a layer but its input."""
_VALID = {"schedule": get_args(Schedule), "sharding": get_args(Sharding), "offload": get_args(Offload)}
_PRESETS: dict[str, tuple[str, ...]] = {"none": (), "selective": ("attention",), "full": ("layer",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees of parallelism, batch, sharding, recomputation, offload and overlap of a training run."""

    gpus: int
    global_batch: int
    """Sequences of one step on all GPUs."""
    microbatch: int = 1
    """Sequences that a data-parallel rank runs at once."""
    tp: int = 1
    sequence_parallel: bool = True
    """Whether norms and residuals are split along the sequence over the tensor-parallel ranks."""
    cp: int = 1
    pp: int = 1
    virtual: int = 1
    """Pieces of the model per pipeline stage (interleaving)."""
    split: tuple[int, ...] = ()
    """Layers of each pipeline stage, where they are not equal."""
    schedule: Schedule = "1f1b"
    """"dualpipe": microbatches enter at both ends, and the exchange of experts of one passes while another is computed;
    every rank has the weights of two stages (arXiv:2412.19437)."""
    routed_nodes: int = 0
    """Nodes that a token is routed to at most (node-limited routing); 0: any number."""
    ep: int = 1
    etp: int = 1
    """Tensor parallelism inside an expert."""
    sharding: Sharding = "zero1"
    shard_group: int = 0
    """Data-parallel ranks that share one copy of the sharded states (zero1, zero2, hsdp); 0: all."""
    recompute: tuple[str, ...] = ()
    """Any of `RECOMPUTE_MODULES`, or one of "none", "selective", "full"."""
    recompute_share: float = 1.0
    """Share of the layers that recompute: 0.5 where every second layer does."""
    offload: Offload = "none"
    overlap_gradients: bool = True
    """Whether gradients are reduced, and parameters gathered, during computation."""
    overlap_tensor: bool = False
    """Whether GEMMs are split to overlap with tensor-parallel communication."""
    overlap_experts: bool = False
    """Whether the experts' all-to-all overlaps with another microbatch."""
    overlap_pipeline: bool = True
    scatter_pipeline: bool = True
    """Whether each tensor-parallel rank sends only its share of an activation to the next stage."""

    def __post_init__(self) -> None:
        degrees = ("gpus", "global_batch", "microbatch", "tp", "cp", "pp", "virtual", "ep", "etp")
        require_positive(**{field: getattr(self, field) for field in degrees})
        for field, valid in _VALID.items():
            value = getattr(self, field)
            if value not in valid:
                raise UsageError(f"{field}={value!r} is not known. {did_you_mean(str(value), valid)}")
        if self.recompute:
            object.__setattr__(self, "recompute", _recompute_modules(self.recompute))
        if not 0 < self.recompute_share <= 1:
            raise UsageError(
                f"recompute_share={self.recompute_share} must lie above 0 and at most at 1. Nearest: recompute_share=1."
            )
        _require_multiple("tp x cp x pp", self.tp * self.cp * self.pp, "gpus", self.gpus)
        if self.ep * self.etp > 1:
            _require_multiple("ep x etp x pp", self.ep * self.etp * self.pp, "gpus", self.gpus)
        for field in ("routed_nodes", "shard_group"):
            if getattr(self, field) < 0:
                raise UsageError(f"{field}={getattr(self, field)} must be 0 or more. Nearest: {field}=0.")
        if self.schedule == "dualpipe" and (self.pp % 2 or self.virtual > 1):
            raise UsageError(
                f"schedule='dualpipe' needs an even pp and virtual=1, and pp={self.pp}, virtual={self.virtual}. "
                f"Nearest: pp={self.pp + self.pp % 2}, virtual=1."
            )
        if self.schedule == "dualpipe" and self.pp > 1 and self.microbatches < 2 * self.pp:
            raise UsageError(
                f"schedule='dualpipe' needs two microbatches for each stage, and global_batch={self.global_batch} "
                f"gives {self.microbatches} for pp={self.pp}. "
                f"Nearest: global_batch={2 * self.pp * self.dp * self.microbatch}."
            )
        if self.virtual > 1 and self.pp == 1:
            raise UsageError(f"virtual={self.virtual} needs a pipeline, and pp=1. Nearest: virtual=1.")
        if self.split and (len(self.split) != self.pp or self.virtual > 1 or min(self.split) < 0):
            raise UsageError(
                f"split={self.split} must give the layers of each of the pp={self.pp} stages, and virtual be 1. "
                "Nearest: split=()."
            )
        _require_multiple("dp x microbatch", self.dp * self.microbatch, "global_batch", self.global_batch)
        if self.virtual > 1 and self.microbatches % self.pp:
            near = max(1, round(self.microbatches / self.pp)) * self.pp * self.dp * self.microbatch
            raise UsageError(
                f"global_batch={self.global_batch} gives {self.microbatches} microbatches, and interleaving over "
                f"pp={self.pp} needs a multiple of {self.pp}. Nearest: global_batch={near}."
            )
        if self.sharding in ("zero1", "zero2", "hsdp"):
            _require_multiple("shard_group", self.shard_group or self.dp, "dp", self.dp)
        elif self.shard_group not in (0, self.dp):
            raise UsageError(
                f"shard_group={self.shard_group} is for zero1, zero2 and hsdp; with sharding={self.sharding!r} the "
                f"group is all of dp={self.dp}. Nearest: shard_group=0."
            )

    @property
    def dp(self) -> int:
        """Data-parallel ranks of attention and dense feeds."""
        return self.gpus // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Data-parallel ranks of the experts."""
        return self.gpus // (self.ep * self.etp * self.pp)

    @property
    def microbatches(self) -> int:
        """Microbatches of one step on each data-parallel rank (gradient accumulation)."""
        return self.global_batch // (self.dp * self.microbatch)

    @property
    def state_ranks(self) -> int:
        """Ranks with copies of the same dense weights: the sharded optimizer is spread over all of them."""
        return self.dp * self.cp

    @property
    def shard_ranks(self) -> int:
        """Ranks over which sharded states are spread."""
        return 1 if self.sharding == "none" else (self.shard_group or self.dp) * self.cp

    @property
    def gathers_weights(self) -> bool:
        """Whether each rank stores a part of the weights, which are gathered layer by layer (ZeRO-3)."""
        return self.sharding in ("zero3", "hsdp") and self.shard_ranks > 1

    def recomputes(self, module: str) -> bool:
        """Whether the backward pass recomputes this module."""
        return module in self.recompute or "layer" in self.recompute

    def check(self, model: Model, sequence: int) -> None:
        """Raise UsageError where this layout cannot run `model`; it names the field and the nearest legal value."""
        if model.heads:
            _require_divisor("tp", self.tp, f"the {model.heads} heads of {model.name}", model.heads)
        if "M" in model.mixers:
            _require_divisor("tp", self.tp, f"the {model.ssm_heads} state-space heads of {model.name}", model.ssm_heads)
        if "D" in model.feeds:
            _require_divisor("tp", self.tp, f"the intermediate width {model.intermediate}", model.intermediate)
        # the first and the last piece of an interleaved pipeline may have the embedding and the output layer alone
        empty = 2 if self.virtual > 1 and self.pp <= model.layers else 0
        if self.pp * self.virtual > model.layers + empty:
            field, limit = (
                ("virtual", (model.layers + empty) // self.pp) if self.pp <= model.layers else ("pp", model.layers)
            )
            raise UsageError(
                f"{field}={getattr(self, field)}: pp x virtual = {self.pp * self.virtual} is more than the "
                f"{model.layers} layers of {model.name}. Nearest: {field}={max(1, limit)}."
            )
        if self.split and sum(self.split) != model.layers:
            last = max(0, self.split[-1] + model.layers - sum(self.split))
            raise UsageError(
                f"split={self.split} has {sum(self.split)} layers and {model.name} has {model.layers}. "
                f"Nearest: split={(*self.split[:-1], last)}."
            )
        for field, without in (("ep", 1), ("etp", 1), ("routed_nodes", 0)):
            if getattr(self, field) > without and not model.is_moe:
                raise UsageError(
                    f"{field}={getattr(self, field)}: {model.name} has no experts. Nearest: {field}={without}."
                )
        if self.ep > 1 or self.etp > 1:
            _require_divisor("ep", self.ep, f"the {model.experts} experts", model.experts)
            _require_divisor(
                "etp", self.etp, f"the experts' width {model.expert_intermediate}", model.expert_intermediate
            )
        pieces = self.cp * (self.tp if self.sequence_parallel else 1)
        if sequence % (2 * self.cp if self.cp > 1 else 1):
            near = round(sequence / (2 * self.cp)) * 2 * self.cp
            raise UsageError(
                f"cp={self.cp} cuts a sequence into {2 * self.cp} equal pieces; sequence={sequence} is no multiple of "
                f"that. Nearest: sequence={max(near, 2 * self.cp)}."
            )
        if sequence % pieces:
            near = max(1, round(sequence / pieces)) * pieces
            raise UsageError(
                f"tp={self.tp} with sequence_parallel and cp={self.cp} cut a sequence into {pieces}; "
                f"sequence={sequence} is no multiple of that. Nearest: sequence={near}."
            )


def _recompute_modules(recompute: str | tuple[str, ...]) -> tuple[str, ...]:
    """Modules by name, with presets expanded."""
    names = (recompute,) if isinstance(recompute, str) else tuple(recompute)
    modules = tuple(part for item in names for part in _PRESETS.get(item, (item,)))
    for module in modules:
        if module not in RECOMPUTE_MODULES:
            raise UsageError(
                f"recompute={module!r} is not known. {did_you_mean(module, (*RECOMPUTE_MODULES, *_PRESETS))}"
            )
    return modules


def _require_divisor(field: str, value: int, what: str, number: int) -> None:
    if number % value:
        raise UsageError(f"{field}={value} does not divide {what}. Nearest: {field}={nearest_divisor(value, number)}.")


def _require_multiple(name: str, product: int, field: str, value: int) -> None:
    if value % product == 0:
        return
    if product > value:
        raise UsageError(f"{name} = {product} is larger than {field}={value}. Nearest: {field}={product}.")
    near = max(1, round(value / product)) * product
    raise UsageError(
        f"{field}={value} is no multiple of {name} = {product}. Nearest: {field}={near}, or "
        f"{name} = {nearest_divisor(product, value)}."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The layers and weights of one rank of one pipeline stage."""

    index: int
    mixers: str
    """One letter per layer, as in `Model`."""
    feeds: str
    has_embedding: bool
    has_output: bool
    in_flight: float
    """Microbatches whose activations are in memory at the peak, as multiples of the whole stage."""
    dense_weights: float
    """Weights of one rank that are not routed experts, after tensor parallelism."""
    expert_weights: float
    """Weights of routed experts of one rank, after expert parallelism."""
    unsharded_layer: float
    """Weights of the largest layer with its experts, after tensor and expert parallelism."""
    shapes: float
    """Weights of one matrix of each shape in its layers, after tensor parallelism."""
    output_weights: float
    """Weights of the output layer, tied or not, after tensor parallelism; 0 except on the last stage."""

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.mixers)


def pipeline_stages(model: Model, layout: Layout) -> list[Stage]:
    """All pipeline stages."""
    return [pipeline_stage(model, layout, index) for index in range(layout.pp)]


def pipeline_stage(model: Model, layout: Layout, index: int, virtual: int | None = None) -> Stage:
    """The pipeline stage `index`; `virtual`: in another number of pieces."""
    virtual = layout.virtual if virtual is None else virtual
    microbatches = in_flight(layout.pp, virtual, layout.microbatches, index)
    spread = layout.ep * layout.etp
    return _stage(model, layout.tp, spread, layout.pp, virtual, layout.split, layout.etp, index, microbatches)


def whole_model(model: Model, layout: Layout) -> Stage:
    """All layers as one stage: what the stages have together, or less."""
    return _stage(model, layout.tp, layout.ep * layout.etp, 1, 1, (), layout.etp, 0, 1.0)


@lru_cache(maxsize=8192)
def _stage(
    model: Model,
    tp: int,
    spread: int,
    pp: int,
    virtual: int,
    split: tuple[int, ...],
    etp: int,
    index: int,
    in_flight: float,
) -> Stage:
    counts = count_parameters(model)
    places = layers_of(model.layers, pp, virtual, split, index, output_layers(model))
    mixers = "".join(model.mixers[place] for place in places)
    feeds = "".join(model.feeds[place] for place in places)
    first, last = index == 0, index == pp - 1
    scans = mixers.count("M")
    attention = len(mixers) - scans - mixers.count("-")
    experts = feeds.count("E")
    blocks = attention + scans + len(feeds) - feeds.count("-")
    dense = (
        attention * counts.attention
        + scans * counts.state_space
        + feeds.count("D") * counts.dense
        + experts * counts.expert_shared
    ) / tp + blocks * counts.norm
    if first:
        dense += counts.embedding / tp
    if last:
        tied_copy = counts.embedding if model.tied and pp > 1 else 0
        dense += (counts.output + tied_copy) / tp + counts.final_norm
    layer_experts = model.experts * counts.expert / spread if experts else 0.0
    mixer = max(counts.attention if attention else 0, counts.state_space if scans else 0)
    feed = counts.dense if "D" in feeds else 0
    shapes = (counts.attention if attention else 0) + (counts.state_space if scans else 0) + feed
    shapes += counts.expert_shared if experts else 0
    return Stage(
        index=index,
        mixers=mixers,
        feeds=feeds,
        has_embedding=first,
        has_output=last,
        in_flight=in_flight,
        dense_weights=dense,
        expert_weights=experts * layer_experts,
        unsharded_layer=mixer / tp + max(feed / tp, counts.expert_shared / tp + layer_experts if experts else 0.0),
        shapes=shapes / tp + (counts.expert / etp if experts else 0.0),
        output_weights=model.vocabulary * model.hidden / tp if last else 0.0,
    )


@lru_cache(maxsize=1024)
def output_layers(model: Model) -> int:
    """How many layers have the FLOPs of the output layer, at least one: so many fewer a last stage may have."""
    counts = count_parameters(model)
    output = model.vocabulary * model.hidden * (1 + model.predictions)
    return max(1, round(output * model.layers / max(1, counts.active - counts.embedding - counts.output)))


def layers_of(
    layers: int, pp: int, virtual: int, split: tuple[int, ...], index: int, output_layers: int = 1
) -> list[int]:
    """Layers of stage `index`: those of `split`, else of equal pieces in turn.

    Where the layers do not come out even, the last piece is short by up to `output_layers`, since it has the output
    layer; then the first one, which has the embedding, by one; then others from the end.

    >>> layers_of(8, 2, 2, (), 0), layers_of(8, 2, 1, (5, 3), 1), layers_of(7, 2, 1, (), 1)
    ([0, 1, 4, 5], [5, 6, 7], [4, 5, 6])
    >>> [len(layers_of(126, 16, 1, (), index)) for index in (0, 1, 14, 15)]
    [7, 8, 8, 7]
    """
    if split:
        start = sum(split[:index])
        return list(range(start, start + split[index]))
    sizes = _piece_sizes(layers, pp * virtual, output_layers)
    numbers: list[int] = []
    for piece in range(index, pp * virtual, pp):
        start = sum(sizes[:piece])
        numbers += range(start, start + sizes[piece])
    return numbers


@lru_cache(maxsize=1024)
def _piece_sizes(layers: int, pieces: int, output_layers: int) -> tuple[int, ...]:
    most = -(-layers // pieces)
    sizes = [most] * pieces
    missing = pieces * most - layers
    last = min(missing, output_layers, max(1, most - 1))
    sizes[-1] -= last
    for piece in [0, *range(pieces - 2, 0, -1), pieces - 1][: missing - last]:
        sizes[piece] -= 1
    return tuple(sizes)


StageKind = tuple[str, str, bool, bool]
"""The sorted letters of mixers and of feeds, and whether a stage has the embedding and the output layer."""


def stage_groups(model: Model, layout: Layout) -> tuple[tuple[StageKind, int, int], ...]:
    """The kinds of pipeline stages, each with the first stage of this kind and how many there are."""
    return groups_of_stages(model.mixers, model.feeds, layout.pp, layout.virtual, layout.split, output_layers(model))


@lru_cache(maxsize=4096)
def groups_of_stages(
    mixers: str, feeds: str, pp: int, virtual: int, split: tuple[int, ...], output_layers: int
) -> tuple[tuple[StageKind, int, int], ...]:
    """`stage_groups` by numbers, for a search."""
    groups: dict[StageKind, list[int]] = {}
    for index, kind in enumerate(kinds_of_stages(mixers, feeds, pp, virtual, split, output_layers)):
        groups.setdefault(kind, []).append(index)
    return tuple((kind, members[0], len(members)) for kind, members in groups.items())


@lru_cache(maxsize=4096)
def kinds_of_stages(
    mixers: str, feeds: str, pp: int, virtual: int, split: tuple[int, ...], output_layers: int
) -> tuple[StageKind, ...]:
    """The kind of each pipeline stage."""
    kinds: list[StageKind] = []
    for index in range(pp):
        places = layers_of(len(mixers), pp, virtual, split, index, output_layers)
        blocks = ["".join(sorted(letters[place] for place in places)) for letters in (mixers, feeds)]
        kinds.append((blocks[0], blocks[1], index == 0, index == pp - 1))
    return tuple(kinds)


def in_flight(pp: int, virtual: int, microbatches: int, index: int) -> float:
    """Microbatches whose activations are in memory of stage `index` at the peak, as multiples of the whole stage.

    1F1B: one for the stage itself and each stage after it. Interleaved: Megatron's warm-up, in pieces of a stage.
    """
    later = pp - index - 1
    if virtual > 1:
        pieces = 2 * later + (virtual - 1) * pp + 1
        return min(pieces, microbatches * virtual) / virtual
    return float(min(later + 1, microbatches))


def deferred(pp: int, microbatches: int, index: int) -> float:
    """Microbatches of a zero-bubble stage whose gradients of weights are still to be computed at the peak.

    Their activations stay beside those of `in_flight`, so that all stages have as many as the first (ZB-H1,
    arXiv:2401.10241, table 2).
    """
    return float(min(pp, microbatches) - min(pp - index, microbatches))
