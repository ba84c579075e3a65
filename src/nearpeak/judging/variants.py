"""The inputs of a judgement: drawn by the user's function, and varied in size, value, stride and offset.

`Task` has the reference and what draws its inputs. A variant counts only if the reference accepts it.
"""

from __future__ import annotations

import inspect
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nearpeak.devices.process_state import preserve_random_state
from nearpeak.errors import CaseError
from nearpeak.judging.exchange import map_tensors, rescaled, storage_span, tensors_in
from nearpeak.judging.models import INIT_NAMES, Model, is_model, make_module
from nearpeak.judging.tolerance import same_values
from nearpeak.measure.case import case_errors, load

INPUT_NAMES = ("inputs", "get_inputs", "make_inputs", "generate_input")
"""Functions of the reference's file that draw its inputs, the first that there is."""
MOST_HALVINGS = 16
SMALL_ELEMENTS = 1 << 15
"""Elements of the largest tensor of a variant that only its values, strides or sizes make interesting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among them."""
        return tensors_in((self.args, self.kwargs))

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
        """The same with other tensors, which require gradients as before."""

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            return change(tensor.detach()).requires_grad_(tensor.requires_grad)

        return Inputs(args=map_tensors(self.args, keep), kwargs=map_tensors(self.kwargs, keep))

    def words(self) -> str:
        """Shapes and dtypes: "float16 4096x1024, 1024"."""
        parts, last = [], ""
        for tensor in self.tensors:
            dtype = str(tensor.dtype).removeprefix("torch.")
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            parts.append(shape if dtype == last else f"{dtype} {shape}")
            last = dtype
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Inputs for one check, and how the call is made."""

    kind: str
    words: str
    inputs: Inputs
    surroundings: Mapping[str, Any] = field(default_factory=dict)


class Task:
    """A reference with the function that draws its inputs."""

    def __init__(self, reference: str, inputs: str | None, device: torch.device) -> None:
        builder = load(reference)
        self.path, self.name = builder.path, builder.name
        self.function: Callable[..., Any] = builder.function
        self.device = device
        self.is_constant = False
        """Whether the function draws the same values whatever the seed."""
        self.model: torch.nn.Module | None = None
        """Where the reference is a class of modules: the one that is judged."""
        if inputs is not None:
            self.draw_function: Callable[..., Any] | None = load(inputs).function
        else:
            self.draw_function = neighbor_of(builder.function, INPUT_NAMES)
        if self.draw_function is None:
            raise CaseError(
                f"{builder.path} has no function that draws inputs. Write `def inputs(rows=4096, columns=1024): return "
                f"(torch.randn(rows, columns),)` beside {builder.name}, or name one with --inputs FILE.py:FUNCTION."
            )
        self.parameters = {
            name: parameter.default
            for name, parameter in inspect.signature(self.draw_function).parameters.items()
            if type(parameter.default) is int
        }
        if is_model(builder.function):
            self._make_model(builder.function)

    def _make_model(self, kind: Any) -> None:
        self.seed = random.getrandbits(31)
        draw = neighbor_of(kind, INIT_NAMES)
        with preserve_random_state(), case_errors(f"{self.path}", f"while {self.name} was made", "failed"):
            torch.manual_seed(self.seed)
            self.init = () if draw is None else draw()
            self.model = make_module(kind, self.init, self.seed, self.device)
        self.function = Model(self.model)

    def draw(self, seed: int, **sizes: int) -> Inputs:
        """New inputs: the user's function after seeding torch and Python."""
        assert self.draw_function is not None
        with preserve_random_state(), case_errors(f"{self.path}", "while it drew inputs", "failed"):
            torch.manual_seed(seed)
            random.seed(seed)
            drawn = self.draw_function(**sizes)
        result = self._moved_inputs(drawn)
        if self.is_constant:
            args, kwargs = rescaled((result.args, result.kwargs), seed)
            return Inputs(args=args, kwargs=kwargs)
        return result

    def scale_constants(self, given: Inputs, seed: int, **sizes: int) -> bool:
        """Whether all draws are the same, as those of a function that seeds itself; then they get factors from now on.

        Otherwise everybody could have the answers.
        """
        floats = [tensor for tensor in given.tensors if tensor.is_floating_point() and tensor.element_size() > 1]
        other = self.draw(seed, **sizes).tensors
        is_same = len(other) == len(given.tensors) and all(map(same_values, given.tensors, other))
        self.is_constant = bool(floats) and is_same
        return self.is_constant

    def _moved_inputs(self, drawn: Any) -> Inputs:
        """What a draw returned, as arguments on the device."""
        args: Any = drawn if isinstance(drawn, (tuple, list)) else () if isinstance(drawn, dict) else (drawn,)
        kwargs = drawn if isinstance(drawn, dict) else {}
        moved = map_tensors((tuple(args), dict(kwargs)), self._moved)
        result = Inputs(args=moved[0], kwargs=moved[1])
        if not result.tensors:
            raise CaseError(f"{self.path}: the function that draws inputs returned no tensor.")
        return result

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self.device).requires_grad_(tensor.requires_grad)

    def is_finite(self, inputs: Inputs) -> bool:
        """Whether the reference runs on these inputs, and its results are finite."""
        try:
            copies = inputs.changed(lambda tensor: tensor.clone())
            results = tensors_in(self.function(*copies.args, **copies.kwargs))
            return all(bool(tensor.isfinite().all()) for tensor in (*results, *copies.tensors))
        except Exception:  # as in `accepts`
            return False

    def accepts(self, inputs: Inputs) -> bool:
        """Whether the reference runs on these inputs."""
        try:
            copies = inputs.changed(lambda tensor: tensor.clone())
            result = self.function(*copies.args, **copies.kwargs)
            changed = not all(same_values(a, b) for a, b in zip(inputs.tensors, copies.tensors, strict=True))
            return bool(tensors_in(result)) or (result is None and changed)
        except Exception:  # whatever it raises, it is no input of this function
            return False


