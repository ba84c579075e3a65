"""The host waits for the device in the middle of a step: the device runs out of work, and the host must catch up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from nearpeak.diagnose.examined import Examined
from nearpeak.diagnose.finding import Waste
from nearpeak.diagnose.findings import rule
from nearpeak.diagnose.idle import IdleCause
from nearpeak.diagnose.rules.pageable_copy import COPIES, comes_from_host, goes_to_host
from nearpeak.diagnose.steady import is_line
from nearpeak.units import seconds
from nearpeak.work.cost import Access


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
_SAME = 1e-9
"""Seconds: times that are less apart are the same."""
_READS = ("aten._local_scalar_dense", "aten.item", "aten.is_nonzero")
_SELECTS = ("nonzero", "index", "index_put", "index_put_", "_index_put_impl_", "masked_select", "argwhere")


@rule("synchronisation", needs=["host"])
def synchronisation(step: Examined) -> Iterator[Waste]:
    """Each line at which the host waited while, or so that, nothing ran on the device."""
    for cause in step.profile.idle:
        if cause.cause != "synchronisation" or (cause.what == "copy" and comes_from_host(step, cause.where)):
            continue
        form = _form(step, cause)
        goes = _goes(step, cause.where, form)
        stays_s = min(_queued(step, cause.where), cause.seconds) if form is _TO_HOST else 0.0
        place = "" if is_line(cause.where) or not cause.where else f" (in {cause.where})"
        yield Waste(
            title=form.title + place,
            at=next((index for index, op in enumerate(step.ops) if op.source == cause.where and op.source), None),
            source=cause.where if is_line(cause.where) else "",
            gains=goes,
            gone=goes,
            idle={"synchronisation": cause.seconds - stays_s},
            evidence=f"{cause.what or 'A call'} made the host wait {_times(cause.count)} in the step; for "
            f"{seconds(cause.seconds)} nothing ran on the device because of it.",
            reasoning="Without the wait the host launches what follows while the device still works: the idle time "
            "that the wait is charged with goes away. What the host takes for launching is not in it."
            + (f" Between kernels and the copies, which stay, {seconds(stays_s)} remain." if stays_s else ""),
            remedy=form.remedy,
        )


def _goes(step: Examined, where: str, form: _Form) -> dict[int, float]:
    """What ops at a line take that nobody needs any more: to count, or to bring a number to the host."""
    if form is _SELECT:
        return _counting(step, where)
    if form is _READ:
        return {
            index: step.measured[index].measured_s
            for index, op in enumerate(step.ops)
            if op.packet in _READS and (op.source or op.module) == where
        }
    return {}


def _queued(step: Examined, where: str) -> float:
    """How long the device took from a kernel to the copy behind it, for all copies to the host at a line.

    The copies are queued while a kernel runs, so this is no wait for the host, and copies that do not block have it
    too. They have another one behind them; but the profiler makes both longer: on an H200, 5.0 us under it before each
    copy, against 5.3 us without it before and after a copy that does not block.
    """
    copies = [kernel.start_s for kernel in step.profile.timeline if _is_copy_at(step, kernel.op, where)]
    ends = [
        (gap.start_s + gap.seconds, gap.seconds)
        for gap in step.profile.gaps
        if (gap.cause, gap.where) == ("synchronisation", where)
    ]
    return sum(length for end, length in ends if any(abs(start - end) < _SAME for start in copies))


def _is_copy_at(step: Examined, index: int | None, where: str) -> bool:
    op = None if index is None else step.ops[index]
    return op is not None and op.packet in COPIES and (op.source or op.module) == where


def _counting(step: Examined, where: str) -> dict[int, float]:
    """What ops at a line take to find out where a mask is true, which nobody needs to know if the shape is kept."""
    found = {}
    for index, op in enumerate(step.ops):
        masks = [tensor for tensor in op.inputs if tensor.dtype in ("bool", "uint8")]
        if (op.source or op.module) != where or (not masks and op.packet != "aten.nonzero"):
            continue
        if op.packet == "aten.nonzero":
            found[index] = step.measured[index].measured_s
        elif op.packet in ("aten.index", "aten.masked_select"):
            whole = op.tensor("self")
            kept = Access(storage=whole.storage, bytes=whole.bytes)
            read = [Access(storage=mask.storage, bytes=mask.bytes) for mask in masks]
            found[index] = max(0.0, step.measured[index].measured_s - step.of_work([kept, *read], [kept]))
    return found


def _form(step: Examined, cause: IdleCause) -> _Form:
    what = cause.what.partition(".")[0]
    if what == "item":
        return _READ
    if what in _SELECTS:
        return _SELECT
    if what == "copy":
        return _TO_HOST if goes_to_host(step, cause.where) else _COPY
    if "Synchronize" in what:
        return _EXPLICIT
    return _Form(
        f"{cause.what or 'A call'} makes the host wait for the device.",
        "Its result has a size or a value that the host must know. Use a form whose shape does not depend on the data, "
        "or do it once before the steps.",
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
