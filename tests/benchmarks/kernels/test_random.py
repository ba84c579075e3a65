"""Random cells of the benchmark of kernels: how they are drawn, measured at tiny sizes, merged and scored."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from nearpeak.kernels._runtime.policy import using

choice: Any = importlib.import_module("nearpeak.kernels._runtime.choice")
cases: Any = importlib.import_module("benchmarks.kernels.cases")
drawing: Any = importlib.import_module("benchmarks.kernels.drawing")
drawn: Any = importlib.import_module("benchmarks.kernels.drawn_cases")
jobs: Any = importlib.import_module("benchmarks.kernels.jobs")
page: Any = importlib.import_module("benchmarks.pages.kernels")
random_calls: Any = importlib.import_module("benchmarks.kernels.random_calls")
random_run: Any = importlib.import_module("benchmarks.kernels.random_run")
run: Any = importlib.import_module("benchmarks.kernels.run")
score: Any = importlib.import_module("benchmarks.kernels.score")
timing: Any = importlib.import_module("benchmarks.kernels.timing")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
QUICK = ("gemm", "transpose_copy", "adamw")
"""Operations whose cells are measured in every run of the tests."""


# drawing


def test_a_seed_has_its_cells():
    assert drawing.cells(5, 60) == drawing.cells(5, 60)
    assert drawing.cells(5, 60) != drawing.cells(6, 60)


def test_a_longer_run_begins_with_the_cells_of_a_shorter_one():
    short = drawing.cells(5, 40)
    assert drawing.cells(5, 120)[: len(short)] == short


def test_a_selection_has_the_cells_that_it_has_without_selecting():
    every = drawing.cells(5, 300)
    some = drawing.cells(5, 20, ["decode", "gemm"])
    assert some == [cell for cell in every if cell.operation in ("decode", "gemm")][: len(some)]


def test_cells_are_counted_by_pass():
    rows = sum(len(cell.passes) for cell in drawing.cells(5, 101))
    assert 101 <= rows <= 103


def test_every_operation_comes_as_often_as_its_weight_says():
    weights = {name: operation.weight for name, operation in drawing.OPERATIONS.items()}
    in_a_round = sum(weight * len(drawing.OPERATIONS[name].passes) for name, weight in weights.items())
    drawn_names = [cell.operation for cell in drawing.cells(7, in_a_round)]
    assert {name: drawn_names.count(name) for name in weights} == weights


def test_400_cells_have_every_operation_of_the_table():
    """Each operation whose share is judged has at least ten cells."""
    names = [cell.operation for cell in drawing.cells(1000, 400) for _ in cell.passes]
    assert set(names) == set(drawing.OPERATIONS)
    judged = ("attention", "decode", "gemm", "gemm few rows", "gemm swiglu", "rms_norm", "layer_norm", "softmax")
    assert all(names.count(name) >= 10 for name in judged)


def test_an_unknown_operation_is_an_error(capsys):
    with pytest.raises(ValueError, match="no such operations: gem"):
        drawing.cells(1, 1, ["gem"])
    with pytest.raises(SystemExit):
        run.parsed(["--random", "1", "--operations", "gem"])
    assert "no such operations: gem" in capsys.readouterr().err


MANY = drawing.cells(11, 3000)


def shapes(operation: str) -> list[dict[str, Any]]:
    return [cell.shape for cell in MANY if cell.operation == operation]


def test_attention_is_drawn_within_its_ranges():
    drawn_shapes = shapes("attention")
    assert {(one["dim"], one["value_dim"]) for one in drawn_shapes} == set(drawing.HEAD_SIZES)
    for one in drawn_shapes:
        assert 64 <= one["queries"] <= 16384
        assert 512 < one["batch"] * one["queries"] <= 32768 + 64
        assert one["heads"] % one["key_heads"] == 0
        assert one["keys"] == one["queries"] or not one["causal"]
        assert one["window"] is None or (one["causal"] and one["window"] < one["keys"])
    odd = sum(one["queries"] % 64 != 0 for one in drawn_shapes) / len(drawn_shapes)
    assert 0.35 < odd < 0.65
    assert {one["layout"] for one in drawn_shapes} == {"tokens first", "heads first"}
    assert any(one["window"] for one in drawn_shapes)
    assert any(one["keys"] != one["queries"] for one in drawn_shapes)
    assert any(one["heads"] > one["key_heads"] for one in drawn_shapes)


@pytest.mark.parametrize(
    ("operation", "least", "most"), [("gemm", 128, 16384), ("gemm few rows", 1, 96), ("gemm swiglu", 16, 16384)]
)
def test_products_are_drawn_within_their_ranges(operation, least, most):
    for one in shapes(operation):
        assert least <= one["rows"] <= most
        assert 768 <= one["features"] <= 16384
        assert 768 <= one["results"] <= 16384


def test_sizes_are_log_uniform():
    """Each doubling is as likely as any other; rows of a norm are limited by its columns only at the end."""
    draw = drawing.Draw("any")
    sizes = [draw.size(16, 16384) for _ in range(4000)]
    assert min(sizes) >= 16
    assert max(sizes) <= 16384
    by_doubling = [sum(16 * 2**n <= size < 32 * 2**n for size in sizes) for n in range(10)]
    assert all(320 < count < 480 for count in by_doubling)


def test_sizes_are_multiples_within_their_limits():
    draw = drawing.Draw("any")
    assert all(draw.size(100, 1000, 64) in range(128, 1000, 64) for _ in range(200))
    assert {draw.size(64, 64, 64) for _ in range(5)} == {64}


def test_work_and_memory_are_limited():
    for one in shapes("rms_norm") + shapes("softmax"):
        assert 16 <= one["rows"] <= 262144
        assert 64 <= one["columns"] <= 131072
        assert one["rows"] * one["columns"] <= drawing.MOST_ELEMENTS
    for one in shapes("cross_entropy") + shapes("linear_cross_entropy"):
        assert one["tokens"] * one["vocabulary"] <= drawing.MOST_LOGITS
    for one in shapes("decode"):
        assert 4 * one["batch"] * one["tokens"] * one["key_heads"] * one["dim"] <= drawing.MOST_CACHE_BYTES
    for one in shapes("gemm fp8"):
        multiple = 128 if one["scales"].startswith("blocks") else 16
        assert one["features"] % multiple == one["results"] % multiple == 0


def test_every_cell_says_its_shape():
    assert all(cell.text for cell in MANY)
    cell = next(cell for cell in MANY if cell.operation == "attention" and cell.shape["window"])
    assert f"window {cell.shape['window']}" in cell.text


def test_every_operation_is_in_a_range_and_has_a_maker():
    named = {name for names in drawing.RANGES for name in names.split(", ")}
    rows = {"rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "swiglu", "geglu", "bias_gelu", "dropout_add"}
    assert named - {"norms", "activations"} | rows == set(drawing.OPERATIONS)
    assert set(drawn.MAKERS) == set(drawing.TINY) == set(drawing.OPERATIONS)


# measuring


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(cases, "BACKEND", "eager")
    monkeypatch.setattr(timing, "ROUNDS", 1)
    torch.manual_seed(0)
    with using("require"):
        yield
    torch.compiler.reset()


def tiny(operation: str, **shape: Any) -> Any:
    (cell,) = drawing.tiny_cells(3, [operation])
    cell.shape.update(shape)
    return cell


def rows_of(cell: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = random_run.measured_cell(cell, run.Setting(DEVICE))
    return rows


def assert_right(cell: Any, rows: list[dict[str, Any]]) -> None:
    assert tuple(row["pass"] for row in rows) == cell.passes
    for row in rows:
        assert not score.is_wrong(row), row["errors"]
        assert row["errors"]["nearpeak"] <= row["error_limit"] < 0.1
        assert row["seconds"]["nearpeak"] > 0
        assert set(row["spread"]) == set(row["seconds"])
        assert row["bytes"] > 0
        json.dumps(row)


@pytest.mark.parametrize(
    "operation",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in drawing.OPERATIONS],
)
@pytest.mark.usefixtures("quick")
def test_a_cell_of_each_operation_is_measured_and_right(operation):
    cell = tiny(operation)
    rows = rows_of(cell)
    assert_right(cell, rows)
    if operation not in ("attention packed", "gemm fp8"):  # whose peers need a GPU
        assert all(score.ratio(row) is not None for row in rows)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "shape",
    [
        {"window": None, "layout": "heads first", "dim": 24, "value_dim": 16},
        {"window": None, "causal": False, "keys": 7, "batch": 1, "heads": 2},
    ],
)
def test_kinds_of_attention_are_right(shape):
    cell = tiny("attention", **shape)
    assert_right(cell, rows_of(cell))


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("shape", [{"page": 16}, {"cache": "float8"}])
def test_caches_without_a_peer_are_counted_apart(shape):
    cell = tiny("decode", **shape)
    rows = rows_of(cell)
    assert_right(cell, rows)
    assert score.ratio(rows[0]) is None
    assert "| decode forward | 0 | - | - | - | 0 | 1 | - |" in score.operations_table(rows)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("scales", ["tensor", "blocks of 128"])
def test_kinds_of_scales_are_right(scales):
    cell = tiny("gemm fp8", scales=scales, features=128, results=128, rows=4)
    assert_right(cell, rows_of(cell))


@pytest.mark.usefixtures("quick")
def test_a_wrong_result_is_seen(monkeypatch):
    """One wrong row among many, which an error over all rows would hide."""
    cell = tiny("transpose_copy", rows=256, columns=512)
    right: Any = drawn.copies.kernels.transpose_copy

    def wrong(x: Any) -> Any:
        result = right(x)
        result[37] = result[38]
        return result

    monkeypatch.setattr(drawn.copies.kernels, "transpose_copy", wrong)
    (row,) = rows_of(cell)
    assert score.is_wrong(row)
    assert row["errors"]["nearpeak"] > 1.0 > row["errors"]["eager"]
    assert any("wrong" in text for text in score.short_of_bars([row], {}))


@pytest.mark.usefixtures("quick")
def test_a_result_that_is_not_a_number_is_wrong():
    assert drawn.worst_row_error([torch.full((2, 3), float("nan"))], [torch.ones(2, 3)]) == float("inf")
    assert drawn.worst_row_error([torch.tensor([1.0, float("nan")])], [torch.ones(2)]) == float("inf")


def test_an_error_is_that_of_the_worst_row():
    exact = torch.ones(100, 4)
    result = exact.clone()
    result[7] = 0.5
    assert drawn.worst_row_error([exact, result], [exact, exact]) == pytest.approx(0.5)


@pytest.mark.parametrize(("queries", "keys", "left"), [(6, 6, None), (6, 6, 2), (40, 40, 11)])
def test_visible_pairs_are_those_of_the_mask(queries, keys, left):
    pairs = drawn.visible_pairs(queries, keys, True, left)
    assert pairs == pytest.approx(drawn.visible(queries, keys, True, left, "cpu").sum().item(), abs=queries)
    assert drawn.visible_pairs(queries, keys, False, None) == queries * keys


def test_the_limit_of_errors_follows_torch():
    cell = tiny("gemm")
    assert random_run.error_limit(cell, {}) == random_run.ERROR_LIMITS[cell.dtype]
    assert random_run.error_limit(cell, {"cublas": 0.5, "liger": 3.0, "eager": float("inf")}) == 1.0


@pytest.mark.usefixtures("quick")
def test_cells_that_are_compiled_come_first_and_the_limit_ends_the_run(tmp_path, monkeypatch):
    measured: list[int] = []
    clock = iter(range(100))
    monkeypatch.setattr(random_run.time, "perf_counter", lambda: float(next(clock)))

    def measure(cell: Any, setting: Any) -> list[Any]:
        measured.append(cell.number)
        if cell.number == 2:
            raise ValueError("no such shape")
        return [{"number": cell.number}]

    monkeypatch.setattr(random_run, "measured_cell", measure)
    setting = run.Setting(DEVICE, jobs=jobs.Jobs(tmp_path))
    cells = drawing.cells(3, 12, ["gemm"])[:6]
    for place, cell in enumerate(cells):
        object.__setattr__(cell, "number", place)
    for number in (2, 4):
        setting.jobs.write(f"random-{number}", "nearpeak", jobs.DONE)
    content = random_run.new_random_content({"failed": {}})
    written: list[int] = []
    enough = random_run.measure_cells(
        cells, setting, content, lambda: written.append(len(content["cells"])), lambda: None, until=7.5
    )
    assert not enough
    assert measured[:3] == [2, 4, 0]
    assert written == [0, 1, 2, 3][: len(written)]
    assert list(content["failed"].values()) == ["ValueError: no such shape"]
    assert random_run.measure_cells(cells[3:4], setting, content, lambda: None, lambda: None)


def test_a_run_goes_on_where_another_ended():
    cells = drawing.cells(3, 20)
    earlier = [{"cells": [{"seed": 3, "number": cells[0].number}, {"seed": 4, "number": cells[1].number}]},
               {"cells": [{"seed": 3, "number": cells[5].number}]}]  # fmt: skip
    assert run.not_in(cells, earlier) == [*cells[1:5], *cells[6:]]
    assert run.not_in(cells, []) == cells


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_what_is_measured_is_compiled_before(tmp_path):
    folder = jobs.Jobs(tmp_path)
    cells = [tiny("softmax")]
    setting = run.Setting(DEVICE)
    jobs.work_through(folder, random_run.compile_jobs(cells, setting), run.clean)
    name = cells[0].job
    assert folder.outcome(name, "nearpeak") == folder.outcome(name, "compile") == jobs.DONE
    assert folder.outcome(name, "eager") is None
    setting.left_out = {"compile"}
    (tmp_path / "rest").mkdir()
    folder = jobs.Jobs(tmp_path / "rest")
    jobs.work_through(folder, random_run.compile_jobs(cells, setting), run.clean)
    assert (folder.outcome(name, "nearpeak"), folder.outcome(name, "compile")) == (jobs.DONE, None)


@pytest.mark.usefixtures("quick")
def test_what_is_left_out_is_not_measured():
    setting = run.Setting(DEVICE, check=False)
    setting.left_out = {"cublas", "others"}
    (row,) = random_run.measured_cell(tiny("gemm"), setting)
    assert set(row["seconds"]) == {"nearpeak"}


def test_rounds_end_where_they_agree(monkeypatch):
    times = {"quiet": iter([5.0] + [1.0] * 9), "loud": iter([1.0, 1.0, 2.0, 3.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0])}

    class Sampler:
        def __init__(self, name: str) -> None:
            self.seconds = times[name].__next__

    monkeypatch.setattr(timing, "_sampler", lambda way, reset, may_wait: (Sampler(way), False))
    assert timing.in_turns({"quiet": "quiet"}, 7, enough=(3, 0.01)) == {"quiet": 1.0}
    assert len(list(times["quiet"])) == 6
    spread: dict[str, float] = {}
    timing.in_turns({"loud": "loud"}, 5, enough=(2, 0.01), spread=spread)
    assert spread["loud"] > 0.01
    assert len(list(times["loud"])) == 4


def test_clear_comparisons_end_early(monkeypatch):
    """Much slower ways are measured once, and all rounds are for those that are close."""

    def rounds(**times: float) -> dict[str, int]:
        calls = dict.fromkeys(times, 0)

        class Sampler:
            def __init__(self, name: str) -> None:
                self.name = name

            def seconds(self) -> float:
                calls[self.name] += 1
                return times[self.name]

        monkeypatch.setattr(timing, "_sampler", lambda way, reset, may_wait: (Sampler(way), False))
        assert timing.in_turns({name: name for name in times}, 5, compared="nearpeak") == times
        return {name: count - 1 for name, count in calls.items()}  # the first warms up

    assert rounds(nearpeak=1.0, liger=1.1, eager=3.0) == {"nearpeak": 5, "liger": 5, "eager": 1}
    assert rounds(nearpeak=1.0, liger=1.2, eager=3.0) == {"nearpeak": 2, "liger": 2, "eager": 1}
    assert rounds(nearpeak=1.0, eager=3.0) == {"nearpeak": 2, "eager": 1}
    assert rounds(nearpeak=3.0, liger=1.0, eager=1.2) == {"nearpeak": 5, "liger": 5, "eager": 5}


@pytest.mark.usefixtures("quick")
def test_every_backend_that_takes_a_call_is_timed(monkeypatch):
    """Those of `candidates`, but what runs anyway and what a peer runs; a name that is not obeyed is left out."""
    chooser = choice.Chooser("made up", {"rows": 0.5})
    ran: list[str] = []

    def call() -> None:
        ran.append(chooser.choose("key", ("torch", "gluon", "triton"), (1.0,), torch.device("cpu")))

    found = drawn.choice_of(call)
    assert found == drawn.Choice(backend="torch", candidates=("torch", "gluon", "triton"))
    ways, failed = drawn.other_backends(call, found)
    assert (list(ways), failed) == (["nearpeak/gluon", "nearpeak/triton"], {})
    ways["nearpeak/gluon"]()
    assert ran[-1] == "gluon"
    assert list(drawn.other_backends(call, found, ["gluon"])[0]) == ["nearpeak/triton"]
    ways, failed = drawn.other_backends(call, drawn.Choice(backend="torch", candidates=("torch", "flash")))
    assert ways == {}
    assert "has no backend 'flash'" in failed["nearpeak/flash"]
    choice._choosers.remove(chooser)


@pytest.mark.usefixtures("quick")
def test_a_call_without_a_choice_has_the_backend_of_its_kernels():
    x = torch.randn(4, 8, device=DEVICE)
    if DEVICE == "cpu":
        assert drawn.choice_of(lambda: drawn.kernels.softmax(x)) == drawn.Choice(backend="triton", by_sizes=False)


def test_gluon_is_denied_where_there_is_no_choice(monkeypatch):
    """And only there: the own backend of an operation with a choice may have kernels in Gluon."""
    seen: list[bool] = []

    def call() -> None:
        seen.append(drawn.gluon.runs_on is drawn._runs_nowhere)

    monkeypatch.setattr(drawn, "choice_of", lambda forced: (forced(), drawn.Choice(backend="triton"))[1])
    for by_sizes in (False, True):
        found = drawn.Choice(backend="gluon", candidates=("gluon", "triton"), by_sizes=by_sizes)
        assert list(drawn.other_backends(call, found)[0]) == ["nearpeak/triton"]
    assert seen == [True, False]
    assert drawn.gluon.runs_on is not drawn._runs_nowhere


# merging and scoring


def row(number: int, own: float, *others: float, operation: str = "gemm", **more: Any) -> dict[str, Any]:
    """A row of microseconds."""
    seconds = {"nearpeak": own * 1e-6, "nearpeak/triton": own * 2e-6}
    seconds |= {f"peer{place}": other * 1e-6 for place, other in enumerate(others)}
    return {
        "seed": 100, "number": number, "operation": operation, "pass": "forward", "text": f"cell {number}",
        "shape": {"dim": 192, "value_dim": 128}, "seconds": seconds, "backend": "gluon", "failed": {},
        "errors": {"nearpeak": 1e-3}, "error_limit": 1e-2, **more,
    }  # fmt: skip


def content(*rows: dict[str, Any], seed: int = 100, machine: str = "GPU") -> dict[str, Any]:
    record = {"seed": seed, "cells": 400, "operations": None, "date": "2026-01-01", "seconds": 10.0, "measured": 2}
    return {
        "format": score.FORMAT, "date": "2026-01-01T00:00:00", "machine": machine, "versions": {"torch": "2.11"},
        "copy_bytes_per_second": 4e12, "failed": {}, "runs": [record], "cells": list(rows),
    }  # fmt: skip


def test_a_ratio_is_the_best_peer_over_nearpeak():
    one = row(1, 100.0, 300.0, 50.0)
    assert score.ratio(one) == pytest.approx(0.5)
    assert score.best_peer(one) == "peer1"
    assert score.ratio(row(1, 100.0)) is None


def test_short_cells_are_below_ten_microseconds():
    assert score.is_short(row(1, 12.0, 9.0))
    assert score.is_short(row(1, 9.0))
    assert not score.is_short(row(1, 12.0, 10.5))


def test_a_table_has_a_line_for_each_operation():
    rows = [
        row(1, 100.0, 98.0),
        row(2, 100.0, 80.0),
        row(3, 8.0, 4.0),
        row(4, 100.0),
        row(5, 10.0, 20.0, operation="softmax", errors={"nearpeak": 1.0}),
    ]
    text = score.operations_table(rows)
    assert "| gemm forward | 3 | 0.80 | 33 % | 67 % (1 short) | 0 | 1 | 0.50: cell 3 (peer0) |" in text
    assert "| softmax forward | 1 | 2.00 | 100 % | 0 % | 1 | 0 | 2.00: cell 5 (peer0) |" in text
    assert "| all | 4 |" in text


def test_attention_has_a_table_by_size_of_heads():
    rows = [
        row(1, 100.0, 50.0, operation="attention"),
        row(2, 100.0, 90.0, operation="attention packed", shape={"dim": 64}),
        row(3, 100.0, 10.0),
    ]
    lines = score.heads_table(rows).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["64 forward", "192/128 forward", "all"]
    assert "| 0.50 |" in lines[3]


def test_the_worst_cells_come_first_and_short_ones_are_marked():
    rows = [row(number, 100.0, 100.0 - number) for number in range(15)] + [row(50, 8.0, 1.0)]
    lines = score.worst_table(rows).splitlines()[2:]
    assert len(lines) == 10
    assert lines[0].startswith("| gemm forward (short) | cell 50 | 100/50 | gluon 8.0 | triton 16.0 | peer0 1.0 | 0.12")
    assert "cell 14" in lines[1]


def test_backends_that_would_have_been_faster_are_counted():
    slow = row(1, 100.0, 90.0)
    slow["seconds"]["nearpeak/triton"] = 50e-6
    text = score.backends_table([slow, row(2, 100.0), row(3, 10.0, backend="torch")])
    assert "| gemm forward | gluon 2, torch 1 | 3 | 1 |" in text


def test_peers_that_cannot_run_are_counted():
    failed = {"flash": "RuntimeError", "compile": jobs.LATE}
    rows = [row(1, 100.0, 90.0), row(2, 100.0, 95.0, 90.0, failed=failed)]
    assert score.peers_table(rows).splitlines()[2:] == [
        "| compile | 0 | 0 | 1 | 0 |",
        "| flash | 0 | 1 | 0 | 0 |",
        "| peer0 | 2 | 0 | 0 | 1 |",
        "| peer1 | 1 | 0 | 0 | 1 |",
    ]


def test_bars_that_are_missed_are_said():
    fast = [row(number, 100.0, 100.0) for number in range(98)]
    assert score.short_of_bars(fast, {}) == []
    assert score.short_of_bars([], {"1/2 gemm": "why"}) == ["1/2 gemm: failed"]
    slow = [row(100 + number, 100.0, 50.0, operation="softmax") for number in range(2)]
    texts = score.short_of_bars(fast + slow, {})
    assert texts == ["softmax forward: as fast in 0 %, and not 90 %", "2 cells of 10 us or more below 0.85"]
    short = [row(200 + number, 9.0, 4.0, operation="softmax") for number in range(3)]
    assert "3 short cells below 0.85, more than 2 %" in score.short_of_bars(fast + short, {})
    assert "as fast as the best peer in 50 % of all cells, and not 95 %" in score.short_of_bars(slow + fast[:2], {})


def test_files_are_merged_by_cell():
    first, again = row(1, 100.0, 50.0), row(1, 100.0, 99.0)
    whole = score.merged([content(first, row(2, 1.0, 1.0)), content(again, {**first, "pass": "backward"}, seed=3)])
    assert [(one["number"], one["pass"]) for one in whole["cells"]] == [(2, "forward"), (1, "forward"), (1, "backward")]
    assert whole["cells"][1] == again
    assert [record["seed"] for record in whole["runs"]] == [100, 3]
    with pytest.raises(ValueError, match="several machines: GPU, other"):
        score.merged([content(), content(machine="other")])


def test_files_are_shown(tmp_path):
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    files[0].write_text(json.dumps(content(row(1, 100.0, 50.0), row(2, 100.0, 120.0, operation="attention"))))
    files[1].write_text(json.dumps(content({**row(9, 100.0, 99.0), "seed": 3}, seed=3)))
    text = run.show(files, ())
    assert "seed 100 (never used for tuning): 2 cells in 10 s; seed 3 (a seed for tuning): 1 cells" in text
    assert "192/128 forward" in text
    assert "Short of a bar:" in text
    (tmp_path / "sections.json").write_text("{}")
    with pytest.raises(SystemExit, match="one file of sections"):
        run.show([files[0], tmp_path / "sections.json"], ())


# the page


def test_the_page_is_that_of_the_random_results():
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.page_with_random(text, page.random_results()) == text


def test_the_published_seeds_were_never_used_for_tuning():
    published = page.random_results()
    if published is not None:
        assert not {record["seed"] for record in published["runs"]} & set(score.TUNING_SEEDS)


def test_the_page_says_which_seeds_are_for_what():
    text = page.random_part(content(row(1, 100.0, 99.0)))
    assert "seed 100" in text
    assert "1 to 99" in text
    assert "| gemm forward | 1 | 0.99 |" in text
    assert page.RANDOM_NOT_YET in page.random_part(None)


# random calls


def test_random_calls_are_compared_and_repeated(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(random_calls, "cells_for", lambda seed, calls: iter([tiny("gemm"), tiny("transpose_copy")]))
    monkeypatch.setattr(random_calls, "set_caches", lambda: None)
    file = tmp_path / "calls.json"
    assert random_calls.main(["--calls", "9", "--processes", "1", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["calls"]
    assert {row["operation"] for row in rows} == {"gemm", "transpose_copy"}
    assert all(row["repeats"] and row["error"] <= row["limit"] for row in rows)
    assert f"{len(rows)} calls" in capsys.readouterr().out


def test_a_wrong_call_and_one_that_differs_are_problems():
    row = {
        "operation": "gemm", "pass": "forward", "text": "3 x 4 x 5", "seed": 1, "number": 2, "backend": "triton",
        "error": float("nan"), "limit": 0.1, "repeats": False, "failed": {"nearpeak/gluon": "no"},
    }  # fmt: skip
    assert len(random_calls.problems([row], {"gemm: 1 x 2": "ValueError: no"})) == 4
    assert random_calls.problems([{**row, "error": 0.1, "repeats": None, "failed": {}}], {}) == []
    assert "| gemm forward | triton | 1 | 1 | 1 | 1 |" in random_calls.summary([row])
