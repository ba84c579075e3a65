import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearpeak.bound.roofline import Bound, bound
from nearpeak.errors import UsageError
from nearpeak.machines.machine import Achievable, LaunchCost, Machine, Theoretical
from nearpeak.ops.work import Work

ACHIEVABLE = Achievable(
    how="measured",
    note="made up",
    bandwidth=1e12,
    matrix={"bfloat16": 400e12, "float8": 800e12},
    vector={"float32": 50e12},
)
THEORETICAL = Theoretical(
    matrix={"bfloat16": 500e12, "float8": 1000e12}, vector={"float32": 60e12}, bandwidth=2e12, source="made up"
)
MACHINE = Machine(
    id="made-up",
    name="Made-up GPU",
    kind="gpu",
    vendor="none",
    architecture="none",
    processors=1,
    memory_bytes=1.0,
    theoretical=THEORETICAL,
    achievable=ACHIEVABLE,
)


def with_launch(**cost):
    achievable = Achievable(how="measured", note="", bandwidth=1e12, matrix={}, vector={}, launch=LaunchCost(**cost))
    return Machine(
        id="x", name="X", kind="gpu", vendor="", architecture="", processors=1, memory_bytes=1.0, achievable=achievable
    )


def test_memory_limits_what_moves_much_and_computes_little():
    limit = bound(Work(flops={"bfloat16": 1e12}, bytes_read=3e12, bytes_written=1e12), MACHINE)
    assert limit.limiter == "memory"
    assert limit.seconds == limit.memory_seconds == pytest.approx(4.0)
    assert limit.compute_seconds == pytest.approx(0.0025)
    assert limit.intensity == pytest.approx(0.25)


def test_compute_limits_what_computes_much():
    limit = bound(Work(flops={"bfloat16": 800e12}, bytes_read=1e12), MACHINE)
    assert limit.limiter == "compute"
    assert limit.seconds == limit.compute_seconds == pytest.approx(2.0)


def test_the_limiter_changes_at_the_ridge():
    ridge = MACHINE.ridge("bfloat16")
    assert bound(Work(flops={"bfloat16": 0.99 * ridge * 1e9}, bytes_read=1e9), MACHINE).limiter == "memory"
    assert bound(Work(flops={"bfloat16": 1.01 * ridge * 1e9}, bytes_read=1e9), MACHINE).limiter == "compute"


def test_matrix_work_of_different_dtypes_takes_turns():
    limit = bound(Work(flops={"bfloat16": 400e12, "float8": 400e12}), MACHINE)
    assert limit.compute_seconds == pytest.approx(1.0 + 0.5)


def test_vector_work_runs_beside_matrix_work():
    matrix, vector = Work(flops={"bfloat16": 400e12}), Work(vector_flops={"float32": 100e12})
    assert bound(matrix, MACHINE).compute_seconds == pytest.approx(1.0)
    assert bound(vector, MACHINE).compute_seconds == pytest.approx(2.0)
    assert bound(matrix + vector, MACHINE).compute_seconds == pytest.approx(2.0)


def test_a_dtype_without_a_matrix_engine_takes_the_vector_rate():
    assert bound(Work(flops={"float32": 50e12}), MACHINE).compute_seconds == pytest.approx(1.0)


def test_a_dtype_without_a_vector_rate_takes_the_matrix_rate():
    assert bound(Work(vector_flops={"bfloat16": 400e12}), MACHINE).compute_seconds == pytest.approx(1.0)


def test_no_bytes_have_no_intensity():
    limit = bound(Work(flops={"bfloat16": 4e12}), MACHINE)
    assert limit.intensity is None
    assert limit.memory_seconds == 0
    assert limit.limiter == "compute"


def test_no_work_takes_no_time():
    assert bound(Work(), MACHINE).seconds == 0


def test_the_theoretical_ceilings_are_used_where_they_are_asked_for():
    work = Work(flops={"bfloat16": 500e12}, bytes_read=2e12)
    assert bound(work, MACHINE, ceilings="theoretical").seconds == pytest.approx(1.0)
    assert bound(work, MACHINE).seconds == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("cost", "seconds"),
    [
        ({"in_graph": 1e-6, "enqueue": 9e-6}, 1e-6),
        ({"host_call": 2e-6}, 2e-6),
        ({"enqueue": 9e-6}, 0.0),  # a launch that can be hidden bounds nothing
        ({}, 0.0),
    ],
)
def test_the_least_launch_is_a_bound(cost, seconds):
    limit = bound(Work(bytes_read=1e3), with_launch(**cost))
    assert limit.launch_seconds == seconds
    assert limit.limiter == ("launch" if seconds else "memory")


@pytest.mark.parametrize("ceilings", ["achievable", "theoretical"])
def test_a_machine_without_ceilings_says_how_to_get_them(ceilings):
    bare = Machine(id="x", name="Box", kind="cpu", vendor="", architecture="", processors=2, memory_bytes=1.0)
    with pytest.raises(UsageError, match=rf"Box has no {ceilings} ceilings. Run `nearpeak machine --calibrate`"):
        bound(Work(bytes_read=1), bare, ceilings=ceilings)


def test_a_dtype_that_the_machine_lacks_is_answered_with_those_it_has():
    with pytest.raises(UsageError, match=r"No measured figure for dtype 'float6' on this machine. Did you mean"):
        bound(Work(flops={"float6": 1.0}), MACHINE)


amounts = st.floats(0, 1e18)


@given(amounts, amounts, amounts)
def test_the_bound_is_the_longest_of_its_parts_and_names_it(memory, compute, launch):
    limit = Bound(memory_seconds=memory, compute_seconds=compute, launch_seconds=launch, intensity=None)
    parts = {"memory": memory, "compute": compute, "launch": launch}
    assert limit.seconds == max(parts.values()) == parts[limit.limiter]


works = st.builds(
    Work,
    flops=st.dictionaries(st.sampled_from(["bfloat16", "float8"]), amounts),
    vector_flops=st.dictionaries(st.just("float32"), amounts),
    bytes_read=amounts,
    bytes_written=amounts,
)


@given(works, works)
def test_a_sum_takes_no_less_than_its_parts_and_no_more_than_both(a, b):
    together = bound(a + b, MACHINE).seconds
    apart = [bound(a, MACHINE).seconds, bound(b, MACHINE).seconds]
    assert together >= max(apart) * (1 - 1e-12)
    assert together <= sum(apart) * (1 + 1e-12)
