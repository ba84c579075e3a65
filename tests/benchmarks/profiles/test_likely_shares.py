"""Ranges of predicted savings are fitted to what was measured, and hold what they say."""

from pathlib import Path

import pytest

from benchmarks.profiles.likely_shares import Outcome, ends_of, fit, is_held, left_out, odds, outcomes
from nearpeak.profiles.finding import LEAST_ODDS, MOST_ODDS, MOST_POWER, likely_shares

RESULTS = sorted((Path(__file__).parents[3] / "benchmarks" / "results").glob("programs_*.json"))


def made(program, predicted, measured):
    return Outcome(
        program=program,
        rule="launch-bound",
        waits=False,
        predicted=odds(predicted),
        measured=odds(measured),
        low=odds(measured),
        high=odds(measured),
    )


def test_the_range_holds_eight_of_ten_savings_that_were_measured():
    found = list(outcomes(RESULTS))
    held = [is_held(one, ends_of(one.predicted, (LEAST_ODDS, MOST_ODDS, MOST_POWER))) for one in found]
    assert len(found) > 130
    assert sum(held) >= 0.8 * len(held)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.99, 1.0])
def test_the_range_is_what_is_fitted_and_has_the_prediction_inside(share):
    low, high = likely_shares(share)
    assert 0.0 <= low <= share <= high <= 1.0
    if 0.0 < share < 0.99:
        expected = ends_of(odds(share), (LEAST_ODDS, MOST_ODDS, MOST_POWER))
        assert (odds(low), odds(high)) == pytest.approx(expected)


def test_a_larger_prediction_has_larger_ends():
    ranges = [likely_shares(number / 50) for number in range(51)]
    assert ranges == sorted(ranges)
    assert [high for _, high in ranges] == sorted(high for _, high in ranges)


def test_the_fit_takes_the_narrowest_range_and_is_judged_by_programs_that_it_has_not_seen():
    exact = [made(f"program {number}", 0.3, 0.3 + number / 100) for number in range(10)]
    least, most, power = fit(exact, 0.8)
    assert least == 0.7
    assert most * odds(0.3) ** power < odds(0.4)
    share, wide = left_out(exact, 0.8)
    assert 0.7 <= share <= 0.9
    assert wide < 0.2
