"""The first examples: their arithmetic by hand for an H100, and that they run."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

import nearpeak
from nearpeak.gallery import pages, run
from nearpeak.gallery.examples import cpu_bound, timing, toy_processor, waves
from nearpeak.gallery.parts import Drawing, Plot, PredictionTable, StackedBars
from nearpeak.gallery.run import Context
from nearpeak.measure.options import options_from
from nearpeak.render.document import Table
from nearpeak.units import quantity

NAMES = ("timing", "cpu_bound", "three_costs", "toy_processor", "layer_ops", "waves")
H100 = nearpeak.machine("h100-sxm").achievable


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_all_predictions_are_finite(predicting, name):
    result = predicting(name)
    assert result.rows and not result.skipped
    assert all(row.predicted and math.isfinite(row.predicted) for row in result.rows)
    assert name == "toy_processor" or all(row.measured is None for row in result.rows)


@pytest.mark.parametrize("name", NAMES)
def test_text_fits_a_terminal_and_pictures_are_drawn(predicting, name):
    result = predicting(name)
    assert all(len(line) <= 80 for line in pages.text(result).split("\n"))
    assert all(picture.svg.startswith("<svg") for picture in pages.document(result).pictures)
    assert pages.document(result).pictures


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_another_machine_is_predicted(name):
    result = run.run_example(name, run.make_context("b200"))
    assert result.rows and all(row.predicted and math.isfinite(row.predicted) for row in result.rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_measured_on_a_cpu(measuring, name, said):
    result = measuring(name)
    assert result.rows
    assert all(row.measured and row.measured > 0 for row in result.rows)
    assert said(result)
    assert pages.text(result) and pages.document(result)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_cpu_is_predicted_without_measuring(predicting_cpu, name):
    result = predicting_cpu(name)
    assert result.rows and all(row.predicted for row in result.rows)
    assert name == "toy_processor" or all(row.measured is None for row in result.rows)


def test_naive_timing_is_the_same_for_both_products(predicting, only, said):
    result = predicting("timing")
    naive, bench = only(result, PredictionTable)[1].rows
    assert naive.predicted == 1.0
    small, large = only(result, PredictionTable)[0].rows
    assert large.predicted > 2 * 4096 * 4096 * 8192 / H100.peak("bfloat16")
    assert bench.predicted == pytest.approx(large.predicted / small.predicted)
    assert "16,777,216 times as many" in said(result)  # (4096 / 16) ** 2 * 8192 / 32
    assert only(result, Drawing)


def test_a_clock_that_does_not_wait_returns_what_the_call_took(monkeypatch):
    ticks = iter([1.0, 1.5])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(ticks))
    a = timing.torch.zeros(2, 2)
    assert timing.naive(a, a) == 0.5


def test_five_clocks_follow_from_two_times(predicting, only):
    steps, clocks = only(predicting("cpu_bound"), PredictionTable)
    product = steps.rows[0].predicted
    assert product > 2 * 4096**3 / H100.peak("bfloat16")
    assert [row.predicted / product for row in steps.rows] == pytest.approx([1, 1, 1, 1, 2, 4])
    assert [row.predicted / product for row in clocks.rows] == pytest.approx([1, 1, 4, 5, 4])


def test_the_loop_takes_its_time():
    start = cpu_bound.time.perf_counter()
    cpu_bound.busy(2e-3)
    assert cpu_bound.time.perf_counter() - start >= 2e-3


def test_three_costs_by_hand(predicting, only):
    (bars,) = only(predicting("three_costs"), StackedBars)
    parts = {bar.name: dict(bar.pieces) for bar in bars.bars}
    assert parts["add"]["memory"] == pytest.approx(12 * 8192**2 / H100.bandwidth)
    assert parts["add"]["compute"] == pytest.approx(8192**2 / H100.vector["float32"])
    assert parts["prefill"]["compute"] == pytest.approx(2 * 4096 * 8192**2 / H100.peak("bfloat16"))
    assert parts["decode"]["memory"] == pytest.approx(2 * (8192**2 + 2 * 8192) / H100.bandwidth)
    longest = {name: max(pieces, key=pieces.get) for name, pieces in parts.items()}
    assert longest == {"add": "memory", "add, small": "overhead", "prefill": "compute", "decode": "memory"}


@pytest.mark.parametrize("intensity, seconds, used", [(1, 16, (1.0, 0.5)), (2, 16, (1.0, 1.0)), (8, 64, (0.25, 1.0))])
def test_the_toy_by_hand(intensity, seconds, used):
    assert toy_processor.TOY.seconds(64, intensity) == seconds
    assert toy_processor.TOY.used(intensity) == used
    followed = toy_processor.TOY.followed(64, intensity)
    assert seconds < followed <= seconds + intensity / 8 + 1 / 4


def test_ridges_of_the_catalogue(predicting, only):
    result = predicting("toy_processor")
    table = only(result, Table)[-1]
    assert [row[0].split()[1] for row in table.rows] == ["A100", "H100", "H200", "B200"]  # the H100 stands there once
    assert table.rows[1][-1] == f"{H100.peak('bfloat16') / H100.bandwidth:.0f} FLOP/B"
    assert not result.missed


def test_a_rate_above_the_roof_is_said(measuring, said, monkeypatch):
    result = measuring("ridge")
    low = [row.measured for row in result.rows if row.measured]
    monkeypatch.setattr(Context, "measure", lambda self, fn, *args, **options: min(low) / 1e3)
    assert "times the roof" in said(measuring("ridge"))
    monkeypatch.setattr(Context, "measure", lambda self, fn, *args, **options: 1.0)
    assert "times the roof" not in said(measuring("ridge"))


def test_a_few_columns_have_a_floor(predicting, said):
    rows = {row.what: row for row in predicting("ridge").rows}
    assert [name for name, row in rows.items() if row.high is None] == ["N = 4"]
    assert rows["N = 4"].predicted == pytest.approx((8192 + 2 * 4) * 8192 * 2 / H100.bandwidth, rel=0.01)
    assert "N = 4 is between" in said(predicting("ridge")) and "Measured" not in said(predicting("ridge"))


def test_room_beside_a_few_columns(measuring, said, monkeypatch):
    monkeypatch.setattr(Context, "measure", lambda self, fn, a, b, **options: 3.0 if b.shape[1] == 4 else 1.0)
    assert "3.0 times as long as one column: room" in said(measuring("ridge"))
    monkeypatch.setattr(Context, "measure", lambda self, fn, *args, **options: 1.0)
    assert "room" not in said(measuring("ridge"))


def test_layer_ops_by_hand(predicting, only, said):
    result = predicting("layer_ops")
    rows = {row[0]: row for row in only(result, Table)[0].rows}
    assert rows["product"][1] == quantity(2 * 8192 * 2048 * 8192, "")
    assert rows["attention"][1] == "138 G"  # 4 * batch * heads * tokens ** 2 * width, and the softmax
    assert rows["residual add"][2] == quantity(3 * 8192 * 2048 * 2, "B")
    assert {name for name, row in rows.items() if row[-1] == "compute"} == {"product", "attention"}
    assert "Limited by compute: product and attention." in said(result)
    (bars,) = only(result, StackedBars)
    written, end = (dict(bar.pieces) for bar in bars.bars)
    assert written["fusion"] > 4 * written["fused bound"]
    assert end["fusion"] < 0.1 * end["fused bound"]


def test_waves_by_hand(predicting, only):
    result = predicting("waves")
    steps = {row[0]: row for row in only(result, Table)[0].rows}
    assert steps["8448"][1:5] == ("264", "2", "100 %", "100 %")  # 8 x 33 tiles on 132 multiprocessors
    assert steps["8704"][1:4] == ("272", "3", "6 %")
    assert steps["2304"][5:] == ("128 of 128 x 144", "97 %")  # one wave, as with N = 2048
    fixed, fitting = (series.points for series in only(result, Plot)[0].series)
    assert all(later >= earlier * 0.999 for (_, earlier), (_, later) in pairwise(fixed))
    assert all(best <= stairs * 1.001 for (_, stairs), (_, best) in zip(fixed, fitting, strict=True))
    assert max(row.predicted for row in result.rows) < waves.WAVES * 50e-6


@pytest.mark.slow
def test_waves_where_tiles_have_three_sizes():
    result = run.run_example("waves", run.make_context("a100-sxm-80gb"))
    assert not result.skipped and len(result.rows) == 8  # no kernel that copies by TMA


def test_threads_are_as_before(measuring):
    before = waves.torch.get_num_threads()
    measuring("waves")
    assert waves.torch.get_num_threads() == before


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "toy_processor"])
def test_what_is_said_with_measurements_of_a_gpu(monkeypatch, name, said):
    """The branch of a GPU, with times that are made up: 100 us for everything."""
    monkeypatch.setattr(Context, "measure", lambda self, fn, *args, **options: options_from(options) and 1e-4)
    monkeypatch.setattr(Context, "tensors", "meta")
    for clock in ("naive", "synchronized", "events"):
        monkeypatch.setattr(timing, clock, lambda a, b: 1e-5)
    result = run.run_example(name, Context(machine=nearpeak.machine("h100-sxm"), device="cuda"))
    assert all(row.ratio for row in result.rows)
    assert "nan" not in said(result) and "None" not in said(result)
    if name == "timing":
        assert "The naive clock reads 10.0 us and 10.0 us" in said(result)
    if name == "waves":
        assert "measured, it fell by 0.0 %" in said(result)
    assert pages.text(result)
