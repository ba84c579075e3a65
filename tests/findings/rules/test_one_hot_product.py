"""Which products select rows."""

import pytest
import torch
from gpu_steps import examined, found_in
from torch.nn.functional import one_hot

from nearpeak.findings.rules.one_hot_product import one_hot_product

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


def test_a_codebook_that_follows_its_vectors_needs_no_one_hot_vectors():
    def build():
        ids, table, vectors = torch.randint(CATEGORIES, (512,)), torch.randn(CATEGORIES, 64), torch.randn(512, 64)

        def step():
            chosen = one_hot(ids, CATEGORIES).to(vectors.dtype)
            return chosen @ table, chosen.T @ vectors, chosen.sum(dim=0)

        return step

    step = examined(build, live=True)
    (found,) = found_in(step, "one-hot-product")
    large = [index for index, op in enumerate(step.ops) if any(t.elements == 512 * CATEGORIES for t in op.inputs)]
    assert {"aten.scatter_", "aten._to_copy", "aten.mm", "aten.sum"} <= {step.ops[index].packet for index in large}
    assert {index for index in large if step.time(index) and step.ops[index].packet != "aten.aminmax"} <= set(found.ops)
    assert found.saving_s > 0.8 * step.seconds(large)


def test_its_gradient_is_a_lookup_too():
    step = examined(selecting(scattered, train=True), live=True)
    (found,) = found_in(step, "one-hot-product")
    assert any(step.ops[index].phase == "backward" for index in found.ops)


@pytest.mark.parametrize(
    "fn",
    [
        lambda ids, weight: torch.zeros(len(ids), CATEGORIES).scatter_(1, ids[:, None], 2) @ weight,
        lambda ids, weight: torch.zeros(len(ids), CATEGORIES).scatter_(1, ids.view(-1, 2), 1) @ weight,
        lambda ids, weight: torch.eye(CATEGORIES)[ids] @ weight,
        lambda ids, weight: (ids[:, None] == torch.arange(CATEGORIES)).float() @ weight,
        lambda ids, weight: torch.einsum("nk,kw->nw", one_hot(ids, CATEGORIES).float(), weight),
        lambda ids, weight: torch.bmm(one_hot(ids, CATEGORIES).float()[None], weight[None]),
    ],
    ids=["twos", "several", "eye", "compared", "einsum", "bmm"],
)
def test_values_count_and_not_how_they_were_made(fn):
    step = examined(selecting(fn), live=True)
    (found,) = found_in(step, "one-hot-product")
    assert found.saving_s > 0.5 * step.profile.wall_s


@pytest.mark.parametrize(
    "fn",
    [
        lambda ids, weight: torch.randn(len(ids), CATEGORIES) @ weight,
        lambda ids, weight: torch.randn(len(ids), CATEGORIES).relu() @ weight,
        lambda ids, weight: torch.randn(len(ids), CATEGORIES).sub(1.7).relu() @ weight,  # 4 % are left
    ],
    ids=["dense", "half", "few, and many in a row"],
)
def test_other_products_are_not_named(fn):
    assert not found_in(examined(selecting(fn), live=True), "one-hot-product")


def test_tokens_that_move_to_experts_and_back():
    """Dispatch and combine of a mixture: all three products and the tensors between them, forward and backward."""
    tokens, width, experts, room = 256, 48, 4, 96

    def build():
        torch.manual_seed(0)
        x = torch.randn(tokens, width, requires_grad=True)
        up = torch.nn.Parameter(torch.randn(experts, width, width))
        gates = torch.rand(tokens, requires_grad=True)
        chosen = torch.randint(experts, (tokens,))

        def step():
            marks = one_hot(chosen, experts)
            places = one_hot(((marks.cumsum(0) * marks).sum(-1) - 1).clamp(max=room - 1), room).float()
            combine = torch.einsum("se,sc->sec", gates[:, None] * marks, places)
            inputs = torch.einsum("sec,sm->ecm", (combine > 0).float(), x)
            y = torch.einsum("sec,ecm->sm", combine, torch.bmm(inputs, up))
            y.square().sum().backward()

        return step

    step = examined(build, live=True, times=lambda op, expected: 50e-6 if op.packet == "aten.bmm" else expected)
    found = found_in(step, "one-hot-product")
    claimed = {index for finding in found for index in finding.ops}
    products = [index for index, op in enumerate(step.ops) if op.packet == "aten.bmm"]
    kept = {index for index in products if step.ops[index].inputs[0].shape[0] == experts}  # those of the experts
    assert claimed.isdisjoint(kept) and claimed >= set(products) - kept
    assert any(step.ops[index].packet == "aten.gt" for index in claimed)


def cross_entropy(weights_of, train=True, reduce=lambda x: x.sum(-1).mean()):
    def build():
        torch.manual_seed(0)
        logits = torch.randn(256, 1000, requires_grad=train)
        ids = torch.randint(1000, (256,))

        def step():
            loss = reduce(weights_of(ids) * logits.log_softmax(-1))
            return loss.backward() if train else loss

        return step

    return examined(build, live=True)


