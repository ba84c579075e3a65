import os
import threading

import pytest

from nearpeak.trace.guard import Guard, OwnThread


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
