"""Each collective with its buffers, the call, and the check of its result, value by value.

Buffers hold small whole numbers that follow from the rank and the place of an element, so that every dtype holds the
sums exactly and every rank knows what it must receive without having been told. They repeat after `PERIOD` elements:
filling and checking are views with a period, and take no memory in proportion to the message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from nearpeak.comm.fit import bus_factor
from nearpeak.comm.world import Group
from nearpeak.errors import UsageError, did_you_mean

# torch 2.13 renamed two of them
all_gather_single = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
reduce_scatter_single = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
PERIOD = 11
CHECKED_AT_ONCE = PERIOD * 2**20
"""Elements; a check has a mask of one byte for each."""
DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
}
PLACES: dict[str, tuple[bool, ...]] = {
    "broadcast": (True,),
    "reduce": (True,),
    "all_reduce": (True,),
    "all_gather": (False, True),
    "reduce_scatter": (False, True),
    "all_to_all": (False,),
    "all_to_all_v": (False,),
    "send_recv": (False,),
    "barrier": (True,),
}
"""Whether torch offers an operation out of place (False) and in place (True)."""
REMARKS: dict[tuple[str, str], str] = {
    (
        "gloo",
        "reduce_scatter",
    ): "gloo has none: torch runs an all-reduce of a copy and keeps a part, which sends twice the bytes"
}
"""What a backend does in place of an operation that it does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operation to time."""

    op: str
    group: Group
    dtype: str
    in_place: bool
    size: int
    """The bytes that were asked for."""

    def __str__(self) -> str:
        where = "" if self.group.label == "world" else f" over {self.group.label}"
        return f"{self.op}{where}" if self.op == "barrier" else f"{self.op} of {self.size:,} bytes{where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A case with its buffers."""

    bytes: int
    """As nccl-tests counts them: what was asked for, in whole parts."""
    wire_bytes: float
    """Bytes that each link carries; for uneven parts, what the busiest rank sends or receives."""
    call: Callable[[], object]
    reset: Callable[[], object]
    """Writes the inputs, and something else into the outputs."""
    wrong_elements: Callable[[], int]
    """Elements of this rank's result that are not what they must be."""
    resets_each_call: bool
    """Whether a call overwrites its input: sums would grow without end."""
    waits: bool = False
    """Whether the host waits for the call also on a GPU, so that events say nothing about it."""


def check_dtype(name: str) -> None:
    """UsageError for a dtype that is not exchanged here."""
    if name not in DTYPES:
        raise UsageError(f"--dtype {name!r} is not known. {did_you_mean(name, DTYPES)}")


def buffers_needed(op: str) -> float:
    """Memory of a case over its bytes, check included."""
    return {"broadcast": 1.0, "reduce": 1.0, "all_reduce": 1.0, "barrier": 0.0}.get(
        op, 4.0 if op == "all_to_all_v" else 2.0
    )


def build(case: Case, rank: int, device: torch.device) -> Operation:
    """The operation of a case for the rank with this number in the world."""
    return _BUILDERS[case.op](_Maker(case=case, rank=rank, device=device))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Maker:
    """What all builders need."""

    case: Case
    rank: int
    device: torch.device

    @property
    def handle(self) -> Any:
        return self.case.group.handle

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.case.group.ranks

    @property
    def place(self) -> int:
        """Of this rank in its group."""
        return self.ranks.index(self.rank)

    def elements(self, parts: int) -> int:
        """Elements of the message, in so many equal parts."""
        return max(1, self.case.size // self.dtype.itemsize // parts) * parts

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.case.dtype]

    def empty(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=self.dtype, device=self.device)

    def _link_bytes(self, size: int) -> float:
        """What a link carries; nothing where there is one rank, whatever the factor is."""
        return size * bus_factor(self.case.op, len(self.ranks)) if len(self.ranks) > 1 else 0.0

    def operation(
        self,
        count: int,
        *,
        call: Callable[[], object],
        reset: Callable[[], object],
        wrong_elements: Callable[[], int],
        resets_each_call: bool = False,
        wire_bytes: float | None = None,
    ) -> Operation:
        size = count * self.dtype.itemsize
        return Operation(
            bytes=size,
            wire_bytes=self._link_bytes(size) if wire_bytes is None else wire_bytes,
            call=call,
            reset=reset,
            wrong_elements=wrong_elements,
            resets_each_call=resets_each_call,
        )


