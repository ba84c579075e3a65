"""What settings for debugging add to a step, and that lines which only run under them are not blamed."""

import dataclasses

import pytest
import torch
from made_up import slow_cpu
from stalled_steps import cause, stalled

import nearpeak
from nearpeak.findings.engine import add_findings, find
from nearpeak.findings.replay import HostPiece, ReplayedKernel, StepReplay, StepTimeline
from nearpeak.findings.rules.debugging_left_on import debugging_left_on
from nearpeak.findings.rules.synchronization import synchronization
from nearpeak.trace.trace import trace


def training():
    x, weight = torch.ones(64, 64), torch.ones(64, 64, requires_grad=True)

    def step():
        (x @ weight).relu().sum().backward()
        weight.grad = None

    return step


def with_settings(step, *names):
    return dataclasses.replace(step, trace=dataclasses.replace(step.trace, settings=names))


@pytest.fixture
def anomaly_mode():
    with torch.autograd.set_detect_anomaly(True):
        yield


def test_a_trace_has_the_mode_its_line_and_the_nodes_that_got_stacks(anomaly_mode):
    traced = trace(training(), live=True)
    assert traced.settings == ("anomaly mode",)
    assert traced.stack_s > 0.0
    made = {traced.ops[index].packet: count for index, count in traced.graph_nodes.items()}
    assert made == {"aten.mm": 2, "aten.relu": 1, "aten.sum": 1}  # the leaf has a node of its own
    assert any(line.startswith("test_debugging_left_on.py") for line in traced.written_at["set_detect_anomaly"])


def test_without_it_a_trace_has_none():
    traced = trace(training(), live=True)
    assert (traced.settings, traced.stack_s, dict(traced.graph_nodes)) == ((), 0.0, {})


def test_its_checks_their_waits_and_the_stacks_are_one_finding_and_nobody_else_is_blamed(anomaly_mode):
    step = stalled(training())
    checks = step.anomaly_checks
    assert len(checks) == 3 * 3
    (place,) = step.anomaly_places - {""}
    idle = [cause("synchronization", 3e-4, where=place, what="item", count=3), cause("launching", 5e-4)]
    step = stalled(training(), idle=idle)
    (waste,) = debugging_left_on(step)
    assert waste.gone == step.anomaly_checks
    assert waste.idle["synchronization"] == pytest.approx(3e-4)
    assert waste.launch_s == {}  # nothing was replayed
    assert not list(synchronization(step))
    assert {finding.rule for finding in find(step)[0] if finding.source == place} <= {"debugging-left-on"}


def test_a_number_that_the_program_reads_at_a_line_of_checks_is_still_reported(anomaly_mode):
    x, weight = torch.ones(64, 64), torch.ones(64, 64, requires_grad=True)

    def step():
        for _ in range(2):
            (loss := (x @ weight).sum(), loss.item(), loss.backward())
        weight.grad = None

    (place,) = {
        op.place for op in stalled(step).ops if op.packet == "aten._local_scalar_dense" and op.phase == "forward"
    }
    (found,) = synchronization(stalled(step, idle=[cause("synchronization", 3e-4, where=place, what="item")]))
    assert found.source == place


def test_on_a_cpu_the_stacks_are_time_of_ops(anomaly_mode):
    profile = nearpeak.profile(training(), on=slow_cpu())
    (found,) = [finding for finding in profile.findings if finding.rule == "debugging-left-on"]
    assert found.share > 0.1 and "set_detect_anomaly(False)" in found.remedy
    assert profile.settings == ("anomaly mode",)


def test_with_blocking_launches_the_shorter_of_host_and_device_is_saved():
    idle = [cause("launching", 5e-4), cause("python", 1e-4)]
    step = with_settings(
        stalled(lambda: torch.ones(64, 64).relu(), idle=idle, took=lambda _: 1e-4), "CUDA_LAUNCH_BLOCKING"
    )
    (waste,) = debugging_left_on(step)
    assert waste.saving_s == pytest.approx(step.profile.kernel_s)
    assert "unset CUDA_LAUNCH_BLOCKING" in waste.remedy


def test_without_a_cache_of_memory_its_waits_are_saved():
    step = stalled(torch.relu, torch.ones(64), idle=[cause("allocator", 4e-4, what="cudaMalloc", count=3)])
    (waste,) = debugging_left_on(with_settings(step, "PYTORCH_NO_CUDA_MEMORY_CACHING"))
    assert waste.saving_s == pytest.approx(4e-4)


def test_memory_that_is_filled_takes_the_time_of_allocations():
    step = stalled(lambda: torch.relu_(torch.empty(64)), took=lambda op: 1e-4)
    (waste,) = debugging_left_on(with_settings(step, "filled memory"))
    assert [step.ops[index].packet for index in waste.gains] == ["aten.empty"]


def test_what_a_setting_costs_that_one_run_does_not_tell_is_a_note():
    step = with_settings(stalled(torch.relu, torch.ones(64)), "sync debug mode")
    assert not list(debugging_left_on(step))
    profile = add_findings(step.profile, step.trace, step.machine, step.knows)
    assert any("set_sync_debug_mode is on" in note and "cannot be told" in note for note in profile.notes)


def test_deterministic_algorithms_are_noted_only_while_they_fill_memory(monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        assert trace(torch.relu, torch.ones(8), live=True).settings == ("filled memory",)
        torch.utils.deterministic.fill_uninitialized_memory = False
        assert trace(torch.relu, torch.ones(8), live=True).settings == ()
    finally:
        torch.use_deterministic_algorithms(False)


def test_in_a_replay_the_stack_of_a_view_delays_the_launch_after_it(anomaly_mode):
    step = stalled(lambda x, weight: x @ weight.t(), torch.ones(8, 8), torch.ones(8, 8, requires_grad=True))
    assert [op.packet for op in step.ops] == ["aten.t", "aten.mm"]
    piece, kernel = HostPiece(1.0, 0, 1, None, kernel=0), ReplayedKernel(1e-5, 1, 0, 0.0, False, None, 0.0)
    replay = StepReplay(StepTimeline(pieces=[piece], kernels=[kernel], launch_latency_s=0.0), wall_s=1.0)
    traced = dataclasses.replace(step.trace, stack_s=0.125)
    (waste,) = debugging_left_on(dataclasses.replace(step, replay=replay, trace=traced))
    assert waste.launch_s == {1: pytest.approx(1.0 - 3 * 0.125)}  # of the view, the leaf, and the product
