"""pytest in pytest: what a marked test says, on a made-up machine with made-up measurements."""

from __future__ import annotations

import dataclasses
import json
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

# A run of pytest inside forgets what it imported first, and torch cannot be imported twice.
import torch  # noqa: F401
from figures import DOUBTFUL, KEY, profile, timing  # type: ignore[import-not-found]

import nearpeak.measure.bench
import nearpeak.measure.machine
import nearpeak.pytest_plugin.measured_test
from nearpeak.errors import EnvironmentProblem
from nearpeak.machines import catalogue
from nearpeak.profiling import run

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What the next measurements give; the machine is known."""
    found: dict[str, object] = {"profile": profile(), "timing": timing()}

    def give(name: str) -> Callable[..., object]:
        def measure(fn: Callable[..., object], *args: object, **options: object) -> object:
            fn(*args)
            if isinstance(found[name], Exception):
                raise found[name]
            return found[name]

        return measure

    monkeypatch.setattr(run, "profile", give("profile"))
    monkeypatch.setattr(nearpeak.measure.bench, "bench", give("timing"))
    monkeypatch.setattr(nearpeak.measure.machine, "this_machine_if_known", lambda: catalogue.find("h100-sxm"))
    monkeypatch.setattr(nearpeak.measure.machine, "this_machine_key", lambda: KEY)
    return found


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, measured: dict[str, object]) -> Run:
    """Runs one test with this marker and body, and only this plugin."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def go(
        marker: str,
        body: str = "nearpeak_profile(int)",
        *options: str,
        decorator: str = "",
        arguments: str = "",
    ) -> pytest.RunResult:
        lines = "\n    ".join(body.splitlines())
        pytester.makepyfile(
            f"import pytest\n\n{decorator}\n@pytest.mark.nearpeak({marker})\n"
            f"def test_step({arguments}nearpeak_profile, nearpeak_bench):\n    {lines}\n"
        )
        return pytester.runpytest_inprocess(
            "-p", "nearpeak.pytest_plugin", "-rsfE", "--strict-markers", "-p", "no:cacheprovider", *options
        )

    return go


def baseline_files(pytester: pytest.Pytester) -> list[str]:
    return sorted(path.relative_to(pytester.path).as_posix() for path in pytester.path.rglob("*.json"))


@pytest.mark.parametrize(
    "marker",
    [
        'step_time="12 s"',
        "of_bound=0.3",
        'peak_memory="2 GiB"',
        'no_finding_above="8%"',
        'of_bound="9%", floor="ideal"',
    ],
)
def test_a_bar_that_is_met(inner: Run, marker: str):
    inner(marker).assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("marker", "says"),
    [
        ('step_time="5 s"', "*step_time: 10.00* s [[]*], and the bar is 5.00 s."),
        ("of_bound=0.5", "*of_bound: 30.0 % of the as written bound*, and the bar is 50.0 %."),
        ('peak_memory="1 GiB"', "*peak_memory: 2.00 GiB on cuda:0 at model.py:7, and the bar is 1.00 GiB."),
        ('no_finding_above="5%"', "*no_finding_above: 1 finding saves more than 5.0 %*"),
    ],
)
def test_a_bar_that_is_missed(inner: Run, marker: str, says: str):
    result = inner(marker)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            ">*nearpeak_profile(int)",  # the user's own line, and nothing of the plugin's
            "*train.py misses a bar:",
            says,
            "*Top finding: 800 ms, 8.0 %: unfused-norm at model.py:41: A norm is written as 5 ops.",
            "*x = norm(x)",
            "*Measured on Toy 1, grade A.",
        ]
    )
    result.stdout.no_fnmatch_line("*measured_test.py*")


def test_a_time_within_the_noise_of_the_bar_is_skipped(inner: Run):
    result = inner('step_time="9.98 s"')
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*nearpeak: cannot tell: step_time: 10.00*and the bar is 9.98 s*"])


def test_a_call(inner: Run):
    inner("of_bound=0.5, step_time='11 us'", "assert nearpeak_bench(int).kind == 'device'").assert_outcomes(passed=1)
    result = inner("of_bound=0.6", "nearpeak_bench(int)")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*of_bound: 50.0 % of the memory bound*"])


def test_measurements_without_bars_are_just_measurements(inner: Run, measured: dict[str, object]):
    measured["timing"] = timing(flags=DOUBTFUL)
    inner("", "assert nearpeak_profile(int).wall_s == 10.0\nassert nearpeak_bench(int).grade == 'F'").assert_outcomes(
        passed=1
    )


