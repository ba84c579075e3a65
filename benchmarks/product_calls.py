"""Calls of products, grouped products, layers of experts and linear attention, drawn at random.

For `benchmarks/product_numerics.py`: a kind is what kernels are compiled for, and of each kind there are many calls.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

FLOAT8_BLOCKS: dict[str, tuple[Any, Any]] = {
    "tensor": ("tensor", "tensor"),
    "row": ("row", "row"),
    "128": ((1, 128), (128, 128)),
}
EPS = 1e-6
STEP = 7
"""From kind to kind; it has no divisor in common with their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a kernel is compiled for."""

    operation: str = "product"
    """Or "grouped" (product), "experts" (a layer), "linear" (attention)."""
    dtype: str = "bfloat16"
    aligned: bool = True
    """Whether rows of matrices begin at multiples of 16 bytes; large sizes of these have kernels of Hopper."""
    activation: str = ""
    gated: bool = False
    bias: str = ""
    """Its dtype."""
    residual: bool = False
    across: str = ""
    """Which factor has columns, and not rows, next to each other: "x", "weight" or "both"."""
    recompute: bool = False
    scales: str = ""
    """Of 8 bits: "tensor", "row" or "128"."""
    fast: bool = False
    out_dtype: str = ""
    causal: bool = False
    dim: int = 0
    value_dim: int = 0

    def described(self) -> str:
        """What is not as in others."""
        values = asdict(self)
        rest = [name if values[name] is True else f"{name} {values[name]}" for name in list(values)[3:] if values[name]]
        return ", ".join([f"{self.operation} {self.dtype}{'' if self.aligned else ' odd'}", *rest])


KINDS = (
    Kind(),
    Kind(aligned=False),
    Kind(dtype="float16"),
    Kind(dtype="float32", aligned=False),
    Kind(dtype="float32", activation="gelu_tanh", bias="float32"),
    Kind(across="x"),
    Kind(across="weight", residual=True),
    Kind(across="both", aligned=False, bias="bfloat16"),
    Kind(activation="silu", gated=True),
    Kind(activation="silu", gated=True, aligned=False, residual=True),
    Kind(activation="gelu", gated=True, bias="float32", recompute=True),
    Kind(activation="gelu_tanh", bias="bfloat16"),
    Kind(activation="gelu", bias="float32", residual=True, dtype="float16"),
    Kind(activation="relu_squared", aligned=False, bias="bfloat16", recompute=True),
    Kind(activation="silu", residual=True),
    Kind(out_dtype="float32", residual=True),
    Kind(dtype="float8", scales="tensor"),
    Kind(dtype="float8", scales="row", fast=True, bias="bfloat16"),
    Kind(dtype="float8", scales="row", aligned=False),
    Kind(dtype="float8", scales="128"),
    Kind(dtype="float8", scales="128", activation="silu", gated=True),
    Kind(operation="grouped"),
    Kind(operation="grouped", aligned=False),
    Kind(operation="grouped", dtype="float16", activation="gelu"),
    Kind(operation="grouped", activation="silu"),
    Kind(operation="grouped", activation="gelu_tanh", aligned=False),
    Kind(operation="grouped", across="weight"),
    Kind(operation="grouped", dtype="float32", aligned=False),
    Kind(operation="grouped", dtype="float8", scales="row"),
    Kind(operation="grouped", dtype="float8", scales="128", activation="silu"),
    Kind(operation="experts", activation="silu"),
    Kind(operation="experts", activation="gelu", aligned=False),
    Kind(operation="linear", causal=True, dim=128, value_dim=128),
    Kind(operation="linear", dim=128, value_dim=128),
    Kind(operation="linear", causal=True, dim=64, value_dim=64),
    Kind(operation="linear", causal=True, dim=40, value_dim=72, aligned=False),
    Kind(operation="linear", dtype="float16", causal=True, dim=64, value_dim=128),
    Kind(operation="linear", dtype="float32", dim=36, value_dim=36),
    Kind(operation="linear", dtype="float32", causal=True, dim=64, value_dim=64),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A call of a kind."""

    kind: Kind
    seed: int
    rows: int
    columns: int
    depth: int
    counts: tuple[int, ...] = ()
    """Rows of experts."""
    behind: int = 0
    """Rows that no expert has."""
    choices: int = 0
    batch: int = 0
    heads: int = 0
    group: int = 0
    """Heads of queries that share keys."""
    spread: float = 1.0
    """How large numbers are."""


