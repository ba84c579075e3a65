"""`notes_of`: what a trace file cannot tell of what was read from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

from nearpeak.capture.kineto.calls import Call, Step
from nearpeak.capture.kineto.kernels import Kernel, graph_note
from nearpeak.capture.kineto.ops import Ops
from nearpeak.capture.kineto.recording import Recording

_STORAGES = {
    "least": "The file has no addresses: a tensor may be any earlier one that looks like it, and arguments that look "
    "alike may be one. The least is counted, so the bound can be well below that of a live trace, and the fused and "
    "ideal floors follow a guess at the flow of data.",
    "likely": "The file has no addresses: which tensors share memory is guessed, so the floors are estimates, not "
    "bounds.",
}


def notes_of(
    recording: Recording,
    found: Ops,
    kernels: Sequence[Kernel],
    calls: Sequence[Call],
    step: Step | None,
    *,
    cut: bool,
    storages: Literal["least", "likely"],
) -> Iterator[str]:
    """Sentences for people.

    Args:
        recording: All of the file.
        found: The ops of what was read.
        kernels: Its kernels.
        calls: The calls of its ops.
        step: The step that was read; None for all of the file.
        cut: Whether some of it may be missing.
        storages: How tensors that share memory were guessed.
    """
    if calls or not kernels:
        yield _STORAGES[storages]
    if recording.truncated:
        yield "The file ends in the middle; what follows is not in the trace."
    if cut:
        what = "What was read" if step is None else f"Step {step.number}"
        yield f"{what} is not whole: ops or kernels of it may be missing, and its times are those of what is there."
        if not recording.device_spans and recording.metadata.get("deviceProperties"):
            yield "The file has no kernels. They are written last, so it may have been cut off before them."
    if recording.damaged:
        yield f"{recording.damaged} events are not valid JSON and were left out."
    unknown = found.unknown - Counter(call.span.name for call in calls if call.kind == "graph")
    if unknown:
        listed = ", ".join(f"{name} ({count})" for name, count in unknown.most_common(5))
        yield f"{unknown.total()} ops have no cost, because the file does not show enough of them: {listed}."
    if found.exact_lists:
        yield (
            f"{found.exact_lists} ops on long lists have the tensors of the gradients of the backward pass: these make "
            "as many chunks as their kernels have blocks."
        )
    if found.least_lists:
        yield (
            f"{found.least_lists} ops on long lists or with index tensors count the elements that they have at the "
            "least, from the blocks of their kernels."
        )
    compiled = sum(call.kind == "inductor" for call in calls)
    if compiled:
        yield (
            f"Of {compiled} compiled kernels only what they must move counts: the file does not say which part of a "
            "tensor they read, so it is all of it only where no operator in their name takes a part."
        )
    if graphs := graph_note(kernels):
        yield graphs
    if recording.device_spans and calls:
        yield "Products of float32 count as tf32 where the device has it, since the file does not say what was allowed."
    lost = [kernel for kernel in kernels if kernel.op is None and not kernel.in_graph]
    if lost:
        seconds = sum(kernel.seconds for kernel in lost)
        yield f"{len(lost)} kernels of {seconds * 1e3:.3f} ms belong to no op in the file."
