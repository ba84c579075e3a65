"""Every Python example of the documentation runs.

The blocks of a page run in order and share their names. A block that cannot run here starts with `# not run: reason`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"# not run: \S+")


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """The fenced blocks of a page in one language, each with the line number of its first line."""
    text = page.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, match.start("code")) + 1, match["code"])
        for match in BLOCK.finditer(text)
        if match["language"] == language
    ]


def pages_with_python() -> list[Path]:
    return [page for page in PAGES if blocks(page, "python")]


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with_python(), ids=lambda page: page.name)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for line, code in blocks(page, "python"):
        if code.startswith("# not run"):
            assert NOT_RUN.match(code), f"{page.name}:{line}: say why: `# not run: reason`"
            continue
        # The padding makes a traceback show the line of the page.
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)


def test_readme_has_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.partition("## Two commands\n")[2].partition("\n## ")[0]
    fences = [match["language"] for match in BLOCK.finditer(section)]
    assert fences == ["bash", "text"]
    run, test = (code.splitlines() for _, code in blocks(ROOT / "README.md", "bash"))
    assert run == ["pip install -c constraints.txt -e .", "nearpeak profile examples/train.py"]
    assert test == ["pip install -c constraints.txt -e '.[test]'", "pytest -n auto"]


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:]}
    assert pages == set(re.findall(r"[\w/-]+\.md", navigation))