def drawn(kind: Kind, seed: int, most: int) -> Drawn:
    """A call whose matrices have up to `most` rows and columns."""
    at_random = random.Random(seed)

    def size(least: int, largest: int, step: int = 1) -> int:
        return at_random.randint(max(1, least // step), max(1, largest // step)) * step

    if kind.operation == "linear":
        return Drawn(
            kind=kind,
            seed=seed,
            rows=size(1, most),
            columns=size(1, most),
            depth=kind.dim,
            batch=at_random.randint(1, 2),
            heads=at_random.randint(1, 3),
            group=at_random.choice((1, 1, 2, 4)),
            spread=at_random.choice((0.3, 1.0, 2.0)),
        )
    # half of the aligned ones are large enough for the kernels of Hopper
    least = most // 2 if kind.aligned and at_random.random() < 0.5 else 1
    step = (16 if kind.aligned else 1) * (2 if kind.aligned and kind.gated else 1)
    rows, columns, depth = size(least, most), size(least, most, step), size(least // 2, most // 2, step)
    if kind.aligned:  # two variants of rows, and no more to compile
        rows = at_random.choice((-(-rows // 16) * 16, rows | 1))
    else:
        columns, depth = columns | 1, depth | 1
    counts: tuple[int, ...] = ()
    if kind.operation in ("grouped", "experts"):
        counts = _counts(at_random, rows, at_random.choice((1, 3, 4, 8, 11)))
    return Drawn(
        kind=kind,
        seed=seed,
        rows=rows,
        columns=columns,
        depth=depth,
        counts=counts,
        behind=at_random.choice((0, 0, 5)),
        choices=at_random.randint(1, min(3, max(1, len(counts)))),
        spread=at_random.choice((0.5, 1.0, 2.0)),
    )


def _counts(at_random: random.Random, rows: int, experts: int) -> tuple[int, ...]:
    """Some even, some skewed, and some with experts that have no rows."""
    chances = [at_random.choice((1.0, at_random.betavariate(1, 5) + 1e-3, 0.0)) for _ in range(experts)]
    chances = chances if any(chances) else [1.0] * experts
    found = [0] * experts
    for expert in at_random.choices(range(experts), chances, k=rows):
        found[expert] += 1
    return tuple(found)


def all_drawn(number: int, most: int, kinds: Sequence[Kind] = KINDS) -> list[Drawn]:
    """Calls of all kinds in turn, in an order in which few calls are of all operations too."""
    return [drawn(kinds[seed * STEP % len(kinds)], seed, most) for seed in range(number)]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call with its tensors."""

    function: Callable[..., Any]
    """Of the tensors, by name."""
    tensors: Mapping[str, Any]
    """Those of floating point have gradients, unless `differentiable` is off."""
    differentiable: bool
    exact: Callable[..., Any] | None = None
    """The same for tensors in float64, where the function does not take them."""


def made(call: Drawn, device: str) -> Prepared:
    import torch

    torch.manual_seed(call.seed)
    operation = {"grouped": _grouped, "experts": _experts, "linear": _linear}.get(call.kind.operation, _product)
    dtype = torch.bfloat16 if call.kind.scales else getattr(torch, call.kind.dtype)

    def randn(*shape: int, of: Any = dtype, spread: float = 1.0, across: bool = False) -> Any:
        found = (torch.randn(shape, device=device) * spread).to(of)
        return found.mT.contiguous().mT if across else found

    return operation(call, randn, device)


def _product(call: Drawn, randn: Callable[..., Any], device: str) -> Prepared:
    import torch

    from nearpeak import kernels

    kind = call.kind
    lines = call.columns * (2 if kind.gated else 1)
    x = randn(call.rows, call.depth, spread=call.spread, across=kind.across in ("x", "both"))
    weight = randn(lines, call.depth, spread=call.depth**-0.5, across=kind.across in ("weight", "both"))
    tensors = {"x": x, "weight": weight}
    if kind.bias:
        tensors["bias"] = randn(lines, of=getattr(torch, kind.bias))
    if kind.residual:
        tensors["residual"] = randn(call.rows, call.columns)
    options: dict[str, Any] = {"activation": kind.activation or None, "gated": kind.gated, "recompute": kind.recompute}
    if kind.out_dtype:
        options["out_dtype"] = getattr(torch, kind.out_dtype)
    if kind.scales:
        return _product_of_eight(call, tensors, options)

    def function(x: Any, weight: Any, bias: Any = None, residual: Any = None) -> Any:
        given = dict(options)
        if x.dtype == torch.float64:
            given.pop("out_dtype", None)
        return kernels.product(x, weight, bias=bias, residual=residual, **given)

    return Prepared(function, tensors, True)


def _product_of_eight(call: Drawn, tensors: dict[str, Any], options: dict[str, Any]) -> Prepared:
    from nearpeak import kernels
    from nearpeak.kernels.operations.product_arguments import dequantised

    (x, scale_x), (weight, scale_weight) = (
        kernels.quantise(tensors.pop(name), block=block)
        for name, block in zip(("x", "weight"), FLOAT8_BLOCKS[call.kind.scales], strict=True)
    )
    scales: dict[str, Any] = {"scale_x": scale_x, "scale_weight": scale_weight}

    def function(bias: Any = None) -> Any:
        return kernels.product(x, weight, bias=bias, fast_accumulate=call.kind.fast, **scales, **options)

    def exact(bias: Any = None) -> Any:
        wide = dequantised(x, scale_x, 1).double(), dequantised(weight, scale_weight, 128).double()
        return kernels.product(*wide, bias=bias, **options)

    return Prepared(function, tensors, False, exact)


def _grouped(call: Drawn, randn: Callable[..., Any], device: str) -> Prepared:
    import torch

    from nearpeak import kernels
    from nearpeak.kernels.operations.grouped_product_operators import widened_matrices, widened_rows

    kind, experts = call.kind, len(call.counts)
    lines = call.columns * (2 if kind.activation else 1)
    counts = torch.tensor(call.counts, dtype=torch.int32, device=device)
    rows = randn(call.rows + call.behind, call.depth, spread=call.spread)
    weight = randn(experts, lines, call.depth, spread=call.depth**-0.5, across=kind.across == "weight")
    activation: Any = kind.activation or None
    if not kind.scales:
        return Prepared(
            lambda rows, weight: kernels.grouped_product(rows, weight, counts, activation=activation),
            {"rows": rows, "weight": weight},
            True,
        )
    eight, row_scales = kernels.quantise(rows, block=(1, 128) if kind.scales == "128" else "row")
    matrices, scales = kernels.quantise(weight, block=(128, 128) if kind.scales == "128" else "tensor")
    scales = scales if kind.scales == "128" else scales.expand(experts).contiguous()
    given: dict[str, Any] = {"row_scales": row_scales, "weight_scales": scales}
    wide = widened_rows(eight, row_scales).double(), widened_matrices(matrices, scales).double()
    return Prepared(
        lambda: kernels.grouped_product(eight, matrices, counts, activation=activation, **given),
        {},
        False,
        lambda: kernels.grouped_product(*wide, counts, activation=activation),
    )


def _experts(call: Drawn, randn: Callable[..., Any], device: str) -> Prepared:
    import torch

    from nearpeak import kernels

    experts = len(call.counts)
    logits = torch.randn(call.rows, experts, device=device)
    chosen = logits.topk(call.choices)[1].to(torch.int32)
    chosen[torch.rand(chosen.shape, device=device) < 0.05] = -1  # some are dropped
    activation: Any = call.kind.activation
    return Prepared(
        lambda x, weights, gate_up, down: kernels.mixture_of_experts(
            x, weights, chosen, gate_up, down, activation=activation
        ),
        {
            "x": randn(call.rows, call.depth, spread=call.spread),
            "weights": torch.rand(call.rows, call.choices, device=device),
            "gate_up": randn(experts, 2 * call.columns, call.depth, spread=call.depth**-0.5),
            "down": randn(experts, call.depth, call.columns, spread=call.columns**-0.5),
        },
        True,
    )


def _linear(call: Drawn, randn: Callable[..., Any], device: str) -> Prepared:
    from nearpeak import kernels

    kind = call.kind
    queries = call.columns if kind.causal else call.rows
    tensors = {
        "query": randn(call.batch, call.heads * call.group, queries, kind.dim, spread=call.spread),
        "key": randn(call.batch, call.heads, call.columns, kind.dim, spread=call.spread),
        "value": randn(call.batch, call.heads, call.columns, kind.value_dim),
    }
    return Prepared(
        lambda query, key, value: kernels.linear_attention(query, key, value, causal=kind.causal, eps=EPS),
        tensors,
        True,
    )
