"""Device code, in Gluon, of kernels over parts of rows in ring buffers: copies, reductions, and the exchange between programs."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from nearpeak.kernels._runtime import ring_buffer

FULL, ENDED, SHIFTED = (
    gl.constexpr(ring_buffer.FULL),
    gl.constexpr(ring_buffer.ENDED),
    gl.constexpr(ring_buffer.SHIFTED),
)
GLOBAL = gl.constexpr(ring_buffer.PARAMETER_MEMORY.index("global"))
SHARED = gl.constexpr(ring_buffer.PARAMETER_MEMORY.index("shared"))
REGISTERS = gl.constexpr(ring_buffer.PARAMETER_MEMORY.index("registers"))
SLOTS = gl.constexpr(ring_buffer.SLOTS)
HEADER = gl.constexpr(ring_buffer.HEADER_WORDS)
DONE_WORD = gl.constexpr(ring_buffer.HEADER_WORDS // 2)
"""The word that counts programs that are done."""


@gluon.jit
def as_float32(values):
    """The same numbers; of two of bfloat16 in a register the second is one instruction from this, and not two."""
    if values.dtype == gl.bfloat16:
        return (values.to(gl.uint16, bitcast=True).to(gl.uint32) << 16).to(gl.float32, bitcast=True)
    return values.to(gl.float32)


@gluon.jit
def allocate_ring(dtype: gl.constexpr, RING: gl.constexpr, FORM: gl.constexpr):
    """Shared memory for parts of so many rows.

    Each chunk has an allocation of its own: between two copies to the same, the compiler would have all threads meet.
    """
    found = ()
    for _ in gl.static_range(FORM[2]):
        found += (gl.allocate_shared_memory(dtype, [RING, FORM[3]], gl.SwizzledSharedLayout(1, 1, 1, [0])),)  # type: ignore[assignment]
    return found


@gluon.jit
def part_bounds(own, part, FORM: gl.constexpr):
    """From where to where a part goes, in columns; the last may go further than the row."""
    VECTOR: gl.constexpr = FORM[1]
    if FORM[0] == FULL:
        begin = own * (FORM[2] * FORM[3])
        return begin, begin + FORM[2] * FORM[3]
    begin = own * (part // VECTOR * VECTOR)
    return begin, begin + part // VECTOR * VECTOR


@gluon.jit
def row_offsets(row, columns, stride, FORM: gl.constexpr):
    """Where a row starts in what is read and in what is written, and by how much that is too early.

    A SHIFTED row is read from the 16 bytes on in which it starts; all tensors are dense and start alike.
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
    """Whether some columns of this chunk may not belong to the row, or not to the part."""
    return (FORM[0] != ring_buffer.FULL and c == FORM[2] - 1) or (FORM[0] == ring_buffer.SHIFTED and c == 0)


@gluon.jit
def copy_part(pointer, ring, slot, begin, stop, FORM: gl.constexpr):
    """Starts to copy a part of a row; what is after its end is 0."""
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
    """Starts to copy the part of a row that the program takes in this turn."""
    start, _written, shift = row_offsets(row, columns, stride, FORM)
    copy_part(tensor + start, ring, turn % RING, begin, gl.minimum(end, shift + columns), FORM)


@gluon.jit
def unpack_bfloat16(pairs, FORM: gl.constexpr):
    """The numbers of a chunk in float32, of which there are pairs in bfloat16, each in 32 bits."""
    low = (pairs << 16).to(gl.float32, bitcast=True)
    high = (pairs & 0xFFFF0000).to(gl.float32, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(low, high), [FORM[3]]), FORM[4], assert_trivial=True)


@gluon.jit
def load_float32(memory, FORM: gl.constexpr):
    """A chunk from shared memory in float32; of bfloat16 two numbers come as one, and cost an instruction each."""
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
    """The same slot, which the compiler takes for another: otherwise it keeps all that it reads of it in registers.

    `stop` is never negative, which the compiler cannot know.
    """
    return slot + gl.where(stop < 0, 1, 0)


@gluon.jit
def chunk_mask(c: gl.constexpr, begin, shift, stop, FORM: gl.constexpr):
    """Which columns of a chunk at the edge belong to the part of a row from `shift` to `stop`."""
    VECTOR: gl.constexpr = FORM[1]
    first = begin + c * FORM[3]
    lane = gl.arange(0, FORM[3], layout=FORM[4])
    if FORM[0] == SHIFTED:
        return (lane < stop - first) & (lane >= shift - first)
    return lane // VECTOR * VECTOR < stop - first


@gluon.jit
def mask_chunk(values, other: gl.constexpr, c: gl.constexpr, begin, shift, stop, FORM: gl.constexpr):
    """A chunk with another number in the place of what does not belong to the row."""
    if is_edge(c, FORM):
        values = gl.where(chunk_mask(c, begin, shift, stop, FORM), values, other)
    return values


