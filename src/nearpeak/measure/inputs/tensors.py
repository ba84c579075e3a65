"""Generators of tensors with stated distributions."""

from __future__ import annotations

import math
from typing import Literal

import torch

from nearpeak.errors import UsageError
from nearpeak.measure.inputs.draws import at_least, device_for, generator, not_negative, one_of, positive

_FLOAT_NAMES = ("float64", "float32", "float16", "bfloat16")
_FLOAT8_NAMES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
FLOATING: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _FLOAT_NAMES + _FLOAT8_NAMES}
"""The dtypes that `activations` and `weights` can make, by name."""


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
        at_least("shape", number, 0)
    positive("scale", scale)
    positive("outlier_scale", outlier_scale)
    not_negative("outlier_channels", outlier_channels)
    if outlier_channels > 1:
        raise UsageError(f"outlier_channels={outlier_channels!r}: expected a share of the channels, from 0 to 1.")
    kind, place, draw = _floating(dtype), device_for(device), generator("activations", seed)
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
    at_least("out_features", out_features, 1)
    at_least("in_features", in_features, 1)
    kind, place, draw = _floating(dtype), device_for(device), generator("weights", seed)
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
        at_least("shape", number, 0)
    at_least("vocabulary", vocabulary, 1)
    one_of("distribution", distribution, ("zipf", "uniform"))
    not_negative("exponent", exponent)
    place, draw = device_for(device), generator("token_ids", seed)
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
    at_least("count", count, 0)
    one_of("distribution", distribution, ("lognormal", "uniform", "constant"))
    not_negative("sigma", sigma)
    if sigma > 5:
        raise UsageError(f"sigma={sigma!r}: expected 0 to 5; it is the spread of the logarithm, not of the length.")
    if maximum is not None:
        at_least("maximum", maximum, 1)
    ceiling = math.inf if maximum is None else float(maximum)
    positive("mean", mean)
    if not 1 <= mean <= ceiling:
        raise UsageError(f"mean={mean!r}: expected a length from 1 to the maximum ({maximum}).")
    draw = generator("sequence_lengths", seed)
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
    one_of("dtype", name, FLOATING)
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
