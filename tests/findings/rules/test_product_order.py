"""Which products of three factors take less work in the other order."""

import pytest
import torch
from gpu_steps import examined, found_in
from torch import nn

LONG, WIDE = 4096, 64


def multiplying(fn, *shapes, trained=False):
    def build():
        factors = [torch.randn(*shape, device="cuda", requires_grad=trained) for shape in shapes]

        def step():
            y = fn(*factors)
            return y.square().mean().backward() if trained else y.detach()

        return step

    return build


TALL, HEADS = (LONG, WIDE), (2, 8, 2048, WIDE)
SLOW = [
    (lambda q, k, v: (q @ k.T) @ v, TALL, TALL, TALL),
    (lambda q, k, v: (q @ k.mT / 8.0) @ v, HEADS, HEADS, HEADS),
    (lambda q, k, v: torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k), v), HEADS, HEADS, HEADS),
    (lambda q, k, v: torch.matmul(q.mul(0.1), k.transpose(-2, -1)).neg().matmul(v), HEADS, HEADS, HEADS),
    (lambda u, v, x: (u @ v) @ x, (LONG, WIDE), (WIDE, LONG), (LONG, 128)),
    (lambda u, v, x: x @ (u @ v).T, (LONG, WIDE), (WIDE, LONG), (128, LONG)),
    (lambda a, b, x: (a.T @ b).T @ x, (LONG, 2048), (LONG, 2048), (2048, 8)),
]
QUIET = [
    (lambda q, k, v: q @ (k.T @ v), TALL, TALL, TALL),
    (lambda q, k, v: (q @ k.T).softmax(-1) @ v, TALL, TALL, TALL),
    (lambda q, k, v: (q @ k.T).tril() @ v, TALL, TALL, TALL),
    (lambda q, k, v: ((q @ k.T) * (q @ k.T)) @ v, TALL, TALL, TALL),
    (lambda x, a, b: x @ a @ b, (LONG, 1024), (1024, 16), (16, 1024)),
    (lambda x, a, b: x @ a @ b, (256, 256), (256, 256), (256, 256)),
    (lambda q, k, v: (s := q @ k.T) @ v + s.sum(-1, keepdim=True), TALL, TALL, TALL),
]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(("fn", "a", "b", "c"), SLOW)
def test_the_order_with_less_work_is_found(fn, a, b, c, trained):
    step = examined(multiplying(fn, a, b, c, trained=trained))
    (found,) = found_in(step, "product-order")
    products = [i for i, op in enumerate(step.ops) if op.packet in ("aten.mm", "aten.bmm")]
    assert set(found.ops) >= set(products)
    assert found.saving_s > 0.4 * step.seconds(products)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(("fn", "a", "b", "c"), QUIET)
def test_products_in_the_right_order_and_with_something_between(fn, a, b, c, trained):
    assert not found_in(examined(multiplying(fn, a, b, c, trained=trained)), "product-order")


def test_layers_with_biases_are_no_chain():
    def build():
        layers = nn.Sequential(nn.Linear(64, 4096), nn.Linear(4096, 64)).cuda()
        x = torch.randn(LONG, 64, device="cuda")
        return lambda: layers(x)

    assert not found_in(examined(build), "product-order")
