"""A kernel in Gluon for Hopper run on a CPU, line by line, in a thread for each of its partitions.

Gluon has no interpreter. Here its functions are run as Python, on tensors of torch: `emulated(modules)` puts stand-ins
in the places of what modules take from Gluon. Threads go on in an order that is drawn by lot, see `scheduled`. What is
asynchronous is as early and as late as it may be:

- A product is computed when it is waited for, and is not a number if a factor has changed since it began.
- A copy into shared memory leaves no number there at once, and what it copies when its barrier is waited for. That is
  the one it is told, or for a copy by the threads of a partition the one they arrive at next.
- A copy out of it reads when that is waited for, and writes when that is: at the latest as its thread ends.

What is stored in shared memory must have been fenced before products and copies read it, by who stored it. What
threads copied there must have been fenced by who reads it, after waiting for it. So what is read too early or
overwritten too early shows in results, and a barrier with the wrong phase in threads that wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from types import FunctionType, SimpleNamespace

import torch
from scheduled import Schedule, here, pause


class Number(int):
    """An integer of a kernel, which is divided towards zero."""

    def to(self, dtype):
        return self

    def __floordiv__(self, other):
        found = abs(int(self)) // abs(int(other))
        return Number(found if (self < 0) == (other < 0) else -found)

    def __mod__(self, other):
        return self - self // other * other


def _closed(name):
    plain = getattr(int, name)

    def operate(self, other):
        found = plain(self, other)
        return Number(found) if isinstance(found, int) else found

    return operate


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "and", "xor", "rshift"):
    setattr(Number, f"__{_name}__", _closed(f"__{_name}__"))


class Values(torch.Tensor):
    """A tensor in registers."""

    def to(self, dtype):
        return super().to(getattr(dtype, "torch", dtype))

    def split(self):
        return self[..., 0], self[..., 1]


def values(x):
    return x.clone().as_subclass(Values)


class Pointer:
    def __init__(self, base, offset=0):
        self.base, self.offset = base, offset

    def __add__(self, offset):
        return Pointer(self.base, self.offset + offset)


def _load(pointer, mask=None, other=0.0):
    if mask is not None:
        found = pointer.base[torch.where(mask, pointer.offset, 0)]
        return values(torch.where(mask, found, torch.tensor(other, dtype=found.dtype)))
    found = pointer.base[pointer.offset]
    return values(found) if found.dim() or found.is_floating_point() else Number(found)


def _store(pointer, value, mask=None):
    if mask is None:
        pointer.base[pointer.offset] = value
    else:
        pointer.base[pointer.offset.expand(mask.shape)[mask]] = value[mask].to(pointer.base.dtype)


def _atomic_add(pointer, value, sem, mask=None):
    """What was there, with a mask in the first element alone. Whoever asks again waits until it has changed."""
    if mask is not None:
        assert mask.nonzero().tolist() == [[0]]
        found = torch.full(mask.shape, -1)
        found[0] = _atomic_add(Pointer(pointer.base, int(pointer.offset[0])), int(value[0]), sem)
        return values(found)
    at = pointer.offset
    told = here().told
    pause((lambda: (at, int(pointer.base[at])) != told) if value == 0 else None)
    found = int(pointer.base[at])
    pointer.base[at] += value
    here().told = (at, found)
    return Number(found)


class DType:
    def __init__(self, dtype):
        self.torch, self.primitive_bitwidth = dtype, 8 * dtype.itemsize


class Memory:
    """A tensor in shared memory."""

    def __init__(self, data, dtype):
        self.data, self.dtype, self.shape = data, dtype, data.shape

    def index(self, place):
        return Memory(self.data[place], self.dtype)

    def permute(self, order):
        return Memory(self.data.permute(order), self.dtype)

    def reshape(self, shape):
        return Memory(self.data.view(shape), self.dtype)

    def slice(self, start, length, dim=0):
        return Memory(self.data.narrow(dim, start, length), self.dtype)

    def load(self, layout):
        pause()
        return values(self.data)

    def store(self, value):
        pause()
        self.data.copy_(value)
        here().unfenced.append(self.addresses())

    def addresses(self):
        last = sum((size - 1) * stride for size, stride in zip(self.data.shape, self.data.stride(), strict=True))
        return self.data.data_ptr(), self.data.data_ptr() + (last + 1) * self.data.element_size()

    def begin_to_read(self):
        """Of what is about to read this without being a thread."""
        start, end = self.addresses()

        def is_among(others):
            return any(start < other_end and other_start < end for other_start, other_end in others)

        for thread in here().schedule.threads:
            assert not is_among(getattr(thread, "unfenced", ())), "what is read was stored without a fence"
        assert not is_among(here().waited_for), "what is read was copied by threads, and its reader has not fenced it"


def _fence():
    here().unfenced.clear()
    here().waited_for.clear()


class Barrier:
    def __init__(self):
        self.phase, self.left, self.bytes, self.copies = 0, 0, 0, []
        self.landed = [], []
        """Addresses of what threads copied, of each phase."""

    def index(self, place):
        assert place == 0
        return self

    def complete(self):
        if self.left == 0 and self.bytes == 0:
            self.phase, self.left = self.phase ^ 1, self.count
            self.landed[self.phase].clear()


class Barriers:
    def __init__(self, count):
        self.each = [Barrier() for _ in range(count)]

    def index(self, place):
        return self.each[place]


def _init(barrier, count):
    barrier.count = barrier.left = count


def _arrive(barrier, count=1, pred=True, tx=0):
    pause()
    if pred:
        _count(barrier, count, tx)


def _count(barrier, count, tx=0):
    assert barrier.left >= count, "more arrive than are expected"
    barrier.left -= count
    barrier.bytes += tx
    barrier.complete()


def _expect(barrier, size, pred=True):
    _arrive(barrier, pred=pred, tx=size)


def _wait(barrier, phase, pred=True):
    def is_over():
        if barrier.phase == phase:  # somebody waits for what is copied
            while barrier.copies:
                barrier.copies.pop(0)()
        return barrier.phase != phase

    pause(is_over if pred else None)
    if pred:
        here().waited_for += barrier.landed[int(phase)]


class Descriptor:
    def __init__(self, described):
        self.base, self.shape, self.strides = described.base, described.shape, described.strides
        self.dtype, self.layout, self.block_shape = DType(described.base.dtype), described.layout, described.block_shape
        size = torch.Size(described.block_shape).numel() * described.base.element_size()
        self.block_type = SimpleNamespace(nbytes=size)

    def parts(self, place, tile):
        """What is at a place, and where that is in a tile: some of it may be beyond the end."""
        block = tile.view(self.block_shape)
        sizes = [max(min(n, end - int(at)), 0) for at, n, end in zip(place, self.block_shape, self.shape, strict=True)]
        if not all(sizes):
            sizes, place = [0 for _ in sizes], [0 for _ in sizes]
        first = sum(int(at) * stride for at, stride in zip(place, self.strides, strict=True))
        first = first * self.base.element_size() % 2**64 // self.base.element_size()  # as addresses wrap around
        part = torch.as_strided(self.base, sizes, self.strides, self.base.storage_offset() + first)
        return part, block[tuple(map(slice, sizes))]


def _copy_in(source, place, barrier, target, pred=True):
    pause()
    if not pred:
        return
    target.data.fill_(float("nan"))

    def copy():
        target.data.zero_()
        part, inside = source.parts(place, target.data)
        inside.copy_(part)
        barrier.bytes -= source.block_type.nbytes
        barrier.complete()

    barrier.copies.append(copy)


def _copy_by_threads(target, pointer, mask):
    pause()
    target.data.fill_(float("nan"))

    def copy():
        target.data.copy_(_load(pointer, mask))
        return target.addresses()

    here().copies.append(copy)


def _arrive_with_copies(barrier, increment_count):
    """Each thread of a partition arrives when all that it copies is there."""
    pause()
    assert not increment_count
    copies, threads = here().copies.copy(), 32 * here().warps
    here().copies.clear()

    def land():
        barrier.landed[barrier.phase].extend(copy() for copy in copies)
        _count(barrier, threads)

    barrier.copies.append(land)


def _copy_out(target, place, source, add=False):
    def read():
        snapshot = source.data.clone()

        def write():
            part, inside = target.parts(place, snapshot)
            part.copy_(part + inside if add else inside)

        return write

    pause()
    source.begin_to_read()
    here().reads.append(read)


def _add_out(target, place, source):
    _copy_out(target, place, source, add=True)


def _store_wait(pending):
    pause()
    thread = here()
    while len(thread.reads) > pending:
        thread.writes.append(thread.reads.pop(0)())


def _wait_until_written():
    _store_wait(0)
    pause()
    writes = here().writes
    while writes:
        writes.pop(0)()


def _is_same(one, other):
    """To the bit: what is no number is the same as itself."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


