"""What a trace does about backward passes where they begin: in the function that starts autograd's engine.

`keep_graphs`: a pass in a trace leaves the graph of a real forward pass to be used once more. Autograd frees what a
graph has saved when it is used. The code that is traced may hold a loss from before, and the program will use that
graph itself.

`note_passes`: a live trace knows which of its ops belong to which pass, and the lines that began it. The ops of a GPU
run on a thread of the engine's, on which no line is seen. No function is put around the engine's: warnings of torch's
name the line that is so many calls above them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import Variable, graph

from nearpeak.trace.patches.shared_patch import SharedPatch, patch_attribute
from nearpeak.trace.recorder import active_recorder


@SharedPatch
@contextmanager
def keep_graphs() -> Iterator[None]:
    """Inside, backward passes on threads that record retain their graph."""
    original: Any = graph._engine_run_backward

    def run(outputs: Any, gradients: Any, retain_graph: Any, *args: Any, **kwargs: Any) -> Any:
        return original(outputs, gradients, active_recorder() is not None or retain_graph, *args, **kwargs)

    with (
        patch_attribute(graph, "_engine_run_backward", run),
        patch_attribute(torch.autograd, "_engine_run_backward", run),
    ):
        yield


@SharedPatch
@contextmanager
def note_passes() -> Iterator[None]:
    """Inside, recorders note the backward passes that begin on their threads."""
    with patch_attribute(Variable, "_execution_engine", _NotedEngine(Variable._execution_engine)):
        yield


class _NotedEngine:
    """Autograd's engine. Whoever takes its `run_backward` calls it next."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        recorder = active_recorder() if name == "run_backward" else None
        if recorder is not None:
            recorder.backward_begins()
        return getattr(self._engine, name)