def _broadcast(maker: _Maker) -> Operation:
    count = maker.elements(1)
    buffer = maker.empty(count)
    root = maker.ranks[0]
    return maker.operation(
        count,
        call=lambda: distributed.broadcast(buffer, src=root, group=maker.handle),
        reset=lambda: fill(buffer, maker.rank),
        wrong_elements=lambda: count_wrong(buffer, [root]),
    )


def _reduce(maker: _Maker) -> Operation:
    count = maker.elements(1)
    buffer = maker.empty(count)
    root = maker.ranks[0]
    return maker.operation(
        count,
        call=lambda: distributed.reduce(buffer, dst=root, group=maker.handle),
        reset=lambda: fill(buffer, maker.rank),
        wrong_elements=lambda: count_wrong(buffer, maker.ranks) if maker.rank == root else 0,
        resets_each_call=True,
    )


def _all_reduce(maker: _Maker) -> Operation:
    count = maker.elements(1)
    buffer = maker.empty(count)
    return maker.operation(
        count,
        call=lambda: distributed.all_reduce(buffer, group=maker.handle),
        reset=lambda: fill(buffer, maker.rank),
        wrong_elements=lambda: count_wrong(buffer, maker.ranks),
        resets_each_call=True,
    )


def _all_gather(maker: _Maker) -> Operation:
    count = maker.elements(len(maker.ranks))
    output = maker.empty(count)  # (ranks x part,)
    parts = output.chunk(len(maker.ranks))
    mine = parts[maker.place] if maker.case.in_place else torch.empty_like(parts[0])

    def reset() -> None:
        output.fill_(PERIOD)
        fill(mine, maker.rank)

    return maker.operation(
        count,
        call=lambda: all_gather_single(output, mine, group=maker.handle),
        reset=reset,
        wrong_elements=lambda: sum(count_wrong(part, [rank]) for part, rank in zip(parts, maker.ranks, strict=True)),
    )


def _reduce_scatter(maker: _Maker) -> Operation:
    count = maker.elements(len(maker.ranks))
    buffer = maker.empty(count)  # (ranks x part,)
    part = count // len(maker.ranks)
    mine = buffer.chunk(len(maker.ranks))[maker.place] if maker.case.in_place else maker.empty(part)

    def reset() -> None:
        if not maker.case.in_place:
            mine.fill_(PERIOD)
        fill(buffer, maker.rank)

    return maker.operation(
        count,
        call=lambda: reduce_scatter_single(mine, buffer, group=maker.handle),
        reset=reset,
        wrong_elements=lambda: count_wrong(mine, maker.ranks, start=maker.place * part),
        resets_each_call=maker.case.in_place,
    )