class Product:
    """A product on its way."""

    def __init__(self, a, b, total, use):
        self.a, self.b, self.total, self.use, self.found = a, b, total, use, None
        self.before = a.data.clone(), b.data.clone()

    def compute(self):
        before = self.total.found if isinstance(self.total, Product) else self.total
        factors = self.a.data, self.b.data
        product = values(factors[0].float() @ factors[1].float())
        if not all(map(_is_same, factors, self.before)):
            product.fill_(float("nan"))
        self.found = before + product if self.use else product


def _multiply(a, b, total, use_acc=True, is_async=False):
    pause()
    for factor in (a, b):
        if isinstance(factor, Memory):
            factor.begin_to_read()
    here().products.append(Product(a, b, total, use_acc))
    return here().products[-1]


def _multiply_wait(num_outstanding, deps):
    pause()
    products = here().products
    while len(products) > num_outstanding:
        products.pop(0).compute()
    found = tuple(one.found if isinstance(one, Product) and one.found is not None else one for one in deps)
    return found[0] if len(found) == 1 else found


def _allocate(dtype, shape, layout):
    if layout is Barriers:
        return Barrier() if len(shape) == 1 else Barriers(shape[0])
    return Memory(torch.full(shape, float("nan")).to(dtype.torch), dtype)


