"""What is read of the machine while steps are timed, with a made-up host and a made-up GPU."""

import threading

import pytest
import torch

from nearpeak.devices.device import Conditions
from nearpeak.devices.host_load import HostShares
from nearpeak.profiles.conditions import StepConditions, worst_conditions
from nearpeak.profiling import session
from nearpeak.profiling.session import ConditionsWatch
from nearpeak.profiling.steps import StepKind


class Host:
    """The shares of each window, one after the other."""

    def __init__(self, *windows):
        self.windows = list(windows)
        self.read_times = 0

    def read(self):
        self.read_times += 1
        return self.read_times

    def shares(self, before, after):
        assert before < after
        return self.windows.pop(0)


class Gpu:
    """Readings of a GPU; `enough` is set when three were taken."""

    missing = None

    def __init__(self):
        self.enough = threading.Event()
        self.clocks = iter([1.2e9, 1.4e9, 1.3e9])

    def read(self):
        clock = next(self.clocks, None)
        if clock is None:
            self.enough.set()
            clock = 1.3e9
        return Conditions(clock_hz=clock, power_watts=700.0, throttle=("power cap",))

    def processes(self):
        return 2


def made(*windows, gpu=None):
    watch = ConditionsWatch()
    watch._host, watch._reader = Host(*windows), gpu
    return watch


def test_the_worst_window_counts():
    watch = made(HostShares(waited=0.1, others=0.0), HostShares(waited=0.0, others=0.7, throttled=0.2))
    assert watch.conditions is None
    for _ in range(2):
        watch.begin()
        watch.end()
    assert watch.conditions == StepConditions(waited_share=0.1, others_share=0.7, throttled_share=0.2)


def test_a_window_that_is_cancelled_or_forgotten_does_not_count():
    watch = made(HostShares(waited=0.1), HostShares(waited=0.2))
    watch.begin()
    watch.cancel()
    watch.end()
    assert watch.conditions is None
    watch.begin()
    watch.end()
    watch.forget()
    assert watch.conditions is None


def test_the_clock_is_read_on_a_thread_that_the_program_does_not_see(monkeypatch):
    monkeypatch.setattr(session, "FIRST_READING_S", 0.001)
    monkeypatch.setattr(session, "READING_INTERVAL_S", 0.001)
    gpu = Gpu()
    watch = made(HostShares(), HostShares(), gpu=gpu)
    before = threading.enumerate()
    watch.begin(with_gpu=True)
    assert gpu.enough.wait(10.0)
    assert threading.enumerate() == before
    watch.end()
    found = watch.conditions
    assert found.clock_hz == pytest.approx(1.3e9)
    assert (found.power_watts, found.throttle, found.gpu_processes) == (700.0, ("power cap",), 2)
    watch.begin()  # the profiled step: the clock is that of clean ones
    watch.end()
    assert watch.conditions.clock_hz == pytest.approx(1.3e9)


def test_a_gpu_that_cannot_be_read_starts_no_thread():
    gpu = Gpu()
    gpu.missing = "nvidia-ml-py is not installed"
    watch = made(HostShares(), gpu=gpu)
    watch.begin(with_gpu=True)
    assert watch._gpu is None
    watch.end()
    assert watch.conditions.clock_hz is None


def test_nothing_is_known_of_no_windows():
    assert worst_conditions([]) is None


def test_clean_and_profiled_steps_have_their_windows(monkeypatch):
    events = []
    for name in ("begin", "end", "cancel", "prepare"):
        method = getattr(ConditionsWatch, name)

        def note(self, *args, _name=name, _method=method, **kwargs):
            events.append((_name, found.schedule.phase))
            return _method(self, *args, **kwargs)

        monkeypatch.setattr(ConditionsWatch, name, note)
    next_step = session.Profiler.next_step
    monkeypatch.setattr(
        session.Profiler, "next_step", lambda self: (events.append(("step", found.schedule.phase)), next_step(self))
    )
    found = session.Session(lambda line: None, traces=False)
    for _ in range(100):
        torch.ones(64, 64).exp()
        if found.schedule.phase == "traced":
            found.add_trace("it was not traced")
        elif not found.is_done:
            found.step_ends(StepKind(trained=1))
    assert found.is_done, found.problem
    marks = [(name, phase) for name, phase in events if name in ("begin", "end")]
    assert marks == [
        ("begin", "clean"),
        ("end", "profiler start"),
        ("begin", "profiled"),
        ("end", "profiled"),
        ("begin", "clean again"),
        ("end", "done"),
    ]
    assert found._watch.conditions is not None
    # The profiled step begins last: what reads the system's counters takes milliseconds, and is no part of it.
    profiled = [name for name, phase in events if phase == "profiled" and name in ("begin", "step")]
    assert profiled == ["begin", "step"]
