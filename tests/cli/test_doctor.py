from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from nearpeak._records import from_json
from nearpeak.cli.main import main
from nearpeak.cli.verbs import doctor
from nearpeak.cli.verbs.doctor import Check, Report, text
from nearpeak.devices import nvml
from nearpeak.devices.device import GpuFacts, GpuScan

H200 = GpuFacts(
    index=0,
    name="NVIDIA H200",
    uuid=None,
    driver_version="570.86",
    memory_bytes=None,
    power_limit_watts=None,
    clock_multiprocessor_hz=None,
    clock_memory_hz=None,
)


def fake_torch(*, cuda: str | None, available: bool) -> SimpleNamespace:
    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(is_available=lambda: available, get_device_name=lambda: "A GPU"),
    )


@pytest.fixture
def scan(monkeypatch: pytest.MonkeyPatch):
    """Sets the GPUs that the driver reports."""

    def install(*gpus: GpuFacts) -> None:
        found = GpuScan(gpus=gpus, problem=None if gpus else "NVML reports no GPU")
        monkeypatch.setattr(nvml, "scan_gpus", lambda: found)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return install


def found(name: str) -> Check:
    return next(check for check in doctor.run_checks() if check.name == name)


def test_this_environment_has_what_the_tests_need(scan, capsys: pytest.CaptureFixture[str]):
    scan()
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert metadata.version("torch") in output
    assert output.endswith("Nothing that nearpeak needs is missing.\n")


def test_json_on_stdout_is_the_whole_output(scan, capsys: pytest.CaptureFixture[str]):
    scan()
    assert main(["doctor", "--json", "-"]) == 0
    report = from_json(Report, json.loads(capsys.readouterr().out))
    assert report.ok
    assert {"python", "torch", "triton", "cpu", "gpu", "cache"} <= {check.name for check in report.checks}


def test_json_into_a_file(scan, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    scan()
    assert main(["doctor", "--json", str(tmp_path / "report.json")]) == 0
    assert json.loads((tmp_path / "report.json").read_text())["ok"]
    assert "python" in capsys.readouterr().out
    assert main(["doctor", "--json", str(tmp_path)]) == 2


def test_a_missing_package_is_named_with_its_remedy(scan, monkeypatch: pytest.MonkeyPatch, capsys):
    scan()
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda package: None if package == "platformdirs" else version(package))
    assert main(["doctor"]) == 4
    output = capsys.readouterr().out
    assert "-> pip install platformdirs" in output
    assert output.endswith("Missing: platformdirs.\n")


def test_a_torch_that_cannot_be_imported_is_missing(scan, monkeypatch: pytest.MonkeyPatch):
    scan()
    monkeypatch.setattr(doctor, "_import_torch", lambda: OSError("libcudart.so: no such file"))
    check = found("torch")
    assert check.state == "missing"
    assert "OSError: libcudart.so: no such file" in check.found


@pytest.mark.parametrize(
    ("torch", "advice"),
    [
        (fake_torch(cuda=None, available=False), "build without CUDA"),
        (fake_torch(cuda="12.8", available=False), "driver is new enough"),
        (ImportError("no torch"), "Install torch first"),
    ],
)
def test_a_gpu_that_torch_cannot_use(torch, advice: str, scan, monkeypatch: pytest.MonkeyPatch):
    scan(H200)
    monkeypatch.setattr(doctor, "_import_torch", lambda: torch)
    check = found("gpu")
    assert check.state == "missing"
    assert check.found == "NVIDIA H200, driver 570.86, but torch cannot use it"
    assert advice in check.advice


def test_a_hidden_gpu(scan, monkeypatch: pytest.MonkeyPatch):
    scan(H200)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(doctor, "_import_torch", lambda: fake_torch(cuda="12.8", available=False))
    assert "CUDA_VISIBLE_DEVICES" in found("gpu").advice


def test_a_usable_gpu(scan, monkeypatch: pytest.MonkeyPatch):
    scan(H200)
    monkeypatch.setattr(doctor, "_import_torch", lambda: fake_torch(cuda="12.8", available=True))
    assert found("gpu") == Check(name="gpu", state="ok", found="NVIDIA H200, driver 570.86")


def test_no_gpu_is_no_problem(scan, monkeypatch: pytest.MonkeyPatch):
    scan()
    monkeypatch.setattr(doctor, "_import_torch", lambda: fake_torch(cuda=None, available=False))
    assert found("gpu").state == "absent"


def test_a_cache_that_cannot_be_written_is_said(scan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scan()
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("NEARPEAK_CACHE_DIR", str(tmp_path / "file" / "cache"))
    check = found("cache")
    assert check.state == "absent"
    assert "NEARPEAK_CACHE_DIR" in check.advice


def test_advice_stands_below_its_check():
    report = Report(
        checks=(
            Check(name="torch", state="ok", found="2.13.0"),
            Check(name="platformdirs", state="missing", found="not installed", advice="pip install platformdirs"),
        ),
        ok=False,
    )
    assert text(report) == (
        "ok       torch         2.13.0\n"
        "missing  platformdirs  not installed\n"
        "                       -> pip install platformdirs\n\n"
        "Missing: platformdirs."
    )
