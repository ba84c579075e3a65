import dataclasses

import pytest
from stalled import CPU, findings, idle, step

from nearpeak.findings.engine import rules
from nearpeak.profiles.profile import CompilerFacts, DeviceKernel, GraphBreak

LATE = idle("launching", 6.0, count=3, where="train.py:4", what="launched late")
BETWEEN = idle("python", 2.0, count=2, what="between ops")
FACTS = CompilerFacts(
    graphs=3, breaks=(GraphBreak(reason="print", source="train.py:7", count=2),), recompiled_in_steps=0
)
BROKEN = {"compiler": FACTS}
WHOLE = {"compiler": CompilerFacts(graphs=3, breaks=(), recompiled_in_steps=0)}


def test_late_launches_and_python_between_ops_are_saved_but_for_the_gaps_of_a_graph():
    (found,) = findings("launch-bound", LATE, BETWEEN)
    assert found.saving_s == pytest.approx(8.0 - 3 * 0.01)
    assert "train.py:4" in found.evidence
    assert "reduce-overhead" in found.remedy


def test_what_is_queued_and_long_python_is_not_its_affair():
    assert not findings("launch-bound", idle("launching", 9.0, what="between queued kernels"), idle("python", 5.0))


def test_below_a_tenth_of_the_step_it_is_silent():
    assert not findings("launch-bound", idle("launching", 1.9, what="launched late"))


def test_a_cpu_launches_nothing():
    assert not findings("launch-bound", LATE, machine=CPU)


def test_a_step_of_graphs_alone_needs_no_graph():
    made = step(LATE, BETWEEN)
    made = dataclasses.replace(made, profile=dataclasses.replace(made.profile, ops=()))
    assert not list(rules()["launch-bound"].look(made))


def test_only_the_launches_beside_graphs_count():
    made = step(LATE, BETWEEN)
    first, *rest = made.profile.ops
    ops = (dataclasses.replace(first, launch_wait_s=4.0), *rest, first)
    captured = DeviceKernel(name="k", start_s=0.0, seconds=1.0, op=len(ops) - 1, in_graph=True)
    profile = dataclasses.replace(made.profile, ops=ops, timeline=(captured,))
    (found,) = rules()["launch-bound"].look(dataclasses.replace(made, profile=profile))
    assert sum(found.idle.values()) == pytest.approx(4.0 - 3 * 0.01)


def test_synchronizations_are_to_be_removed_first():
    (found,) = findings("launch-bound", LATE, idle("synchronization", 1.0, count=4, what="item"))
    assert found.remedy.startswith("First remove the 4 synchronizations")


def test_a_file_of_the_profiler_has_a_slow_host():
    (found,) = findings("launch-bound", LATE, steps=0, profiled_s=None)
    assert found.saving_s == pytest.approx(20.0 / 2.5 - 5.0 - 3 * 0.01)
    assert not findings("launch-bound", LATE, steps=0, profiled_s=None, kernel_s=9.0)


def test_breaks_of_compiled_code_are_named_instead():
    assert not findings("launch-bound", LATE, BETWEEN, **BROKEN)
    (found,) = findings("graph-breaks", LATE, BETWEEN, **BROKEN)
    assert found.saving_s == pytest.approx(8.0)  # 3 launches of 0.1 s hide behind 5 s of kernels
    assert found.source == "train.py:7"
    assert "print" in found.evidence
    assert not findings("graph-breaks", LATE, BETWEEN)
    assert not findings("graph-breaks", LATE, BETWEEN, **WHOLE)
    assert findings("launch-bound", LATE, BETWEEN, **WHOLE)
    assert not findings("graph-breaks", LATE, BETWEEN, **BROKEN, machine=CPU)


def test_launches_that_one_graph_has_too_remain():
    (found,) = findings("graph-breaks", LATE, BETWEEN, **BROKEN, kernel_s=0.2)
    assert found.saving_s == pytest.approx(8.0 - (3 * 0.1 - 0.2))
