"""`GradientLog`: the gradients that the backward passes of a live trace add to parameters, and what becomes of them.

An op tells that a gradient was computed. Whether anybody reads it is known from what the program has: an optimizer
with the parameter that takes a step, a hook. Gradients are let go of without an op (`grad = None`).
"""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import torch

from nearpeak.ops.op import AddedGradient, Op
from nearpeak.trace.storages import Storages, storage_of

_STORING_OPS = frozenset({"aten.detach.default", "aten.clone.default", "aten.new_empty_strided.default"})
"""Ops with which autograd stores the first gradient of a leaf: the tensor itself, or a copy of it."""
_ADDING_OPS = frozenset({"aten.add.Tensor", "aten.add_.Tensor"})
"""Ops with which it adds a further one."""


class GradientLog:
    """Is told about the ops of backward passes and about the steps of optimizers."""

    def __init__(self, storages: Storages, paths: dict[int, str]) -> None:
        self._storages = storages
        self._paths = paths
        """Of parameters, by the ids of the tensors."""
        self._leaves: dict[int, torch.Tensor] = {}
        self._numbers: dict[int, int] = {}
        self._added: list[tuple[int, AddedGradient]] = []
        """With the id of the leaf."""
        self._unusual: set[int] = set()
        """Leaves whose gradients are no single storage, by which readers would be known."""
        self._steps: list[tuple[int, torch.optim.Optimizer]] = []

    def note_op(self, op: Op, index: int) -> None:
        """An op has run in a backward pass."""
        if op.name not in _STORING_OPS and op.name not in _ADDING_OPS:
            return
        node: Any = torch._C._current_autograd_node()
        leaf = getattr(node, "variable", None)
        if not isinstance(leaf, torch.nn.Parameter) or not op.outputs:
            return  # what becomes of the gradient of an input is not known
        self._leaves[id(leaf)] = leaf
        output = op.outputs[0]
        if output.shape != tuple(leaf.shape):  # a part of a sparse gradient
            self._unusual.add(id(leaf))
        hooks = leaf._backward_hooks or getattr(leaf, "_post_accumulate_grad_hooks", None)
        added = AddedGradient(
            op=index,
            storage=output.storage,
            leaf=self._numbers.setdefault(id(leaf), len(self._numbers)),
            parameter=self._paths.get(id(leaf), ""),
            was_none=op.name in _STORING_OPS,
            is_watched=bool(hooks) or type(leaf) is not torch.nn.Parameter,
            is_stepped=False,
            is_left=False,
            optimizer_steps=None,
        )
        self._added.append((id(leaf), added))

    def note_step(self, optimizer: torch.optim.Optimizer, ops: int) -> None:
        """An optimizer takes a step after this number of ops."""
        self._steps.append((ops, optimizer))
        present = {id(leaf) for leaf in _parameters(optimizer) if leaf.grad is not None}
        self._added = [
            (
                leaf,
                dataclasses.replace(added, is_stepped=True)
                if leaf in present and self._is_current(leaf, added)
                else added,
            )
            for leaf, added in self._added
        ]

    def gradients(self) -> tuple[AddedGradient, ...]:
        """The gradients in order, when the step has ended."""
        if not self._added:
            return ()
        owned = {id(leaf) for optimizer in _optimizers() for leaf in _parameters(optimizer)}
        steps: dict[int, list[int]] = {}
        for ops, optimizer in self._steps:
            for parameter in _parameters(optimizer):
                steps.setdefault(id(parameter), []).append(ops)
        gradients = tuple(
            dataclasses.replace(
                added,
                is_watched=added.is_watched or leaf in self._unusual,
                is_left=self._is_current(leaf, added),
                optimizer_steps=tuple(steps.get(leaf, ())) if leaf in owned or leaf in steps else None,
            )
            for leaf, added in self._added
        )
        self._leaves.clear()
        return gradients

    def _is_current(self, leaf: int, added: AddedGradient) -> bool:
        """Whether this is what the leaf has as its gradient now."""
        gradient = self._leaves[leaf].grad
        if gradient is None:
            return False
        return storage_of(gradient) is None or self._storages.used(gradient) == added.storage


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _optimizers() -> list[torch.optim.Optimizer]:
    """All optimizers of the program: one that takes a step now and then is not seen in every step."""
    return [item for item in gc.get_objects() if issubclass(type(item), torch.optim.Optimizer)]
