"""The table of docs/diff.md is that of the runs."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_table_is_that_of_the_runs():
    command = [sys.executable, "-m", "benchmarks.profiles.diff", "--show", "benchmarks/results/diff_h200.json"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert shown in (ROOT / "docs" / "diff.md").read_text(encoding="utf-8")
