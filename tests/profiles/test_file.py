import dataclasses
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from made_up import profile

from nearpeak.errors import EnvironmentProblem, FileProblem, UsageError
from nearpeak.profiles import file
from nearpeak.profiles.finding import Fix
from nearpeak.profiles.profile import SCHEMA, ProfileCeilings


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_profile_comes_back_as_it_was(tmp_path, name):
    file.save(profile(), tmp_path / name)
    assert file.is_profile_file(tmp_path / name)
    assert file.read(tmp_path / name) == profile()


def test_it_is_read_without_torch(tmp_path):
    file.save(profile(), tmp_path / "run.json")
    code = f"import sys, nearpeak; nearpeak.load({str(tmp_path / 'run.json')!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def edited(tmp_path, change):
    path = tmp_path / "run.json"
    file.save(profile(), path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content["profile"].update(schema=99), "has schema 99, .* a newer nearpeak wrote it: update"),
        (lambda content: content["profile"].update(schema=1), "has schema 1, .* an older nearpeak wrote it: profile"),
        (lambda content: content["profile"].pop("ops"), r"is damaged: Profile\.ops"),
        (lambda content: content["profile"]["ops"].pop("name"), r"is damaged: Profile\.ops"),
        (lambda content: content["profile"].update(wall_s=10**400), "expected a finite number"),
        (lambda content: content["profile"].update(wall_s=float("nan")), "NaN is not JSON"),
        (lambda content: content["profile"].update(wall_s="long"), "is damaged: Profile.wall_s"),
        (lambda content: content["profile"].update(extra=1), "is damaged"),
        (lambda content: content.update(kind="other"), "is no saved profile"),
        (lambda content: content.update(profile=[]), "is no saved profile"),
    ],
)
def test_a_file_that_was_changed_is_not_trusted(tmp_path, change, message):
    with pytest.raises(UsageError, match=message):
        file.read(edited(tmp_path, change))


