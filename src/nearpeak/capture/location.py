"""`Locations`: the module and the user's line that an op comes from, in the backward pass those of the forward op."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from nearpeak.capture.modules import ModulePaths
from nearpeak.capture.source import user_line
from nearpeak.capture.untouched import Untouched


class Location(NamedTuple):
    """Where an op comes from."""

    module: str
    source: str


class Locations:
    """Where the ops of one trace come from; ask once for each op, in order."""

    def __init__(self, modules: ModulePaths, untouched: Untouched) -> None:
        self.parameters: dict[int, str] = {}
        """Paths of parameters, by the ids of the tensors."""
        self._modules = modules
        self._untouched = untouched
        self._sequence: int = torch._C._autograd._get_sequence_nr()
        self._by_sequence: dict[int, Location] = {}
        self._last_backward = Location("", "")

    def here(self, graph_task: int) -> Location:
        """The running module and the user's line; for an op of autograd's own those of the forward op behind it.

        A node of the graph takes the next sequence number when its forward op is called, just before that op arrives
        here: all numbers that are new since the op before belong to this op.
        """
        module = self._modules.running(graph_task)
        line, crossed = user_line()
        if graph_task != -1 and (crossed or module is None):
            behind = self._behind_current_node()
            module = behind.module if module is None else module
            line = behind.source or line if crossed else line
            location = self._last_backward = Location(module, line)
        else:
            location = Location(module or "", line)
        sequence: int = torch._C._autograd._get_sequence_nr()
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
            module = self._last_backward.module if name is None else name.rpartition(".")[0]
            return Location(module, self._last_backward.source)
        return self._by_sequence.get(node._sequence_nr(), self._last_backward)
