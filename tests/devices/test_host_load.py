import os
import types

import pytest

from nearpeak.devices import host_load
from nearpeak.devices.host_load import HostLoad, HostShares


class System:
    """A made-up /proc with two cores, and a clock that moves by hand."""

    def __init__(self, root):
        self.root, self.now = root, 100.0
        self.load = HostLoad(root, cpus=(0, 1))

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def thread(self, thread, ran, waited, *, process=None, children=""):
        folder = f"proc/{process or os.getpid()}/task/{thread}"
        self.write(f"{folder}/schedstat", f"{round(1e9 * ran)} {round(1e9 * waited)} 5\n")
        self.write(f"{folder}/children", children)

    def cores(self, busy, steal=0.0):
        """Seconds of both cores together; the third core is not the process's."""
        ticks = f"{round(50 * busy)} 0 0 4000 7 0 0 {round(50 * steal)} 0 0"
        self.write(
            "proc/stat", f"cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 {ticks}\ncpu1 {ticks}\ncpu2 8888888 0 0 0 0 0 0 0 0 0\n"
        )


@pytest.fixture
def system(tmp_path, monkeypatch):
    made = System(tmp_path)
    monkeypatch.setattr(host_load, "time", types.SimpleNamespace(perf_counter=lambda: made.now))
    return made


def test_nothing_is_known_where_there_are_no_files(system):
    before = system.load.read()
    system.now += 1.0
    assert system.load.shares(before, system.load.read()) == HostShares()


def test_the_own_threads_that_waited_and_what_others_used(system):
    system.thread(1, 5.0, 1.0)
    system.thread(2, 0.0, 0.0)
    system.cores(50.0)
    before = system.load.read()
    system.now += 2.0
    system.thread(1, 6.0, 1.5)
    system.thread(2, 0.5, 0.5)
    system.cores(53.0)
    found = system.load.shares(before, system.load.read())
    assert found.waited == pytest.approx(1.0 / 2.5)
    assert found.others == pytest.approx(1.5 / 4.0)  # 3 s busy less 1.5 s of its own, of 4 s


def test_children_are_the_process_itself(system):
    system.thread(1, 0.0, 0.0, children="77 ")
    system.thread(77, 0.0, 0.0, process=77)
    system.cores(0.0)
    before = system.load.read()
    system.now += 1.0
    system.thread(1, 1.0, 0.0, children="77 ")
    system.thread(77, 1.0, 0.0, process=77)
    system.cores(2.0)
    assert system.load.shares(before, system.load.read()) == HostShares(waited=0.0, others=0.0)


def test_what_the_host_of_a_virtual_machine_takes_is_other_work(system):
    system.thread(1, 0.0, 0.0)
    system.cores(0.0)
    before = system.load.read()
    system.now += 1.0
    system.thread(1, 1.0, 0.0)
    system.cores(1.0, steal=0.4)
    assert system.load.shares(before, system.load.read()).others == pytest.approx(0.2)


def test_a_window_of_a_few_ticks_says_nothing_about_others(system):
    system.thread(1, 0.0, 0.0)
    system.cores(0.0)
    before = system.load.read()
    system.now += 0.05
    system.thread(1, 0.03, 0.02)
    system.cores(0.1)
    found = system.load.shares(before, system.load.read())
    assert (found.waited, found.others) == (pytest.approx(0.4), None)


def test_throttling_is_that_of_the_window(system):
    system.write("sys/fs/cgroup/cpu.stat", "usage_usec 5\nthrottled_usec 1000000\n")
    before = system.load.read()
    system.now += 2.0
    system.write("sys/fs/cgroup/cpu.stat", "usage_usec 5\nthrottled_usec 1500000\n")
    assert system.load.shares(before, system.load.read()).throttled == pytest.approx(0.25)


@pytest.mark.parametrize("text", ["", "cpu0\n", "cpu0 1 2 3\n", "cpuX 1 2 3 4 5 6 7 8\n"])
def test_a_file_of_another_form_is_as_good_as_none(system, text):
    system.write("proc/stat", text)
    system.write(f"proc/{os.getpid()}/task/1/schedstat", text)
    before = system.load.read()
    system.now += 1.0
    assert system.load.shares(before, system.load.read()).others is None


def test_this_process_can_be_read_or_tells_nothing():
    load = HostLoad()
    before = load.read()
    found = load.shares(before, load.read())
    assert found.waited is None or 0.0 <= found.waited <= 1.0
