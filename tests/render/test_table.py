import pytest

from nearpeak.render.text import table


def test_the_first_column_is_left_and_the_others_right():
    assert table(["a", "bb"], [["xyz", "1"], ["", "100"]]).splitlines() == [
        "a     bb",
        "---  ---",
        "xyz    1",
        "     100",
    ]


def test_columns_align_as_asked_and_no_line_ends_in_a_space():
    lines = table(["n", "name"], [["1", "x"], ["10", "long"]], "rl").splitlines()
    assert lines == [" n  name", "--  ----", " 1  x", "10  long"]


def test_a_table_without_rows_is_its_header():
    assert table(["a", "b"], []) == "a  b\n-  -"


@pytest.mark.parametrize(("rows", "align"), [([["1"]], ""), ([["1", "2", "3"]], ""), ([], "l"), ([], "lx")])
def test_a_ragged_table_is_an_error(rows, align):
    with pytest.raises(ValueError):
        table(["a", "b"], rows, align)
