import dataclasses

import pytest
from bound_traces import Builder, machine, random_traces
from hypothesis import given, settings
from hypothesis import strategies as st

from nearpeak.bound.cache import Residency
from nearpeak.bound.dataflow import touches_in
from nearpeak.bound.floors import as_written, group_times, ideal
from nearpeak.bound.fusion import fusion_groups
from nearpeak.errors import UsageError


def grouped_seconds(trace, costs, groups, toy, ceilings="achievable"):
    return sum(map(max, group_times(trace, costs, groups, toy, ceilings, touches_in(trace, costs))))


def fused_seconds(trace, costs, groups, toy, ceilings="achievable"):
    written = sum(item.seconds for item in as_written(trace, costs, toy, ceilings=ceilings))
    return min(grouped_seconds(trace, costs, groups, toy, ceilings), written)


def ideal_seconds(trace, costs, toy, ceilings="achievable"):
    return ideal(trace, costs, toy, ceilings=ceilings).seconds


def chain():
    """x (1000) -> a (1000) -> b (1000), a cache of 100, 1 byte/s."""
    build = Builder()
    x = build.storage(1000, "input")
    a = build.make(1000, "pointwise", (x,), vector_flops={"float32": 1000})
    b = build.make(1000, "pointwise", (a,), vector_flops={"float32": 1000})
    return build.trace(b), build.costs


def test_the_three_floors_of_a_chain_by_hand():
    trace, costs = chain()
    toy = machine(cache=100)
    first, second = as_written(trace, costs, toy)
    assert first.memory_seconds == 1000 + 900  # all of x, and what of a does not fit
    assert second.memory_seconds == 900 + 100 + 900  # the rest of a; what b pushes out of it; what of b does not fit
    assert (first.limiter, first.compute_seconds) == ("memory", 100)
    assert fused_seconds(trace, costs, fusion_groups(trace, costs), toy) == 1000 + 900
    assert ideal_seconds(trace, costs, toy) == 1000 + 900


def test_without_a_cache_every_byte_goes_to_memory():
    trace, costs = chain()
    assert sum(item.seconds for item in as_written(trace, costs, machine(cache=None))) == 4000
    assert ideal_seconds(trace, costs, machine(cache=None)) == 2000


def test_in_a_large_cache_only_the_input_comes_from_memory():
    trace, costs = chain()
    first, second = as_written(trace, costs, machine(cache=1e6, cache_bandwidth=4.0))
    assert (first.memory_seconds, first.cache_seconds) == (1000, 500)
    assert (second.memory_seconds, second.cache_seconds, second.limiter) == (0, 500, "cache")


def test_hits_are_free_where_the_bandwidth_of_the_cache_is_unknown():
    trace, costs = chain()
    for ceilings in ("achievable", "theoretical"):
        second = as_written(trace, costs, machine(cache=1e6), ceilings=ceilings)[1]
        assert (second.memory_seconds, second.cache_seconds, second.limiter) == (0, 0, "compute")


def test_a_warm_run():
    trace, costs = chain()
    residency = Residency(1e6)
    cold = as_written(trace, costs, machine(cache=1e6), residency=residency)
    warm = as_written(trace, costs, machine(cache=1e6), residency=residency)
    assert (cold[0].memory_seconds, warm[0].memory_seconds) == (1000, 0)


def test_results_that_are_pushed_out_reach_memory():
    build = Builder()
    made = [build.make(80, "creation") for _ in range(5)]
    assert sum(item.memory_seconds for item in as_written(build.trace(*made), build.costs, machine(cache=100))) == 300
    assert ideal(build.trace(*made), build.costs, machine(cache=100)).memory_seconds == 300