def _partition(program, warps, function, args):
    def run():
        thread = here()
        thread.program, thread.warps, thread.told = program, warps, None
        thread.reads, thread.writes, thread.products, thread.copies = [], [], [], []
        thread.unfenced, thread.waited_for = [], []
        function(*args)
        assert not thread.copies, "a copy after which nobody arrives"
        assert not thread.products, "a product that nobody waits for"
        assert not thread.reads, "a copy that nobody waits for"
        _wait_until_written()

    return run


def _specialize(partitions, warps, registers):
    """The first partition has the warps of the kernel, and the others so many each, or 4 where it is not said."""
    schedule, program = here().schedule, here().program
    warps = chain((here().warps, *warps), repeat(4))
    started = [
        schedule.start(_partition(program, own, *one), f"program {program}, partition {number}")
        for number, (one, own) in enumerate(zip(partitions, warps, strict=False))
    ]
    pause(lambda: all(one.ended for one in started))


def _given(argument):
    if hasattr(argument, "block_shape"):
        return Descriptor(argument)
    if isinstance(argument, torch.Tensor):
        size = argument.untyped_storage().nbytes() // argument.element_size()
        return Pointer(torch.as_strided(argument, (size,), (1,), 0), argument.storage_offset())
    return Number(argument) if type(argument) is int else argument


def _where(is_so, one, other):
    if isinstance(is_so, torch.Tensor):
        return torch.where(is_so, one, other).as_subclass(Values)
    return one if is_so else other


def _minimum(one, other):
    if isinstance(one, torch.Tensor):
        return torch.minimum(one, torch.as_tensor(other, dtype=one.dtype))
    return Number(min(one, other))


def _maximum(one, other):
    if isinstance(one, torch.Tensor):
        return torch.maximum(one, torch.as_tensor(other, dtype=one.dtype))
    return Number(max(one, other))


def _max(x, axis):
    found = torch.amax(x, axis)
    return found if found.dim() or found.is_floating_point() else Number(found)


