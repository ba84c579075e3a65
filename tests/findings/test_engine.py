"""Findings have what each saves alone and all together, are merged by line, and can be silenced."""

import dataclasses
import inspect
import runpy
import sys

import pytest
import torch

import nearpeak
from nearpeak.bound.estimate import estimate_trace
from nearpeak.errors import UsageError
from nearpeak.findings import engine
from nearpeak.findings.engine import Waste, add_findings, add_rules, check_ignored_rules, find, forget_rule, rule, rules
from nearpeak.findings.replay import HostPiece, ReplayedKernel, StepReplay, StepTimeline
from nearpeak.findings.step import Step
from nearpeak.machines.catalogue import find as find_machine
from nearpeak.profiles.finding import Fix
from nearpeak.profiles.idle import IdleCause
from nearpeak.profiles.profile import DeviceKernel, build_profile
from nearpeak.render.views.profile import select_findings
from nearpeak.trace.trace import trace

pytestmark = pytest.mark.usefixtures("own_rules")


@pytest.fixture
def own_rules(monkeypatch):
    """Only the rules of a test, and none of them afterwards."""
    rules()
    monkeypatch.setattr(engine, "_RULES", {})


def chain(x, y):
    a = x + y
    b = a * 2
    c = b.relu()
    return c.sum(), a


def examined(took=1.0, idle=(), knows=("storages", "lines", "host", "memory")):
    """A step of four ops that took a second each, in a wall time of ten."""
    traced = trace(chain, torch.ones(64, 64), torch.ones(64, 64), live=True)
    machine = find_machine("h200-sxm")
    kernels = [
        DeviceKernel(name=op.name, start_s=number * took, seconds=took, op=number)
        for number, op in enumerate(traced.ops)
    ]
    profile = build_profile(
        estimate_trace(traced, machine), kernels, wall_s=10.0, source="test", date="", device="made up"
    )
    profile = dataclasses.replace(profile, idle=tuple(idle))
    return Step(trace=traced, profile=profile, machine=machine, knows=frozenset(knows))


def waste(at, gains=None, **others):
    return nearpeak.Waste(
        **{"title": "Too much.", "evidence": "seen", "reasoning": "so", "remedy": "less", **others},
        op=at,
        gains=gains or {},
    )


def test_findings_have_what_they_save_alone_and_shares_of_the_same_op_multiply():
    rule("one")(lambda step: [waste(0, {0: 0.8, 1: 0.6})])
    rule("other")(lambda step: [waste(0, {0: 0.5})])
    found, undecided = find(examined())
    assert [(item.rule, pytest.approx(item.saving_s)) for item in found] == [("one", 1.4), ("other", 0.5)]
    assert [item.together_s for item in found] == pytest.approx([1.4, 0.9 + 0.6])
    assert undecided == ()
    assert found[0].share == pytest.approx(0.14)


def test_places_of_one_rule_claim_the_time_of_an_op_once():
    rule("one")(lambda step: [waste(0, {0: 0.8}), waste(1, {0: 0.5})])
    found, _ = find(examined())
    assert sorted(item.saving_s for item in found) == pytest.approx([0.2, 0.8])


@pytest.mark.parametrize(
    ("larger", "left"),
    [
        (waste(0, {0: 1.0, 1: 1.0}), []),  # the op no longer runs
        (waste(0, {0: 0.8, 1: 0.8}, replaces=True), []),  # another op takes its place
        (waste(0, {0: 0.8, 1: 0.8}), [0.6]),
        (waste(0, {1: 1.0, 2: 1.0}), [0.6]),
    ],
)
def test_what_goes_with_a_larger_finding_anyway_has_one_name(larger, left):
    rule("larger")(lambda step: [larger])
    rule("smaller")(lambda step: [waste(0, {0: 0.6})])
    found, _ = find(examined())
    assert [item.saving_s for item in found if item.rule == "smaller"] == pytest.approx(left)


def test_a_change_that_is_mostly_elsewhere_keeps_what_it_saves_alone():
    rule("larger")(lambda step: [waste(0, {0: 1.0, 1: 1.0})])
    rule("wide")(lambda step: [waste(0, {0: 0.5, 2: 0.5, 3: 0.5})])
    found, _ = find(examined())
    assert [item.saving_s for item in found] == pytest.approx([2.0, 1.5])
    assert found[-1].together_s == pytest.approx(3.0)


