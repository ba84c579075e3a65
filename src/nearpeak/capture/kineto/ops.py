"""Calls of a recording as ops with storages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nearpeak.capture.kineto.calls import Call
from nearpeak.capture.kineto.inductor import least_moved
from nearpeak.capture.kineto.lists import LongLists
from nearpeak.capture.kineto.operators import Operator, constant, dtype_name, is_number, results_of, tensors_of
from nearpeak.capture.kineto.schemas import Parameter
from nearpeak.capture.kineto.storages import Storages
from nearpeak.capture.kineto.tensors import Argument, Members, Scalar, Seen
from nearpeak.work.cost import Cost, cost_of
from nearpeak.work.op import Op
from nearpeak.work.tensor import ITEM_BYTES, Tensor

_SEPARATE_LISTS = ("_foreach", "_fused_", "_amp_foreach")
_MAYBE = "may_have_touched"
"""The name of an argument of ours: tensors that an op of unknown results may have made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """The ops of the calls, in the same order; and how often which operator's results could not be found."""

    ops: tuple[Op, ...]
    storages: Storages
    unknown: Counter[str]
    exact_lists: int = 0
    """Ops on lists that the file leaves out and whose members are known all the same."""
    least_lists: int = 0
    """Ops on such lists of which only the least number of elements is known."""


@dataclass(slots=True)
class _Draft:
    """An op before it is final: later ones may show what it touched."""

    name: str
    arguments: dict[str, Any]
    outputs: tuple[Tensor, ...]
    mutated: tuple[str, ...]


def ops_of(
    calls: Sequence[Call], *, tf32: bool, likely: bool = False, lists: Mapping[int, LongLists] | None = None
) -> Ops:
    """All calls as ops. `tf32`: whether float32 products may have run in it; the file does not say.

    `lists` has the arguments of calls whose long lists the file leaves out, by the identity of the call.
    """
    lists = lists or {}
    exact = least = 0
    storages = Storages(likely=likely)
    drafts: list[_Draft] = []
    unknown: Counter[str] = Counter()
    touched: list[Tensor] = []
    for call in calls:
        filled = lists.get(id(call))
        if filled is not None and not filled.exact:
            draft: _Draft | None = _least_lists(call, filled, storages)
            least += 1
        else:
            draft = _draft(call, storages, filled.arguments if filled else call.arguments)
            exact += filled is not None and draft is not None
        if storages.unexplained:  # new tensors: the last op of unknown results may have made them
            touched.extend(storages.unexplained)
            storages.unexplained.clear()
        if draft is None:
            unknown[call.span.name] += 1
        if draft is None or call.kind == "inductor" or draft.name.startswith("least."):
            draft = draft or _Draft(f"unknown.{call.span.name}", _positional(call.arguments, storages), (), ())
            touched = draft.arguments.get(_MAYBE, [])
            draft.arguments[_MAYBE] = touched
        drafts.append(draft)
    ops = tuple(_final(draft, call, tf32) for draft, call in zip(drafts, calls, strict=True))
    return Ops(ops=ops, storages=storages, unknown=unknown, exact_lists=exact, least_lists=least)


def _final(draft: _Draft, call: Call, tf32: bool) -> Op:
    arguments = {name: tuple(value) if name == _MAYBE else value for name, value in draft.arguments.items()}
    return Op(
        name=draft.name,
        arguments=arguments,
        outputs=draft.outputs,
        mutated=draft.mutated,
        phase=call.phase,
        module=call.module,
        source=call.source,
        tf32_products=tf32,
    )


def _least_lists(call: Call, lists: LongLists, storages: Storages) -> _Draft:
    """An op of which only the least number of elements is known: it reads or writes each of its lists once.

    Lists of one `_foreach_` op may be the same. What the cache holds afterwards is of their members, which may be
    anything of that dtype that was there before.
    """
    arguments = _positional(call.arguments, storages)
    (flat,) = lists.members
    size = flat.shape[0] * ITEM_BYTES[str(flat.dtype)]
    arguments["touched"] = tuple(
        storages.result(flat.shape, (1,), str(flat.dtype), size) for _ in range(lists.separate)
    )
    arguments[_MAYBE] = storages.before(str(flat.dtype))
    return _Draft(f"least.{call.span.name}", arguments, (), ())


