"""`Recorder`: every op that torch dispatches below autograd, as a `work.Op`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from nearpeak.capture import remembered
from nearpeak.capture.copies import Copies, is_small, restored
from nearpeak.capture.form import Form, Forms, forget, noted
from nearpeak.capture.location import Locations
from nearpeak.capture.lowering.register import COMPOSED, natively
from nearpeak.capture.memory import MemoryWatch
from nearpeak.capture.modules import ModulePaths, without_wrapper
from nearpeak.capture.precision import tf32
from nearpeak.capture.recompute import Recompute
from nearpeak.capture.remembered import Recipe
from nearpeak.capture.rows import Row, rows_of
from nearpeak.capture.schema import Schema, schema_of
from nearpeak.capture.transforms import below_transforms, innermost
from nearpeak.capture.untouched import Untouched
from nearpeak.capture.values import Storages
from nearpeak.work.garbage import rarely_collected
from nearpeak.work.lives import Lives
from nearpeak.work.op import Op, OpForm, Phase, StorageKind
from nearpeak.work.quick import maker
from nearpeak.work.tensor import Tensor

_DEVICE = torch.ops.prim.device.default
_ITEM = torch.ops.aten._local_scalar_dense.default


class LimitReached(BaseException):
    """Stops a trace at its limit; no Exception, so that the traced code does not catch it."""


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
        self._memory = MemoryWatch() if mode is None else None  # fake tensors have none
        self.storages = Storages(None if self._memory is None else self._memory.met)
        self.mutated: set[int] = set()
        self.modules = ModulePaths(self._met_root)
        self.optimizers_running = 0
        self.graph_recorded = False
        """Whether autograd has recorded an op of a forward."""
        self.paused = False
        """Whether ops pass unrecorded, as those of a compiler at work do."""
        self._untouched = untouched
        self._mode = mode
        self._remembers = remembered.remembers(mode)
        self._limit = limit
        self._copies = None if mode is None else Copies(mode, untouched)
        self._forms = Forms(self.storages, mode) if mode is not None and self._remembers else None
        self._locations = Locations(self.modules, untouched)
        self._recompute = Recompute(self.modules)
        self._entered: list[ExitStack] = []

    def __enter__(self) -> Self:
        if self._mode is not None:  # the tensors have no memory that a collection could free
            entered = ExitStack()
            entered.enter_context(rarely_collected())
            entered.enter_context(noted())
            self._entered.append(entered)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._locations.lines.forget()
        if self._mode is not None:
            self._entered.pop().close()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from wrapping `__torch_dispatch__`, which looks for itself whether code is being compiled."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # asked for more often than there are ops
        if self.paused:
            return func(*args, **(kwargs or {}))
        if _compiling() is not None:
            return _not_compiled(self, func, types, args, kwargs)
        return self._dispatch(func, types, args, kwargs or {})

    def _dispatch(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for kind in types:
            if kind is not FakeTensor and hasattr(kind, "__tensor_flatten__"):
                return NotImplemented  # a tensor made of others: its own ops come here afterwards
        schema = schema_of(func)
        forms = self._forms if schema.follows_from_form and len(self.ops) < self._limit else None
        if forms is None:
            return self._asked(schema, func, args, kwargs, None, None)
        with torch._C.DisableTorchFunction():
            form = forms.of(schema, args, kwargs)
            if form is not None:
                recipe = remembered.recipes.get(form.key)
                if recipe is not None:
                    return self._again(schema, form, recipe, forms)
                if schema.by_rows:
                    rows = rows_of(func, schema, args, kwargs, form, forms)
                    if rows:
                        return self._rows_again(schema, form, rows, forms)
        return self._asked(schema, func, args, kwargs, form, forms)

    def _asked(
        self,
        schema: Schema,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        form: Form | None,
        forms: Forms | None,
    ) -> Any:
        """The result of an op from torch, and recorded."""
        mode = self._mode
        if schema.query:
            return func(*args, **kwargs)
        if schema.composite:  # inference mode passes by the layer that takes these apart
            with self:
                result = func.decompose(*args, **kwargs) if func in COMPOSED else natively(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if schema.lift:
            if self._forms is not None and mode is not None and is_small(args[0]):
                result = remembered.constant(mode, args[0])  # a number keeps its value: optimizers count steps so
            else:
                result = func(*args, **kwargs)
            self.storages.value(result, "intermediate")
            return result
        if len(self.ops) >= self._limit:
            raise LimitReached
        originals: dict[int, torch.Tensor] = {}
        with torch._C.DisableTorchFunction():
            if self._copies is not None and form is None:
                args, kwargs = self._copies.faked(args, originals), self._copies.faked(kwargs, originals)
                if originals and forms is not None:  # real tensors have a form as soon as they are fake
                    form = forms.of(schema, args, kwargs)
                    recipe = remembered.recipes.get(form.key) if form is not None else None
                    if form is not None and recipe is not None:
                        return restored(self._again(schema, form, recipe, forms), originals)
            arguments = form.arguments if form is not None else self._arguments(schema, args, kwargs)
            self._note_mutations(schema, arguments)
            if mode is None and not self.graph_recorded and torch.is_grad_enabled() and _graph_task() == -1:
                self.graph_recorded = _requires_grad(args) or _requires_grad(tuple(kwargs.values()))
            if func is _ITEM and type(args[0]) is FakeTensor and args[0].constant is not None:
                self._record(schema, arguments, ())
                with torch._C._DisableTorchDispatch():
                    return args[0].constant.item()
            if schema.by_rows and mode is not None and not func._schema.returns:
                values = remembered.values_of(args)
                if values is not None:  # counts of steps: they are kept by value, and count on
                    self._record(schema, arguments, ())
                    with torch._C._DisableTorchDispatch():
                        return func(*values, **kwargs)
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if schema.mutated and not schema.follows_from_form:
                forget((*args, *kwargs.values()))
            if mode is not None and form is not None and form.key not in remembered.recipes:
                with torch._C._DisableTorchDispatch():
                    remembered.learn(form.key, mode, form.tensors, result)
            self._record(schema, arguments, tuple(_flat(self.storages.value(result, "intermediate"))))
        return restored(result, originals) if originals else result

    def _again(self, schema: Schema, form: Form, recipe: Recipe, forms: Forms) -> Any:
        """The result of an op on arguments of a form that is known, made without torch, and recorded."""
        if schema.mutated:
            self._note_mutations(schema, form.arguments)
        results: list[Any] = []
        outputs: list[Tensor] = []
        if recipe.makes:
            with torch._C._DisableTorchDispatch():
                remembered.make(form, recipe, forms, results, outputs)
        else:
            remembered.make(form, recipe, forms, results, outputs)
        self._record(schema, form.arguments, tuple(outputs), (recipe.form, tuple(form.storages)))
        return results[0] if recipe.container is None else recipe.container(results)

    def _rows_again(self, schema: Schema, form: Form, rows: list[Row], forms: Forms) -> Any:
        """The same for an op on rows of tensors."""
        self._note_mutations(schema, form.arguments)
        results: list[Any] = []
        outputs: list[Tensor] = []
        with torch._C._DisableTorchDispatch():
            for row, recipe in rows:
                remembered.make(row, recipe, forms, results, outputs)
        for output in outputs:
            form.storages.setdefault(output.storage, len(form.storages))
        stands_for = remembered.forms_of_rows.setdefault(form.key, OpForm())
        self._record(schema, form.arguments, tuple(outputs), (stands_for, tuple(form.storages)))
        return results if rows[0][1].container is list else None

    def fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake copy of a real tensor, where tensors are fake."""
        return tensor if self._copies is None else self._copies.of(tensor)

    def finished(self) -> tuple[Op, ...]:
        """The ops in order. Where any ran on a device, what the host did for itself is `host.NAME`."""
        host = self.storages.on_host
        if not host or len(host) == self.storages.count:
            return tuple(self.ops)
        return tuple(_on_host(op) if _only_in(op, host) else op for op in self.ops)

    def lives(self) -> Lives | None:
        """What was in memory during the ops, where they really ran. Ask once, at the end."""
        return None if self._memory is None else self._memory.lives(self._untouched, self.storages.facts())

    def _met_root(self, module: torch.nn.Module, name: str) -> None:
        self._untouched.module(module)
        if self._memory is not None:
            self._memory.module(module)
        prefix = f"{name}." if name else ""
        with below_transforms():
            for path, parameter in module.named_parameters():
                path = without_wrapper(prefix + path)
                self._locations.parameters.setdefault(id(parameter), path)
                self.storages.name(self.fake_of(innermost(parameter)), "parameter", path)
            for path, buffer in module.named_buffers():
                self.storages.name(self.fake_of(innermost(buffer)), "buffer", without_wrapper(prefix + path))

    def launched(self, schema: Schema, arguments: dict[str, Any]) -> bool:
        """Records a kernel that passes by torch's dispatcher; whether it shall really run."""
        if len(self.ops) >= self._limit:
            raise LimitReached
        with torch._C.DisableTorchFunction():
            if self._copies is not None:
                arguments = self._copies.faked(arguments, {})
            self.recorded(schema, self._arguments(schema, (), arguments))
        return self._mode is None

    def recorded(self, schema: Schema, arguments: dict[str, Any]) -> None:
        """Records an op whose arguments are plain data already."""
        self._note_mutations(schema, arguments)
        self._record(schema, arguments, ())

    def _arguments(self, schema: Schema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        value = self.storages.value
        arguments = dict(schema.defaults)
        for index, item in enumerate(args):
            name = schema.arguments[index] if index < len(schema.arguments) else str(index)
            arguments[name] = value(item, "input")
        for name, item in kwargs.items():
            # compiled code makes the memory for results without torch's dispatcher: what is written is not older
            kind: StorageKind = "intermediate" if self._mode is None and name in schema.mutated else "input"
            arguments[name] = value(item, kind)
        return arguments

    def _note_mutations(self, schema: Schema, arguments: dict[str, Any]) -> None:
        for name in schema.mutated:
            self._note_mutated(arguments.get(name))

    def _note_mutated(self, value: Any) -> None:
        if isinstance(value, Tensor):
            if self.storages.existed(value.storage):
                self.mutated.add(value.storage)
        elif isinstance(value, tuple):
            for item in value:
                self._note_mutated(item)

    def _record(
        self,
        schema: Schema,
        arguments: dict[str, Any],
        outputs: tuple[Tensor, ...],
        form: tuple[OpForm, tuple[int, ...]] | None = None,
    ) -> None:
        graph_task = _graph_task()
        phase: Phase = "backward" if graph_task != -1 else "optimizer" if self.optimizers_running else "forward"
        module, source = self._locations.here(graph_task)
        products, convolutions = tf32()
        again = graph_task != -1 and self._recompute.here(graph_task)
        op = _make_op(
            schema.name, arguments, outputs, schema.mutated, phase, module, source, products, convolutions, again
        )
        if form is not None:
            _note(op, "form", form)
        self.ops.append(op)
        if self._memory is not None:
            self._memory.recorded(op)


def _requires_grad(values: Any) -> bool:
    """Whether any tensor of nested lists does. Nothing is kept of them: their deaths are watched."""
    if isinstance(values, (list, tuple)):
        return any(_requires_grad(value) for value in values)
    return isinstance(values, torch.Tensor) and values.requires_grad


def _only_in(op: Op, host: AbstractSet[int]) -> bool:
    storages = [tensor.storage for tensor in (*op.inputs, *op.outputs)]
    return bool(storages) and all(storage in host for storage in storages)


def _on_host(op: Op) -> Op:
    return dataclasses.replace(op, name=f"host.{op.packet.rpartition('.')[2]}")


_make_op = maker(Op)
_note = object.__setattr__
_graph_task: Callable[[], int] = torch._C._current_graph_task_id


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple):
        return [tensor for item in value for tensor in _flat(item)]
    return []


_compiling: Callable[[], Any] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: True)
"""What compiles the frames that run now, if anything does; where torch cannot say, something might."""


@torch._disable_dynamo  # type: ignore[attr-defined]
def _not_compiled(recorder: Recorder, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """An op inside code that is being compiled: the recording of it is not part of that code."""
    return recorder._dispatch(func, types, args, kwargs or {})
