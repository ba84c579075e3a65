import dataclasses
import json
import math
import os

import pytest

from nearpeak._files import cache_folder
from nearpeak.machines import calibrations, catalogue
from nearpeak.machines.machine import Achievable, Ceiling, LaunchCost

KEY = calibrations.CalibrationKey(device="NVIDIA H200", driver="570.86.15", torch="2.13.0+cu130")
MEASURED = Achievable(
    how="measured",
    note="2026-01-02, driver 570.86.15, torch 2.13.0+cu130",
    bandwidth=4.25e12,
    matrix={"bfloat16": 780e12},
    vector={"float32": 0.1 + 0.2},  # a float whose shortest text is long
    matrix_sustained={"bfloat16": 694e12},
    launch=LaunchCost(enqueue=4.2e-6, event_tick=0.0),
    ceilings={"bandwidth.copy": Ceiling(value=4.25e12, spread=0.0, how="copy of 2 GiB")},
)
MACHINE = dataclasses.replace(catalogue.find("h200-sxm"), achievable=MEASURED)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NEARPEAK_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def path():
    saved = calibrations.save(MACHINE, KEY)
    assert isinstance(saved, calibrations.Calibration)
    return saved.path


def refused(path):
    found = calibrations.load(KEY)
    assert isinstance(found, calibrations.UnusableFile), found
    assert found.path == path
    return found.reason


def sealed(payload):
    """The file that a forger who knows the checksum would write."""
    payload = {name: value for name, value in payload.items() if name != "sha256"}
    return json.dumps({**payload, "sha256": calibrations._checksum(payload)})


def test_nothing_is_stored_at_first():
    assert calibrations.load(KEY) is None


def test_what_is_saved_is_loaded(path, folder):
    found = calibrations.load(KEY)
    assert isinstance(found, calibrations.Calibration)
    assert found.machine == MACHINE
    assert found.key == KEY
    assert found.path == path
    assert found.date.endswith("+00:00")
    assert [file.suffix for file in folder.rglob("*") if file.is_file()] == [".json"]  # no temporary file is left


def test_saving_again_replaces(path):
    faster = dataclasses.replace(MACHINE, achievable=dataclasses.replace(MEASURED, bandwidth=4.3e12))
    calibrations.save(faster, KEY)
    assert calibrations.load(KEY).machine.achievable.bandwidth == 4.3e12


@pytest.mark.parametrize("field", ["device", "driver", "torch"])
def test_another_device_driver_or_torch_has_a_file_of_its_own(path, field):
    assert calibrations.load(dataclasses.replace(KEY, **{field: "other"})) is None


def test_keys_that_read_alike_do_not_share_a_file():
    assert calibrations.path_of(KEY) != calibrations.path_of(dataclasses.replace(KEY, device="NVIDIA-H200"))


def test_a_key_cannot_leave_the_folder(folder):
    key = calibrations.CalibrationKey(device="../../etc/passwd", driver="..", torch="/")
    assert calibrations.path_of(key).parent == folder / "machines"


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[]", b"null", b"3", b"[" * 100_000])
def test_a_corrupt_file_is_refused(path, content):
    path.write_bytes(content)
    assert refused(path)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(path, share):
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    assert "not valid JSON" in refused(path)


def test_a_tampered_figure_is_refused(path):
    text = path.read_text()
    assert "780000000000000.0" in text
    path.write_text(text.replace("780000000000000.0", "990000000000000.0"))
    assert "checksum" in refused(path)


def test_a_file_without_checksum_is_refused(path):
    payload = json.loads(path.read_text())
    del payload["sha256"]
    path.write_text(json.dumps(payload))
    assert "checksum" in refused(path)


def test_a_foreign_file_is_refused(path):
    other = calibrations.save(MACHINE, dataclasses.replace(KEY, driver="999"))
    path.write_bytes(other.path.read_bytes())
    assert "another machine or software" in refused(path)


def test_another_schema_is_refused(path):
    path.write_text(sealed({**json.loads(path.read_text()), "schema": calibrations.SCHEMA + 1}))
    assert "schema" in refused(path)


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("bandwidth", -1.0, "machine.achievable.bandwidth"),
        ("bandwidth", 0, "machine.achievable.bandwidth"),
        ("bandwidth", "fast", "expected a number"),
        ("bandwidth", None, "bandwidth"),
        ("matrix", {"bfloat16": -5.0}, "matrix.bfloat16"),
        ("ceilings", {"x": {"value": 1.0, "spread": -0.1, "how": ""}}, "spread"),
        ("how", "derated", "no measured ceilings"),
        ("how", "guessed", "guessed"),
        ("unheard", 1, "unheard"),
    ],
)
def test_figures_that_no_machine_has_are_refused_even_with_a_valid_checksum(path, field, value, complaint):
    payload = json.loads(path.read_text())
    payload["machine"]["achievable"][field] = value
    path.write_text(sealed(payload))
    assert complaint in refused(path)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e999"])
