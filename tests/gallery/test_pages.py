"""The gallery's pages of the documentation are what the committed results say."""

from __future__ import annotations

from pathlib import Path

from benchmarks.pages import gallery
from nearpeak.gallery import NAMES

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("gallery_*.json"))


def test_pages_are_of_the_committed_results(tmp_path):
    results = [gallery.load(path) for path in RESULTS]
    assert results
    assert all(set(one) <= set(NAMES) for one in results)
    for name in NAMES:
        found = [one[name] for one in results if name in one]
        page = ROOT / "docs" / "gallery" / f"{name}.md"
        assert page.read_text() == gallery.page(name, found, tmp_path / "images"), (
            "run `python -m benchmarks.pages.gallery`"
        )
    assert gallery.listed(results) in (ROOT / "docs" / "gallery.md").read_text()
    written = {path.name: path.read_text() for path in (tmp_path / "images").iterdir()}
    kept = {path.name: path.read_text() for path in (ROOT / "docs" / "gallery" / "images").iterdir()}
    assert kept == written
