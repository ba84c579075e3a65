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
    lines, _ = run([("a", 2.0, True), ("b", 2.0, True), ("c", 4.0, True)], 2.0, whole_s=8.0)
    assert lines == [
        "measuring: 0 %, about 8 s left (a)",
        "measuring: 25 %, about 6 s left (b)",
        "measuring: 50 %, about 4 s left (c)",
    ]
    assert all(isinstance(line, StatusLine) for line in lines)


def test_the_time_left_follows_a_slow_machine():
    lines, _ = run([("a", 2.0, True), ("b", 6.0, True)], 20.0, whole_s=8.0)
    assert lines[1] == "measuring: 25 %, about 33 s left (b)"  # 6 s at (20 + 2) / (2 + 2) of the speed


def test_it_is_never_done_before_its_end():
    lines, _ = run([("a", 9.0, True), ("b", 9.0, True)], 1.0, whole_s=8.0)
    assert lines[1] == "measuring: 99 %, about 1 s left (b)"


def test_when_the_time_is_over_only_what_is_needed_is_done():
    tasks = [("memory", 3.0, True), ("cache", 3.0, True), ("int8", 1.0, False), ("bfloat16", 1.0, True)]
    lines, progress = run(tasks, 3.0, whole_s=8.0, budget_s=6.0)
    assert [line.partition("(")[2] for line in lines] == ["memory)", "cache)", "bfloat16)"]
    assert progress.left_out == ["int8"]
    assert progress.elapsed_s == 9.0
