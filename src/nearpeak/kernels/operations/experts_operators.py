"""The operators of torch behind `mixture_of_experts`: the layer, and the steps of its backward pass.

Backward takes three products by rows and columns of tokens, wherever these are, as forward does. The gradient of a
weight is the product of a result of its expert and the gradient of its token; results are not kept. It is the same as
that of the inner row and its gradient before the weight, which the gradient of the first product needs anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearpeak.kernels.operations.activations import apply
from nearpeak.kernels.operations.gated import packed_backward_reference
from nearpeak.kernels.operations.grouped_product_operators import (
    gathered,
    plain_gated,
    plain_product,
    plain_weight_gradient,
    product,
    why_not,
)
from nearpeak.kernels.operations.permutation import sum_rows, unpermute_reference
from nearpeak.kernels.operator import Operator
from nearpeak.kernels.policy import cannot_run


def _plain_layer(
    x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, groups: Tensor, row_map: Tensor, sources: Tensor,
    height: int, activation: str, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    inner, kept = plain_gated(x[sources.long()], gate_up, groups, height, activation, keep)
    return unpermute_reference(plain_product(inner, down, groups, height, False), row_map, weights), kept


def _plain_gate_backward(
    upstream: Tensor, kept: Tensor, weights: Tensor, row_map: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(kept.dtype, torch.float32)
    row = row_map.reshape(-1).long()
    taken, row = row >= 0, torch.where(row >= 0, row, ~row)
    by_row = torch.zeros(len(row), dtype=wide, device=row.device)
    by_row[row] = torch.where(taken, weights.reshape(-1).to(wide), 0.0)
    gate, up = kept.to(wide).chunk(2, 1)
    inner = apply(gate, activation) * up
    by_factors = packed_backward_reference(upstream.to(wide) * by_row[:, None], kept.to(wide), activation, False)
    by_weights = torch.where(taken, (upstream.to(wide) * inner).sum(1)[row], 0.0)
    weighted = (inner * by_row[:, None]).to(kept.dtype)
    return by_factors.to(kept.dtype), weighted, by_weights.to(weights.dtype).view(weights.shape)


def _plain_gathered_gradient(
    gradient: Tensor, rows: Tensor, groups: Tensor, experts: int, sources: Tensor, which: str
) -> Tensor:
    if which == "gradient":
        gradient = gradient[sources.long()]
    else:
        rows = rows[sources.long()]
    return plain_weight_gradient(gradient, rows, groups, experts)


def _fake_layer(
    x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, groups: Tensor, row_map: Tensor, sources: Tensor,
    height: int, activation: str, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape), x.new_empty((sources.shape[0], gate_up.shape[1]) if keep else (0,))


def _setup_layer(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weights, gate_up, down, groups, row_map, sources, ctx.height, ctx.activation, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weights, gate_up, down, groups, row_map, sources, output[1])


def _layer_backward(ctx: Any, gradient: Tensor | None, _: Any) -> tuple[Any, ...]:
    rest = (None,) * 6
    if gradient is None:
        return None, None, None, None, *rest
    x, weights, gate_up, down, groups, row_map, sources, kept = ctx.saved_tensors
    experts = gate_up.shape[0]
    upstream = gathered(gradient, down, groups, ctx.height, True, "", sources)
    by_factors, weighted, by_weights = gate_backward(upstream, kept, weights, row_map, ctx.activation)
    by_x = by_gate_up = by_down = None
    if ctx.needs_input_grad[3]:
        by_down = gathered_gradient(gradient, weighted, groups, experts, sources, "gradient")
    if ctx.needs_input_grad[2]:
        by_gate_up = gathered_gradient(by_factors, x, groups, experts, sources, "rows")
    if ctx.needs_input_grad[0]:
        by_x = sum_rows(product(by_factors, gate_up, groups, ctx.height, True), row_map, None)
    return by_x, by_weights, by_gate_up, by_down, *rest


layer = Operator(
    "mixture_of_experts(Tensor x, Tensor weights, Tensor gate_up, Tensor down, Tensor groups, Tensor row_map,"
    " Tensor sources, int height, str activation, bool keep) -> (Tensor, Tensor)",
    launch="experts:forward",
    reference=_plain_layer,
    fake=_fake_layer,
    why_not=lambda x, weights, gate_up, down, *others: why_not(x, gate_up, down, weights),
    setup_context=_setup_layer,
    backward=_layer_backward,
)
gate_backward = Operator(
    "experts_gate_backward(Tensor upstream, Tensor kept, Tensor weights, Tensor row_map, str activation)"
    " -> (Tensor, Tensor, Tensor)",
    launch="experts:gate_backward",
    reference=_plain_gate_backward,
    fake=lambda upstream, kept, weights, row_map, activation: (
        kept.new_empty(kept.shape),
        upstream.new_empty(upstream.shape),
        weights.new_empty(weights.shape),
    ),
    why_not=lambda upstream, kept, weights, row_map, activation: cannot_run(upstream, kept, weights, row_map),
)
gathered_gradient = Operator(
    "gathered_weight_gradient(Tensor gradient, Tensor rows, Tensor groups, SymInt experts, Tensor sources,"
    " str which) -> Tensor",
    launch="grouped_product:weight_gradient",
    reference=_plain_gathered_gradient,
    fake=lambda gradient, rows, groups, experts, sources, which: rows.new_empty(
        experts, gradient.shape[1], rows.shape[1]
    ),
    why_not=why_not,
)
