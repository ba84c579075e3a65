"""A 1 x 1 convolution runs on an image that was enlarged before it: on the small image it does the same."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step, shape_text
from nearpeak.findings.what_if import seconds_by_size, share_left
from nearpeak.units import seconds

_CONVOLUTIONS = ("aten.convolution", "aten.conv1d", "aten.conv2d", "aten.conv3d")


@rule("enlarged-before-convolution", needs=["storages"])
def enlarged_before_convolution(step: Step) -> Iterator[Waste]:
    """Convolutions of single pixels that alone read an interpolated image. Interpolation mixes pixels of one channel,
    with weights that sum to 1, and the convolution mixes channels of one pixel: either may come first."""
    for index, op in enumerate(step.ops):
        if op.packet not in _CONVOLUTIONS or op.phase != "forward" or op.recomputed or not _is_of_pixels(step, index):
            continue
        images = op.tensor("input")
        enlarging = step.flow.producers[index].get(images.storage)
        if enlarging is None or not _enlarges(step, enlarging) or step.forward_readers(enlarging) != [index]:
            continue
        if images.storage in step.flow.results:
            continue
        small, channels = step.ops[enlarging].inputs[0], op.outputs[0].shape[1]
        times = images.elements / small.elements
        left = {index: 1 / times, enlarging: channels / images.shape[1]}
        left |= {i: left[forward] for forward in (index, enlarging) for i in _backward(step, forward)}
        changes = {i: seconds_by_size(step, i) * (1 - share) for i, share in left.items()}
        share = share_left(changes.values())
        if not share:
            continue
        gains = {i: change * share for i, change in changes.items() if change > 0.0}
        yield Waste(
            title=f"A convolution of single pixels runs on {times:.0f} times the pixels, after they were enlarged.",
            op=index,
            gains=gains,
            evidence=f"{step.ops[enlarging].packet} makes {shape_text(images.shape)} of {shape_text(small.shape)}, and "
            f"only {op.packet} with a 1 x 1 kernel reads it: {len(left)} ops take {seconds(step.seconds(left))}.",
            reasoning=f"Before they are enlarged, there are {times:.0f} times fewer pixels to convolve; the "
            f"interpolation is then one of {channels} channels in place of {images.shape[1]}.",
            remedy="y = interpolate(conv(x), scale_factor=...)  # in place of conv(interpolate(x, scale_factor=...))",
        )


def _is_of_pixels(step: Step, index: int) -> bool:
    """Whether a convolution reads one pixel for each that it writes."""
    op = step.ops[index]
    arguments = op.arguments
    return (
        all(size == 1 for size in op.tensor("weight").shape[2:])
        and not arguments.get("transposed", False)
        and op.outputs[0].shape[2:] == op.tensor("input").shape[2:]
        and not _any_above(arguments.get("padding", 0), 0)
    )


def _any_above(sizes: object, least: int) -> bool:
    return any(
        size > least for size in (sizes if isinstance(sizes, (tuple, list)) else (sizes,)) if isinstance(size, int)
    )


def _enlarges(step: Step, index: int) -> bool:
    op = step.ops[index]
    is_interpolation = "upsample_" in op.packet and "backward" not in op.packet
    return is_interpolation and op.outputs[0].elements > op.inputs[0].elements


def _backward(step: Step, forward: int) -> list[int]:
    """The ops of the backward pass that an op has, by its line and kind."""
    op, family = step.ops[forward], step.costs[forward].family
    kind = op.packet.rpartition(".")[2] + "_backward"
    sizes = {tensor.elements for tensor in (*op.inputs, *op.outputs)}
    return [
        index
        for index, other in enumerate(step.ops)
        if other.phase == "backward"
        and (other.source, other.module) == (op.source, op.module)
        and (kind in other.packet or (family == "convolution" and step.costs[index].family == family))
        and any(tensor.elements in sizes for tensor in other.inputs)
    ]
