"""Examples on many GPUs and whole steps: experts split two ways, collectives, memory, MFU, an optimization."""

from __future__ import annotations

import csv
import math
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

import nearpeak
from nearpeak.gallery import run as gallery_run
from nearpeak.gallery.examples import (
    collectives,
    memory_7b,
    mfu,
    moe_degrees,
    optimization,
    parallel_training,
    small_llama,
)
from nearpeak.gallery.parts import Drawing, Plot, PredictionTable, StackedBars
from nearpeak.gallery.run import Context
from nearpeak.profiles.grade import Grade
from nearpeak.render.document import Table

NAMES = ("moe_degrees", "collectives", "parallel_training", "memory_7b", "mfu", "optimization")
MEASUREMENTS = Path(__file__).parents[2] / "benchmarks" / "measurements" / "measured_training.csv"


@pytest.fixture
def small(monkeypatch):
    """Models of two narrow layers and batches of a few tokens."""
    tiny = small_llama.shape(layers=2, hidden=64, heads=2, intermediate=176, vocabulary=256)
    real = Context.pick

    def pick(self, *, gpu, cpu):
        chosen = real(self, gpu=gpu, cpu=cpu)
        if isinstance(chosen, nearpeak.plan.Model):
            return tiny
        return (2, 64) if chosen in ((2, 256), (1, 256)) else chosen

    monkeypatch.setattr(Context, "pick", pick)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_predictions_are_finite(name, predicting):
    result = predicting(name)
    assert not result.skipped
    assert all(row.measured is None and 0 < row.predicted < math.inf for row in result.rows)
    assert any(isinstance(part, (Plot, StackedBars, Drawing)) for part in result.parts)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[:-1])  # the last one runs below
def test_predicted_for_a_cpu(name, predicting_cpu):
    assert all(0 < row.predicted < math.inf for row in predicting_cpu(name).rows)


def test_moe_both_ways_do_the_same_work(predicting, only):
    (table,) = only(predicting("moe_degrees"), Table)
    assert [row[0] for row in table.rows] == ["2", "4", "8", "16", "32", "64"]
    # 256 experts of 3 x 4096 x 1536 in 2 bytes are 9.66 GB, half of which is on each of two GPUs
    assert table.rows[0][1] == "4.83 GB" and table.rows[-1][1] == "151 MB"
    tensor, expert = ([float(row[column]) for row in table.rows] for column in (4, 5))
    assert tensor == sorted(tensor, reverse=True) and expert == sorted(expert)
    (measured,) = only(predicting("moe_degrees"), PredictionTable)
    by_name = {row.what.split(":")[0]: row.predicted for row in measured.rows}
    assert by_name["TP 32"] > 2 * by_name["EP 32"]


def test_moe_runs(measuring, only, monkeypatch):
    monkeypatch.setattr(
        Context, "pick", lambda self, *, gpu, cpu: (8, 8, 16, 16) if cpu == (8, 128, 1024, 1024) else cpu
    )
    result = measuring("moe_degrees")
    assert all(row.measured for row in result.rows)
    assert moe_degrees.LAYER.experts == 256


@pytest.mark.parametrize("op", collectives.OPS)
def test_collectives_keep_every_piece(op):
    held = collectives.blocks_after(op, 4)
    first = {piece for row in collectives.blocks_before(op, 4) for block in row for piece in block}
    assert {piece for row in held for block in row for piece in block} == first


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    scattered, reduced = (collectives.blocks_after(op, 4) for op in ("reduce_scatter", "all_reduce"))
    gathered = [scattered[place][place] for place in range(4)]
    assert all(row == gathered for row in reduced)


def test_bytes_of_training(predicting, only):
    training = only(predicting("collectives"), Table)[1]
    sent = [row[1] for row in training.rows]
    # 6.74 billion weights of 2 bytes: twice, twice and three times 7/8 of 13.5 GB
    assert sent == ["23.6 GB", "23.6 GB", "35.4 GB"]


@pytest.mark.exhaustive  # tests/comm runs ranks
def test_two_processes(measuring, only, said):
    result = measuring("collectives")
    assert "right on both ranks, element by element" in said(result)
    assert {row.what for row in result.rows} == {*collectives.OPS, "all_reduce of 1 kB"}
    assert all(row.measured > 0 and row.predicted > 0 for row in result.rows)


@pytest.mark.exhaustive  # as above: twenty seconds
def test_two_ranks_train_as_one_does(measuring, only, said):
    result = measuring("parallel_training")
    assert "All three agree with one rank" in said(result)
    (plot,) = only(result, Plot)
    assert {series.name for series in plot.series} == set(parallel_training.WAYS)
    assert all(row.holds for row in result.rows if row.what in parallel_training.KEPT and row.predicted > 12e6)


def test_ways_that_do_not_train_or_differ_are_named():
    def trained(*losses):
        return {"losses": list(losses), "seconds": 1.0, "kept": 0, "sent": None}

    results = {"one rank": trained(2.0, 1.0), "data parallel": trained(2.0, 1.01), "tensor parallel": trained(2.0, 1.0)}
    assert parallel_training.disagreeing(results) == ["data parallel"]
    assert parallel_training.disagreeing({"one rank": trained(2.0, 2.0)}) == ["one rank"]


