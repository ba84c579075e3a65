"""zeros or empty, nan_to_num or zero_: what a needless fill costs.

A buffer that is about to be overwritten need not be filled. A fill writes every byte once, and a step that looks at
what it replaces, such as nan_to_num, reads them too. Neither stands out in a list of operations, since each takes
little; a model of 64 layers pays for it 64 times in each pass. Shown for the output of a mixture of experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nearpeak.gallery.parts import Part, Prediction, StackedBars, prediction_table, prose
from nearpeak.gallery.run import Context
from nearpeak.render.document import Table
from nearpeak.render.picture.bars import Bar
from nearpeak.units import percent, quantity, seconds

LAYERS = 64


def zeros_as(output: Tensor) -> Tensor:
    """New zeros, of a size and a place."""
    return torch.zeros(output.shape, dtype=output.dtype, device=output.device)


def example(context: Context) -> Iterator[Part]:
    """Bytes, seconds a call, and seconds a pass."""
    tokens, experts_of_a_token, width = context.pick(gpu=(8192, 8, 1536), cpu=(2048, 8, 384))
    dtype = context.pick(gpu=torch.bfloat16, cpu=torch.float32)
    rows = tokens * experts_of_a_token
    shape, size = (rows, width), rows * width * dtype.itemsize
    output = torch.zeros(shape, dtype=dtype, device=context.tensors)

    def empty() -> Tensor:
        return torch.empty(shape, dtype=dtype, device=context.tensors)

    yield from prose(
        f"{tokens} tokens with {experts_of_a_token} experts each are {rows} rows for the grouped product of a layer;"
        f" with {width} columns its output is {quantity(size, 'B')}. The product writes every row, so that the buffer"
        " it writes to may hold anything before. Three ways to prepare it, and one to clean it up afterwards:"
    )
    yield Table(
        title="Bytes of a call",
        headers=("", "reads", "writes"),
        rows=(
            ("torch.empty", *(quantity(0, "B"),) * 2),
            ("torch.zeros", quantity(0, "B"), quantity(size, "B")),
            ("zero_", quantity(0, "B"), quantity(size, "B")),
            ("nan_to_num_", *(quantity(size, "B"),) * 2),
        ),
    )
    zero_row = context.row("torch.zeros", zeros_as, output)
    fill_row = context.row("zero_", Tensor.zero_, output)
    # At the least nan_to_num_ writes what it changes; torch's kernel writes all, as where the result is elsewhere.
    both_ways = context.predict(torch.nan_to_num, output)
    clean_row = context.row("nan_to_num_", Tensor.nan_to_num_, output, predicted=both_ways)
    yield prediction_table(
        "A call",
        [zero_row, fill_row, clean_row],
        note="Predicted at what torch's fills, and its operations on one number each, reach on such a machine.",
    )
    nothing = context.measure(empty)
    if nothing is not None:
        yield from prose(f"torch.empty takes {seconds(nothing)}: it asks the allocator for memory, and writes nothing.")

    def of_pass(row: Prediction) -> float:
        return LAYERS * (row.measured or row.predicted or 0.0)

    how = "measured" if context.measures else "predicted"
    yield StackedBars(
        title=f"A pass through {LAYERS} layers",
        subtitle=f"one call for each layer, as {how} here",
        bars=tuple(Bar(name=row.what, pieces=(("seconds", of_pass(row)),)) for row in (zero_row, fill_row, clean_row)),
    )
    flops = 2 * rows * width * width
    ceilings = context.machine.achievable or context.machine.theoretical
    assert ceilings is not None
    product = LAYERS * flops / ceilings.peak(str(dtype))
    yield from prose(
        f"In a model of {LAYERS} layers torch.zeros in place of torch.empty costs {seconds(of_pass(zero_row))} a pass,"
        f" and nan_to_num_ in place of nothing {seconds(of_pass(clean_row))}. The grouped products that fill the"
        f" buffers, with matrices of {width} x {width}, take {seconds(product)} at the machine's peak: the needless"
        f" zeros add {percent(of_pass(zero_row) / product)} to them.",
        "Where padding must not hold NaN, zero_ on the padding alone, or on the buffer once when it is made, does what"
        " nan_to_num_ does after every call: it writes, and reads nothing.",
    )
