"""Recorded calls as ops with storages; `GuessedStorages`: which memory a tensor has.

The profiler writes shapes, strides and dtypes, and no addresses, so the choice is the one that keeps the bound a
bound:

* A result of an op has a new storage, unless the operator returns a view or an argument.
* An argument is either the result of an earlier op, views included, or older than the trace. So it has the shape,
  strides and dtype of an earlier tensor, or it is new. Of all such tensors the last used one is chosen. If it was
  another one, that has not been used for longer, and less of it is in the cache: the choice charges no byte that the
  cache may have.
* Arguments of one op with the same layout, or with transposed layouts, are taken to be one tensor, since `x * x` and
  `x @ x.T` cannot be told from `x * y`. Only an argument that the op writes, and the members of one list of a
  `_foreach_` or `_fused_` op, are separate.
* Compiled code uses its buffers with other shapes. After its first kernel, tensors are compared by dtype and number of
  elements; one with gaps, by whether it fits into the other.
* A tensor that matches none, after an op of unknown results, may be one of these results: it is noted there.

The other choice, `likely`, takes the arguments of an op for different tensors if that is possible. It is nearer to what
ran, and not certain to be a bound.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nearpeak.ops.cost import Cost, cost_of
from nearpeak.ops.custom_schemas import CustomParameter, CustomSchema, custom_schemas
from nearpeak.ops.op import Op, Origin, Storage, StorageKind, name_with_origin
from nearpeak.ops.tensor import ITEM_BYTES, Tensor
from nearpeak.trace.kineto.arguments import Argument, RecordedTensor, Scalar, TensorList, contiguous_strides
from nearpeak.trace.kineto.calls import OpCall
from nearpeak.trace.kineto.inductor import min_traffic
from nearpeak.trace.kineto.operators import (
    RecordedOperator,
    SchemaParameter,
    as_torch_value,
    infer_results,
    is_python_number,
    tensor_arguments,
)
from nearpeak.trace.kineto.truncated_lists import TruncatedLists
from nearpeak.trace.storages import dtype_name

_LIST_OPERATOR_PREFIXES = ("_foreach", "_fused_", "_amp_foreach")
_MAYBE_TOUCHED = "may_have_touched"
"""An argument that is added to ops: tensors that an op of unknown results may have made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOps:
    """The ops of the calls, in the same order."""

    ops: tuple[Op, ...]
    storages: GuessedStorages
    unknown: Counter[str]
    """How often the results of an operator could not be inferred, by the name of its event."""
    exact_lists: int = 0
    """Ops on lists that the file truncates and whose members are known all the same."""
    min_lists: int = 0
    """Ops on such lists of which only the minimum number of elements is known."""


@dataclass(slots=True)
class _DraftOp:
    """An unfinished op: later ones may show what it touched."""

    name: str
    arguments: dict[str, Any]
    outputs: tuple[Tensor, ...] = ()
    mutated: tuple[str, ...] = ()
    origin: Origin = "torch"


def build_ops(
    calls: Sequence[OpCall],
    *,
    tf32: bool,
    likely: bool = False,
    lists: Mapping[int, TruncatedLists] | None = None,
    on_host: Collection[int] = (),
) -> RecordedOps:
    """All calls as ops.

    Args:
        calls: In the order of time.
        tf32: Whether float32 products may have run in tf32; the file does not say.
        likely: Which storages to choose.
        lists: The arguments of calls whose lists the file truncates, by the identity of the call.
        on_host: The identities of calls that launched nothing, beside others that did: they ran on the host.
    """
    lists = lists or {}
    exact = minimal = 0
    storages = GuessedStorages(likely=likely)
    drafts: list[_DraftOp] = []
    unknown: Counter[str] = Counter()
    touched: list[Tensor] = []
    for call in calls:
        filled = lists.get(id(call))
        if filled is not None and not filled.exact:
            draft: _DraftOp | None = _draft_of_min_elements(call, filled, storages)
            minimal += 1
        else:
            draft = _draft_op(call, storages, filled.arguments if filled else call.arguments)
            exact += filled is not None and draft is not None
        if storages.unexplained:  # the last op of unknown results may have made them
            touched.extend(storages.unexplained)
            storages.unexplained.clear()
        if draft is not None and id(call) in on_host and not _is_view(draft):
            draft.name = name_with_origin("host", call.span.name.rpartition("::")[2])
            draft.origin = "host"
        if draft is None:
            unknown[call.span.name] += id(call) not in on_host
            draft = _draft_of_origin("unknown", call, _positional_arguments(call.arguments, storages))
        if draft.origin not in ("torch", "host"):
            touched = draft.arguments.get(_MAYBE_TOUCHED, [])
            draft.arguments[_MAYBE_TOUCHED] = touched
        drafts.append(draft)
    ops = tuple(_finish_op(draft, call, tf32) for draft, call in zip(drafts, calls, strict=True))
    return RecordedOps(ops=ops, storages=storages, unknown=unknown, exact_lists=exact, min_lists=minimal)


