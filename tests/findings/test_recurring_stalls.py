import dataclasses

from made_up import profile

from nearpeak.findings.step import is_recurring_stall


def test_a_stall_that_made_only_the_profiled_step_longer_does_not_count():
    usual = profile(wall_s=10.0)
    assert is_recurring_stall(usual, 1.0)  # that of a trace file: it is the step itself
    assert is_recurring_stall(dataclasses.replace(usual, profiled_s=10.2), 1.0)
    assert not is_recurring_stall(dataclasses.replace(usual, profiled_s=11.0), 1.0)


def test_what_the_profiler_adds_to_each_op_does_not_count():
    many = dataclasses.replace(profile(wall_s=10.0), ops=profile().ops * 1000)
    assert is_recurring_stall(dataclasses.replace(many, profiled_s=10.06), 1e-3)
    assert not is_recurring_stall(dataclasses.replace(many, profiled_s=10.07), 1e-3)
