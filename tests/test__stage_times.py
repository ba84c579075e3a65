"""Where nearpeak's own time goes, for its developers."""

import threading

import pytest

from nearpeak import _stage_times
from nearpeak._stage_times import StageTimes
from nearpeak.cli.main import main


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests turn; the processor works for half of the time."""

    class Clock:
        seconds = 0.0

    monkeypatch.setattr(_stage_times.time, "perf_counter", lambda: Clock.seconds)
    monkeypatch.setattr(_stage_times.time, "process_time", lambda: Clock.seconds / 2)
    return Clock


def test_a_stage_inside_of_another_does_not_count_for_it(clock):
    times = StageTimes("start")
    clock.seconds += 1.0
    with times.stage("script"):
        clock.seconds += 2.0
        with times.stage("findings"):
            clock.seconds += 4.0
        clock.seconds += 8.0
    clock.seconds += 16.0
    assert [line.split() for line in times.table().splitlines()] == [
        ["stage", "wall", "s", "CPU", "s"],
        ["start", "17.00", "8.50"],
        ["script", "10.00", "5.00"],
        ["findings", "4.00", "2.00"],
        ["total", "31.00", "15.50"],
    ]


def test_a_stage_of_another_thread_is_none(clock):
    times = StageTimes("start")

    def work():
        with times.stage("report"):
            clock.seconds += 1.0

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "report" not in times.table()


def test_a_command_prints_the_table_where_it_is_asked_for(monkeypatch, capsys):
    assert main(["machine", "h100-sxm"]) == 0
    assert "CPU s" not in capsys.readouterr().err
    monkeypatch.setattr("nearpeak.cli.main.TIMES", StageTimes("other"))
    assert main(["machine", "h100-sxm"]) == 0
    assert capsys.readouterr().err.startswith("stage ")