@pytest.mark.parametrize(("kind", "ceilings", "expected"), [
    ("gpu", "achievable", 2.0), ("gpu", "theoretical", 0.0), ("cpu", "achievable", 0.0),
])  # fmt: skip
def test_launches(kind, ceilings, expected):
    build = Builder()
    x = build.storage(1, "input")
    build.op("view", (x,), (x,))
    build.make(1, "pointwise", (x,))
    view, op = as_written(build.trace(), build.costs, machine(launch=2.0, kind=kind), ceilings=ceilings)
    assert (view.seconds, view.limiter) == (0, "none")
    assert op.launch_seconds == expected


def test_matrix_and_vector_work_overlap_and_a_missing_engine_falls_back():
    build = Builder()
    build.op("matrix", flops={"bfloat16": 500, "float32": 20}, vector_flops={"float32": 10})
    build.op("pointwise", vector_flops={"bfloat16": 500})
    first, second = as_written(build.trace(), build.costs, machine())
    assert first.compute_seconds == 5 + 2  # float32 has no matrix engine: 20 FLOP at 10 FLOP/s
    assert (second.compute_seconds, second.limiter) == (5, "compute")


def test_a_dtype_without_a_peak_names_dtype_op_and_machine():
    build = Builder()
    build.op("matrix", name="aten._scaled_mm.default", flops={"float8": 1})
    for call in (as_written, ideal_seconds):
        with pytest.raises(UsageError, match=r"aten\._scaled_mm\.default.*float8.*Toy 1"):
            call(build.trace(), build.costs, machine())


def test_machine_without_those_ceilings():
    trace, costs = chain()
    with pytest.raises(UsageError, match="no theoretical ceilings"):
        as_written(trace, costs, dataclasses.replace(machine(), theoretical=None), ceilings="theoretical")


def test_a_buffer_that_is_written_before_it_is_read_is_not_fetched():
    build = Builder()
    buffer = build.storage(1000, "buffer")
    build.op("creation", (), (buffer,))
    build.make(10, "sorting", (buffer,))
    assert ideal(build.trace(), build.costs, machine(cache=None)).memory_seconds == 0


@pytest.mark.slow
@settings(max_examples=500)
@given(
    random_traces(),
    st.sampled_from([None, 10.0, 100.0, 500.0]),
    st.sampled_from([None, 3.0]),
    st.sampled_from([None, 20.0]),
    st.sampled_from(["achievable", "theoretical"]),
)
def test_ideal_fused_and_as_written_are_in_order(drawn, cache, cache_bandwidth, launch, ceilings):
    trace, costs = drawn
    toy = machine(cache=cache, cache_bandwidth=cache_bandwidth, launch=launch)
    written = sum(item.seconds for item in as_written(trace, costs, toy, ceilings=ceilings))
    found = fusion_groups(trace, costs)
    fused = fused_seconds(trace, costs, found, toy, ceilings=ceilings)
    least = ideal_seconds(trace, costs, toy, ceilings=ceilings)
    grouped = grouped_seconds(trace, costs, found, toy, ceilings)
    slack = 1 + 1e-12
    assert least <= fused * slack
    assert fused <= written * slack
    assert least <= grouped * slack


@pytest.mark.slow
@settings(max_examples=300)
@given(random_traces())
def test_without_a_cache_regrouping_alone_never_costs(drawn):
    trace, costs = drawn
    toy = machine(cache=None, launch=1.0)
    grouped = grouped_seconds(trace, costs, fusion_groups(trace, costs), toy)
    assert grouped <= sum(item.seconds for item in as_written(trace, costs, toy)) * (1 + 1e-12)


def test_what_an_op_without_a_formula_touched_may_be_in_the_cache():
    """Its reads are not known, so the next op may find them there."""
    trace = Builder()
    source = trace.storage(80, "input")
    trace.op("unknown", (source,), (trace.storage(1),), sizes={source: 0}, model="operands")
    trace.make(1, "pointwise", (source,))
    costs = tuple(trace.costs)
    first, second = as_written(trace.trace(), costs, machine(cache=100.0))
    assert second.memory_seconds == 0
    assert ideal_seconds(trace.trace(), costs, machine(cache=100.0)) <= first.seconds + second.seconds
