import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearpeak.profiles.idle import BETWEEN_QUEUED_KERNELS, CAUSE_MEANINGS, LAUNCHED_LATE
from nearpeak.profiles.idle_attribution import DeviceActivity, HostActivity, attribute
from nearpeak.profiles.waterfall import covered_seconds, merge_intervals

times = st.integers(0, 100).map(float)
spans = st.tuples(times, times).map(lambda pair: (min(pair), max(pair) + 1.0))
named = st.sampled_from(["profiler", "compilation", "garbage collection", "input", "allocator", "synchronization"])


def seconds(found, cause, what=None):
    return sum(item.seconds for item in found if item.cause == cause and what in (None, item.what))


def of(ran, doing=(), working=(), window=(0.0, 100.0), idle_s=None, clean=False):
    """The causes of all idle time in the window."""
    gaps = window[1] - window[0] - covered_seconds((max(r.start_s, window[0]), min(r.end_s, window[1])) for r in ran)
    gone = gaps if idle_s is None else idle_s
    return attribute(ran, list(doing), working, window=window, idle_s=gone, clean=clean).causes


def test_gaps_are_charged_to_what_the_host_did():
    ran = [
        DeviceActivity(10.0, 20.0, 9.0),
        DeviceActivity(60.0, 70.0, 58.0, "train.py:9"),
        DeviceActivity(80.0, 100.0, 15.0),
    ]
    found = of(ran, [HostActivity("input", 25.0, 45.0, what="DataLoader")], [(5.0, 9.0), (49.0, 58.0)])
    assert [(c.cause, c.seconds, c.count, c.where, c.what) for c in found] == [
        ("input", 20.0, 1, "", "DataLoader"),
        ("launching", 16.0, 2, "train.py:9", LAUNCHED_LATE),  # 4 + 1 and 9 + 2
        ("launching", 10.0, 1, "", BETWEEN_QUEUED_KERNELS),
        ("python", 9.0, 1, "train.py:9", ""),  # 5 until the loader, 4 after it
        ("python", 5.0, 1, "", ""),  # before the first op
    ]


@pytest.mark.parametrize("closing", [0.0005, 0.013])
def test_what_the_profiler_takes_to_end_is_no_time_of_the_step(closing):
    ran = [DeviceActivity(0.002, 0.0021, None, "train.py:9")]
    (found,) = of(ran, working=None, window=(0.0, 0.0021 + closing), idle_s=0.002, clean=True)
    assert (found.cause, found.where, found.seconds) == ("python", "train.py:9", pytest.approx(0.002))
    found = of(ran, working=None, window=(0.0, 0.0101), idle_s=0.006, clean=True)  # a clean step has some of it too
    assert [item.seconds for item in found] == pytest.approx([0.004, 0.002])


def test_a_synchronization_is_charged_with_the_lead_that_it_took():
    ran = [DeviceActivity(0.0, 40.0, 0.0), DeviceActivity(90.0, 100.0, 90.0)]
    wait = HostActivity("synchronization", 30.0, 42.0, "train.py:52", "item")
    found = of(ran, [wait], [(60.0, 90.0)])
    assert seconds(found, "synchronization") == 12.0  # 2 until it returned, and the 10 that the host had waited
    assert seconds(found, "python") == 8.0
    assert seconds(found, "launching") == 30.0
    assert [(c.where, c.what) for c in found if c.cause == "synchronization"] == [("train.py:52", "item")]


def test_a_synchronization_that_waits_for_nothing_costs_its_own_time():
    ran = [DeviceActivity(0.0, 40.0, 0.0), DeviceActivity(90.0, 100.0, 90.0)]
    found = of(ran, [HostActivity("synchronization", 50.0, 52.0)], [(41.0, 90.0)])
    assert seconds(found, "synchronization") == 2.0


