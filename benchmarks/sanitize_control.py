"""A kernel in which nothing is wrong, for racecheck: one warp hands numbers to others through a barrier in memory.

    compute-sanitizer --tool racecheck python benchmarks/sanitize_control.py

Kernels in Gluon hand everything over like this. racecheck does not follow such barriers, nor those by which Triton
starts warps with parts of their own: what it reports of this kernel, it reports of them all. Triton has a sanitizer
that does, which is built into a kernel as it is compiled:

    TRITON_INSTRUMENTATION_MODE=consan python benchmarks/sanitize_control.py
    TRITON_INSTRUMENTATION_MODE=consan python benchmarks/sanitize_control.py --hasty  # does not wait, and is found out
"""

from __future__ import annotations

import sys

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

NUMBERS = 128


@gluon.jit
def _give(numbers, given, NUMBERS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([NUMBERS // 32], [32], [1], [0])
    numbers.store(gl.arange(0, NUMBERS, layout=layout))
    mbarrier.arrive(given, count=1)


@gluon.jit
def _take(numbers, given, result, NUMBERS: gl.constexpr, HASTY: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if not HASTY:
        mbarrier.wait(given, 0)
    gl.store(result + gl.arange(0, NUMBERS, layout=layout), numbers.load(layout))


@gluon.jit
def hand_over_kernel(result, NUMBERS: gl.constexpr, HASTY: gl.constexpr):
    numbers = gl.allocate_shared_memory(gl.int32, [NUMBERS], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    given = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(given, count=1)
    gl.warp_specialize(
        [(_take, (numbers, given, result, NUMBERS, HASTY)), (_give, (numbers, given, NUMBERS))], [1], [24]
    )


def main() -> int:
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    result = torch.full((NUMBERS,), -1, dtype=torch.int32, device="cuda")
    hand_over_kernel[(1,)](result, NUMBERS, "--hasty" in sys.argv, num_warps=4)
    torch.cuda.synchronize()
    right = torch.equal(result, torch.arange(NUMBERS, dtype=torch.int32, device="cuda"))
    print("all numbers came over" if right else "not all numbers came over")
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