def test_a_general_rule_gets_the_ops_that_no_other_claims():
    rule("general", general=True)(lambda step: [waste(0, {0: 0.9, 1: 0.9})])
    rule("special")(lambda step: [waste(0, {0: 0.2})])
    found, _ = find(examined())
    assert [(item.rule, pytest.approx(item.saving_s)) for item in found] == [("general", 0.9), ("special", 0.2)]


def test_a_claim_beyond_what_an_op_took_is_cut():
    rule("greedy")(lambda step: [waste(0, {0: 100.0})])
    assert find(examined())[0][0].saving_s == 1.0


def test_idle_time_is_claimed_by_its_cause():
    idle = (IdleCause(cause="input", seconds=2.0, count=1, where="", what=""),)
    rule("input")(lambda step: [waste(None, idle={"input": 1.5})])
    rule("more-input")(lambda step: [waste(None, idle={"input": 1.0, "compilation": 3.0})])
    found, _ = find(examined(idle=idle))
    assert [item.saving_s for item in found] == [1.5, 1.0] and found[-1].together_s == 2.0


LAUNCHING = (IdleCause(cause="launching", seconds=3.0, count=4, where="", what="launched late"),)


def late(step, *seconds):
    """The same step, whose ops were launched so late."""
    ops = (
        dataclasses.replace(op, launch_wait_s=launch_wait_s)
        for op, launch_wait_s in zip(step.profile.ops, seconds, strict=True)
    )
    return dataclasses.replace(step, profile=dataclasses.replace(step.profile, ops=tuple(ops)))


def test_an_op_that_goes_takes_what_the_device_waited_for_it():
    rule("merged")(lambda step: [waste(0, {0: 0.5, 1: 0.5}, gone=[1])])
    rule("gone")(lambda step: [waste(2, {2: 1.0})])  # all of its time: it runs no more
    rule("quicker")(lambda step: [waste(3, {3: 0.9})])
    found, _ = find(late(examined(idle=LAUNCHING), 1.0, 0.8, 0.7, 0.5))
    assert {item.rule: item.saving_s for item in found} == pytest.approx({"merged": 1.8, "gone": 1.7, "quicker": 0.9})
    assert next(item for item in found if item.rule == "gone").reasoning.startswith(
        "so 700 ms in which the device waited"
    )
    assert next(item for item in found if item.rule == "quicker").reasoning == "so"


def test_what_was_waited_for_a_launch_is_saved_once():
    rule("one")(lambda step: [waste(0, {0: 0.5}, gone=[0])])
    rule("other")(lambda step: [waste(0, {0: 0.4}, gone=[0])])
    rule("rest", general=True)(lambda step: [waste(None, idle={"launching": 3.0})])
    found, _ = find(late(examined(idle=LAUNCHING), 1.0, 0.8, 0.7, 0.5))
    assert {item.rule: item.saving_s for item in found} == pytest.approx({"rest": 2.0, "one": 1.5, "other": 1.4})
    assert found[-1].together_s == pytest.approx(3.0 + 0.7)


def test_a_waste_of_launches_alone_is_one():
    rule("launches")(lambda step: [waste(0, gone=[0, 1])])
    (found,), _ = find(late(examined(idle=LAUNCHING), 1.0, 0.8, 0.7, 0.5))
    assert found.saving_s == pytest.approx(1.8)


READS = [IdleCause(cause="synchronization", seconds=1.0, count=1, where=f"a.py:{line}", what="item") for line in (1, 2)]


def replayed(launch_s, kernel_s, *, waits=(), wall_s=10.0):
    """The step of four ops with a made-up timeline: each op is launched for some time, then the host may wait."""
    pieces = []
    for op in range(4):
        pieces.append(HostPiece(launch_s, 0, op, None, kernel=op))
        pieces += [HostPiece(0.0, 0, None, (c.cause, c.where, c.what), wait=op) for c in waits if op == 1]
    kernels = [ReplayedKernel(kernel_s, op, 0, 0.0, False, None, 0.0) for op in range(4)]
    timeline = StepTimeline(pieces=pieces, kernels=kernels, launch_latency_s=0.0)
    return dataclasses.replace(examined(idle=waits), replay=StepReplay(timeline, wall_s))


