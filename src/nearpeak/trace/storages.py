"""`Storages`: tensors and arguments as plain data, with a number for every storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.multiprocessing.reductions import StorageWeakRef

from nearpeak.ops.op import Storage, StorageKind
from nearpeak.ops.tensor import Sparse, Tensor
from nearpeak.trace.objects import instance_attributes, keys_and_values


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor below the wrappers of `torch.func`'s `grad`, `vmap` and `jvp`; it has the memory."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


@contextmanager
def below_transforms() -> Iterator[None]:
    """Inside, tensors are created and converted as if no transform of `torch.func` ran: else they would be wrapped."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        yield
        return
    with temporarily_clear_interpreter_stack():
        yield


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor; None for one that has none of its own: sparse, not initialized yet, a wrapper."""
    try:
        return tensor.untyped_storage() if tensor.layout is torch.strided else None
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return None


def _sparse_values(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values that a sparse tensor stores; None for any other tensor."""
    try:
        if tensor.layout is torch.sparse_coo:
            with torch._C.DisableTorchFunction():
                return tensor._values()
        if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
            with torch._C.DisableTorchFunction():
                return tensor.values()
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        pass
    return None


_PLAIN = (int, float, bool, str, complex, type(None))
_DTYPES: dict[torch.dtype, str] = {}
_NAMES: dict[Any, str] = {}


_INTERMEDIATE: tuple[StorageKind, str] = ("intermediate", "")

View = tuple[int, int, tuple[int, ...], tuple[int, ...], int, torch.dtype, bool]
"""Address and bytes of the storage, shape, strides, offset, dtype, and the negative bit. An address stands for one
storage as long as a weak reference to the storage exists."""


