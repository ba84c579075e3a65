"""The search over layouts: all legal, the fastest that fits, the front, reasons, and how quick it is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from nearpeak.cli.main import main
from nearpeak.errors import UsageError
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.models.catalogue import get_model
from nearpeak.plan.models.model import Model
from nearpeak.plan.training.job import Job
from nearpeak.plan.training.layout import Layout, Schedule
from nearpeak.plan.training.memory import memory, memory_by_stage, peak
from nearpeak.plan.training.search import ALL_SCHEDULES, SCHEDULES, SLOWEST, layouts, search, search_plan
from nearpeak.plan.training.time import Planner, training_time


@pytest.mark.slow
def test_every_layout_is_legal_and_met_once() -> None:
    qwen, cluster = get_model("qwen3-30b-a3b").with_layers(6), Cluster.of("h100-sxm x 16")
    found = list(layouts(qwen, cluster, 64, 4096))
    assert len(found) == len(set(found)) > 500
    for layout in found:
        layout.check(qwen, 4096)
    assert {layout.ep for layout in found} == {1, 2, 4, 8, 16}
    assert {layout.sharding for layout in found} == {"zero1", "zero2", "shard_grad_op", "zero3", "hsdp", "none"}
    assert {layout.sharding for layout in found if layout.pp > 1} == {"none", "zero1", "shard_grad_op", "zero3"}
    assert {layout.etp for layout in found} == {1, 2, 4, 8}
    assert {layout.schedule for layout in found} == {"1f1b", "interleaved"}
    assert not any(layout.overlap_experts for layout in found)


def test_other_schedules_and_overlapped_experts_are_tried_on_demand() -> None:
    qwen, cluster = get_model("qwen3-30b-a3b").with_layers(6), Cluster.of("h100-sxm x 4")
    found = list(layouts(qwen, cluster, 64, 4096, schedules=ALL_SCHEDULES, overlap_experts=True))
    assert len(found) == len(set(found))
    assert {layout.schedule for layout in found} == set(ALL_SCHEDULES)
    overlapped = [layout for layout in found if layout.overlap_experts]
    assert overlapped and all(layout.ep > 1 and layout.microbatches > 1 for layout in overlapped)
    assert all(layout.pp == 1 or layout.schedule == "interleaved" for layout in overlapped)
    assert not any("layer" in layout.recompute for layout in overlapped)
    for layout in found:
        layout.check(qwen, 4096)


@pytest.mark.slow
def test_the_winner_fits_and_none_that_fits_is_faster() -> None:
    llama, cluster = get_model("llama-3-8b"), Cluster.of("h100-sxm x 8")
    found = search(llama, cluster, global_batch=32, sequence=8192)
    assert found.best is not None and found.time is not None
    capacity = cluster.machine.memory_bytes
    assert capacity is not None and found.best.memory <= capacity
    for layout in list(layouts(llama, cluster, 32, 8192))[::7]:
        job = Job(model=llama, layout=layout, sequence=8192)
        if memory(job).total <= capacity:
            assert training_time(job, cluster).seconds >= found.best.seconds * (1 - 1e-9)
    assert found.time.seconds == pytest.approx(found.best.seconds)


def test_the_front_gives_up_time_only_for_memory() -> None:
    front = search(get_model("llama-3-8b"), Cluster.of("h100-sxm x 8"), global_batch=32, sequence=8192).front
    assert len(front) > 2
    for first, second in itertools.pairwise(front):
        assert first.seconds <= second.seconds and first.memory > second.memory


@pytest.mark.slow
def test_a_reason_names_what_another_choice_loses() -> None:
    found = search(get_model("llama-3-70b"), Cluster.of("h100-sxm x 64"), global_batch=128, sequence=8192)
    reasons = {reason.field: reason for reason in found.reasons}
    tensor = reasons["tp"]
    assert tensor.other is not None and tensor.slower is not None and tensor.slower >= 0
    assert tensor.other.layout.tp != tensor.value and "of a step more" in tensor.because
    assert reasons["ep"].other is None and "nothing else" in reasons["ep"].because


def test_nothing_fits_is_an_answer_with_what_would_be_needed() -> None:
    found = search(get_model("llama-3.1-405b"), Cluster.of("h100-sxm x 8"), global_batch=8, sequence=8192)
    assert found.best is None and found.computed == 0 and found.legal > 0
    assert found.smallest > 80e9


def test_a_batch_that_no_layout_can_spread_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"global_batch=7 .*global_batch=8"):
        search(get_model("qwen2.5-7b").with_layers(1), Cluster.of("h100-sxm x 8"), global_batch=7, sequence=4097)


def test_of_405_billion_weights_on_16384_gpus_all_layouts_are_tried() -> None:
    found = search(get_model("llama-3.1-405b"), Cluster.of("h100-sxm x 16384"), global_batch=2048, sequence=8192)
    assert found.best is not None and found.time is not None
    assert found.legal > 30_000
    assert 0.35 < found.time.mfu < 0.5  # what runs of this size reach
    assert isinstance(found.best.layout, Layout)


def _random_model(draw: random.Random) -> Model:
    layers, heads = draw.randint(2, 7), draw.choice((2, 4))
    moe, latent = draw.random() < 0.5, draw.random() < 0.3
    feeds = "E" * layers if moe else "D" * layers
    if moe and draw.random() < 0.5:
        feeds = "D" + feeds[1:]
    return Model(
        name="random",
        mixers="A" * layers,
        feeds=feeds,
        hidden=draw.choice((1024, 4096)),
        heads=heads,
        kv_heads=heads,
        head_dim=128,
        kv_rank=256 if latent else 0,
        rope_dim=64 if latent else 0,
        intermediate=draw.choice((2048, 8192)),
        vocabulary=draw.choice((8192, 128256)),
        experts=4 if moe else 0,
        active_experts=2 if moe else 0,
        expert_intermediate=1024 if moe else 0,
    )


def _all_layouts(
    model: Model, gpus: int, batch: int, sequence: int, schedules: tuple[Schedule, ...], overlap: bool
) -> Iterator[Layout]:
    """Every combination of fields, those that are not legal dropped by the layout's own checks."""
    modules = ["norm", "feed_activation"] + ["feed"] * ("D" in model.feeds)
    modules += ["experts"] * model.is_moe + ["mla_up"] * bool(model.kv_rank)
    subsets = [item for size in range(len(modules) + 1) for item in itertools.combinations(modules, size)]
    degrees, microbatches = (1, 2, 4), [2**power for power in range(7) if 2**power <= max(8, 2**15 // sequence)]
    for tp, cp, pp, ep, etp in itertools.product(degrees, degrees, range(1, gpus + 1), degrees, degrees):
        if gpus % (tp * cp * pp) or gpus % (ep * etp * pp) or (ep * etp > 1 and not model.is_moe):
            continue
        dp = gpus // (tp * cp * pp)
        shardings = ["none"] if dp * cp == 1 else ["none", "zero1", "shard_grad_op", "zero3"]
        shardings += ["zero2"] * (dp * cp > 1 and pp == 1)
        for microbatch, virtual, schedule, sharding, overlapped, recompute in itertools.product(
            microbatches, range(1, model.layers + 1), schedules if pp > 1 else ("1f1b",), shardings,
            (False, True) if overlap and ep > 1 else (False,), [*subsets, ("ops",), ("layer",)],
        ):  # fmt: skip
            if (virtual > 1) != (schedule == "interleaved") or (schedule == "dualpipe" and pp % 2):
                continue
            if overlapped and (recompute == ("layer",) or schedule != ("1f1b" if pp == 1 else "interleaved")):
                continue
            try:
                layout = Layout(
                    gpus=gpus, global_batch=batch, microbatch=microbatch, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp,
                    virtual=virtual, schedule=schedule, sharding=sharding, recompute=recompute,
                    overlap_tensor=tp > 1, overlap_experts=overlapped,
                )  # fmt: skip
                layout.check(model, sequence)
            except UsageError:
                continue
            if overlapped and layout.microbatches == 1:
                continue
            yield layout


def _space(seed: int) -> None:
    draw = random.Random(seed)
    model, gpus, sequence = _random_model(draw), draw.choice((1, 2, 4)), draw.choice((512, 4096))
    batch = gpus * draw.choice((1, 2, 3, 8))
    schedules = draw.choice((SCHEDULES, ALL_SCHEDULES, ("1f1b", "zero-bubble"), ("interleaved", "dualpipe")))
    overlap = draw.random() < 0.5
    cluster = Cluster.of(f"h100-sxm x {gpus}")
    every = _all_layouts(model, gpus, batch, sequence, schedules, overlap)
    jobs = [Job(model=model, layout=layout, sequence=sequence) for layout in every]
    needs = [max(stage.total for stage in memory_by_stage(job)) for job in jobs]
    # a capacity that some layouts fit and others do not
    capacity = sorted(needs)[int(draw.random() * (len(needs) - 1))]
    cluster = replace(cluster, machine=replace(cluster.machine, memory_bytes=int(capacity) + 1))
    planner = Planner(cluster)
    fitting = [(planner.seconds(job), need, job) for job, need in zip(jobs, needs, strict=True) if need <= capacity]
    fastest = min(seconds for seconds, _, _ in fitting)
    found = search(model, cluster, global_batch=batch, sequence=sequence, schedules=schedules, overlap_experts=overlap)
    assert found.best is not None
    assert found.best.seconds == pytest.approx(fastest, rel=1e-9), seed
    for candidate in (found.best, *found.front):
        best = Job(model=model, layout=candidate.layout, sequence=sequence)
        assert memory(best).total == pytest.approx(candidate.memory, rel=1e-9)
        assert peak(best) == pytest.approx(candidate.memory, rel=1e-9)
        assert planner.time(best).seconds == pytest.approx(candidate.seconds, rel=1e-9)
    # nothing beats the front in time and memory, and no alternative the reasons name
    for seconds, need, _ in fitting:
        if seconds < SLOWEST * fastest * (1 - 1e-9):
            assert any(
                other.seconds <= seconds * (1 + 1e-9) and other.memory <= need * (1 + 1e-9) for other in found.front
            ), seed
    for reason in found.reasons:
        if reason.field == "recompute":  # brute force has further sets of modules that save the same
            continue
        others = [item for item, _, job in fitting if getattr(job.layout, reason.field) != reason.value]
        least = min(others, default=float("inf"))
        if least < SLOWEST * fastest * (1 - 1e-9):
            assert reason.other is not None
            assert reason.other.seconds == pytest.approx(least, rel=1e-9), (seed, reason.field)


@pytest.mark.parametrize("seed", (0, 1, 9))
def test_a_search_equals_brute_force(seed: int) -> None:
    _space(seed)


@pytest.mark.slow
def test_searches_of_random_spaces_equal_brute_force() -> None:
    for seed in range(10, 30):
        _space(seed)


@pytest.mark.exhaustive
def test_searches_of_200_random_spaces_equal_brute_force() -> None:
    for seed in range(200):
        _space(seed)


@pytest.mark.slow
def test_no_winner_is_beaten_by_its_own_slowest_stage() -> None:
    qwen, cluster = get_model("qwen3-235b-a22b").with_layers(14), Cluster.of("h200-sxm x 16")
    found = search(qwen, cluster, global_batch=64, sequence=4096)
    assert found.best is not None
    planner = Planner(cluster)
    for candidate in found.front[:20]:
        job = Job(model=qwen, layout=candidate.layout, sequence=4096)
        slowest = max(stage.step(job.layout.microbatches) for stage, _ in planner.stages(job))
        assert planner.time(job).seconds >= slowest


def test_a_middle_stage_with_experts_sets_the_pace() -> None:
    """The last stage has the output layer and the most computation; a middle one waits for its experts longer."""
    qwen = get_model("qwen3-235b-a22b")
    layout = Layout(gpus=64, pp=32, global_batch=128, ep=2, recompute=("layer",))
    job, planner = Job(model=qwen, layout=layout, sequence=4096), Planner(Cluster.of("h200-sxm x 64"))
    stages = planner.stages(job)
    middle = max((stage for stage, count in stages if count > 1), key=lambda stage: stage.microbatch)
    last = next(stage for stage, _ in stages if stage.index == 31)
    assert last.compute.gemm > middle.compute.gemm
    step = planner.time(job)
    assert step.seconds > max(middle.step(128 // 2), last.step(128 // 2))
    assert step.seconds > layout.microbatches * middle.microbatch


def test_modules_and_pieces_that_do_not_divide_the_layers_are_tried() -> None:
    qwen = get_model("qwen3-30b-a3b").with_layers(7)
    tried = list(layouts(qwen, Cluster.of("h100-sxm x 4"), 64, 4096))
    assert ("experts",) in {layout.recompute for layout in tried}
    assert {layout.virtual for layout in tried if layout.pp == 2} == {1, 2, 3, 4}  # 7 layers, and one piece without
    assert {layout.pp for layout in tried} == {1, 2, 4}


def test_a_plan_of_a_search_is_the_best_candidate() -> None:
    found = search_plan(get_model("llama-3-8b"), Cluster.of("h100-sxm x 8"), sequence=8192, global_batch=16)
    assert found.plan is not None and found.search.best is not None
    assert found.plan.time.seconds == pytest.approx(found.search.best.seconds)
    assert found.plan.memory.fullest.total == pytest.approx(found.search.best.memory)


def test_a_condition_without_a_legal_layout_is_left_out() -> None:
    # a quarter of 37 sequences cannot be spread over 37 times 8 GPUs
    found = search_plan(get_model("llama-3-8b"), Cluster.of("h100-sxm x 296"), sequence=4096, global_batch=37)
    assert found.plan is not None
    whats = [condition.what for condition in found.conditions]
    assert whats == ["any schedule", "memory x 1.5", "network x 2", "network / 2"]


@pytest.mark.parametrize(("sequence", "largest"), [(128, 256), (1024, 32), (4096, 8), (32768, 8)])
def test_of_short_sequences_a_microbatch_has_more(sequence: int, largest: int) -> None:
    tried = layouts(get_model("llama-3.2-1b"), Cluster.of("h100-sxm x 2"), 4096, sequence)
    assert max(layout.microbatch for layout in tried) == largest


def test_no_larger_microbatch_of_short_sequences_beats_the_search() -> None:
    llama, cluster = get_model("llama-3.2-1b"), Cluster.of("h100-sxm x 2")
    best = search(llama, cluster, global_batch=8192, sequence=128).best
    assert best is not None
    planner = Planner(cluster)
    for microbatch in (16, 32, 64, 128):
        layout = replace(best.layout, microbatch=microbatch)
        assert planner.seconds(Job(model=llama, layout=layout, sequence=128)) >= best.seconds


def test_a_search_refuses_an_option_that_it_would_ignore(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "train", "llama-3-8b", "--on", "h100-sxm x 8", "--no-sequence-parallel"]) == 2
    assert "--no-sequence-parallel needs a layout" in capsys.readouterr().err


@pytest.mark.slow
def test_no_layout_by_hand_with_another_schedule_beats_a_search_that_tries_it() -> None:
    """An issue of earlier searches: zero-bubble pipelines, kept weights and experts in slices were left to the user."""
    llama, cluster = get_model("llama-3-8b"), Cluster.of("h100-sxm x 16")
    common = search(llama, cluster, global_batch=16, sequence=8192).best
    every = search(llama, cluster, global_batch=16, sequence=8192, schedules=ALL_SCHEDULES).best
    assert common is not None and every is not None and every.seconds <= common.seconds
    planner = Planner(cluster)
    for schedule, pp in itertools.product(("zero-bubble", "dualpipe"), (2, 4, 8)):
        for sharding in ("zero1", "shard_grad_op"):
            try:
                layout = Layout(gpus=16, global_batch=16, pp=pp, tp=2, sharding=sharding, schedule=schedule)
                job = Job(model=llama, layout=layout, sequence=8192)
            except UsageError:
                continue
            if memory(job).total <= (cluster.machine.memory_bytes or 0):
                assert planner.seconds(job) >= every.seconds * (1 - 1e-9)


@pytest.mark.slow
def test_a_schedule_alone_restricts_the_search(capsys: pytest.CaptureFixture[str]) -> None:
    train = ["plan", "train", "llama-3-8b", "--on", "h100-sxm x 8", "--batch", "16", "--sequence", "4k"]
    assert main([*train, "--schedule", "any"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Pipelines: 1f1b, interleaved, zero-bubble, dualpipe." in out and "any schedule" not in out
    assert main(train) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Pipelines: 1f1b, interleaved." in out and "any schedule" in out
    assert main([*train, "--schedule", "gpipe"]) == 2
    assert "'gpipe' is not known" in capsys.readouterr().err
