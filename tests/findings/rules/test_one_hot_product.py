"""Which products select rows."""

import pytest
import torch
from gpu_steps import examined, found_in
from torch.nn.functional import one_hot

CATEGORIES, WIDTH = 8000, 128


def selecting(fn, train=False):
    def build():
        ids = torch.randint(CATEGORIES, (512,))
        weight = torch.randn(CATEGORIES, WIDTH, requires_grad=train)

        def step():
            out = fn(ids, weight)
            return out.sum().backward() if train else out

        return step

    return build


def scattered(ids, weight):
    return torch.zeros(len(ids), CATEGORIES).scatter_(1, ids[:, None], 1) @ weight


@pytest.mark.parametrize("fn", [scattered, lambda ids, weight: one_hot(ids, CATEGORIES).float() @ weight])
def test_a_product_with_one_hot_vectors_becomes_a_lookup(fn):
    step = examined(selecting(fn), live=True)
    (found,) = found_in(step, "one-hot-product")
    (product,) = (index for index, op in enumerate(step.ops) if op.packet == "aten.mm")
    assert product in found.ops
    assert len(found.ops) >= 3
    assert "embedding" in found.remedy


def test_its_gradient_is_a_lookup_too():
    step = examined(selecting(scattered, train=True), live=True)
    (found,) = found_in(step, "one-hot-product")
    assert any(step.ops[index].phase == "backward" for index in found.ops)


@pytest.mark.parametrize(
    "fn",
    [
        lambda ids, weight: torch.zeros(len(ids), CATEGORIES).scatter_(1, ids[:, None], 2) @ weight,
        lambda ids, weight: torch.zeros(len(ids), CATEGORIES).scatter_(1, ids.view(-1, 2), 1) @ weight,
        lambda ids, weight: torch.randn(len(ids), CATEGORIES) @ weight,
        lambda ids, weight: (torch.zeros(len(ids), CATEGORIES).scatter_(1, ids[:, None], 1) * 2) @ weight,
    ],
    ids=["twos", "several", "dense", "scaled"],
)
def test_other_products_are_not_named(fn):
    assert not found_in(examined(selecting(fn), live=True), "one-hot-product")
