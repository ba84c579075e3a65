"""How far a result may be from the reference in float64: as far as rounding explains, and no constant.

An element's unit of error w is what rounding of the result adds (the unit roundoff of its dtype times its magnitude),
plus what rounding of the inputs to the precision of the arithmetic adds, which is found by perturbing the inputs in
float64: that contains the cancellation and the depth of the sums. The reference in its own dtype has some error in
these units; a candidate may have `FACTOR` times that, and sums in another order, whose error grows as the square root
of their length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from nearpeak.judging.exchange import bytes_of, map_tensors, tensors_in

FACTOR = 4.0
PRECISION_FACTOR = 4.0
"""The typical error over that of the reference at which the arithmetic is called less precise."""
INNER_FACTOR = 2 * FACTOR
"""Times the error of a reference that rounds inside: it is a standard deviation."""
OWN_ERROR_64 = 64.0
"""Of a reference in float64, in its units: nothing is there to compare it with, and torch.softmax has 18."""
DRAWS = 2
"""Perturbations of the inputs, where they are small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the reference gives for some inputs: results and gradients, in its own dtype and in float64."""

    own: list[torch.Tensor]
    exact: list[torch.Tensor]
    perturbed: list[torch.Tensor]
    """The root mean square of what a perturbation of the inputs changes, element by element."""
    unit: float
    """The unit roundoff of the arithmetic."""
    depth: int
    """The length of the longest sum that the inputs allow."""
    mutated: list[int]
    """Positions of the inputs that the reference changes; their new values are the last of the results."""
    is_exact: bool
    """Whether the reference runs in float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """A result beside the answer."""

    error: float
    """The largest error over its tolerance."""
    rms_ratio: float
    """The typical error over that of the reference."""
    wrong_share: float
    """Elements out of tolerance."""
    unwritten_share: float
    """Elements out of tolerance that hold exactly zero."""
    relative: float
    """The root mean square error over that of the values."""
    looks_rounded: bool
    """Whether the errors are small and everywhere, as those of a narrower dtype are."""
    lowered: bool
    """Whether the typical error is larger than the order of sums explains."""
    where: str = ""
    """The largest error in words."""

    @property
    def is_right(self) -> bool:
        """Whether every element is within its tolerance, and the typical error is."""
        return self.error <= 1 and not self.lowered


