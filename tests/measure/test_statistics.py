import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearpeak.measure.statistics import (
    Interval,
    inflation,
    lag1,
    median,
    median_interval,
    modality,
    quantile,
    signed_rank_center,
    trend,
)

numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


def slack(rate, draws):
    """Three and a half standard deviations of a share: a sound rate passes all but once in two thousand seeds."""
    return 3.5 * math.sqrt(rate * (1 - rate) / draws)


def autoregressive(source, n, rho):
    """Normal values with median 0 whose neighbors correlate by `rho`, from their stationary distribution."""
    value = source.gauss(0, 1) / math.sqrt(1 - rho**2)
    values = []
    for _ in range(n):
        value = rho * value + source.gauss(0, 1)
        values.append(value)
    return values


DISTRIBUTIONS = {
    "normal": (lambda source: source.gauss(100, 5), 100.0),
    "lognormal": (lambda source: source.lognormvariate(0, 0.5), 1.0),
    "exponential": (lambda source: 1 + source.expovariate(1), 1 + math.log(2)),
}
each_distribution = pytest.mark.parametrize("distribution", DISTRIBUTIONS)


@given(numbers, st.floats(0, 1), st.floats(0, 1))
def test_quantiles_lie_within_the_values_and_grow_with_q(values, q, p):
    low, high = sorted((q, p))
    assert min(values) <= quantile(values, low) <= max(values)
    assert quantile(values, low) <= quantile(values, high) + 1e-9 * max(abs(value) for value in values)


def test_quantiles_interpolate():
    assert quantile([40, 10, 30, 20], 0.5) == 25
    assert quantile([10, 20, 30], 0.25) == 15
    assert quantile([10, 20, 30], 0) == 10
    assert quantile([10, 20, 30], 1) == 30
    assert quantile([7], 0.99) == 7


def test_the_median_of_an_even_number_is_between_the_two_middle_values():
    assert median([4, 1, 3, 2]) == 2.5


@pytest.mark.parametrize(
    ("n", "low", "high"), [(6, 1, 6), (9, 2, 8), (12, 3, 10), (20, 6, 15), (30, 10, 21), (50, 18, 33), (100, 40, 61)]
)
def test_ranks_of_the_median_interval_are_those_of_the_tables(n, low, high):
    interval = median_interval(list(range(n, 0, -1)))
    assert (interval.low, interval.high) == (low, high)
    assert interval.confidence >= 0.95


def test_coverage_is_the_binomial_probability_of_the_ranks():
    assert median_interval(range(20)).confidence == pytest.approx(
        1 - 2 * sum(math.comb(20, i) for i in range(6)) / 2**20
    )


@pytest.mark.parametrize(("n", "coverage"), [(1, 0.0), (2, 0.5), (3, 0.75), (4, 0.875), (5, 0.9375)])
def test_too_few_values_give_their_range_and_say_how_little_it_covers(n, coverage):
    interval = median_interval(range(n))
    assert interval == Interval(low=0, high=n - 1, confidence=coverage)


def test_a_higher_confidence_gives_a_wider_interval():
    values = list(range(50))
    intervals = [median_interval(values, confidence) for confidence in (0.5, 0.9, 0.95, 0.99)]
    widths = [interval.high - interval.low for interval in intervals]
    assert widths == sorted(set(widths))
    assert all(found.confidence >= asked for found, asked in zip(intervals, (0.5, 0.9, 0.95, 0.99), strict=True))


@each_distribution
@pytest.mark.parametrize("n", [6, 12, 31])
def test_the_median_interval_covers_as_often_as_it_says_whatever_the_distribution(distribution, n):
    draw, truth = DISTRIBUTIONS[distribution]
    source, draws = random.Random(n), 1500
    intervals = [median_interval([draw(source) for _ in range(n)]) for _ in range(draws)]
    covered = sum(interval.low <= truth <= interval.high for interval in intervals) / draws
    stated = intervals[0].confidence
    assert abs(covered - stated) <= slack(stated, draws)


def test_half_width_is_relative():
    assert Interval(low=9, high=11, confidence=0.95).half_width(10) == pytest.approx(0.1)
    assert Interval(low=-1, high=1, confidence=0.95).half_width(-2) == pytest.approx(0.5)
    assert Interval(low=-1, high=1, confidence=0.95).half_width(0) == math.inf


def test_lag_one_correlation_of_known_series():
    assert lag1(list(range(100))) > 0.9
    assert lag1([0, 1] * 50) < -0.9
    assert lag1([5.0] * 50) == 0
    assert lag1([1, 2, 3]) == 0  # too few to say
    source = random.Random(1)
    assert abs(lag1([source.gauss(0, 1) for _ in range(2000)])) < 0.08
    assert lag1(autoregressive(source, 2000, 0.6)) == pytest.approx(0.6, abs=0.08)


def test_one_outlier_does_not_decide_the_correlation():
    source = random.Random(2)
    values = [source.gauss(100, 1) for _ in range(200)]
    spoilt = [*values[:100], 1e9, *values[101:]]
    assert lag1(spoilt) == pytest.approx(lag1(values), abs=0.03)


