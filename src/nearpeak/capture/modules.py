"""Which module runs, by its path; and which modules and optimizers a callable holds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from nearpeak.capture.calls import watching_calls

_DEPTH = 4
"""How far to look into containers and objects."""


class ModulePaths:
    """Paths of modules below their roots, and the stack of those that run now.

    `met` is called with every root before anything of it runs.
    """

    def __init__(self, met: Callable[[nn.Module, str], None]) -> None:
        self._met = met
        self._paths: dict[int, str] = {}
        self._held: list[nn.Module] = []  # an id stays taken as long as its object lives
        self.stack: list[tuple[int, str, int]] = []
        """Of modules whose forward runs, the innermost last: id, path, and the backward pass in which it was called."""
        self._roots: set[str] = set()

    def add_root(self, module: nn.Module, name: str) -> None:
        """Gives a module and all below it their paths; one without a name is the origin of paths."""
        self._held.append(module)
        self._roots.add(name)
        for path, part in module.named_modules(prefix=name):
            self._paths.setdefault(id(part), without_wrapper(path))
        self._met(module, name)

    def meet(self, module: nn.Module) -> None:
        """Makes a module that is below no known one a root."""
        if id(module) not in self._paths:
            self.add_root(module, self._unused(type(module).__name__))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follows every module's forward."""
        with watching_calls(self._enter, self._leave):
            yield

    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        self.meet(module)
        self.stack.append((id(module), self._paths[id(module)], torch._C._current_graph_task_id()))

    def _leave(self, module: nn.Module) -> None:
        while self.stack and self.stack.pop()[0] != id(module):
            pass

    def _unused(self, name: str) -> str:
        number = 1
        candidate = name
        while candidate in self._roots:
            number += 1
            candidate = f"{name}_{number}"
        return candidate


def without_wrapper(path: str) -> str:
    """A path without what `torch.compile` puts around a module.

    >>> without_wrapper("_orig_mod.0.weight"), without_wrapper("block._orig_mod")
    ('0.weight', 'block')
    """
    return path.replace("_orig_mod.", "").removesuffix("_orig_mod").rstrip(".")


class Holdings:
    """The modules and optimizers that a callable and its arguments hold, by the names of their variables."""

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.modules: list[tuple[str, nn.Module]] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._seen: set[int] = set()
        self._look("", fn, 0)
        for index, value in enumerate(args):
            self._look(f"argument_{index}", value, 0)
        for name, value in kwargs.items():
            self._look(name, value, 0)

    def roots(self) -> list[tuple[str, nn.Module]]:
        """Modules that are inside no other one. The only one with parameters is the origin of paths: its name is ""."""
        inside = {id(part) for _, module in self.modules for part in module.modules() if part is not module}
        roots = [(name, module) for name, module in self.modules if id(module) not in inside]
        main = [module for _, module in roots if next(module.parameters(), None) is not None]
        if len(main) == 1:
            return [("" if module is main[0] else name, module) for name, module in roots]
        return roots

    def _look(self, name: str, value: Any, depth: int) -> None:
        if depth > _DEPTH or id(value) in self._seen or isinstance(value, (str, bytes, int, float, torch.Tensor, type)):
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module):
            self.modules.append((name, value))
        elif isinstance(value, torch.optim.Optimizer):
            self.optimizers.append(value)
        else:
            for inner_name, inner in _parts(name, value):
                self._look(inner_name, inner, depth + 1)


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, MethodType):
        yield name, value.__self__
        yield name, value.__func__
    elif isinstance(value, functools.partial):
        yield name, value.func
        for item in (*value.args, *value.keywords.values()):
            yield name, item
    elif isinstance(value, FunctionType):
        yield from _variables(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key), item
    elif isinstance(value, (list, tuple, set)):
        for index, item in enumerate(value):
            yield f"{name}_{index}", item
    elif hasattr(value, "__dict__") and not type(value).__module__.startswith(("torch", "builtins")):
        yield from vars(value).items()


def _variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function refers to: its closure, its defaults, and the globals that its code names."""
    if hasattr(function, "__wrapped__"):
        yield "", function.__wrapped__
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a cell that is not filled yet
            continue
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield "default", value
    if function.__module__.partition(".")[0] in ("torch", "nearpeak"):
        return
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, (nn.Module, torch.optim.Optimizer, FunctionType, list, tuple, dict)):
            yield name, value
