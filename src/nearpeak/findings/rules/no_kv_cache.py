"""A text that grows by one token is processed as a whole for every token."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from nearpeak.bound.tiles import FACTORS
from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.loops import Loop
from nearpeak.findings.step import Step
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor
from nearpeak.units import seconds

_LAYERS = ("aten._transformer_encoder_layer_fwd", "aten._native_multi_head_attention")
"""Operators of torch's with attention inside."""
_SOFTMAX = ("aten._softmax", "aten._safe_softmax", "aten.softmax", "aten.exp")

Shapes = Mapping[str, tuple[int, ...]]


class _Attention(NamedTuple):
    """An attention of a text with itself."""

    op: int
    length: int
    masked: bool


class _Pass(NamedTuple):
    """A run of the model for one more token: its ops, with the shapes of their arguments one token before."""

    members: Sequence[int]
    before: Mapping[int, Shapes]
    steps: int
    """How many tokens before."""


@rule("no-kv-cache", needs=["storages"])
def no_kv_cache(step: Step) -> Iterator[Waste]:
    """Inference with masked attention of as many queries as keys, one more with each step or turn of a loop."""
    if step.trains:
        return
    whole_step = _Pass(range(len(step.ops)), step.trace.shapes_before, step.trace.steps_since)
    for passes in ([whole_step], *(_turns(step, loop) for loop in step.loops)):
        waste = _waste(step, passes)
        if waste is not None:
            yield waste
            return


def _turns(step: Step, loop: Loop) -> list[_Pass]:
    """The turns of a loop but the first of each run, with the shapes of the turn before."""
    passes = []
    for run in loop.runs:
        for last, turn in pairwise(run):
            earlier = {key: index for index, key in _numbered(step, last)}
            before: dict[int, Shapes] = {}
            for index, key in _numbered(step, turn):
                if key in earlier:
                    then, now = step.ops[earlier[key]].arguments, step.ops[index].arguments
                    shapes = {
                        name: then[name].shape
                        for name, value in now.items()
                        if isinstance(value, Tensor)
                        and isinstance(then.get(name), Tensor)
                        and then[name].shape != value.shape
                        and len(then[name].shape) == len(value.shape)
                    }
                    if shapes:
                        before[index] = shapes
            passes.append(_Pass(turn, before, 1))
    return passes


def _numbered(step: Step, turn: Sequence[int]) -> Iterator[tuple[int, Hashable]]:
    """The ops of a turn, each with its name, line and number among those of the same name and line."""
    counts: Counter[Hashable] = Counter()
    for index in turn:
        key = (step.ops[index].name, step.ops[index].source)
        counts[key] += 1
        yield index, (key, counts[key])


def _waste(step: Step, passes: Sequence[_Pass]) -> Waste | None:
    left: dict[int, float] = {}
    attentions: list[_Attention] = []
    for each in passes:
        seen = [item for index in each.members if (item := _attention(step, each, index)) is not None]
        lengths = {item.length for item in seen}
        if len(lengths) != 1 or not all(item.masked for item in seen):
            return None
        attentions += seen
        for index in each.before:
            share = _share_of_one_token(step, each, index, *lengths)
            if share is not None:
                left[index] = min(share, 1.0) * step.time(index)
    took = step.seconds(left)
    remaining = max(sum(left.values()), _launching(step, len(left)))
    if not left or took <= remaining:
        return None
    scale = (took - remaining) / (took - sum(left.values()))
    first, last = attentions[0], attentions[-1]
    loop = len(passes) > 1
    return Waste(
        title=f"Each {'turn' if loop else 'step'} runs the whole text through the model, where one new token would do: "
        "there is no KV cache.",
        op=first.op,
        replaces=True,
        gains={index: scale * (step.time(index) - seconds_left) for index, seconds_left in left.items()},
        evidence=f"{len(attentions)} causal attention{'s' * (len(attentions) > 1)} of {first.length} queries with "
        f"{first.length} keys"
        + (f", up to {last.length} in the last of {len(passes)} turns: one" if loop else ", one")
        + f" more of each than in the {'turn' if loop else 'step'} before; {len(left)} ops that grow with the text "
        f"took {seconds(took)}.",
        reasoning="For one token with the keys and values of the others kept, these ops take "
        f"{seconds(remaining)}: products read their weights once more, attention reads the cache.",
        remedy="Keep keys and values of each layer, and give the model the new token alone "
        "(transformers: model.generate(..., use_cache=True), or past_key_values from the call before).",
    )


