"""Which gathers read a tensor that is repeated for them alone."""

import pytest
import torch
from gpu_steps import examined, found_in
from torch import nn

BATCH, POINTS, NEAR, WIDTH = 8, 512, 16, 64


def training(pick):
    def build():
        x = torch.randn(BATCH, POINTS, WIDTH, device="cuda")
        layer = nn.Linear(WIDTH, WIDTH, device="cuda")
        index = torch.randint(POINTS, (BATCH, POINTS, NEAR), device="cuda")

        def step():
            pick(layer(x), index).square().mean().backward()

        return step

    return build


def expanded(y):
    return y[:, None].expand(-1, POINTS, -1, -1)


def everywhere(index):
    return index[..., None].expand(-1, -1, -1, WIDTH)


def batches(y):
    return torch.arange(BATCH, device=y.device)[:, None, None]


def points(y):
    return torch.arange(POINTS, device=y.device)[None, :, None]


VIEWS = [
    lambda y, index: expanded(y).gather(2, everywhere(index)),
    lambda y, index: torch.take_along_dim(expanded(y), index[..., None], 2),
    lambda y, index: expanded(y)[batches(y), points(y), index],
    lambda y, index: y.mT[:, :, None].expand(-1, -1, POINTS, -1).gather(3, everywhere(index).permute(0, 3, 1, 2)),
]
COPIES = [
    lambda y, index: y.unsqueeze(1).repeat(1, POINTS, 1, 1).gather(2, everywhere(index)),
    lambda y, index: expanded(y).contiguous()[batches(y), points(y), index],
]
QUIET = [
    lambda y, index: y[batches(y), index],
    lambda y, index: y.flatten(0, 1).index_select(0, (index + POINTS * batches(y)).flatten()),
    lambda y, index: y.gather(1, index.flatten(1)[..., None].expand(-1, -1, WIDTH)),
    # what is picked is another one for each point
    lambda y, index: (y[:, None] - y[:, :, None]).gather(2, everywhere(index)),
    # the copy is read as a whole too
    lambda y, index: (table := expanded(y).contiguous()).gather(2, everywhere(index)).sum() + table.square(),
]


@pytest.mark.parametrize("pick", VIEWS)
def test_the_gradient_of_an_expanded_view_is_as_large_as_it_seems(pick):
    step = examined(training(pick))
    (found,) = found_in(step, "gathered-from-expanded")
    large = [i for i, op in enumerate(step.ops) if op.packet == "aten.new_zeros" or op.packet == "aten.sum"]
    large = [
        i
        for i in large
        if BATCH * POINTS**2 * WIDTH in (t.elements for t in (*step.ops[i].inputs, *step.ops[i].outputs))
    ]
    assert len(large) == 2
    assert found.saving_s == pytest.approx(step.seconds(large), rel=0.01)
    assert "512 times" in found.title


@pytest.mark.parametrize("pick", COPIES)
def test_a_repeated_copy_goes_too(pick):
    step = examined(training(pick))
    (found,) = found_in(step, "gathered-from-expanded")
    (copy,) = (i for i, op in enumerate(step.ops) if op.packet in ("aten.repeat", "aten.clone") and step.time(i) > 1e-5)
    assert copy in found.ops
    assert found.saving_s > 1.5 * step.time(copy)


@pytest.mark.parametrize("pick", QUIET)
def test_gathers_from_what_is_not_repeated(pick):
    assert not found_in(examined(training(pick)), "gathered-from-expanded")


def test_an_expanded_view_costs_nothing_without_a_gradient():
    def build():
        y = torch.randn(BATCH, POINTS, WIDTH, device="cuda")
        index = torch.randint(POINTS, (BATCH, POINTS, NEAR), device="cuda")
        return lambda: VIEWS[0](y, index)

    assert not found_in(examined(build), "gathered-from-expanded")


@pytest.mark.parametrize("pick", VIEWS)
def test_all_rows_that_are_picked_through_an_expanded_view_are_used(pick):
    assert not found_in(examined(training(pick)), "partly-used")
