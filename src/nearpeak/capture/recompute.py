"""`Recompute`: which ops of a backward pass run a forward again, as activation checkpointing does."""

from __future__ import annotations

import sys
from types import FrameType

import torch

from nearpeak.capture.modules import ModulePaths
from nearpeak.capture.source import ENGINE

_CREATE_GRAPH = 2
"""Among the arguments of torch's function that starts its engine, after the outputs: gradients, retain_graph, this."""


class Recompute:
    """Asked for each op of a backward pass.

    Autograd runs without recording for a backward pass of its own, unless the pass shall itself be differentiated. So
    what is recorded there is a forward; and whatever a module does that was called in this very pass.
    """

    def __init__(self, modules: ModulePaths) -> None:
        self._modules = modules
        self._differentiated: dict[int, bool] = {}
        """Passes whose own ops are recorded."""

    def here(self, graph_task: int) -> bool:
        """Whether the op that runs now, in this pass, is of a forward."""
        stack = self._modules.stack
        if stack and stack[-1][2] == graph_task:
            return True
        if not torch.is_grad_enabled():
            return False
        known = self._differentiated.get(graph_task)
        if known is None:
            known = self._differentiated[graph_task] = _creates_graph(sys._getframe(1))
        return not known


def _creates_graph(frame: FrameType | None) -> bool:
    """Whether the pass around a frame was asked for its graph. Engines' own threads have no frames of who asked."""
    asked = _nearest_engine(frame)
    found = [asked] if asked is not None else [_nearest_engine(other) for other in sys._current_frames().values()]
    return any(_asked_for_graph(each) for each in found if each is not None)


def _nearest_engine(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code is not ENGINE:
        frame = frame.f_back
    return frame


def _asked_for_graph(frame: FrameType) -> bool:
    arguments = frame.f_locals.get("args", ())
    return len(arguments) > _CREATE_GRAPH and bool(arguments[_CREATE_GRAPH])
