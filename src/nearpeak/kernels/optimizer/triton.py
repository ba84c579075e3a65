"""The Triton kernel of AdamW over many tensors in one launch, its launcher, and the tables of addresses that it reads.

Tables are written to the device without waiting for it, and kept while they are used: parameters and states are at the
same addresses in every step, gradients usually.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearpeak.kernels._runtime.launch import launch
from nearpeak.kernels._runtime.tuning import from_row, tuned

_HYPERPARAMETERS = [
    "lr", "decay", "beta1", "beta2", "one_less_beta1", "one_less_beta2", "log_beta1", "log_beta2", "eps",
    "correction1", "correction2",
]  # fmt: skip
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_NUMBERS_PER_LAUNCH = 16
"""Numbers that are arguments of one launch of `write_kernel`."""
_OFFSET = 2**48
"""Added to each of them: Triton would compile another kernel for a number that fits into 32 bits."""
_ready: set[torch.device] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWConfig:
    """The chunk of a tensor that a program has."""

    block: int
    """Elements."""
    warps: int


def heuristic(elements: int) -> AdamWConfig:
    """Smaller chunks for small models, so that every multiprocessor has one."""
    return AdamWConfig(block=2048, warps=8) if elements > 2**20 else AdamWConfig(block=1024, warps=4)


def candidates(elements: int) -> list[AdamWConfig]:
    """Configurations worth measuring for this many parameters in all."""
    return [
        AdamWConfig(block=block, warps=warps)
        for block in (512, 1024, 2048, 4096, 8192)
        for warps in (2, 4, 8, 16)
        if 4 <= block // (32 * warps) <= 32
    ]


@triton.jit
def _one_minus_exp(exponent):
    """1 - exp(exponent) for a negative exponent, without cancellation near 0: 1 - 0.999 has four digits in float32."""
    series = 1.0 + exponent / 5.0 * (1.0 + exponent / 6.0 * (1.0 + exponent / 7.0))
    series = 1.0 + exponent / 2.0 * (1.0 + exponent / 3.0 * (1.0 + exponent / 4.0 * series))
    return tl.where(exponent > -0.25, -exponent * series, 1.0 - tl.exp(exponent))


@triton.jit
def _pointers(address, offset, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(dtype), bitcast=False)
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + offset


@triton.jit
def _load(address, offset, inside, dtype: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        value = tl.load(_pointers(address, offset, dtype, ALIGNED), mask=inside, other=0.0)
    else:
        value = tl.load(_pointers(address, offset, dtype, ALIGNED))
    return value.to(tl.float32)


@triton.jit
def _store(address, offset, value, inside, dtype: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        tl.store(_pointers(address, offset, dtype, ALIGNED), value.to(dtype), mask=inside)
    else:
        tl.store(_pointers(address, offset, dtype, ALIGNED), value.to(dtype))


@triton.jit
def _update(
    param, grad, average, square, master, offset, inside,
    lr, decay, beta1, beta2, one_less_beta1, one_less_beta2, eps, correction1, correction2, factor,
    PARAM: tl.constexpr, GRAD: tl.constexpr, AVERAGE: tl.constexpr, SQUARE: tl.constexpr, MASTER: tl.constexpr,
    ALIGNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    gradient = _load(grad, offset, inside, GRAD, ALIGNED, MASKED) * factor
    if MASTER:
        value = _load(master, offset, inside, tl.float32, ALIGNED, MASKED)
    else:
        value = _load(param, offset, inside, PARAM, ALIGNED, MASKED)
    first = _load(average, offset, inside, AVERAGE, ALIGNED, MASKED)
    second = _load(square, offset, inside, SQUARE, ALIGNED, MASKED)
    # averages, weight decay, and the step
    first = beta1 * first + one_less_beta1 * gradient
    second = beta2 * second + one_less_beta2 * gradient * gradient
    value -= lr * decay * value
    value -= (lr / correction1) * (first / (tl.sqrt(second) / tl.sqrt(correction2) + eps))
    _store(average, offset, first, inside, AVERAGE, ALIGNED, MASKED)
    _store(square, offset, second, inside, SQUARE, ALIGNED, MASKED)
    _store(param, offset, value, inside, PARAM, ALIGNED, MASKED)
    if MASTER:
        _store(master, offset, value, inside, tl.float32, ALIGNED, MASKED)


@triton.jit(do_not_specialize=_HYPERPARAMETERS)
def adamw_kernel(
    states, gradients, chunks, tensors, lr_tensor, grad_scale, found_inf,
    lr, decay, beta1, beta2, one_less_beta1, one_less_beta2, log_beta1, log_beta2, eps, correction1, correction2,
    PARAM: tl.constexpr, GRAD: tl.constexpr, AVERAGE: tl.constexpr, SQUARE: tl.constexpr, MASTER: tl.constexpr,
    STEPS: tl.constexpr, MAXIMIZE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    wanted = True
    if found_inf is not None:
        wanted = tl.load(found_inf).to(tl.float32) == 0.0
    if wanted:
        # the tensor and the chunk of this program
        tensor = tl.load(chunks + 2 * program)
        begin = tl.load(chunks + 2 * program + 1).to(tl.int64) * BLOCK
        size = tl.load(states + tensor)
        param = tl.load(states + tensors + tensor)
        average = tl.load(states + 2 * tensors + tensor)
        square = tl.load(states + 3 * tensors + tensor)
        step = tl.load(states + 4 * tensors + tensor)
        master = tl.load(states + 5 * tensors + tensor)
        grad = tl.load(gradients + tensor)
        # a chunk has its own address, so that offsets in it fit into 32 bits
        param += begin * (PARAM.primitive_bitwidth // 8)
        average += begin * (AVERAGE.primitive_bitwidth // 8)
        square += begin * (SQUARE.primitive_bitwidth // 8)
        master += begin * 4
        grad += begin * (GRAD.primitive_bitwidth // 8)

        # hyperparameters, from the device if they are tensors
        lr = tl.cast(lr, tl.float32)
        if lr_tensor is not None:
            lr = tl.load(lr_tensor).to(tl.float32)
        correction1 = tl.cast(correction1, tl.float32)
        correction2 = tl.cast(correction2, tl.float32)
        if STEPS:
            number = tl.load(step.to(tl.pointer_type(tl.float32), bitcast=False))
            correction1 = _one_minus_exp(number * tl.cast(log_beta1, tl.float32))
            correction2 = _one_minus_exp(number * tl.cast(log_beta2, tl.float32))
        factor = 1.0
        if MAXIMIZE:
            factor = -1.0
        if grad_scale is not None:
            factor = factor / tl.load(grad_scale).to(tl.float32)
        decay = tl.cast(decay, tl.float32)
        beta1 = tl.cast(beta1, tl.float32)
        beta2 = tl.cast(beta2, tl.float32)
        one_less_beta1 = tl.cast(one_less_beta1, tl.float32)
        one_less_beta2 = tl.cast(one_less_beta2, tl.float32)
        eps = tl.cast(eps, tl.float32)

        offset = tl.arange(0, BLOCK)  # (BLOCK,)
        inside = offset < size - begin
        # full chunks without a mask, which would make all accesses narrow
        if begin + BLOCK <= size:
            _update(
                param, grad, average, square, master, offset, inside,
                lr, decay, beta1, beta2, one_less_beta1, one_less_beta2, eps, correction1, correction2, factor,
                PARAM, GRAD, AVERAGE, SQUARE, MASTER, ALIGNED, False,
            )  # fmt: skip
        else:
            _update(
                param, grad, average, square, master, offset, inside,
                lr, decay, beta1, beta2, one_less_beta1, one_less_beta2, eps, correction1, correction2, factor,
                PARAM, GRAD, AVERAGE, SQUARE, MASTER, ALIGNED, True,
            )  # fmt: skip


def adamw_step(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    master_params: Sequence[Tensor], steps: Sequence[Tensor],
    lr_tensor: Tensor | None, grad_scale: Tensor | None, found_inf: Tensor | None,
    step: float, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, maximize: bool,
    *, config: AdamWConfig | None = None,
) -> None:  # fmt: skip
    """Updates all tensors, with a launch for each combination of dtypes and another for those that are not aligned."""
    if lr_tensor is not None and params and lr_tensor.device != params[0].device:
        lr, lr_tensor = float(lr_tensor), None
    groups: dict[tuple[Any, ...], list[tuple[int, ...]]] = defaultdict(list)
    for index, param in enumerate(params):
        size = param.numel()
        if not size:
            continue
        grad, average, square = grads[index], exp_avgs[index], exp_avg_sqs[index]
        master = master_params[index].data_ptr() if master_params else 0
        number = steps[index].data_ptr() if steps else 0
        addresses = grad.data_ptr(), param.data_ptr(), average.data_ptr(), square.data_ptr()
        aligned = (master | addresses[0] | addresses[1] | addresses[2] | addresses[3]) % 16 == 0
        key = param.dtype, grad.dtype, average.dtype, square.dtype, aligned
        groups[key].append((addresses[0], size, *addresses[1:], number, master))
    floats = (
        lr, weight_decay, beta1, beta2, 1 - beta1, 1 - beta2, _log(beta1), _log(beta2), eps,
        -math.expm1(step * _log(beta1)), -math.expm1(step * _log(beta2)),
    )  # fmt: skip
    for key, rows in groups.items():
        device = params[0].device
        columns = tuple(zip(*rows, strict=True))
        total = sum(columns[1])
        chosen = config or from_row(tuned("adamw", total, device), AdamWConfig) or heuristic(total)
        block = chosen.block
        states, chunks, programs = _state_tables.get((device, block, columns[1:]), device, _make_state_table)
        (gradients,) = _gradient_tables.get((device, columns[0]), device, _make_gradient_table)
        *dtypes, aligned = key
        launch(
            adamw_kernel, (programs, 1, 1), states, gradients, chunks, len(rows), lr_tensor, grad_scale, found_inf,
            *floats, *(_TYPES[dtype] for dtype in dtypes), bool(master_params), bool(steps), maximize, aligned, block,
            warps=chosen.warps,
        )  # fmt: skip
    torch.autograd.graph.increment_version([*params, *exp_avgs, *exp_avg_sqs, *master_params])


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf


def _make_state_table(key: tuple[Any, ...]) -> tuple[Tensor, Tensor, int]:
    """The sizes and addresses of tensors, the tensor and chunk of each program, and the number of programs."""
    device, block, columns = key
    tensors = len(columns[0])
    states = upload([number for column in columns for number in column], device)
    programs = sum(triton.cdiv(size, block) for size in columns[0])
    counts = (states[:tensors] + (block - 1)) // block
    tensor = torch.repeat_interleave(torch.arange(tensors, device=device), counts, output_size=programs)
    part = torch.arange(programs, device=device) - (counts.cumsum(0) - counts)[tensor]
    return states, torch.stack([tensor, part], 1).to(torch.int32), programs


def _make_gradient_table(key: tuple[Any, ...]) -> tuple[Tensor]:
    device, addresses = key
    return (upload(addresses, device),)


class TableCache:
    """The tables that were used last, by their contents. A table that a CUDA graph may use is never dropped."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[Hashable, tuple[int, Any]] = OrderedDict()
        self._recorded: dict[Hashable, Any] = {}

    def get(self, key: Hashable, device: torch.device, make: Callable[[Any], Any]) -> Any:
        """The result of `make(key)`, from the cache if possible."""
        recording = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        entry = self._entries.get(key)
        if recording:
            if entry is None:
                return make(key)  # in the graph's memory, and written by each replay: useless outside
            self._recorded[key] = entry
            return entry[1]
        if entry is not None and entry[0] == stream:
            self._entries.move_to_end(key)
            return entry[1]
        # a table belongs to one stream: its memory may only be freed in the order of the stream that used it
        table = make(key)
        self._entries[key] = stream, table
        self._entries.move_to_end(key)
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)
        return table


