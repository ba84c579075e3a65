import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearpeak.profiles.file import from_columns, to_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    shape: tuple[int, ...]
    count: int
    seconds: float
    expected: float | None
    known: bool


rows = st.builds(
    Row,
    name=st.text(max_size=3),
    shape=st.lists(st.integers(0, 9), max_size=2).map(tuple),
    count=st.integers(-(2**63), 2**63 - 1),
    seconds=st.floats(allow_nan=False, allow_infinity=False),
    expected=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    known=st.booleans(),
)


@pytest.mark.slow
@given(st.lists(rows, max_size=6))
def test_records_come_back_through_text(records):
    data = json.loads(json.dumps(to_columns(Row, records), allow_nan=False))
    assert from_columns(Row, data, "Rows") == tuple(records)


def two():
    row = Row(name="a", shape=(2, 3), count=1, seconds=0.5, expected=None, known=True)
    return to_columns(Row, [row, row])


def test_each_text_is_there_once():
    assert two()["name"] == {"values": ["a"], "index": [0, 0]}
    assert two()["shape"] == {"values": [[2, 3]], "index": [0, 0]}
    assert two()["seconds"] == [0.5, 0.5]


def test_whole_numbers_become_floats_where_those_are_declared():
    data = two()
    data["seconds"] = [1, 2]
    assert [type(row.seconds) for row in from_columns(Row, data, "Rows")] == [float, float]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": [1, 1.5]}, r"Rows\.count\[1\]: expected an integer, found 1\.5"),
        ({"count": [1, True]}, r"Rows\.count\[1\]: expected an integer"),
        ({"seconds": [1.0, None]}, r"Rows\.seconds\[1\]: expected a number"),
        ({"seconds": [1.0, 10**400]}, "expected a finite number"),
        ({"known": [True, 1]}, r"Rows\.known\[1\]: expected bool"),
        ({"count": [1]}, "different lengths"),
        ({"count": "11"}, "expected a list"),
        ({"name": ["a", "a"]}, '"values" and "index"'),
        ({"name": {"values": ["a"], "index": [0, 1]}}, "not all between 0 and 0"),
        ({"name": {"values": ["a"], "index": [0, -1]}}, "not all between 0 and 0"),
        ({"name": {"values": ["a"], "index": [0, False]}}, "a list of integers"),
        ({"name": {"values": [1], "index": [0, 0]}}, r"Rows\.name\.values\[0\]: expected str"),
        ({"extra": []}, "expected the columns"),
    ],
)
def test_a_wrong_column_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        from_columns(Row, two() | change, "Rows")


def test_what_is_no_table_is_said():
    with pytest.raises(ValueError, match="an object of columns"):
        from_columns(Row, None, "Rows")
