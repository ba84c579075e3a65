"""The ops of a profile as CSV."""

import csv
import dataclasses
import io

import pytest
from synthetic import profile  # type: ignore[import-not-found]

from nearpeak._display import printable
from nearpeak.profiles.profile import ProfiledOp
from nearpeak.render.csv import guard_formula
from nearpeak.render.views.profile import OP_COLUMNS, ops_csv


def rows(made):
    return list(csv.DictReader(io.StringIO(ops_csv(made), newline=""), strict=True))


def test_every_field_of_an_op_is_a_column():
    assert {field.name for field in dataclasses.fields(ProfiledOp)} | {"lost_s"} == {
        column.name for column in OP_COLUMNS
    }


def test_figures_are_read_back_exactly():
    made = profile(50)
    for row, op in zip(rows(made), made.ops, strict=True):
        assert (row["name"], row["module"], row["source"]) == (op.name, op.module, op.source)
        assert float(row["measured_s"]) == op.measured_s
        assert float(row["flops"]) == op.flops
        assert row["bound_s"] == (repr(op.bound_s) if op.modeled else "")
        assert row["modeled"] == ("true" if op.modeled else "false")
        assert row["shapes"].startswith("2048x")


def test_lines_end_as_the_standard_says():
    text = ops_csv(profile(3))
    assert text.count("\r\n") == text.count("\n") == 4
    assert text.endswith("\r\n")


@pytest.mark.parametrize("name", ['a,b "c"', "two\nlines", "two\r\nlines", "semi;colon", "\u202ertl", "</script>"])
def test_any_name_stays_in_its_cell(name):
    made = profile(3, name=name.replace("{", "") + "{}")
    found = rows(made)
    assert [row["name"] for row in found] == [printable(op.name) for op in made.ops]
    assert all(None not in row for row in found)


@pytest.mark.parametrize("start", ["=", "+", "-", "@", " =", "\t=", "\n", "\uff1d"])
def test_no_name_is_a_formula(start):
    made = profile(3, name=start + "cmd|' /C calc'!A0{}")
    for row, op in zip(rows(made), made.ops, strict=True):
        assert row["name"] == "'" + printable(op.name)
        assert row["source"] == "'" + printable(op.source)
        assert not row["measured_s"].startswith("'")


def test_a_number_below_zero_stays_a_number():
    made = profile(3)
    fast = dataclasses.replace(made.ops[0], measured_s=0.0)
    assert float(rows(dataclasses.replace(made, ops=(fast,)))[0]["lost_s"]) < 0


def test_usual_names_are_not_touched():
    assert guard_formula("aten.add.Tensor") == "aten.add.Tensor"
    assert guard_formula("") == ""
