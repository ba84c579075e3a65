from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nearpeak._records import from_json, to_json
from nearpeak.errors import EnvironmentProblem, UsageError
from nearpeak.measure.case import Resampled
from nearpeak.measure.inputs import (
    DISTINCT_SAMPLE,
    FLOATING,
    STATISTICS_SAMPLE,
    Routing,
    _spread,
    activations,
    busiest_share,
    describe,
    routing,
    sequence_lengths,
    token_ids,
    weights,
)
from nearpeak.measure.timing import InputStatistics

GENERATORS = {
    "activations": lambda seed, device="cpu": activations(
        64, 32, dtype="bfloat16", seed=seed, device=device, outlier_channels=0.1
    ),
    "weights": lambda seed, device="cpu": weights(64, 32, seed=seed, device=device),
    "zipf": lambda seed, device="cpu": token_ids(512, vocabulary=1000, seed=seed, device=device),
    "uniform": lambda seed, device="cpu": token_ids(
        512, vocabulary=1000, distribution="uniform", seed=seed, device=device
    ),
    "lengths": lambda seed, device="cpu": sequence_lengths(100, 500, seed=seed),
    "routing": lambda seed, device="cpu": routing(200, 16, 4, seed=seed, device=device).weights,
    "beta": lambda seed, device="cpu": routing(200, 16, 4, distribution="beta", seed=seed, device=device).expert_ids,
    "target": lambda seed, device="cpu": (
        routing(200, 16, 4, distribution="target", busiest_to_mean=2, seed=seed, device=device).expert_ids
    ),
}
shapes = st.lists(st.integers(0, 9), max_size=4)


@pytest.mark.parametrize("name", GENERATORS)
def test_a_seed_fixes_the_values(name):
    make = GENERATORS[name]
    assert make(7).equal(make(7))
    assert not make(7).equal(make(8))
    assert not make(None).equal(make(None))


@pytest.mark.parametrize("name", GENERATORS)
def test_the_global_generator_is_left_alone(name):
    before = torch.random.get_rng_state()
    GENERATORS[name](3)
    GENERATORS[name](None)
    assert torch.random.get_rng_state().equal(before)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GENERATORS)
def test_values_do_not_depend_on_the_device(name):
    assert GENERATORS[name](7, "cuda").cpu().equal(GENERATORS[name](7, "cpu"))


@pytest.mark.gpu
def test_the_gpu_is_the_default_where_there_is_one():
    assert activations(4).is_cuda
    assert routing(4, 2, 1).counts.is_cuda
    assert not sequence_lengths(4, 10).is_cuda


def test_tensors_of_different_purpose_are_independent():
    x, w = activations(256, 256, seed=0, device="cpu"), weights(256, 256, seed=0, device="cpu")
    correlation = torch.corrcoef(torch.stack([x.flatten(), w.flatten()]))[0, 1].item()
    assert abs(correlation) < 5 / 256  # five standard errors of 256 * 256 pairs


@given(shape=shapes, dtype=st.sampled_from(sorted(FLOATING)), as_name=st.booleans())
@settings(max_examples=50)
def test_activations_of_any_shape_and_dtype(shape, dtype, as_name):
    values = activations(*shape, dtype=dtype if as_name else FLOATING[dtype], device="cpu")
    assert values.shape == tuple(shape)
    assert values.dtype == FLOATING[dtype]
    assert values.to(torch.float64).isfinite().all()


def test_activations_are_normal():
    values = activations(1000, 100, scale=3.0, dtype="float64", device="cpu")
    standard_error = 3 / math.sqrt(values.numel())
    assert values.mean().item() == pytest.approx(0, abs=5 * standard_error)
    assert values.std().item() == pytest.approx(3, abs=5 * standard_error)
    within_one = (values.abs() < 3).double().mean().item()
    assert within_one == pytest.approx(math.erf(1 / math.sqrt(2)), abs=0.01)


def test_outlier_channels_are_the_stated_share_with_the_stated_scale():
    deviations = activations(2000, 200, outlier_channels=0.05, outlier_scale=30.0, device="cpu").std(dim=0)
    outliers = deviations > 5
    assert outliers.sum() == 10
    assert deviations[outliers].mean().item() == pytest.approx(30, rel=0.05)
    assert deviations[~outliers].mean().item() == pytest.approx(1, rel=0.02)


