"""Convolutions run on channels-first images, which their kernels convert to channels-last and back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from nearpeak.findings.convolutions import is_conversion
from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step, shape_text
from nearpeak.ops.cost import Access
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor
from nearpeak.units import percent, seconds

_BLOCK = 8
"""Channels of an image that a kernel reads at once; with fewer, cuDNN pads images of either layout."""
_LEAST_WIDTH = 16
"""Channels from which a CPU's kernels keep images in blocks of channels, into which they convert each image."""
_NORMED, _POOLED = 1.8, 1.4
"""The time of a batch norm that is trained, and of poolings and other norms, of channels-last images on a CPU, over
that of copying as many bytes. On a Xeon: 1.8 to 1.9, and 1.1 to 1.7; poolings of channels-first images take 5 to 9."""
_LAST_ON_GPU = {
    "norm": 5.3,
    "norm_given": 1.75,
    "norm_backward": 4.3,
    "max_pool": 2.95,
    "max_pool_backward": 5.3,
}
"""The time of torch's own kernels for channels-last images on a GPU, over that of copying as many. On an H200, 33 to
134 MB in bfloat16: batch norms that are trained 5.1 to 5.7, with given statistics 1.75, backward 4.1 to 4.9; maxima 2.7
to 3.0, backward 4.9 to 6.2. Channels-first ones take 5 to 10, 2.9, 6 to 16; 3.3, and 11."""
_MAX_HOPS = 6
"""Pointwise ops between a convolution and the op that decides about its layout."""


@rule("channels-first")
def channels_first(step: Step) -> Iterator[Waste]:
    """All channels-first convolutions with the norms and poolings between them; one waste, since a model has one
    layout."""
    convolutions = [index for index, op in enumerate(step.ops) if _is_channels_first(step, index, op)]
    seen_s: dict[int, float] = {}
    for kernel in step.profile.timeline:
        if kernel.op is not None and is_conversion(kernel.name):
            seen_s[kernel.op] = seen_s.get(kernel.op, 0.0) + kernel.seconds
    conversions = {index: _conversion_seconds(step, index, seen_s.get(index, 0.0)) for index in convolutions}
    if not sum(conversions.values()):  # then the kernels want the images as they are
        return
    changes = dict(conversions)
    for index, op in enumerate(step.ops):
        if _follows_layout(step, index, op):
            changes[index] = _layout_gain(step, index)
    gained = sum(gain for gain in changes.values() if gain > 0.0)
    net = gained + sum(gain for gain in changes.values() if gain < 0.0) - _first_conversion_seconds(step, convolutions)
    if net <= 0.0:
        return
    gains = {index: gain * net / gained for index, gain in changes.items() if gain > 0.0}
    largest = max(gains, key=lambda index: (index in conversions, bool(step.ops[index].source), gains[index]))
    converting = sum(conversions.values())
    seen = "were seen to take" if step.machine.kind == "gpu" else "are expected to take"
    others = len(gains.keys() - conversions.keys())
    images = max((_images(step.ops[index]) for index in convolutions), key=lambda tensor: tensor.bytes)
    yield Waste(
        title="Convolutions run on channels-first images, which are converted for each of them.",
        op=largest,
        gains=gains,
        evidence=f"{len(convolutions)} convolutions of channels-first images, the largest of "
        f"{shape_text(images.shape)}, take {seconds(step.seconds(convolutions))}; conversions between layouts inside "
        f"of them {seen} {seconds(converting)}, {percent(converting / step.seconds(convolutions), 0)}.",
        reasoning="Channels-last images need no conversions."
        + (f" {others} norms and poolings take less time in that layout too." if others else "")
        + " The first image is converted once.",
        remedy=_remedy(_images(step.ops[convolutions[0]])),
    )


def _images(op: Op) -> Tensor:
    """What a convolution reads."""
    return op.tensor("input" if "input" in op.arguments else "self")


def _results(op: Op) -> Tensor:
    """What a convolution writes, or the gradient of it."""
    return op.tensor("grad_output") if "grad_output" in op.arguments else op.outputs[0]


def _has_channels_inside(tensor: Tensor) -> bool:
    """Whether images have several channels and places, and places lie side by side in memory."""
    return (
        len(tensor.shape) in (4, 5)
        and tensor.shape[1] > 1
        and math.prod(tensor.shape[2:]) > 1
        and tensor.strides[1] != 1
    )


def _is_channels_first(step: Step, index: int, op: Op) -> bool:
    if step.costs[index].family != "convolution" or not step.time(index) or op.origin != "torch":
        return False
    if not isinstance(op.arguments.get("input", op.arguments.get("self")), Tensor) or not op.outputs:
        return False
    images, results = _images(op), _results(op)
    return _has_channels_inside(results) and (_has_channels_inside(images) or images.shape[1] == 1)


def _conversion_seconds(step: Step, index: int, seen_s: float) -> float:
    """The time of the conversions in a convolution that channels-last images do not need: on a GPU, of those seen."""
    op = step.ops[index]
    if step.machine.kind != "gpu":
        return _expected_conversion_seconds(step, index)
    images, results, weight = _images(op), _results(op), op.tensor("weight")
    stays_before, stays_after = _stays_channels_first(step, index)
    moved = images.bytes + results.bytes + weight.bytes
    staying = images.bytes * (stays_before or images.shape[1] < _BLOCK) + results.bytes * stays_after
    return min(seen_s * (1 - staying / moved), step.time(index)) if moved else 0.0


