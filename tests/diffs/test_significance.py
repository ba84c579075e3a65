"""What the clock of a GPU explains, in made-up runs of a few kinds of kernels in twelve layers."""

import math
import random
from dataclasses import replace

import pytest
from made_up import profile as made_up

from nearpeak.diffs.difference import MAX_CLOCK_CHANGE, difference
from nearpeak.diffs.significance import UNKNOWN_CLOCK_CHANGE
from nearpeak.profiles.idle import IdleCause
from nearpeak.profiles.profile import ProfileCeilings, ProfiledOp, typical_seconds

BANDWIDTH = 4e12
LAYERS = 12
KINDS = {
    # microseconds, limiter, share of the bandwidth that it reaches, elasticity to the clock
    "aten.addmm": (700.0, "compute", 0.2, 1.0),
    "aten.native_layer_norm": (100.0, "memory", 0.5, 1.7),
    "aten.gelu": (90.0, "memory", 0.6, 1.7),
    "aten.add": (90.0, "memory", 0.95, 0.0),
    "triton.mine": (66.0, "none", None, 0.0),
}


def run(seed, *, clock=0.0, steps=(-0.02, -0.01, 0.0, 0.01, 0.02), slower=None, only=None, far=(), wander=0.0):
    """A run at a clock that is lower by `clock`, with `steps` beside it, some kernels slower by a factor, and
    some of them `far` from the bandwidth."""
    chance = random.Random(seed)
    ops = []
    for layer in range(LAYERS):
        for name, (took, limiter, reached, follows) in KINDS.items():
            if only is not None and name not in only:
                continue
            reached = 0.5 if name in far else reached
            longer = 1e-6 * took * (slower or {}).get(name, 1.0)
            times = [longer * math.exp(follows * (clock + step) + chance.gauss(0.0, 0.006)) for step in steps]
            repeats = {}
            if len(steps) > 1:
                repeats = {"typical_s": typical_seconds(times), "quickest_s": times[0], "slowest_s": times[-1]}
            moved = 0.0 if reached is None else reached * BANDWIDTH * 1e-6 * took
            ops.append(
                ProfiledOp(
                    name=f"{name}.default",
                    family="matrix" if limiter == "compute" else "pointwise",
                    phase="forward",
                    module=f"Net.{layer}",
                    source="net.py:1",
                    shapes=((64, 64),),
                    kernels=1,
                    measured_s=times[len(times) // 2],
                    bound_s=0.8e-6 * took if limiter == "compute" else moved / BANDWIDTH,
                    expected_s=None,
                    limiter=limiter,
                    flops=1e9 if limiter == "compute" else 0.0,
                    bytes=moved,
                    modeled=reached is not None,
                    **repeats,
                )
            )
    kernel_s = sum(op.measured_s for op in ops)
    walls = tuple(1.1 * kernel_s * math.exp(wander) * (1.0 + chance.gauss(0.0, 0.001)) for _ in range(10))
    wall_s = sum(walls) / len(walls)
    return replace(
        made_up(),
        device="NVIDIA H200",
        ops=tuple(ops),
        kernel_s=kernel_s,
        wall_s=wall_s,
        walls=walls,
        steps=len(walls),
        spread=(max(walls) - min(walls)) / wall_s,
        ceilings=ProfileCeilings(bandwidth=BANDWIDTH),
    )


def named(before, after):
    return {op.names_after[0]: op.verdict for op in difference(before, after).ops}


ONE = (0.0,)


@pytest.mark.parametrize("clock", [-0.05, 0.05])
@pytest.mark.parametrize("steps", [ONE, (-0.02, -0.01, 0.0, 0.01, 0.02)])
@pytest.mark.parametrize("seed", range(5))
def test_another_clock_is_no_change_of_any_op(clock, steps, seed):
    found = difference(run(seed, steps=steps), run(100 + seed, clock=clock, steps=steps))
    assert found.ops == ()
    assert math.log(found.clock) == pytest.approx(clock, abs=0.01)


@pytest.mark.parametrize("clock", [-0.05, 0.0, 0.05])
@pytest.mark.parametrize("seed", range(5))
def test_a_kernel_that_waits_for_memory_is_named_whatever_the_clock_does(clock, seed):
    slower = run(100 + seed, clock=clock, slower={"aten.add": 1.03})
    assert named(run(seed), slower) == {"aten.add": "slower"}
    assert named(slower, run(seed)) == {"aten.add": "faster"}


@pytest.mark.parametrize("clock", [-0.05, 0.0, 0.05])
@pytest.mark.parametrize("seed", range(5))
def test_so_is_one_of_unknown_work_that_was_seen_to_stand_still(clock, seed):
    slower = run(100 + seed, clock=clock, slower={"triton.mine": 1.03})
    assert named(run(seed), slower) == {"triton.mine": "slower"}


def test_of_unknown_work_it_is_not_known_where_one_step_was_profiled():
    slower = run(100, clock=0.05, slower={"triton.mine": 1.03}, steps=ONE)
    assert named(run(0, steps=ONE), slower) == {}


def test_a_kernel_far_from_the_bandwidth_may_have_followed_the_clock():
    before, after = run(0, steps=ONE), run(100, clock=0.05, slower={"aten.add": 1.03}, steps=ONE)
    assert named(before, after) == {"aten.add": "slower"}
    far = {"far": ("aten.add",), "steps": ONE}
    assert named(run(0, **far), run(100, clock=0.05, slower={"aten.add": 1.03}, **far)) == {}
    assert named(run(0, **far), run(100, clock=0.05, slower={"aten.add": 1.2}, **far)) == {"aten.add": "slower"}


def test_the_only_product_is_judged_by_what_may_follow_the_clock_with_it():
    assert named(run(0), run(100, clock=0.04)) == {}
    assert named(run(0), run(100, slower={"aten.addmm": 1.08})) == {"aten.addmm": "slower"}


def test_a_product_beside_what_waits_for_memory_alone_has_nothing_to_be_judged_by():
    only = ("aten.addmm", "aten.add")
    little, much = math.exp(0.9 * UNKNOWN_CLOCK_CHANGE), math.exp(UNKNOWN_CLOCK_CHANGE + 0.1)
    assert named(run(0, only=only), run(100, only=only, slower={"aten.addmm": little})) == {}
    assert named(run(0, only=only), run(100, only=only, slower={"aten.addmm": much})) == {"aten.addmm": "slower"}


def test_a_step_without_products():
    only = ("aten.native_layer_norm", "aten.gelu", "aten.add", "triton.mine")
    assert named(run(0, only=only), run(100, only=only, slower={"aten.gelu": 1.06})) == {"aten.gelu": "slower"}
    found = difference(run(0, only=only), run(100, only=only))
    assert (found.ops, found.clock) == ((), None)


def test_a_longer_step_that_no_op_accounts_for_may_be_the_clock():
    found = difference(run(0), run(1, wander=0.028))
    assert found.noise < math.log(found.ratio) < MAX_CLOCK_CHANGE
    assert (found.verdict, found.by_clock) == ("same", True)
    found = difference(run(0), run(1, wander=MAX_CLOCK_CHANGE + 0.02))
    assert (found.verdict, found.by_clock) == ("slower", False)


def test_a_longer_step_that_idle_time_or_an_op_accounts_for_is_slower():
    before, after = run(0), run(1, wander=0.028)
    waits = IdleCause(cause="python", seconds=after.wall_s - before.wall_s, count=1, where="net.py:9", what="")
    found = difference(replace(before, idle=()), replace(after, idle=(waits,)))
    assert (found.verdict, found.by_clock) == ("slower", False)
    found = difference(run(0), run(1, slower={"aten.add": 1.35}))
    assert found.noise < math.log(found.ratio) < MAX_CLOCK_CHANGE
    assert (found.verdict, found.by_clock) == ("slower", False)