def test_a_lost_lead_is_caught_up_with_over_several_gaps():
    wait = HostActivity("synchronization", 10.0, 40.0, "train.py:52", "item")  # 30 lost
    ran = [
        DeviceActivity(0.0, 40.0, 0.0),
        DeviceActivity(50.0, 52.0, 48.0),
        DeviceActivity(60.0, 90.0, 59.0),
        DeviceActivity(90.0, 95.0, 80.0),
        DeviceActivity(97.0, 100.0, 97.0),
    ]
    found = of(ran, [wait], [(40.0, 48.0), (52.0, 59.0), (95.0, 97.0)])
    assert seconds(found, "synchronization") == 18.0  # both gaps, with the time that a launch takes to arrive
    assert seconds(found, "launching") == 2.0  # the host had been ahead before: its lead was there again
    ran = [DeviceActivity(0.0, 40.0, 0.0), DeviceActivity(60.0, 62.0, 60.0), DeviceActivity(80.0, 100.0, 80.0)]
    found = of(ran, [wait], [(40.0, 60.0), (62.0, 80.0)])
    assert seconds(found, "synchronization") == 30.0  # no more than was lost
    assert seconds(found, "launching") == 8.0


def test_what_a_wait_left_to_do_is_slower_under_the_profiler():
    us = 1e-6
    wait = HostActivity("synchronization", 10 * us, 42 * us, "train.py:52", "item")
    ran = [DeviceActivity(0.0, 40 * us, 0.0), DeviceActivity(62 * us, 100 * us, 62 * us)]
    found = of(ran, [wait], [(42 * us, 62 * us)], window=(0.0, 100 * us), idle_s=12 * us, clean=True)
    assert {c.cause: c.seconds for c in found} == pytest.approx({"synchronization": 12 * us})


def test_late_launches_are_those_of_ops():
    us = 1e-6
    spans = [(0, 10, 0, "", 0), (30, 40, 28, "train.py:3", 1), (41, 60, 10, "train.py:4", 2)]
    ran = [DeviceActivity(start * us, end * us, launched * us, where, op) for start, end, launched, where, op in spans]
    found = attribute(ran, [], [(12 * us, 28 * us)], window=(0.0, 60 * us), idle_s=10.5 * us, clean=True)
    assert found.launch_wait_s == pytest.approx(
        {1: 9.5 * us, 2: 1 * us}
    )  # the second was queued, as it would be without
    assert [(gap.cause, gap.where) for gap in found.gaps] == [("launching", "train.py:3"), ("launching", "train.py:4")]
    assert [gap.start_s for gap in found.gaps] == pytest.approx([10 * us, 40 * us])
    assert [gap.seconds for gap in found.gaps] == pytest.approx([20 * us, 1 * us])


def test_while_a_kernel_is_queued_the_host_is_not_to_blame():
    found = of([DeviceActivity(0.0, 40.0, 0.0), DeviceActivity(45.0, 100.0, 10.0)], [HostActivity("input", 20.0, 90.0)])
    assert [(c.cause, c.seconds, c.what) for c in found] == [("launching", 5.0, BETWEEN_QUEUED_KERNELS)]


def test_the_most_specific_counts_where_several_are_true():
    doing = [
        HostActivity("synchronization", 0.0, 100.0),
        HostActivity("input", 20.0, 80.0),
        HostActivity("garbage collection", 40.0, 50.0),
        HostActivity("compilation", 45.0, 60.0),
    ]
    found = of([], doing)
    assert {c.cause: c.seconds for c in found} == {
        "synchronization": 40.0,
        "input": 40.0,
        "garbage collection": 5.0,
        "compilation": 15.0,
    }


def test_without_launches_all_that_has_no_name_is_python():
    found = of([DeviceActivity(10.0, 20.0, None), DeviceActivity(50.0, 100.0, None)], working=None)
    assert [(c.cause, c.seconds, c.count) for c in found] == [("python", 40.0, 2)]


def test_of_a_cpu_only_a_clean_step_says_what_its_ops_have_of_the_time_between_them():
    us = 1e-6
    ran = [
        DeviceActivity(0.0, 10 * us, None, op=0),
        DeviceActivity(20 * us, 30 * us, None, op=1),
        DeviceActivity(60 * us, 70 * us, None, op=2),
    ]
    given = {"host_ops": None, "window": (0.0, 70 * us)}
    assert attribute(ran, [], **given, idle_s=40 * us, clean=False).launch_wait_s == {}
    found = attribute(ran, [], **given, idle_s=20 * us, clean=True)
    assert found.launch_wait_s == pytest.approx({1: 5 * us, 2: 15 * us})


