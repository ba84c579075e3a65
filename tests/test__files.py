import os
import stat

import pytest

from nearpeak._files import replace_file


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "run.json"
    path.write_bytes(b"old")
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("call", ["fsync", "open"])
def test_a_failed_write_leaves_the_old_file_alone(tmp_path, monkeypatch, call):
    path = tmp_path / "run.json"
    path.write_bytes(b"old")

    def fail(*arguments, **keywords):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(OSError, match="No space"):
            replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_who_may_read_it_is_for_the_umask_to_say(tmp_path):
    before = os.umask(0o022)
    try:
        replace_file(tmp_path / "run.json", b"new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run.json").stat().st_mode) == 0o644


def test_the_file_behind_a_link_is_replaced(tmp_path):
    (tmp_path / "real.json").write_bytes(b"old")
    (tmp_path / "link.json").symlink_to("real.json")
    replace_file(tmp_path / "link.json", b"new")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_bytes() == b"new"
