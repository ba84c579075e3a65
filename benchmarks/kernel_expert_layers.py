"""Whole layers of experts for `benchmarks/kernels.py`: from tokens and the choice of experts to results, both passes.

The ways: "nearpeak", `mixture_of_experts`; "torch", a layer as transformers has it with `torch._grouped_mm`: sort,
gather, two products, weights, and a sum; "compile", the same through torch.compile; "liger", its fused layer, which
tries about 200 configurations when it is first called: several processes compile some of them each, and the process
that measures tries all, each for 20 ms. The router itself is left out: all ways have the same choice and weights.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from kernel_cases import HAS_LIGER, random_tensor
from kernel_flops import FlopsCase, Made, both_call, compiled_way, forward_call
from kernel_jobs import Steps
from torch import Tensor
from torch.nn import functional

from nearpeak import kernels

LOOKED_AT = 8
"""Tokens that are compared with float64: each needs all matrices of its experts."""
SLICES = 12
"""Processes that compile the configurations of Liger."""
FEW_EXPERTS, FEW_TOKENS = 8, 256
"""For compiling Liger's layer: its kernels know the sizes of matrices alone."""
Layer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Given:
    """What a layer takes: tokens, weights and experts of each, and the matrices."""

    x: Tensor
    weights: Tensor
    experts: Tensor
    gate_up: Tensor
    down: Tensor

    def all(self) -> tuple[Tensor, ...]:
        return self.x, self.weights, self.experts, self.gate_up, self.down

    def leaves(self) -> list[Tensor]:
        return [self.x, self.weights, self.gate_up, self.down]


def layer_cases(sizes: Any, device: str) -> Iterator[FlopsCase]:
    flops = 6.0 * sizes.tokens * sizes.choices * sizes.columns * sizes.inner
    size = f"{sizes.tokens} tokens, {sizes.choices} of {sizes.experts} x {sizes.columns} x {sizes.inner}"
    for both in (False, True):
        yield FlopsCase(
            operation="experts layer",
            step="both" if both else "forward",
            size=size,
            flops=flops * (3 if both else 1),
            kinds=sizes.layers,
            make=partial(_made, sizes=sizes, device=device, both=both),
            compiled=("nearpeak", "compile"),
            apart={"liger": partial(_liger_jobs, sizes, device)} if HAS_LIGER else {},
        )


def _made(kind: str, *, sizes: Any, device: str, both: bool) -> Made:
    given = _given(kind, sizes, device)
    ways: dict[str, Layer] = {
        "nearpeak": kernels.mixture_of_experts,
        "torch": plain_layer,
        "compile": compiled_way(plain_layer),
    }
    if HAS_LIGER:
        ways["liger"] = liger_layer(quick=True)
    if both:
        above = random_tensor(sizes.tokens, sizes.columns, device=device, grad=False)
        return Made(
            ways={name: both_call(way, above, given.leaves(), *given.all()) for name, way in ways.items()},
            exact=partial(_exact_gradient, given, above),
            looked_at=lambda result: result[0][:LOOKED_AT],
        )
    return Made(
        ways={name: forward_call(way, *given.all()) for name, way in ways.items()},
        exact=lambda: _exact(given, given.x[:LOOKED_AT].double()),
        looked_at=lambda result: result[:LOOKED_AT],
    )


def _given(kind: str, sizes: Any, device: str) -> _Given:
    from kernel_experts import chances

    # the k largest of logarithms of chances with Gumbel noise are k draws in these proportions
    logits = chances(kind, sizes.experts).add(1e-3).log()
    logits = logits - torch.rand(sizes.tokens, sizes.experts).log().neg().log()
    weights, experts = kernels.route(logits.to(device), sizes.choices, renormalise=True)
    gate_up = random_tensor(sizes.experts, 2 * sizes.inner, sizes.columns, device=device, grad=False)
    down = random_tensor(sizes.experts, sizes.columns, sizes.inner, device=device, grad=False)
    return _Given(
        random_tensor(sizes.tokens, sizes.columns, device=device),
        weights.detach().requires_grad_(),
        experts,
        gate_up.mul_(sizes.columns**-0.5).requires_grad_(),
        down.mul_(sizes.inner**-0.5).requires_grad_(),
    )


