"""Inputs with a stated distribution, and the statistics of any tensor.

Zeros, constants and uniform routing make a kernel faster than real data: they draw less power, hit the cache and
balance the load. The generators here draw data that resembles real data, and `describe` gives the statistics of a
tensor. A seed gives the same values on every call and on every device, since they are drawn on the CPU and then moved;
`seed=None` draws anew.

    >>> activations(2, 3, device="cpu").equal(activations(2, 3, device="cpu"))
    True

`routing` draws the experts of the tokens of a mixture-of-experts layer with a stated imbalance: each token has a score
for every expert, the logarithm of the expert's popularity plus Gumbel noise, and goes to the `top_k` highest.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from nearpeak.devices.backends import gpu_backend, is_gpu
from nearpeak.errors import EnvironmentProblem, UsageError
from nearpeak.measure.case import Resampled
from nearpeak.measure.timing import InputStatistics

__all__ = [
    "FLOATING",
    "InputStatistics",
    "Resampled",
    "Routing",
    "RoutingStatistics",
    "activations",
    "describe",
    "routing",
    "sequence_lengths",
    "token_ids",
    "weights",
]
_FLOAT_NAMES = ("float64", "float32", "float16", "bfloat16")
_FLOAT8_NAMES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
FLOATING: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _FLOAT_NAMES + _FLOAT8_NAMES}
"""The dtypes that `activations` and `weights` can make, by name."""
STATISTICS_SAMPLE = 65536
"""Elements that `describe` reads; in a larger tensor, their positions are spread over all of it."""
DISTINCT_SAMPLE = 4096
"""Elements among which distinct values are counted."""
_AS_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SCORES_AT_ONCE = 2**22
_LARGEST_SKEW = 64.0
"""At this exponent the second expert is 2**64 times less popular than the first."""


def activations(
    *shape: int,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device | None = None,
    seed: int | None = 0,
    scale: float = 1.0,
    outlier_channels: float = 0.0,
    outlier_scale: float = 20.0,
) -> torch.Tensor:
    """Normal values with standard deviation `scale`, some channels of the last dimension larger.

    `outlier_channels` is the share of channels (at least one when it is above 0) whose standard deviation is
    `scale * outlier_scale`, as the hidden states of trained transformers have. Values past the largest finite number
    of `dtype` are clamped to it. Two tensors of one shape need two seeds, or they are equal.

    >>> activations(4, 8, dtype="bfloat16", device="cpu").dtype
    torch.bfloat16
    """
    for number in shape:
        check_at_least("shape", number, 0)
    check_positive("scale", scale)
    check_positive("outlier_scale", outlier_scale)
    check_not_negative("outlier_channels", outlier_channels)
    if outlier_channels > 1:
        raise UsageError(f"outlier_channels={outlier_channels!r}: expected a share of the channels, from 0 to 1.")
    kind, place, draw = _floating(dtype), device_for(device), seeded_generator("activations", seed)
    values = torch.randn(shape, generator=draw, dtype=_drawn_as(kind)).mul_(scale)
    if outlier_channels > 0:
        if not shape:
            raise UsageError("outlier_channels needs a last dimension, and the shape is (). Give a shape.")
        count = min(shape[-1], max(1, round(outlier_channels * shape[-1])))
        values[..., torch.randperm(shape[-1], generator=draw)[:count]] *= outlier_scale
    return _cast(values, kind).to(place)


def weights(
    out_features: int,
    in_features: int,
    *,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device | None = None,
    seed: int | None = 0,
) -> torch.Tensor:
    """A matrix (out_features, in_features) of normal values with standard deviation 1/sqrt(in_features).

    With that scale a product with `activations` keeps their standard deviation, so that a chain of layers neither
    grows nor fades.

    >>> weights(16, 8, device="cpu").shape
    torch.Size([16, 8])
    """
    check_at_least("out_features", out_features, 1)
    check_at_least("in_features", in_features, 1)
    kind, place, draw = _floating(dtype), device_for(device), seeded_generator("weights", seed)
    values = torch.randn(out_features, in_features, generator=draw, dtype=_drawn_as(kind))
    return _cast(values.mul_(in_features**-0.5), kind).to(place)


def token_ids(
    *shape: int,
    vocabulary: int,
    distribution: Literal["zipf", "uniform"] = "zipf",
    exponent: float = 1.0,
    seed: int | None = 0,
    device: str | torch.device | None = None,
) -> torch.Tensor:
    """Token ids (int64) from 0 to vocabulary - 1.

    "zipf": id i has a probability proportional to 1 / (i + 1)**exponent, so 0 is the most frequent, as in a vocabulary
    that is sorted by frequency. "uniform": every id is as likely, which touches far more rows of an embedding.

    >>> token_ids(2, 3, vocabulary=1, device="cpu").tolist()
    [[0, 0, 0], [0, 0, 0]]
    """
    for number in shape:
        check_at_least("shape", number, 0)
    check_at_least("vocabulary", vocabulary, 1)
    check_one_of("distribution", distribution, ("zipf", "uniform"))
    check_not_negative("exponent", exponent)
    place, draw = device_for(device), seeded_generator("token_ids", seed)
    if distribution == "uniform":
        return torch.randint(vocabulary, shape, generator=draw).to(place)
    cumulative = torch.arange(1, vocabulary + 1, dtype=torch.float64).pow_(-exponent).cumsum(0)
    uniform = torch.rand(shape, generator=draw, dtype=torch.float64).mul_(cumulative[-1])
    ids = torch.searchsorted(cumulative, uniform, right=True)
    return ids.clamp_(max=vocabulary - 1).to(place)  # rounding may place a draw at the very end


def sequence_lengths(
    count: int,
    mean: float,
    sigma: float = 0.8,
    *,
    maximum: int | None = None,
    distribution: Literal["lognormal", "uniform", "constant"] = "lognormal",
    seed: int | None = 0,
) -> torch.Tensor:
    """`count` lengths (int64, on the CPU, since they shape other tensors) from 1 to `maximum` with the stated mean.

    "lognormal": the logarithm has standard deviation `sigma`; lengths past `maximum` become `maximum`, and the rest is
    moved up so that `mean` is the mean of what comes out, not of what was cut. "uniform": the widest range around
    `mean` that fits. "constant": `mean`, rounded.

    >>> sequence_lengths(3, 100, distribution="constant").tolist()
    [100, 100, 100]
    """
    check_at_least("count", count, 0)
    check_one_of("distribution", distribution, ("lognormal", "uniform", "constant"))
    check_not_negative("sigma", sigma)
    if sigma > 5:
        raise UsageError(f"sigma={sigma!r}: expected 0 to 5; it is the spread of the logarithm, not of the length.")
    if maximum is not None:
        check_at_least("maximum", maximum, 1)
    ceiling = math.inf if maximum is None else float(maximum)
    check_positive("mean", mean)
    if not 1 <= mean <= ceiling:
        raise UsageError(f"mean={mean!r}: expected a length from 1 to the maximum ({maximum}).")
    draw = seeded_generator("sequence_lengths", seed)
    if distribution == "lognormal" and sigma > 0:
        normal = torch.randn(count, generator=draw, dtype=torch.float64)
        lengths = (normal * sigma + _lognormal_location(mean, sigma, ceiling)).exp_()
    elif distribution == "uniform":
        reach = min(mean - 1, ceiling - mean)
        lengths = mean + (2 * torch.rand(count, generator=draw, dtype=torch.float64) - 1) * reach
    else:
        lengths = torch.full((count,), float(mean), dtype=torch.float64)
    return lengths.clamp_(1, min(ceiling, 2.0**53)).round_().to(torch.int64)


def _floating(dtype: str | torch.dtype) -> torch.dtype:
    name = str(dtype).removeprefix("torch.")
    check_one_of("dtype", name, FLOATING)
    return FLOATING[name]


def _drawn_as(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    largest = torch.finfo(dtype).max  # a cast to float8_e4m3fn turns what is larger into NaN
    return values.clamp_(-largest, largest).to(dtype)


def _lognormal_location(mean: float, sigma: float, ceiling: float) -> float:
    """The mean of the logarithm for which a lognormal, clamped to 1 and `ceiling`, has that mean."""
    low, high = -10 * sigma - sigma**2, math.log(mean) + 10 * sigma
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _clamped_mean(middle, sigma, ceiling) < mean else (low, middle)
    return (low + high) / 2


def _clamped_mean(location: float, sigma: float, ceiling: float) -> float:
    """The mean of clamp(X, 1, ceiling) where ln X is normal: the share at 1, the part between, the share at the top.

    The part between is exp(location + sigma**2 / 2) times the mass that a normal shifted by sigma**2 has there.
    """
    top = math.log(ceiling) if ceiling < math.inf else math.inf
    from_, to = (-location - sigma**2) / sigma, (top - location - sigma**2) / sigma
    if from_ > 0:  # the nearer tail, where the difference of two tiny numbers keeps its digits
        from_, to = -to, -from_
    between = math.exp(location + sigma**2 / 2) * (_normal_cdf(to) - _normal_cdf(from_))
    at_the_top = ceiling * _normal_cdf((location - top) / sigma) if top < math.inf else 0.0
    return _normal_cdf(-location / sigma) + between + at_the_top


def _normal_cdf(value: float) -> float:
    return math.erfc(-value / math.sqrt(2)) / 2


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
    check_at_least("tokens", tokens, 1)
    check_at_least("experts", experts, 1)
    check_at_least("top_k", top_k, 1)
    if top_k > experts:
        raise UsageError(f"top_k={top_k}: a token cannot go to more than the {experts} experts there are.")
    check_one_of("distribution", distribution, ("uniform", "beta", "target"))
    if busiest_to_mean is not None and distribution != "target":
        raise UsageError(f"busiest_to_mean needs distribution='target', found {distribution!r}.")
    place, draw = device_for(device), seeded_generator("routing", seed)
    popularity = torch.zeros(experts)
    if distribution == "beta":
        check_positive("alpha", alpha)
        check_positive("beta", beta)
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
    check_positive("busiest_to_mean", busiest_to_mean)
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


def describe(tensor: torch.Tensor) -> InputStatistics:
    """The statistics of a tensor, from at most 65536 of its elements and, on a GPU, with one small copy to the host.

    >>> describe(torch.zeros(2, 3)).degenerate
    'all values are zero'
    >>> describe(torch.tensor([1.0, 2.0, 6.0])).mean
    3.0
    """
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"describe takes a tensor, found {type(tensor).__name__}.")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise UsageError(f"describe takes a dense tensor, found {tensor.layout}. Describe its values, or to_dense().")
    if tensor.device.type == "meta":
        raise UsageError("describe takes a tensor with values, found one on the device 'meta'.")
    if "float4" in str(tensor.dtype):
        raise UsageError(f"describe cannot read {tensor.dtype}, which packs two numbers. Describe it before packing.")
    values = _sample(tensor.detach())
    finite = values[values.isfinite()]
    count = values.numel()
    known = finite.numel() > 0
    return InputStatistics(
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=str(tensor.device),
        mean=finite.mean().item() if known else None,
        std=finite.std(correction=0).item() if known else None,
        minimum=finite.min().item() if known else None,
        maximum=finite.max().item() if known else None,
        zero_fraction=(values == 0).sum().item() / count if count else None,
        nonfinite_fraction=1 - finite.numel() / count if count else None,
        distinct=len(set(finite[_spread(finite.numel(), DISTINCT_SAMPLE)].tolist())),
        sampled=tensor.numel() > STATISTICS_SAMPLE,
    )


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """At most SAMPLE elements as float64 on the CPU, without a copy of the whole tensor."""
    bits = tensor.view(_AS_BITS[tensor.dtype.itemsize]) if _lacks_indexing(tensor.dtype) else tensor
    if tensor.numel() <= STATISTICS_SAMPLE:
        elements = bits.reshape(-1)
    else:
        positions = _spread(tensor.numel(), STATISTICS_SAMPLE).to(tensor.device)
        elements = bits[torch.unravel_index(positions, tensor.shape)]
    values = elements.cpu().view(tensor.dtype)
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj()).reshape(-1)
    return values.to(torch.float64)


def _spread(size: int, count: int) -> torch.Tensor:
    """At most `count` distinct positions below `size`, spread evenly.

    The stride shares no factor with `size`. A stride of 4096 in a tensor with 4096 channels would see one channel.
    """
    if size <= count:
        return torch.arange(size)
    stride = max(1, int(size * 0.6180339887498949))  # the golden ratio leaves no large gap for any count
    while math.gcd(stride, size) != 1:
        stride += 1
    return torch.arange(count) * stride % size


def _lacks_indexing(dtype: torch.dtype) -> bool:
    """Whether a tensor of that dtype is indexed by its bits, since torch cannot index it on every device."""
    return dtype in (torch.uint16, torch.uint32, torch.uint64) or (dtype.is_floating_point and dtype.itemsize == 1)


def seeded_generator(purpose: str, seed: int | None) -> torch.Generator:
    """A CPU generator for that purpose and seed; `None` gives one that was never used before.

    The purpose is part of the seed: activations and weights with the same seed must not be the same numbers, since a
    product of correlated matrices is no product of independent ones.
    """
    return torch.Generator(device="cpu").manual_seed(derived_seed(purpose, seed))


def derived_seed(purpose: str, seed: int | None) -> int:
    """63 bits that depend on the purpose and the seed, or on nothing when the seed is None."""
    if seed is None:
        return secrets.randbits(63)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UsageError(f"seed={seed!r}: expected an integer (the same values each time) or None (fresh values).")
    digest = hashlib.blake2b(f"{purpose}:{seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def device_for(device: str | torch.device | None) -> torch.device:
    """The requested device; for None the GPU where there is one, else the CPU."""
    backend = gpu_backend()
    if device is None:
        return torch.device("cpu") if backend is None else torch.device(backend.torch_type)
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        raise UsageError(f"device={device!r} is not a device. Valid: 'cpu', 'cuda', 'cuda:0', None.") from None
    count = 0 if backend is None else backend.count()
    if is_gpu(place) and (place.index or 0) >= count:
        raise EnvironmentProblem(f"device={str(place)!r}: torch can use {count} GPUs here. Use 'cpu' or None.")
    return place


def check_one_of(name: str, value: str, valid: Iterable[str]) -> None:
    """Raise unless the argument called `name` is one of the valid names."""
    names = tuple(valid)
    if value not in names:
        raise UsageError(f"{name}={value!r} is not known. Valid: {', '.join(map(repr, names))}.")


def check_at_least(name: str, value: int, minimum: int) -> None:
    """Raise unless the argument called `name` is an integer, `minimum` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise UsageError(f"{name}: expected an integer of at least {minimum}, found {value!r}.")


def check_positive(name: str, value: float) -> None:
    """Raise unless the argument called `name` is a finite number above 0."""
    if not (_is_finite(value) and value > 0):
        raise UsageError(f"{name}={value!r}: expected a finite number above 0.")


def check_not_negative(name: str, value: float) -> None:
    """Raise unless the argument called `name` is a finite number, 0 or more."""
    if not (_is_finite(value) and value >= 0):
        raise UsageError(f"{name}={value!r}: expected a finite number, 0 or more.")


def _is_finite(value: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
