"""`GradScaler` on fake tensors: its step is taken, and it is afterwards as it was before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from nearpeak.capture.counted import Counted, replaced

_STATES = "_per_optimizer_states"
_METHODS = ("scale", "unscale_", "step", "update")


class _Known(threading.local):
    """The scalers that the trace on this thread met, with their attributes before."""

    def __init__(self) -> None:
        self.scalers: dict[int, tuple[Any, dict[str, Any], dict[int, dict[str, Any]]]] | None = None


_known = _Known()


@contextmanager
def scalers_untouched() -> Iterator[None]:
    """Inside, a scaler takes its step whether or not a gradient overflowed, since fake ones have no values."""
    with _scaling():
        outer, _known.scalers = _known.scalers, {}
        try:
            yield
        finally:
            for scaler, attributes, states in _known.scalers.values():
                scaler.__dict__.clear()
                scaler.__dict__.update(attributes)
                if _STATES in attributes:
                    attributes[_STATES].clear()
                    attributes[_STATES].update(states)
            _known.scalers = outer


@contextmanager
def _patches() -> Iterator[None]:
    kind = torch.amp.GradScaler
    maybe_step = kind._maybe_opt_step

    def step(self: Any, optimizer: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(found, FakeTensor) for found in state["found_inf_per_device"].values()):
            return optimizer.step(*args, **kwargs)
        return maybe_step(self, optimizer, state, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(replaced(kind, "_maybe_opt_step", step))
        for name in _METHODS:
            stack.enter_context(replaced(kind, name, _remembering(getattr(kind, name))))
        yield


_scaling = Counted(_patches)


def _remembering(method: Callable[..., Any]) -> Callable[..., Any]:
    def remember(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _known.scalers is not None and id(self) not in _known.scalers:
            states = {key: dict(state) for key, state in getattr(self, _STATES, {}).items()}
            _known.scalers[id(self)] = (self, dict(self.__dict__), states)
        return method(self, *args, **kwargs)

    return remember
