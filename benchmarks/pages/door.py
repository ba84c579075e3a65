"""Refreshes what commands print on README.md and on the pages for visitors, and draws a terminal session.

python -m benchmarks.pages.door

A block of output stands below the command that printed it, with the lines that are shown:

    <!-- nearpeak plan memory llama-3-8b | 1-4 -->

The session, docs/images/session.svg, types its commands and shows what they print; it stands still where a reader asked
for less motion.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from nearpeak.render.picture.scene import escape_xml

ROOT = Path(__file__).resolve().parents[2]
VISITORS = ("slow_training", "slow_serving", "writing_kernels", "buying_gpus", "teaching")
PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in VISITORS))
PICTURE = ROOT / "docs" / "images" / "session.svg"
SESSION = (
    ("nearpeak report tests/data/kineto_eager.json.gz", 16),
    ('nearpeak plan memory llama-3-8b --on "h100-sxm x 8"', 6),
)
"""Commands and how many lines of their output are shown."""
_BLOCK = re.compile(
    r"(?P<head><!-- (?P<command>nearpeak [^|\n]*?) \| (?P<first>\d+)-(?P<last>\d+) -->\n\n```text\n)"
    r"(?P<text>.*?)(?P<end>```)",
    re.DOTALL,
)
_ROW, _SIZE, _LEFT, _TOP = 18, 13, 18, 50


def output(command: str) -> list[str]:
    """The lines that a command prints."""
    arguments = [sys.executable, "-m", "nearpeak", *shlex.split(command)[1:]]
    return subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def refresh(text: str) -> str:
    """A page with what its commands print today."""

    def block(match: re.Match[str]) -> str:
        lines = output(match["command"])[int(match["first"]) - 1 : int(match["last"])]
        return match["head"] + "".join(f"{line}\n" for line in lines) + match["end"]

    return _BLOCK.sub(block, text)


def session() -> str:
    """The terminal as an SVG: a command is typed, then its lines come one after the other."""
    rows, moment = [], 0.4
    y = _TOP
    for command, count in SESSION:
        y += _ROW
        rows.append(_line(f"$ {command}", y, moment, "command"))
        moment += 1.2
        for line in output(command)[:count]:
            y += _ROW
            rows.append(_line(line, y, moment, "said"))
            moment += 0.06
        moment += 1.6
        y += _ROW
    height = y + 16
    place = f'viewBox="0 0 720 {height}" width="720" height="{height}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {place} role="img">
<title>A terminal session: {escape_xml("; ".join(command for command, _ in SESSION))}</title>
<style>
text {{ font: {_SIZE}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre; }}
text {{ fill: #dfe3e8; }}
.command {{ fill: #3fc79a; font-weight: bold; }}
@keyframes shown {{ from {{ opacity: 0; }} to {{ opacity: 1; }} }}
@media (prefers-reduced-motion: no-preference) {{ text {{ animation: shown 0.05s both; }} }}
</style>
<rect width="720" height="{height}" rx="8" fill="#16191d"/>
<circle cx="20" cy="20" r="6" fill="#f0854a"/><circle cx="40" cy="20" r="6" fill="#e6c229"/>
<circle cx="60" cy="20" r="6" fill="#3fc79a"/>
{"".join(rows)}</svg>
"""


def _line(text: str, y: float, moment: float, kind: str) -> str:
    if not text.strip():
        return ""
    style = f'style="animation-delay:{moment:.2f}s"'
    return f'<text class="{kind}" x="{_LEFT}" y="{y}" xml:space="preserve" {style}>{escape_xml(text)}</text>\n'


def main() -> int:
    for page in PAGES:
        page.write_text(refresh(page.read_text(encoding="utf-8")), encoding="utf-8")
    PICTURE.write_text(session(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
