import dataclasses

import pytest
import torch

from nearpeak.ops.cost import cost_of
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor

aten = torch.ops.aten
NONE, MEAN = 0, 1


def work(op):
    return cost_of(op).work


def of(op):
    assert cost_of(op).family == "loss", op.name
    return work(op).bytes_read, work(op).bytes_written


def test_the_likelihood_of_a_class_reads_the_targets_and_one_score_for_all_may_be_ignored(call):
    scores, target = torch.zeros(64, 1000), torch.zeros(64, dtype=torch.int64)
    assert of(call(aten.nll_loss_forward, scores, target, None, MEAN, -100)) == (64 * 8 + 4, 4 + 4)
    assert of(call(aten.nll_loss_forward, scores, target, None, NONE, -100)) == (64 * 8 + 4, 64 * 4 + 4)
    assert of(call(aten.nll_loss_forward, scores, target, torch.ones(1000), MEAN, -100)) == (64 * 8 + 4 + 4, 8)


def test_the_gradient_of_the_likelihood_is_written_in_full_and_needs_no_scores(call):
    scores, target = torch.zeros(64, 1000), torch.zeros(64, dtype=torch.int64)
    one, total = torch.ones(()), torch.ones(())
    op = call(aten.nll_loss_backward, one, scores, target, None, MEAN, -100, total)
    assert of(op) == (64 * 8, 64 * 4000)
    op = call(aten.nll_loss_backward, torch.ones(64), scores, target, None, NONE, -100, total)
    assert of(op) == (64 * 8 + 64 * 4, 64 * 4000)


def test_the_likelihood_over_an_image(call):
    scores, target = torch.zeros(2, 10, 8, 8), torch.zeros(2, 8, 8, dtype=torch.int64)
    assert of(call(aten.nll_loss2d_forward, scores, target, None, MEAN, -100)) == (128 * 8 + 4, 8)
    op = call(aten.nll_loss2d_backward, torch.ones(()), scores, target, None, MEAN, -100, torch.ones(()))
    assert of(op) == (128 * 8, 1280 * 4)


def test_margins_over_several_labels_read_one_target_of_each_row(call):
    scores, target = torch.zeros(8, 10), torch.full((8, 10), -1)
    forward = call(aten.multilabel_margin_loss_forward, scores, target, MEAN)
    assert of(forward) == (8 * 10 * 4 + 8 * 8, 4 + 8 * 10 * 4)
    backward = call(aten.multilabel_margin_loss_backward, torch.ones(()), scores, target, MEAN, torch.zeros(8, 10))
    assert of(backward) == (4 + 2 * 8 * 10 * 4 + 8 * 8, 8 * 10 * 4)


def test_a_library_gives_the_gradient_of_ctc_with_the_loss():
    scores = Tensor(shape=(50, 2, 20), strides=(40, 20, 1), dtype="float32", storage=0)
    targets = Tensor(shape=(30,), strides=(1,), dtype="int32", storage=1)
    loss = Tensor(shape=(2,), strides=(1,), dtype="float32", storage=2)
    gradient = dataclasses.replace(scores, storage=3)
    arguments = {"log_probs": scores, "targets": targets, "input_lengths": (50, 40), "target_lengths": (20, 10)}
    op = Op(name="aten._cudnn_ctc_loss.default", arguments=arguments, outputs=(loss, gradient))
    assert of(op) == (90 * 4 + 30 * 4, 8 + 50 * 2 * 20 * 4)
    unknown = dataclasses.replace(op, arguments={**arguments, "input_lengths": targets})
    assert of(unknown) == (0, 8 + 50 * 2 * 20 * 4)


def test_cross_entropy_as_one_op(call):
    scores, target = torch.zeros(64, 1000, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int64)
    op = call(aten.nll_loss_forward, scores, target, None, MEAN, -100)
    op = dataclasses.replace(op, name="aten.cross_entropy_loss.default", outputs=op.outputs[:1])
    assert of(op) == (64 * 2000 + 64 * 8, 2)
    assert work(op).vector_flops == {"float32": 2 * 64000}


@pytest.mark.parametrize("function", [aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss, aten.binary_cross_entropy])
def test_losses_of_pairs(calls, function):
    x, y = torch.full((64, 100), 0.5), torch.ones(64, 100)
    op = next(op for op in calls(function, x, y) if op.packet == f"aten.{function.__name__}")
    assert of(op) == (2 * 25600, 4)
    assert work(op).vector_flops == {"float32": 12800}


@pytest.mark.parametrize(
    ("function", "extra"),
    [(aten.mse_loss_backward, ()), (aten.smooth_l1_loss_backward, (1.0,)), (aten.huber_loss_backward, (1.0,))],
)
def test_gradients_of_pairs(call, function, extra):
    x, y = torch.zeros(64, 100), torch.ones(64, 100)
    assert of(call(function, torch.ones(()), x, y, MEAN, *extra)) == (2 * 25600, 25600)
    assert of(call(function, torch.ones(64, 100), x, y, NONE, *extra)) == (3 * 25600, 25600)


def test_weights_of_binary_cross_entropy_are_read(call):
    x, y, weight = torch.full((64, 100), 0.5), torch.ones(64, 100), torch.ones(64, 100)
    assert of(call(aten.binary_cross_entropy, x, y, weight)) == (3 * 25600, 4)
    assert of(call(aten.binary_cross_entropy_backward, torch.ones(()), x, y, weight)) == (3 * 25600, 25600)


def test_multi_margin_reads_all_scores(call):
    x, y = torch.zeros(64, 100), torch.zeros(64, dtype=torch.int64)
    assert of(call(aten.multi_margin_loss, x, y)) == (25600 + 512, 4)
    assert of(call(aten.multi_margin_loss_backward, torch.ones(()), x, y, 1, 1)) == (25600 + 512, 25600)


def test_ctc_charges_what_the_lengths_need(call):
    scores = torch.zeros(50, 2, 20).log_softmax(2)
    targets = torch.ones(2, 10, dtype=torch.int64)
    steps, labels = [50, 40], [10, 5]
    cells = 50 * 21 + 40 * 11
    forward = call(aten._ctc_loss, scores, targets, steps, labels)
    assert of(forward) == (90 * 4 + 15 * 8, 2 * 4 + cells * 4)
    likelihood, alphas = aten._ctc_loss(scores, targets, steps, labels)
    op = call(aten._ctc_loss_backward, torch.ones(2), scores, targets, steps, labels, likelihood, alphas, 0)
    assert of(op) == (90 * 4 + 15 * 8 + cells * 4 + 8 + 8, 50 * 2 * 20 * 4)


def test_ctc_with_lengths_in_tensors_charges_the_loss_alone(calls):
    scores = torch.zeros(50, 2, 20).log_softmax(2)
    steps, labels = torch.tensor([50, 40]), torch.tensor([10, 5])
    targets = torch.ones(2, 10, dtype=torch.int64)
    op = next(op for op in calls(aten._ctc_loss, scores, targets, steps, labels) if "_ctc_loss" in op.name)
    assert op.name == "aten._ctc_loss.Tensor"
    assert of(op) == (0, 8)
