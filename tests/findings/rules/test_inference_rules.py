"""Where rules about steps that only predict speak, and where they are silent."""

import pytest
import torch
from gpu_steps import examined, found_in
from torch.nn.functional import dropout


def predicting(fn):
    def build():
        model = torch.nn.Linear(512, 4096, bias=False)
        x = torch.randn(2048, 512)

        def step():
            with torch.no_grad():
                return fn(model, model(x))

        return step

    return build


def named(build, rule):
    return found_in(examined(build), rule)


def dropping(probability, train=True):
    return predicting(lambda model, y: dropout(y, probability, training=train).relu())


def test_dropout_is_found_on_a_gpu():
    (found,) = named(dropping(0.1), "dropout-in-inference")
    assert "2048 x 4096" in found.evidence
    assert "eval" in found.remedy


@pytest.mark.parametrize("build", [dropping(0.0), dropping(0.1, train=False)])
def test_dropout_that_does_nothing_is_not_named(build):
    assert not named(build, "dropout-in-inference")


def test_dropout_of_a_trained_step_is_not_named():
    def build():
        model = torch.nn.Linear(512, 4096)
        x = torch.randn(2048, 512)
        return lambda: dropout(model(x), 0.1).sum().backward()

    assert not named(build, "dropout-in-inference")


def test_dropout_recorded_by_autograd_is_not_named():
    def build(grad):
        model = torch.nn.Linear(64, 1024)
        x = torch.randn(512, 64)

        def step():
            with torch.set_grad_enabled(grad):
                return dropout(model(x), 0.1)

        return step

    assert found_in(examined(lambda: build(False), live=True), "dropout-in-inference")
    assert not found_in(examined(lambda: build(True), live=True), "dropout-in-inference")


def test_random_masks_that_are_no_dropout_are_not_named():
    def build():
        x = torch.randn(2048, 4096)

        def step():
            mask = torch.empty_like(x).bernoulli_(0.5)
            return mask.sum(), x.sum()

        return step

    assert not found_in(examined(build, live=True), "dropout-in-inference")


ORDER = [
    lambda _, y: y.softmax(-1).argmax(-1),
    lambda _, y: y.log_softmax(1).argmax(1),
    lambda _, y: y.softmax(-1).topk(5, -1).indices,
    lambda _, y: y.softmax(-1).max(-1).indices,
]
MORE_THAN_ORDER = [
    lambda _, y: y.softmax(-1).topk(5, -1),
    lambda _, y: y.softmax(-1).max(-1).values,
    lambda _, y: y.softmax(-1).argmax(0),
    lambda _, y: y.softmax(0).argmax(-1),
    lambda _, y: y.softmax(-1).argmax(),
    lambda _, y: [(p := y.softmax(-1)), p.argmax(-1)],
    lambda _, y: [(p := y.softmax(-1)).argmax(-1), p.sum(-1)],
]


@pytest.mark.parametrize("fn", ORDER)
def test_softmaxes_of_which_only_the_order_is_used(fn):
    assert named(predicting(fn), "softmax-for-argmax")


@pytest.mark.parametrize("fn", MORE_THAN_ORDER)
def test_softmaxes_that_are_needed(fn):
    assert not named(predicting(fn), "softmax-for-argmax")


def test_a_softmax_that_somebody_keeps_is_needed():
    def build(keeps):
        x, kept = torch.randn(512, 1024), []

        def step():
            probabilities = x.softmax(-1)
            if keeps:
                kept[:] = [probabilities]
            return probabilities.argmax(-1)

        return step

    assert found_in(examined(lambda: build(False), live=True), "softmax-for-argmax")
    assert not found_in(examined(lambda: build(True), live=True), "softmax-for-argmax")


def copying(fn, dtype=torch.float32, trained=False):
    def build():
        weight = torch.nn.Parameter(torch.randn(4096, 4096).to(dtype), requires_grad=trained)
        model = torch.nn.Module()
        model.weight = weight
        x = torch.randn(256, 4096, dtype=torch.bfloat16)
        model.forward = lambda: fn(x, model.weight)

        def step():
            out = model()
            if trained:
                out.sum().backward()
            return out

        return step

    return build


def test_weights_cast_for_predicting_are_named():
    (found,) = named(copying(lambda x, w: x @ w.bfloat16()), "weight-copied")
    assert "bfloat16" in found.remedy


NEEDED = [
    copying(lambda x, w: x @ w.bfloat16(), trained=True),
    copying(lambda x, w: x @ (w.bfloat16() * 2)),
    copying(lambda x, w: x @ w.to(torch.bfloat16), dtype=torch.int8),
    copying(lambda x, w: x @ w[:2048].bfloat16().mT.reshape(4096, 2048)),
]


@pytest.mark.parametrize("build", NEEDED)
def test_copies_of_weights_that_are_needed(build):
    assert not named(build, "weight-copied")
