"""The one line that says how far a calibration is."""

from nearpeak._display import StatusLine
from nearpeak.calibrate.progress import CalibrationProgress, Task


class Clock:
    seconds = 0.0

    def __call__(self):
        return self.seconds


def run(tasks, took_s, **options):
    """The lines of tasks that take `took_s` seconds each."""
    lines, clock = [], Clock()

    def measure():
        clock.seconds += took_s

    progress = CalibrationProgress(lines.append, "measuring", clock=clock, **options)
    progress.run(Task(name=name, seconds=seconds, measure=measure, needed=needed) for name, seconds, needed in tasks)
    return lines, progress


def test_the_share_grows_and_the_time_left_shrinks():
    lines, _ = run([("a", 2.0, True), ("b", 2.0, True), ("c", 4.0, True)], 2.0)
    assert lines == [
        "measuring: 0 %, about 8 s left (a)",
        "measuring: 25 %, about 6 s left (b)",
        "measuring: 50 %, about 4 s left (c)",
    ]
    assert all(isinstance(line, StatusLine) for line in lines)


def test_the_time_left_follows_a_slow_machine():
    lines, _ = run([("a", 2.0, True), ("b", 6.0, True)], 20.0)
    assert lines[1] == "measuring: 38 %, about 33 s left (b)"  # 6 s at (20 + 2) / (2 + 2) of the speed


def test_the_share_is_one_of_time_where_tasks_take_less_than_expected():
    lines, _ = run([("a", 9.0, True), ("b", 9.0, True)], 1.0)
    assert lines[1] == "measuring: 29 %, about 2 s left (b)"  # 1 s of 1 + 9 x 3/11


def test_tasks_that_there_will_be_no_time_for_are_no_part_of_the_whole():
    tasks = [("a", 2.0, True), *((name, 1.0, False) for name in "bcdefg")]
    lines, progress = run(tasks, 1.0, budget_s=4.0)
    assert [line.partition(": ")[2] for line in lines][:3] == [
        "0 %, about 4 s left (a)",
        "31 %, about 2 s left (b)",
        "56 %, about 2 s left (c)",
    ]
    assert progress.left_out == ["e", "f", "g"]


def test_what_follows_the_first_tasks_counts():
    lines, clock = [], Clock()

    def measure():
        clock.seconds += 1.0

    progress = CalibrationProgress(lines.append, "measuring", later_s=2.0, clock=clock)
    task = Task(name="a", seconds=1.0, measure=measure)
    for tasks in ([task, task], [task], [task]):
        progress.run(tasks)
    assert [line.partition(": ")[2] for line in lines] == [
        "0 %, about 4 s left (a)",
        "25 %, about 3 s left (a)",
        "50 %, about 2 s left (a)",
        "75 %, about 1 s left (a)",
    ]


def test_when_the_time_is_over_only_what_is_needed_is_done():
    tasks = [("memory", 3.0, True), ("cache", 3.0, True), ("int8", 1.0, False), ("bfloat16", 1.0, True)]
    lines, progress = run(tasks, 3.0, budget_s=6.0)
    assert [line.partition("(")[2] for line in lines] == ["memory)", "cache)", "bfloat16)"]
    assert progress.left_out == ["int8"]
    assert progress.elapsed_s == 9.0
