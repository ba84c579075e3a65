"""Source lines that are saved with a profile."""

from nearpeak.profiles.excerpt import LONGEST_LINE, excerpt

LINES = [f"line {number}" for number in range(1, 11)]


def test_a_line_has_two_before_and_two_after_it():
    found = excerpt("train.py:5", LINES)
    assert (found.first_line, found.lines) == (3, ("line 3", "line 4", "line 5", "line 6", "line 7"))
    assert excerpt("train.py:1", LINES).lines == ("line 1", "line 2", "line 3")
    assert excerpt("train.py:10", LINES).first_line == 8


def test_what_is_no_line_has_no_excerpt():
    for name in ("train.py:11", "train.py:0", "train.py:-1", "train.py", "", "model.layers", "train.py:²"):
        assert excerpt(name, LINES) is None
    assert excerpt("train.py:1", ["   ", "x"]) is None


def test_long_lines_are_cut():
    assert len(excerpt("train.py:1", ["x" * 1000]).lines[0]) == LONGEST_LINE


def test_empty_lines_at_its_ends_are_left_out():
    found = excerpt("train.py:3", ["a", "", "b", " ", "", "c"])
    assert (found.first_line, found.lines) == (1, ("a", "", "b"))
