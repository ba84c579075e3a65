"""Sweeps and saved results. The logic of a sweep is tested with a made-up `bench`; one test measures for real."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nearpeak.errors import CaseError, UntrustworthyMeasurement, UsageError
from nearpeak.measure import results
from nearpeak.measure import sweep as module
from nearpeak.measure.bench import bench
from nearpeak.measure.case import Case, CaseBuilder
from nearpeak.measure.compare import compare
from nearpeak.measure.sweep import sweep
from nearpeak.measure.timing import Block, Comparison, Environment, Sweep, Timing
from nearpeak.ops.work import Work

ENVIRONMENT = Environment(
    device="Made-up", driver="1", torch="2", python="3.11", nearpeak="0.1.0", date="2026-01-02", threads=2
)
QUICK = {"max_seconds": 0.03, "warmup_seconds": 0.01, "cache": "hot"}


def made_up(seconds: float = 1e-3, **parameters: str) -> Timing:
    return Timing(
        name="f",
        seconds=seconds,
        low=0.99 * seconds,
        high=1.01 * seconds,
        confidence=0.95,
        kind="cpu",
        method="m",
        cache="cold",
        regime="sustained",
        blocks=(Block(seconds=seconds, readings=(seconds, seconds)),),
        flags=(),
        environment=ENVIRONMENT,
        parameters=parameters,
        work=Work(bytes_read=1.0),
    )


@pytest.fixture
def fake_bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Case], object]], None]:
    """Replaces `bench` by a function that calls what it is given and returns a made-up timing."""

    def install(action: Callable[[Case], object] = lambda case: None) -> None:
        def bench(case: Case, **options: object) -> Timing:
            found = action(case)
            return found if isinstance(found, Timing) else made_up(**case.parameters)

        monkeypatch.setattr(module, "bench", bench)

    return install


def build(rows: int, columns: int = 2) -> tuple[Callable[..., object], torch.Tensor]:
    return torch.neg, torch.ones(rows, columns)


@pytest.mark.slow
def test_a_real_sweep_and_its_file(tmp_path: Path):
    result = sweep(build, {"rows": [1, 64], "columns": [8]}, **QUICK)
    assert result.name == "build"
    assert result.parameters == {"rows": ("1", "64"), "columns": ("8",)}
    assert [timing.parameters for timing in result.timings] == [
        {"rows": "1", "columns": "8"},
        {"rows": "64", "columns": "8"},
    ]
    assert result.timings[1].inputs[0].shape == (64, 8)
    assert not result.failures
    assert not result.partial
    results.save(result, tmp_path / "sweep.json")
    assert results.load_result(tmp_path / "sweep.json") == result


@pytest.mark.slow
def test_the_grid_is_walked_in_order_with_the_last_parameter_fastest(fake_bench):
    fake_bench()
    result = sweep(build, {"rows": [3, 1], "columns": (2, 4)}, name="named")
    assert [tuple(timing.parameters.values()) for timing in result.timings] == [
        ("3", "2"),
        ("3", "4"),
        ("1", "2"),
        ("1", "4"),
    ]
    assert result.name == "named"


@pytest.mark.slow
def test_a_builder_of_a_file_and_any_callable(fake_bench, tmp_path: Path):
    fake_bench()
    builder = CaseBuilder(path=tmp_path / "cases.py", name="in_file", function=build)
    assert sweep(builder, {"rows": [1]}).name == "in_file"
    assert sweep(lambda **parameters: Case(print), {"rows": [1]}).timings[0].parameters == {"rows": "1"}
    assert sweep(lambda n: Case(print), {"n": [1, 2]}).timings[1].parameters == {"n": "2"}


@pytest.mark.slow
def test_a_point_that_fails_is_recorded_and_the_sweep_goes_on(fake_bench):
    def action(case: Case) -> None:
        rows = int(case.parameters["rows"])
        if rows == 2:
            raise CaseError("does\nnot work")
        if rows == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if rows == 4:
            raise MemoryError

    fake_bench(action)

    def picky(rows: int) -> tuple[Callable[..., object], int]:
        if rows == 5:
            raise ValueError("five")
        return abs, rows

    result = sweep(picky, {"rows": [1, 2, 3, 4, 5, 6]})
    assert [timing.parameters["rows"] for timing in result.timings] == ["1", "6"]
    assert list(result.failures) == ["rows=2", "rows=3", "rows=4", "rows=5"]
    assert result.failures["rows=2"] == "does not work"
    assert result.failures["rows=4"] == "MemoryError"
    assert "ValueError: five" in result.failures["rows=5"]
    assert not result.partial


def test_our_own_mistakes_and_strict_are_not_swallowed(fake_bench):
    def bug(case: Case) -> None:
        raise ZeroDivisionError

    fake_bench(bug)
    with pytest.raises(ZeroDivisionError):
        sweep(build, {"rows": [1]})

    def doubtful(case: Case) -> None:
        raise UntrustworthyMeasurement("grade F")

    fake_bench(doubtful)
    with pytest.raises(UntrustworthyMeasurement):
        sweep(build, {"rows": [1]}, strict=True)


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured(fake_bench):
    def action(case: Case) -> None:
        if case.parameters["rows"] == "3":
            raise KeyboardInterrupt

    fake_bench(action)
    result = sweep(build, {"rows": [1, 2, 3, 4]})
    assert len(result.timings) == 2
    assert result.partial


@pytest.mark.slow
def test_ctrl_c_inside_a_measurement_keeps_that_one_too(fake_bench):
    fake_bench(lambda case: dataclasses.replace(made_up(), partial=case.parameters["rows"] == "2"))
    result = sweep(build, {"rows": [1, 2, 3]})
    assert [timing.partial for timing in result.timings] == [False, True]
    assert result.partial


def test_ctrl_c_before_anything_was_measured_is_ctrl_c(fake_bench):
    def action(case: Case) -> None:
        raise KeyboardInterrupt

    fake_bench(action)
    with pytest.raises(KeyboardInterrupt):
        sweep(build, {"rows": [1]})


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_the_tensors_of_a_point_are_gone_before_the_next(fake_bench, fails):
    alive: list[weakref.ref[torch.Tensor]] = []

    def action(case: Case) -> None:
        assert all(reference() is None for reference in alive)
        alive.extend(weakref.ref(tensor) for tensor in case.tensors())
        if fails:
            raise CaseError("no")

    fake_bench(action)
    sweep(build, {"rows": [1, 2, 3]})
    assert len(alive) == 3
    assert all(reference() is None for reference in alive)


@pytest.mark.slow
def test_progress_counts_the_points(fake_bench):
    fake_bench()
    lines: list[str] = []
    points: list[tuple[int, int, str]] = []
    sweep(build, {"rows": [1, 2]}, progress=lines.append, point=lambda *told: points.append(told))
    assert lines == ["[1/2] rows=1", "[2/2] rows=2"]
    assert points == [(0, 2, "rows=1"), (1, 2, "rows=2"), (2, 2, "")]


@pytest.mark.parametrize(
    ("builder", "grid", "message"),
    [
        (build, {}, "at least one parameter"),
        (build, {"rows": []}, "at least one value"),
        (build, {"rows": "12"}, "'12'; give a list"),
        (build, {"rows": 12}, "12; give a list"),
        (build, {"row": [1]}, "no parameter 'row'. Did you mean 'rows'?"),
        (lambda: print, {"row": [1]}, "It takes none"),
        (3, {"rows": [1]}, "needs a function"),
    ],
)
def test_a_grid_that_cannot_be_walked(builder, grid, message):
    with pytest.raises(UsageError, match=message.replace("?", r"\?")):
        sweep(builder, grid)


def test_a_misspelt_option_is_one_error():
    with pytest.raises(UsageError, match="max_seconds"):
        sweep(build, {"rows": [1]}, max_second=1)


@pytest.mark.slow
def test_a_timing_and_a_comparison_come_back_from_their_files(tmp_path: Path):
    x = torch.rand(64)
    timing = bench(torch.neg, x, **QUICK)
    comparison = compare(torch.neg, torch.abs, x, **QUICK)
    for result in (timing, comparison):
        results.save(result, tmp_path / "result.json")
        assert results.load_result(tmp_path / "result.json") == result
    data = json.loads((tmp_path / "result.json").read_text())
    assert list(data)[:2] == ["nearpeak", "schema"]
    assert data["nearpeak"] == "comparison"


def test_loading_needs_no_torch(tmp_path: Path):
    results.save(made_up(), tmp_path / "t.json")
    code = (
        "import sys\n"
        "from nearpeak.measure.results import load_result\n"
        "from nearpeak.render.text import text\n"
        "from nearpeak.render.views.timing import document\n"
        "import nearpeak.render.views.sweep\n"
        "print(text(document(load_result(sys.argv[1]))))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "t.json")], check=True, capture_output=True)


def changed(**fields: object) -> str:
    return json.dumps({**results.as_json(made_up()), **fields})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "nested more than"),
        ("[]", 'no field "nearpeak"'),
        ('{"traceEvents": []}', 'no field "nearpeak"'),
        (changed(nearpeak="profile"), "'profile'"),
        (changed(nearpeak=["timing"]), "not a result"),
        (changed(nearpeak="sweep"), "damaged"),
        (changed(schema=99), "schema 99"),
        (changed(seconds="fast"), "seconds: expected a number"),
        (changed(seconds=2), "damaged"),
        (changed(kind="guess"), "'guess' is not one of"),
        (changed(extra=1), "known fields only"),
        (changed(high=1).replace('"high": 1', '"high": NaN'), "NaN is not JSON"),
        (changed(high=1).replace('"high": 1', '"high": 1e999'), "damaged"),
        (changed(inputs=[{"shape": [1]}]), "missing"),
    ],
)
def test_a_foreign_or_damaged_file_is_refused(content, message, tmp_path: Path):
    path = tmp_path / "result.json"
    path.write_text(content)
    with pytest.raises(UsageError) as error:
        results.load_result(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_a_file_that_cannot_be_read_or_written(tmp_path: Path):
    with pytest.raises(UsageError, match="no such file"):
        results.load_result(tmp_path / "missing.json")
    with pytest.raises(UsageError, match="cannot be written"):
        results.save(made_up(), tmp_path / "missing" / "t.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="no text in UTF-8"):
        results.load_result(tmp_path / "binary")


def grid(*timings: Timing) -> Sweep:
    return Sweep(name="f", parameters={}, timings=timings)


def test_against_a_saved_run_point_by_point():
    old = grid(made_up(1e-3, n="1"), made_up(1e-3, n="2"), made_up(1e-3, n="3"))
    new = grid(made_up(1.001e-3, n="1"), made_up(0.5e-3, n="2"), made_up(1e-3, n="4"))
    result = results.compare_to_baseline(new, old)
    assert [(row.point, row.state) for row in result.rows] == [("n=1", "overlap"), ("n=2", "apart")]
    assert result.rows[1].ratio == pytest.approx(0.5)
    assert (result.only_old, result.only_new) == (("n=3",), ("n=4",))
    assert result.environment == ()


def test_against_another_environment_or_another_kind_of_time():
    old = made_up(n="1")
    elsewhere = dataclasses.replace(ENVIRONMENT, device="Other", torch="3", date="later")
    new = dataclasses.replace(old, environment=elsewhere, cache="hot")
    result = results.compare_to_baseline(new, old)
    assert result.environment == ("device: Made-up then, Other now", "torch: 2 then, 3 now")
    assert result.rows[0].state == "not comparable"
    assert result.rows[0].reason == "cache cold then, hot now"
    assert result.rows[0].ratio is None


def test_a_comparison_is_no_baseline():
    comparison = Comparison(
        a=made_up(),
        b=made_up(),
        ratio=1.0,
        low=1.0,
        high=1.0,
        confidence=0.95,
        verdict="EQUIVALENT",
        margin=0.01,
        detectable=0.01,
        pairs=20,
    )
    with pytest.raises(UsageError, match="no baseline"):
        results.as_sweep(comparison)
