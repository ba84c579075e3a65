"""Real measurements of a small step on the CPU. Its bounds are a GPU's, so that it is sure to be far from them."""

from __future__ import annotations

import pytest
import torch

import nearpeak.pytest_plugin.measured_test
from nearpeak.measure import bench  # noqa: F401
from nearpeak.profiling import run  # noqa: F401

STEP = """
import pytest
import torch

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batch = torch.randn(32, 64)

def step(batch):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()

@pytest.mark.nearpeak(step_time="60 s", peak_memory="1 GiB")
def test_budget(nearpeak_profile):
    measured = nearpeak_profile(step, batch, on="h100-sxm")
    assert measured.memory.peak_bytes > 2 * 64 * 64 * 4

@pytest.mark.nearpeak(of_bound=0.9)
def test_bound(nearpeak_profile):
    nearpeak_profile(step, batch, on="h100-sxm")

@pytest.mark.nearpeak(peak_memory="1 kB")
def test_memory(nearpeak_profile):
    nearpeak_profile(step, batch, on="h100-sxm")

@pytest.mark.nearpeak(step_time="60 s", baseline="add", within="5%")
def test_call(nearpeak_bench):
    nearpeak_bench(torch.add, batch, batch, max_seconds=0.1)
"""


@pytest.mark.slow
def test_a_step_on_the_cpu(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    # A busy machine has grades that decide nothing; what is decided here is the same on any.
    monkeypatch.setattr(nearpeak.pytest_plugin.measured_test, "grade_too_low", lambda figure, bars: False)
    if torch.cuda.is_available():
        pytest.skip("a GPU is there, and the step is on the CPU")
    pytester.makepyfile(STEP)
    result = pytester.runpytest_inprocess(
        "-p", "nearpeak.pytest_plugin", "-p", "no:cacheprovider", "-v", "-rs", "--nearpeak-update"
    )
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(["*::test_budget PASSED*", "*::test_call PASSED*"])
    assert any("peak_memory: " in line and "the bar is 1.00 kB" in line for line in result.outlines)
    assert any("% of the as written bound" in line for line in result.outlines)
