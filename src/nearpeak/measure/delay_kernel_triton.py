"""The triton code of `spin`; imported only where triton is."""


# mypy: ignore-errors
# triton's language is not Python to a type checker.

import triton
import triton.language as tl


@triton.jit
def delay(times_ptr, nanoseconds):
    """Reads the global timer until `nanoseconds` have passed; stores begin and end."""
    begin = tl.extra.cuda.globaltimer()
    now = begin
    while now - begin < nanoseconds:
        now = tl.extra.cuda.globaltimer()
    tl.store(times_ptr, begin)
    tl.store(times_ptr + 1, now)


@triton.jit
def fma(out_ptr, factor, steps, WIDTH: tl.constexpr):  # upper case: a compile-time constant  # noqa: N803  # upper case: a compile-time constant
    """Four independent chains per lane, so that the latency of one hides behind the others."""
    offsets = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    start = offsets.to(tl.float32)
    a, b, c, d = start, start + 1.0, start + 2.0, start + 3.0
    for _ in range(steps):
        a = a * factor + 1.0
        b = b * factor + 1.0
        c = c * factor + 1.0
        d = d * factor + 1.0
    tl.store(out_ptr + offsets, a + b + c + d)