def _draft_of_origin(
    origin: Origin, call: OpCall, arguments: dict[str, Any], outputs: tuple[Tensor, ...] = ()
) -> _DraftOp:
    return _DraftOp(name_with_origin(origin, call.span.name), arguments, outputs, origin=origin)


def _finish_op(draft: _DraftOp, call: OpCall, tf32: bool) -> Op:
    arguments = {name: tuple(value) if name == _MAYBE_TOUCHED else value for name, value in draft.arguments.items()}
    return Op(
        name=draft.name,
        arguments=arguments,
        outputs=draft.outputs,
        mutated=draft.mutated,
        phase=call.phase,
        module=call.module,
        source=call.source,
        tf32_products=tf32,
        origin=draft.origin,
    )


def _draft_of_min_elements(call: OpCall, lists: TruncatedLists, storages: GuessedStorages) -> _DraftOp:
    """An op with a minimum number of elements: it reads or writes each of its lists once.

    Lists of one `_foreach_` op may be the same. Afterwards the cache holds their members, which may be any older tensor
    of that dtype.
    """
    arguments = _positional_arguments(call.arguments, storages)
    (flat,) = lists.members
    size = flat.shape[0] * ITEM_BYTES[str(flat.dtype)]
    arguments["touched"] = tuple(
        storages.result(flat.shape, (1,), str(flat.dtype), size) for _ in range(lists.separate)
    )
    arguments[_MAYBE_TOUCHED] = storages.older_tensors(str(flat.dtype))
    return _draft_of_origin("partial", call, arguments)


def _is_view(draft: _DraftOp) -> bool:
    cost = _cost_or_none(draft)
    return cost is not None and cost.family == "view"


def _cost_or_none(draft: _DraftOp) -> Cost | None:
    """None where the formula fails: the file may not show an argument that it needs."""
    arguments = {name: tuple(value) if name == _MAYBE_TOUCHED else value for name, value in draft.arguments.items()}
    try:
        return cost_of(Op(name=draft.name, arguments=arguments, outputs=draft.outputs, mutated=draft.mutated))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _draft_op(call: OpCall, storages: GuessedStorages, arguments: tuple[Argument, ...]) -> _DraftOp | None:
    if call.kind == "inductor":
        return _draft_inductor_op(call, storages)
    operator = call.operator
    if operator is None:
        return _draft_custom_op(call, storages, arguments)
    arguments = tuple(_fill_dtypes(argument, storages) for argument in arguments)
    results = infer_results(operator, arguments)
    if results is None:
        return None
    tensors = tuple(tensor_arguments(operator, arguments))
    if any(recorded.dtype is None for _, recorded in tensors):
        return None
    inputs = storages.arguments(
        tensors, lists_differ=operator.overload._opname.startswith(_LIST_OPERATOR_PREFIXES), results_known=True
    )
    new_storages: dict[int, int] = {}
    outputs = []
    for result in results:
        if result.memory < len(inputs) or result.memory in new_storages:
            storage = inputs[result.memory].storage if result.memory < len(inputs) else new_storages[result.memory]
            output = storages.view(result.shape, result.strides, result.dtype, result.offset, storage)
        else:
            output = storages.result(result.shape, result.strides, result.dtype, float(result.bytes))
            new_storages[result.memory] = output.storage
        outputs.append(output)
    draft = _DraftOp(operator.name, _named_arguments(operator, arguments, inputs), tuple(outputs), operator.mutated)
    return draft if _cost_or_none(draft) is not None else None


def _draft_custom_op(call: OpCall, storages: GuessedStorages, arguments: tuple[Argument, ...]) -> _DraftOp | None:
    """An operator of a library that is not installed, by its public schema; None if that is not known, or its cost."""
    for schema in custom_schemas(call.span.name):
        parameters = _fit_schema(schema, arguments)
        if parameters is None:
            continue
        pairs = [
            (one, item) for one, item in zip(parameters, arguments, strict=True) if isinstance(item, RecordedTensor)
        ]
        trial = [_as_tensor(item, -1 - place) for place, (_, item) in enumerate(pairs)]  # of no storage
        try:
            draft = _name_custom_arguments(schema, parameters, arguments, trial)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError):
            return None  # the file does not show an argument that the results follow from
        cost = _cost_or_none(draft)
        if cost is None or cost.model == "none":
            return None
        inputs = storages.arguments(pairs, lists_differ=False, results_known=True)
        results = [storages.result(item.shape, item.strides, item.dtype, item.bytes) for item in draft.outputs]
        return replace(_name_custom_arguments(schema, parameters, arguments, inputs), outputs=tuple(results))
    return None


