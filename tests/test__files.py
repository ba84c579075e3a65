import gzip
import json
import os
import stat
import threading

import pytest

from nearpeak import _files
from nearpeak._files import InputFile, read_csv, read_json, replace_file, write_file
from nearpeak.errors import EnvironmentProblem, FileProblem, UsageError


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


def test_a_link_to_nothing_makes_the_file_behind_it(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    (tmp_path / "chain.json").symlink_to("link.json")
    replace_file(tmp_path / "chain.json", b"new")
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "chain.json").is_symlink()
    assert (tmp_path / "real.json").read_bytes() == b"new"


def test_links_in_a_circle_and_folders_are_errors(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for path in (tmp_path / "a", tmp_path, tmp_path / "no" / "such.json", "nul\0l"):
        with pytest.raises(UsageError, match="cannot be written"):
            write_file(path, "new")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "b"]


def test_a_device_is_written_to_and_stays_one():
    replace_file(_files.Path("/dev/null"), b"new")
    assert stat.S_ISCHR(_files.Path("/dev/null").stat().st_mode)


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    found = []
    content = b"x" * 200_000  # more than a pipe holds
    reader = threading.Thread(target=lambda: found.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    replace_file(tmp_path / "link", content)
    reader.join()
    assert found == [content]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "pipe"]


def test_a_pipe_that_nobody_reads_from_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(_files, "NO_READER_S", 0.05)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="nobody read from this pipe"):
        write_file(tmp_path / "pipe", "new")


@pytest.mark.parametrize("place", ["/dev/fd/{}", "/proc/self/fd/{}"])
def test_an_open_file_is_written_where_it_is(tmp_path, place):
    path = tmp_path / "out.txt"
    with path.open("wb", buffering=0) as file:
        file.write(b"before ")
        replace_file(_files.Path(place.format(file.fileno())), b"new")
        file.write(b" after")
        (tmp_path / "link").symlink_to(place.format(file.fileno()))
        replace_file(tmp_path / "link", b"!")
    assert path.read_bytes() == b"before new after!"
    with pytest.raises(UsageError, match="Bad file descriptor"):
        write_file(place.format(999), "new")


