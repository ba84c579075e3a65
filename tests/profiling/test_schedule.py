import pytest

from nearpeak.profiling.session import (
    AGAIN_STEPS,
    CLEAN_STEPS,
    MAX_WARM_UP,
    MIN_CLEAN,
    PROFILED_SECONDS,
    PROFILED_STEPS,
    PROFILER_STEPS,
    ProfilerAction,
    Schedule,
)
from nearpeak.profiling.steps import StepKind


def phases(times):
    schedule, now, found = Schedule(), 0.0, []
    for took in times:
        now += took
        found.append(schedule.step_ended(now))
    return found, schedule


def test_warm_up_lasts_until_steps_get_no_faster():
    found, schedule = phases([1.0, 9.0, 5.0, 2.0, 1.0, 1.0] + [1.0] * 20)
    assert found.index("clean") == 5
    assert schedule.walls == [1.0] * len(schedule.walls)


def test_warm_up_ends_for_steps_that_never_settle():
    found, _ = phases([1.0 / 1.5**step for step in range(60)])
    assert found.index("clean") == MAX_WARM_UP - 1


def test_short_steps_are_taken_often_and_long_ones_seldom():
    assert len(phases([0.001] * 40)[1].walls) == CLEAN_STEPS
    assert len(phases([2.0] * 40)[1].walls) == MIN_CLEAN


@pytest.mark.parametrize(("repeats", "taken"), [(0, 10), (1, 20), (3, 30)])
def test_short_steps_that_still_get_faster_are_taken_again(repeats, taken):
    schedule, now, times = Schedule(repeats_left=repeats), 0.0, []
    for step in range(60):
        took = 1e-4 * max(1.0, 3.0 - step / 10)
        now += took
        if schedule.phase == "clean":
            times.append(took)
        schedule.step_ended(now)
    assert len(times) == taken
    assert schedule.walls == pytest.approx(times[-CLEAN_STEPS:])


def test_one_step_each_is_profiled_and_traced_and_then_all_is_done():
    found, schedule = phases([0.01] * 60)
    assert [found.count(phase) for phase in ("profiler start", "profiled", "traced")] == [PROFILER_STEPS, 1, 1]
    assert found[-1] == "done"
    assert schedule.steps == 60


def test_long_steps_need_few():
    found, schedule = phases([60.0] + [30.0] * 10)
    assert found[:7] == ["warm-up", "clean", "clean", "profiled", "traced", "done", "done"]
    assert schedule.walls == [30.0, 30.0]


@pytest.mark.parametrize("took", [0.001, 0.3, 0.7, 2.0, 30.0])
@pytest.mark.parametrize("taken", [0, 2, 9])
def test_about_as_many_steps_as_it_says_are_left_suffice(took, taken):
    """But for one, which a session takes between warm-up and clean steps."""
    _, schedule = phases([took] * taken)
    schedule._took = took  # as if one had been seen
    left, now, more = schedule.steps_left(1) - (schedule.phase in ("warm-up", "clean")), took * taken, 0
    while schedule.phase != "done":
        now, more = now + took, more + 1
        schedule.step_ended(now)
    assert more <= left <= more + 2


def run(steps, **first):
    """Each step is its seconds, its kind and how many graphs were compiled so far."""
    schedule, now, found = Schedule(**first), 0.0, []
    for took, kind, graphs in steps:
        now += took
        found.append(schedule.step_ended(now, kind, graphs=graphs))
    return found, schedule


def test_clean_steps_are_timed_again_where_the_script_has_them():
    def after(walls):
        return run([(took, None, 0) for took in [0.01] * 18 + walls], times_again=True)

    found, schedule = after([0.01] * 5 + [0.02] * 60)
    assert found[17:19] == ["traced", "clean again"]
    assert len(schedule.later_walls) == AGAIN_STEPS
    assert found[-1] == "done"
    assert schedule.wall_s == pytest.approx(0.02)
    assert schedule.clean_steps == AGAIN_STEPS  # those that come late alone, if they are as many as the first
    found, schedule = after([0.01] * 5)  # it ends
    assert (found[-1], schedule.wall_s) == ("clean again", pytest.approx(0.01))
    assert schedule.clean_steps == 10 + 4
    found, schedule = after([0.01, 0.01, *[0.3] * 20])
    assert 1.0 <= sum(schedule.later_walls) < 1.3
    assert found[-1] == "done"


