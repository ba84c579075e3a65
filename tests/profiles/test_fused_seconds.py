import dataclasses

import pytest
from made_up import estimate, op

from nearpeak.bound.fusion import FusionGroup
from nearpeak.profiles.profile import fused_seconds


def group(*members):
    nothing = {"reads": (), "writes": (), "flops": {}, "vector_flops": {}, "saved_bytes": 0.0}
    return FusionGroup(members=members, family="pointwise", launches=True, **nothing)


def made(group_seconds, fused_s):
    ops = [op("a", 1.0), op("b", 3.0), op("c", 2.0), op("view", 0.0)]
    found = estimate(ops)
    groups = (group(0, 1), group(2, 3))
    return dataclasses.replace(found, groups=groups, group_seconds=group_seconds, fused_s=fused_s)


def test_a_group_is_shared_out_by_the_bounds_of_its_ops():
    assert fused_seconds(made((2.0, 1.5), 3.5)) == [0.5, 1.5, 1.5, 0.0]


def test_the_shares_sum_to_the_floor():
    assert sum(fused_seconds(made((2.2, 1.7), 3.9))) == pytest.approx(3.9)


def test_where_regrouping_does_not_pay_ops_keep_their_bounds():
    assert fused_seconds(made((5.0, 3.0), 6.0)) == [1.0, 3.0, 2.0, 0.0]


def test_without_groups_nothing_is_known():
    assert fused_seconds(estimate([op("a", 1.0)])) == [None]