@pytest.mark.parametrize(
    "weights_of",
    [
        lambda ids: one_hot(ids, 1000),
        lambda ids: one_hot(ids, 1000) * 0.9 + 1e-4,
        lambda ids: (1 - one_hot(ids, 1000)) * 1e-4 + one_hot(ids, 1000).float() * 0.9,
        lambda ids: torch.eye(1000)[ids],
        lambda ids: (ids[:, None] == torch.arange(1000)).float(),
        lambda ids: torch.zeros(256, 1000).index_put_((torch.arange(256), ids), torch.ones(256)),
    ],
    ids=["one-hot", "smoothed", "both", "eye", "compared", "put"],
)
def test_a_sum_weighted_with_one_hot_vectors_is_a_gather(weights_of):
    step = cross_entropy(weights_of)
    wastes = list(one_hot_product(step))
    assert wastes and all("gather" in waste.remedy for waste in wastes)
    claimed = {index for waste in wastes for index in waste.gains}
    logs = next(op.outputs[0].storage for op in step.ops if op.packet == "aten._log_softmax")
    readers = [index for index, op in enumerate(step.ops) if logs in {tensor.storage for tensor in op.inputs}]
    product = next(index for index in readers if step.ops[index].packet == "aten.mul")
    adds = any(step.ops[index].packet in ("aten.add", "aten.rsub") for index in claimed)
    assert (product in claimed) is not adds  # with smoothed targets a pass for the gradient takes its place
    assert len(claimed) >= 2


def by_hand(logs, ids):
    wanted = torch.full_like(logs, 1e-4)
    wanted.scatter_(1, ids[:, None], 0.9)
    wanted.masked_fill_((ids == 0)[:, None], 0.0)
    return -(wanted * logs).sum() / (ids != 0).sum()


def by_divergence(logs, ids):
    wanted = logs.data.clone().fill_(1e-4)
    wanted.scatter_(1, ids.unsqueeze(1), 0.9)
    wanted[:, 0] = 0
    wanted.index_fill_(0, torch.nonzero(ids == 0).squeeze(-1), 0.0)
    return torch.nn.functional.kl_div(logs, wanted, reduction="sum")


def by_indices(logs, ids):
    wanted = torch.full((256, 1000), 1e-4)
    wanted[torch.arange(256), ids] = 0.9
    return torch.sum(-wanted * logs, dim=-1).mean()


def out_of_place(logs, ids):
    return -torch.mul(logs, torch.full(logs.shape, 1e-4).scatter(-1, ids[:, None], 0.9)).sum(1).mean()


def smoothed(loss_of):
    def build():
        torch.manual_seed(0)
        logits = torch.randn(256, 1000, requires_grad=True)
        ids = torch.randint(1000, (256,))
        return lambda: loss_of(logits.log_softmax(-1), ids).backward()

    return examined(build, live=True)


@pytest.mark.parametrize("loss_of", [by_hand, by_divergence, by_indices, out_of_place])
def test_targets_that_are_smoothed_by_hand(loss_of):
    step = smoothed(loss_of)
    (waste,) = one_hot_product(step)
    assert "label_smoothing" in waste.remedy
    claimed = {step.ops[index].packet.rstrip("_") for index in waste.gains}
    assert claimed & {"aten.full", "aten.full_like", "aten.fill"}
    assert claimed & {"aten.scatter", "aten.index_put"}
    assert "aten.mul" not in claimed or loss_of is by_divergence  # a pass for the gradient takes its place


def soft_targets(logs, ids):
    wanted = torch.full_like(logs, 1e-4).scatter_(1, ids[:, None], 0.9)
    wanted *= torch.rand(256, 1000)
    return -(wanted * logs).sum()


def several_labels(logs, ids):
    wanted = torch.full_like(logs, 1e-4).scatter_(1, torch.stack([ids, ids.flip(0)], 1), 0.5)
    return -(wanted * logs).sum()


def read_otherwise(logs, ids):
    wanted = torch.full_like(logs, 1e-4).scatter_(1, ids[:, None], 0.9)
    return -(wanted * logs).sum() + (wanted - logs.exp()).square().mean()


def from_torch(logs, ids):
    return torch.nn.functional.cross_entropy(logs, ids, label_smoothing=0.1)


@pytest.mark.parametrize("loss_of", [soft_targets, several_labels, read_otherwise, from_torch])
def test_other_targets_are_not_named(loss_of):
    assert not list(one_hot_product(smoothed(loss_of)))


@pytest.mark.parametrize(
    "reduce",
    [
        lambda x: x.sum(0).square().mean(),
        lambda x: x.square().sum(-1).mean(),
        lambda x: x.sigmoid().sum(-1).mean(),
    ],
    ids=["over the rows", "squares", "another function"],
)
def test_other_sums_are_not(reduce):
    assert not list(one_hot_product(cross_entropy(lambda ids: one_hot(ids, 1000), reduce=reduce)))