def neighbor_of(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any] | None:
    """The first function of these names in the module in which another one was defined."""
    plain = inspect.unwrap(function)
    module = getattr(plain, "__globals__", None) or vars(sys.modules[plain.__module__])
    return next((module[name] for name in names if callable(module.get(name))), None)


def size_variants(task: Task, draws: random.Random, sizes: Mapping[str, int]) -> Iterator[Variant]:
    """Inputs of other sizes: odd ones, one more and one less, one, zero, and some that are drawn."""
    given = {**task.parameters, **sizes}
    scale: Any
    if given:
        scale = _ParameterScale(task, draws, given)
    else:
        scale = _DimensionScale(task.draw(draws.getrandbits(48)), draws)
    if not scale.names:
        return
    base = scale.small()
    chosen: list[tuple[str, dict[Any, int]]] = []
    changes: tuple[Callable[[int], int], ...] = (
        lambda value: value + 1,
        lambda value: 0,
        lambda value: value - 1,
        lambda value: 1,
        lambda value: draws.randrange(value // 2, value + 1) | 1,
        lambda value: 2 * value + 1,
    )
    for change in changes:
        for name in scale.names:
            new = change(base[name])
            if new != base[name] and new >= 0:
                chosen.append((f"{scale.label(name)} {new}", {**base, name: new}))
    chosen.append(("all sizes 1", dict.fromkeys(base, 1)))
    for _ in range(3):
        drawn = {name: draws.randrange(1, 2 * value + 2) for name, value in base.items()}
        chosen.append(("drawn sizes", drawn))
    yield from _accepted(task, scale, chosen)


def _accepted(task: Task, scale: Any, chosen: list[tuple[str, dict[Any, int]]]) -> Iterator[Variant]:
    for words, new in chosen:
        try:
            inputs = scale.draw(new)
        except Exception:  # the function that draws inputs has limits of its own
            continue
        if inputs is not None and inputs.tensors and task.accepts(inputs):
            yield Variant(kind="sizes", words=words, inputs=inputs)


class _ParameterScale:
    """Sizes that are parameters of the function that draws inputs."""

    def __init__(self, task: Task, draws: random.Random, given: Mapping[str, int]) -> None:
        self.task, self.draws, self.given = task, draws, dict(given)
        self.names = [name for name, value in given.items() if value > 0]

    def label(self, name: str) -> str:
        return name

    def small(self) -> dict[str, int]:
        """The given sizes, the largest halved until the inputs are small, and the reference still accepts them."""
        sizes = dict(self.given)
        while True:
            inputs = self.draw(sizes)
            if max(tensor.numel() for tensor in inputs.tensors) <= SMALL_ELEMENTS:
                return sizes
            for name in sorted(self.names, key=lambda name: -sizes[name]):
                smaller = {**sizes, name: sizes[name] // 2}
                if sizes[name] > 1 and self._works(smaller):
                    sizes = smaller
                    break
            else:
                return sizes

    def _works(self, sizes: dict[str, int]) -> bool:
        try:
            return self.task.accepts(self.draw(sizes))
        except Exception:
            return False

    def draw(self, sizes: Mapping[str, int]) -> Inputs:
        return self.task.draw(self.draws.getrandbits(48), **sizes)


class _DimensionScale:
    """Sizes of inputs that are drawn in one size alone: equal dimensions are taken for the same size.

    Values are drawn again from those of the given tensors. Integers may be indices into one of the sizes: inputs that
    have some are not varied.
    """

    def __init__(self, given: Inputs, draws: random.Random) -> None:
        self.given, self.draws = given, draws
        indices = any(not t.is_floating_point() and t.dtype != torch.bool for t in given.tensors)
        self.names = [] if indices else sorted({size for tensor in given.tensors for size in tensor.shape if size > 1})

    def label(self, name: int) -> str:
        return f"{name} ->"

    def small(self) -> dict[int, int]:
        sizes = {name: name for name in self.names}
        while True:
            numbers = [math.prod(sizes.get(size, size) for size in tensor.shape) for tensor in self.given.tensors]
            largest = max(self.names, key=lambda name: sizes[name])
            if max(numbers) <= SMALL_ELEMENTS or sizes[largest] <= 16:
                return sizes
            sizes[largest] //= 2

    def draw(self, sizes: Mapping[int, int]) -> Inputs:
        generator = torch.Generator().manual_seed(self.draws.getrandbits(48))

        def resized(tensor: torch.Tensor) -> torch.Tensor:
            shape = [sizes.get(size, size) for size in tensor.shape]
            if not tensor.numel():
                return tensor.new_empty(shape)
            picks = torch.randint(tensor.numel(), (math.prod(shape),), generator=generator).to(tensor.device)
            return tensor.reshape(-1)[picks].reshape(shape)

        new = self.given.changed(resized)
        return Inputs(args=_renumbered(new.args, sizes), kwargs=_renumbered(new.kwargs, sizes))


def _renumbered(tree: Any, sizes: Mapping[int, int], inside: bool = False) -> Any:
    """Shapes among the arguments, which are numbers in a tuple or list, follow the sizes."""
    if isinstance(tree, dict):
        return {key: _renumbered(item, sizes, inside) for key, item in tree.items()}
    if isinstance(tree, (tuple, list)):
        nested = all(type(item) is int for item in tree)
        return type(tree)(_renumbered(item, sizes, nested) for item in tree)
    return sizes.get(tree, tree) if inside and type(tree) is int else tree


def small_inputs(task: Task, draws: random.Random, sizes: Mapping[str, int]) -> Inputs:
    """Inputs like the given ones, and small."""
    given = {**task.parameters, **sizes}
    if given:
        scale: Any = _ParameterScale(task, draws, given)
    else:
        drawn = task.draw(draws.getrandbits(48))
        scale = _DimensionScale(drawn, draws)
        if not scale.names:
            return drawn
    inputs = scale.draw(scale.small())
    if task.accepts(inputs):
        return inputs  # type: ignore[no-any-return]
    return task.draw(draws.getrandbits(48), **sizes)


def value_variants(
    task: Task, inputs: Inputs, draws: random.Random, only: Sequence[str] | None = None
) -> Iterator[Variant]:
    """The same sizes with other values: large, small, constant, spikes, one row or column that dominates, NaN, inf."""
    generator = torch.Generator().manual_seed(draws.getrandbits(48))

    def pick(tensor: torch.Tensor, share: float) -> torch.Tensor:
        return (torch.rand(tensor.shape, generator=generator) < share).to(tensor.device)

    def line(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        new = tensor.clone()
        if tensor.dim() and tensor.numel():
            new.select(dim, draws.randrange(tensor.shape[dim])).mul_(100)
        return new

    def spikes(tensor: torch.Tensor) -> torch.Tensor:
        return torch.where(pick(tensor, 0.02), tensor * 30, tensor * 0.01)

    def huge(tensor: torch.Tensor) -> torch.Tensor:
        new = tensor.clone()
        if tensor.dim() and tensor.numel():
            row = new[tuple(draws.randrange(size) for size in tensor.shape[:-1])]
            size = min(3e4, math.sqrt(torch.finfo(tensor.dtype).max))
            for column, value in zip(
                draws.sample(range(len(row)), min(2, len(row))), (size, 2 / 3 * size), strict=False
            ):
                row[column] = value
        return new

    changes: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
        "offset": ("values", lambda t: t + 8 * t.float().std().to(t.dtype) if t.numel() > 1 else t),
        "large values": ("range", lambda t: t * (200 / max(1e-6, float(t.abs().max()))) if t.numel() else t),
        "small values": ("range", lambda t: t * 1e-3),
        "constant values": ("range", lambda t: torch.full_like(t, 0.75)),
        "zeros": ("range", torch.zeros_like),
        "spikes": ("spikes", spikes),
        "a dominant row": ("spikes", lambda t: line(t, 0)),
        "a dominant column": ("spikes", lambda t: line(t, -1)),
        "two huge elements in a row": ("range", huge),
    }
    for words, (kind, change) in changes.items():
        if only is not None and words not in only:
            continue
        yield from _accepted_values(task, inputs, words, kind, _on_free_floats(change))
    positions = [i for i, tensor in enumerate(inputs.tensors) if _is_free(tensor)]
    for position in positions[:3]:
        for words, value in (("NaN", math.nan), ("+inf", math.inf), ("-inf", -math.inf)):
            if position != positions[0] and not math.isnan(value):
                continue
            change = _planted(inputs, position, value, draws)
            if only is not None and f"{words} in tensor {position}" not in only:
                continue
            kind = "infinity" if value == math.inf else "nonfinite"
            yield from _accepted_values(task, inputs, f"{words} in tensor {position}", kind, change)


def _is_free(tensor: torch.Tensor) -> bool:
    """Whether a tensor may have any value: not one of probabilities, masks or 8-bit numbers, by the looks of it."""
    if not tensor.is_floating_point() or tensor.element_size() == 1 or not tensor.numel():
        return False
    values = tensor.detach().float()
    return not (bool((values >= 0).all()) and bool((values <= 1).all())) and bool(values.isfinite().all())


def _on_free_floats(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: change(tensor).to(tensor.dtype) if _is_free(tensor) else tensor.clone()


def _planted(
    inputs: Inputs, position: int, value: float, draws: random.Random
) -> Callable[[torch.Tensor], torch.Tensor]:
    target = inputs.tensors[position].detach()

    def change(tensor: torch.Tensor) -> torch.Tensor:
        new = tensor.clone()
        if tensor.data_ptr() == target.data_ptr() and tensor.shape == target.shape:
            new[tuple(draws.randrange(size) for size in tensor.shape)] = value
        return new

    return change


def _accepted_values(
    task: Task, inputs: Inputs, words: str, kind: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[Variant]:
    new = inputs.changed(change)
    if kind not in ("nonfinite", "infinity"):
        new = _within_range(task, new)
    if task.accepts(new):
        yield Variant(kind=kind, words=words, inputs=new)


def _within_range(task: Task, inputs: Inputs) -> Inputs:
    """The inputs, halved until the reference does not overflow in float16, nor would for twice as large values.

    Whether what is inside of a function overflows near the limit depends on the order of sums.
    """
    if all(tensor.dtype != torch.float16 for tensor in inputs.tensors):
        return inputs
    smaller = inputs
    for _ in range(MOST_HALVINGS):
        if task.is_finite(smaller.changed(_on_free_floats(lambda t: 2 * t))):
            return smaller
        smaller = smaller.changed(_on_free_floats(lambda t: 0.5 * t))
    return inputs


def stride_variants(task: Task, inputs: Inputs, only: Sequence[str] | None = None) -> Iterator[Variant]:
    """The same values with other strides and offsets."""
    changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "transposed": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.dim() >= 2 else t.clone(),
        "outer dimensions swapped": lambda t: (
            t.transpose(0, 1).contiguous().transpose(0, 1) if t.dim() >= 3 else t.clone()
        ),
        "rows padded by 3 elements": lambda t: _placed(t, _pitch(t, 3), 0),
        "every second element": lambda t: _placed(t, [2 * stride for stride in t.contiguous().stride()], 0),
        "an offset of one element": lambda t: _placed(t, list(t.contiguous().stride()), 1),
        "the first dimension expanded": lambda t: t[:1].clone().expand_as(t) if t.dim() >= 2 and len(t) else t.clone(),
    }
    for words, change in changes.items():
        if only is not None and words not in only:
            continue
        new = inputs.changed(change)
        if any(
            a.stride() != b.stride() or b.storage_offset() for a, b in zip(inputs.tensors, new.tensors, strict=True)
        ):
            grown = Inputs(args=new.args, kwargs=new.kwargs)
            if task.accepts(grown):
                yield Variant(kind="strides", words=words, inputs=grown)


def _pitch(tensor: torch.Tensor, padding: int) -> list[int]:
    strides, pitch = [], 1
    for i, size in enumerate(reversed(tensor.shape)):
        strides.append(pitch)
        pitch = pitch * max(1, size) + (padding if i == 0 else 0)
    return list(reversed(strides))


def _placed(tensor: torch.Tensor, strides: list[int], offset: int) -> torch.Tensor:
    """The values in a larger storage, with these strides and this offset."""
    if not tensor.numel():
        return tensor.clone()
    storage = tensor.new_zeros(offset + 1 + sum((s - 1) * st for s, st in zip(tensor.shape, strides, strict=True)))
    placed = storage.as_strided(tensor.shape, strides, offset)
    placed.copy_(tensor)
    assert storage_span(placed) + offset <= storage.numel()
    return placed
