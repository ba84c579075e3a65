"""`StateSnapshot`: what code changes while it is traced on fake tensors is put back.

Only the tensors of such a trace are fake; everything else that the code does happens. It registers hooks, fills
caches, counts steps, takes another learning rate. So the snapshot follows references from the traced function and its
arguments, through containers, objects, modules, optimizers, closures, classes and the globals that functions name, and
copies the content of everything that can change, before it does. Afterwards what differs gets its content again, in
place and in the same order, so that everyone who holds an object sees it as it was. `devices/process_state.py` does
the same for what belongs to the process: settings of torch, random generators, the environment.

What cannot be put back: what other threads and processes do, files, and iterators that were advanced.
"""

from __future__ import annotations

import functools
import itertools
import operator
import random
import sys
import threading
import types
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from multiprocessing.process import BaseProcess
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import _disable_current_modes

from nearpeak.devices.process_state import preserve_process_state
from nearpeak.trace.objects import instance_attributes, keys_and_values, named_tensors
from nearpeak.trace.patches.shared_patch import SharedPatch, patch_attribute
from nearpeak.trace.storages import innermost

MAX_OBJECTS = 200_000
"""Objects that a snapshot looks at, the nearest first."""
MAX_ITEMS = 10_000
"""Items of one container that it looks into."""
MAX_ARRAY_BYTES = 1 << 24
"""Of a NumPy array that is copied."""


class StateSnapshot:
    """Copies the state of objects when they are first met, and restores it.

    With `live`, nothing is restored, and no tensor is held that its owner lets go of.
    """

    def __init__(self, *, live: bool = False) -> None:
        self._live = live
        self._states = _ObjectStates()
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._leaves: dict[int, torch.Tensor] = {}

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Restores everything that was met inside, after errors too."""
        with preserve_process_state():
            self.meet(_objects_of_torch())
            try:
                yield
            finally:
                try:
                    self._states.restore()
                except KeyboardInterrupt:  # restoring twice is the same as once
                    self._states.restore()
                    raise

    def meet(self, *values: Any) -> None:
        """Stores the state of objects and of all that they refer to."""
        if not self._live:
            self._states.save(values)

    def module(self, module: nn.Module) -> None:
        """Stores the state of a module and of all that it refers to."""
        self.meet(module)
        for _, parameter in named_tensors(module, "_parameters"):
            self.leaf(parameter)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Stores the state of an optimizer and of its parameters."""
        if id(optimizer) in self._optimizers:
            return
        self.meet(optimizer)
        self._optimizers[id(optimizer)] = optimizer
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.leaf(parameter)

    def leaf(self, tensor: torch.Tensor) -> None:
        """Stores the state of a leaf, its gradient among it."""
        tensor = innermost(tensor)
        if id(tensor) not in self._leaves and tensor.is_leaf:
            self._leaves[id(tensor)] = tensor
            self.meet(tensor)

    def release(self) -> None:
        """Lets go of what was met."""
        self._leaves.clear()
        self._optimizers.clear()

    @property
    def met_graph(self) -> bool:
        """Whether a tensor was met that a real op computed for autograd."""
        return self._states.met_graph

    @property
    def unusual_tensors(self) -> list[str]:
        """The kinds of tensors that were met and that fake tensors may not stand for."""
        return sorted(self._states.unusual)

    def leaves(self) -> Iterator[torch.Tensor]:
        """The leaves that were met."""
        return iter(self._leaves.values())

    def optimizers(self) -> Iterator[torch.optim.Optimizer]:
        """The optimizers that were met."""
        return iter(self._optimizers.values())

    def outliving_tensors(self) -> Iterator[torch.Tensor]:
        """Gradients of the leaves and states of the optimizers, as they are now."""
        for leaf in self._leaves.values():
            if leaf.is_leaf and leaf.grad is not None:  # it may have been written to from what requires gradients
                yield leaf.grad
        for optimizer in self._optimizers.values():
            for state in optimizer.state.values():
                if isinstance(state, dict):
                    yield from (value for value in state.values() if isinstance(value, torch.Tensor))


_Restore = Callable[[Any, Any], object]
_Visit = Callable[["_ObjectStates", Any], Iterable[Any]]
"""Stores the content of an object, and returns what it refers to."""

