"""Which sorts need only their first elements."""

import pytest
import torch
from gpu_steps import examined, found_in

ROWS, LENGTH = 64, 50_000


def sorting(fn):
    def build():
        x = torch.randn(ROWS, LENGTH)

        def step():
            with torch.no_grad():
                return fn(x)

        return step

    return build


def nucleus(logits):
    ordered, tokens = logits.sort(dim=-1, descending=True)
    likely = ordered.softmax(-1)
    likely = likely.masked_fill(likely.cumsum(-1) - likely > 0.9, 0.0)
    return tokens.gather(-1, likely.multinomial(1))


def nucleus_scattered(logits):
    """As libraries write it: the mask goes back to the order of the vocabulary."""
    ordered, tokens = logits.sort(dim=-1, descending=False)
    removed = ordered.softmax(-1).cumsum(-1) <= 0.1
    removed[..., -1:] = False
    logits = logits.masked_fill(removed.scatter(1, tokens, removed), -torch.inf)
    return logits.softmax(-1).multinomial(1)


FEW = [
    lambda x: x.sort(dim=-1, descending=True).values[:, :10].clone(),
    lambda x: x.argsort(dim=-1, descending=True)[:, :10].clone(),
    lambda x: x.sort(dim=-1).values[:, -10:].clone(),
    lambda x: x < x.sort(dim=-1).values[:, -10].unsqueeze(-1),
    lambda x: x.argsort(dim=-1, descending=True)[:, :10, None].expand(-1, -1, 4) + 1,
    lambda x: x.gather(1, x.argsort(dim=-1, descending=True)[:, :10]),
    lambda x: x.T.sort(dim=0, descending=True).values.narrow(0, 0, 10).T.clone(),
]
ALL = [
    lambda x: x.sort(dim=-1),
    lambda x: x.sort(dim=-1).values.cumsum(-1),
    lambda x: x.sort(dim=-1).values[:, : LENGTH // 2].clone(),
    lambda x: x[:, :100].sort(dim=-1).values[:, :10].clone(),
    lambda x: x.sort(dim=-1).values[:, 20_000:20_010].clone(),
    lambda x: x.argsort(dim=-1)[:, :, None].expand(-1, -1, 4) + 1,
]


@pytest.mark.parametrize("fn", FEW)
def test_a_sort_for_a_few_elements_becomes_a_topk(fn):
    step = examined(sorting(fn))
    (found,) = found_in(step, "sorted-for-few")
    (sort,) = (index for index, op in enumerate(step.ops) if op.packet in ("aten.sort", "aten.argsort"))
    assert found.ops == (sort,)
    assert 0.5 * step.time(sort) < found.saving_s < step.time(sort)
    assert "topk(10" in found.remedy
    assert "largest=False" not in found.remedy


def test_the_smallest_elements_are_asked_for_as_such():
    (found,) = found_in(examined(sorting(lambda x: x.sort(dim=-1).values[:, :10].clone())), "sorted-for-few")
    assert "largest=False" in found.remedy


@pytest.mark.parametrize("fn", ALL)
def test_sorts_whose_order_is_needed(fn):
    assert not found_in(examined(sorting(fn)), "sorted-for-few")


@pytest.mark.parametrize("fn", [nucleus, nucleus_scattered])
def test_sampling_from_the_most_likely_tokens_needs_no_sorted_vocabulary(fn):
    step = examined(sorting(fn))
    (found,) = found_in(step, "sorted-for-few")
    assert "whole vocabulary" in found.title
    assert found.saving_s > 0.6 * step.profile.wall_s
    packets = {step.ops[index].packet for index in found.ops}
    assert packets >= {"aten.sort", "aten._softmax", "aten.cumsum"}


def test_sampled_probabilities_that_somebody_keeps_are_needed():
    def keeps(logits):
        ordered, tokens = logits.sort(dim=-1, descending=True)
        likely = ordered.softmax(-1)
        return tokens.gather(-1, likely.cumsum(-1).multinomial(1)), likely

    assert not found_in(examined(sorting(keeps)), "sorted-for-few")


LABELS = torch.arange(ROWS)[:, None]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x.argsort(dim=1, descending=True) == LABELS).int().argmax(dim=1),
        lambda x: (x.sort(dim=-1).indices == LABELS).nonzero(),
        lambda x: (x[:, :500].argsort(dim=1) == LABELS).float().argmax(dim=1),
        lambda x: (x.argsort(dim=1) == 7).int().argmax(dim=1),
    ],
)
def test_a_rank_needs_no_sort(fn):
    (finding,) = found_in(examined(sorting(fn)), "sorted-for-few")
    assert "the rank of one" in finding.title and "gather" in finding.remedy


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x.argsort(dim=1) == torch.arange(LENGTH)).sum(),
        lambda x: (order := x.argsort(dim=1), order == LABELS),
        lambda x: (lambda order: (order == LABELS).sum() + order.sum())(x.argsort(dim=1)),
    ],
    ids=["compared with all", "returned", "used otherwise"],
)
def test_orders_that_are_used_otherwise(fn):
    assert not [finding for finding in found_in(examined(sorting(fn))) if "the rank of one" in finding.title]
