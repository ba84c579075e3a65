"""What makes a traced step fit into memory: peaks from lifetimes, and the cheapest change."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.plan import fit_peaks
from nearpeak.bound.estimate import estimate_trace
from nearpeak.cli.main import main
from nearpeak.errors import UsageError
from nearpeak.machines import catalogue
from nearpeak.measure.case import as_case
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.training import fit
from nearpeak.plan.training.fit import fit_step
from nearpeak.plan.training.memory import WORKSPACE
from nearpeak.profiles.memory import peak_memory
from nearpeak.profiling.estimate import estimate_step
from nearpeak.trace.fake import fake
from nearpeak.trace.trace import trace

LAYERS, BATCH, WIDTH, TOKENS, CLASSES = 4, 8, 64, 32, 256


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(x)))


class Network(nn.Module):
    def __init__(self, recomputed=0):
        super().__init__()
        self.recomputed = recomputed
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.table(x)
        for number, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if number < self.recomputed else layer(x)
        return self.head(x)


def build(recomputed=0, pieces=1, batch=BATCH, **options):
    model = Network(recomputed)
    optimizer = torch.optim.AdamW(model.parameters(), **(options or {"foreach": False}))
    tokens = torch.zeros(batch, TOKENS, dtype=torch.int64)

    def step():
        optimizer.zero_grad(set_to_none=True)
        for piece in tokens.chunk(pieces):
            functional.cross_entropy(model(piece).view(-1, CLASSES), piece.view(-1)).backward()
        optimizer.step()

    return step


@pytest.fixture(scope="module")
def traced():
    with fake():
        step = build()
    machine = catalogue.find("h200-sxm")
    recorded = trace(step)
    return recorded, estimate_trace(recorded, machine), machine


def plan_for(traced, spare=None, gpus=1):
    """The plan for a GPU with `spare` bytes for tensors; None: all of an H200."""
    recorded, estimate, machine = traced
    whole = fit_step(recorded, estimate, Cluster.of(machine, gpus=gpus))
    if spare is None:
        return whole
    small = replace(machine, memory_bytes=whole.needed - whole.peak + spare)
    return fit_step(recorded, estimate, Cluster.of(small, gpus=gpus))


def test_the_peak_on_fake_tensors_is_that_of_the_real_step(traced):
    live = trace(build(), live=True)
    real = peak_memory(live.lives, live.ops)
    plan = plan_for(traced)
    # the first real step has no optimizer states yet; every later one has
    assert plan.peak - plan.by_category["optimizer"] == pytest.approx(real.peak_bytes, rel=0.02)
    weights = sum(parameter.numel() * 4 for parameter in Network().parameters())
    assert plan.by_category["parameters"] == weights
    assert plan.by_category["optimizer"] == pytest.approx(2 * weights, rel=0.01)
    assert (plan.layers, plan.batch) == (LAYERS, BATCH)
    assert plan.fits and not plan.remedies


def test_each_remedy_fits_and_is_ranked_by_its_time(traced):
    whole = plan_for(traced)
    plan = plan_for(traced, spare=0.8 * whole.peak)
    assert not plan.fits and plan.remedies
    times = [remedy.added_seconds for remedy in plan.remedies]
    assert times == sorted(times)
    assert all(remedy.bytes <= plan.capacity and remedy.changes for remedy in plan.remedies)


@pytest.mark.parametrize("share", [0.85, 0.7, 0.6])
def test_the_changed_step_has_the_peak_that_is_said(traced, share):
    plan = plan_for(traced, spare=share * plan_for(traced).peak)
    remedies = [remedy for remedy in plan.remedies if remedy.states == "as they are"]
    assert remedies
    for remedy in remedies:
        with fake():
            step = build(remedy.recomputed_layers, remedy.pieces)
        recorded = trace(step)
        changed = fit_step(recorded, estimate_trace(recorded, traced[2]), Cluster.of(traced[2], gpus=1))
        assert remedy.peak == pytest.approx(changed.peak, rel=0.05), remedy


def test_temporary_tensors_of_the_optimizer_go_where_it_is_fused(traced):
    def planned(spare=None, **options):
        with fake():
            step = build(batch=1, **options)
        recorded = trace(step)
        return plan_for((recorded, estimate_trace(recorded, traced[2]), traced[2]), spare)

    whole = planned(foreach=True)
    assert "_foreach_sqrt" in whole.at
    plan = planned(0.95 * whole.peak, foreach=True)
    (remedy,) = [remedy for remedy in plan.remedies if remedy.states == "as they are"]
    assert str(remedy) == "a fused optimizer (fused=True)"
    fused = planned(fused=True)
    assert remedy.peak == pytest.approx(fused.peak, rel=0.02)
    assert remedy.exact and remedy.added_seconds < 0
    assert not any(item.fused for item in planned(0.95 * fused.peak, fused=True).remedies)


def test_a_loss_in_chunks_has_one_of_them_in_memory(traced, monkeypatch):
    classes = 64 * CLASSES

    def planned(chunks, spare=None):
        with fake():
            table, head = nn.Embedding(classes, WIDTH), nn.Linear(WIDTH, classes)
            tokens = torch.zeros(TOKENS * BATCH, dtype=torch.int64)

        def loss(rows, wanted):
            return functional.cross_entropy(head(rows), wanted, reduction="sum")

        def step():
            parts = zip(table(tokens).chunk(chunks), tokens.chunk(chunks), strict=True)
            sum(
                loss(*part) if chunks == 1 else checkpoint(loss, *part, use_reentrant=False) for part in parts
            ).backward()

        recorded = trace(step)
        return plan_for((recorded, estimate_trace(recorded, traced[2]), traced[2]), spare)

    monkeypatch.setattr(fit._Step, "_batch_size", lambda self: None)
    plan = planned(1, spare=0.6 * planned(1).peak)
    (remedy,) = plan.remedies
    assert str(remedy) == f"the loss in {fit.LOSS_CHUNKS} chunks, recomputed"
    assert remedy.added_seconds > 0 and remedy.exact
    assert remedy.peak == pytest.approx(planned(fit.LOSS_CHUNKS).peak, rel=0.05)


def test_no_more_layers_are_recomputed_than_needed(traced, monkeypatch):
    monkeypatch.setattr(fit._Step, "_batch_size", lambda self: None)  # one sequence, which has no parts
    monkeypatch.setattr(fit._Step, "_scores", lambda self: set())  # and no loss of classes
    whole = plan_for(traced)
    counts = []
    for share in (0.95, 0.85, 0.75):
        plan = plan_for(traced, spare=share * whole.peak)
        counts += [
            remedy.recomputed_layers for remedy in plan.remedies if remedy.changes == 1 and remedy.recomputed_layers
        ]
    assert counts == sorted(counts) and len(set(counts)) > 1


def test_more_gpus_offer_sharding(traced):
    whole = plan_for(traced, gpus=8)
    # no activation can go below what the states take: only sharding or fewer states help
    states = whole.by_category["parameters"] + whole.by_category["optimizer"]
    plan = plan_for(traced, spare=0.7 * states, gpus=8)
    assert plan.remedies and all(
        remedy.sharding != "none" or remedy.states != "as they are" for remedy in plan.remedies
    )


def test_what_cannot_fit_has_no_remedy(traced):
    plan = plan_for(traced, spare=1000.0)
    assert not plan.fits and plan.remedies == ()


def test_a_step_without_a_backward_pass_is_refused(traced):
    recorded, estimate, machine = traced
    ends = next(place for place, op in enumerate(recorded.ops) if op.phase == "backward")
    forward = replace(recorded, ops=recorded.ops[:ends])
    with pytest.raises(UsageError, match="no backward pass"):
        fit_step(forward, replace(estimate, ops=estimate.ops[:ends]), Cluster.of(machine, gpus=1))


def test_the_command_plans_a_file_or_a_model(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\n"
        "def step(width=64):\n"
        "    model = torch.nn.Linear(width, width)\n"
        "    optimizer = torch.optim.SGD(model.parameters())\n"
        "    x = torch.zeros(4, width)\n"
        "    def run():\n"
        "        model(x).sum().backward()\n"
        "        optimizer.step()\n"
        "    return run\n",
        encoding="utf-8",
    )
    assert main(["plan", "fit", f"{path}:step", "--on", "h200-sxm x 1", "--set", "width=128"]) == 0
    assert "fits on NVIDIA H200" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", "fit", f"{path}:step", "--on", "h200-sxm x 1", "--tp", "2"]) == 2
    assert main(["plan", "fit", "llama-3-8b", "--on", "h100-sxm x 8", "--sequence", "8k"]) == 0
    assert "cheapest changes" in capsys.readouterr().out


MEASURED = json.loads((Path(fit_peaks.__file__).parents[1] / "results" / "fit_peaks_h200.json").read_text())["rows"]


@pytest.mark.slow
@pytest.mark.parametrize("row", MEASURED, ids=lambda row: row["step"])
def test_peaks_that_an_h200_measured_before_and_after_a_change(row):
    subject = next(each for each in fit_peaks.STEPS if each.name == row["step"])
    machine = catalogue.find("h200-sxm")
    with fake():
        case = as_case(subject.build(fit_peaks.Change()), (), {})
    step = fit._Step(*estimate_step(case, machine), Cluster.of(machine, gpus=1))
    choice = fit._Choice(row["pieces"], "as they are", "none", row["recomputed_layers"])
    assert step.peak(fit._AS_IS) + WORKSPACE == pytest.approx(row["found"], rel=0.02)
    assert step.peak(choice) + WORKSPACE == pytest.approx(row["found_after"], rel=0.02)
