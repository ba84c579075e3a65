"""Whether a changed model computes what the original computes: outputs and gradients against a wide reference.

The reference is the original in float64, where it can run in that: casts to narrower types inside of it are widened
too. The original in its own precision has an error against it, which is its rounding, and the changed one may have
`OUTPUT_FACTOR` or `GRADIENT_FACTOR` times that and a few units in the last place. Inputs are the user's, and drawn ones
of other sizes: see `variants`.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from nearpeak.devices.process_state import preserve_random_state
from nearpeak.errors import UsageError, message_of
from nearpeak.fixes.arguments import preserve_module_state, undisturbed_stack
from nearpeak.fixes.record import Errors
from nearpeak.measure.statistics import median
from nearpeak.trace.interrupts import defer_signals

OUTPUT_FACTOR = 1.5
"""Rounding errors of large tensors vary little: another order of the same additions does not reach this."""
GRADIENT_FACTOR = 2.0
SMALL_FACTOR = 4.0
"""For tensors of few elements, whose rounding errors are one draw of a wide distribution."""
FEW_ELEMENTS = 512
FLOOR_UNITS = 4.0
"""Units in the last place of the dtype that an error may always have."""
VANISHING = 2.0**-23
"""Of the largest gradient, one unit in float32. Where large terms cancel, as behind a saturated softmax, what is left
has their rounding errors: units of the largest gradient. One that is smaller than a unit is judged beside it alone."""
STILL_VANISHING = 2.0**-12
"""Of the largest gradient: where one vanishes, that of the fixed model must stay below."""
LARGEST_NOISE = 0.05
"""Outputs that differ by more between two runs on the same batch cannot be compared."""
SPREAD_RATIO = 1.3
"""By which the spread of random results, as of dropout, may differ."""
ODD_LENGTH = 37
MOST_ROWS, MOST_POSITIONS = 2, 128
"""Of inputs that are compared with a wide reference."""
MOST_KEPT_BYTES = 2**33
"""Of results that are kept for the comparison of further fixes."""
SEED = 20_240_917
CHUNK = 2**24
"""Elements that are compared at a time."""
Scalar = Callable[[Any], Tensor]
Width = Literal["float64", "float32", "original"]
_NARROW = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Arguments to compare on, and how to run on them."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    training: bool | None = None
    """The mode of the module; None for that which it is in."""
    grad: bool = True
    autocast: bool = False
    series: int = 1
    """Calls in a row, with the rows of the inputs rotated: the results are those of all of them."""
    valid: Tensor | None = None
    """[rows, positions]: those whose results mean something. A query that sees no key, as padding to the left of a
    causal sequence, may have any result."""


class Widened(TorchDispatchMode):
    """Inside, every cast to a narrower floating-point type is one to this type: a reference has no early roundings."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widen(value: Any) -> Any:
            return self._dtype if isinstance(value, torch.dtype) and value in _NARROW else value

        named = {name: widen(value) for name, value in (kwargs or {}).items()}
        return func(*map(widen, args), **named)


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What a run gave: floating-point tensors of the output, and gradients by name."""

    outputs: dict[str, Tensor]
    """By their path in the output: "['logits']"."""
    gradients: dict[str, Tensor | None]

    @property
    def nbytes(self) -> int:
        """Bytes of memory behind them."""
        return sum(each.nbytes for each in (*self.outputs.values(), *self.gradients.values()) if each is not None)


def run(
    module: nn.Module,
    inputs: Inputs,
    *,
    scalar: Scalar | None = None,
    width: torch.dtype | None = None,
    seed: int = SEED,
) -> Results:
    """Outputs of a module and gradients of its parameters and inputs, from a scalar or from drawn cotangents.

    Random numbers are those of the seed, `grad` of the parameters is not touched, and the mode, buffers and attributes
    of modules and the random states are as before. `width` widens everything, for a reference.
    """
    args, kwargs = _own_inputs(inputs, width)
    with undisturbed_stack() as stack:
        stack.enter_context(preserve_random_state())
        stack.enter_context(preserve_module_state(module))
        stack.enter_context(in_mode(module, inputs.training))
        stack.enter_context(Widened(width) if width is not None else nullcontext())
        if inputs.autocast and width is None:
            stack.enter_context(torch.autocast(_device_of(module, args, kwargs).type, torch.bfloat16))
        torch.manual_seed(seed)
        with torch.set_grad_enabled(inputs.grad):
            earlier: dict[str, Tensor] = {}
            for number in range(1, inputs.series):
                turned, turned_kwargs = pytree.tree_map_only(Tensor, partial(_rotated, by=number), (args, kwargs))
                results = _by_path(module(*turned, **turned_kwargs))
                earlier |= {f"{path} of call {number}": each.detach().clone() for path, each in results.items()}
            output = module(*args, **kwargs)
            outputs = _by_path(output) | earlier
            if inputs.valid is not None:
                outputs, scalar = _where_valid(outputs, inputs.valid), None
            gradients: dict[str, Tensor | None] = {}
            if inputs.grad and any(tensor.requires_grad for tensor in outputs.values()):
                leaves: dict[str, Tensor] = {
                    name: each for name, each in module.named_parameters() if each.requires_grad
                }
                given = [each for each in floating((args, kwargs)) if each.requires_grad]
                leaves |= {f"input {place}": each for place, each in enumerate(given)}
                total = scalar(output) if scalar is not None else _weighted_sum(list(outputs.values()))
                values = torch.autograd.grad(total, list(leaves.values()), allow_unused=True) if leaves else ()
                gradients = dict(zip(leaves, values, strict=True))
    return Results(outputs={path: each.detach() for path, each in outputs.items()}, gradients=gradients)


def _rotated(tensor: Tensor, by: int) -> Tensor:
    """Other values that are as valid: those of other rows."""
    return tensor.roll(by, 0) if tensor.dim() else tensor


def _by_path(output: Any) -> dict[str, Tensor]:
    leaves, _ = pytree.tree_flatten_with_path(output)
    tensors = ((path, leaf) for path, leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return {pytree.keystr(path): leaf for path, leaf in tensors}


def _where_valid(outputs: dict[str, Tensor], valid: Tensor) -> dict[str, Tensor]:
    """The outputs that have a value for each position, with 0 where it means nothing."""
    shaped = {path: each for path, each in outputs.items() if each.shape[:2] == valid.shape}
    return {
        path: torch.where(valid.view(*valid.shape, *[1] * (each.dim() - 2)), each, 0) for path, each in shaped.items()
    }


@contextmanager
def in_mode(module: nn.Module, training: bool | None) -> Iterator[None]:
    """Inside, a module is in training or evaluation mode; afterwards each part of it is in its own again."""
    before = [(part, part.training) for part in module.modules()]
    try:
        if training is not None:
            module.train(training)
        yield
    finally:
        with defer_signals():
            for part, was in before:
                part.training = was


def floating(tree: Any) -> list[Tensor]:
    """The floating-point tensors of a tree."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _own_inputs(inputs: Inputs, width: torch.dtype | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs that a run may change: tensors detached, other objects such as caches copied."""
    memo: dict[int, Tensor] = {}

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return (
                leaf if leaf is None or isinstance(leaf, (int, float, str, bool, torch.dtype)) else copy.deepcopy(leaf)
            )
        if id(leaf) not in memo:
            wide = leaf.to(width) if width is not None and leaf.is_floating_point() else leaf
            memo[id(leaf)] = wide.detach().clone().requires_grad_(leaf.requires_grad)
        return memo[id(leaf)]

    args, kwargs = pytree.tree_map(own, (inputs.args, inputs.kwargs))
    return args, kwargs


