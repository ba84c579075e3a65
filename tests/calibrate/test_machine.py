import dataclasses

import pytest
import torch

from nearpeak.calibrate import machine as module
from nearpeak.calibrate.machine import machine
from nearpeak.devices.host_load import HostShares
from nearpeak.errors import UnknownMachine
from nearpeak.machines import catalogue
from nearpeak.machines.machine import Achievable, EfficiencyPoint


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
        progress("memory: copy")
        return Achievable(how="measured", note="made up", bandwidth=bandwidth, matrix={}, vector={"float32": 1e11})

    def efficiency(found, progress):
        made.append("kernels")
        points = {"pointwise": (EfficiencyPoint(bound_seconds=1e-6, ratio=2.0),)}
        return dataclasses.replace(found, achievable=dataclasses.replace(found.achievable, efficiency=points))

    monkeypatch.setattr(module, "HostLoad", lambda: others)
    others.share = 0.0
    monkeypatch.setattr(module, "calibrate_host", calibrate)
    monkeypatch.setattr(module, "measure_efficiency", efficiency)
    return made


def test_a_machine_of_the_catalogue_is_found_and_nothing_is_measured(here):
    assert machine("h200-sxm") == catalogue.find("h200-sxm")
    assert machine("h200-sxm", calibrate=True) == catalogue.find("h200-sxm")
    assert here == []


def test_an_unknown_machine_is_answered_with_the_nearest():
    with pytest.raises(UnknownMachine, match="h100-sxm"):
        machine("h100-sxn")


def test_ceilings_and_kernels_are_measured_once_and_kept(here):
    first = machine()
    assert first.achievable.efficiency["pointwise"] == (EfficiencyPoint(bound_seconds=1e-6, ratio=2.0),)
    assert machine() == first
    assert here == ["ceilings", "kernels"]


def only_file(tmp_path):
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    return file


def test_the_first_call_measures_and_later_ones_read(here):
    lines = []
    first = machine(progress=lines.append)
    assert first.kind == "cpu"
    assert first.achievable.bandwidth == 1e10
    assert lines == ["measuring this machine, once", "memory: copy"]
    lines.clear()
    assert machine(progress=lines.append) == first
    assert here == ["ceilings", "kernels"]
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


def test_another_number_of_threads_is_another_machine(here, monkeypatch):
    machine()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 97)
    assert machine().achievable.bandwidth == 1e10 + 1


def test_another_torch_is_another_machine(here, monkeypatch):
    machine()
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert machine().achievable.bandwidth == 1e10 + 1


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
    assert lines[0].endswith("other work used 60 % of the cores meanwhile. Measuring again")
    assert machine().achievable.bandwidth == 1e10 + 1
    assert here.count("ceilings") == 2


def test_what_contradicts_itself_on_a_quiet_machine_is_not_taken_again_and_again(here, monkeypatch):
    slow_cache = dataclasses.replace(module.calibrate_host(lambda line: None), cache_bandwidth=1e9)
    monkeypatch.setattr(module, "calibrate_host", lambda progress: slow_cache)
    lines = []
    first = machine(progress=lines.append)
    assert "the cache was slower than the memory" in lines[-1]
    monkeypatch.setattr(module, "calibrate_host", None)
    assert machine() == first


def test_where_nobody_counts_other_work_a_doubtful_calibration_stays(here, monkeypatch):
    slow_cache = dataclasses.replace(module.calibrate_host(lambda line: None), cache_bandwidth=1e9)
    monkeypatch.setattr(module, "calibrate_host", lambda progress: slow_cache)
    others.share = None
    first = machine()
    monkeypatch.setattr(module, "calibrate_host", None)
    assert machine() == first


def test_a_stored_one_from_before_work_was_counted_is_taken_again_if_it_contradicts_itself(here, monkeypatch):
    good = module.calibrate_host
    poor = dataclasses.replace(good(lambda line: None), cache_bandwidth=1e9)
    monkeypatch.setattr(module, "calibrate_host", lambda progress: poor)
    others.share = None
    machine()
    others.share = 0.01
    monkeypatch.setattr(module, "calibrate_host", good)
    assert machine().achievable.cache_bandwidth is None
