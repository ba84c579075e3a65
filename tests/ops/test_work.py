import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearpeak.ops.work import Work

amounts = st.floats(0, 1e18)
counts = st.dictionaries(st.sampled_from(["float32", "bfloat16", "float8", "int8"]), amounts, max_size=4)
works = st.builds(Work, flops=counts, vector_flops=counts, bytes_read=amounts, bytes_written=amounts)


def figures(work):
    """All numbers of a work; a dtype that is not named has none."""
    dtypes = ("float32", "bfloat16", "float8", "int8")
    return [
        *(work.flops.get(dtype, 0.0) for dtype in dtypes),
        *(work.vector_flops.get(dtype, 0.0) for dtype in dtypes),
        work.bytes_read,
        work.bytes_written,
    ]


@given(works, works)
def test_the_order_of_two_works_does_not_matter(a, b):
    assert a + b == b + a


@given(works, works, works)
def test_the_grouping_of_works_matters_only_to_rounding(a, b, c):
    assert figures((a + b) + c) == pytest.approx(figures(a + (b + c)), rel=1e-12)


@given(works)
def test_no_work_adds_nothing(work):
    assert work + Work() == work
    assert Work() + work == work


@given(works, works)
def test_nothing_is_lost_in_a_sum(a, b):
    expected = [x + y for x, y in zip(figures(a), figures(b), strict=True)]
    assert figures(a + b) == expected
    assert (a + b).bytes == pytest.approx(a.bytes + b.bytes)


def test_dtypes_and_engines_are_kept_apart():
    total = Work(flops={"bfloat16": 1}, bytes_read=2) + Work(flops={"float8": 3}, vector_flops={"bfloat16": 4})
    assert total.flops == {"bfloat16": 1, "float8": 3}
    assert total.vector_flops == {"bfloat16": 4}


def test_adding_leaves_both_as_they_were():
    a, b = Work(flops={"float32": 1}), Work(flops={"float32": 2})
    assert (a + b).flops == {"float32": 3}
    assert (a.flops, b.flops) == ({"float32": 1}, {"float32": 2})
