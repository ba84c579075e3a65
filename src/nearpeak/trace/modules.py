"""Which module runs, by its path; and which modules and optimizers a callable refers to.

`watch_module_calls` does not use torch's global hooks: torch.compile would trace these into what it compiles and
compile again when they change, a module's own `compile()` bypasses them, and they slow every call down. The call itself
is replaced, early and for long (`keep_calls_watchable`): whatever changes a class, or what the interpreter reports
(`sys.monitoring`), makes it forget what it knows of the instructions of a program, which then take up to a fourth
longer for the next fifty times that each of them runs.

Compiled code checks for a replaced call where it goes through `super().__call__`, so the call is torch's own again, for
good, as soon as anything is compiled. From then on the interpreter reports calls, since Python 3.12; before that,
modules are watched by the next `watch_module_calls`.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch._dynamo.callback import callback_handler

from nearpeak.trace.guard import Guard
from nearpeak.trace.objects import instance_attributes, keys_and_values, named_tensors, submodules
from nearpeak.trace.patches.shared_patch import SharedPatch
from nearpeak.trace.source import user_line

BeforeCall = Callable[[nn.Module, tuple[Any, ...]], object]
AfterCall = Callable[[nn.Module], object]

_watchers: list[tuple[BeforeCall, AfterCall]] = []


@contextmanager
def watch_module_calls(before: BeforeCall, after: AfterCall) -> Iterator[None]:
    """Inside, `before(module, args)` runs before each module's call and `after(module)` after it, also if it raised."""
    watcher = (before, after)
    with _reported_calls() if _can_report and compiled_graph_count() else keep_calls_watchable():
        _watchers.append(watcher)
        try:
            yield
        finally:
            _watchers.remove(watcher)
            if not _watchers:
                _replaced_call.taken_over.close()


@contextmanager
def keep_calls_watchable() -> Iterator[None]:
    """Inside, who begins or ends to watch changes nothing that a program runs, until something is compiled."""
    if _can_report and compiled_graph_count():
        yield
        return
    _replaced_call.acquire()
    try:
        yield
    finally:
        _replaced_call.release()


def note_compiler() -> None:
    """Makes sure that what is compiled from now on does not see the replaced call: a program may reset the compiler."""
    _replaced_call.note_compiler()


def compiled_graph_count() -> int:
    """The number of graphs that torch.compile has compiled in this process."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return int(compiler.counters["stats"]["unique_graphs"]) if compiler is not None else 0


class _ReplacedCall:
    """A call of modules that tells watchers, in the place of torch's while anyone needs it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._users = 0
        self._put_back: Callable[[], None] | None = None
        self.taken_over = ExitStack()
        """Where the interpreter reports calls to those who watched when something was compiled."""

    def acquire(self) -> None:
        """Another one needs it. It is there again, also if something was compiled since."""
        with self._lock:
            self._users += 1
            if self._put_back is None:
                self._put_back = self._install()
            self.note_compiler()

    def note_compiler(self) -> None:
        """torch._dynamo.reset() clears what was registered."""
        if self._put_back is not None and self._withdraw not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._withdraw)

    def release(self) -> None:
        """One less needs it."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._remove()

    def _install(self) -> Callable[[], None]:
        original = nn.Module.__call__
        installed = True

        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not _watchers or not installed:
                return original(self, *args, **kwargs)
            watchers = tuple(_watchers)
            for before, _ in watchers:
                before(self, args)
            try:
                return original(self, *args, **kwargs)
            finally:
                if not _reports:  # else the interpreter has reported the end
                    for _, after in reversed(watchers):
                        after(self)

        def put_back() -> None:
            nonlocal installed
            installed = False
            if nn.Module.__call__ is call:  # else the program has replaced it meanwhile, and calls ours from there
                nn.Module.__call__ = original  # type: ignore[method-assign]

        nn.Module.__call__ = call  # type: ignore[method-assign]
        return put_back

    def _withdraw(self, _: Any = None) -> None:
        with self._lock:
            self._remove()
            if _can_report and _watchers and not _reports:
                self.taken_over.enter_context(_reported_calls())

    def _remove(self) -> None:
        if self._put_back is None:
            return
        self._put_back()
        self._put_back = None
        if self._withdraw in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(self._withdraw)


_replaced_call = _ReplacedCall()
_reports: list[bool] = []
"""Not empty while the interpreter reports calls."""
_can_report = sys.version_info >= (3, 12)

if sys.version_info >= (3, 12):
    _TOOL_IDS = (5, 4, 3, 2)
    """Ids for `sys.monitoring`, those without a conventional user first."""

    @contextmanager
    def _monitored_call() -> Iterator[None]:
        """The interpreter reports each start and end of the call, on any thread."""
        monitoring = sys.monitoring
        code = (
            nn.Module._wrapped_call_impl.__code__
        )  # torch's own `__call__`, whatever the program has put in its place
        tool = next((number for number in _TOOL_IDS if monitoring.get_tool(number) is None), None)
        if tool is None:
            _replaced_call.acquire()
            try:
                yield
            finally:
                _replaced_call.release()
            return

        def started(_code: Any, _offset: int) -> None:
            local_variables = sys._getframe(1).f_locals
            for before, _ in tuple(_watchers):
                before(local_variables["self"], local_variables["args"])

        def ended(ending: Any, _offset: int, _result: Any) -> None:
            if ending is code:  # PY_UNWIND cannot be limited to one code object
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
        _reports.append(True)
        try:
            yield
        finally:
            _reports.clear()
            monitoring.set_events(tool, 0)
            monitoring.set_local_events(tool, code, 0)
            for event in (events.PY_START, events.PY_RETURN, events.PY_UNWIND):
                monitoring.register_callback(tool, event, None)
            monitoring.free_tool_id(tool)

    _reported_calls = SharedPatch(_monitored_call)
else:
    _reported_calls = SharedPatch(nullcontext)

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
MAX_CALLS = 1000
"""Of modules inside no other one: more are no models, but layers of one."""
_MAX_DEPTH = 4
"""How deep to search containers and objects."""


class ModulePaths:
    """Paths of modules below their roots, and the stack of those that run now.

    `on_root` is called with every root and its name before the root runs. In a real program, module calls are followed
    through a guard.
    """

    def __init__(self, on_root: Callable[[nn.Module, str], None], guard: Guard | None = None) -> None:
        self._on_root = on_root
        self._guard = guard
        self._paths: dict[int, str] = {}
        self._modules: list[nn.Module] = []  # an id stays taken as long as its object lives
        self.stack: list[tuple[int, str, int]] = []
        """Id and path of each running module, the innermost last, and the backward pass in which it was called."""
        self.calls: list[tuple[str, str]] = []
        """The path of each module that was called inside no other one, with the line of the user's that called it."""
        self._roots: set[str] = set()
        self.torch_classes: dict[str, str] = {}
        """The classes of torch's own modules by their paths, without containers, whose content is the user's."""

    def add_root(self, module: nn.Module, name: str) -> None:
        """Sets the paths of a module and of all below it; paths are relative to a root without a name."""
        self._modules.append(module)
        self._roots.add(name)
        for path, part in submodules(module, name):
            path = strip_compile_wrapper(path)
            self._paths.setdefault(id(part), path)
            kind = type(part)
            if kind.__module__.startswith("torch.nn.") and kind not in _CONTAINERS:
                self.torch_classes[path] = f"torch.nn.{kind.__name__}"
        self._on_root(module, name)

    def meet(self, module: nn.Module) -> None:
        """Makes a module a root if it is below no other root."""
        if id(module) not in self._paths:
            self.add_root(module, self._unused(type(module).__name__))

    def release(self) -> None:
        """Lets go of all modules."""
        self._modules.clear()
        self._paths.clear()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the stack follows every module's call."""
        enter, leave = self._enter, self._leave
        with watch_module_calls(
            *((enter, leave) if self._guard is None else (self._guard.wrap(enter), self._guard.wrap(leave)))
        ):
            yield

    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        self.meet(module)
        if not self.stack and len(self.calls) < MAX_CALLS:
            self.calls.append((self._paths[id(module)], user_line()[0]))
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


