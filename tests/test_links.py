"""Every link of the documentation leads somewhere: files and headings are there, and addresses are well-formed.

`mkdocs build --strict` holds the same for the pages of the site; this needs neither mkdocs nor a network, and holds it
for the files beside them too.
"""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2`*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?[^)]*\)|^\[[^\]]+\]:\s+(\S+)|<(https?:[^>\s]*)>", re.MULTILINE)
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
HOST = re.compile(r"([a-z0-9]([a-z0-9-]*[a-z0-9])?\.)+[a-z]{2,}")


def links(text: str) -> list[str]:
    """What a page links to, code left out."""
    prose = CODE.sub("", FENCE.sub("", text))
    return [next(filter(None, found)) for found in LINK.findall(prose)]


def anchors(text: str) -> set[str]:
    """Ids of the headings of a page, as mkdocs makes them; the second of two equal ones ends with _1."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        letters = unicodedata.normalize("NFKD", shown).encode("ascii", "ignore").decode()
        slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", letters).strip().lower())
        same = sum(1 for one in found if re.fullmatch(rf"{re.escape(slug)}(_\d+)?", one))
        found.add(f"{slug}_{same}" if same else slug)
    return found


def wrong(page: Path, link: str) -> str:
    """What is wrong with a link of a page; empty where it is right."""
    address = urlsplit(link)
    if address.scheme or address.netloc:
        right = address.scheme in ("http", "https") and HOST.fullmatch(address.netloc)
        return "" if right and not re.search(r"[\s\\<>]", link) else "is no well-formed address"
    target = (page.parent / unquote(address.path)).resolve() if address.path else page
    if not target.is_file():
        return "leads to no file"
    if page.is_relative_to(ROOT / "docs") and not target.is_relative_to(ROOT / "docs"):
        return "leads out of the site"
    if target.suffix != ".md" or not address.fragment:
        return ""
    text = target.read_text(encoding="utf-8")
    if re.search(rf"^::: {re.escape(address.fragment)}$", text, re.MULTILINE):
        return ""  # mkdocstrings makes an anchor of each name that it documents
    return "" if unquote(address.fragment) in anchors(text) else "leads to no heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    found = links(page.read_text(encoding="utf-8"))
    assert [f"{link} {why}" for link in found if (why := wrong(page, link))] == []


def test_wrong_links_are_found() -> None:
    index = ROOT / "docs" / "index.md"
    assert links('`[a](b)` [c](d.md#e "f")\n```\n[g](h)\n```\n![i](j.svg) <https://k.org/l>') == [
        "d.md#e",
        "j.svg",
        "https://k.org/l",
    ]
    assert anchors("# A `b` c!\n## Two\n## Two\n```\n# no\n```\n") == {"a-b-c", "two", "two_1"}
    for link in ("nowhere.md", "ideas.md#no-such-heading", "../README.md", "https://", "htp://a.org", "http://a b.org"):
        assert wrong(index, link), link
    for link in ("ideas.md", "ideas.md#three-floors", "#in-python", "https://pytorch.org/docs/#a"):
        assert not wrong(index, link), link
