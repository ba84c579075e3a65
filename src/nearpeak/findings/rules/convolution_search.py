"""cuDNN searches for the fastest algorithm of a convolution in the step, since its images have a new size."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.findings.convolutions import searched_convolutions
from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step, shape_text
from nearpeak.ops.tensor import Tensor
from nearpeak.units import seconds

_WAITS = ("synchronization", "allocator")


@rule("convolution-search")
def convolution_search(step: Step) -> Iterator[Waste]:
    """Convolutions that ran the kernels of many algorithms one after the other; one waste for all, by one setting."""
    searched = searched_convolutions(step)
    if not searched:
        return
    gains = {}
    for index in searched:
        expected = step.expected(step.ops[index])
        if expected is not None and expected < step.time(index):
            gains[index] = step.time(index) - expected
    places = {step.ops[index].place for index in searched}
    causes = tuple(cause for cause in step.profile.idle if cause.cause in _WAITS and cause.where in places)
    idle: dict[str, float] = {}
    for cause in causes:
        idle[cause.cause] = idle.get(cause.cause, 0.0) + cause.seconds
    largest = max(searched, key=lambda index: (bool(step.ops[index].source), step.time(index)))
    op = step.ops[largest]
    images = next(tensor for tensor in op.inputs if isinstance(tensor, Tensor))
    yield Waste(
        title="cuDNN searches for the fastest algorithms of convolutions again, since sizes change.",
        op=largest,
        source=step.line_that_writes("cudnn.benchmark"),
        gains=gains,
        gone=searched,
        idle=idle,
        causes=causes,
        evidence=f"{len(searched)} convolutions, the longest of {shape_text(images.shape)} at {op.place}, ran "
        f"{sum(step.measured[index].kernels for index in searched)} kernels of several algorithms in "
        f"{seconds(step.seconds(searched))}"
        + (f"; the device was idle for {seconds(sum(idle.values()))} meanwhile." if idle else "."),
        reasoning="One algorithm each remains, at the time of a good kernel. Each size is searched for once: a size "
        "that comes again costs nothing.",
        remedy="torch.backends.cudnn.benchmark = False  # where sizes always change; or\n"
        "pad images to a few sizes, multiples of 32 or 64, so that each is searched for once",
    )
