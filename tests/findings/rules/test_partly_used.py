"""Of which results a part is used, and how much of the work before that is for the rest."""

import pytest
import torch
from gpu_steps import examined
from made_up import slow_cpu
from torch import nn
from torch.nn import functional

from nearpeak.findings.rules.partly_used import partly_used

CPU = slow_cpu()
"""Its kernels have no launch, which is all that small ones take on a GPU."""


def wastes(build):
    return list(partly_used(examined(build, live=True, machine=CPU)))


def frames():
    video = torch.randint(256, (2, 16, 3, 64, 64), dtype=torch.uint8)

    def step():
        pictures = video.flatten(0, 1).float() / 255
        pictures = functional.interpolate(pictures, size=(48, 48), mode="bilinear")
        pictures = (pictures - 0.45) / 0.225
        return pictures.unflatten(0, (2, 16))[:, ::8].transpose(1, 2).contiguous()

    return step


def test_a_part_is_followed_back_to_where_it_begins():
    (waste,) = wastes(frames)
    assert len(waste.gains) == 5  # a cast, a division, the resizing, a difference, a division
    assert waste.title.startswith("12 %")


def encoder():
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    video = torch.randn(1024, 64)

    def step():
        with torch.no_grad():
            features = network(video)
            return features[::4].exp()

    return step


def test_all_of_a_network_that_treats_rows_one_by_one():
    (waste,) = wastes(encoder)
    assert len(waste.gains) == 3
    assert waste.source.startswith("test_partly_used.py")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.wide, self.narrow = nn.Linear(8, 8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        mixed = functional.scaled_dot_product_attention(x, x, x)
        x = x + self.mix(mixed)
        return x + self.narrow(self.wide(x).relu())


def first_token():
    layer, head = Layer(), nn.Linear(8, 3)
    x = torch.randn(2, 1, 16, 8)

    def step():
        return head(layer(x)[:, :, 0]).exp()

    return step


def test_half_of_a_layer_is_not_split():
    assert not [waste for waste in wastes(first_token) if len(waste.gains) > 1]


@pytest.mark.parametrize(
    ("fn", "packet"),
    [
        (lambda a: a[torch.randperm(4096)[:64]].exp(), "aten.randperm"),
        (lambda a: (a @ a.T)[:, torch.arange(8)].exp(), "aten.mm"),
        (lambda a: a.exp().index_select(0, torch.arange(8)).neg(), "aten.exp"),
        (lambda a: a.softmax(-1)[:8].neg(), "aten._softmax"),
        (lambda a: torch.rand(4096)[:8].neg(), "aten.rand"),
        (lambda a: (a.exp().sum(1))[:8].neg(), "aten.exp"),
    ],
)
def test_kinds_of_ops(fn, packet):
    def build():
        a = torch.randn(4096, 16)
        return lambda: fn(a)

    step = examined(build, live=True, machine=CPU)
    assert packet in {step.ops[index].packet for waste in partly_used(step) for index in waste.gains}


@pytest.mark.parametrize(
    "fn",
    [
        lambda a: torch.cat([part.neg() for part in a.exp().chunk(4)]),
        lambda a: (lambda b: b[::2] * b[1::2])(a.exp()),
        lambda a: (lambda b: b[:4].neg().sum() + b.sum())(a.exp()),
        lambda a: a.exp()[:4],
        lambda a: a.softmax(0)[:4].neg(),
        lambda a: a.cumsum(0)[-1:].neg(),
        lambda a: a.exp()[: len(a) * 3 // 4].neg(),
        lambda a: a.exp()[:0].neg(),
        lambda a: a.exp()[torch.arange(0)].neg(),
        lambda a: a.mean().sum(0).neg(),
        lambda a: (lambda b: (b[:4].fill_(0.0), b.sum()))(a.exp()),
        lambda a: (lambda b: b.values[:4].neg().sum() + b.indices.sum())(a.max(1)),
    ],
    ids=[
        *("all parts", "both halves", "all elsewhere", "a view that is kept", "along the dimension", "a scan", "most"),
        *("nothing", "no index", "a number", "a part that is written", "another result"),
    ],
)
def test_what_is_used_as_a_whole(fn):
    def build():
        a = torch.randn(64, 16)
        return lambda: fn(a)

    assert not wastes(build)


def test_the_backward_pass_of_the_rest_goes_too():
    def build():
        weight = nn.Parameter(torch.randn(16, 16))
        optimizer, x = torch.optim.SGD([weight], lr=1e-3), torch.randn(64, 16)

        def step():
            y = x @ weight
            y[:4].sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    (waste,) = wastes(build)
    assert len(waste.gains) == 2  # a product of each pass


def directions(columns, rows):
    x, y = (columns - 128) / 300.0, -(rows - 128) / 300.0
    return torch.stack([x, y, -torch.ones_like(x)], dim=-1) * 0.5


def directions_of_all(size):
    grid = torch.arange(size)
    rows, columns = torch.meshgrid(grid, grid, indexing="ij")
    return directions(columns.flatten(), rows.flatten())


def a_few_pixels():
    def step():
        pick = torch.randint(256 * 256, (64,))
        found = directions_of_all(256)  # the whole of it is for 64 pixels
        return found[pick].exp()

    return step


def test_joined_columns_are_followed_back_to_the_call_that_computes_all_rows():
    (waste,) = wastes(a_few_pixels)
    line = a_few_pixels.__code__.co_firstlineno + 3
    assert waste.source == f"test_partly_used.py:{line}"
    assert len(waste.gains) >= 8  # differences, quotients, signs, ones, the stack, its scaling, indices of the pixels


def joined(part):
    a, b = torch.randn(512, 64), torch.randn(512, 64)

    def step():
        return part(torch.cat([a.sin(), b.cos()], dim=1)).exp()

    return step


@pytest.mark.parametrize(("part", "is_found"), [(lambda y: y[:16], True), (lambda y: y[:, 48:80], False)])
def test_a_part_across_joined_tensors_is_not_one_of_each(part, is_found):
    assert bool(wastes(lambda: joined(part))) is is_found


PAIRED = 512
"""Rows of which all pairs are computed."""


def overlap(a, b):
    sides = torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])
    sides = sides.clamp(min=0)
    area = (a[..., 2] - a[..., 0]) * (a[..., 3] - a[..., 1])
    shared = sides[..., 0] * sides[..., 1]
    return shared / (area + (b[..., 2] - b[..., 0]) * (b[..., 3] - b[..., 1]) - shared)


