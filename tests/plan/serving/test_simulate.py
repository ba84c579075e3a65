"""The scheduler, simulated: queues, waves, chunks, preemption, pools, and what must add up."""

from __future__ import annotations

import pytest

from nearpeak.errors import UsageError
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.models.catalogue import get_model
from nearpeak.plan.serving.constants import load_serving_constants
from nearpeak.plan.serving.deployment import Deployment, ServingLayout, cache_room
from nearpeak.plan.serving.plan import Load, serving_plan
from nearpeak.plan.serving.serve import serve, speculate
from nearpeak.plan.serving.simulate import (
    Request,
    Workload,
    closed_loop,
    open_loop,
    read_arrivals,
    simulate,
)
from nearpeak.plan.serving.step import step_time


def deployment(model="llama-3-8b", on="h100-sxm x 1", layout=None, precision="bf16", **options):
    return Deployment.of(get_model(model), Cluster.of(on), layout, precision, **options)


def test_one_request_alone_is_its_prompt_and_its_steps():
    llama = deployment()
    run = simulate(llama, Workload(requests=(Request(arrival=0.0, prompt=1024, output=101),)))
    first = load_serving_constants().engines["vllm"].first
    prompt = step_time(llama, sequences=0, prompt_tokens=1024, prompt_length=1024).seconds
    step = step_time(llama, sequences=1, context=1024 + 51).seconds
    assert run.ttft.mean == pytest.approx(first + prompt, rel=1e-9)
    assert run.tpot.mean == pytest.approx(step, rel=1e-3)
    assert run.latency.mean == pytest.approx(run.ttft.mean + 100 * run.tpot.mean)
    assert run.queue.mean == pytest.approx(first)


def test_prompts_that_come_at_once_wait_for_each_other():
    """SGLang's requests of equal length run in waves: the mean prompt waits for half of the others."""
    llama = deployment(engine="sglang")
    prompt = step_time(llama, sequences=0, prompt_tokens=8192, prompt_length=8192).seconds
    first = load_serving_constants().engines["sglang"].first
    waves = simulate(llama, closed_loop(prompt=8192, output=64, concurrency=16, requests=16))
    assert waves.ttft.mean - first == pytest.approx(prompt * 17 / 2, rel=0.02)
    # formulas for a steady load do not see the wave
    steady = serve(llama, prompt=8192, output=64, concurrency=16)
    assert steady.ttft < 0.8 * waves.ttft.mean


def test_decoding_pauses_for_prompts_where_the_engine_computes_them_first():
    requests = (
        Request(arrival=0.0, prompt=128, output=200),
        Request(arrival=0.2, prompt=16384, output=2),
    )
    mixed = simulate(deployment(), Workload(requests=requests))
    first = simulate(deployment(engine="sglang"), Workload(requests=requests))
    alone = step_time(deployment(engine="sglang"), sequences=0, prompt_tokens=16384, prompt_length=16384).seconds
    quiet = simulate(deployment(engine="sglang"), Workload(requests=requests[:1]))
    assert first.latency.p99 - quiet.latency.p99 == pytest.approx(alone, rel=0.1)
    assert mixed.ttft.p99 > first.ttft.p99 * 0.5


def test_in_a_steady_load_the_simulation_agrees_with_the_formulas():
    llama = deployment("llama-3-70b", "h200-sxm x 4", ServingLayout(tp=4), "fp8")
    run = simulate(llama, Load(prompt=1024, output=512, concurrency=32).closed_loop())
    formula = serve(llama, prompt=1024, output=512, concurrency=32)
    assert run.tpot.mean == pytest.approx(formula.tpot, rel=0.08)
    assert run.ttft.mean == pytest.approx(formula.ttft, rel=0.25)
    assert run.tokens_per_second == pytest.approx(formula.tokens_per_second, rel=0.08)