def test_a_grade_that_is_too_low_is_skipped(inner: Run, measured: dict[str, object]):
    measured["timing"] = timing(flags=DOUBTFUL)
    result = inner('step_time="1 ns"', "nearpeak_bench(int)")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*cannot tell: *has grade F (LAUNCH_NOT_HIDDEN: the device waited)*wants B*"])
    measured["profile"] = profile(spread=0.1)
    inner('step_time="12 s", grade="A"').assert_outcomes(skipped=1)
    inner('step_time="12 s"').assert_outcomes(passed=1)
    measured["profile"] = profile(spread=0.3)
    inner('step_time="1 s"').assert_outcomes(skipped=1)
    inner('step_time="1 s", grade="C"').assert_outcomes(failed=1)


def test_a_machine_that_was_never_measured_is_skipped(inner: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nearpeak.measure.machine, "this_machine_if_known", lambda: None)
    result = inner("of_bound=0.1")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*this machine was never measured*nearpeak machine --calibrate*--nearpeak-calibrate*"])
    inner("of_bound=0.1", "nearpeak_profile(int, on='h100-sxm')").assert_outcomes(passed=1)
    asked = []
    monkeypatch.setattr("nearpeak.calibrate.machine.machine", lambda: asked.append(1) or catalogue.find("h100-sxm"))
    inner("of_bound=0.1", "nearpeak_profile(int)", "--nearpeak-calibrate").assert_outcomes(passed=1)
    assert asked == [1]


def test_a_time_of_a_call_needs_no_machine(inner: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nearpeak.measure.machine, "this_machine_if_known", lambda: None)
    inner('step_time="1 s"', "nearpeak_bench(int)").assert_outcomes(passed=1)


def test_what_the_machine_lacks_is_skipped(inner: Run, measured: dict[str, object]):
    measured["profile"] = EnvironmentProblem("no permission for the profiler")
    result = inner("of_bound=0.1")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*nearpeak: no permission for the profiler"])


def test_without_torch_a_test_is_skipped(inner: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    result = inner("of_bound=0.1")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*nearpeak: torch cannot be imported*"])


@pytest.mark.parametrize(
    ("has_gpu", "device", "outcome", "reason"),
    [
        (False, "gpu", "skipped", "*nearpeak: needs a GPU, and there is none"),
        (True, "gpu", "passed", None),
        (True, "cpu", "skipped", "*nearpeak: needs a CPU, and there is a GPU*"),
        (False, "cpu", "passed", None),
        (True, "Toy 1", "passed", None),
        (True, "NVIDIA H200", "skipped", "*nearpeak: is for NVIDIA H200, and this is Toy 1"),
    ],
)
def test_device(
    inner: Run, monkeypatch: pytest.MonkeyPatch, has_gpu: bool, device: str, outcome: str, reason: str | None
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    # A device that is missing is said before the test begins: its body never runs.
    result = inner(f'device="{device}", step_time="100 s"', "print('began')\nnearpeak_profile(int)", "-s")
    result.assert_outcomes(**{outcome: 1})
    assert ("began" in result.stdout.str()) == (outcome == "passed")
    if reason is not None:
        result.stdout.fnmatch_lines([reason])


def test_a_marked_test_that_measures_nothing_fails(inner: Run):
    result = inner("of_bound=0.5", "pass")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*has bars (of_bound) and measured nothing*"])


def test_a_test_that_fails_by_itself_says_only_that(inner: Run):
    result = inner("of_bound=0.5", "assert 1 == 2")
    result.assert_outcomes(failed=1)
    result.stdout.no_fnmatch_line("*measured nothing*")


def test_a_wrong_marker_is_an_error_of_that_test(inner: Run):
    result = inner("of_bund=0.5")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*The marker nearpeak has no 'of_bund'. Did you mean 'of_bound'*"])


def test_a_bar_without_sense_fails(inner: Run):
    result = inner('peak_memory="1 GiB"', "nearpeak_bench(int)")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*peak_memory is a bar for nearpeak_profile*"])


def test_a_marker_of_the_module_and_one_of_the_test(inner: Run):
    module = 'pytestmark = pytest.mark.nearpeak(step_time="1 s")'
    inner('step_time="12 s"', BODY, decorator=module).assert_outcomes(passed=1)
    inner("of_bound=0.1", BODY, decorator=module).assert_outcomes(failed=1)


def test_the_marker_is_declared(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    result = pytester.runpytest_inprocess("-p", "nearpeak.pytest_plugin", "--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.nearpeak(of_bound=0.5*"])


BASELINE = 'baseline="step", within="5%"'
BODY = "nearpeak_profile(int)"
FILE = "tests/nearpeak_baselines/step.json"


def test_a_baseline_is_written_only_when_asked(inner: Run, pytester: pytest.Pytester):
    result = inner(BASELINE)
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(
        [f"*no baseline of this machine (Toy 1, driver 1.0, torch 2.13.0): {FILE} is not there. --nearpeak-update*"]
    )
    assert baseline_files(pytester) == []
    result = inner(BASELINE, BODY, "--nearpeak-update")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"nearpeak wrote {FILE}: 10.00*"])
    assert baseline_files(pytester) == [FILE]
    before = (pytester.path / FILE).read_bytes()
    inner(BASELINE).assert_outcomes(passed=1)
    assert (pytester.path / FILE).read_bytes() == before


