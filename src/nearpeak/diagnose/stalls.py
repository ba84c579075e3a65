"""`explained`: what a recording says about the idle time of its step, with the lines of another trace of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nearpeak.capture.kineto.host import HostSpan, marked_line
from nearpeak.capture.kineto.read import KinetoTrace
from nearpeak.diagnose.charging import Doing, Ran, explain
from nearpeak.diagnose.idle import Idle
from nearpeak.work.op import Op

_CALLED: Mapping[str, str] = {
    "aten._local_scalar_dense": "item",
    "aten.item": "item",
    "aten.is_nonzero": "item",
    "aten._to_copy": "copy",
    "aten.copy_": "copy",
    "aten._copy_from": "copy",
}
"""What an op is called in the code that has it."""


def explained(
    recorded: KinetoTrace,
    *,
    idle_s: float,
    clean: bool,
    host_ahead: bool = False,
    traced: Sequence[Op] | None = None,
    to_traced: Sequence[int | None] | None = None,
) -> Idle:
    """The causes of `idle_s`, from the gaps of the recorded step.

    Args:
        recorded: The step under the profiler.
        idle_s: The idle time to explain.
        clean: Whether that is the idle time of a step without the profiler.
        host_ahead: Whether clean steps began while the device was at work on the one before. The recorded one did not:
            the device had been waited for, and what passed until its first kernel is no idle time of theirs.
        traced: The ops of another run of the step, which know their lines.
        to_traced: Of each op of the recording its index there.
    """
    ops = recorded.trace.ops

    def index(op: int | None) -> int | None:
        return op if op is None or to_traced is None else to_traced[op]

    def where(op: int | None) -> str:
        there = index(op)
        place = None if there is None else (ops if traced is None else traced)[there]
        return "" if place is None else place.source or place.module

    # What torch does inside of `torch.tensor` and the like is in no trace: the next op that is has nearly its line.
    known = [where(op) for op in range(len(ops))]
    for op in range(len(ops) - 2, -1, -1):
        known[op] = known[op] or known[op + 1]
    if recorded.kernels:
        ran = [
            Ran(
                item.start_s,
                item.start_s + item.seconds,
                item.launched_s,
                "" if item.op is None else known[item.op],
                index(item.op),
            )
            for item in recorded.kernels
        ]
    else:  # ops are the kernels of a CPU
        ran = [Ran(start, start + took, None, known[op], index(op)) for op, (start, took) in enumerate(recorded.spans)]
    first = min((item.start_s for item in ran), default=0.0)
    last = max((item.end_s for item in ran), default=0.0)
    begins = max(first, 0.0)
    return explain(
        ran,
        [
            Doing(
                span.kind,
                span.start_s,
                span.start_s + span.seconds,
                marked_line(span.name) or where(span.op),
                _what(span, ops),
            )
            for span in recorded.host
        ],
        recorded.host_working if recorded.kernels else None,
        window=(begins if host_ahead else min(recorded.free_from_s, begins), max(last, recorded.wall_s)),
        idle_s=idle_s,
        clean=clean,
    )


def _what(span: HostSpan, ops: Sequence[Op]) -> str:
    if span.kind == "input":
        return "DataLoader with workers" if "_MultiProcessing" in span.name else "DataLoader"
    if span.kind == "garbage collection":
        return ""
    if span.kind == "synchronisation" and span.op is not None:
        op = ops[span.op]
        kind, _, rest = op.name.partition(".")
        if kind in ("least", "unknown"):  # one that the file does not tell enough of
            return rest.removeprefix("aten::").removeprefix("aten.")
        return _CALLED.get(op.packet, op.packet.removeprefix("aten."))
    return span.name.partition(" (dynamo_timed)")[0]
