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
        (lambda a: (a @ a.T).diagonal().exp(), "aten.mm"),
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
    ],
    ids=[
        *("all parts", "both halves", "all elsewhere", "a view that is kept", "along the dimension", "a scan", "most"),
        *("nothing", "no index", "a number"),
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