def upload(numbers: Sequence[int], device: torch.device) -> Tensor:
    """64-bit numbers on the device, without waiting for it."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.int64)
    if not torch.cuda.is_current_stream_capturing():
        table = torch.tensor(numbers, dtype=torch.int64).pin_memory().to(device, non_blocking=True)
        if device not in _ready:  # compiles the kernel, which could not be loaded while a graph is recorded
            write_table(table[:1], numbers[:1])
            _ready.add(device)
        return table
    table = torch.empty(len(numbers), dtype=torch.int64, device=device)
    write_table(table, numbers)
    return table


def write_table(table: Tensor, numbers: Sequence[int]) -> None:
    """Writes numbers as arguments of launches, which a CUDA graph records; host memory could be gone at a replay."""
    for offset in range(0, len(numbers), _NUMBERS_PER_LAUNCH):
        arguments = [number + _OFFSET for number in numbers[offset : offset + _NUMBERS_PER_LAUNCH]]
        arguments += [_OFFSET] * (_NUMBERS_PER_LAUNCH - len(arguments))
        launch(write_kernel, (1, 1, 1), table, offset, len(numbers), *arguments, _OFFSET, warps=1)


@triton.jit
def _write_number(table, offset, end, number, ABOVE: tl.constexpr):
    if offset < end:
        tl.store(table + offset, number - ABOVE)


@triton.jit(do_not_specialize=["offset", "end", *(f"n{index}" for index in range(16))])
def write_kernel(
    table, offset, end, n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11, n12, n13, n14, n15, ABOVE: tl.constexpr
):  # fmt: skip
    _write_number(table, offset, end, n0, ABOVE)
    _write_number(table, offset + 1, end, n1, ABOVE)
    _write_number(table, offset + 2, end, n2, ABOVE)
    _write_number(table, offset + 3, end, n3, ABOVE)
    _write_number(table, offset + 4, end, n4, ABOVE)
    _write_number(table, offset + 5, end, n5, ABOVE)
    _write_number(table, offset + 6, end, n6, ABOVE)
    _write_number(table, offset + 7, end, n7, ABOVE)
    _write_number(table, offset + 8, end, n8, ABOVE)
    _write_number(table, offset + 9, end, n9, ABOVE)
    _write_number(table, offset + 10, end, n10, ABOVE)
    _write_number(table, offset + 11, end, n11, ABOVE)
    _write_number(table, offset + 12, end, n12, ABOVE)
    _write_number(table, offset + 13, end, n13, ABOVE)
    _write_number(table, offset + 14, end, n14, ABOVE)
    _write_number(table, offset + 15, end, n15, ABOVE)


_state_tables = TableCache(64)
_gradient_tables = TableCache(8)
