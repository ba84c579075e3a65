"""The benchmark of attention's errors, at tiny sizes."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
import torch

from nearpeak.kernels._runtime.policy import using

pytest.importorskip("triton")


jobs: Any = importlib.import_module("benchmarks.kernels.jobs")
numerics: Any = importlib.import_module("benchmarks.numerics.attention")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_a_thousand_calls_are_of_two_dozen_kinds():
    found = numerics.random_calls(1000, 400)
    assert len({call.kind for call in found}) == len(numerics.KINDS) == 24
    assert len(set(found)) == 1000
    assert found == numerics.random_calls(1000, 400)
    assert len({kind.described() for kind in numerics.KINDS}) == 24
    for call in found:
        assert call.batch * call.key_heads * call.group * call.queries * call.keys <= numerics.MOST_PAIRS
        assert bool(call.lengths) == call.kind.packed
    for name in ("bias", "slopes", "sinks", "dropout", "packed", "softcap", "window"):
        assert any(getattr(kind, name) for kind in numerics.KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("place", [5, 9, 12, 13, 15, 17, 23])
def test_a_call_is_within_the_rule(place):
    """Sinks and a window, packed with slopes, masks, biases of two shapes, dropout, float32."""
    call = numerics.drawn(numerics.KINDS[place], place, 12)
    with using("require"):
        row = numerics.judged(call, numerics.compared(call, DEVICE))
    assert row["within"], row
    assert ("bias" in row["found"]) == (call.kind.bias in ("full", "keys", "heads"))
    assert ("sinks" in row["found"]) == call.kind.sinks


def test_what_is_kept_of_calls(tmp_path, capsys):
    call = numerics.drawn(numerics.KINDS[0], 1, 12)
    good = {"result": {"error": 1.0, "torch": 1.0, "more": 0.0}, "lse": {"error": 0.0, "torch": 0.0, "more": 0.0}}
    lucky = {"result": {"error": 0.1, "torch": 0.0, "more": 0.2}}
    bad = {"result": {"error": 5.0, "torch": 1.0, "more": 0.0}}
    rows = [numerics.judged(call, found) for found in (good, lucky, bad)]
    assert [(row["within"], row["strictly"]) for row in rows] == [(True, True), (True, False), (False, False)]
    found = numerics.summary(rows)
    assert (found["calls"], found["within"], found["within_without_units"]) == (3, 2, 1)
    assert found["tensors"]["result"]["largest"] == found["tensors"]["result"]["most_of_rule"] == 5.0
    assert len(found["failures"]) == 1
    file = tmp_path / "numerics.json"
    file.write_text(json.dumps({**found, "machine": "GPU", "torch": "2", "date": "2026-01-01", "seconds": 1.0}))
    assert numerics.main(["--show", str(file)]) == 1
    assert "2 of 3 calls are within the rule, 1 of these" in capsys.readouterr().out


@pytest.mark.slow
def test_every_kind_is_compiled_before(tmp_path):
    found = numerics.random_calls(2, 4)
    with using("require"):
        jobs.work_through(jobs.Jobs(tmp_path), numerics.compile_jobs(found, DEVICE), lambda: None)
    assert {file.name: file.read_text() for file in tmp_path.glob("*.all")} == {
        "kind-0.all": jobs.DONE,
        "kind-1.all": jobs.DONE,
    }