def _attention(step: Step, each: _Pass, index: int) -> _Attention | None:
    """The attention that an op is, with length 0 where it has not as many queries as keys, one more with each step."""
    op, before = step.ops[index], each.before.get(index, {})
    if op.packet in _LAYERS:
        name = "src" if "src" in op.arguments else "query"
        if len(op.tensor(name).shape) < 2:  # a nested tensor: rows of different lengths
            return _Attention(index, 0, False)
        length = op.tensor(name).shape[-2]
        grew = _grew(op, name, before, -2, each.steps)
        return _Attention(index, length if grew else 0, any(_is_square(mask, length) for mask in op.tensors("mask")))
    if step.costs[index].family == "attention":
        query, key = op.arguments.get("query"), op.arguments.get("key")
        if not isinstance(query, Tensor) or not isinstance(key, Tensor):
            return _Attention(index, 0, False)
        length = query.shape[-2]
        grew = all(_grew(op, name, before, -2, each.steps) for name in ("query", "key"))
        masks = op.tensors("attn_mask", "attn_bias")
        masked = op.arguments.get("is_causal") is True or any(_is_square(mask, length) for mask in masks)
        return _Attention(index, length if grew and key.shape[-2] == length > each.steps else 0, masked)
    if op.packet in _SOFTMAX and op.inputs and len(op.inputs[0].shape) >= 3:
        scores = op.inputs[0]
        name = next(name for name, value in op.arguments.items() if value is scores)
        product = _product_before(step, index)
        if product is None:
            return None
        length = scores.shape[-1]
        grew = all(_grew(op, name, before, place, each.steps) for place in (-1, -2))
        masked = _is_masked(step, index, product, length)
        return _Attention(index, length if grew and scores.shape[-2] == length else 0, masked)
    return None


def _grew(op: Op, name: str, before: Shapes, place: int, steps: int) -> bool:
    then, now = before.get(name), op.tensor(name).shape
    return then is not None and len(then) == len(now) and now[place] - then[place] == steps and now[:-2] == then[:-2]


def _is_square(mask: Tensor, length: int) -> bool:
    return mask.shape[-2:] == (length, length)


def _product_before(step: Step, softmax: int) -> int | None:
    """The batched product whose result, after pointwise ops, a softmax reads."""
    index, seen = softmax, 0
    while seen < _MAX_BETWEEN:
        seen += 1
        writers = step.flow.producers[index]
        sized = [
            writer
            for tensor in step.ops[index].inputs
            if (writer := writers.get(tensor.storage)) is not None
            and any(out.elements == step.ops[softmax].inputs[0].elements for out in step.ops[writer].written)
        ]
        if not sized:
            return None
        index = max(sized)
        if step.costs[index].family == "matrix":
            return index if "bmm" in step.ops[index].packet else None
        if step.costs[index].family not in ("pointwise", "movement", "creation"):
            return None
    return None


def _is_masked(step: Step, softmax: int, product: int, length: int) -> bool:
    """Whether an op between a product and a softmax reads a square mask that is smaller than the scores."""
    scores = step.ops[softmax].inputs[0]
    return any(
        (_is_square(tensor, length) and _distinct_elements(tensor) < scores.elements) or op.packet in _TRIANGLES
        for op in step.ops[product + 1 : softmax + 1]
        for tensor in op.inputs
    )


_TRIANGLES = ("aten.tril", "aten.triu", "aten.tril_", "aten.triu_")
_MAX_BETWEEN = 8
"""Ops between the product and the softmax: scaling, masking, a cast."""


def _distinct_elements(tensor: Tensor) -> int:
    return math.prod(size for size, stride in zip(tensor.shape, tensor.strides, strict=True) if stride)


def _share_of_one_token(step: Step, each: _Pass, index: int, length: int) -> float | None:
    """The share of an op's time that remains for one token; None if the op does not grow with the text."""
    op, before, steps = step.ops[index], each.before[index], each.steps
    per_token = {
        now: (now - was) // steps
        for name, shape in before.items()
        for now, was in zip(op.tensor(name).shape, shape, strict=True)
        if now != was and now * steps == (now - was) * length
    }
    if not per_token or step.costs[index].family == "view":
        return None
    whole, single = step.expected(op), step.expected(_shrunk(op, tuple(before), per_token, length))
    if not whole or single is None:
        return 1.0 / length if step.costs[index].model == "none" else None
    return single / whole


_KEYS = {
    **{name: (factors[1],) for name, factors in FACTORS.items() if "bmm" in name or "matmul" in name},
    "attention": ("key", "value"),
}
"""Arguments with keys or values, which stay whole."""


def _shrunk(op: Op, names: Collection[str], per_token: Mapping[int, int], length: int) -> Op:
    """The op for one token: a query with all keys."""
    whole = _KEYS["attention"] if "query" in op.arguments and "key" in op.arguments else _KEYS.get(op.packet, ())
    arguments: dict[str, Any] = dict(op.arguments)
    for name in names:
        if name not in whole:
            arguments[name] = _smaller(op.tensor(name), per_token, length)
    outputs = tuple(_smaller(tensor, per_token, length) for tensor in op.outputs)
    return dataclasses.replace(op, arguments=arguments, outputs=outputs)


def _smaller(tensor: Tensor, per_token: Mapping[int, int], length: int) -> Tensor:
    shape = tuple(per_token.get(size, size) for size in tensor.shape)
    if tensor.shape[-2:] == (length, length):  # scores: of one query with all keys
        shape = (*shape[:-1], length)
    strides = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
    return dataclasses.replace(tensor, shape=shape, strides=strides, offset=0)


def _launching(step: Step, ops: int) -> float:
    """The time of the host to launch so many ops, which limits short ops of one token."""
    if step.machine.achievable is None:
        return 0.0
    launch = step.machine.achievable.launch
    return ops * (launch.enqueue or launch.host_call or 0.0)
