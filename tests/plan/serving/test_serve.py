"""Serving: steps, latency against load, memory, other ways to serve."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nearpeak.errors import UsageError
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.models.catalogue import get_model
from nearpeak.plan.models.model import count_parameters
from nearpeak.plan.serving.constants import (
    EngineConstants,
    GenerationConstants,
    ServingConstants,
    load_serving_constants,
)
from nearpeak.plan.serving.deployment import Deployment, ServingLayout, cache_room, require_room, serving_precision
from nearpeak.plan.serving.plan import critical_batch, phases
from nearpeak.plan.serving.serve import (
    expected_tokens,
    most_throughput,
    serve,
    serve_disaggregated,
    speculate,
)
from nearpeak.plan.serving.step import exchange_seconds, expert_imbalance, experts_hit, step_time

FREE = EngineConstants(
    layer=0.0,
    expert_layer=0.0,
    step=0.0,
    sequence=0.0,
    launch=0.0,
    expert_launch=0.0,
    first=0.0,
    collective=1.0,
    overlaps=False,
    grouped=True,
    reserves=False,
)
IDEAL = ServingConstants(
    source="a machine without losses",
    generations={
        "hopper": GenerationConstants(stream=1.0, gap=1.0, compute={"bfloat16": 1.0, "float8": 1.0}, rows={"stream": 1})
    },
    engines={"vllm": FREE, "trtllm": replace(FREE, reserves=True)},
    cache=1.0,
    attention=1.0,
    attention_narrow=1.0,
    expert_stream=1.0,
    expert_compute=1.0,
    expert_rows=0.0,
    expert_width=0.0,
    narrow={},
    narrow_compute=1.0,
    variety=1.0,
    skew=0.0,
    occupancy=1.0,
    burst=0.0,
)


def llama(tp: int = 1, name: str = "fp8", gpu: str = "h100-sxm", size: str = "8b", engine: str = "vllm") -> Deployment:
    cluster = Cluster.of(gpu, gpus=max(tp, 1))
    return Deployment.of(get_model(f"llama-3-{size}"), cluster, ServingLayout(tp=tp), name, engine=engine)


def test_one_token_streams_the_weights() -> None:
    here = llama(name="bf16")
    numbers = count_parameters(here.model)
    read = 2 * (numbers.total - numbers.embedding - numbers.final_norm - 64 * numbers.norm)
    step = step_time(here, sequences=1, constants=IDEAL)
    assert step.gemm == pytest.approx(read / 3.35e12, rel=0.01)
    assert step.communication == step.layers == step.host == 0


def test_a_long_prompt_multiplies_at_the_peak() -> None:
    here = llama(name="bf16")
    step = step_time(here, sequences=0, prompt_tokens=8192, prompt_length=8192, constants=IDEAL)
    matrices = (
        count_parameters(here.model).total
        - count_parameters(here.model).embedding
        - count_parameters(here.model).output
    )
    assert step.gemm == pytest.approx(8192 * 2 * matrices / 989.4e12, rel=0.01)
    scores = 32 * 8192 * 2 * 32 * 256 * 4096.5
    assert step.attention == pytest.approx(scores / 989.4e12, rel=0.001)


def test_reading_the_cache_is_counted_exactly() -> None:
    here = llama()
    one, two = (step_time(here, sequences=8, context=context, constants=IDEAL) for context in (1000, 3000))
    assert two.attention - one.attention == pytest.approx(8 * 2000 * 32 * 2 * 8 * 128 / 3.35e12, rel=0.02)
    assert here.cache_bytes(1000) == 1000 * 32 * 2 * 8 * 128


def test_parts_sum_to_the_step() -> None:
    step = step_time(llama(tp=4, size="70b"), sequences=16, context=2000, prompt_tokens=500, prompt_length=1000)
    parts = step.gemm + step.experts + step.attention + step.elementwise
    assert step.seconds == pytest.approx(parts + step.communication + step.layers + step.host)
    assert step.communication > 0
    assert step.layers > 0


def test_prefill_is_limited_by_compute_and_decode_by_memory() -> None:
    both = phases(llama(tp=4, size="70b"), prompt=4096, context=4096)
    assert (both.prefill.limiter, both.decode.limiter) == ("compute", "memory")
    assert both.decode.intensity < 5 < both.decode.ridge < both.prefill.intensity
    assert "limited by memory" in str(both.decode)


def test_critical_batch_of_ideal_products_is_the_ridge() -> None:
    here = llama(name="bf16")
    found = critical_batch(here, context=1, constants=IDEAL)
    assert found.batch == pytest.approx(989.4e12 / 3.35e12, rel=0.15)  # activations add a little
    long = critical_batch(here, context=16384, constants=IDEAL)
    assert long.batch is None
    assert "stays limited by memory" in str(long)


@pytest.mark.parametrize("field", ["sequences", "context"])
def test_steps_grow_with_load(field: str) -> None:
    here = llama(tp=2, size="70b")
    load = {"sequences": 8.0, "context": 1000.0}
    times = [step_time(here, **{**load, field: load[field] * factor}).seconds for factor in (1, 2, 4, 8)]
    assert times == sorted(times)
    assert times[0] < times[-1]


def test_narrower_weights_decode_faster() -> None:
    times = {
        name: step_time(llama(name=name, gpu="b200"), sequences=1, context=500).seconds
        for name in ("bf16", "fp8", "fp4")
    }
    assert times["fp4"] < times["fp8"] < times["bf16"]


def test_latency_and_throughput_against_concurrency() -> None:
    deployment = llama(tp=2, size="70b", gpu="h200-sxm")
    answers = [serve(deployment, prompt=1024, output=1024, concurrency=number) for number in (1, 8, 64, 256)]
    assert [a.tpot for a in answers] == sorted(a.tpot for a in answers)
    assert [a.ttft for a in answers] == sorted(a.ttft for a in answers)
    rates = [a.tokens_per_second for a in answers]
    assert rates == sorted(rates)
    assert rates[1] < 8 * rates[0]


def test_requests_beyond_the_cache_wait() -> None:
    here = llama(tp=2, size="70b", name="fp8")
    few, many = (serve(here, prompt=8192, output=1024, concurrency=number) for number in (8, 200))
    assert few.queue_seconds == 0
    assert many.running < 200
    assert many.queue_seconds > 0.5 * many.ttft


def test_prompts_delay_tokens_only_where_others_send_them() -> None:
    here = llama(tp=2, size="70b")
    alone = serve(here, prompt=8192, output=512, concurrency=1)
    assert alone.mixed_share == 0
    assert alone.tpot == pytest.approx(alone.decode.seconds)
    short, long = (serve(here, prompt=n, output=512, concurrency=16) for n in (128, 8192))
    assert long.tpot > 1.5 * short.tpot
    assert 0 < short.mixed_share < 1


def test_a_reserving_engine_holds_fewer_requests() -> None:
    free, reserving = (
        most_throughput(llama(engine=engine), prompt=128, output=4096, constants=IDEAL) for engine in ("vllm", "trtllm")
    )
    assert reserving.running == pytest.approx(free.running * (128 + 2048) / (128 + 4096), rel=0.01)


def test_static_batches_make_the_first_token_wait() -> None:
    here = llama(tp=2, size="70b")
    static, continuous = (
        serve(here, prompt=2048, output=512, concurrency=16, batching=kind) for kind in ("static", "continuous")
    )
    assert static.tpot < continuous.tpot
    assert static.ttft > continuous.ttft


def test_experts_hit_by_a_batch() -> None:
    mixtral = get_model("mixtral-8x7b")
    assert experts_hit(mixtral, 1) == pytest.approx(2)
    assert experts_hit(mixtral, 2) == pytest.approx(8 * (1 - 0.75**2))
    assert experts_hit(mixtral, 1000) == pytest.approx(8)
    assert experts_hit(mixtral, 16, 0.7) < experts_hit(mixtral, 16)
    assert expert_imbalance(100, mixtral, 1, 0.5) == 1
    assert expert_imbalance(1e9, mixtral, 8, 0.0) == pytest.approx(1, abs=1e-3)


def test_a_small_batch_reads_few_experts() -> None:
    here = Deployment.of(get_model("qwen3-30b-a3b"), Cluster.of("h200-sxm x 1"), None, "fp8")
    times = [step_time(here, sequences=n, constants=IDEAL).experts for n in (1, 4, 4096)]
    assert times[0] == pytest.approx(times[2] * 8 / 128, rel=0.7)
    assert times[1] == pytest.approx(times[0] * experts_hit(here.model, 4) / 8, rel=0.02)


def test_expert_parallel_groups_exchange_tokens() -> None:
    cluster = Cluster.of("h200-sxm x 8")
    spread = Deployment.of(get_model("deepseek-v3"), cluster, ServingLayout(dp=8, ep=8), "fp8")
    joined = Deployment.of(get_model("deepseek-v3"), cluster, ServingLayout(tp=8), "fp8")
    assert exchange_seconds(spread, 1.0, 64) > 0
    # latent attention holds the same cache on every GPU of a tensor parallel group
    assert joined.cache_bytes(4096) == spread.cache_bytes(4096)
    full = most_throughput(spread, prompt=1024, output=1024)
    assert full.tokens_per_second > most_throughput(joined, prompt=1024, output=1024).tokens_per_second


def test_windows_bound_the_cache() -> None:
    here = Deployment.of(get_model("gpt-oss-120b"), Cluster.of("h200-sxm x 1"), None, "fp4")
    slope = here.cache_bytes(20_000) - here.cache_bytes(10_000)
    assert slope == pytest.approx(10_000 * 18 * 2 * 8 * 64)  # half of the 36 layers have a window
    assert here.precision.weight_only
    assert here.precision.rest_bytes == 2.0


def test_stages_share_the_weights() -> None:
    one = Deployment.of(get_model("llama-3-70b"), Cluster.of("h100-sxm x 8"), ServingLayout(tp=2), "fp8")
    two = Deployment.of(get_model("llama-3-70b"), Cluster.of("h100-sxm x 8"), ServingLayout(tp=2, pp=4), "fp8")
    assert two.weight_bytes < one.weight_bytes / 2
    assert cache_room(two).tokens > 4 * cache_room(one).tokens


def test_disaggregated_decode_never_waits_for_prompts() -> None:
    here = llama(tp=2, size="70b", gpu="h200-sxm")
    apart = serve_disaggregated(here, here, prompt=8192, output=1024, concurrency=64, prefill_replicas=2)
    together = serve(here, prompt=8192, output=1024, concurrency=64)
    assert apart.tpot < together.tpot
    assert apart.transfer_seconds == pytest.approx(here.cache_bytes(8192) / (0.7 * here.cluster.network_bandwidth))
    assert apart.requests_per_second == min(apart.prefill_limit, apart.decode_limit)
    balanced = serve_disaggregated(here, here, prompt=8192, output=1024, concurrency=64)
    assert balanced.balance == pytest.approx(balanced.decode_limit / balanced.prefill_limit)


def test_speculation_pays_while_memory_limits() -> None:
    here = llama(tp=2, size="70b")
    small, large = (speculate(here, batch=n, context=1000, guesses=3, acceptance=0.7) for n in (1, 512))
    assert small.speedup > 1.5 > large.speedup
    assert small.tokens_per_step == pytest.approx(1 + 0.7 + 0.49 + 0.343)
    assert expected_tokens(3, 1.0) == 4
    assert small.break_even is not None
    even = speculate(here, batch=1, context=1000, guesses=3, acceptance=small.break_even)
    assert even.speedup == pytest.approx(1, abs=1e-6)


def test_what_does_not_fit_says_what_would() -> None:
    with pytest.raises(UsageError, match=r"weights take 131\.4 GiB.*What would fit: tp=2 .*precision='fp8'"):
        require_room(llama(name="bf16", size="70b"), 4096)
    with pytest.raises(UsageError, match=r"at most \d+ tokens"):
        serve(llama(name="bf16", gpu="l4"), prompt=100_000, output=1000, concurrency=1)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: llama(name="fp8", gpu="a100-sxm-80gb"), "has no float8 products. Nearest: int8"),
        (lambda: llama(tp=3), "tp=3 does not divide the 32 heads.*Nearest: tp=2"),
        (lambda: llama(name="fp7"), "precision='fp7'"),
        (lambda: llama(engine="vlm"), "Did you mean 'vllm'"),
        (lambda: ServingLayout(tp=0), "Nearest: tp=1"),
        (lambda: ServingLayout(tp=4, ep=3), "ep=3 does not divide.*Nearest: ep=2"),
        (lambda: ServingLayout(tp=4, ep=2, expert_tp=4), "Nearest: expert_tp=2"),
        (lambda: serving_precision("fp8", kv="fp5"), "kv='fp5'"),
        (lambda: serve(llama(), prompt=0, output=1, concurrency=1), "prompt=0"),
        (lambda: serve(llama(), prompt=1, output=1, concurrency=0), "concurrency=0"),
        (lambda: speculate(llama(), batch=1, context=1, guesses=2, acceptance=1.5), "Nearest: acceptance=1"),
    ],
)
def test_bad_input_names_the_field(build: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build()  # type: ignore[operator]


def test_layout_larger_than_the_cluster() -> None:
    with pytest.raises(UsageError, match="Nearest: gpus=8"):
        Deployment.of(get_model("llama-3-8b"), Cluster.of("h100-sxm x 4"), ServingLayout(tp=8))
    with pytest.raises(UsageError, match="has no experts"):
        Deployment.of(get_model("llama-3-8b"), Cluster.of("h100-sxm x 4"), ServingLayout(tp=2, ep=2))


def test_provenance_is_the_weakest() -> None:
    assert serve(llama(), prompt=100, output=100, concurrency=1).provenance.kind == "fitted"
    other = serve(llama(name="bf16", gpu="mi300x"), prompt=100, output=100, concurrency=1)
    assert other.provenance.kind == "transferred"
    assert "cdna3 has no rows" in other.provenance.text


def test_constants_are_plausible() -> None:
    constants = load_serving_constants()
    for found in constants.generations.values():
        assert 0.6 < found.stream < 0.95
        assert all(0.3 < share < 0.95 for share in found.compute.values())
    assert set(constants.without) == set(constants.fitted_on)
    assert not constants.leaving_out("gptfast").fitted_on.get("gptfast")


def test_stages_wait_for_the_last_one() -> None:
    here = Deployment.of(get_model("llama-3-70b"), Cluster.of("h100-sxm x 8"), ServingLayout(tp=1, pp=8), "fp8")
    alone = step_time(here, sequences=4, context=500, constants=IDEAL)
    full = step_time(here, sequences=4, context=500, in_flight=8, constants=IDEAL)
    output = 2 * count_parameters(here.model).output / 3.35e12
    assert full.gemm - alone.gemm == pytest.approx(7 * output, rel=0.01)


def test_a_group_between_nodes_says_that_it_is_assumed() -> None:
    cluster = Cluster.of("h100-sxm x 16")
    wide = Deployment.of(get_model("llama-3-70b"), cluster, ServingLayout(tp=16), "fp8")
    narrow = Deployment.of(get_model("llama-3-70b"), cluster, ServingLayout(tp=8), "fp8", collectives=wide.collectives)
    assert step_time(wide, sequences=1, context=100).provenance.kind == "assumed"
    assert step_time(narrow, sequences=1, context=100).provenance.kind == "fitted"


def test_answers_have_a_range_from_validation() -> None:
    answer = serve(llama(), prompt=1000, output=500, concurrency=8)
    for value, (low, high) in ((answer.tpot, answer.tpot_range), (answer.ttft, answer.ttft_range)):
        assert 0.2 * value < low < value < high < 5 * value
    width = answer.tpot_range[1] / answer.tpot_range[0]
    assert width < answer.ttft_range[1] / answer.ttft_range[0]


@pytest.mark.parametrize("fields", [{"redundant": 4}, {"overlap": True}])
def test_options_of_experts_need_experts(fields):
    name = next(iter(fields))
    with pytest.raises(UsageError, match=f"{name}=.*: llama-3-8b has no experts. Nearest: {name}="):
        Deployment.of(get_model("llama-3-8b"), Cluster.of("h100-sxm x 2"), ServingLayout(tp=2, **fields))
