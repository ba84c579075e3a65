import csv
from pathlib import Path

import pytest

from nearpeak.errors import UsageError
from nearpeak.plan.validation.errors import ComparedRow, errors_by_key, gpu_range, summarize_errors
from nearpeak.plan.validation.validate import kind_of_file, validate

FOLDER = Path(__file__).parents[3] / "benchmarks" / "measurements"
KINDS = {
    "measured_training.csv": "training",
    "measured_inference.csv": "inference",
    "measured_collectives.csv": "collectives",
    "layout_pairs.csv": "pairs",
}


def row(measured, predicted, what="step"):
    return ComparedRow(
        id="1", what=what, unit="s", source="one", about="", measured=measured, predicted=predicted, why=""
    )


@pytest.mark.parametrize("name", KINDS)
def test_columns_say_what_a_file_holds(name):
    assert kind_of_file(FOLDER / name) == KINDS[name]


def test_a_file_of_something_else_names_what_is_missing(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("gpu,gpus,seq_len,color\n")
    with pytest.raises(UsageError, match="Nearest: training, which needs the columns gbs_seqs"):
        kind_of_file(path)
    with pytest.raises(UsageError, match="no such file"):
        kind_of_file(tmp_path / "missing.csv")


def test_errors_of_a_group():
    found = summarize_errors("all", [row(1.0, 1.1).error, row(2.0, 1.0).error, row(4.0, 4.0).error])
    assert (found.rows, found.worst) == (3, -0.5)
    assert found.mean_absolute == pytest.approx(0.2)
    assert found.median_absolute == pytest.approx(0.1)
    assert found.mean == pytest.approx(-0.4 / 3)


def test_quantities_are_apart_where_there_are_several():
    names = {group.name for group in errors_by_key([row(1, 1), row(1, 2, "memory")], ["a", "a"])}
    assert names == {"a: step", "a: memory"}
    assert [group.name for group in errors_by_key([row(1, 1), row(1, 2)], ["a", "a"])] == ["a"]


def test_scales():
    assert [gpu_range(number) for number in (1, 8, 64, 65, 4096)] == [
        "1 GPU", "2 to 8 GPUs", "9 to 64 GPUs", "65 to 256 GPUs", "more than 1024 GPUs",
    ]  # fmt: skip


def test_training_runs_by_source_and_scale():
    found = validate(FOLDER / "measured_training.csv", worst=3)
    names = [group.name for group in found.whole]
    assert set(names) == {"dense: step", "moe: step", "all: memory"}
    assert sum(group.rows for group in found.by["source"]) == len(found.rows)
    assert len(found.worst) == 3 and all(item.why for item in found.worst)
    assert set(found.by) == {"source", "architecture", "GPU", "scale"}


def test_rows_of_a_gpu_that_is_not_known_are_left_out_alone(tmp_path):
    lines = (FOLDER / "measured_collectives.csv").read_text().splitlines()[:40]
    other = lines[1].replace("NVIDIA A100-SXM4-80GB", "Some GPU").replace("a100_sxm", "some_system")
    path = tmp_path / "collectives.csv"
    path.write_text("\n".join([*lines, other]) + "\n")
    found = validate(path)
    assert len(found.rows) == 39
    assert [name for name, _ in found.skipped] == ["line 41"]


def test_a_file_without_a_row_that_can_be_planned_is_an_error(tmp_path):
    lines = (FOLDER / "measured_collectives.csv").read_text().splitlines()[:2]
    path = tmp_path / "collectives.csv"
    path.write_text("\n".join([lines[0], lines[1].replace("NVIDIA A100-SXM4-80GB", "Some GPU")]) + "\n")
    with pytest.raises(UsageError, match="no row that can be planned"):
        validate(path)


def test_pairs_need_the_files_that_they_name(tmp_path):
    path = tmp_path / "layout_pairs.csv"
    path.write_text((FOLDER / "layout_pairs.csv").read_text())
    with pytest.raises(UsageError, match="--runs"):
        validate(path)
    found = validate(path, runs=FOLDER)
    assert found.right is not None and found.right > 0.85
    assert {row.source for row in found.rows} == {"training", "inference"}
    assert all((row.measured > 1) != (row.predicted > 1) for row in found.worst)


@pytest.mark.parametrize(
    ("name", "column", "error"),
    [
        ("measured_collectives.csv", "time_us", "must be from 1e-6"),
        ("measured_training.csv", "step_time_s", "nearly 0"),
        ("measured_inference.csv", "tpot_ms", "nearly 0"),
    ],
)
def test_a_time_that_is_nothing_in_seconds_is_no_time(tmp_path, name, column, error):
    with (FOLDER / name).open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row[column]][:3]
    rows[1][column] = "1e-320"
    path = tmp_path / name
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    try:
        skipped = " ".join(f"{line}: {why}" for line, why in validate(path).skipped)
    except UsageError as problem:
        skipped = str(problem)
    assert error in skipped