def test_in_a_clean_step_only_ops_and_what_is_between_them_are_faster():
    us = 1e-6
    ran = [DeviceActivity(0.0, 10 * us, 0.0), DeviceActivity(50 * us, 100 * us, 50 * us)]
    doing = [HostActivity("input", 10 * us, 20 * us), HostActivity("profiler", 20 * us, 30 * us)]
    clean = {"working": [(35 * us, 50 * us)], "window": (0.0, 100 * us), "clean": True}
    found = of(ran, doing, **clean, idle_s=14 * us)
    assert {c.cause: c.seconds for c in found} == pytest.approx(
        {"input": 10 * us, "launching": 3 * us, "python": 1 * us}
    )
    found = of(ran, doing, **clean, idle_s=4 * us)
    assert {c.cause: c.seconds for c in found} == pytest.approx({"input": 4 * us})


def test_long_stretches_of_python_keep_their_time_and_their_place():
    ms = 1e-3
    ran = [
        DeviceActivity(0.0, 10 * ms, None),
        DeviceActivity(20 * ms, 30 * ms, None, "train.py:7"),
        DeviceActivity(30.1 * ms, 40 * ms, None),
    ]
    found = of(ran, working=None, window=(0.0, 40 * ms), idle_s=10.04 * ms, clean=True)
    assert [(c.cause, c.where, c.what) for c in found] == [("python", "train.py:7", ""), ("python", "", "between ops")]
    assert [c.seconds for c in found] == pytest.approx([10 * ms, 0.04 * ms])


def test_idle_time_that_the_profiled_step_did_not_have_is_unknown():
    ran = [DeviceActivity(0.0, 10.0, 0.0), DeviceActivity(20.0, 100.0, 20.0)]
    found = of(ran, [HostActivity("input", 10.0, 20.0)], idle_s=10.5, clean=True)
    assert {c.cause: c.seconds for c in found} == pytest.approx({"input": 10.5})  # steps are never quite the same
    found = of(ran, [HostActivity("input", 10.0, 20.0)], idle_s=15.0, clean=True)
    assert {c.cause: c.seconds for c in found} == pytest.approx({"input": 10.0, "unknown": 5.0})
    assert of([], idle_s=0.0) == ()


@given(
    st.lists(st.tuples(spans, times), max_size=8),
    st.lists(st.tuples(named, spans), max_size=8),
    st.lists(spans, max_size=5),
    st.floats(0.0, 200.0),
    st.booleans(),
)
def test_causes_sum_to_the_idle_time(kernels, doing, working, idle_s, clean):
    ran = [DeviceActivity(*span, launched) for span, launched in kernels]
    host = [HostActivity(cause, *span) for cause, span in doing]
    found = of(ran, host, merge_intervals(working), idle_s=idle_s, clean=clean)
    assert sum(item.seconds for item in found) == pytest.approx(idle_s, rel=1e-9, abs=1e-12)
    assert all(item.seconds > 0.0 for item in found)
    assert {item.cause for item in found} <= set(CAUSE_MEANINGS)
    whole = of(ran, host, merge_intervals(working))
    assert not seconds(whole, "unknown")


@given(st.lists(spans, max_size=8), st.lists(spans, max_size=8))
def test_a_loader_is_charged_where_it_ran_and_nothing_else_did(kernels, loading):
    window = (0.0, 101.0)
    found = of(
        [DeviceActivity(*span, None) for span in kernels],
        [HostActivity("input", *span) for span in loading],
        window=window,
    )
    alone = covered_seconds([*kernels, *loading]) - covered_seconds(kernels)
    assert seconds(found, "input") == pytest.approx(alone)
    assert seconds(found, "python") == pytest.approx(101.0 - covered_seconds(kernels) - alone)
