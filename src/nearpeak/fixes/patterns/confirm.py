"""A match is a hypothesis. It is confirmed on drawn numbers in float64 before anything is put into a model.

`bare_copy` makes a module with the same code and drawn parameters, without hooks; `agree` runs the module as it is and
the candidate on the same inputs, and compares results and gradients.
"""

from __future__ import annotations

import itertools
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nearpeak.errors import UsageError
from nearpeak.fixes.arguments import MODULE_INTERNALS, attributes_held_by, is_plain

TOLERANCE = {torch.float64: 2e-5, torch.float32: 2e-3, torch.bfloat16: 3e-2}
"""Of the largest result: code that computes in float32 whatever its input is as far away from float64."""
_CANCELLED = 1e-12
"""Of the largest number among all results: what is left of gradients that are 0, such as that of the bias of keys."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SEEDS = itertools.count(1)
Forward = Callable[..., Any]


def current_forward(module: nn.Module) -> Forward:
    """The function behind `module.forward`, of the module or of its class; it takes the module as first argument."""
    own = vars(module).get("forward")
    if own is None:
        return type(module).forward
    if isinstance(own, MethodType) and own.__self__ is module:
        return own.__func__
    raise UsageError(f"the forward of this {type(module).__name__} is {own!r}, which somebody else has put there")


def has_hooks(module: nn.Module) -> bool:
    return any(vars(module).get(name) for name in _HOOKS)


def plain_attributes(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """The settings of a module: its attributes that are numbers, texts, or lists of these, and those of objects that it
    holds, such as a configuration, as "config.scale"; not whether it trains."""
    own = _own_attributes(module)
    settings = _plain_items(own)
    for name, value in own.items():
        held = attributes_held_by(value)
        settings += [] if held is None else [(f"{name}.{key}", inner) for key, inner in _plain_items(held)]
    return tuple(settings)


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in MODULE_INTERNALS}


def _plain_items(attributes: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    constants = ((name, _constant(value)) for name, value in attributes.items())
    return [(name, value) for name, value in constants if value is not _NO_CONSTANT]


_NO_CONSTANT: Any = object()


def _constant(value: Any) -> Any:
    """A value that decides what runs, as it is now."""
    if is_plain(value):
        return value
    if isinstance(value, (tuple, list, set)) and all(map(is_plain, value)):
        return tuple(value)
    return _NO_CONSTANT


def _is_constant(value: Any, constant: Any) -> bool:
    if value is constant:
        return True
    now = _constant(value)
    return type(now) is type(constant) and bool(now == constant)


def kind_of(module: nn.Module, *extra: Any) -> tuple[Any, ...]:
    """Modules of one kind compute the same of the same inputs and parameters."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    settings = [(name, plain_attributes(child)) for name, child in module.named_modules()]
    shapes = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors]
    codes = [(type(child), current_forward(child)) for child in module.modules()]
    return (*codes, repr(settings), repr(shapes), *extra)


class Memo:
    """What was found out about kinds of modules."""

    def __init__(self, most: int = 1000) -> None:
        self._most = most
        self._found: dict[Any, Any] = {}

    def get(self, key: Any, find: Callable[[], Any]) -> Any:
        if key not in self._found:
            if len(self._found) >= self._most:
                self._found.clear()
            self._found[key] = find()
        return self._found[key]


class Settings:
    """Whether a module has the settings that it had when it was recognized."""

    def __init__(self, module: nn.Module, bypassed: Sequence[str] = ()) -> None:
        self._own = _Constants(module)
        children = ((name, module.get_submodule(name)) for name in bypassed)
        self._children = [(name, type(child), current_forward(child), _Constants(child)) for name, child in children]

    def hold(self, module: nn.Module) -> bool:
        """`bypassed` children are not called any more, so they must not have got hooks, other settings or other code
        since."""
        if not self._own.hold(module):
            return False
        for name, kind, forward, constants in self._children:
            child = module.get_submodule(name)
            if type(child) is not kind or has_hooks(child) or not constants.hold(child):
                return False
            own = vars(child).get("forward")
            if own is not None and getattr(own, "__func__", own) is not forward:
                return False
        return True


def _constants_of(attributes: Mapping[Any, Any]) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
    """All settings, and those that can change while the object stays the same."""
    constants = _plain_items(attributes)
    return constants, [each for each in constants if isinstance(attributes[each[0]], (list, set))]


class _Constants:
    """The settings of one module, as they are when this is made."""

    def __init__(self, module: nn.Module) -> None:
        own = _own_attributes(module)
        self._own = _plain_items(own)
        held = ((name, attributes_held_by(value)) for name, value in own.items())
        self._held = [(name, list(each.values()), *_constants_of(each)) for name, each in held if each is not None]

    def hold(self, module: nn.Module) -> bool:
        own = vars(module)
        if not all(_is_constant(own.get(name, _NO_CONSTANT), value) for name, value in self._own):
            return False
        for name, values, constants, lists in self._held:
            held = attributes_held_by(own.get(name))
            if held is None:
                return False
            if len(held) == len(values) and all(map(operator.is_, held.values(), values)):
                constants = lists  # the usual case, quickly
            if not all(_is_constant(held.get(key, _NO_CONSTANT), value) for key, value in constants):
                return False
        return True


