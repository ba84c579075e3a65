"""Ring buffers over long rows: the device code, in Gluon, that the kernels of `ring_buffer` share.

In the order of a kernel: the part of a row that a program has, copies into the ring, chunks of it in registers, the
weight and the bias, and the exchange of sums between programs.

FORM is (mode, vector, chunks, chunk, layout): see `RingPlan`. A part is processed in chunks of as many 16 bytes as the
program has threads. All reads have the layout of the copies, so that a thread reads only what it copied itself.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from nearpeak.kernels._runtime import ring_buffer

FULL = gl.constexpr(ring_buffer.FULL)
SHIFTED = gl.constexpr(ring_buffer.SHIFTED)
GLOBAL = gl.constexpr(ring_buffer.PARAMETER_MEMORY.index("global"))
SHARED = gl.constexpr(ring_buffer.PARAMETER_MEMORY.index("shared"))
REGISTERS = gl.constexpr(ring_buffer.PARAMETER_MEMORY.index("registers"))
SLOTS = gl.constexpr(ring_buffer.SLOTS)
HEADER = gl.constexpr(ring_buffer.HEADER_WORDS)
DONE_WORD = gl.constexpr(ring_buffer.HEADER_WORDS // 2)
"""The word that counts finished programs."""


@gluon.jit
def as_float32(values):
    """Converts to float32. The second of two bfloat16 in a register takes one instruction like this, and not two."""
    if values.dtype == gl.bfloat16:
        return (values.to(gl.uint16, bitcast=True).to(gl.uint32) << 16).to(gl.float32, bitcast=True)
    return values.to(gl.float32)


@gluon.jit
def allocate_ring(dtype: gl.constexpr, RING: gl.constexpr, FORM: gl.constexpr):
    """Shared memory for the parts of RING rows: a (RING, chunk) buffer for each chunk.

    One allocation for all chunks would make the compiler put a barrier between two copies.
    """
    buffers = ()
    for _ in gl.static_range(FORM[2]):
        buffers += (gl.allocate_shared_memory(dtype, [RING, FORM[3]], gl.SwizzledSharedLayout(1, 1, 1, [0])),)  # type: ignore[assignment]
    return buffers


@gluon.jit
def part_bounds(own, part, FORM: gl.constexpr):
    """The first column of a part, and the end of it; the last part may reach beyond the row."""
    VECTOR: gl.constexpr = FORM[1]
    if FORM[0] == FULL:
        begin = own * (FORM[2] * FORM[3])
        return begin, begin + FORM[2] * FORM[3]
    begin = own * (part // VECTOR * VECTOR)
    return begin, begin + part // VECTOR * VECTOR


@gluon.jit
def row_offsets(row, columns, stride, FORM: gl.constexpr):
    """The offsets of a row in the tensors that are read and written, and the columns by which they are too early.

    A SHIFTED row is read from the start of the 16 bytes that it starts in; all tensors are dense and start alike.
    """
    row = row.to(gl.int64)
    VECTOR: gl.constexpr = FORM[1]
    if FORM[0] == SHIFTED:
        start = row * columns
        even = start // VECTOR * VECTOR
        return even, even, (start - even).to(gl.int32)
    return row * (stride // VECTOR * VECTOR), row * (columns // VECTOR * VECTOR), 0


@gluon.constexpr_function
def is_edge(c, FORM):
    """Whether some columns of this chunk may be outside of the row, or of the part."""
    return (FORM[0] != ring_buffer.FULL and c == FORM[2] - 1) or (FORM[0] == ring_buffer.SHIFTED and c == 0)


@gluon.jit
def copy_part(pointer, ring, slot, begin, stop, FORM: gl.constexpr):
    """Starts to copy a part of a row; columns after its end become 0."""
    VECTOR: gl.constexpr = FORM[1]
    lane = gl.arange(0, FORM[3], layout=FORM[4])
    for c in gl.static_range(FORM[2]):
        first = begin + c * FORM[3]
        source = pointer + first + lane
        if is_edge(c, FORM):
            within = lane // VECTOR * VECTOR < stop - first
            async_copy.async_copy_global_to_shared(ring[c].index(slot), source, mask=within)
        else:
            async_copy.async_copy_global_to_shared(ring[c].index(slot), source)


@gluon.jit
def copy_row(tensor, ring, row, turn, begin, end, columns, stride, RING: gl.constexpr, FORM: gl.constexpr):
    """Starts to copy the part of the row of a turn into its slot of the ring."""
    start, _written, shift = row_offsets(row, columns, stride, FORM)
    copy_part(tensor + start, ring, turn % RING, begin, gl.minimum(end, shift + columns), FORM)


@gluon.jit
def unpack_bfloat16(pairs, FORM: gl.constexpr):
    """A chunk in float32, (chunk,), from pairs of bfloat16 in 32 bits, (chunk / 2,)."""
    low = (pairs << 16).to(gl.float32, bitcast=True)
    high = (pairs & 0xFFFF0000).to(gl.float32, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(low, high), [FORM[3]]), FORM[4], assert_trivial=True)


@gluon.jit
def load_float32(memory, FORM: gl.constexpr):
    """A chunk from shared memory in float32; bfloat16 is loaded in pairs, at one instruction for each number."""
    if memory.dtype == gl.bfloat16:
        HALF: gl.constexpr = gl.BlockedLayout([FORM[1] // 2], [32], [gl.num_warps()], [0])
        pairs = memory._reinterpret(gl.uint32, [FORM[3] // 2], gl.SwizzledSharedLayout(1, 1, 1, [0])).load(HALF)
        return unpack_bfloat16(pairs, FORM)
    return memory.load(FORM[4]).to(gl.float32)


@gluon.jit
def load_chunk(ring, slot, c: gl.constexpr, FORM: gl.constexpr):
    return load_float32(ring[c].index(slot), FORM)


@gluon.jit
def opaque_slot(slot, stop):
    """The same slot, opaque to the compiler, which would otherwise keep everything it reads there in registers.

    `stop` is never negative, which the compiler cannot know.
    """
    return slot + gl.where(stop < 0, 1, 0)


@gluon.jit
def chunk_mask(c: gl.constexpr, begin, shift, stop, FORM: gl.constexpr):
    """Which columns of an edge chunk belong to the part of a row from `shift` to `stop`."""
    VECTOR: gl.constexpr = FORM[1]
    first = begin + c * FORM[3]
    lane = gl.arange(0, FORM[3], layout=FORM[4])
    if FORM[0] == SHIFTED:
        return (lane < stop - first) & (lane >= shift - first)
    return lane // VECTOR * VECTOR < stop - first


@gluon.jit
def mask_chunk(values, other: gl.constexpr, c: gl.constexpr, begin, shift, stop, FORM: gl.constexpr):
    """A chunk with `other` in the columns that do not belong to the row."""
    if is_edge(c, FORM):
        values = gl.where(chunk_mask(c, begin, shift, stop, FORM), values, other)
    return values


@gluon.jit
def sum_by_thread(values, FORM: gl.constexpr):
    """The sums of each thread over its elements of a chunk, (chunk / vector,): one register instead of a vector."""
    by_thread: gl.constexpr = gl.BlockedLayout([1, FORM[1]], [32, 1], [gl.num_warps(), 1], [1, 0])
    values = gl.reshape(values, [FORM[3] // FORM[1], FORM[1]])
    return gl.sum(gl.convert_layout(values, by_thread, assert_trivial=True), 1)


@gluon.jit
def broadcast_by_thread(sums, FORM: gl.constexpr):
    """A number of each thread, (chunk / vector,), for all of its elements of a chunk, (chunk,)."""
    by_thread: gl.constexpr = gl.BlockedLayout([1, FORM[1]], [32, 1], [gl.num_warps(), 1], [1, 0])
    wide = sums[:, None] + gl.zeros([FORM[3] // FORM[1], FORM[1]], gl.float32, by_thread)
    return gl.convert_layout(gl.reshape(wide, [FORM[3]]), FORM[4], assert_trivial=True)


@gluon.jit
def store_chunk(pointer, values, c: gl.constexpr, begin, shift, stop, FORM: gl.constexpr):
    """Stores a chunk, 16 bytes at a time but for those in which a SHIFTED row starts and ends."""
    VECTOR: gl.constexpr = FORM[1]
    values = values.to(pointer.dtype.element_ty)
    first = begin + c * FORM[3]
    lane = gl.arange(0, FORM[3], layout=FORM[4])
    target = pointer + first + lane
    if is_edge(c, FORM):
        vector = lane // VECTOR * VECTOR
        if FORM[0] == SHIFTED:
            whole = (vector + VECTOR <= stop - first) & (vector >= shift - first)
            gl.store(target, values, mask=whole)
            gl.store(target, values, mask=chunk_mask(c, begin, shift, stop, FORM) & (whole == 0))
        else:
            gl.store(target, values, mask=vector < stop - first)
    else:
        gl.store(target, values)


@gluon.jit
def copy_parameter(pointer, begin, stop, FORM: gl.constexpr):
    """Starts to copy a part of the weight or the bias into shared memory."""
    buffers = allocate_ring(pointer.dtype.element_ty, 1, FORM)
    copy_part(pointer, buffers, 0, begin, stop, FORM)
    return buffers


@gluon.jit
def read_parameter(pointer, buffers, c: gl.constexpr, begin, shift, stop, WHERE: gl.constexpr, FORM: gl.constexpr):
    """A chunk of the weight or the bias, for `parameter_float32`."""
    if WHERE == SHARED:
        values = buffers[c].index(0).load(FORM[4])
    elif WHERE == REGISTERS and pointer.dtype.element_ty == gl.bfloat16:  # a number of 16 bits would take a register
        VECTOR: gl.constexpr = FORM[1] // 2
        lane = gl.arange(0, FORM[3] // 2, layout=gl.BlockedLayout([VECTOR], [32], [gl.num_warps()], [0]))
        pairs = pointer.to(gl.pointer_type(gl.uint32), bitcast=True) + (begin + c * FORM[3]) // 2 + lane
        if is_edge(c, FORM):
            values = gl.load(pairs, mask=lane // VECTOR * FORM[1] < stop - begin - c * FORM[3], other=0)
        else:
            values = gl.load(pairs)
    else:
        source = pointer + (begin + c * FORM[3] - shift) + gl.arange(0, FORM[3], layout=FORM[4])
        if is_edge(c, FORM):
            values = gl.load(source, mask=chunk_mask(c, begin, shift, stop, FORM), other=0.0)
        else:
            values = gl.load(source)
    return values


@gluon.jit
def parameter_float32(values, FORM: gl.constexpr):
    """A chunk of `read_parameter` in float32."""
    if values.dtype == gl.uint32:
        # opaque, so that the compiler repeats the conversion for each row instead of keeping its result in registers
        values = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [values], gl.uint32, is_pure=False, pack=1)
        values = unpack_bfloat16(values, FORM)
    else:
        values = as_float32(values)
    return values


@gluon.jit
def read_parameters(
    before, pointer, buffers, begin, FROM: gl.constexpr, TO: gl.constexpr, shift, stop,
    WHERE: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """The chunks from FROM to TO of the weight or the bias, appended to those that were read `before`."""
    if pointer is not None:
        for c in gl.static_range(FROM, min(TO, FORM[2])):
            before += (read_parameter(pointer, buffers, c, begin, shift, stop, WHERE, FORM),)
    return before


@gluon.jit
def draw_ticket(words, PARTS: gl.constexpr):
    """The number of the part, of all groups, that this program has."""
    if PARTS == 1:
        return gl.program_id(0)
    return gl.atomic_add(_as_words(words), 1, sem="relaxed").to(gl.int32)


@gluon.jit
def _as_words(counters):
    """32-bit counters as 64-bit words."""
    return counters.to(gl.pointer_type(gl.int64), bitcast=True)


@gluon.jit
def clear_words(words, groups, PARTS: gl.constexpr):
    """The last program to finish sets all words back to 0, for the next launch."""
    if PARTS > 1:
        words = _as_words(words)
        gl.thread_barrier()  # all threads have read before this
        if gl.atomic_add(words + DONE_WORD, 1, sem="acq_rel") == gl.num_programs(0) - 1:
            SIZE: gl.constexpr = 64 * gl.num_warps()
            each = gl.arange(0, SIZE, layout=gl.BlockedLayout([2], [32], [gl.num_warps()], [0]))
            end = HEADER + groups * (SLOTS * 2 * PARTS)
            for first in range(0, end, SIZE):
                gl.store(words + first + each, gl.zeros_like(each).to(gl.int64), mask=first + each < end)


@gluon.jit
def row_words(words, group, turn, PARTS: gl.constexpr):
    """The words by which a group publishes a row, two for each part; every SLOTS rows they are used again."""
    return _as_words(words) + HEADER + (group * SLOTS + (turn + SLOTS) % SLOTS) * (2 * PARTS)


@gluon.jit
def publish(word, value, tag):
    """Publishes a number and its tag in one word: who sees the tag has the number, without a fence.

    A fence would wait for all stores of the program, which always has results in flight.
    """
    bits = value.to(gl.uint32, bitcast=True).to(gl.uint64)
    gl.atomic_xchg(word, ((tag.to(gl.uint64) << 32) | bits).to(gl.int64, bitcast=True), sem="relaxed")


@gluon.jit
def poll(words, PARTS: gl.constexpr):
    """The words of all parts as they are now; every warp reads them all, and none waits for another."""
    each = gl.arange(0, PARTS, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return gl.load(words + each, volatile=True)


@gluon.jit
def oldest_tag(current, parts, tag, PARTS: gl.constexpr):
    each = gl.arange(0, PARTS, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return gl.min(gl.where(each < parts, (current >> 32).to(gl.int32), tag), 0)


@gluon.jit
def wait_for_values(words, current, parts, tag, PARTS: gl.constexpr):
    """The numbers of all parts once they are published, 0 for parts that do not exist.

    The words in `current`, polled early, are usually complete, so that nobody waits for the latency of a load.
    """
    while oldest_tag(current, parts, tag, PARTS) < tag:
        current = poll(words, PARTS)
    each = gl.arange(0, PARTS, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return gl.where(each < parts, current.to(gl.uint32).to(gl.float32, bitcast=True), 0.0)
