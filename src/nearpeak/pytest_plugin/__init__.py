"""The pytest plugin: bars that a step or a kernel must meet, as a marker, and fixtures that measure.

    @pytest.mark.nearpeak(of_bound=0.5, no_finding_above="5%")
    def test_training_step(nearpeak_profile):
        nearpeak_profile(step, batch)

It is loaded in every run of pytest where nearpeak is installed, so nothing here imports more than it must: torch and
the rest of nearpeak come with the first test that is marked or that measures. PYTEST_DONT_REWRITE: it has no asserts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

from nearpeak._display import printable

if TYPE_CHECKING:
    from nearpeak.judging.judgement import Judgement
    from nearpeak.measure.timing import Timing
    from nearpeak.profiles.profile import Profile
    from nearpeak.pytest_plugin.measured_test import MeasuredTest

MARKER = (
    'nearpeak(of_bound=0.5, floor="as written", step_time="12 ms", peak_memory="3 GiB", no_finding_above="5%", '
    'ignore=[...], baseline="name", within="5%", device="gpu", grade="B"): bars for what nearpeak_profile or '
    "nearpeak_bench measures in the test"
)
WROTE = "nearpeak wrote"
"""The user property of a report that names a written baseline; workers of pytest-xdist send it back."""

_measured_test = pytest.StashKey["MeasuredTest"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Two options that change files outside of the tests, and the folder of the baselines."""
    group = parser.getgroup("nearpeak", "nearpeak: how near the hardware's bounds")
    group.addoption(
        "--nearpeak-update", action="store_true", help="write baselines of this machine instead of comparing with them"
    )
    group.addoption(
        "--nearpeak-calibrate",
        action="store_true",
        help="calibrate this machine first if that was never done (a minute); otherwise such tests are skipped",
    )
    parser.addini("nearpeak_baselines", "folder of the baselines, from the root folder", default="")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker, for --strict-markers and --markers."""
    config.addinivalue_line("markers", MARKER)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fails a test with a wrong marker and skips one that is for another device, before it runs."""
    if item.get_closest_marker("nearpeak") is not None:
        measured_test_of(item).begin()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fails a test that has bars and measured nothing."""
    result = yield
    measured = item.stash.get(_measured_test, None)
    if measured is not None:
        measured.end()
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Names the baselines that were written."""
    if not config.getoption("--nearpeak-update"):
        return
    reports = [report for each in terminalreporter.stats.values() for report in each]
    written = {value for report in reports for name, value in getattr(report, "user_properties", ()) if name == WROTE}
    for line in sorted(written):
        terminalreporter.write_line(printable(f"{WROTE} {line}"))
    if not written:
        terminalreporter.write_line(f"{WROTE} no baseline: no test with one was measured well enough")


@pytest.fixture
def nearpeak_profile(request: pytest.FixtureRequest) -> Callable[..., Profile]:
    """`nearpeak_profile(fn, *args)` is `nearpeak.profile(fn, *args)`, judged against the bars of the test's marker."""
    return measured_test_of(request.node).profile


@pytest.fixture
def nearpeak_bench(request: pytest.FixtureRequest) -> Callable[..., Timing]:
    """`nearpeak_bench(fn, *args)` is `nearpeak.bench(fn, *args)`, judged against the bars of the test's marker."""
    return measured_test_of(request.node).bench


@pytest.fixture
def nearpeak_judge() -> Callable[..., Judgement]:
    """`nearpeak_judge("kernel.py:fn", against="reference.py:fn")` is `nearpeak.judge`; it fails unless accepted."""
    judge: Callable[..., Judgement] = import_module("nearpeak.judging.judge").judge

    def judged(candidate: str, **options: Any) -> Judgement:
        judgement = judge(candidate, **options)
        if not judgement.is_accepted:
            charges = "\n".join(f"{each.name}: {each.meaning} Seen: {each.evidence}." for each in judgement.charges)
            reason = f"is undecided. {judgement.untimed}" if judgement.is_undecided else f"is rejected.\n{charges}"
            pytest.fail(printable(f"{candidate} {reason}"), pytrace=False)
        return judgement

    return judged


def measured_test_of(item: pytest.Item) -> MeasuredTest:
    """The measurements and the bars of a test."""
    measured = item.stash.get(_measured_test, None)
    if measured is None:
        # An import at the top would run in every session of pytest.
        new: Any = import_module("nearpeak.pytest_plugin.measured_test").MeasuredTest(item)
        measured = item.stash[_measured_test] = new
    return measured
