"""Made-up timelines of the host and the device with known answers, and what holds for all of them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearpeak.findings.replay import (
    UNCHANGED,
    Change,
    HostPiece,
    ReplayedKernel,
    StepReplay,
    StepTimeline,
    combine,
    step_timeline,
)
from nearpeak.profiles.idle_attribution import DeviceActivity, HostActivity

READ = ("synchronization", "train.py:8", "item")
DECODE = ("python", "train.py:9", "")


def work(seconds, op=None, *, kernel=None, events=0):
    return HostPiece(seconds, events, op, None, kernel=kernel)


def wait(kernel, *, returns=0.0, op=None):
    return HostPiece(returns, 0, op, READ, wait=kernel)


def stretch(seconds):
    return HostPiece(seconds, 0, None, DECODE)


def replay(pieces, kernel_seconds, *, wall_s=None, latency_s=0.0, gap_s=0.0):
    """A step whose kernels have the ops 0, 1, 2, ..., calibrated to its own time unless another is given."""
    kernels = [ReplayedKernel(took, op, 0, gap_s, False, None, 0.0) for op, took in enumerate(kernel_seconds)]
    timeline = StepTimeline(pieces=pieces, kernels=kernels, launch_latency_s=latency_s)
    return StepReplay(timeline, StepReplay(timeline, 1e-9).unchanged.seconds if wall_s is None else wall_s)


def launches(count, seconds):
    return [work(seconds, op, kernel=op) for op in range(count)]


def test_a_step_of_short_kernels_takes_the_time_of_the_host_and_gains_host_time_alone():
    step = replay(launches(10, 1.0), [0.25] * 10)
    assert step.unchanged == pytest.approx((10.0, 2.5))
    assert step.saving(Change(shorter={3: 0.5})).seconds == pytest.approx(0.0)
    assert step.saving(Change(launch_s={3: 0.0}, shorter={3: 0.5})).seconds == pytest.approx(1.0)
    assert step.saving(Change(launch_s={op: 0.1 for op in range(10)})).seconds == pytest.approx(7.5)  # then kernels run


def test_a_step_of_long_kernels_takes_their_time_and_gains_kernel_time_alone():
    step = replay(launches(10, 1.0), [4.0] * 10)
    assert step.unchanged == pytest.approx((40.0, 40.0))
    assert step.saving(Change(launch_s=dict.fromkeys(range(9), 0.0))).seconds == pytest.approx(0.0)
    assert step.saving(Change(shorter={3: 0.5})) == pytest.approx((2.0, 2.0))
    assert step.saving(Change(shorter={3: 1.0})).seconds == pytest.approx(4.0)


def test_what_is_gained_ends_where_the_other_side_limits():
    step = replay(launches(10, 1.0), [1.5] * 10)
    assert step.unchanged.seconds == pytest.approx(15.0)
    assert step.saving(Change(shorter=dict.fromkeys(range(10), 0.8))).seconds == pytest.approx(5.0)  # of 12


def test_a_wait_among_long_kernels_costs_the_bubble_after_it():
    long = replay([*launches(5, 1.0), wait(4), *[work(1.0, op, kernel=op) for op in range(5, 10)]], [4.0] * 10)
    assert long.unchanged.seconds == pytest.approx(41.0)  # one launch, until the device has work again
    assert long.saving(Change(causes={READ: 0.01})).seconds == pytest.approx(1.0)


def test_a_wait_among_short_kernels_costs_what_the_host_waits():
    short = replay([*launches(5, 1.0), wait(4, returns=0.25), work(1.0)], [0.5] * 5, latency_s=0.5)
    assert short.unchanged.seconds == pytest.approx(5.0 + 1.0 + 0.25 + 1.0)
    assert short.saving(Change(causes={READ: 1.0})).seconds == pytest.approx(1.25)


def test_two_waits_in_a_row_cost_together_what_neither_costs_alone():
    other = ("synchronization", "train.py:12", "item")
    pieces = [*launches(2, 1.0), wait(1), wait(1)._replace(cause=other), stretch(3.0)]
    step = replay(pieces, [4.0, 4.0])
    assert step.saving(Change(causes={READ: 1.0})).seconds == pytest.approx(0.0)
    assert step.saving(Change(causes={other: 1.0})).seconds == pytest.approx(0.0)
    assert step.saving(Change(causes={READ: 1.0, other: 1.0})).seconds == pytest.approx(4.0)


def test_a_loop_that_reads_a_count_for_each_expert():
    """Each expert is two launches, a wait for its count, and Python: without all of that, kernels remain."""
    pieces, kernels = [], []
    for _ in range(8):
        first = len(kernels)
        pieces += [work(0.25, first, kernel=first), wait(first, returns=0.25, op=first), stretch(0.5)]
        pieces += [work(0.25, first + 1, kernel=first + 1)]
        kernels += [0.125, 0.125]
    step = replay(pieces, kernels)
    assert step.unchanged.seconds == pytest.approx(8 * 1.375)
    everything = Change(causes={READ: 1.0, DECODE: 1.0}, launch_s=dict.fromkeys(range(2, 16), 0.0))
    assert step.step(everything).seconds == pytest.approx(16 * 0.125)
    assert step.saving(Change(causes={DECODE: 1.0})).seconds == pytest.approx(4.0)
    assert step.saving(Change(causes={READ: 1.0})).seconds == pytest.approx(8 * 0.375)


def test_an_op_that_goes_takes_its_wait_along():
    step = replay([*launches(2, 1.0), wait(1, returns=0.5, op=1), work(1.0, 2, kernel=2)], [2.0, 2.0, 1.0])
    assert step.unchanged.seconds == pytest.approx(5.0 + 0.5 + 1.0)
    assert step.step(Change(shorter={1: 1.0})).seconds == pytest.approx(3.0)  # the kernels alone


def test_a_wait_for_the_step_before():
    step = replay([HostPiece(0.0, 0, None, READ, wait=-1), work(1.0, 0, kernel=0)], [5.0])
    assert step.unchanged.seconds == pytest.approx(6.0)
    assert step.step(Change(causes={READ: 1.0})).seconds == pytest.approx(5.0)


def test_two_streams_run_side_by_side_and_a_kernel_waits_for_the_other_stream():
    pieces = [work(0.0, op, kernel=op) for op in range(3)]
    kernels = [
        ReplayedKernel(4.0, 0, 0, 0.0, False, None, 0.0),
        ReplayedKernel(3.0, 1, 1, 0.0, True, None, 0.0),
        ReplayedKernel(2.0, 2, 1, 0.0, False, 0, 0.5),
    ]
    step = StepReplay(StepTimeline(pieces=pieces, kernels=kernels, launch_latency_s=0.0), 6.5)
    assert step.unchanged.seconds == pytest.approx(6.5)
    assert step.step(Change(communication=1.0)).seconds == pytest.approx(6.5)  # it was hidden
    assert step.step(Change(shorter={0: 0.5})).seconds == pytest.approx(5.0)


def test_the_time_of_the_profiler_is_found_from_the_clean_step():
    pieces = [work(12e-6, op, kernel=op, events=4) for op in range(100)]
    step = replay(pieces, [1e-6] * 100, wall_s=100 * 6e-6)
    assert step.host_speed.event_s == pytest.approx(1.5e-6, rel=0.05)
    assert abs(step.residual) < 0.01 and step.is_good
    assert step.saving(Change(launch_s=dict.fromkeys(range(50), 0.0))).seconds == pytest.approx(300e-6, rel=0.05)


def test_where_the_device_decides_the_host_is_taken_to_be_ahead_of_it():
    pieces = [work(10e-6, op, kernel=op, events=4) for op in range(100)]
    step = replay(pieces, [9e-6] * 100, wall_s=900e-6)
    assert step.host_speed.event_s == pytest.approx(1.5e-6)  # the host takes 4 us of 10
    assert step.saving(Change(shorter=dict.fromkeys(range(100), 0.5))).seconds == pytest.approx(450e-6)


def test_kernels_that_took_a_little_longer_do_not_make_a_slow_host():
    """One percent is missing. A host that is as slow as under the profiler, or waits at the end, would explain it."""
    end = HostPiece(500e-6, 0, None, None, after_last_op=True)
    pieces = [*(work(9e-6, op, kernel=op, events=4) for op in range(100)), end]
    step = replay(pieces, [9e-6] * 100, wall_s=909e-6)
    assert step.host_speed.end_share == 0.0 and step.residual == pytest.approx(-0.01, abs=1e-3)
    tenth = step.saving(Change(shorter=dict.fromkeys(range(100), 0.9)))
    assert tenth.seconds == pytest.approx((900e-6 - 360e-6) * 1.01, rel=0.01)  # the host takes 3.6 us of 9 for a launch


def test_a_host_that_is_slower_than_usual_explains_a_step_that_takes_much_longer():
    pieces = [work(10e-6, op, kernel=op, events=4) for op in range(100)]
    step = replay(pieces, [3e-6] * 100, wall_s=800e-6)  # usually 4 us of 10
    assert abs(step.residual) < 0.01
    assert step.saving(Change(launch_s=dict.fromkeys(range(100), 0.0))).seconds == pytest.approx(500e-6, rel=0.02)


@pytest.mark.parametrize("wall_s", [100e-6, 350e-6, 600e-6])
def test_time_after_the_last_op_counts_as_far_as_the_clean_step_has_it(wall_s):
    """nearpeak works there too: of 500 us, a clean step has none, half, or all."""
    end = HostPiece(500e-6, 0, None, ("python", "", "after the last kernel"), after_last_op=True)
    step = replay([*launches(10, 10e-6), end], [1e-6] * 10, wall_s=wall_s)
    assert step.unchanged.seconds == pytest.approx(wall_s, rel=0.01)
    assert step.host_speed.end_share == pytest.approx((wall_s - 100e-6) / 500e-6, abs=0.01)


def test_a_change_saves_the_same_share_of_the_step_as_of_a_replay_with_longer_waits():
    """Under the profiler, calls of the driver take longer; events of the profiler do not explain it."""
    pieces = [piece for op in range(4) for piece in (stretch(500e-6), work(1e-6, op, kernel=op, events=1))]
    step = replay(pieces, [100e-6] * 4, wall_s=1500e-6)
    assert step.residual == pytest.approx(1 / 3, abs=0.01) and step.is_good
    assert step.saving(Change(causes={DECODE: 1.0})).seconds == pytest.approx(0.8 * 1500e-6, rel=0.01)


def test_kernels_of_a_graph_follow_each_other_more_closely():
    step = replay(launches(4, 9e-6), [1e-6] * 4, gap_s=1.5e-6)
    assert step.step(Change(launch_s=dict.fromkeys(range(4), 0.0))).seconds == pytest.approx(4 * 1.4e-6)


def test_python_without_events_keeps_its_time_beside_ops_that_the_profiler_slows_down():
    pieces = [piece for op in range(100) for piece in (work(10e-6, op, kernel=op, events=5), stretch(10e-6))]
    step = replay(pieces, [1e-6] * 100, wall_s=100 * 14e-6)
    assert step.saving(Change(causes={DECODE: 1.0})).seconds == pytest.approx(1e-3, rel=0.02)


def test_a_step_that_the_replay_cannot_explain_says_so():
    short = replay(launches(4, 1.0), [0.5] * 4, wall_s=8.0)
    assert short.residual == pytest.approx(-0.5) and not short.is_good
    long = replay(launches(4, 1.0), [4.0] * 4, wall_s=9.0)
    assert long.residual == pytest.approx(7 / 9) and not long.is_good
    slow = replay(launches(4, 1.0), [4.0] * 4, wall_s=14.0)
    assert slow.residual == pytest.approx(1 / 7) and slow.is_good
    assert slow.saving(Change(shorter=dict.fromkeys(range(4), 0.5))).seconds == pytest.approx(7.0)  # half of the step


def test_a_call_waits_for_the_pageable_copy_that_it_makes():
    """The end of the copy is recorded 30 us after the return of the call; both are one stretch of time."""
    us = 1e-6
    device = [DeviceActivity(20 * us, 1030 * us, 15 * us, "train.py:8", 0)]
    host = [HostActivity("synchronization", 10 * us, 1000 * us, "train.py:8", "copy", 0)]
    timeline = step_timeline(device, host, [(0.0, 1005 * us)], [0.0, 10 * us], host_end_s=1010 * us)
    assert [piece.wait for piece in timeline.pieces if piece.cause] == [0]
    assert StepReplay(timeline, wall_s=1040 * us).residual == pytest.approx(0.0, abs=0.02)


def test_changes_of_the_same_multiply():
    both = combine([Change(shorter={0: 0.5}, idle_s=1.0), Change(shorter={0: 0.75, 1: 0.25}, causes={READ: 1.0})])
    assert both == Change(shorter={0: 0.875, 1: 0.25}, idle_s=1.0, causes={READ: 1.0})
    assert combine([]) == UNCHANGED


seconds = st.integers(0, 20).map(lambda number: number / 4)


@st.composite
def timelines(draw):
    """Launches, waits and stretches in any order."""
    count = draw(st.integers(1, 12))
    pieces = []
    for op in range(count):
        pieces.append(work(draw(seconds), op, kernel=op))
        if draw(st.booleans()):
            pieces.append(wait(draw(st.integers(-1, op)), returns=draw(seconds)))
        if draw(st.booleans()):
            pieces.append(stretch(draw(seconds)))
    return pieces, draw(st.lists(seconds.map(lambda took: took + 0.25), min_size=count, max_size=count))


@st.composite
def changes(draw):
    ops = st.integers(0, 11)
    shares = st.sampled_from([0.25, 0.5, 1.0])
    return Change(
        shorter=draw(st.dictionaries(ops, shares)),
        launch_s=draw(st.dictionaries(ops, st.sampled_from([0.0, 0.25]))),
        causes=draw(st.dictionaries(st.sampled_from([READ, DECODE]), shares)),
    )


@settings(max_examples=60)
@given(timelines(), changes(), changes())
def test_what_goes_never_makes_a_step_longer_and_savings_follow_from_each_other(timeline, change, other):
    step = replay(*timeline, latency_s=0.125, gap_s=0.0625)
    tolerance = 2e-3 * step.unchanged.seconds
    assert step.step(UNCHANGED) == step.unchanged
    first = step.saving(change)
    assert -tolerance <= first.seconds <= step.unchanged.seconds + tolerance
    after = step.saving(other, after=change)
    assert after.seconds >= -tolerance
    assert first.seconds + after.seconds == pytest.approx(step.saving(combine([change, other])).seconds, abs=tolerance)
    host = sum(piece.seconds for piece in step.timeline.pieces)
    assert step.unchanged.seconds >= max(host, step.unchanged.busy_s) - tolerance


def test_a_recorded_step_becomes_a_timeline():
    """An op, a number that is read, 400 us of Python, and another op; the profiler took 20 us on its own."""
    us = 1e-6
    device = [
        DeviceActivity(30 * us, 480 * us, 20 * us, "train.py:7", 0, op_returned_s=40 * us),
        DeviceActivity(481 * us, 500 * us, 70 * us, "train.py:8", 1),
        DeviceActivity(1025 * us, 1100 * us, 1020 * us, "train.py:9", 2),
    ]
    host = [
        HostActivity("synchronization", 80 * us, 505 * us, "train.py:8", "item", 1),
        HostActivity("profiler", 560 * us, 580 * us),
    ]
    working = [(0.0, 40 * us), (50 * us, 510 * us), (980 * us, 1040 * us), (1055 * us, 1120 * us)]
    events = [0.0, 10 * us, 50 * us, 60 * us, 80 * us, 980 * us, 1000 * us]
    timeline = step_timeline(device, host, working, events, host_end_s=1050 * us)
    rows = [
        (round(piece.seconds / us), piece.events, piece.op, piece.cause, piece.kernel, piece.wait)
        for piece in timeline.pieces
    ]
    assert rows == [
        (20, 2, 0, None, 0, None),
        (20, 0, 0, None, None, None),
        (30, 2, 1, None, 1, None),
        (10, 0, 1, None, None, None),
        (5, 0, 1, READ, None, 1),
        (450, 0, None, DECODE, None, None),
        (45, 2, 2, None, 2, None),
        (20, 0, None, None, None, None),
        (10, 0, None, None, None, None),
    ]
    assert [piece.after_last_op for piece in timeline.pieces] == [False] * 8 + [True]
    assert timeline.kernels[1].gap_s == pytest.approx(1 * us)
    assert timeline.launch_latency_s == pytest.approx(7.5 * us)
    assert timeline.causes == {READ, DECODE} and timeline.waiting_ops == {1}


def read_after_each_kernel(count, us=1e-6):
    """Kernels of 100 us, each with a copy to the host that is queued, starts 5 us after it, and is waited for;
    the next kernel is launched 20 us later."""
    device, host = [], []
    for number in range(count):
        start = number * 130 * us
        device += [
            DeviceActivity(start + 3 * us, start + 103 * us, start, "train.py:7", 2 * number),
            DeviceActivity(
                start + 108 * us, start + 110 * us, start + 5 * us, "train.py:8", 2 * number + 1, is_copy=True
            ),
        ]
        host.append(
            HostActivity("synchronization", start + 6 * us, start + 112 * us, "train.py:8", "item", 2 * number + 1)
        )
    return step_timeline(device, host, [(0.0, count * 130 * us)], [], host_end_s=count * 130 * us)


def test_kernels_that_were_never_queued_do_not_have_the_gaps_of_copies():
    timeline = read_after_each_kernel(10)
    gaps = [kernel.gap_s for kernel in timeline.kernels]
    assert gaps == pytest.approx([1e-6] + [4e-6] * 19)  # beside a copy, 1 us less than with the profiler
    step = StepReplay(timeline, StepReplay(timeline, 1e-9).unchanged.seconds)
    waits = dict.fromkeys(timeline.waits, 1.0)
    copied = step.step(Change(causes=waits)).seconds
    assert copied == pytest.approx(10 * 102e-6 + 20 * 4e-6, rel=0.01)
    without_copies = step.step(Change(causes=waits, shorter={2 * number + 1: 1.0 for number in range(10)})).seconds
    assert without_copies == pytest.approx(10 * 101e-6, rel=1e-3)  # 1 us between kernels


def test_kernels_of_several_streams_overlap_no_more_than_they_were_seen_to():
    """They wait for each other, which the recording shows only where it delays them."""
    pieces = [work(2.0, op, kernel=op) for op in range(4)]
    kernels = [ReplayedKernel(2.0, op, op % 2, 0.0, False, None, 0.0) for op in range(4)]
    step = StepReplay(StepTimeline(pieces=pieces, kernels=kernels, launch_latency_s=0.0), 8.0)
    assert step.unchanged == pytest.approx((8.0, 8.0))
    without_launches = Change(launch_s=dict.fromkeys(range(4), 0.0))
    assert step.step(without_launches).seconds == pytest.approx(8.0)
    shorter = combine([without_launches, Change(shorter={1: 0.5})])
    assert step.step(shorter) == pytest.approx((7.0, 7.0))


def test_calls_that_launch_nothing_take_their_share_of_the_host_with_them():
    step = replay(launches(10, 1.0), [0.25] * 10)
    one, other = Change(calls={3: 0.5}), Change(calls={3: 0.25, 4: 0.5})
    assert step.saving(one).seconds == pytest.approx(0.5)
    assert step.saving(combine([one, other])).seconds == pytest.approx(1.25)
