import dataclasses

import pytest
import torch
from gpu_steps import examined, found_in
from planted import load, planted
from torch import nn
from torch.nn import functional

from nearpeak.findings.rules.experts import skewed_experts
from nearpeak.profiles.idle import IdleCause

NAME = "skewed-experts"


def experts(rows, *, trained=False, shared=False):
    def build():
        weights = torch.randn(len(rows), 2048, 2048, dtype=torch.bfloat16, requires_grad=trained)
        x = torch.randn(sum(rows), 2048, dtype=torch.bfloat16)

        def step():
            parts = [part @ weights[0 if shared else at] for at, part in enumerate(x.split(rows))]
            return torch.cat(parts).sum().backward() if trained else parts

        return step

    return build


def test_the_corpus():
    module = load("skewed_experts")
    (finding,) = found_in(examined(lambda: module.waste("cuda")), NAME)
    assert finding.source == planted("skewed_experts")
    assert finding.places == 1 and len(finding.ops) == module.EXPERTS
    assert 0.3 < finding.share < 0.8
    assert not found_in(examined(lambda: module.clean("cuda")), NAME)


def test_gradients_of_weights_are_a_loop_of_their_own():
    found = list(skewed_experts(examined(experts([1024, *[16] * 31], trained=True))))
    step = examined(experts([1024, *[16] * 31], trained=True))
    assert {step.ops[waste.op].phase for waste in found} == {"forward", "backward"}


@pytest.mark.parametrize(
    "build",
    [
        experts([64] * 16),
        experts([2048, 16, 16]),
        experts([1024, *[16] * 15], shared=True),
        experts([32768, *[8192] * 7]),
    ],
    ids=["even", "three", "one-weight", "large"],
)
def test_silent(build):
    assert not list(skewed_experts(examined(build)))


def test_layers_of_different_widths_are_no_experts():
    def build():
        weights = [torch.randn(width, 768, dtype=torch.bfloat16) for width in (768, 3072) * 12]
        inputs = {width: torch.randn(512, width, dtype=torch.bfloat16) for width in (768, 3072)}
        return lambda: [inputs[weight.shape[0]] @ weight for weight in weights]

    assert not list(skewed_experts(examined(build)))


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(functional.gelu(self.up(x)))


class Mixture(nn.Module):
    """Experts in a list, with a mask or an index for the rows of each."""

    def __init__(self, how, experts=8, width=16):
        super().__init__()
        self.how = how
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))

    def forward(self, x):
        weight, chosen = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if self.how == "index":
                rows, choice = torch.where(chosen == number)
                if not rows.numel():
                    continue
                out.index_add_(0, rows, expert(x[rows]) * weight[rows, choice, None])
            elif self.how == "mask":
                mask = (chosen == number).any(-1)
                if mask.sum().item() == 0:
                    continue
                out[mask] = out[mask] + expert(x[mask])
            else:
                out = out + expert(x) * weight[:, :1]
        return out


def mixing(how, *, train=False, layers=2):
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(*(Mixture(how) for _ in range(layers)))
        x = torch.randn(64, 16)

        def step():
            out = model(x)
            return out.sum().backward() if train else out

        return step

    return examined(build, live=True, times=lambda op, expected: expected and max(expected, 3e-6))


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("how", ["index", "mask"])
def test_a_loop_over_experts_is_one_finding(how, train):
    step = mixing(how, train=train)
    shown = [finding for finding in found_in(step) if finding.share > 0.02]
    assert [(finding.rule, finding.places) for finding in shown] == [("expert-loop", 1)]
    products = {index for index, op in enumerate(step.ops) if op.packet.endswith("mm") and "router" not in op.module}
    assert products <= set(shown[0].ops)
    assert "8 experts" in shown[0].title and "16 turns" in shown[0].evidence
    assert "_grouped_mm" in shown[0].remedy


def test_the_waits_of_the_loop_are_part_of_it_and_of_nothing_else():
    step = mixing("index")
    (found,) = found_in(step, "expert-loop")
    wait = IdleCause(cause="synchronization", seconds=5e-3, count=16, where=found.source, what="nonzero")
    other = IdleCause(cause="synchronization", seconds=1e-3, count=1, where="train.py:9", what="item")
    profile = dataclasses.replace(step.profile, idle=(wait, other), wall_s=step.profile.wall_s + 6e-3)
    waiting = dataclasses.replace(step, profile=profile, knows=step.knows | {"host"})
    (longer,) = found_in(waiting, "expert-loop")
    assert longer.saving_s == pytest.approx(found.saving_s + 5e-3)
    assert "16 times the host waits" in longer.evidence
    assert [finding.source for finding in found_in(waiting, "synchronization")] == ["train.py:9"]


def test_experts_that_all_see_every_row_are_no_such_loop():
    assert not found_in(mixing("all"), "expert-loop")


def test_layers_that_mask_their_rows_are_no_experts():
    """Each has weights of its own, and chooses by a mask; but it needs the layer before."""

    def build():
        layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        x, used, order = torch.randn(64, 16), torch.rand(64, 1) > 0.5, torch.randperm(64)

        def step():
            out = x
            for layer in layers:
                out = out + layer(torch.where(used, out, 0.0)) + layer(out[order])
            return out

        return step

    assert not found_in(examined(build, times=lambda op, expected: expected and max(expected, 3e-6)), "expert-loop")


def test_the_corpus_of_loops_over_experts():
    module = load("expert_loop")
    (finding,) = found_in(examined(lambda: module.waste("cpu"), live=True), "expert-loop")
    assert finding.source == planted("expert_loop")
    assert not found_in(examined(lambda: module.clean("cpu"), live=True), "expert-loop")