_ATOMS = frozenset(
    {
        *(int, float, complex, bool, str, bytes, range, slice, type(None), type(...), type(NotImplemented)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
        *(
            types.CodeType,
            types.FrameType,
            types.GeneratorType,
            types.GetSetDescriptorType,
            types.WrapperDescriptorType,
        ),
    }
)
_MISSING = object()


class _ObjectStates:
    """The contents of objects, and how to put them back."""

    def __init__(self) -> None:
        self._met: dict[int, Any] = {}  # with the objects, so that no other gets their ids
        self._saved: list[tuple[_Restore, Any, Any]] = []
        self._visits: dict[type, _Visit | None] = {}
        self.classes: set[int] = set()
        """Ids of the classes that were visited, each with those above it."""
        self.met_graph = False
        self.unusual: set[str] = set()
        """Kinds of tensors with data in another form than strides."""
        self.modules: set[tuple[str, tuple[str, ...]]] = set()
        """Modules that were visited, with the names that were looked for."""

    def save(self, values: Iterable[Any]) -> None:
        """Stores what objects and all that they refer to contain."""
        pending = deque(values)
        met, visits = self._met, self._visits
        with torch._C.DisableTorchFunction():
            while pending and len(met) < MAX_OBJECTS:
                value = pending.popleft()
                kind = type(value)
                if kind in _ATOMS or id(value) in met:
                    continue
                met[id(value)] = value
                try:
                    visit = visits[kind]
                except KeyError:
                    visit = visits[kind] = _visit_of(kind)
                if visit is not None:
                    try:
                        pending.extend(visit(self, value))
                    except Exception:  # it cannot be looked at, and so not be put back
                        continue
                    if visit in _CONTAINER_VISITS and kind not in _PLAIN_CONTAINERS:
                        pending.append(instance_attributes(value))

    def add(self, restore: _Restore, value: Any, content: Any) -> None:
        """Stores a content that `restore(value, content)` puts back."""
        self._saved.append((restore, value, content))

    def restore(self) -> None:
        """Puts back every content that differs. One that cannot be put back does not keep others from it."""
        failures = []
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            for restore, value, content in self._saved:
                try:
                    restore(value, content)
                except Exception as error:
                    failures.append(f"{type(value).__module__}.{type(value).__qualname__}: {error}")
        if failures:
            warnings.warn(f"Not as before the trace: {'; '.join(failures[:3])}", RuntimeWarning, stacklevel=2)


def _visit_of(kind: type) -> _Visit | None:
    """How objects of a class are visited; None if they have no state of the user's."""
    for base, visit in _VISITS:
        if issubclass(kind, base):
            return visit
    if _is_numpy(kind, "ndarray"):
        return _visit_array
    if str(kind.__module__).startswith("numpy.random"):
        return _visit_numpy_generator
    return _visit_object if _has_user_state(kind) else None


_STANDARD_LIBRARY = sys.stdlib_module_names - {"collections", "types", "argparse", "contextlib", "weakref"}
_INTERNAL_PREFIXES = ("_cython", "torch._", "torch.fx.", "torch.jit.", "torch.library", "torch.autograd.")
_NOT_OF_USERS = (
    frozenset({"nearpeak", "numpy", "builtins", "triton", "IPython", "pytest", "_pytest", "pluggy"}) | _STANDARD_LIBRARY
)


def _has_user_state(kind: type) -> bool:
    """Whether objects of a class are of a program, and not of Python, of torch's internals or of this library."""
    module = str(kind.__module__)
    return module.partition(".")[0] not in _NOT_OF_USERS and not module.startswith(_INTERNAL_PREFIXES)


def _is_user_code(module: Any) -> bool:
    """Whether the code of a module may keep state in globals and in classes. Torch's does, for its own use."""
    top = str(module).partition(".")[0]
    return top != "torch" and top not in _NOT_OF_USERS


def _is_numpy(kind: type, name: str) -> bool:
    return any(base.__name__ == name and base.__module__ == "numpy" for base in kind.__mro__)


def _visit_dict(states: _ObjectStates, value: dict[Any, Any]) -> Iterable[Any]:
    keys, values = content = keys_and_values(value)
    states.add(_restore_dict, value, content)
    return [part for part in (*keys[:MAX_ITEMS], *values[:MAX_ITEMS]) if type(part) not in _ATOMS]


def _restore_dict(value: dict[Any, Any], content: tuple[tuple[Any, ...], tuple[Any, ...]]) -> None:
    now = keys_and_values(value)
    if _same(now[0], content[0]) and _same(now[1], content[1]):
        return
    kind: type[dict[Any, Any]] = OrderedDict if issubclass(type(value), OrderedDict) else dict
    kind.clear(value)
    for key, item in zip(*content, strict=True):
        kind.__setitem__(value, key, item)


def _visit_list(states: _ObjectStates, value: list[Any]) -> Iterable[Any]:
    items = tuple(list.__iter__(value))
    states.add(_restore_list, value, items)
    return items[:MAX_ITEMS]


def _restore_list(value: list[Any], items: tuple[Any, ...]) -> None:
    if not _same(list.__iter__(value), items):
        list.__setitem__(value, slice(None), items)


def _visit_deque(states: _ObjectStates, value: deque[Any]) -> Iterable[Any]:
    items = tuple(deque.__iter__(value))
    states.add(_restore_deque, value, items)
    return items[:MAX_ITEMS]


def _restore_deque(value: deque[Any], items: tuple[Any, ...]) -> None:
    if not _same(deque.__iter__(value), items):
        deque.clear(value)
        deque.extend(value, items)


def _visit_set(states: _ObjectStates, value: set[Any]) -> Iterable[Any]:
    items = tuple(set.__iter__(value))
    states.add(_restore_set, value, items)
    return items[:MAX_ITEMS]


def _restore_set(value: set[Any], items: tuple[Any, ...]) -> None:
    if {id(item) for item in set.__iter__(value)} != {id(item) for item in items}:
        set.clear(value)
        set.update(value, items)


def _visit_bytes(states: _ObjectStates, value: bytearray) -> Iterable[Any]:
    states.add(_restore_bytes, value, bytes(value))
    return ()


def _restore_bytes(value: bytearray, content: bytes) -> None:
    if value != content:
        value[:] = content


def _same(now: Iterable[Any], before: tuple[Any, ...]) -> bool:
    items = tuple(now)
    return len(items) == len(before) and all(map(operator.is_, items, before))


def _visit_items(states: _ObjectStates, value: Any) -> Iterable[Any]:
    """Of a tuple or a frozen set, which cannot change itself."""
    return itertools.islice((tuple if issubclass(type(value), tuple) else frozenset).__iter__(value), MAX_ITEMS)


def _visit_array(states: _ObjectStates, value: Any) -> Iterable[Any]:
    if value.flags.writeable and value.dtype != object and value.nbytes <= MAX_ARRAY_BYTES:
        states.add(_restore_array, value, value.copy())
    return ()


def _restore_array(value: Any, content: Any) -> None:
    if value.shape == content.shape and value.tobytes() != content.tobytes():
        value[...] = content


def _visit_random(states: _ObjectStates, value: random.Random) -> Iterable[Any]:
    if not isinstance(value, random.SystemRandom):
        states.add(random.Random.setstate, value, value.getstate())
    return ()


def _visit_numpy_generator(states: _ObjectStates, value: Any) -> Iterable[Any]:
    bits = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", None) or value
    if hasattr(bits, "state"):
        states.add(lambda bits, state: setattr(bits, "state", state), bits, bits.state)
    return ()


def _visit_generator(states: _ObjectStates, value: torch.Generator) -> Iterable[Any]:
    states.add(torch.Generator.set_state, value, value.get_state())
    return ()


def _visit_iterator(states: _ObjectStates, value: Any) -> Iterable[Any]:
    """Of a list, a tuple or a range, as long as it has an item left."""
    _, arguments, *position = value.__reduce__()
    if position:
        states.add(lambda iterator, place: iterator.__setstate__(place), value, position[0])
    return tuple(arguments)


def _visit_lru_cache(states: _ObjectStates, value: Any) -> Iterable[Any]:
    states.add(_forget_new_results, value, value.cache_info().misses)
    return (value.__wrapped__,)


def _forget_new_results(value: Any, misses: int) -> None:
    if value.cache_info().misses != misses:  # a new result may hold a fake tensor, and single ones cannot be taken out
        value.cache_clear()


def _visit_method(states: _ObjectStates, value: Any) -> Iterable[Any]:
    return value.__self__, getattr(value, "__func__", None)


def _visit_partial(states: _ObjectStates, value: functools.partial[Any]) -> Iterable[Any]:
    return value.func, value.args, value.keywords, instance_attributes(value)


def _visit_descriptor(states: _ObjectStates, value: Any) -> Iterable[Any]:
    """Of a property, a class method or a static method."""
    return [getattr(value, name, None) for name in ("__func__", "fget", "fset", "fdel", "func")]


def _visit_function(states: _ObjectStates, value: types.FunctionType) -> Iterable[Any]:
    yield from (value.__defaults__, value.__kwdefaults__, value.__dict__)
    for cell in value.__closure__ or ():
        content = _cell_content(cell)
        states.add(_restore_cell, cell, content)
        yield content
    if not _is_user_code(value.__module__):
        return
    names = _names_in(value.__code__)
    yield from _visit_variables(states, value.__globals__, names)


def _visit_variables(states: _ObjectStates, variables: dict[str, Any], names: tuple[str, ...]) -> Iterable[Any]:
    """The variables of a module that code names, and those of other modules that it may name by a dot."""
    values = [variables.get(name, _MISSING) for name in names]
    states.add(_restore_variables, (variables, names), values)
    package = _installed_package(variables)
    for value in values:
        if value is _MISSING or (package is not None and isinstance(value, _CODE) and _package(value) != package):
            continue  # a library runs others for downloads, files and text; the tensors are in its own code
        if type(value) is not types.ModuleType:
            yield value
        elif _is_user_code(value.__name__) and (value.__name__, names) not in states.modules:
            states.modules.add((value.__name__, names))
            inner = vars(value)
            yield from _visit_variables(states, inner, tuple(name for name in names if name in inner))


_CODE = (types.FunctionType, type, types.ModuleType)


def _installed_package(variables: dict[str, Any]) -> str | None:
    """The package that a module's variables are of; None if it is a program and not installed."""
    installed = "-packages" in str(variables.get("__file__"))
    return str(variables.get("__name__")).partition(".")[0] if installed else None


def _package(code: Any) -> str:
    return str(code.__name__ if isinstance(code, types.ModuleType) else code.__module__).partition(".")[0]


def _restore_variables(place: tuple[dict[str, Any], tuple[str, ...]], values: list[Any]) -> None:
    variables, names = place
    for name, value in zip(names, values, strict=True):
        if variables.get(name, _MISSING) is not value:
            if value is _MISSING:
                del variables[name]
            else:
                variables[name] = value


@functools.lru_cache(maxsize=1 << 16)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """The names of globals and attributes in code and in the functions inside it."""
    inner = [
        name for constant in code.co_consts if isinstance(constant, types.CodeType) for name in _names_in(constant)
    ]
    return tuple(dict.fromkeys((*code.co_names, *inner)))


def _cell_content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return _MISSING


def _restore_cell(cell: types.CellType, content: Any) -> None:
    if _cell_content(cell) is not content:
        if content is _MISSING:
            del cell.cell_contents
        else:
            cell.cell_contents = content


def _visit_class(states: _ObjectStates, value: type) -> Iterable[Any]:
    package = _installed_package(getattr(sys.modules.get(str(value.__module__)), "__dict__", {}))
    for kind in value.__mro__:
        if package is not None and _package(kind) != package:
            continue
        if _is_user_code(kind.__module__) and (kind is value or id(kind) not in states.classes):
            states.classes.add(id(kind))
            attributes = {name: item for name, item in vars(kind).items() if name not in _CLASS_NAMES}
            states.add(_restore_class, kind, attributes)
            yield from attributes.values()


_CLASS_NAMES = frozenset({"__dict__", "__weakref__", "__doc__", "__abstractmethods__", "_abc_impl", "__slotnames__"})


def _restore_class(kind: type, attributes: dict[str, Any]) -> None:
    now = vars(kind)
    for name in [name for name in now if name not in attributes and name not in _CLASS_NAMES]:
        type.__delattr__(kind, name)
    for name, item in attributes.items():
        if now.get(name, _MISSING) is not item:
            type.__setattr__(kind, name, item)


_OF_OTHER_THREADS = (threading.Thread, Executor, BaseProcess)


def _visit_object(states: _ObjectStates, value: Any) -> Iterable[Any]:
    kind = type(value)
    attributes = instance_attributes(value)
    if attributes and any(issubclass(type(item), _OF_OTHER_THREADS) for item in attributes.values()):
        return ()  # its threads go on, with what is theirs
    states.add(_restore_object, value, (kind, attributes))
    return [attributes, *_visit_slots(states, value), kind]


def _restore_object(value: Any, content: tuple[type, dict[str, Any] | None]) -> None:
    kind, attributes = content
    if type(value) is not kind:
        object.__setattr__(value, "__class__", kind)
    if attributes is not None and instance_attributes(value) is not attributes:
        object.__setattr__(value, "__dict__", attributes)


def _visit_slots(states: _ObjectStates, value: Any) -> list[Any]:
    slots = _slots_of(type(value))
    contents = [_slot_content(slot, value) for slot in slots]
    if slots:
        states.add(_restore_slots, value, (slots, contents))
    return contents


_without_slots: WeakSet[type] = WeakSet()
"""Nearly all classes. One that was kept would keep the globals of its functions, which Python clears as it ends."""


def _slots_of(kind: type) -> tuple[Any, ...]:
    if kind in _without_slots:
        return ()
    slots = tuple(
        member
        for base in kind.__mro__
        if _is_user_code(base.__module__)
        for member in vars(base).values()
        if type(member) is types.MemberDescriptorType
    )
    if not slots:
        _without_slots.add(kind)
    return slots


def _slot_content(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:  # not set
        return _MISSING


def _restore_slots(value: Any, content: tuple[tuple[Any, ...], list[Any]]) -> None:
    for slot, item in zip(*content, strict=True):
        if _slot_content(slot, value) is not item:
            if item is _MISSING:
                slot.__delete__(value)
            else:
                slot.__set__(value, item)


_Layout = tuple[torch.UntypedStorage, int, Any, Any, Any]
"""The storage of a tensor and its bytes; the tensor's offset, sizes and strides."""


def _visit_tensor(states: _ObjectStates, value: torch.Tensor) -> Iterable[Any]:
    """Of a real or fake tensor: everything that changes without an op. Ops on real tensors run on copies."""
    attributes = instance_attributes(value)
    assert attributes is not None
    fields = keys_and_values(attributes)  # first: a tensor with rows of different sizes notes those it is asked for
    if (unusual := _unusual_kind(value)) is not None:
        states.unusual.add(unusual)
    leaf = value.is_leaf
    states.met_graph |= not leaf
    gradient = value.grad if leaf or value.retains_grad else None
    hooks = (value._backward_hooks, value._post_accumulate_grad_hooks)
    version = None if value.is_inference() else _unsafe_preserve_version_counter(value)
    states.add(
        _restore_tensor, value, (type(value), _layout(value), leaf, value.requires_grad, gradient, hooks, version)
    )
    states.add(_restore_dict, attributes, fields)
    return (gradient, *hooks) if isinstance(value, FakeTensor) else (gradient, *hooks, *fields[1])


_USUAL_CLASSES = frozenset({torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor})


def _unusual_kind(value: torch.Tensor) -> str | None:
    if value.is_nested:
        return "nested tensor"
    if value.is_quantized:
        return "quantized tensor"
    if value.layout is not torch.strided:
        return "sparse tensor"
    return None if type(value) in _USUAL_CLASSES or nn.parameter.is_lazy(value) else type(value).__name__


def _layout(value: torch.Tensor) -> _Layout | None:
    try:
        storage = value.untyped_storage()
        return storage, storage.nbytes(), value.storage_offset(), value.size(), value.stride()
    except (RuntimeError, NotImplementedError):  # sparse, nested and others
        return None


def _restore_tensor(value: torch.Tensor, content: tuple[Any, ...]) -> None:
    kind, layout, leaf, requires_grad, gradient, hooks, version = content
    if type(value) is not kind:
        value.__class__ = kind
    now = _layout(value)
    if layout is not None and now is not None and (now[0]._cdata, *now[1:]) != (layout[0]._cdata, *layout[1:]):
        _set_layout(value, layout)
    if leaf and not value.is_leaf and not value._is_view():  # it was written to from what requires gradients
        value.detach_()
    if value.is_leaf:
        if value.requires_grad is not requires_grad:
            value.requires_grad_(requires_grad)
        if value.grad is not gradient:
            value.grad = gradient
    if value._backward_hooks is not hooks[0]:
        value._backward_hooks = hooks[0]
    if value._post_accumulate_grad_hooks is not hooks[1]:
        value._post_accumulate_grad_hooks = hooks[1]
    if version is not None and value._version != version.prev_versions[0]:
        version.__exit__()


def _set_layout(value: torch.Tensor, layout: _Layout) -> None:
    storage, size, *view = layout
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        if not isinstance(value, FakeTensor):
            value.data = torch.empty(0, dtype=value.dtype, device=storage.device).set_(storage, *view)
            return
        if storage.nbytes() != size:  # of no memory
            storage.resize_(size)
        value.set_(storage, *view)


_VISITS: tuple[tuple[Any, _Visit | None], ...] = (
    (torch.Tensor, _visit_tensor),
    (dict, _visit_dict),
    (list, _visit_list),
    (deque, _visit_deque),
    (set, _visit_set),
    (bytearray, _visit_bytes),
    ((tuple, frozenset), _visit_items),
    (types.FunctionType, _visit_function),
    ((types.MethodType, types.BuiltinFunctionType), _visit_method),
    (functools.partial, _visit_partial),
    ((property, classmethod, staticmethod, functools.cached_property), _visit_descriptor),
    (type(functools.lru_cache(len)), _visit_lru_cache),
    ((type(iter([])), type(iter(())), type(iter(range(0)))), _visit_iterator),
    (torch.Generator, _visit_generator),
    (random.Random, _visit_random),
    (types.ModuleType, None),
    (type, _visit_class),
    ((nn.Module, torch.optim.Optimizer), _visit_object),
)
"""How the objects of a class are visited, the first that fits."""
_CONTAINER_VISITS = frozenset({_visit_dict, _visit_list, _visit_deque, _visit_set})
_PLAIN_CONTAINERS = frozenset({dict, OrderedDict, defaultdict, list, deque, set})
"""Containers without attributes of their own."""


def _objects_of_torch() -> list[Any]:
    """The hooks of all modules and of all optimizers, and how tensors are printed."""
    modules = (nn.modules.module, sys.modules["torch.optim.optimizer"])
    return [
        vars(torch._tensor_str.PRINT_OPTS),
        *(
            value
            for module in modules
            for name, value in vars(module).items()
            if name.startswith("_global_") and isinstance(value, dict)
        ),
    ]


_SCALER_METHODS = ("scale", "unscale_", "step", "update")


class _ScalerSnapshots(threading.local):
    """The snapshot of the trace on this thread."""

    snapshot: StateSnapshot | None = None


_scaler_snapshots = _ScalerSnapshots()


@contextmanager
def restore_grad_scalers(snapshot: StateSnapshot) -> Iterator[None]:
    """Inside, gradient scalers take their step whether or not a gradient overflowed, and are met by the snapshot."""
    with _patch_grad_scalers():
        outer, _scaler_snapshots.snapshot = _scaler_snapshots.snapshot, snapshot
        try:
            yield
        finally:
            _scaler_snapshots.snapshot = outer


@SharedPatch
@contextmanager
def _patch_grad_scalers() -> Iterator[None]:
    kind = torch.amp.GradScaler
    maybe_step = kind._maybe_opt_step

    def step(self: Any, optimizer: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(overflow, FakeTensor) for overflow in state["found_inf_per_device"].values()):
            return optimizer.step(*args, **kwargs)
        return maybe_step(self, optimizer, state, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(patch_attribute(kind, "_maybe_opt_step", step))
        for name in _SCALER_METHODS:
            stack.enter_context(patch_attribute(kind, name, _snapshot_before(getattr(kind, name))))
        yield


def _snapshot_before(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _scaler_snapshots.snapshot is not None:
            _scaler_snapshots.snapshot.meet(self)
        return method(self, *args, **kwargs)

    return call
