import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearpeak.profiles.waterfall import covered_seconds, exclusive_seconds, merge_intervals

points = st.integers(0, 60)
intervals = st.lists(st.tuples(points, points).map(lambda pair: (float(min(pair)), float(max(pair)))), max_size=12)


def instants(found):
    """The unit cells that integer intervals cover."""
    return {cell for start, end in found for cell in range(int(start), int(end))}


@given(intervals)
def test_a_union_covers_the_same_instants_and_is_disjoint(given_intervals):
    found = merge_intervals(given_intervals)
    assert instants(found) == instants(given_intervals)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(found))
    assert covered_seconds(given_intervals) == len(instants(given_intervals))


@given(intervals)
def test_charges_sum_to_what_is_covered_and_none_exceeds_its_interval(given_intervals):
    charged = exclusive_seconds(given_intervals)
    assert sum(charged) == pytest.approx(covered_seconds(given_intervals))
    assert all(0 <= part <= end - start for part, (start, end) in zip(charged, given_intervals, strict=True))
