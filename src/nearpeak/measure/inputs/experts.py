"""Which experts the tokens of a mixture of experts go to, with a stated imbalance.

Each token has a score for every expert, the logarithm of the expert's popularity plus Gumbel noise, and goes to the
`top_k` highest: a draw of distinct experts in proportion to their popularity, and the way a router works.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Literal

import torch

from nearpeak.errors import UsageError
from nearpeak.measure.inputs.draws import at_least, derived_seed, device_for, generator, one_of, positive

_SCORES_AT_ONCE = 2**22
_LARGEST_SKEW = 64.0
"""At this exponent the second expert is 2**64 times less popular than the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingStatistics:
    """How uneven the load of the experts is."""

    busiest_to_mean: float
    """Tokens of the busiest expert over the mean: 1 is balanced, experts / top_k is the worst."""
    coefficient_of_variation: float
    """Standard deviation of the load over its mean."""
    gini: float
    """0: all experts have the same load; near 1: one expert has it all."""
    empty_experts: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routing:
    """The experts of each token, their weights, and the load that results."""

    expert_ids: torch.Tensor
    """(tokens, top_k), int64; distinct in each row, the heaviest first."""
    weights: torch.Tensor
    """(tokens, top_k), float32; each row sums to 1."""
    counts: torch.Tensor
    """(experts,), int64: how many tokens each expert gets."""

    @property
    def statistics(self) -> RoutingStatistics:
        """The imbalance of this draw, which for few tokens is more than that of its distribution."""
        counts = self.counts.to("cpu", torch.float64).sort().values
        experts, total = counts.numel(), counts.sum().item()
        mean = total / experts
        ranks = torch.arange(1, experts + 1, dtype=torch.float64)
        return RoutingStatistics(
            busiest_to_mean=counts[-1].item() / mean,
            coefficient_of_variation=counts.std(correction=0).item() / mean,
            gini=((2 * ranks - experts - 1) @ counts).item() / (experts * total),
            empty_experts=int((counts == 0).sum().item()),
        )


def routing(
    tokens: int,
    experts: int,
    top_k: int,
    *,
    distribution: Literal["uniform", "beta", "target"] = "uniform",
    alpha: float = 1.0,
    beta: float = 5.0,
    busiest_to_mean: float | None = None,
    seed: int | None = 0,
    device: str | torch.device | None = None,
) -> Routing:
    """The routing of `tokens` tokens to `top_k` of `experts` experts each.

    "uniform": all experts are equally popular. "beta": the popularity of each is drawn from Beta(alpha, beta).
    "target": popularity falls as a power of the expert's rank, with the power for which the expected load of the
    busiest expert is `busiest_to_mean` times the mean. Which expert is popular depends on the seed.

    The target is met in the long run. A draw of few tokens scatters around it, and near 1, where another expert may
    happen to be the busiest, above it; `statistics` has what was drawn.

    >>> routing(100, experts=8, top_k=2, device="cpu").expert_ids.shape
    torch.Size([100, 2])
    """
    at_least("tokens", tokens, 1)
    at_least("experts", experts, 1)
    at_least("top_k", top_k, 1)
    if top_k > experts:
        raise UsageError(f"top_k={top_k}: a token cannot go to more than the {experts} experts there are.")
    one_of("distribution", distribution, ("uniform", "beta", "target"))
    if busiest_to_mean is not None and distribution != "target":
        raise UsageError(f"busiest_to_mean needs distribution='target', found {distribution!r}.")
    place, draw = device_for(device), generator("routing", seed)
    popularity = torch.zeros(experts)
    if distribution == "beta":
        positive("alpha", alpha)
        positive("beta", beta)
        source = random.Random(derived_seed("popularity", seed))
        drawn = [source.betavariate(alpha, beta) for _ in range(experts)]
        popularity = torch.tensor(drawn, dtype=torch.float64).clamp_min(1e-300).log().float()
    elif distribution == "target":
        skew = _skew_for(busiest_to_mean, experts, top_k)
        popularity = -skew * (1 + torch.randperm(experts, generator=draw)).log()
    chosen, weights = _choose(popularity, tokens, top_k, draw)
    counts = torch.bincount(chosen.flatten(), minlength=experts)
    return Routing(expert_ids=chosen.to(place), weights=weights.to(place), counts=counts.to(place))


def _choose(
    popularity: torch.Tensor, tokens: int, top_k: int, draw: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and weights of each token, from the logarithm of the popularity; some rows at a time."""
    experts = popularity.numel()
    rows = max(1, _SCORES_AT_ONCE // experts)
    chosen, weights = [], []
    for start in range(0, tokens, rows):
        uniform = torch.rand(min(rows, tokens - start), experts, generator=draw).clamp_(min=2**-25)
        gumbel = uniform.neg_().log1p_().neg_().log_().neg_()
        best = gumbel.add_(popularity).topk(top_k, dim=1)
        chosen.append(best.indices)
        weights.append(best.values.softmax(dim=1))
    return torch.cat(chosen), torch.cat(weights)


def _skew_for(busiest_to_mean: float | None, experts: int, top_k: int) -> float:
    largest = experts / top_k
    if busiest_to_mean is None:
        raise UsageError(f"distribution='target' needs busiest_to_mean, from 1 to experts / top_k = {largest:g}.")
    positive("busiest_to_mean", busiest_to_mean)
    if not 1 <= busiest_to_mean <= largest:
        raise UsageError(
            f"busiest_to_mean={busiest_to_mean!r} cannot be reached with {experts} experts and top_k={top_k}: "
            f"1 is balanced, and experts / top_k = {largest:g} gives the busiest expert every token."
        )
    return _skew(float(busiest_to_mean), experts, top_k)


@functools.lru_cache(maxsize=256)
def _skew(busiest_to_mean: float, experts: int, top_k: int) -> float:
    """The exponent of the popularity for which the busiest expert's expected load is that many times the mean."""
    low, high = 0.0, _LARGEST_SKEW
    if busiest_to_mean == experts / top_k:
        return 0.0 if top_k == experts else high
    while high - low > 1e-4 * high and high > 1e-6:
        middle = (low + high) / 2
        reached = busiest_share(middle, experts, top_k) * experts / top_k
        low, high = (middle, high) if reached < busiest_to_mean else (low, middle)
    return (low + high) / 2


def busiest_share(skew: float, experts: int, top_k: int) -> float:
    """The share of tokens that go to the first expert when the r-th has popularity r**-skew.

    The highest score is the earliest of exponential arrivals with the popularities as rates. The first expert is taken
    when fewer than `top_k` others arrive before it. With u = exp(-its arrival time), uniform in (0, 1), the r-th has
    arrived with probability 1 - u**(r**-skew); the number that has is a sum of independent events, added up one by one.
    The integral over u is a trapezoid sum in logit(u), where the integrand is smooth and vanishes at both ends: with
    this step it is exact to about 1e-12.

    >>> round(busiest_share(0.0, experts=8, top_k=2), 9)
    0.25
    """
    step = 0.1
    logit = torch.arange(-360, 361, dtype=torch.float64) * step
    density = logit.sigmoid() * (-logit).sigmoid() * step
    rates = torch.arange(2, experts + 1, dtype=torch.float64).pow(-skew)
    arrived = -torch.expm1(rates[:, None] * torch.nn.functional.logsigmoid(logit))
    before = torch.zeros(top_k, logit.numel(), dtype=torch.float64)  # before[n]: n others came first
    before[0] = 1
    for probability in arrived:
        moved = before * probability
        before -= moved
        before[1:] += moved[:-1]
    return float(before.sum(0) @ density)
