"""The least time of a right result, where it can be proved, and the bound of the reference's work as written.

A time below the floor is a charge by itself, so that only what nobody can leave out counts: the elements of the inputs
that move a result (a mask may hide the others), the results that the cache cannot hold, and the FLOPs of a product
whose factors are inputs and whose every element reaches a result of its own. A product that is summed up, masked,
multiplied by another one or made of a known matrix may have a shorter way to the same result: its FLOPs do not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nearpeak.bound.floors import ideal
from nearpeak.judging.exchange import map_tensors, tensors_in
from nearpeak.judging.tolerance import wide
from nearpeak.judging.variants import Inputs
from nearpeak.machines.machine import Machine
from nearpeak.ops.cost import costs_of
from nearpeak.trace.cuda_ops.target import target_of
from nearpeak.trace.trace import trace

SLACK = 0.9
"""Of a floor by the figures of a datasheet."""
SLACK_MEASURED = 0.5
"""Of a floor by figures that were measured here, where other programs may have run at that time."""
FAST_PRODUCTS = 0.75
"""Multiplications that two levels of Strassen's algorithm need, of those as written."""
LEAST_INFLUENCE = 1e-6
"""The gradient of an element that counts, over the typical one."""
MOST_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 28}
MOST_FLOPS = {"cpu": 4e9, "cuda": 4e12}
"""What is probed at most: a probe runs the reference in float64 a few times."""
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """What a call takes at the least."""

    bound_seconds: float
    """Of the work of the reference as written."""
    limiter: str
    ceilings: str
    seconds: float
    """Of what nobody can leave out."""
    why: str
    slack: float


def floor_of(function: Callable[..., Any], inputs: Inputs, machine: Machine) -> Floor:
    """The floor of a right result of `function`; an error where fake tensors cannot run it."""
    assert machine.achievable is not None
    recorded = trace(function, *inputs.args, kwargs=inputs.kwargs, grad=False, target=target_of(machine))
    costs = costs_of(recorded.ops)
    reached = ideal(recorded, costs, machine)
    limits = machine.theoretical
    least = reached if limits is None else ideal(recorded, costs, machine, ceilings="theoretical")
    bandwidth = (limits or machine.achievable).bandwidth
    total = sum(tensor.numel() * tensor.element_size() for tensor in inputs.tensors)
    needed = needed_bytes(function, inputs)
    seconds = max(0.0, least.memory_seconds - (total - needed) / bandwidth)
    why = f"{needed / 1e6:.3g} MB of inputs that matter, and the results, take that long to cross memory"
    rate = _fastest_rate(machine, inputs)
    flops = FAST_PRODUCTS * product_flops(function, inputs) if rate else 0.0
    if rate and flops / rate > seconds:
        seconds, why = flops / rate, f"{flops / 1e9:.3g} GFLOP of a dense product take that long"
    return Floor(
        bound_seconds=reached.seconds,
        limiter=reached.limiter,
        ceilings=machine.achievable.how,
        seconds=seconds,
        why=why,
        slack=SLACK if limits is not None else SLACK_MEASURED,
    )


def _fastest_rate(machine: Machine, inputs: Inputs) -> float | None:
    """FLOP/s that a right product reaches at most; None where it is not known.

    Three products of bfloat16 make one that is nearly as precise as float32. Products of float64 are made of many of
    narrow integers: nothing is said about them.
    """
    rates = (machine.theoretical or machine.achievable).matrix  # type: ignore[union-attr]
    floats = {tensor.dtype for tensor in inputs.tensors if tensor.is_floating_point()}
    names = [str(dtype).removeprefix("torch.") for dtype in floats]
    if len(names) != 1 or names[0] not in rates or names[0] == "float64":
        return None
    if names[0] == "float32":
        return max(rates["float32"], rates.get("bfloat16", 0.0) / 3)
    return rates[names[0]]


