"""What the tests of kernels share: tolerances from theory, and layouts of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TIMES = 2.0
"""A kernel's error may be so many times that of the same mathematics in torch at the same precision."""
_ROUNDINGS = 1.5
"""And so many units in the last place of its dtype at the largest value, where torch happens to be exact."""
_ROUNDINGS_OF_EXP = 3.0
"""The same in float32 where each element takes an exponential: that of a GPU is off by up to 2 units (ex2.approx, of
which CUDA says so), and its argument and what follows are rounded too. It shows in tensors of few elements."""


def assert_as_exact(
    actual: Tensor, exact: Tensor, same_precision: Tensor, what: str = "", *, by_exp: bool = False
) -> None:
    """Holds a result against float64, beside torch's own result at the precision of the result.

    `by_exp`: whether each element takes an exponential.
    """
    assert actual.shape == exact.shape, f"{what}: shape {tuple(actual.shape)}, not {tuple(exact.shape)}"
    assert actual.dtype == same_precision.dtype, f"{what}: {actual.dtype}, not {same_precision.dtype}"
    if not exact.numel():
        return
    assert torch.equal(actual.isnan(), exact.isnan()), f"{what}: not a number in other places"
    exact = exact.double()
    error = (actual.double() - exact).abs().nan_to_num(0.0, 0.0, 0.0).max()
    allowed = (same_precision.double() - exact).abs().nan_to_num(0.0, 0.0, 0.0).max()
    finite = exact[exact.isfinite()]
    last_place = torch.finfo(actual.dtype).eps * (finite.abs().max() if finite.numel() else 0.0)
    roundings = _ROUNDINGS_OF_EXP if by_exp and actual.dtype == torch.float32 else _ROUNDINGS
    assert error <= TIMES * allowed + roundings * last_place, (
        f"{what}: off by {error:.3g} at most, torch by {allowed:.3g}, one unit is {last_place:.3g}"
    )


def gradients(function: Callable[..., Any], inputs: Sequence[Tensor], upstream: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The first result of a function and the gradients of all inputs that can have one."""
    leaves = [one.detach().requires_grad_(one.is_floating_point()) for one in inputs]
    result = function(*leaves)
    first = result[0] if isinstance(result, tuple) else result
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return first.detach(), list(torch.autograd.grad(first, wanted, upstream.to(first.dtype)))


def assert_kernel_is_exact(
    kernel: Callable[..., Any], reference: Callable[..., Any], inputs: Sequence[Tensor], upstream: Tensor | None = None,
    *, by_exp: bool = False,
) -> None:  # fmt: skip
    """The result of a kernel and all its gradients, against the reference in float64 and at the same precision."""
    same = reference(*inputs)
    shape = (same[0] if isinstance(same, tuple) else same).shape
    if upstream is None:
        generator = torch.Generator(device=inputs[0].device).manual_seed(1)
        upstream = torch.randn(shape, generator=generator, device=inputs[0].device).to(inputs[0].dtype)
    wide = [one.double() if one.is_floating_point() else one for one in inputs]
    actual, actual_gradients = gradients(kernel, inputs, upstream)
    exact, exact_gradients = gradients(reference, wide, upstream)
    low, low_gradients = gradients(reference, inputs, upstream)
    assert_as_exact(actual, exact, low, "result", by_exp=by_exp)
    for index, parts in enumerate(zip(actual_gradients, exact_gradients, low_gradients, strict=True)):
        assert_as_exact(*parts, f"gradient {index}", by_exp=by_exp)


def layouts(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same numbers, each time elsewhere in memory: names and tensors."""
    yield "contiguous", x.contiguous()
    if x.dim() > 1:
        yield "transposed", x.transpose(0, -1).contiguous().transpose(0, -1)
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device=x.device)
    yield "every other", wide[..., ::2].copy_(x)
    yield "part of rows", torch.cat([x, x], -1)[..., : x.shape[-1]]
    shifted = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)[1:]
    yield "not aligned", shifted.copy_(x.reshape(-1)).view(x.shape)
