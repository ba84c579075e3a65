"""Section "products" of `benchmarks.kernels`: GEMMs alone, with epilogues, and in 8 bits.

Implementations: "nearpeak"; "cublas", `torch.nn.functional.linear` alone; "cublas + ...", followed by kernels of
nearpeak, Liger or torch; "cublas fused", epilogues of cuBLAS: `torch.addmm` with a residual, and
`torch._addmm_activation` with bias and GELU; "compile" and "max-autotune", torch.compile without and with its own GEMM
kernels; "scaled_mm", torch's GEMM in 8 bits. All have the same normally distributed inputs. For the gated GEMM, Liger
gets gate and up from two GEMMs, as in its layer: it would copy halves of one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.cases import liger, random_tensor
from benchmarks.kernels.flops_cases import (
    CHECKED_ROWS,
    Call,
    FlopsCase,
    Made,
    both_call,
    compiled_way,
    forward_call,
    gradient_call,
    tuned_way,
)
from nearpeak import kernels
from nearpeak.kernels.gemm import dequantize_operand

BLOCKS: dict[str, tuple[Any, Any]] = {
    "tensor": ("tensor", "tensor"),
    "row": ("row", "row"),
    "128": ((1, 128), (128, 128)),
}
"""Which numbers of x and of the weight have one scale."""
SPREAD = 0.02
"""Of the weights of layers: results of about 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductSizes:
    """Of all cases."""

    cubes: Sequence[int] = (4096, 8192, 16384)
    gradients: int = 8192
    tokens: int = 8192
    features: int = 4096
    hidden: int = 14336
    """Of a layer of Llama 3 8B."""
    eight: int = 8192


def product_cases(sizes: ProductSizes | None = None, device: str = "cuda") -> Iterator[FlopsCase]:
    sizes = sizes or ProductSizes()
    layer = _Layer(sizes.tokens, sizes.features, sizes.hidden, device)
    yield from layer.cases()
    for size in sizes.cubes:
        yield FlopsCase(
            operation="gemm", size=str(size), flops=2.0 * size**3, make=partial(_cube, size=size, device=device)
        )
    for step in ("by x", "by weight"):
        yield FlopsCase(
            operation="gemm",
            step=step,
            size=str(sizes.gradients),
            flops=2.0 * sizes.gradients**3,
            make=partial(_cube_gradient, step=step, size=sizes.gradients, device=device),
        )
    for block in BLOCKS:
        for fast in (False,) if block == "128" else (True, False):
            yield FlopsCase(
                operation="fp8",
                size=str(sizes.eight),
                flops=2.0 * sizes.eight**3,
                kinds=(f"{block}, {'fast' if fast else 'exact'}",),
                make=partial(_eight, size=sizes.eight, block=block, fast=fast, device=device),
            )


def _cube(kind: str, *, size: int, device: str) -> Made:
    torch.manual_seed(0)
    x, weight = (random_tensor(size, size, device=device, grad=False) for _ in "xw")
    return Made(
        ways={
            "nearpeak": forward_call(kernels.gemm, x, weight),
            "cublas": forward_call(functional.linear, x, weight),
        },
        exact=lambda: x[:CHECKED_ROWS].double() @ weight.double().t(),
    )


