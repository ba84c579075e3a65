from nearpeak.diagnose.schedule import CLEAN_STEPS, LEAST_CLEAN, MOST_WARM_UP, Schedule


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
    found, _ = phases([100.0 / 1.5**step for step in range(60)])
    assert found.index("clean") == MOST_WARM_UP - 1


def test_short_steps_are_taken_often_and_long_ones_seldom():
    assert len(phases([0.001] * 40)[1].walls) == CLEAN_STEPS
    assert len(phases([10.0] * 40)[1].walls) == LEAST_CLEAN


def test_one_step_each_is_profiled_and_traced_and_then_all_is_done():
    found, schedule = phases([0.01] * 60)
    assert [found.count(phase) for phase in ("profiler start", "profiled", "traced")] == [1, 1, 1]
    assert found[-1] == "done"
    assert schedule.steps == 60
