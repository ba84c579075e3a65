"""What is tuned of matrix products, of layers of experts and of linear attention: see `kernel_tunables`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from kernel_cases import random_tensor
from kernel_tunable import MANY, Tunable, TunedSizes, Where, near_of

from nearpeak import kernels
from nearpeak.kernels.jit import (
    grouped_product,
    grouped_product_launch,
    linear_attention_configs,
    product_hopper_launch,
    routing,
)

KINDS = ("16_bits", "16_bits_gated", "8_bits", "8_bits_gated", "8_bits_fast", "8_bits_fast_gated")
HEIGHTS = (16, 64)
"""Rows of tiles of experts that have few rows."""


def product_tunables(sizes: TunedSizes, device: str) -> Iterator[Tunable]:
    for side, depth in sizes.products:
        for kind in KINDS:
            yield _product(side, depth, kind, False, device)
        for kind in KINDS[:2]:
            yield _product(side, depth, kind, True, device)
    yield from _experts(sizes, device)
    yield from _experts_of_few(sizes, device)
    yield from _routed(sizes, device)
    yield from _linear_attention(sizes, device)


def _product(side: int, depth: int, kind: str, keep: bool, device: str) -> Tunable:
    gated, eight = kind.endswith("_gated"), kind.startswith("8_bits")
    results = 2 * side if gated else side
    activation = "silu" if gated or keep else None

    def make() -> Callable[[], Any]:
        x, weight = (random_tensor(lines, depth, device=device, grad=keep) for lines in (side, results))
        if not eight:
            return lambda: kernels.product(x, weight, activation=activation, gated=gated)
        x, weight = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
        scale = torch.ones((), device=device)
        options = {"activation": activation, "gated": gated, "fast_accumulate": "fast" in kind}
        return lambda: kernels.product(x, weight, scale_x=scale, scale_weight=scale, **options)

    # tiles that are left over at the end decide, so that an entry holds for results of nearly this size alone
    numbers = side * side
    return Tunable(
        kernel=f"product_hopper_{kind}" + ("_kept" if keep else ""),
        operation="product",
        where=Where(numbers, numbers - numbers // 32, numbers + numbers // 32),
        candidates=product_hopper_launch.candidates(numbers, kind, keep=keep),
        make=make,
        least_bytes=(side + results) * depth * (1 if eight else 2) + 2 * numbers * (1 + (2 if gated else 1) * keep),
    )


def _grouped(experts: int, rows: int, columns: int, depth: int, device: str, **options: Any) -> Callable[[], Any]:
    """The product of as many rows for each expert."""
    x = random_tensor(experts * rows, depth, device=device, grad=False)
    weight = random_tensor(experts, columns, depth, device=device, grad=False)
    counts = torch.full((experts,), rows, dtype=torch.int32, device=device)
    groups = kernels.row_groups(counts, rows=experts * rows)
    return lambda: kernels.grouped_product(x, weight, counts, groups=groups, **options)


def _experts(sizes: TunedSizes, device: str) -> Iterator[Tunable]:
    for number, (experts, rows, columns, depth) in enumerate(sizes.experts):

        def gradient(
            experts: int = experts, rows: int = rows, columns: int = columns, depth: int = depth
        ) -> Callable[[], Any]:
            x = random_tensor(experts * rows, depth, device=device, grad=False)
            weight = random_tensor(experts, columns, depth, device=device)
            counts = torch.full((experts,), rows, dtype=torch.int32, device=device)
            result = kernels.grouped_product(x, weight, counts)
            upstream = torch.randn_like(result)
            return lambda: torch.autograd.grad(result, weight, upstream, retain_graph=True)

        def forward(shape: tuple[int, int, int, int] = (experts, rows, columns, depth), **options: Any) -> Any:
            return _grouped(*shape, device, **options)

        where = near_of(rows)
        if number == len(sizes.experts) - 1:
            where = where._replace(up_to=MANY)
        least = 2 * experts * (rows * depth + columns * depth + rows * columns)
        found: list[tuple[str, Any, Callable[[], Any]]] = [
            ("grouped_product_hopper", grouped_product_launch.CONFIGS, forward),
            (
                "grouped_product_hopper_gated",
                grouped_product_launch.CONFIGS,
                lambda forward=forward: forward(activation="silu"),
            ),
            ("grouped_gradient_hopper", grouped_product_launch.GRADIENT_CONFIGS, gradient),
        ]
        for kernel, candidates, make in found:
            yield Tunable(
                kernel=kernel,
                operation="grouped_product",
                where=where,
                candidates=list(candidates),
                make=make,
                least_bytes=least,
            )


def _experts_of_few(sizes: TunedSizes, device: str) -> Iterator[Tunable]:
    experts, columns, depth = sizes.experts_of_few
    for height in HEIGHTS:
        for gated in (False, True):

            def make(height: int = height, gated: bool = gated) -> Callable[[], Any]:
                options = {"activation": "silu"} if gated else {}
                return _grouped(experts, 3 * height // 8, columns, depth, device, **options)

            yield Tunable(
                kernel="grouped_product" + ("_gated" if gated else ""),
                operation="grouped_product",
                where=near_of(height),
                candidates=grouped_product.candidates(height, gated),
                make=make,
                least_bytes=2 * experts * columns * depth,
            )


def _routed(sizes: TunedSizes, device: str) -> Iterator[Tunable]:
    tokens, numbers = sizes.routed
    for experts in numbers:

        def forward(experts: int = experts) -> Callable[[], Any]:
            logits = random_tensor(tokens, experts, device=device, grad=False)
            return lambda: kernels.route(logits, min(8, experts // 4), renormalise=True)

        def backward(experts: int = experts) -> Callable[[], Any]:
            logits = random_tensor(tokens, experts, device=device)
            weights, _ = kernels.route(logits, min(8, experts // 4), renormalise=True)
            upstream = torch.randn_like(weights)
            return lambda: torch.autograd.grad(weights, logits, upstream, retain_graph=True)

        for kernel, make, passes in (("route", forward, 1), ("route_backward", backward, 2)):
            yield Tunable(
                kernel=kernel,
                operation="route",
                where=near_of(experts),
                candidates=routing.candidates(experts),
                make=make,
                least_bytes=2 * passes * tokens * experts,
            )


def _linear_attention(sizes: TunedSizes, device: str) -> Iterator[Tunable]:
    sequences, heads, tokens, dims = sizes.linear_attention
    for dim in dims:
        shape = (sequences, heads, tokens, dim)
        one = 2 * sequences * heads * tokens * dim

        def forward(shape: tuple[int, ...] = shape) -> Callable[[], Any]:
            given = [random_tensor(*shape, device=device, grad=False) for _ in "qkv"]
            return lambda: kernels.linear_attention(*given)

        def backward(wanted: str, shape: tuple[int, ...] = shape) -> Callable[[], Any]:
            given = [random_tensor(*shape, device=device, grad=name == wanted) for name in ("query", "key", "value")]
            result = kernels.linear_attention(*given)
            (of,) = (tensor for tensor in given if tensor.requires_grad)
            upstream = torch.randn_like(result)
            return lambda: torch.autograd.grad(result, of, upstream, retain_graph=True)

        for name in ("", "_states", "_query", "_key", "_value"):
            is_forward = name in ("", "_states")
            kernel = f"linear_attention{name}"
            yield Tunable(
                kernel=kernel,
                operation="linear_attention",
                where=near_of(dim),
                candidates=linear_attention_configs.candidates(dim, kernel),
                make=forward if is_forward else lambda name=name, backward=backward: backward(name[1:]),  # type: ignore[misc]
                least_bytes=(4 if is_forward else 6) * one,
            )
