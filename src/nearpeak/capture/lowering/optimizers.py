"""Optimizers and gradient clipping as with parameters on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from nearpeak.capture.counted import Counted, replaced
from nearpeak.capture.lowering.register import current_target

_SUPPORT = ("_get_foreach_kernels_supported_devices", "_get_capturable_supported_devices")
"""The functions of torch that list the devices for multi-tensor optimizers and for those without synchronisation."""
_TYPES = "_foreach_supported_types"
"""torch's lists of the types of parameters that multi-tensor optimizers take by default."""


@contextmanager
def _patches() -> Iterator[None]:
    with ExitStack() as stack:
        for module in _modules():
            for name in _SUPPORT:
                if name in vars(module):
                    stack.enter_context(replaced(module, name, _with_cpu(getattr(module, name))))
            if _TYPES in vars(module):
                stack.enter_context(replaced(module, _TYPES, _Types(getattr(module, _TYPES))))
        yield


optimizers_as_on_gpu = Counted(_patches)
"""Inside, on threads that trace for a GPU, an optimizer on the CPU's fake tensors takes the path of a GPU's.

That is the multi-tensor path where the user does not choose, and the one without synchronisation where they do.
"""


class _Types(list[type]):
    """A list of types that has fake tensors too, on threads that trace for a GPU."""

    def __contains__(self, item: object) -> bool:
        return super().__contains__(item) or (item is FakeTensor and current_target() is not None)


def _modules() -> list[Any]:
    names = [name for name in sys.modules if name.startswith("torch.optim.")]
    return [sys.modules[name] for name in (*names, "torch.utils._foreach_utils")]


def _with_cpu(listing: Any) -> Any:
    def devices(*args: Any, **kwargs: Any) -> list[str]:
        found: list[str] = listing(*args, **kwargs)
        return [*found, "cpu"] if current_target() is not None else found

    return devices
