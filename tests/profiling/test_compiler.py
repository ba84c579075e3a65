import sys
import traceback
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import nearpeak
from nearpeak.profiles.profile import CompilerFacts, GraphBreak
from nearpeak.profiling.torch_profiler import graph_breaks_in, read_compiler_facts
from nearpeak.trace.kineto.read import read_trace

REGION = "Torch-Compiled Region: 0/0"


def reason(said, line):
    stack = [traceback.FrameSummary("/home/me/train.py", line, "step")] if line else []
    return SimpleNamespace(reason=said, user_stack=stack)


@pytest.fixture
def dynamo(monkeypatch):
    """What torch counts, made up; and it does not tell which code is behind a region."""
    facts = SimpleNamespace(counters={"stats": Counter()}, graph_break_reasons=[])
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", facts)
    monkeypatch.setitem(sys.modules, "torch._dynamo.convert_frame", SimpleNamespace())
    return facts


def test_nothing_compiled_is_no_fact(dynamo):
    assert read_compiler_facts(0) is None


def test_graphs_after_the_warm_up_were_recompiled(dynamo):
    dynamo.counters["stats"]["unique_graphs"] = 5
    assert read_compiler_facts(3) == CompilerFacts(graphs=5, breaks=(), recompiled_in_steps=2)


def test_breaks_are_counted_by_reason_and_line(dynamo):
    dynamo.graph_break_reasons[:] = [reason("Print\n  Explanation: much", 6), reason("jump", 7), reason("jump", 7)]
    assert graph_breaks_in([REGION]) == (
        GraphBreak(reason="jump", source="train.py:7", count=2),
        GraphBreak(reason="Print", source="train.py:6", count=1),
    )


def test_a_break_without_a_stack_has_no_line(dynamo):
    dynamo.graph_break_reasons[:] = [reason("jump", None)]
    assert graph_breaks_in([REGION]) == (GraphBreak(reason="jump", source="", count=1),)


def test_a_step_without_compiled_code_has_no_breaks(dynamo):
    dynamo.graph_break_reasons[:] = [reason("jump", 7)]
    assert graph_breaks_in([]) == ()


def first_half(x):
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos()


def second_half(x):
    return inner(x.exp()) * 2.0


def inner(x):
    torch._dynamo.graph_break()
    return x.abs()


def looped(x):
    for _ in range(2):
        x = x.neg()
        torch._dynamo.graph_break()
    return x


def around_a_loop(x):
    return looped(x.sin()).cos()


def whole(x):
    return x.sin().cos()


class Broken(torch.nn.Module):
    def forward(self, x):
        return first_half(x)


def line_of(function, offset):
    return f"test_compiler.py:{function.__code__.co_firstlineno + offset}"


@pytest.fixture(scope="module")
def regions_of(tmp_path_factory):
    """Compiles functions, all of them before the first one is looked at; gives the regions that a call of one has."""
    torch._dynamo.reset()
    file = tmp_path_factory.mktemp("regions") / "step.json"
    given = {item.__name__: item for item in (first_half, second_half, around_a_loop, whole)}
    given["broken sequence"] = torch.nn.Sequential(Broken(), torch.nn.ReLU())
    given["whole sequence"] = torch.nn.Sequential(torch.nn.ReLU())
    compiled = {name: torch.compile(item, backend="eager") for name, item in given.items()}
    x = torch.ones(8, 8)
    for function in compiled.values():
        function(x)

    def regions(name):
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            compiled[name](x)
        profiler.export_chrome_trace(str(file))
        return read_trace(file).compiled_regions

    yield regions
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("first_half", {line_of(first_half, 2)}),
        ("second_half", {line_of(inner, 1)}),
        ("around_a_loop", {line_of(looped, 3)}),
        ("whole", set()),
        ("broken sequence", {line_of(first_half, 2)}),
        ("whole sequence", set()),
    ],
)
def test_breaks_are_those_of_the_code_that_ran(regions_of, name, lines):
    regions = regions_of(name)
    assert regions
    assert {item.source for item in graph_breaks_in(regions)} == lines


def test_a_profile_of_compiled_code_has_the_facts_and_keeps_them(tmp_path):
    @torch.compile(backend="eager")
    def step(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    found = nearpeak.profile(step, torch.ones(64, 64), on="h200-sxm")
    assert found.compiler.graphs >= 2
    assert found.compiler.recompiled_in_steps == 0
    assert any(item.source.startswith("test_compiler.py:") for item in found.compiler.breaks)
    found.save(tmp_path / "run.json")
    assert nearpeak.load(tmp_path / "run.json").compiler == found.compiler


def test_a_profile_does_not_have_the_breaks_of_code_that_ran_before():
    broken, clean = torch.compile(first_half, backend="eager"), torch.compile(whole, backend="eager")
    x = torch.ones(64, 64)
    broken(x)  # compiled before anything is watched
    assert nearpeak.profile(clean, x, on="h200-sxm").compiler.breaks == ()
    (found,) = nearpeak.profile(broken, x, on="h200-sxm").compiler.breaks
    assert found.source == line_of(first_half, 2)
    assert nearpeak.profile(clean, x, on="h200-sxm").compiler.breaks == ()
