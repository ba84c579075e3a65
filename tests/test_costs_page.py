"""docs/costs.md: each formula as it is written there gives what nearpeak counts, and no formula is missing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from cost_rows import SIZES, Row, rows

from nearpeak.ops.cost import Formula, cost_of, registered
from nearpeak.ops.custom_schemas import custom_schemas
from nearpeak.ops.formulas.attention import banded
from nearpeak.ops.formulas.convolution import VECTOR_LAG, winograd
from nearpeak.ops.op import Op

PAGE = (Path(__file__).parents[1] / "docs" / "costs.md").read_text(encoding="utf-8")
FUNCTIONS = {"min": min, "max": max, "log2": math.log2}
CASES: dict[str, list[Row]] = {}
for _name, _row in rows():
    CASES.setdefault(_name, []).append(_row)


def tables(header: str) -> Iterator[list[str]]:
    """The rows of all tables that start with this column, as lists of cells."""
    for table in re.finditer(rf"^\| {header} \|[^\n]*\n\|[ |:-]+\n(?P<rows>(\|[^\n]*\n)+)", PAGE, re.MULTILINE):
        for line in table["rows"].splitlines():
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


ROWS = {cells[0].replace("`", "").strip(): cells for cells in tables("operator")}


def value(cell: str, sizes: Mapping[str, float]) -> float:
    expression = re.fullmatch(r"`([^`]+)`", cell)
    assert expression, f"{cell}: a formula stands in backticks"
    return float(eval(expression[1], {"__builtins__": {}}, {**FUNCTIONS, **sizes}))


def formula_of(op: Op) -> Formula:
    return registered().get(op.name) or registered()[op.packet]


def named(cell: str) -> dict[str, Formula]:
    """The operators that a cell names."""
    return {name: registered()[name] for name in re.findall(r"`([\w.]+)`", cell) if name in registered()}


def test_every_row_has_a_case_and_every_case_a_row() -> None:
    assert set(ROWS) == set(CASES)
    assert len(ROWS) == len(list(tables("operator"))), "a row is there twice"


@pytest.mark.parametrize("name", ROWS)
def test_a_row_says_what_is_counted(name: str) -> None:
    cell, *formulas = ROWS[name]
    assert {formula_of(op) for row in CASES[name] for op in row.ops} == set(named(cell).values())
    for row in CASES[name]:
        expected = [value(one, {**SIZES, **row.sizes}) for one in formulas]
        for op in row.ops:
            cost = cost_of(op)
            assert cost.model == "formula"
            work = cost.work
            counted = [sum(work.flops.values()), sum(work.vector_flops.values()), work.bytes_read, work.bytes_written]
            assert counted == pytest.approx(expected), op.name


def test_no_formula_is_missing() -> None:
    """One for what a compiler made is in the text: it has no sizes, nor has a sparse tensor. Nothing is counted of what
    is not known."""
    shown = {function for cell, *_ in ROWS.values() for function in named(cell).values()}
    shown |= {
        function for cell, _ in tables("custom operators") for function in named(cell.replace("::", ".")).values()
    }
    missing = {f"{one.__module__}:{one.__name__}" for one in registered().values() if one not in shown}
    partial = "nearpeak.ops.formulas.partial"
    sparse = {f"nearpeak.ops.formulas.matrix:{name}" for name in ("_sparse_addmm", "_sparse_mm", "_conversion")}
    assert missing == {f"{partial}:partly_known", f"{partial}:not_known"} | sparse


def test_custom_operators_of_the_page_are_those_with_a_schema() -> None:
    shown = {name for cell, _ in tables("custom operators") for name in re.findall(r"`(\w+::\w+)`", cell)}
    assert shown == {name.replace(".", "::", 1) for name in registered() if custom_schemas(name.replace(".", "::", 1))}


def test_operators_of_the_page_exist() -> None:
    names = {name for name in re.findall(r"`((?:aten|nearpeak|c10d|_c10d_functional|symm_mem)\.[\w.]+)`", PAGE)}
    assert {name for name in names if name not in registered() and name.rpartition(".")[0] not in registered()} == set()


@pytest.mark.parametrize("queries, keys", [(7, 9), (8, 8), (1, 5)])
def test_pairs_of_attention(queries: int, keys: int) -> None:
    offsets = (None, 0, keys - queries)
    for (_, pairs, seen), offset in zip(tables("mask"), offsets, strict=True):
        found = banded(queries, keys, right=None if offset is None else 0, offset=offset or 0)
        sizes = {"q": queries, "s": keys}
        assert (value(pairs, sizes), value(seen, sizes)) == (found.count, found.keys[1])


@pytest.mark.parametrize("size", [1, 3, 5, 7, 11])
def test_what_fast_convolutions_save(size: int) -> None:
    (_, matrix, vector), _ = tables("case")
    spectrum = max(1.0, size * size / 1.5)
    assert value(matrix, {"f": size}) == pytest.approx(max(winograd((size, size)), spectrum / VECTOR_LAG))
    assert value(vector, {"f": size}) == pytest.approx(spectrum)
