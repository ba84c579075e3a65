"""The benchmark of generation with and without a cache, at tiny sizes."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

from nearpeak.kernels._runtime.policy import using

generation: Any = importlib.import_module("benchmarks.models.generation")
SIZES = "--vocabulary 50 --width 32 --layers 2 --heads 4 --key-heads 2 --batch 2 --new 3 --lengths 8 16 24"


@pytest.mark.slow
def test_with_a_cache_flops_grow_by_the_attention_to_one_token(tmp_path, monkeypatch):
    monkeypatch.setattr(generation, "REPEATS", 1)
    path = tmp_path / "generation.json"
    with using("off"):  # where kernels are interpreted they take a while, and have tests of their own
        result = generation.main([*SIZES.split(), "--device", "cpu", "--json", str(path)])
    assert result["same_tokens"]
    rows = result["rows"]
    cached, whole = ([row[name] for row in rows] for name in ("flops_with_cache", "flops_without"))
    assert cached[2] - cached[1] == pytest.approx(cached[1] - cached[0], rel=0.05)  # linear in the length
    assert cached[2] < 1.5 * cached[0]
    assert whole[2] - whole[1] > 1.02 * (whole[1] - whole[0])  # more than linear
    assert whole[2] > 2.5 * whole[0]
    assert all(row["seconds_with_cache"] > 0.0 and row["seconds_without"] > 0.0 for row in rows)
    assert json.loads(path.read_text())["rows"] == rows
