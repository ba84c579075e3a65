"""`KnownValues`: the values of small tensors in a trace on fake tensors, so that code can branch on them.

Fake tensors have no values. But what a model decides in Python depends on small tensors: whether a mask has padding,
how many patches an image has, a number drawn to skip a layer, how many tokens an expert gets. Of each small tensor
whose values follow from the arguments and from nothing large, the values are computed beside the trace. They are stored
by storage, so that views share them, and an op in place changes them for all views.

What depends on large tensors is assumed, if code asks for it: values are ordinary (finite, comparisons with limits do
not hold), integers that a large op gives as indices are spread evenly over their range, and integers from outside are
ones. Each line where code read a value that rests on an assumption is noted, and the trace says so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from nearpeak.errors import UsageError
from nearpeak.ops.tensor import Tensor
from nearpeak.trace.schema import OperatorSchema
from nearpeak.trace.storages import Storages, dtype_name

MAX_ELEMENTS = 1 << 16
"""Of a small tensor."""
MAX_READS = 10_000
"""How often one line may ask for an assumed truth value."""
BUILT_WITH = "nearpeak_value"
"""The entry in the `__dict__` of a small fake tensor with the values that it was built with, and its version then."""
_DISCRETE = frozenset({"bool", "uint8", "int8", "int16", "int32", "int64"})
_CPU = torch.device("cpu")
_INDEX_OPERATORS = ("aten.topk", "aten.sort", "aten.argsort", "aten.argmax", "aten.argmin", "aten.multinomial")
_COMPARISONS = ("aten.gt", "aten.lt", "aten.ge", "aten.le", "aten.eq", "aten.ne")
_HOLD = ("aten.all", "aten.eq", "aten.equal", "aten.isfinite")
"""Operators of truth values that hold for ordinary values; the others do not: `isnan`, `any`, `gt`, `ne`."""


class KnownValues:
    """The values within one trace. Tensors are given as torch has them, or as plain data."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._memory: dict[int, torch.UntypedStorage] = {}
        """Real memory by the number of the storage that it stands for."""
        self._copied: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        """The storages of copies that no op has used yet, with their real memory, by address."""
        self._assumed: set[int] = set()
        """Storages whose values rest on an assumption."""
        self._compared: set[int] = set()
        """Storages of masks that hold where values of large tensors are above, below or equal to something: a condition
        on all of them does not hold, but what a mask selects is taken to be everything."""
        self._uniform: dict[int, bool] = {}
        """The assumed value of all elements of large tensors of truth values."""
        self.assumptions: dict[str, str] = {}
        """What was assumed, by the line that asked for it."""
        self.guesses: list[str] = []
        """The lines of all truth values that were read and rest on an assumption, in order."""
        self._reads: Counter[str] = Counter()
        self.flipped: frozenset[int] = frozenset()
        """The guesses, by their place, for which the other value is taken."""

    def add(self, tensor: torch.Tensor, value: torch.Tensor, *, assumed: bool = False) -> None:
        """Notes the values of a fake tensor whose storage is new."""
        self._add(self._storages.tensor(tensor, "input"), value, assumed=assumed)

    def add_copy(self, copy: torch.Tensor, real: torch.Tensor) -> None:
        """Notes the values of a real tensor's fake copy, if it is small."""
        if (
            type(real) is torch.Tensor
            and real.numel() <= MAX_ELEMENTS
            and real.device.type == "cpu"
            and real.layout is torch.strided
            and not real.requires_grad
            and real.untyped_storage().nbytes() <= MAX_ELEMENTS * 8
        ):
            number = self._storages.used(copy)
            storage = copy.untyped_storage()
            if number not in self._memory and storage._cdata not in self._copied:
                with no_dispatch():
                    values = real.untyped_storage().clone()
                if number is None:  # numbered when an op uses it, as without known values
                    self._copied[storage._cdata] = (storage, values)
                else:
                    self._memory[number] = values

    def add_from_outside(self, number: int, tensor: torch.Tensor) -> None:
        """Notes the values that a fake tensor was copied or built with, unless they were changed since."""
        copied = self._copied.pop(tensor.untyped_storage()._cdata, None)
        if copied is not None:
            self._memory[number] = copied[1]
            return
        built = tensor.__dict__.get(BUILT_WITH) if type(tensor) is FakeTensor else None
        if built is not None and not tensor.is_inference() and tensor._version == built[1]:
            with no_dispatch():
                self._memory[number] = built[0].untyped_storage().clone()

    def value(self, tensor: Any) -> torch.Tensor | None:
        """The values of a fake tensor, in the memory that stands for its storage; None if they are not known."""
        if type(tensor) is not FakeTensor:
            return None
        if tensor.constant is not None:
            return tensor.constant
        if tensor.layout is not torch.strided or tensor.is_neg():
            return None
        plain = self._storages.tensor(tensor, "input")
        return self._view(plain, tensor.dtype) if self.knows((plain,)) else None

    def array(self, tensor: torch.Tensor) -> Any:
        """The values of a tensor, fake or real, as an array of NumPy's that is a copy; None if they are not known."""
        value = tensor if type(tensor) is torch.Tensor and not tensor.requires_grad else self.value(tensor)
        if value is None:
            return None
        with no_dispatch(), torch._C.DisableTorchFunction():
            return value.cpu().clone().numpy()

    def knows(self, tensors: Iterable[Tensor]) -> bool:
        """Whether the values of all these are known, or are integers from outside, which are assumed to be ones."""
        return all(tensor.storage in self._memory or self._assume_ones(tensor) for tensor in tensors)

    def follow(
        self,
        func: Callable[..., Any],
        schema: OperatorSchema,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        arguments: dict[str, Any],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> None:
        """Notes what an op has done to values. `arguments`, their tensors `inputs` and `outputs` are plain data."""
        if (
            self.knows(inputs)
            and all(tensor.elements <= MAX_ELEMENTS for tensor in outputs)
            and _is_reproducible(func, kwargs)
            and self._run(func, schema, args, kwargs, inputs, outputs)
        ):
            return
        if schema.mutated:
            self._forget(schema, arguments)
        for output in outputs:
            if output.dtype in _DISCRETE and output.storage not in self._memory and not _shares(output, inputs):
                self._assume(schema.name, arguments, inputs, output)

    def truth(self, tensor: FakeTensor, line: str) -> bool | int | float:
        """The value of a tensor of one element that code asks for; an assumption if it is not known."""
        value = self.value(tensor)
        plain = self._storages.tensor(tensor, "input")
        with no_dispatch():
            number: Any = value.item() if value is not None else self._uniform.get(plain.storage, 1.0)
        if value is not None and not (tensor.constant is None and plain.storage in self._assumed):
            return number  # type: ignore[no-any-return]
        if tensor.dtype is torch.bool:
            return self._guess(bool(number), line)
        number = number if value is not None or tensor.is_floating_point() else int(number)
        self._note(line, f"a value is {number}")
        return number  # type: ignore[no-any-return]

    def value_dependent(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], line: str) -> Any:
        """The result of an op whose shape depends on values; NotImplemented if nothing can be assumed about it.

        Call it where ops on fake tensors are not recorded.
        """
        packet = str(func).rpartition(".")[0]
        if packet == "aten.nonzero":
            return self._indices(args[0], line).movedim(0, -1)
        if packet == "aten.masked_select":
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            return args[0].new_empty(self._indices(args[1].expand(shape), line).shape[1])
        if packet == "aten.index":
            if not any(map(_is_mask, args[1])):
                return NotImplemented
            indices: list[Any] = []
            for index in args[1]:
                indices += self._indices(index, line).unbind() if _is_mask(index) else [index]
            return func(args[0], indices)
        if packet == "aten._pack_padded_sequence":
            return self._packed_sequence(func, *args, **kwargs)
        tensors = [item for item in _flat((*args, *kwargs.values())) if isinstance(item, torch.Tensor)]
        if all(self.value(tensor) is not None for tensor in tensors):
            with no_dispatch(), torch._C.DisableTorchFunction(), torch.no_grad():
                results = func(*map(self._real, args), **{key: self._real(item) for key, item in kwargs.items()})
            assumed = self._is_assumed(tensors)
            shapes = [tuple(item.shape) for item in _flat(results) if isinstance(item, torch.Tensor)]
            if assumed:
                self._note(line, f"{packet} gives {_shapes_text(shapes)}" if shapes else f"{packet} gives {results}")
            return self._as_fake(results, tensors[0], assumed=assumed)
        if packet in ("aten.equal", "aten.allclose"):
            return self._guess(True, line)
        if packet in _SIZES_OF_UNKNOWN:
            return _SIZES_OF_UNKNOWN[packet](lambda text: self._note(line, text), *args, **kwargs)
        return NotImplemented

    def _packed_sequence(self, func: Any, tensor: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
        """Padded sequences one after the other, without the padding; their lengths must be known."""
        value = self.value(lengths)
        if value is None:
            return NotImplemented
        with no_dispatch(), torch._C.DisableTorchFunction(), torch.no_grad():
            elements, batch_sizes = func(torch.empty(*tensor.shape[:2], 1), value, batch_first)
        packed = tensor.new_empty(elements.shape[0], *tensor.shape[2:])
        return packed, self._as_fake(batch_sizes, lengths, assumed=self._is_assumed([lengths]))

    def _is_assumed(self, tensors: Sequence[torch.Tensor]) -> bool:
        return any(self._storages.tensor(tensor, "input").storage in self._assumed for tensor in tensors)

    def _indices(self, mask: torch.Tensor, line: str) -> torch.Tensor:
        """The places of the nonzero elements, a row for each dimension; of all or none where they are not known."""
        number = self._storages.tensor(mask, "input").storage
        value = None if number in self._compared else self.value(mask)
        if value is not None:
            with no_dispatch(), torch._C.DisableTorchFunction():
                places = value.nonzero().t().contiguous()
            assumed = number in self._assumed
            if assumed:
                self._note(line, f"{places.shape[1]} of {mask.numel()} elements are nonzero")
            return self._as_fake(places, mask, assumed=assumed)  # type: ignore[no-any-return]
        count = mask.numel() if number in self._compared or self._uniform.get(number, True) else 0
        self._note(line, f"{count} of {mask.numel()} elements are nonzero")
        return torch.empty(mask.dim(), count, dtype=torch.int64, device=mask.device)

    def _as_fake(self, results: Any, like: torch.Tensor, *, assumed: bool) -> Any:
        """Results as fake tensors whose values are known."""
        if isinstance(results, torch.Tensor):
            copy = torch.empty_strided(results.shape, results.stride(), dtype=results.dtype, device=like.device)
            self._add(self._storages.tensor(copy, "intermediate"), results, assumed=assumed)
            return copy
        if isinstance(results, (list, tuple)):
            return type(results)([self._as_fake(item, like, assumed=assumed) for item in results])
        return results

    def _guess(self, usual: bool, line: str) -> bool:
        """A truth value that is assumed, or the other one if that has failed."""
        truth = usual if len(self.guesses) not in self.flipped else not usual
        self.guesses.append(line)
        self._reads[line] += 1
        if self._reads[line] > MAX_READS:
            raise UsageError(
                f"{line}: this condition was assumed to be {truth} {MAX_READS} times, as in a loop that waits for a "
                "value which fake tensors do not have. Pass live=True to run on real tensors."
            )
        self._note(line, f"a condition is {truth}")
        return truth

    def _note(self, line: str, text: str) -> None:
        self.assumptions.setdefault(line, text)

    def _view(self, plain: Tensor, dtype: torch.dtype) -> torch.Tensor:
        with no_dispatch(), torch._C.DisableTorchFunction():
            view = torch.empty(0, dtype=dtype)
            view.set_(self._memory[plain.storage], plain.offset, plain.shape, plain.strides)
            return view

    def _add(self, plain: Tensor, value: torch.Tensor, *, assumed: bool) -> None:
        last = sum((size - 1) * stride for size, stride in zip(plain.shape, plain.strides, strict=True))
        count = 0 if 0 in plain.shape else plain.offset + last + 1
        with no_dispatch(), torch._C.DisableTorchFunction():
            self._memory[plain.storage] = torch.zeros(count, dtype=value.dtype).untyped_storage()
            self._view(plain, value.dtype).copy_(value.detach())
        if assumed:
            self._assumed.add(plain.storage)

    def _run(
        self,
        func: Callable[..., Any],
        schema: OperatorSchema,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> bool:
        """Runs an op on the values; whether that was possible."""
        if schema.mutated and any(map(_has_constant, (*args, *kwargs.values()))):
            return False  # torch has changed its own constants already
        try:
            with no_dispatch(), torch._C.DisableTorchFunction(), torch.no_grad():
                if schema.name.startswith("aten.empty"):  # what is not written yet shall not differ between traces
                    results: Any = [torch.zeros(output.shape, dtype=getattr(torch, output.dtype)) for output in outputs]
                else:
                    results = func(*map(self._real, args), **{key: self._real(item) for key, item in kwargs.items()})
        except Exception:  # of a kind that has no values here: its results stay unknown
            return False
        flat = [item for item in _flat(results) if isinstance(item, torch.Tensor)]
        if len(flat) != len(outputs) or any(
            tuple(real.shape) != output.shape or dtype_name(real.dtype) != output.dtype
            for real, output in zip(flat, outputs, strict=True)
        ):
            return not outputs and not schema.mutated
        assumed = any(tensor.storage in self._assumed for tensor in inputs)
        for real, output in zip(flat, outputs, strict=True):
            if output.storage not in self._memory:
                self._add(output, real, assumed=assumed)
            elif assumed:
                self._assumed.add(output.storage)
        return True

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            known = self.value(value)
            if known is None:
                raise ValueError
            return known
        if type(value) in (list, tuple):
            return type(value)([self._real(item) for item in value])
        return _CPU if isinstance(value, torch.device) else value

    def _forget(self, schema: OperatorSchema, arguments: dict[str, Any]) -> None:
        for name in schema.mutated:
            for tensor in _plain_tensors({name: arguments.get(name)}):
                self._memory.pop(tensor.storage, None)
                self._uniform.pop(tensor.storage, None)

    def _assume_ones(self, tensor: Tensor) -> bool:
        if (
            tensor.dtype not in _DISCRETE
            or not self._storages.existed(tensor.storage)
            or self._storages.bytes_of(tensor.storage) > MAX_ELEMENTS * 8
        ):
            return False
        dtype = getattr(torch, tensor.dtype)
        with no_dispatch(), torch._C.DisableTorchFunction():
            count = self._storages.bytes_of(tensor.storage) // dtype.itemsize
            self._memory[tensor.storage] = torch.ones(count, dtype=dtype).untyped_storage()
        self._assumed.add(tensor.storage)
        return True

    def _assume(self, name: str, arguments: dict[str, Any], inputs: Sequence[Tensor], output: Tensor) -> None:
        """What an op with large inputs gives for ordinary values."""
        packet = name.rpartition(".")[0]
        truth = output.dtype == "bool" and self._usual_truth(packet, arguments, inputs)
        other = arguments.get("other")
        if packet in _COMPARISONS and not (isinstance(other, float) and math.isinf(other)):
            self._compared.add(output.storage)
        if output.elements > MAX_ELEMENTS:
            if output.dtype == "bool":
                self._uniform[output.storage] = truth
            return
        source = inputs[0] if inputs else output
        with no_dispatch(), torch._C.DisableTorchFunction():
            if output.dtype == "bool":
                value = torch.full(output.shape, truth)
            elif packet in _INDEX_OPERATORS and source.shape:
                dim = arguments.get("dim", -1)
                span = source.shape[dim if isinstance(dim, int) else -1]
                value = torch.arange(output.elements).remainder(max(1, span)).reshape(output.shape)
            elif packet in ("aten.sum", "aten.count_nonzero"):
                value = torch.full(output.shape, source.elements // max(1, output.elements))
            else:
                value = torch.ones(output.shape)
            self._add(output, value.to(getattr(torch, output.dtype)), assumed=True)

    def _usual_truth(self, packet: str, arguments: dict[str, Any], inputs: Sequence[Tensor]) -> bool:
        known = [self._uniform[tensor.storage] for tensor in inputs if tensor.storage in self._uniform]
        if len(known) == len(inputs) and known:
            if packet in ("aten.logical_not", "aten.bitwise_not"):
                return not known[0]
            if packet in ("aten.logical_and", "aten.bitwise_and", "aten.mul", "aten.any", "aten.all", "aten._to_copy"):
                return all(known)
            if packet in ("aten.logical_or", "aten.bitwise_or"):
                return any(known)
        other = arguments.get("other")
        if isinstance(other, float) and math.isinf(other):
            return packet == "aten.ne"
        return packet in _HOLD


def _unique(
    note: Callable[[str], None],
    tensor: torch.Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[torch.Tensor, ...]:
    count = tensor.numel()
    note(f"all {count} elements are different")
    inverse = tensor.new_empty(tensor.shape if return_inverse or return_counts else (0,), dtype=torch.int64)
    return tensor.new_empty(count), inverse, tensor.new_empty(count if return_counts else 0, dtype=torch.int64)


def _bincount(
    note: Callable[[str], None], tensor: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
) -> torch.Tensor:
    bins = max(minlength, 1)
    note(f"the values are below {bins}")
    dtype = torch.int64 if weights is None else weights.dtype if weights.dtype == torch.float32 else torch.float64
    return tensor.new_empty(bins, dtype=dtype)


def _repeats(note: Callable[[str], None], repeats: torch.Tensor, *, output_size: int | None = None) -> torch.Tensor:
    count = repeats.numel() if output_size is None else output_size
    if output_size is None:
        note("each element is repeated once")
    return torch.empty(count, dtype=torch.int64, device=repeats.device)


def _ctc_loss(
    note: Callable[[str], None],
    scores: torch.Tensor,
    targets: torch.Tensor,
    lengths: Any,
    target_lengths: Any,
    *_: Any,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    steps, batch = scores.shape[:2]
    if isinstance(target_lengths, torch.Tensor):
        longest = targets.shape[-1] if targets.ndim > 1 else math.ceil(targets.shape[0] / max(1, batch))
        note("all targets are as long as they can be")
    else:
        longest = max(target_lengths, default=0)
    return scores.new_empty(batch), scores.new_empty(batch, steps, 2 * longest + 1)


def _least_squares(
    note: Callable[[str], None], matrix: torch.Tensor, right: torch.Tensor, *_: Any, **options: Any
) -> tuple[torch.Tensor, ...]:
    rows, columns = matrix.shape[-2:]
    tail = right.shape[matrix.ndim - 1 :] if right.ndim >= matrix.ndim else ()
    batch = matrix.shape[:-2]
    driver = options.get("driver")
    left = rows > columns and driver in ("gels", "gelsd")  # the other drivers do not say what is left over
    if left:
        note("the matrices have full rank")
    residuals = matrix.new_empty((*batch, *(tail or (1,))) if left else (0,))
    rank = matrix.new_empty((0,) if driver == "gels" else batch, dtype=torch.int64)
    return matrix.new_empty((*batch, columns, *tail)), residuals, rank, matrix.new_empty(0)


_SIZES_OF_UNKNOWN: dict[str, Callable[..., Any]] = {
    "aten._ctc_loss": _ctc_loss,
    "aten._unique2": _unique,
    "aten.linalg_lstsq": _least_squares,
    "aten.bincount": _bincount,
    "aten.repeat_interleave": _repeats,
}
"""Results of operators on tensors whose values are not known, with the assumption that their size rests on."""


def _shapes_text(shapes: Sequence[tuple[int, ...]]) -> str:
    return " and ".join(" x ".join(map(str, shape)) or "a number" for shape in shapes)


def _is_reproducible(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the values of an op follow from its arguments, or are drawn by the process' own generator for a CPU."""
    if kwargs.get("generator") is not None or not isinstance(func, torch._ops.OpOverload):
        return False
    if func._opname.startswith(("set_", "resize", "_resize")):
        return False
    device = kwargs.get("device")
    return torch.Tag.nondeterministic_seeded not in func.tags or device is None or torch.device(device) == _CPU


def _has_constant(value: Any) -> bool:
    if type(value) in (list, tuple):
        return any(map(_has_constant, value))
    return type(value) is FakeTensor and value.constant is not None


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _shares(output: Tensor, inputs: Sequence[Tensor]) -> bool:
    return any(output.storage == tensor.storage for tensor in inputs)


def _plain_tensors(arguments: dict[str, Any]) -> list[Tensor]:
    return [item for value in arguments.values() for item in _flat(value) if isinstance(item, Tensor)]


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [inner for item in value for inner in _flat(item)]
    return [value]
