"""Layouts: two meshes over the same GPUs, and errors that name the field and the nearest legal value."""

from __future__ import annotations

from typing import Any

import pytest

from nearpeak.errors import UsageError
from nearpeak.plan.models.catalogue import get_model
from nearpeak.plan.training.layout import Layout, nearest_divisor


def test_two_meshes_share_the_same_gpus() -> None:
    layout = Layout(gpus=1024, tp=2, pp=16, ep=64, global_batch=8192)
    assert (layout.dp, layout.edp, layout.microbatches) == (32, 1, 256)
    layout = Layout(gpus=128, tp=4, ep=8, etp=4, global_batch=256)
    assert (layout.dp, layout.edp) == (32, 4)


def test_presets_of_recomputation_are_modules() -> None:
    assert Layout(gpus=1, global_batch=1, recompute="full").recompute == ("layer",)  # type: ignore[arg-type]
    assert Layout(gpus=1, global_batch=1, recompute=("norm", "selective")).recompute == ("norm", "attention")
    assert Layout(gpus=1, global_batch=1, recompute=("full",)).recomputes("feed")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"gpus": 0}, ["gpus=0", "gpus=1"]),
        ({"tp": 3}, ["gpus=64", "no multiple", "gpus=63"]),
        ({"tp": 128}, ["larger than gpus=64", "gpus=128"]),
        ({"pp": 8, "ep": 16}, ["ep x etp x pp = 128", "gpus=64"]),
        ({"virtual": 2}, ["virtual=2", "virtual=1"]),
        ({"global_batch": 100}, ["global_batch=100", "global_batch=128"]),
        ({"pp": 4, "virtual": 2, "global_batch": 96}, ["6 microbatches", "global_batch=128"]),
        ({"schedule": "1f2b"}, ["schedule", "1f1b"]),
        ({"sharding": "zero4"}, ["sharding", "zero3"]),
        ({"recompute": ("atention",)}, ["recompute", "attention"]),
        ({"sharding": "hsdp", "shard_group": 48}, ["shard_group", "dp"]),
        ({"sharding": "zero3", "shard_group": 8}, ["shard_group=8", "hsdp"]),
        ({"shard_group": 48}, ["shard_group", "dp"]),
        ({"pp": 2, "split": (10, 11, 11)}, ["split", "pp=2", "split=()"]),
    ],
)
def test_an_illegal_layout_names_the_field_and_the_nearest_value(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        Layout(**{"gpus": 64, "global_batch": 128, **fields})
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("name", "fields", "sequence", "words"),
    [
        ("qwen2.5-7b", {"tp": 8}, 4096, ["tp=8", "28 heads", "tp=7"]),
        ("llama-3-8b", {"ep": 8}, 4096, ["ep=8", "no experts", "ep=1"]),
        ("qwen3-30b-a3b", {"ep": 64, "etp": 1}, 4096, []),
        ("mixtral-8x7b", {"ep": 16}, 4096, ["ep=16", "8 experts", "ep=8"]),
        ("llama-3-8b", {"pp": 64}, 4096, ["pp=64", "32 layers", "pp=32"]),
        ("llama-3-8b", {"pp": 2, "split": (20, 13)}, 4096, ["33 layers", "has 32", "split=(20, 12)"]),
        ("llama-3-8b", {"pp": 8, "virtual": 8}, 4096, ["virtual=8", "virtual=4"]),
        ("llama-3-8b", {"cp": 8}, 1000, ["cp=8", "sequence=1000", "sequence=992"]),
        ("llama-3-8b", {"tp": 8}, 1001, ["tp=8", "sequence=1000"]),
    ],
)
def test_a_layout_that_cannot_run_a_model_says_why(
    name: str, fields: dict[str, Any], sequence: int, words: list[str]
) -> None:
    layout = Layout(**{"gpus": 64, "global_batch": 512, **fields})
    if not words:
        layout.check(get_model(name), sequence)
        return
    with pytest.raises(UsageError) as caught:
        layout.check(get_model(name), sequence)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_nearest_divisor_is_the_smaller_of_two() -> None:
    assert nearest_divisor(8, 28) == 7
    assert nearest_divisor(3, 8) == 2


def test_a_negative_group_and_nodes_without_experts_are_errors() -> None:
    with pytest.raises(UsageError, match=r"shard_group=-1 must be 0 or more. Nearest: shard_group=0"):
        Layout(gpus=8, global_batch=8, shard_group=-1)
    with pytest.raises(UsageError, match=r"routed_nodes=4: llama-3-8b has no experts. Nearest: routed_nodes=0"):
        Layout(gpus=8, global_batch=8, routed_nodes=4).check(get_model("llama-3-8b"), 4096)


def test_dualpipe_needs_two_microbatches_for_each_stage() -> None:
    with pytest.raises(UsageError, match=r"gives 7 for pp=4.*global_batch=8"):
        Layout(gpus=4, pp=4, global_batch=7, schedule="dualpipe")
    assert Layout(gpus=4, pp=4, global_batch=8, schedule="dualpipe").microbatches == 8