def test_every_token_comes_out():
    llama = deployment()
    load = open_loop(prompt=700, output=90, rate=5.0, requests=120, spread=0.5)
    run = simulate(llama, load)
    assert run.requests == 120
    assert run.tokens_per_second * run.seconds == pytest.approx(sum(item.output for item in load.requests))
    assert run.latency.p99 >= run.ttft.p99 >= run.queue.p99 > 0
    assert 0 < run.busy <= 1 and 0 < run.cache_peak <= 1


def test_a_higher_rate_never_shortens_the_wait():
    llama = deployment()
    waits = [simulate(llama, open_loop(prompt=2048, output=128, rate=rate, requests=150)).ttft for rate in (1, 8, 40)]
    assert waits[0].mean < waits[1].mean < waits[2].mean
    assert waits[2].p99 > 10 * waits[0].p99  # beyond what it can serve, the queue grows to the end


def test_a_full_cache_preempts_or_makes_requests_wait():
    small = dict(memory_share=0.27)  # 3.1 GB of cache: 3 whole requests
    load = closed_loop(prompt=2000, output=6000, concurrency=8, requests=8)
    preempting = simulate(deployment(), load, **small)
    assert preempting.preemptions > 0 and preempting.cache_peak <= 1.0
    reserving = simulate(deployment(engine="trtllm"), load, **small)
    assert reserving.preemptions == 0 and reserving.queue.p99 > 10 * preempting.queue.median
    roomy = simulate(deployment(), load)
    assert roomy.preemptions == 0 and roomy.latency.mean < preempting.latency.mean


def test_a_shared_prefix_is_computed_once():
    llama = deployment()
    plain = simulate(llama, closed_loop(prompt=4096, output=32, concurrency=8, requests=80))
    shared = simulate(llama, closed_loop(prompt=4096, output=32, concurrency=8, requests=80, prefix=3584))
    assert shared.ttft.median < 0.5 * plain.ttft.median
    assert shared.cache_peak < 0.5 * plain.cache_peak


def test_speculation_has_the_steps_of_its_formula():
    llama = deployment("llama-3-70b", "h200-sxm x 4", ServingLayout(tp=4), "fp8")
    one = Workload(requests=(Request(arrival=0.0, prompt=512, output=513),))
    run = simulate(llama, one, guesses=3, acceptance=0.7)
    formula = speculate(llama, batch=1, context=512 + 256, guesses=3, acceptance=0.7)
    assert run.tpot.mean == pytest.approx(formula.tpot, rel=0.02)
    assert run.tpot.mean < simulate(llama, one).tpot.mean


def test_disaggregated_decoding_is_not_disturbed_by_prompts():
    llama = deployment("llama-3-70b", "h200-sxm x 8", ServingLayout(tp=4), "fp8")
    load = closed_loop(prompt=8192, output=128, concurrency=16, requests=96, spread=0.2)
    together = simulate(llama, load, replicas=2)
    apart = simulate(llama, load, prefill=llama)
    assert together.gpus == apart.gpus == 8
    assert apart.tpot.p99 < together.tpot.p99
    pure = step_time(llama, sequences=16, context=8192 + 64).seconds
    assert apart.tpot.p99 < 1.3 * pure


def test_replicas_share_the_requests_evenly():
    llama = deployment(on="h100-sxm x 4")
    one = simulate(llama, closed_loop(prompt=512, output=128, concurrency=32, requests=128))
    four = simulate(llama, closed_loop(prompt=512, output=128, concurrency=128, requests=512), replicas=4)
    assert four.tokens_per_second == pytest.approx(4 * one.tokens_per_second, rel=0.03)
    # a client at one of four replicas leaves three idle
    idle = simulate(llama, closed_loop(prompt=512, output=128, concurrency=1, requests=8), replicas=4)
    assert idle.busy == pytest.approx(0.25, abs=0.03)


def test_a_pipeline_works_on_several_batches_at_once():
    stages = deployment("llama-3-70b", "h100-sxm x 8", ServingLayout(tp=4, pp=2), "fp8")
    busy = simulate(stages, closed_loop(prompt=512, output=64, concurrency=32, requests=64))
    alone = simulate(stages, closed_loop(prompt=512, output=64, concurrency=1, requests=2))
    assert busy.tokens_per_second > 1.5 * alone.tokens_per_second * 2


