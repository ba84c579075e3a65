"""Whether a changed model computes what the original computes: outputs and gradients against a wide reference.

The reference is the original in float64, where it can run in that: casts to narrower types inside of it are widened
too. The original in its own precision has an error against it, which is its rounding, and the changed one may have
`OUTPUT_FACTOR` or `GRADIENT_FACTOR` times that and a few units in the last place. Inputs are the user's, and drawn ones
of other sizes: see `variants`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from nearpeak.devices.process_state import preserve_random_state
from nearpeak.errors import UsageError, message_of
from nearpeak.fixes.record import Errors
from nearpeak.fixes.registry import preserve_buffers

OUTPUT_FACTOR = 1.5
"""Rounding errors of large tensors vary little: another order of the same additions does not reach this."""
GRADIENT_FACTOR = 2.0
SMALL_FACTOR = 4.0
"""For tensors of few elements, whose rounding errors are one draw of a wide distribution."""
FEW_ELEMENTS = 512
FLOOR_UNITS = 4.0
"""Units in the last place of the dtype that an error may always have."""
LARGEST_NOISE = 0.05
"""Outputs that differ by more between two runs on the same batch cannot be compared."""
SPREAD_RATIO = 1.3
"""By which the spread of random results, as of dropout, may differ."""
MOST_ROWS, ODD_LENGTH = 2, 37
SEED = 20_240_917
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


class Widened(TorchDispatchMode):
    """Inside, every cast to a narrower floating-point type is one to this type: a reference has no early roundings."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widen(value: Any) -> Any:
            return self._dtype if isinstance(value, torch.dtype) and value in _NARROW else value

        args, kwargs = pytree.tree_map(widen, (args, kwargs or {}))
        return func(*args, **kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What a run gave: floating-point tensors of the output, and gradients by name."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]


def run(
    module: nn.Module,
    inputs: Inputs,
    *,
    scalar: Scalar | None = None,
    width: torch.dtype | None = None,
    seed: int = SEED,
) -> Results:
    """Outputs of a module and gradients of its parameters and inputs, from a scalar or from drawn cotangents.

    Random numbers are those of the seed, `grad` of the parameters is not touched, and the mode, the buffers and the
    random states are as before. `width` widens everything, for a reference.
    """
    args, kwargs = _own_inputs(inputs, width)
    with ExitStack() as stack:
        stack.enter_context(preserve_random_state())
        stack.enter_context(preserve_buffers(module))
        stack.enter_context(in_mode(module, inputs.training))
        stack.enter_context(Widened(width) if width is not None else nullcontext())
        if inputs.autocast and width is None:
            stack.enter_context(torch.autocast(_device_of(module, args, kwargs).type, torch.bfloat16))
        torch.manual_seed(seed)
        with torch.set_grad_enabled(inputs.grad):
            output = module(*args, **kwargs)
            tensors = floating(output)
            gradients: dict[str, Tensor | None] = {}
            if inputs.grad and any(tensor.requires_grad for tensor in tensors):
                leaves: dict[str, Tensor] = {
                    name: each for name, each in module.named_parameters() if each.requires_grad
                }
                given = [each for each in floating((args, kwargs)) if each.requires_grad]
                leaves |= {f"input {place}": each for place, each in enumerate(given)}
                total = scalar(output) if scalar is not None else _weighted_sum(tensors)
                values = torch.autograd.grad(total, list(leaves.values()), allow_unused=True) if leaves else ()
                gradients = dict(zip(leaves, values, strict=True))
    return Results(outputs=[tensor.detach() for tensor in tensors], gradients=gradients)


@contextmanager
def in_mode(module: nn.Module, training: bool | None) -> Iterator[None]:
    """Inside, a module is in training or evaluation mode; afterwards each part of it is in its own again."""
    before = [(part, part.training) for part in module.modules()]
    try:
        if training is not None:
            module.train(training)
        yield
    finally:
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
    generator = torch.Generator().manual_seed(SEED)
    total: Tensor | None = None
    for tensor in tensors:
        if tensor.requires_grad:
            drawn = torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
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

    def probe(self, inputs: Inputs) -> None:
        """Measures the noise of the original. UsageError where it is too large to compare anything."""
        first, second = (run(self._original, inputs, scalar=self._scalar) for _ in range(2))
        self.noise = _largest(first, second)
        if not self.noise <= LARGEST_NOISE:
            raise UsageError(
                f"Two runs of the model on the same batch and seed differ by {self.noise:.2g} of their norm: its "
                "results are not repeatable, and a change of it cannot be verified. Make them so "
                "(torch.use_deterministic_algorithms, no state that grows), or pass a smaller part of the model."
            )
        other_seed = run(self._original, inputs, scalar=self._scalar, seed=SEED + 1)
        self.is_random = _largest(first, other_seed) > 10 * self.noise + 1e-6

    def check(self, changed: nn.Module, inputs: Inputs) -> list[Errors]:
        """The errors of a changed module beside those of the original. Empty if the original does not take the inputs.

        Where results are random, values are compared in evaluation mode, and in training mode the spread over seeds.
        """
        if self.is_random and inputs.training is not False:
            spread = self._check_spread(changed, inputs)
            inputs = replace(inputs, training=False, name=f"{inputs.name}, without dropout")
            return [*spread, *self.check(changed, inputs)]
        scalar = self._scalar
        try:
            original = run(self._original, inputs, scalar=scalar)
        except Exception:  # inputs that were drawn need not suit the model, nor the labels of a loss
            try:
                scalar = None
                original = run(self._original, inputs)
            except Exception:
                return []
        width, wide = self._reference(inputs, original, scalar)
        fixed = run(changed, inputs, scalar=scalar)
        return list(_compare(inputs.name, width, wide, original, fixed, self.noise))

    def _reference(self, inputs: Inputs, original: Results, scalar: Scalar | None) -> tuple[Width, Results]:
        """The results in the widest precision in which the original runs on these inputs."""
        for name, dtype in (("float64", torch.float64), ("float32", torch.float32)):
            if dtype == torch.float32 and all(each.dtype == dtype for each in self._original.parameters()):
                continue
            try:
                copied = copy.deepcopy(self._original).to(dtype)
                return name, run(copied, inputs, scalar=scalar, width=dtype)  # type: ignore[return-value]
            except Exception as error:
                if isinstance(error, torch.OutOfMemoryError):
                    torch.cuda.empty_cache()
        return "original", original

    def _check_spread(self, changed: nn.Module, inputs: Inputs) -> list[Errors]:
        """Two seeds differ as much as in the original: a change that loses dropout, or adds some, is seen."""
        spreads = []
        for module in (self._original, changed):
            first, second = (run(module, inputs, scalar=self._scalar, seed=SEED + place) for place in range(2))
            spreads.append(relative_error(_joined(first.outputs), _joined(second.outputs)))
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


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors]) if tensors else torch.zeros(0)


