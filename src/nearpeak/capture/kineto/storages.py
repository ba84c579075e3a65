"""Which memory a tensor of a file has: the file does not say, so the choice is the one that keeps the bound a bound.

The profiler writes shapes, strides and dtypes, and no addresses. What follows from these alone:

* A result of an op has memory of its own, unless the operator returns a view or its own argument.
* An argument is either the result of an earlier op, views included, or was there before: so it looks exactly like a
  tensor that the trace has seen, or it is new. Of all that look like it, the one that was used last is taken. If it
  was another one, that has been out of use for longer, and less of it is in the cache: no byte is charged that may
  come from there.
* Arguments of one op that look the same, or like each other's transpose, are taken to be one tensor, since `x * x`
  and `x @ x.T` cannot be told from `x * y`. Only an argument that the op writes, and the members of one list of a
  `_foreach_` or `_fused_` op, are taken to be separate.
* Compiled code looks at its buffers with other shapes, and does not say so. After its first kernel, a tensor is
  compared by dtype and number of elements; one with gaps, by whether it fits into the other.
* What looks like nothing seen before, after an op of unknown results, may be one of these results: it is noted there.

The other choice, `likely`, takes the arguments of an op for different tensors where that is possible. It comes nearer
to what ran, and is no longer certain to be a bound.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from nearpeak.capture.kineto.schemas import Parameter
from nearpeak.capture.kineto.tensors import Seen
from nearpeak.work.op import Storage, StorageKind
from nearpeak.work.tensor import ITEM_BYTES, Tensor

_LOOK_BACK = 1000
"""Storages to look at for one that a tensor with gaps can lie in."""


@dataclass(slots=True)
class _Known:
    bytes: float
    kind: StorageKind
    looks: list[Hashable]


class Storages:
    """Numbers the storages of a trace, op by op."""

    def __init__(self, *, likely: bool = False) -> None:
        self._likely = likely
        self.results: set[int] = set()
        """Storages that were there before and that an op writes."""
        self.unexplained: list[Tensor] = []
        """New tensors since this list was last taken, which an op of unknown results may have made."""
        self._known: list[_Known] = []
        self._by_look: dict[Hashable, OrderedDict[int, None]] = {}
        self._by_use: OrderedDict[int, None] = OrderedDict()
        self._before: dict[str, list[Tensor]] = {}
        self._dtypes: dict[Hashable, dict[str, None]] = {}
        self._compiled = False
        self._unknown = False

    def dtype_of(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> str | None:
        """The dtype of a member of a list, which the file does not say: the smallest of those that look like it."""
        seen = self._dtypes.get((shape, strides)) or self._dtypes.get(shape)
        return min(seen, key=lambda dtype: ITEM_BYTES[dtype]) if seen else None

    def arguments(
        self, tensors: Sequence[tuple[Parameter, Seen]], *, lists_differ: bool, results_known: bool
    ) -> tuple[Tensor, ...]:
        """The tensors of one op with their storages, in order. All of them have a dtype by now."""
        chosen: dict[Hashable, int] = {}
        taken: set[int] = set()
        places: dict[str, int] = {}
        found = []
        for parameter, seen in tensors:
            place = places.get(parameter.name, -1) + 1
            places[parameter.name] = place
            alike: Hashable = (*_shape_of_memory(seen), place if lists_differ else 0)
            same = None if parameter.mutated else chosen.get(alike)
            storage = None if self._likely else same
            if storage is None:
                storage = None if parameter.name == "out" else self._last_like(seen, taken)
                if storage is None:
                    storage = same
                if storage is None:
                    # One that looks like an argument that this op writes may be another part of its memory.
                    part = not lists_differ and next(self._alike(seen), None) is not None
                    storage = self._new(seen, _span(seen), "intermediate" if part or parameter.name == "out" else None)
                taken.add(storage)
                if not parameter.mutated:
                    chosen[alike] = storage
            tensor = self._tensor(seen, storage, 0)
            self._use(storage, seen)
            if parameter.mutated and self._known[storage].kind != "intermediate":
                self.results.add(storage)
            found.append(tensor)
        if not results_known:
            self._unknown = True
        return tuple(found)

    def compiled(self) -> None:
        """From here on buffers are looked at with other shapes."""
        self._compiled = self._unknown = True

    def view(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, offset: int, storage: int) -> Tensor:
        """A result that has the memory of an argument."""
        seen = Seen(shape, strides, dtype)
        known = self._known[storage]
        known.bytes = max(known.bytes, _span(seen))  # an `out` that was resized
        self._use(storage, seen)
        return self._tensor(seen, storage, offset)

    def result(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, size: float) -> Tensor:
        """A result with memory of its own."""
        seen = Seen(shape, strides, dtype)
        return self._tensor(seen, self._new(seen, size, "intermediate"), 0)

    def before(self, dtype: str) -> list[Tensor]:
        """The tensors of this dtype that were there before, as they were seen first."""
        return [*self._before.get(dtype, ())]

    def facts(self) -> dict[int, Storage]:
        """All storages by number."""
        return {number: Storage(bytes=known.bytes, kind=known.kind) for number, known in enumerate(self._known)}

    def _last_like(self, seen: Seen, taken: set[int]) -> int | None:
        for storage in self._alike(seen):
            if storage not in taken:
                return storage
        return None

    def _alike(self, seen: Seen) -> Iterator[int]:
        """Storages that may hold it, the last used one first."""
        if not self._compiled:
            yield from reversed(self._by_look.get(seen, ()))
            return
        span = _span(seen)
        if math.prod(seen.shape) * ITEM_BYTES[str(seen.dtype)] >= span:
            yield from reversed(self._by_look.get(_amount(seen), ()))
            return
        for count, storage in enumerate(reversed(self._by_use)):
            if count == _LOOK_BACK:
                return
            known = self._known[storage]
            if known.bytes >= span and any(isinstance(look, Seen) and look.dtype == seen.dtype for look in known.looks):
                yield storage

    def _new(self, seen: Seen, size: float, kind: StorageKind | None) -> int:
        number = len(self._known)
        explained = kind is not None
        if kind is None:
            kind = "intermediate" if self._unknown else "input"
        self._known.append(_Known(size, kind, []))
        self._use(number, seen)
        if kind != "intermediate":
            self._before.setdefault(str(seen.dtype), []).append(self._tensor(seen, number, 0))
        if self._unknown and not explained:
            self.unexplained.append(self._tensor(seen, number, 0))
        return number

    def _use(self, storage: int, seen: Seen) -> None:
        known = self._known[storage]
        for look in (seen, _amount(seen)):
            if look not in known.looks:
                known.looks.append(look)
                self._by_look.setdefault(look, OrderedDict())[storage] = None
        for look in known.looks:
            self._by_look[look].move_to_end(storage)
        self._by_use[storage] = None
        self._by_use.move_to_end(storage)
        dtype = str(seen.dtype)
        self._dtypes.setdefault((seen.shape, seen.strides), {})[dtype] = None
        self._dtypes.setdefault(seen.shape, {})[dtype] = None

    @staticmethod
    def _tensor(seen: Seen, storage: int, offset: int) -> Tensor:
        return Tensor(shape=seen.shape, strides=seen.strides, dtype=str(seen.dtype), storage=storage, offset=offset)


def _amount(seen: Seen) -> Hashable:
    return seen.dtype, math.prod(seen.shape)


def _span(seen: Seen) -> float:
    """Bytes from its first element to its last."""
    if 0 in seen.shape:
        return 0.0
    last = sum((size - 1) * abs(stride) for size, stride in zip(seen.shape, seen.strides, strict=True))
    return (last + 1) * ITEM_BYTES[str(seen.dtype)]


def _shape_of_memory(seen: Seen) -> tuple[Hashable, ...]:
    """The same for a tensor and its transposes."""
    return seen.dtype, tuple(sorted((s, step) for s, step in zip(seen.shape, seen.strides, strict=True) if s != 1))