def _weighted_sum(tensors: Sequence[Tensor]) -> Tensor:
    """A scalar whose gradient by each element of the outputs is a drawn one, the same for all precisions."""
    total: Tensor | None = None
    for tensor in tensors:
        if tensor.requires_grad:
            generator = torch.Generator(tensor.device).manual_seed(SEED)
            drawn = torch.randn(tensor.shape, generator=generator, device=tensor.device).to(tensor.dtype)
            # Positions that a model masks may be infinite, and have no gradient.
            part = (torch.where(tensor.isfinite(), tensor, 0) * drawn).sum()
            total = part if total is None else total + part
    assert total is not None
    return total


def _device_of(module: nn.Module, *trees: Any) -> torch.device:
    for tensor in itertools.chain(module.parameters(), pytree.tree_leaves(trees)):
        if isinstance(tensor, Tensor):
            return tensor.device
    return torch.device("cpu")


class Reference:
    """An original module with its wide copy, to compare others with."""

    def __init__(self, original: nn.Module, *, scalar: Scalar | None = None) -> None:
        """`original` must stay as it is while this lives: a copy of the user's."""
        self._original, self._scalar = original, scalar
        self.noise = 0.0
        """By which two runs of the original on the same inputs differ."""
        self.is_random = False
        """Whether results depend on the seed, as with dropout in training mode."""
        self._wide: dict[torch.dtype, nn.Module] = {}
        self._own: dict[str, float] = {}
        """The largest error of the original against a wide reference so far, by output and gradient."""
        self._no_room: dict[torch.dtype, int] = {}
        """Inputs of so many elements had no room in a wider precision."""
        self._batch: tuple[Inputs, Results, Width, Results] | None = None
        """The results on the first inputs, which every fix is compared on, if they are not too large to be kept."""

    def probe(self, inputs: Inputs) -> None:
        """Measures the noise of the original. UsageError where it is too large to compare anything."""
        scalar = self._scalar
        try:
            first = run(self._original, inputs, scalar=scalar)
        except Exception:  # the labels of a loss are of the whole batch
            scalar = None
            first = run(self._original, inputs)
        self.noise = _largest(first, run(self._original, inputs, scalar=scalar))
        if not self.noise <= LARGEST_NOISE:
            raise UsageError(
                f"Two runs of the model on the same batch and seed differ by {self.noise:.2g} of their norm: its "
                "results are not repeatable, and a change of it cannot be verified. Make them so "
                "(torch.use_deterministic_algorithms, no state that grows), or pass a smaller part of the model."
            )
        other_seed = run(self._original, inputs, scalar=scalar, seed=SEED + 1)
        self.is_random = _largest(first, other_seed) > 10 * self.noise + 1e-6

    def check(self, changed: nn.Module, inputs: Inputs, omits: Collection[str] = ()) -> list[Errors]:
        """The errors of a changed module beside those of the original. Empty if the original does not take the inputs.

        Where results are random, values are compared in evaluation mode, and in training mode the spread over seeds.
        `omits` has the names of outputs that the changed module leaves out by design.
        """
        if self.is_random and inputs.training is not False:
            spread = self._check_spread(changed, inputs)
            inputs = replace(inputs, training=False, name=f"{inputs.name}, without dropout")
            return [*spread, *self.check(changed, inputs, omits)]
        scalar = self._scalar
        if self._batch is not None and self._batch[0].name == inputs.name:
            _, original, width, wide = self._batch
        else:
            try:
                original = run(self._original, inputs, scalar=scalar)
            except Exception:  # inputs that were drawn need not suit the model, nor the labels of a loss
                try:
                    scalar = None
                    original = run(self._original, inputs)
                except Exception:
                    return []
            width, wide = self._reference(inputs, original, scalar)
            if scalar is self._scalar and self._batch is None and original.nbytes + wide.nbytes < MOST_KEPT_BYTES:
                self._batch = (inputs, original, width, wide)
        fixed = run(changed, inputs, scalar=scalar)
        return list(self._compare(inputs.name, width, wide, original, fixed, omits))

    def check_all(self, changed: nn.Module, inputs: Inputs, omits: Collection[str] = ()) -> list[Errors]:
        """The errors against the original itself, on inputs that are too large for a wide reference.

        Both round, and the original, which repeats itself bitwise, does not show by how much: each output and gradient
        may differ by `SMALL_FACTOR` times the largest error that the original has had in it so far.
        """
        if self.is_random:
            inputs = replace(inputs, training=False)
        original = run(self._original, inputs, scalar=self._scalar)
        fixed = run(changed, inputs, scalar=self._scalar)
        return list(self._compare(f"all of {inputs.name}", "original", original, original, fixed, omits))

    def _compare(
        self, name: str, width: Width, wide: Results, original: Results, fixed: Results, omits: Collection[str]
    ) -> Iterator[Errors]:
        """The worst of the outputs and the worst of the gradients."""
        missing = [
            key for key in original.outputs if key not in fixed.outputs and not any(omitted in key for omitted in omits)
        ]
        if missing or any(key not in original.outputs for key in fixed.outputs):
            yield Errors(what=f"outputs there are, {name}", original=0.0, fixed=1e30, allowed=0.0, reference=width)
            return
        outputs = {f"output{key if len(original.outputs) > 1 else ''}": (wide.outputs[key], value, fixed.outputs[key])
                   for key, value in original.outputs.items() if key in fixed.outputs}  # fmt: skip
        gradients = {}
        for key in dict.fromkeys([*original.gradients, *fixed.gradients]):  # a detached output has none
            three = [results.gradients.get(key) for results in (wide, original, fixed)]
            shape = next((each for each in three if each is not None), None)
            if shape is not None:
                filled = [torch.zeros_like(shape) if each is None else each for each in three]
                gradients[f"gradient of {key}"] = (filled[0], filled[1], filled[2])
        for group, factor in ((outputs, OUTPUT_FACTOR), (gradients, GRADIENT_FACTOR)):
            if not group:
                continue
            owns = {
                key: self._own_error(key, width, before, reference) for key, (reference, before, _) in group.items()
            }
            large = [owns[key] for key, (reference, _, _) in group.items() if reference.numel() >= FEW_ELEMENTS]
            # Of few elements the original may by chance be much nearer to the reference than its precision.
            typical = median(large) if large else self._narrowest()
            if width == "original":
                factor = SMALL_FACTOR
            sizes = {
                key: float(torch.linalg.vector_norm(reference, dtype=torch.float64))
                for key, (reference, _, _) in group.items()
                if group is gradients
            }
            largest = max(filter(math.isfinite, sizes.values()), default=0.0)
            judged = []
            for key, tensors in group.items():
                each = _judge(f"{key}, {name}", width, *tensors, owns[key], factor, typical, self.noise)
                size = sizes.get(key, 0.0)
                if not math.isfinite(size):
                    size = math.inf
                beside = STILL_VANISHING if size < VANISHING * largest else FLOOR_UNITS * VANISHING
                judged.append(replace(each, allowed=each.allowed + beside * largest / max(size, 1e-300)))
            yield max(judged, key=lambda each: each.fixed / max(each.allowed, 1e-300))

    def _own_error(self, key: str, width: Width, before: Tensor, reference: Tensor) -> float:
        """The error of the original in one output or gradient: against a wide reference, or the largest it had."""
        if width == "original":
            return self._own.get(key, 0.0)
        error = relative_error(before, reference)
        self._own[key] = max(error, self._own.get(key, 0.0))
        return error

    def _narrowest(self) -> float:
        dtypes = {each.dtype for each in self._original.parameters() if each.is_floating_point()}
        return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)

    def _reference(self, inputs: Inputs, original: Results, scalar: Scalar | None) -> tuple[Width, Results]:
        """The results in the widest precision in which the original runs on these inputs."""
        elements = sum(
            leaf.numel() for leaf in pytree.tree_leaves((inputs.args, inputs.kwargs)) if isinstance(leaf, Tensor)
        )
        widths: tuple[tuple[Width, torch.dtype], ...] = (("float64", torch.float64), ("float32", torch.float32))
        for name, dtype in widths:
            if elements >= self._no_room.get(dtype, elements + 1):
                continue
            if dtype == torch.float32 and all(each.dtype == dtype for each in self._original.parameters()):
                continue
            try:
                if dtype not in self._wide:
                    self._wide[dtype] = copy.deepcopy(self._original).to(dtype)
                return name, run(self._wide[dtype], inputs, scalar=scalar, width=dtype)
            except Exception as error:  # an operator without a kernel for it, for example
                if isinstance(error, torch.OutOfMemoryError):
                    self._no_room[dtype] = elements
                    self._wide.pop(dtype, None)
                    torch.cuda.empty_cache()
        return "original", original

    def _check_spread(self, changed: nn.Module, inputs: Inputs) -> list[Errors]:
        """Two seeds differ as much as in the original: a change that loses dropout, or adds some, is seen."""
        spreads = []
        for module in (self._original, changed):
            try:
                first, second = (run(module, inputs, scalar=self._scalar, seed=SEED + place) for place in range(2))
            except Exception:
                if module is self._original:  # inputs that were drawn need not suit it
                    return []
                raise
            spreads.append(relative_error(_joined(first.outputs.values()), _joined(second.outputs.values())))
        ratio = max(spreads) / max(min(spreads), 1e-30)
        return [
            Errors(
                what=f"spread over seeds, {inputs.name}",
                original=1.0,
                fixed=min(ratio, 1e30),
                allowed=SPREAD_RATIO,
                reference="original",
            )
        ]


