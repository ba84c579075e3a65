"""README and the pages for visitors show what their commands print, and the session is that of its script."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.pages import door


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=pytest.mark.slow if page.stem == "README" else pytest.mark.exhaustive)
        for page in door.PAGES
    ],
)
def test_the_output_is_that_of_the_commands(page):
    text = page.read_text(encoding="utf-8")
    assert text == door.refresh(text), "run `python -m benchmarks.pages.door`"


def test_every_page_for_visitors_shows_what_a_command_prints():
    for page in door.PAGES:
        blocks = list(door._BLOCK.finditer(page.read_text(encoding="utf-8")))
        assert blocks, page.name
        for block in blocks:
            lines = block["text"].splitlines()
            assert 1 <= len(lines) <= int(block["last"]) - int(block["first"]) + 1
            assert all(len(line) <= 80 for line in lines)


def test_the_session_is_one_picture_that_fits(monkeypatch):
    printed = {command: ["<b> & more", "x" * 80] * 20 for command, _ in door.SESSION}
    monkeypatch.setattr(door, "output", printed.__getitem__)
    root = ElementTree.fromstring(door.session())
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if text.startswith("$ ")] == [f"$ {command}" for command, _ in door.SESSION]
    assert texts.count("<b> & more") == sum(count // 2 for _, count in door.SESSION)
    kept = ElementTree.parse(door.PICTURE).getroot()
    assert kept.get("role") == "img"
