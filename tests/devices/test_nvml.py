import sys
import types

import pytest
import torch

from nearpeak.devices import nvml
from nearpeak.devices.device import Conditions, GpuFacts
from nearpeak.devices.nvml import NvmlConditions


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
    reader = NvmlConditions("1234-abcd")
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
    NvmlConditions("GPU-1234")
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
    assert NvmlConditions("x").read().throttle == reasons


def test_a_driver_that_answers_in_bytes_is_understood(install):
    install(FakeNvml(nvmlSystemGetDriverVersion=b"570.1"))
    assert NvmlConditions("x").driver() == "570.1"


def test_without_the_library_nothing_is_known(install):
    install(None)  # importing it raises ImportError
    assert unknown(NvmlConditions("x")) == "nvidia-ml-py is not installed"


def test_a_library_without_a_driver_leaves_everything_unknown(install):
    install(FakeNvml(nvmlInit=FakeNvml.NVMLError("Driver Not Loaded")))
    assert unknown(NvmlConditions("x")) == "NVML: Driver Not Loaded"


def test_one_question_that_is_forbidden_leaves_the_others(install):
    install(FakeNvml(nvmlDeviceGetPowerUsage=FakeNvml.NVMLError("Not Supported")))
    state = NvmlConditions("x").read()
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
    assert answer(NvmlConditions("x")) is None


class ScannedNvml(types.ModuleType):
    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

    class NVMLError(Exception):
        pass

    def __init__(self, names, refuse=()):
        super().__init__("pynvml")
        self.names, self.refuse, self.open = names, refuse, 0

    def answer(self, question, value):
        if question in self.refuse:
            raise self.NVMLError(f"{question} refused")
        return value

    def nvmlInit(self):  # noqa: N802, the driver's spelling, as below
        self.answer("init", None)
        self.open += 1

    def nvmlShutdown(self):  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self):  # noqa: N802
        return self.answer("count", len(self.names))

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return self.answer("name", self.names[handle])

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return self.answer("uuid", f"GPU-{handle}")

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        return b"570.86.15"

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        return self.answer("memory", types.SimpleNamespace(total=1024))

    def nvmlDeviceGetPowerManagementLimit(self, handle):  # noqa: N802
        return self.answer("power", 700_000)

    def nvmlDeviceGetMaxClockInfo(self, handle, clock):  # noqa: N802
        return self.answer("clock", 1980 if clock == self.NVML_CLOCK_SM else 3201)


@pytest.fixture
def drivers(monkeypatch):
    def install(*arguments, **keywords):
        fake = ScannedNvml(*arguments, **keywords)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return install


def test_gpus_are_described_by_their_driver(drivers):
    fake = drivers(["NVIDIA H200", b"NVIDIA L4"])
    first, second = nvml.scan_gpus().gpus
    assert first == GpuFacts(
        index=0,
        name="NVIDIA H200",
        uuid="GPU-0",
        driver_version="570.86.15",
        memory_bytes=1024,
        power_limit_watts=700,
        clock_multiprocessor_hz=1.98e9,
        clock_memory_hz=3.201e9,
    )
    assert second.name == "NVIDIA L4"
    assert fake.open == 0


def test_a_question_that_the_driver_refuses_is_none(drivers):
    fake = drivers(["NVIDIA H200"], refuse={"power", "clock", "memory", "uuid"})
    (gpu,) = nvml.scan_gpus().gpus
    assert gpu.name == "NVIDIA H200"
    assert (gpu.power_limit_watts, gpu.clock_memory_hz, gpu.memory_bytes, gpu.uuid) == (None, None, None, None)
    assert fake.open == 0


@pytest.mark.parametrize("question", ["init", "count", "name"])
def test_without_an_answer_there_are_no_gpus_and_a_reason(drivers, question):
    fake = drivers(["NVIDIA H200"], refuse={question})
    scan = nvml.scan_gpus()
    assert scan.gpus == ()
    assert f"{question} refused" in scan.problem
    assert fake.open == 0


def test_no_gpu_has_a_reason(drivers):
    drivers([])
    assert nvml.scan_gpus().problem == "NVML reports no GPU"


def test_without_the_package_there_is_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py" in nvml.scan_gpus().problem


@pytest.mark.gpu
def test_the_driver_and_torch_agree_on_the_gpu():
    assert torch.cuda.get_device_name(0) in [gpu.name for gpu in nvml.scan_gpus().gpus]
    assert nvml.scan_gpus().gpus[0].driver_version
