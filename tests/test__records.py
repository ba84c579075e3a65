from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearpeak._records import from_json, to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    name: str
    value: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    count: int
    seconds: float
    kind: Literal["cold", "hot"]
    exact: bool
    leaf: Leaf | None = None
    leaves: tuple[Leaf, ...] = ()
    pair: tuple[int, str] = (0, "")
    rates: Mapping[str, float] = field(default_factory=dict)


finite = st.floats(allow_nan=False, allow_infinity=False)
leaves = st.builds(Leaf, name=st.text(), value=st.none() | finite)
records = st.builds(
    Record,
    count=st.integers(),
    seconds=finite,
    kind=st.sampled_from(["cold", "hot"]),
    exact=st.booleans(),
    leaf=st.none() | leaves,
    leaves=st.lists(leaves, max_size=4).map(tuple),
    pair=st.tuples(st.integers(), st.text()),
    rates=st.dictionaries(st.text(), finite, max_size=4),
)

MINIMAL: dict[str, Any] = {"count": 1, "seconds": 0.5, "kind": "hot", "exact": True}


@pytest.mark.slow
@given(records)
def test_round_trip_through_text(record: Record):
    assert from_json(Record, json.loads(json.dumps(to_json(record), allow_nan=False))) == record


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner)))
def test_foreign_data_is_a_value_error(data: Any):
    with pytest.raises(ValueError, match="Record: expected an object"):
        from_json(Record, data)


def test_fields_with_defaults_may_be_missing():
    assert from_json(Record, MINIMAL) == Record(count=1, seconds=0.5, kind="hot", exact=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 1.5}, r"Record\.count: expected an integer, found 1\.5"),
        ({"count": True}, r"Record\.count: expected an integer, found True"),
        ({"seconds": "1"}, r"Record\.seconds: expected a number, found '1'"),
        ({"seconds": None}, r"Record\.seconds: expected a number, found None"),
        ({"kind": "warm"}, r"Record\.kind: 'warm' is not one of 'cold', 'hot'"),
        ({"exact": 1}, r"Record\.exact: expected bool, found 1"),
        ({"leaf": {"value": 1.0}}, r"Record\.leaf: the field 'name' is missing"),
        ({"leaves": [{"name": "a"}, {"name": 2}]}, r"Record\.leaves\[1\]\.name: expected str, found 2"),
        ({"leaves": {"name": "a"}}, r"Record\.leaves: expected a list, found"),
        ({"pair": [1]}, r"Record\.pair: expected a list of 2, found \[1\]"),
        ({"rates": {"bfloat16": "fast"}}, r"Record\.rates\.bfloat16: expected a number, found 'fast'"),
        ({"surprise": 1}, r"Record: expected known fields only, found \['surprise'\]"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        from_json(Record, MINIMAL | change)


def test_a_missing_field_is_named():
    with pytest.raises(ValueError, match="Record: the field 'count' is missing"):
        from_json(Record, {key: value for key, value in MINIMAL.items() if key != "count"})


def test_an_integer_is_a_number():
    seconds = from_json(Record, MINIMAL | {"seconds": 2}).seconds
    assert seconds == 2.0
    assert isinstance(seconds, float)


def test_json_has_no_infinity():
    assert to_json(Leaf(name="a", value=float("inf"))) == {"name": "a", "value": None}


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(ValueError, match="Record") as caught:
        from_json(Record, MINIMAL | {"count": "x" * 10_000})
    assert len(str(caught.value)) < 200
