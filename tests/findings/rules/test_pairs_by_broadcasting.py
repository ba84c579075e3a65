"""Which comparisons of all pairs of rows a GEMM could do."""

import pytest
import torch
from gpu_steps import examined, found_in
from torch import nn
from torch.nn import functional

ROWS, OTHERS, WIDTH = 512, 1024, 64


def comparing(fn, *, trained=False):
    def build():
        a = torch.randn(ROWS, WIDTH, device="cuda")
        b = nn.Parameter(torch.randn(OTHERS, WIDTH, device="cuda"))

        def step():
            if trained:
                fn(a, b).mean().backward()
                return None
            with torch.no_grad():
                return fn(a, b).argmin(1)

        return step

    return build


DISTANCES = [
    lambda a, b: (a[:, None] - b).square().sum(-1),
    lambda a, b: (a.unsqueeze(1) - b.unsqueeze(0)).pow(2).sum(2).sqrt(),
    lambda a, b: torch.linalg.vector_norm(a[:, None] - b, dim=-1),
    lambda a, b: ((difference := a[:, None] - b) * difference).mean(-1),
    lambda a, b: functional.pairwise_distance(a[:, None], b[None]),
    lambda a, b: functional.mse_loss(a[:, None].expand(-1, OTHERS, -1), b.expand(ROWS, -1, -1), reduction="none").mean(
        -1
    ),
    lambda a, b: torch.norm(a.repeat(OTHERS, 1, 1).transpose(0, 1) - b.repeat(ROWS, 1, 1), dim=2),
    lambda a, b: (a.T[:, :, None] - b.T[:, None]).norm(dim=0),
]
PRODUCTS = [
    lambda a, b: (a[:, None] * b).sum(-1),
    lambda a, b: functional.cosine_similarity(a[:, None], b[None], dim=-1),
    lambda a, b: (functional.normalize(a, dim=-1)[:, None] * functional.normalize(b, dim=-1)).sum(dim=2) / 0.07,
]
QUIET = [
    lambda a, b: torch.cdist(a, b),
    lambda a, b: a @ b.T,
    lambda a, b: (a[:, None] - b).abs().sum(-1),
    lambda a, b: (a[:, None] - b).square().amax(-1),
    lambda a, b: (a[:, None] + b).relu().sum(-1),
    # the differences themselves are read
    lambda a, b: (d := a[:, None] - b).square().sum(-1) + d.sigmoid().sum(-1),
    # columns have weights of their own
    lambda a, b: ((a[:, None] - b) * b[0]).square().sum(-1),
    # one row each
    lambda a, b: (a - b[:ROWS]).square().sum(-1, keepdim=True).expand(-1, OTHERS),
    lambda a, b: (a[:, None] * b[:ROWS, None].expand(-1, OTHERS, -1)).sum(-1),
]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("fn", DISTANCES)
def test_distances_of_all_pairs(fn, trained):
    step = examined(comparing(fn, trained=trained))
    (found,) = found_in(step, "pairs-by-broadcasting")
    assert f"A GEMM of {ROWS} x {WIDTH} and {WIDTH} x {OTHERS}" in found.reasoning
    assert "cdist" in found.remedy
    large = [
        index
        for index, op in enumerate(step.ops)
        if step.time(index) and any(t.elements == ROWS * OTHERS * WIDTH for t in (*op.inputs, *op.outputs))
    ]
    if not trained:
        assert set(found.ops) >= set(large)
        assert 0.8 * step.seconds(large) < found.saving_s < step.seconds(large)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("fn", PRODUCTS)
def test_products_of_all_pairs(fn, trained):
    (found,) = found_in(examined(comparing(fn, trained=trained)), "pairs-by-broadcasting")
    assert "a @ b.T" in found.remedy
    assert found.share > 0.75


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("fn", QUIET)
def test_comparisons_that_are_no_gemm(fn, trained):
    assert not found_in(examined(comparing(fn, trained=trained)), "pairs-by-broadcasting")


def test_pairs_within_each_item_of_a_batch():
    def build():
        x = torch.randn(8, 300, 16, device="cuda")
        return lambda: (x[:, :, None] - x[:, None]).norm(dim=-1) < 0.5

    (found,) = found_in(examined(build), "pairs-by-broadcasting")
    assert "8 x 300 x 16 and 16 x 300" in found.reasoning


def test_rows_that_were_stacked_are_not_the_same():
    def build():
        rows = [torch.randn(WIDTH, device="cuda") for _ in range(8)]
        others = torch.randn(OTHERS, WIDTH, device="cuda")
        return lambda: functional.cosine_similarity(torch.stack(rows)[:, None], others[None], dim=-1)

    (found,) = found_in(examined(build), "pairs-by-broadcasting")
    assert f"8 x {WIDTH} and {WIDTH} x {OTHERS}" in found.reasoning
