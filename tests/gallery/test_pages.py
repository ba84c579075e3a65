"""The gallery's pages of the documentation are what the committed results say."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.pages import gallery
from nearpeak.gallery import NAMES

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("gallery_*.json"))
VIEWS = "heads first "
"""Names of drawn cases that may run no kernel: reshapes of attention heads."""


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


def test_times_of_the_host_among_results_of_a_gpu_are_those_of_views():
    for path in (ROOT / "benchmarks" / "results").glob("gallery_h200*.json"):
        doubts = [doubt for result in gallery.load(path).values() for doubt in result.doubts]
        assert not [doubt for doubt in doubts if doubt.startswith("Times of the host")]
    cases = (ROOT / "benchmarks" / "results").glob("expected_cases_h200_*.json")
    rows = [row for path in cases for row in json.loads(path.read_text())["rows"]]
    of_host = [row["name"] for row in rows if row.get("kind") in ("cpu", "enqueue")]
    assert len(of_host) == 3 and all(name.startswith(VIEWS) for name in of_host)
