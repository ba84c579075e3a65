import sys
import types

import pytest

from nearpeak.measure import conditions
from nearpeak.measure.conditions import CpuConditions, GpuConditions
from nearpeak.measure.timing import Conditions


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
    monkeypatch.setattr(conditions, "time", types.SimpleNamespace(perf_counter=lambda: made.now))
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


class FakeNvml(types.ModuleType):
    """A driver's management library with one GPU, whose answers are set by name; an exception is raised."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self, **answers):
        super().__init__("pynvml")
        self.asked_for = []
        self.answers = {
            "nvmlInit": None,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0,
            "nvmlDeviceGetClockInfo": 1755,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetPowerUsage": 412_500,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetComputeRunningProcesses": ["one"],
            "nvmlSystemGetDriverVersion": "570.86.15",
            **answers,
        }

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        self.asked_for.append(uuid)
        return "handle"

    def __getattr__(self, name):
        answer = self.__dict__["answers"][name]

        def ask(*arguments):
            if isinstance(answer, Exception):
                raise answer
            return answer

        return ask


@pytest.fixture
def install(monkeypatch):
    def install(nvml):
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return nvml

    return install


def unknown(reader):
    assert reader.read() == Conditions()
    assert reader.highest_clock_hz() is None
    assert reader.processes() is None
    assert reader.driver() is None
    return reader.missing


def test_a_gpu_is_read_in_base_units(install):
    nvml = install(FakeNvml())
    reader = GpuConditions("1234-abcd")
    assert nvml.asked_for == ["GPU-1234-abcd"]
    assert reader.missing is None
    assert reader.read() == Conditions(
        clock_hz=1755e6, memory_clock_hz=1755e6, power_watts=412.5, temperature_celsius=61.0, throttle=()
    )
    assert reader.highest_clock_hz() == 1980e6
    assert reader.processes() == 1
    assert reader.driver() == "570.86.15"


def test_a_uuid_keeps_the_prefix_that_it_has(install):
    nvml = install(FakeNvml())
    GpuConditions("GPU-1234")
    assert nvml.asked_for == ["GPU-1234"]


@pytest.mark.parametrize(
    ("bits", "reasons"),
    [
        (0x00, ()),
        (0x01, ()),  # idle
        (0x02, ()),  # clocks that someone set
        (0x04, ("power cap",)),
        (0x08, ("hardware slowdown",)),
        (0x20, ("thermal (software)",)),
        (0x40, ("thermal (hardware)",)),
        (0x80, ("power brake",)),
        (0x04 | 0x40, ("power cap", "thermal (hardware)")),
        (None, ()),
    ],
)
def test_throttle_reasons_are_read_from_their_bits(install, bits, reasons):
    install(FakeNvml(nvmlDeviceGetCurrentClocksThrottleReasons=bits))
    assert GpuConditions("x").read().throttle == reasons


def test_a_driver_that_answers_in_bytes_is_understood(install):
    install(FakeNvml(nvmlSystemGetDriverVersion=b"570.1"))
    assert GpuConditions("x").driver() == "570.1"


def test_without_the_library_nothing_is_known(install):
    install(None)  # importing it raises ImportError
    assert unknown(GpuConditions("x")) == "nvidia-ml-py is not installed"


def test_a_library_without_a_driver_leaves_everything_unknown(install):
    install(FakeNvml(nvmlInit=FakeNvml.NVMLError("Driver Not Loaded")))
    assert unknown(GpuConditions("x")) == "NVML: Driver Not Loaded"


def test_one_question_that_is_forbidden_leaves_the_others(install):
    install(FakeNvml(nvmlDeviceGetPowerUsage=FakeNvml.NVMLError("Not Supported")))
    state = GpuConditions("x").read()
    assert state.power_watts is None
    assert state.temperature_celsius == 61.0


@pytest.mark.parametrize(
    ("function", "answer"),
    [
        ("nvmlDeviceGetMaxClockInfo", lambda reader: reader.highest_clock_hz()),
        ("nvmlDeviceGetComputeRunningProcesses", lambda reader: reader.processes()),
        ("nvmlSystemGetDriverVersion", lambda reader: reader.driver()),
    ],
)
def test_what_a_driver_refuses_to_tell_is_unknown(install, function, answer):
    install(FakeNvml(**{function: FakeNvml.NVMLError("Unknown Error")}))
    assert answer(GpuConditions("x")) is None