@gluon.jit
def sum_by_thread(values, FORM: gl.constexpr):
    """Sums over what a thread has of a chunk, side by side: one register, and not one for each element of a load."""
    by_thread: gl.constexpr = gl.BlockedLayout([1, FORM[1]], [32, 1], [gl.num_warps(), 1], [1, 0])
    values = gl.reshape(values, [FORM[3] // FORM[1], FORM[1]])
    return gl.sum(gl.convert_layout(values, by_thread, assert_trivial=True), 1)


@gluon.jit
def broadcast_by_thread(sums, FORM: gl.constexpr):
    """The number of a thread for each of its elements of a chunk."""
    by_thread: gl.constexpr = gl.BlockedLayout([1, FORM[1]], [32, 1], [gl.num_warps(), 1], [1, 0])
    wide = sums[:, None] + gl.zeros([FORM[3] // FORM[1], FORM[1]], gl.float32, by_thread)
    return gl.convert_layout(gl.reshape(wide, [FORM[3]]), FORM[4], assert_trivial=True)


@gluon.jit
def store_chunk(pointer, values, c: gl.constexpr, begin, shift, stop, FORM: gl.constexpr):
    """Stores a chunk, 16 bytes at once but for those in which a SHIFTED row begins and ends."""
    VECTOR: gl.constexpr = FORM[1]
    values = values.to(pointer.dtype.element_ty)
    first = begin + c * FORM[3]
    lane = gl.arange(0, FORM[3], layout=FORM[4])
    there = pointer + first + lane
    if is_edge(c, FORM):
        vector = lane // VECTOR * VECTOR
        if FORM[0] == SHIFTED:
            whole = (vector + VECTOR <= stop - first) & (vector >= shift - first)
            gl.store(there, values, mask=whole)
            gl.store(there, values, mask=chunk_mask(c, begin, shift, stop, FORM) & (whole == 0))
        else:
            gl.store(there, values, mask=vector < stop - first)
    else:
        gl.store(there, values)


@gluon.jit
def copy_parameter(pointer, begin, stop, FORM: gl.constexpr):
    """A part of the weight or the bias in shared memory."""
    held = allocate_ring(pointer.dtype.element_ty, 1, FORM)
    copy_part(pointer, held, 0, begin, stop, FORM)
    return held


@gluon.jit
def read_parameter(pointer, held, c: gl.constexpr, begin, shift, stop, WHERE: gl.constexpr, FORM: gl.constexpr):
    """A chunk of the weight or the bias: see `parameter_float32`."""
    if WHERE == SHARED:
        values = held[c].index(0).load(FORM[4])
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
    """A chunk of the weight or the bias as it was read, in float32."""
    if values.dtype == gl.uint32:
        # the same, in a way that the compiler must repeat for each row: it would keep what it makes of it in registers
        values = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [values], gl.uint32, is_pure=False, pack=1)
        values = unpack_bfloat16(values, FORM)
    else:
        values = as_float32(values)
    return values


@gluon.jit
def read_parameters(
    before, pointer, held, begin, FROM: gl.constexpr, TO: gl.constexpr, shift, stop,
    WHERE: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """Some chunks of the weight or the bias, after those that were read `before`."""
    if pointer is not None:
        for c in gl.static_range(FROM, min(TO, FORM[2])):
            before += (read_parameter(pointer, held, c, begin, shift, stop, WHERE, FORM),)
    return before


@gluon.jit
def draw_ticket(words, PARTS: gl.constexpr):
    """Which of all parts this program has."""
    if PARTS == 1:
        return gl.program_id(0)
    return gl.atomic_add(_as_words(words), 1, sem="relaxed").to(gl.int32)


@gluon.jit
def _as_words(counters):
    """Two counters of 32 bits are a word."""
    return counters.to(gl.pointer_type(gl.int64), bitcast=True)


@gluon.jit
def clear_words(words, groups, PARTS: gl.constexpr):
    """The last program to be done sets all words back to 0, for the next launch."""
    if PARTS > 1:
        words = _as_words(words)
        gl.thread_barrier()  # what any thread has read comes before this
        if gl.atomic_add(words + DONE_WORD, 1, sem="acq_rel") == gl.num_programs(0) - 1:
            SIZE: gl.constexpr = 64 * gl.num_warps()
            each = gl.arange(0, SIZE, layout=gl.BlockedLayout([2], [32], [gl.num_warps()], [0]))
            end = HEADER + groups * (SLOTS * 2 * PARTS)
            for first in range(0, end, SIZE):
                gl.store(words + first + each, gl.zeros_like(each).to(gl.int64), mask=first + each < end)


@gluon.jit
def row_words(words, group, turn, PARTS: gl.constexpr):
    """Where the programs of a group tell of a row: two words of each part, in a slot for every so many rows."""
    return _as_words(words) + HEADER + (group * SLOTS + (turn + SLOTS) % SLOTS) * (2 * PARTS)


@gluon.jit
def publish(word, value, tag):
    """A number and its tag in one word: a tag that is seen comes with its number, and no fence is needed for that.

    A fence would wait for all that the program has stored, and it always has results on their way.
    """
    bits = value.to(gl.uint32, bitcast=True).to(gl.uint64)
    gl.atomic_xchg(word, ((tag.to(gl.uint64) << 32) | bits).to(gl.int64, bitcast=True), sem="relaxed")


@gluon.jit
def poll(words, PARTS: gl.constexpr):
    """The words of all parts as they are now; every warp has all of them, and none waits for another."""
    each = gl.arange(0, PARTS, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return gl.load(words + each, volatile=True)


@gluon.jit
def oldest_tag(found, parts, tag, PARTS: gl.constexpr):
    each = gl.arange(0, PARTS, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return gl.min(gl.where(each < parts, (found >> 32).to(gl.int32), tag), 0)


@gluon.jit
def wait_for_values(words, found, parts, tag, PARTS: gl.constexpr):
    """The numbers of all parts once they are there, 0 for those that do not exist.

    What was `found` before is most often all: the words are looked at early, so that nobody waits for their way.
    """
    while oldest_tag(found, parts, tag, PARTS) < tag:
        found = poll(words, PARTS)
    each = gl.arange(0, PARTS, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return gl.where(each < parts, found.to(gl.uint32).to(gl.float32, bitcast=True), 0.0)
