"""Rows of tables as jobs: what a table leaves out is filled in by the same rules for every source."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.models.catalogue import get_model
from nearpeak.plan.training.job import Job
from nearpeak.plan.training.layout import Layout, Sharding
from nearpeak.plan.training.time import training_time
from nearpeak.plan.validation.training import MeasuredTraining, planner_key, read_training

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


def test_a_local_batch_is_no_microbatch_of_a_pipeline(tmp_path: Path) -> None:
    layout = read(tmp_path, gpus="64", pp="8", tp="8", gbs_seqs="8", mbs_seqs="8").job.layout
    assert (layout.microbatch, layout.microbatches) == (1, 8)


@pytest.mark.parametrize(
    ("text", "kind", "group"),
    (
        ("FSDP2, no reshard", "shard_grad_op", 0),
        ("FSDP (reshard_after_forward=False)", "shard_grad_op", 0),
        ("SHARD_GRAD_OP/DEFAULT", "shard_grad_op", 0),
        ("ZeRO-1 over all of DP (-1)", "zero1", 0),
        ("ZeRO-1 in groups of 8", "zero1", 8),
        ("HSDP 8", "hsdp", 8),
        ("zero3", "zero3", 0),
        ("ZeRO-2", "zero2", 0),
    ),
)
def test_kinds_of_sharding(tmp_path: Path, text: str, kind: str, group: int) -> None:
    layout = read(tmp_path, sharding=text).job.layout
    assert (layout.sharding, layout.shard_group) == (kind, group)


def test_float8_is_no_bf16(tmp_path: Path) -> None:
    assert read(tmp_path, precision="float8").job.precision.name == "fp8"
    assert read(tmp_path, precision="float8 rowwise").job.precision.name == "fp8-row"


def test_a_known_model_needs_no_dimensions_and_keeps_its_latent_attention(tmp_path: Path) -> None:
    run = read(tmp_path, model="deepseek-v3", gpus="256", ep="8", pp="8", gbs_seqs="2048", heads="128", kv_heads="128")
    assert run.job.model.kv_rank == 512
    assert read(tmp_path, layers="4").job.model.layers == 4
    assert read(tmp_path, vocab="128512").job.model.vocabulary == 128256  # padded
    assert read(tmp_path, vocab="32000").job.model.vocabulary == 32000


def test_memory_has_a_unit_and_a_meaning(tmp_path: Path) -> None:
    plain = read(tmp_path, peak_mem_gib="50")
    assert (plain.memory, plain.memory_meaning) == (50 * 2**30, "reserved")
    stated = read(tmp_path, peak_mem_gib="50", mem_kind="max allocated GB as printed")
    assert (stated.memory, stated.memory_meaning) == (50e9, "allocated")


def test_power_limits_do_not_share_a_planner(tmp_path: Path) -> None:
    full, limited = read(tmp_path), read(tmp_path, gpu="H100-80GB-SXM 500W")
    assert planner_key(full.cluster) != planner_key(limited.cluster)


@pytest.mark.parametrize(
    ("text", "modules", "share"),
    (
        ("full", ("layer",), 1.0),
        ("none", (), 1.0),
        ("selective (op)", ("ops",), 1.0),
        ("selective, every 2nd layer", ("layer",), 0.5),
        ("full, 4 of 32 layers", ("layer",), 0.125),
        ("moe+layernorm", ("experts", "norm"), 1.0),
    ),
)
def test_recomputation(tmp_path: Path, text: str, modules: tuple[str, ...], share: float) -> None:
    layout = read(tmp_path, recompute=text).job.layout
    assert (layout.recompute, layout.recompute_share) == (modules, share)


def test_recomputation_that_is_not_understood_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="is not understood"):
        read(tmp_path, recompute="some of it")


def test_zero2_gathers_its_weights_once_a_step() -> None:
    cluster, model = Cluster.of("h100-sxm x 8"), get_model("llama-3-8b")

    def data(sharding: Sharding, batch: int) -> float:
        layout = Layout(gpus=8, global_batch=batch, sharding=sharding, overlap_gradients=False)
        return training_time(Job(model=model, layout=layout, sequence=512), cluster).parts["data"]

    # each further microbatch scatters its gradients; only FSDP gathers weights for it, too
    assert data("zero2", 16) - data("zero2", 8) < data("shard_grad_op", 16) - data("shard_grad_op", 8)
    assert data("zero2", 8) == pytest.approx(data("shard_grad_op", 8))
