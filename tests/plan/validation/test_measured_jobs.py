"""Rows of tables as jobs: what a table leaves out is filled in by the same rules for every source."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from nearpeak.plan.validation.training import MeasuredTraining, read_training

ROW = {
    "id": "a-1",
    "source": "somewhere",
    "model": "llama3-8b",
    "gpu": "H100-80GB-SXM",
    "gpus": "64",
    "seq_len": "8192",
    "gbs_seqs": "128",
    "tokens_per_s_per_gpu": "5000",
    "precision": "bf16",
    "framework": "Megatron-Bridge 26.04.01",
}


def read(tmp_path: Path, **changes: str) -> MeasuredTraining:
    row = ROW | changes
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(row))
        writer.writeheader()
        writer.writerow(row)
    found, skipped = read_training(path)
    assert not skipped, skipped
    return found[0]


def test_a_plain_row(tmp_path: Path) -> None:
    run = read(tmp_path)
    assert run.seconds == pytest.approx(128 * 8192 / (5000 * 64))
    assert (run.kind, run.job.software, run.job.layout.sharding) == ("dense", "fused", "zero1")
    assert run.job.year == pytest.approx(2026 + 4 / 12)


def test_a_paper_dates_its_software(tmp_path: Path) -> None:
    run = read(tmp_path, source="arXiv 2205.05198 Table 5", framework="Megatron-LM", tp="8", recompute="selective")
    assert run.job.year == pytest.approx(2022 + 5 / 12)
    assert run.job.software == "unfused" and run.job.layout.recompute == ("attention",)
    assert run.job.layout.sequence_parallel and not run.job.layout.overlap_tensor
    full = read(tmp_path, source="arXiv 2104.04473", framework="Megatron-LM", tp="8")
    assert full.job.layout.recompute == ("layer",) and not full.job.layout.sequence_parallel


def test_a_limited_gpu_keeps_its_limits(tmp_path: Path) -> None:
    machine = read(tmp_path, notes="H100 with 500 W and 2.4 TB/s").cluster.machine
    assert machine.power_watts == 500 and machine.theoretical is not None and machine.theoretical.bandwidth == 2.4e12


def test_native_software_is_eager_unless_compiled(tmp_path: Path) -> None:
    assert read(tmp_path, framework="torchtitan", sharding="FSDP2").job.software == "eager"
    compiled = read(tmp_path, framework="torchtitan", sharding="FSDP2", extras="torch.compile").job
    assert compiled.software == "fused" and compiled.layout.sharding == "zero3"


def test_sharding_inside_groups(tmp_path: Path) -> None:
    layout = read(tmp_path, sharding="ZeRO-1 over 8 ranks").job.layout
    assert (layout.sharding, layout.shard_group) == ("zero1", 8)
    layout = read(tmp_path, sharding="FSDP=8 + DP=8").job.layout
    assert (layout.sharding, layout.shard_group) == ("hsdp", 8)


def test_a_model_that_is_not_known_comes_from_its_dimensions(tmp_path: Path) -> None:
    shape = {"hidden": "4096", "layers": "32", "heads": "32", "kv_heads": "8", "ffn": "14336", "vocab": "128256"}
    run = read(tmp_path, model="ours-8b", params_b="8.03", **shape)
    assert (
        run.job.model.gated and not run.job.model.tied and run.job.model.parameters == pytest.approx(8.03e9, rel=0.01)
    )
    experts = {"experts": "8", "topk": "2", "moe_ffn": "14336", "ep": "8"}
    mixture = read(tmp_path, model="ours-8x7b", params_b="47", **shape, **experts)
    assert mixture.job.model.is_moe and mixture.job.layout.ep == 8


def test_a_gpu_that_is_not_known_is_skipped_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(ROW))
        writer.writeheader()
        writer.writerow(ROW | {"gpu": "X9000"})
    found, skipped = read_training(path)
    assert not found and "X9000" in skipped[0].reason


def test_nanotron_balances_stages_with_the_output_layer_and_prints_gib(tmp_path: Path) -> None:
    row = {"framework": "nanotron v0.5", "model": "llama-like-80.0b", "params_b": "80.0", "gbs_seqs": "256"}
    run = read(tmp_path, **row, gpus="256", tp="4", pp="16", sharding="ZeRO-1", peak_mem_gib="64.21", mem_kind="GB")
    split = run.job.layout.split
    assert split[0] == 6 and split[-1] == 3 and sum(split) == 80
    assert run.memory == 64.21 * 2**30


def test_weights_that_cannot_fit_are_sharded(tmp_path: Path) -> None:
    assert read(tmp_path, model="llama3-70b", gpu="GB300", gbs_seqs="256", mbs_seqs="2").job.layout.sharding == "zero3"


def test_fine_tuning_keeps_moments_in_32_bits(tmp_path: Path) -> None:
    row = {"framework": "Megatron-Bridge (2026)", "precision": "fp8 current scaling", "model": "llama3-70b"}
    assert read(tmp_path, **row, tp="8").job.precision.moments == 4
    assert read(tmp_path, **row | {"model": "llama3-70b+sft"}, tp="8").job.precision.moments == 8
