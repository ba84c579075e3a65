"""The picture in docs/estimate.md is what the command beside it draws, and its figures are those of the runs."""

import json
import re
from pathlib import Path

import pytest
import torch

from nearpeak.cli.main import main

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "estimate.md"
PICTURE = ROOT / "docs" / "images" / "roofline.svg"
COMMAND = "nearpeak estimate examples/cases.py:transformer_layer --on h100-sxm --roofline docs/images/roofline.svg"


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU torch chooses other operators than on the page")
def test_the_picture_is_that_of_the_command(tmp_path, monkeypatch):
    assert COMMAND in PAGE.read_text(encoding="utf-8")
    monkeypatch.chdir(ROOT)
    verb, case, *options = COMMAND.split()[1:-1]
    drawn = tmp_path / "roofline.svg"
    assert main([verb, case, *options, str(drawn)]) == 0
    assert drawn.read_text(encoding="utf-8") == PICTURE.read_text(encoding="utf-8"), f"run `{COMMAND}`"


def result(name):
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))


def test_the_figures_are_those_of_the_soundness_run():
    found = result("soundness_h200.json")
    summary, page = found["summary"], PAGE.read_text(encoding="utf-8")
    assert f"On an H200, {found['date'][:10]}" in page
    assert f"{summary['calls']} calls, {summary['measurements']} measurements" in page
    assert summary["theoretical"]["below"] == 0
    below = summary["achievable"]["below"]
    assert f"{below} {'was' if below == 1 else 'were'} ({summary['achievable']['share']:.2%})" in page
    for family in {row["family"] for row in found["rows"]}:
        count = sum(row["family"] == family for row in found["rows"])
        assert f"| {family} | {count} |" in page


def test_the_expected_time_is_that_of_the_run():
    found = result("expected_h200.json")
    kernels = sorted(found["kernel_s"])[len(found["kernel_s"]) // 2]
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    expected = re.search(r"kernels ran for (\d+) ms \(.{0,60}\), and (\d+) ms are expected", text)
    assert expected is not None and int(expected[1]) == round(kernels * 1e3)
    assert abs(int(expected[2]) / int(expected[1]) - 1) < 0.1


def test_the_table_of_what_was_expected_is_that_of_the_fresh_cases():
    page, rows = PAGE.read_text(encoding="utf-8"), result("expected_fresh_h200.json")["rows"]
    assert f"Of {len(rows)} cases" in page
    for family in {row["family"] for row in rows} | {"all"}:
        ratios = [row["ratio"] for row in rows if family in (row["family"], "all")]
        near, far = (sum(1 / most <= ratio <= most for ratio in ratios) / len(ratios) for most in (1.25, 2.0))
        assert f"| {family} | {len(ratios)} | {near:.0%} | {far:.0%} |".replace("%", " %") in page
