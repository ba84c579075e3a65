import json

import pytest

from nearpeak._records import to_json
from nearpeak.errors import UsageError
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.models.catalogue import get_model
from nearpeak.plan.serving.deployment import ServingLayout
from nearpeak.plan.serving.plan import Load, ServingPlan, plan_within, search_load, serving_plan, whole_layouts
from nearpeak.plan.serving.search import ServingOption
from nearpeak.render.views.plan.sliders import decode_sliders

LOAD = Load(prompt=1024, output=256, concurrency=32)


def test_without_a_layout_the_best_is_taken():
    plan = serving_plan(get_model("llama-3-70b"), Cluster.of("h100-sxm x 8"), LOAD, precision="fp8")
    speeds = [choice.tokens_per_second for choice in plan.choices]
    assert speeds == sorted(speeds, reverse=True)
    assert plan.layout == plan.choices[0].layout
    assert plan.replicas * plan.layout.gpus == 8
    users = [option.per_user for option in plan.front]
    assert users == sorted(users, reverse=True) and len(users) > 2


def test_prefill_is_limited_by_compute_and_decode_by_memory():
    plan = serving_plan(get_model("llama-3-70b"), Cluster.of("h100-sxm x 8"), LOAD, ServingLayout(tp=8))
    assert (plan.phases.prefill.limiter, plan.phases.decode.limiter) == ("compute", "memory")
    assert plan.phases.decode.intensity < plan.phases.decode.ridge < plan.phases.prefill.intensity
    assert len(plan.choices) == 1


def test_throughput_grows_with_concurrency_and_latency_too():
    plan = serving_plan(get_model("llama-3-8b"), Cluster.of("h100-sxm x 1"), LOAD)
    rates = [point.tokens_per_second for point in plan.curve]
    waits = [point.tpot for point in plan.curve]
    assert rates == sorted(rates) and waits == sorted(waits)


def test_the_parts_of_a_gpu_are_its_memory():
    room = serving_plan(get_model("llama-3-8b"), Cluster.of("h100-sxm x 1"), LOAD).memory
    assert room.weights + room.reserved + room.cache == pytest.approx(room.memory)
    assert room.sequences == pytest.approx(room.cache / (room.bytes_per_token * 1280))


def test_experts_are_spread_in_some_layouts():
    found = whole_layouts(get_model("deepseek-v3"), Cluster.of("h200-sxm x 8"))
    assert ServingLayout(dp=8, ep=8) in found and ServingLayout(tp=8) in found
    assert not any(layout.ep > 1 for layout in whole_layouts(get_model("llama-3-8b"), Cluster.of("h100-sxm x 8")))


def test_what_does_not_fit_says_what_would():
    with pytest.raises(UsageError, match="What would fit"):
        serving_plan(get_model("llama-3-70b"), Cluster.of("h100-sxm x 1"), LOAD)


def test_other_modes_come_along():
    plan = serving_plan(
        get_model("llama-3-8b"),
        Cluster.of("h100-sxm x 2"),
        LOAD,
        ServingLayout(),
        disaggregate=(1, 1),
        guesses=(3, 0.7),
    )
    assert plan.disaggregated is not None and plan.speculative is not None
    assert plan.speculative.tokens_per_step == pytest.approx(2.533)
    json.dumps(to_json(plan))


def test_replicas_without_a_request_do_not_count() -> None:
    load = Load(prompt=1024, output=256, concurrency=1)
    plan = serving_plan(get_model("llama-3-8b"), Cluster.of("h100-sxm x 8"), load)
    assert plan.replicas == 1
    for choice in plan.choices:
        if choice.serving is not None:
            assert choice.tokens_per_second <= 1.01 / choice.serving.tpot


def test_the_layout_that_is_taken_has_room_for_the_longest_request():
    # one sequence of the mean length fits on one GPU, the longest that is simulated does not
    load = Load(prompt=2**20, output=1024, concurrency=4)
    plan = serving_plan(get_model("gpt-oss-20b"), Cluster.of("rtx-5090 x 2"), load, precision="fp4", engine="gpt-fast")
    assert plan.layout.gpus == 2
    assert [choice.layout.gpus for choice in plan.choices if choice.serving is None] == [1]


@pytest.mark.parametrize(
    ("layout", "graphs", "concurrency"),
    [
        (ServingLayout(tp=2), False, 12),  # kernels launched one by one
        (ServingLayout(tp=4), True, 2.5),  # a number of requests that is not whole
        (ServingLayout(tp=2, pp=2), True, 37),
    ],
)
def test_sliders_start_at_the_decode_step_of_the_page(layout: ServingLayout, graphs: bool, concurrency: float) -> None:
    load = Load(prompt=900, output=512, concurrency=concurrency)
    plan = serving_plan(get_model("qwen2.5-32b"), Cluster.of("h100-sxm x 4"), load, layout, graphs=graphs)
    data = decode_sliders(plan).data
    batch, context = (data["choices"][name].index(data["start"][name]) for name in ("batch", "context"))
    assert sum(data["steps"][batch][context]) == pytest.approx(plan.replica.decode.seconds, rel=1e-9)
    assert plan.phases.decode.step.memory_seconds == pytest.approx(plan.replica.decode.memory_seconds)


def test_a_gpu_of_a_pipeline_has_the_work_of_its_stage() -> None:
    plan = serving_plan(get_model("qwen2.5-32b"), Cluster.of("h100-sxm x 4"), LOAD, ServingLayout(tp=2, pp=2))
    for phase in (plan.phases.prefill, plan.phases.decode):
        assert phase.bytes_moved < plan.memory.weights + plan.memory.cache
    whole = 2 * plan.model.parameters * 1024  # FLOPs of the prompt, without attention
    assert 0.9 * whole / 4 < plan.phases.prefill.flops < 1.1 * whole / 4
    assert plan.phases.decode.tokens == 16  # of 32 requests: the other stage works on the rest


def test_compared_layouts_have_the_memory_of_the_engine() -> None:
    small = Load(prompt=1024, output=256, concurrency=8, memory_share=0.35)
    plan = serving_plan(get_model("llama-3-70b"), Cluster.of("h100-sxm x 8"), small)
    assert {option.layout.gpus for option in plan.front} == {8}  # with less, weights need more than a third of a GPU


def test_limits_hold_for_the_simulation() -> None:
    """Formulas have a TTFT below the limit where the first wave of clients waits longer."""
    qwen, cluster, limit = get_model("qwen3-30b-a3b"), Cluster.of("h200-sxm x 8"), 0.1

    def planned(option: ServingOption) -> ServingPlan:
        load = Load(prompt=1024, output=256, concurrency=option.serving.concurrency * option.replicas)
        return serving_plan(qwen, cluster, load, option.layout)

    search = search_load(qwen, cluster, LOAD, most_ttft=limit)
    assert search.best is not None and planned(search.best).simulation.ttft.mean > limit
    plan = plan_within(search, planned, most_ttft=limit)
    assert plan is not None and plan.simulation.ttft.mean <= limit
    assert plan_within(search, planned, most_ttft=limit, most_tpot=1e-4) is None