def answer(
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    seeds: Sequence[torch.Tensor] | None = None,
    context: Any = None,
    draws: int = DRAWS,
) -> Answer:
    """The reference on these inputs; `seeds` are the gradients of its results, where gradients are compared."""
    widest = _widest(args, kwargs)
    unit = torch.finfo(torch.float64).eps / 2 if widest == torch.float64 else torch.finfo(torch.float32).eps / 2
    own, mutated = _run(function, args, kwargs, seeds, context)
    devices = {tensor.device for tensor in tensors_in((args, kwargs))}
    generators = {device: torch.Generator(device).manual_seed(0x5EED) for device in devices}

    def perturb(tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(
            tensor.shape, generator=generators[tensor.device], dtype=torch.float32, device=tensor.device
        )
        return tensor.detach() * (1 + unit * noise.double())

    def influence() -> list[torch.Tensor]:
        """The mean square of what perturbations change."""
        squares = [torch.zeros_like(_reals(tensor).double()) for tensor in exact]
        for _ in range(draws):
            moved = map_tensors(wider, lambda t: perturb(t).requires_grad_(t.requires_grad) if _is_wide(t) else t)
            results, _ = _run(function, moved[0], moved[1], seeds, None, mutated)
            for square, a, b in zip(squares, results, exact, strict=True):
                difference = (_reals(a).double() - _reals(b).double()).nan_to_num_(0.0, 0.0, 0.0)
                square.addcmul_(difference, difference, value=1 / draws)
        return squares

    try:
        wider = wide((args, kwargs))
        exact, _ = _run(function, wider[0], wider[1], seeds, None, mutated)
        is_exact = True
        squares = influence()
        if widest == torch.float64 and _are_mostly_zero(squares):
            # The reference rounds to float32 inside, which swallows a change in the last bit of float64.
            unit = torch.finfo(torch.float32).eps / 2
            squares = influence()
    except Exception:  # a reference may be written for one dtype: then it is compared with itself
        exact, is_exact = own, False
        squares = [torch.zeros_like(_reals(tensor).double()) for tensor in exact]
    depth = max((max(tensor.shape, default=1) for tensor in tensors_in((args, kwargs))), default=1)
    perturbed = [square.sqrt() for square in squares]
    return Answer(
        own=own, exact=exact, perturbed=perturbed, unit=unit, depth=max(1, depth), mutated=mutated, is_exact=is_exact
    )


def without_nonfinite(known: Answer, function: Callable[..., Any], args: Any, kwargs: Any) -> Answer:
    """The same answer, finite where no infinity or NaN of the inputs has an influence.

    A reference may spread a NaN by multiplying it with a weight of zero, as a mask before softmax does; a candidate
    need not look at what is masked. An element is independent if two other numbers in place of what is not finite give
    it the same value.
    """

    def replaced(value: float) -> list[torch.Tensor]:
        def clean(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point():
                return tensor
            plain = tensor.detach()
            return torch.where(plain.isfinite(), plain, value * _counting(plain)).requires_grad_(tensor.requires_grad)

        tree = wide(map_tensors((args, kwargs), clean))
        return _run(function, tree[0], tree[1], None, None, known.mutated)[0]

    first, second = replaced(0.5), replaced(-2.0)
    exact = []
    for old, a, b in zip(known.exact, first, second, strict=True):
        is_free = ~old.double().isfinite() & (a == b) if old.is_floating_point() else torch.zeros_like(old).bool()
        exact.append(torch.where(is_free, a.to(old.dtype), old))
    return replace(known, exact=exact)


def reach_of_nan(known: Answer, function: Callable[..., Any], args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Of each result, where a candidate may have NaN because the reference has some: a mask for each.

    A kernel may multiply a NaN by a weight of zero: where a mask is added to scores, or a scan is a product with a
    triangular matrix. Such a NaN reaches elements that share an input of its tensor with one that is NaN in the
    reference, and no others: another row of a softmax shares none. What is reached along most of a line is reached
    along all of it, since the first row of a causal attention has one weight, which is 1 whatever its key is.
    """
    sources: list[torch.Tensor] = []

    def source(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or bool(tensor.isfinite().all()):
            return tensor.detach().clone()
        sources.append(torch.nan_to_num(tensor.detach(), 0.5, 0.5, 0.5).requires_grad_())
        return sources[-1].clone()  # which the function may change

    unreached = [torch.zeros_like(exact, dtype=torch.bool) for exact in known.exact]
    plain = wide((args, kwargs))
    try:
        with torch.enable_grad():
            tree = map_tensors(plain, source)
            results = tensors_in(function(*tree[0], **tree[1]))
            results += [tensors_in(tree)[i] for i in known.mutated]
            total = sum(
                (result * exact.isnan() * _counting(result)).sum()
                for result, exact in zip(results, known.exact, strict=True)
                if result.is_floating_point() and result.requires_grad
            )
            gradients = torch.autograd.grad(total, sources, allow_unused=True)  # type: ignore[arg-type]
        moved = iter(
            torch.where(gradient != 0, _counting(values) - 1.5 * values, values) if gradient is not None else values
            for values, gradient in zip((each.detach() for each in sources), gradients, strict=True)
        )
        others = map_tensors(
            plain, lambda t: next(moved) if t.is_floating_point() and not bool(t.isfinite().all()) else t
        )
        changed, _ = _run(function, others[0], others[1], None, None, known.mutated)
    except Exception:  # it cannot be differentiated: nothing more than the reference's NaN is allowed
        return unreached
    reached = [
        (a.detach() != b) | exact.isnan() if exact.is_floating_point() else none
        for a, b, exact, none in zip(results, changed, known.exact, unreached, strict=True)
    ]
    for i, mask in enumerate(reached):
        for dim in range(mask.dim()):
            reached[i] = reached[i] | (mask.double().mean(dim, keepdim=True) > 0.5)
    return reached


def _counting(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers that differ from neighbor to neighbor: functions may ignore what is added to all elements."""
    numbers = torch.arange(tensor.numel(), device=tensor.device) % 7 + 1
    return numbers.reshape(tensor.shape).to(tensor.dtype)


def _run(
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    seeds: Sequence[torch.Tensor] | None,
    context: Any,
    mutated: list[int] | None = None,
) -> tuple[list[torch.Tensor], list[int]]:
    """Results, changed inputs and gradients of one call, which gets copies of the inputs.

    `mutated` has the positions of the inputs that change, where an earlier call has shown them.
    """
    copies = map_tensors((args, kwargs), lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad))
    if context is not None:
        with context():
            result = function(*copies[0], **copies[1])
    else:
        result = function(*copies[0], **copies[1])
    results = tensors_in(result)
    after = tensors_in(copies)
    if mutated is None:
        before = tensors_in((args, kwargs))
        mutated = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if not same_values(a, b)]
    values = [tensor.detach() for tensor in results] + [after[i].detach() for i in mutated]
    if seeds is not None:
        inputs = [tensor for tensor in after if tensor.requires_grad]
        outputs = [tensor for tensor in results if tensor.is_floating_point()]
        pairs = [(output, seed) for output, seed in zip(outputs, seeds, strict=True) if output.requires_grad]
        gradients = torch.autograd.grad(
            [output for output, _ in pairs],
            inputs,
            [seed.to(output.dtype) for output, seed in pairs],
            allow_unused=True,
        )
        values += [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, gradients, strict=True)]
    return values, mutated


