"""The tables of docs/findings.md are those of the runs."""

import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parent.parent
RESULT = "benchmarks/results/findings_h200.json"
MODELS = "benchmarks/results/model_fixes_h200.json"


@pytest.mark.slow
def test_the_table_is_that_of_the_runs():
    command = [sys.executable, "-m", "benchmarks.profiles.findings", "--show", RESULT]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert shown in (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("programs_h200.json", "27 wastes, 12 found at the line, 4 within 3 lines, 2 in the function, 9 missed"),
        (
            "programs_held_out_h200.json",
            "31 wastes, 16 found at the line, 3 within 3 lines, 2 in the function, 10 missed",
        ),
    ],
)
def test_the_tables_of_programs_are_those_of_the_runs(file, counts):
    command = [sys.executable, "-m", "benchmarks.profiles.programs", "--show", f"benchmarks/results/{file}"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.partition("\n\n")[0].strip() in (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    assert counts in shown


def test_the_table_of_real_models_is_that_of_the_runs():
    command = [sys.executable, "-m", "benchmarks.pages.model_fixes", MODELS]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert shown in (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")


def test_what_was_realized_on_real_models_is_the_median_of_the_rounds():
    for row in json.loads((ROOT / MODELS).read_text(encoding="utf-8"))["rows"]:
        saved = [plain - fixed for plain, fixed in row["rounds_s"]]
        assert row["realized_s"] == pytest.approx(median(saved))
        assert row["ratio"] == pytest.approx(row["predicted_s"] / row["realized_s"])


def test_every_planted_waste_was_run_or_is_said_not_to_be():
    rows = json.loads((ROOT / RESULT).read_text(encoding="utf-8"))["rows"]
    page = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    (later,) = re.findall(r"Planted after this run, and not yet measured on a GPU: (.*?)\.\n", page, re.DOTALL)
    not_run = set(re.findall(r"\*(\w+)\*", later))
    assert {row["name"] for row in rows} | not_run == {path.stem for path in (ROOT / "tests" / "corpus").glob("*.py")}
    assert not not_run & {row["name"] for row in rows}
