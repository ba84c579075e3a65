"""`LiveTrace`: the ops of real code between two moments, which need not be the ends of one call."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from nearpeak.ops.op import Trace
from nearpeak.trace.graphs import record_replays
from nearpeak.trace.patches.backward_passes import note_passes
from nearpeak.trace.patches.ctc_loss import ctc_loss_by_lists
from nearpeak.trace.patches.inductor_cpp import see_cpp_kernels
from nearpeak.trace.patches.inductor_kernels import record_inductor_kernels
from nearpeak.trace.patches.triton_kernels import record_triton_kernels
from nearpeak.trace.recorder import Recorder
from nearpeak.trace.state_snapshot import StateSnapshot
from nearpeak.trace.trace import MAX_OPS


class LiveTrace:
    """Records from its creation to `stop`, on the thread that created it and in the backward passes that it starts.

    Its owner must call `optimizer_begins` and `optimizer_ends`: hooks for that cannot be added inside a hook.
    """

    def __init__(self, limit: int = MAX_OPS, *, reads_values: bool = True) -> None:
        self._snapshot = StateSnapshot(live=True)
        self._recorder = Recorder(mode=None, limit=limit, snapshot=self._snapshot, reads_values=reads_values)
        self._undo = ExitStack()
        self._undo.enter_context(record_inductor_kernels(self._recorder))
        self._undo.enter_context(see_cpp_kernels())
        self._undo.enter_context(record_triton_kernels())
        self._undo.enter_context(record_replays())
        self._undo.enter_context(ctc_loss_by_lists())
        self._undo.enter_context(note_passes())
        self._undo.enter_context(self._recorder.modules.watching())
        self._undo.enter_context(self._recorder)
        self._undo.enter_context(self._recorder.running_live())

    def optimizer_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Ops that follow are the optimizer's. If its step has a closure, what to call the step with."""
        return self._recorder.optimizer_begins(optimizer, args, kwargs)

    def optimizer_ends(self) -> None:
        """The optimizer is done."""
        self._recorder.optimizer_ends()

    def cancel(self) -> None:
        """Records nothing more; for other threads than the one that created it, which alone can stop it."""
        self._recorder.paused = True
        if self._recorder.python_time is not None:
            self._recorder.python_time.end()

    def stop_next_step(self, trace: Trace, first: LiveTrace) -> Trace:
        """Ends the recording of the step after `trace`, which `first` has recorded: the trace with this step's ops."""
        self._undo.close()
        if self._recorder.failure is not None or self._recorder.truncated:
            return trace
        return first._recorder.add_next_step(trace, self._recorder)

    def stop(self) -> Trace:
        """Ends the recording; raises what kept it from being complete."""
        self._undo.close()
        if self._recorder.failure is not None:
            raise self._recorder.failure
        return self._recorder.finish((), truncated=self._recorder.truncated)
