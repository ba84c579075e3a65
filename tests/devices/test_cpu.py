import types

import pytest
import torch

from nearpeak.devices import cpu
from nearpeak.devices.backends import CPU
from nearpeak.devices.cpu import CpuConditions
from nearpeak.devices.device import Conditions


class System:
    """A made-up /proc and /sys, and a clock that moves by hand."""

    def __init__(self, root):
        self.root = root
        self.now = 100.0

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def throttled(self, microseconds):
        text = f"usage_usec 900\nuser_usec 5\nnr_periods 3\nnr_throttled 1\nthrottled_usec {microseconds}\n"
        self.write("sys/fs/cgroup/cpu.stat", text)

    def waited(self, microseconds):
        line = "avg10=0.00 avg60=0.00 avg300=0.00 total="
        self.write("proc/pressure/cpu", f"some {line}{microseconds}\nfull {line}999999999\n")


@pytest.fixture
def system(tmp_path, monkeypatch):
    made = System(tmp_path)
    monkeypatch.setattr(cpu, "time", types.SimpleNamespace(perf_counter=lambda: made.now))
    return made


def test_nothing_is_known_where_there_are_no_files(system):
    reader = CpuConditions(system.root)
    system.now += 1
    assert reader.read() == Conditions(clock_hz=None, throttle=())


def test_the_clock_is_that_of_the_first_core(system):
    system.write("sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq", "2400000\n")
    assert CpuConditions(system.root).read().clock_hz == 2.4e9


def test_throttling_is_what_happened_since_the_last_reading(system):
    system.throttled(5_000_000)
    reader = CpuConditions(system.root)
    system.now += 1.0
    assert reader.read().throttle == ()  # all of it was before
    system.now += 1.0
    system.throttled(5_000_000 + 20_000)  # 2 % of a second
    assert reader.read().throttle == ("cpu quota",)
    system.now += 1.0
    assert reader.read().throttle == ()
    system.now += 1.0
    system.throttled(5_020_000 + 9_000)  # 0.9 %: not worth a word
    assert reader.read().throttle == ()


def test_contention_is_what_happened_since_the_last_reading(system):
    system.waited(70_000_000)
    reader = CpuConditions(system.root)
    system.now += 0.5
    system.waited(70_000_000 + 60_000)  # 12 % of half a second
    assert reader.read().throttle == ("cpu contended",)
    system.now += 0.5
    system.waited(70_060_000 + 40_000)  # 8 %
    assert reader.read().throttle == ()


def test_both_can_happen_at_once(system):
    system.throttled(0)
    system.waited(0)
    reader = CpuConditions(system.root)
    system.now += 1.0
    system.throttled(500_000)
    system.waited(500_000)
    assert reader.read().throttle == ("cpu quota", "cpu contended")


def test_two_readings_at_the_same_moment_are_no_division_by_zero(system):
    system.throttled(0)
    reader = CpuConditions(system.root)
    system.throttled(500_000)
    assert reader.read().throttle == ()


def test_a_system_that_tells_of_throttling_only_later_is_not_accused(system):
    reader = CpuConditions(system.root)
    system.throttled(5_000_000)  # of the container's whole life, not of the last second
    system.waited(70_000_000)
    system.now += 1.0
    assert reader.read().throttle == ()


@pytest.mark.parametrize("text", ["", "throttled_usec", "nr_periods 0\n", "garbage\n\n"])
def test_a_file_of_another_form_is_as_good_as_none(system, text):
    system.write("sys/fs/cgroup/cpu.stat", text)
    system.write("proc/pressure/cpu", text)
    system.write("sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq", "")
    assert CpuConditions(system.root).read() == Conditions()


def test_the_memory_of_this_process_is_within_that_of_the_host():
    data = torch.ones(2**20)
    assert CPU.allocated_bytes(0) == 0 or CPU.allocated_bytes(0) > data.nbytes
    assert CPU.memory_capacity(0) > data.nbytes
    assert CPU.properties(0).processors >= 1
