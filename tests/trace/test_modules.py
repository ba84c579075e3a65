"""Who watches the calls of modules is told, and compiled code does not notice."""

import sys

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from nearpeak.trace import modules
from nearpeak.trace.modules import watch_module_calls


class Told:
    def __init__(self):
        self.before, self.after = [], []

    def watching(self):
        return watch_module_calls(lambda module, args: self.before.append((module, args)), self.after.append)


class Fails(nn.Module):
    def forward(self, x):
        raise ValueError("no")


class Layer(nn.Module):
    """Calls through `super()`, which compiled code guards."""

    def __call__(self, x):
        return super().__call__(x)

    def forward(self, x):
        return x * 2 + 1


@pytest.fixture(params=["here", "replaced"])
def way(request, monkeypatch):
    """As on this Python, and as on one that cannot tell."""
    if request.param == "replaced":
        monkeypatch.setattr(modules, "_call_events", modules.SharedPatch(modules._patched_call))
    return request.param


def test_inner_calls_are_told_inside_of_outer_ones(way):
    inner = nn.Identity()
    outer = nn.Sequential(inner)
    told, x = Told(), torch.ones(2)
    original = nn.Module.__call__
    with told.watching():
        outer(x)
    outer(x)
    assert [module for module, _ in told.before] == [outer, inner]
    assert told.before[0][1][0] is x
    assert told.after == [inner, outer]
    assert nn.Module.__call__ is original


def test_a_call_that_raises_has_an_end(way):
    told, module = Told(), nn.Sequential(Fails())
    with told.watching(), pytest.raises(ValueError, match="no"):
        module(torch.ones(2))
    assert told.after == [module[0], module]


def test_two_watchers_are_both_told(way):
    one, other = Told(), Told()
    with one.watching():
        with other.watching():
            nn.Identity()(1)
        nn.Identity()(1)
    assert (len(one.after), len(other.after)) == (2, 1)


def test_compiled_code_is_compiled_once(way):
    told, layer = Told(), Layer()
    compiled = torch.compile(lambda x: layer(x), backend="eager")
    before = counters["stats"]["unique_graphs"]
    try:
        with told.watching():
            for _ in range(3):
                compiled(torch.ones(4))
        compiled(torch.ones(4))
        if way == "here" and sys.version_info >= (3, 12):  # else once more for each who begins to watch
            with told.watching():
                compiled(torch.ones(4))
        assert counters["stats"]["unique_graphs"] - before == 1
    finally:
        torch._dynamo.reset()
