"""The benchmark of the errors of products, experts and linear attention, at tiny sizes."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
import torch

from nearpeak.kernels._runtime.policy import using

pytest.importorskip("triton")


jobs: Any = importlib.import_module("benchmarks.kernels.jobs")
numerics: Any = importlib.import_module("benchmarks.numerics.gemm")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # of bfloat16, on some CPUs


def test_five_hundred_calls_are_of_many_kinds():
    found = numerics.random_calls(500, 1280)
    assert found == numerics.random_calls(500, 1280)
    assert len(set(found)) == 500
    assert (
        len({call.kind for call in found}) == len({kind.described() for kind in numerics.KINDS}) == len(numerics.KINDS)
    )
    for name in ("activation", "gated", "bias", "residual", "across", "recompute", "scales", "fast", "causal"):
        assert any(getattr(kind, name) for kind in numerics.KINDS)
    assert {kind.operation for kind in numerics.KINDS} == {"product", "grouped", "experts", "linear"}
    counts = [call.counts for call in found if call.counts]
    assert any(0 in one for one in counts)
    assert any(max(one) > 5 * (min(one) + 1) for one in counts)
    # kernels of Hopper multiply what has tiles for a quarter of 132 processors
    assert sum(call.kind.aligned and call.rows >= 640 and call.columns >= 640 for call in found) > 50
    assert any(call.rows % 2 for call in found if call.kind.aligned)
    assert len({call.kind.operation for call in found[:20]}) == 4
    for call in found:
        if call.kind.operation == "grouped":
            assert sum(call.counts) == call.rows


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 7, 10, 12, 19, 25, 26, 28, 31, 32, 33])
def test_a_call_is_within_the_rule(place):
    """Of all operations, with biases, gates, factors that lie across, 8 bits, and heads that share keys."""
    call = numerics.drawn(numerics.KINDS[place], place, 24)
    with using("require"):
        row = numerics.judged(call, numerics.compared(call, DEVICE))
    assert row["within"], row
    assert ("bias" in row["found"]) == bool(call.kind.bias)
    assert (len(row["found"]) > 1) == (not call.kind.scales)


def test_a_wrong_gradient_is_seen(monkeypatch):
    call = numerics.drawn(numerics.KINDS[0], 3, 24)
    with using("require"):
        right = numerics.compared(call, DEVICE)
        passes = numerics.passes

        def wrong(prepared: Any, function: Any, tensors: Any, above: Any) -> Any:
            found, kept = passes(prepared, function, tensors, above)
            if above is None:
                found["weight"] = found["weight"] * 1.1
            return found, kept

        monkeypatch.setattr(numerics, "passes", wrong)
        row = numerics.judged(call, numerics.compared(call, DEVICE))
    assert not row["within"]
    assert row["found"]["weight"]["error"] > 2 * right["weight"]["error"]


def test_runs_that_differ_are_seen(monkeypatch):
    call = numerics.drawn(numerics.KINDS[0], 3, 8)
    assert numerics.repeated([call, call], DEVICE, 3) == {"calls": 1, "runs": 3, "different": {}}
    passes, number = numerics.passes, iter(range(100))

    def unlike(*given: Any) -> Any:
        found, above = passes(*given)
        found["x"] = found["x"] + next(number)
        return found, above

    monkeypatch.setattr(numerics, "passes", unlike)
    found = numerics.repeated([call], DEVICE, 3)
    assert found["different"] == {f"{call.kind.described()}, seed 3": 2}


def test_what_is_written_is_shown(tmp_path, capsys):
    call = numerics.drawn(numerics.KINDS[0], 1, 12)
    good = numerics.judged(call, {"result": {"error": 1.0, "torch": 1.0, "more": 0.0}})
    bad = numerics.judged(call, {"result": {"error": 1.0, "torch": 0.1, "more": 0.0}})
    head = {"machine": "GPU", "torch": "2", "date": "2026-01-01", "seconds": 1.0}
    runs: dict[str, Any] = {"calls": 40, "runs": 100, "different": {}}
    file = tmp_path / "numerics.json"
    for rows, different, code in (([good], {}, 0), ([good, bad], {}, 1), ([good], {"linear": 3}, 1)):
        found = numerics.summary(rows, numerics.TENSORS)
        file.write_text(json.dumps({**head, **found, "repeated": {**runs, "different": different}}))
        assert numerics.main(["--show", str(file)]) == code
        text = capsys.readouterr().out
        assert ("all were the same to the last bit" in text) == (not different)
    assert "- linear: 3 runs differ" in text


def test_every_kind_is_compiled_before(tmp_path):
    found = numerics.random_calls(2, 4)
    with using("require"):
        jobs.work_through(jobs.Jobs(tmp_path), numerics.compile_jobs(found, DEVICE), lambda: None)
    assert {file.name: file.read_text() for file in tmp_path.glob("*.all")} == {
        "kind-0.all": jobs.DONE,
        "kind-1.all": jobs.DONE,
    }
