"""`stages`: which layers, embeddings and weights each rank of a pipeline holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from nearpeak.plan.models.model import Model
from nearpeak.plan.models.parameters import count
from nearpeak.plan.training.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One pipeline stage."""

    index: int
    mixers: str
    """Letters of its layers, as in `Model`."""
    feeds: str
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
    shapes: float
    """Weights of one matrix of each shape that its layers have, after tensor parallelism."""
    output_weights: float
    """Of the output layer, tied or not, after tensor parallelism; 0 but on the last stage."""

    @property
    def layers(self) -> int:
        """How many there are."""
        return len(self.mixers)


def stages(model: Model, layout: Layout) -> list[Stage]:
    """All stages."""
    return [stage(model, layout, index) for index in range(layout.pp)]


def stage(model: Model, layout: Layout, index: int) -> Stage:
    """The stage `index`."""
    held = in_flight(layout, index)
    return _stage(
        model, layout.tp, layout.ep * layout.etp, layout.pp, layout.virtual, layout.split, layout.etp, index, held
    )


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
    held: float,
) -> Stage:
    counts = count(model)
    places = layers_of(model.layers, pp, virtual, split, index)
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
    one_layer = model.experts * counts.expert / spread if experts else 0.0
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
        in_flight=held,
        dense_weights=dense,
        expert_weights=experts * one_layer,
        unsharded_layer=mixer / tp + max(feed / tp, counts.expert_shared / tp + one_layer if experts else 0.0),
        shapes=shapes / tp + (counts.expert / etp if experts else 0.0),
        output_weights=model.vocabulary * model.hidden / tp if last else 0.0,
    )


def layers_of(layers: int, pp: int, virtual: int, split: tuple[int, ...], index: int) -> list[int]:
    """Which layers stage `index` has: as `split` says, else equal pieces in turn, of which the last are smaller.

    >>> layers_of(8, 2, 2, (), 0), layers_of(8, 2, 1, (5, 3), 1), layers_of(7, 2, 1, (), 1)
    ([0, 1, 4, 5], [5, 6, 7], [4, 5, 6])
    """
    if split:
        start = sum(split[:index])
        return list(range(start, start + split[index]))
    whole, rest = divmod(layers, pp * virtual)
    found: list[int] = []
    for piece in range(index, pp * virtual, pp):
        start = piece * whole + min(piece, rest)
        found += range(start, start + whole + (1 if piece < rest else 0))
    return found


def in_flight(layout: Layout, index: int) -> float:
    """Microbatches whose activations stage `index` holds at the peak, as multiples of the stage's whole share.

    1F1B: as many as there are stages after it, and its own. Interleaved: Megatron's warm-up, in pieces of a stage.
    """
    behind = layout.pp - index - 1
    if layout.virtual > 1:
        pieces = 2 * behind + (layout.virtual - 1) * layout.pp + 1
        return min(pieces, layout.microbatches * layout.virtual) / layout.virtual
    return float(min(behind + 1, layout.microbatches))