def _joined(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0), *(tensor.float().flatten().cpu() for tensor in tensors)])


def _largest(first: Results, second: Results) -> float:
    pairs = [(first.outputs[key], second.outputs[key]) for key in first.outputs]
    gradients = zip(first.gradients.values(), second.gradients.values(), strict=True)
    pairs += [(a, b) for a, b in gradients if a is not None and b is not None]
    return max((relative_error(a, b) for a, b in pairs), default=0.0)


def relative_error(value: Tensor, reference: Tensor) -> float:
    """The norm of the difference over the norm of the reference, both without elements that are equal infinities.

    >>> relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
    0.1
    """
    if value.shape != reference.shape:
        return 1e30
    squares = torch.zeros(2, dtype=torch.float64, device=reference.device)
    pieces = zip(value.detach().reshape(-1).split(CHUNK), reference.detach().reshape(-1).split(CHUNK), strict=True)
    for piece, wanted in pieces:  # in pieces: in float64 a batch of logits would not fit beside the model
        piece, wanted = piece.double(), wanted.double()
        same = (piece == wanted) | (piece.isnan() & wanted.isnan())
        squares[0] += torch.where(same, 0.0, piece - wanted).square().sum()
        squares[1] += torch.where(wanted.isfinite(), wanted, 0.0).square().sum()
    error, size = squares.sqrt().tolist()
    if error != error:  # a NaN where the reference has none
        return 1e30
    return min(error / size, 1e30) if size > 0.0 else (0.0 if error == 0.0 else 1e30)


