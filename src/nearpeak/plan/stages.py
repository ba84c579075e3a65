"""`stages`: which layers, embeddings and weights each rank of a pipeline holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from nearpeak.plan.layout import Layout
from nearpeak.plan.models import Model
from nearpeak.plan.parameters import count


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One pipeline stage."""

    index: int
    layers: int
    share: float
    """Of all layers; every kind of layer counts with this share."""
    has_embedding: bool
    has_output: bool
    in_flight: float
    """Microbatches, as multiples of the whole stage, whose activations are held at the peak."""
    dense_weights: float
    """Weights of one rank that are not routed experts, after tensor parallelism."""
    expert_weights: float
    """Weights of routed experts of one rank, after expert parallelism."""
    unsharded_layer: float
    """Weights of the largest layer with its experts, after tensor and expert parallelism."""


def stages(model: Model, layout: Layout) -> list[Stage]:
    """All stages; layers are spread evenly, and the fullest stage has the rest of the division."""
    return [stage(model, layout, index) for index in range(layout.pp)]


def stage(model: Model, layout: Layout, index: int) -> Stage:
    """The stage `index`."""
    return _stage(model, layout.tp, layout.ep * layout.etp, layout.pp, index, in_flight(layout, index))


@lru_cache(maxsize=8192)
def _stage(model: Model, tp: int, spread: int, pp: int, index: int, held: float) -> Stage:
    counts = count(model)
    layers = _layers(model.layers, pp, index)
    share = layers / model.layers
    mixers = {kind: share * model.mixers.count(kind) for kind in "AWCM" if kind in model.mixers}
    feeds = {kind: share * model.feeds.count(kind) for kind in "DE" if kind in model.feeds}
    first, last = index == 0, index == pp - 1
    attention = sum(mixers.get(kind, 0.0) for kind in "AWC")
    blocks = attention + mixers.get("M", 0.0) + sum(feeds.values())
    dense = (
        attention * counts.attention
        + mixers.get("M", 0.0) * counts.state_space
        + feeds.get("D", 0.0) * counts.dense
        + feeds.get("E", 0.0) * counts.expert_shared
    ) / tp + blocks * counts.norm
    if first:
        dense += counts.embedding / tp
    if last:
        tied_copy = counts.embedding if model.tied and pp > 1 else 0
        dense += (counts.output + tied_copy) / tp + counts.final_norm
    one_layer = model.experts * counts.expert / spread if model.is_moe else 0.0
    return Stage(
        index=index,
        layers=layers,
        share=share,
        has_embedding=first,
        has_output=last,
        in_flight=held,
        dense_weights=dense,
        expert_weights=feeds.get("E", 0.0) * one_layer,
        unsharded_layer=(max(counts.attention, counts.state_space) + counts.dense) / tp + one_layer,
    )


def _layers(layers: int, pp: int, index: int) -> int:
    """Layers of a stage: the last one has the output layer besides, so it is the first to have fewer."""
    whole, rest = divmod(layers, pp)
    return whole + (1 if index < rest else 0)


def in_flight(layout: Layout, index: int) -> float:
    """Microbatches whose activations stage `index` holds at the peak, as multiples of the stage's whole share.

    1F1B: as many as there are stages after it, and its own. Interleaved: Megatron's warm-up, in pieces of a stage.
    """
    behind = layout.pp - index - 1
    if layout.virtual > 1:
        pieces = 2 * behind + (layout.virtual - 1) * layout.pp + 1
        return min(pieces, layout.microbatches * layout.virtual) / layout.virtual
    return float(min(behind + 1, layout.microbatches))
