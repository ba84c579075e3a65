"""Sizes in a config that no model has: one error that names the file and the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nearpeak.errors import UsageError
from nearpeak.plan.models.config import from_config

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}


def write(tmp_path: Path, **fields: Any) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY, **fields}).replace('"@1e999"', "1e999"))
    return path


@pytest.mark.parametrize("field", [name for name in TINY if name != "model_type"])
@pytest.mark.parametrize(
    "value", [-1, -0.5, 1.5, 1e300, 2**70, 10**400, "@1e999", "64", "", True, [], {}, [64], "\x1b[31m", "x" * 10_000]
)
def test_a_size_that_no_model_has_is_named(tmp_path: Path, field: str, value: Any) -> None:
    path = write(tmp_path, **{field: value})
    with pytest.raises(UsageError, match=f"`{field}` must be") as caught:
        from_config(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_of_json_is_refused(tmp_path: Path, value: float) -> None:
    with pytest.raises(UsageError, match="is not JSON"):
        from_config(write(tmp_path, hidden_size=value))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400])
def test_a_dictionary_is_checked_too(value: float) -> None:
    with pytest.raises(UsageError, match="`hidden_size` must be"):
        from_config({**TINY, "hidden_size": value})


@pytest.mark.parametrize("value", [0, 10_001, 10**12])
def test_layers_are_counted_before_they_are_made(tmp_path: Path, value: int) -> None:
    with pytest.raises(UsageError, match="`num_hidden_layers` must be from 1 to 10,000"):
        from_config(write(tmp_path, num_hidden_layers=value))


@pytest.mark.parametrize(
    ("kind", "field"), [("qwen3_moe", "decoder_sparse_step"), ("gemma3", "sliding_window_pattern")]
)
@pytest.mark.parametrize("value", [0, 10**9])
def test_a_pattern_repeats_after_some_layers(tmp_path: Path, kind: str, field: str, value: int) -> None:
    more = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    with pytest.raises(UsageError, match=f"`{field}` must be from 1 to"):
        from_config(write(tmp_path, model_type=kind, **more, **{field: value}))


def test_a_large_prime_takes_no_time(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nearest 1"):
        from_config(write(tmp_path, hidden_size=2**31 - 1, num_attention_heads=2**30))


@pytest.mark.parametrize("content", ["[]", "3", '"a"', "null", "{", ""])
def test_what_is_no_object_is_no_config(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match=r"config\.json: it is "):
        from_config(tmp_path)