def test_a_regression_against_the_baseline_fails(inner: Run, measured: dict[str, object]):
    inner(BASELINE, BODY, "--nearpeak-update")
    measured["profile"] = profile(11.0)
    result = inner(BASELINE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*baseline: 11.00*, 10.0 % more than 10.00*, and the bar is 5.0 %.", "*Top finding:*"])
    measured["profile"] = profile(8.0)
    inner(BASELINE).assert_outcomes(passed=1)


def test_a_baseline_of_another_machine_is_skipped(inner: Run, monkeypatch: pytest.MonkeyPatch):
    inner(BASELINE, BODY, "--nearpeak-update")
    other = dataclasses.replace(KEY, torch="2.14.0")
    monkeypatch.setattr(nearpeak.measure.machine, "this_machine_key", lambda: other)
    result = inner(BASELINE)
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(
        ["*(Toy 1, driver 1.0, torch 2.14.0): there is one of Toy 1, driver 1.0, torch 2.13.0*"]
    )


def test_other_bars_are_judged_where_the_baseline_is_missing(inner: Run, pytester: pytest.Pytester):
    inner(f'{BASELINE}, step_time="1 s"').assert_outcomes(failed=1)
    inner(f'{BASELINE}, step_time="1 s"', BODY, "--nearpeak-update").assert_outcomes(failed=1)
    assert baseline_files(pytester) == []  # what misses a bar is no baseline


def test_a_poor_measurement_is_no_baseline(inner: Run, measured: dict[str, object], pytester: pytest.Pytester):
    measured["timing"] = timing(flags=DOUBTFUL)
    result = inner(BASELINE, "nearpeak_bench(int)", "--nearpeak-update")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["nearpeak wrote no baseline*"])
    assert baseline_files(pytester) == []


def test_the_folder_of_baselines_is_the_users(inner: Run, pytester: pytest.Pytester):
    pytester.makeini("[pytest]\nnearpeak_baselines = speed/figures\n")
    inner(BASELINE, BODY, "--nearpeak-update").assert_outcomes(passed=1)
    assert baseline_files(pytester) == ["speed/figures/step.json"]


def test_parameters_have_a_baseline_each(inner: Run, pytester: pytest.Pytester):
    values = '@pytest.mark.parametrize("size", [1, 2, "a/b"])'
    inner(BASELINE, BODY, "--nearpeak-update", decorator=values, arguments="size, ").assert_outcomes(passed=3)
    names = [Path(name).name for name in baseline_files(pytester)]
    assert names[:2] == ["step_1.json", "step_2.json"]
    assert names[2].startswith("step_a-b_") and len(names) == 3


def test_one_name_holds_one_figure(inner: Run):
    result = inner(BASELINE, "nearpeak_profile(int)\nnearpeak_profile(int)", "--nearpeak-update")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*The baseline 'step' holds one figure*"])


def test_a_damaged_baseline_fails(inner: Run, pytester: pytest.Pytester):
    inner(BASELINE, BODY, "--nearpeak-update")
    (pytester.path / FILE).write_text("{")
    result = inner(BASELINE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*{FILE} cannot be used*Delete it*"])


def test_figures_are_in_the_xml_for_ci(inner: Run, pytester: pytest.Pytester):
    inner('step_time="12 s"', BODY, "--junit-xml=report.xml")
    assert "train.py: 10.00" in (pytester.path / "report.xml").read_text()


def test_a_file_of_a_baseline_is_readable_json(inner: Run, pytester: pytest.Pytester):
    inner(BASELINE, BODY, "--nearpeak-update")
    (entry,) = json.loads((pytester.path / FILE).read_text())["baselines"]
    assert entry["key"] == {"device": "Toy 1", "driver": "1.0", "torch": "2.13.0"}
    assert (entry["seconds"], entry["kind"]) == (10.0, "step")


def test_the_entry_point_names_the_plugin():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    entry = tomllib.loads(text)["project"]["entry-points"]["pytest11"]["nearpeak"]
    point = metadata.EntryPoint(name="nearpeak", value=entry, group="pytest11")
    assert point.load() is nearpeak.pytest_plugin
