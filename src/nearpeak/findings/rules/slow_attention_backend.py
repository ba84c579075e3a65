"""Attention runs in a slower backend than torch has for the same call on this GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step, shape_text
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor
from nearpeak.units import seconds

_KERNELS = {"flash": "FlashAttention", "efficient": "memory-efficient", "cudnn": "cuDNN's"}
_WITH_CUDNN = ("hopper", "blackwell")
"""Architectures whose matrix engine cuDNN uses better; on earlier ones, FlashAttention is as fast."""
_WIDEST = 128
"""The largest head dimension that cuDNN supports forward and backward in every release."""
_LEAST_TOKENS = 128
"""Queries of a sequence. Decoding, with few queries, was not measured."""
_FASTER = 1.1
"""The least speedup."""
_TRIANGLES = ("aten.tril", "aten.triu", "aten.tril_", "aten.triu_")
_NOT_AFTER = ("le", "ge")
"""Comparisons of positions that give a causal mask."""
_OF_POSITIONS = frozenset(
    ("arange", "iota", "add", "expand", "unsqueeze", "view", "scalar", "tensor", "full", "where", "to", "copy", "")
)
"""Other parts of the name of a compiled kernel that computes a causal mask."""


@rule("slow-attention-backend")
def slow_attention_backend(step: Step) -> Iterator[Waste]:
    """Fused attention that does not run in cuDNN on a GPU where it is faster, or has a causal mask as a tensor."""
    if step.machine.kind != "gpu" or step.machine.architecture not in _WITH_CUDNN:
        return
    for members in _calls(step):
        op = step.ops[members[0]]
        backend, causal = _backend(op), _causal_mask(step, members[0])
        if backend is None or (backend == "cudnn" and not causal) or (_mask(op) and not causal) or not _fits(op):
            continue
        # Masks, and memory-efficient kernels for most head dimensions, were not measured: there is no ratio.
        by_ratio = backend == "flash" and not causal
        left = {index: _left(step, index, causal=causal, by_ratio=by_ratio) for index in members}
        gains = {index: step.time(index) - after for index, after in left.items() if after is not None}
        took = step.seconds(gains)
        if sum(gains.values()) <= took * (1 - 1 / _FASTER):
            continue
        query, key, mask = op.tensor("query"), op.tensor("key"), _mask(op)
        yield Waste(
            title="A causal mask is given to attention as a tensor, so that all scores are computed."
            if causal
            else f"Attention runs in the {_KERNELS[backend]} kernels; cuDNN's are faster on this GPU.",
            op=members[0],
            gains=gains,
            evidence=f"{op.packet} of {shape_text(query.shape)} queries and {key.shape[-2]} keys in "
            f"{query.dtype}{', with its backward,' if len(gains) > 1 else ''} takes {seconds(took)}"
            + (f", with a mask of {shape_text(mask.shape)} {mask.dtype}." if mask else "."),
            reasoning=f"{_better(op, causal=causal).packet} takes {seconds(took - sum(gains.values()))} for it: "
            + ("the measured time by the ratio of expected times." if by_ratio else "its expected time."),
            remedy=_remedy(causal),
        )


def _calls(step: Step) -> Iterator[list[int]]:
    """Each fused attention with its backward, connected by data flow; otherwise each alone."""
    joined: dict[int, list[int]] = {}
    for index, op in enumerate(step.ops):
        if _backend(op) is None:
            continue
        known = (
            [call for call in joined if call in step.flow.producers[index].values()] if "storages" in step.knows else []
        )
        if op.packet.endswith("_backward") and known:
            joined[known[-1]].append(index)
        else:
            joined[index] = [index]
    yield from joined.values()


def _left(step: Step, index: int, *, causal: bool, by_ratio: bool) -> float | None:
    """The remaining time of an op."""
    op, took = step.ops[index], step.time(index)
    now, then = step.expected(op), step.expected(_better(op, causal=causal))
    if not now or then is None:
        return None
    return took * then / now if by_ratio else min(took, then)


def _backend(op: Op) -> str | None:
    for name in _KERNELS:
        if op.packet in (
            f"aten._scaled_dot_product_{name}_attention",
            f"aten._scaled_dot_product_{name}_attention_backward",
        ):
            return name
    return None


def _mask(op: Op) -> Tensor | None:
    return next(iter(op.tensors("attn_bias", "attn_mask")), None)


def _fits(op: Op) -> bool:
    """Whether cuDNN supports the call in every release in which it can be selected."""
    query, key, value = op.tensor("query"), op.tensor("key"), op.tensor("value")
    widths = (query.shape[-1], value.shape[-1])
    return (
        query.dtype in ("bfloat16", "float16")
        and max(widths) <= _WIDEST
        and all(width % 8 == 0 for width in widths)
        and min(query.shape[-2], key.shape[-2]) >= _LEAST_TOKENS
        and not op.arguments.get("dropout_p")
        and all(tensor.strides[-1] == 1 for tensor in (query, key, value))
    )


def _causal_mask(step: Step, index: int) -> bool:
    """Whether the mask is causal and the same for the whole batch: as its values show, or since it was computed in this
    step from one triangle only."""
    op = step.ops[index]
    mask = _mask(op)
    if mask is not None and mask.storage in step.trace.causal_masks:
        return True
    if mask is None or "storages" not in step.knows or op.tensor("query").shape[-2] != op.tensor("key").shape[-2]:
        return False
    size = op.tensor("query").shape[-2]
    if mask.shape[-2:] != (size, size):
        return False
    maker = step.flow.producers[index].get(mask.storage)
    for_all = maker is not None and _compiled_triangle(step, maker)  # it reads nothing that depends on the batch
    if mask.bytes > size * size * mask.item_bytes and not for_all:
        return False
    triangles, seen, waiting = 0, set(), [(index, mask.storage)]
    while waiting:
        reader, storage = waiting.pop()
        producer = step.flow.producers[reader].get(storage)
        if producer is None:
            return False  # from before the step: its values are not known
        if producer == reader or producer in seen:
            continue
        seen.add(producer)
        maker_op = step.ops[producer]
        if _compiled_triangle(step, producer):
            triangles += 1
            continue
        if step.costs[producer].family not in ("pointwise", "movement", "creation"):
            return False
        if maker_op.packet in _TRIANGLES:
            triangles += 1
            if maker_op.arguments.get("diagonal", 0) != (1 if "triu" in maker_op.packet else 0):
                return False
        waiting.extend((producer, read) for read in step.flow.read_by[producer])
    return triangles == 1  # two make a window


def _compiled_triangle(step: Step, index: int) -> bool:
    """Whether a compiled kernel without inputs compares positions once; its name lists its operators."""
    op = step.ops[index]
    _, pointwise, name = op.name.partition("triton_poi_fused_")
    if (
        op.origin != "inductor"
        or not pointwise
        or not set(step.flow.read_by[index]) <= set(step.flow.written_by[index])
    ):
        return False
    words = [word for word in name.split("_") if not word.isdigit()]
    compared = [word for word in words if word in _NOT_AFTER]
    return "arange" in words and len(compared) == 1 and _OF_POSITIONS.issuperset(set(words) - set(compared))


def _better(op: Op, *, causal: bool) -> Op:
    """The same call in cuDNN's kernels, with is_causal in place of a causal mask."""
    backward = "_backward" if op.packet.endswith("_backward") else ""
    arguments = dict(op.arguments)
    if causal:
        arguments |= {"is_causal": True, "attn_bias": None, "attn_mask": None}
    name = f"aten._scaled_dot_product_cudnn_attention{backward}.default"
    return dataclasses.replace(op, name=name, arguments=arguments)


def _remedy(causal: bool) -> str:
    if causal:
        return "F.scaled_dot_product_attention(query, key, value, is_causal=True)  # in place of attn_mask=..."
    return (
        "from torch.nn.attention import SDPBackend, sdpa_kernel\n\n"
        "with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):\n"
        "    ...  # the attention, or the whole model"
    )