def test_a_step_that_waits_for_its_host_gains_nothing_from_quicker_kernels_and_all_from_ops_that_go():
    rule("quicker")(lambda step: [waste(0, {0: 0.9})])
    rule("gone")(lambda step: [waste(2, {2: 1.0})])
    found, _ = find(replayed(2.5, 1.0))
    assert [(item.rule, item.saving_s, item.together_s) for item in found] == [
        ("gone", pytest.approx(2.5), pytest.approx(2.5))
    ]
    assert found[0].reasoning.startswith("so A replay of the host and the device without it takes 7.50 s")


def test_no_more_idle_time_is_saved_than_the_step_has():
    rule("gone")(lambda step: [waste(2, {2: 1.0, 3: 1.0})])
    step = replayed(2.5, 1.0)  # which waits for its host for 6 of 10 s
    busy = dataclasses.replace(step, profile=dataclasses.replace(step.profile, kernel_s=9.0))
    (found,), _ = find(step)
    (bounded,), _ = find(busy)
    assert (found.saving_s, found.idle_s) == (pytest.approx(5.0), pytest.approx(3.0))
    assert (bounded.saving_s, bounded.idle_s) == (pytest.approx(2.5), pytest.approx(0.5))


def test_a_step_of_long_kernels_gains_nothing_from_launches_that_go():
    rule("launches")(lambda step: [waste(0, launch_s=dict.fromkeys(range(4), 0.0), idle={"launching": 3.0})])
    rule("quicker")(lambda step: [waste(0, {0: 0.5})])
    step = replayed(1.0, 2.5)
    step = dataclasses.replace(step, profile=dataclasses.replace(step.profile, idle=LAUNCHING))
    (found,), _ = find(step)
    assert (found.rule, found.saving_s) == ("quicker", pytest.approx(1.25))  # half of its kernel


def test_lines_that_wait_for_the_same_share_what_they_cost_together():
    rule("waits")(lambda step: [waste(None, idle={"synchronization": 1.0}, causes=[c], source=c.where) for c in READS])
    found, _ = find(replayed(1.0, 2.0, waits=READS, wall_s=9.0))
    assert [(item.source, item.saving_s) for item in found] == [
        ("a.py:1", pytest.approx(0.5)),
        ("a.py:2", pytest.approx(0.5)),
    ]
    assert [item.together_s for item in found] == [pytest.approx(0.0, abs=1e-3), pytest.approx(1.0)]


def test_a_part_of_the_waiting_that_no_rule_names_is_saved_as_it_is():
    rule("some")(lambda step: [waste(None, idle={"synchronization": 0.5})])
    (found,), _ = find(replayed(1.0, 2.0, waits=READS, wall_s=9.0))
    assert found.saving_s == pytest.approx(0.5)


def test_a_general_rule_saves_what_the_others_leave_and_all_together_are_known():
    rule("graph", general=True)(
        lambda step: [waste(None, launch_s=dict.fromkeys(range(4), 0.0), idle={"launching": 3.0})]
    )
    rule("gone")(lambda step: [waste(2, {2: 1.0}), waste(3, {3: 1.0})])
    step = replayed(2.5, 1.0)
    step = dataclasses.replace(step, profile=dataclasses.replace(step.profile, idle=LAUNCHING))
    found, _ = find(step)
    savings = [(item.rule, round(item.saving_s, 6)) for item in found]
    assert savings == [("graph", 3.0), ("gone", 2.5), ("gone", 2.5)]
    assert found[-1].together_s == pytest.approx(8.0)