def _fit_schema(schema: CustomSchema, arguments: tuple[Argument, ...]) -> list[SchemaParameter] | None:
    """A parameter for each argument; None if the schema takes others. What is only written has memory of its own."""
    count = len(schema.parameters)
    if len(arguments) < count or (len(arguments) > count and not schema.has_rest):
        return None
    parameters = []
    for place, argument in enumerate(arguments):
        custom = schema.parameters[place] if place < count else CustomParameter("rest", "t", True)
        is_tensor = isinstance(argument, RecordedTensor)
        if place < count and is_tensor != custom.is_tensor and not (custom.optional and argument is None):
            return None
        if not is_tensor and place < count and custom.mode == "dtype" and not isinstance(argument, Scalar):
            return None
        name = "out" if custom.mode == "w" else custom.name
        kind = "ScalarType" if custom.mode == "dtype" else "Tensor" if is_tensor else ""
        parameters.append(SchemaParameter(name, kind, custom.optional, False, None, False, custom.is_written))
    return parameters


def _name_custom_arguments(
    schema: CustomSchema,
    parameters: Sequence[SchemaParameter],
    arguments: Sequence[Argument],
    tensors: Sequence[Tensor],
) -> _DraftOp:
    """The op with its results, on memory of their own."""
    left = iter(tensors)
    values = [
        next(left)
        if isinstance(argument, RecordedTensor)
        else _plain_value(as_torch_value(parameter.kind, argument.value))
        if isinstance(argument, Scalar)
        else None
        for parameter, argument in zip(parameters, arguments, strict=True)
    ]
    named = {parameter.name: value for parameter, value in zip(schema.parameters, values, strict=False)}
    if schema.has_rest:
        named["rest"] = tuple(values[len(schema.parameters) :])
    written = tuple(name for name in schema.named("w") if named[name] is not None)
    draft = _DraftOp(f"{schema.packet}.default", named, (), written)
    if schema.returned is not None:
        op = Op(name=draft.name, arguments=named, outputs=(), mutated=written)
        draft.outputs = tuple(
            _as_tensor(RecordedTensor(shape, contiguous_strides(shape), dtype), -1 - len(tensors) - place)
            for place, (shape, dtype) in enumerate(schema.returned(op))
        )
    return draft


def _as_tensor(recorded: RecordedTensor, storage: int) -> Tensor:
    return Tensor(shape=recorded.shape, strides=recorded.strides, dtype=str(recorded.dtype), storage=storage)


def _fill_dtypes(argument: Argument, storages: GuessedStorages) -> Argument:
    """The members of a list with their dtypes, by their shapes. An empty member has the dtype of the others."""
    if not isinstance(argument, TensorList):
        return argument
    members = [
        member if member.dtype else member._replace(dtype=storages.dtype_of(member.shape, member.strides))
        for member in argument.tensors
    ]
    dtypes = [member.dtype for member in members if member.dtype and 0 not in member.shape]
    dtype = min(dtypes, key=lambda name: ITEM_BYTES[name]) if dtypes else None
    if dtype is None and all(not member.shape for member in members):
        dtype = "float32"  # the step counts of optimizers, a few bytes whatever their dtype
    return TensorList(tuple(member if member.dtype else member._replace(dtype=dtype) for member in members))


def _named_arguments(
    operator: RecordedOperator, arguments: tuple[Argument, ...], inputs: tuple[Tensor, ...]
) -> dict[str, Any]:
    """The arguments by the names of the schema."""
    tensors = iter(inputs)
    named: dict[str, Any] = {}
    for place, parameter in enumerate(operator.parameters):
        argument = arguments[place] if place < len(arguments) else None
        if isinstance(argument, RecordedTensor):
            named[parameter.name] = None if is_python_number(parameter, argument) else next(tensors)
        elif isinstance(argument, Scalar):
            named[parameter.name] = _plain_value(as_torch_value(parameter.kind, argument.value))
        elif isinstance(argument, TensorList):
            named[parameter.name] = tuple(next(tensors) for _ in argument.tensors)
        else:
            named[parameter.name] = _plain_value(parameter.default) if place >= len(arguments) else None
    return named


