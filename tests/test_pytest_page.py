"""The example of docs/pytest.md is a file of tests that pytest runs, and its table has all arguments of the marker."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch  # noqa: F401

import nearpeak.measure.machine
import nearpeak.pytest_plugin.measured_test
from nearpeak.machines import catalogue
from nearpeak.measure import bench  # noqa: F401
from nearpeak.profiling import run  # noqa: F401
from nearpeak.pytest_plugin.measured_test import Bars

PAGE = (Path(__file__).parent.parent / "docs" / "pytest.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_example_runs(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(nearpeak.measure.machine, "this_machine_if_known", lambda: catalogue.find("h100-sxm"))
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert code is not None
    pytester.makepyfile(code[1])
    result = pytester.runpytest_inprocess("-p", "nearpeak.pytest_plugin", "-p", "no:cacheprovider", "-rs")
    outcomes = result.parseoutcomes()
    assert outcomes.pop("warnings", 0) == 0
    assert sum(outcomes.values()) == 3 and "error" not in outcomes
    # A CPU is far from the bounds of a GPU; a busy one has grades that decide nothing.
    told = result.stdout.str()
    assert "of the as written bound" in told or "the test wants B" in told
    assert "no baseline of this machine" in told or "the test wants B" in told


def test_the_table_has_all_arguments():
    rows = "\n".join(re.findall(r"^\| `.*", PAGE, re.MULTILINE))
    for field in fields(Bars):
        assert f"{field.name}=" in rows
