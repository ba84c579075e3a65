"""`OutermostCalls`: tells of the calls of modules that are inside no other one, and costs the others nothing.

Every call is looked at while modules are searched for (`capture/calls.py`). The class of a module that was called from
outside then gets a `__call__` of its own, so that nothing but these calls is slower once the search is over. Hooks
would be part of the module: of its copies, of files that it is saved to, and of what torch.compile makes of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch._dynamo.callback import callback_handler

from nearpeak.capture.calls import watching_calls

Ended = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


class OutermostCalls:
    """While it is open, `ended` is told each outermost call that ended without an error."""

    def __init__(self, ended: Ended) -> None:
        self._ended = ended
        self._depth = 0
        self._nested = 0
        self._first: tuple[nn.Module, tuple[Any, ...]] | None = None
        self._classes: dict[type[nn.Module], Any] = {}
        """Those with a `__call__` of ours, and the one that they had themselves."""
        self._search = ExitStack()
        self._is_open = False

    def open(self) -> None:
        """Begins."""
        self._is_open = True
        callback_handler.register_start_callback(self._hide)
        callback_handler.register_end_callback(self._show)
        self.search(True)

    def close(self) -> None:
        """Leaves everything as it was, for good."""
        self._is_open = False
        self._search.close()
        for callbacks, callback in (
            (callback_handler.start_callbacks, self._hide),
            (callback_handler.end_callbacks, self._show),
        ):
            if callback in callbacks:  # torch._dynamo.reset() forgets them all
                callbacks.remove(callback)
        self._hide()
        self._classes.clear()

    def search(self, on: bool) -> None:
        """Whether to look for modules that were not called before: this makes every call slower."""
        self._search.close()
        self._nested, self._first = 0, None
        if on and self._is_open:
            self._search.enter_context(watching_calls(self._before_any, self._after_any))

    def _before_any(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._depth == 0 and self._nested == 0 and type(module) not in self._classes:
            self._first = module, args
            self._classes[type(module)] = vars(type(module)).get("__call__")
            _tell(type(module), self._call_of(type(module)))
        self._nested += 1

    def _after_any(self, _module: nn.Module) -> None:
        self._nested = max(0, self._nested - 1)
        if self._nested == 0 and self._first is not None:
            module, args = self._first
            self._first = None
            self._ended(module, args, {})

    def _call_of(self, kind: type[nn.Module]) -> Callable[..., Any]:
        own = self._classes[kind]
        above = next(base for base in kind.__mro__[1:] if "__call__" in vars(base))

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            original = above.__call__ if own is None else own
            if self._depth or self._nested or torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            self._depth += 1
            try:
                result = original(module, *args, **kwargs)
            finally:
                self._depth -= 1
            self._ended(module, args, kwargs)
            return result

        return call

    def _hide(self, _: Any = None) -> None:
        for kind, own in self._classes.items():
            _tell(kind, own)

    def _show(self, _: Any = None) -> None:
        for kind in self._classes:
            _tell(kind, self._call_of(kind))


def _tell(kind: type[nn.Module], call: Any) -> None:
    if call is not None:
        kind.__call__ = call  # type: ignore[method-assign]
    elif "__call__" in vars(kind):
        del kind.__call__
