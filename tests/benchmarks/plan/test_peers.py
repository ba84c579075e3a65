"""The comparison with other planners: its figures follow from what they answered and from what nearpeak answers."""

from __future__ import annotations

import csv
import json
from functools import cache
from typing import Any

import pytest

from benchmarks.plan.peers import (
    MARKS,
    PAGE,
    PEERS,
    QUANTITIES,
    RESULTS,
    Comparison,
    Order,
    Predicted,
    Rows,
    compared,
    measured_rows,
    ordered,
    own_row,
    planner_rows,
    section,
    with_section,
)

AGAIN = "run `python -m benchmarks.plan.peers`"


@cache
def peers() -> dict[str, Any]:
    return json.loads(PEERS.read_text(encoding="utf-8"))


@cache
def results() -> dict[str, Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def stored() -> list[Comparison]:
    return [Comparison(**item) for item in results()["comparisons"]]


def test_every_peer_says_its_version_and_settings() -> None:
    assert set(peers()["peers"]) == {"calculon", "SimuMax", "llm-analysis", "aiconfigurator"}
    for said in peers()["peers"].values():
        assert all(said[field] for field in ("version", "how", "settings"))


def test_every_prediction_is_of_a_measured_row() -> None:
    measured, own = measured_rows(), {row["id"] for row in peers()["published"]["rows"]}
    for quantity, answers in peers()["predictions"].items():
        assert answers.keys() <= measured[quantity] | own, quantity
        assert all(value > 0 for one in answers.values() for value in one.values())


def test_measured_rows_are_those_of_the_files() -> None:
    measured = measured_rows()
    with (PEERS.parent / "measured_inference.csv").open(newline="", encoding="utf-8") as file:
        single = {row["id"] for row in csv.DictReader(file) if row["scenario"] == "single-stream decode"}
    assert single <= measured["decode"]
    assert not measured["decode"] & measured["tpot"]


def stored_rows() -> Rows:
    return {
        name: {row: Predicted(**one) for row, one in found.items()} for name, found in results()["nearpeak"].items()
    }


def test_the_figures_follow_from_the_predictions() -> None:
    again = {(item.peer, item.quantity, item.source): item for item in compared(peers(), stored_rows())}
    assert len(again) == len(stored())
    for item in stored():
        other = again[item.peer, item.quantity, item.source]
        for field in ("rows", "peer_rows", "of", "peer_mean", "peer_median", "nearpeak_mean", "closer"):
            assert getattr(item, field) == getattr(other, field), (item, field)


def test_the_order_of_layouts_follows_from_the_predictions() -> None:
    (order,) = [Order(**item) for item in results()["order"]]
    assert [order] == ordered(peers(), stored_rows())
    assert order.pairs >= 50
    assert order.nearpeak_right > order.peer_right


@pytest.mark.slow
def test_nearpeak_still_answers_as_stored() -> None:
    again = {
        (item.peer, item.quantity): item for item in compared(peers(), planner_rows(peers())) if item.source == "all"
    }
    for item in stored():
        if item.source == "all":
            now = again[item.peer, item.quantity]
            assert now.nearpeak_mean == pytest.approx(item.nearpeak_mean, abs=0.02), f"{item}: {AGAIN}"
            assert now.nearpeak_rows == item.nearpeak_rows, AGAIN


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    if MARKS[0] not in page:
        pytest.skip("the page has no such section")
    text = section(stored(), [Order(**item) for item in results()["order"]])
    assert with_section(page, text) == page, AGAIN


def test_a_page_without_marks_is_left_alone() -> None:
    assert with_section("no marks", "table") == "no marks"
    start, end = MARKS
    assert with_section(f"a {start} old {end} b", "new") == f"a {start}\n\nnew\n\n{end} b"


def test_nearpeak_is_nearer_on_most_rows_that_a_peer_predicts() -> None:
    seen = [item for item in stored() if item.source == "all" and item.rows >= 20 and item.peer != "SimuMax"]
    assert {item.peer for item in seen} == {"calculon", "llm-analysis", "aiconfigurator"}
    for item in seen:
        assert item.closer > 0.5, QUANTITIES[item.quantity]


def test_published_peaks_that_were_in_no_fit_are_met_and_never_undercut() -> None:
    errors = [own_row(row)[1] / row["memory_bytes"] - 1 for row in peers()["published"]["rows"]]
    assert len(errors) == 43
    assert min(errors) > -0.01 and sum(map(abs, errors)) / len(errors) < 0.03
