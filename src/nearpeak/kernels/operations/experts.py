"""`mixture_of_experts` and `MoE`: a layer of gated experts, of which each token has a few.

Tokens are multiplied by the two matrices of each of their experts, from wherever they are, and results are added up by
token. Of T tokens with k experts of the sizes H and I, forward writes T k rows of I and of H, and reads these; where
there is a backward pass to come, it writes T k rows of 2 I as well, and keeps these and the tokens for it. Results are
not added by the product that gives them: the order of additions would be another each time, or one would wait.
"""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor, nn

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.kernels.operations import experts_operators as operators
from nearpeak.kernels.operations import grouped_product, permutation
from nearpeak.kernels.operations.grouped_product_operators import Activation, group, height_of
from nearpeak.kernels.operations.grouped_product_operators import why_not as product_why_not
from nearpeak.kernels.operations.routing import Scores, route
from nearpeak.kernels.policy import fused

_ACTIVATIONS: dict[str, Activation] = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
}
"""By the names of classes of torch and transformers."""


def _fit(found: list[nn.Parameter]) -> bool:
    """Whether these are the weights of a router and of experts."""
    if [one.dim() for one in found] != [2, 3, 3]:
        return False
    (experts, columns), inner = found[0].shape, found[2].shape[2]
    return found[1].shape == (experts, 2 * inner, columns) and found[2].shape == (experts, columns, inner)


def _reference(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, activation: Activation
) -> Tensor:
    rows, counts, row_map = permutation.reference(x, experts, number_of_experts=gate_up.shape[0])
    inner = grouped_product.reference(rows, gate_up, counts, activation=activation)
    return permutation.unpermute_reference(grouped_product.reference(inner, down, counts), row_map, weights)


def _why_not(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, activation: Activation
) -> str | None:
    return (
        permutation.why_not(x, experts, number_of_experts=gate_up.shape[0])
        or product_why_not(x, gate_up, weights)
        or product_why_not(x, down)
    )


@fused(reference=_reference, why_not=_why_not)
def _mixture(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, activation: Activation
) -> Tensor:
    number = gate_up.shape[0]
    counts, row_map, sources = permutation.sort_operator(experts, number)
    height = height_of(sources.shape[0], number)
    groups = group(counts, sources.shape[0], height)
    keep = torch.is_grad_enabled() and any(one.requires_grad for one in (x, weights, gate_up, down))
    return operators.layer(x, weights, gate_up, down, groups, row_map, sources, height, activation, keep)[0]  # type: ignore[no-any-return]


