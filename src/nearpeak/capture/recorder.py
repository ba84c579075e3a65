"""`Recorder`: every op that torch dispatches below autograd, as a `work.Op`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from nearpeak.capture import remembered
from nearpeak.capture.form import Form
from nearpeak.capture.location import Locations
from nearpeak.capture.lowering.register import COMPOSED, natively
from nearpeak.capture.modules import ModulePaths
from nearpeak.capture.remembered import Given, Made, Recipe
from nearpeak.capture.rows import Row, rows_of
from nearpeak.capture.schema import Schema, schema_of
from nearpeak.capture.untouched import Untouched
from nearpeak.capture.values import Storages
from nearpeak.work.garbage import rarely_collected
from nearpeak.work.op import Op, Phase
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
        self.storages = Storages()
        self.mutated: set[int] = set()
        self.modules = ModulePaths(self._met_root)
        self.optimizers_running = 0
        self._untouched = untouched
        self._mode = mode
        self._remembers = remembered.remembers(mode)
        self._limit = limit
        self._fakes: dict[int, tuple[torch.Tensor, FakeTensor]] = {}
        self._locations = Locations(self.modules, untouched)
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> Self:
        if self._mode is not None:  # the tensors have no memory that a collection could free
            self._entered.append(rarely_collected())
            self._entered[-1].__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._mode is not None:
            self._entered.pop().__exit__(None, None, None)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from wrapping `__torch_dispatch__`, which looks for itself whether code is being compiled."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # asked for more often than there are ops
        if _compiling() is not None:
            return _not_compiled(self, func, types, args, kwargs)
        return self._dispatch(func, types, args, kwargs or {})

    def _dispatch(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for kind in types:
            if kind is not FakeTensor and hasattr(kind, "__tensor_flatten__"):
                return NotImplemented  # a tensor made of others: its own ops come here afterwards
        schema = schema_of(func)
        form: Form | None = None
        if schema.follows_from_form and self._mode is not None and self._remembers and len(self.ops) < self._limit:
            with torch._C.DisableTorchFunction():
                form = Form(self.storages, self._mode, schema, args, kwargs)
                if form.known:
                    recipe = remembered.recipes.get(form.key)
                    if recipe is not None:
                        return self._again(schema, form, recipe, self._mode)
                    if schema.by_rows:
                        rows = rows_of(func, schema, args, kwargs, self.storages, self._mode)
                        if rows:
                            return self._rows_again(schema, form, rows, self._mode)
        return self._asked(schema, func, args, kwargs, form)

    def _asked(
        self, schema: Schema, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], form: Form | None
    ) -> Any:
        """The result of an op from torch, and recorded."""
        if schema.query:
            return func(*args, **kwargs)
        if schema.composite:  # inference mode passes by the layer that takes these apart
            with self:
                result = func.decompose(*args, **kwargs) if func in COMPOSED else natively(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if schema.lift:
            result = self._lifted(func, args, kwargs)
            self.storages.value(result, "intermediate")
            return result
        if len(self.ops) >= self._limit:
            raise LimitReached
        originals: dict[int, torch.Tensor] = {}
        mode = self._mode
        with torch._C.DisableTorchFunction():
            if mode is not None and (form is None or not form.known):
                args, kwargs = self._faked(args, originals), self._faked(kwargs, originals)
                if originals and form is not None:  # real tensors have a form as soon as they are fake
                    form = Form(self.storages, mode, schema, args, kwargs)
                    recipe = remembered.recipes.get(form.key) if form.known else None
                    if recipe is not None:
                        return _restored(self._again(schema, form, recipe, mode), originals)
            known = form is not None and form.known
            arguments = form.arguments if form is not None and known else self._arguments(schema, args, kwargs)
            self._note_mutations(schema, arguments)
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
            if mode is not None and form is not None and known and form.key not in remembered.recipes:
                with torch._C._DisableTorchDispatch():
                    remembered.learn(form.key, mode, form.tensors, result)
            self._record(schema, arguments, tuple(_flat(self.storages.value(result, "intermediate"))))
        return _restored(result, originals) if originals else result

    def _again(self, schema: Schema, form: Form, recipe: Recipe, mode: FakeTensorMode) -> Any:
        """The result of an op on arguments of a form that is known, made without torch, and recorded."""
        if schema.mutated:
            self._note_mutations(schema, form.arguments)
        results: list[Any] = []
        outputs: list[Tensor] = []
        with torch._C._DisableTorchDispatch():
            self._make(form, recipe, mode, results, outputs)
        self._record(schema, form.arguments, tuple(outputs))
        return results[0] if recipe.container is None else recipe.container(results)

    def _rows_again(self, schema: Schema, form: Form, rows: list[Row], mode: FakeTensorMode) -> Any:
        """The same for an op on rows of tensors."""
        self._note_mutations(schema, form.arguments)
        results: list[Any] = []
        outputs: list[Tensor] = []
        with torch._C._DisableTorchDispatch():
            for row, recipe in rows:
                self._make(row, recipe, mode, results, outputs)
        self._record(schema, form.arguments, tuple(outputs))
        return results if rows[0][1].container is list else None

    def _make(
        self, form: Form, recipe: Recipe, mode: FakeTensorMode, results: list[Any], outputs: list[Tensor]
    ) -> None:
        storages, tensors, plain = self.storages, form.tensors, form.plain
        for how in recipe.items:
            if type(how) is Made:
                result = how.make(mode, tensors)
                storage = result.untyped_storage()
                at = how.argument
                number = plain[at].storage if at >= 0 else storages.new(storage, how.view[0])
                output = Tensor(
                    shape=how.shape, strides=how.strides, dtype=how.dtype_name, storage=number, offset=how.offset
                )
                storages.views[(storage._cdata, *how.view)] = (how.look, output)
                results.append(result)
                outputs.append(output)
            elif type(how) is Given:
                results.append(tensors[how.argument])
                outputs.append(plain[how.argument])
            else:
                results.append(how)

    def _lifted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `torch.tensor(...)` gives; a number keeps its value, as torch has it: optimizers count steps so."""
        if self._mode is not None and self._remembers and type(args[0]) is torch.Tensor and _is_small(args[0]):
            return remembered.constant(self._mode, args[0])
        return func(*args, **kwargs)

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
            self._locations.parameters.setdefault(id(parameter), prefix + path)
            self.storages.name(self.fake_of(parameter), "parameter", prefix + path)
        for path, buffer in module.named_buffers():
            self.storages.name(self.fake_of(buffer), "buffer", prefix + path)

    def _arguments(self, schema: Schema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        value = self.storages.value
        arguments = dict(schema.defaults)
        for index, item in enumerate(args):
            name = schema.arguments[index] if index < len(schema.arguments) else str(index)
            arguments[name] = value(item, "input")
        for name, item in kwargs.items():
            arguments[name] = value(item, "input")
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

    def _record(self, schema: Schema, arguments: dict[str, Any], outputs: tuple[Tensor, ...]) -> None:
        graph_task = torch._C._current_graph_task_id()
        phase: Phase = "backward" if graph_task != -1 else "optimizer" if self.optimizers_running else "forward"
        location = self._locations.here(graph_task)
        products, convolutions = tf32()
        self.ops.append(
            Op(
                name=schema.name,
                arguments=arguments,
                outputs=outputs,
                mutated=schema.mutated,
                phase=phase,
                module=location.module,
                source=location.source,
                tf32_products=products,
                tf32_convolutions=convolutions,
            )
        )


def _is_number(tensor: torch.Tensor) -> bool:
    return (
        tensor.dim() == 0
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and tensor.untyped_storage().nbytes() == tensor.element_size()
    )


def _is_small(tensor: torch.Tensor) -> bool:
    """Whether torch keeps its value in a fake tensor: one element or none."""
    return (
        tensor.numel() <= 1
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
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


_compiling: Callable[[], Any] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: True)
"""What compiles the frames that run now, if anything does; where torch cannot say, something might."""


@torch._disable_dynamo  # type: ignore[attr-defined]
def _not_compiled(recorder: Recorder, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """An op inside code that is being compiled: the recording of it is not part of that code."""
    return recorder._dispatch(func, types, args, kwargs or {})