def _judge(
    what: str,
    width: Width,
    reference: Tensor,
    before: Tensor,
    after: Tensor,
    own: float,
    factor: float,
    typical: float,
    noise: float,
) -> Errors:
    error = relative_error(after, reference)
    if before.shape == after.shape and before.dtype != after.dtype:
        error = 1e30  # the code after it would compute in another precision
    unit = torch.finfo(before.dtype).eps
    allowed = factor * own + FLOOR_UNITS * unit + 2 * noise
    if before.numel() < FEW_ELEMENTS:
        allowed = max(allowed, SMALL_FACTOR * own + FLOOR_UNITS * unit + 2 * noise, factor * typical)
    if width == "original":  # both round: the difference of the two is all that is known
        allowed = max(allowed, 2 * FLOOR_UNITS * unit, typical)
    return Errors(what=what, original=own, fixed=error, allowed=allowed, reference=width)


def variants(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], *, trains: bool, scaled: bool = False, autocast: bool = False
) -> Iterator[Inputs]:
    """The user's inputs, and drawn ones: the other mode, fewer rows, an odd length, padding, and without gradients.

    Args:
        trains: Whether gradients are compared.
        scaled: Also with the first tensor much smaller and larger, where constants such as the eps of a norm show. For
            modules inside of a model, whose inputs are activations.
        autocast: Also under autocast to bfloat16.
    """
    user = Inputs(name="the batch", args=args, kwargs=dict(kwargs), grad=trains)
    yield user
    yield replace(user, name="the other mode", training=not trains)
    if trains:
        yield replace(user, name="no gradients", grad=False, training=False)
    if autocast:
        yield replace(user, name="autocast", autocast=True)
    sizes = _sizes(args, kwargs)
    if sizes is not None:
        rows, length = sizes
        if rows > 1:
            yield replace(user, name="one row", **_sliced(user, rows, 1, None, 0))
        if length is not None and length > 2:
            odd = min(ODD_LENGTH, length - 1 - length % 2)
            yield replace(user, name=f"{odd} positions", **_sliced(user, rows, rows, length, odd))
            yield from _padded(user, rows, length)
    if scaled:
        for scale in (1e-3, 30.0):
            changed = _scaled(user, scale)
            if changed is not None:
                yield replace(user, name=f"inputs times {scale:g}", **changed)


