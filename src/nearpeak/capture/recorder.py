"""`Recorder`: every op that torch dispatches below autograd, as a `work.Op`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from nearpeak.capture.modules import ModulePaths
from nearpeak.capture.source import user_line
from nearpeak.capture.untouched import Untouched
from nearpeak.capture.values import Storages
from nearpeak.work.op import Op, Phase
from nearpeak.work.tensor import Tensor

_QUERIES = frozenset({"prim", "profiler"})
"""Namespaces whose operators ask about tensors or mark time, and touch no data."""
_DEVICE = torch.ops.prim.device.default
_LIFTS = frozenset({"aten.lift_fresh.default", "aten.lift.default", "aten.lift_fresh_copy.default"})
"""What `torch.tensor(...)` calls on the data it was given."""


class LimitReached(BaseException):
    """Stops a trace at its limit; no Exception, so that the traced code does not catch it."""


class _Schema(NamedTuple):
    """What is asked of an operator again and again."""

    name: str
    arguments: tuple[str, ...]
    defaults: dict[str, Any]
    """All arguments in the order of the schema; None stands for those that have no default, which are always given."""
    mutated: tuple[str, ...]
    query: bool
    lift: bool
    composite: bool


class Location(NamedTuple):
    """Where an op comes from."""

    module: str
    source: str


class Recorder(TorchDispatchMode):
    """Records ops while it is entered. With a fake `mode`, real tensors are replaced by their fake copies."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Lets through what calls the compiler itself, as flex attention does; torch refuses that for other modes."""
        return True

    def __init__(self, *, mode: FakeTensorMode | None, limit: int, untouched: Untouched) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Op] = []
        self.storages = Storages()
        self.mutated: set[int] = set()
        self.modules = ModulePaths(self._met_root)
        self.optimizers_running = 0
        self._untouched = untouched
        self._mode = mode
        self._limit = limit
        self._fakes: dict[int, tuple[torch.Tensor, FakeTensor]] = {}
        self._parameters: dict[int, str] = {}
        self._sequence: int = torch._C._autograd._get_sequence_nr()
        self._locations: dict[int, Location] = {}
        self._last_backward = Location("", "")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # asked for as often as there are ops
        kwargs = kwargs or {}
        for kind in types:
            if hasattr(kind, "__tensor_flatten__"):
                return NotImplemented  # a tensor made of others: its own ops come here afterwards
        schema = _schema(func)
        if schema.query:
            return func(*args, **kwargs)
        if schema.composite:  # inference mode passes by the layer that takes these apart
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        originals: dict[int, torch.Tensor] = {}
        if self._mode is not None and not schema.lift:
            args, kwargs = self._faked(args, originals), self._faked(kwargs, originals)
        if schema.lift:
            result = func(*args, **kwargs)
            self.storages.value(result, "intermediate")
            return result
        if len(self.ops) >= self._limit:
            raise LimitReached
        with torch._C.DisableTorchFunction():
            arguments = self._arguments(schema, args, kwargs)
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            self._record(schema, arguments, result)
        return _restored(result, originals) if originals else result

    def fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake copy of a real tensor: its strides, its storage shared with the copies of its other views."""
        if self._mode is None or isinstance(tensor, FakeTensor):
            return tensor
        known = self._fakes.get(id(tensor))
        if known is not None:
            return known[1]
        self._untouched.leaf(tensor)
        if _is_number(tensor):  # an optimizer's count of steps, say: its value may be asked for
            with no_dispatch():
                value = tensor.clone()
            copy = self._mode.fake_tensor_converter.from_real_tensor(self._mode, value, make_constant=True)
        else:
            copy = self._mode.from_tensor(tensor)
        self._fakes[id(tensor)] = (tensor, copy)
        return copy

    def _faked(self, value: Any, originals: dict[int, torch.Tensor]) -> Any:
        if isinstance(value, FakeTensor):
            return value
        if isinstance(value, torch.Tensor):
            copy = self.fake_of(value)
            if copy is not value:
                originals[id(copy)] = value
            return copy
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)([self._faked(item, originals) for item in value])
        if isinstance(value, dict):
            return {key: self._faked(item, originals) for key, item in value.items()}
        return value

    def _met_root(self, module: torch.nn.Module, name: str) -> None:
        self._untouched.module(module)
        prefix = f"{name}." if name else ""
        for path, parameter in module.named_parameters():
            self._parameters.setdefault(id(parameter), prefix + path)
            self.storages.name(self.fake_of(parameter), "parameter", prefix + path)
        for path, buffer in module.named_buffers():
            self.storages.name(self.fake_of(buffer), "buffer", prefix + path)

    def _arguments(self, schema: _Schema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        value = self.storages.value
        arguments = dict(schema.defaults)
        for index, item in enumerate(args):
            name = schema.arguments[index] if index < len(schema.arguments) else str(index)
            arguments[name] = value(item, "input")
        for name, item in kwargs.items():
            arguments[name] = value(item, "input")
        for name in schema.mutated:
            self._note_mutated(arguments.get(name))
        return arguments

    def _note_mutated(self, value: Any) -> None:
        if isinstance(value, Tensor):
            if self.storages.existed(value.storage):
                self.mutated.add(value.storage)
        elif isinstance(value, tuple):
            for item in value:
                self._note_mutated(item)

    def _record(self, schema: _Schema, arguments: dict[str, Any], result: Any) -> None:
        graph_task = torch._C._current_graph_task_id()
        phase: Phase = "backward" if graph_task != -1 else "optimizer" if self.optimizers_running else "forward"
        location = self._location(graph_task)
        products, convolutions = tf32()
        self.ops.append(
            Op(
                name=schema.name,
                arguments=arguments,
                outputs=tuple(_flat(self.storages.value(result, "intermediate"))),
                mutated=schema.mutated,
                phase=phase,
                module=location.module,
                source=location.source,
                tf32_products=products,
                tf32_convolutions=convolutions,
            )
        )

    def _location(self, graph_task: int) -> Location:
        """The running module and the user's line; for an op of autograd's own those of the forward op behind it.

        A node of the graph takes the next sequence number when its forward op is called, just before that op arrives
        here: all numbers that are new since the op before belong to this op.
        """
        module = self.modules.running(graph_task)
        line, crossed = user_line()
        if graph_task != -1 and (crossed or module is None):
            behind = self._behind_current_node()
            module = behind.module if module is None else module
            line = behind.source or line if crossed else line
            location = self._last_backward = Location(module, line)
        else:
            location = Location(module or "", line)
        sequence: int = torch._C._autograd._get_sequence_nr()
        if sequence > self._sequence:
            for number in range(self._sequence, sequence):
                self._locations[number] = location
            self._sequence = sequence
        return location

    def _behind_current_node(self) -> Location:
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return self._last_backward
        variable = getattr(node, "variable", None)
        if variable is not None:  # gradients are accumulated into a leaf
            self._untouched.leaf(variable)
            name = self._parameters.get(id(variable))
            module = self._last_backward.module if name is None else name.rpartition(".")[0]
            return Location(module, self._last_backward.source)
        return self._locations.get(node._sequence_nr(), self._last_backward)


@functools.cache
def _schema(func: Any) -> _Schema:
    if not isinstance(func, torch._ops.OpOverload):  # a higher-order operator has no schema
        return _Schema(f"higher_order.{func.name()}", (), {}, (), False, False, False)
    arguments = func._schema.arguments
    query = func.namespace in _QUERIES or func._opname.startswith(("sym_", "is_pinned", "is_same_size"))
    return _Schema(
        name=str(func),
        arguments=tuple(argument.name for argument in arguments),
        defaults={
            argument.name: Storages().value(argument.default_value, "input") if argument.has_default_value() else None
            for argument in arguments
        },
        mutated=tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write),
        query=query,
        lift=str(func) in _LIFTS,
        composite=not query and func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd),
    )


def _is_number(tensor: torch.Tensor) -> bool:
    return (
        tensor.dim() == 0
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and tensor.untyped_storage().nbytes() == tensor.element_size()
    )


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple):
        return [tensor for item in value for tensor in _flat(item)]
    return []


def _restored(result: Any, originals: dict[int, torch.Tensor]) -> Any:
    """In-place operators give back the tensor they were given, not its copy."""
    if isinstance(result, torch.Tensor):
        return originals.get(id(result), result)
    if type(result) in (list, tuple):
        return type(result)([_restored(item, originals) for item in result])
    return result


def _tf32_reader() -> Callable[[], tuple[bool, bool]]:
    read: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)
    if read is None:
        return lambda: (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    return lambda: (read("cuda", "matmul") == "tf32", read("cuda", "conv") == "tf32")


tf32 = _tf32_reader()
"""Whether float32 matrix products and convolutions run in tf32, by torch's flags now."""