def test_figures_that_are_not_finite_are_refused(path, text):
    path.write_text(path.read_text().replace("780000000000000.0", text))
    assert refused(path)


@pytest.mark.parametrize("change", [{"date": 3}, {"date": "yesterday"}, {"extra": 1}, {"machine": []}])
def test_a_malformed_envelope_is_refused(path, change):
    path.write_text(sealed({**json.loads(path.read_text()), **change}))
    assert refused(path)


def test_an_oversized_file_is_refused(path):
    path.write_bytes(b" " * (calibrations.MAXIMUM_FILE_BYTES + 1))
    assert "holds more than" in refused(path)


def test_a_folder_in_place_of_the_file_is_refused(path):
    path.unlink()
    path.mkdir()
    assert "cannot be read" in refused(path)


@pytest.mark.parametrize("bandwidth", [math.nan, math.inf, 0.0, -1.0])
def test_figures_that_no_machine_has_are_not_saved(bandwidth):
    broken = dataclasses.replace(MACHINE, achievable=dataclasses.replace(MEASURED, bandwidth=bandwidth))
    saved = calibrations.save(broken, KEY)
    assert isinstance(saved, calibrations.UnusableFile)
    assert "bandwidth" in saved.reason
    assert calibrations.load(KEY) is None


def test_a_catalogue_machine_is_not_a_calibration():
    assert isinstance(calibrations.save(catalogue.find("h200-sxm"), KEY), calibrations.UnusableFile)


def test_a_folder_that_cannot_be_made_is_a_reason_and_no_crash(folder, monkeypatch):
    (folder / "file").write_text("")
    monkeypatch.setenv("NEARPEAK_CACHE_DIR", str(folder / "file" / "inside"))
    saved = calibrations.save(MACHINE, KEY)
    assert isinstance(saved, calibrations.UnusableFile)
    assert "cannot be written" in saved.reason
    assert isinstance(calibrations.load(KEY), calibrations.UnusableFile | None)


def test_a_read_only_folder_is_a_reason_and_no_crash(path, monkeypatch):
    def refuse(*arguments, **keywords):  # a superuser may write anywhere, so permissions alone would not do
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    saved = calibrations.save(MACHINE, KEY)
    assert saved == calibrations.UnusableFile(path=path, reason="cannot be written: Permission denied")


def test_a_failed_write_leaves_the_old_file_and_no_litter(path, folder, monkeypatch):
    before = path.read_bytes()

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    assert "No space left" in calibrations.save(MACHINE, KEY).reason
    assert path.read_bytes() == before
    assert [file for file in folder.rglob("*") if file.is_file()] == [path]


def test_without_the_variable_the_cache_is_the_users(monkeypatch):
    monkeypatch.delenv("NEARPEAK_CACHE_DIR")
    assert cache_folder().name == "nearpeak"


def test_all_calibrations_are_found_the_newest_first(path, folder):
    other = calibrations.save(MACHINE, dataclasses.replace(KEY, driver="999"))
    payload = json.loads(other.path.read_text())
    other.path.write_text(sealed({**payload, "date": "2031-01-02T03:04:05+00:00"}))
    (folder / "machines" / "damaged.json").write_text("{")
    (folder / "machines" / "no-key.json").write_text('{"schema": 1}')
    (folder / "machines" / "list.json").write_text("[]")
    (folder / "machines" / "moved.json").write_text(path.read_text())
    assert [one.key.driver for one in calibrations.load_all()] == ["999", KEY.driver]


def test_no_calibration_is_none():
    assert calibrations.load_all() == []