def _largest(first: Results, second: Results) -> float:
    pairs = [*zip(first.outputs, second.outputs, strict=True)]
    pairs += [
        (a, b)
        for a, b in zip(first.gradients.values(), second.gradients.values(), strict=True)
        if a is not None and b is not None
    ]
    return max((relative_error(a, b) for a, b in pairs), default=0.0)


def relative_error(value: Tensor, reference: Tensor) -> float:
    """The norm of the difference over the norm of the reference, both without elements that are equal infinities.

    >>> relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
    0.1
    """
    if value.shape != reference.shape:
        return 1e30
    value, reference = value.detach().double(), reference.detach().double()
    same = (value == reference) | (value.isnan() & reference.isnan())
    difference = torch.where(same, 0.0, value - reference)
    size = torch.where(reference.isfinite(), reference, 0.0).norm().item()
    error = difference.norm().item()
    if error != error:  # a NaN where the reference has none
        return 1e30
    return min(error / size, 1e30) if size > 0.0 else (0.0 if error == 0.0 else 1e30)


def _compare(
    name: str, width: Width, wide: Results, original: Results, fixed: Results, noise: float
) -> Iterator[Errors]:
    """The worst of the outputs and the worst of the gradients."""
    if len(fixed.outputs) != len(original.outputs):
        yield Errors(what=f"number of outputs, {name}", original=0.0, fixed=1e30, allowed=0.0, reference=width)
        return
    outputs = [
        _judge(f"output, {name}", width, reference, before, after, OUTPUT_FACTOR, noise)
        for reference, before, after in zip(wide.outputs, original.outputs, fixed.outputs, strict=True)
    ]
    # A detached output has no gradients at all.
    names = dict.fromkeys([*original.gradients, *fixed.gradients])
    gradients = []
    for key in names:
        reference, before, after = (results.gradients.get(key) for results in (wide, original, fixed))
        if reference is None and before is None and after is None:
            continue
        shape = next(each for each in (reference, before, after) if each is not None)
        reference, before, after = (
            torch.zeros_like(shape) if each is None else each for each in (reference, before, after)
        )
        gradients.append(_judge(f"gradient of {key}, {name}", width, reference, before, after, GRADIENT_FACTOR, noise))
    for group in (outputs, gradients):
        if group:
            yield max(group, key=lambda each: each.fixed / max(each.allowed, 1e-300))


def _judge(
    what: str, width: Width, reference: Tensor, before: Tensor, after: Tensor, factor: float, noise: float
) -> Errors:
    own, error = relative_error(before, reference), relative_error(after, reference)
    if before.shape == after.shape and before.dtype != after.dtype:
        error = 1e30  # the code after it would compute in another precision
    unit = torch.finfo(before.dtype).eps
    factor = max(factor, SMALL_FACTOR) if before.numel() < FEW_ELEMENTS else factor
    allowed = factor * own + FLOOR_UNITS * unit + 2 * noise
    if width == "original":  # both round: the difference of the two is all that is known
        allowed = max(allowed, 2 * FLOOR_UNITS * unit)
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
            for axis in range(1 if leaf.dim() > 1 else 0, leaf.dim()):
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
        yield replace(inputs, name=f"padded on the {side}", args=args, kwargs=kwargs)


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
        outputs = zip(run(module, first).outputs, run(module, second).outputs, strict=True)
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
