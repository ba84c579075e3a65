"""`watching_calls`: who wants to know is told before and after every module's call.

Not through torch's global hooks: torch.compile would trace these into what it compiles and compile again when they
change, a module's own `compile()` passes by them, and they slow every call down. Since Python 3.12 the interpreter
tells, and nothing is changed that compiled code looks at. Before that, the call itself is replaced. Compiled code
checks that where it goes through `super().__call__`, so the call is torch's own again, for good, as soon as anything is
compiled: modules are then watched by whoever asks next.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch._dynamo.callback import callback_handler

from nearpeak.capture.counted import Counted

Before = Callable[[nn.Module, tuple[Any, ...]], None]
After = Callable[[nn.Module], None]

_watchers: list[tuple[Before, After]] = []


@contextmanager
def watching_calls(before: Before, after: After) -> Iterator[None]:
    """Inside, `before` is told a module and its arguments, and `after` the module, also when its call raised."""
    watcher = (before, after)
    with _told():
        _watchers.append(watcher)
        try:
            yield
        finally:
            _watchers.remove(watcher)


@contextmanager
def _replaced() -> Iterator[None]:
    original = nn.Module.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        told = tuple(_watchers)
        for before, _ in told:
            before(self, args)
        try:
            return original(self, *args, **kwargs)
        finally:
            for _, after in reversed(told):
                after(self)

    def withdraw(_: Any = None) -> None:
        nn.Module.__call__ = original  # type: ignore[method-assign]

    callback_handler.register_start_callback(withdraw)
    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        if withdraw in callback_handler.start_callbacks:  # torch._dynamo.reset() forgets them all
            callback_handler.remove_start_callback(withdraw)
        withdraw()


if sys.version_info >= (3, 12):
    _TOOLS = (5, 4, 3, 2)
    """Numbers to call ourselves by, the ones that nobody else uses first."""

    @contextmanager
    def _monitored() -> Iterator[None]:
        """The interpreter tells about each start and end of the call's code, on any thread."""
        monitoring = sys.monitoring
        code = nn.Module.__call__.__code__
        tool = next((number for number in _TOOLS if monitoring.get_tool(number) is None), None)
        if tool is None:
            with _replaced():
                yield
            return

        def started(_code: Any, _offset: int) -> None:
            found = sys._getframe(1).f_locals
            for before, _ in tuple(_watchers):
                before(found["self"], found["args"])

        def ended(ending: Any, _offset: int, _result: Any) -> None:
            if ending is code:  # what raises is told of any code
                module = sys._getframe(1).f_locals["self"]
                for _, after in tuple(reversed(_watchers)):
                    after(module)

        events = monitoring.events
        monitoring.use_tool_id(tool, "nearpeak")
        monitoring.register_callback(tool, events.PY_START, started)
        monitoring.register_callback(tool, events.PY_RETURN, ended)
        monitoring.register_callback(tool, events.PY_UNWIND, ended)
        monitoring.set_local_events(tool, code, events.PY_START | events.PY_RETURN)
        monitoring.set_events(tool, events.PY_UNWIND)
        try:
            yield
        finally:
            monitoring.set_events(tool, 0)
            monitoring.set_local_events(tool, code, 0)
            for event in (events.PY_START, events.PY_RETURN, events.PY_UNWIND):
                monitoring.register_callback(tool, event, None)
            monitoring.free_tool_id(tool)

    _told = Counted(_monitored)
else:
    _told = Counted(_replaced)
