"""Which calibrations are not to be trusted."""

import dataclasses

import pytest

from nearpeak.machines import catalogue
from nearpeak.machines.machine import Achievable, Ceiling, Machine
from nearpeak.machines.physics import calibration_doubts, is_worth_repeating


def measured(kind="cpu", **changes):
    facts = {"bandwidth": 1e10, "cache_bandwidth": 4e10, "matrix": {}, "vector": {"float32": 1e11}} | changes
    achievable = Achievable(how="measured", note="", **facts)
    return Machine(
        id="toy",
        name="Toy",
        kind=kind,
        vendor="",
        architecture="",
        processors=2,
        memory_bytes=1e9,
        achievable=achievable,
    )


def ceiling(value=1.0, spread=0.0):
    return Ceiling(value=value, spread=spread, how="")


def test_a_good_one_has_none():
    ceilings = {"bandwidth.copy": ceiling(1e10, 0.3), "vector.float32": ceiling(1e11, 0.2)}
    assert calibration_doubts(measured(ceilings=ceilings, others_share=0.02)) == ()


@pytest.mark.parametrize(
    ("changes", "doubt"),
    [
        ({"cache_bandwidth": 3.6e9}, "the cache was slower than the memory (3.60 GB/s, 10.0 GB/s)"),
        ({"others_share": 0.5}, "other work used 50 % of the cores meanwhile"),
        ({"ceilings": {"bandwidth.copy": ceiling(1e10, 4.54)}}, "repeats of bandwidth.copy lay 454 % apart"),
        ({"ceilings": {"cache_bandwidth": ceiling(spread=0.7)}}, "repeats of cache_bandwidth lay 70 % apart"),
    ],
)
def test_each_doubt(changes, doubt):
    assert calibration_doubts(measured(**changes)) == (doubt,)


def test_only_peaks_of_dtypes_that_are_used_count():
    ceilings = {"vector.int8": ceiling(5e11, 1.6), "vector.float32": ceiling(1e11, 0.1)}
    machine = measured(ceilings=ceilings)
    assert calibration_doubts(machine, {"float32"}) == ()
    assert calibration_doubts(machine, {"float32", "int8"}) == ("repeats of vector.int8 lay 160 % apart",)
    assert not is_worth_repeating(machine)  # nearly nothing computes in it
    slow_cache = measured(ceilings=ceilings, cache_bandwidth=1e9)
    assert "the cache was slower" in calibration_doubts(slow_cache, {"float32"})[0]


def test_of_peaks_above_the_datasheet_only_those_that_are_used_count():
    listed = catalogue.find("h200-sxm")
    peaks = {**listed.achievable.matrix, "float8": 9e15}
    machine = dataclasses.replace(
        listed, achievable=dataclasses.replace(listed.achievable, how="measured", matrix=peaks)
    )
    assert calibration_doubts(machine, {"bfloat16"}) == ()
    assert "float8 was faster than its datasheet" in calibration_doubts(machine, {"float8"})[0]


def test_ways_that_are_not_the_ceiling_may_scatter():
    ceilings = {
        "bandwidth.copy": ceiling(1e10),
        "bandwidth.fill": ceiling(0.5e10, 3.0),
        "launch.host_call": ceiling(1e-6, 5.0),
    }
    assert calibration_doubts(measured(ceilings=ceilings)) == ()


@pytest.mark.parametrize(
    ("changes", "doubt"),
    [
        ({"bandwidth": 4.9e12}, None),
        ({"bandwidth": 5.5e12}, "the memory was faster than its datasheet by 14.6 %"),
        ({"matrix": {"bfloat16": 1.05 * 989.4e12}}, None),
        ({"matrix": {"bfloat16": 2.0 * 989.4e12}}, "bfloat16 was faster than its datasheet by 100.0 %"),
        ({"others_share": 0.3}, None),  # of the host's cores
    ],
)
def test_nothing_is_faster_than_its_datasheet(changes, doubt):
    made = measured("gpu", **({"bandwidth": 4.5e12, "cache_bandwidth": 6e12} | changes))
    made = dataclasses.replace(made, theoretical=catalogue.find("h200-sxm").theoretical)
    assert calibration_doubts(made) == (() if doubt is None else (doubt,))


def test_a_machine_of_the_catalogue_was_not_measured():
    assert calibration_doubts(catalogue.find("h200-sxm")) == ()


def test_repeating_pays_unless_nothing_else_ran():
    poor = {"cache_bandwidth": 1e9}
    assert is_worth_repeating(measured(**poor))
    assert is_worth_repeating(measured(**poor, others_share=0.4))
    assert not is_worth_repeating(measured(**poor, others_share=0.01))
    assert not is_worth_repeating(measured())