def test_there_is_at_least_one_outlier_channel():
    assert (activations(500, 8, outlier_channels=0.001, device="cpu").std(dim=0) > 5).sum() == 1


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float16"])
def test_values_past_the_range_are_clamped(dtype):
    values = activations(1000, dtype=dtype, scale=1e5, device="cpu").float()
    assert values.isfinite().all()
    assert values.max().item() == torch.finfo(FLOATING[dtype]).max


def test_weights_keep_the_scale_of_activations():
    x, w = activations(512, 1024, device="cpu"), weights(256, 1024, device="cpu")
    assert w.std().item() == pytest.approx(1 / 32, rel=0.01)
    assert (x @ w.T).std().item() == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.5])
def test_zipf_frequencies(exponent):
    draws, vocabulary = 200_000, 50
    ids = token_ids(draws, vocabulary=vocabulary, exponent=exponent, device="cpu")
    expected = torch.arange(1, vocabulary + 1, dtype=torch.float64) ** -exponent
    expected *= draws / expected.sum()
    chi_square = ((torch.bincount(ids, minlength=vocabulary) - expected) ** 2 / expected).sum().item()
    assert chi_square < 49 + 5 * math.sqrt(2 * 49)  # five standard deviations above its mean


def test_uniform_frequencies():
    ids = token_ids(100, 1000, vocabulary=50, distribution="uniform", device="cpu")
    counts = torch.bincount(ids.flatten(), minlength=50)
    assert ((counts - 2000) ** 2 / 2000).sum().item() < 49 + 5 * math.sqrt(2 * 49)


@given(shape=shapes, vocabulary=st.integers(1, 70_000), exponent=st.floats(0, 3))
@settings(max_examples=30)
def test_token_ids_are_in_the_vocabulary(shape, vocabulary, exponent):
    ids = token_ids(*shape, vocabulary=vocabulary, exponent=exponent, device="cpu")
    assert ids.dtype == torch.int64
    assert ids.shape == tuple(shape)
    assert ((ids >= 0) & (ids < vocabulary)).all()


@pytest.mark.parametrize("maximum", [None, 4096, 1024, 600])
@pytest.mark.parametrize("sigma", [0.3, 0.8, 1.2])
def test_lognormal_lengths_have_the_stated_mean_even_when_cut(sigma, maximum):
    lengths = sequence_lengths(40_000, 512, sigma, maximum=maximum).double()
    assert lengths.mean().item() == pytest.approx(512, abs=5 * lengths.std().item() / 200)


def test_lognormal_lengths_have_the_stated_spread():
    assert sequence_lengths(40_000, 5000, 0.8).double().log().std().item() == pytest.approx(0.8, rel=0.02)


def test_uniform_lengths():
    lengths = sequence_lengths(40_000, 700, maximum=1000, distribution="uniform").double()
    assert (lengths.min().item(), lengths.max().item()) == (400, 1000)
    assert lengths.mean().item() == pytest.approx(700, abs=5)


@given(
    mean=st.floats(1, 1e6),
    room=st.none() | st.integers(0, 100_000),
    sigma=st.floats(0, 5),
    distribution=st.sampled_from(["lognormal", "uniform", "constant"]),
)
@settings(max_examples=60)
def test_lengths_are_in_range(mean, room, sigma, distribution):
    maximum = None if room is None else math.ceil(mean) + room
    lengths = sequence_lengths(64, mean, sigma, maximum=maximum, distribution=distribution)
    assert lengths.dtype == torch.int64
    assert lengths.min() >= 1
    assert maximum is None or lengths.max() <= maximum


def assert_is_a_routing(result: Routing, tokens: int, experts: int, top_k: int) -> None:
    ids, share = result.expert_ids, result.weights
    assert ids.dtype == torch.int64
    assert share.dtype == torch.float32
    assert ids.shape == share.shape == (tokens, top_k)
    ordered = ids.sort(dim=1).values
    assert (ordered[:, 1:] > ordered[:, :-1]).all(), "an expert twice in a row"
    assert ((ids >= 0) & (ids < experts)).all()
    assert (share >= 0).all()
    torch.testing.assert_close(share.sum(1), torch.ones(tokens), atol=1e-6, rtol=0)
    assert result.counts.tolist() == [int((ids == expert).sum()) for expert in range(experts)]


