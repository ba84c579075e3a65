"""Data goes to the device from memory that is not pinned, or the host waits for the copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nearpeak.diagnose.examined import Examined
from nearpeak.diagnose.finding import Waste
from nearpeak.diagnose.findings import rule
from nearpeak.diagnose.steady import is_line
from nearpeak.units import quantity, seconds
from nearpeak.work.op import Op
from nearpeak.work.tensor import Tensor

COPIES = ("aten._to_copy", "aten.copy", "aten.copy_")
SMALL = 65536.0
"""Bytes: up to this a copy is one value or a short list, and costs its call."""


@rule("pageable-copy", needs=["storages", "host"])
def pageable_copy(step: Examined) -> Iterator[Waste]:
    """Copies to the device at each line, from memory that is not pinned or with a wait."""
    rate = step.machine.achievable.host_to_device if step.machine.achievable is not None else None
    if not rate:
        return
    for where, indices in _by_place(step).items():
        pageable = [index for index in indices if not _pinned(step, step.ops[index])]
        moved = {index: sum(tensor.bytes for tensor in _sources(step.ops[index])) for index in indices}
        waited = sum(
            cause.seconds
            for cause in step.profile.idle
            if cause.cause == "synchronisation" and cause.what == "copy" and cause.where == where
        )
        small = all(size <= SMALL for size in moved.values())
        gains = {
            index: max(0.0, step.measured[index].measured_s - (0.0 if small else moved[index] / rate))
            for index in pageable
        }
        took, total = step.seconds(indices), sum(moved.values())
        yield Waste(
            title=_title(small, bool(pageable)),
            at=indices[0],
            source=where if is_line(where) else "",
            gains=gains,
            idle={"synchronisation": waited} if waited else {},
            evidence=f"{quantity(total, 'B')} go to the device in {seconds(took)}"
            + (f", {quantity(total / took, 'B/s')}" if took and not small else "")
            + (f"; for {seconds(waited)} nothing ran because the host waited for it." if waited else "."),
            reasoning=(
                "Made on the device, or once before the steps, there is no copy and no wait."
                if small
                else f"From pinned memory this machine copies {quantity(rate, 'B/s')}, which is "
                f"{seconds(total / rate)}; a copy that does not block leaves the host free to launch what follows. On "
                "a stream of its own, behind the kernels of the step before, the rest can go too."
            ),
            remedy=_remedy(step.ops[indices[0]], small=small, pageable=bool(pageable)),
        )


def comes_from_host(step: Examined, where: str) -> bool:
    """Whether the ops at a place copy from the host's memory to the device's; False where storages are not known."""
    return any((op.source or op.module) == where and _to_device(step, op) for op in step.ops)


def goes_to_host(step: Examined, where: str) -> bool:
    """Whether the ops at a place copy from the device's memory to the host's; False where storages are not known."""
    host = step.trace.on_host
    return any(
        (op.source or op.module) == where
        and op.packet in COPIES
        and any(tensor.storage in host for tensor in op.written)
        and not all(tensor.storage in host for tensor in _sources(op))
        for op in step.ops
    )


def _by_place(step: Examined) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for index, op in enumerate(step.ops):
        if _to_device(step, op):
            found.setdefault(op.source or op.module, []).append(index)
    return found


def _to_device(step: Examined, op: Op) -> bool:
    written = op.written
    return (
        op.packet in COPIES
        and bool(written)
        and not any(tensor.storage in step.trace.on_host for tensor in written)
        and any(tensor.storage in step.trace.on_host for tensor in _sources(op))
    )


def _sources(op: Op) -> Sequence[Tensor]:
    return op.tensors("src") if op.packet != "aten._to_copy" else op.tensors("self")


def _pinned(step: Examined, op: Op) -> bool:
    return all(tensor.storage in step.trace.pinned for tensor in _sources(op))


def _title(small: bool, pageable: bool) -> str:
    if small:
        return "A small value is copied to the device in the step."
    if pageable:
        return "Data goes to the device from memory that is not pinned."
    return "The host waits for a copy to the device."


def _remedy(op: Op, *, small: bool, pageable: bool) -> str:
    shape = tuple(op.written[0].shape)
    if small:
        return (
            f"Make the tensor of shape {shape} on the device (torch.full, torch.arange with device='cuda'), or once "
            "before the steps."
        )
    if pageable:
        return (
            "DataLoader(..., pin_memory=True), or batch.pin_memory() ahead of the step; then\n"
            f"    batch.to('cuda', non_blocking=True)    # {shape}"
        )
    return f"batch.to('cuda', non_blocking=True)    # {shape}: the memory is pinned already"