def _expected_conversion_seconds(step: Step, index: int) -> float:
    """The time that a CPU's convolution takes to copy images into blocks of channels, and results back.

    On a Xeon, copies of this kind take 0.9 to 1.1 of what channels-last images save. For the gradient of the weights,
    the images and the gradient of the results are copied, and for that of the images the latter again. Convolutions by
    channel, of few channels and with one tap read channels-first images as they are.
    """
    op = step.ops[index]
    images, results, weight = _images(op), _results(op), op.tensor("weight")
    if weight.shape[1] == 1 or math.prod(weight.shape[2:]) == 1:
        return 0.0
    copied = [images, results]
    if "grad_output" in op.arguments:
        for_images, for_weight = op.arguments.get("output_mask", (True, True))[:2]
        copied = [images, results] * for_images + [images, results] * for_weight
    total = 0.0
    for tensor in copied:
        if tensor.shape[1] >= _LEAST_WIDTH:
            total += _copy_seconds(step, tensor.bytes, "movement/permuted")
    return min(total, 0.9 * step.time(index))


def _copy_seconds(step: Step, size: float, kind: str) -> float:
    return step.expected_for_work([Access(storage=-1, bytes=size)], [Access(storage=-2, bytes=size)], kind=kind)


def _stays_channels_first(step: Step, index: int) -> tuple[bool, bool]:
    """Whether the images and the results of a convolution on a GPU are channels-first whatever the model's layout is:
    torch's group norm reads and writes channels-first images alone there."""
    return _reaches_group_norm(step, index, back=True), _reaches_group_norm(step, index, back=False)


def _reaches_group_norm(step: Step, index: int, *, back: bool) -> bool:
    phase = step.ops[index].phase
    near, seen = {index}, {index}
    for _ in range(_MAX_HOPS):
        following: set[int] = set()
        for member in near:
            following.update(step.flow.producers[member].values() if back else step.flow.consumers[member])
        following = {member for member in following if step.ops[member].phase == phase} - seen
        if any("group_norm" in step.ops[member].packet for member in following):
            return True
        near = {member for member in following if step.costs[member].family in ("pointwise", "movement")}
        seen |= near
    return False


def _follows_layout(step: Step, index: int, op: Op) -> bool:
    """Whether an op is a batch norm or a pooling of channels-first images."""
    if not step.time(index) or not (step.costs[index].family == "pooling" or "batch_norm" in op.packet):
        return False
    images = [tensor for tensor in op.inputs if len(tensor.shape) in (4, 5)]
    return bool(images) and all(map(_has_channels_inside, images))


def _layout_gain(step: Step, index: int) -> float:
    """What an op saves in the other layout; negative if it takes longer there."""
    if step.machine.kind != "gpu":
        cost, op = step.costs[index], step.ops[index]
        trained = op.arguments.get("training", op.arguments.get("train", "no_training" not in op.packet))
        times = _NORMED if "norm" in op.packet and trained else _POOLED
        return step.time(index) - times * step.expected_for_work(cost.reads, cost.writes, kind="movement")
    op = step.ops[index]
    times_on_gpu = _LAST_ON_GPU.get(_kernel_kind(op))
    if times_on_gpu is not None:
        images = max((tensor for tensor in op.inputs if len(tensor.shape) in (4, 5)), key=lambda tensor: tensor.bytes)
        copied = dataclasses.replace(images, storage=-1)
        copy = Op(name="aten.clone.default", arguments={"self": images, "memory_format": None}, outputs=(copied,))
        return step.time(index) - times_on_gpu * (step.expected(copy) or 0.0)
    now, then = step.expected(step.ops[index]), step.expected(_channels_last(step.ops[index]))
    return step.time(index) * (1 - then / now) if now and then is not None else 0.0


def _kernel_kind(op: Op) -> str:
    """The kind of a kernel of torch's own whose time in the other layout was measured; "" for others."""
    backward = "_backward" if op.packet.endswith("_backward") else ""
    if op.packet.startswith("aten.max_pool"):
        return "max_pool" + backward
    if "batch_norm" not in op.packet or op.packet.startswith(("aten.cudnn", "aten.miopen")):
        return ""
    trained = op.arguments.get("training", op.arguments.get("train", "no_training" not in op.packet))
    return "norm" + (backward or ("" if trained else "_given"))


def _channels_last(op: Op) -> Op:
    """The op on channels-last images."""
    return dataclasses.replace(
        op,
        arguments={name: _in_channels_last(value) for name, value in op.arguments.items()},
        outputs=tuple(_in_channels_last(tensor) for tensor in op.outputs),
    )


def _in_channels_last(value: Any) -> Any:
    if not isinstance(value, Tensor) or len(value.shape) not in (4, 5):
        return value
    strides, step_size = [0] * len(value.shape), 1
    for place in (1, *range(len(value.shape) - 1, 1, -1), 0):
        strides[place] = step_size
        step_size *= value.shape[place]
    return dataclasses.replace(value, strides=tuple(strides))


def _first_conversion_seconds(step: Step, convolutions: list[int]) -> float:
    """The time to convert what convolutions read from before the step, or from ops that have no channels."""
    first: dict[int, Tensor] = {}
    for index in convolutions:
        images = _images(step.ops[index])
        if step.ops[index].phase == "forward" and images.storage not in step.flow.producers[index]:
            first[images.storage] = images
    return sum(_copy_seconds(step, images.bytes, "movement/permuted") for images in first.values())


def _remedy(images: Tensor) -> str:
    layout = "torch.channels_last" if len(images.shape) == 4 else "torch.channels_last_3d"
    return (
        f"model = model.to(memory_format={layout})    # once, before the optimizer\n"
        f"images = images.to(memory_format={layout})  # each batch: {shape_text(images.shape)} stays its shape"
    )
