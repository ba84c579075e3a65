"""An optimizer updates its state in many ops; one fused kernel would read and write everything once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from nearpeak.findings.engine import Waste, rule, wastes_of
from nearpeak.findings.loops import line_range
from nearpeak.findings.regions import launches_removed
from nearpeak.findings.step import Step
from nearpeak.findings.updates import SINGLE_OPS, UPDATE_FAMILIES, is_parameter, is_scalar, updates
from nearpeak.ops.op import SeenOptimizer
from nearpeak.ops.tensor import Tensor
from nearpeak.units import quantity, seconds

PASSES = 1.3
"""The least ratio of the traffic to one pass over the state; with momentum alone it is 1.6."""


@rule("unfused-optimizer", needs=["storages"])
def unfused_optimizer(step: Step) -> Iterator[Waste]:
    """Optimizer steps whose ops move far more than one pass over parameters, gradients and states."""
    of_tables: dict[int, float] = {}
    """The time of ops that goes away if large tables get sparse gradients."""
    for table in wastes_of(step, "dense-embedding-gradient"):
        for index, gain in table.gains.items():
            of_tables[index] = of_tables.get(index, 0.0) + gain
    for members in updates(step):
        if any(step.costs[index].family not in UPDATE_FAMILIES for index in members):
            continue
        passing = [index for index in members if any(len(tensor.shape) for tensor in step.ops[index].inputs)]
        passing = [index for index in passing if step.costs[index].family in ("pointwise", "optimizer")]
        reads, writes = step.border(passing)
        needed_bytes = sum(access.bytes for access in (*reads, *writes))
        moved_bytes = step.bytes(passing)
        alone = [index for index in passing if len(step.touches[index].writes) == 1]
        if not needed_bytes or (moved_bytes < PASSES * needed_bytes and len(alone) < SINGLE_OPS):
            continue
        took = step.seconds(passing)
        expected = step.pace * sum(step.measured[index].expected_s or 0.0 for index in passing)
        item_bytes = min(
            (tensor.item_bytes for index in passing for tensor in step.ops[index].inputs if tensor.elements > 1),
            default=4.0,
        )
        one_pass = step.expected_for_lists(
            reads,
            writes,
            item_bytes=item_bytes,
            kind="fused",
            # On a CPU, list kernels with 2-byte elements are further from the bandwidth.
            cpu_kind="aten._foreach_addcdiv_" if item_bytes >= 4 else "optimizer",
        )
        if expected <= one_pass:
            continue
        share = 1 - one_pass / expected
        made_at = _construction(step, members)
        gains = {index: share * (step.time(index) - of_tables.get(index, 0.0)) for index in passing}
        yield Waste(
            title="The optimizer goes over its state in many ops; a fused one does it in one pass.",
            op=passing[0],
            source=made_at,
            gains=gains,
            gone=launches_removed(step, members, one_pass),
            evidence=f"{len(passing)} ops of the update{_where(step, passing, made_at)} move "
            f"{quantity(moved_bytes, 'B')} in {seconds(took)}; the parameters, gradients and states that they read and "
            f"write are {quantity(needed_bytes, 'B')}"
            + (f"; {len(alone)} of the ops are on one tensor each." if len(alone) > len(passing) / 2 else "."),
            reasoning=f"Good kernels take {seconds(expected)} for these ops as they are, and {seconds(one_pass)} for "
            f"one pass over {quantity(needed_bytes, 'B')}; what the ops took shrinks as much.",
            remedy=_remedy(step, members),
        )


def _construction(step: Step, members: Sequence[int]) -> str:
    """The line that makes the optimizer, if that is where an option would fuse it."""
    optimizer = _optimizer(step, members)
    return "" if optimizer is None else step.line_that_writes(optimizer.name.rpartition(".")[2])


def _optimizer(step: Step, members: Sequence[int]) -> SeenOptimizer | None:
    """The one optimizer with options that an update is of."""
    inside = all(step.ops[index].phase == "optimizer" for index in members)
    seen = step.trace.optimizers if inside else ()
    return seen[0] if len(seen) == 1 and seen[0].options else None


def _where(step: Step, members: Sequence[int], source: str) -> str:
    lines = {step.ops[index].source for index in members} - {""}
    return f" ({line_range(sorted(lines))})" if len(lines) > 1 or (source and lines) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    """What an update does, by its dataflow."""

    name: str
    """The optimizer of torch's that computes this; "" if it is none that is known."""
    options: str = ""
    by_gradients: bool = True
    """Whether it reads gradients; an average of the parameters does not."""


_NOT_IN_KNOWN = ("sign", "sgn", "max", "maximum", "clamp", "clamp_min", "clamp_max", "where", "exp", "tanh")
"""Operators that none of the known updates has."""


