"""A recurrent network runs step by step in Python, where one call of torch's runs all of its steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nearpeak.bound.kernel_models import kernel_constants, kernel_count
from nearpeak.bound.tiles import FACTORS, product_sizes
from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.loops import (
    Loop,
    batched_seconds,
    line_range,
    python_between_turns,
    replacement_claims,
)
from nearpeak.findings.step import Step
from nearpeak.findings.what_if import gemm_op, median_slowness
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor
from nearpeak.units import seconds

MIN_STEPS = 8
_CELL_FAMILIES = ("matrix", "pointwise", "movement", "creation", "view")
"""What a cell consists of: products, gates, and joining or storing their results."""
_CPU_BOTH_PASSES = 2.7
"""The time of an LSTM of oneDNN's forward and backward over that of its forward as it is estimated here: 2.1 to 3.2 for
8 x 64 x 64 to 64 x 64 x 128 (batch x inputs x hidden), by process time on an Intel Xeon."""

Kind = Literal["LSTM", "GRU", "RNN"]
_MODES: dict[Kind, int] = {"RNN": 1, "LSTM": 2, "GRU": 3}
"""As cuDNN's operator in torch numbers them; 1 has tanh."""
_GATES: dict[Kind, int] = {"RNN": 1, "LSTM": 4, "GRU": 3}
_ARTICLES: dict[Kind, str] = {"RNN": "An", "LSTM": "An", "GRU": "A"}
_FUSED_CELLS: dict[str, Kind] = {"aten._thnn_fused_lstm_cell": "LSTM", "aten._thnn_fused_gru_cell": "GRU"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recurrence:
    """A recurrent network: one run of a loop over its steps."""

    kind: Kind
    steps: int
    batch: int
    inputs: int
    hidden: int
    layers: int
    dtype: str
    core: frozenset[int]
    """Ops of one turn that need an earlier one, and that a later one needs."""
    products: tuple[int, ...]
    """Products of one turn with the input of that step alone."""


@rule("unrolled-recurrence", needs=["storages", "lines"])
def unrolled_recurrence(step: Step) -> Iterator[Waste]:
    """Loops whose turns are an LSTM, GRU or RNN cell with the same weights and the state of the turn before."""
    for loop in step.loops:
        if step.ops[loop.members[0]].phase != "forward":
            continue
        runs = [_recurrence(step, run) for run in loop.runs]
        known = [item for item in runs if item is not None]
        if len(known) < len(runs):
            continue
        forward, backward = loop.members, loop.backward_members
        members = [*forward, *backward]
        remaining_s = _remaining_seconds(step, loop, known, backward)
        gains, gone = replacement_claims(step, members, remaining_s)
        first = known[0]
        took = step.seconds(members)
        stretches = python_between_turns(step, loop)
        stretches_s = sum(cause.seconds for cause in stretches)
        turns = sum(item.steps for item in known)
        launched = sum(step.costs[index].family != "view" for index in members)
        lines = line_range([step.ops[index].source for index in loop.members])
        yield Waste(
            title=f"{_ARTICLES[first.kind]} {first.kind} runs step by step in Python: {first.steps} turns of a loop.",
            op=loop.runs[0][0][0],
            gains=gains,
            gone=gone,
            replaces=True,
            idle={"python": stretches_s} if stretches_s else {},
            causes=stretches,
            evidence=f"The loop at {lines} takes {turns} turns, {launched / turns:.0f} ops each"
            + (" with their backward pass" if backward else "")
            + (f" and {seconds(stretches_s)} between them" if stretches_s else "")
            + f": {seconds(took)} in {launched:,} ops of {seconds(took / max(1, launched))}. Each turn multiplies the "
            f"state of the turn before with the same weights, and has the gates of "
            f"{_ARTICLES[first.kind].lower()} {first.kind}.",
            reasoning=f"torch.nn.{first.kind} multiplies the inputs of all steps at once, and runs the steps in one "
            f"call: {seconds(remaining_s)}.",
            remedy=_remedy(step, first),
        )


def ops_inside_cells(step: Step) -> set[int]:
    """The ops of torch.nn.LSTMCell and GRUCell: products and gates at one line, which nobody can write otherwise."""
    groups: dict[tuple[str, str], list[int]] = {}
    for index, op in enumerate(step.ops):
        groups.setdefault((op.source, op.module), []).append(index)
    inside: set[int] = set()
    for members in groups.values():
        forward = [index for index in members if step.ops[index].phase == "forward"]
        if any(_is_product(step, index) for index in forward) and _kind(step, forward)[0] in ("LSTM", "GRU"):
            inside.update(members)
    return inside


def _recurrence(step: Step, run: Sequence[Sequence[int]]) -> _Recurrence | None:
    if len(run) < MIN_STEPS:
        return None
    turn, after = run[len(run) // 2], run[len(run) // 2 + 1]
    core = _core(step, run, turn)
    recurrent = [index for index in core if _is_product(step, index)]
    kind, states = _kind(step, core)
    if kind is None or not recurrent or any(step.costs[index].family not in _CELL_FAMILIES for index in core):
        return None
    weights, next_weights = (
        {_weight(step, index) for index in part if _is_product(step, index)} for part in (core, _core(step, run, after))
    )
    if weights != next_weights:
        return None
    products = tuple(
        index
        for index in turn
        if index not in core and _is_product(step, index) and core & set(step.flow.consumers[index])
    )
    hidden, rows = states.shape[-1], states.elements // states.shape[-1]
    widths = [step.ops[index].tensor(FACTORS[step.ops[index].packet][0]).shape[-1] for index in products]
    if not widths:  # input and state may be multiplied as one tensor
        joined = [index for index in core if step.ops[index].packet == "aten.cat"]
        parts = [
            tensor
            for index in joined
            for tensor in step.ops[index].inputs
            if _is_input(step, index, tensor, core, run[0][0], turn)
        ]
        widths = [tensor.shape[-1] for tensor in parts]
    if not widths:  # the next input comes from the state: no call can know it before
        return None
    activations = sum(_activated(step, index, "aten.tanh") for index in core)
    cells = sum(step.ops[index].packet in _FUSED_CELLS for index in core)
    per_layer = rows * hidden * (2 if kind == "LSTM" else 1)
    return _Recurrence(
        kind=kind,
        steps=len(run),
        batch=rows,
        inputs=widths[0],
        hidden=hidden,
        layers=cells or max(1, round(activations / per_layer)),
        dtype=states.dtype,
        core=core,
        products=products,
    )


def _core(step: Step, run: Sequence[Sequence[int]], turn: Sequence[int]) -> frozenset[int]:
    """The ops of a turn that need results of an earlier one, and that a later one needs."""
    first, start, end, last = run[0][0], turn[0], turn[-1], run[-1][-1]
    needing: set[int] = set()
    for index in turn:
        if any(first <= writer < start or writer in needing for writer in step.flow.producers[index].values()):
            needing.add(index)
    needed: set[int] = set()
    for index in reversed(turn):
        if any(end < reader <= last or reader in needed for reader in step.flow.consumers[index]):
            needed.add(index)
    return frozenset(needing & needed)


def _is_product(step: Step, index: int) -> bool:
    sizes = product_sizes(step.ops[index])
    return sizes is not None and sizes[0] == 1


def _weight(step: Step, index: int) -> tuple[int, int]:
    op = step.ops[index]
    weight = op.tensor(FACTORS[op.packet][1])
    return weight.storage, weight.offset


def _is_input(step: Step, index: int, tensor: Tensor, core: Collection[int], start: int, turn: Sequence[int]) -> bool:
    """Whether what an op of the core reads comes from outside of the loop, or from the input of the same turn."""
    writer = step.flow.producers[index].get(tensor.storage)
    return writer is None or writer < start or (writer in turn and writer not in core)


def _kind(step: Step, core: Collection[int]) -> tuple[Kind | None, Tensor]:
    """The kind of a cell by the sizes of its gates, and a tensor of the size of a state."""
    empty = Tensor(shape=(0,), strides=(1,), dtype="float32", storage=-1)
    for index in core:
        if step.ops[index].packet in _FUSED_CELLS:
            return _FUSED_CELLS[step.ops[index].packet], step.ops[index].outputs[0]
    squashed = sum(_activated(step, index, "aten.sigmoid") for index in core)
    tanh = [index for index in core if _activated(step, index, "aten.tanh")]
    total = sum(_activated(step, index, "aten.tanh") for index in tanh)
    if not tanh:
        return None, empty
    state = step.ops[max(tanh)].outputs[0]
    if not state.shape or not state.elements:
        return None, empty
    ratios: dict[float, Kind] = {0.0: "RNN", 1.5: "LSTM", 2.0: "GRU"}
    return ratios.get(squashed / total), state


def _activated(step: Step, index: int, packet: str) -> int:
    op = step.ops[index]
    return op.outputs[0].elements if op.packet in (packet, packet + "_") and op.outputs else 0


def _remaining_seconds(step: Step, loop: Loop, recurrences: Sequence[_Recurrence], backward: Sequence[int]) -> float:
    """The time of torch's networks, and of what else the turns do, for all steps at once."""
    lines = {step.ops[index].source for item in recurrences for index in (*item.core, *item.products)}
    kept = [index for index in (*loop.members, *backward) if step.ops[index].source not in lines]
    network_s = 0.0
    for item in recurrences:
        if step.machine.kind == "gpu":
            network_s += _cudnn_seconds(step, item, backward=bool(backward))
        else:
            network_s += _cpu_seconds(step, item, backward=bool(backward))
    if step.machine.kind == "cpu" and recurrences[0].kind != "LSTM":  # its gradient has the ops of the loop's
        network_s += step.seconds(index for index in backward if step.ops[index].source in lines)
    return network_s + batched_seconds(step, kept)


def _cudnn_seconds(step: Step, item: _Recurrence, *, backward: bool) -> float:
    """The time of cuDNN's network: of its kernels, or of the host that launches them if that takes longer."""
    numbers = iter(range(1, 1000))
    last = max(step.trace.storages, default=0)

    def tensor(*shape: int) -> Tensor:
        strides = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
        return Tensor(shape=shape, strides=strides, dtype=item.dtype, storage=last + next(numbers))

    rows = _GATES[item.kind] * item.hidden
    weights = tuple(
        tensor(rows, width)
        for layer in range(item.layers)
        for width in (item.inputs if layer == 0 else item.hidden, item.hidden)
    )
    state = tensor(item.layers, item.batch, item.hidden)
    data, out = tensor(item.steps, item.batch, item.inputs), tensor(item.steps, item.batch, item.hidden)
    arguments: dict[str, Any] = {"input": data, "weight": weights, "weight_stride0": 2, "hx": state, "cx": None}
    arguments |= {"mode": _MODES[item.kind], "hidden_size": item.hidden, "num_layers": item.layers}
    arguments |= {"batch_first": False, "bidirectional": False}
    ops = [Op(name="aten._cudnn_rnn.default", arguments=arguments, outputs=(out, state))]
    if backward:
        arguments = arguments | {"grad_output": out, "output": out, "output_mask": (True, True, True, True)}
        ops.append(Op(name="aten._cudnn_rnn_backward.default", arguments=arguments, outputs=(data, *weights)))
    constants = kernel_constants().constants
    launch_s = constants["host"]["launch"]
    return sum(max(step.expected(op) or 0.0, kernel_count(op, constants) * launch_s) for op in ops)


def _cpu_seconds(step: Step, item: _Recurrence, *, backward: bool) -> float:
    """The time on a CPU: products with all inputs at once, and in each step the product with the state and the cell.

    oneDNN runs an LSTM: its gates are fused, and the products of its steps, whose weights are packed once, are about as
    fast as one of all steps. Of others, torch runs the ops of the cell; this is their forward pass alone. Products are
    as much slower than expected as those of the loop.
    """
    recurrent = [index for index in item.core if _is_product(step, index)]
    slower = median_slowness(step, [*recurrent, *item.products])

    def at_once_s(index: int) -> float:
        _, m, n, k = product_sizes(step.ops[index]) or (1, 1, 1, 1)
        batched_s = step.expected(gemm_op(1, item.steps * m, n, k, dtype=item.dtype)) or 0.0
        return min(item.steps * step.time(index), batched_s * slower)

    inputs_s = sum(map(at_once_s, item.products))
    gates = [index for index in item.core if not _is_product(step, index)]
    if item.kind != "LSTM":
        return inputs_s + item.steps * step.seconds([*recurrent, *gates])
    forward_s = inputs_s + sum(map(at_once_s, recurrent)) + item.steps * step.expected_fused(gates)
    return _CPU_BOTH_PASSES * forward_s if backward else forward_s


def _remedy(step: Step, item: _Recurrence) -> str:
    layers = f", num_layers={item.layers}" if item.layers > 1 else ""
    names = "output, (h, c)" if item.kind == "LSTM" else "output, h"
    return (
        f"rnn = torch.nn.{item.kind}({item.inputs}, {item.hidden}{layers})  # with the weights of the cell\n"
        f"{names} = rnn(x)  # x: {item.steps} x {item.batch} x {item.inputs}; all steps in one call"
        + (", by cuDNN" if step.machine.kind == "gpu" else "")
    )
