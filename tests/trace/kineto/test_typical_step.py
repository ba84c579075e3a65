import pytest

from nearpeak.trace.kineto.read import RecordedStep, typical_times


def recorded(*lengths, names=("mm", "add"), events=()):
    """A step of seconds before, in, between and after two ops."""
    before, first, between, second, after = lengths
    ops = [(before, before + first), (before + first + between, before + first + between + second)]
    return RecordedStep(names=names, ops=ops, events=events, seconds=sum((before, first, between, second, after)))


USUAL = recorded(1.0, 4.0, 1.0, 2.0, 2.0)


def test_an_interruption_of_one_step_is_in_no_typical_one():
    interrupted = recorded(1.0, 4.0, 1.0, 12.0, 2.0)
    times = typical_times(interrupted, [USUAL, USUAL])
    starts_and_ends = [times.time(time) for time in interrupted.cuts()]
    assert starts_and_ends == pytest.approx([2.0 * time for time in (0.0, 1.0, 5.0, 6.0, 8.0, 10.0)])  # it takes 20 s


def test_a_collection_between_two_ops_of_one_step_shrinks_with_its_gap():
    collecting = recorded(1.0, 4.0, 11.0, 2.0, 2.0)
    ((start, end),) = typical_times(collecting, [USUAL, USUAL]).intervals([(5.5, 15.5)])
    assert end - start < 0.1 * 20.0


def test_steps_that_run_other_ops_do_not_count():
    other = recorded(9.0, 1.0, 1.0, 1.0, 1.0, names=("mm", "mul"))
    times = typical_times(USUAL, [other, other])
    assert [times.time(time) for time in USUAL.cuts()] == pytest.approx(USUAL.cuts())


def test_the_time_of_the_profiler_is_that_of_its_events():
    small, large = 1e-5, 1e-3
    events = [1e-6 * number for number in range(5)]  # five in the small op
    step = RecordedStep(names=("add", "mm"), ops=[(0.0, small), (small, small + large)], events=events, seconds=1.01e-3)
    times = typical_times(step, event_s=1e-6)
    ratio = (times.time(small + large) - times.time(small)) / times.time(small)
    assert ratio == pytest.approx(large / (small - 5e-6))


def test_ops_of_several_threads_stay_as_they_were_recorded():
    overlapping = RecordedStep(names=("mm", "mm"), ops=[(0.0, 2.0), (1.0, 3.0)], events=(), seconds=4.0)
    assert typical_times(overlapping, [overlapping]) is None
