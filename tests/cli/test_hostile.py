"""Files from elsewhere on the command line: what is in them is only text, on the terminal and in reports."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from made_up import profile
from markdown_it import MarkdownIt

from nearpeak.cli.main import main
from nearpeak.profiles import file

ESCAPES = "\x1b[31m\x1b]0;owned\x07\u202e"
MARKUP = "</script><img src=x onerror=alert(1)>[x](javascript:alert(1))|`**b**"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NEARPEAK_DEBUG", raising=False)


def saved(name: str, **fields: Any) -> str:
    """A saved profile with other fields."""
    data = json.loads(file.to_bytes(profile(), compressed=False))
    data["profile"].update(fields)
    Path(name).write_text(json.dumps(data))
    return name


def trace(name: str, device: str) -> str:
    kernel = {
        "ph": "X",
        "cat": "kernel",
        "name": "k",
        "pid": 0,
        "tid": 7,
        "ts": 2,
        "dur": 1,
        "args": {"External id": 1},
    }
    inputs = {"Input Dims": [[4, 4], [4, 4]], "Input type": ["float", "float"], "External id": 1}
    op = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 9, "args": inputs}
    properties = [{"id": 0, "name": device}]
    Path(name).write_text(json.dumps({"deviceProperties": properties, "traceEvents": [op, kernel]}))
    return name


@pytest.mark.parametrize(
    "where", ["field", "column", "device", "schema", "kind of result", "field of a trace", "config"]
)
def test_no_escape_reaches_the_terminal(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    made = json.loads(file.to_bytes(profile(), compressed=False))
    if where == "field":
        command = ["report", saved("a.json", **{ESCAPES: 1})]
    elif where == "column":
        command = ["report", saved("a.json", ops={**made["profile"]["ops"], ESCAPES: []})]
    elif where == "device":
        command = ["report", trace("a.json", f"NVIDIA {ESCAPES}")]
    elif where == "schema":
        command = ["diff", saved("a.json", schema=ESCAPES), "a.json"]
    elif where == "kind of result":
        Path("a.json").write_text(json.dumps({"nearpeak": ESCAPES}))
        command = ["bench", "cases.py:f", "--baseline", "a.json"]
    elif where == "field of a trace":
        Path("a.json").write_text(json.dumps({ESCAPES: 1, "other": 2}))
        command = ["estimate", "--trace", "a.json"]
    else:
        Path("a.json").write_text(json.dumps({"model_type": ESCAPES}))
        command = ["plan", "memory", "a.json"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith("nearpeak: ") and "x1b[31m" in error
    assert not set(error) & {"\x1b", "\x07", "\u202e"}


def test_markup_in_names_is_text_in_markdown() -> None:
    made = json.loads(file.to_bytes(profile(), compressed=False))["profile"]["ops"]
    for column in ("name", "module", "source"):
        made[column]["values"] = [MARKUP + value for value in made[column]["values"]]
    for by in ("op", "module", "line"):
        assert main(["report", saved("a.json", ops=made), "--by", by, "-o", "a.md"]) == 0
        written = Path("a.md").read_text()
        assert "<img" not in written and "](javascript" not in written and "<script" not in written
        tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(written)
        inline = [child for token in tokens for child in token.children or ()]
        assert not {"link_open", "image"} & {child.type for child in inline}
        found = {child.content for child in inline if child.type == "html_inline"}
        assert found <= {"<!-- -->", "<code>", "</code>"}


@pytest.mark.parametrize("kind", ["link", "pipe", "null", "stdout"])
@pytest.mark.parametrize(
    "command",
    [
        ["machine", "h100-sxm", "--json", "{}"],
        ["report", "a.json", "--json", "{}"],
        ["diff", "a.json", "a.json", "--json", "{}"],
        ["plan", "memory", "llama-3-8b", "--json", "{}"],
        ["gallery", "ridge", "--on", "h100-sxm", "--json", "{}"],
    ],
    ids=lambda command: command[0],
)
def test_results_are_written_through(command: list[str], kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    saved("a.json")
    if kind == "link":
        Path("real.json").write_text("old")
        Path("out.json").symlink_to("real.json")
    elif kind == "pipe":
        os.mkfifo("out.json")
        reader = os.open("out.json", os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(reader, True)
        pytest.importorskip("fcntl").fcntl(reader, 1031, 2**20)  # room for all of it, since nobody reads meanwhile
    elif kind == "null":
        Path("out.json").symlink_to("/dev/null")
    else:
        Path("out.json").symlink_to("/dev/stdout")
    before = os.lstat("out.json")
    assert main([word.format("out.json") for word in command]) == 0
    assert stat.S_IFMT(os.lstat("out.json").st_mode) == stat.S_IFMT(before.st_mode)
    out = capfd.readouterr().out
    if kind == "link":
        assert json.loads(Path("real.json").read_text())
    elif kind == "pipe":
        assert json.loads(os.read(reader, 2**20))
        os.close(reader)
    elif kind == "stdout":
        assert '"' in out
    assert not [path for path in Path().iterdir() if path.suffix == ".tmp"]
