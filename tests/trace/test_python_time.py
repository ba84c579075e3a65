import dis
import os
import sys
import threading
import time
import types

import pytest
import torch

from nearpeak.trace import python_time
from nearpeak.trace.guard import Guard
from nearpeak.trace.live import LiveTrace
from nearpeak.trace.python_time import PythonTime, own_seconds, sampled_stack
from nearpeak.trace.source import user_line
from nearpeak.trace.trace import trace


@pytest.fixture
def clock(monkeypatch):
    """Clocks that the test moves: of the wall, of the thread, and how often it lost its processor."""
    clock = types.SimpleNamespace(wall=0.0, thread=0.0, preempted=0)
    monkeypatch.setattr(python_time, "_read_clocks", lambda: (clock.wall, clock.thread, clock.preempted))
    monkeypatch.setattr(python_time.time, "perf_counter", lambda: clock.wall)
    return clock


def test_the_time_before_an_op_is_that_in_which_the_thread_had_a_processor_or_gave_it_up(clock):
    measured = PythonTime()
    for wall, thread, preempted in ((5.0, 5.0, 0), (5.0, 1.0, 2), (5.0, 0.1, 0), (1e-5, 1e-5, 0)):
        clock.wall, clock.thread, clock.preempted = (
            clock.wall + wall,
            clock.thread + thread,
            clock.preempted + preempted,
        )
        op = measured._op
        measured.op_begins(op)
        measured.op_begins(op)  # a kernel that is launched inside of an op is told too
        clock.wall, clock.thread = clock.wall + 100.0, clock.thread + 100.0
        measured.op_ended(op + 1)
    assert {op: stretch.seconds for op, stretch in measured.stretches().items()} == pytest.approx(
        {0: 5.0, 1: 1.0, 2: 5.0}
    )


def test_time_without_a_processor_is_time_of_the_threads_own_if_it_was_not_taken_away():
    assert own_seconds((1.0, 1.0, 4), (3.0, 1.5, 4)) == 2.0
    assert own_seconds((1.0, 1.0, 4), (3.0, 1.5, 5)) == 0.5


def test_what_keeps_pythons_lock_is_seen_where_it_calls_its_first_op(clock):
    measured = PythonTime()
    clock.wall, clock.thread = 5.0, 5.0
    line = sys._getframe().f_lineno + 1
    Guard().call(measured.op_begins, 0)
    (stretch,) = measured.stretches().values()
    assert {stack[0].line: seen_s for stack, seen_s in stretch.stacks.items()} == {f"test_python_time.py:{line}": 5.0}


def test_a_look_counts_since_the_last_one_or_since_the_last_op(clock):
    measured = PythonTime()
    clock.wall = 1.0
    measured._saw(0, ("first",), clock.wall)
    clock.wall = 5.0
    measured._saw(0, ("second",), clock.wall)
    measured.op_begins(0)
    clock.wall = 20.0
    measured.op_ended(1)
    clock.wall = 22.0
    measured._saw(1, None, clock.wall)  # nearpeak's own code
    measured._saw(1, ("first",), clock.wall)
    measured.op_begins(1)
    assert {op: stretch.stacks for op, stretch in measured.stretches().items()} == {
        0: {("first",): 1.0, ("second",): 4.0},
        1: {("first",): 2.0},
    }


def test_a_look_that_comes_after_the_end_of_the_stretch_is_none(clock):
    """Shares of a stretch are of the sum of its looks, which is never zero."""
    measured = PythonTime()
    measured._seconds[0] = 1.0
    measured._saw(0, ("late",), clock.wall - 1.0)
    measured._saw(0, ("at once",), clock.wall)
    assert not measured.stretches()[0].stacks


def test_a_tensor_that_is_made_of_a_long_list_is_at_its_line():
    values = [0.5] * 3_000_000
    live = LiveTrace()
    x = torch.ones(4).exp()
    sum(range(1000))
    line = sys._getframe().f_lineno + 1
    made = torch.tensor(values)
    made[:4].add_(x)
    (stretch,) = (item for item in live.stop().python.values() if item.seconds > 0.02)
    at_line = sum(seen_s for stack, seen_s in stretch.stacks.items() if stack and stack[0].line.endswith(f":{line}"))
    assert at_line > 0.8 * sum(stretch.stacks.values())