def _cost(draft: _Draft) -> Cost | None:
    """None where the formula cannot do with what the file shows; an argument that it needs may not be in there."""
    arguments = {name: tuple(value) if name == _MAYBE else value for name, value in draft.arguments.items()}
    try:
        return cost_of(Op(name=draft.name, arguments=arguments, outputs=draft.outputs, mutated=draft.mutated))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _draft(call: Call, storages: Storages, arguments: tuple[Argument, ...]) -> _Draft | None:
    if call.kind == "inductor":
        return _inductor(call, storages)
    operator = call.operator
    if operator is None:
        return None
    arguments = tuple(_with_dtypes(argument, storages) for argument in arguments)
    results = results_of(operator, arguments)
    if results is None:
        return None
    tensors = tuple(tensors_of(operator, arguments))
    if any(seen.dtype is None for _, seen in tensors):
        return None
    inputs = storages.arguments(
        tensors, lists_differ=operator.overload._opname.startswith(_SEPARATE_LISTS), results_known=True
    )
    own: dict[int, int] = {}
    outputs = []
    for result in results:
        if result.memory < len(inputs) or result.memory in own:
            storage = inputs[result.memory].storage if result.memory < len(inputs) else own[result.memory]
            output = storages.view(result.shape, result.strides, result.dtype, result.offset, storage)
        else:
            output = storages.result(result.shape, result.strides, result.dtype, float(result.bytes))
            own[result.memory] = output.storage
        outputs.append(output)
    draft = _Draft(operator.name, _named(operator, arguments, inputs), tuple(outputs), operator.mutated)
    return draft if _cost(draft) is not None else None


def _with_dtypes(argument: Argument, storages: Storages) -> Argument:
    """The members of a list with their dtypes, found by their shapes. One that holds nothing has that of the others."""
    if not isinstance(argument, Members):
        return argument
    members = [
        member if member.dtype else member._replace(dtype=storages.dtype_of(member.shape, member.strides))
        for member in argument.tensors
    ]
    known = [member.dtype for member in members if member.dtype and 0 not in member.shape]
    dtype = min(known, key=lambda name: ITEM_BYTES[name]) if known else None
    if dtype is None and all(not member.shape for member in members):
        dtype = "float32"  # what optimizers count their steps in, seen nowhere else: whatever it is, it is a few bytes
    return Members(tuple(member if member.dtype else member._replace(dtype=dtype) for member in members))


def _named(operator: Operator, arguments: tuple[Argument, ...], inputs: tuple[Tensor, ...]) -> dict[str, Any]:
    """The arguments by the names of the schema."""
    tensors = iter(inputs)
    named: dict[str, Any] = {}
    for place, parameter in enumerate(operator.parameters):
        argument = arguments[place] if place < len(arguments) else None
        if isinstance(argument, Seen):
            named[parameter.name] = None if is_number(parameter, argument) else next(tensors)
        elif isinstance(argument, Scalar):
            named[parameter.name] = _plain(constant(parameter.kind, argument.value))
        elif isinstance(argument, Members):
            named[parameter.name] = tuple(next(tensors) for _ in argument.tensors)
        else:
            named[parameter.name] = _plain(parameter.default) if place >= len(arguments) else None
    return named


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(value)
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value
    return dtype_name(value)


def _positional(arguments: Sequence[Argument], storages: Storages) -> dict[str, Any]:
    """What an op of unknown results was given, by position."""
    named: dict[str, Any] = {}
    for place, argument in enumerate(arguments):
        if isinstance(argument, Scalar):
            named[str(place)] = argument.value
        elif not isinstance(argument, (Seen, Members)):
            named[str(place)] = None
        else:
            members = (argument,) if isinstance(argument, Seen) else argument.tensors
            seen = [member for member in members if member.dtype is not None]
            parameter = Parameter(str(place), "Tensor", False, False, None, False, False)
            pairs = [(parameter, member) for member in seen]
            tensors = storages.arguments(pairs, lists_differ=True, results_known=False)
            named[str(place)] = tensors[0] if isinstance(argument, Seen) and tensors else tensors
    if not named:
        storages.arguments((), lists_differ=True, results_known=False)
    return named


def _inductor(call: Call, storages: Storages) -> _Draft:
    storages.compiled()
    arguments = _positional(call.arguments, storages)
    least = least_moved(call.span.name, call.arguments, call.span.facts or {})
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    if least.read is not None:
        arguments["read"] = tensors[least.read]
    if least.product is not None:
        arguments |= {"inner": least.product.inner, "product": least.product.dtype}
        arguments["read"] = tuple(tensors[place] for place in least.product.operands)
    arguments["touched"] = tuple(tensors[place] for place in least.touched)
    outputs: tuple[Tensor, ...] = ()
    if least.written is not None:
        elements, dtype = least.written
        outputs = (storages.result((elements,), (1,), dtype, elements * ITEM_BYTES[dtype]),)
    return _Draft(f"inductor.{call.span.name}", arguments, outputs, ())