@given(data=st.data(), tokens=st.integers(1, 40), experts=st.integers(1, 12))
@settings(max_examples=60)
def test_every_routing_is_one(data, tokens, experts):
    top_k = data.draw(st.integers(1, experts))
    distribution = data.draw(st.sampled_from(["uniform", "beta", "target"]))
    ratio = data.draw(st.floats(1, experts / top_k)) if distribution == "target" else None
    result = routing(tokens, experts, top_k, distribution=distribution, busiest_to_mean=ratio, device="cpu")
    assert_is_a_routing(result, tokens, experts, top_k)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experts", "top_k", "ratio"), [(8, 2, 1.5), (8, 2, 3.9), (64, 2, 4), (256, 8, 4), (256, 8, 31.5), (16, 1, 8)]
)
def test_the_target_ratio_is_reached(experts, top_k, ratio):
    result = routing(50_000, experts, top_k, distribution="target", busiest_to_mean=ratio, seed=1, device="cpu")
    assert result.statistics.busiest_to_mean == pytest.approx(ratio, rel=0.02)


def test_the_target_ratio_is_the_mean_over_draws():
    ratios = [
        routing(20_000, 8, 2, distribution="target", busiest_to_mean=3, seed=seed, device="cpu").statistics
        for seed in range(20)
    ]
    mean = sum(statistics.busiest_to_mean for statistics in ratios) / len(ratios)
    assert mean == pytest.approx(3, rel=0.005)  # one draw scatters by 0.43 %, the mean of twenty by 0.1 %


def test_the_largest_target_gives_the_busiest_expert_every_token():
    result = routing(1000, 8, 2, distribution="target", busiest_to_mean=4, device="cpu")
    assert result.counts.max() == 1000


def test_the_busiest_expert_is_not_always_the_same():
    busiest = {
        routing(500, 16, 1, distribution="target", busiest_to_mean=8, seed=seed, device="cpu").counts.argmax().item()
        for seed in range(20)
    }
    assert len(busiest) > 5


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (8, 1), (8, 8), (60, 4), (128, 64)])
def test_share_of_equally_popular_experts(experts, top_k):
    assert busiest_share(0.0, experts, top_k) == pytest.approx(top_k / experts, abs=1e-10)


@pytest.mark.parametrize("skew", [0.3, 1.0, 4.0])
def test_share_against_the_sum_over_all_orders(skew):
    a, *others = popularity = [rank**-skew for rank in range(1, 6)]
    total = sum(popularity)
    assert busiest_share(skew, 5, 1) == pytest.approx(a / total, abs=1e-10)
    second = sum(other / total * a / (total - other) for other in others)
    assert busiest_share(skew, 5, 2) == pytest.approx(a / total + second, abs=1e-10)


def test_uniform_routing_is_balanced_up_to_sampling():
    statistics = routing(50_000, 64, 4, device="cpu").statistics
    # each expert has about 3125 tokens, with a standard deviation of 1.73 %
    assert statistics.coefficient_of_variation == pytest.approx(0.0173, rel=0.4)
    assert statistics.busiest_to_mean < 1.08
    assert statistics.empty_experts == 0


def test_beta_popularity_gives_the_load_its_spread():
    # Beta(1, 5) has the coefficient of variation sqrt(5 / 7); with top_k = 1 the load is proportional to popularity
    statistics = routing(20_000, 500, 1, distribution="beta", alpha=1, beta=5, device="cpu").statistics
    assert statistics.coefficient_of_variation == pytest.approx(math.sqrt(5 / 7), rel=0.1)
    even = routing(20_000, 200, 1, distribution="beta", alpha=500, beta=500, device="cpu").statistics
    assert even.coefficient_of_variation < 0.15


def test_beta_with_a_popularity_of_zero():
    assert_is_a_routing(routing(50, 8, 4, distribution="beta", alpha=1e-4, beta=5, device="cpu"), 50, 8, 4)


def test_statistics_of_a_known_load():
    ids = torch.zeros(4, 1, dtype=torch.int64)
    result = Routing(expert_ids=ids, weights=torch.ones(4, 1), counts=torch.tensor([0, 2, 6, 0]))
    statistics = result.statistics
    assert statistics.busiest_to_mean == 3
    assert statistics.coefficient_of_variation == pytest.approx(math.sqrt(6) / 2)
    assert statistics.gini == pytest.approx(0.625)  # mean absolute difference 2.5 over twice the mean
    assert statistics.empty_experts == 2
    assert from_json(type(statistics), json.loads(json.dumps(to_json(statistics)))) == statistics