def needed_bytes(function: Callable[..., Any], inputs: Inputs) -> float:
    """Bytes of the inputs whose elements move a result, by the gradient of a random sum of the results.

    Integers, and a reference without gradients, count nothing.
    """
    tensors = inputs.tensors
    if _is_large(inputs):
        return 0.0
    args, kwargs = wide(map_tensors((inputs.args, inputs.kwargs), _with_gradient))
    leaves = tensors_in((args, kwargs))
    try:
        results = [result for result in tensors_in(function(*args, **kwargs)) if result.requires_grad]
        sources = [leaf for leaf in leaves if leaf.requires_grad]
        total = sum((result * torch.randn_like(result)).sum() for result in results)
        gradients = torch.autograd.grad(total, sources, allow_unused=True)  # type: ignore[arg-type]
    except Exception:  # what has no gradient, or changes its inputs, cannot be probed
        return 0.0
    by_leaf = dict(zip(map(id, sources), gradients, strict=True))
    needed = 0.0
    for tensor, leaf in zip(tensors, leaves, strict=True):
        gradient = by_leaf.get(id(leaf))
        if gradient is not None:
            typical = float(gradient.double().square().mean().sqrt())
            count = int((gradient.abs() > LEAST_INFLUENCE * typical).sum())
            needed += count * tensor.element_size()
    return needed


def _with_gradient(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    return plain.clone().requires_grad_() if plain.is_floating_point() and plain.element_size() > 1 else plain


def _is_large(inputs: Inputs) -> bool:
    device = inputs.tensors[0].device.type
    return sum(tensor.numel() for tensor in inputs.tensors) > MOST_ELEMENTS.get(device, 1 << 28)


class _Products(TorchDispatchMode):
    """Sees the products of a call, and adds `change` to the result of each."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.change = change
        self.factors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.sizes: list[int] = []
        self.has_others = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an op."""
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _PRODUCTS:
            first, second = args[-2:]
            self.factors.append((first, second))
            self.sizes.append(result.numel())
            if self.change is not None:
                result = result + self.change(result)
        elif any(word in name for word in ("convolution", "attention", "mv", "dot", "einsum", "fft", "linear")):
            self.has_others = True
        return result


def product_flops(function: Callable[..., Any], inputs: Inputs) -> float:
    """FLOPs of the one product of a reference, where each of its elements has a result of its own; 0 where it has not.

    One half of the elements of the product is moved, drawn at random, and then the other: where no result moves both
    times, nothing sums them up.
    """
    if _is_large(inputs):
        return 0.0
    args, kwargs = wide((inputs.args, inputs.kwargs))

    def results(mode: _Products) -> torch.Tensor:
        with torch.no_grad(), mode:
            found = tensors_in(function(*args, **kwargs))
        return torch.cat([result.detach().double().reshape(-1) for result in found])

    try:
        seen = _Products()
        plain = results(seen)
        if len(seen.factors) != 1 or seen.has_others:
            return 0.0
        first, second = seen.factors[0]
        flops = 2.0 * seen.sizes[0] * first.shape[-1]
        is_limited = flops > MOST_FLOPS.get(first.device.type, 4e12)
        if is_limited or not _are_inputs((first, second), tensors_in((args, kwargs))):
            return 0.0
        picks = torch.rand(seen.sizes[0], device=first.device) < 0.5

        def moved(where: torch.Tensor | None) -> torch.Tensor:
            def change(product: torch.Tensor) -> torch.Tensor:
                step = 10 * product.std() * torch.ones_like(product)
                return step if where is None else step * where.reshape(product.shape)

            return results(_Products(change)) != plain

        changed, *halves = (int(moved(where).sum()) for where in (None, picks, ~picks))
    except Exception:  # a reference that does not run in float64 cannot be probed
        return 0.0
    if not changed or changed > seen.sizes[0] or sum(halves) > 1.1 * changed:
        return 0.0
    return flops * changed / seen.sizes[0]


def _are_inputs(factors: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> bool:
    """Whether both factors hold the elements of an input each, of two inputs, without zeros."""
    used = []
    for factor in factors:
        if not factor.numel() or bool((factor == 0).any()):
            return False
        same = [i for i, tensor in enumerate(tensors) if _holds_the_same(factor, tensor)]
        if not same:
            return False
        used.append(same[0])
    return used[0] != used[1]


def _holds_the_same(factor: torch.Tensor, tensor: torch.Tensor) -> bool:
    if factor.numel() != tensor.numel() or not tensor.is_floating_point():
        return False
    sums = [(float(each.double().sum()), float(each.double().square().sum())) for each in (factor, tensor.detach())]
    return all(math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-9) for a, b in zip(*sums, strict=True))
