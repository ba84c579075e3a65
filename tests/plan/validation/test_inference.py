"""Serving against published runs, leaving out whole sources: the errors that were achieved."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from nearpeak.errors import UsageError
from nearpeak.plan.validation.errors import ErrorGroup, SkippedRow, summarize_errors
from nearpeak.plan.validation.inference import (
    MeasuredInference,
    PredictedInference,
    predict_inference,
    read_inference,
)
from nearpeak.plan.validation.names import gpu_id, model_id

FILE = Path(__file__).parents[3] / "benchmarks/measurements/measured_inference.csv"


@cache
def rows() -> tuple[tuple[MeasuredInference, ...], tuple[SkippedRow, ...]]:
    return read_inference(FILE)


@cache
def predictions(leave_out: bool) -> tuple[PredictedInference, ...]:
    found, skipped = predict_inference(rows()[0], leave_out=leave_out)
    assert not skipped
    return found


def errors(leave_out: bool, source: str | None = None) -> dict[str, ErrorGroup]:
    groups: dict[str, list[float]] = {}
    for item in predictions(leave_out):
        if source in (None, item.measured.source):
            groups.setdefault(item.quantity, []).append(item.error)
    return {name: summarize_errors(name, values) for name, values in groups.items()}


def test_rows_are_read_or_skipped_with_a_reason() -> None:
    found, skipped = rows()
    assert (len(found), len(skipped)) == (820, 15)
    impossible = [item.id for item in skipped if "contradict each other, at" in item.reason]
    assert impossible == ["aic-silicon-0750", "aic-silicon-0751"]  # tokens came faster than memory reads the weights
    reasons = {item.reason.split(",")[0] for item in skipped if item.id not in impossible}
    assert reasons == {
        "speculative decoding",
        "the model 'DeepSeek-V4-Flash-0731' is not in the catalogue",
        "disaggregated",
    }
    by_id = {row.id: row for row in found}
    assert by_id["aic-silicon-0623"].deployment.layout.dp == 8  # 448 requests, 56 per group
    assert by_id["aic-silicon-0623"].concurrency == 448
    assert by_id["gptfast-0014"].deployment.layout.tp == 8


def test_leaving_out_whole_sources() -> None:
    found = errors(leave_out=True)
    assert errors(leave_out=True, source="gptfast")["decode"].mean_absolute < 0.12
    assert found["tpot"].median_absolute < 0.18
    assert found["ttft"].median_absolute < 0.30
    assert found["throughput"].median_absolute < 0.18


def test_errors_that_were_achieved() -> None:
    found = errors(leave_out=False)
    assert found["decode"].mean_absolute < 0.075
    assert found["tpot"].median_absolute < 0.095
    assert found["ttft"].median_absolute < 0.25
    assert found["throughput"].median_absolute < 0.11


def test_left_out_sources_are_predicted_by_other_constants() -> None:
    seen = {item.measured.id: item.predicted for item in predictions(False) if item.quantity == "decode"}
    unseen = {item.measured.id: item.predicted for item in predictions(True) if item.quantity == "decode"}
    assert seen.keys() == unseen.keys()
    assert all(seen[key] != unseen[key] for key in seen)


def test_predictions_have_a_reason() -> None:
    assert all("limited by" in item.reason for item in predictions(False))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvidia/DeepSeek-V3.1-NVFP4", "deepseek-v3"),
        ("llama3.3-70b", "llama-3-70b"),
        ("Qwen/Qwen2.5-72B-Instruct", "qwen2.5-72b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("nothing-7b", None),
    ],
)
def test_models_as_tables_name_them(name: str, expected: str | None) -> None:
    assert model_id(name) == expected


def test_gpus_as_tables_name_them() -> None:
    names = ("H200-141GB-SXM (A3 Ultra)", "B200-180GB", "MI300X", "L40S", "H20", "TPU v5e")
    assert [gpu_id(name) for name in names] == ["h200-sxm", "b200", "mi300x", "l40s", "h20", None]


def test_a_file_without_a_column(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("id,model\n1,llama2-7b\n")
    with pytest.raises(UsageError, match="the column 'gpu' is missing"):
        read_inference(path)
    with pytest.raises(UsageError, match="no such file"):
        read_inference(tmp_path / "none.csv")
