"""Which products of thin factors are merged into a weight for nothing."""

import pytest
import torch
from gpu_steps import examined, found_in
from planted import load, planted
from torch import nn

NAME = "merged-adapter"


def of(weight_of, *, rank=8, rows=4096, frozen=True, trains=True, width=2048):
    """The findings in a layer whose weight is a function of a weight and of two factors."""

    def build():
        weight = torch.randn(width, width, device="cuda", requires_grad=not frozen)
        up = torch.zeros(width, rank, device="cuda", requires_grad=True)
        down = torch.randn(rank, width, device="cuda", requires_grad=True)
        before = nn.Linear(width, width, device="cuda")
        x = torch.randn(rows, width, device="cuda")

        def step():
            with torch.set_grad_enabled(trains):
                loss = (before(x) @ weight_of(weight, up, down).T).square().mean()
            if trains:
                loss.backward()
            return loss.detach()

        return step

    return examined(build)


WAYS = {
    "a sum": lambda weight, up, down: weight + 0.5 * (up @ down),
    "the factors first": lambda weight, up, down: (up @ down) / 8 + weight,
    "one op": lambda weight, up, down: torch.addmm(weight, up, down, alpha=0.5),
    "cast": lambda weight, up, down: (weight + (up.half() @ down.half()).float()).float(),
    "factors the other way around": lambda weight, up, down: weight + (down.T @ up.T).T,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [4096, 2048], ids=["more rows", "as many rows as columns"])
def test_thin_products_in_place_of_the_sum(way, rows):
    step = of(WAYS[way], rows=rows)
    (finding,) = found_in(step, NAME)
    gone = [step.ops[index] for index in finding.ops]
    products = [op for op in gone if op.phase == "backward" and op.packet == "aten.mm"]
    assert sum(op.inputs[1].shape == (rows, 2048) == op.inputs[0].shape[::-1] for op in products) == 1
    assert any(op.packet in ("aten.add", "aten.addmm") and op.phase == "forward" for op in gone)
    assert "rank 8" in finding.title


def test_a_product_by_einsum():
    def build():
        weight, x = torch.randn(2048, 2048, device="cuda"), torch.randn(16, 256, 2048, device="cuda")
        up, down = (torch.randn(*shape, device="cuda", requires_grad=True) for shape in ((2048, 4), (4, 2048)))
        return lambda: torch.einsum("bti,oi->bto", x, weight + up @ down).square().sum().backward()

    assert found_in(examined(build), NAME)


@pytest.mark.parametrize(
    ("weight_of", "facts"),
    [
        (WAYS["a sum"], {"frozen": False}),
        (WAYS["a sum"], {"rank": 1024}),
        (WAYS["a sum"], {"trains": False}),
        (lambda weight, up, down: weight * (up @ down), {}),
        (lambda weight, up, down: torch.relu(weight + up @ down), {}),
        (lambda weight, up, down: weight + up.sum() * down.sum(), {}),
    ],
    ids=["a trained weight", "a high rank", "inference", "a product", "a function of the sum", "numbers"],
)
def test_what_thin_products_cannot_do(weight_of, facts):
    assert not found_in(of(weight_of, **facts), NAME)


def test_the_corpus():
    module = load("merged_adapter")
    (finding,) = found_in(examined(lambda: module.waste("cuda")), NAME)
    assert finding.source == planted("merged_adapter")
    assert finding.share > 0.1
    assert not found_in(examined(lambda: module.clean("cuda")), NAME)
