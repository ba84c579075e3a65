"""`MemoryTracker`: when the storages of a live trace are allocated and freed.

A weak reference to the Python object of a storage reports its end: torch keeps the object for as long as the storage
lives, whoever owns it. If the object goes earlier, the storage is checked after every op from then on.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nearpeak.devices.backends import find_backend
from nearpeak.ops.lifetimes import Category, Lifetime, Lifetimes
from nearpeak.ops.op import Op, Storage, StorageKind
from nearpeak.trace.objects import named_tensors
from nearpeak.trace.state_snapshot import StateSnapshot
from nearpeak.trace.storages import innermost, storage_of, tensors_in

_BEFORE_TRACE = -1
_GRADIENT_ACCUMULATION_OPS = frozenset(
    f"aten.{name}"
    for name in ("detach.default", "add.Tensor", "add_.Tensor", "clone.default", "new_empty_strided.default")
)
"""Ops of autograd that accumulate a gradient into its leaf."""


class _StorageLifetime(weakref.ref[torch.UntypedStorage]):
    """A tracked storage; it is the weak reference itself, so that the callback knows which storage was freed."""

    __slots__ = ("address", "born", "bytes", "category", "died", "level")

    address: int
    born: int
    bytes: int
    category: Category
    died: int | None
    level: _DeviceUsage


class _DeviceUsage:
    """Bytes of the tracked storages on one device."""

    __slots__ = ("bytes", "device", "high", "levels", "peaks")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes = 0
        self.high = 0
        self.levels: dict[int, float] = {}
        self.peaks = _allocator_bytes(device, "peak")
        """Allocated and reserved bytes, as the allocator has them before the trace."""

    def note(self, op: int) -> None:
        """Reads the allocator at a new maximum of the storages; reading costs as much as an op on the host."""
        if self.bytes > self.high:
            self.high = self.bytes
            if self.peaks is not None:
                allocated = _allocator_bytes(self.device, "current")
                if allocated is not None:
                    self.levels[op] = allocated[0]


class MemoryTracker:
    """Tracks the storages of one live trace. The allocator's statistics are read, never reset."""

    def __init__(self) -> None:
        self._ops = 0
        self._by_number: dict[int, _StorageLifetime] = {}
        self._by_address: dict[int, _StorageLifetime] = {}
        self._references: list[StorageWeakRef] = []  # an address stays taken as long as something refers to it
        self._levels: dict[torch.device, _DeviceUsage] = {}
        self._finalized: list[_StorageLifetime] = []
        self._unreleased: list[_StorageLifetime] = []
        self._on_finalize = self._finalized.append
        self._left: dict[int, int] = {}
        """The addresses of what the ops allocated and is there at the end, by the numbers of the storages."""

    def note_storage(self, number: int, storage: torch.UntypedStorage, kind: StorageKind) -> None:
        """An op uses a storage for the first time; "intermediate" if it has just allocated it."""
        life = self._by_address.get(storage._cdata)
        if life is None:
            category: Category = "parameters" if kind in ("parameter", "buffer") else "activations"
            life = self._track(storage, self._ops if kind == "intermediate" else _BEFORE_TRACE, category)
        self._by_number[number] = life

    def note_module(self, module: torch.nn.Module) -> None:
        """Parameters, buffers and gradients take memory whether ops use them or not."""
        for _, parameter in named_tensors(module, "_parameters"):
            self._track_existing(parameter, "parameters")
            if parameter.grad is not None:
                self._track_existing(parameter.grad, "gradients")
        for _, buffer in named_tensors(module, "_buffers"):
            self._track_existing(buffer, "parameters")

    def note_op(self, op: Op) -> None:
        """An op has run; its results were noted before."""
        if self._finalized or self._unreleased:
            self._note_freed()
        for level in self._levels.values():
            if level.bytes > level.high:
                level.note(self._ops)
        self._ops += 1
        if op.phase == "backward" and op.name in _GRADIENT_ACCUMULATION_OPS:
            node: Any = torch._C._current_autograd_node()
            if getattr(node, "variable", None) is not None:
                for tensor in op.outputs:
                    life = self._by_number.get(tensor.storage)
                    if life is not None:
                        life.category = "gradients"

    def lifetimes(self, snapshot: StateSnapshot, storages: Mapping[int, Storage]) -> Lifetimes | None:
        """The storages of the device with the most bytes, of a CPU if there is no other. Ends the tracking."""
        self._note_freed()
        for leaf in snapshot.leaves():
            if isinstance(leaf, torch.nn.Parameter):
                self._track_existing(leaf, "parameters")
            if leaf.grad is not None:
                self._track_existing(leaf.grad, "gradients")
        for optimizer in snapshot.optimizers():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._track_existing(parameter, "parameters")
            for tensor in tensors_in(dict(optimizer.state)):
                self._track_existing(tensor, "optimizer")
        for number, life in self._by_number.items():
            life.bytes = max(life.bytes, int(storages[number].bytes))  # it may have grown
        lifetimes = list(self._by_address.values())
        self._left = {
            number: life.address
            for number, life in self._by_number.items()
            if life.born != _BEFORE_TRACE and life.died is None
        }
        self._by_number.clear()
        self._by_address.clear()  # without references no callback runs from here on
        return self._of_one_device(lifetimes)

    def freed_since(self) -> frozenset[int]:
        """The storages that were there when the tracking ended, and are gone by now."""
        return frozenset(number for number, address in self._left.items() if torch.UntypedStorage._expired(address))

    def _of_one_device(self, lifetimes: list[_StorageLifetime]) -> Lifetimes | None:
        sums: dict[torch.device, int] = {}
        for life in lifetimes:
            sums[life.level.device] = sums.get(life.level.device, 0) + life.bytes
        sums.pop(torch.device("meta"), None)
        if not sums:
            return None
        device = max(sums, key=lambda candidate: (candidate.type != "cpu", sums[candidate]))
        level = self._levels[device]
        peaks = level.peaks
        if peaks is not None and peaks[0] < max(level.levels.values(), default=0.0):
            peaks = _allocator_bytes(device, "peak")  # the statistics were reset recently
        return Lifetimes(
            device=str(device),
            capacity_bytes=_device_capacity(device),
            lives=tuple(
                Lifetime(bytes=float(life.bytes), born=life.born, died=life.died, category=life.category)
                for life in lifetimes
                if life.level is level
            ),
            levels=level.levels,
            peak_bytes=None if peaks is None else peaks[0],
            reserved_bytes=None if peaks is None else peaks[1],
        )

    def _track(self, storage: torch.UntypedStorage, born: int, category: Category) -> _StorageLifetime:
        device = storage.device
        level = self._levels.get(device)
        if level is None:
            level = self._levels[device] = _DeviceUsage(device)
        life = _StorageLifetime(storage, self._on_finalize)
        life.address = storage._cdata
        life.born = born
        life.bytes = storage.nbytes()
        life.category = category
        life.died = None
        life.level = level
        level.bytes += life.bytes
        self._by_address[life.address] = life
        self._references.append(StorageWeakRef(storage))
        return life

    def _track_existing(self, tensor: torch.Tensor, category: Category) -> None:
        for part in _memory_tensors(innermost(tensor)):
            storage = storage_of(part)
            if storage is None:
                continue
            life = self._by_address.get(storage._cdata)
            if life is None:
                self._track(storage, _BEFORE_TRACE, category)
            elif life.category == "activations" or category == "parameters":
                life.category = category

    def _note_freed(self) -> None:
        """Notes what was freed since the op before, during which it was still there."""
        last = self._ops - 1
        gone, self._unreleased = [*self._finalized, *self._unreleased], []
        self._finalized.clear()
        for life in gone:
            if torch.UntypedStorage._expired(life.address):
                life.died = last
                life.level.bytes -= life.bytes
            else:
                self._unreleased.append(life)


def _memory_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with memory behind a tensor: itself, or the inner tensors of a wrapper subclass."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        names: Iterable[str] = flatten()[0]
        for name in names:
            yield from _memory_tensors(getattr(tensor, name))
    else:
        yield tensor


def _allocator_bytes(device: torch.device, moment: str) -> tuple[float, float] | None:
    """Allocated and reserved bytes of torch's allocator, at the "current" moment or at the "peak"."""
    backend = find_backend(device)
    return None if backend is None else backend.allocator_bytes(device.index or 0, moment)


def _device_capacity(device: torch.device) -> float | None:
    backend = find_backend(device)
    return None if backend is None else backend.memory_capacity(device.index or 0)
