"""Who watches the calls of modules is told, and compiled code does not notice."""

import sys

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from nearpeak.trace import modules
from nearpeak.trace.modules import keep_calls_watchable, note_compiler, watch_module_calls


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


@pytest.fixture(params=["replaced", "reported"])
def way(request, monkeypatch):
    """As before anything is compiled, and as after that where the interpreter reports calls."""
    monkeypatch.setattr(modules, "_can_report", sys.version_info >= (3, 12) and request.param == "reported")
    monkeypatch.setattr(modules, "compiled_graph_count", lambda: 1)
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
        if way == "reported" and sys.version_info >= (3, 12):  # else once more for each who begins to watch
            with told.watching():
                compiled(torch.ones(4))
        assert counters["stats"]["unique_graphs"] - before == 1
    finally:
        torch._dynamo.reset()


def test_who_begins_to_watch_changes_no_class_while_calls_are_kept_watchable():
    original, told = nn.Module.__call__, Told()
    with keep_calls_watchable():
        kept = nn.Module.__call__
        with told.watching():
            assert nn.Module.__call__ is kept
            nn.Identity()(1)
        assert nn.Module.__call__ is kept
        nn.Identity()(1)
    assert nn.Module.__call__ is original
    assert (len(told.before), len(told.after)) == (1, 1)


def test_what_is_compiled_sees_the_call_of_torch_also_after_a_reset():
    layer, original = Layer(), nn.Module.__call__
    try:
        with keep_calls_watchable():
            torch._dynamo.reset()
            note_compiler()
            seen = []

            def backend(graph, _inputs):
                seen.append(nn.Module.__call__)
                return graph

            torch.compile(lambda x: layer(x), backend=backend)(torch.ones(4))
            assert seen == [original]
    finally:
        torch._dynamo.reset()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the interpreter cannot report calls")
def test_who_watches_while_something_is_compiled_hears_on():
    told, layer, outer = Told(), Layer(), nn.Sequential(nn.Identity())
    compiled = torch.compile(lambda x: layer(x), backend="eager")
    outer.register_forward_hook(lambda *_: compiled(torch.ones(4)) * 0)
    try:
        with keep_calls_watchable(), told.watching():
            outer(torch.ones(2))
            outer(torch.ones(2))
        for module in (outer, outer[0]):
            assert sum(each is module for each, _ in told.before) == sum(each is module for each in told.after) == 2
    finally:
        torch._dynamo.reset()