def _plain_value(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(value)
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value
    return dtype_name(value)


def _positional_arguments(arguments: Sequence[Argument], storages: GuessedStorages) -> dict[str, Any]:
    """The arguments of an op of unknown results, by position."""
    named: dict[str, Any] = {}
    for place, argument in enumerate(arguments):
        if isinstance(argument, Scalar):
            named[str(place)] = argument.value
        elif not isinstance(argument, (RecordedTensor, TensorList)):
            named[str(place)] = None
        else:
            members = (argument,) if isinstance(argument, RecordedTensor) else argument.tensors
            recorded = [member for member in members if member.dtype is not None]
            parameter = SchemaParameter(str(place), "Tensor", False, False, None, False, False)
            pairs = [(parameter, member) for member in recorded]
            tensors = storages.arguments(pairs, lists_differ=True, results_known=False)
            named[str(place)] = tensors[0] if isinstance(argument, RecordedTensor) and tensors else tensors
    if not named:
        storages.arguments((), lists_differ=True, results_known=False)
    return named


def _draft_inductor_op(call: OpCall, storages: GuessedStorages) -> _DraftOp:
    storages.enter_compiled_code()
    arguments = _positional_arguments(call.arguments, storages)
    traffic = min_traffic(call.span.name, call.arguments, call.span.facts or {})
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    if traffic.read is not None:
        arguments["read"] = tensors[traffic.read]
    if traffic.gemm is not None:
        arguments |= {"inner": traffic.gemm.inner, "product": traffic.gemm.dtype}
        arguments["read"] = tuple(tensors[place] for place in traffic.gemm.operands)
    arguments["touched"] = tuple(tensors[place] for place in traffic.touched)
    outputs: tuple[Tensor, ...] = ()
    if traffic.written is not None:
        elements, dtype = traffic.written
        outputs = (storages.result((elements,), (1,), dtype, elements * ITEM_BYTES[dtype]),)
    return _draft_of_origin("inductor", call, arguments, outputs)


_MAX_LOOK_BACK = 1000
"""Storages to search for one that a tensor with gaps can lie in."""


@dataclass(slots=True)
class _GuessedStorage:
    bytes: float
    kind: StorageKind
    layouts: list[Hashable]


class GuessedStorages:
    """Numbers the storages of a trace, op by op; see the top of this file for the rules."""

    def __init__(self, *, likely: bool = False) -> None:
        self._likely = likely
        self.results: set[int] = set()
        """Storages older than the trace that an op writes."""
        self.unexplained: list[Tensor] = []
        """New tensors since this list was last cleared, which an op of unknown results may have made."""
        self._storages: list[_GuessedStorage] = []
        self._by_layout: dict[Hashable, OrderedDict[int, None]] = {}
        self._by_use: OrderedDict[int, None] = OrderedDict()
        self._older_tensors: dict[str, list[Tensor]] = {}
        self._dtypes: dict[Hashable, dict[str, None]] = {}
        self._after_compiled_code = False
        self._after_unknown_results = False

    def dtype_of(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> str | None:
        """The dtype of a member of a list, which the file lacks: the smallest of those with its shape and strides."""
        recorded = self._dtypes.get((shape, strides)) or self._dtypes.get(shape)
        return min(recorded, key=lambda dtype: ITEM_BYTES[dtype]) if recorded else None

    def arguments(
        self, tensors: Sequence[tuple[SchemaParameter, RecordedTensor]], *, lists_differ: bool, results_known: bool
    ) -> tuple[Tensor, ...]:
        """The tensors of one op with their storages, in order. Each has a dtype."""
        chosen: dict[Hashable, int] = {}
        excluded: set[int] = set()
        places: dict[str, int] = {}
        arguments = []
        for parameter, recorded in tensors:
            place = places.get(parameter.name, -1) + 1
            places[parameter.name] = place
            layout_key: Hashable = (*_memory_layout(recorded), place if lists_differ else 0)
            same = None if parameter.mutated else chosen.get(layout_key)
            storage = None if self._likely else same
            if storage is None:
                storage = None if parameter.name == "out" else self._last_used(recorded, excluded)
                if storage is None:
                    storage = same
                if storage is None:
                    # A tensor with the layout of an argument that this op writes may be another part of its memory.
                    part = not lists_differ and next(self._candidates(recorded), None) is not None
                    storage = self._new(
                        recorded, _span_bytes(recorded), "intermediate" if part or parameter.name == "out" else None
                    )
                excluded.add(storage)
                if not parameter.mutated:
                    chosen[layout_key] = storage
            tensor = self._tensor(recorded, storage, 0)
            self._use(storage, recorded)
            if parameter.mutated and self._storages[storage].kind != "intermediate":
                self.results.add(storage)
            arguments.append(tensor)
        if not results_known:
            self._after_unknown_results = True
        return tuple(arguments)

    def enter_compiled_code(self) -> None:
        """Compiled code runs: from here on buffers are used with other shapes."""
        self._after_compiled_code = self._after_unknown_results = True

    def view(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, offset: int, storage: int) -> Tensor:
        """A result that views the storage of an argument."""
        recorded = RecordedTensor(shape, strides, dtype)
        info = self._storages[storage]
        info.bytes = max(info.bytes, _span_bytes(recorded))  # an `out` that was resized
        self._use(storage, recorded)
        return self._tensor(recorded, storage, offset)

    def result(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, size: float) -> Tensor:
        """A result with a new storage."""
        recorded = RecordedTensor(shape, strides, dtype)
        return self._tensor(recorded, self._new(recorded, size, "intermediate"), 0)

    def older_tensors(self, dtype: str) -> list[Tensor]:
        """The tensors of this dtype that are older than the trace, as they were used first."""
        return [*self._older_tensors.get(dtype, ())]

    def facts(self) -> dict[int, Storage]:
        """All storages by number."""
        return {number: Storage(bytes=info.bytes, kind=info.kind) for number, info in enumerate(self._storages)}

    def _last_used(self, recorded: RecordedTensor, excluded: set[int]) -> int | None:
        return next((storage for storage in self._candidates(recorded) if storage not in excluded), None)

    def _candidates(self, recorded: RecordedTensor) -> Iterator[int]:
        """Storages that may hold a tensor, the last used one first."""
        if not self._after_compiled_code:
            yield from reversed(self._by_layout.get(recorded, ()))
            return
        span = _span_bytes(recorded)
        if math.prod(recorded.shape) * ITEM_BYTES[str(recorded.dtype)] >= span:
            yield from reversed(self._by_layout.get(_dtype_and_size(recorded), ()))
            return
        for count, storage in enumerate(reversed(self._by_use)):
            if count == _MAX_LOOK_BACK:
                return
            info = self._storages[storage]
            if info.bytes >= span and any(
                isinstance(layout, RecordedTensor) and layout.dtype == recorded.dtype for layout in info.layouts
            ):
                yield storage

    def _new(self, recorded: RecordedTensor, size: float, kind: StorageKind | None) -> int:
        number = len(self._storages)
        explained = kind is not None
        if kind is None:
            kind = "intermediate" if self._after_unknown_results else "input"
        self._storages.append(_GuessedStorage(size, kind, []))
        self._use(number, recorded)
        if kind != "intermediate":
            self._older_tensors.setdefault(str(recorded.dtype), []).append(self._tensor(recorded, number, 0))
        if self._after_unknown_results and not explained:
            self.unexplained.append(self._tensor(recorded, number, 0))
        return number

    def _use(self, storage: int, recorded: RecordedTensor) -> None:
        info = self._storages[storage]
        for layout in (recorded, _dtype_and_size(recorded)):
            if layout not in info.layouts:
                info.layouts.append(layout)
                self._by_layout.setdefault(layout, OrderedDict())[storage] = None
        for layout in info.layouts:
            self._by_layout[layout].move_to_end(storage)
        self._by_use[storage] = None
        self._by_use.move_to_end(storage)
        dtype = str(recorded.dtype)
        self._dtypes.setdefault((recorded.shape, recorded.strides), {})[dtype] = None
        self._dtypes.setdefault(recorded.shape, {})[dtype] = None

    @staticmethod
    def _tensor(recorded: RecordedTensor, storage: int, offset: int) -> Tensor:
        return Tensor(
            shape=recorded.shape, strides=recorded.strides, dtype=str(recorded.dtype), storage=storage, offset=offset
        )


def _dtype_and_size(recorded: RecordedTensor) -> Hashable:
    return recorded.dtype, math.prod(recorded.shape)


def _span_bytes(recorded: RecordedTensor) -> float:
    """Bytes from its first element to its last."""
    if 0 in recorded.shape:
        return 0.0
    last = sum((size - 1) * abs(stride) for size, stride in zip(recorded.shape, recorded.strides, strict=True))
    return (last + 1) * ITEM_BYTES[str(recorded.dtype)]


def _memory_layout(recorded: RecordedTensor) -> tuple[Hashable, ...]:
    """Dtype, sizes and strides; the same for a tensor and its transposes."""
    return recorded.dtype, tuple(
        sorted((s, step) for s, step in zip(recorded.shape, recorded.strides, strict=True) if s != 1)
    )
