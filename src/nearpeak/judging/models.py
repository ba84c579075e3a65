"""A task whose reference is a class of modules: the module is made alike in every process, with the same weights.

The arguments of the class come from `get_init_inputs` in the reference's file, where it has one. Parameters are
constants of the task: they need no gradients, and sizes that they fix are not varied.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from nearpeak.judging.exchange import tensors_in

INIT_NAMES = ("get_init_inputs", "init_inputs")
"""Functions of the reference's file that give the arguments of its class, the first that there is."""


class Model:
    """A module as a function, which computes in float64 where its inputs are of float64."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self._wide: torch.nn.Module | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        floats = [tensor.dtype for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point()]
        if torch.float64 not in floats:
            return self.module(*args, **kwargs)
        if self._wide is None:
            self._wide = copy.deepcopy(self.module).double()
        return self._wide(*args, **kwargs)


def is_model(thing: Any) -> bool:
    """Whether it is a class of modules, and no function."""
    return isinstance(thing, type) and issubclass(thing, torch.nn.Module)


def make_module(kind: type[torch.nn.Module], init: Any, seed: int, device: torch.device) -> torch.nn.Module:
    """A module after seeding torch; `init` are its arguments, as a sequence or by name."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = kind(**init) if isinstance(init, Mapping) else kind(*init)
    return module.to(device).requires_grad_(False)


def model_content(module: torch.nn.Module, init: Any, seed: int) -> dict[str, Any]:
    """What another process needs to make the same module."""
    return {"init": init, "seed": seed, "state": dict(module.state_dict())}


def model_like(
    content: dict[str, Any], kind: type[torch.nn.Module], device: torch.device
) -> tuple[torch.nn.Module, bool]:
    """A module of another class with the same weights, and whether they have the same names and shapes.

    Where they have not, the module keeps what it drew after the same seed.
    """
    module = make_module(kind, content["init"], content["seed"], device)
    state, own = content["state"], module.state_dict()
    shapes = {name: tensor.shape for name, tensor in own.items()}
    has_same_names = shapes == {name: tensor.shape for name, tensor in state.items()}
    if has_same_names and not all(torch.equal(own[name], tensor) for name, tensor in state.items()):
        module.load_state_dict(state)
    return module, has_same_names
