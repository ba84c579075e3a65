"""`Locations`: the module and the user's line that an op comes from, in the backward pass those of the forward op."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from nearpeak.capture.modules import ModulePaths
from nearpeak.capture.source import Lines
from nearpeak.capture.untouched import Untouched

Location = tuple[str, str]
"""Where an op comes from: the path of its module and the user's line."""


class Locations:
    """Where the ops of one trace come from; ask once for each op, in order."""

    def __init__(self, modules: ModulePaths, untouched: Untouched) -> None:
        self.parameters: dict[int, str] = {}
        """Paths of parameters, by the ids of the tensors."""
        self.lines = Lines()
        self._modules = modules
        self._untouched = untouched
        self._sequence: int = torch._C._autograd._get_sequence_nr()
        self._by_sequence: dict[int, Location] = {}
        self._last_backward: Location = ("", "")

    def here(self, graph_task: int) -> Location:
        """The running module and the user's line; for an op of autograd's own those of the forward op behind it.

        A node of the graph takes the next sequence number when its forward op is called, just before that op arrives
        here: all numbers that are new since the op before belong to this op.
        """
        if graph_task == -1:
            self.lines.forget()  # a pass that is over; its frame would hold tensors that nobody else does
        stack = self._modules.stack
        module = stack[-1][1] if stack and stack[-1][2] == graph_task else None
        line, crossed = self.lines.nearest(_frame(2))  # from whoever records the op
        if graph_task != -1 and (crossed or module is None):
            behind = self._behind_current_node()
            module = behind[0] if module is None else module
            line = behind[1] or line if crossed else line
            location = self._last_backward = (module, line)
        else:
            location = (module or "", line)
        sequence = _sequence()
        if sequence > self._sequence:
            for number in range(self._sequence, sequence):
                self._by_sequence[number] = location
            self._sequence = sequence
        return location

    def _behind_current_node(self) -> Location:
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return self._last_backward
        variable = getattr(node, "variable", None)
        if variable is not None:  # gradients are accumulated into a leaf
            self._untouched.leaf(variable)
            name = self.parameters.get(id(variable))
            module = self._last_backward[0] if name is None else name.rpartition(".")[0]
            return (module, self._last_backward[1])
        return self._by_sequence.get(node._sequence_nr(), self._last_backward)


_frame = sys._getframe
_sequence: Callable[[], int] = torch._C._autograd._get_sequence_nr
