"""How programs that share a row tell each other of their parts of it, within one launch.

A part is known by a ticket, which programs draw as they begin: those of one row begin one after another, whatever the
order of their numbers, and all that wait for a part have begun no earlier than it. Only the programs of one row wait
for each other, so that a launch ends wherever so many can run at the same time; there are `MOST_PARTS` at most.

The interpreter runs programs one after another. There, the first half of the work is one launch and the second another.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels.policy import INTERPRETED

MOST_PARTS = 32
"""Of a row: of several such kernels at a time on different streams, each can have all parts of a row at work."""
ALL, FIRST, LAST = (tl.constexpr(phase) for phase in range(3))
"""What a launch does: all with a meeting between the halves, or one half."""
PHASES = (FIRST, LAST) if INTERPRETED else (ALL,)


def counters(rows: int, device: torch.device) -> Tensor:
    """The tickets that were drawn, and of each row how many parts are known."""
    return torch.zeros(1 + rows, dtype=torch.int32, device=device)


@triton.jit
def turn(counters, PHASE: tl.constexpr):
    """Which of all parts this program has."""
    if PHASE == ALL:
        return tl.atomic_add(counters, 1, sem="relaxed")
    if PHASE == LAST:
        return tl.num_programs(0) - 1 - tl.program_id(0)  # what was read last is nearest
    return tl.program_id(0)


@triton.jit
def meet(counters, row, parts):
    """Waits for the other parts of a row. What they stored before is seen by loads from the L2 cache after this."""
    tl.debug_barrier()
    tl.atomic_add(counters + 1 + row, 1, sem="release")
    while tl.atomic_add(counters + 1 + row, 0, sem="acquire") < parts:
        pass
    tl.debug_barrier()