def test_permissions_stay(tmp_path):
    path = tmp_path / "run.json"
    path.write_bytes(b"old")
    path.chmod(0o604)
    replace_file(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o604


def test_a_protected_file_is_not_replaced(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "access", lambda *_: False)  # a superuser may write anywhere
    with pytest.raises(UsageError, match="protected against writing"):
        write_file(path, "new")
    assert path.read_bytes() == b"old"


def test_all_names_of_a_file_have_the_new_content(tmp_path):
    path = tmp_path / "run.json"
    path.write_bytes(b"old and longer")
    os.link(path, tmp_path / "other.json")
    replace_file(path, b"new")
    assert (tmp_path / "other.json").read_bytes() == b"new"
    assert path.stat().st_nlink == 2


@pytest.mark.parametrize("content", [b"new", b"new and longer than the old one"])
def test_a_file_in_a_folder_that_cannot_be_written_is_overwritten(tmp_path, monkeypatch, content):
    path = tmp_path / "run.json"
    path.write_bytes(b"old content")
    original = os.open

    def only_existing(name, flags, *more):
        if flags & os.O_CREAT:
            raise PermissionError(13, "Permission denied")
        return original(name, flags, *more)

    monkeypatch.setattr(os, "open", only_existing)
    replace_file(path, content)
    assert path.read_bytes() == content


def test_a_file_that_cannot_be_overwritten_has_its_old_content(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    path.write_bytes(b"old content")
    os.link(path, tmp_path / "other.json")
    original, calls = os.fsync, []

    def full_once(descriptor):
        calls.append(descriptor)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        original(descriptor)

    monkeypatch.setattr(os, "fsync", full_once)
    with pytest.raises(EnvironmentProblem, match="No space left"):
        write_file(path, "new")
    assert path.read_bytes() == b"old content"


DEEP = 100_000
BAD_JSON = {
    "nested": (b"[" * DEEP + b"]" * DEEP, "nested more than 64 deep"),
    "opened": (b'{"a":' * DEEP, "nested more than 64 deep"),
    "nested in a list": (b"[0," + b"[" * 65 + b"]" * 65 + b"]", "nested more than 64 deep"),
    "nan": (b'{"a": NaN}', "NaN is not JSON"),
    "infinity": (b"[-Infinity]", "-Infinity is not JSON"),
    "digits": (b"9" * 5000, "not valid JSON"),
    "empty": (b"", "not valid JSON: Expecting value: line 1 column 1"),
    "nul": (b'"a\x00"', "not valid JSON"),
    "half": (b'{"a": [1, 2', "not valid JSON"),
    "utf-16": ('{"a": 1}'.encode("utf-16"), "no text in UTF-8"),
    "latin-1": (b'{"a": "\xe9"}', r"no text in UTF-8 \(byte 7\)"),
    "half a gzip file": (gzip.compress(b"[1]", mtime=0)[:-9], "truncated or damaged"),
    "no gzip file": (b"\x1f\x8bnothing", "truncated or damaged"),
    "gzip in gzip": (gzip.compress(gzip.compress(b"[1]", mtime=0), mtime=0), "no text in UTF-8"),
    "rest after gzip": (gzip.compress(b"[1]", mtime=0) + b"rest", "truncated or damaged"),
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_one_error_names_the_file_and_what_is_wrong(tmp_path, name):
    content, reason = BAD_JSON[name]
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(FileProblem, match=reason) as caught:
        read_json(path)
    assert str(caught.value).startswith(f"{path}: ") and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "content",
    [
        b'{"a": [1.5, "]]]}"]}',
        b'\xef\xbb\xbf{"a": [1.5, "]]]}"]}',
        gzip.compress(b'{"a": [1.5,', mtime=0) + gzip.compress(b' "]]]}"]}', mtime=0) + b"\0" * 512,
        json.dumps({"a": [1.5, "]]]}"]}).encode() + b" " * 10,
    ],
)
def test_content_is_found_however_it_is_written(tmp_path, content):
    (tmp_path / "run.json").write_bytes(content)
    assert read_json(tmp_path / "run.json") == {"a": [1.5, "]]]}"]}


def test_brackets_in_strings_are_no_depth(tmp_path):
    value = ["[" * 1000, '"' + "\\[" * 500, "\\"]
    (tmp_path / "run.json").write_text(json.dumps(value))
    assert read_json(tmp_path / "run.json") == value


def test_limits_of_size(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    path.write_bytes(b" " * 1001)
    with pytest.raises(FileProblem, match="holds more than 1,000 bytes"):
        read_json(path, largest=1000)
    monkeypatch.setattr(_files, "_ANY_RATIO_BYTES", 10_000)
    path.write_bytes(gzip.compress(b" " * 1_000_000))
    with pytest.raises(FileProblem, match="expands to more than 200 times its size"):
        read_json(path)
    monkeypatch.setattr(_files, "MOST_CONTAINERS", 10)
    path.write_bytes(b"[" + b"[]," * 10 + b"[]]")
    with pytest.raises(FileProblem, match="more than 10 lists and objects"):
        read_json(path)


def test_what_is_no_file_is_not_read(tmp_path):
    (tmp_path / "circle").symlink_to("circle")
    for path in (tmp_path, tmp_path / "circle", "/dev/zero", "/dev/null", "nul\0l", "x" * 5000):
        with pytest.raises(FileProblem, match="it cannot be read: "):
            read_json(path)
    with pytest.raises(FileProblem, match="there is no such file"):
        read_json(tmp_path / "none")


def test_a_pipe_is_read_once_and_to_its_end(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    content = gzip.compress(json.dumps(["x" * 300_000]).encode())
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(content))
    writer.start()
    with InputFile(tmp_path / "pipe") as file:
        assert file.head(5) == b'["xxx'
        assert len(b"".join(file.pieces())) == 300_004
    writer.join()


def test_a_pipe_that_gives_a_byte_at_a_time(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(tmp_path / "pipe", os.O_WRONLY)

    def write():
        for byte in gzip.compress(b"[1]"):
            os.write(writer, bytes([byte]))
            os.sched_yield()
        os.close(writer)

    thread = threading.Thread(target=write)
    thread.start()
    assert read_json(tmp_path / "pipe") == [1]
    thread.join()
    os.close(reader)


def test_a_pipe_without_content_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(_files, "NO_WRITER_S", 0.05)
    monkeypatch.setattr(_files, "SILENT_WRITER_S", 0.05)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileProblem, match="Expecting value"):
        read_json(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(tmp_path / "pipe", os.O_WRONLY)
    with pytest.raises(FileProblem, match="nothing came for"):
        read_json(tmp_path / "pipe")
    os.close(writer)
    os.close(reader)


def test_rows_of_a_table_have_all_columns(tmp_path):
    (tmp_path / "a.csv").write_text("a,b,c\n1\n1,2,3,4,5\n")
    assert read_csv(tmp_path / "a.csv") == (
        ("a", "b", "c"),
        [{"a": "1", "b": "", "c": ""}, {"a": "1", "b": "2", "c": "3"}],
    )
    (tmp_path / "a.csv").write_text("a\n" + "x" * 200_000)
    with pytest.raises(FileProblem, match=r"not valid CSV: .* after line 1"):
        read_csv(tmp_path / "a.csv")
