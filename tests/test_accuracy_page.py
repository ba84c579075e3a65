"""docs/accuracy.md and its plot show the committed results, and nothing else."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "kernel_durations_h200.json"


@pytest.fixture(scope="module")
def page():
    return runpy.run_path(str(ROOT / "benchmarks" / "kernel_durations_page.py"))


def test_the_table_is_that_of_the_results(page):
    text = page["PAGE"].read_text()
    assert page["page_with_table"](text, json.loads(RESULTS.read_text())) == text


def test_the_plot_is_that_of_the_results(page):
    assert page["plot"](json.loads(RESULTS.read_text())) == page["PLOT"].read_text()