def _cube_gradient(kind: str, *, step: str, size: int, device: str) -> Made:
    torch.manual_seed(0)
    x, weight, above = (random_tensor(size, size, device=device, grad=False) for _ in "xwa")
    wanted = (x if step == "by x" else weight).requires_grad_()

    def exact() -> Tensor:
        if step == "by x":
            return above[:CHECKED_ROWS].double() @ weight.double()
        return above[:, :CHECKED_ROWS].double().t() @ x.double()

    return Made(
        ways={
            "nearpeak": gradient_call(kernels.gemm, above, [wanted], x, weight),
            "cublas": gradient_call(functional.linear, above, [wanted], x, weight),
        },
        exact=exact,
        looked_at=lambda result: result[0][:CHECKED_ROWS],
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    """Products as in a layer of tokens with so many features, and so many inside."""

    tokens: int
    features: int
    hidden: int
    device: str

    def cases(self) -> Iterator[FlopsCase]:
        flops = 2.0 * self.tokens * self.features * self.hidden
        size = f"{self.tokens} x {self.features} x {self.hidden}"
        compiled = ("nearpeak", "cublas + nearpeak", "cublas + liger", "compile")
        # first of all: it takes long to compile
        yield FlopsCase(
            operation="swiglu",
            size=f"{self.tokens} x {self.features} x 2 x {self.hidden}",
            flops=2 * flops,
            make=self.gated,
            compiled=compiled,
            apart={"max-autotune": lambda: {"all": {"one": _late(self.gated, "max-autotune")}}},
        )
        yield FlopsCase(
            operation="swiglu",
            step="both",
            size=f"{self.tokens} x {self.features} x 2 x {self.hidden}",
            flops=6 * flops,
            make=self.gated_both,
            compiled=compiled,
        )
        yield FlopsCase(operation="bias gelu", size=size, flops=flops, make=self.biased, compiled=compiled)
        size = f"{self.tokens} x {self.hidden} x {self.features}"
        yield FlopsCase(operation="residual", size=size, flops=flops, make=self.added, compiled=compiled)

    def random(self, *shape: int, spread: float = 1.0, grad: bool = False) -> Tensor:
        return (random_tensor(*shape, device=self.device, grad=False) * spread).requires_grad_(grad)

    def gated_ways(self) -> dict[str, Callable[..., Tensor]]:
        def own(x: Tensor, weight: Tensor) -> Tensor:
            return kernels.gemm(x, weight, activation="silu", gated=True)

        ways = {
            "nearpeak": own,
            "cublas + nearpeak": lambda x, weight: kernels.swiglu_packed(functional.linear(x, weight)),
            "compile": compiled_way(_plain_swiglu),
        }
        of_liger = liger("swiglu")
        if of_liger is not None:
            ways["cublas + liger"] = lambda x, weight: of_liger(
                *(functional.linear(x, half) for half in weight.chunk(2))
            )
        return ways

    def gated(self, kind: str = "") -> Made:
        torch.manual_seed(0)
        x, weight = self.random(self.tokens, self.features), self.random(2 * self.hidden, self.features, spread=SPREAD)
        ways = {**self.gated_ways(), "max-autotune": tuned_way(_plain_swiglu)}
        return Made(
            ways={name: forward_call(way, x, weight) for name, way in ways.items()},
            exact=lambda: _plain_swiglu(x[:CHECKED_ROWS].double(), weight.double()),
        )

    def gated_both(self, kind: str = "") -> Made:
        torch.manual_seed(0)
        x = self.random(self.tokens, self.features, grad=True)
        weight = self.random(2 * self.hidden, self.features, spread=SPREAD, grad=True)
        above = self.random(self.tokens, self.hidden)

        def exact() -> Tensor:
            with torch.enable_grad():
                some = x[:CHECKED_ROWS].detach().double().requires_grad_()
                result = _plain_swiglu(some, weight.detach().double())
                return torch.autograd.grad(result, some, above[:CHECKED_ROWS].double())[0]

        return Made(
            ways={name: both_call(way, above, [x, weight], x, weight) for name, way in self.gated_ways().items()},
            exact=exact,
            looked_at=lambda result: result[0][:CHECKED_ROWS],
        )

    def biased(self, kind: str = "") -> Made:
        torch.manual_seed(0)
        x, bias = self.random(self.tokens, self.features), self.random(self.hidden)
        weight = self.random(self.hidden, self.features, spread=SPREAD)

        def own(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return kernels.gemm(x, weight, bias=bias, activation="gelu_tanh")

        def after(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return kernels.bias_gelu(functional.linear(x, weight), bias, "tanh")

        ways = {
            "nearpeak": own,
            "cublas + nearpeak": after,
            "cublas fused": lambda x, weight, bias: torch._addmm_activation(bias, x, weight.t(), use_gelu=True),
            "compile": compiled_way(_plain_gelu),
        }
        return Made(
            ways={name: forward_call(way, x, weight, bias) for name, way in ways.items()},
            exact=lambda: _plain_gelu(x[:CHECKED_ROWS].double(), weight.double(), bias.double()),
        )

    def added(self, kind: str = "") -> Made:
        torch.manual_seed(0)
        x, residual = self.random(self.tokens, self.hidden), self.random(self.tokens, self.features)
        weight = self.random(self.features, self.hidden, spread=SPREAD)

        def own(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
            return kernels.gemm(x, weight, residual=residual)

        ways = {
            "nearpeak": own,
            "cublas + torch": _plain_residual,
            "cublas fused": lambda x, weight, residual: torch.addmm(residual, x, weight.t()),
            "compile": compiled_way(_plain_residual),
        }
        return Made(
            ways={name: forward_call(way, x, weight, residual) for name, way in ways.items()},
            exact=lambda: _plain_residual(x[:CHECKED_ROWS].double(), weight.double(), residual[:CHECKED_ROWS].double()),
        )


def _late(make: Callable[[str], Made], way: str) -> Call:
    return lambda: make("").ways[way]()


def _plain_swiglu(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = functional.linear(x, weight).chunk(2, -1)
    return functional.silu(gate) * up


def _plain_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.gelu(functional.linear(x, weight, bias), approximate="tanh")


def _plain_residual(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    return functional.linear(x, weight) + residual


def _eight(kind: str, *, size: int, block: str, fast: bool, device: str) -> Made:
    return fp8_product(size, size, size, block, fast, device)


def fp8_product(rows: int, features: int, results: int, block: str, fast: bool, device: str) -> Made:
    """float8_e4m3fn with the scales of `quantize`; "exact" is without `fast_accumulate`."""
    torch.manual_seed(0)
    wide = [random_tensor(*shape, device=device, grad=False) for shape in ((rows, features), (results, features))]
    (x, scale_x), (weight, scale_weight) = (
        kernels.quantize(one, block=how) for one, how in zip(wide, BLOCKS[block], strict=True)
    )
    del wide

    def own() -> Tensor:
        return kernels.gemm(x, weight, scale_x=scale_x, scale_weight=scale_weight, fast_accumulate=fast)

    of_torch = {
        "tensor": (scale_x, scale_weight),
        "row": (scale_x[..., None], scale_weight[None]),
        # torch wants the scales of blocks of 128 of a row next to those of the next row
        "128": (scale_x.t().contiguous().t() if scale_x.dim() else scale_x, scale_weight.t()),
    }[block]
    scaled = partial(torch._scaled_mm, x, weight.t(), *of_torch, out_dtype=torch.bfloat16, use_fast_accum=fast)

    def exact() -> Tensor:
        some_scales = scale_x[:CHECKED_ROWS] if scale_x.dim() else scale_x
        some = dequantize_operand(x[:CHECKED_ROWS], some_scales, 1).double()
        return some @ dequantize_operand(weight, scale_weight, 128).double().t()

    return Made(ways={"nearpeak": forward_call(own), "scaled_mm": forward_call(scaled)}, exact=exact)
