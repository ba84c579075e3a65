"""The gallery's pages of the documentation are what the committed results say."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from nearpeak.gallery import NAMES

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("gallery_*.json"))


def gallery_pages() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module("gallery_pages")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_pages_are_of_the_committed_results(tmp_path):
    module = gallery_pages()
    results = [module.load(path) for path in RESULTS]
    assert results
    assert all(set(one) == set(NAMES) for one in results)
    for name in NAMES:
        found = [one[name] for one in results]
        page = ROOT / "docs" / "gallery" / f"{name}.md"
        assert page.read_text() == module.page(name, found, tmp_path / "images"), f"run {module.__file__} again"
    assert module.listed(results) in (ROOT / "docs" / "gallery.md").read_text()
    written = {path.name: path.read_text() for path in (tmp_path / "images").iterdir()}
    kept = {path.name: path.read_text() for path in (ROOT / "docs" / "gallery" / "images").iterdir()}
    assert kept == written