def test_one_long_prompt_is_given_all_gpus():
    """A single request of a million tokens: tensor parallelism over all GPUs, not over the fewest that hold it."""
    plan = serving_plan(
        get_model("llama-3-8b"), Cluster.of("h100-sxm x 8"), Load(prompt=1 << 20, output=64, concurrency=1)
    )
    assert plan.layout.tp == 8
    assert plan.simulation.requests == 10 and plan.simulation.ttft.mean < 120


def test_concurrency_below_the_replicas_does_not_multiply():
    plan = serving_plan(
        get_model("llama-3-8b"), Cluster.of("h100-sxm x 8"), Load(prompt=128, output=64, concurrency=1), ServingLayout()
    )
    assert plan.simulation.tokens_per_second < 1.05 / plan.simulation.tpot.mean


def test_chunks_of_prompts_beside_decoding_are_not_charged_as_eager_launches():
    """A step of few tokens is a graph, with a prompt in it or without; a long one is launched kernel by kernel."""
    llama = deployment("llama-3-70b", "h100-sxm x 8", ServingLayout(tp=8), "fp8")
    decode = step_time(llama, sequences=32, context=2048).seconds
    prompt = step_time(llama, sequences=0, prompt_tokens=256, prompt_length=256).seconds
    mixed = step_time(llama, sequences=32, context=2048, prompt_tokens=256, prompt_length=256).seconds
    assert mixed < decode + prompt
    layers = [
        step_time(llama, sequences=32, context=2048, prompt_tokens=tokens, prompt_length=1024).layers
        for tokens in (0, 256, 1024)
    ]
    assert layers[0] == layers[1] < layers[2]


def test_wide_expert_parallelism_takes_redundant_experts():
    model, cluster = get_model("deepseek-v3"), Cluster.of("h100-sxm x 72")
    with pytest.raises(UsageError, match="redundant=32"):
        Deployment.of(model, cluster, ServingLayout(dp=72, ep=72), "fp8")
    wide = Deployment.of(model, cluster, ServingLayout(dp=72, ep=72, redundant=32), "fp8", engine="sglang")
    overlapped = Deployment.of(
        model, cluster, ServingLayout(dp=72, ep=72, redundant=32, overlap=True), "fp8", engine="sglang"
    )
    step = {item.layout.overlap: step_time(item, sequences=256, context=2050) for item in (wide, overlapped)}
    assert step[True].seconds < step[False].seconds
    assert step[True].communication < step[False].communication
    # published: 22.3 thousand tokens/s of a node of eight, with two overlapped batches (SGLang, 2025-05-05)
    assert 256 * 8 / step[True].seconds == pytest.approx(22.3e3, rel=0.25)
    plain = Deployment.of(model, cluster, ServingLayout(dp=64, ep=64), "fp8")
    assert wide.weight_bytes > plain.weight_bytes * 0.95


def test_arrivals_are_read_from_a_file(tmp_path):
    path = tmp_path / "arrivals.csv"
    path.write_text("arrival_s,prompt,output,cached\n0.5,100,10,\n0.0,200,20,50\n", encoding="utf-8")
    load = read_arrivals(path)
    assert [item.arrival for item in load.requests] == [0.0, 0.5]
    assert load.requests[0].cached == 50
    assert simulate(deployment(), load).requests == 2
    path.write_text("arrival_s,prompt,output\n0.5,many,10\n", encoding="utf-8")
    with pytest.raises(UsageError, match="line 2"):
        read_arrivals(path)
    path.write_text("when,prompt\n0.5,1\n", encoding="utf-8")
    with pytest.raises(UsageError, match="arrival_s"):
        read_arrivals(path)


