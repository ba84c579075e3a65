"""What the plugin costs a user whose tests have nothing to do with it: in a process of its own."""

from __future__ import annotations

import pytest

TELL = """
import sys

def pytest_unconfigure():
    watched = ("torch", "numpy", "triton", "nearpeak")
    loaded = [name for name in sys.modules if name.partition(".")[0] in watched]
    print("LOADED", *sorted(loaded))
"""


def loaded(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, test: str) -> tuple[set[str], pytest.RunResult]:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeconftest(TELL)
    pytester.makepyfile(test)
    result = pytester.runpytest_subprocess("-p", "nearpeak.pytest_plugin", "-p", "no:cacheprovider", "-rs")
    (line,) = (line for line in result.outlines if line.startswith("LOADED"))
    return set(line.split()[1:]), result


def test_tests_without_it_load_two_small_modules(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    modules, result = loaded(pytester, monkeypatch, "def test_a():\n    assert True")
    result.assert_outcomes(passed=1)
    assert modules == {"nearpeak", "nearpeak._display", "nearpeak.pytest_plugin"}


@pytest.mark.slow
def test_a_wrong_marker_is_said_without_torch(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    test = "import pytest\n\n@pytest.mark.nearpeak(of_bund=1)\ndef test_a():\n    pass"
    modules, result = loaded(pytester, monkeypatch, test)
    result.assert_outcomes(errors=1)
    assert "torch" not in modules