def boxes_and_targets(read):
    raw, targets = torch.rand(PAIRED, 4, requires_grad=True), torch.rand(PAIRED, 4)

    def step():
        boxes = torch.cat([raw[:, :2], raw[:, :2] + raw[:, 2:]], 1)
        found = overlap(boxes[:, None], targets[None])
        loss = (1 - read(found)).sum()
        loss.backward()
        raw.grad = None

    return step


def test_all_pairs_for_a_diagonal():
    step = examined(lambda: boxes_and_targets(torch.diag), live=True, machine=CPU)
    (waste,) = partly_used(step)
    line = boxes_and_targets.__code__.co_firstlineno + 5
    assert waste.source == f"test_partly_used.py:{line}"
    assert waste.title == "All pairs of 512 rows are computed, and the diagonal is used."
    assert f":{line + 1}." in waste.evidence
    on_pairs = {
        index
        for index, op in enumerate(step.ops)
        if step.touches[index].writes
        and not op.packet.startswith("aten.diag")
        and any(tensor.elements >= PAIRED**2 for tensor in (*op.inputs, *op.outputs))
    }
    forward = {index for index in waste.gains if step.ops[index].phase == "forward"}
    assert forward == {index for index in on_pairs if step.ops[index].phase == "forward"}
    assert len(forward) == 8  # two corners, their difference, its clamp, products, the union in two ops, a quotient
    backward = set(waste.gains) - forward
    assert on_pairs <= set(waste.gains)
    assert any(step.ops[index].packet == "aten.diagonal_backward" for index in backward)
    assert sum(waste.gains.values()) > 0.9 * step.seconds(waste.gains)
    assert "without the added dimension" in waste.remedy


ROWS = torch.arange(PAIRED)


@pytest.mark.parametrize(
    "read",
    [
        torch.diag,
        torch.diagonal,
        torch.trace,
        lambda pairs: torch.einsum("ii->i", pairs),
        lambda pairs: pairs[torch.arange(PAIRED), torch.arange(PAIRED)],
        lambda pairs: pairs[ROWS, ROWS],
        lambda pairs: pairs.T.diagonal(),
        lambda pairs: pairs.diagonal()[:8].exp(),
        lambda pairs: pairs.diagonal().mean() + torch.diag(pairs).std(),
    ],
    ids=["diag", "diagonal", "trace", "einsum", "two ranges", "one range", "transposed", "part of it", "twice"],
)
def test_ways_to_read_a_diagonal(read):
    found = [waste for waste in wastes(lambda: boxes_and_targets(read)) if waste.title.startswith("All pairs of 512")]
    assert len(found) == 1
    assert found[0].source == f"test_partly_used.py:{boxes_and_targets.__code__.co_firstlineno + 5}"


