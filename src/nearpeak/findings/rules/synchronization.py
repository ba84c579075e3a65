"""The host waits for the device or for a copy, or copies pageable memory.

pageable-copy: Data is copied to the device from memory that is not pinned, or the host waits for the copy.
synchronization: The host waits for the device within a step: the device runs out of work, and the host must catch up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from nearpeak.findings.convolutions import searched_convolutions
from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.experts import expert_places
from nearpeak.findings.host_reads import (
    COPIES,
    copy_sources,
    is_copy_to_device,
    is_copy_to_host,
    reading_places,
    reads_for_python,
)
from nearpeak.findings.step import READS, Step, is_source_line
from nearpeak.ops.cost import Access
from nearpeak.ops.op import Op
from nearpeak.profiles.idle import IdleCause
from nearpeak.units import quantity, seconds

SMALL_COPY_BYTES = 65536.0
"""Up to this size, a copy is one value or a short list, and costs its call."""


@rule("pageable-copy", needs=["storages", "host"])
def pageable_copy(step: Step) -> Iterator[Waste]:
    """Copies to the device, by line, from pageable memory or with a wait."""
    rate = step.machine.achievable.host_to_device if step.machine.achievable is not None else None
    if not rate:
        return
    for where, indices in _copies_by_place(step).items():
        pageable = [index for index in indices if not _is_pinned(step, step.ops[index])]
        moved = {index: sum(tensor.bytes for tensor in copy_sources(step.ops[index])) for index in indices}
        waits = [
            cause
            for cause in step.profile.idle
            if cause.cause == "synchronization" and cause.what == "copy" and cause.where == where
        ]
        waited = sum(cause.seconds for cause in waits)
        small = all(size <= SMALL_COPY_BYTES for size in moved.values())
        gains = {index: max(0.0, step.time(index) - (0.0 if small else moved[index] / rate)) for index in pageable}
        took, total = step.seconds(indices), sum(moved.values())
        yield Waste(
            title=_copy_title(small, bool(pageable)),
            op=indices[0],
            source=where if is_source_line(where) else "",
            gains=gains,
            idle={"synchronization": waited} if waited else {},
            causes=waits,
            evidence=f"{quantity(total, 'B')} are copied to the device in {seconds(took)}"
            + (f", {quantity(total / took, 'B/s')}" if took and not small else "")
            + (f"; for {seconds(waited)} nothing ran because the host waited for it." if waited else "."),
            reasoning=(
                "A tensor that is created on the device, or once before the steps, needs no copy and no wait."
                if small
                else f"From pinned memory this machine copies {quantity(rate, 'B/s')}, which is "
                f"{seconds(total / rate)}; a non-blocking copy leaves the host free to launch what follows. On a "
                "stream of its own, overlapped with the step before, the rest can be hidden too."
            ),
            remedy=_copy_remedy(step.ops[indices[0]], small=small, pageable=bool(pageable)),
        )


def copies_from_host(step: Step, where: str) -> bool:
    """Whether ops at a place copy from host to device memory; False if storages are not known."""
    return any(op.place == where and is_copy_to_device(step, op) for op in step.ops)


def copies_to_host(step: Step, where: str) -> bool:
    """Whether ops at a place copy from device to host memory; False if storages are not known."""
    return any(op.place == where and is_copy_to_host(step, op) for op in step.ops)


def _copies_by_place(step: Step) -> dict[str, list[int]]:
    copies: dict[str, list[int]] = {}
    for index, op in enumerate(step.ops):
        if is_copy_to_device(step, op):
            copies.setdefault(op.place, []).append(index)
    return copies


def _is_pinned(step: Step, op: Op) -> bool:
    return all(tensor.storage in step.trace.pinned for tensor in copy_sources(op))


def _copy_title(small: bool, pageable: bool) -> str:
    if small:
        return "A small value is copied to the device in the step."
    if pageable:
        return "Data is copied to the device from memory that is not pinned."
    return "The host waits for a copy to the device."


def _copy_remedy(op: Op, *, small: bool, pageable: bool) -> str:
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


class _Form(NamedTuple):
    title: str
    remedy: str


_READ = _Form(
    "A number is read from the device (`.item()`), and the host waits for it.",
    "Keep it on the device, and read it every so many steps:\n"
    "    total += loss.detach()\n"
    "    if step % 100 == 0:\n"
    "        print(total.item() / 100)",
)
_FINITE = _Form(
    "Gradients are checked to be finite, and the host waits for the answer.",
    "norm = torch.nn.utils.clip_grad_norm_(parameters, most)  # without error_if_nonfinite=True; it stays there:\n"
    "    if step % 100 == 0 and not norm.isfinite():\n"
    "        raise RuntimeError(...)",
)
_SCALER = _Form(
    "The gradient scaler reads whether gradients are finite, and the host waits for it.",
    "An optimizer with fused=True decides on the device; and with bfloat16 no scaler is needed:\n"
    "    with torch.autocast('cuda', dtype=torch.bfloat16): ...",
)
_PRINTED = _Form(
    "A tensor is printed, and the host waits for its values.",
    "Print every so many steps, and numbers in place of tensors:\n    if step % 100 == 0:\n        print(loss.item())",
)
_SELECT = _Form(
    "A boolean mask or `nonzero` makes the host wait: it must know how many elements there are.",
    "Keep the shape, so that nobody need count:\n"
    "    torch.where(mask, x, 0)        # in place of x[mask]\n"
    "    x.masked_fill_(mask, value)    # in place of x[mask] = value",
)
_TO_HOST = _Form(
    "A copy to the host makes the host wait.",
    "Copy into pinned memory without waiting, and read it a step later:\n"
    "    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)   # once\n"
    "    host.copy_(x, non_blocking=True)\n"
    "    copied = torch.cuda.Event(); copied.record()                  # copied.synchronize() before it is read",
)
_COPY = _Form(
    "A copy between the host and the device makes the host wait.",
    "A tensor of the host's numbers, torch.tensor(..., device='cuda'): make it once before the steps, or on the device "
    "with torch.full or torch.arange. A result: copy it into pinned memory with non_blocking=True, and read it a step "
    "later.",
)
_EXPLICIT = _Form(
    "The host waits for the whole device (`torch.cuda.synchronize()`).",
    "Leave the call out: kernels of one stream run in order anyway, and a number that is read waits for itself. Times "
    "are taken with torch.cuda.Event(enable_timing=True).",
)
_SAME_TIME_S = 1e-9
"""Times that are closer than this are equal."""
_NORMS = frozenset({"aten._foreach_norm", "aten.linalg_vector_norm", "aten.norm", "aten._foreach_powsum"})
_SELECTS = ("nonzero", "index", "index_put", "index_put_", "_index_put_impl_", "masked_select", "argwhere")


@rule("synchronization", needs=["host"])
def synchronization(step: Step) -> Iterator[Waste]:
    """Lines at which the host waits for the device, and the device is idle because of it."""
    searched = {step.ops[index].place for index in searched_convolutions(step)}  # waits for its own measurements
    elsewhere = set(reads_for_python(step)) | step.anomaly_places
    if {"storages", "lines"} <= step.knows:  # else no other rule finds them
        elsewhere |= expert_places(step) | reading_places(step)
    for cause in step.profile.idle:
        if cause.cause != "synchronization" or cause.where in searched:
            continue
        if cause.what == "copy" and copies_from_host(step, cause.where):
            continue
        if cause.where in elsewhere:  # part of a larger finding
            continue
        form = _form(step, cause)
        goes = _removed_work(step, cause.where, form)
        stays_s = min(_queued_copy_seconds(step, cause.where), cause.seconds) if form is _TO_HOST else 0.0
        place = "" if is_source_line(cause.where) or not cause.where else f" (in {cause.where})"
        yield Waste(
            title=form.title + place,
            op=next((index for index, op in enumerate(step.ops) if op.source == cause.where and op.source), None),
            source=cause.where if is_source_line(cause.where) else "",
            gains=goes,
            gone=goes,
            idle={"synchronization": cause.seconds - stays_s},
            causes=[cause],
            evidence=f"{cause.what or 'A call'} made the host wait {_times(cause.count)} in the step; for "
            f"{seconds(cause.seconds)} nothing ran on the device because of it.",
            reasoning="Without the wait the host launches what follows while the device still works: the idle time "
            "that the wait is charged with goes away. What the host takes for launching is not in it."
            + (f" Between kernels and the copies, which stay, {seconds(stays_s)} remain." if stays_s else ""),
            remedy=form.remedy,
        )


def _removed_work(step: Step, where: str, form: _Form) -> dict[int, float]:
    """The time of ops at a line that are no longer needed: counting, or copying a number to the host."""
    if form is _SELECT:
        return _mask_counting_seconds(step, where)
    if form in (_READ, _FINITE, _SCALER):
        return {
            index: step.time(index) for index, op in enumerate(step.ops) if op.packet in READS and op.place == where
        }
    return {}


def _queued_copy_seconds(step: Step, where: str) -> float:
    """The gaps between a kernel and a queued copy to the host, for all copies at a line.

    The copies are queued while a kernel runs, so the gap is not caused by the host, and non-blocking copies have it
    too. Those have another gap after them; but the profiler lengthens both: on an H200, 5.0 us with the profiler before
    each copy, and 5.3 us without it before and after a non-blocking copy.
    """
    copies = [kernel.start_s for kernel in step.profile.timeline if _is_copy_at(step, kernel.op, where)]
    ends = [
        (gap.start_s + gap.seconds, gap.seconds)
        for gap in step.profile.gaps
        if (gap.cause, gap.where) == ("synchronization", where)
    ]
    return sum(length for end, length in ends if any(abs(start - end) < _SAME_TIME_S for start in copies))


def _is_copy_at(step: Step, index: int | None, where: str) -> bool:
    op = None if index is None else step.ops[index]
    return op is not None and op.packet in COPIES and op.place == where


def _mask_counting_seconds(step: Step, where: str) -> dict[int, float]:
    """The time of ops at a line to count where a mask is true, which is not needed if the shape is kept."""
    gains = {}
    for index, op in enumerate(step.ops):
        masks = [tensor for tensor in op.inputs if tensor.dtype in ("bool", "uint8")]
        if op.place != where or (not masks and op.packet != "aten.nonzero"):
            continue
        if op.packet == "aten.nonzero":
            gains[index] = step.time(index)
        elif op.packet in ("aten.index", "aten.masked_select"):
            whole = op.tensor("self")
            whole_access = Access(storage=whole.storage, bytes=whole.bytes)
            read = [Access(storage=mask.storage, bytes=mask.bytes) for mask in masks]
            gains[index] = max(0.0, step.time(index) - step.expected_for_work([whole_access, *read], [whole_access]))
    return gains


def _form(step: Step, cause: IdleCause) -> _Form:
    what = cause.what.partition(".")[0]
    if what == "print":
        return _PRINTED
    if what == "item":
        return _number_form(step, cause.where)
    if what in _SELECTS:
        return _SELECT
    if what == "copy":
        return _TO_HOST if copies_to_host(step, cause.where) else _COPY
    if "Synchronize" in what:
        return _EXPLICIT
    return _Form(
        f"{cause.what or 'A call'} makes the host wait for the device.",
        "Its result has a size or a value that the host must know. Use a form whose shape does not depend on the data, "
        "or do it once before the steps.",
    )


def _packets_at(step: Step, where: str) -> set[str]:
    """The operators that ran at a place."""
    return {op.packet for op in step.ops if op.place == where and where}


def _number_form(step: Step, where: str) -> _Form:
    """What a number is read for, by the ops at its line."""
    packets = _packets_at(step, where)
    if any("_amp_" in packet for packet in packets):
        return _SCALER
    return _FINITE if "aten.logical_or" in packets and packets & _NORMS else _READ


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