def test_intervals_are_widened_only_where_neighbors_agree():
    source = random.Random(3)
    assert inflation([source.gauss(0, 1) for _ in range(2000)]) < 1.1
    assert inflation([0, 1] * 50) == 1.0
    assert inflation(autoregressive(source, 2000, 0.6)) == pytest.approx(2.0, abs=0.3)  # sqrt(1.6 / 0.4)
    assert inflation(list(range(1000))) == pytest.approx(math.sqrt(19))  # at most


def test_widening_is_what_makes_correlated_values_covered():
    source, draws, n = random.Random(4), 800, 40
    plain = widened = 0
    for _ in range(draws):
        values = autoregressive(source, n, 0.5)
        as_it_is = median_interval(values)
        wider = median_interval(values, inflate=inflation(values))
        plain += as_it_is.low <= 0 <= as_it_is.high
        widened += wider.low <= 0 <= wider.high
    assert plain / draws < 0.90
    assert widened / draws > 0.94


def test_widening_makes_the_interval_wider_and_never_claims_more_confidence():
    values = list(range(40))
    plain, widened = median_interval(values), median_interval(values, inflate=1.7)
    assert widened.low < plain.low
    assert widened.high > plain.high
    assert widened.confidence == plain.confidence
    assert median_interval(values, inflate=100.0) == Interval(low=0, high=39, confidence=plain.confidence)


def test_a_drift_is_seen_with_its_size():
    source = random.Random(5)
    found = [trend([(1 + 0.05 * i / 23) * source.gauss(1, 0.01) for i in range(24)]) for _ in range(200)]
    assert all(drift.p_value < 0.01 for drift in found)
    assert median([drift.change for drift in found]) == pytest.approx(0.05, rel=0.1)
    assert trend([10 - 0.01 * i for i in range(20)]).change == pytest.approx(-0.019, rel=0.02)


def test_noise_is_not_called_a_drift():
    source, draws = random.Random(6), 1000
    false = sum(trend([source.lognormvariate(0, 0.3) for _ in range(24)]).p_value < 0.01 for _ in range(draws))
    assert false / draws <= 0.01 + slack(0.01, draws)


@pytest.mark.parametrize("values", [[3.0] * 20, [1.0, 2.0, 3.0], [0.0] * 10])
def test_constant_or_few_values_have_no_trend(values):
    drift = trend(values)
    assert (drift.change, drift.p_value) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("n", "cut", "coverage"),
    [(6, 0, 0.96875), (7, 2, 0.953125), (8, 3, 0.9609375), (9, 5, 0.9609375), (10, 8, 0.951171875), (20, 52, 0.95156)],
)
def test_cuts_of_the_signed_rank_interval_are_those_of_the_tables(n, cut, coverage):
    differences = [float(2**i) for i in range(n)]  # all averages of two differ
    averages = sorted((a + b) / 2 for i, a in enumerate(differences) for b in differences[i:])
    center = signed_rank_center(differences)
    assert center.interval.low == averages[cut]
    assert center.interval.high == averages[-1 - cut]
    assert center.interval.confidence == pytest.approx(coverage, abs=1e-5)
    assert center.value == median(averages)


def test_few_differences_give_their_range_and_say_how_little_it_covers():
    center = signed_rank_center([1.0, 2.0, 4.0, 8.0])
    assert center.interval == Interval(low=1.0, high=8.0, confidence=0.875)


@pytest.mark.parametrize("shape", ["normal", "uniform", "double exponential"])
@pytest.mark.parametrize("n", [8, 20])
def test_the_signed_rank_interval_covers_as_often_as_it_says(shape, n):
    draws, truth, source = 1500, 0.3, random.Random(n)
    noise = {
        "normal": lambda: source.gauss(0, 1),
        "uniform": lambda: source.uniform(-1, 1),
        "double exponential": lambda: source.choice((-1, 1)) * source.expovariate(1),
    }[shape]
    intervals = [signed_rank_center([truth + noise() for _ in range(n)]).interval for _ in range(draws)]
    covered = sum(interval.low <= truth <= interval.high for interval in intervals) / draws
    assert abs(covered - intervals[0].confidence) <= slack(intervals[0].confidence, draws)


@pytest.mark.slow
@each_distribution
@pytest.mark.parametrize(("n", "draws"), [(40, 300), (100, 300), (200, 300), (500, 600), (2000, 100)])
def test_one_hump_is_not_called_two(distribution, n, draws):
    draw, _ = DISTRIBUTIONS[distribution]
    source = random.Random(n)
    flagged = sum(modality([draw(source) for _ in range(n)]) > 2.8 for _ in range(draws))
    assert flagged <= 0.01 * draws


@pytest.mark.parametrize("n", [40, 60, 100, 400])
def test_two_humps_are_seen(n):
    source = random.Random(n)
    seen = [modality([source.gauss(130 if i % 2 else 100, 2) for i in range(n)]) for _ in range(100)]
    assert sum(value > 2.8 for value in seen) >= 95
    assert median(seen) == pytest.approx(4, abs=0.5)


def test_three_humps_count_more_than_two():
    source = random.Random(7)
    assert modality([source.gauss((100, 130, 160)[i % 3], 2) for i in range(600)]) == pytest.approx(6, abs=0.7)


@pytest.mark.parametrize("values", [[1.0] * 100, [1.0, 2.0] * 15, [1.0]])
def test_constant_or_few_values_have_one_hump(values):
    assert modality(values) == 2.0