@pytest.mark.parametrize(
    "read",
    [
        lambda pairs: pairs.diagonal().sum() + pairs.mean(),
        lambda pairs: pairs.diagonal().sum() + pairs[:, 0].sum(),
        lambda pairs: pairs.diagonal().sum() + pairs.diagonal(1).sum(),
        lambda pairs: pairs.softmax(0).diagonal(),
        lambda pairs: pairs.softmax(1).diagonal(),
        lambda pairs: pairs.cumsum(1).diagonal(),
        lambda pairs: functional.cross_entropy(pairs, ROWS),
        lambda pairs: pairs[ROWS, ROWS.flip(0)].sum() + pairs[ROWS.flip(0), ROWS].sum() + pairs[ROWS, ROWS].sum(),
        lambda pairs: pairs.detach().fill_diagonal_(0.0).sum() + pairs.diagonal().sum(),
        lambda pairs: (pairs * (1 - torch.eye(PAIRED))).sum() + pairs.diagonal().sum(),
    ],
    ids=[
        *("all", "a column", "another diagonal", "along columns", "along rows", "a scan", "each with all"),
        *("other pairs", "all but the diagonal", "masked"),
    ],
)
def test_more_than_the_diagonal_is_read(read):
    assert not [waste for waste in wastes(lambda: boxes_and_targets(read)) if waste.title.startswith("All pairs")]


def test_a_diagonal_that_is_written_before_all_is_read():
    def build():
        a = torch.randn(64, 16)

        def step():
            pairs = a @ a.T
            pairs.diagonal().fill_(0.0)
            return pairs.exp().sum()

        return step

    assert not wastes(build)


@pytest.mark.parametrize(
    ("score", "packet"),
    [
        (lambda a, b: a @ b.T, "aten.mm"),
        (lambda a, b: torch.einsum("nd,md->nm", a, b), "aten.bmm"),
        (lambda a, b: (a[:, None] - b[None]).square().sum(-1).sqrt(), "aten.pow"),
        (lambda a, b: torch.cdist(a, b, p=1.0), "aten._cdist_forward"),
        (lambda a, b: (a @ b.T).mul_(2.0).sub_(1.0), "aten.mul_"),
        (lambda a, b: functional.cosine_similarity(a[:, None], b[None], dim=-1), "aten.mul"),
    ],
    ids=["product", "einsum", "differences", "distances", "in place", "cosines"],
)
def test_kinds_of_pairs(score, packet):
    def build():
        a, b = torch.randn(128, 32), torch.randn(128, 32)
        return lambda: score(a, b).diagonal().exp()

    step = examined(build, live=True, machine=CPU)
    (waste,) = partly_used(step)
    assert packet in {step.ops[index].packet for index in waste.gains}
    assert waste.title == "All pairs of 128 rows are computed, and the diagonal is used."
    assert ("(a * b).sum(-1)" in waste.remedy) is any(
        step.ops[index].packet in ("aten.mm", "aten.bmm") for index in waste.gains
    )


def test_pairs_of_each_batch():
    def build():
        a, b = torch.randn(4, 64, 16), torch.randn(4, 64, 16)
        return lambda: (a @ b.mT).diagonal(dim1=1, dim2=2).exp()

    (waste,) = wastes(build)
    assert waste.title.startswith("All pairs of 64 rows")


def test_pairs_in_a_slow_layout_go_as_a_whole():
    def build():
        a, b = torch.randn(512, 4), torch.randn(512, 4)
        return lambda: torch.minimum(a[:, None], b[None]).sum(-1).diagonal().exp()

    step = examined(build, live=True, machine=CPU, times=lambda op, expected: 100 * expected)
    (waste,) = partly_used(step)
    assert sum(waste.gains.values()) > 0.9 * step.seconds(waste.gains)


def test_a_matrix_from_before_is_no_pairs():
    def build():
        matrix = torch.randn(256, 256)
        return lambda: matrix.exp().diagonal().neg()

    (waste,) = wastes(build)
    assert waste.remedy.startswith("x = x.diagonal()")