def _recognize(step: Step, members: Sequence[int]) -> _Update:
    """The optimizer that an update is, by the tensors that it keeps and what they are made of.

    Adam keeps an average of the gradients and one of their squares, and divides by the root of that; RMSprop and
    Adagrad keep squares alone; SGD keeps at most an average. Weights decay apart from the gradient (AdamW) if something
    is computed of the parameters alone, and does not get into what is kept.
    """
    names = {_operator(step, index) for index in members}
    origins = _origins(step, members)
    if not origins.gradients:
        return _Update(name="", by_gradients=False)
    squares = {storage for storage, origin in origins.states.items() if "square" in origin}
    averages = set(origins.states) - squares
    count, rooted = max(1, len(origins.parameters)), not names.isdisjoint(("sqrt", "rsqrt"))
    if not names.isdisjoint(_NOT_IN_KNOWN) or (rooted and not squares):
        return _Update(name="")
    if len(squares) == len(averages) == count and rooted:
        coupled = any("parameter" in origin for origin in origins.states.values())
        return _Update(name="AdamW" if origins.decays and not coupled else "Adam", options="fused=True")
    if len(squares) == count and not averages and rooted:
        fading = any(_operator(step, index) in ("mul", "lerp") for index in members if _writes(step, index, squares))
        return _Update(name="RMSprop" if fading else "Adagrad", options="foreach=True")
    if not squares and len(averages) in (0, count):
        return _Update(name="SGD", options="momentum=..., fused=True" if averages else "fused=True")
    return _Update(name="")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origins:
    """What the tensors of an update are made of."""

    parameters: set[int]
    """Storages that it changes."""
    gradients: set[int]
    states: dict[int, set[str]]
    """For each storage that it keeps from step to step, what is written into it: of "parameter", "gradient", "square"
    and "state"."""
    decays: bool
    """Whether something is computed of parameters alone."""


def _origins(step: Step, members: Sequence[int]) -> _Origins:
    ops = step.ops
    written = {tensor.storage for index in members for tensor in ops[index].written if len(tensor.shape)}
    parameters = {storage for storage in written if is_parameter(step, storage)}
    states: dict[int, set[str]] = {storage: set() for storage in written - parameters if _outlives(step, storage)}
    gradients: set[int] = set()
    made_of: dict[int, set[str]] = {}
    """What is in a storage now."""
    decays = False

    def of(index: int, storage: int) -> set[str]:
        writer = step.flow.producers[index].get(storage)
        if storage in made_of:
            return made_of[storage]
        if is_parameter(step, storage):
            return {"parameter"}
        if writer is not None and ops[writer].phase == "backward":
            gradients.add(storage)
            return {"gradient"}
        if storage in states:
            return {"state"}
        if writer is None and not is_scalar(step, storage):  # from before the step
            gradients.add(storage)
            return {"gradient"}
        return set()

    for index in members:
        op = ops[index]
        whole = [tensor for tensor in op.inputs if len(tensor.shape)]
        origin: set[str] = set().union(*(of(index, tensor.storage) for tensor in whole))
        if _squares(step, index) and "gradient" in origin:
            target = set().union(*(of(index, tensor.storage) for tensor in op.tensors("self"))) if op.mutated else set()
            origin = (origin - {"gradient"}) | {"square"} | (target - {"gradient"})
        decays = decays or origin == {"parameter"}
        for tensor in op.written:
            if tensor.storage in states:
                states[tensor.storage] |= origin - {"state"}
                made_of[tensor.storage] = {"state"}
            elif tensor.storage in parameters:
                made_of[tensor.storage] = {"parameter"}
            else:
                made_of[tensor.storage] = origin
    for storage in gradients:
        states.pop(storage, None)
    return _Origins(parameters=parameters, gradients=gradients, states=states, decays=decays)


def _operator(step: Step, index: int) -> str:
    """The operator without its namespace, whether it is in place, and whether it is for lists."""
    return step.ops[index].packet.rpartition(".")[2].removeprefix("_foreach_").rstrip("_")


def _outlives(step: Step, storage: int) -> bool:
    known = step.trace.storages.get(storage)
    return (known is not None and known.kind != "intermediate") or storage in step.flow.results


def _writes(step: Step, index: int, storages: Collection[int]) -> bool:
    return any(storage in storages for storage in step.touches[index].writes)


def _squares(step: Step, index: int) -> bool:
    """Whether an op multiplies a tensor with itself."""
    op, name = step.ops[index], _operator(step, index)
    if name == "pow":
        return op.arguments.get("exponent") == 2
    factors = {"mul": ("self", "other"), "addcmul": ("tensor1", "tensor2")}.get(name)
    if factors is None:
        return name == "square"
    first, second = (op.arguments.get(argument) for argument in factors)
    return isinstance(first, Tensor) and isinstance(second, Tensor) and first.storage == second.storage


def _remedy(step: Step, members: Sequence[int]) -> str:
    optimizer = _optimizer(step, members)
    if optimizer is not None:
        option = "fused" if "fused" in optimizer.options else "foreach"
        return f"{optimizer.name}(parameters, lr=..., {option}=True)"
    seen = step.trace.optimizers if all(step.ops[index].phase == "optimizer" for index in members) else ()
    if len(seen) > 1:
        return (
            "fused=True for the optimizer, where it has it (Adam, AdamW, SGD, Adagrad of torch.optim); else "
            "foreach=True, or torch.compile(optimizer.step)"
        )
    update = _recognize(step, members)
    if update.name:
        return (
            f"torch.optim.{update.name}(parameters, lr=..., {update.options})  # its update is what these lines compute"
        )
    if not update.by_gradients:
        return "torch._foreach_lerp_(averages, parameters, 1 - decay)  # all of them in one call"
    if seen:
        return f"step = torch.compile(optimizer.step)  # {seen[0].name} has neither fused=True nor foreach=True"
    return (
        "update = torch.compile(update)  # a function of the lists of parameters, gradients and states; or the same\n"
        "# lines with torch._foreach_mul_, _foreach_addcmul_ and so on: one op for all parameters"
    )
