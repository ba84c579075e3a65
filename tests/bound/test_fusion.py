import sys

import pytest
from bound_traces import Builder, random_traces
from hypothesis import given, settings

from nearpeak.bound.dataflow import touches_of
from nearpeak.bound.fusion import fusion_groups


def members(found):
    return sorted(group.members for group in found)


def sizes(accesses):
    return {access.storage: access.bytes for access in accesses}


def test_a_pointwise_chain_is_one_group_and_its_intermediates_are_gone():
    build = Builder()
    x = build.storage(100, "input")
    a = build.make(100, "pointwise", (x,))
    b = build.make(50, "movement", (a,))
    c = build.make(50, "pointwise", (b,))
    (group,) = fusion_groups(build.trace(c), build.costs)
    assert group.members == (0, 1, 2)
    assert (sizes(group.reads), sizes(group.writes)) == ({x: 100}, {c: 50})
    assert group.saved_bytes == 2 * 100 + 2 * 50
    assert group.family == "pointwise"


def test_a_tree_merges_at_its_join():
    build = Builder()
    x, y = build.storage(10, "input"), build.storage(10, "input")
    out = build.make(10, "pointwise", (build.make(10, "pointwise", (x,)), build.make(10, "pointwise", (y,))))
    assert members(fusion_groups(build.trace(out), build.costs)) == [(0, 1, 2)]


def test_a_result_in_between_stays_written_but_is_not_read_again():
    build = Builder()
    x = build.storage(10, "input")
    a = build.make(10, "pointwise", (x,))
    b = build.make(10, "pointwise", (a,))
    (group,) = fusion_groups(build.trace(a, b), build.costs)
    assert sizes(group.writes) == {a: 10, b: 10}
    assert group.saved_bytes == 10


def test_what_backward_reads_stays_written_and_no_group_spans_phases():
    build = Builder()
    x = build.storage(10, "input")
    a = build.make(10, "pointwise", (x,))
    b = build.make(10, "pointwise", (a,))
    c = build.make(10, "pointwise", (a, b), phase="backward")
    forward, backward = fusion_groups(build.trace(c), build.costs)
    assert (forward.members, backward.members) == ((0, 1), (2,))
    assert sizes(forward.writes) == {a: 10, b: 10}


def test_no_cycle_through_an_op_outside():
    build = Builder()
    x = build.storage(10, "input")
    a = build.make(10, "pointwise", (x,))
    b = build.make(10, "sorting", (a,))
    c = build.make(10, "pointwise", (a, b))
    assert members(fusion_groups(build.trace(c), build.costs)) == [(0,), (1,), (2,)]


def test_an_unrelated_op_in_between_does_not_hinder():
    build = Builder()
    x = build.storage(10, "input")
    a = build.make(10, "pointwise", (x,))
    build.make(10, "sorting", (a,))
    h = build.make(5, "sorting", (x,))
    c = build.make(10, "pointwise", (a, h))
    assert members(fusion_groups(build.trace(c), build.costs)) == [(0, 3), (1,), (2,)]


def test_a_norm_takes_its_neighbors_but_no_product():
    build = Builder()
    x, w = build.storage(10, "input"), build.storage(10, "parameter")
    a = build.make(10, "pointwise", (x,))
    n = build.make(10, "normalization", (a,))
    b = build.make(10, "pointwise", (n,))
    m = build.make(10, "matrix", (b, w))
    norm, product = fusion_groups(build.trace(m), build.costs)
    assert (norm.members, norm.family) == ((0, 1, 2), "normalization")
    assert (product.members, product.family) == ((3,), "matrix")


def test_prologue_and_epilogue_of_one_product():
    build = Builder()
    x, w = build.storage(10, "input"), build.storage(20, "parameter")
    cast = build.make(10, "movement", (w,))
    y = build.make(30, "matrix", (x, cast))
    act = build.make(30, "pointwise", (y,))
    z = build.make(30, "matrix", (act, w))
    first, second = fusion_groups(build.trace(z), build.costs)
    assert (first.members, second.members) == ((0, 1, 2), (3,))
    assert first.saved_bytes == 2 * 10 + 2 * 30


def test_in_place_ops_join_and_a_view_goes_with_what_it_views():
    build = Builder()
    x, w = build.storage(10, "input"), build.storage(10, "parameter")
    y = build.make(10, "matrix", (x, w))
    build.op("view", (y,), (y,))
    build.op("pointwise", (y,), (y,), name="aten.relu_.default")
    (group,) = fusion_groups(build.trace(y), build.costs)
    assert group.members == (0, 1, 2)
    assert (sizes(group.writes), group.saved_bytes) == ({y: 10}, 20)