class Draws:
    """Random numbers from a generator of their own, so that nothing that the user draws changes."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._generator = torch.Generator(self.device).manual_seed(next(_SEEDS))

    def normal(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64, device=self.device).to(dtype)

    def integers(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(high, shape, generator=self._generator, device=self.device).to(dtype)

    def permutations(self, rows: int, size: int, count: int) -> Tensor:
        """Of each row `count` different numbers below `size`."""
        return self.normal(rows, size).argsort(-1)[:, :count]

    def like(self, tensor: Tensor, dtype: torch.dtype = torch.float64, shape: Sequence[int] | None = None) -> Tensor:
        """Numbers of the same kind: floats become `dtype`."""
        size = tensor.shape if shape is None else torch.Size(shape)
        if tensor.is_floating_point():
            return self.normal(*size, dtype=dtype)
        if tensor.dtype == torch.bool:
            return self.integers(2, *size, dtype=torch.bool)
        return self.integers(2, *size, dtype=tensor.dtype)


def bare_copy(
    module: nn.Module,
    draws: Draws,
    dtype: torch.dtype = torch.float64,
    *,
    stand_ins: Mapping[str, nn.Module] | None = None,
    prefix: str = "",
) -> nn.Module:
    """A module with the code and settings of this one, drawn parameters of `dtype`, its buffers, and no hooks.

    Args:
        stand_ins: Modules to take in the place of children, by path.
    """
    copy = object.__new__(type(module))
    state = {
        name: value.copy() if isinstance(value, (list, dict, set)) else value for name, value in vars(module).items()
    }
    for name in state:
        if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
            state[name] = OrderedDict()
    state["_parameters"] = {
        name: None if parameter is None else _drawn_parameter(parameter, draws, dtype)
        for name, parameter in module._parameters.items()
    }
    state["_buffers"] = {
        name: None
        if buffer is None
        else buffer.detach().clone().to(draws.device, dtype if buffer.is_floating_point() else buffer.dtype)
        for name, buffer in module._buffers.items()
    }
    state["_modules"] = {
        name: None
        if child is None
        else (stand_ins or {}).get(prefix + name)
        or bare_copy(child, draws, dtype, stand_ins=stand_ins, prefix=f"{prefix}{name}.")
        for name, child in module._modules.items()
    }
    forward = state.get("forward")
    if isinstance(forward, MethodType):
        state["forward"] = MethodType(forward.__func__, copy)
    copy.__dict__ = state
    return copy


def _drawn_parameter(parameter: Tensor, draws: Draws, dtype: torch.dtype) -> nn.Parameter:
    if not parameter.is_floating_point():
        raise UsageError(f"a parameter is {parameter.dtype}")
    numbers = draws.normal(*parameter.shape, dtype=dtype)
    if parameter.dim() < 2:
        return nn.Parameter(0.9 + 0.3 * numbers)
    return nn.Parameter(numbers * parameter.shape[-1] ** -0.5)


def agree(
    original: Callable[..., Any],
    candidate: Callable[..., Any],
    inputs: Iterable[tuple[tuple[Any, ...], dict[str, Any]]],
    parameters: Iterable[Tensor] = (),
    *,
    gradients: bool = True,
    dtype: torch.dtype = torch.float64,
) -> bool:
    """Whether two functions have the same results and gradients for all inputs. One that raises does not agree."""
    parameters = list(parameters)
    for args, kwargs in inputs:
        try:
            expected = _run(original, args, kwargs, parameters, gradients)
            actual = _run(candidate, args, kwargs, parameters, gradients)
        except Exception:  # of the user's code, or of a hypothesis that does not fit
            return False
        if len(expected) != len(actual):
            return False
        floor = _CANCELLED * max(map(_size_of, expected), default=0.0)
        if not all(_is_close(one, other, TOLERANCE[dtype], floor) for one, other in zip(expected, actual, strict=True)):
            return False
    return True


def _run(
    function: Callable[..., Any], args: Any, kwargs: Any, parameters: list[Tensor], gradients: bool
) -> list[Tensor | None]:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    leaves = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    floats = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    with torch.enable_grad():
        for leaf in floats if gradients else ():
            leaf.requires_grad_()
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        results = [leaf for leaf in pytree.tree_leaves(function(*args, **kwargs)) if isinstance(leaf, Tensor)]
        values: list[Tensor | None] = [result.detach() for result in results]
        differentiable = [result for result in results if result.requires_grad]
        sources = [leaf for leaf in (*floats, *parameters) if leaf.requires_grad]
        if gradients and differentiable and sources:
            # the same upstream gradients for both functions, by the place of the result
            upstream = [_waves(result, index) for index, result in enumerate(differentiable)]
            values += torch.autograd.grad(differentiable, sources, upstream, allow_unused=True)
    return values


def _waves(like: Tensor, index: int) -> Tensor:
    steps = torch.arange(like.numel(), device=like.device, dtype=torch.float64)
    return torch.cos(steps * 0.7 + index).reshape(like.shape).to(like.dtype)


def _size_of(tensor: Tensor | None) -> float:
    """The largest finite number of a tensor."""
    return (
        0.0 if tensor is None or not tensor.numel() else float(torch.nan_to_num(tensor.double(), 0, 0, 0).abs().max())
    )


def _is_close(one: Tensor | None, other: Tensor | None, tolerance: float, floor: float) -> bool:
    if one is None or other is None:
        present = one if other is None else other
        return present is None or not bool(present.count_nonzero())
    if one.shape != other.shape or one.is_floating_point() != other.is_floating_point():
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    wide, other = one.double(), other.double()
    if not bool(torch.isfinite(wide).all()) or not bool(torch.isfinite(other).all()):
        return torch.equal(torch.nan_to_num(wide), torch.nan_to_num(other))
    if not one.numel():
        return True
    return float((wide - other).abs().max()) <= tolerance * float(wide.abs().max()) + floor + 1e-30
