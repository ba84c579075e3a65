"""A text that grows by one token per step is processed as a whole in every step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor
from nearpeak.units import seconds


@rule("no-kv-cache", needs=["storages"])
def no_kv_cache(step: Step) -> Iterator[Waste]:
    """Inference steps with causal attention of as many queries as keys, one more than in the step before."""
    if step.trains:
        return
    attention = [index for index, cost in enumerate(step.costs) if cost.family == "attention"]
    grown = [index for index in attention if _grew_by_one(step, index)]
    if not grown or len(grown) != len(attention):
        return
    length = step.ops[grown[0]].tensor("query").shape[-2]
    left = {}
    for index in step.trace.shapes_before:
        share = _share_of_one_token(step, index, length)
        if share is not None:
            left[index] = min(share, 1.0) * step.time(index)
    took = step.seconds(left)
    remaining = max(sum(left.values()), _launching(step, len(left)))
    if not left or took <= remaining:
        return
    scale = (took - remaining) / (took - sum(left.values()))
    yield Waste(
        title="Each step runs the whole text through the model, where one new token would do: there is no KV cache.",
        op=grown[0],
        gains={index: scale * (step.time(index) - seconds_left) for index, seconds_left in left.items()},
        evidence=f"{len(grown)} causal attention{'s' * (len(grown) > 1)} of {length} queries with {length} keys, one "
        f"more of each than in the step before; {len(left)} ops that grow with the text took {seconds(took)}.",
        reasoning=f"For one token with the keys and values of {length - 1} others kept, these ops take "
        f"{seconds(remaining)}: products read their weights once more, attention reads the cache.",
        remedy="Keep keys and values of each layer, and give the model the new token alone "
        "(transformers: model.generate(..., use_cache=True), or past_key_values from the call before).",
    )


def _grew_by_one(step: Step, index: int) -> bool:
    """Whether an attention is causal and has one more query and key with each step."""
    before, op = step.trace.shapes_before.get(index, {}), step.ops[index]
    query, key, steps = op.arguments.get("query"), op.arguments.get("key"), step.trace.steps_since
    if not isinstance(query, Tensor) or not isinstance(key, Tensor) or op.arguments.get("is_causal") is not True:
        return False
    was = before.get("query"), before.get("key")
    return (
        query.shape[-2] == key.shape[-2] > steps
        and was[0] == (*query.shape[:-2], query.shape[-2] - steps, query.shape[-1])
        and was[1] == (*key.shape[:-2], key.shape[-2] - steps, key.shape[-1])
    )


def _share_of_one_token(step: Step, index: int, length: int) -> float | None:
    """The share of an op's time that remains for one token; None if the op does not grow with the text."""
    op, before = step.ops[index], step.trace.shapes_before[index]
    steps = step.trace.steps_since
    per_token = {
        now: (now - was) // steps
        for name, shape in before.items()
        for now, was in zip(op.tensor(name).shape, shape, strict=True)
        if now != was and now * steps == (now - was) * length
    }
    if not per_token or step.costs[index].family == "view":
        return None
    names = ("query",) if step.costs[index].family == "attention" else tuple(before)
    whole, single = step.expected(op), step.expected(_shrunk(op, names, per_token))
    return single / whole if whole and single is not None else None


def _shrunk(op: Op, names: tuple[str, ...], per_token: Mapping[int, int]) -> Op:
    """The op for one token."""
    arguments: dict[str, Any] = dict(op.arguments)
    for name in names:
        arguments[name] = _smaller(op.tensor(name), per_token)
    outputs = tuple(_smaller(tensor, per_token) for tensor in op.outputs)
    return dataclasses.replace(op, arguments=arguments, outputs=outputs)


def _smaller(tensor: Tensor, per_token: Mapping[int, int]) -> Tensor:
    shape = tuple(per_token.get(size, size) for size in tensor.shape)
    strides = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
    return dataclasses.replace(tensor, shape=shape, strides=strides, offset=0)


def _launching(step: Step, ops: int) -> float:
    """The time of the host to launch so many ops, which limits short ops of one token."""
    if step.machine.achievable is None:
        return 0.0
    launch = step.machine.achievable.launch
    return ops * (launch.enqueue or launch.host_call or 0.0)
