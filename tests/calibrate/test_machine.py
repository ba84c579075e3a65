import dataclasses
import subprocess
import sys

import pytest
import torch

from nearpeak._display import StatusLine
from nearpeak.calibrate import machine as module
from nearpeak.calibrate.machine import machine
from nearpeak.calibrate.progress import CalibrationProgress, Task
from nearpeak.devices.host_load import HostShares
from nearpeak.errors import UnknownMachine
from nearpeak.machines import catalogue
from nearpeak.machines.calibrations import CalibrationKey
from nearpeak.machines.machine import Achievable, Ceiling, EfficiencyPoint


class Others:
    """Other processes on the cores, as many as wanted."""

    share: float | None = 0.0

    def read(self):
        return None

    def shares(self, before, after):
        return HostShares(others=self.share)


others = Others()


@pytest.fixture
def here(tmp_path, monkeypatch):
    """This machine as a CPU with an empty cache folder and made-up measurements, which are listed."""
    monkeypatch.setenv("NEARPEAK_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made = []

    def calibrate(progress):
        bandwidth = 1e10 + made.count("ceilings")
        made.append("ceilings")
        progress.run([Task(name="memory", seconds=1.0, measure=lambda: None)])
        return Achievable(how="measured", note="made up", bandwidth=bandwidth, matrix={}, vector={"float32": 1e11})

    def efficiency(found, progress):
        made.append("kernels")
        points = {"pointwise": (EfficiencyPoint(bound_seconds=1e-6, ratio=2.0),)}
        return dataclasses.replace(found, achievable=dataclasses.replace(found.achievable, efficiency=points))

    monkeypatch.setattr(module, "HostLoad", lambda: others)
    others.share = 0.0
    monkeypatch.setattr(module, "calibrate_host", calibrate)
    monkeypatch.setattr("nearpeak.calibrate.efficiency.measure_efficiency", efficiency)
    return made


def test_a_machine_of_the_catalogue_is_found_and_nothing_is_measured(here):
    assert machine("h200-sxm") == catalogue.find("h200-sxm")
    assert machine("h200-sxm", calibrate=True) == catalogue.find("h200-sxm")
    assert here == []


def test_an_unknown_machine_is_answered_with_the_nearest():
    with pytest.raises(UnknownMachine, match="h100-sxm"):
        machine("h100-sxn")


def test_all_of_it_is_measured_when_asked_and_kept(here):
    first = machine(calibrate=True)
    assert first.achievable.efficiency["pointwise"] == (EfficiencyPoint(bound_seconds=1e-6, ratio=2.0),)
    assert not first.achievable.quick
    assert machine() == machine(complete=True) == first
    assert here == ["ceilings", "kernels"]


def test_a_quick_one_is_completed_once_where_all_of_it_is_needed(here):
    lines = []
    assert machine().achievable.quick
    complete = machine(complete=True, progress=lines.append)
    assert not complete.achievable.quick
    assert lines[0].startswith("measuring this machine (all of it, for predictions): 0 %")
    assert machine(complete=True) == complete
    assert here == ["ceilings", "ceilings", "kernels"]


def only_file(tmp_path):
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    return file


def test_the_first_call_measures_quickly_and_later_ones_read(here):
    lines = []
    first = machine(progress=lines.append)
    assert first.kind == "cpu"
    assert first.achievable.bandwidth == 1e10
    assert first.achievable.quick
    status, end = lines
    assert isinstance(status, StatusLine)  # the next one replaces it
    assert status.startswith("measuring this machine (first time): 0 %, about ")
    assert end.startswith("measured this machine in ") and end.endswith(
        "(first time); `nearpeak machine --calibrate` measures the rest"
    )
    lines.clear()
    assert machine(progress=lines.append) == first
    assert here == ["ceilings"]
    assert lines == []


def test_calibrating_again_measures_and_replaces(here):
    machine()
    assert machine(calibrate=True).achievable.bandwidth == 1e10 + 1
    assert machine().achievable.bandwidth == 1e10 + 1
    assert here.count("ceilings") == 2


@pytest.mark.parametrize("damage", ["{", "", "[]", '{"schema": 1}', None])
def test_a_damaged_file_is_measured_again_and_said(here, tmp_path, damage):
    machine()
    file = only_file(tmp_path)
    text = file.read_text()
    file.write_text(text.replace("10000000000.0", "99000000000.0") if damage is None else damage)
    lines = []
    assert machine(progress=lines.append).achievable.bandwidth == 1e10 + 1
    assert lines[0].startswith(f"{file} is not used: ")
    assert machine().achievable.bandwidth == 1e10 + 1
    assert here.count("ceilings") == 2


def test_another_number_of_threads_is_another_machine_and_why_is_said(here, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    machine()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    lines = []
    assert machine(progress=lines.append).achievable.bandwidth == 1e10 + 1
    assert all("(torch uses 1 thread, 2 before)" in line for line in lines)


def test_another_torch_is_another_machine_and_why_is_said(here, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "98.0")
    machine()
    monkeypatch.setattr(torch, "__version__", "99.0")
    lines = []
    assert machine(progress=lines.append).achievable.bandwidth == 1e10 + 1
    assert all("(torch is now 99.0, was 98.0)" in line for line in lines)


def test_a_device_beside_others_is_measured_for_the_first_time(here, monkeypatch):
    machine()
    monkeypatch.setattr(module, "calibration_key", lambda device: CalibrationKey(device="x", driver="1", torch="2"))
    lines = []
    machine(progress=lines.append)
    assert "(first time on x)" in lines[0]


def test_what_a_quick_calibration_of_a_gpu_leaves_out_is_derated(here):
    listed = catalogue.find("h200-sxm")
    measured = Achievable(
        how="measured",
        note="",
        bandwidth=4e12,
        matrix={"bfloat16": 7e14},
        vector={},
        quick=True,
        ceilings={"matrix.bfloat16": Ceiling(value=7e14, spread=0.0, how="")},
    )
    filled = module._fill_in(measured, listed)
    assert filled.matrix["bfloat16"] == 7e14
    assert filled.matrix["float8"] == listed.achievable.matrix["float8"]
    assert filled.vector == listed.achievable.vector
    assert {"matrix.float8", "vector.float32"} <= filled.derated_peaks
    assert "matrix.bfloat16" not in filled.derated_peaks
    assert dataclasses.replace(filled, quick=False).derated_peaks == frozenset()


def test_a_folder_that_cannot_be_written_costs_only_the_memory_of_it(here, tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("a file where a folder should be")
    monkeypatch.setenv("NEARPEAK_CACHE_DIR", str(tmp_path / "taken"))
    lines = []
    assert machine(progress=lines.append).achievable.bandwidth == 1e10
    assert lines[-1].startswith("the calibration is not saved: ")


def test_a_calibration_beside_other_work_is_taken_again_when_there_is_none(here):
    others.share = 0.6
    lines = []
    first = machine(progress=lines.append)
    assert first.achievable.others_share == 0.6
    assert lines[-1] == "this calibration is doubtful: other work used 60 % of the cores meanwhile"
    lines.clear()
    assert machine(progress=lines.append) == first  # still busy
    assert "is measured again when nothing else runs" in lines[0]
    others.share = 0.0
    lines.clear()
    assert machine(progress=lines.append).achievable.bandwidth == 1e10 + 1
    assert "(again, the last was doubtful: other work used 60 % of the cores meanwhile): 0 %" in lines[0]
    assert machine().achievable.bandwidth == 1e10 + 1
    assert here == ["ceilings", "ceilings"]  # as quickly as the first time


def test_a_doubtful_one_that_was_complete_is_measured_again_quickly(here):
    others.share = 0.6
    machine(calibrate=True)
    others.share = 0.0
    assert machine().achievable.quick
    assert here == ["ceilings", "kernels", "ceilings"]


def test_what_contradicts_itself_on_a_quiet_machine_is_not_taken_again_and_again(here, monkeypatch):
    slow_cache = dataclasses.replace(module.calibrate_host(CalibrationProgress()), cache_bandwidth=1e9)
    monkeypatch.setattr(module, "calibrate_host", lambda progress: slow_cache)
    lines = []
    first = machine(progress=lines.append)
    assert "the cache was slower than the memory" in lines[-1]
    monkeypatch.setattr(module, "calibrate_host", None)
    assert machine() == first


def test_where_nobody_counts_other_work_a_doubtful_calibration_stays(here, monkeypatch):
    slow_cache = dataclasses.replace(module.calibrate_host(CalibrationProgress()), cache_bandwidth=1e9)
    monkeypatch.setattr(module, "calibrate_host", lambda progress: slow_cache)
    others.share = None
    first = machine()
    monkeypatch.setattr(module, "calibrate_host", None)
    assert machine() == first


def test_a_stored_one_from_before_work_was_counted_is_taken_again_if_it_contradicts_itself(here, monkeypatch):
    good = module.calibrate_host
    poor = dataclasses.replace(good(CalibrationProgress()), cache_bandwidth=1e9)
    monkeypatch.setattr(module, "calibrate_host", lambda progress: poor)
    others.share = None
    machine()
    others.share = 0.01
    monkeypatch.setattr(module, "calibrate_host", good)
    assert machine().achievable.cache_bandwidth is None


def test_a_gpu_is_measured_in_a_process_of_its_own_where_this_torch_has_no_calibration(here, monkeypatch):
    started = []
    monkeypatch.setattr(module.subprocess, "Popen", lambda command, **options: started.append(command))
    monkeypatch.setattr(module, "gpu_visible", lambda: False)
    module.start_gpu_calibration()
    assert started == []
    monkeypatch.setattr(module, "gpu_visible", lambda: True)
    module.start_gpu_calibration()
    assert started == [[sys.executable, "-m", "nearpeak", "machine"]]
    gpu = catalogue.find("h200-sxm")
    measured = Achievable(how="measured", note="made up", bandwidth=4.6e12, matrix={}, vector={})
    for version, starts in (("1.0", 2), (torch.__version__, 2)):  # of another torch, and of this one
        key = CalibrationKey(device=gpu.name, driver="1", torch=version)
        module.calibrations.save(dataclasses.replace(gpu, achievable=measured), key)
        module.start_gpu_calibration()
        assert len(started) == starts


@pytest.mark.slow
def test_a_quick_calibration_imports_little_beside_torch():
    heavy = "{'torch._dynamo', 'nearpeak.trace', 'nearpeak.kernels', 'nearpeak.findings'}"
    code = f"import sys, nearpeak.calibrate.machine\nprint(sys.modules.keys() & {heavy})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