def test_what_is_no_file_of_ours_is_said(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        file.read(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("hello")
    with pytest.raises(UsageError, match="not valid JSON"):
        file.read(tmp_path / "text.json")
    with pytest.raises(UsageError, match="no such file"):
        file.is_profile_file(tmp_path / "none.json")
    with pytest.raises(UsageError, match=r"as \.json or \.json\.gz"):
        file.save(profile(), tmp_path / "run.html")
    with pytest.raises(UsageError, match="cannot be written"):
        file.save(profile(), tmp_path / "no" / "run.json")


def test_only_a_whole_file_is_left(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(EnvironmentProblem, match=r"run\.json cannot be written: No space left"):
        file.save(profile(), tmp_path / "run.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.99])
@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_file_that_is_cut_off_is_said(tmp_path, name, keep):
    path = tmp_path / name
    file.save(profile(), path)
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(UsageError, match=r"cannot be read|not valid JSON"):
        file.read(path)


def test_a_file_that_claims_too_much_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(file.read_json, "__kwdefaults__", {"largest": 10_000})
    path = tmp_path / "run.json.gz"
    path.write_bytes(gzip.compress(b'{"kind":"nearpeak profile","profile":{}}' + b" " * 1_000_000))
    assert path.stat().st_size < 10_000
    assert file.is_profile_file(path)
    with pytest.raises(UsageError, match="holds more than 10,000 bytes"):
        file.read(path)


def test_deep_nesting_is_an_error_and_no_crash(tmp_path):
    path = tmp_path / "run.json"
    path.write_text('{"kind":"nearpeak profile","profile":' + "[" * 200_000)
    with pytest.raises(UsageError, match="nested more than 64 deep"):
        file.read(path)


def test_the_head_has_all_but_ops_and_timeline(tmp_path):
    file.save(profile(), tmp_path / "run.json")
    assert profile().timeline
    assert file.read_head(tmp_path / "run.json") == dataclasses.replace(profile(), ops=(), timeline=())


def test_a_file_from_before_a_field_has_its_default(tmp_path):
    path = tmp_path / "run.json"
    file.save(profile(), path)
    data = json.loads(path.read_text())
    del data["profile"]["ops"]["launch_wait_s"], data["profile"]["timeline"]
    path.write_text(json.dumps(data))
    assert file.read(path) == dataclasses.replace(profile(), timeline=())
    del data["profile"]["ops"]["measured_s"]
    path.write_text(json.dumps(data))
    with pytest.raises(UsageError, match="expected the columns"):
        file.read(path)


def test_what_many_ops_share_is_stored_once(tmp_path):
    ops = tuple(dataclasses.replace(profile().ops[0], module="layer" * 20, measured_s=0.25) for _ in range(1000))
    many = dataclasses.replace(profile(), ops=ops)
    many.save(tmp_path / "run.json")
    text = (tmp_path / "run.json").read_text()
    assert text.count("layer" * 20) == 1
    assert len(text) < 75 * 1000
    assert file.read(tmp_path / "run.json") == many


def test_a_profile_of_schema_2_is_upgraded():
    path = Path(__file__).parents[1] / "data" / "profile_schema_2.json"
    found = file.read(path)
    assert found.schema == SCHEMA
    assert [cause.cause for cause in found.idle] == [gap.cause for gap in found.gaps] == ["synchronization"]
    assert found.undecided == ("synchronization",)
    assert [finding.rule for finding in found.findings] == ["unfused-norm", "wave-quantization"]
    assert found.findings[0].module == "layers.*.norm"
    assert found.findings[0].fix == Fix(
        id="rms_norm", usage="nearpeak.kernels.rms_norm(x, weight)", ops=(0, 1), modules=("layers.*.norm",)
    )
    assert (found.findings[1].modules, found.findings[1].fix) == ((), None)
    assert found.ceilings == ProfileCeilings(bandwidth=3e12)
    assert (found.ops[0].launch_wait_s, found.ops[0].family, found.ops[0].origin) == (0.25, "normalization", "inductor")
    assert [op.modeled for op in found.ops] == [True, True, False]
    assert found.waterfall.seconds("not modeled") > 0
    assert [kernel.collective for kernel in found.timeline if kernel.communication] == ["unknown"]
    assert file.read_head(path).findings == found.findings


def test_an_upgraded_profile_is_saved_with_the_new_schema(tmp_path):
    found = file.read(Path(__file__).parents[1] / "data" / "profile_schema_2.json")
    file.save(found, tmp_path / "new.json")
    assert json.loads((tmp_path / "new.json").read_text())["profile"]["schema"] == SCHEMA
    assert file.read(tmp_path / "new.json") == found


def of_profile(**fields):
    return lambda content: content["profile"].update(fields)


def of_column(table, column, value):
    def change(content):
        content["profile"][table][column][0] = value

    return change


def of_part(value):
    def change(content):
        content["profile"]["waterfall"]["parts"][0]["seconds"] = value

    return change


IMPOSSIBLE = {
    "wall 0": (of_profile(wall_s=0), "Profile.wall_s: expected a number from 1e-12"),
    "wall -1": (of_profile(wall_s=-1.0), "Profile.wall_s: expected a number"),
    "wall tiny": (of_profile(wall_s=1e-300), "Profile.wall_s"),
    "wall large": (of_profile(wall_s=1e300), "Profile.wall_s"),
    "walls": (of_profile(walls=[1.0, 0.0]), r"Profile.walls\[1\]"),
    "share": (of_profile(modeled_share=1.5), "Profile.modeled_share: expected a number from 0 to 1"),
    "matched": (of_profile(matched=-0.1), "Profile.matched"),
    "steps": (of_profile(steps=-1), "Profile.steps"),
    "rank": (of_profile(rank=2**70), "Profile.rank: expected an integer of 64 bits"),
    "how": (of_profile(how="\x1b[31m"), "Profile.how: .* is not one of 'measured'"),
    "text": (of_profile(source="x" * 200_000), "Profile.source: expected a text, found one of 200,000"),
    "ceilings": (of_profile(ceilings={"bandwidth": 0}), "ceilings.bandwidth"),
    "memory": (of_profile(memory={"device": "cpu", "capacity_bytes": -1}), "capacity_bytes"),
    "finding": (of_profile(findings=[{"rule": "x", "ops": [-1]}]), "findings"),
    "measured": (of_column("ops", "measured_s", -1e-9), "Profile.ops.measured_s: expected a number from 0"),
    "infinite": (of_column("ops", "flops", 1e999), "not valid JSON|finite"),
    "kernels": (of_column("ops", "kernels", -2), "Profile.ops.kernels"),
    "start": (of_column("timeline", "start_s", 1e18), "Profile.timeline.start_s"),
    "op": (of_column("timeline", "op", 99), "it names the op 99, and has 3"),
    "sum": (of_part(7.0), "Profile.waterfall: the parts sum to"),
    "parts": (lambda content: content["profile"]["waterfall"]["parts"].pop(), "expected the parts ideal, "),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_figure_that_cannot_be_is_an_error_that_names_it(tmp_path, name):
    change, message = IMPOSSIBLE[name]
    with pytest.raises(FileProblem, match=message) as caught:
        file.read(edited(tmp_path, change))
    assert "\n" not in str(caught.value)


def test_a_number_beyond_all_is_an_error(tmp_path):
    path = edited(tmp_path, of_profile(wall_s=12345.5))
    path.write_text(path.read_text().replace("12345.5", "1e999"))
    with pytest.raises(FileProblem, match=r"Profile\.wall_s: expected a finite number"):
        file.read(path)
