"""Which steps of a run are profiled, with a profiler that sees what a file has: there is no GPU."""

import types
from typing import ClassVar

import pytest
import torch
from replays import event, write_events

from nearpeak.ops.op import Trace
from nearpeak.profiling import session
from nearpeak.profiling.session import PROFILED_STEPS
from nearpeak.profiling.steps import Awaited, StepKind
from nearpeak.trace import guard
from nearpeak.trace.kineto.read import read_trace
from nearpeak.trace.live import LiveTrace

TOOK = (100.0, 130.0, 110.0, 140.0, 120.0)
"""Of the kernel in the steps that are profiled, in microseconds."""
FLOATS = {"Input Dims": [[64, 64]], "Input Strides": [[64, 1]], "Input type": ["float"], "Concrete Inputs": [""]}


class Profiler:
    made: ClassVar[list] = []

    def __init__(self, folder):
        self.number, self.ended, self.among, self.discarded = 0, 0, None, False
        self.folder = folder
        Profiler.made.append(self)

    def next_step(self):
        self.number += 1

    def end_step(self):
        self.ended += 1

    def discard(self):
        self.discarded = True

    def stop(self, among):
        self.among = list(among)
        events = []
        for number in range(self.number + 1):
            start, took, facts = 1000.0 * number, TOOK[(number - 1) % 5], {"correlation": number + 1}
            known = facts | {"External id": number + 1}
            events += [
                event("user_annotation", f"ProfilerStep#{number}", start, 900.0, {}),
                event("cpu_op", "aten::exp", start + 10.0, 10.0, {"External id": number + 1} | FLOATS),
                event("cuda_runtime", "cudaLaunchKernel", start + 12.0, 5.0, facts),
                event("kernel", "exp", start + 20.0, took, known | {"device": 0, "stream": 7}),
            ]
        return read_trace(write_events(self.folder / "steps.json", events), among=among)


@pytest.fixture
def watching(monkeypatch, tmp_path):
    """A watch that believes in a GPU, and the profilers that it made."""
    Profiler.made = []
    monkeypatch.setattr(session, "Profiler", lambda: Profiler(tmp_path))
    monkeypatch.setattr(session, "_gpu_was_used", lambda: True)
    return session.Session(lambda line: None, traces=False)


def until_profiled(found):
    while found.schedule.phase != "profiled":
        found.step_ends()


def test_the_step_in_the_middle_is_what_counts(watching):
    while watching.schedule.phase != "traced":
        watching.step_ends()
    (profiler,) = Profiler.made
    assert profiler.among == list(range(1, 1 + PROFILED_STEPS))
    assert profiler.ended == PROFILED_STEPS - 1  # what runs between two steps is in neither
    recorded = watching._recorded
    assert recorded.step == 5
    assert recorded.repeats == (pytest.approx([1e-6 * took for took in TOOK]),)


def test_a_step_of_another_kind_is_left_out_and_ends_it(watching):
    until_profiled(watching)
    watching.step_ends()
    watching.step_ends()
    watching.step_ends(StepKind(shape=(4096, 4096)))
    (profiler,) = Profiler.made
    assert watching.schedule.phase == "traced"
    assert (profiler.among, watching._recorded.step) == ([1, 2], 1)


def test_a_trace_that_the_caller_takes_knows_how_many_steps_lie_between(watching):
    until_profiled(watching)
    watching.step_ends()
    watching.step_ends()
    watching.step_ends(StepKind(shape=(4096, 4096)))
    watching.add_trace(Trace(ops=(), storages={}))
    assert watching._recorded.step == 1
    assert watching._traced.steps_since == 3  # the second one, the one of another kind, and the traced one


def test_the_first_of_another_kind_begins_them_anew(watching):
    until_profiled(watching)
    watching.step_ends(StepKind(shape=(4096, 4096)))
    assert [profiler.discarded for profiler in Profiler.made] == [True, False]
    while watching.schedule.phase != "traced":
        watching.step_ends()
    assert len(Profiler.made[-1].among) == PROFILED_STEPS


def test_on_a_cpu_one_step_is_profiled(watching, monkeypatch):
    monkeypatch.setattr(session, "_gpu_was_used", lambda: False)
    while watching.schedule.phase != "traced":
        watching.step_ends()
    assert Profiler.made[0].among == [1]


def test_the_rank_is_that_of_the_profiled_step(watching, monkeypatch):
    monkeypatch.setattr(session, "distributed_rank", lambda: (3, 8))
    while watching.schedule.phase != "traced":
        watching.step_ends()
    monkeypatch.setattr(session, "distributed_rank", lambda: None)  # the process group is gone
    watching.add_trace(Trace(ops=(), storages={}))
    found = watching.records("train.py")
    assert (found.source, found.rank, found.world_size) == ("train.py", 3, 8)