def test_other_rules_save_what_they_do_without_what_comes_first():
    rule("setting", first=True)(
        lambda step: [waste(None, launch_s=dict.fromkeys(range(4), 0.5), idle={"launching": 3.0})]
    )
    rule("gone")(lambda step: [waste(2, {2: 1.0})])
    step = replayed(2.5, 1.0)
    step = dataclasses.replace(step, profile=dataclasses.replace(step.profile, idle=LAUNCHING))
    found, _ = find(step)
    savings = [(item.rule, round(item.saving_s, 6)) for item in found]
    assert savings == [("setting", 6.0), ("gone", 1.0)]  # a kernel, not the launch that takes as long with the setting


def test_what_is_spent_once_is_no_saving_and_others_save_a_share_of_the_step_without_it():
    rule("plan")(
        lambda step: [waste(None, launch_s=dict.fromkeys(range(4), 0.5), idle={"launching": 3.0}, is_once=True)]
    )
    rule("gone")(lambda step: [waste(2, {2: 1.0})])
    step = replayed(2.5, 1.0)
    step = dataclasses.replace(step, profile=dataclasses.replace(step.profile, idle=LAUNCHING))
    (plan, gone), _ = find(step)
    assert (plan.saving_s, plan.share, plan.once_s, plan.together_s) == (0.0, 0.0, pytest.approx(6.0), 0.0)
    assert (gone.saving_s, gone.together_s) == (pytest.approx(1.0), pytest.approx(1.0))
    assert gone.share == pytest.approx(1.0 / 4.0)
    profile = dataclasses.replace(step.profile, findings=(plan, gone))
    assert profile.long_run_s == pytest.approx(4.0)
    assert [finding.rule for finding in select_findings(profile, 0.5)] == ["plan"]


def test_idle_time_that_the_timeline_does_not_have_is_saved_as_it_is():
    rule("input")(lambda step: [waste(None, idle={"input": 1.5})])
    idle = (IdleCause(cause="input", seconds=2.0, count=1, where="", what=""),)
    step = replayed(2.5, 1.0)
    (found,), _ = find(dataclasses.replace(step, profile=dataclasses.replace(step.profile, idle=idle)))
    assert found.saving_s == pytest.approx(1.5)


def test_a_replay_that_misses_the_clean_step_is_not_used_and_said():
    rule("quicker")(lambda step: [waste(0, {0: 0.9})])
    step = replayed(0.5, 1.0)
    profile = add_findings(step.profile, step.trace, step.machine, step.knows, replay=step.replay)
    assert profile.findings[0].saving_s == pytest.approx(0.9)
    assert profile.notes[-1].startswith("The replay of the host and the device takes 4.00 s where a clean step takes")


@pytest.mark.parametrize(("slower", "value"), [(1.25, 0.875), (9.0, 1 - (3 ** (1 / 3) - 1) / 2)])
def test_idle_time_is_worth_less_where_products_cannot_keep_their_speed(slower, value):
    """Of two seconds, what the product takes longer: a quarter, or all that a rest of two thirds allows."""
    left, right = torch.ones(2, 64, 64, dtype=torch.bfloat16)
    traced = trace(lambda: left @ right, live=True)
    machine = find_machine("h200-sxm")
    limits = dataclasses.replace(machine.achievable, matrix_sustained={"bfloat16": 2 * 64**3 / slower})
    machine = dataclasses.replace(machine, achievable=limits)
    kernels = [DeviceKernel(name="mm", start_s=0.0, seconds=1.0, op=0)]
    profile = build_profile(estimate_trace(traced, machine), kernels, wall_s=3.0, source="", date="", device="")
    wait = IdleCause(cause="synchronization", seconds=2.0, count=1, where="", what="item")
    step = Step(
        trace=traced, profile=dataclasses.replace(profile, idle=(wait,)), machine=machine, knows=frozenset({"host"})
    )
    assert step.idle_value == pytest.approx(value)
    rule("waits", needs=["host"])(lambda step: [waste(None, idle={"synchronization": 2.0})])
    (found,), _ = find(step)
    assert found.saving_s == pytest.approx(2 * value) and "less of the waiting is counted" in found.reasoning


def test_places_of_one_line_are_one_finding():
    rule("twice")(lambda step: [waste(0, {0: 0.5}), waste(0, {1: 0.4})])
    (found,), _ = find(examined())
    assert (found.places, found.saving_s, found.ops) == (2, 0.9, (0, 1))
    assert found.source.startswith("test_engine.py:")