_LAYOUTS = ("Blocked", "DotOperand", "NVMMADistributed", "NVMMAShared", "Slice", "SwizzledShared")
_LANGUAGE = {
    "program_id": lambda axis: Number(here().program), "num_programs": lambda axis: Number(here().schedule.programs),
    "num_warps": lambda: here().warps, "static_range": range, "minimum": _minimum, "maximum": _maximum, "where": _where,
    "cdiv": lambda one, other: (one + other - 1) // other,
    "zeros": lambda shape, dtype, layout: values(torch.zeros(shape, dtype=dtype.torch)),
    "full": lambda shape, value, dtype, layout: values(torch.full(shape, value, dtype=dtype.torch)),
    "arange": lambda start, end, layout: values(torch.arange(start, end)),
    "exp2": torch.exp2, "log2": torch.log2, "sum": torch.sum, "max": _max,
    "float32": DType(torch.float32), "int32": DType(torch.int32), "int64": DType(torch.int64),
    "load": _load, "store": _store, "atomic_add": _atomic_add, "thread_barrier": lambda: None,
    "convert_layout": lambda x, layout, assert_trivial=False: x, "allocate_shared_memory": _allocate,
    "warp_specialize": _specialize, **{f"{name}Layout": lambda *_args, **_named: None for name in _LAYOUTS},
}  # fmt: skip
_INSTEAD = {
    "gl": SimpleNamespace(**_LANGUAGE),
    "tma": SimpleNamespace(
        async_copy_global_to_shared=_copy_in, async_copy_shared_to_global=_copy_out, store_wait=_store_wait
    ),
    "mbarrier": SimpleNamespace(
        init=_init, wait=_wait, arrive=_arrive, expect=_expect, MBarrierLayout=lambda: Barriers
    ),
    "async_copy": SimpleNamespace(
        async_copy_global_to_shared=_copy_by_threads, mbarrier_arrive=_arrive_with_copies
    ),
    "fence_async_shared": _fence, "warpgroup_mma": _multiply, "warpgroup_mma_wait": _multiply_wait,
    "async_add_shared_to_global": _add_out, "_wait_until_written": _wait_until_written,
    "_packed": lambda weights, _keys, dtype: weights.to(dtype), "_unpacked": lambda packed, *_: packed,
    "_wide": lambda packed, *_: packed.to(torch.float32),
    "wgmma_layout": lambda *_: None, "gathered_layout": lambda *_: None,
}  # fmt: skip


@contextmanager
def emulated(modules, monkeypatch, programs=None, at_a_time=None, seed=0, slowest=None, **others) -> Iterator:
    """What is given runs the kernels of these modules, by so many programs, or as many as the grid has.

    So many of them run at a time, the first ones first. `slowest` is the partition that goes on where no other can.
    `others` are stand-ins for more of their names. Other kernels are launched as ever.
    """
    from nearpeak.kernels._runtime.launch import launch as real_launch

    def launch(kernel, grid, *args, **settings):
        if not isinstance(kernel, FunctionType):
            real_launch(kernel, grid, *args, **settings)
            return
        schedule = Schedule(seed, None if slowest is None else f"partition {slowest}")
        schedule.programs = programs or grid[0]
        running = SimpleNamespace(begun=0)

        def run():
            """One program, and then the next that nobody has begun."""
            here().unfenced, here().waited_for, here().warps = [], [], settings.get("warps", 4)
            while running.begun < schedule.programs:
                here().program, running.begun = running.begun, running.begun + 1
                kernel(*map(_given, args))

        for number in range(min(at_a_time or schedule.programs, schedule.programs)):
            schedule.start(run, f"processor {number}")
        torch_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # tiles are small, and each thread would have threads of its own
        try:
            schedule.run()
        finally:
            torch.set_num_threads(torch_threads)

    instead = {**_INSTEAD, **others}
    homes = {module.__name__ for module in modules}
    with monkeypatch.context() as patched:
        for module in modules:
            for name, found in list(vars(module).items()):
                if name in instead:
                    patched.setattr(module, name, instead[name])
                elif type(found).__name__ == "constexpr":
                    patched.setattr(module, name, found.value)
                elif type(found).__name__ == "GluonJITFunction" and found.fn.__module__ in homes:
                    patched.setattr(module, name, found.fn)
        yield launch