def strip_compile_wrapper(path: str) -> str:
    """A path without the wrapper of `torch.compile`.

    >>> strip_compile_wrapper("_orig_mod.0.weight"), strip_compile_wrapper("block._orig_mod")
    ('0.weight', 'block')
    """
    return path.replace("_orig_mod.", "").removesuffix("_orig_mod").rstrip(".")


class ReachableModules:
    """The modules and optimizers that a callable and its arguments refer to, by the names of their variables."""

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
        """Modules inside no other one. If only one has parameters, its name is "" and paths are relative to it."""
        inside = {id(part) for _, module in self.modules for _, part in submodules(module) if part is not module}
        roots = [(name, module) for name, module in self.modules if id(module) not in inside]
        main = [module for _, module in roots if next(named_tensors(module, "_parameters"), None) is not None]
        if len(main) == 1:
            return [("" if module is main[0] else name, module) for name, module in roots]
        return roots

    def _look(self, name: str, value: Any, depth: int) -> None:
        kind = type(value)
        if (
            depth > _MAX_DEPTH
            or id(value) in self._seen
            or issubclass(kind, (str, bytes, int, float, torch.Tensor, type))
        ):
            return
        self._seen.add(id(value))
        if issubclass(kind, nn.Module):
            self.modules.append((name, value))
        elif issubclass(kind, torch.optim.Optimizer):
            self.optimizers.append(value)
        else:
            for inner_name, inner in _referenced_objects(name, value):
                self._look(inner_name, inner, depth + 1)


def _referenced_objects(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    if kind is MethodType:
        yield name, value.__self__
        yield name, value.__func__
    elif issubclass(kind, functools.partial):
        yield name, value.func
        for item in (*value.args, *value.keywords.values()):
            yield name, item
    elif kind is FunctionType:
        yield from _referenced_variables(value)
    elif issubclass(kind, dict):
        for key, item in zip(*keys_and_values(value), strict=True):
            yield str(key) if type(key) in (str, int) else name, item
    elif issubclass(kind, (list, tuple, set)):
        for index, item in enumerate(tuple(value)):
            yield f"{name}_{index}", item
    elif not str(kind.__module__).startswith(("torch", "builtins")):
        yield from list((instance_attributes(value) or {}).items())


def _referenced_variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The objects that a function refers to: its closure, its defaults, and the globals that its code names."""
    if hasattr(function, "__wrapped__"):
        yield "", function.__wrapped__
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a cell that is not filled yet
            continue
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield "default", value
    if str(function.__module__).partition(".")[0] in ("torch", "nearpeak"):
        return
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if issubclass(type(value), (nn.Module, torch.optim.Optimizer, FunctionType, list, tuple, dict)):
            yield name, value
