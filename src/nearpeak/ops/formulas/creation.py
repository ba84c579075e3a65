"""Creation and filling: writes only.

Every element of the result is written once and nothing is read, neither the old contents of `fill_` and `zero_` nor
the tensor that gives `zeros_like` its shape. `empty` and its relatives only reserve memory.
"""

from __future__ import annotations

from nearpeak.ops.cost import Cost, accesses, formula
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor

UNWRITTEN = (
    "aten._efficientzerotensor",  # zeros that are known to be zeros and have no memory
    "aten._empty_affine_quantized",
    "aten._empty_per_channel_affine_quantized",
    "aten.empty",
    "aten.empty_like",
    "aten.empty_permuted",
    "aten.empty_quantized",
    "aten.empty_strided",
    "aten.from_file",  # a file that is mapped: pages come when they are touched
    "aten.new_empty",
    "aten.new_empty_strided",
)

WRITTEN = """
    aten._new_zeros_with_same_feature_meta aten.arange aten.bartlett_window aten.blackman_window aten.eye
    aten.fft_fftfreq aten.fft_rfftfreq aten.full aten.full_like aten.hamming_window aten.hann_window
    aten.kaiser_window aten.linspace aten.logspace aten.new_full aten.new_ones aten.new_zeros aten.ones
    aten.ones_like aten.range aten.scalar_tensor aten.tril_indices aten.triu_indices aten.zero aten.zero_
    aten.zeros aten.zeros_like
""".split()


@formula(*UNWRITTEN)
def reserve(op: Op) -> Cost:
    """Nothing: memory is reserved, no element is written."""
    return Cost(family="creation")


@formula(*WRITTEN)
def create(op: Op) -> Cost:
    """Each element of the result written once; an expanded destination once for the memory behind it."""
    return Cost(family="creation", writes=accesses(*op.outputs))


@formula("aten.fill", "aten.fill_")
def fill(op: Op) -> Cost:
    """As `create`, and the value read where it is a tensor."""
    value = op.arguments.get("value")
    return Cost(
        family="creation",
        reads=accesses(value if isinstance(value, Tensor) and op.outputs[0].bytes else None),
        writes=accesses(*op.outputs),
    )


@formula("aten.fill_diagonal_")
def fill_diagonal(op: Op) -> Cost:
    """The shorter side's worth of elements written (with `wrap` a tall matrix takes more)."""
    matrix = op.tensor("self")
    count = min(matrix.shape, default=0)
    return Cost(family="creation", writes=accesses((matrix, min(matrix.bytes, count * matrix.item_bytes))))