def test_many_tokens_are_drawn_in_parts(monkeypatch):
    monkeypatch.setattr("nearpeak.measure.inputs._SCORES_AT_ONCE", 100)
    assert_is_a_routing(routing(95, 10, 3, device="cpu"), 95, 10, 3)


def test_resampled_gives_each_block_its_own_inputs():
    resampled = Resampled(lambda seed: activations(8, seed=seed, device="cpu"))
    assert resampled.draw(2).equal(resampled.draw(2))
    assert not resampled.draw(2).equal(resampled.draw(3))


def test_resampled_refuses_inputs_that_are_already_drawn():
    with pytest.raises(UsageError, match="function of a seed, found Tensor"):
        Resampled(torch.zeros(3))
    with pytest.raises(UsageError, match="block is -1"):
        Resampled(lambda seed: seed).draw(-1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: activations(-1), r"shape: expected an integer of at least 0, found -1"),
        (lambda: activations((2, 3)), r"shape: expected an integer of at least 0, found \(2, 3\)"),
        (lambda: activations(2, dtype="bfloat15"), r"dtype='bfloat15' is not known. Valid: 'float64', 'float32'"),
        (lambda: activations(2, dtype=torch.int8), r"dtype='int8' is not known"),
        (lambda: activations(2, scale=0), r"scale=0: expected a finite number above 0"),
        (lambda: activations(2, scale=math.nan), r"scale=nan"),
        (lambda: activations(2, outlier_channels=3), r"outlier_channels=3: .* from 0 to 1"),
        (lambda: activations(outlier_channels=0.5), r"needs a last dimension"),
        (lambda: activations(2, seed="x"), r"seed='x': expected an integer .* or None"),
        (lambda: activations(2, device="gpu"), r"device='gpu' is not a device. Valid: 'cpu', 'cuda'"),
        (lambda: weights(0, 4), r"out_features: expected an integer of at least 1"),
        (lambda: token_ids(4, vocabulary=0), r"vocabulary: expected an integer of at least 1"),
        (lambda: token_ids(4, vocabulary=9, distribution="zip"), r"'zip' is not known. Valid: 'zipf', 'uniform'"),
        (lambda: token_ids(4, vocabulary=9, exponent=-1), r"exponent=-1: expected a finite number, 0 or more"),
        (lambda: sequence_lengths(-1, 4), r"count: expected"),
        (lambda: sequence_lengths(4, 0.5), r"mean=0.5: expected a length from 1 to the maximum \(None\)"),
        (lambda: sequence_lengths(4, "9"), r"mean='9': expected a finite number above 0"),
        (lambda: sequence_lengths(4, 9, maximum=8), r"mean=9: expected a length from 1 to the maximum \(8\)"),
        (lambda: sequence_lengths(4, 9, sigma=100), r"sigma=100: expected 0 to 5"),
        (lambda: sequence_lengths(4, 9, distribution="normal"), r"Valid: 'lognormal', 'uniform', 'constant'"),
        (lambda: routing(0, 4, 1), r"tokens: expected"),
        (lambda: routing(4, 4, 5), r"top_k=5: .* the 4 experts"),
        (lambda: routing(4, 4, 1, distribution="zipf"), r"Valid: 'uniform', 'beta', 'target'"),
        (lambda: routing(4, 4, 1, distribution="beta", alpha=-1), r"alpha=-1"),
        (lambda: routing(4, 4, 1, busiest_to_mean=2), r"busiest_to_mean needs distribution='target'"),
        (lambda: routing(4, 8, 2, distribution="target"), r"needs busiest_to_mean, from 1 to experts / top_k = 4"),
        (lambda: routing(4, 8, 2, distribution="target", busiest_to_mean=4.1), r"cannot be reached .* = 4 gives"),
        (lambda: routing(4, 8, 2, distribution="target", busiest_to_mean=0.9), r"cannot be reached .* 1 is balanced"),
        (lambda: describe([1, 2]), r"takes a tensor, found list"),
        (lambda: describe(torch.empty(3, device="meta")), r"with values, found one on the device 'meta'"),
        (lambda: describe(torch.eye(3).to_sparse()), r"a dense tensor, found torch.sparse_coo"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(UsageError, match=message):
        call()


def test_a_gpu_that_is_not_there():
    with pytest.raises(EnvironmentProblem, match=r"device='cuda:99': torch can use \d+ GPUs here"):
        activations(2, device="cuda:99")


def test_statistics_of_a_small_tensor():
    found = describe(torch.tensor([[0.0, 1.0, math.nan], [2.0, 5.0, math.inf]]))
    assert found == InputStatistics(
        shape=(2, 3),
        dtype="float32",
        device="cpu",
        mean=2.0,
        std=math.sqrt(3.5),
        minimum=0.0,
        maximum=5.0,
        zero_fraction=1 / 6,
        nonfinite_fraction=pytest.approx(1 / 3),
        distinct=4,
        sampled=False,
    )


DTYPES = [*FLOATING.values(), torch.complex64, torch.int8, torch.uint16, torch.uint64, torch.int64, torch.bool]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (7,), (300, 300)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_has_statistics(dtype, shape):
    found = describe(torch.ones(shape).to(dtype))
    assert found.shape == shape
    assert found.maximum == (None if 0 in shape else 1)
    assert found.sampled == (shape == (300, 300))
    assert from_json(InputStatistics, json.loads(json.dumps(to_json(found)))) == found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics_do_not_depend_on_the_device(dtype):
    values = (activations(300, 400, device="cpu").abs() * 9).to(dtype)
    on_gpu = describe(values.cuda())
    assert dataclasses.replace(on_gpu, device="cpu") == describe(values)


def test_statistics_without_any_finite_value():
    found = describe(torch.full((4,), math.nan))
    assert (found.mean, found.minimum, found.nonfinite_fraction, found.distinct) == (None, None, 1, 0)


def test_the_sample_meets_every_channel():
    values = torch.zeros(2048, 512)  # a stride of 16 would meet every 16th channel only
    values[:, 5] = 1
    found = describe(values)
    assert found.sampled
    assert 1 - found.zero_fraction == pytest.approx(1 / 512, rel=0.05)


def test_a_sample_needs_no_copy_of_the_tensor():
    values = activations(1000, 1, device="cpu").expand(1000, 10**9)
    assert describe(values).std == pytest.approx(1, abs=0.1)
    assert describe(values.T).std == pytest.approx(1, abs=0.1)


@given(size=st.integers(1, 10**9))
@settings(max_examples=30)
def test_sampled_positions_are_distinct(size):
    positions = _spread(size, 500)
    assert len(set(positions.tolist())) == min(size, 500)
    assert positions.min() >= 0
    assert positions.max() < size


def test_large_tensors_have_the_statistics_of_their_distribution():
    found = describe(activations(1000, 1000, scale=2.0, device="cpu"))
    assert found.std == pytest.approx(2, abs=5 * 2 / math.sqrt(STATISTICS_SAMPLE))
    assert found.distinct > 0.99 * DISTINCT_SAMPLE


def one_nan() -> torch.Tensor:
    values = activations(100, device="cpu")
    values[50] = math.nan
    return values


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (torch.zeros(10), "all values are zero"),
        (torch.zeros(10, dtype=torch.int64), "all values are zero"),
        (torch.zeros(300, 300), "all sampled values are zero"),
        (torch.ones(10), "all values are 1"),
        (one_nan(), "1 % of the values are infinite or NaN"),
        (activations(10, device="cpu") / 0, "100 % of the values are infinite or NaN"),
        (torch.eye(40), "97.5 % of the values are zero"),
        (torch.randint(1, 5, (2000,)).float(), "only 4 distinct values"),
        (torch.randint(1, 5, (2000,)).to(torch.float8_e4m3fn), "only 4 distinct values"),
    ],
)
def test_data_that_would_flatter(values, reason):
    assert describe(values).degenerate == reason


@pytest.mark.parametrize(
    "values",
    [
        *(activations(64, 64, dtype=dtype, device="cpu") for dtype in FLOATING),
        activations(500, 500, outlier_channels=0.01, device="cpu"),
        weights(64, 64, device="cpu"),
        torch.nn.functional.relu(activations(64, 64, device="cpu")),
        token_ids(4096, vocabulary=50_000, device="cpu"),
        sequence_lengths(16, 100),
        torch.randint(0, 2, (2000,)),
        torch.tensor([1.0, 2.0]),
        torch.tensor(0.0),
        torch.ones(2000, dtype=torch.bool),
        torch.empty(0),
    ],
)
def test_ordinary_data_is_not_degenerate(values):
    assert describe(values).degenerate is None