def test_a_traced_step_is_evaluated_at_once():
    found = session.Session(lambda line: None)
    kind = StepKind(trained=1)
    found.step_ends(kind)
    # as after clean steps that steps of another kind came between
    found.schedule.phase, found._deferred_left, found._last_kind = "traced", 5, (kind, False, False)
    found._live = LiveTrace()
    found.step_ends(kind)
    assert found.schedule.phase == "traced next"  # which is traced too
    found.step_ends(kind)
    assert found._live is None
    assert torch._C._len_torch_dispatch_stack() == 0
    assert found.is_done


def test_what_we_do_at_the_end_of_a_step_is_no_part_of_it(monkeypatch):
    clock = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr(guard, "time", types.SimpleNamespace(perf_counter=lambda: clock.now))

    def slow_count():
        clock.now += 0.5
        return 0

    monkeypatch.setattr(session, "compiled_graph_count", slow_count)
    found = session.Session(lambda line: None)
    while found.schedule.phase in ("warm-up", "clean"):
        clock.now += 0.25
        found.step_ends(StepKind(trained=1))
    assert found.schedule.walls == [0.25] * session.CLEAN_STEPS
    found.abandon()


class Detector:
    """Of steps after which something may come."""

    awaits = Awaited("the first step of Adam", 60.0)
    awaited_loop = ""
    unfinished_calls = 0

    def __init__(self):
        self.stopped = False
        self.calls = types.SimpleNamespace(search=lambda on: None)

    def awaited(self):
        return self.awaits

    def notes(self):
        return ()

    def stop(self, *, until_training=False):
        self.stopped = True


@pytest.fixture
def recorded(watching, monkeypatch):
    """A session of steps of a millisecond that is to end the program when all is recorded, and its clock."""
    clock = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr(guard, "time", types.SimpleNamespace(perf_counter=lambda: clock.now))
    watching.guard._own_time.entered = 100.0
    watching._stop, watching.steps, watching.said = True, Detector(), []
    watching._say = watching.said.append

    def take_step(seconds=1e-3):
        clock.now += seconds
        watching.step_ends(StepKind(module=1))
        if watching.schedule.phase == "traced":
            watching.add_trace(Trace(ops=(), storages={}))

    watching.take_step = take_step
    while not watching.is_done:
        take_step()
    return watching


def test_the_program_goes_on_while_a_longer_step_may_come_and_ends_when_it_does_not(recorded):
    recorded.take_step()
    assert "waiting up to 60.0 s for the first step of Adam: these may be one step" in recorded.said
    recorded.take_step(30.0)
    assert not recorded.steps.stopped
    with pytest.raises(session.StopRun):
        recorded.take_step(31.0)
    assert recorded.steps.stopped
    assert recorded.records("play.py") is not None


def test_a_loop_is_waited_for_until_it_is_known_to_be_no_step(recorded):
    recorded._wait_ends = None
    recorded.steps.awaits = Awaited("the next iterations of the loop at serve.py:8", 10.0, is_loop=True)
    recorded.steps.awaited_loop = "serve.py:8"
    recorded._complete()
    recorded.take_step(1.0)
    assert not recorded.steps.stopped
    recorded.steps.awaited_loop = ""
    with pytest.raises(session.StopRun):
        recorded.take_step()


def test_an_injected_delay_counts_as_the_programs(watching, monkeypatch):
    clock = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr(guard, "time", types.SimpleNamespace(perf_counter=lambda: clock.now))

    class Injector:
        def step_begins(self):
            clock.now += 0.5

    watching.injector = Injector()
    for _ in range(40):
        with watching.guard.own_time():  # what ends a step is called by code of nearpeak
            watching.step_ends(StepKind(trained=1))
        clock.now += 0.25
        if watching.schedule.phase not in ("warm-up", "clean"):
            break
    assert set(watching.schedule.walls) == {0.75}
    watching.abandon()


def test_a_period_begins_with_one_more_step_to_warm_up_and_what_was_recorded_counts_until_it_is(recorded):
    recorded.take_step()
    recorded.period_begins("the program repeats 16 steps as one: these are the step")
    assert recorded.schedule.phase == "warm-up"
    assert recorded.records("play.py") is not None
    recorded.take_step(0.5)
    recorded.take_step(0.5)
    assert recorded.schedule.phase == "clean"
    recorded.steps.awaits = Awaited()
    with pytest.raises(session.StopRun):
        for _ in range(20):
            recorded.take_step(0.5)
    assert recorded.records("play.py").walls[0] == pytest.approx(0.5)