def _are_mostly_zero(squares: Sequence[torch.Tensor]) -> bool:
    elements = sum(square.numel() for square in squares)
    return elements >= 64 and sum(int((square == 0).sum()) for square in squares) > 0.9 * elements


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bytes_of(a), bytes_of(b))


def _reals(tensor: torch.Tensor) -> torch.Tensor:
    """Real and imaginary parts of complex numbers; other tensors as they are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _is_wide(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.float64, torch.complex128)


def wide(tree: Any) -> Any:
    """The same tree with floating-point tensors in float64, and complex ones in complex128."""

    def widen(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() and not tensor.is_complex():
            return tensor
        dtype = torch.complex128 if tensor.is_complex() else torch.float64
        return tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)

    return map_tensors(tree, widen)


def _widest(args: Any, kwargs: Any) -> torch.dtype:
    reals = [_reals(tensor) for tensor in tensors_in((args, kwargs))]
    floats = [tensor.dtype for tensor in reals if tensor.is_floating_point()]
    return max(floats, key=lambda dtype: torch.finfo(dtype).bits, default=torch.float32)


def agreement(
    result: torch.Tensor, own: torch.Tensor, exact: torch.Tensor, perturbed: torch.Tensor, known: Answer
) -> Agreement:
    """How far a result is from the answer; results that are no floating-point numbers must be equal."""
    if not own.numel():
        return Agreement(
            error=0, rms_ratio=0, wrong_share=0, unwritten_share=0, relative=0, looks_rounded=False, lowered=False
        )
    result, own, exact = _reals(result.detach().to(own.device)), _reals(own), _reals(exact)
    if not own.is_floating_point():
        wrong = (result != own) & (result != exact.to(own.dtype))
        return _exact_agreement(result, own, wrong)
    roundoff = torch.finfo(own.dtype).eps / 2
    c, o, e = result.double(), own.double(), exact.double()
    is_finite = math.isfinite(float(c.sum() + o.sum() + e.sum()))
    finite = None if is_finite else o.isfinite() & e.isfinite()
    both = None if finite is None else finite & c.isfinite()
    scale = _rms(_where_true(finite, e))
    tiny = float(torch.finfo(own.dtype).tiny) * (2.0**-6 if own.dtype == torch.float16 else 1.0)
    sums = perturbed + known.unit * scale
    w = (e.abs() if is_finite else e.abs().nan_to_num_(posinf=0.0)).mul_(roundoff).add_(sums).add_(tiny)
    own_difference = _where_true(finite, (o - e).abs_())
    inner = _inner_rounding(own_difference, e, perturbed, roundoff, known.unit, finite)
    own_error = own_difference / w
    error = _where_true(both, (c - e).abs_().div_(w))
    worst_own = max(OWN_ERROR_64 if own.dtype == torch.float64 else 1.0, float(own_error.max()))
    order = math.sqrt(known.depth) / 2
    tolerance = (sums / w).mul_(FACTOR * order).add_(FACTOR * worst_own)
    weights: torch.Tensor | float = 1.0
    if inner is not None:
        tolerance.add_(inner.mul_(1 / w), alpha=INNER_FACTOR)
        weights = 1 / (1 + inner)
    ratio = error / tolerance
    has_odd = False
    if both is not None and finite is not None:
        odd = _are_odd(c, o, e, finite, both, tolerance * w, float(torch.finfo(own.dtype).max))
        ratio.masked_fill_(odd, math.inf)
        has_odd = bool(odd.any())
    typical_own = _rms(_where_true(both, own_error * weights))
    rms_ratio = _rms(error * weights) / max(typical_own, 1.0 if own.dtype == torch.float64 else 0.3)
    several = own.numel() >= 64
    limit = PRECISION_FACTOR * max(1.0, order * float(sums.mean() / w.mean()))
    lowered = several and rms_ratio > limit and not has_odd
    index = int(ratio.reshape(-1).argmax())
    largest = float(ratio.reshape(-1)[index])
    relative = wrong_share = unwritten_share = 0.0
    looks_rounded = False
    if largest > 1 or lowered:
        wrong = ratio > 1
        wrong_share = float(wrong.double().mean())
        unwritten_share = float((wrong & (c == 0)).double().mean())
        relative = _rms(_where_true(both, c - e)) / max(scale, 1e-300)
        everywhere = float((error * weights > 2 * max(typical_own, 0.3)).double().mean()) > 0.3
        looks_rounded = several and relative < 0.05 and everywhere and not has_odd
    return Agreement(
        error=largest,
        rms_ratio=rms_ratio,
        wrong_share=wrong_share,
        unwritten_share=unwritten_share,
        relative=relative,
        looks_rounded=looks_rounded,
        lowered=lowered,
        where=_where(index, own, c, e),
    )


def _inner_rounding(
    own_difference: torch.Tensor,
    e: torch.Tensor,
    perturbed: torch.Tensor,
    roundoff: float,
    unit: float,
    finite: torch.Tensor | None,
) -> torch.Tensor | None:
    """The error, element by element, of a reference that rounds what is inside of it to a narrow dtype; else None.

    Where terms cancel, such an error is no share of the result: an element may be near zero, and the reference be lucky
    there. The size of it is that of a rounding of the inputs to the dtype, in the measure in which the reference's own
    errors are beyond the rounding of its results.
    """
    if roundoff <= unit:
        return None
    inside = perturbed * (roundoff / unit)
    size = float(torch.linalg.vector_norm(inside))
    if not size:
        return None
    beyond = (own_difference - _where_true(finite, roundoff * e.abs())).clamp_min_(0)
    return inside.mul_(float(torch.linalg.vector_norm(beyond)) / size)


def _where_true(mask: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
    """The values with zero where the mask is not true; without a mask, the values."""
    return values if mask is None else torch.where(mask, values, 0.0)


def _rms(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values)) / math.sqrt(values.numel())


def _are_odd(
    c: torch.Tensor,
    o: torch.Tensor,
    e: torch.Tensor,
    finite: torch.Tensor,
    both: torch.Tensor,
    allowed: torch.Tensor,
    largest: float,
) -> torch.Tensor:
    """Elements that are wrong where a number is not finite.

    Where the reference overflows, its own value counts as well as the one in float64; so does the same infinity. Which
    of infinity and NaN comes out is up to the kernel: torch's own differ in that from dtype to dtype.
    """
    opposite = c.isinf() & e.isinf() & (c != e)
    same = (c == o) | (c == e) | (~c.isfinite() & ~finite & ~opposite)
    same |= c.isinf() & (c.sign() == e.sign()) & (e.abs() + allowed >= largest)
    near_exact = c.isfinite() & e.isfinite() & ((c - e).abs() <= allowed)
    near_own = c.isfinite() & o.isfinite() & ((c - o).abs() <= allowed.nan_to_num(posinf=0.0))
    return ~both & ~(same | near_exact | near_own)


def _where(index: int, own: torch.Tensor, c: torch.Tensor, e: torch.Tensor) -> str:
    place = []
    rest = index
    for size in reversed(own.shape):
        place.append(rest % size)
        rest //= size
    found, expected = c.reshape(-1)[index], e.reshape(-1)[index]
    return f"[{', '.join(map(str, reversed(place)))}] is {float(found):.6g}, in float64 {float(expected):.6g}"


def _exact_agreement(result: torch.Tensor, own: torch.Tensor, wrong: torch.Tensor) -> Agreement:
    share = float(wrong.double().mean())
    index = int(wrong.reshape(-1).to(torch.uint8).argmax())
    return Agreement(
        error=math.inf if share else 0.0,
        rms_ratio=0.0,
        wrong_share=share,
        unwritten_share=float((wrong & (result == 0)).double().mean()),
        relative=share,
        looks_rounded=False,
        lowered=False,
        where=_where(index, own, result.double(), own.double()),
    )
