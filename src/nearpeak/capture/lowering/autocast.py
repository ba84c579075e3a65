"""`torch.autocast("cuda")` for tensors on the CPU that stand for CUDA's."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from nearpeak.capture.counted import Counted
from nearpeak.capture.lowering.autocast_lists import (
    FLOAT32,
    FLOAT32_APPENDED,
    FLOAT32_RESULT,
    LOWER,
    REFUSED,
    WIDEST,
)
from nearpeak.capture.lowering.register import (
    Kernel,
    current_target,
    kernels_registered,
    overload_of,
    until_the_trace_ends,
)

_Rule = Callable[[tuple[Any, ...], dict[str, Any]], Any]

_KEY = "AutocastCPU"
_BELOW = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


class _Casts(threading.local):
    """Casts of parameters that are made once in an autocast region, with the parameter that keeps its id."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


_casts = _Casts()


def cast_as_on_cuda() -> None:
    """From here to the end of a trace for a GPU, autocast on the CPU's tensors follows CUDA's rules."""
    if current_target() is not None:
        until_the_trace_ends(_rules)


def forget_casts() -> None:
    """Ends an autocast region: parameters are cast again in the next."""
    _casts.known.clear()


@functools.cache
def _kernels() -> list[Kernel]:
    """CUDA's rules for the operators that have one in this torch, and none for those with one on the CPU alone."""
    rules: dict[str, _Rule] = {}
    for operators, rule in ((LOWER, _lower), (FLOAT32, _float32), (WIDEST, _widest), (FLOAT32_RESULT, _float32_result)):
        rules.update((operator, functools.partial(rule, overload_of(operator))) for operator in operators)
    for operator, appended in FLOAT32_APPENDED.items():
        rules[operator] = functools.partial(_float32_appended, overload_of(operator), overload_of(appended))
    rules.update((operator, functools.partial(_refused, reason)) for operator, reason in REFUSED.items())
    with_rule = {"cpu": registered("AutocastCPU"), "cuda": registered("AutocastCUDA")}
    kernels = []
    for operator in sorted(with_rule["cpu"] | with_rule["cuda"]):
        overload = overload_of(operator)
        if overload is not None:
            ruled = operator in with_rule["cuda"] and operator in rules
            chosen = rules[operator] if ruled else functools.partial(_unchanged, overload)
            kernels.append(Kernel(operator, _KEY, _kernel(overload, chosen)))
    return kernels


def registered(key: str) -> set[str]:
    """The operators of aten for which torch registers something under a key of its dispatcher."""
    names: list[str] = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


_rules = Counted(lambda: kernels_registered(_kernels))


def _kernel(overload: torch._ops.OpOverload, rule: _Rule) -> Callable[..., Any]:
    """The rule on threads that trace for a GPU; torch's own on others."""
    own = _own_kernel(overload) or rule

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_BELOW):
            return (own if current_target() is None else rule)(args, kwargs)

    return kernel


def _own_kernel(overload: torch._ops.OpOverload) -> _Rule | None:
    """What torch does to this operator on the CPU; None in releases before 2.9, which do not say."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), _KEY):
        return functools.partial(_unchanged, overload)
    read = getattr(torch.library, "get_kernel", None)
    kernel = None if read is None else read(overload.name(), _KEY)
    return None if kernel is None else lambda args, kwargs: kernel.call_boxed(_BELOW, *args, **kwargs)


def _eligible(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return _cast_tensor(value, dtype) if _eligible(value) and value.dtype is not dtype else value
    if isinstance(value, (list, tuple)):
        return type(value)([_cast(item, dtype) for item in value])
    return value


def _cast_tensor(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A cast that the backward pass goes through; that of a parameter is made once in a region."""
    kept = (
        dtype is torch.get_autocast_dtype("cpu")
        and tensor.dtype is torch.float32
        and tensor.requires_grad
        and tensor.is_leaf
        and not tensor._is_view()
        and torch.is_autocast_cache_enabled()
    )
    if not kept:
        return tensor.to(dtype)
    if id(tensor) not in _casts.known:
        _casts.known[id(tensor)] = (tensor, tensor.to(dtype))
    return _casts.known[id(tensor)][1]


def _called(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
    return function(*_cast(args, dtype), **{name: _cast(value, dtype) for name, value in kwargs.items()})


def _lower(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _called(function, args, kwargs, torch.get_autocast_dtype("cpu"))


def _float32(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _called(function, args, kwargs, torch.float32)


def _widest(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values = [item for value in (*args, *kwargs.values()) for item in _items(value) if _eligible(item)]
    wide = any(value.dtype is torch.float32 for value in values)
    return _called(function, args, kwargs, torch.float32 if wide else torch.get_autocast_dtype("cpu"))


def _float32_result(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = [argument.name for argument in function._schema.arguments]
    place = names.index("dtype")
    given = args[place] if place < len(args) else kwargs.get("dtype")
    if not _eligible(args[0]) or given is not None:
        return function(*args, **kwargs)
    if place < len(args):
        return function(*args[:place], torch.float32, *args[place + 1 :], **kwargs)
    return function(*args, **{**kwargs, "dtype": torch.float32})


def _float32_appended(called: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    left_out = [argument.default_value for argument in called._schema.arguments[len(args) :]]
    return function(*args, *left_out, dtype=torch.float32 if _eligible(tensor) else tensor.dtype)


def _refused(reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise RuntimeError(reason)


def _unchanged(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
