"""What kernels take on a GPU: one physical model per family of kernels.

A model adds up what a kernel of its family must do, in terms that another GPU has too: a fixed time for launch, ramp
and drain; bytes over the bandwidth of memory and cache; instructions and uncoalesced accesses in cycles of all
multiprocessors together; waves of blocks or rows over the multiprocessors, which is what few rows cost; products over
the rate of the matrix engine by tile; and steps that must follow each other, for scans and recurrent networks. So a
model that was fitted on one GPU carries over by bandwidth, multiprocessors, clock and matrix rate, and not as a ratio.

The constants are in `kernel_constants.json`, which `benchmarks.estimates.fit_expected` writes with the rows that they
were fitted to. The models are those of the kernels that torch, cuBLAS and cuDNN run: what is expected is what such
kernels take, not what the best imaginable one would.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from nearpeak.bound.tiles import product_sizes
from nearpeak.machines.machine import Machine
from nearpeak.ops.cost import Cost
from nearpeak.ops.formulas.pointwise import MOSTLY_UNCHANGED
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor

Constants = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConstants:
    """The constants of all models, and what they were fitted to."""

    machine: str
    torch: str
    date: str
    rows: int
    constants: Constants


@cache
def kernel_constants() -> KernelConstants:
    """The constants that are part of the package."""
    text = resources.files("nearpeak.bound").joinpath("kernel_constants.json").read_text(encoding="utf-8")
    return KernelConstants(**json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What the models know of a GPU."""

    bandwidth: float
    cache_bandwidth: float
    processors: int
    clock: float
    matrix: Mapping[str, float]
    """FLOP/s with random numbers in a burst."""
    vector: float
    """FLOP/s in float32."""

    @property
    def cycles(self) -> float:
        """Cycles per second of all multiprocessors together."""
        return self.processors * self.clock

    @staticmethod
    def of(machine: Machine, constants: Constants) -> Gpu | None:
        """None for a machine without ceilings."""
        limits, common = machine.achievable, constants["gpu"]
        if limits is None:
            return None
        vector = limits.vector.get("float32") or max(limits.vector.values(), default=0.0) or 1e13
        # A multiprocessor has 128 lanes that do a multiply-add per cycle; so its clock follows where it is not known.
        clock = machine.clock_boost_hz or common["clock"]
        processors = machine.processors or max(1, round(vector / (256 * clock)))
        cached = limits.cache_bandwidth or common["cache_bytes_per_cycle"] * processors * clock
        share = common["random_share"]
        matrix = {dtype: limits.matrix_random.get(dtype, share * rate) for dtype, rate in limits.matrix.items()}
        return Gpu(
            bandwidth=limits.bandwidth,
            cache_bandwidth=max(cached, limits.bandwidth),
            processors=processors,
            clock=clock,
            matrix=matrix,
            vector=vector,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One op, as the models see it."""

    op: Op
    cost: Cost
    gpu: Gpu
    missed: float
    """Bytes that the cache does not serve, by the floor as written: see `traffic`."""
    constants: Constants

    def __getitem__(self, name: str) -> float:
        """A constant by the name of its model and its own: "reduction.fixed"."""
        group, _, key = name.partition(".")
        return self.constants[group][key]

    def get(self, name: str, default: float) -> float:
        """A constant that may be missing."""
        group, _, key = name.partition(".")
        return self.constants.get(group, {}).get(key, default)

    def memory(self, reads: float | None = None, writes: float | None = None) -> float:
        """Seconds for bytes that are read and written: from memory, or from the cache as far as they are there.

        A floor lets a write stay in the cache. In a step the lines that it takes there are another op's results, which
        then go to memory: every write costs its bytes.
        """
        read = sum(access.bytes for access in self.cost.reads) if reads is None else reads
        written = sum(access.bytes for access in self.cost.writes) if writes is None else writes
        known = sum(access.bytes for access in self.cost.reads)
        hit = max(0.0, 1.0 - self.missed / known) if known else 0.0
        gpu, share = self.gpu, self["gpu.bandwidth_share"]
        return (read * (1 - hit) + written) / (share * gpu.bandwidth) + read * hit / gpu.cache_bandwidth

    def cycles(self, count: float) -> float:
        """Seconds for cycles that are spread over all multiprocessors."""
        return count / self.gpu.cycles

    def waves(self, blocks: float, per_processor: float, cycles: float) -> float:
        """Seconds for blocks of so many cycles each, of which so many run on a multiprocessor at once."""
        return math.ceil(blocks / (self.gpu.processors * per_processor)) * cycles / self.gpu.clock


Model = Callable[[Kernel], float]
_MODELS: dict[str, Model] = {}


def model(*names: str) -> Callable[[Model], Model]:
    """Registers a model under families and operators."""

    def register(function: Model) -> Model:
        for name in names:
            assert name not in _MODELS, name
            _MODELS[name] = function
        return function

    return register


def kernel_seconds(op: Op, cost: Cost, missed: float, gpu: Gpu, constants: Constants) -> float:
    """The time of the kernels of an op.

    The models of families are those of torch's own operators. A fused kernel, or an operator of another library, is one
    pass over its operands, beside its products.
    """
    chosen: Model | None = None
    if op.origin == "torch":
        chosen = _MODELS.get(op.packet) or (_MODELS.get(cost.family) if op.packet.startswith("aten.") else None)
    return (chosen or _stream)(Kernel(op=op, cost=cost, gpu=gpu, missed=missed, constants=constants))


_FIXED = {
    "pointwise": "vector.fixed",
    "reduction": "reduction.fixed",
    "normalization": "layer_norm.fixed",
    "creation": "fill.fixed",
    "optimizer": "foreach.fixed",
    "matrix": "matrix_narrow.fixed",
}
"""The constant that is the fixed time of a good kernel, by kind."""


def work_seconds(memory: float, compute: float, kind: str, constants: Constants) -> float:
    """The time of a good kernel of some kind, from the seconds that its bytes and its FLOPs take at the ceilings."""
    group, _, key = _FIXED.get(kind.partition("/")[0], "stream.fixed").partition(".")
    share, products = constants["gpu"]["bandwidth_share"], constants["stream"]["products"]
    return constants[group][key] + _both(memory / share, compute / products)


def list_seconds(memory: float, accesses: float, launches: int, kind: str, gpu: Gpu, constants: Constants) -> float:
    """The time of kernels over lists of tensors, "foreach" or "fused", for so many elements that they read or write.

    Their blocks load few elements at once, so that instructions add to the bytes.
    """
    own = constants[kind]
    return (
        launches * own["fixed"] + memory / constants["gpu"]["bandwidth_share"] + accesses * own["access"] / gpu.cycles
    )


def _both(*seconds: float, sharpness: float = 4.0) -> float:
    """Resources that overlap: about the longest, more where several are as long.

    >>> round(_both(1.0, 1.0), 2), round(_both(1.0, 0.1), 2)
    (1.19, 1.0)
    """
    longest = max(seconds)
    if longest <= 0.0:
        return 0.0
    return longest * math.pow(sum((value / longest) ** sharpness for value in seconds), 1 / sharpness)


def _stream(kernel: Kernel) -> float:
    """Anything else: a pass over its operands, beside its products."""
    gpu, share = kernel.gpu, kernel["stream.products"]
    seconds = sum(count / (share * gpu.matrix.get(dtype, gpu.vector)) for dtype, count in kernel.cost.flops.items())
    vector = sum(kernel.cost.vector_flops.values()) / (share * gpu.vector)
    return kernel["stream.fixed"] + _both(kernel.memory(), seconds, vector)


def access_order(op: Op) -> str:
    """How the memory orders of an op's tensors differ: "" not at all, "permuted" by rows, "transposed" by elements.

    Where rows are permuted or an operand is broadcast, the last dimension is contiguous in all tensors.
    """
    tensors = [tensor for tensor in (*op.inputs, *op.outputs) if tensor.elements > 1]
    if len({_steps(tensor) for tensor in tensors}) <= 1:
        return ""
    last = {_steps(tensor)[-1] for tensor in tensors if _steps(tensor)}
    return "permuted" if last <= {0, 1} else "transposed"


def _steps(tensor: Tensor) -> tuple[int, ...]:
    """The strides of the dimensions that have more than one element."""
    return tuple(stride for size, stride in zip(tensor.shape, tensor.strides, strict=True) if size != 1)


def _elements(*tensors: Tensor) -> int:
    return max((tensor.elements for tensor in tensors), default=0)


_FULL = frozenset({"aten.where", "aten.masked_fill", "aten.masked_fill_"})
"""Which of their operands' elements are needed depends on data, and kernels read all."""
_ONE_BY_ONE = frozenset(
    f"aten.{name}" for name in ("flip", "repeat", "tril", "triu", "tril_", "triu_", "masked_fill", "masked_fill_")
)
"""Operators whose kernels compute an index for each element, whatever the order."""


@model("pointwise", "movement", "creation", "random")
def _elementwise(kernel: Kernel) -> float:
    """One thread for some elements.

    Where all tensors have one order and one dtype, accesses are vectors and the bytes decide, unless an element takes
    many instructions. Other dtypes or orders are taken one by one, with an index computed for each; across the memory's
    order each element is an access of its own.
    """
    op = kernel.op
    read = sum(tensor.bytes for tensor in op.inputs) if op.packet in _FULL else None
    written = sum(tensor.bytes for tensor in op.written) if stores_unchanged(op) else None
    return _pass(kernel, _form(op), reads=read, writes=written)


def stores_unchanged(op: Op) -> bool:
    """Whether torch's kernel stores every element of an operand that it leaves mostly as it was.

    The bound of such an op charges no write, as a kernel could store only what it changes.
    """
    return op.packet.removeprefix("aten.") in MOSTLY_UNCHANGED


def _form(op: Op) -> str:
    """How an elementwise kernel reaches its operands."""
    order = access_order(op)
    lone = _elements(*op.written) > 1 and any(tensor.elements == 1 for tensor in op.inputs)
    if not order and (op.packet in _ONE_BY_ONE or lone):  # one number on the device is broadcast as a row is
        order = "permuted"
    if order:
        return order
    if not all(_dense(tensor) for tensor in (*op.inputs, *op.written) if tensor.elements > 1):  # a part of each row
        return "permuted"
    large = [tensor for tensor in op.inputs if tensor.elements > 1]
    dtypes = {tensor.dtype for tensor in large}
    if op.packet in ("aten._to_copy", "aten.copy_"):
        written = {tensor.dtype for tensor in op.written}
        down = "float32" in dtypes and bool(written & {"bfloat16", "float16"})
        return "vector" if dtypes | written == dtypes or down else "mixed"
    return "mixed" if len(dtypes - {"bool"}) > 1 or (op.packet == "aten.mul" and "bool" in dtypes) else "vector"


def _pass(
    kernel: Kernel, form: str, *, reads: float | None = None, writes: float | None = None, count: int = 0
) -> float:
    """One elementwise kernel of some form over `count` elements, those of the result where it is 0.

    The first blocks of a kernel that computes indices or casts take longer than those that load vectors, and hide what
    the others do meanwhile.
    """
    op = kernel.op
    tensors = [tensor for tensor in (*op.inputs, *op.written) if tensor.elements > 1]
    count = count or _elements(*op.written) or _elements(*op.inputs)
    width = sum(tensor.item_bytes for tensor in tensors)
    item = min((tensor.item_bytes for tensor in op.written), default=4.0)
    cycles = kernel[f"{form}.element"] + kernel[f"{form}.byte"] * width
    if form == "transposed":
        # Where the fastest dimension of the result is short, what one access fetches serves its neighbors.
        inner = next((tensor.shape[-1] for tensor in op.written if tensor.shape), 1)
        cycles *= kernel["transposed.near"] if inner <= 64 else 1.0
    name = op.packet.removeprefix("aten.").removesuffix("_")
    special = kernel.get(f"instructions.{name}", 0.0) / 128
    work = _both(kernel.memory(reads, writes), kernel.cycles(count * max(cycles, special)))
    if form == "vector":
        return kernel["vector.fixed"] + work
    first = kernel[f"{form}.fixed"] + (kernel["elementwise.half"] if item < 4 else 0.0)
    if form == "mixed" and len([tensor for tensor in op.inputs if tensor.elements > 1]) > 1:
        first += kernel["mixed.operand"]
    return _both(first, kernel["vector.fixed"] + work)


_FILLS = (
    "zeros", "zeros_like", "full", "full_like", "fill_", "zero_", "ones", "ones_like", "new_zeros", "new_full",
    "new_ones",
)  # fmt: skip


@model(*(f"aten.{name}" for name in _FILLS))
def _fill(kernel: Kernel) -> float:
    """Narrow types are stored in narrower vectors."""
    size = sum(tensor.bytes for tensor in kernel.op.written)
    narrow = any(tensor.item_bytes < 4 for tensor in kernel.op.written)
    slow = kernel["fill.narrow"] if narrow and size > 1e6 else 1.0
    return kernel["fill.fixed"] + slow * size / kernel.gpu.bandwidth


@model("aten.cat", "aten.stack")
def _cat(kernel: Kernel) -> float:
    """Each operand is read, also one that is given twice."""
    op = kernel.op
    read = sum(tensor.bytes for tensor in op.inputs)
    strides = {_steps(tensor)[-1:] for tensor in op.inputs if tensor.elements > 1}
    plain = all(_contiguous(tensor) for tensor in op.inputs) and strides <= {(1,), ()}
    if plain:
        return kernel["cat.fixed"] + kernel["cat.bytes"] * kernel.memory(reads=read)
    return _pass(kernel, "permuted", reads=read)


def _contiguous(tensor: Tensor) -> bool:
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _dense(tensor: Tensor) -> bool:
    """Whether the elements lie beside each other in memory, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.strides, tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


@model("aten.masked_fill")
def _masked_copy(kernel: Kernel) -> float:
    """A copy, and a fill of it in place."""
    size = kernel.op.outputs[0].bytes
    copied = kernel["vector.fixed"] + kernel.memory(reads=size, writes=size)
    return copied + kernel["gpu.gap"] + _pass(kernel, _form(kernel.op), writes=size)


@model("aten.diag_embed")
def _diagonal(kernel: Kernel) -> float:
    """A fill, and a copy onto the diagonal."""
    return _fill(kernel) + kernel["gpu.gap"] + kernel["permuted.fixed"]


@model("aten.constant_pad_nd")
def _pad(kernel: Kernel) -> float:
    """A fill, and a copy into the middle."""
    return _fill(kernel) + kernel["gpu.gap"] + _pass(kernel, "permuted")


_MIRRORED = tuple(f"aten.{kind}_pad{rank}d" for kind in ("reflection", "replication") for rank in (1, 2, 3))


@model("aten.roll", "aten.pixel_shuffle", "aten.pixel_unshuffle", *_MIRRORED)
def _rolled(kernel: Kernel) -> float:
    """An index with a division for each element. Pixels are shuffled by a copy of a view in another order."""
    fixed = kernel["rolled.fixed"]
    if kernel.op.packet in _MIRRORED:  # divisions of 64 bits, one after the other
        fixed += kernel["rolled.mirrored"]
    elif kernel.op.packet != "aten.roll":
        narrow = any(tensor.item_bytes < 4 for tensor in kernel.op.written)
        fixed = kernel["permuted.fixed"] + (kernel["elementwise.half"] if narrow else 0.0)
    return fixed + _both(kernel.memory(), kernel.cycles(_elements(*kernel.op.written) * kernel["rolled.element"]))


_RANDOM = {
    "aten.randn": "normal", "aten.normal_": "normal", "aten.randn_like": "normal", "aten.rand": "uniform",
    "aten.rand_like": "uniform", "aten.uniform_": "uniform", "aten.native_dropout": "dropout",
    "aten.bernoulli": "bernoulli", "aten.bernoulli_": "bernoulli_number", "aten.arange": "arange",
    "aten.linspace": "arange", "aten.randint": "uniform", "aten.random_": "uniform", "aten.randint_like": "uniform",
}  # fmt: skip


@model(*_RANDOM)
def _generated(kernel: Kernel) -> float:
    """Numbers that are computed: cycles for each."""
    name = _RANDOM[kernel.op.packet]
    count = _elements(*kernel.op.outputs) or _elements(*kernel.op.written)
    fixed = kernel["fill.fixed" if name == "arange" else "generated.fixed"]
    if name == "dropout" and count % 4:  # vectors of two elements, or a load of its own for each element
        fixed += kernel["generated.dropout_one_by_one"]
        name = "dropout_singles" if count % 2 else "dropout_pairs"
    return fixed + _both(kernel.memory(), kernel.cycles(count * kernel[f"generated.{name}"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lines:
    """What an op reduces or scans: `outer` x `length` x `inner` elements in the order of memory, along the middle."""

    outer: int
    length: int
    inner: int
    item: float

    @property
    def elements(self) -> int:
        return self.outer * self.length * self.inner


def _lines(tensor: Tensor, dims: Any) -> _Lines:
    """The lines of a tensor along some dimensions; along all of them where `dims` names none."""
    rank = len(tensor.shape)
    if dims is None or dims == () or dims == []:
        along = set(range(rank))
    else:
        along = {int(dim) % max(1, rank) for dim in (dims if isinstance(dims, (tuple, list)) else (dims,))}
    length = math.prod(tensor.shape[dim] for dim in along if dim < rank)
    # What varies faster in memory than all of the reduced dimensions.
    steps = [(tensor.shape[dim] == 1, tensor.strides[dim]) for dim in along if dim < rank]
    step = min(steps, default=(True, 1))[1]
    inner = math.prod(tensor.shape[dim] for dim in range(rank) if dim not in along and 0 < tensor.strides[dim] < step)
    others = math.prod(tensor.shape[dim] for dim in range(rank) if dim not in along)
    return _Lines(
        outer=max(1, others // max(1, inner)), length=max(1, length), inner=max(1, inner), item=tensor.item_bytes
    )


@model("reduction")
def _reduction(kernel: Kernel) -> float:
    """Blocks along rows, or threads down columns; where there are few results, several blocks share each."""
    op = kernel.op
    if not op.inputs:
        return _stream(kernel)
    lines = _lines(op.inputs[0], op.arguments.get("dim"))
    if op.packet == "aten.logsumexp":  # the largest, the difference, its exponential, the sum; infinities are mended
        read = op.inputs[0].bytes
        count = op.inputs[0].elements
        passes = _pass(kernel, "permuted", writes=read, count=count) + _pass(kernel, "vector", writes=read, count=count)
        return 2 * _reduce(kernel, lines, 0.0) + passes + 7 * kernel["vector.fixed"]
    name = op.packet.removeprefix("aten.")
    cycles = kernel.get(f"reduction.{name}", kernel["reduction.element"])
    step = kernel[f"reduction.{_ROW_STEPS[name]}"] if lines.inner == 1 and name in _ROW_STEPS else 1.0
    if lines.inner > 1 and name in _PAIRS:
        step = kernel["reduction.column_pairs"]
    return _reduce(kernel, lines, cycles, step, kernel["reduction.pairs"] if name in _PAIRS else 1.0)


_PAIRS = ("aminmax", "argmax", "argmin", "max", "min", "var", "std", "var_mean")
"""Reductions whose threads exchange more than one number."""
_ROW_STEPS = {"var": "moments", "std": "moments", "var_mean": "moments", "prod": "jitted"}
"""Reductions whose steps along a row take longer than those of a sum: they divide, or load no vectors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """How torch's kernel of reductions spreads its work."""

    values: float
    """Elements that a thread reads, one after the other."""
    blocks: float
    beside: float
    """Blocks on a multiprocessor."""
    stages: float
    """Exchanges between the threads of a block."""
    vector: int
    """Results of a thread, for each of which the code is repeated."""
    parts: float
    """Blocks that share a result."""
    sums: float
    """Values of other blocks that a thread of the last one adds up, one after the other."""


def _layout(lines: _Lines, processors: int) -> _Layout:
    """The choice of torch's `setReduceConfig`: threads along what is contiguous, more of them where few results are.

    A block has 512 threads, fewer where each has two or four results side by side.
    """
    rows = lines.inner == 1
    results = lines.outer * lines.inner
    vector = 1
    if rows:
        whole = results == 1 and lines.length > 128
        across, down = (lines.length // _LOADS if whole else lines.length), results
    else:
        vector = 4 if lines.inner % 4 == 0 else 2 if lines.inner % 2 == 0 else 1
        across, down = results // vector, lines.length
    most = 512 // vector
    width, height = (min(most, 1 << max(0, int(math.log2(max(1, size))))) for size in (across, down))
    narrow = min(width, 32)
    height = min(height, most // narrow)
    width = min(width, most // height)
    values = lines.length / (width if rows else 1)
    stages = math.log2(width) if rows else 0.0
    together = height if rows else width  # results of a block, or vectors of them
    if values >= min(16 * height, 256):
        values /= height
        stages += math.log2(height)
        together = 1 if rows else width
    elif not rows:
        together = width * height
    blocks = math.ceil(results / vector / together)
    beside = 2048 / (width * height)
    parts = 1.0
    if values >= 256 and blocks <= processors * beside:
        parts = max(min(math.ceil(processors * beside / blocks), math.ceil(values / 16)), math.ceil(values / 256))
        values /= parts
    return _Layout(
        values=max(1.0, values),
        blocks=blocks * parts,
        beside=beside,
        stages=stages,
        vector=vector,
        parts=parts,
        sums=math.ceil(parts / (width * height if rows else height)),
    )


_LOADS = 4
"""Elements that a thread reads in a step, of at most `_STEP_BYTES` of a row."""
_STEP_BYTES = 16


def _reduce(kernel: Kernel, lines: _Lines, cycles: float, step: float = 1.0, exchange: float = 1.0) -> float:
    """Loads that wait for each other in each thread, waves of blocks, and exchanges in a block and between blocks.

    `step` and `exchange` are how many times longer a step and an exchange take than those of a sum.
    """
    layout = _layout(lines, kernel.gpu.processors)
    memory = kernel.memory(writes=0.0) * kernel["reduction.bytes"]
    waves = layout.blocks / (kernel.gpu.processors * layout.beside)
    waves = math.ceil(waves) if waves <= 2 else waves
    steps: float = math.ceil(layout.values / _LOADS)
    if lines.inner == 1:
        steps = max(steps, layout.values * lines.item / _STEP_BYTES)
    block = kernel["reduction.block"] + layout.stages * kernel["reduction.stage"] * exchange
    block += steps * kernel["reduction.step" if lines.inner == 1 else "reduction.column_step"] * step
    fixed = kernel["reduction.fixed"] + kernel["reduction.code"] * layout.vector * step
    if layout.parts > 1:
        fixed += kernel["reduction.parts"] + layout.sums * kernel["reduction.sum"] * step
    work = kernel.cycles(lines.elements * cycles)
    return fixed + block + _both(memory, work, max(0.0, waves - 1) * block, sharpness=2)


_WARP_ROW = 1024
"""Gradients of rows up to this length are computed by one warp, with a value of the row in each of 32 registers."""
_WARP_ROW_FORWARD = 2048
"""Rows up to this length are normalized by one warp: torch's limits are 2048 elements and 8 KiB."""


@model("aten._softmax", "aten._log_softmax", "aten._safe_softmax", "aten.softmax", "aten.log_softmax")
def _softmax(kernel: Kernel) -> float:
    """A warp or a block for each row; along another dimension a thread for each column."""
    op = kernel.op
    lines = _lines(op.inputs[0], op.arguments.get("dim", -1))
    if lines.inner > 1:
        return _down_columns(kernel, lines, passes=3)
    if lines.length <= min(_WARP_ROW_FORWARD, 8192 // lines.item):
        padded = 1 << math.ceil(math.log2(max(2, lines.length)))
        count = lines.elements / lines.length * padded
        if padded > _WARP_ROW:  # twice the registers: half of the rows are in flight
            count *= kernel["softmax.warp_long"]
        return (
            kernel["softmax.warp_fixed"]
            + kernel["softmax.warp_row_forward"] * padded / _WARP_ROW
            + _both(kernel.memory() * kernel["softmax.bytes"], kernel.cycles(count * kernel["softmax.warp_element"]))
        )
    if lines.length <= _REGISTER_ROW:
        return _register_rows(kernel, lines)
    return _long_rows(kernel, lines)


_REGISTER_ROW = 9 * 1024
"""Rows up to this length are normalized by a block of 1024 threads that keeps them in registers."""


def _register_rows(kernel: Kernel, lines: _Lines) -> float:
    """A block for each row, whose threads load one element at a time: one block alone, or as fast as many are."""
    steps = math.ceil(lines.length / 1024)
    rows = lines.elements / lines.length
    alone = kernel["softmax.row"] + steps * kernel["softmax.register_step"]
    together = rows / kernel.gpu.processors * steps * kernel["softmax.register_beside"]
    return kernel["softmax.fixed"] + _both(kernel.memory() * kernel["softmax.bytes"], max(alone, together))


def _long_rows(kernel: Kernel, lines: _Lines) -> float:
    """A block of 1024 threads for each row, which loads vectors of 16 bytes.

    A row of whole vectors that fits in shared memory is read once. Others are read three times, for the largest, the
    sum and the result: from the cache, as long as the rows in flight fit there.
    """
    rows, row_bytes = lines.elements / lines.length, lines.length * lines.item
    steps: float = math.ceil(row_bytes / 16 / 1024)
    memory = kernel.memory() * kernel["softmax.bytes"]
    on_chip = row_bytes <= kernel["softmax.on_chip"] and row_bytes % 16 == 0
    if on_chip:
        steps *= kernel["softmax.shared_steps"]
    else:
        steps *= 3
        in_flight = min(rows, 2 * kernel.gpu.processors) * row_bytes
        speed = kernel.gpu.cache_bandwidth if in_flight < kernel["softmax.cached"] else kernel.gpu.bandwidth
        memory += 2 * lines.elements * lines.item / speed
    block = kernel["softmax.long_row"] + steps * kernel["softmax.long_step"]
    waves = max(1.0, rows / kernel.gpu.processors)
    return kernel["softmax.fixed"] + _both(memory, waves * block)


def _long_rows_backward(kernel: Kernel, lines: _Lines) -> float:
    """A block for each row, of half as many threads as there are vectors of 16 bytes.

    A row that does not fit on the chip is read twice.
    """
    rows, row_bytes = lines.elements / lines.length, lines.length * lines.item
    fits = row_bytes <= kernel["softmax.on_chip"]
    threads = max(32, 1 << math.ceil(math.log2(min(row_bytes / 16, 1024.0) / 2)))
    beside = 2048 // threads
    steps = math.ceil(row_bytes / 16 / threads)
    memory = kernel.memory() * kernel["softmax.bytes"]
    if not fits:
        steps *= 2
        in_flight = kernel.gpu.processors * beside * row_bytes
        speed = kernel.gpu.cache_bandwidth if in_flight < kernel["softmax.cached"] else kernel.gpu.bandwidth
        memory += lines.elements * lines.item / speed
    waves = max(1.0, rows / (kernel.gpu.processors * beside))
    block = kernel["softmax.row"] + steps * kernel["softmax.step"]
    return kernel["softmax.fixed"] + _both(memory, waves * block)


def _down_columns(kernel: Kernel, lines: _Lines, *, passes: int, backward: bool = False) -> float:
    """A thread for each column: its elements one after the other, in several passes.

    The first pass waits for memory at each element, later ones for what is nearer, where all of the data fit there.
    """
    threads = min(lines.inner, 1024)
    beside = 1
    if threads <= 64 and lines.length >= 64:
        while threads * beside <= 512 and beside <= lines.length:
            beside *= 2
    share = threads * beside / 1024
    first = kernel["columns.step"] + kernel["columns.thread"] * share
    again = kernel["columns.near"] + kernel["columns.near_thread"] * share
    if lines.elements * lines.item > kernel["softmax.cached"]:
        again = first
    if beside > 1 and lines.elements * lines.item > _ON_CHIP:  # the threads of a warp are in different rows
        lines_of_warp = 1 + kernel["columns.apart"] * min(1.0, lines.inner * lines.item / 128)
        first, again = first * lines_of_warp, again * lines_of_warp
    if backward:
        first = again = kernel["columns.backward_step"]
    blocks = lines.outer * math.ceil(lines.inner / threads)
    waves = math.ceil(blocks / (kernel.gpu.processors * 2))
    steps = math.ceil(lines.length / beside)
    return kernel["columns.fixed"] + max(kernel.memory(), waves * steps * (first + (passes - 1) * again))


_ON_CHIP = 2**16
"""Bytes that later passes of a block surely find in the nearest cache."""


@model("aten._softmax_backward_data", "aten._log_softmax_backward_data")
def _softmax_backward(kernel: Kernel) -> float:
    """As the forward; that of a softmax multiplies gradient and result in a kernel of its own before."""
    op = kernel.op
    lines = _lines(op.inputs[0], op.arguments.get("dim", -1))
    product = 0.0 if "log" in op.packet else _pass(kernel, "vector")
    if lines.inner > 1:
        return product + _down_columns(kernel, lines, passes=2, backward=True)
    if lines.length <= _WARP_ROW:
        padded = 1 << math.ceil(math.log2(max(2, lines.length)))
        start = kernel["softmax.warp_fixed"] + kernel["softmax.warp_row"] * padded / _WARP_ROW
        work = kernel.cycles(lines.elements / lines.length * padded * kernel["softmax.warp_backward"])
        return product + start + _both(kernel.memory() * kernel["softmax.bytes"], work)
    return product + _long_rows_backward(kernel, lines)


def _row_steps(kernel: Kernel, rows: float, width: float) -> float:
    """Rows of a block of 128 threads that take 4 elements each at a time, in two passes: seconds of all waves."""
    waves = max(1.0, rows / (kernel.gpu.processors * 12))
    return waves * (kernel["layer_norm.row"] + width / 512 * kernel["layer_norm.step"])


@model("aten.native_layer_norm", "aten._fused_rms_norm", "aten.rms_norm")
def _layer_norm(kernel: Kernel) -> float:
    """A block for each row, which it reads twice. A mean of squares is simpler than a mean and a variance."""
    op = kernel.op
    source = op.inputs[0]
    shape = op.arguments.get("normalized_shape", source.shape[-1:])
    width = math.prod(shape)
    rows = source.elements / max(1, width)
    simple = kernel["layer_norm.squares"] if "rms" in op.packet else 1.0
    read = source.bytes * (1 + simple * (kernel["layer_norm.reads"] - 1))
    if width % 4:
        return _norm_without_vectors(kernel, source, rows, width)
    return kernel["layer_norm.fixed"] + _both(
        kernel.memory(reads=read, writes=source.bytes), simple * _row_steps(kernel, rows, width)
    )


def _norm_without_vectors(kernel: Kernel, source: Tensor, rows: float, width: float) -> float:
    """Moments by blocks of 512 threads for a row each, and a pass by blocks of 256: an element at a time.

    A block alone waits for its loads; where a multiprocessor is full, its blocks share the instructions.
    """
    moments = _thread_rows(kernel, rows, width, 512, "moments")
    results = _thread_rows(kernel, rows, width, 256, "results")
    return (
        2 * kernel["layer_norm.fixed"]
        + kernel["gpu.gap"]
        + max(moments, kernel.memory(writes=0.0))
        + max(results, kernel.memory(writes=source.bytes))
    )


def _thread_rows(kernel: Kernel, rows: float, width: float, threads: int, name: str) -> float:
    """Seconds of blocks of so many threads for a row each."""
    waves = rows / (kernel.gpu.processors * (2048 // threads))
    steps = math.ceil(width / threads)
    step = kernel["layer_norm.one_by_one"] + min(1.0, waves) * kernel["layer_norm.one_by_one_beside"]
    start = kernel["layer_norm.moments"] if name == "moments" else 0.0
    return max(1.0, waves) * (start + steps * step)


@model("aten.native_layer_norm_backward", "aten._fused_rms_norm_backward")
def _layer_norm_backward(kernel: Kernel) -> float:
    """The gradient of the input, as the forward; and sums over all rows for those of the weights.

    A gradient that is not contiguous, as that of a sum, is copied first.
    """
    op = kernel.op
    gradient, source = op.inputs[:2]
    width = math.prod(op.arguments.get("normalized_shape", source.shape[-1:]))
    rows = source.elements / max(1, width)
    waves = max(1.0, rows / (kernel.gpu.processors * 16))
    block = kernel["layer_norm_backward.row"] + width / 512 * kernel["layer_norm_backward.step"]
    first = _both(
        kernel.memory(reads=kernel["layer_norm_backward.reads"] * source.bytes, writes=source.bytes), waves * block
    )
    if width % 4:
        first *= kernel["layer_norm_backward.one_by_one"]
    copied = 0.0 if _contiguous(gradient) else _pass(kernel, "permuted", reads=gradient.bytes, writes=source.bytes)
    second = _column_sums(kernel, source, rows, width) + kernel["gpu.gap"] if len(op.outputs) > 1 else 0.0
    return copied + kernel["layer_norm_backward.fixed"] + first + second


_SUMMED_APART = 64 * 1024
"""More rows than this are added up in parts, where the columns give less than half of the multiprocessors a block."""


def _column_sums(kernel: Kernel, source: Tensor, rows: float, width: float) -> float:
    """Gradients of the weights of a norm: a block for 32 columns goes through all rows, 256 of them at a time."""
    blocks = math.ceil(width / 32)
    memory = kernel.memory(reads=2 * source.bytes, writes=0.0)
    if rows > _SUMMED_APART and blocks < kernel.gpu.processors // 2:
        return memory * kernel["layer_norm_backward.sums"] + kernel["layer_norm_backward.parts"]
    near = 2 * source.bytes < kernel["softmax.cached"]  # the gradient of the input has read both
    step = kernel["layer_norm_backward.near_step" if near else "layer_norm_backward.far_step"]
    block = kernel["layer_norm_backward.block"] + math.ceil(rows / 256) * step
    waves = max(1.0, blocks / (2 * kernel.gpu.processors))
    return _both(0.0 if near else memory, waves * block)


@model("aten.native_group_norm", "aten.native_group_norm_backward")
def _group_norm(kernel: Kernel) -> float:
    """Moments of each group by one block, and a pass that has the statistics of each element looked up."""
    op = kernel.op
    source = op.inputs[0]
    groups = int(op.arguments.get("group", 1)) * int(op.arguments.get("N", source.shape[0]))
    length = source.elements / max(1, groups)
    moments = kernel.waves(groups, 4, kernel["group_norm.element"] * length + kernel["group_norm.row"])
    seconds = kernel["group_norm.fixed"] + moments + _pass(kernel, "permuted")
    return seconds * (kernel["group_norm.backward"] if "backward" in op.packet else 1.0)


@model("normalization")
def _batch_norm(kernel: Kernel) -> float:
    """Statistics of each channel by one block, and a pass over all elements; only the pass where they are given."""
    op = kernel.op
    source = op.inputs[0]
    channels = source.shape[1] if len(source.shape) > 1 else 1
    length = source.elements / max(1, channels)
    last = len(source.shape) > 1 and source.strides[1] == 1
    backward = "backward" in op.packet
    given = op.arguments.get("training", op.arguments.get("train", "no_training" not in op.packet)) is False
    kind = "batch_norm_backward" if backward else "batch_norm"
    passing = kernel.memory() * kernel[f"{kind}.bytes"]
    if given and not backward and "cudnn" in op.packet:
        places = length / max(1, source.shape[0])
        blocks = source.shape[0] * math.ceil(channels / 32) if last else channels * source.shape[0]
        walk = kernel.waves(blocks, 1, places * kernel["batch_norm.given_place"]) if last else 0.0
        if not last and blocks < kernel.gpu.processors:  # a block for each channel of an image, one after the other
            walk = places * kernel["batch_norm.given_element"] / kernel.gpu.clock
        return kernel["batch_norm.given_cudnn"] + passing + walk
    if given and not backward:
        walk = (_last_rows(channels, length) - 4) * kernel["batch_norm.given_step"] if last else 0.0
        # Where an image's places lie together, a thread takes one element at a time.
        each = 0.0 if last else kernel.cycles(source.elements * kernel["batch_norm.given_one"])
        return kernel["batch_norm.given"] + max(passing, walk, each)
    if last and "cudnn" in op.packet and not backward:  # read twice, for moments and for results
        return kernel["cudnn_batch_norm.fixed"] + 2 * passing
    if last:
        walk = _last_rows(channels, length) * kernel["batch_norm.last_step"]
        return kernel["batch_norm.last"] + walk + passing * kernel[f"{kind}.last_passes"]
    if "cudnn" in op.packet:
        kind = f"cudnn_{kind}"
    block = kernel[f"{kind}.channel"] + kernel[f"{kind}.step"] * length / 512
    waves = math.ceil(channels / (kernel.gpu.processors * 4))
    seconds = kernel[f"{kind}.fixed"] + waves * block
    # torch's own has a pass of its own for the results, cuDNN's may hold a channel on the chip.
    return seconds + passing if "cudnn" not in op.packet and not backward else max(seconds, passing)


def _last_rows(channels: int, length: float) -> int:
    """How many times a thread of a batch norm with channels last loads, 4 elements at once.

    A block has 512 threads in 2 dimensions, and rows are spread over blocks until a thread has 16 elements.
    """
    down = min(32, 1 << math.ceil(math.log2(max(1.0, length / 16))))
    down = max(512 // min(channels, 32), 512 // down) if channels < 32 else max(1, min(down, 16))
    spread = min(128, math.ceil(length / (16 * down)))
    return math.ceil(length / (spread * down * 4))


def _picked_steps(rows: int) -> int:
    """How many rows a thread of the one block has, which has a thread for about 16 of them, from 32 to 1024."""
    threads = min(1024, max(32, 1 << round(math.log2(max(1.0, rows / 16)))))
    return math.ceil(rows / threads)


@model("aten.nll_loss_forward", "aten.nll_loss2d_forward")
def _picked(kernel: Kernel) -> float:
    """One block adds up one element of each row; of images, blocks of 1024 threads those of some places each."""
    target = kernel.op.inputs[1]
    if "2d" in kernel.op.packet:
        places = target.elements / max(1, target.shape[0])
        blocks = max(1, math.ceil(places / 1024) // 128)
        return kernel["picked.fixed"] + math.ceil(places / blocks / 1024) * kernel["picked.step"]
    return kernel["picked.fixed"] + _picked_steps(target.elements) * kernel["picked.step"]


@model("aten.nll_loss_backward", "aten.nll_loss2d_backward")
def _picked_backward(kernel: Kernel) -> float:
    """A fill, and one block that writes into each row."""
    steps = _picked_steps(kernel.op.inputs[2].elements) if "2d" not in kernel.op.packet else 1
    return _fill(kernel) + kernel["picked.backward"] + steps * kernel["picked.backward_step"]


@model("loss")
def _loss(kernel: Kernel) -> float:
    """An elementwise kernel and the mean of its result; backward a fill and an elementwise kernel."""
    op = kernel.op
    source = op.inputs[0]
    if "backward" in op.packet:
        source = max(op.inputs, key=lambda tensor: tensor.elements)
        return (
            kernel["fill.fixed"] + source.bytes / kernel.gpu.bandwidth + kernel["gpu.gap"] + _pass(kernel, "permuted")
        )
    if op.packet == "aten.binary_cross_entropy_with_logits":
        moved = kernel["loss.logit_passes"] * source.bytes
        return kernel["loss.logit_fixed"] + kernel.memory(reads=moved, writes=0.0)
    if op.arguments.get("reduction", 1) == 0:
        return _pass(kernel, "vector")
    first = kernel["vector.fixed"] + kernel.memory(reads=2 * source.bytes, writes=source.bytes) + kernel["gpu.gap"]
    return first + _reduce(kernel, _lines(source, None), kernel["reduction.element"]) - kernel.memory(writes=0.0) / 2


@model("aten.embedding", "aten.index_select", "aten.index")
def _rows_taken(kernel: Kernel) -> float:
    """Whole rows: as many bytes as the result has, and cycles for each row; unaligned rows element by element."""
    op = kernel.op
    out = op.outputs[0]
    table = next(tensor for tensor in op.inputs if tensor.dtype == out.dtype)
    index = [tensor for tensor in op.inputs if tensor is not table]
    count = max((int(tensor.bytes / tensor.item_bytes) for tensor in index), default=1)
    width = out.elements / max(1, count)
    # A row that is taken again comes from the cache.
    first = min(out.bytes, table.bytes) + sum(tensor.bytes for tensor in index)
    again = max(0.0, out.bytes - table.bytes)
    memory = _both(kernel.memory(reads=first, writes=out.bytes), again / kernel.gpu.cache_bandwidth)
    chosen = _selected(kernel) if any(tensor.dtype == "bool" for tensor in index) else 0.0
    if chosen:
        return chosen + kernel["rows.unaligned"] + memory
    if (width * out.item_bytes) % 16 == 0:
        return kernel["rows.fixed"] + _both(memory, kernel.cycles(count * kernel["rows.row"]))
    return kernel["rows.unaligned"] + _both(memory, kernel.cycles(out.elements * kernel["rows.element"]))


@model("indexing")
def _scattered(kernel: Kernel) -> float:
    """Elements by index: each is an access of its own, and an addition by atomics."""
    op = kernel.op
    name = op.packet.removeprefix("aten.").removesuffix("_")
    index = [tensor for tensor in op.inputs if tensor.dtype in ("int64", "int32")]
    count = max((tensor.elements for tensor in index), default=0)
    sources = [tensor for tensor in op.inputs if tensor not in index]
    if name == "masked_scatter":
        return _masked_scatter(kernel)
    if name in ("nonzero", "argwhere", "masked_select"):
        return _selected(kernel) + (kernel["vector.fixed"] + kernel.memory() if name.startswith("masked") else 0.0)
    if name == "index_fill":
        count *= sources[0].elements // max(1, sources[0].shape[op.arguments["dim"]])
    elif name.startswith(("index_", "_index_put", "_unsafe_index_put")):
        count = max((tensor.elements for tensor in sources[1:]), default=count)
    elif op.outputs and name in ("gather", "take"):
        if index and index[0].strides and index[0].strides[-1] == 0 and index[0].shape[-1] > 1:
            return _rows_taken(kernel)  # one index for each row
        count = op.outputs[0].elements
    table = max((tensor.bytes for tensor in sources), default=0.0)
    if "index_put" in name and op.arguments.get("accumulate"):
        return _sorted_sums(kernel, count, index)
    like = _SCATTERED_LIKE.get(name, "index_put")
    cycles, fixed = kernel[f"scattered.{like}"], kernel[f"scattered.{like}_fixed"]
    if name == "scatter" and "src" not in op.arguments:  # one value, which no element fetches
        fixed = kernel["scattered.value_fixed"]
    if name in ("gather", "scatter", "scatter_add"):  # a thread has up to 8 elements, one after the other
        first = kernel["scattered.first"]
        fixed *= first + (1 - first) * min(8, math.ceil(count / 128)) / 8
    seconds = fixed + kernel.cycles(count * cycles)
    if name == "take":  # a sector of memory for each element, as far as the table has so many
        moved = sum(tensor.bytes for tensor in (*index, *op.outputs)) + min(table, 32.0 * count)
        return fixed + _both(moved / kernel.gpu.bandwidth, kernel.cycles(count * cycles))
    if name in ("gather", "scatter", "scatter_add", "put") and table > kernel["scattered.cached"]:
        seconds += count * kernel["scattered.far"] / kernel.gpu.bandwidth  # each access fetches a line from memory
    if like == "scatter_add":  # an addition in memory is slower than that
        missed = max(0.0, 1 - kernel["scattered.cached"] / max(1.0, sources[0].bytes))
        seconds += missed * count * kernel["scattered.far_sum"] / kernel.gpu.bandwidth
    whole = [tensor for tensor in op.outputs if not op.mutated and name not in ("gather", "take")]
    for tensor in whole:  # out of place: the table is copied first
        seconds += kernel["vector.fixed"] + kernel.memory(reads=tensor.bytes, writes=tensor.bytes)
    return seconds


_SCATTERED_LIKE = {
    **{name: name for name in ("gather", "scatter", "scatter_add", "take", "index_add", "index_copy")},
    "scatter_reduce": "scatter_add", "index_reduce": "index_add", "index_fill": "index_copy",
}  # fmt: skip
"""Whose kernel that of an operator is like; others are like `index_put`."""


def _selected(kernel: Kernel) -> float:
    """What a mask selects: its elements are counted, the host waits for their number, and their places are written."""
    places = sum(tensor.elements for tensor in kernel.op.inputs if tensor.dtype == "bool")
    places = places or _elements(*kernel.op.inputs)
    passes = 2 * kernel.memory(writes=0.0) + kernel.cycles(places * kernel["selected.element"])
    return _waited(kernel, 6) + passes


def _waited(kernel: Kernel, launches: int) -> float:
    """An op whose host waits for a number, so that none of its launches is hidden."""
    return kernel["selected.wait"] + launches * kernel["selected.launch"]


def _small(kernel: Kernel, count: int) -> float:
    """Elementwise kernels over next to nothing, after each other."""
    return count * (kernel["vector.fixed"] + kernel["gpu.gap"])


def _masked_scatter(kernel: Kernel) -> float:
    """A copy of the tensor, a scan of the mask that says which element comes where, a check and a pass."""
    op = kernel.op
    size, places = op.inputs[0].bytes, op.inputs[1].elements
    scanned = (2 * 8 + 1) * places / kernel.gpu.bandwidth  # written and read as numbers of 8 bytes
    copied = kernel.memory(reads=size, writes=size) if op.outputs and not op.mutated else 0.0
    return _small(kernel, 3) + kernel["scan.whole"] + scanned + copied + _pass(kernel, "vector")


_ONE_TILE = 4096
"""So many keys and fewer are sorted by one block."""


def _key_sort(kernel: Kernel, count: int, item: float) -> float:
    """A sort of all keys of so many bytes: by one block where they are few, else by passes over their digits."""
    if count <= _ONE_TILE:
        return kernel["sort.tile"] + count * kernel["sort.tile_element"]
    fixed = kernel["sort.long_fixed"] + item * kernel["sort.digit"]
    return fixed + kernel.cycles(count * kernel["sort.long_element"] * item)


def _sorted_sums(kernel: Kernel, count: int, index: Sequence[Tensor]) -> float:
    """Sums by index in a fixed order: the indices are checked, wrapped around and numbered, and sorted first."""
    rows = max((tensor.elements for tensor in index), default=1)
    before = _small(kernel, 10 * len(index)) + kernel["vector.fixed"] + kernel["gpu.gap"]
    ordered = kernel["sort.tile"] + rows * kernel["sort.tile_element"]
    if rows > _ONE_TILE:
        ordered = kernel["scattered.sort"] + rows * kernel["embedding_backward.sorted"]
    return before + ordered + _both(kernel.memory(), kernel.cycles(count * kernel["embedding_backward.element"]))


@model("aten._embedding_bag", "aten._embedding_bag_forward_only", "aten.embedding_bag")
def _bags(kernel: Kernel) -> float:
    """Threads for the columns of each bag, which add up its rows one after the other."""
    op = kernel.op
    table, count = op.tensor("weight"), op.tensor("indices").elements
    bags = max(1, op.outputs[0].shape[0])
    width = table.shape[-1]
    read = count * width * table.item_bytes
    first, again = min(read, table.bytes), max(0.0, read - table.bytes)
    memory = kernel.memory(reads=first) + again / kernel.gpu.cache_bandwidth
    waves = max(1.0, bags * math.ceil(width / 32) / (kernel.gpu.processors * 64))
    return kernel["bags.fixed"] + max(memory, waves * count / bags * kernel["bags.step"])


@model("aten.embedding_dense_backward")
def _embedding_backward(kernel: Kernel) -> float:
    """Few indices are taken one after the other; many are sorted, and equal ones added up."""
    op = kernel.op
    gradient, index = op.inputs[0], op.inputs[1]
    fill = kernel["fill.fixed"] + sum(tensor.bytes for tensor in op.outputs) / kernel.gpu.bandwidth
    if index.elements <= 3072:
        return fill + kernel["embedding_backward.fixed"] + index.elements * kernel["embedding_backward.index"]
    # Equal indices are added up ten at a time, and then these sums: so many rows are of the table.
    count, rows = index.elements, op.outputs[0].shape[0]
    sums = count / 10 + rows * (1 - math.exp(-count / rows))
    width = gradient.elements / count
    return (
        fill
        + kernel["embedding_backward.sort"]
        + count * kernel["embedding_backward.sorted"]
        + kernel.cycles(sums * width * kernel["embedding_backward.element"])
    )


_SCANS = ("cumsum", "cumprod", "logcumsumexp", "_logcumsumexp", "cummax", "cummin", "_cummax_helper", "_cummin_helper")


@model(*(f"aten.{name}" for name in _SCANS), "aten.cumsum_", "aten.cumprod_")
def _scan(kernel: Kernel) -> float:
    """Along rows some blocks of elements after each other; down columns element after element."""
    op = kernel.op
    lines = _lines(op.inputs[0], op.arguments.get("dim", -1))
    heavy = kernel["scan.exponentials"] if "log" in op.packet else 1.0
    if "max" in op.packet or "min" in op.packet:
        heavy = kernel["scan.indices"]
    if lines.inner > 1:
        waves = max(1.0, lines.outer * lines.inner / (kernel.gpu.processors * 1024))
        return kernel["scan.fixed"] + max(kernel.memory(), waves * lines.length * kernel["scan.step"])
    rows = lines.elements / lines.length
    if rows == 1 and heavy == 1.0:
        return kernel["scan.whole"] + kernel.memory() * 1.2
    # A block has 512 threads for about as many rows as columns of them as the data have, and 2 elements per thread.
    across = (9 + math.ceil(math.log2(max(1, lines.length))) - math.ceil(math.log2(max(1.0, rows)))) // 2
    threads = 1 << min(9, max(4, across))
    blocks = math.ceil(rows / (512 // threads))
    together = min(4.0, max(1.0, blocks / kernel.gpu.processors))
    steps = math.ceil(blocks / (kernel.gpu.processors * 4)) * math.ceil(lines.length / (2 * threads))
    step = (kernel["scan.block_step"] + kernel["scan.neighbor"] * (together - 1)) * heavy
    return kernel["scan.fixed"] + max(kernel.memory(), steps * step)


def _block_sort(kernel: Kernel, rows: float, length: int, item: float) -> float:
    """Rows of up to 4096 elements, each by one block of a size that torch has compiled.

    Up to 32 elements by compare and exchange; above in passes over 4 bits each, of 128 elements or of 1024 and more,
    whose code is long since every thread has 32 of them.
    """
    if length <= 32:
        return kernel["sort.fixed"] + kernel.cycles(rows * 32 * kernel["sort.short_element"])
    padded = 128 if length <= 128 else max(1024, 1 << math.ceil(math.log2(length)))
    passes, each = 2 * item, 4 if padded == 128 else 32
    code = kernel["sort.code"] if each == 32 else 0.0
    alone = code + passes * each * kernel["sort.pass_element"]
    return kernel["sort.fixed"] + _both(alone, kernel.cycles(rows * padded * passes * kernel["sort.element"]))


@model("aten.sort", "aten.argsort", "aten.msort")
def _sort(kernel: Kernel) -> float:
    """Rows of up to 4096 elements within a block, long ones by passes over the digits of all."""
    return _sort_of(kernel, _lines(kernel.op.inputs[0], kernel.op.arguments.get("dim", -1)))


def _sort_of(kernel: Kernel, lines: _Lines) -> float:
    """A sort of some lines."""
    rows = lines.outer * lines.inner
    if lines.length <= 4096:  # values and places are copied and numbered first
        moved = lines.elements * (2 * lines.item + 3 * 8) / kernel.gpu.bandwidth
        return kernel["sort.before"] + moved + _block_sort(kernel, rows, lines.length, lines.item)
    fixed = kernel["sort.long_fixed"] + lines.item * kernel["sort.digit"]
    if rows >= 128:  # a block for each row
        passes = math.ceil(8 * lines.item / 6)
        return fixed + kernel.cycles(lines.elements * passes * kernel["sort.segment_element"])
    again = 1.0
    if rows > 1:  # all rows at once, and again by the number of the row
        fixed, again = fixed * kernel["sort.again"], kernel["sort.again"]
    return fixed + kernel.cycles(lines.elements * kernel["sort.long_element"] * lines.item * again)


@model("aten.topk", "aten.kthvalue", "aten.median")
def _topk(kernel: Kernel) -> float:
    """A block for each row looks for the threshold digit by digit; many blocks where rows are long or many."""
    op = kernel.op
    if op.packet == "aten.median" and "dim" not in op.arguments:
        return _sort_of(kernel, _lines(op.inputs[0], None))
    lines = _lines(op.inputs[0], op.arguments.get("dim", -1))
    rows = lines.elements / lines.length
    count = int(op.arguments.get("k", 1))
    after = _block_sort(kernel, rows, count, lines.item) if 1 < count <= 4096 and "topk" in op.packet else 0.0
    several = (rows <= 20 and lines.length >= 20000) or (20 < rows <= 40 and lines.length >= 10000) or (
        40 < rows < 80 and lines.length >= 8000
    ) or (80 <= rows < 200 and lines.length >= 5000) or (200 <= rows < 800 and lines.length >= 3000) or (
        rows >= 800 and lines.length >= 1000
    )  # fmt: skip
    if several:  # 8 bits at a time
        work = lines.elements * kernel["topk.several_element"] + rows * kernel["topk.several_row"]
        return after + kernel["topk.several_fixed"] + lines.item * (kernel["topk.several_digit"] + kernel.cycles(work))
    # 2 bits at a time by a block of a thread for each element, up to 1024; and a last time to gather.
    threads = min(1024, 32 * math.ceil(lines.length / 32))
    waves = max(1.0, rows / (kernel.gpu.processors * min(32, 2048 // threads)))
    steps = math.ceil(lines.length / threads)
    digits = 4 * lines.item if count > 1 else kernel["topk.first"] * 4 * lines.item
    block = kernel["topk.block"] + (digits + 2) * (kernel["topk.digit"] + steps * kernel["topk.step"])
    return after + kernel["topk.fixed"] + waves * block


_SLOW_MODE = 2048
"""The most frequent value of longer rows is found row after row, each by a sort of its own."""


@model("aten.mode")
def _mode(kernel: Kernel) -> float:
    """A sort of each row by a block, or by kernels of its own."""
    lines = _lines(kernel.op.inputs[0], kernel.op.arguments.get("dim", -1))
    rows = lines.elements / lines.length
    if lines.length > _SLOW_MODE:
        return rows * kernel["sort.long_row"]
    return kernel["sort.before"] + _block_sort(kernel, rows, lines.length, lines.item)


@model("aten._unique2", "aten._unique", "aten.randperm", "aten.histc", "aten.bincount")
def _sorted_apart(kernel: Kernel) -> float:
    """A sort of all elements, and passes over them; a histogram has passes alone. The host waits for their number.

    Of `bincount`, the host waits for the least and the largest; `histc` with limits has them.
    """
    op = kernel.op
    count = _elements(*op.inputs) or _elements(*op.outputs)
    if op.packet in ("aten.histc", "aten.bincount"):
        return _waited(kernel, 6) + 3 * kernel.memory() + kernel.cycles(count * kernel["selected.bin"])
    item = min((tensor.item_bytes for tensor in op.inputs), default=4.0)
    waited = _waited(kernel, 4) if op.packet != "aten.randperm" else 0.0
    return waited + 2 * kernel.memory() + _key_sort(kernel, count, item)


@model("aten.unique_consecutive", "aten.unique_dim", "aten.unique_dim_consecutive")
def _neighbors_apart(kernel: Kernel) -> float:
    """Passes that compare neighbors and gather those that differ; the host waits for their number."""
    return _waited(kernel, 4) + 2 * kernel.memory()


@model("aten.searchsorted", "aten.bucketize")
def _searched(kernel: Kernel) -> float:
    """Each value halves the sorted sequence until it is found."""
    ordered = kernel.op.tensor("sorted_sequence" if "search" in kernel.op.packet else "boundaries")
    steps = math.log2(max(2, ordered.shape[-1]))
    waves = max(1.0, _elements(*kernel.op.outputs) / (kernel.gpu.processors * 2048))
    return kernel["vector.fixed"] + max(kernel.memory(), waves * steps * kernel["selected.step"])


@model("aten.multinomial")
def _multinomial(kernel: Kernel) -> float:
    """The largest of the probabilities, each divided by a random number, after checks of them on the device."""
    source = kernel.op.inputs[0]
    whole, rows = _lines(source, None), _lines(source, -1)
    element = kernel["reduction.element"]
    checks = 2 * _reduce(kernel, whole, element) + _reduce(kernel, rows, element) + _small(kernel, 8)
    drawn = kernel["generated.fixed"] + kernel.memory(reads=source.bytes, writes=2 * source.bytes) + _small(kernel, 1)
    largest = _reduce(kernel, rows, kernel["reduction.argmax"], 1.0, kernel["reduction.pairs"])
    return checks + drawn + largest + 5 * kernel["gpu.gap"]


@model("aten._cdist_forward", "aten._pdist_forward")
def _distances(kernel: Kernel) -> float:
    """A block of 256 threads for each pair of points."""
    pairs, width = _elements(*kernel.op.outputs), kernel.op.inputs[0].shape[-1]
    block = kernel["distance.block"] + math.ceil(width / 256) * kernel["distance.step"]
    waves = max(1.0, pairs / (kernel.gpu.processors * 8))
    return kernel["vector.fixed"] + _both(kernel.memory(), waves * block)


@model("aten._euclidean_dist")
def _distances_by_product(kernel: Kernel) -> float:
    """A product of the points and their squares, put together by small kernels, and two passes over the result."""
    op = kernel.op
    first, second = op.inputs[:2]
    m, n, k = first.shape[-2], second.shape[-2], first.shape[-1] + 2
    batch = op.outputs[0].elements // max(1, m * n)
    small = 10 * (kernel["vector.fixed"] + kernel["gpu.gap"]) + 3 * kernel.memory(writes=first.bytes + second.bytes)
    dtype = _dtype(kernel)
    engine = _engine(kernel, dtype)
    product = kernel[f"matrix_{engine}.fixed"] + _product(kernel, batch, m, n, k, dtype, kind=f"matrix_{engine}")
    passes = 2 * (kernel["vector.fixed"] + 2 * op.outputs[0].bytes / kernel.gpu.bandwidth)
    return small + max(product, op.outputs[0].bytes / kernel.gpu.bandwidth) + passes


_FACTORIZED: Mapping[str, tuple[str, int, int]] = {
    "linalg_cholesky_ex": ("cholesky", 0, 0), "cholesky": ("cholesky", 0, 0), "linalg_lu_factor_ex": ("lu", 0, 0),
    "linalg_lu": ("lu", 0, 0), "_linalg_det": ("lu", 0, 6), "_linalg_slogdet": ("lu", 0, 8),
    "_linalg_solve_ex": ("lu", 2, 2), "linalg_inv_ex": ("lu", 2, 2), "linalg_lu_solve": ("", 2, 2),
    "cholesky_solve": ("", 2, 1), "_cholesky_solve_helper": ("", 2, 1), "cholesky_inverse": ("", 2, 1),
    "linalg_solve_triangular": ("", 1, 0), "triangular_solve": ("", 1, 0), "linalg_qr": ("qr", 0, 4),
    "geqrf": ("reflectors", 0, 0), "linalg_householder_product": ("reflectors", 0, 0), "linalg_lstsq": ("qr", 1, 4),
    "_linalg_eigh": ("eigh", 0, 1), "_linalg_svd": ("svd", 0, 4), "linalg_pinv": ("svd", 0, 10),
}  # fmt: skip
"""By operator: the factorization, how many triangular systems are solved, and how many small kernels there are."""


@model(*(f"aten.{name}" for name in _FACTORIZED))
def _factorized(kernel: Kernel) -> float:
    """Columns that follow each other, beside products at a low rate; for eigenvalues, rotations of each two columns.

    A column waits for the one before it, in a batch as much as alone; a multiprocessor has few matrices of a batch at
    once.
    """
    op = kernel.op
    kind, systems, small = _FACTORIZED[op.packet.removeprefix("aten.")]
    square = next((tensor for tensor in op.inputs if len(tensor.shape) > 1), None)
    if square is None:
        return _stream(kernel)
    columns = min(square.shape[-2:])
    batch = square.elements // max(1, math.prod(square.shape[-2:]))
    turns = max(1.0, batch / (2 * kernel.gpu.processors))
    seconds = small * (kernel["vector.fixed"] + kernel["gpu.gap"])
    if kind:
        one = batch > 1 and columns <= _TOGETHER and kind in ("lu", "cholesky")  # one kernel, a warp for each matrix
        seconds += kernel["factorization.system_fixed" if one else "factorization.fixed"]
        apart = batch > 1 and kind in ("eigh", "svd", "qr") and columns > _TOGETHER  # one matrix after the other
        column = kernel[f"factorization.{kind}"] + columns * kernel.get(f"factorization.{kind}_rotation", 0.0)
        seconds += columns * column * (batch if apart else turns)
        if kind == "lu" and batch > 1 and columns > _TOGETHER:  # kernels for each panel: swaps, pointers, products
            seconds += 2 * columns * kernel["factorization.panel"]
    seconds += systems * (kernel["factorization.system_fixed"] + columns * kernel["factorization.system"] * turns)
    flops = sum(kernel.cost.product_flops.values()) / (kernel["factorization.rate"] * kernel.gpu.vector)
    return seconds + flops + kernel.memory()


@model("aten._linalg_check_errors")
def _checked(kernel: Kernel) -> float:
    """The host waits for what a factorization says of itself."""
    return kernel["selected.wait"]


_LAUNCHES: Mapping[str, int] = {
    "linalg_cholesky_ex": 8, "linalg_lu_factor_ex": 8, "_linalg_det": 17, "_linalg_slogdet": 19, "_linalg_solve_ex": 18,
    "linalg_inv_ex": 18, "_linalg_eigh": 31, "_linalg_svd": 40, "linalg_lstsq": 20, "linalg_qr": 14, "multinomial": 16,
}  # fmt: skip
"""Kernels and copies of one op, by operator, for a matrix alone or for small ones together."""
_BY_PANELS = ("linalg_lu_factor_ex", "_linalg_solve_ex", "linalg_inv_ex", "_linalg_det", "_linalg_slogdet")
"""Operators that decompose batches of larger matrices by panels, with about two calls for each column."""


def _factorized_launches(op: Op) -> int:
    name = op.packet.removeprefix("aten.")
    launches = _LAUNCHES.get(name, 1)
    square = next((tensor for tensor in op.inputs if len(tensor.shape) > 1), None)
    if square is not None and name in _BY_PANELS:
        columns = min(square.shape[-2:])
        if square.elements > math.prod(square.shape[-2:]):
            launches += 2 * columns if columns > _TOGETHER else -5
    return launches


_TOGETHER = 32
"""Matrices of a batch with more columns are decomposed one after the other where no batched kernel exists."""


@model("aten.linalg_matrix_exp")
def _exponential(kernel: Kernel) -> float:
    """Powers of the matrix up to the eighteenth by five products, and squares; the host waits for the norms."""
    source = kernel.op.inputs[0]
    size = source.shape[-1]
    batch = source.elements // max(1, size * size)
    engine = _engine(kernel, source.dtype)
    product = _product(kernel, batch, size, size, size, source.dtype, kind=f"matrix_{engine}")
    moved = 3 * source.bytes / kernel.gpu.bandwidth
    passes = 30 * (kernel["vector.fixed"] + kernel["gpu.gap"] + moved)
    return _waited(kernel, 8) + passes + 8 * (kernel[f"matrix_{engine}.fixed"] + max(product, moved))


@model("pooling")
def _pooling(kernel: Kernel) -> float:
    """A thread for each result, whose taps it reads one by one; backward a thread for each gradient of the input."""
    op = kernel.op
    name = op.packet
    out = op.outputs[0] if op.outputs else op.inputs[0]
    source = op.inputs[0]
    backward = "backward" in name
    dimensions = 3 if "3d" in name else 1 if "1d" in name else 2
    if "upsample" in name:
        kind = "linear" if "linear" in name or "cubic" in name else "nearest"
        if kind == "linear" and not backward and (dimensions != 2 or out.strides[1] != 1):
            # A thread for each place of an image goes through all images and channels.
            planes: float = math.prod(out.shape[:2])
            places = math.prod(out.shape[2:])
            waves = math.ceil(places / (kernel.gpu.processors * 1024))
            if name.endswith("_aa"):  # a thread for each result of each plane, whose taps it reads one by one
                scales = zip(source.shape[2:], out.shape[2:], strict=True)
                support = 4 if "cubic" in name else 2
                taps = math.prod(math.ceil(support * max(1.0, size / few)) + 1 for size, few in scales)
                waves = math.ceil(out.elements / (kernel.gpu.processors * 1024))
                return kernel["pooling.fixed"] + max(kernel.memory(), waves * taps * kernel["pooling.antialias"])
            if "cubic" in name:
                planes *= kernel["pooling.cubic"]
            elif dimensions != 2:
                planes *= kernel[f"pooling.linear_{dimensions}"]
            return kernel["pooling.fixed"] + max(kernel.memory(), waves * planes * kernel["pooling.plane"])
        many = source if backward else out
        cycles = kernel[f"pooling.{kind}{'_backward' * backward}"]
        if kind == "nearest" and not backward and dimensions == 2 and out.shape[1] > 1 and out.strides[1] == 1:
            cycles *= kernel["pooling.nearest_last"]
        fill = source.bytes / kernel.gpu.bandwidth if backward and kind == "linear" else 0.0
        work = kernel.cycles(many.elements * cycles)
        if kind == "nearest" and backward:  # a thread for each place and channel goes through all images
            waves = math.ceil(out.elements / out.shape[0] / (kernel.gpu.processors * 2048))
            work = max(work, waves * out.shape[0] * kernel["pooling.nearest_image"])
        fixed = kernel["pooling.nearest_fixed" if kind == "nearest" else "pooling.fixed"]
        return fixed + fill + _both(kernel.memory(), work)
    if "adaptive" in name:
        many = source if not backward else out
        if not backward and source.shape[1] > 1 and source.strides[1] == 1:
            walk = _adaptive_last_steps(source, out) * kernel["pooling.adaptive_place"]
            return kernel["pooling.fixed"] + _both(kernel.memory(), walk)
        if not backward:
            # A block of 256 threads for each plane, whose threads read the window of one result each.
            taps = math.prod(math.ceil(size / few) for size, few in zip(source.shape[2:], out.shape[2:], strict=True))
            cycles = kernel["pooling.adaptive_plane"] + taps * kernel["pooling.adaptive_tap"]
            blocks = kernel.cycles(math.prod(source.shape[:2]) * cycles)
            return kernel["pooling.fixed"] + _both(kernel.memory(), max(blocks, taps * kernel["pooling.adaptive_wait"]))
        work = kernel.cycles(many.elements * kernel["pooling.adaptive"])
        windows = zip(out.shape[2:], source.shape[2:], strict=True)
        if many.item_bytes < 4:  # additions by atomics, which compare and swap in 16 bits, one after the other
            taps = math.prod(math.ceil(size / few) for size, few in windows)
            turns = max(1.0, math.prod(source.shape) / (kernel.gpu.processors * 2048))
            work = max(work, turns * taps * kernel["pooling.adaptive_atomic"])
        return kernel["pooling.fixed"] + _both(kernel.memory(), work)
    window = _by_dimension(op.arguments.get("kernel_size", 2), dimensions)
    stride = _by_dimension(op.arguments.get("stride") or window, dimensions)
    taps = math.prod(window)
    last = dimensions == 2 and source.shape[1] > 1 and source.strides[1] == 1
    if backward:
        kind = "average" if "avg" in name else "largest"
        fill = kernel["fill.fixed"] + out.bytes / kernel.gpu.bandwidth
        # A gradient of the input is the sum over the windows that it is in.
        taps = math.prod(math.ceil(size / step) for size, step in zip(window, stride, strict=True))
        many = source if dimensions == 3 else out
        cycles = kernel[f"pooling.{kind}_backward"] + kernel["pooling.window"] * taps
    else:
        fill = 0.0
        many = out
        cycles = kernel["pooling.result"] + kernel["pooling.tap"] * taps
        if last and "avg" in name:
            cycles *= kernel["pooling.average_last"]
    waits = taps * kernel["pooling.wait"]
    if last and "max" in name:
        waits = taps * _last_steps(out, 2 if backward else 4, kernel.gpu.processors) * kernel["pooling.last_step"]
    threads = many.elements if dimensions < 3 else _block_threads(many)
    return fill + kernel["pooling.fixed"] + _both(kernel.memory(), max(waits, kernel.cycles(threads * cycles)))


def _block_threads(volume: Tensor) -> int:
    """Threads of blocks of 32 x 8 that each lie along the width and height of one plane."""
    height, width = volume.shape[-2:]
    planes = volume.elements // max(1, height * width)
    return planes * math.ceil(width / 32) * math.ceil(height / 8) * 256


def _by_dimension(value: Any, dimensions: int) -> Sequence[int]:
    """An argument that has a number for each dimension, or one for all."""
    numbers = _numbers(value)
    return numbers if len(numbers) == dimensions else (numbers[0],) * dimensions


def _adaptive_last_steps(source: Tensor, out: Tensor) -> float:
    """How many elements a thread adds up one after the other in an adaptive average with channels last.

    Blocks of up to 1024 threads lie along channels, width and height; a thread has up to 4 channels and 2 x 2 results.
    """
    channels, height, width = out.shape[1:]
    wide = min(_power(width), 1024 // min(_power(channels), 32))
    high = min(_power(height), 1024 // min(_power(channels), 32) // wide)
    across = min(_power(channels), 1024 // (wide * high))
    taps = math.prod(math.ceil(size / few) for size, few in zip(source.shape[2:], out.shape[2:], strict=True))
    own = min(2, math.ceil(height / high)) * min(2, math.ceil(width / wide)) * min(4, math.ceil(channels / across))
    return float(own * taps)


def _power(size: int) -> int:
    """The largest power of two that is not above a size."""
    return 1 << int(math.log2(max(1, size)))


def _last_steps(out: Tensor, most: int, processors: int) -> float:
    """How many results a thread computes one after the other where channels are last, at most so many along a side.

    Blocks of up to 1024 threads lie along channels, width and height.
    """
    batch, channels, height, width = out.shape
    threads, block = 1024, []
    for size, limit in ((channels, 32), (width, 1024), (height, 1024)):
        block.append(min(1 << int(math.log2(max(1, size))), limit, threads))
        threads //= block[-1]
    across, wide, high = block
    blocks = batch * math.ceil(channels / (4 * across))
    blocks *= math.ceil(width / (most * wide)) * math.ceil(height / (most * high))
    waves = math.ceil(blocks / (processors * (2048 // math.prod(block))))
    return waves * min(most, math.ceil(width / wide)) * min(most, math.ceil(height / high))


_GATES = {0: 1, 1: 1, 2: 4, 3: 3}
"""Matrices of a cell by cuDNN's number of its kind: ReLU, tanh, LSTM, GRU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Network:
    """A recurrent network: its sizes, and whether the weights of a layer stay on a multiprocessor."""

    chains: int
    """Layers in each direction; each takes its steps one after the other."""
    steps: int
    batch: int
    matrix: int
    """Elements of the matrices that a step multiplies its state with."""
    resident: bool


def _network(op: Op, constants: Constants) -> _Network:
    source = op.tensor("input")
    hidden = int(op.arguments.get("hidden_size", 0)) or op.tensors("hx")[0].shape[-1]
    first = bool(op.arguments.get("batch_first"))
    steps, batch = (source.shape[1], source.shape[0]) if first else (source.shape[0], source.shape[1])
    matrix = _GATES.get(int(op.arguments["mode"]), 4) * hidden * hidden
    return _Network(
        chains=int(op.arguments.get("num_layers", 1)) * (2 if op.arguments.get("bidirectional") else 1),
        steps=max(1, steps),
        batch=batch if len(source.shape) > 2 else 1,
        matrix=matrix,
        resident=matrix * source.item_bytes <= constants["recurrent"]["on_chip"] and source.dtype != "bfloat16",
    )


_REGISTERS = 2**16
"""Registers of a multiprocessor, of 4 bytes each."""


@model("recurrent")
def _recurrent(kernel: Kernel) -> float:
    """Steps after each other: by one kernel for each layer where the weights stay on the chip, else some per step."""
    op, gpu = kernel.op, kernel.gpu
    source, network = op.tensor("input"), _network(op, kernel.constants)
    if network.resident:
        # Sequences are spread over multiprocessors, each of which goes through all weights.
        step = kernel["recurrent.resident_step"] + network.matrix * kernel["recurrent.resident_weight"] / gpu.clock
        step += network.batch * kernel["recurrent.resident_sequence"]
        if network.matrix >= _REGISTERS:  # more weights than registers
            step += network.matrix * kernel["recurrent.spilled_weight"] / gpu.clock
    else:
        stored = network.matrix * source.item_bytes
        fits = stored * network.chains < kernel["recurrent.cached"]
        # Chains run beside each other, so that one fills the gaps between the kernels of the others.
        step = kernel["recurrent.stepped_step"] + kernel["recurrent.step_alone"] / network.chains
        step += stored / (gpu.cache_bandwidth if fits else gpu.bandwidth)
        if op.arguments.get("bidirectional"):  # neither direction waits for the other
            step *= kernel["recurrent.direction"]
    layer = kernel["recurrent.layer"]
    if network.resident and network.matrix >= _REGISTERS:
        layer += network.matrix * kernel["recurrent.spilled_load"] / gpu.clock
    if "backward" in op.packet:
        step *= kernel["recurrent.backward"]
        layer *= kernel["recurrent.backward_layer"]
    rate = gpu.matrix.get(_dtype(kernel), gpu.vector)
    products = sum(kernel.cost.product_flops.values()) / rate * kernel["recurrent.products"]
    return kernel["recurrent.fixed"] + network.chains * (layer + network.steps * step) + products


def kernel_count(op: Op, constants: Constants) -> int:
    """How many kernels an op launches, where these are so many that the time of the host counts; else 1."""
    if "convolution" in op.packet:
        return 1 + isinstance(op.arguments.get("bias"), Tensor)
    if op.packet not in ("aten._cudnn_rnn", "aten._cudnn_rnn_backward"):
        return _factorized_launches(op)
    network = _network(op, constants)
    each = constants["recurrent"]["kernels_backward" if "backward" in op.packet else "kernels"]
    return 1 if network.resident else math.ceil(each * network.chains * network.steps)


def _largest_prime(number: int) -> int:
    """The largest prime factor."""
    largest, factor = 1, 2
    while factor * factor <= number:
        while number % factor == 0:
            largest, number = factor, number // factor
        factor += 1
    return max(largest, number)


_DIRECT_PRIME = 127
"""Lengths with a larger prime factor are transformed by a convolution (Bluestein's algorithm)."""
_WHOLE_CHIP = 16384
"""A transform of so many points needs the shared memory of a multiprocessor for itself."""


@model("fourier")
def _fourier(kernel: Kernel) -> float:
    """A pass for each dimension. Blocks that have a multiprocessor for themselves load, compute and store in turns."""
    op = kernel.op
    dims = op.arguments.get("dim") or (-1,)
    length = max(op.inputs[0].shape[int(dim)] for dim in dims) if op.inputs[0].shape else 1
    passes = float(len(dims))
    inverse = "c2r" in op.packet
    turned = kernel["fourier.inverse"] if inverse else 1.0
    size = int(op.arguments.get("last_dim_size") or length)
    fixed = kernel["fourier.fixed"] * len(dims) + kernel["gpu.gap"] * (len(dims) - 1)
    if inverse:  # a copy, the other half of the numbers, and the scale have kernels of their own
        fixed += kernel["fourier.inverse_fixed"]
    prime = _largest_prime(size)
    if prime > 7:
        turned *= kernel["fourier.odd"] * (kernel["fourier.long"] if size > 8192 else 1.0)
    if prime > _DIRECT_PRIME:
        fixed += kernel["fourier.odd_fixed"]
    # A transform is one block's, with some points for each thread; of real numbers two make one complex point.
    points = min(2 * _WHOLE_CHIP, size if "c2c" in op.packet else size // 2)
    block = len(dims) * points * kernel["fourier.point"]
    memory = passes * turned * kernel.memory() * kernel["fourier.bytes"]
    if points >= 2 * _WHOLE_CHIP and prime <= 7:  # two kernels, each of which transforms one factor of the length
        return fixed + kernel["fourier.fixed"] + kernel["gpu.gap"] + 2 * memory
    if points < _WHOLE_CHIP or prime > 7:
        return fixed + max(block, memory)
    rows = op.inputs[0].elements / length
    return fixed + memory + max(1, math.ceil(rows / kernel.gpu.processors)) * block


_LISTED = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
"""How many tensors of each list one launch has, by the number of lists."""


@model("optimizer")
def _lists(kernel: Kernel) -> float:
    """Blocks of up to 65536 elements of one tensor; a launch has up to 320 of them, of some tens of tensors.

    A block goes through its elements 2048 at a time. A fused step of SGD computes and loads less than one of Adam.
    """
    op = kernel.op
    tensors = op.written or op.inputs
    name = "fused" if "fused" in op.packet else "foreach"
    chunks = sum(math.ceil(tensor.elements / 65536) for tensor in tensors)
    lists = max(1, len(op.mutated)) if name == "fused" else 1
    chunks //= lists
    launches = math.ceil(chunks / 320)
    longest = min(65536, _elements(*tensors))
    # Vectors of four elements where all tensors have whole ones.
    one_by_one = any(tensor.elements % 4 for tensor in tensors)
    if name == "fused":
        launches = max(launches, math.ceil(len(tensors) / lists / _LISTED.get(lists, 30)))
        share = kernel["fused.simple"] if "sgd" in op.packet or "adagrad" in op.packet else 1.0
        wait = kernel["fused.one_by_one_step"] if one_by_one else kernel["fused.step"]
        cycles = kernel["fused.element"] * (kernel["fused.one_by_one"] if one_by_one else 1.0)
        alone = share * math.ceil(longest / 2048) * wait
        beside = share * longest * cycles / kernel.gpu.clock
        full = chunks / launches if launches > math.ceil(chunks / 320) else 320.0
        blocks = [full] * (launches - 1) + [chunks - full * (launches - 1)]
        memory = kernel.memory() * kernel["fused.bytes"] / max(1, chunks)
        return sum(
            kernel["fused.fixed"]
            + max(alone, _both(memory * number, (math.ceil(number / kernel.gpu.processors) - 1) * beside + alone))
            for number in blocks
        )
    block = longest * kernel["foreach.block_element"]
    count = sum(tensor.elements for tensor in tensors)
    work = kernel.cycles(count * kernel["foreach.element"] * (kernel["foreach.one_by_one"] if one_by_one else 1.0))
    return launches * kernel["foreach.fixed"] + block + _both(kernel.memory() * kernel["foreach.bytes"], work)


_TILES = (
    (256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (128, 32), (32, 128), (64, 64), (64, 32), (32, 64),
    (32, 32), (64, 16), (16, 64), (16, 16),
)  # fmt: skip
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
_FITTED_COLUMNS = {64: 8, 128: 32, 192: 16, 256: 32}
"""Steps of the columns of a tile by its rows. The instructions allow every multiple of 8; with more than 64 rows,
cuBLAS nearly always takes one of fewer widths."""
_TILE_ELEMENTS = 256 * 128
"""Elements of the largest tile, whose sums are in registers."""


def _usual_tiles(m: int, n: int) -> Iterator[tuple[int, int]]:
    """Tiles that are not much larger than the result."""
    for rows, columns in _TILES:
        if rows <= max(16, 2 * m) and columns <= max(16, 2 * n):
            yield rows, columns


def _fitted_tiles(batch: int, m: int, n: int, processors: int) -> Iterator[tuple[int, int]]:
    """Tiles with as few columns as cover the result in some parts or waves, in both orders of rows and columns."""
    for turned in (False, True):
        along, across = (n, m) if turned else (m, n)
        for rows, step in _FITTED_COLUMNS.items():
            if rows >= 2 * along and rows > 64:
                break
            below = batch * math.ceil(along / rows)
            in_waves = (waves * processors // below for waves in (1, 2, 3, 4))
            for parts in {1, 2, 3, 4, *in_waves} - {0}:
                columns = step * math.ceil(across / parts / step)
                if columns <= 256 and rows * columns <= _TILE_ELEMENTS:
                    yield (columns, rows) if turned else (rows, columns)


def _product(
    kernel: Kernel,
    batch: int,
    m: int,
    n: int,
    k: int,
    dtype: str,
    *,
    kind: str,
    alignment: int = 16,
    splits: bool = True,
    smallest: int = 16,
) -> float:
    """The compute time of a matrix product: the best choice of tile and of parts of the contraction.

    Small tiles reach less of the engine's rate, since they load their operands more often. A tile takes a start of its
    own, the time of so many more steps to fill the pipeline and to store its results, and no step along the contraction
    is shorter than the latency of its loads. A contraction in parts adds the pass that sums them up. No edge of a tile
    is shorter than `smallest`.
    """
    gpu = kernel.gpu
    rate = gpu.matrix.get(dtype, gpu.vector) / gpu.processors * kernel[f"{kind}.rate"]
    unaligned = 1.0
    if alignment < 16:
        rate *= kernel[f"matrix.aligned_{alignment}"]
        # Loads of less than 4 bytes go through registers, and no step begins before they have come.
        unaligned = kernel["matrix.unaligned_step"] if alignment < 4 else 1.0
    half, depth = kernel[f"{kind}.half_tile"], int(kernel[f"{kind}.depth"])
    start, latency, fill = kernel[f"{kind}.tile_start"], kernel[f"{kind}.step"], kernel[f"{kind}.fill"]
    best = math.inf
    choices = {*_usual_tiles(m, n)}
    if smallest > 16:
        choices = {tile for tile in choices if min(tile) >= smallest and max(tile) > smallest} or {(64, smallest)}
    if kind == "matrix_narrow" and alignment == 16:
        choices.update(_fitted_tiles(batch, m, n, gpu.processors))
    for rows, columns in choices:
        # The loads of a tile grow with its edges and its FLOPs with its area.
        edge = rows * columns / (rows + columns)
        tile_rate = rate * edge / (edge + half) * (85.3 + half) / 85.3
        tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
        for split in _SPLITS:
            if split > 1 and (
                not splits or batch > 1 or k < split * kernel[f"{kind}.split_depth"] or 2 * tiles > gpu.processors
            ):
                break
            steps = math.ceil(k / split / depth)
            waves: float = math.ceil(tiles * split / gpu.processors)
            if waves > 8:  # blocks start as others end
                waves = tiles * split / gpu.processors + 0.5
            work = 2.0 * rows * columns * (steps * depth + fill) / tile_rate
            seconds = waves * (max(work, steps * latency * unaligned) + start)
            if split > 1:
                seconds += kernel[f"{kind}.split"] + 8.0 * split * m * n * batch / gpu.cache_bandwidth
            best = min(best, seconds)
    return best


def _dtype(kernel: Kernel) -> str:
    """The dtype that most of its products are computed in."""
    flops = kernel.cost.product_flops
    return max(flops, key=lambda name: flops[name], default="float32")


def _engine(kernel: Kernel, dtype: str) -> str:
    """The group of constants for products in a dtype: on the matrix engine in up to 16 bits, in more, or without it."""
    if dtype not in kernel.gpu.matrix:
        return "vector"
    return "wide" if dtype in ("tfloat32", "float64", "float32") else "narrow"


def _alignment(*tensors: Tensor) -> int:
    """The bytes to which all rows of matrices are aligned, up to 16."""
    aligned = 16
    for tensor in tensors:
        strides = [stride for size, stride in zip(tensor.shape, tensor.strides, strict=True) if size > 1 and stride > 1]
        for stride in strides:
            while (stride * tensor.item_bytes) % aligned:
                aligned //= 2
    return max(2, aligned)


_VECTOR_STEPS = 8
"""Longer dot products are split over more threads."""


def _vector_product(kernel: Kernel, k: int) -> float:
    """A matrix and a vector: the bytes of the matrix, after the first of the steps along each dot product.

    Threads load numbers of 16 bits in less than whole vectors, which takes longer than the bytes do.
    """
    steps = min(_VECTOR_STEPS, math.ceil(k / 512))
    matrix = max(kernel.op.inputs, key=lambda tensor: tensor.bytes)
    share = kernel["matrix.vector_bytes"]
    if matrix.item_bytes == 2:
        share = kernel["matrix.vector_bytes_16" if _alignment(matrix) == 16 else "matrix.vector_bytes_unaligned"]
    return kernel["matrix.vector_fixed"] + steps * kernel["matrix.vector_step"] + kernel.memory() * share


def _is_in_tiles(kernel: Kernel, batch: int, m: int, n: int, k: int) -> bool:
    """Whether cuBLAS multiplies a matrix and a vector in tiles of 8 columns, on the matrix engine.

    It does so in 16 bits if the rows and the columns of the matrix are multiples of 16 bytes.
    """
    narrow = all(tensor.item_bytes == 2 for tensor in kernel.op.inputs if tensor.shape)
    return narrow and batch == 1 and max(m, n) % 8 == 0 and k % 8 == 0


_ROWS_LIKE_ONE = 4
"""So few rows are multiplied as a vector is, where no matrix engine does it."""


_LARGE_K = 128
"""A shorter contraction is not taken in parts."""


def _copied_first(kernel: Kernel) -> float:
    """A whole matrix that is added to a product is copied into the result before."""
    op = kernel.op
    if op.packet not in ("aten.addmm", "aten.baddbmm") or len(op.inputs[0].shape) < 2 or op.mutated:
        return 0.0
    size = op.outputs[0].bytes
    return kernel["vector.fixed"] + kernel.memory(reads=op.inputs[0].bytes, writes=size) + kernel["gpu.gap"]


def _adds_bias(op: Op) -> bool:
    """Whether a product adds a row to its result, which cuBLAS does in the kernel that stores it."""
    return op.packet == "aten.addmm" and len(op.inputs[0].shape) == 1


@model("matrix")
def _matrix(kernel: Kernel) -> float:
    """Tiles over multiprocessors, beside the bytes of the three matrices."""
    sizes = product_sizes(kernel.op)
    if sizes is None and "grouped" in kernel.op.packet:
        rate = kernel.gpu.matrix.get(_dtype(kernel), kernel.gpu.vector) * kernel["matrix.grouped"]
        return kernel["matrix.grouped_fixed"] + _both(kernel.memory(), sum(kernel.cost.product_flops.values()) / rate)
    dtype = _dtype(kernel)
    engine = _engine(kernel, dtype)
    if sizes is None:
        matrix = next((tensor for tensor in kernel.op.inputs if len(tensor.shape) == 2), None)
        if matrix is None:
            depths = [tensor.shape[-1] for tensor in kernel.op.inputs if tensor.shape]
            return _vector_product(kernel, max(depths, default=1))
        sizes = (1, matrix.shape[0], 1, matrix.shape[1])
    batch, m, n, k = sizes
    if min(m, n) == 1 and not (engine == "narrow" and _is_in_tiles(kernel, batch, m, n, k)):
        return _vector_product(kernel, k)
    if engine == "vector" and min(m, n) <= _ROWS_LIKE_ONE:
        return _vector_product(kernel, k) + kernel["matrix.rows_fixed"] + kernel.memory() * kernel["matrix.rows_bytes"]
    aligned = _alignment(*(tensor for tensor in (*kernel.op.inputs, *kernel.op.outputs) if len(tensor.shape) > 1))
    memory = kernel.memory() * kernel["matrix.bytes"]
    if engine == "vector":
        aligned = 16
    elif 4 <= aligned < 16 and min(m, n) <= 8:  # a kernel for few rows, which does not mind
        memory *= kernel["matrix.bytes_few"]
        aligned = 16
    elif aligned < 16:
        memory *= kernel[f"matrix.bytes_{aligned}"]
    compute = _product(kernel, batch, m, n, k, dtype, kind=f"matrix_{engine}", alignment=aligned)
    if engine == "wide" and aligned < 16:  # kernels without the matrix engine, where they are faster
        compute = min(compute, _product(kernel, batch, m, n, k, "float32", kind="matrix_vector"))
    if dtype == "int8":
        compute /= kernel["matrix.integers"]
    fixed = kernel[f"matrix_{engine}.fixed"] + (kernel["matrix.unaligned_fixed"] if aligned < 4 else 0.0)
    if engine == "vector" and _adds_bias(kernel.op) and k >= _LARGE_K:
        tiles = batch * math.ceil(m / 32) * math.ceil(n / 32)
        if tiles < kernel.gpu.processors:  # parts of the contraction, with a scaling before and an epilogue after them
            flops = 2.0 * batch * m * n * k / (kernel["matrix.parts_rate"] * kernel.gpu.vector)
            fixed = kernel["matrix.parts_fixed"] + k * kernel["matrix.parts_step"]
            compute = max(compute, flops)
    return _copied_first(kernel) + fixed + _both(memory, compute, sharpness=_SHARPNESS[engine])


@model("nearpeak.linear_cross_entropy", "nearpeak.linear_cross_entropy_backward")
def _linear_cross_entropy(kernel: Kernel) -> float:
    """A product for the logits, a pass over them that leaves their gradients, and a product for each gradient wanted.

    Chunks of tokens are as large as it takes for this to cost hardly more than all tokens at once.
    """
    op = kernel.op
    hidden, weight, target = op.tensor("hidden"), op.tensor("weight"), op.tensor("target")
    tokens, (classes, features) = target.elements, weight.shape
    dtype = _dtype(kernel)
    engine = _engine(kernel, dtype)
    logits = tokens * classes * hidden.item_bytes
    products = [(tokens, classes, features)]
    if op.arguments["for_hidden"]:
        products.append((tokens, features, classes))
    if op.arguments["for_weight"]:
        products.append((classes, features, tokens))
    aligned = 16 if engine == "vector" else math.gcd(int(classes * hidden.item_bytes), 16)
    memory = kernel.memory(reads=logits + (hidden.bytes + weight.bytes), writes=0)
    if aligned < 16:
        memory *= kernel[f"matrix.bytes_{aligned}"]
    seconds = kernel.memory(reads=logits, writes=logits if len(products) > 1 else 0)
    for m, n, k in products:
        compute = _product(kernel, 1, m, n, k, dtype, kind=f"matrix_{engine}", alignment=aligned)
        seconds += kernel[f"matrix_{engine}.fixed"] + _both(memory, compute, sharpness=_SHARPNESS[engine])
    return seconds


_SHARPNESS = {"narrow": 4.0, "wide": 1.3, "vector": 4.0}
"""How well a product overlaps with its bytes, see `_both`: kernels for 16 bits store a tile while they compute the
next."""


@model("convolution")
def _convolution(kernel: Kernel) -> float:
    """A bias is added to the result by a kernel of its own."""
    op = kernel.op
    if "backward" in op.packet or not isinstance(op.arguments.get("bias"), Tensor):
        return _convolved(kernel)
    size = op.outputs[0].bytes
    return _convolved(kernel) + kernel["gpu.gap"] + _pass(kernel, "permuted", reads=size, writes=size)


def _convolved(kernel: Kernel) -> float:
    """Products of an implicit matrix: results by taps and channels. Channels-first data are turned around first."""
    op = kernel.op
    backward = "backward" in op.packet
    data = op.tensor("input") if "input" in op.arguments else op.tensor("self")
    weight = op.tensor("weight")
    out = op.tensor("grad_output") if backward else op.outputs[0]
    dims = len(weight.shape) - 2
    transposed = bool(op.arguments.get("transposed")) or "transpose" in op.packet
    taps = math.prod(weight.shape[2:])
    groups = int(op.arguments.get("groups", 1) or 1)
    many, few = (out, data) if transposed else (data, out)
    inner, outer = many.shape[1], few.shape[1]
    results = few.elements // max(1, outer)
    dtype = _dtype(kernel)
    engine = _engine(kernel, dtype)
    last = dims > 0 and data.strides[1] == 1 and data.shape[1] > 1
    mask = op.arguments.get("output_mask", (True, True, True)) if backward else (False, False, False)
    strided = any(stride > 1 for stride in _numbers(op.arguments.get("stride", 1)))
    if groups > 1 and weight.shape[1] == 1 and not (transposed and engine == "narrow"):
        return _depthwise(kernel, few.elements, taps, last=last, strided=strided, mask=mask)
    matrix = taps == 1 and not strided
    pad = 4 if engine == "wide" else 8
    channels = inner // groups
    padded = math.ceil(channels / pad) * pad if engine != "vector" else channels
    # Rows, columns and depth of each product. Where windows do not overlap, a place of the wider tensor meets few taps.
    met = max(1.0, sum(kernel.cost.product_flops.values()) / 2 / max(1, sum(map(bool, mask[:2])) if backward else 1))
    wide = many.elements // max(1, inner)
    spread = (wide, channels, math.ceil(met / groups / (wide * channels)))
    steps = (
        math.ceil(padded / _TAP_DEPTH) * _TAP_DEPTH if taps > 1 and pad <= channels and engine != "vector" else padded
    )
    gather = (results, outer // groups, steps * taps)
    packed = groups > 1 and _packs(channels, outer // groups)
    if packed and engine == "narrow" and not last and channels < _FEWEST_TURNED and not transposed:
        packed = False
    if packed:  # tiles along the diagonal of a product of all groups, where most factors are zero
        spread = (wide, inner, math.ceil(met / wide / inner * _PACKED_CHANNELS / channels))
        gather = (results, outer, _PACKED_CHANNELS * taps)
    shapes = []
    if not backward:
        shapes = [spread if transposed else gather]
    if backward and mask[0]:
        shapes.append(gather if transposed else spread)
    weights = (outer // groups, padded * taps, results)
    if backward and mask[1]:
        shapes.append(weights)
    # Without taps, cuDNN calls the kernels of matrix products.
    kind = f"matrix_{engine}" if matrix and groups == 1 else f"convolution_{engine}"
    fixed = kernel[f"{kind}.fixed"]
    if backward and channels < pad and groups == 1:  # channels are padded to whole vectors first
        fixed += kernel["convolution.padded_fixed"]
    patches = not backward and channels < pad and min(weight.shape[2:], default=1) >= 14
    aligned = 16
    if not last and matrix and engine != "vector":  # channels first as they are: rows are as long as an image
        while math.prod(data.shape[2:]) * data.item_bytes % aligned:
            aligned //= 2
    aligned = max(2, aligned)
    # Each product of a backward reads two of the three tensors and writes the third.
    moved = kernel.memory() if not backward else (data.bytes + out.bytes + weight.bytes) / kernel.gpu.bandwidth
    memory = moved * kernel["convolution.bytes"]
    many_taps = taps > _MASKED_TAPS and max(weight.shape[2:]) < 14 and engine != "vector"
    # Channels first, a gradient of the weights of single places is a product only with more channels than these.
    thin = matrix and groups == 1 and not last and engine != "vector" and channels <= _THIN_CHANNELS
    # Channels first, a convolution of single places is a product for each image.
    images = data.shape[0] if matrix and not last and not backward else 1
    seconds = 0.0
    for shape in shapes:
        m, n, k = shape
        product = _product(
            kernel,
            images,
            m // images,
            n,
            k,
            dtype,
            kind=kind,
            alignment=aligned,
            splits=backward or matrix,
            smallest=16 if groups > 1 or matrix or engine == "vector" else _SMALLEST_EDGE,
        )
        if patches:  # a kernel that looks up each of the many taps, with tiles of 128
            waves = math.ceil(math.ceil(m / 128) * math.ceil(n / 128) / kernel.gpu.processors)
            product = waves * math.ceil(k / 64) * kernel["convolution.patch_step"]
        if channels < pad and not backward and not patches and not packed:
            product *= kernel["convolution.thin"]
        if packed and shape is weights:  # a kernel without the matrix engine, for all groups
            work = outer // groups * inner * taps * results
            seconds += max(fixed + kernel.cycles(work * kernel["convolution.grouped_weights"]), memory)
            continue
        if many_taps and shape is weights:
            padded_m = math.ceil(m / 256) * 256  # its tiles have 256 rows
            product = max(product, kernel.cycles(2.0 * padded_m * n * k / kernel["convolution.weights_of_many_taps"]))
        elif many_taps:
            product *= kernel["convolution.many_taps"]
        elif shape is weights and thin:
            product *= kernel["convolution.thin_weights"]
        elif shape is weights and engine == "wide":  # its instructions take no operand across the order of memory
            product *= kernel["convolution.wide_weights"]
        if matrix and groups == 1:
            seconds += fixed + _both(memory, product, sharpness=_SHARPNESS[engine])
        elif groups == 1 or packed:
            seconds += max(fixed + product, memory)
        else:
            between = kernel["convolution.group_bytes"] * (data.bytes + out.bytes) / kernel.gpu.bandwidth
            seconds += max(groups * (kernel["convolution.group"] + product), memory) + between
    turned = 0.0
    if thin and backward and mask[1]:
        turned = _turned(kernel, data) + _turned(kernel, out)
    if not last and not matrix and (backward or engine == "narrow" or channels >= pad):
        passes = sum(map(bool, mask[:2])) if backward else 1
        # A weight without taps is the same in both layouts.
        turned = passes * sum(_turned(kernel, tensor) for tensor in (data, weight, out)[:: 1 if taps > 1 else 2])
    overlap = taps > math.prod(_by_dimension(op.arguments.get("stride", 1), dims))
    if packed and channels < 32 and (engine == "wide") != transposed:  # the weights are put along the diagonal first
        turned += kernel["convolution.diagonal"]
        turned += kernel["convolution.listed"] if transposed and strided else 0.0  # and which taps meet a place
    if strided and overlap and last and transposed and not backward and engine != "vector":
        # Windows that overlap are folded into channels before the product, and results unfolded after it.
        turned += sum(_turned(kernel, tensor) for tensor in (data, weight, out))
    return seconds + turned


_SMALLEST_EDGE = 32
"""The shorter edge of the smallest tiles that implicit products have on the matrix engine; the other one is longer."""
_TAP_DEPTH = 32
"""Channels of a tap in a step along the contraction, which is not across two taps."""
_FEWEST_TURNED = 4
"""Groups of fewer channels are not turned around in 16 bits: a kernel without the matrix engine computes each group."""
_PACKED_CHANNELS = 64
"""Channels along the contraction of a tile that holds several groups."""
_THIN_CHANNELS = 16
"""So many channels fill the narrowest tile of a gradient of weights, whose kernel reads channels last."""
_MASKED_TAPS = 32
"""Kernels of implicit products have a bit for each tap that is within the image; for more taps there are older ones."""


def _packs(inner: int, outer: int) -> bool:
    """Whether one kernel computes all groups of so many channels each: narrow ones whose widths divide a tile."""
    narrow = all(width <= 32 and width & (width - 1) == 0 for width in (inner, outer))
    return narrow and max(inner, outer) <= 4 * min(inner, outer)


def _numbers(value: Any) -> Sequence[int]:
    """An argument of convolutions that is one number or one for each dimension."""
    return value if isinstance(value, (tuple, list)) else (value,)


def _turned(kernel: Kernel, tensor: Tensor) -> float:
    """A tensor whose channels become its last dimension, or stop being it: by tiles of 32 channels and 32 places."""
    outer, channels, places = tensor.shape[0], tensor.shape[1], math.prod(tensor.shape[2:])
    slots = outer * math.ceil(channels / 32) * math.ceil(places / 32) * 1024
    memory = 2 * tensor.bytes / (kernel["gpu.bandwidth_share"] * kernel.gpu.bandwidth)
    return kernel["convolution.turned_fixed"] + _both(
        memory, kernel.cycles(slots * kernel["convolution.turned_slot"]), sharpness=2
    )


def _depthwise(kernel: Kernel, results: int, taps: int, *, last: bool, strided: bool, mask: Sequence[Any]) -> float:
    """No product: each result reads its taps.

    cuDNN has kernels for channels last and for float16; in 16 bits, neighbors of stride 1 share loads. torch's own
    compute the gradient of the weights by a block for each weight, which reads all results and their inputs.
    """
    kind = "depthwise_last" if last else "depthwise"
    own = not last and kernel.op.inputs[0].dtype != "float16"
    shares = last and not strided and kernel.op.inputs[0].item_bytes < 4
    pairs = kernel["depthwise_last.half"] if shares else 1.0
    cycles = kernel[f"{kind}.result"] + kernel[f"{kind}.tap"] * taps * pairs
    passes = [cycles]
    waits = taps * kernel["depthwise.wait"]
    if any(mask):
        cycles = kernel["depthwise.backward_result"] + kernel["depthwise.backward_tap"] * taps
        own_cycles = tuple(
            kernel["depthwise.own_result"] + kernel[f"depthwise.own_{name}"] * taps for name in ("data", "weight")
        )
        # cuDNN's fast gradient of the data is for float16 and windows that move by one; another reads tap by tap.
        direct = strided or kernel.op.inputs[0].item_bytes > 2
        of_cudnn = (taps * kernel["depthwise.direct_tap"] if direct else cycles, cycles)
        passes = [one for one, wanted in zip(own_cycles if own else of_cudnn, mask, strict=False) if wanted]
    fixed = kernel["depthwise.fixed"] * (2 * len(passes) if any(mask) else 1)
    if last and strided and kernel.op.inputs[0].item_bytes < 4:
        fixed += kernel["depthwise_last.strided_fixed"]
    return fixed + sum(_both(kernel.memory(), kernel.cycles(results * cycles), waits) for cycles in passes)


_SEGMENT, _SEGMENT_MULTIPLE = 256, 128
"""The fewest tokens of a segment of linear attention, and what their number is a multiple of."""


@model("nearpeak.linear_attention", "nearpeak.linear_attention_backward")
def _linear_attention(kernel: Kernel) -> float:
    """Chunks of a segment of tokens after each other, for all heads, columns and segments beside each other.

    A sequence has as many segments as give each multiprocessor two programs. Where it has more than one, a pass of its
    own computes the states that they start with.
    """
    op, gpu = kernel.op, kernel.gpu
    query, value = op.tensor("query"), op.tensor("value")
    tokens = query.shape[-2]
    beside = math.prod(query.shape[:-2]) * math.ceil(value.shape[-1] / 64)
    segment = math.ceil(tokens / max(1, 2 * gpu.processors // max(1, beside)))
    segment = max(_SEGMENT, math.ceil(segment / _SEGMENT_MULTIPLE) * _SEGMENT_MULTIPLE)
    segments = math.ceil(tokens / segment)
    programs = beside * segments / gpu.processors
    turns = math.ceil(programs / 2) if programs > 1 else kernel["linear_attention.alone"]
    chunks = turns * min(tokens, segment) / kernel["linear_attention.chunk"] * query.shape[-1] / 128
    backward = "backward" in op.packet
    seconds = chunks * kernel["linear_attention.step"] * (kernel["linear_attention.backward"] if backward else 1.0)
    if segments > 1:
        states = chunks * kernel["linear_attention.states"]
        seconds += kernel["linear_attention.segments"]
        seconds += states * (kernel["linear_attention.backward_states"] if backward else 1.0)
    return kernel["linear_attention.fixed"] + max(kernel.memory(), seconds)


@model("aten._local_scalar_dense")
def _item(kernel: Kernel) -> float:
    """One number for the host: no kernel."""
    return 0.0


_FLASH, _CUDNN, _EFFICIENT = "flash", "cudnn", "efficient"


_OWN_OVER_CUDNN = {False: 0.93, True: 0.95}
"""The time of attention of nearpeak, forward and backward, over cuDNN's: geometric means of the measured calls that
choose its kernels on an H200. It calls cuDNN where that is faster."""
_RATE_OF_OWN = (2600.0, 5000.0)
"""FLOP per cycle of a multiprocessor that has the instructions of nearpeak's kernels; elsewhere torch's run."""


@model("attention")
def _attention(kernel: Kernel) -> float:
    """Pairs of a query and a key: two products as deep as a head is wide, and an exponential, block by block.

    FlashAttention and the memory-efficient kernel use the matrix instructions that a warp issues, of which a
    multiprocessor does 2048 FLOP per cycle in 16 bits from Ampere on; cuDNN uses the fastest ones that the GPU has.
    """
    op = kernel.op
    if not op.packet.startswith("aten._scaled_dot_product"):  # sequences in one tensor: their lengths are data
        return _stream(kernel)
    query, key = op.inputs[:2] if "backward" not in op.packet else op.inputs[1:3]
    backend = _CUDNN if "cudnn" in op.packet else _EFFICIENT if "efficient" in op.packet else _FLASH
    masked = bool(op.tensors("attn_bias", "attn_mask"))
    return _attention_seconds(kernel, query, key, backend, bool(op.arguments.get("is_causal")), masked)


@model("nearpeak.attention", "nearpeak.attention_backward")
def _own_attention(kernel: Kernel) -> float:
    """As torch's best kernel, and a few percent faster where nearpeak's own run."""
    op, gpu = kernel.op, kernel.gpu
    query, key = op.tensor("query"), op.tensor("key")
    left, right = (op.arguments.get(name, -1) for name in ("left", "right"))
    if op.tensors("query_starts") or query.dtype not in ("bfloat16", "float16"):
        return _stream(kernel)  # how many pairs there are is not known, or no kernel of torch is like it
    rate = _engine_rate(gpu)
    is_own = _RATE_OF_OWN[0] < rate < _RATE_OF_OWN[1]
    backend = _CUDNN if rate > _RATE_OF_OWN[0] else _FLASH
    seconds = _attention_seconds(kernel, query, key, backend, right >= 0, bool(op.tensors("bias")), left + 1)
    return seconds * (_OWN_OVER_CUDNN["backward" in op.packet] if is_own else 1.0)


def _engine_rate(gpu: Gpu) -> float:
    """FLOP per cycle of a multiprocessor's matrix engine in 16 bits."""
    return gpu.matrix.get("bfloat16", gpu.matrix.get("float16", 8.0 * gpu.vector)) / gpu.cycles


def _attention_seconds(
    kernel: Kernel, query: Tensor, key: Tensor, backend: str, causal: bool, masked: bool, window: int = 0
) -> float:
    """By the kernels of a backend of torch; 0 is no window."""
    op, gpu = kernel.op, kernel.gpu
    batch, heads, queries, width = query.shape[-4:]
    keys = key.shape[-2]
    backward = "backward" in op.packet
    kind = f"{backend}_backward" if backward else backend
    if query.dtype == "float32":
        kind = "efficient32_backward" if backward else "efficient32"
    rows = 128 if queries > 64 else 64
    blocks = batch * heads * math.ceil((keys if backward else queries) / rows)
    others = math.ceil((queries if backward else keys) / 64) * 64
    other = others * 0.5 + rows / 2 if causal else others
    if window:
        others, other = min(others, window + rows), min(other, window + rows)
    width = math.ceil(width / 64) * 64
    rate = kernel[f"{kind}.flops_per_cycle"]
    if width > 128:
        rate *= kernel["cudnn.wide_masked" if kind == _CUDNN and masked else f"{kind}.wide"]
    if backend == _CUDNN:  # in terms of the engine's own rate
        rate *= _engine_rate(gpu) / 3370.0
    products = 5 if backward else 2
    mask = kernel["attention.mask"] if masked else 0.0
    if keys * query.item_bytes % 4:  # rows of the mask are read element by element
        mask *= kernel["attention.unaligned"]
    pair = kernel[f"{kind}.pair"] + mask
    each = 2.0 * products * width / rate + pair
    block = rows * other * each + kernel[f"{kind}.block"]
    share = blocks / gpu.processors
    if causal:  # blocks differ in length, and one of the longest may be the last to end
        longest = rows * others * each + kernel[f"{kind}.block"]
        cycles = longest if share <= 1 else max(longest, share * block + kernel["attention.tail"] * longest)
    else:
        cycles = (math.ceil(share) if share <= 4 else share + 0.5) * block
    compute = cycles / gpu.clock
    if queries <= 16 and not backward:  # decoding: the keys are split over all multiprocessors
        compute = 0.0
    padded = width / query.shape[-1]
    return kernel[f"{kind}.fixed"] + _both(kernel.memory() * padded * kernel[f"{kind}.bytes"], compute)
