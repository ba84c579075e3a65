import pytest

from nearpeak.profiling.steps import MAX_MARKS, MAX_PERIOD_S, PeriodFinder


def period(marks, took=None, finder=None):
    """The first period in a sequence of marks, and how many marks had come by then."""
    finder = PeriodFinder() if finder is None else finder
    now = 0.0
    for number, mark in enumerate(marks, 1):
        now += (took or {}).get(mark, 1e-3)
        found = finder.add(mark, now)
        if found:
            return "".join(found), number
    return None


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ("ab" * 5, ("ab", 6)),  # a guided and a free pass
        ("ddddt" * 4, ("ddddt", 15)),  # four drafts and their check
        ("rsss" * 4, ("rsss", 12)),  # a rollout and four steps
        (("r" + "s" * 15) * 3, ("r" + "s" * 15, 32)),
        ("xy" + "cg" * 5, ("cg", 8)),  # after a check at the start
        ("s" * 400, None),
        ("p" + "t" * 100, None),  # a prompt and its tokens
        ("abab" + "a" * 20, None),
        ("abcaabbcabcbacbc", None),
    ],
)
def test_the_period_explains_all_of_the_sequence_and_begins_where_the_program_did(marks, expected):
    assert period(marks, {"r": 0.1}) == expected


def test_the_most_frequent_mark_is_the_step_if_the_rest_is_rare():
    finder = PeriodFinder()
    epochs = ("s" * 10 + "e") * 4
    assert period(epochs, {"e": 1e-3}, finder) is None
    assert "Once in 11 steps" in finder.refused
    assert "9% of the time" in finder.refused
    assert period(epochs, {"e": 5e-3}) == ("s" * 10 + "e", 22)


@pytest.mark.parametrize("calls", ["ddddettttt", "dt", "dddtttt"])
def test_calls_that_take_no_time_are_in_the_period_if_they_are_many(calls):
    short = dict.fromkeys("de", 1e-5)
    assert period("pq" + calls * 3, short) == (calls, 2 + len(calls) * (2 if len(calls) >= 8 else 3))


def test_a_period_that_takes_too_long_is_not_the_step():
    finder = PeriodFinder()
    assert period("rs" * 5, {"r": MAX_PERIOD_S}, finder) is None
    assert "repeats every 2 steps" in finder.refused


def test_what_was_recorded_in_one_of_the_periods_does_not_make_it_long():
    finder, now = PeriodFinder(), 0.0
    for number, mark in enumerate("rs" * 3):
        now += 100.0 if number == 3 else 1e-3
        found = finder.add(mark, now)
    assert found == ("r", "s")


def test_a_period_of_more_marks_than_can_be_told_from_an_epoch_is_not_looked_for():
    assert period(("r" + "s" * MAX_MARKS) * 4, {"r": 1.0}) is None