KnownView = tuple[int, Tensor]
"""The layout id of a view (see `memo.layout_id`), and the view as plain data."""


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype: "bfloat16"."""
    name = _DTYPES.get(dtype)
    if name is None:
        name = _DTYPES[dtype] = str(dtype).removeprefix("torch.")
    return name


def setting_name(value: torch.device | torch.dtype | torch.layout | torch.memory_format) -> str:
    """The name of a setting: "cuda", "strided"."""
    name = _NAMES.get(value)
    if name is None:
        name = _NAMES[value] = value.type if isinstance(value, torch.device) else str(value).removeprefix("torch.")
    return name


def memory_address(tensor: torch.Tensor) -> int | None:
    """Where the storage of a tensor on a device begins; None for other tensors and for empty ones."""
    if tensor.device.type in ("cpu", "meta") or not tensor.numel():
        return None
    address: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]
    return address - int(tensor.storage_offset()) * tensor.element_size() if address else None


class Storages:
    """Numbers storages by identity.

    A weak reference to each keeps no data alive, but keeps the address that identifies the storage from being reused,
    so numbers are unique. `on_new` is called with each new number. Without `asks_device`, nothing is asked of the
    device's runtime. A CUDA graph works on memory, whichever tensors there are for it: `in_graph` finds its storages
    by the addresses of what they hold.
    """

    def __init__(
        self,
        on_new: Callable[[int, torch.UntypedStorage, StorageKind], None] | None = None,
        *,
        asks_device: bool = True,
    ) -> None:
        self._on_new = on_new
        self._asks_device = asks_device
        self.memory: dict[int, int] = {}
        """Where storages on a device begin in its memory, by number."""
        self._by_memory: dict[int, int] = {}
        """The storage that was seen last at each address."""
        self._graph_memory: set[int] = set()
        """Addresses that replayed graphs use."""
        self.on_input: Callable[[int, torch.Tensor], None] | None = None
        """Is called with each tensor from outside whose storage is used for the first time."""
        self.on_host: set[int] = set()
        """Storages of real tensors in host memory."""
        self.pinned: set[int] = set()
        self._numbers: dict[int, int] = {}
        self._references: list[StorageWeakRef | torch.UntypedStorage] = []
        self._known: dict[int, tuple[StorageKind, str]] = {}
        self._bytes: list[int] = []
        self._kinds: list[tuple[StorageKind, str]] = []
        self.views: dict[View, KnownView] = {}
        """The views of these storages that were used before."""

    def name(self, tensor: torch.Tensor, kind: StorageKind, name: str) -> None:
        """Names the storage of a tensor before its first use."""
        storage = storage_of(tensor)
        if storage is not None:
            self._references.append(StorageWeakRef(storage))
            self._known.setdefault(storage._cdata, (kind, name))
            number = self._numbers.get(storage._cdata)
            if number is not None and self.existed(number) and not self._kinds[number][1]:
                self._kinds[number] = self._known[storage._cdata]  # an op used it before its module was known

    def number(self, tensor: torch.Tensor, kind: StorageKind, storage: torch.UntypedStorage | None = None) -> int:
        """The number of a tensor's storage; `kind` is what it is if this is its first use."""
        storage = tensor.untyped_storage() if storage is None else storage
        address = storage._cdata
        size = storage.nbytes()
        number = self._numbers.get(address)
        if number is None:
            memory = memory_address(tensor) if self._on_new is not None else None
            self._references.append(StorageWeakRef(storage))
            if kind == "input" and memory in self._graph_memory:  # another tensor for what a graph wrote
                return self._numbers.setdefault(address, self._by_memory[memory])
            number = len(self._bytes)
            self._numbers[address] = number
            if memory is not None:
                self.memory[number] = memory
                self._by_memory[memory] = number
            self._bytes.append(size)
            if kind == "input" and isinstance(tensor, torch.nn.Parameter):
                kind = "parameter"
            self._kinds.append((kind, "") if kind == "intermediate" else self._known.get(address, (kind, "")))
            if kind != "intermediate" and self.on_input is not None:
                self.on_input(number, tensor)
            if self._on_new is not None:
                self._on_new(number, storage, self._kinds[number][0])
                if storage.device.type == "cpu":
                    self.on_host.add(number)
                    if self._asks_device and torch.cuda.is_initialized() and tensor.is_pinned():
                        self.pinned.add(number)
        elif size > self._bytes[number]:
            self._bytes[number] = size
        return number

    @property
    def count(self) -> int:
        """The number of storages."""
        return len(self._bytes)

    def bytes_of(self, number: int) -> int:
        """The size of a storage."""
        return self._bytes[number]

    def kind(self, number: int) -> StorageKind:
        """What a storage is."""
        return self._kinds[number][0]

    def existed(self, number: int) -> bool:
        """Whether a storage is older than the trace."""
        return self._kinds[number][0] != "intermediate"

    def used(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor's storage if an op has used it, else None."""
        tensor = innermost(tensor)
        storage = storage_of(tensor)
        if storage is None:
            return None
        number = self._numbers.get(storage._cdata)
        if number is None and self._graph_memory and (memory := memory_address(tensor)) in self._graph_memory:
            number = self._by_memory[memory]
        return number

    def same_memory(self, other: Storages) -> dict[int, int]:
        """The numbers here of storages that `other` numbers too, by their numbers there.

        Weak references of both keep the addresses of storages from being reused.
        """
        return {
            number: self._numbers[address] for address, number in other._numbers.items() if address in self._numbers
        }

    def in_graph(self, facts: Storage, memory: int | None) -> int:
        """The number of a storage that a replayed graph uses; a new one for what the graph allocates."""
        existed = facts.kind != "intermediate" and memory is not None
        number = self._by_memory.get(memory) if existed and memory is not None else None
        if number is None:
            number = len(self._bytes)
            self._bytes.append(int(facts.bytes))
            self._kinds.append((facts.kind, facts.name))
        if memory is not None:
            self._by_memory[memory] = number
            self._graph_memory.add(memory)
        return number

    def facts(self) -> dict[int, Storage]:
        """All storages by number."""
        return {
            number: Storage(bytes=float(size), kind=kind, name=name)
            for number, (size, (kind, name)) in enumerate(zip(self._bytes, self._kinds, strict=True))
        }

    def new(self, storage: torch.UntypedStorage, size: int) -> int:
        """The number of a storage that an op on fake tensors has just allocated."""
        number = len(self._bytes)
        self._numbers[storage._cdata] = number
        self._references.append(storage)  # a fake one, without memory
        self._bytes.append(size)
        self._kinds.append(_INTERMEDIATE)
        return number

    def tensor(self, tensor: torch.Tensor, kind: StorageKind) -> Tensor:
        """A tensor as plain data.

        A tensor without memory of its own counts as empty; a sparse one does so on the memory of its values. A nested
        one, whose rows have sizes of their own, counts as all its elements in a row.
        """
        dtype = dtype_name(tensor.dtype)
        storage = storage_of(tensor)
        if storage is None:
            values = _sparse_values(tensor)
            if values is not None and (memory := storage_of(values)) is not None:
                number = self.number(values, kind, memory)
                sparse = Sparse(stored=values.numel(), shape=tuple(tensor.shape))
                return Tensor(shape=(0,), strides=(1,), dtype=dtype, storage=number, sparse=sparse)
            self._bytes.append(0)
            self._kinds.append((kind, ""))
            if self._on_new is not None and tensor.device.type == "cpu":  # packed weights, for example
                self.on_host.add(len(self._bytes) - 1)
            return Tensor(shape=(0,), strides=(1,), dtype=dtype, storage=len(self._bytes) - 1)
        if tensor.is_nested:
            number = self.number(tensor, kind, storage)
            return Tensor(shape=(tensor.numel(),), strides=(1,), dtype=dtype, storage=number)
        return Tensor(
            shape=tuple(tensor.shape),
            strides=tensor.stride(),
            dtype=dtype,
            storage=self.number(tensor, kind, storage),
            offset=tensor.storage_offset(),  # type: ignore[arg-type]
        )

    def value(self, value: Any, kind: StorageKind) -> Any:
        """An argument as plain data."""
        if isinstance(value, torch.Tensor):
            return self.tensor(value, kind)
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, (list, tuple)):
            return tuple([self.value(item, kind) for item in value])
        if isinstance(value, dict):
            return tuple([(str(key), self.value(item, kind)) for key, item in value.items()])
        if isinstance(value, torch.device):
            return value.type
        if isinstance(value, torch.SymInt):
            return int(value)
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return str(value).removeprefix("torch.")
        return type(value).__name__  # a generator, a function of a higher-order operator


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors inside nested containers, dataclasses and model outputs included."""
    tensors: list[torch.Tensor] = []
    visited: set[int] = set()
    pending = [value]
    while pending:
        item = pending.pop()
        kind = type(item)
        if issubclass(kind, torch.Tensor):
            tensors.append(item)
        elif id(item) not in visited and not issubclass(kind, (type, torch.nn.Module)):
            visited.add(id(item))
            if issubclass(kind, dict):
                pending += reversed(keys_and_values(item)[1])
            elif issubclass(kind, (list, tuple, set)):
                pending += reversed(tuple(item))
            else:
                pending += reversed(list((instance_attributes(item) or {}).values()))
    return tensors
