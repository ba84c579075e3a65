"""`at_their_launches`: kernels that the code launches itself, past torch's dispatcher, at the ops that stand for them.

torch's profiler shows such a kernel and no op. A trace of the step has an op for each launch by Triton, named after the
kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nearpeak.diagnose.profile import DeviceKernel
from nearpeak.work.op import Op

TRITON = "triton."


def at_their_launches(kernels: Sequence[DeviceKernel], ops: Sequence[Op]) -> list[DeviceKernel]:
    """The same kernels; those without an op are at the launches of that name, in order, where there are as many."""
    launches: dict[str, list[int]] = {}
    for index, op in enumerate(ops):
        if op.name.startswith(TRITON):
            launches.setdefault(op.name.removeprefix(TRITON), []).append(index)
    alone: dict[str, list[int]] = {}
    for index in sorted(range(len(kernels)), key=lambda index: kernels[index].start_s):
        if kernels[index].op is None and kernels[index].name in launches:
            alone.setdefault(kernels[index].name, []).append(index)
    found = list(kernels)
    for name, indices in alone.items():
        if len(indices) == len(launches[name]):
            for index, at in zip(indices, launches[name], strict=True):
                found[index] = replace(found[index], op=at)
    return found