def test_a_view_of_a_parameter_is_alone_and_launches_nothing():
    build = Builder()
    w = build.storage(10, "parameter")
    build.op("view", (w,), (w,))
    (group,) = fusion_groups(build.trace(), build.costs)
    assert (group.family, group.launches, group.reads) == ("view", False, ())


def written_out_attention(*, backward=False):
    build = Builder()
    q, k, v, mask = (build.storage(64, "input") for _ in range(4))
    scores = build.make(1000, "matrix", (q, k))
    build.op("view", (scores,), (scores,))
    scaled = build.make(1000, "pointwise", (scores,))
    masked = build.make(1000, "pointwise", (scaled, mask))
    weights = build.make(1000, "normalization", (masked,), name="aten._softmax.default")
    half = build.make(500, "movement", (weights,))
    out = build.make(64, "matrix", (half, v))
    if backward:
        build.make(1000, "pointwise", (weights,), phase="backward")
    return build, out, (q, k, v, mask)


def test_attention_written_out_is_one_group_without_its_scores():
    build, out, inputs = written_out_attention()
    (group,) = fusion_groups(build.trace(out), build.costs)
    assert (group.family, group.members) == ("attention", tuple(range(7)))
    assert group.saved_bytes == 2 * (4 * 1000 + 500)
    assert sizes(group.reads) == dict.fromkeys(inputs, 64)
    assert sizes(group.writes) == {out: 64}


def test_attention_whose_weights_backward_reads_keeps_them():
    build, out, _ = written_out_attention(backward=True)
    found = fusion_groups(build.trace(out), build.costs)
    assert "attention" not in {group.family for group in found}
    assert any(1000 in sizes(group.writes).values() for group in found)


def test_an_op_without_a_formula_keeps_what_it_reads():
    build = Builder()
    x = build.storage(10, "input")
    a = build.make(10, "pointwise", (x,))
    b = build.make(10, "pointwise", (a,))
    build.op("unknown", (a,), (), sizes={a: 0}, model="none")
    found = fusion_groups(build.trace(b), build.costs)
    assert a in sizes(found[0].writes)


@pytest.mark.slow
@settings(max_examples=300)
@given(random_traces())
def test_each_op_once_in_an_order_that_can_run(drawn):
    trace, costs = drawn
    found = fusion_groups(trace, costs)
    assert sorted(index for group in found for index in group.members) == list(range(len(trace.ops)))
    position = {index: at for at, group in enumerate(found) for index in group.members}
    touches = [touches_of(op, cost) for op, cost in zip(trace.ops, costs, strict=True)]
    for late, after in enumerate(touches):
        for early, before in enumerate(touches[:late]):
            shared = set(before.writes) & {*after.reads, *after.writes} or set(before.reads) & set(after.writes)
            assert not shared or position[early] <= position[late]
    for group in found:
        assert len({trace.ops[index].phase for index in group.members}) == 1
        assert group.saved_bytes >= 0
        assert list(group.members) == sorted(group.members)


@pytest.mark.parametrize("kind", ["layers", "chain", "shared"])
def test_work_grows_with_the_number_of_ops_and_no_faster(kind):
    once, twice = (lines_run(fusion_groups, *many_ops(kind, count)) for count in (400, 800))
    assert twice < 2.2 * once  # four times where each op looks at all others


def many_ops(kind, count):
    build = Builder()
    x = build.storage(100, "input")
    weight = build.storage(100, "parameter")
    shared = build.make(10, "creation")
    for number in range(count):
        if kind == "chain":
            x = build.make(100, "pointwise", (x,))
        elif kind == "shared":
            x = build.make(100, "pointwise", (x, shared, build.storage(10, "parameter")))
        else:
            family = ("normalization", "matrix", "pointwise", "matrix", "pointwise")[number % 5]
            x = build.make(100, family, (x, weight))
    return build.trace(x), build.costs


def lines_run(function, *args):
    """How many lines of Python the call runs: a measure of its work that no other process changes."""
    count = 0

    def step(frame, event, argument):
        nonlocal count
        count += event == "line"
        return step

    before = sys.gettrace()
    sys.settrace(step)
    try:
        function(*args)
    finally:
        sys.settrace(before)
    return count