def reduced(inputs: Inputs) -> Inputs:
    """The first rows and positions of large inputs: a float64 reference of all of them would take minutes.

    >>> tokens = torch.zeros(8, 4096, dtype=torch.long)
    >>> reduced(Inputs(name="the batch", args=(tokens,), kwargs={})).args[0].shape
    torch.Size([2, 128])
    """
    sizes = _sizes(inputs.args, inputs.kwargs)
    if sizes is None:
        return inputs
    rows, length = sizes
    most_rows = MOST_ROWS if length is not None or rows <= MOST_POSITIONS else MOST_ROWS * MOST_POSITIONS
    kept = None if length is None or length <= MOST_POSITIONS else MOST_POSITIONS
    if rows <= most_rows and kept is None:
        return inputs
    return replace(inputs, **_sliced(inputs, rows, min(rows, most_rows), None if kept is None else length, kept or 0))


def _sizes(args: Any, kwargs: Any) -> tuple[int, int | None] | None:
    """The rows of a batch, and its length if tensors agree on one that no other size is equal to."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim() > 1]
    if not tensors:
        return None
    first = tensors[0]
    length = first.shape[1]
    others = [*first.shape[2:], first.shape[0]]
    return first.shape[0], None if length in others or length < 2 else length


def _sliced(inputs: Inputs, rows: int, kept_rows: int, length: int | None, kept: int) -> dict[str, Any]:
    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            return leaf
        result = leaf
        if kept_rows < rows and leaf.shape[0] == rows:
            result = result[:kept_rows]
        if length is not None:
            for axis in range(leaf.dim()):  # also the first: tables have no rows
                if leaf.shape[axis] == length:
                    result = result.narrow(axis, 0, kept)
        return result.detach().requires_grad_(leaf.requires_grad) if result is not leaf else leaf

    args, kwargs = pytree.tree_map(cut, (inputs.args, inputs.kwargs))
    return {"args": args, "kwargs": kwargs}


def _padded(inputs: Inputs, rows: int, length: int) -> Iterator[Inputs]:
    """If there is a padding mask, of ones and zeros, ones that pad to the right and to the left."""
    leaves, spec = pytree.tree_flatten((inputs.args, inputs.kwargs))
    place = next(
        (
            place
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor)
            and tuple(leaf.shape) == (rows, length)
            and leaf.dtype in (torch.bool, torch.int64, torch.int32)
            and bool(((leaf == 0) | (leaf == 1)).all())
            and bool(leaf.any())
        ),
        None,
    )
    if place is None:
        return
    for side in ("right", "left"):
        mask = torch.ones_like(leaves[place])
        for row in range(rows):
            kept = max(1, length - 1 - (row * length) // (2 * rows))
            if side == "right":
                mask[row, kept:] = 0
            else:
                mask[row, : length - kept] = 0
        args, kwargs = pytree.tree_unflatten([*leaves[:place], mask, *leaves[place + 1 :]], spec)
        valid = mask != 0 if side == "left" else None
        yield replace(inputs, name=f"padded on the {side}", args=args, kwargs=kwargs, valid=valid)


def _scaled(inputs: Inputs, scale: float) -> dict[str, Any] | None:
    leaves, spec = pytree.tree_flatten((inputs.args, inputs.kwargs))
    place = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)
    if place is None:
        return None
    leaf = leaves[place]
    leaves[place] = (leaf.detach() * scale).requires_grad_(leaf.requires_grad)
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return {"args": args, "kwargs": kwargs}


def check_causality(original: nn.Module, changed: nn.Module, inputs: Inputs) -> list[Errors]:
    """If a later token changes no earlier output of the original, it must not in the changed model.

    The tokens are a batch of integers, [rows, positions]; nothing is checked where there is none.
    """
    leaves, spec = pytree.tree_flatten((inputs.args, inputs.kwargs))
    place = next(
        (
            place
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.dtype in (torch.int64, torch.int32) and leaf.dim() == 2
        ),
        None,
    )
    if place is None or leaves[place].shape[1] < 2 or int(leaves[place].max()) < 2:
        return []
    tokens = leaves[place]
    half = tokens.shape[1] // 2
    other = tokens.clone()
    other[:, half:] = torch.where(tokens[:, half:] == 0, 1, 0).to(tokens.dtype)
    args, kwargs = pytree.tree_unflatten([*leaves[:place], other, *leaves[place + 1 :]], spec)
    first = replace(inputs, grad=False, training=False)
    second = replace(first, args=args, kwargs=kwargs)
    leaks: list[float] = []
    for module in (original, changed):
        outputs = zip(run(module, first).outputs.values(), run(module, second).outputs.values(), strict=True)
        leaks.append(
            max(
                (
                    relative_error(b[:, :half], a[:, :half])
                    for a, b in outputs
                    if a.dim() > 1 and a.shape[:2] == tokens.shape
                ),
                default=0.0,
            )
        )
    if leaks[0] > 1e-3:  # it is not causal
        return []
    allowed = 2 * leaks[0] + 1e-3
    return [
        Errors(
            what="causality: earlier outputs when later tokens change",
            original=leaks[0],
            fixed=leaks[1],
            allowed=allowed,
            reference="original",
        )
    ]


def problem(errors: Sequence[Errors]) -> str:
    """The first error that is not allowed, as a clause; "" if all are."""
    for each in errors:
        if not each.is_within:
            return (
                f"{each.what}: error {each.fixed:.1e} against {each.reference}, where the original has "
                f"{each.original:.1e} and {each.allowed:.1e} is allowed"
            )
    return ""


def run_error(error: BaseException) -> str:
    """Why a run failed, as a clause."""
    return f"it raised {type(error).__name__}: {message_of(error)}"