def plain_layer(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    (tokens, choices), number = experts.shape, gate_up.shape[0]
    flat = experts.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.histc(flat.float(), number, 0, number - 1)  # which a graph can be made of, as of bincount not
    offsets = counts.cumsum(0).to(torch.int32)
    gate, up = torch._grouped_mm(x[order // choices], gate_up.mT, offsets).chunk(2, -1)
    results = torch._grouped_mm(functional.silu(gate) * up, down.mT, offsets)
    results = results * weights.reshape(-1)[order, None].to(x.dtype)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    return results[back].view(tokens, choices, -1).sum(1)


def _exact(given: _Given, x: Tensor) -> Tensor:
    """Results of the first tokens, which are given in float64."""
    found = []
    for token, one in enumerate(x.unbind()):
        total = torch.zeros_like(one)
        for weight, expert in zip(given.weights[token].tolist(), given.experts[token].tolist(), strict=True):
            gate, up = (given.gate_up[expert].detach().double() @ one).chunk(2)
            total = total + weight * (given.down[expert].detach().double() @ (functional.silu(gate) * up))
        found.append(total)
    return torch.stack(found)


def _exact_gradient(given: _Given, above: Tensor) -> Tensor:
    """By the first tokens."""
    with torch.enable_grad():
        x = given.x[:LOOKED_AT].detach().double().requires_grad_()
        return torch.autograd.grad(_exact(given, x), x, above[:LOOKED_AT].double())[0]


def liger_layer(quick: bool = False) -> Layer:
    """Liger's layer; `quick` tries each configuration for 20 ms, where it would do so for 100."""
    function = importlib.import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction
    if quick:
        for kernel in _tuned_by_liger():
            kernel.__dict__["do_bench"] = _quick_bench

    def call(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        found: Tensor = function.apply(x, gate_up, down, experts, weights.to(x.dtype))
        return found

    return call


def _quick_bench(call: Callable[[], Any], quantiles: Sequence[float]) -> Any:
    testing = importlib.import_module("triton.testing")
    return testing.do_bench(call, warmup=5, rep=20, quantiles=quantiles)


def _tuned_by_liger() -> list[Any]:
    module = importlib.import_module("liger_kernel.ops.fused_moe_kernels")
    return [one for one in vars(module).values() if hasattr(one, "configs") and hasattr(one, "fn")]


def _liger_jobs(sizes: Any, device: str) -> dict[str, Steps]:
    """By number, a job that compiles some of the configurations of each kernel."""
    return {str(number): {"some": partial(_compile_some, sizes, device, number)} for number in range(SLICES)}


def _compile_some(sizes: Any, device: str, number: int) -> None:
    experts, tokens = min(FEW_EXPERTS, sizes.experts), min(FEW_TOKENS, sizes.tokens)
    few = type(sizes)(
        experts=experts,
        tokens=tokens,
        choices=min(sizes.choices, experts),
        columns=sizes.columns,
        inner=sizes.inner,
    )
    given = _given("uniform", few, device)
    layer = liger_layer(quick=True)
    kernels_of_liger = _tuned_by_liger()
    every = [kernel.configs for kernel in kernels_of_liger]
    try:
        for kernel, configs in zip(kernels_of_liger, every, strict=True):
            kernel.configs = configs[number::SLICES] or configs[:1]
        above = torch.randn_like(given.x)
        both_call(layer, above, given.leaves(), *given.all())()
    finally:
        for kernel, configs in zip(kernels_of_liger, every, strict=True):
            kernel.configs = configs
            kernel.cache.clear()
