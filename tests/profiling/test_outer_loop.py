import inspect
import sys
import threading

import pytest

from nearpeak.profiling.steps import LONELY_CALLS, MAX_MARKS, MAX_PERIOD_S, OuterLoop


class Program:
    """Calls that take a millisecond, and work between them."""

    def __init__(self):
        self.outer = OuterLoop()
        self.now = 0.0
        self.turned = []
        self.awaited = []

    def call(self):
        before = self.outer.turn
        self.outer.call_begins(sys._getframe(1), self.now)
        self.turned.append(self.outer.turn != before)
        self.awaited.append(self.outer.awaited)
        self.work(1.0)

    def work(self, milliseconds):
        self.now += 1e-3 * milliseconds


@pytest.fixture
def program():
    return Program()


def line_of(function, text):
    lines, start = inspect.getsourcelines(function)
    return f"test_outer_loop.py:{start + next(i for i, line in enumerate(lines) if text in line)}"


def answer_requests(program, requests, tokens, work):
    for request in range(requests):
        program.call()
        for _ in range(tokens + request % 3):
            program.call()
        program.work(work)


def test_a_request_is_the_step_if_much_of_it_is_outside_of_its_inner_loop(program):
    answer_requests(program, 5, tokens=10, work=4.0)
    line = line_of(answer_requests, "for request")
    assert program.outer.line == line
    assert program.awaited[:2] == ["", line]  # one loop alone is no question
    assert program.awaited[-1] == ""
    starts = [0, 11, 23, 36, 47]
    assert [index for index, turned in enumerate(program.turned) if turned] == starts[2:]
    assert program.outer.calls_in_turn == 11


def test_the_inner_loop_is_the_step_if_little_is_outside_of_it(program):
    answer_requests(program, 5, tokens=10, work=1.0)
    assert program.outer.found is None
    assert not any(program.turned)
    assert program.awaited[-1] == ""


def test_a_turn_that_cannot_be_afforded_is_no_step(program):
    answer_requests(program, 4, tokens=10, work=1e3 * MAX_PERIOD_S)
    assert program.outer.found is None
    program = Program()
    answer_requests(program, 4, tokens=200, work=500.0)
    assert program.outer.found is None


def test_what_is_recorded_in_one_of_the_turns_makes_no_difference(program):
    for request in range(3):
        program.call()
        for token in range(10):
            program.call()
            program.work(30.0 if (request, token) == (0, 5) else 0.0)
        program.work(4.0)
    assert program.outer.found is not None


def solve(program, tries):
    program.call()
    while tries:
        program.call()
        for _ in range(5):
            program.call()
            program.work(0.2)
        program.work(2.0)
        tries -= 1


def integrate(program, requests, decoding):
    for request in range(requests):
        solve(program, 3 + request % 2)
        program.call()
        program.work(decoding)


@pytest.mark.parametrize(
    ("decoding", "function", "loop"), [(1.0, solve, "while tries"), (20.0, integrate, "for request")]
)
def test_of_three_loops_the_outermost_that_does_something_of_its_own_is_the_step(program, decoding, function, loop):
    integrate(program, 6, decoding)
    assert program.outer.line == line_of(function, loop)


def test_a_long_turn_is_waited_for_until_the_loop_is_known_to_be_no_step(program):
    answer_requests(program, 1, tokens=100, work=0.0)
    assert not program.outer.is_settled
    answer_requests(program, 4, tokens=100, work=0.0)
    assert program.outer.is_settled


def test_a_loop_whose_turn_does_not_end_is_no_longer_looked_at(program):
    for _ in range(1):
        for _ in range(10 * MAX_MARKS):
            program.call()
    assert program.outer.is_settled
    (outer, _) = program.outer._path
    assert sum(map(len, program.outer._open[outer.run].inner.values())) <= MAX_MARKS


def test_calls_of_another_thread_count_for_no_loop(program):
    answer_requests(program, 3, tokens=10, work=4.0)
    found = program.outer.found
    assert found is not None
    thread = threading.Thread(target=answer_requests, args=(program, 2, 10, 4.0))
    turn = program.outer.turn
    thread.start()
    thread.join()
    assert program.outer.turn == turn


def test_calls_in_one_loop_are_no_question(program):
    for _ in range(LONELY_CALLS + 1):
        program.call()
    assert program.outer.is_settled
    assert not any(program.awaited)
