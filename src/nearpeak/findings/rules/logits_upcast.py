"""16-bit logits are cast to float32 for the loss: every pass over them then moves twice the bytes."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step, shape_text
from nearpeak.findings.what_if import with_dtype
from nearpeak.ops.op import Op
from nearpeak.units import quantity, seconds

_SHORT = ("bfloat16", "float16")
_FAMILIES = ("movement", "pointwise", "creation", "indexing")
"""Families between the cast and the softmax: shifts by a token, softcaps, and their backward."""
_LOSS_USAGE = "(logits, targets), or linear_cross_entropy(hidden, weight, targets), which has no logits at all"


@rule("logits-upcast", needs=["storages"], compiles=True)
def logits_upcast(step: Step) -> Iterator[Waste]:
    """Casts to float32 of a GEMM's result before a log-softmax and a loss, or of the log-softmax's result."""
    for softmax, op in enumerate(step.ops):
        if op.packet == "aten._log_softmax" and op.tensor("self").dtype in _SHORT:
            yield from _cast_after(step, softmax)
        if op.packet != "aten._log_softmax" or op.tensor("self").dtype != "float32":
            continue
        if not any(step.costs[reader].family == "loss" for reader in step.flow.consumers[softmax]):
            continue
        before = _before(step, softmax)
        if before is None:
            continue
        cast, between = before
        backward, cast_back = _backward(step, softmax)
        short = step.ops[cast].tensor("self").dtype
        casts = [cast, *cast_back]
        gains = {index: step.time(index) for index in casts}
        for index in (*between, softmax, *backward):
            gains[index] = step.time(index) * _saved(step, step.ops[index], short)
        logits = op.tensor("self")
        yield Waste(
            title="The logits are cast to float32 before the loss.",
            op=cast,
            gains=gains,
            evidence=f"{quantity(step.ops[cast].tensor('self').bytes, 'B')} of {short} logits, "
            f"{shape_text(logits.shape)}, become {quantity(logits.bytes, 'B')} of float32. "
            f"{len(casts)} casts take {seconds(step.seconds(casts))}, and {len(gains) - len(casts)} passes over "
            f"float32 {seconds(step.seconds(set(gains) - set(casts)))}.",
            reasoning=f"The casts go away, and every other pass takes what it took times a good kernel's time in "
            f"{short} over that in float32.",
            remedy=_remedy(short),
            fix=step.nearpeak_kernel("cross_entropy", _LOSS_USAGE),
        )


def _cast_after(step: Step, softmax: int) -> Iterator[Waste]:
    """Autocast computes the log-softmax in 16 bits and casts its result for the loss."""
    logits = step.ops[softmax].tensor("self")
    for cast in step.flow.consumers[softmax]:
        losses = [reader for reader in step.flow.consumers[cast] if step.costs[reader].family == "loss"]
        if not _casts(step.ops[cast], _SHORT, ("float32",)) or not losses:
            continue
        spread = [reader for reader in losses if _spreads(step, reader, logits.elements)]
        back = [
            reader
            for index in spread
            for reader in step.flow.consumers[index]
            if _casts(step.ops[reader], ("float32",), _SHORT)
        ]
        gains = {index: step.time(index) for index in (cast, *back)}
        for index in spread:
            gains[index] = step.time(index) * _saved(step, step.ops[index], logits.dtype)
        yield Waste(
            title="Log-probabilities are cast to float32 for the loss.",
            op=cast,
            gains=gains,
            evidence=f"{quantity(logits.bytes, 'B')} of {logits.dtype}, {shape_text(logits.shape)}, become "
            f"twice as many of float32. {1 + len(back)} casts take {seconds(step.seconds((cast, *back)))}.",
            reasoning=f"The casts go away, and the loss's backward pass writes {logits.dtype}.",
            remedy=_remedy(logits.dtype),
            fix=step.nearpeak_kernel("cross_entropy", _LOSS_USAGE),
        )


def _before(step: Step, softmax: int) -> tuple[int, list[int]] | None:
    """The cast of a GEMM's result that a log-softmax reads, and the ops between; None if there is none."""
    between: list[int] = []
    index, storage = softmax, step.ops[softmax].tensor("self").storage
    while (producer := step.flow.producers[index].get(storage)) is not None:
        op = step.ops[producer]
        if _casts(op, _SHORT, ("float32",)):
            return (producer, between) if _is_product(step, producer) else None
        if step.costs[producer].family not in _FAMILIES or producer == index:
            return None
        largest = max((tensor for tensor in op.inputs), key=lambda tensor: tensor.elements, default=None)
        if largest is None:
            return None
        between.append(producer)
        index, storage = producer, largest.storage
    return None


def _is_product(step: Step, cast: int) -> bool:
    """Whether the input of a cast comes from a GEMM, possibly through pointwise ops."""
    index = cast
    for _ in range(4):
        tensor = max(step.ops[index].inputs, key=lambda tensor: tensor.elements)
        producer = step.flow.producers[index].get(tensor.storage)
        if producer is None or producer == index:
            return False
        if step.costs[producer].family == "matrix":
            return True
        if step.costs[producer].family not in _FAMILIES:
            return False
        index = producer
    return False


def _backward(step: Step, softmax: int) -> tuple[list[int], list[int]]:
    """The backward passes over float32 tensors of this size, and the casts back to 16 bits after them."""
    output = step.ops[softmax].outputs[0].storage
    elements = step.ops[softmax].outputs[0].elements
    passes = [
        index for index in step.flow.consumers[softmax] if step.ops[index].phase == "backward" and index > softmax
    ]
    passes = [index for index in passes if any(tensor.elements >= elements for tensor in step.ops[index].outputs)]
    losses = {producer for index in passes for producer in step.flow.producers[index].values() if producer > softmax}
    passes += [index for index in sorted(losses - set(passes)) if _spreads(step, index, elements)]
    casts: list[int] = []
    waiting = [index for index in passes if output in step.flow.read_by[index]]
    while waiting:
        for reader in step.flow.consumers[waiting.pop()]:
            op = step.ops[reader]
            if reader in passes or reader in casts or op.phase != "backward":
                continue
            if _casts(op, ("float32",), _SHORT):
                casts.append(reader)
            elif step.costs[reader].family in _FAMILIES and any(
                tensor.elements >= elements and tensor.dtype == "float32" for tensor in op.written
            ):
                passes.append(reader)
                waiting.append(reader)
    return passes, casts


def _spreads(step: Step, index: int, elements: int) -> bool:
    """Whether it is the backward of a loss, which writes a gradient for every logit."""
    return step.costs[index].family == "loss" and any(tensor.elements >= elements for tensor in step.ops[index].outputs)


def _casts(op: Op, old: tuple[str, ...], new: tuple[str, ...]) -> bool:
    return (
        op.packet in ("aten._to_copy", "aten.copy_")
        and bool(op.written)
        and op.inputs[-1].dtype in old
        and op.written[0].dtype in new
    )


def _saved(step: Step, op: Op, short: str) -> float:
    """The share of its time that an op would save with 16 bits."""
    now, then = step.expected(op), step.expected(with_dtype(op, "float32", short))
    return max(0.0, 1.0 - then / now) if now and then is not None else 0.0


def _remedy(short: str) -> str:
    return (
        f"loss = F.cross_entropy(logits, targets)  # the {short} logits as they are; under autocast inside\n"
        "                                         # torch.autocast(logits.device.type, enabled=False)\n"
        "or, with float32 inside and nothing of it in memory: a fused linear cross-entropy, or\n"
        "loss_of = torch.compile(lambda logits, targets: F.cross_entropy(logits.float(), targets))"
    )
