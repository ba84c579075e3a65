"""`StateSnapshot`: modules, optimizers, gradients and gradient scalers are restored after a trace on fake tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from nearpeak.trace.patches.shared_patch import SharedPatch, patch_attribute
from nearpeak.trace.storages import innermost

_CONTAINERS = ("_parameters", "_buffers", "_modules")


class StateSnapshot:
    """Copies the state of objects when they are first met, and restores it.

    With `live`, nothing is restored, and no tensor is held that its owner lets go of.
    """

    def __init__(self, *, live: bool = False) -> None:
        self._live = live
        self._modules: dict[int, tuple[nn.Module, dict[str, Any], dict[str, dict[str, Any]]]] = {}
        self._optimizers: dict[int, tuple[torch.optim.Optimizer, dict[Any, Any], list[dict[str, Any]]]] = {}
        self._leaves: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Restores everything that was met inside, after errors too."""
        try:
            yield
        finally:
            self._restore()

    def module(self, module: nn.Module) -> None:
        """Stores the attributes, parameters, buffers and gradients of a module and all below it."""
        for part in () if self._live else module.modules():
            if id(part) not in self._modules:
                containers = {name: dict(part.__dict__[name]) for name in _CONTAINERS}
                self._modules[id(part)] = (part, dict(part.__dict__), containers)
        for parameter in module.parameters():
            self.leaf(parameter)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Stores the state and settings of an optimizer and the gradients of its parameters."""
        if id(optimizer) in self._optimizers:
            return
        state, groups = {}, []
        if not self._live:
            state = {key: dict(value) if isinstance(value, dict) else value for key, value in optimizer.state.items()}
            groups = [dict(group) for group in optimizer.param_groups]
        self._optimizers[id(optimizer)] = (optimizer, state, groups)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.leaf(parameter)

    def leaf(self, tensor: torch.Tensor) -> None:
        """Stores the gradient of a leaf."""
        tensor = innermost(tensor)
        if id(tensor) not in self._leaves and tensor.is_leaf:
            self._leaves[id(tensor)] = (tensor, None if self._live else tensor.grad)

    def leaves(self) -> Iterator[torch.Tensor]:
        """The leaves that were met."""
        return (leaf for leaf, _ in self._leaves.values())

    def optimizers(self) -> Iterator[torch.optim.Optimizer]:
        """The optimizers that were met."""
        return (optimizer for optimizer, _, _ in self._optimizers.values())

    def outliving_tensors(self) -> Iterator[torch.Tensor]:
        """Gradients of the leaves and states of the optimizers, as they are now."""
        for leaf, _ in self._leaves.values():
            if leaf.grad is not None:
                yield leaf.grad
        for optimizer, _, _ in self._optimizers.values():
            for state in optimizer.state.values():
                if isinstance(state, dict):
                    yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def _restore(self) -> None:
        for module, attributes, containers in self._modules.values():
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for name, content in containers.items():
                module.__dict__[name].clear()
                module.__dict__[name].update(content)
        for optimizer, state, groups in self._optimizers.values():
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, settings in zip(optimizer.param_groups, groups, strict=False):
                group.clear()
                group.update(settings)
        for leaf, gradient in self._leaves.values():
            if leaf.grad is not gradient:
                leaf.grad = gradient


_SCALER_STATES = "_per_optimizer_states"
_SCALER_METHODS = ("scale", "unscale_", "step", "update")


class _ScalerSnapshots(threading.local):
    """The scalers that the trace on this thread met, with their attributes and states before."""

    def __init__(self) -> None:
        self.scalers: dict[int, tuple[Any, dict[str, Any], dict[int, dict[str, Any]]]] | None = None


_scaler_snapshots = _ScalerSnapshots()


@contextmanager
def restore_grad_scalers() -> Iterator[None]:
    """Inside, gradient scalers take their step whether or not a gradient overflowed; at the end they are restored."""
    with _patch_grad_scalers():
        outer, _scaler_snapshots.scalers = _scaler_snapshots.scalers, {}
        try:
            yield
        finally:
            for scaler, attributes, states in _scaler_snapshots.scalers.values():
                scaler.__dict__.clear()
                scaler.__dict__.update(attributes)
                if _SCALER_STATES in attributes:
                    attributes[_SCALER_STATES].clear()
                    attributes[_SCALER_STATES].update(states)
            _scaler_snapshots.scalers = outer


@SharedPatch
@contextmanager
def _patch_grad_scalers() -> Iterator[None]:
    kind = torch.amp.GradScaler
    maybe_step = kind._maybe_opt_step

    def step(self: Any, optimizer: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(overflow, FakeTensor) for overflow in state["found_inf_per_device"].values()):
            return optimizer.step(*args, **kwargs)
        return maybe_step(self, optimizer, state, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(patch_attribute(kind, "_maybe_opt_step", step))
        for name in _SCALER_METHODS:
            stack.enter_context(patch_attribute(kind, name, _snapshot_before(getattr(kind, name))))
        yield


def _snapshot_before(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _scaler_snapshots.scalers is not None and id(self) not in _scaler_snapshots.scalers:
            states = {key: dict(state) for key, state in getattr(self, _SCALER_STATES, {}).items()}
            _scaler_snapshots.scalers[id(self)] = (self, dict(self.__dict__), states)
        return method(self, *args, **kwargs)

    return call
