import os
import threading
import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from nearpeak.trace import guard as guard_module
from nearpeak.trace.guard import Guard, OwnThread, undone_in_child
from nearpeak.trace.trace import trace


def fails(*_args):
    raise ValueError("ours")


def test_an_exception_is_kept_from_the_program_and_told():
    told = []
    guard = Guard(told.append)
    assert guard.call(fails) is None
    assert guard.wrap(fails)(1) is None
    assert [str(error) for error in told] == ["ours", "ours"]
    assert guard.failure is told[0]
    assert guard.failure.__traceback__ is None
    assert guard.call(len, "abc") == 3


def test_what_ends_the_program_on_purpose_passes():
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Guard().call(interrupt)


def test_a_failure_of_who_is_told_is_kept_too():
    assert Guard(fails).call(fails) is None


def test_nothing_runs_in_a_forked_child():
    guard = Guard()
    called = []
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        guard.call(called.append, 1)
        os.write(writer, f"{guard.in_child} {called}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 100) == b"True []"
    assert not guard.in_child


def test_a_forked_child_undoes_the_latest_change_first_and_the_parent_nothing():
    undone = []
    reader, writer = os.pipe()
    with undone_in_child(lambda: undone.append("outer")), undone_in_child(lambda: undone.append("inner")):
        child = os.fork()
        if child == 0:
            os.write(writer, " ".join(undone).encode())
            os._exit(0)
        os.waitpid(child, 0)
    assert os.read(reader, 100) == b"inner outer"
    assert undone == []
    child = os.fork()
    if child == 0:
        os._exit(len(undone))
    assert os.waitpid(child, 0)[1] == 0


def test_a_child_that_is_forked_in_a_traced_step_has_the_modes_of_the_program_alone():
    class Mode(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen += 1
            return function(*args, **(kwargs or {}))

    children = []

    def step():
        with Mode() as inner:
            child = os.fork()
            if child:
                children.append(child)
                return torch.ones(2) + 1
            modes = _get_current_dispatch_mode_stack()
            torch.ones(2) + 1
            own = len(modes) == 2 and modes[-1] is inner and inner.seen == 2
        os._exit(0 if own and len(_get_current_dispatch_mode_stack()) == 1 else 1)

    with Mode():
        trace(step, live=True)
    assert os.waitpid(children[0], 0)[1] == 0


def test_a_thread_is_known_by_itself_and_not_by_its_id():
    answers = []
    made = []

    def make():
        made.append((OwnThread(), threading.get_ident()))

    def ask():
        answers.append((bool(made[0][0]), threading.get_ident()))

    for target in (make, ask):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    assert not answers[0][0]  # also where the id is that of the thread that has ended
    assert not made[0][0]


def test_the_clock_of_the_program_stands_still_while_our_code_runs(monkeypatch):
    clock = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr(guard_module, "time", types.SimpleNamespace(perf_counter=lambda: clock.now))

    def takes(seconds):
        clock.now += seconds

    guard = Guard()
    begun = guard.program_time()
    takes(1.0)
    guard.call(takes, 50.0)
    with guard.own_time():
        guard.call(takes, 50.0)
        takes(7.0)
        assert guard.program_time() - begun == 1.0
        assert guard.program_time(now=True) - begun == 58.0  # a wait for the program's own work
    takes(2.0)
    with pytest.raises(KeyboardInterrupt), guard.own_time():
        takes(9.0)
        raise KeyboardInterrupt
    assert guard.program_time() - begun == 3.0
    with guard.own_time():
        takes(9.0)
        with guard.as_program():
            takes(4.0)
        takes(9.0)
        assert guard.program_time() - begun == 7.0
    with guard.as_program():
        takes(1.0)
    assert guard.program_time() - begun == 8.0