def test_little_is_not_shown_and_can_be_asked_for():
    rule("little")(lambda step: [waste(0, {0: 0.05})])
    assert find(examined())[0] == ()
    assert len(find(examined(), least_share=0.001)[0]) == 1


def test_rules_and_single_lines_can_be_silenced():
    rule("loud")(lambda step: [waste(0, {0: 0.5}), waste(1, {1: 0.5})])
    step = examined()
    assert find(step, ignore=["loud"])[0] == ()
    (left,), _ = find(step, ignore=[f"loud@{step.ops[0].source}"])
    assert left.source == step.ops[1].source
    with pytest.raises(UsageError, match="no rule called 'lout'"):
        check_ignored_rules(["lout"])


def test_a_rule_that_needs_more_than_is_known_is_undecided():
    rule("needs-storages", needs=["storages"])(lambda step: [waste(0, {0: 1.0})])
    assert find(examined(knows=("lines",))) == ((), ("needs-storages",))


def test_names_are_checked_and_taken_once():
    with pytest.raises(UsageError, match="lowercase letters"):
        rule("Not a Name")
    rule("taken")(lambda step: [])
    with pytest.raises(UsageError, match="already"):
        rule("taken")(lambda step: [])
    forget_rule("taken")
    rule("taken")(lambda step: [])


