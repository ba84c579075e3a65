"""The table of docs/findings.md is that of the runs."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULT = "benchmarks/results/findings_h200.json"


def test_the_table_is_that_of_the_runs():
    command = [sys.executable, "benchmarks/findings.py", "--show", RESULT]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert shown in (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")


def test_every_planted_waste_was_run():
    rows = json.loads((ROOT / RESULT).read_text(encoding="utf-8"))["rows"]
    assert {row["name"] for row in rows} == {path.stem for path in (ROOT / "tests" / "corpus").glob("*.py")}
