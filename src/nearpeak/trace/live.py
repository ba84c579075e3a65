"""`LiveTrace`: the ops of real code between two moments, which need not be the ends of one call."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from nearpeak.ops.op import Trace
from nearpeak.trace.patches.inductor_kernels import record_inductor_kernels
from nearpeak.trace.patches.triton_kernels import record_triton_kernels
from nearpeak.trace.recorder import Recorder
from nearpeak.trace.state_snapshot import StateSnapshot
from nearpeak.trace.trace import MAX_OPS


class LiveTrace:
    """Records from its making to `stop`, on the thread that made it and in the backward passes that it starts.

    Who makes it must say when an optimizer's step begins and ends: the hooks for that cannot be added in a hook.
    """

    def __init__(self, limit: int = MAX_OPS) -> None:
        self._untouched = StateSnapshot(live=True)
        self._recorder = Recorder(mode=None, limit=limit, untouched=self._untouched)
        self._undo = ExitStack()
        self._undo.enter_context(record_inductor_kernels(self._recorder))
        self._undo.enter_context(record_triton_kernels())
        self._undo.enter_context(self._recorder.modules.watching())
        self._undo.enter_context(self._recorder)

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """What follows is the optimizer's."""
        self._untouched.optimizer(optimizer)
        self._recorder.optimizers_running += 1

    def optimizer_ends(self) -> None:
        """The optimizer is done."""
        self._recorder.optimizers_running = max(0, self._recorder.optimizers_running - 1)

    def stop(self) -> Trace:
        """What was recorded."""
        self._undo.close()
        recorder = self._recorder
        results = {recorder.storages.used(tensor) for tensor in self._untouched.wanted()}
        return Trace(
            ops=recorder.finished(),
            storages=recorder.storages.facts(),
            results=frozenset(number for number in results if number is not None) | recorder.mutated,
            lives=recorder.lives(),
            on_host=frozenset(recorder.storages.on_host),
            pinned=frozenset(recorder.storages.pinned),
            graph_recorded=recorder.graph_recorded,
        )
