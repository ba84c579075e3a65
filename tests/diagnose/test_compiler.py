import sys
import traceback
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

import nearpeak
from nearpeak.diagnose.compiler import CompilerFacts, GraphBreak, compiler_facts


def reason(said, line):
    stack = [traceback.FrameSummary("/home/me/train.py", line, "step")] if line else []
    return SimpleNamespace(reason=said, user_stack=stack)


@pytest.fixture
def dynamo(monkeypatch):
    """What torch counts, made up."""
    facts = SimpleNamespace(counters={"stats": Counter()}, graph_break_reasons=[])
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", facts)
    return facts


def test_nothing_compiled_is_no_fact(dynamo):
    assert compiler_facts(0) is None


def test_breaks_are_counted_by_reason_and_line(dynamo):
    dynamo.counters["stats"]["unique_graphs"] = 5
    dynamo.graph_break_reasons[:] = [reason("Print\n  Explanation: much", 6), reason("jump", 7), reason("jump", 7)]
    assert compiler_facts(3) == CompilerFacts(
        graphs=5,
        breaks=(
            GraphBreak(reason="jump", source="train.py:7", count=2),
            GraphBreak(reason="Print", source="train.py:6", count=1),
        ),
        recompiled_in_steps=2,
    )


def test_a_break_without_a_stack_has_no_line(dynamo):
    dynamo.counters["stats"]["unique_graphs"] = 1
    dynamo.graph_break_reasons[:] = [reason("jump", None)]
    assert compiler_facts(1).breaks == (GraphBreak(reason="jump", source="", count=1),)


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
