"""Times of ops over several profiled steps."""

import pytest
from made_up import estimate, op

from nearpeak.profiles.profile import DeviceKernel, add_step_spread, build_profile, typical_seconds


def made(kernels):
    ops = [op("aten.mul.Tensor", 1.0), op("aten.exp.default", 1.0), op("aten.view.default", 0.0)]
    return build_profile(estimate(ops), kernels, wall_s=20.0, source="train.py", date="2026", device="Toy")


KERNELS = [
    DeviceKernel(name="mul", start_s=0.0, seconds=2.0, op=0),
    DeviceKernel(name="mul", start_s=2.0, seconds=1.0, op=0),
    DeviceKernel(name="exp", start_s=2.0, seconds=2.0, op=1),  # 1 s of it beside the other
    DeviceKernel(name="stray", start_s=6.0, seconds=1.0, op=None),
]


def test_an_op_has_the_times_of_all_its_kernels_in_all_steps():
    #        the step itself is the second
    repeats = [(1.5, 2.0, 2.5), (0.5, 1.0, 2.0), (4.0, 2.0, 1.0), (0.5, 1.0, 2.0)]
    first, second, nothing = add_step_spread(made(KERNELS), KERNELS, repeats).ops
    assert (first.measured_s, first.typical_s) == (3.0, 3.0)
    assert (first.quickest_s, first.slowest_s) == (3.0, 4.5)  # of the quickest step, not its own least
    assert (second.measured_s, second.typical_s) == (1.0, 1.0)  # half of it beside an earlier kernel, in each step
    assert (second.quickest_s, second.slowest_s) == (1.0, 0.5)
    assert nothing.typical_s is None


def test_one_step_tells_of_itself_alone():
    profile = made(KERNELS)
    assert add_step_spread(profile, KERNELS, ()) is profile
    assert add_step_spread(profile, KERNELS, [(kernel.seconds,) for kernel in KERNELS]) is profile
    assert profile.ops[0].compared_s == profile.ops[0].measured_s


def test_a_step_in_which_something_else_ran_does_not_count():
    assert typical_seconds([1.0, 1.1, 30.0, 0.9, 1.0]) == pytest.approx(1.0333, abs=1e-4)
