"""`real_imports`: a module that is first imported in a trace is imported as without one.

Tensors in its globals and classes stay when the trace ends. As fake ones they would be of no use to anyone, and ops of
an import are no ops of the call.
"""

from __future__ import annotations

import importlib.machinery
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.overrides import _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

from nearpeak.trace.patches.shared_patch import SharedPatch


@SharedPatch
@contextmanager
def real_imports() -> Iterator[None]:
    """Inside, the code of modules runs outside of fake modes and traces."""
    with _disable_current_modes():  # imports what it needs itself
        pass
    owner = next(kind for kind in importlib.machinery.SourceFileLoader.__mro__ if "exec_module" in vars(kind))
    original: Any = vars(owner)["exec_module"]

    def exec_module(self: Any, module: ModuleType) -> None:
        with _disable_current_modes(), _no_function_modes():
            original(self, module)

    owner.exec_module = exec_module  # type: ignore[attr-defined]
    try:
        yield
    finally:
        owner.exec_module = original  # type: ignore[attr-defined]


@contextmanager
def _no_function_modes() -> Iterator[None]:
    """Inside, torch functions have no modes but the default device that the user set."""
    modes: list[Any] = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())][::-1]
    for mode in (mode for mode in modes if isinstance(mode, DeviceContext)):
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in range(torch._C._len_torch_function_stack()):
            _pop_mode()
        for mode in modes:
            _push_mode(mode)