def _all_to_all(maker: _Maker) -> Operation:
    count = maker.elements(len(maker.ranks))
    return _exchange(maker, [[count // len(maker.ranks)] * len(maker.ranks) for _ in maker.ranks])


def _all_to_all_v(maker: _Maker) -> Operation:
    return _exchange(maker, uneven_parts(maker.elements(1), len(maker.ranks)))


def uneven_parts(count: int, ranks: int) -> list[list[int]]:
    """Elements from each rank to each, as experts with unequal popularity get them: the first rank the most.

    Shares are those of Zipf's law, 1, 1/2, 1/3, ...; each rank sends `count` in all.

    >>> uneven_parts(110, 4)
    [[53, 26, 18, 13], [53, 26, 18, 13], [53, 26, 18, 13], [53, 26, 18, 13]]
    """
    whole = sum(1 / (place + 1) for place in range(ranks))
    bounds = [round(count * sum(1 / (place + 1) for place in range(end)) / whole) for end in range(ranks + 1)]
    return [[bounds[place + 1] - bounds[place] for place in range(ranks)] for _ in range(ranks)]


def busiest_bytes(parts: Sequence[Sequence[int]], itemsize: int) -> float:
    """Bytes that the busiest rank sends to others, or receives from them."""
    ranks = range(len(parts))
    sent = [sum(parts[rank]) - parts[rank][rank] for rank in ranks]
    received = [sum(row[rank] for row in parts) - parts[rank][rank] for rank in ranks]
    return float(max(*sent, *received) * itemsize)


def _exchange(maker: _Maker, parts: Sequence[Sequence[int]]) -> Operation:
    """An all-to-all with `parts[i][j]` elements from rank i of the group to rank j."""
    place = maker.place
    send, receive = list(parts[place]), [row[place] for row in parts]
    source, target = maker.empty(sum(send)), maker.empty(sum(receive))
    is_even = maker.case.op == "all_to_all"

    def reset() -> None:
        target.fill_(PERIOD)
        fill(source, maker.rank)

    def call() -> None:
        if is_even:
            distributed.all_to_all_single(target, source, group=maker.handle)
        else:
            distributed.all_to_all_single(target, source, receive, send, group=maker.handle)

    def wrong_elements() -> int:
        wrong = 0
        for index, part in enumerate(target.split(receive)):
            wrong += count_wrong(part, [maker.ranks[index]], start=sum(parts[index][:place]))
        return wrong

    return maker.operation(
        sum(send),
        call=call,
        reset=reset,
        wrong_elements=wrong_elements,
        wire_bytes=None if is_even else busiest_bytes(parts, maker.dtype.itemsize),
    )


def _send_recv(maker: _Maker) -> Operation:
    count = maker.elements(1)
    source, target = maker.empty(count), maker.empty(count)
    before, after = (maker.ranks[(maker.place + step) % len(maker.ranks)] for step in (-1, 1))

    def reset() -> None:
        target.fill_(PERIOD)
        fill(source, maker.rank)

    def call() -> None:
        works = distributed.batch_isend_irecv(
            [
                distributed.P2POp(distributed.isend, source, after, group=maker.handle),
                distributed.P2POp(distributed.irecv, target, before, group=maker.handle),
            ]
        )
        for work in works:
            work.wait()

    return maker.operation(count, call=call, reset=reset, wrong_elements=lambda: count_wrong(target, [before]))


def _barrier(maker: _Maker) -> Operation:
    devices = None if maker.device.index is None else [maker.device.index]
    return Operation(
        bytes=0,
        wire_bytes=0.0,
        call=lambda: distributed.barrier(group=maker.handle, device_ids=devices),
        reset=lambda: None,
        wrong_elements=lambda: 0,
        resets_each_call=False,
        waits=True,
    )


_BUILDERS: dict[str, Callable[[_Maker], Operation]] = {
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "all_to_all_v": _all_to_all_v,
    "send_recv": _send_recv,
    "barrier": _barrier,
}


def pattern(rank: int, start: int = 0) -> torch.Tensor:
    """The first `PERIOD` elements of a rank from the element `start` on: (PERIOD,) whole numbers below PERIOD."""
    return (torch.arange(start, start + PERIOD) * 7 + rank * 5 + rank // PERIOD) % PERIOD


def fill(tensor: torch.Tensor, rank: int, start: int = 0) -> None:
    """Writes the values of a rank."""
    period = pattern(rank, start).to(tensor.device, tensor.dtype)
    whole = tensor.numel() // PERIOD * PERIOD
    tensor[:whole].view(-1, PERIOD).copy_(period)
    tensor[whole:].copy_(period[: tensor.numel() - whole])


def count_wrong(tensor: torch.Tensor, ranks: Sequence[int], start: int = 0) -> int:
    """Elements of a tensor that are not the sum of those of `ranks`."""
    period = torch.stack([pattern(rank, start) for rank in ranks]).sum(0).to(tensor.device, tensor.dtype)
    slack = _rounding(tensor.dtype, len(ranks))
    wrong = 0
    for chunk in tensor.split(CHECKED_AT_ONCE):
        whole = chunk.numel() // PERIOD * PERIOD
        rows, rest = chunk[:whole].view(-1, PERIOD), chunk[whole:]
        for found, wanted in ((rows, period), (rest, period[: rest.numel()])):
            if slack:
                # a NaN is no number that is near enough
                wrong += int((~((found - wanted).abs() <= slack * wanted.abs())).sum())
            else:
                wrong += int((found != wanted).sum())
    return wrong


def _rounding(dtype: torch.dtype, ranks: int) -> float:
    """Relative error of a sum of so many values below PERIOD; 0 where the dtype holds it exactly."""
    if not dtype.is_floating_point:
        return 0.0
    epsilon = torch.finfo(dtype).eps
    is_exact = (PERIOD - 1) * ranks <= 2 / epsilon
    return 0.0 if is_exact else epsilon * math.ceil(math.log2(ranks) + 1)