def test_what_nearpeak_reads_before_an_op_is_no_time_of_the_program(monkeypatch):
    rows, places = torch.zeros(64, 4), torch.arange(8)
    monkeypatch.setattr("nearpeak.trace.recorder.contents_digest", lambda *_: (time.sleep(0.2), "")[1])
    live = LiveTrace()
    torch.ones(4).exp()
    rows[places] = 1.0
    rows.add_(1.0)
    assert sum(item.seconds for item in live.stop().python.values()) < 0.2


def here():
    return sys._getframe()


def test_a_sample_has_the_users_lines_and_nothing_if_torch_runs():
    line = here.__code__.co_firstlineno + 1
    stack, caller = sampled_stack(here()), sys._getframe().f_lineno
    assert stack[0] == (f"test_python_time.py:{line}", {line - 1, line})
    assert stack[1].line == f"test_python_time.py:{caller}"
    assert stack[1].is_in_function_of(f"test_python_time.py:{caller + 1}")
    assert not stack[0].is_in_function_of(f"test_python_time.py:{caller}")
    (in_torch,) = torch.utils._pytree.tree_map(lambda _: sys._getframe(1), [0])
    assert sampled_stack(in_torch) == ()
    in_nearpeak = Guard().call(lambda: sys._getframe(1))
    assert sampled_stack(in_nearpeak) is None
    assert sampled_stack(None) is None


def nested(rows):
    best = 0
    for row in rows:
        for number in row:
            if number > best:
                best = number
    return best


def test_a_loop_that_begins_again_is_at_its_first_line():
    first = nested.__code__.co_firstlineno
    jumps = [item.offset for item in dis.get_instructions(nested) if item.opname.startswith("JUMP_BACKWARD")]
    assert jumps
    for jump in jumps:
        frame = types.SimpleNamespace(f_code=nested.__code__, f_lasti=jump, f_lineno=None, f_back=None)
        assert user_line(frame)[0] in (f"test_python_time.py:{first + 2}", f"test_python_time.py:{first + 3}")


def spin(measured):
    """Python, until the sampler has seen some of it."""
    until = time.monotonic() + 20.0
    while not any(map(is_in_spin, list(measured._stacks.get(measured._op, ())))) and time.monotonic() < until:
        sum(range(100))
    time.sleep(python_time.MIN_STRETCH_S)


def is_in_spin(stack):
    first = spin.__code__.co_firstlineno
    return any(first in item.lines and item.line.startswith("test_python_time.py:") for item in stack)


def check(recorded):
    (stretch,) = (stretch for stretch in recorded.python.values() if any(map(is_in_spin, stretch.stacks)))
    assert stretch.seconds > 0.0


def test_a_live_step_knows_the_lines_that_ran_between_its_ops_and_leaves_nothing_behind():
    interval = sys.getswitchinterval()
    live = LiveTrace()
    x = torch.ones(4).exp()
    spin(live._recorder.python_time)
    x.exp()
    recorded = live.stop()
    assert sys.getswitchinterval() == interval
    check(recorded)


def test_the_sampling_ends_with_a_trace_that_another_thread_cancels():
    interval = sys.getswitchinterval()
    live = LiveTrace()
    threads = [threading.Thread(target=live.cancel)]
    threads[0].start()
    threads[0].join()
    assert sys.getswitchinterval() == interval
    assert live._recorder.python_time._running.acquire(timeout=20.0)  # the sampler has let go of it
    live._recorder.python_time._running.release()
    live.stop()
    assert sys.getswitchinterval() == interval


def test_a_function_that_runs_live_is_sampled_too():
    measured = []
    before = PythonTime.op_ended

    def step():
        x = torch.ones(4).exp()
        spin(measured[-1])
        return x.exp()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PythonTime, "op_ended", lambda self, index: (measured.append(self), before(self, index)))
        check(trace(step, live=True))
    assert trace(lambda: torch.ones(4).exp()).python is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12: the sampler is a thread
def test_a_forked_child_has_the_interval_of_the_program():
    interval = sys.getswitchinterval()
    with PythonTime().sampling():
        assert sys.getswitchinterval() < interval
        child = os.fork()
        if child == 0:
            os._exit(0 if sys.getswitchinterval() == interval else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert sys.getswitchinterval() == interval