def test_steps_of_a_device_that_are_timed_again_stand_beside_those_before():
    _, schedule = run([(0.01, None, 0)] * 80, times_again=True, host_ahead=True)
    assert schedule.clean_steps == 10  # kernels are those of steps at that clock
    schedule.device_ended_again([0.5] * (AGAIN_STEPS - 1))  # one is missing
    assert schedule.later_device_walls == []
    schedule.device_ended_again([0.5] * AGAIN_STEPS)
    assert schedule.later_device_walls == [0.5] * AGAIN_STEPS
    assert schedule.wall_s == pytest.approx(0.01)


def test_steps_of_another_kind_and_compilations_are_not_timed_again():
    steps = [(0.01, TOKEN, 0)] * 20 + [(0.01, TOKEN, 0), (0.5, PROMPT, 0), (0.01, TOKEN, 0), (0.9, TOKEN, 1)]
    _, schedule = run([*steps, *[(0.01, TOKEN, 1)] * 60], times_again=True)
    assert max(schedule.later_walls) < 0.02


TOKEN, PROMPT = StepKind(shape=(1, 1)), StepKind(shape=(1, 64))


def test_a_compilation_among_clean_steps_begins_the_warm_up_anew():
    found, schedule = run([(0.01, TOKEN, int(at > 7)) for at in range(40)])
    assert found[7:12] == ["clean", "warm-up", "warm-up", "warm-up", "warm-up"]
    assert found[12] == "clean"
    assert len(schedule.walls) == CLEAN_STEPS
    found, _ = run([(0.01, TOKEN, at) for at in range(200)])
    assert found[-1] == "done"  # code that compiles in every step is profiled as it is


def test_what_is_profiled_and_traced_is_of_the_most_frequent_kind():
    kinds = ([PROMPT] + [TOKEN] * 8) * 10
    steps = [(0.1 if kind is PROMPT else 0.01, kind, 0) for kind in kinds]
    found, schedule = run(steps)
    for phase in ("profiled", "traced"):
        last = len(found) - 1 - found[::-1].index(phase)  # what it says is for the next step
        assert kinds[last + 1] is TOKEN
    assert schedule.wall_s == pytest.approx(0.01)
    assert schedule.others == 1


def test_a_step_of_another_kind_is_not_the_profiled_one():
    steps = [(0.01, TOKEN, 0)] * 17 + [(0.1, PROMPT, 0)] * 2 + [(0.01, TOKEN, 0)] * 5
    found, schedule = run(steps)
    assert found[13:16] == ["profiler start"] * PROFILER_STEPS
    assert found[16:21] == ["profiled", "profiled", "profiled", "traced", "done"]
    assert not schedule.again


@pytest.mark.parametrize(
    ("took", "count"), [(0.01, PROFILED_STEPS), (PROFILED_SECONDS / 3.5, 3), (PROFILED_SECONDS / 1.5, 1), (40.0, 1)]
)
def test_several_steps_are_profiled_where_they_are_short(took, count):
    found, _ = run([(took, TOKEN, 0)] * 40, most_profiled=PROFILED_STEPS)
    assert found.count("profiled") == count
    assert found[-1] == "done"


def test_a_step_of_another_kind_ends_the_profiled_ones():
    steps = [(0.01, TOKEN, 0)] * 19 + [(0.1, PROMPT, 0)] + [(0.01, TOKEN, 0)] * 5
    found, schedule = run(steps, most_profiled=PROFILED_STEPS)
    assert found[16:21] == ["profiled", "profiled", "profiled", "traced", "done"]  # the third was the prompt
    assert not schedule.again


