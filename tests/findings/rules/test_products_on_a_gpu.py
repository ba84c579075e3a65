"""Pairs of the corpus on an H200 with good kernels alone: what is predicted is what the twin saves."""

import pytest
from gpu_steps import examined, found_in
from planted import load, planted

NAMES = [
    "logits_upcast",
    "logits_kept",
    "logits_kept_for_masked",
    "causal_mask_as_tensor",
    "few_tiles",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_prediction_is_the_difference_to_the_twin(name):
    module = load(name)
    waste, clean = (examined(lambda build=build: build("cuda")) for build in (module.waste, module.clean))
    (finding,) = found_in(waste, module.RULE)
    assert finding.source == planted(name)
    assert finding.saving_s == pytest.approx(waste.profile.wall_s - clean.profile.wall_s, rel=0.1)
    assert not found_in(clean)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["batch_too_small", "dense_embedding_gradient", "skewed_experts"])
def test_found_and_not_in_the_twin(name):
    module = load(name)
    step = examined(lambda: module.waste("cuda"))
    (finding,) = found_in(step, module.RULE)
    assert finding.saving_s > 0.25 * step.profile.wall_s
    assert not found_in(examined(lambda: module.clean("cuda")))


def test_all_passes_over_float32_logits_are_part_of_the_finding():
    module = load("logits_upcast")
    step = examined(lambda: module.waste("cuda"))
    (finding,) = found_in(step, "logits-upcast")
    assert [step.ops[index].packet for index in finding.ops] == [
        "aten._to_copy",
        "aten._log_softmax",
        "aten.nll_loss_backward",
        "aten._log_softmax_backward_data",
        "aten._to_copy",
    ]
