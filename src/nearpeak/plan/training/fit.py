"""`fit_step`: the changes after which a traced training step fits into a GPU's memory, and what each costs in time.

The step was traced on fake tensors, so it needs no GPU and no memory. A storage is in memory from the op that makes it
to the last op that uses it; what the step leaves behind (gradients, optimizer states, parameters) stays. Each change
rewrites these lifetimes:

- recomputing the first `n` layers: what such a layer saves for its backward pass is gone between the two, except what
  it hands on; the layer's forward ops run once more;
- smaller microbatches: activations shrink, gradients stay from one to the next and grow by addition, weights are read
  again;
- the loss in chunks of the rows, recomputed in the backward pass: one chunk of the logits is in memory at a time;
- a fused optimizer, which has no temporary tensors of the size of the weights;
- 8-bit optimizer states, or states in host memory, which move over PCIe once each way;
- sharding over the GPUs: optimizer states (zero1), gradients too (zero2), weights too (zero3).

All combinations are tried, each with the fewest layers to recompute, and ranked by the time that they add.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from nearpeak._display import Result, headline
from nearpeak.bound.estimate import Estimate, EstimatedOp
from nearpeak.errors import UsageError
from nearpeak.ops.lifetimes import Category
from nearpeak.ops.op import Trace
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.cluster.collectives import collective_seconds
from nearpeak.plan.training.calibration import layer_list, layer_number
from nearpeak.plan.training.efficiency import load_efficiency
from nearpeak.plan.training.memory import COMMUNICATORS, CONTEXT, SLACK, WORKSPACE
from nearpeak.plan.training.time import OFFLOAD_SHARE, hidden_behind
from nearpeak.units import quantity

MOST_PIECES = 64
"""Microbatches that a batch is cut into at most."""
MOST_REMEDIES = 6
LOSS_CHUNKS = 8
ADAMS_OPS = {"aten._foreach_lerp_", "aten._foreach_sqrt", "aten._foreach_addcdiv_"}
"""Of torch's Adam and AdamW with temporary tensors: with `fused=True` they compute the same."""
EIGHT_BIT_STATE = 1.0 + 4.0 / 256
"""Bytes of an 8-bit optimizer state: a float32 scale for each block of 256 (arXiv:2110.02861)."""
States = Literal["as they are", "8-bit", "on the host"]
Sharding = Literal["none", "zero1", "zero2", "zero3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A combination of changes after which the step fits."""

    recomputed_layers: int
    pieces: int
    """Microbatches that the batch is cut into."""
    states: States
    sharding: Sharding
    loss_chunks: int = 1
    """Parts of the rows whose logits are in memory one after the other."""
    fused: bool = False
    """Whether the optimizer runs in fused kernels."""
    peak: float
    """Bytes of tensors at the fullest op after them: what torch.cuda.max_memory_allocated would say."""
    bytes: float
    """Memory that a GPU needs after them, context and allocator included."""
    added_seconds: float
    """Time that a step takes longer, at the speed of good kernels; below 0 where it is shorter."""

    @property
    def exact(self) -> bool:
        """Whether the step computes the same numbers: 8-bit states do not."""
        return self.states != "8-bit"

    @property
    def changes(self) -> int:
        """How many things change."""
        others = (self.states != "as they are") + (self.sharding != "none") + self.fused + (self.loss_chunks > 1)
        return (self.recomputed_layers > 0) + (self.pieces > 1) + others

    def contains(self, other: Remedy) -> bool:
        """Whether `other` is a part of these changes."""
        return (
            other is not self
            and other.recomputed_layers <= self.recomputed_layers
            and other.pieces <= self.pieces
            and other.states in ("as they are", self.states)
            and other.sharding in ("none", self.sharding)
            and other.fused <= self.fused
            and other.loss_chunks <= self.loss_chunks
        )

    def __str__(self) -> str:
        parts = []
        if self.recomputed_layers:
            parts.append(f"recompute {self.recomputed_layers} layers")
        if self.pieces > 1:
            parts.append(f"{self.pieces} microbatches")
        if self.loss_chunks > 1:
            parts.append(f"the loss in {self.loss_chunks} chunks, recomputed")
        if self.fused:
            parts.append("a fused optimizer (fused=True)")
        if self.states != "as they are":
            parts.append(f"optimizer states {'in 8 bits' if self.states == '8-bit' else 'in host memory'}")
        if self.sharding != "none":
            parts.append(f"sharding {self.sharding}")
        return ", ".join(parts) or "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class FitPlan(Result):
    """The memory of a traced step on one GPU, and remedies where it does not fit."""

    source: str
    machine: str
    capacity: float
    peak: float
    """Bytes of tensors at the fullest op: what torch.cuda.max_memory_allocated would say, without workspaces."""
    needed: float
    """`peak`, workspaces, the slack of the allocator, and what is outside of torch."""
    by_category: dict[str, float]
    """Bytes at the fullest op: parameters, gradients, optimizer, activations."""
    at: str
    """The fullest op, with its module."""
    seconds: float
    """Time of the step as it is, if it fitted, at the speed of good kernels."""
    layers: int
    """Numbered layers; 0 where modules have no numbers."""
    batch: int | None
    """Leading size of the step's inputs; None where they have none in common."""
    remedies: tuple[Remedy, ...]
    """The least time first; empty where the step fits, or where nothing that was tried makes it fit."""

    @property
    def fits(self) -> bool:
        """Whether the step fits as it is."""
        return self.needed <= self.capacity

    def __repr__(self) -> str:
        verdict = "fits" if self.fits else f"does not fit: {self.remedies[0]}" if self.remedies else "does not fit"
        need = f"{quantity(self.needed, 'B')} of {quantity(self.capacity, 'B')}"
        return headline(f"FitPlan of {self.source} on {self.machine}: {need}, {verdict}")


def fit_step(trace: Trace, estimate: Estimate, cluster: Cluster, *, source: str = "") -> FitPlan:
    """The memory of a traced training step on each GPU of `cluster`, and the remedies where it does not fit.

    `estimate` is that of the same trace on the machine of the cluster: its ops are in the same order.
    """
    capacity = cluster.machine.memory_bytes
    if capacity is None:
        raise UsageError(f"{cluster.machine.name} has no memory size in the catalogue to plan with.")
    step = _Step(trace, estimate, cluster)
    as_is = step.peak(_AS_IS)
    place = step.fullest
    op = trace.ops[place]
    plan = FitPlan(
        source=source,
        machine=cluster.machine.name,
        capacity=capacity,
        peak=as_is,
        needed=step.needed(as_is),
        by_category=step.categories_at(place),
        at=f"{op.name} of {op.module}" if op.module else op.name,
        seconds=step.seconds,
        layers=step.layers,
        batch=step.batch,
        remedies=(),
    )
    return plan if plan.fits else replace(plan, remedies=tuple(_remedies(step, capacity)))


@dataclass(frozen=True, slots=True)
class _Choice:
    pieces: int
    states: States
    sharding: Sharding
    recomputed: int = 0
    fused: bool = False
    chunks: int = 1


_AS_IS = _Choice(1, "as they are", "none")


def _remedies(step: _Step, capacity: float) -> Iterable[Remedy]:
    """Remedies with the fewest layers to recompute, without those that another one beats in both time and changes."""
    pieces = [1]
    while step.batch is not None and step.batch % (2 * pieces[-1]) == 0 and pieces[-1] < MOST_PIECES:
        pieces.append(2 * pieces[-1])
    shardings: tuple[Sharding, ...] = ("none", "zero1", "zero2", "zero3") if step.gpus > 1 else ("none",)
    states: tuple[States, ...] = ("as they are", "8-bit", "on the host")
    choices = list(itertools.starmap(_Choice, itertools.product(pieces, states, shardings)))
    if step.has_unfused_adam:
        choices += [replace(choice, fused=True) for choice in choices if choice.states == "as they are"]
    if step.scores:
        choices += [replace(choice, chunks=LOSS_CHUNKS) for choice in choices]
    found = []
    for choice in choices:
        low, high = -1, step.layers  # `high` fits, `low` does not
        if step.needed(step.peak(replace(choice, recomputed=high))) > capacity:
            continue
        while high - low > 1:
            middle = (low + high) // 2
            fits = step.needed(step.peak(replace(choice, recomputed=middle))) <= capacity
            low, high = (low, middle) if fits else (middle, high)
        best = replace(choice, recomputed=high)
        peak = step.peak(best)
        found.append(
            Remedy(
                recomputed_layers=high,
                pieces=choice.pieces,
                states=choice.states,
                sharding=choice.sharding,
                fused=choice.fused,
                loss_chunks=choice.chunks,
                peak=peak,
                bytes=step.needed(peak),
                added_seconds=step.added_seconds(best),
            )
        )
    enough = [remedy for remedy in found if not any(remedy.contains(other) for other in found)]
    enough.sort(key=lambda remedy: (remedy.added_seconds, remedy.changes))
    shown: list[Remedy] = []
    for remedy in enough:
        # a slower one is of interest if it changes less, or keeps the numbers
        if not any(other.changes <= remedy.changes and other.exact >= remedy.exact for other in shown):
            shown.append(remedy)
    return shown[:MOST_REMEDIES]


@dataclass(frozen=True, slots=True)
class _Span:
    """A storage in memory from `born` to `died`, both included."""

    bytes: float
    born: int
    died: int
    category: Category
    layer: int | None = None
    """The layer whose forward pass made it, if the backward pass of this layer alone uses it later."""
    narrow: float = 1.0
    """What is left of an optimizer state in 8 bits."""
    is_score: bool = False
    """Whether it has logits, their logarithms or their gradients, which a loss in chunks has in parts; of a gradient,
    whether it is made of these."""
    is_late: bool = False
    """Whether it is made after the backward pass, where gradients are clipped and the optimizer runs."""
    is_temporary: bool = False
    """Whether the optimizer makes and drops it."""


class _Step:
    """The spans of a step, and what changes do to them."""

    def __init__(self, trace: Trace, estimate: Estimate, cluster: Cluster) -> None:
        if len(trace.ops) != len(estimate.ops) or not trace.ops:
            raise UsageError("The step has no ops to plan with.")
        self.trace, self.cluster, self.gpus = trace, cluster, cluster.gpus
        self.ops = estimate.ops
        self.seconds = sum(map(_seconds, estimate.ops))
        backward = [place for place, op in enumerate(trace.ops) if op.phase == "backward"]
        if not backward:
            raise UsageError("The step has no backward pass. Give a case whose function runs a whole training step.")
        self.first_backward, self.last_backward = backward[0], backward[-1]
        self._number_layers()
        self.last = len(self.ops) - 1
        self.scores = self._scores()
        self.spans = self._spans()
        self.after_scores = 1 + max(
            (span.died for span in self.spans if span.is_score and span.died < self.last), default=0
        )
        self.score_seconds = sum(
            _seconds(estimated)
            for op, estimated in zip(trace.ops[: self.first_backward], self.ops, strict=False)
            if any(tensor.storage in self.scores for tensor in op.written)
        )
        packets = {op.packet for op in trace.ops if op.phase == "optimizer"}
        self.has_unfused_adam = packets >= ADAMS_OPS and any(span.is_temporary for span in self.spans)
        self.batch = self._batch_size()
        self.fullest = 0

    def _number_layers(self) -> None:
        """The layer of each op, and the ops at which its forward pass ends and its backward pass begins."""
        try:
            prefix: str | None = layer_list(self.ops)
        except UsageError:
            prefix = None
        numbers = [None if prefix is None else layer_number(op.module, prefix) for op in self.ops]
        order = {name: place for place, name in enumerate(dict.fromkeys(name for name in numbers if name is not None))}
        self.layer_of = [None if name is None else order[name] for name in numbers]
        self.layers = len(order)
        self.forward_end = [-1] * self.layers
        self.backward_start = [len(self.ops)] * self.layers
        for place, layer in enumerate(self.layer_of):
            if layer is None:
                continue
            if place < self.first_backward:
                self.forward_end[layer] = place
            else:
                self.backward_start[layer] = min(self.backward_start[layer], place)
        self.forward_seconds = [0.0] * self.layers
        for place, layer in enumerate(self.layer_of):
            if layer is not None and place < self.first_backward:
                self.forward_seconds[layer] += _seconds(self.ops[place])

    def _scores(self) -> set[int]:
        """The storages with a value for each row and class of a loss of classes."""
        shapes = {op.inputs[0].shape for op in self.trace.ops if op.packet == "aten._log_softmax" and op.inputs}
        sizes = {(math.prod(shape), shape[-1]) for shape in shapes if shape}
        return {
            tensor.storage
            for op in self.trace.ops
            for tensor in (*op.inputs, *op.written)
            if tensor.shape and (math.prod(tensor.shape), tensor.shape[-1]) in sizes
        }

    def _spans(self) -> list[_Span]:
        last = len(self.ops) - 1
        first_use: dict[int, int] = {}
        last_use: dict[int, int] = {}
        leaves_layer: set[int] = set()
        item_bytes: dict[int, float] = {}
        made_by: dict[int, int | None] = {}
        for place, op in enumerate(self.trace.ops):
            layer = self.layer_of[place]
            for tensor in (*op.inputs, *op.written):
                number = tensor.storage
                if number not in first_use:
                    first_use[number], made_by[number] = place, layer
                    item_bytes[number] = tensor.item_bytes
                elif made_by[number] != layer and (place < self.first_backward or layer is not None):
                    leaves_layer.add(number)
                last_use[number] = place
        spans = []
        for number, storage in self.trace.storages.items():
            if number not in first_use:
                if storage.kind in ("parameter", "buffer"):
                    spans.append(_Span(storage.bytes, 0, last, "parameters"))
                continue
            born, died = first_use[number], last_use[number]
            phase = self.trace.ops[born].phase
            if storage.kind in ("parameter", "buffer"):
                spans.append(_Span(storage.bytes, 0, last, "parameters"))
            elif number in self.trace.results and phase == "backward":
                of_scores = any(tensor.storage in self.scores for tensor in self.trace.ops[born].inputs)
                spans.append(_Span(storage.bytes, born, last, "gradients", is_score=of_scores))
            elif phase == "optimizer" and (storage.kind != "intermediate" or number in self.trace.results):
                # states of the first step are there from the start in all others
                narrow = EIGHT_BIT_STATE / item_bytes[number] if storage.bytes > 4096 else 1.0
                spans.append(_Span(storage.bytes, 0, last, "optimizer", narrow=min(1.0, narrow)))
            elif storage.kind != "intermediate":
                spans.append(_Span(storage.bytes, 0, last, "activations"))
            else:
                own = made_by[number]
                saved = own is not None and born < self.first_backward <= died and number not in leaves_layer
                layer = own if saved else None
                spans.append(
                    _Span(
                        storage.bytes,
                        born,
                        died,
                        "activations",
                        layer,
                        is_score=number in self.scores,
                        is_late=born > self.last_backward,
                        is_temporary=phase == "optimizer",
                    )
                )
        return spans

    def _batch_size(self) -> int | None:
        """The leading size that the inputs of the step have in common."""
        sizes: set[int] = set()
        seen: set[int] = set()
        for op in self.trace.ops[: self.first_backward]:
            for tensor in op.inputs:
                if self.trace.storages[tensor.storage].kind == "input" and tensor.storage not in seen and tensor.shape:
                    seen.add(tensor.storage)
                    if len(tensor.shape) > 1:
                        sizes.add(tensor.shape[0])
        return sizes.pop() if len(sizes) == 1 else None

    def peak(self, choice: _Choice) -> float:
        """Bytes of tensors at the fullest op after the changes; notes that op."""
        changes = [0.0] * (len(self.ops) + 1)
        share = 1 / self.gpus
        for span in self.spans:
            size, born, died = span.bytes, span.born, span.died
            if span.category == "optimizer":
                size *= {"as they are": 1.0, "8-bit": span.narrow, "on the host": 0.0}[choice.states]
                size *= share if choice.sharding != "none" else 1.0
            elif span.category == "gradients":
                of_parts = choice.chunks > 1 and span.is_score
                if choice.pieces > 1 or of_parts:  # they wait for those of the next part, which are added as they come
                    changes[born] += size
                    changes[born + 1] -= size
                    if of_parts:  # the sum of those of two chunks is a third tensor
                        after = min(self.after_scores, self.last)
                        changes[after] += 2 * size
                        changes[after + 1] -= 2 * size
                    born = 0
                size *= share if choice.sharding in ("zero2", "zero3") else 1.0
            elif span.category == "parameters":
                size *= share if choice.sharding == "zero3" else 1.0
            elif span.is_late:
                size *= 0.0 if choice.fused and span.is_temporary else share if choice.sharding != "none" else 1.0
            else:
                size /= choice.pieces * (choice.chunks if span.is_score else 1)
                if span.layer is not None and span.layer < choice.recomputed:
                    changes[born] += size
                    changes[self.forward_end[span.layer] + 1] -= size
                    born = max(self.backward_start[span.layer], self.forward_end[span.layer] + 1)
                    if born > died:
                        continue
            changes[born] += size
            changes[died + 1] -= size
        levels = list(itertools.accumulate(changes[:-1]))
        self.fullest = max(range(len(levels)), key=levels.__getitem__)
        gathered = 0.0
        if choice.sharding == "zero3":  # two layers at a time are whole
            weights = sum(span.bytes for span in self.spans if span.category == "parameters")
            gathered = 2 * weights / max(2, self.layers)
        return levels[self.fullest] + gathered

    def categories_at(self, place: int) -> dict[str, float]:
        """Bytes by use during one op of the step as it is."""
        sums = {"parameters": 0.0, "gradients": 0.0, "optimizer": 0.0, "activations": 0.0}
        for span in self.spans:
            if span.born <= place <= span.died:
                sums[span.category] += span.bytes
        return sums

    def needed(self, peak: float) -> float:
        """What a GPU needs for such a peak of tensors."""
        states = sum(span.bytes for span in self.spans if span.category in ("parameters", "optimizer"))
        slack = SLACK * max(0.0, peak - states)
        return peak + WORKSPACE + slack + CONTEXT + (COMMUNICATORS if self.gpus > 1 else 0.0)

    def added_seconds(self, choice: _Choice) -> float:
        """Time that the changes add to a step."""
        machine = self.cluster.machine
        efficiency = load_efficiency().values
        ceilings = machine.theoretical or machine.achievable
        if ceilings is None:
            raise UsageError(f"{machine.name} has no figures to plan with. Name a machine of the catalogue.")
        bandwidth = efficiency.memory * ceilings.bandwidth
        total = {
            category: sum(span.bytes for span in self.spans if span.category == category)
            for category in ("parameters", "gradients", "optimizer")
        }
        added = sum(self.forward_seconds[: choice.recomputed])
        if choice.chunks > 1:
            added += self.score_seconds
        # each further microbatch reads the weights forward and twice backward, and adds to the gradients
        again = 3 * total["parameters"] + 2 * total["gradients"]
        added += (choice.pieces - 1) * again / bandwidth
        share = 1 / self.gpus if choice.sharding != "none" else 1.0
        if choice.fused:  # each is written and read once
            added -= 2 * share * sum(span.bytes for span in self.spans if span.is_temporary) / bandwidth
        if choice.states == "8-bit":
            narrow = sum(span.bytes * span.narrow for span in self.spans if span.category == "optimizer")
            added -= 2 * share * (total["optimizer"] - narrow) / bandwidth
        if choice.states == "on the host":
            if machine.pcie is None:
                raise UsageError(f"{machine.name}: the bandwidth to its host is not known.")
            added += 2 * share * total["optimizer"] / (OFFLOAD_SHARE * machine.pcie.bandwidth)
        if choice.sharding != "none":
            # 1/n of the optimizer's work each; its traffic is two passes over states, and weights and gradients
            added -= (1 - share) * (2 * total["optimizer"] + 3 * total["gradients"]) / bandwidth
        if choice.sharding == "zero3":
            gather = collective_seconds("all_gather", total["parameters"], self.gpus, self.cluster).seconds
            both = choice.pieces * 2 * gather
            added += both - hidden_behind(both, efficiency.sharded_hidden * self.seconds)
        return added


def _seconds(op: EstimatedOp) -> float:
    return op.seconds if op.expected_seconds is None else max(op.seconds, op.expected_seconds)
