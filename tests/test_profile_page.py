"""The table of docs/profile.md is that of the runs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nearpeak.cli.main import main

ROOT = Path(__file__).parent.parent
RESULT = "benchmarks/results/model_profiles_h200.json"


def test_the_table_is_that_of_the_runs():
    command = [sys.executable, "-m", "benchmarks.models.profiles", "--show", RESULT]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert shown in (ROOT / "docs" / "profile.md").read_text(encoding="utf-8")


def test_the_runs_hold_what_is_said_of_them():
    rows = json.loads((ROOT / RESULT).read_text(encoding="utf-8"))["rows"]
    assert all(abs(row["parts_over_wall"] - 1) < 0.01 and row["modeled"] > 0.98 for row in rows)


def test_the_screen_of_the_readme_is_that_of_the_command(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ((command, last, block),) = re.findall(
        r"<!-- nearpeak (report \S+) \| 1-(\d+) -->\n\n```text\n(.*?)```", readme, re.S
    )
    assert main(command.split()) == 0
    assert capsys.readouterr().out.splitlines()[: int(last)] == block.splitlines()


GRAPHS = "benchmarks/results/graph_kernels_h200.json"


@pytest.mark.slow
def test_the_table_of_graphs_is_that_of_the_runs():
    command = [sys.executable, "-m", "benchmarks.profiles.graph_kernels", "--show", GRAPHS]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert shown in (ROOT / "docs" / "profile.md").read_text(encoding="utf-8")
    models = json.loads((ROOT / GRAPHS).read_text(encoding="utf-8"))["models"].values()
    assert all(model["known_share"] > 0.98 and not model["wrong"] and not model["bounds_broken"] for model in models)
