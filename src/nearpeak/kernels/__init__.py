"""Fused kernels: operations that move each byte once, as functions that are differentiable and safe to compile.

    from nearpeak import kernels
    y = kernels.softmax(x)                    # a Triton kernel on a GPU, plain torch elsewhere
    kernels.supports(kernels.softmax, x)      # which of them, and why
    with kernels.using("require"): ...        # raise rather than run plain torch

The functions are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nearpeak.kernels.operations.add import add
    from nearpeak.kernels.policy import Support, supports, using

__all__ = ["Support", "add", "supports", "using"]

_HOME = {
    "Support": "policy",
    "add": "operations.add",
    "supports": "policy",
    "using": "policy",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'nearpeak.kernels' has no attribute {name!r}")
    value = getattr(import_module(f"nearpeak.kernels.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
