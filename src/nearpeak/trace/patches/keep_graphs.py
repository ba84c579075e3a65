"""`keep_graphs`: a backward pass in a trace leaves the graph of a real forward pass to be used once more.

Autograd frees what a graph has saved when it is used. The code that is traced may hold a loss from before, and the
program will use that graph itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import graph

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
