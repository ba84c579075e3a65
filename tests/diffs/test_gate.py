"""When a gate passes, fails, or cannot tell."""

from dataclasses import replace

import pytest
from real_runs import real, scaled

from nearpeak.diffs.difference import difference
from nearpeak.diffs.gate import gate

RUN = real("vit_second")


def slower(factor):
    """The step takes longer by a factor, kernels and all."""
    return scaled(RUN, lambda op: True, 1.0 + (factor - 1.0) * RUN.walls[5] / RUN.kernel_s)


@pytest.mark.parametrize(
    ("factor", "outcome"), [(0.9, "passed"), (1.0, "passed"), (1.02, "passed"), (1.04, "failed"), (1.5, "failed")]
)
def test_by_how_much_slower(factor, outcome):
    found = gate(difference(RUN, slower(factor)), 0.03)
    assert found.outcome == outcome
    assert "3.0 % is allowed" in found.reason


def test_a_limit_below_the_noise_cannot_be_told_unless_it_is_far_from_it():
    assert gate(difference(RUN, slower(1.0)), 0.001).outcome == "not known"
    assert gate(difference(RUN, slower(1.01)), 0.001).outcome == "not known"
    assert gate(difference(RUN, slower(1.10)), 0.001).outcome == "failed"
    assert gate(difference(RUN, slower(0.90)), 0.001).outcome == "passed"


def test_a_change_that_may_be_the_clock_cannot_be_told():
    found = gate(difference(RUN, slower(1.033)), 0.03)
    assert found.outcome == "not known"
    assert "no op and no idle time accounts for it" in found.reason
    assert gate(difference(RUN, slower(1.033)), 0.04).outcome == "passed"


def noisy(run):
    return replace(run, spread=0.5)


def test_runs_that_are_too_noisy():
    found = gate(difference(noisy(RUN), slower(1.2)), 0.03)
    assert found.outcome == "not known"
    assert "between" in found.reason
    assert gate(difference(noisy(RUN), slower(2.0)), 0.03).outcome == "failed"


def test_what_is_not_comparable():
    assert gate(difference(RUN, replace(slower(1.2), device="other")), 0.03).outcome == "not known"
    assert gate(difference(replace(RUN, steps=0, walls=(), spread=None), RUN), 0.03).outcome == "not known"


def test_different_programs_cannot_pass_or_fail():
    result = gate(difference(real("vit_first"), real("moe_first")), 0.03)
    assert (result.outcome, result.reason) == ("not known", "the runs are of different programs")