def test_two_processes_that_hang_are_ended(monkeypatch):
    started = []
    real = subprocess.Popen

    def start(command, **options):
        started.append(real([command[0], "-c", "import time; time.sleep(60)"], **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(gallery_run, "RANKS_TIMEOUT_S", 0.2)
    assert collectives.measure_two() is None
    assert [one.returncode is not None for one in started] == [True]


def test_84_gigabytes(predicting, only, said):
    (states,) = only(predicting("memory_7b"), Table)
    assert [row[2] for row in states.rows] == ["84 GB", "112 GB", "126 GB", "112 GB"]
    assert "take 14 GB, their gradients 14 GB and the moments 56 GB: 84 GB" in said(predicting("memory_7b"))
    (bars,) = only(predicting("memory_7b"), StackedBars)
    by_name = {bar.name: dict(bar.pieces) for bar in bars.bars}
    whole, third = by_name["1 GPU"], by_name["8 GPUs, ZeRO 3"]
    for part in ("weights", "gradients", "optimizer"):
        assert third[part] == pytest.approx(whole[part] / 8)
    assert third["activations"] == whole["activations"]
    assert bars.limit == nearpeak.machine("h100-sxm").memory_bytes


def test_states_are_counted_exactly(measuring, small):
    result = measuring("memory_7b")
    assert not result.missed
    (kept,) = [row for row in result.rows if row.what == "activations of layers"]
    assert kept.ratio == pytest.approx(1, abs=0.02)  # all but a number or two of each row
    assert len(result.rows) == 5
    assert memory_7b.EXACT == (0.99, 1.01)


def test_conventions_by_hand():
    model = nearpeak.plan.Model(
        name="tiny", mixers="A", feeds="D", hidden=8, heads=2, kv_heads=2, head_dim=4, vocabulary=10, intermediate=16
    )
    weights = 4 * 8 * 8 + 3 * 8 * 16 + 3 * 8 + 2 * 10 * 8
    found = mfu.conventions(model, 100)
    assert list(found.values()) == [
        6 * weights,
        6 * (weights - 80),
        6 * (weights - 80) + 12 * 8 * 100,
        6 * (weights - 80) + 6 * 8 * 100,
    ]


def test_published_runs_are_those_of_the_file():
    with MEASUREMENTS.open(encoding="utf-8", newline="") as file:
        rows = {row["id"]: row for row in csv.DictReader(file)}
    for run in mfu.PUBLISHED:
        row = rows[run.id]
        assert run.source == row["source"] and row["gpu"] == "H100-80GB-SXM" and "bf16" in row["precision"]
        assert (run.gpus, run.sequence, run.batch) == (int(row["gpus"]), int(row["seq_len"]), int(row["gbs_seqs"]))
        assert (run.seconds, 100 * run.printed) == (float(row["step_time_s"]), pytest.approx(float(row["mfu_pct"])))


@pytest.mark.slow
def test_checkpointing_lowers_mfu_and_not_hfu(predicting, only):
    convention = only(predicting("mfu"), Table)[0]
    read = {row[0]: [float(cell.removesuffix(" %")) for cell in row[2:]] for row in convention.rows}
    kept, again = read["and attention, causal"]
    assert again < 0.9 * kept and read["HFU: as it was done"][1] > again
    assert read["HFU: as it was done"][0] == kept


def test_mfu_runs(measuring, small):
    assert all(row.measured for row in measuring("mfu").rows)


@pytest.mark.slow
def test_every_fix_is_expected_to_save(predicting):
    written, *alone, together = (row.predicted for row in predicting("optimization").rows)
    assert len(alone) == len(set(optimization.FIXES.values()))
    assert all(together < time < written for time in alone)


@pytest.mark.slow
def test_fixed_steps_learn_the_same():
    import torch

    sizes = _tiny()
    torch.manual_seed(0)
    slow = optimization.Llama(sizes, frozenset())
    quick = optimization.Llama(sizes, frozenset(optimization.FIXES))
    quick.load_state_dict(slow.state_dict())
    tokens = torch.randint(sizes.vocabulary, (sizes.batch, sizes.tokens + 1))
    losses = [model(tokens) for model in (slow, quick)]
    torch.testing.assert_close(losses[0], losses[1])
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(slow.layers[0].qkv.weight.grad, quick.layers[0].qkv.weight.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_an_optimization_from_verdict_to_proof(measuring, said, only, monkeypatch):
    real = Context.pick

    def pick(self, *, gpu, cpu):
        return _tiny() if isinstance(cpu, optimization.Sizes) else real(self, gpu=gpu, cpu=cpu)

    timing = SimpleNamespace(seconds=1.0, flags=())
    proof = SimpleNamespace(
        pairs=20, ratio=0.9, low=0.8, high=0.95, confidence=0.98, verdict="FASTER", a=timing, b=timing
    )
    monkeypatch.setattr(nearpeak, "compare", lambda *args, **options: proof)
    monkeypatch.setattr(optimization, "grade_profile", lambda profile: Grade(letter="A"))  # whatever else runs here
    monkeypatch.setattr(Context, "pick", pick)
    result = measuring("optimization")
    assert "The verdict" in said(result)
    (found,) = only(result, Table)
    assert any(row[0] in optimization.WITHOUT_GPU for row in found.rows)
    (row,) = result.rows
    assert row.measured == pytest.approx(0.1) and 0 < row.predicted < 1


def _tiny():
    import torch

    return optimization.Sizes(
        layers=1,
        hidden=32,
        heads=2,
        intermediate=64,
        vocabulary=64,
        batch=1,
        tokens=64,
        dtype=torch.float32,
    )
