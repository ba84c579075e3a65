"""Memory of training: states by the byte, activations by module, pipelines, sharding, and published peaks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from nearpeak.errors import UsageError
from nearpeak.plan.models.catalogue import get_model
from nearpeak.plan.models.model import count_parameters
from nearpeak.plan.training.job import Job, Software, precision_named
from nearpeak.plan.training.layout import Layout, layers_of, pipeline_stages
from nearpeak.plan.training.memory import WORKSPACE, StageMemory, memory, memory_by_stage, peak


def job(name: str = "llama-3-8b", precision: str = "bf16", sequence: int = 4096, **layout: Any) -> Job:
    fields = {"gpus": 8, "global_batch": 64, **layout}
    return Job(model=get_model(name), layout=Layout(**fields), sequence=sequence, precision=precision_named(precision))


def test_states_of_mixed_precision_adamw_are_two_two_and_eight_bytes_a_weight() -> None:
    found = memory(job("llama-2-7b", gpus=1, sharding="none"))
    weights = get_model("llama-2-7b").parameters
    assert (found.parameters, found.gradients, found.optimizer) == (2 * weights, 2 * weights, 8 * weights)
    assert found.states == 12 * weights  # 84 GB for 7 billion


@pytest.mark.parametrize(
    ("sharding", "bytes_per_weight"),
    [("none", 12.0), ("zero1", 4 + 8 / 8), ("zero2", 2 + 2 / 8 + 8 / 8), ("zero3", 12 / 8)],
)
def test_each_stage_of_sharding_spreads_more(sharding: str, bytes_per_weight: float) -> None:
    found = memory(job(sharding=sharding))
    assert found.states == pytest.approx(bytes_per_weight * get_model("llama-3-8b").parameters)


def test_experts_are_spread_over_their_own_mesh() -> None:
    one = memory(job("mixtral-8x7b", ep=1, sharding="zero1"))
    eight = memory(job("mixtral-8x7b", ep=8, sharding="zero1"))
    counts = count_parameters(get_model("mixtral-8x7b"))
    experts = counts.experts_of(get_model("mixtral-8x7b"))
    assert one.parameters == 2 * counts.total
    assert eight.parameters == 2 * (counts.total - experts) + 2 * experts / 8
    # no two ranks hold the same expert, so there is nothing to spread the optimizer over
    assert eight.optimizer == pytest.approx(8 * ((counts.total - experts) / 8 + experts / 8))


def test_activations_fall_with_tensor_and_context_parallelism() -> None:
    whole = memory(job(tp=1, global_batch=8, sharding="zero1")).activation
    assert memory(job(tp=4, global_batch=8)).activation == pytest.approx(whole / 4, rel=1e-6)
    assert memory(job(cp=4, global_batch=8)).activation == pytest.approx(whole / 4, rel=1e-6)


def test_without_sequence_parallelism_norms_stay_whole() -> None:
    with_it, without = memory(job(tp=4)), memory(job(tp=4, sequence_parallel=False))
    assert without.activations["norm"] == 4 * with_it.activations["norm"]
    assert without.activations["feed"] == with_it.activations["feed"]


def test_the_first_stage_of_a_pipeline_holds_the_most_microbatches() -> None:
    stages = memory_by_stage(job(pp=4))
    activations = [stage.activation for stage in stages]
    assert [value / activations[-1] for value in activations] == [4, 3, 2, 1]
    assert stages[-1].logits > 0 and not any(stage.logits for stage in stages[:-1])
    interleaved = memory_by_stage(job(pp=4, virtual=2))[0].activation
    assert interleaved == pytest.approx(activations[0] * (2 * 3 + 4 + 1) / 8)


def test_few_microbatches_are_fewer_in_flight() -> None:
    assert memory_by_stage(job(pp=4, global_batch=4))[0].activation == memory_by_stage(job(pp=4))[2].activation


def test_recomputation_keeps_the_inputs_of_layers_and_one_layer_at_a_time() -> None:
    none, full = memory(job()), memory(job(recompute=("layer",)))
    tokens, llama = 4096, get_model("llama-3-8b")
    assert full.activation == 32 * 2 * llama.hidden * tokens
    assert full.recomputed == pytest.approx(none.activation / 32)
    part = memory(job(recompute=("feed_activation",)))
    assert none.activation - part.activation == 32 * 2 * llama.intermediate * tokens


def test_recomputed_expert_activations_are_what_a_published_pair_of_runs_differs_by() -> None:
    # 66.297 and 62.103 GB: Nemotron 3 Nano without and with recomputed activations of its experts
    nano = {"gpus": 16, "global_batch": 16, "ep": 8}
    none = memory(job("nemotron-3-nano", sequence=8192, **nano))
    some = memory(job("nemotron-3-nano", sequence=8192, recompute=("feed_activation",), **nano))
    assert none.activations["experts"] - some.activations["experts"] == pytest.approx(66.297e9 - 62.103e9, rel=0.01)


def test_stages_have_their_own_layers() -> None:
    # the first three layers of DeepSeek-V3 have no experts
    first, second, *_ = memory_by_stage(job("deepseek-v3", gpus=64, pp=4, ep=16))
    assert first.activations["experts"] / second.activations["experts"] == pytest.approx(4 * 12 / (3 * 16))
    counts = count_parameters(get_model("deepseek-v3"))
    layer = counts.experts_of(get_model("deepseek-v3")) / 58 / 16
    stages = pipeline_stages(get_model("deepseek-v3"), Layout(gpus=64, pp=4, ep=16, global_batch=64))
    assert [round(stage.expert_weights / layer) for stage in stages] == [15 - 3, 16, 16, 14]
    assert "".join(stage.feeds for stage in stages) == get_model("deepseek-v3").feeds


def test_interleaved_stages_take_pieces_in_turn() -> None:
    assert [layers_of(8, 2, 2, (), index) for index in (0, 1)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    # 126 layers in 128 pieces: the stages with the embedding and with the output layer have one fewer
    assert [len(layers_of(126, 16, 8, (), index)) for index in range(16)] == [7, *[8] * 14, 7]
    # an output layer that computes as much as three layers takes their place
    assert [len(layers_of(61, 16, 1, (), index, 3)) for index in range(16)] == [*[4] * 15, 1]


def test_a_split_is_followed() -> None:
    even, uneven = memory_by_stage(job(pp=2)), memory_by_stage(job(pp=2, split=(20, 12)))
    assert uneven[0].activation == pytest.approx(even[0].activation * 20 / 16)
    assert uneven[1].activation == pytest.approx(even[1].activation * 12 / 16)


def test_fused_gradients_leave_a_tensor_of_each_shape() -> None:
    counts = count_parameters(get_model("llama-3.1-405b"))
    found = memory(job("llama-3.1-405b", tp=8, gpus=64, global_batch=8))
    weights = (counts.attention + counts.dense + counts.output) / 8
    assert found.workspace == pytest.approx(WORKSPACE + 2 * weights)
    assert memory(replace(job(), trainable=0.01)).workspace == WORKSPACE


def test_distributed_data_parallel_copies_gradients_into_its_buckets() -> None:
    eager = replace(job(sharding="none"), software="eager")
    alone = replace(job(sharding="none", gpus=1), software="eager")
    weights = get_model("llama-3-8b").parameters
    assert memory(eager).communication - memory(alone).communication == 2 * weights


def test_hiding_the_exchange_of_experts_keeps_outputs_of_parts() -> None:
    plain, hidden = (memory(job("qwen3-30b-a3b", ep=8, overlap_experts=on)) for on in (False, True))
    assert hidden.activation - plain.activation == 48 * 4 * 2 * 2048 * 4096


def test_offload_takes_states_off_the_gpu() -> None:
    assert memory(job(offload="optimizer")).optimizer == 0
    assert memory(job(offload="optimizer+gradients")).gradients == 0
    assert memory(job(offload="all")).states == 0


def test_allocated_is_at_most_reserved_and_reserved_at_most_what_the_gpu_needs() -> None:
    found = memory(job(tp=2, sharding="zero3"))
    assert 0 < found.states < found.allocated < found.reserved < found.total < found.safe
    parts = found.states + found.activation + found.logits + found.communication + found.recomputed + found.workspace
    assert found.allocated == pytest.approx(parts)


def test_the_quick_peak_sees_a_second_stage_that_is_fuller() -> None:
    asked = job("deepseek-v3", gpus=64, pp=16, ep=4, recompute=("layer",))
    assert peak(asked) == pytest.approx(memory(asked).total)
    assert memory(asked).stage == 1


@pytest.mark.parametrize("fields", [{}, {"pp": 4}, {"tp": 2, "recompute": ("layer",)}, {"sharding": "zero3"}])
def test_the_quick_peak_is_the_total_of_the_fullest_stage(fields: dict[str, Any]) -> None:
    asked = job(**fields)
    assert peak(asked) == pytest.approx(max(memory_by_stage(asked)[0].total, memory_by_stage(asked)[-1].total))


def test_adapters_have_few_gradients() -> None:
    asked = job()
    adapted = memory(replace(asked, trainable=0.01))
    assert adapted.gradients == pytest.approx(0.01 * memory(asked).gradients)
    assert adapted.parameters == memory(asked).parameters


def test_a_job_that_makes_no_sense_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"sequence=0.*sequence=1"):
        job(sequence=0)
    with pytest.raises(UsageError, match="bf16"):
        precision_named("bf17")
    with pytest.raises(UsageError, match=r"trainable=2"):
        replace(job(), trainable=2.0)
    with pytest.raises(UsageError, match="eager"):
        replace(job(), software="eagar")  # type: ignore[arg-type]


def test_a_loss_of_single_operators_has_its_softmax_and_gradient_in_memory() -> None:
    fused, unfused = (memory(replace(job(), software=software)).logits for software in ("fused", "unfused"))
    assert unfused / fused == pytest.approx(12 / 6.5)


def test_states_of_other_optimizers_and_frozen_weights() -> None:
    model = get_model("llama-3-8b")
    layout = Layout(gpus=1, global_batch=1, sharding="none")

    def fullest(precision: str, trainable: float = 1.0) -> StageMemory:
        job = Job(model=model, layout=layout, sequence=2048, precision=precision_named(precision), trainable=trainable)
        return memory(job)

    adam, narrow, muon = (fullest(name) for name in ("bf16", "bf16-adam8bit", "bf16-muon"))
    assert narrow.optimizer == pytest.approx(adam.optimizer * 2.03125 / 8)
    assert muon.optimizer == pytest.approx(adam.optimizer / 2)
    adapters = fullest("qlora", trainable=0.01)
    assert adapters.parameters == pytest.approx(model.parameters * 4.127 / 8)
    assert adapters.gradients + adapters.optimizer < 0.02 * (adam.gradients + adam.optimizer)
    with pytest.raises(UsageError, match="adapters"):
        fullest("qlora")


def test_dualpipe_has_the_states_and_activations_of_both_directions() -> None:
    fields = {"gpus": 16, "pp": 4, "ep": 4}
    plain = memory_by_stage(job("deepseek-v3", **fields))
    both = memory_by_stage(job("deepseek-v3", schedule="dualpipe", **fields))
    for index, stage in enumerate(both):
        other = plain[-1 - index]
        assert stage.parameters == plain[index].parameters + other.parameters
        assert stage.gradients == plain[index].gradients + other.gradients
        assert stage.activation == pytest.approx(plain[index].activation + other.activation)
    # a rank and its counterpart have the same two stages, and share their optimizer states
    assert both[0].optimizer == both[-1].optimizer
    assert sum(stage.optimizer for stage in both) == pytest.approx(sum(stage.optimizer for stage in plain))


@pytest.mark.parametrize("recompute", [(), ("layer",)])
def test_zero_bubble_stages_wait_with_whole_activations_for_gradients_of_weights(recompute: tuple[str, ...]) -> None:
    fields = {"gpus": 8, "pp": 8, "global_batch": 32, "recompute": recompute}
    plain = memory_by_stage(job("llama-3-8b", **fields))
    delayed = memory_by_stage(job("llama-3-8b", schedule="zero-bubble", **fields))
    assert delayed[0].total == plain[0].total
    assert delayed[5].total > plain[5].total
    name = "deferred weight gradients"
    whole = memory_by_stage(job("llama-3-8b", **(fields | {"recompute": ()})))[5].activation / 3  # of 3 microbatches
    assert delayed[5].activations[name] == pytest.approx(5 * whole)
    assert name not in delayed[0].activations
    every = job("llama-3-8b", schedule="zero-bubble", **fields)
    assert peak(every) == pytest.approx(max(stage.total for stage in delayed))


@pytest.mark.parametrize(
    ("name", "software", "fields"),
    [
        ("opt-66b", "fused", {"gpus": 32, "tp": 4, "pp": 8, "virtual": 4, "global_batch": 64}),  # nothing to shard
        ("mpt-125m", "eager", {"gpus": 64, "tp": 4, "pp": 4, "global_batch": 64}),  # less than a bucket holds
    ],
)
def test_more_sharding_needs_no_more_memory(name: str, software: Software, fields: dict[str, Any]) -> None:
    jobs = [job(name, sharding=sharding, **fields) for sharding in ("none", "zero1", "zero2", "zero3")]
    totals = [memory(replace(each, software=software)).total for each in jobs]
    assert all(more <= less * 1.001 for less, more in itertools.pairwise(totals)), totals


def test_a_stage_of_one_layer_gathers_no_next_one() -> None:
    whole, alone = (
        memory_by_stage(job("llama-3.2-1b", gpus=4 * pp, pp=pp, global_batch=64, sharding="zero3"))[1] for pp in (8, 16)
    )
    assert alone.communication == pytest.approx(whole.communication * 2 / 3)
