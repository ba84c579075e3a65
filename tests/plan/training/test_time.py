"""Training time: parts that sum, what each kind of parallelism costs, and errors for what a machine cannot do."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nearpeak.errors import UsageError
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.models.catalogue import get_model
from nearpeak.plan.models.model import forward_flops
from nearpeak.plan.training import efficiency
from nearpeak.plan.training.efficiency import Efficiency, gemm_rate, load_efficiency
from nearpeak.plan.training.job import Job, precision_named
from nearpeak.plan.training.layout import Layout, Sharding
from nearpeak.plan.training.memory import memory_by_stage
from nearpeak.plan.training.plan import memory_plan
from nearpeak.plan.training.time import PARTS, Planner, TrainingTime, hidden_behind, training_time


def job(name: str = "llama-3-8b", precision: str = "bf16-master", sequence: int = 8192, **layout: Any) -> Job:
    fields = {"gpus": 64, "global_batch": 256, **layout}
    return Job(model=get_model(name), layout=Layout(**fields), sequence=sequence, precision=precision_named(precision))


def timed(on: str = "h100-sxm x 64", **fields: Any) -> TrainingTime:
    return training_time(job(**fields), Cluster.of(on))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tp": 4, "pp": 4, "virtual": 2},
        {"cp": 2, "sharding": "zero3"},
        {"name": "qwen3-30b-a3b", "ep": 8},
        {"name": "nemotron-3-nano", "ep": 8, "precision": "fp8", "recompute": ("layer",)},
        {"sharding": "hsdp", "shard_group": 8},
    ],
)
def test_the_parts_sum_to_the_step(fields: dict[str, Any]) -> None:
    found = timed(**fields)
    assert tuple(found.parts) == PARTS
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert all(value >= 0 for value in [*found.parts.values(), *found.hidden.values()])
    assert Planner(Cluster.of("h100-sxm x 64")).seconds(job(**fields)) == pytest.approx(found.seconds)


def test_utilization_follows_from_model_flops() -> None:
    found = timed()
    flops = 3 * forward_flops(get_model("llama-3-8b"), 8192).total * 256 * 8192
    assert found.model_flops == flops
    assert found.mfu == pytest.approx(flops / found.seconds / 64 / 989.4e12)
    assert 0.3 < found.mfu < 0.65 and found.hfu == found.mfu
    again = timed(recompute=("layer",))
    assert again.seconds > found.seconds and again.hfu > again.mfu
    assert found.tokens_per_second_per_gpu == pytest.approx(256 * 8192 / found.seconds / 64)


def test_gradients_of_microbatches_are_added_up() -> None:
    # 6 bytes a weight and microbatch more in 32 bits: 8 read and written, less the 2 of the product; 2 bytes in 16 bits
    narrow, wide = (timed(precision=name, sharding="none") for name in ("bf16-master", "bf16-fp32-grads"))
    weights = get_model("llama-3-8b").parameters - 128256 * 4096  # the embedding has no product
    more = 4 * (4 - 2) / 2 * weights / (load_efficiency().values.memory * 3.35e12)
    assert wide.parts["GEMMs"] - narrow.parts["GEMMs"] == pytest.approx(more * 4, rel=0.01)
    alone = {"gpus": 64, "global_batch": 64, "sharding": "none"}
    assert timed(**alone).parts["GEMMs"] == timed(**alone, precision="bf16-fp32-grads").parts["GEMMs"]


def test_the_fullest_stage_of_a_split_sets_the_pace() -> None:
    even, uneven = timed(pp=4), timed(pp=4, split=(14, 6, 6, 6))
    assert uneven.parts["GEMMs"] > 1.2 * even.parts["GEMMs"]
    assert timed(pp=4, split=(8, 8, 8, 8)).seconds == even.seconds


def test_eight_bits_are_faster_and_not_twice() -> None:
    assert 1.1 < timed().seconds / timed(precision="fp8").seconds < 2


def test_the_bubble_shrinks_with_interleaving_and_with_microbatches() -> None:
    plain = timed(pp=4, gpus=64)
    assert timed(pp=4, virtual=4).parts["bubble"] == pytest.approx(plain.parts["bubble"] / 4, rel=0.2)
    # a third where forward passes and both backward passes take the same; attention and norms have no weights
    assert 1 / 3 < timed(pp=4, schedule="zero-bubble").parts["bubble"] / plain.parts["bubble"] < 0.7
    more = timed(pp=4, global_batch=1024)
    assert more.parts["bubble"] / more.seconds < plain.parts["bubble"] / plain.seconds
    assert timed().parts["bubble"] == 0


def test_overlap_moves_communication_from_exposed_to_hidden() -> None:
    bare, hidden = timed(tp=4), timed(tp=4, overlap_tensor=True)
    assert hidden.parts["tensor"] < bare.parts["tensor"]
    assert hidden.parts["tensor"] + hidden.hidden["tensor"] == pytest.approx(bare.parts["tensor"])
    assert bare.hidden["tensor"] == 0
    exposed = timed(overlap_gradients=False)
    assert exposed.hidden["data"] == 0 and exposed.parts["data"] > timed().parts["data"]


def test_tensor_parallelism_across_nodes_is_slow() -> None:
    inside = timed(name="llama-3-70b", tp=8)
    across = timed(name="llama-3-70b", tp=16)
    assert across.parts["tensor"] > 2 * inside.parts["tensor"]


def test_experts_inside_a_rack_beat_experts_across_nodes() -> None:
    # GPT-OSS 120B on 64 GPUs, all experts apart: NVL72 keeps what racks of 8 lose
    fields: dict[str, Any] = {"name": "gpt-oss-120b", "ep": 64, "global_batch": 1280, "microbatch": 4, "sequence": 4096}
    assert timed("b200 x 64", **fields).parts["experts"] > 3 * timed("gb200 x 64", **fields).parts["experts"]


def test_a_larger_microbatch_pays_for_experts() -> None:
    small = timed("b200 x 8", name="qwen3-30b-a3b", gpus=8, ep=8, microbatch=1, sequence=4096)
    large = timed("b200 x 8", name="qwen3-30b-a3b", gpus=8, ep=8, microbatch=4, sequence=4096)
    assert large.tokens_per_second > 1.3 * small.tokens_per_second


def test_eager_software_moves_more_and_adapters_compute_less() -> None:
    asked, cluster = job(), Cluster.of("h100-sxm x 64")
    assert training_time(replace(asked, software="eager"), cluster).seconds > training_time(asked, cluster).seconds
    assert training_time(replace(asked, trainable=0.01), cluster).seconds < 0.8 * training_time(asked, cluster).seconds


def test_more_gpus_than_the_cluster_has_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"gpus=64 .* gpus=8"):
        timed("h100-sxm x 8")


def test_a_gpu_without_the_precision_is_an_error_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"float8.*Nearest: bfloat16"):
        timed("a100-sxm-80gb x 64", precision="fp8")
    machine = Cluster.of("h100-sxm x 8").machine
    with pytest.raises(UsageError, match=r"float4.*Nearest: float8"):
        gemm_rate(machine, "float4", 2026.0, Efficiency())


def test_scales_of_small_blocks_need_their_gemms() -> None:
    with pytest.raises(UsageError, match=r"precision='mxfp8': NVIDIA H100 .* Nearest: precision='fp8-row'"):
        timed(precision="mxfp8")
    with pytest.raises(UsageError, match=r"Nearest: precision='bf16'"):
        timed(precision="mxfp8", on="a100-sxm-80gb x 64")
    assert timed(precision="mxfp8", on="b200 x 64").seconds < timed(on="b200 x 64").seconds


def test_no_year_is_written_inside_a_formula() -> None:
    """A year that changes a plan is a constant with its source beside it."""
    for file in sorted(Path(efficiency.__file__).parent.glob("*.py")):
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                numbers = [node.value for node in ast.walk(function) if isinstance(node, ast.Constant)]
                years = [each for each in numbers if isinstance(each, (int, float)) and 2015 < each < 2030]
                assert not years, (file.name, function.name)


def test_constants_are_shares_and_have_a_source() -> None:
    fitted = load_efficiency()
    for name in ("gemm_ampere", "gemm_hopper", "gemm_blackwell", "attention_hopper", "tensor_exposed"):
        assert 0.1 < getattr(fitted.values, name) < 1
        assert fitted.provenance[name].kind == "fitted" and "runs of" in fitted.provenance[name].text
    assert 0.02 < fitted.error < 0.2


@pytest.mark.parametrize("available", [0.0, 0.5, 1.0, 10.0])
def test_what_hides_is_never_more_than_there_is(available: float) -> None:
    assert 0 <= hidden_behind(1.0, available) <= min(1.0, available)
    assert hidden_behind(1.0, 100.0) == pytest.approx(1.0, rel=1e-3)


def test_the_data_file_has_every_constant_but_those_that_are_not_fitted() -> None:
    import dataclasses

    fitted = load_efficiency()
    names = {field.name for field in dataclasses.fields(Efficiency)}
    assert set(fitted.provenance) == names - {"memory", "expert_gemm", "layer_scale", "output_scale", "optimizer_scale"}
    assert fitted.of("memory")[0].kind == "assumed"


def test_a_limit_on_power_slows_products_and_not_memory() -> None:
    cluster = Cluster.of("h100-sxm x 64")
    limited = replace(cluster, machine=replace(cluster.machine, power_watts=500.0))
    full, less = training_time(job(), cluster), training_time(job(), limited)
    assert less.parts["GEMMs"] > 1.15 * full.parts["GEMMs"]
    assert less.parts["memory-bound"] == full.parts["memory-bound"]


def test_an_optimizer_sharded_inside_a_node_talks_less_across_nodes() -> None:
    # InternLM 7B on 1024 A100: sharded over 8 ranks it was 60 % faster than over all
    fields: dict[str, Any] = {"name": "llama-2-7b", "gpus": 1024, "global_batch": 1024, "sequence": 4096}
    cluster = Cluster.of("a100-sxm-80gb x 1024")
    everywhere = training_time(replace(job(**fields), software="eager"), cluster)
    inside = training_time(replace(job(shard_group=8, **fields), software="eager"), cluster)
    assert inside.tokens_per_second > 1.1 * everywhere.tokens_per_second


def published(name: str, sequence: int, precision: str, year: float, **layout: object) -> Job:
    return Job(
        model=get_model(name),
        layout=Layout(**layout),  # type: ignore[arg-type]
        sequence=sequence,
        precision=precision_named(precision),
        year=year,
    )


def test_llama_405b_as_it_was_published_fits_and_is_as_fast() -> None:
    """arXiv:2407.21783, table 4: TP 8, PP 16, DP 128, 16 million tokens, 400 TFLOP/s per GPU, 41 % MFU."""
    cluster = Cluster.of("h100-sxm x 16384")
    job = published(
        "llama-3.1-405b", 8192, "bf16-fp32-grads", 2024.5,
        gpus=16384, tp=8, pp=16, virtual=8, global_batch=2048, sharding="zero2", overlap_tensor=True,
    )  # fmt: skip
    step = training_time(job, cluster)
    assert step.mfu == pytest.approx(0.41, rel=0.12)
    assert cluster.machine.memory_bytes is not None
    assert max(stage.total for stage in memory_by_stage(job)) <= cluster.machine.memory_bytes


def test_deepseek_v3_as_it_was_published_fits_and_is_as_fast() -> None:
    """arXiv:2412.19437: 180,000 H800 hours for a trillion tokens, DualPipe, at most 4 nodes for a token."""
    job = published(
        "deepseek-v3", 4096, "fp8-compact", 2024.9,
        gpus=2048, pp=16, ep=64, global_batch=15360, schedule="dualpipe", routed_nodes=4,
        recompute=("norm", "mla_up", "feed_activation"),
    )  # fmt: skip
    job = replace(job, model=replace(job.model, predictions=1))  # one more token was predicted in training
    cluster = Cluster.of("h800-sxm x 2048")
    assert training_time(job, cluster).tokens_per_second_per_gpu == pytest.approx(1e12 / (180e3 * 3600), rel=0.12)
    assert cluster.machine.memory_bytes is not None
    assert max(stage.total for stage in memory_by_stage(job)) <= cluster.machine.memory_bytes


def test_gradients_of_an_interleaved_piece_are_reduced_once_for_all_its_microbatches() -> None:
    cluster = Cluster.of("h100-sxm x 64")
    fields = {"gpus": 64, "tp": 4, "pp": 4, "global_batch": 64, "sharding": "zero2"}
    plain, pieces = (
        training_time(published("llama-3-70b", 8192, "bf16", 2026.0, virtual=virtual, **fields), cluster)
        for virtual in (1, 4)
    )
    total = [step.parts["data"] + step.hidden["data"] for step in (plain, pieces)]
    assert total[1] < 0.5 * total[0]


@pytest.mark.parametrize(
    "wrong", [{"pp": 3}, {"pp": 4, "virtual": 2, "global_batch": 32}, {"routed_nodes": -1}, {"pp": 16, "virtual": 9}]
)
def test_schedules_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    fields = {"gpus": wrong.get("pp", 2), "global_batch": 16, "schedule": "dualpipe"} | wrong
    with pytest.raises(UsageError):
        published("llama-3.1-405b", 4096, "bf16", 2026.0, **fields)


@pytest.mark.parametrize("sharding", ["zero3", "hsdp"])
def test_one_rank_has_nothing_to_shard(sharding: str) -> None:
    alone = {"gpus": 4, "pp": 4, "global_batch": 64}
    assert timed("h100-sxm x 4", **alone, sharding=sharding).parts == timed("h100-sxm x 4", **alone).parts
    assert memory_by_stage(job(**alone, sharding=sharding)) == memory_by_stage(job(**alone))


@pytest.mark.parametrize(
    ("recompute", "share", "part"),
    [(("layer",), 1.0, 1.0), (("layer",), 0.5, 0.5), (("feed",), 1.0, None), (("norm", "feed_activation"), 1.0, 0.0)],
)
def test_what_is_computed_again_counts_as_hardware_flops(
    recompute: tuple[str, ...], share: float, part: float | None
) -> None:
    again = timed(recompute=recompute, recompute_share=share)
    flops = forward_flops(get_model("llama-3-8b"), 8192)
    layers = flops.total - flops.output
    expected = flops.dense if part is None else part * layers
    assert (again.hardware_flops - again.model_flops) / again.tokens == pytest.approx(expected)


def test_frozen_weights_have_no_gradients_to_count() -> None:
    adapters = replace(job("opt-175b", "bf16", gpus=8, microbatch=8, sharding="none"), trainable=0.01)
    step = training_time(adapters, Cluster.of("a100-sxm-80gb x 8"))
    flops = forward_flops(get_model("opt-175b"), 8192)
    assert step.model_flops / step.tokens == pytest.approx(3 * flops.total - flops.gemm)
    assert step.mfu < 1


@pytest.mark.parametrize("sharding", ["none", "zero3"])
def test_offloaded_weights_cross_the_bus_for_every_microbatch(sharding: str) -> None:
    fields = {"gpus": 8, "global_batch": 256, "recompute": ("layer",), "sequence": 1024, "sharding": sharding}
    cluster = Cluster.of("rtx-4090 x 8")
    assert cluster.machine.pcie is not None
    weights = 2.0 * get_model("llama-3-8b").parameters / (8 if sharding == "zero3" else 1)
    times = {
        name: timed("rtx-4090 x 8", **fields, offload=name) for name in ("optimizer", "optimizer+gradients", "all")
    }
    assert times["all"].seconds > 32 * 2 * weights / cluster.machine.pcie.bandwidth
    assert times["optimizer"].seconds < times["optimizer+gradients"].seconds < times["all"].seconds
    held = [memory_by_stage(job(**fields, offload=name))[0].total for name in times]
    assert held == sorted(held, reverse=True)


def test_offload_needs_the_bandwidth_of_the_host() -> None:
    with pytest.raises(UsageError, match=r"offload='optimizer'.*GB200.*Nearest: offload=none"):
        timed("gb200 x 64", offload="optimizer")
    plan = memory_plan(job("llama-3-70b", gpus=4, global_batch=4, sharding="none"), Cluster.of("gb200 x 4"))
    assert not plan.fits and plan.changes and not any("offload" in change.what for change in plan.changes)


@pytest.mark.parametrize(("year", "near"), [(float("nan"), 2017), (-1.0, 2017), (1999.0, 2017), (float("inf"), 2100)])
def test_years_of_software_are_years(year: float, near: int) -> None:
    with pytest.raises(UsageError, match=f"year=.*Nearest: year={near}"):
        replace(job(), year=year)


def test_frozen_weights_leave_nothing_to_fill_a_bubble_with() -> None:
    """ZB-H1 delays gradients of weights; beside adapters there are none."""
    bubbles = [
        training_time(
            replace(job("llama-3-8b", gpus=64, pp=4, global_batch=64, schedule=schedule), trainable=0.01),
            Cluster.of("h100-sxm x 64"),
        ).parts["bubble"]
        for schedule in ("1f1b", "zero-bubble")
    ]
    assert bubbles[1] == pytest.approx(bubbles[0])


def test_one_microbatch_has_no_other_whose_computation_hides_its_experts() -> None:
    alone, overlapped = (
        training_time(
            job("qwen3-30b-a3b", gpus=64, ep=8, global_batch=64, overlap_experts=overlap), Cluster.of("h100-sxm x 64")
        ).parts["experts"]
        for overlap in (False, True)
    )
    assert overlapped == alone > 0


@pytest.mark.parametrize("sharding", ("zero1", "zero2", "zero3", "hsdp"))
@pytest.mark.parametrize("gpu", ("a100-sxm-80gb", "b200"))
def test_recomputing_more_never_makes_a_step_faster(gpu: str, sharding: Sharding) -> None:
    """Communication hid behind the same computation twice, and each recomputed layer hid more than it took."""
    qwen, planner = get_model("qwen3-30b-a3b"), Planner(Cluster.of(f"{gpu} x 64"))
    group = 8 if sharding == "hsdp" else 0
    layout = Layout(gpus=64, global_batch=64, sharding=sharding, shard_group=group)
    for sequence in (256, 1024, 4096):
        plain = planner.seconds(Job(model=qwen, layout=layout, sequence=sequence))
        for modules in (("norm",), ("ops",), ("layer",)):
            again = replace(layout, recompute=modules)
            assert planner.seconds(Job(model=qwen, layout=again, sequence=sequence)) > plain