def test_one_before_any_other_does_not():
    steps = [(0.01, TOKEN, 0)] * 17 + [(0.1, PROMPT, 0)] + [(0.01, TOKEN, 0)] * 8
    found, _ = run(steps, most_profiled=PROFILED_STEPS)
    assert found.count("profiled") == PROFILED_STEPS + 1


def test_a_compilation_ends_the_profiled_ones():
    found, _ = run([(0.01, TOKEN, int(at >= 19)) for at in range(30)], most_profiled=PROFILED_STEPS)
    assert found.count("profiled") == 3


def test_what_follows_a_profiled_step_is_the_same_before_and_after_it_is_counted():
    schedule = run([(0.01, TOKEN, 0)] * 17, most_profiled=2)[1]
    assert schedule.phase == "profiled"
    assert schedule.after_profiled(0.18, PROMPT) == ProfilerAction.RESTART
    assert schedule.after_profiled(0.18, TOKEN, graphs=1) == ProfilerAction.RESTART
    assert schedule.after_profiled(0.18, TOKEN) == ProfilerAction.CONTINUE
    assert (schedule.step_ended(0.18, TOKEN), schedule.again) == ("profiled", True)
    assert schedule.after_profiled(0.19, PROMPT) == ProfilerAction.STOP_EXCLUDING
    assert schedule.after_profiled(0.19, TOKEN) == ProfilerAction.STOP_INCLUDING
    # nothing could be read of them
    assert (schedule.step_ended(0.19, TOKEN, usable=False), schedule.again) == ("profiled", True)
    assert schedule.after_profiled(0.20, TOKEN) == ProfilerAction.CONTINUE


def test_kinds_that_never_repeat_are_taken_as_they_come():
    found, _ = run([(0.01, StepKind(shape=(1, 2**at)), 0) for at in range(60)])
    assert found[-1] == "done"


def test_a_text_that_grows_stays_of_one_kind():
    found, schedule = run([(0.01, StepKind(shape=(1, 8 + at)), 0) for at in range(40)])
    assert schedule.others == 0
    assert found[-1] == "done"


def clean(walls, behind, device=()):
    """A schedule after these clean steps, and the device `behind` the host at their end."""
    schedule, now = Schedule(), 0.0
    while schedule.phase != "clean":
        now += walls[0]
        schedule.step_ended(now)
    schedule.resumes(now)
    for wall in walls:
        now += wall
        schedule.step_ended(now)
    schedule.device_ended(now + behind, device)
    return schedule


def test_the_wall_time_is_that_of_all_clean_steps_together():
    assert clean([0.01] * 10, 0.0).wall_s == pytest.approx(0.01)
    # The host launched three steps, and then waited for the device in the others.
    ahead = clean([0.002] * 6 + [0.010] * 4, 0.048)
    assert ahead.wall_s == pytest.approx(0.010)
    assert len(ahead.typical_walls) == 10
    assert ahead.host_ahead
    assert not clean([0.01] * 10, 0.001).host_ahead


def test_the_device_tells_of_its_steps_where_the_host_is_ahead():
    schedule = clean([0.002] * 6 + [0.010] * 4, 0.098, device=[0.010] * 5 + [0.060] + [0.010] * 4)
    assert schedule.wall_s == pytest.approx(0.010)
    assert len(schedule.typical_walls) == 9
    assert clean([0.01] * 10, 0.0, device=[0.5] * 10).walls == pytest.approx([0.01] * 10)


def test_an_outlier_does_not_count_where_the_ends_of_steps_are_the_devices():
    schedule = clean([0.010] * 4 + [0.050] + [0.010] * 5, 0.001)
    assert schedule.wall_s == pytest.approx(0.010)
    assert len(schedule.typical_walls) == 9


def test_without_clean_steps_there_is_no_wall_time():
    assert Schedule().wall_s is None