@pytest.mark.parametrize(
    "broken",
    [
        lambda: open_loop(prompt=10, output=1, rate=0.0),
        lambda: open_loop(prompt=10, output=1, rate=float("nan")),
        lambda: closed_loop(prompt=10, output=1, concurrency=0),
        lambda: closed_loop(prompt=10, output=1, concurrency=1, prefix=11),
        lambda: closed_loop(prompt=10, output=1, concurrency=1, spread=1.0),
        lambda: Workload(requests=()),
        lambda: Workload(requests=(Request(arrival=-1.0, prompt=1, output=1),)),
        lambda: Workload(requests=(Request(arrival=0.0, prompt=1, output=1, cached=2),)),
    ],
)
def test_requests_that_cannot_be_are_refused(broken):
    with pytest.raises(UsageError):
        broken()


def test_a_thousand_requests_take_few_events():
    """Equal steps are taken in one go: the events of a run count its requests, not its tokens."""
    llama = deployment("llama-3-70b", "h200-sxm x 8", ServingLayout(tp=4), "fp8")
    load = closed_loop(prompt=1024, output=1024, concurrency=64, requests=1000, spread=0.1)
    run = simulate(llama, load, replicas=2)
    assert run.events < 4 * 1000


def test_the_cost_of_a_million_tokens_pays_for_all_gpus():
    load = Load(prompt=128, output=64, concurrency=8)
    model, cluster = get_model("llama-3-8b"), Cluster.of("h100-sxm x 2")
    plan = serving_plan(model, cluster, load, ServingLayout(tp=2), price=3.6)
    assert plan.dollars_per_million_tokens == pytest.approx(2e3 / plan.simulation.tokens_per_second)
    assert serving_plan(model, cluster, load, ServingLayout(tp=2)).dollars_per_million_tokens is None
    with pytest.raises(UsageError, match="price"):
        serving_plan(model, cluster, load, ServingLayout(tp=2), price=-1.0)


def test_batches_in_a_pipeline_have_no_more_room_than_the_cache():
    llama = deployment(on="h100-sxm x 8", layout=ServingLayout(pp=8))
    requests = tuple(Request(arrival=0.0, prompt=900_000, output=2) for _ in range(8))
    assert 4 <= cache_room(llama).sequences(900_002) < 5
    run = simulate(llama, Workload(requests=requests))
    alone = simulate(llama, Workload(requests=requests[:4]))
    assert run.seconds == pytest.approx(2 * alone.seconds, rel=0.1)  # two waves of four


@pytest.mark.parametrize("number", [0, -1, 10**12])
def test_numbers_of_requests_that_cannot_be_simulated_are_errors(number):
    with pytest.raises(UsageError, match="Nearest: requests="):
        closed_loop(prompt=8, output=8, concurrency=1, requests=number)
    with pytest.raises(UsageError, match="Nearest: requests="):
        open_loop(prompt=8, output=8, rate=1.0, requests=number)
    with pytest.raises(UsageError, match="Nearest: concurrency="):
        closed_loop(prompt=8, output=8, concurrency=number)
    with pytest.raises(UsageError, match="Nearest: replicas="):
        simulate(deployment(), closed_loop(prompt=8, output=8, concurrency=1), replicas=number)
    with pytest.raises(UsageError, match="Nearest: concurrency="):
        Load(prompt=8, output=8, concurrency=float(number))


def test_arrivals_so_late_that_steps_vanish_are_errors():
    with pytest.raises(UsageError, match="higher rate"):
        open_loop(prompt=8, output=8, rate=1e-300, requests=2)


@pytest.mark.parametrize("concurrency", [1, 2, 5])
def test_groups_without_a_request_have_no_throughput(concurrency):
    layout = ServingLayout(dp=8, ep=8)
    deepseek = deployment("deepseek-v2-lite", on="h100-sxm x 8", layout=layout)
    steady = serve(deepseek, prompt=100, output=64, concurrency=concurrency)
    assert steady.running == concurrency
    run = simulate(deepseek, closed_loop(prompt=100, output=64, concurrency=concurrency))
    assert steady.tokens_per_second == pytest.approx(run.tokens_per_second, rel=0.2)
