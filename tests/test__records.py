from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearpeak._records import Count, MeasuredSeconds, Rate, Share, from_json, to_json


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
    count=st.integers(-(2**63), 2**63 - 1),
    seconds=finite,
    kind=st.sampled_from(["cold", "hot"]),
    exact=st.booleans(),
    leaf=st.none() | leaves,
    leaves=st.lists(leaves, max_size=4).map(tuple),
    pair=st.tuples(st.integers(-(2**63), 2**63 - 1), st.text()),
    rates=st.dictionaries(st.text(), finite, max_size=4),
)

MINIMAL: dict[str, Any] = {"count": 1, "seconds": 0.5, "kind": "hot", "exact": True}


@pytest.mark.slow
@given(records)
def test_round_trip_through_text(record: Record):
    assert from_json(Record, json.loads(json.dumps(to_json(record), allow_nan=False))) == record


@pytest.mark.slow
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Limited:
    wall: MeasuredSeconds
    share: Share | None = None
    counts: tuple[Count, ...] = ()
    rates: Mapping[str, Rate] = field(default_factory=dict)

    def check(self) -> None:
        if len(self.counts) > 2:
            raise ValueError("too many counts")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wall": 0}, r"Limited\.wall: expected a number from 1e-12 to 1e\+09, found 0"),
        ({"wall": 1e999}, r"Limited\.wall: expected a finite number, found inf"),
        ({"wall": 10**400}, r"Limited\.wall: expected a finite number"),
        ({"share": 1.1}, r"Limited\.share: expected a number from 0 to 1"),
        ({"counts": [1, -1]}, r"Limited\.counts\[1\]: expected a number from 0"),
        ({"counts": [2**63]}, r"Limited\.counts\[0\]: expected an integer of 64 bits, found one of 64"),
        ({"counts": [1, 2, 3]}, "Limited: too many counts"),
        ({"rates": {"a": 0}}, r"Limited\.rates\.a: expected a number from 0\.001"),
        ({"wall": [1] * 10**6}, r"Limited\.wall: expected a number, found \[1, 1, 1, 1, 1, 1, \.\.\.\]"),
    ],
)
def test_a_number_outside_of_its_limits_is_named(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message) as caught:
        from_json(Limited, {"wall": 1.0, **change})
    assert len(str(caught.value)) < 200


def test_numbers_within_their_limits():
    assert from_json(Limited, {"wall": 1, "share": 1.0, "counts": [0], "rates": {"a": 2}}).rates == {"a": 2.0}


def test_a_text_has_a_length():
    with pytest.raises(ValueError, match=r"Leaf\.name: expected a text, found one of 100,001 characters"):
        from_json(Leaf, {"name": "x" * 100_001})
