"""docs/accuracy.md and its plot show the committed results, and nothing else."""

import json
from pathlib import Path

from benchmarks.pages import durations

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "kernel_durations_h200.json"


def test_the_table_is_that_of_the_results():
    text = durations.PAGE.read_text()
    assert durations.page_with_table(text, json.loads(RESULTS.read_text())) == text


def test_the_plot_is_that_of_the_results():
    assert durations.plot(json.loads(RESULTS.read_text())) == durations.PLOT.read_text()
