import json
import subprocess
import sys

import pytest
from made_up import profile

from nearpeak.diagnose import saved
from nearpeak.errors import UsageError


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_profile_comes_back_as_it_was(tmp_path, name):
    saved.save(profile(), tmp_path / name)
    assert saved.is_saved(tmp_path / name)
    assert saved.read(tmp_path / name) == profile()


def test_it_is_read_without_torch(tmp_path):
    saved.save(profile(), tmp_path / "run.json")
    code = f"import sys, nearpeak; nearpeak.load({str(tmp_path / 'run.json')!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def edited(tmp_path, change):
    path = tmp_path / "run.json"
    saved.save(profile(), path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content["profile"].update(schema=99), "has schema 99"),
        (lambda content: content["profile"].update(wall_s="long"), "is damaged: Profile.wall_s"),
        (lambda content: content["profile"].update(extra=1), "is damaged"),
        (lambda content: content.update(kind="other"), "is no saved profile"),
        (lambda content: content.update(profile=[]), "is no saved profile"),
    ],
)
def test_a_file_that_was_changed_is_not_trusted(tmp_path, change, message):
    with pytest.raises(UsageError, match=message):
        saved.read(edited(tmp_path, change))


def test_what_is_no_file_of_ours_is_said(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        saved.read(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("hello")
    with pytest.raises(UsageError, match="not valid JSON"):
        saved.read(tmp_path / "text.json")
    assert not saved.is_saved(tmp_path / "none.json")
    with pytest.raises(UsageError, match=r"as \.json or \.json\.gz"):
        saved.save(profile(), tmp_path / "run.html")
    with pytest.raises(UsageError, match="cannot be written"):
        saved.save(profile(), tmp_path / "no" / "run.json")
