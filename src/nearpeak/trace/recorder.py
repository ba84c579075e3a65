"""`Recorder`: a dispatch mode that records every op which torch dispatches below autograd.

With a fake mode, real tensors are replaced by their fake copies (`FakeCopies`). Each op has the module and the user's
line that it comes from (`Locations`), in the backward pass those of the forward op, and says whether it recomputes a
forward (`RecomputeDetector`). A `GradientLog` has what backward passes add to the gradients of parameters, and what
becomes of that; a `SettingsWatch` has the settings that slow steps down. `active_recorder` is the recorder of this
thread.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
import hashlib
import inspect
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import CodeType, FrameType
from typing import Any, ParamSpec, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from nearpeak.machines.machine import Machine
from nearpeak.ops.fast_init import positional_constructor
from nearpeak.ops.graph import GraphNode, GraphReplay
from nearpeak.ops.low_gc import low_gc
from nearpeak.ops.op import (
    AddedGradient,
    BackwardPass,
    NextStep,
    Op,
    OpSignature,
    Phase,
    SeenOptimizer,
    Storage,
    StorageKind,
    Trace,
    name_with_origin,
    name_without_origin,
)
from nearpeak.ops.settings import SLOW_SETTINGS
from nearpeak.ops.tensor import Tensor
from nearpeak.trace import interrupts, memo
from nearpeak.trace.cuda_ops.registry import RECOMPOSED_OPERATORS, run_native
from nearpeak.trace.guard import Guard, is_capturing, undone_in_child
from nearpeak.trace.known_values import KnownValues
from nearpeak.trace.loop_turns import LoopTurns
from nearpeak.trace.memo import (
    CallSignature,
    CallSignatures,
    Recipe,
    RowSignature,
    drop_notes,
    memoized_rows,
    tensor_notes,
)
from nearpeak.trace.memory import MemoryTracker
from nearpeak.trace.modules import ModulePaths, strip_compile_wrapper
from nearpeak.trace.objects import named_tensors
from nearpeak.trace.python_time import PythonTime
from nearpeak.trace.schema import OperatorSchema, schema_of
from nearpeak.trace.seen_values import SeenValues
from nearpeak.trace.source import AUTOGRAD_ENGINE_CODE, COLLATE, UserLines, lines_that_write, own_stack, package_files
from nearpeak.trace.state_snapshot import StateSnapshot
from nearpeak.trace.storages import Storages, below_transforms, innermost, storage_of
from nearpeak.trace.threads import current_frames

P = ParamSpec("P")

_DEVICE = torch.ops.prim.device.default
_ITEM = torch.ops.aten._local_scalar_dense.default


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedGraph:
    """What was recorded while a CUDA graph was captured; see `trace/graphs.py`."""

    number: int
    ops: tuple[Op, ...]
    """Those that added nodes: what a replay runs."""
    nodes: tuple[GraphNode, ...]
    """In the order in which they were added; `op` is an index into `ops`."""
    storages: Mapping[int, Storage]
    memory: Mapping[int, int]
    """Where storages begin in the memory of the device."""


class LimitReached(BaseException):
    """Stops a trace on fake tensors at its limit; no Exception, so that the traced code does not catch it."""


class Recorder(TorchDispatchMode):
    """Records ops while it is entered. With a fake `mode`, real tensors are replaced by their fake copies.

    Without one, the ops of a real program pass unchanged. If recording one of them fails, nothing more is recorded,
    and `failure` says why; the program goes on.
    """

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Lets through what calls the compiler itself, as flex attention does; torch refuses that for other modes."""
        return True

    def __init__(
        self, *, mode: FakeTensorMode | None, limit: int, snapshot: StateSnapshot, reads_values: bool = True
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Op] = []
        self.replays: list[GraphReplay] = []
        self._memory = MemoryTracker() if mode is None else None  # fake tensors have none
        self.storages = Storages(None if self._memory is None else self._memory.note_storage)
        self.mutated: set[int] = set()
        self._guard = Guard()
        self.modules = ModulePaths(self._add_root, self._guard if mode is None else None)
        self._optimizers_running = 0
        self._optimizers: dict[type, SeenOptimizer] = {}
        self.graph_recorded = False
        """Whether autograd has recorded an op of a forward pass."""
        self._left_in_child = False
        self.paused = False
        """Whether ops pass unrecorded: those of a compiler at work do."""
        self.truncated = False
        """Whether there were more ops than the limit."""
        self._snapshot = snapshot
        self._mode = mode
        self._limit = limit
        self._signatures = CallSignatures(self.storages, mode) if mode is not None and memo.can_memoize(mode) else None
        self.known = None if self._signatures is None else KnownValues(self.storages)
        self._copies = None if mode is None else FakeCopies(mode, snapshot, self.known)
        if self.known is not None:
            self.storages.on_input = self.known.add_from_outside
        self._locations = Locations(self.modules, snapshot, stacks=mode is None)
        self._stacks: list[tuple[str, ...]] = []
        self._passes: list[BackwardPass] = []
        self._is_in_pass = False
        self._loop_turns = LoopTurns(Recorder.__torch_dispatch__.__code__)
        self._forward_ops: dict[int, int] = {}
        """The forward op behind each op of a backward pass, by their indices."""
        self._derivative_of: dict[int, int] = {}
        """The op whose derivative an op of a backward pass computes; in a pass that differentiates another one, an op
        of that."""
        self._gradients = GradientLog(self.storages, self._locations.parameters) if mode is None else None
        self._contents: dict[int, str] = {}
        """Digests of what no op wrote, by storage."""
        if mode is None:
            self.storages.on_input = self._note_input
        self._recompute = RecomputeDetector(self.modules)
        self._values = SeenValues(self.storages, reads=reads_values)
        self._entered: list[ExitStack] = []
        self._settings = SettingsWatch(Recorder.__torch_dispatch__.__code__) if mode is None else None
        self.python_time = PythonTime() if mode is None else None

    @property
    def failure(self) -> Exception | None:
        """Why the ops of a program could not be recorded."""
        return self._guard.failure

    def __enter__(self) -> Self:
        _keep_from_compiler()
        if self._mode is not None:  # the tensors have no memory that a collection could free
            entered = ExitStack()
            entered.enter_context(low_gc())
            entered.enter_context(tensor_notes())
            self._entered.append(entered)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        if self._left_in_child:
            return
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._locations.lines.forget()
        if self._mode is not None:
            self._entered.pop().close()

    @contextmanager
    def running_live(self) -> Iterator[None]:
        """Inside, the program's own code runs: its time in Python is sampled, its children are left alone."""
        assert self.python_time is not None
        with undone_in_child(self._leave_in_child), self.python_time.sampling():
            yield

    def _leave_in_child(self) -> None:
        """Takes the recorder from below the program's own modes, of the thread that has forked."""
        self._left_in_child = True
        above = []
        while any(mode is self for mode in _get_current_dispatch_mode_stack()):
            if _get_current_dispatch_mode_stack()[-1] is self:
                super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
            else:
                above.append(_pop_mode())
        for mode in reversed(above):
            _push_mode(mode)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from wrapping `__torch_dispatch__`, which looks for itself whether code is being compiled."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # queried more often than there are ops
        if self.paused or self._guard.failure is not None:
            return _run(func, args, kwargs or {})
        if _frame_compiler() is not None:
            return _dispatch_uncompiled(self, func, types, args, kwargs)
        return self._dispatch(func, types, args, kwargs or {})

    def _dispatch(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._mode is None:
            return self._dispatch_live(func, types, args, kwargs)
        for kind in types:
            if kind is not FakeTensor and hasattr(kind, "__tensor_flatten__"):
                return NotImplemented  # a tensor made of others: its own ops come here afterwards
        schema = schema_of(func)
        signatures = self._signatures if schema.memoizable and len(self.ops) < self._limit else None
        if signatures is None:
            return self._run_with_torch(schema, func, args, kwargs, None, None)
        with torch._C.DisableTorchFunction():
            signature = signatures.sign(schema, args, kwargs)
            if signature is not None:
                recipe = memo.recipes.get(signature.key)
                if recipe is not None:
                    return self._replay(schema, signature, recipe, signatures, func, args, kwargs)
                if schema.by_rows:
                    rows = memoized_rows(func, schema, args, kwargs, signature, signatures)
                    if rows:
                        return self._replay_rows(schema, signature, rows, signatures)
        return self._run_with_torch(schema, func, args, kwargs, signature, signatures)

    def _dispatch_live(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an op of the program, and records it. The program sees the op's own exceptions alone."""
        if any(map(_handles_ops, types)):
            return NotImplemented  # a subclass handles its ops itself; what it runs for them comes here afterwards
        schema = self._guard.call(schema_of, func)
        if schema is None or schema.query or not self.records_now:
            return _run(func, args, kwargs)
        if self.python_time is not None:
            self._guard.call(self.python_time.op_begins, len(self.ops))
        if schema.composite and not _any_nested((*args, *kwargs.values())):
            result = self._run_composite(func, args, kwargs)
            if result is not NotImplemented:
                return result
        if schema.lift:
            self._program_resumes()
            result = _run(func, args, kwargs)
            self._guard.call(self._note_lifted, result)
            self.launch_ended()
            return result
        if len(self.ops) >= self._limit:
            self.truncated = True
            return _run(func, args, kwargs)
        arguments = self._guard.call(self._live_arguments, schema, args, kwargs)
        if arguments is not None:
            self._guard.call(self._look_at_values, schema, arguments, args, kwargs)
        self._program_resumes()
        result = _run(func, args, kwargs)
        if arguments is not None:
            self._guard.call(self._record_live, schema, arguments, result)
        self.launch_ended()
        return result

    @property
    def records_now(self) -> bool:
        """Whether an op that is dispatched now runs: a captured one does not."""
        return not is_capturing()

    def launch_begins(self) -> None:
        """An op of the program is about to run, or a kernel that bypasses torch's dispatcher."""
        if self.python_time is not None:
            self._guard.call(self.python_time.op_begins, len(self.ops))

    def _program_resumes(self) -> None:
        """What is done before an op of the program is done: the op itself is about to run."""
        if self.python_time is not None:
            self._guard.call(self.python_time.program_resumes)

    def launch_ended(self) -> None:
        """It has run. If it was recorded, it is the last op."""
        if self.python_time is not None:
            self._guard.call(self.python_time.op_ended, len(self.ops))

    def backward_begins(self) -> None:
        """A backward pass is about to run, which lasts until an op runs outside of any."""
        if _current_graph_task() == -1:
            self._end_pass()
            self._passes.append(
                BackwardPass(range(len(self.ops), len(self.ops)), own_stack(_frame_at(3)))
            )  # above the engine
            self._is_in_pass = True

    def _end_pass(self) -> None:
        if self._is_in_pass:
            begun = self._passes[-1]
            self._passes[-1] = begun._replace(ops=range(begun.ops.start, len(self.ops)))
            self._is_in_pass = False

    def _run_composite(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the operators that an operator is composed of; inference mode bypasses the key that decomposes it."""
        with self, _called_by_torch(func):
            if func in RECOMPOSED_OPERATORS:
                return func.decompose(*args, **kwargs)
            return run_native(func, *args, **kwargs)

    def _live_arguments(self, schema: OperatorSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        arguments = self._arguments(schema, args, kwargs)
        self._note_mutations(schema, arguments)
        if self._settings is not None:
            self._settings.note_arguments(args)
        if not self.graph_recorded and torch.is_grad_enabled() and _current_graph_task() == -1:
            self.graph_recorded = _any_requires_grad(args) or _any_requires_grad(tuple(kwargs.values()))
        return arguments

    def _look_at_values(
        self, schema: OperatorSchema, arguments: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        with no_dispatch():  # dispatch modes of the program count its own ops
            self._values.look(schema, arguments, args, kwargs, len(self.ops))

    def _note_lifted(self, made: torch.Tensor) -> None:
        """A tensor of numbers that the program wrote down, or computed without torch."""
        value = self.storages.value(made, "intermediate")
        if made.numel() * made.element_size() <= MAX_LIFTED_BYTES:
            self._contents.setdefault(value.storage, contents_digest(made.detach().cpu()))

    def _note_input(self, number: int, tensor: torch.Tensor) -> None:
        """A tensor that no op has made: memory of the host may be written without an op, or be made by NumPy."""
        if self.storages.kind(number) == "input" and tensor.device.type == "cpu":
            self._contents[number] = contents_digest(tensor)

    def _record_live(self, schema: OperatorSchema, arguments: dict[str, Any], result: Any) -> None:
        outputs = tuple(_flat_tensors(self.storages.value(result, "intermediate")))
        with no_dispatch():
            self._values.look_at_results(schema, outputs, result)
        self._record(schema, arguments, outputs)

    def _run_with_torch(
        self,
        schema: OperatorSchema,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        signature: CallSignature | None,
        signatures: CallSignatures | None,
    ) -> Any:
        """Runs an op on fake tensors, records it, and memoizes its results."""
        mode = self._mode
        assert mode is not None
        if schema.query:
            return func(*args, **kwargs)
        if schema.composite:
            result = self._run_composite(func, args, kwargs)
            if result is not NotImplemented:
                return result
        if schema.lift:
            if self._signatures is not None and keeps_its_value(args[0]):
                result = memo.constant_tensor(mode, args[0])  # a number keeps its value: optimizers count steps so
            else:
                result = func(*args, **kwargs)
            self.storages.value(result, "intermediate")
            if self.known is not None and type(args[0]) is torch.Tensor:
                self.known.add_copy(result, args[0])
            return result
        if len(self.ops) >= self._limit:
            raise LimitReached
        originals: dict[int, torch.Tensor] = {}
        with torch._C.DisableTorchFunction():
            if self._copies is not None and signature is None:
                args, kwargs = self._copies.replace(args, originals), self._copies.replace(kwargs, originals)
                if originals and signatures is not None:  # the copies of real tensors have one
                    signature = signatures.sign(schema, args, kwargs)
                    recipe = memo.recipes.get(signature.key) if signature is not None else None
                    if signature is not None and recipe is not None:
                        replayed = self._replay(schema, signature, recipe, signatures, func, args, kwargs)
                        return restore_originals(replayed, originals)
            arguments = signature.arguments if signature is not None else self._arguments(schema, args, kwargs)
            self._note_mutations(schema, arguments)
            if func is _ITEM and type(args[0]) is FakeTensor and self.known is not None:
                self._record(schema, arguments, ())
                return self.known.truth(args[0], self._locations.line())
            if schema.by_rows and not func._schema.returns:
                values = memo.constant_values(args)
                if values is not None:  # counts of steps: they are kept by value, and count on
                    self._record(schema, arguments, ())
                    with torch._C._DisableTorchDispatch():
                        return func(*values, **kwargs)
        result = NotImplemented
        if schema.value_dependent and self.known is not None:
            result = self.known.value_dependent(func, args, kwargs, self._locations.line())
        if result is NotImplemented:
            result = run_fake(func, args, kwargs)
        else:
            signature = None  # the next call may have other values
        with torch._C.DisableTorchFunction():
            if schema.mutated and not schema.memoizable:
                drop_notes((*args, *kwargs.values()))
            if signature is not None and signature.key not in memo.recipes:
                with torch._C._DisableTorchDispatch():
                    memo.memoize(signature.key, mode, signature.tensors, result)
            outputs = tuple(_flat_tensors(self.storages.value(result, "intermediate")))
            self._record(schema, arguments, outputs)
            if self.known is not None:
                inputs = _flat_tensors(tuple(arguments.values()))
                self.known.follow(func, schema, args, kwargs, arguments, inputs, outputs)
        return restore_originals(result, originals) if originals else result

    def _replay(
        self,
        schema: OperatorSchema,
        signature: CallSignature,
        recipe: Recipe,
        signatures: CallSignatures,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The result of a memoized call, made without torch, and recorded."""
        if schema.mutated:
            self._note_mutations(schema, signature.arguments)
        results: list[Any] = []
        outputs: list[Tensor] = []
        if recipe.makes_tensors:
            with torch._C._DisableTorchDispatch():
                memo.replay(signature, recipe, signatures, results, outputs)
        else:
            memo.replay(signature, recipe, signatures, results, outputs)
        self._record(schema, signature.arguments, tuple(outputs), (recipe.op_signature, tuple(signature.storages)))
        if self.known is not None:
            self.known.follow(func, schema, args, kwargs, signature.arguments, signature.plain, outputs)
        return results[0] if recipe.container is None else recipe.container(results)

    def _replay_rows(
        self, schema: OperatorSchema, signature: CallSignature, rows: list[RowSignature], signatures: CallSignatures
    ) -> Any:
        """As `_replay`, for an op on lists whose rows are memoized."""
        self._note_mutations(schema, signature.arguments)
        results: list[Any] = []
        outputs: list[Tensor] = []
        with torch._C._DisableTorchDispatch():
            for row, recipe in rows:
                memo.replay(row, recipe, signatures, results, outputs)
        for output in outputs:
            signature.storages.setdefault(output.storage, len(signature.storages))
        stands_for = memo.row_op_signatures.setdefault(signature.key, OpSignature())
        self._record(schema, signature.arguments, tuple(outputs), (stands_for, tuple(signature.storages)))
        return results if rows[0][1].container is list else None

    def optimizer_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Ops that follow are the optimizer's, but for those of a closure.

        The closure of `optimizer.step(closure)` runs a forward and a backward pass. If there is one, the arguments to
        call `step` with are returned, as torch's hook before the step may.
        """
        self._snapshot.optimizer(optimizer)
        self._optimizers_running += 1
        self._optimizers.setdefault(type(optimizer), seen_optimizer(type(optimizer)))
        if self._gradients is not None:
            self._gradients.note_step(optimizer, len(self.ops))
        if not any(map(callable, (*args[1:], *kwargs.values()))):
            return None
        return (
            (args[0], *(self._outside_optimizer(value) for value in args[1:])),
            {name: self._outside_optimizer(value) for name, value in kwargs.items()},
        )

    def optimizer_ends(self) -> None:
        """The optimizer is done."""
        self._optimizers_running = max(0, self._optimizers_running - 1)  # it may have begun before the recording

    def _outside_optimizer(self, closure: Any) -> Any:
        if not callable(closure):
            return closure

        @functools.wraps(closure)
        def run(*args: Any, **kwargs: Any) -> Any:
            before, self._optimizers_running = self._optimizers_running, 0
            try:
                return closure(*args, **kwargs)
            finally:
                self._optimizers_running = before

        return run

    def fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake copy of a real tensor; live, the tensor itself."""
        return tensor if self._copies is None else self._copies.copy_of(tensor)

    def meet(self, value: Any) -> None:
        """Something of the user's is about to be changed, without an op."""
        self._snapshot.meet(value)

    def assign_data(self, tensor: torch.Tensor, data: FakeTensor) -> None:
        """A real tensor was given the data of a fake one, without an op; from here on that is its copy."""
        if self._copies is not None:
            before, self.paused = self.paused, True
            try:
                self._copies.assign(tensor, data.detach())
            finally:
                self.paused = before

    def assigned_data(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The data of a real tensor that was given those of a fake one."""
        return None if self._copies is None else self._copies.assigned.get(id(tensor))

    def finish(self, results: Iterable[torch.Tensor], **fields: Any) -> Trace:
        """The trace, once everything has run; `fields` are further ones of it.

        Storages of `results`, of gradients and of optimizer states are its results.
        """
        self._end_pass()
        used = {
            self.storages.used(self.fake_of(innermost(tensor)))
            for tensor in (*results, *self._snapshot.outliving_tensors())
        }
        storages = self.storages.facts()
        settings = () if self._settings is None else self._settings.names()
        turning_on = {text for name in settings for text in SLOW_SETTINGS[name].written_as}
        trace = Trace(
            ops=self._final_ops(),
            storages=storages,
            results=frozenset(number for number in used if number is not None) | self.mutated,
            lives=None if self._memory is None else self._memory.lifetimes(self._snapshot, storages),
            on_host=frozenset(self.storages.on_host),
            pinned=frozenset(self.storages.pinned),
            graph_recorded=self.graph_recorded,
            replays=tuple(self.replays),
            optimizers=tuple(self._optimizers.values()),
            padding=self._values.padding,
            python=None if self.python_time is None else self.python_time.stretches(),
            calls=tuple(self.modules.calls),
            nonzeros=self._values.nonzeros,
            subnormals=self._values.subnormals,
            counted=self._values.counted,
            causal_masks=self._values.causal_masks,
            visible_keys=dict(self._values.visible_keys),
            packages=package_files({op.source for op in self.ops}),
            torch_modules=dict(self.modules.torch_classes),
            stacks=tuple(self._stacks),
            gradients=() if self._gradients is None else self._gradients.gradients(),
            passes=tuple(self._passes),
            derivative_of=self._derivative_of,
            contents={number: digest for number, digest in self._contents.items() if digest},
            written_at={} if self._mode is not None else lines_that_write(self._classes_with_options() | turning_on),
            settings=settings,
            graph_nodes={} if self._settings is None else dict(self._settings.graph_nodes),
            stack_s=0.0 if self._settings is None else self._settings.stack_s,
        )
        return dataclasses.replace(trace, **fields)

    def add_next_step(self, trace: Trace, following: Recorder) -> Trace:
        """The trace of this recorder with the ops of another one, which has recorded the step after it.

        Storages are those of this recorder where the memory is the same. Memory of the host that has changed in
        between without an op is another one.
        """
        numbers: dict[int, int] = {}
        new: dict[int, Storage] = {}
        contents = dict(trace.contents)
        shared = self.storages.same_memory(following.storages)
        for number, storage in following.storages.facts().items():
            known = shared.get(number)
            digest = following._contents.get(number, "")
            if known is None or (known in contents and digest and contents[known] != digest):
                known = len(trace.storages) + number
                new[known] = storage
                if digest:
                    contents[known] = digest
            numbers[number] = known
        ops = tuple(op_on_storages(op, numbers) for op in following._final_ops())
        read = {tensor.storage for op in ops for tensor in op.inputs}
        dropped = frozenset() if self._memory is None else self._memory.freed_since() - read
        return dataclasses.replace(trace, contents=contents, next_step=NextStep(ops=ops, storages=new, dropped=dropped))

    def _classes_with_options(self) -> set[str]:
        """The names of classes whose options are the remedy of a waste."""
        optimizers = {seen.name.rpartition(".")[2] for seen in self._optimizers.values()}
        return {"DataLoader", "Embedding", "EmbeddingBag", COLLATE} | optimizers

    def _final_ops(self) -> tuple[Op, ...]:
        """The ops in order. If some ran on a device, ops on tensors in host memory alone have the origin "host"."""
        turns = self._loop_turns.turns()
        for index, op in enumerate(self.ops):
            around = turns.get(self._forward_ops.get(index, index))
            if around:
                _set_field(op, "turns", around)
        host = self.storages.on_host
        if not host or len(host) == self.storages.count:
            return tuple(self.ops)
        return tuple(_as_host_op(op) if _uses_only(op, host) else op for op in self.ops)

    def _add_root(self, module: torch.nn.Module, name: str) -> None:
        self._snapshot.module(module)
        if self._memory is not None:
            self._memory.note_module(module)
        prefix = f"{name}." if name else ""
        with below_transforms():
            for path, parameter in named_tensors(module, "_parameters"):
                path = strip_compile_wrapper(prefix + path)
                self._locations.parameters.setdefault(id(parameter), path)
                self._name(parameter, "parameter", path)
            for path, buffer in named_tensors(module, "_buffers"):
                self._name(buffer, "buffer", strip_compile_wrapper(prefix + path))

    def _name(self, tensor: torch.Tensor, kind: StorageKind, path: str) -> None:
        try:
            copy = self.fake_of(innermost(tensor))
        except Exception:  # of a kind without fake copies: the ops on it fail, if there are any
            return
        self.storages.name(copy, kind, path)

    def record_launch(self, launch: Callable[[], tuple[OperatorSchema, dict[str, Any]]]) -> bool:
        """Records a kernel that bypasses torch's dispatcher; whether it shall really run."""
        if self._mode is None:
            self.record_beside(self._record_launch, launch)
            return True
        if len(self.ops) >= self._limit:
            raise LimitReached
        self._record_launch(launch)
        return False

    def _record_launch(self, launch: Callable[[], tuple[OperatorSchema, dict[str, Any]]]) -> None:
        schema, arguments = launch()
        with torch._C.DisableTorchFunction():
            if self._copies is not None:
                arguments = self._copies.replace(arguments, {})
            self.record(schema, self._arguments(schema, (), arguments))

    def record_beside(self, record: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Calls `record` for a kernel that the program launches past torch's dispatcher, if ops are recorded now."""
        if self.paused or self._guard.failure is not None or not self.records_now:
            return
        if len(self.ops) >= self._limit:
            self.truncated = True
            return
        self._guard.call(record, *args, **kwargs)

    def record_replay(self, graph: CapturedGraph) -> None:
        """Records the ops of a CUDA graph that is launched now, which tells what was not seen at their capture."""
        if len(self.ops) + len(graph.ops) > self._limit:
            self.truncated = True
            return
        graph_task = _current_graph_task()
        if graph_task == -1:
            self._end_pass()
        phase = self._phase(graph_task)
        module, source, caller, stack, _ = self._locations.current(graph_task, len(self.ops))
        numbers: dict[int, int] = {}
        first = len(self.ops)
        for op in graph.ops:
            for tensor in (*op.inputs, *op.outputs):
                if tensor.storage not in numbers:
                    numbers[tensor.storage] = self.storages.in_graph(
                        graph.storages[tensor.storage], graph.memory.get(tensor.storage)
                    )
            op = op_on_storages(op, numbers)
            op = dataclasses.replace(
                op,
                module=op.module or ("" if op.source else module),
                source=op.source or source,
                caller=op.caller if op.source else caller,
                phase=phase if op.phase == "forward" else op.phase,
            )
            for name in op.mutated:
                self._note_mutated(op.arguments.get(name))
            self.ops.append(op)
            self._stacks.append(stack)
            if self._memory is not None:
                self._memory.note_op(op)
        nodes = [node if node.op is None else dataclasses.replace(node, op=first + node.op) for node in graph.nodes]
        self.replays.append(GraphReplay(graph=graph.number, nodes=tuple(nodes), ops=range(first, len(self.ops))))

    def record(self, schema: OperatorSchema, arguments: dict[str, Any]) -> None:
        """Records an op whose arguments are plain data already."""
        self._note_mutations(schema, arguments)
        self._record(schema, arguments, ())

    def _arguments(self, schema: OperatorSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
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

    def _note_mutations(self, schema: OperatorSchema, arguments: dict[str, Any]) -> None:
        for name in schema.mutated:
            self._note_mutated(arguments.get(name))

    def _note_mutated(self, value: Any) -> None:
        if isinstance(value, Tensor):
            if self.storages.existed(value.storage):
                self.mutated.add(value.storage)
        elif isinstance(value, tuple):
            for item in value:
                self._note_mutated(item)

    def _phase(self, graph_task: int) -> Phase:
        return "backward" if graph_task != -1 else "optimizer" if self._optimizers_running else "forward"

    def _record(
        self,
        schema: OperatorSchema,
        arguments: dict[str, Any],
        outputs: tuple[Tensor, ...],
        signature: tuple[OpSignature, tuple[int, ...]] | None = None,
    ) -> None:
        graph_task = _current_graph_task()
        if graph_task == -1:
            self._end_pass()
        phase = self._phase(graph_task)
        index = len(self.ops)
        if self._settings is not None:
            self._settings.note_op(index, self._locations.new_nodes())
        module, source, caller, stack, forward = self._locations.current(graph_task, index)
        if graph_task == -1:
            self._loop_turns.note_op(index, schema.name, _frame_at(1))
        elif forward != index:
            self._forward_ops[index] = forward
        if graph_task != -1 and self._locations.behind is not None:
            self._derivative_of[index] = self._locations.behind
        products, convolutions = tf32_flags()
        again = graph_task != -1 and self._recompute.is_recomputing(graph_task)
        op = _make_op(
            *(schema.name, arguments, outputs, schema.mutated, phase, module, source),
            *(products, convolutions, again, schema.origin, caller, ()),
        )
        if signature is not None:
            _set_field(op, "form", signature)
        self.ops.append(op)
        if self._gradients is not None:
            self._stacks.append(stack)
            if graph_task != -1:
                self._gradients.note_op(op, len(self.ops) - 1)
        if self._memory is not None:
            self._memory.note_op(op)
        elif interrupts.pending:
            interrupts.run_pending()


def seen_optimizer(kind: type) -> SeenOptimizer:
    """What is known about a class of optimizers."""
    options = {"fused", "foreach"}.intersection(inspect.signature(kind).parameters)
    public = getattr(torch.optim, kind.__name__, None) is kind
    name = f"torch.optim.{kind.__name__}" if public else f"{kind.__module__}.{kind.__qualname__}"
    return SeenOptimizer(name=name, options=frozenset(options))


def _any_requires_grad(values: Any) -> bool:
    """Whether any tensor of nested lists does. No reference to them stays: their lifetimes are tracked."""
    if isinstance(values, (list, tuple)):
        return any(_any_requires_grad(value) for value in values)
    return isinstance(values, torch.Tensor) and values.requires_grad


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with _called_by_torch(func):
        return func(*args, **kwargs)


def _called_by_torch(func: Any) -> AbstractContextManager[Any]:
    """Inside, an operator runs as torch would run it: function modes of the program do not see what C++ calls.

    Operators of other libraries may be written in Python, and the functions that these call are seen.
    """
    return torch._C.DisableTorchFunction() if _function_mode_count() and func.namespace == "aten" else _NO_CONTEXT


_NO_CONTEXT = nullcontext()
_function_mode_count = torch._C._len_torch_function_stack


def _handles_ops(kind: type) -> bool:
    """Whether a subclass of tensors, FakeTensor excepted, handles its ops itself."""
    dispatch = getattr(kind, "__torch_dispatch__", None)
    return kind is not FakeTensor and dispatch is not torch.Tensor.__torch_dispatch__


def _any_nested(values: Any) -> bool:
    """Whether any tensor of nested lists has rows of different sizes: composite operators are others for these."""
    if isinstance(values, (list, tuple)):
        return any(_any_nested(value) for value in values)
    return isinstance(values, torch.Tensor) and values.is_nested


def _uses_only(op: Op, host: AbstractSet[int]) -> bool:
    storages = [tensor.storage for tensor in (*op.inputs, *op.outputs)]
    return bool(storages) and all(storage in host for storage in storages)


def op_on_storages(op: Op, numbers: Mapping[int, int]) -> Op:
    """The same op on storages of other numbers."""
    return dataclasses.replace(
        op,
        arguments={name: _on_storages(value, numbers) for name, value in op.arguments.items()},
        outputs=tuple(_on_storages(tensor, numbers) for tensor in op.outputs),
    )


def _on_storages(value: Any, numbers: Mapping[int, int]) -> Any:
    if isinstance(value, Tensor):
        return dataclasses.replace(value, storage=numbers[value.storage])
    if isinstance(value, (tuple, list)):
        return tuple(_on_storages(item, numbers) for item in value)
    return value


def _as_host_op(op: Op) -> Op:
    name = op.packet.rpartition(".")[2] if op.origin == "torch" else name_without_origin(op.name)
    return dataclasses.replace(op, name=name_with_origin("host", name), origin="host")


_make_op = positional_constructor(Op)
_set_field = object.__setattr__
_current_graph_task: Callable[[], int] = torch._C._current_graph_task_id


def _flat_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple):
        return [tensor for item in value for tensor in _flat_tensors(item)]
    return []


_frame_compiler: Callable[[], Any] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: True)
"""The compiler of the frames that run now, if any; where torch cannot tell, there might be one."""


@torch._disable_dynamo  # type: ignore[attr-defined]
def _dispatch_uncompiled(recorder: Recorder, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """An op inside code that is being compiled: the recording of it is not part of that code."""
    return recorder._dispatch(func, types, args, kwargs or {})


def active_recorder() -> Recorder | None:
    """The innermost recorder that sees what runs here; None outside of traces and inside of an op.

    Asked of torch, which hands its modes on to the threads of autograd.
    """
    modes = _get_current_dispatch_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, Recorder)), None)


_skip_code: Any = getattr(torch._C._dynamo.eval_frame, "skip_code", lambda code: None)


def _keep_from_compiler() -> None:
    """torch.compile compiles code of the program, and none of ours.

    A program that calls `torch._dynamo.reset()` in its step makes torch forget the code that it skips, but not the
    files.
    """
    for function in (Recorder.__torch_dispatch__, Guard.call):
        _skip_code(function.__code__)
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    add, skipped = getattr(rules, "add", None), getattr(rules, "SKIP_DIRS", ())
    if add is not None and not any(str(Path(__file__).parent) in each for each in skipped):
        add(__package__)


_GROUPED_ROW_ALIGNMENT = 16
"""Bytes to which the rows of a grouped product's result are padded."""


def run_fake(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of `func(*args, **kwargs)` on fake tensors, also where torch's shapes refuse what its kernels take."""
    special = _FAKE_RESULTS.get(func)
    result = NotImplemented if special is None else special(*args, **kwargs)
    if result is NotImplemented and isinstance(func, torch._ops.OpOverload) and _only_writes(func):
        return None
    return func(*args, **kwargs) if result is NotImplemented else result


def _only_writes(func: Any) -> bool:
    """Whether an operator of torch returns nothing, and has no kernel for fake tensors: steps of fused SGD and Adagrad.

    torch would run it on zeros, which take the memory of all arguments.
    """
    if func._schema.returns:
        return False
    registered = torch._C._dispatch_has_kernel_for_dispatch_key
    return func.namespace == "aten" and not any(registered(func.name(), key) for key in _KEYS_OF_SHAPES)


_KEYS_OF_SHAPES = ("Meta", "CompositeExplicitAutograd", "CompositeImplicitAutograd")


def _grouped_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Products of groups in float32 and float16, which torch has kernels for, and shapes of bfloat16 alone."""
    if left.dtype == torch.bfloat16 or left.dtype != right.dtype or bias is not None:
        return NotImplemented
    if left.dim() == 2 and right.dim() == 2:  # groups of the inner dimension
        if offs is None:
            return NotImplemented
        shape: tuple[int, ...] = (offs.shape[0], left.shape[0], right.shape[1])
    elif left.dim() == 3 and right.dim() == 3:
        shape = (left.shape[0], left.shape[1], right.shape[2])
    else:  # groups of rows or of columns
        shape = (left.shape[-2], right.shape[-1])
    if (left.dim() == 3 or right.dim() == 3) and left.shape[-1] != right.shape[-2]:
        return NotImplemented
    dtype = out_dtype or left.dtype
    step = _GROUPED_ROW_ALIGNMENT // dtype.itemsize
    row = math.ceil(shape[-1] / step) * step
    strides = (row, 1) if len(shape) == 2 else (shape[1] * row, row, 1)
    return torch.empty_strided(shape, strides, dtype=dtype, device=left.device)


_FAKE_RESULTS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._grouped_mm.default: _grouped_mm,
}


MAX_DIGEST_BYTES = 1 << 26
"""What larger memory holds is not looked at: it is the same as long as no op writes it."""
MAX_LIFTED_BYTES = 1 << 20
"""Tensors of numbers in the code are small; on a device they are copied back."""


def contents_digest(tensor: torch.Tensor) -> str:
    """A digest of the memory of a tensor on the host, all of its storage; "" where it is not looked at.

    >>> contents_digest(torch.ones(3)) == contents_digest(torch.ones(3)) != contents_digest(torch.zeros(3))
    True
    """
    storage = storage_of(tensor)
    size = 0 if storage is None else storage.nbytes()
    if storage is None or not 0 < size <= MAX_DIGEST_BYTES:
        return ""
    try:
        address = storage.data_ptr()
    except RuntimeError:  # of a kind without memory
        return ""
    if not address:
        return ""
    return hashlib.blake2b((ctypes.c_char * size).from_address(address), digest_size=16).hexdigest()


class FakeCopies:
    """The fake copies of real tensors within one trace: one for each."""

    def __init__(self, mode: FakeTensorMode, snapshot: StateSnapshot, known: KnownValues | None) -> None:
        self._mode = mode
        self._known = known
        self._snapshot = snapshot
        self._fakes: dict[int, tuple[torch.Tensor, FakeTensor]] = {}
        self.assigned: dict[int, torch.Tensor] = {}
        """Copies that the traced code assigned, by the ids of the real tensors."""

    def assign(self, tensor: torch.Tensor, copy: Any) -> None:
        """Makes a fake tensor the copy of a real one."""
        self._fakes[id(tensor)] = (tensor, copy)
        self.assigned[id(tensor)] = copy

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake copy of a real tensor, with its strides; copies of views share a storage."""
        if isinstance(tensor, FakeTensor):
            return tensor
        copied = self._fakes.get(id(tensor))
        if copied is not None:
            return copied[1]
        self._snapshot.leaf(tensor)
        if _is_step_count(tensor):  # an optimizer's step count, whose value may be read
            with no_dispatch():
                value = tensor.clone()
            copy = self._mode.fake_tensor_converter.from_real_tensor(self._mode, value, make_constant=True)
        else:
            with no_dispatch():  # torch warns about the gradient that a computed tensor does not have
                source = tensor if tensor.is_leaf or type(tensor) is not torch.Tensor else tensor.detach()
            copy = self._mode.from_tensor(source)
            if self._known is not None:
                self._known.add_copy(copy, tensor)
        self._fakes[id(tensor)] = (tensor, copy)
        return copy

    def replace(self, value: Any, originals: dict[int, torch.Tensor]) -> Any:
        """A value with copies for all real tensors, which are added to `originals` by the ids of their copies."""
        if isinstance(value, FakeTensor):
            return value
        if isinstance(value, torch.Tensor):
            copy = self.copy_of(value)
            if copy is not value:
                originals[id(copy)] = value
            return copy
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)([self.replace(item, originals) for item in value])
        if isinstance(value, dict):
            return {key: self.replace(item, originals) for key, item in value.items()}
        return value


def restore_originals(result: Any, originals: dict[int, torch.Tensor]) -> Any:
    """A result with real tensors in place of their copies: in-place operators return their argument."""
    if isinstance(result, torch.Tensor):
        return originals.get(id(result), result)
    if type(result) in (list, tuple):
        return type(result)([restore_originals(item, originals) for item in result])
    return result


def _is_step_count(tensor: torch.Tensor) -> bool:
    return (
        tensor.dim() == 0
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and tensor.untyped_storage().nbytes() == tensor.element_size()
    )


def keeps_its_value(tensor: torch.Tensor) -> bool:
    """Whether torch keeps the value of a real tensor in its fake copy: it has at most one element."""
    return (
        type(tensor) is torch.Tensor
        and tensor.numel() <= 1
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    )


Location = tuple[str, str, str, tuple[str, ...], int]
"""Where an op comes from: the path of its module, the line, where that is of an installed package the user's own line
that calls it, and all lines of the user's own on the stack; and the index of the op, of an op of autograd's that of the
forward op behind it."""


class Locations:
    """The location of each op of one trace; call `current` once for each op, in order."""

    def __init__(self, modules: ModulePaths, snapshot: StateSnapshot, *, stacks: bool = False) -> None:
        self._has_stacks = stacks
        self.parameters: dict[int, str] = {}
        """Paths of parameters, by the ids of the tensors."""
        self.lines = UserLines()
        self._modules = modules
        self._snapshot = snapshot
        self._sequence: int = torch._C._autograd._get_sequence_nr()
        self._by_sequence: dict[int, Location] = {}
        self._last_backward: Location = ("", "", "", (), -1)
        self._makers: dict[int, int] = {}
        """The indices of the ops that made the nodes of the graph, by their sequence numbers."""
        self.behind: int | None = None
        """The op that made the node that the last op in a backward pass belongs to; None if that is not known."""

    def share_lines(self, by_sequence: dict[int, Location]) -> None:
        """Takes part in the lines of other traces on this thread, whose graphs may be run backward in this one."""
        self._by_sequence = by_sequence

    def current(self, graph_task: int, index: int) -> Location:
        """The running module and the user's line; for an op of autograd itself those of the forward op behind it.

        A node of the graph takes the next sequence number when its forward op is called, just before that op arrives
        here: all numbers that are new since the op before belong to this op.
        """
        if graph_task == -1:
            self.lines.forget()  # the frame of a finished pass would keep tensors alive
        stack = self._modules.stack
        module = stack[-1][1] if stack and stack[-1][2] == graph_task else None
        line, crossed, caller = self.lines.nearest(_frame_at(2))  # the caller of the one that records the op
        own = own_stack(_frame_at(2)) if self._has_stacks and not crossed else ()
        if graph_task != -1 and (crossed or module is None):
            behind = self._behind_current_node()
            module = behind[0] if module is None else module
            if crossed and behind[1]:
                line, caller, own = behind[1:4]
            location = self._last_backward = (module, line, caller, own, behind[4])
        else:
            location = (module or "", line, caller, own, index)
        sequence = _next_sequence_number()
        if sequence > self._sequence:
            for number in range(self._sequence, sequence):
                self._by_sequence[number] = location
                self._makers[number] = index
            self._sequence = sequence
        return location

    def new_nodes(self) -> int:
        """How many nodes the graph has got since the op before."""
        return _next_sequence_number() - self._sequence

    def line(self) -> str:
        """The user's line that runs now."""
        return self.lines.nearest(_frame_at(1))[0]

    def _behind_current_node(self) -> Location:
        node: Any = torch._C._current_autograd_node()
        self.behind = None
        if node is None:
            return self._last_backward
        variable = getattr(node, "variable", None)
        if variable is not None:  # gradients are accumulated into a leaf
            self._snapshot.leaf(variable)
            name = self.parameters.get(id(variable))
            module = self._last_backward[0] if name is None else name.rpartition(".")[0]
            return (module, *self._last_backward[1:])
        number = node._sequence_nr()
        self.behind = self._makers.get(number)
        return self._by_sequence.get(number, self._last_backward)


_frame_at = sys._getframe
_next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr

_CREATE_GRAPH = 2
"""Among the arguments of torch's function that starts its engine, after the outputs: gradients, retain_graph, this."""


class RecomputeDetector:
    """Tells which ops of a backward pass run a forward again, as activation checkpointing does.

    Autograd disables gradients in a backward pass, unless the pass itself is differentiated. So an op with gradients
    enabled is of a forward, and so is every op of a module that was called in this pass.
    """

    def __init__(self, modules: ModulePaths) -> None:
        self._modules = modules
        self._differentiated: dict[int, bool] = {}
        """Whether a pass is itself differentiated, by its number."""

    def is_recomputing(self, graph_task: int) -> bool:
        """Whether the op that runs now in this pass is of a forward."""
        stack = self._modules.stack
        if stack and stack[-1][2] == graph_task:
            return True
        if not torch.is_grad_enabled():
            return False
        differentiated = self._differentiated.get(graph_task)
        if differentiated is None:
            differentiated = self._differentiated[graph_task] = _creates_graph(sys._getframe(1))
        return not differentiated


def _creates_graph(frame: FrameType | None) -> bool:
    """Whether the pass around a frame has create_graph=True. Threads of the engine have no frame of the caller."""
    engine = _nearest_engine_frame(frame)
    engines = [engine] if engine is not None else map(_nearest_engine_frame, current_frames().values())
    return any(_requested_graph(frame) for frame in engines if frame is not None)


def _nearest_engine_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code is not AUTOGRAD_ENGINE_CODE:
        frame = frame.f_back
    return frame


def _requested_graph(frame: FrameType) -> bool:
    arguments = frame.f_locals.get("args", ())
    return len(arguments) > _CREATE_GRAPH and bool(arguments[_CREATE_GRAPH])


def _tf32_flag_reader() -> Callable[[], tuple[bool, bool]]:
    read: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)
    if read is None:
        return lambda: (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    return lambda: (read("cuda", "matmul") == "tf32", read("cuda", "conv") == "tf32")


tf32_flags = _tf32_flag_reader()
"""Whether float32 matrix products and convolutions run in tf32, by torch's flags now."""


def ops_on(machine: Machine, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """The same ops as they run on a machine: one without tf32 computes in float32."""
    ceilings = machine.theoretical or machine.achievable
    return ops if ceilings is None or "tfloat32" in ceilings.matrix else without_tf32(ops)


def without_tf32(ops: Iterable[Op]) -> tuple[Op, ...]:
    """The same ops without tf32, for a CPU."""
    return tuple(
        dataclasses.replace(op, tf32_products=False, tf32_convolutions=False)
        if op.tf32_products or op.tf32_convolutions
        else op
        for op in ops
    )


_STORING_OPS = frozenset({"aten.detach.default", "aten.clone.default", "aten.new_empty_strided.default"})
"""Ops with which autograd stores the first gradient of a leaf: the tensor itself, or a copy of it."""
_ADDING_OPS = frozenset({"aten.add.Tensor", "aten.add_.Tensor"})
"""Ops with which it adds a further one."""


class GradientLog:
    """Is told about the ops of backward passes and about the steps of optimizers."""

    def __init__(self, storages: Storages, paths: dict[int, str]) -> None:
        self._storages = storages
        self._paths = paths
        """Of parameters, by the ids of the tensors."""
        self._leaves: dict[int, torch.Tensor] = {}
        self._numbers: dict[int, int] = {}
        self._added: list[tuple[int, AddedGradient]] = []
        """With the id of the leaf."""
        self._unusual: set[int] = set()
        """Leaves whose gradients are no single storage, by which readers would be known."""
        self._steps: list[tuple[int, torch.optim.Optimizer]] = []

    def note_op(self, op: Op, index: int) -> None:
        """An op has run in a backward pass."""
        if op.name not in _STORING_OPS and op.name not in _ADDING_OPS:
            return
        node: Any = torch._C._current_autograd_node()
        leaf = getattr(node, "variable", None)
        if not isinstance(leaf, torch.nn.Parameter) or not op.outputs:
            return  # what becomes of the gradient of an input is not known
        self._leaves[id(leaf)] = leaf
        output = op.outputs[0]
        if output.shape != tuple(leaf.shape):  # a part of a sparse gradient
            self._unusual.add(id(leaf))
        hooks = leaf._backward_hooks or getattr(leaf, "_post_accumulate_grad_hooks", None)
        added = AddedGradient(
            op=index,
            storage=output.storage,
            leaf=self._numbers.setdefault(id(leaf), len(self._numbers)),
            parameter=self._paths.get(id(leaf), ""),
            was_none=op.name in _STORING_OPS,
            is_watched=bool(hooks) or type(leaf) is not torch.nn.Parameter,
            is_stepped=False,
            is_left=False,
            optimizer_steps=None,
        )
        self._added.append((id(leaf), added))

    def note_step(self, optimizer: torch.optim.Optimizer, ops: int) -> None:
        """An optimizer takes a step after this number of ops."""
        self._steps.append((ops, optimizer))
        with torch._C.DisableTorchFunction():  # modes and subclasses of the program see none of this
            self._note_stepped(optimizer)

    def _note_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        present = {id(leaf) for leaf in _parameters(optimizer) if leaf.grad is not None}
        self._added = [
            (
                leaf,
                dataclasses.replace(added, is_stepped=True)
                if leaf in present and self._is_current(leaf, added)
                else added,
            )
            for leaf, added in self._added
        ]

    def gradients(self) -> tuple[AddedGradient, ...]:
        """The gradients in order, when the step has ended."""
        with torch._C.DisableTorchFunction():
            return self._all_gradients() if self._added else ()

    def _all_gradients(self) -> tuple[AddedGradient, ...]:
        owned = {id(leaf) for optimizer in _optimizers() for leaf in _parameters(optimizer)}
        steps: dict[int, list[int]] = {}
        for ops, optimizer in self._steps:
            for parameter in _parameters(optimizer):
                steps.setdefault(id(parameter), []).append(ops)
        gradients = tuple(
            dataclasses.replace(
                added,
                is_watched=added.is_watched or leaf in self._unusual,
                is_left=self._is_current(leaf, added),
                optimizer_steps=tuple(steps.get(leaf, ())) if leaf in owned or leaf in steps else None,
            )
            for leaf, added in self._added
        )
        self._leaves.clear()
        return gradients

    def _is_current(self, leaf: int, added: AddedGradient) -> bool:
        """Whether this is what the leaf has as its gradient now."""
        gradient = self._leaves[leaf].grad
        if gradient is None:
            return False
        return storage_of(gradient) is None or self._storages.used(gradient) == added.storage


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _optimizers() -> list[torch.optim.Optimizer]:
    """All optimizers of the program: one that takes a step now and then is not seen in every step."""
    return [item for item in gc.get_objects() if issubclass(type(item), torch.optim.Optimizer)]


class SettingsWatch:
    """Which settings that slow steps down were on in a live trace, and what one of them costs the host.

    Is told of each op.
    """

    def __init__(self, dispatch_code: CodeType) -> None:
        self._dispatch_code = dispatch_code
        """Of the function in which ops arrive: what called it is the program's."""
        self._anomaly_mode = False
        self._leaves: set[int] = set()
        """Tensors whose gradients are accumulated in the graph of this step, by id."""
        self._new_leaves = 0
        self.graph_nodes: dict[int, int] = {}
        """How many nodes of autograd's graph were made in anomaly mode, by the index of their op."""
        self._stack_seconds: list[float] = []

    def note_arguments(self, args: tuple[Any, ...]) -> None:
        """An op is about to run. For a leaf that the graph meets, it gets a node of its own, which has no number."""
        if torch.is_anomaly_enabled() and torch.is_grad_enabled():
            for value in args:
                if isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf:
                    self._new_leaves += id(value) not in self._leaves
                    self._leaves.add(id(value))

    def note_op(self, index: int, nodes: int) -> None:
        """An op has run, for which so many nodes of autograd's graph were made."""
        if not torch.is_anomaly_enabled():
            return
        self._anomaly_mode = True
        nodes, self._new_leaves = nodes + self._new_leaves, 0
        if nodes > 0:
            self.graph_nodes[index] = nodes
            self._stack_seconds.append(_stack_seconds(self._dispatch_code))

    @property
    def stack_s(self) -> float:
        """The time of one stack."""
        return median(self._stack_seconds) if self._stack_seconds else 0.0

    def names(self) -> tuple[str, ...]:
        """The settings that are on, as `SLOW_SETTINGS` names them."""
        return tuple(name for name, is_on in self._are_on().items() if is_on)

    def _are_on(self) -> dict[str, bool]:
        environment = os.environ
        cuda = torch.cuda.is_initialized()
        tracemalloc: Any = sys.modules.get("tracemalloc")
        deterministic: Any = sys.modules.get("torch.utils.deterministic")
        return {
            "anomaly mode": self._anomaly_mode,
            "CUDA_LAUNCH_BLOCKING": cuda and environment.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"),
            "PYTORCH_NO_CUDA_MEMORY_CACHING": cuda and "PYTORCH_NO_CUDA_MEMORY_CACHING" in environment,
            "filled memory": torch.are_deterministic_algorithms_enabled()
            and bool(getattr(deterministic, "fill_uninitialized_memory", True)),
            "sync debug mode": cuda and torch.cuda.get_sync_debug_mode() > 0,
            "memory history": cuda and bool(getattr(torch._C, "_cuda_isHistoryEnabled", bool)()),
            "TORCH_DISTRIBUTED_DEBUG": environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"
            and torch.distributed.is_available()
            and torch.distributed.is_initialized(),
            "TORCHDYNAMO_DISABLE": any(
                environment.get(name) == "1" for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
            ),
            "tracemalloc": tracemalloc is not None and bool(tracemalloc.is_tracing()),
            "sys.settrace": sys.gettrace() is not None,
        }


def _stack_seconds(dispatch_code: CodeType) -> float:
    """The time of a stack with the files' lines, as torch stores it for each node in anomaly mode."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not dispatch_code:
        frame = frame.f_back
    begin = time.perf_counter()
    traceback.format_stack(None if frame is None else frame.f_back)
    return time.perf_counter() - begin
