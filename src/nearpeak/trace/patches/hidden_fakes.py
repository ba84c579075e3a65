"""`hide_fake_tensors`: code that asks whether a tensor is fake is told that it is not, and runs as it would.

Libraries ask so to take another path while a compiler traces them: they skip a check of a mask, and pay for the mask.
The ops of an estimate are those of a run, so the class of fake tensors is another one for all code but torch's and
nearpeak's: as an attribute of torch's modules, and as a name that a module has imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch._subclasses.fake_tensor
from torch._subclasses.fake_tensor import FakeTensor

from nearpeak.trace.patches.shared_patch import SharedPatch

_NAME = "FakeTensor"
_KNOWING = ("torch", "nearpeak", "functorch", "torchgen")


class HiddenFakeTensor:
    """Stands for the class of fake tensors; nothing is one."""


class _HidingModule(ModuleType):
    """A module of torch's whose class of fake tensors only torch and nearpeak see."""

    def __getattribute__(self, name: str) -> Any:
        if name == _NAME and sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] not in _KNOWING:
            return HiddenFakeTensor
        return super().__getattribute__(name)


@SharedPatch
@contextmanager
def hide_fake_tensors() -> Iterator[None]:
    """Inside, no tensor is fake for code outside of torch."""
    modules: tuple[ModuleType, ...] = (torch._subclasses, torch._subclasses.fake_tensor)
    imported = [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] not in _KNOWING and getattr(module, "__dict__", {}).get(_NAME) is FakeTensor
    ]
    for module in modules:
        module.__class__ = _HidingModule
    for module in imported:
        module.__dict__[_NAME] = HiddenFakeTensor
    try:
        yield
    finally:
        for module in modules:
            module.__class__ = ModuleType
        for module in imported:
            if module.__dict__.get(_NAME) is HiddenFakeTensor:
                module.__dict__[_NAME] = FakeTensor
