import math

import pytest

from nearpeak.errors import UsageError
from nearpeak.measure.options import Options, options_from


def test_the_defaults_are_valid():
    assert options_from({}) == Options()


def test_what_is_given_is_taken():
    assert options_from({"cache": "hot", "max_seconds": 0.5}) == Options(cache="hot", max_seconds=0.5)


@pytest.mark.parametrize(
    ("name", "value", "valid"),
    [
        ("kind", "gpu", ["auto", "cpu", "device", "enqueue", "graph", "latency", "pipelined"]),
        ("method", "", ["auto", "events", "graph"]),
        ("cache", "x", ["cold", "hot"]),
        ("evict", 3, ["flush", "rotate"]),
        ("regime", None, ["burst", "sustained"]),
    ],
)
def test_a_bad_choice_is_answered_with_the_valid_ones(name, value, valid):
    with pytest.raises(UsageError) as caught:
        options_from({name: value})
    message = str(caught.value)
    assert message.startswith(f"{name} is {value!r}.")
    for choice in valid:
        assert repr(choice) in message


def test_a_choice_that_is_nearly_right_is_suggested():
    with pytest.raises(UsageError, match=r"kind is 'latencies'. Did you mean 'latency'\?"):
        options_from({"kind": "latencies"})


@pytest.mark.parametrize("name", ["precision", "max_seconds", "warmup_seconds"])
@pytest.mark.parametrize("value", [-1, -1e-9, math.nan])
def test_a_negative_number_or_none_at_all_is_refused(name, value):
    with pytest.raises(UsageError, match=rf"^{name} is {value!r}; it is a number of at least 0\.$"):
        options_from({name: value})


@pytest.mark.parametrize("name", ["precision", "max_seconds", "warmup_seconds"])
def test_zero_is_a_number(name):
    assert getattr(options_from({name: 0}), name) == 0


@pytest.mark.parametrize("value", [0.49, 1, 95, -0.95, math.nan])
def test_a_confidence_that_is_no_share_is_refused(value):
    with pytest.raises(UsageError, match=r"it is a share from 0\.5 to below 1"):
        options_from({"confidence": value})


@pytest.mark.parametrize("given", [{"min_blocks": 5}, {"max_blocks": 11}, {"min_blocks": 500}, {"max_blocks": 0}])
def test_too_few_blocks_are_refused(given):
    with pytest.raises(UsageError, match=r"min_blocks is \d+ and max_blocks is \d+; .* at least 6 blocks"):
        options_from(given)


@pytest.mark.parametrize(
    "given", [{"precision": "fast"}, {"max_seconds": None}, {"confidence": "95 %"}, {"min_blocks": "many"}]
)
def test_a_text_where_a_number_belongs_is_a_usage_error(given):
    (name,) = given
    with pytest.raises(UsageError, match=name):
        options_from(given)


def test_an_unknown_option_is_answered_with_the_nearest_and_with_where_arguments_go():
    with pytest.raises(UsageError) as caught:
        options_from({"max_second": 1})
    assert "There is no option 'max_second'. Did you mean 'max_seconds'?" in str(caught.value)
    assert "bench(nearpeak.Case(fn, x, dim=-1))" in str(caught.value)


def test_an_unknown_option_with_no_near_name_is_answered_with_all():
    with pytest.raises(UsageError) as caught:
        options_from({"dim": -1})
    for name in ("kind", "method", "cache", "evict", "regime", "precision", "confidence", "seed"):
        assert repr(name) in str(caught.value)