def _check(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, activation: Activation) -> None:
    if (
        gate_up.dim() != 3
        or gate_up.shape[1] % 2
        or down.shape != (gate_up.shape[0], gate_up.shape[2], gate_up.shape[1] // 2)
    ):
        raise UsageError(
            "Experts take gate_up of the shape (experts, 2 * inner, columns) and down of (experts, columns, inner), and"
            f" these have {tuple(gate_up.shape)} and {tuple(down.shape)}."
        )
    if x.dim() != 2 or x.shape[1] != gate_up.shape[2]:
        raise UsageError(
            f"Experts of {gate_up.shape[2]} columns take tokens of the shape (tokens, {gate_up.shape[2]}), and these"
            f" have {tuple(x.shape)}."
        )
    if weights.shape != experts.shape:
        raise UsageError(
            f"Each choice has a weight: experts have the shape {tuple(experts.shape)}, and weights"
            f" {tuple(weights.shape)}."
        )
    if activation not in get_args(Activation):
        raise UsageError(f"There is no activation {activation!r}. {did_you_mean(activation, get_args(Activation))}")


def mixture_of_experts(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, *, activation: Activation = "silu"
) -> Tensor:
    """The results of each token's experts, times their weights, added up: (tokens, columns), in the dtype of x.

    An expert is `down[e] @ (activation(gate) * up)`, where gate and up are the halves of `gate_up[e] @ x`. Results of
    experts are added in float32 and in the order of choices; nothing waits for the device, so a CUDA graph can record
    it. All but `experts` have gradients. Inside of autocast x and both matrices are cast as for linear layers.

    Args:
        x: (tokens, columns).
        weights: A weight for each choice, (tokens, k), as `route` gives them.
        experts: The experts of each token, (tokens, k), in int32 or int64. A choice of none of them, as -1, is dropped.
        gate_up: (experts, 2 * inner, columns), contiguous for speed.
        down: (experts, columns, inner).
        activation: "silu", "gelu" or "gelu_tanh".
    """
    _check(x, weights, experts, gate_up, down, activation)
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, gate_up, down = x.to(dtype), gate_up.to(dtype), down.to(dtype)
    return _mixture(x, weights, experts, gate_up, down, activation)


class Experts(nn.Module):
    """The matrices of all experts, `gate_up_proj` and `down_proj`, named and laid out as in transformers 5."""

    def __init__(
        self, columns: int, inner: int, experts: int, *, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, columns, device=device, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(experts, columns, inner, device=device, dtype=dtype))
        for weight in self.parameters():
            nn.init.uniform_(weight, -(weight.shape[2] ** -0.5), weight.shape[2] ** -0.5)


class MoE(nn.Module):
    """A layer of gated experts with its router: `mixture_of_experts` with the choice of `route`.

    Parameters are `gate.weight`, `experts.gate_up_proj`, `experts.down_proj`, and with `bias` the buffer `bias`: the
    state of blocks of Mixtral and Qwen3-MoE in transformers 5 fits.

    Args:
        columns, inner: The size of tokens, and that between the two matrices of an expert.
        experts, k: How many experts there are, and how many a token has.
        scores, renormalise, scale: See `route`.
        bias: Whether there is a bias for the choice, a buffer that is zeros until someone balances the load.
        activation: See `mixture_of_experts`.
    """

    bias: Tensor | None

    def __init__(
        self, columns: int, inner: int, experts: int, k: int, *, scores: Scores = "softmax", renormalise: bool = True,
        scale: float = 1.0, bias: bool = False, activation: Activation = "silu",
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if scores not in get_args(Scores):
            raise UsageError(f"There are no scores {scores!r}. {did_you_mean(scores, get_args(Scores))}")
        if activation not in get_args(Activation):
            raise UsageError(f"There is no activation {activation!r}. {did_you_mean(activation, get_args(Activation))}")
        if not 1 <= k <= experts:
            raise UsageError(f"A token has from 1 to {experts} experts of as many, and k is {k}.")
        self.k = k
        self.scores: Scores = scores
        self.renormalise = renormalise
        self.scale = scale
        self.activation: Activation = activation
        self.gate = nn.Linear(columns, experts, bias=False, device=device, dtype=dtype)
        self.experts = Experts(columns, inner, experts, device=device, dtype=dtype)
        self.register_buffer("bias", torch.zeros(experts, device=device) if bias else None)

    @classmethod
    def from_transformers(cls, block: nn.Module) -> MoE:
        """The same layer as a block of Mixtral or Qwen3-MoE of transformers 5, which shares its parameters."""
        gate, experts = getattr(block, "gate", None), getattr(block, "experts", None)
        router = getattr(gate, "weight", None)
        gate_up, down = getattr(experts, "gate_up_proj", None), getattr(experts, "down_proj", None)
        found = [one for one in (router, gate_up, down) if isinstance(one, nn.Parameter)]
        if gate is None or experts is None or not hasattr(gate, "top_k") or not _fit(found):
            raise UsageError(
                "MoE.from_transformers takes a sparse block of Mixtral or Qwen3-MoE, with gate.weight,"
                f" experts.gate_up_proj and experts.down_proj, and not a {type(block).__name__} with"
                f" {[tuple(one.shape) for one in found]}."
            )
        router, gate_up, down = found
        for name in ("shared_expert", "shared_experts", "e_score_correction_bias", "gate_up_proj_bias"):
            if any(hasattr(one, name) for one in (block, gate, experts)):
                raise UsageError(f"MoE.from_transformers knows nothing of {name} of {type(block).__name__}.")
        if getattr(block, "jitter_noise", 0.0):
            raise UsageError("MoE has no noise for its router, and this block has: set jitter_noise to 0 before.")
        named = type(experts.act_fn).__name__
        if named not in _ACTIVATIONS:
            raise UsageError(f"MoE has the activations {', '.join(_ACTIVATIONS)}, and not {named}.")
        number, columns = router.shape
        made = cls(
            columns, down.shape[2], number, gate.top_k, renormalise=getattr(gate, "norm_topk_prob", True),
            activation=_ACTIVATIONS[named], device="meta",
        )  # fmt: skip
        made.gate.weight = router
        made.experts.gate_up_proj, made.experts.down_proj = gate_up, down
        return made.train(block.training)

    def forward(self, x: Tensor, *, return_logits: bool = False) -> Any:
        """The results of tokens, in the shape of x, (..., columns); and the logits of the router, if asked for."""
        tokens = x.reshape(-1, x.shape[-1])
        logits = self.gate(tokens)
        weights, experts = route(
            logits, self.k, scores=self.scores, renormalise=self.renormalise, bias=self.bias, scale=self.scale
        )
        result = mixture_of_experts(
            tokens, weights, experts, self.experts.gate_up_proj, self.experts.down_proj, activation=self.activation
        ).view(x.shape)
        return (result, logits) if return_logits else result

    def extra_repr(self) -> str:
        number, columns, inner = self.experts.down_proj.shape
        return f"{columns}, inner={inner}, experts={number}, k={self.k}, scores={self.scores!r}"
