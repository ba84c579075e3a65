"""The planner against published training runs, each source predicted from the others; errors are pinned."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import fmean

import pytest

from nearpeak.errors import UsageError
from nearpeak.plan.validation.training import (
    TrainingValidation,
    dense_or_moe,
    read_training,
    validate_pairs,
    validate_training,
)

DATA = Path(__file__).parents[3] / "benchmarks" / "measurements"
RUNS = DATA / "measured_training.csv"


@pytest.fixture(scope="module")
def validation() -> TrainingValidation:
    return validate_training(RUNS)


def test_most_rows_can_be_planned_and_the_rest_says_why(validation: TrainingValidation) -> None:
    assert len(validation.rows) == 724
    assert len(validation.skipped) == 14 and all(row.reason for row in validation.skipped)


def test_step_times_of_sources_that_were_left_out(validation: TrainingValidation) -> None:
    assert validation.left_out
    errors: dict[tuple[str, str], list[float]] = {}
    for row in validation.rows:
        for source in ("all", row.run.source):
            errors.setdefault((dense_or_moe(row.run), source), []).append(abs(row.error))
    assert fmean(errors["dense", "all"]) < 0.08
    assert fmean(errors["moe", "all"]) < 0.16
    assert max(fmean(values) for (kind, _), values in errors.items() if kind == "dense") < 0.13


def test_peaks_of_memory(validation: TrainingValidation) -> None:
    errors = [row.error for row in validation.memory]
    assert len(errors) == 39
    assert sum(map(abs, errors)) / len(errors) < 0.07
    assert min(errors) > -0.135
    assert sum(error < -0.04 for error in errors) <= 5


def test_a_safe_amount_of_memory_covers_published_peaks(validation: TrainingValidation) -> None:
    from nearpeak.plan.training.memory import memory_by_stage

    short = [
        row.run.id
        for row in validation.memory
        if row.run.memory is not None and memory_by_stage(row.run.job)[0].safe < 0.97 * row.run.memory
    ]
    assert short == ["mbridge-ab-028"]  # CUDA graphs of its router have buffers of their own


def test_pairs_of_layouts_are_ordered_right() -> None:
    pairs = validate_pairs(DATA / "layout_pairs.csv", RUNS)
    assert len(pairs) == 15
    assert sum(pair.right for pair in pairs) >= 12


def test_step_times_come_from_printed_times_rates_or_the_source_s_own_formula() -> None:
    runs = {run.id: run for run in read_training(RUNS)[0]}
    assert runs["dgxc-001"].seconds == 12.78
    # 137 TFLOP/s, 512 sequences of 2048 tokens: 96 B s l h^2 (1 + s / 6h + V / 16lh)
    assert runs["sc21-t1-001"].seconds == pytest.approx(3.53, rel=0.01)
    assert runs["nanotron-001"].job.model.parameters == pytest.approx(1.34e9, rel=0.005)
    assert runs["nanotron-012"].job.model.parameters == pytest.approx(80.0e9, rel=0.002)


def test_a_file_without_the_columns_is_an_error(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.csv"
    with wrong.open("w", newline="") as file:
        csv.writer(file).writerows([["id", "model"], ["a", "b"]])
    with pytest.raises(UsageError, match="gbs_seqs"):
        validate_training(wrong)
    with pytest.raises(UsageError, match="no such file"):
        validate_training(tmp_path / "missing.csv")