def test_a_file_of_the_user_adds_rules(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import nearpeak\n@nearpeak.rule('mine')\ndef mine(step):\n    return []\n", encoding="utf-8")
    add_rules(file)
    assert "mine" in rules()
    file.write_text("x = 1\n", encoding="utf-8")
    with pytest.raises(UsageError, match="defines no rule"):
        add_rules(file)
    with pytest.raises(UsageError, match="no such file"):
        add_rules(tmp_path / "none.py")


@pytest.mark.parametrize("found", [lambda step: 1 / 0, lambda step: [None], lambda step: [waste(0, {99: 1.0})]])
def test_a_rule_of_the_user_that_fails_is_a_note(found):
    rule("broken")(found)
    rule("good")(lambda step: [waste(0, {0: 1.0})])
    step = examined()
    profile = add_findings(step.profile, step.trace, step.machine, step.knows)
    assert [finding.rule for finding in profile.findings] == ["good"]
    assert profile.notes[-1].startswith("The rule broken failed: ")
    with pytest.raises((ZeroDivisionError, AttributeError, ValueError)):
        find(step)


def test_a_rule_of_nearpeak_that_fails_costs_its_findings_and_not_the_report(monkeypatch):
    def own(step):
        return 1 / 0

    own.__module__ = "nearpeak.findings.rules.own"
    rule("own")(own)
    rule("good")(lambda step: [waste(0, {0: 1.0})])
    step = examined()
    with pytest.raises(ZeroDivisionError):  # in tests
        add_findings(step.profile, step.trace, step.machine, step.knows)
    monkeypatch.setattr(engine, "OWN_ERRORS_ARE_RAISED", False)
    profile = add_findings(step.profile, step.trace, step.machine, step.knows)
    assert [finding.rule for finding in profile.findings] == ["good"]
    assert profile.notes[-1] == (
        "The rule own failed, which is an error of nearpeak: please report it: ZeroDivisionError: division by zero"
    )


def test_the_flow_of_data():
    step = examined()
    flow = step.flow
    assert flow.consumers[:3] == [(1,), (2,), (3,)]
    assert set(flow.producers[1].values()) == {0}
    inner = set(flow.written_by[1]) | set(flow.written_by[2])
    assert flow.private([1, 2, 3]) >= inner
    assert not set(flow.written_by[0]) & flow.private([0, 1, 2])  # it is returned


def test_one_kernel_reads_and_writes_what_crosses_its_border():
    step = examined()
    reads, writes = step.border([1, 2])
    assert [access.bytes for access in reads] == [4 * 64 * 64]
    assert [access.bytes for access in writes] == [4 * 64 * 64]
    assert 0 < step.expected_fused([1, 2]) < 1e-3
    assert step.seconds([0, 1]) == 2.0
    assert step.bytes([0, 1]) == 5 * 4 * 64 * 64


def test_a_good_kernel_of_an_op_that_is_not_there():
    step = examined()
    assert step.expected(step.ops[0]) == pytest.approx(
        step.expected_for_work(step.costs[0].reads, step.costs[0].writes), rel=0.5
    )


def test_a_fix_has_the_ops_and_the_real_modules_of_its_finding():
    fix = Fix(id="add", usage="nearpeak.kernels.add(x, y)")
    rule("fixed")(lambda step: [waste(0, {0: 0.5}, fix=fix, source="a.py:1"), waste(1, {1: 0.4}, source="a.py:1")])
    step = examined()
    ops = [dataclasses.replace(op, module=f"model.layers.{number}") for number, op in enumerate(step.ops)]
    step = dataclasses.replace(step, trace=dataclasses.replace(step.trace, ops=tuple(ops)))
    (found,), _ = find(step)
    assert found.modules == ("model.layers.0", "model.layers.1")
    assert found.module == "model.layers.*"
    assert found.fix == dataclasses.replace(fix, ops=(0, 1), modules=found.modules)


class Enclosing(torch.nn.Module):
    def __init__(self, two_callers):
        super().__init__()
        self.two_callers = two_callers

    def forward(self, x):
        table = doubled(x)
        if self.two_callers:
            table = doubled(table)
        return table.relu()


def doubled(x):
    return x * 2


@pytest.mark.parametrize(
    ("rule_name", "two_callers"), [("in-function", False), ("in-function", True), ("in-forward", False)]
)
def test_the_line_that_calls_a_function_is_named_beside_the_line_in_it(rule_name, two_callers):
    """If one line calls it. The forward pass of a module is called at many."""
    rule("in-function")(
        lambda step: [waste(at, {at: 1.0}) for at, op in enumerate(step.ops) if op.packet == "aten.mul"]
    )
    rule("in-forward")(
        lambda step: [waste(at, {at: 1.0}) for at, op in enumerate(step.ops) if op.packet == "aten.relu"]
    )
    module, x = torch.nn.Sequential(Enclosing(two_callers)), torch.ones(64, 64)
    traced = trace(lambda: module(x), live=True)
    profile = build_profile(
        estimate_trace(traced, find_machine("h200-sxm")),
        [DeviceKernel(name=op.name, start_s=at, seconds=1.0, op=at) for at, op in enumerate(traced.ops)],
        wall_s=10.0, source="test", date="", device="made up",
    )  # fmt: skip
    step = Step(trace=traced, profile=profile, machine=find_machine("h200-sxm"), knows=frozenset(("storages", "lines")))
    (found,) = (item for item in find(step)[0] if item.rule == rule_name)
    if rule_name == "in-function" and not two_callers:
        _, _, line = found.called_at.rpartition(":")
        assert inspect.getsource(Enclosing).splitlines()[int(line) - inspect.getsourcelines(Enclosing)[1]].strip() == (
            "table = doubled(x)"
        )
        assert found.where == f"{found.source}, called at line {line}"
    else:
        assert found.called_at == "" and found.where == found.source


class TableFirst(torch.nn.Module):
    def forward(self, x):
        table = doubled(x)
        return table.sum()


class Nested(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = TableFirst(), torch.nn.Sequential(TableFirst())

    def forward(self, x):
        return self.second(self.first(x).expand(4, 4))


def test_the_calling_line_is_named_where_one_line_calls_several_modules():
    rule("doubles")(lambda step: [waste(at, {at: 1.0}) for at, op in enumerate(step.ops) if op.packet == "aten.mul"])
    module, x = torch.nn.Sequential(Nested()), torch.ones(64, 64)
    (found,) = find(timed(trace(lambda: module(x), live=True)))[0]
    _, _, line = found.called_at.rpartition(":")
    assert int(line) == inspect.getsourcelines(TableFirst)[1] + 2


def main(x):
    doubled(x)
    return doubled(x).sum()


def test_a_call_that_all_of_the_step_is_below_is_not_named():
    rule("sums")(lambda step: [waste(at, {at: 1.0}) for at, op in enumerate(step.ops) if op.packet == "aten.sum"])
    (found,) = find(timed(trace(lambda: main(torch.ones(64, 64)), live=True)))[0]
    assert found.called_at == ""


def timed(traced):
    """A step whose ops took a second each."""
    machine = find_machine("h200-sxm")
    kernels = [DeviceKernel(name=op.name, start_s=at, seconds=1.0, op=at) for at, op in enumerate(traced.ops)]
    estimate = estimate_trace(traced, machine)
    profile = build_profile(estimate, kernels, wall_s=40.0, source="test", date="", device="made up")
    return Step(trace=traced, profile=profile, machine=machine, knows=frozenset({"storages", "lines"}))


def viewed(x):
    table = x * 2
    return table.t()[:8], x.exp().t().sum()


def test_views_go_with_what_only_they_read():
    rule("doubles")(lambda step: [waste(at, {at: 1.0}) for at, op in enumerate(step.ops) if op.packet == "aten.mul"])
    step = timed(trace(viewed, torch.ones(64, 64), live=True))
    (found,) = find(step)[0]
    assert [step.ops[index].packet for index in found.ops] == ["aten.mul", "aten.t", "aten.slice"]


def test_on_a_cpu_a_saving_is_the_same_share_of_the_clean_step_as_of_what_is_seen_of_it():
    """Of ten seconds, two were not seen in the profiled step: other work slowed the clean ones."""
    rule("first-op")(lambda step: [waste(0, {0: 0.8})])
    unseen = IdleCause(cause="unknown", seconds=2.0, count=0, where="", what="")
    step = examined(idle=[unseen])
    (on_gpu,) = find(step)[0]
    (on_cpu,) = find(dataclasses.replace(step, machine=dataclasses.replace(step.machine, kind="cpu")))[0]
    assert (on_gpu.saving_s, on_cpu.saving_s) == pytest.approx((0.8, 1.0))
    assert "1.25 times" in on_cpu.reasoning


def test_a_line_of_an_installed_package_gets_a_remedy_for_the_model():
    @rule("first-op", compiles=True)
    def compiled(step):
        yield Waste(title="t", op=0, gains={0: 0.5}, evidence="e", reasoning="r", remedy="Write it so.")

    @rule("second-op")
    def replaced(step):
        yield Waste(title="t", op=1, gains={1: 0.5}, evidence="e", reasoning="r", remedy="Write it so.")

    try:
        seen = examined()
        file = seen.ops[0].source.rpartition(":")[0]
        inside = dataclasses.replace(seen, trace=dataclasses.replace(seen.trace, packages={file: "blocks"}))
        both = set(rules()) - {"first-op", "second-op"}
        assert {(item.remedy, item.library) for item in find(seen, ignore=both)[0]} == {("Write it so.", "")}
        found = {item.rule: item for item in find(inside, ignore=both)[0]}
        assert found["first-op"].remedy.startswith("model.compile()  # blocks writes these ops")
        assert found["second-op"].remedy.startswith("Write it so.\n# This is code of blocks: look for a setting of it")
        assert {item.library for item in found.values()} == {"blocks"}
        assert found["first-op"].inside == seen.ops[0].source
    finally:
        forget_rule("first-op")
        forget_rule("second-op")


def test_which_files_are_of_installed_packages(tmp_path):
    site = tmp_path / "site-packages" / "blocks"
    site.mkdir(parents=True)
    for path in (site / "layer.py", site / "train.py", tmp_path / "train.py"):
        path.write_text("import torch\n\n\ndef run(x):\n    return x + 1\n")
    functions = [
        runpy.run_path(str(path))["run"] for path in (site / "layer.py", site / "train.py", tmp_path / "train.py")
    ]
    traced = trace(lambda x: [function(x) for function in functions], torch.ones(3))
    assert traced.packages == {"layer.py": "blocks"}  # train.py is the user's own too


BLOCKS = """
import torch

def scale(x):
    return x * 2

def shift(x):
    return scale(x) + 1

class Double(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 2

    @staticmethod
    def backward(context, gradient):
        return gradient * 2
"""
SCRIPT = """
import blocks

def run(x):
    a = blocks.shift(x)
    b = blocks.scale(a)
    return b + blocks.Double.apply(b)
"""


@pytest.fixture
def own_and_installed(tmp_path, monkeypatch):
    """A function of the user's own that calls an installed package."""
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "blocks.py").write_text(BLOCKS)
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(str(site))
    yield runpy.run_path(str(tmp_path / "script.py"))["run"]
    sys.modules.pop("blocks", None)


def test_ops_of_an_installed_package_have_the_line_of_the_users_own_that_calls_it(own_and_installed):
    ops = trace(own_and_installed, torch.ones(3), live=True).ops
    assert [(op.source, op.caller) for op in ops] == [
        ("blocks.py:5", "script.py:5"),
        ("blocks.py:8", "script.py:5"),
        ("blocks.py:5", "script.py:6"),
        ("blocks.py:13", "script.py:7"),
        ("script.py:7", ""),
    ]


def test_ops_of_a_backward_pass_have_the_caller_of_their_forward(own_and_installed):
    def step(x):
        own_and_installed(x).sum().backward()

    ops = trace(step, torch.ones(3, requires_grad=True), live=True).ops
    scaled = [(op.source, op.caller) for op in ops if op.phase == "backward" and op.name.startswith("aten.mul.")]
    here = f"test_engine.py:{step.__code__.co_firstlineno + 1}"
    # the package's own backward is called by the line that starts the pass
    assert scaled == [("blocks.py:17", here), ("blocks.py:5", "script.py:6"), ("blocks.py:5", "script.py:5")]


def test_findings_in_an_installed_package_are_grouped_under_the_line_that_calls_it(own_and_installed):
    rule("multiplies", compiles=True)(
        lambda step: [waste(index, {index: 0.5}) for index, op in enumerate(step.ops) if "mul" in op.name]
    )
    traced = trace(own_and_installed, torch.ones(3), live=True)
    machine = find_machine("h200-sxm")
    kernels = [DeviceKernel(name=op.name, start_s=i, seconds=1.0, op=i) for i, op in enumerate(traced.ops)]
    profile = build_profile(estimate_trace(traced, machine), kernels, wall_s=10.0, source="", date="", device="")
    profile = add_findings(profile, traced, machine, frozenset({"lines"}))
    assert sorted((item.source, item.inside, item.library, item.places) for item in profile.findings) == [
        ("script.py:5", "blocks.py:5", "blocks", 1),
        ("script.py:6", "blocks.py:5", "blocks", 1),
        ("script.py:7", "blocks.py:13", "blocks", 1),
    ]
    assert profile.callers["blocks.py:8"] == "script.py:5"


def test_ops_of_one_module_of_torchs_are_changed_from_outside():
    class Reader(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = torch.nn.GRUCell(4, 4)
            self.layer = torch.nn.TransformerEncoderLayer(4, 1, 8, norm_first=True)
            self.own = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())

        def forward(self, x):
            return self.cell(x) + self.own(x) * 2, self.layer(x)

    @rule("all-of-a-module", compiles=True)
    def all_of_a_module(step):
        for path in sorted({op.module.split(".")[0] for op in step.ops} - {""}):
            indices = [index for index, op in enumerate(step.ops) if op.module.split(".")[0] == path]
            yield waste(indices[0], dict.fromkeys(indices, 0.9))

    traced = trace(Reader(), torch.ones(3, 4), live=True)
    machine = find_machine("h200-sxm")
    kernels = [DeviceKernel(name=op.name, start_s=i, seconds=1.0, op=i) for i, op in enumerate(traced.ops)]
    profile = build_profile(estimate_trace(traced, machine), kernels, wall_s=1.0, source="", date="", device="")
    found, _ = find(Step(trace=traced, profile=profile, machine=machine, knows=frozenset()))
    remedies = {item.library: item.remedy for item in found}
    assert set(remedies) == {"torch.nn.GRUCell", "torch.nn.TransformerEncoderLayer", ""}
    assert remedies["torch.nn.GRUCell"].startswith("torch.nn.GRU(...)")
    assert remedies["torch.nn.TransformerEncoderLayer"].startswith("model.compile()")
    assert remedies[""] == "less"  # the user has put these modules beside each other
