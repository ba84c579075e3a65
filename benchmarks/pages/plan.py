"""Writes docs/plan.md anew: its picture, and the outputs in the blocks that begin with `$ nearpeak plan`.

python -m benchmarks.pages.plan
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path

from nearpeak.cli.main import main as nearpeak

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "plan.md"
PICTURE = ROOT / "docs" / "images" / "plan_moe.svg"
DRAWN = 'nearpeak plan moe deepseek-v3 --on "h100-sxm x 64" -o docs/images/plan_moe.svg'
BLOCK = re.compile(r"^```console\n\$ (?P<command>[^\n]+)\n(?P<output>.*?)^```$", re.MULTILINE | re.DOTALL)


def output(command: str) -> str:
    """What a command of the page prints to stdout; `| head -N` and `| tail -N` are understood."""
    call, _, cut = command.partition(" | ")
    words = shlex.split(call)
    assert words[:2] == ["nearpeak", "plan"], command
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()), contextlib.chdir(ROOT):
        nearpeak(words[1:])
    lines = printed.getvalue().rstrip("\n").split("\n")
    if cut:
        which, number = cut.split(" -")
        lines = lines[: int(number)] if which == "head" else lines[-int(number) :]
    return "\n".join(lines).strip("\n") + "\n"


def picture() -> str:
    """The picture of the page as its command draws it today."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        file = Path(folder) / PICTURE.name
        nearpeak([*shlex.split(DRAWN)[1:-1], str(file)])
        return file.read_text(encoding="utf-8")


def blocks(text: str) -> list[tuple[str, str]]:
    """Each command with the output that the page has for it."""
    return [(match["command"], match["output"]) for match in BLOCK.finditer(text)]


def updated(text: str) -> str:
    """The page with the outputs of today."""
    return BLOCK.sub(lambda match: f"```console\n$ {match['command']}\n{output(match['command'])}```", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where the page is outdated")
    arguments = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    new, drawn = updated(text), picture()
    if arguments.check:
        return int(new != text or drawn != PICTURE.read_text(encoding="utf-8"))
    PICTURE.write_text(drawn, encoding="utf-8")
    PAGE.write_text(new, encoding="utf-8")
    print(f"wrote {os.path.relpath(PAGE)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
