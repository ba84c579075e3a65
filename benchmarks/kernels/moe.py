"""Section "experts" of `benchmarks.kernels`: grouped GEMMs, their gradients, 8 bits, and whole MoE layers.

Routing: "even" (all experts have as many rows), "uniform" (random experts) and "beta" (the probability of an expert is
drawn once from Beta(1, 5)). Implementations of grouped GEMMs: "nearpeak"; "torch", `torch._grouped_mm`, eager;
"max-autotune", the same compiled; and "scaled_grouped_mm", torch's in 8 bits. Row groups and offsets are computed
before, as a layer computes them once for several GEMMs. FLOPs are those of the routed rows.

Layers, from tokens and routing to results: "nearpeak"; "torch", as transformers has it with `torch._grouped_mm`;
"compile", the same through torch.compile; and "liger", its fused layer, which autotunes about 200 configurations at its
first call, so that several processes share them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.cases import HAS_LIGER, random_tensor
from benchmarks.kernels.flops_cases import (
    CHECKED_ROWS,
    FlopsCase,
    Made,
    both_call,
    compiled_way,
    forward_call,
    gradient_call,
    tuned_way,
)
from benchmarks.kernels.jobs import Steps
from nearpeak import kernels
from nearpeak.kernels.gemm.grouped import dequantize_rows, dequantize_weight

FLOAT8, LARGEST = torch.float8_e4m3fn, 448.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSizes:
    """Of all cases; by default those of Qwen3-235B-A22B, but for the tokens."""

    experts: int = 128
    tokens: int = 4096
    choices: int = 8
    columns: int = 4096
    inner: int = 1536
    routings: Sequence[str] = ("even", "uniform", "beta")
    layers: Sequence[str] = ("uniform", "beta")


def expert_cases(sizes: ExpertSizes | None = None, device: str = "cuda") -> Iterator[FlopsCase]:
    sizes = sizes or ExpertSizes()
    rows = sizes.tokens * sizes.choices
    flops = 2.0 * rows * sizes.columns * sizes.inner
    size = f"{sizes.experts} x {sizes.columns} x {sizes.inner}, {rows} rows"
    forward: Callable[[str], Made] = partial(grouped_forward, sizes=sizes, device=device)
    yield FlopsCase(
        operation="grouped_gemm",
        size=size,
        flops=flops,
        kinds=sizes.routings,
        make=forward,
        apart={"max-autotune": lambda: {"all": {"one": lambda: forward(sizes.routings[0]).ways["max-autotune"]()}}},
    )
    yield FlopsCase(
        operation="grouped_gemm gated",
        size=f"{sizes.experts} x {sizes.columns} x 2 x {sizes.inner}, {rows} rows",
        flops=2 * flops,
        kinds=sizes.routings,
        make=partial(_gated, sizes=sizes, device=device),
        compiled=("nearpeak", "torch + nearpeak"),
    )
    for step in ("by rows", "by matrices"):
        yield FlopsCase(
            operation="grouped_gemm",
            step=step,
            size=size,
            flops=flops,
            kinds=sizes.routings,
            make=partial(grouped_gradient, step=step, sizes=sizes, device=device),
        )
    for block in ("row", "128"):
        yield FlopsCase(
            operation=f"grouped_gemm fp8, {block}",
            size=size,
            flops=flops,
            kinds=sizes.routings,
            make=partial(_eight, block=block, sizes=sizes, device=device),
        )
    yield from layer_cases(sizes, device)


def counts_of(kind: str, experts: int, rows: int, device: str) -> Tensor:
    """How many rows each expert has, the same in every run."""
    if kind == "even":
        if rows % experts:
            raise ValueError(f"{rows} rows are not the same for each of {experts} experts")
        return torch.full((experts,), rows // experts, dtype=torch.int32, device=device)
    drawn = torch.multinomial(chances(kind, experts), rows, replacement=True)
    return torch.bincount(drawn, minlength=experts).to(torch.int32).to(device)


def chances(kind: str, experts: int) -> Tensor:
    """How often an expert is chosen, in proportion; on the CPU, the same in every run."""
    torch.manual_seed(0)
    return torch.ones(experts) if kind == "uniform" else torch.distributions.Beta(1.0, 5.0).sample((experts,))


@dataclass(frozen=True, slots=True)
class _Grouped:
    """Rows of experts, their matrices, and where the rows of each begin and end."""

    rows: Tensor
    weight: Tensor
    counts: Tensor
    groups: Tensor
    offsets: Tensor
    places: Tensor
    """The rows that are compared with float64."""

    @property
    def expert_of(self) -> Tensor:
        return torch.searchsorted(self.offsets, self.places.to(torch.int32), right=True)


def _grouped(kind: str, sizes: Any, columns: int, device: str) -> _Grouped:
    rows = sizes.tokens * sizes.choices
    counts = counts_of(kind, sizes.experts, rows, device)
    given = random_tensor(rows, sizes.columns, device=device, grad=False)
    weight = random_tensor(sizes.experts, columns, sizes.columns, device=device, grad=False)
    return _Grouped(
        given,
        weight.mul_(sizes.columns**-0.5),
        counts,
        kernels.row_groups(counts, rows=rows),
        counts.cumsum(0).to(torch.int32),
        torch.linspace(0, rows - 1, min(CHECKED_ROWS, rows), device=device).long(),
    )


def _exact_product(given: _Grouped, rows: Tensor, weight: Tensor, transposed: bool = False) -> Tensor:
    parts = []
    for place, expert in zip(given.places.tolist(), given.expert_of.tolist(), strict=True):
        matrix = weight[expert].double()
        parts.append((matrix.t() if transposed else matrix) @ rows[place].double())
    return torch.stack(parts)


def grouped_forward(kind: str, *, sizes: Any, device: str) -> Made:
    given = _grouped(kind, sizes, sizes.inner, device)

    def own(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return kernels.grouped_gemm(rows, weight, given.counts, groups=given.groups)

    ways = {"nearpeak": own, "torch": _by_torch, "max-autotune": tuned_way(_by_torch)}
    return Made(
        ways={name: forward_call(way, given.rows, given.weight, given.offsets) for name, way in ways.items()},
        exact=lambda: _exact_product(given, given.rows, given.weight),
        looked_at=lambda result: result[given.places],
    )


def _gated(kind: str, *, sizes: Any, device: str) -> Made:
    given = _grouped(kind, sizes, 2 * sizes.inner, device)

    def own() -> Tensor:
        return kernels.grouped_gemm(given.rows, given.weight, given.counts, groups=given.groups, activation="silu")

    def of_torch() -> Tensor:
        return kernels.swiglu_packed(_by_torch(given.rows, given.weight, given.offsets))

    def exact() -> Tensor:
        gate, up = _exact_product(given, given.rows, given.weight).chunk(2, -1)
        return functional.silu(gate) * up

    return Made(
        ways={"nearpeak": forward_call(own), "torch + nearpeak": forward_call(of_torch)},
        exact=exact,
        looked_at=lambda result: result[given.places],
    )


def grouped_gradient(kind: str, *, step: str, sizes: Any, device: str) -> Made:
    given = _grouped(kind, sizes, sizes.inner, device)
    above = random_tensor(len(given.rows), sizes.inner, device=device, grad=False)
    by_rows = step == "by rows"
    wanted = (given.rows if by_rows else given.weight).requires_grad_()
    middle = int(given.counts.argmax())  # its gradient is looked at

    def own(rows: Tensor, weight: Tensor) -> Tensor:
        return kernels.grouped_gemm(rows, weight, given.counts, groups=given.groups)

    def of_torch(rows: Tensor, weight: Tensor) -> Tensor:
        return _by_torch(rows, weight, given.offsets)

    def exact() -> Tensor:
        if by_rows:
            return _exact_product(given, above, given.weight, True)
        end = int(given.offsets[middle])
        mine = slice(end - int(given.counts[middle]), end)
        return above[mine, :CHECKED_ROWS].double().t() @ given.rows[mine].double()

    ways = {"nearpeak": own, "torch": of_torch}
    return Made(
        ways={name: gradient_call(way, above, [wanted], given.rows, given.weight) for name, way in ways.items()},
        exact=exact,
        looked_at=lambda result: result[0][given.places] if by_rows else result[0][middle, :CHECKED_ROWS],
    )


def _eight(kind: str, *, block: str, sizes: Any, device: str) -> Made:
    """torch has one scale for each row, and one for each column of a matrix: here all of a matrix have the same."""
    given = _grouped(kind, sizes, sizes.inner, device)
    if block == "128":
        rows, row_scales = kernels.quantize(given.rows, block=(1, 128))
        weight, scales = kernels.quantize(given.weight, block=(128, 128))
    else:
        rows, row_scales = kernels.quantize(given.rows, block="row")
        scales = given.weight.abs().amax((1, 2)).float() / LARGEST
        weight = (given.weight / scales[:, None, None]).to(FLOAT8)

    def own() -> Tensor:
        return kernels.grouped_gemm(
            rows, weight, given.counts, groups=given.groups, row_scales=row_scales, weight_scales=scales
        )

    ways = {"nearpeak": forward_call(own)}
    if block == "row":
        by_column = scales[:, None].expand(-1, sizes.inner).contiguous()
        ways["scaled_grouped_mm"] = forward_call(
            partial(torch._scaled_grouped_mm, out_dtype=torch.bfloat16, use_fast_accum=True),
            rows, weight.mT, row_scales, by_column, given.offsets,
        )  # fmt: skip

    def exact() -> Tensor:
        return _exact_product(given, dequantize_rows(rows, row_scales), dequantize_weight(weight, scales))

    return Made(ways=ways, exact=exact, looked_at=lambda result: result[given.places])


def _by_torch(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    result: Tensor = torch._grouped_mm(rows, weight.mT, offsets)
    return result


CHECKED_LAYER_ROWS = 8
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
            make=partial(expert_layer, sizes=sizes, device=device, both=both),
            compiled=("nearpeak", "compile"),
            apart={"liger": partial(_liger_jobs, sizes, device)} if HAS_LIGER else {},
        )


def expert_layer(kind: str, *, sizes: Any, device: str, both: bool) -> Made:
    given = _given(kind, sizes, device)
    ways: dict[str, Layer] = {
        "nearpeak": kernels.moe,
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
            looked_at=lambda result: result[0][:CHECKED_LAYER_ROWS],
        )
    return Made(
        ways={name: forward_call(way, *given.all()) for name, way in ways.items()},
        exact=lambda: _exact(given, given.x[:CHECKED_LAYER_ROWS].double()),
        looked_at=lambda result: result[:CHECKED_LAYER_ROWS],
    )


def _given(kind: str, sizes: Any, device: str) -> _Given:

    # the k largest of logarithms of chances with Gumbel noise are k draws in these proportions
    logits = chances(kind, sizes.experts).add(1e-3).log()
    logits = logits - torch.rand(sizes.tokens, sizes.experts).log().neg().log()
    weights, experts = kernels.route(logits.to(device), sizes.choices, renormalize=True)
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
    rows = []
    for token, one in enumerate(x.unbind()):
        total = torch.zeros_like(one)
        for weight, expert in zip(given.weights[token].tolist(), given.experts[token].tolist(), strict=True):
            gate, up = (given.gate_up[expert].detach().double() @ one).chunk(2)
            total = total + weight * (given.down[expert].detach().double() @ (functional.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


def _exact_gradient(given: _Given, above: Tensor) -> Tensor:
    """By the first tokens."""
    with torch.enable_grad():
        x = given.x[:CHECKED_LAYER_ROWS].detach().double().requires_grad_()
        return torch.autograd.grad(_exact(given, x), x, above[:CHECKED_LAYER_ROWS].double())[0]


def liger_layer(quick: bool = False) -> Layer:
    """Liger's layer; `quick` tries each configuration for 20 ms, where it would do so for 100."""
    function = importlib.import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction
    if quick:
        for kernel in _tuned_by_liger():
            kernel.__dict__["do_bench"] = _quick_bench

    def call(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        result: Tensor = function.apply(x, gate_up, down, experts, weights.to(x.dtype))
        return result

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
