import pytest
import torch
from gpu_steps import examined, found_in
from planted import load, planted
from torch.nn import functional

from nearpeak.findings.rules.logits_kept import logits_kept

NAME = "logits-kept"


def head(read):
    def build():
        hidden = torch.randn(4, 512, 1024, dtype=torch.bfloat16)
        weight = torch.randn(32768, 1024, dtype=torch.bfloat16)
        return lambda: read(functional.linear(hidden, weight))

    return build


@pytest.mark.parametrize("name", ["logits_kept", "logits_kept_for_masked"])
def test_the_corpus(name):
    module = load(name)
    step, clean = (examined(lambda make=make: make("cuda")) for make in (module.waste, module.clean))
    (finding,) = found_in(step, NAME)
    assert finding.source == planted(name)
    assert finding.saving_s == pytest.approx(step.profile.wall_s - clean.profile.wall_s, rel=0.05)
    assert not found_in(clean, NAME)


def test_casts_of_all_logits_are_part_of_it():
    step = examined(head(lambda logits: logits.float()[:, -1].argmax(-1)))
    (waste,) = logits_kept(step)
    assert [step.ops[index].packet for index in sorted(waste.gains)] == ["aten.mm", "aten._to_copy"]


@pytest.mark.parametrize(
    "read",
    [
        lambda logits: logits,
        lambda logits: logits[:, -1],  # a view: the rest is kept with it
        lambda logits: logits[:, :-1].argmax(-1),
        lambda logits: logits[..., :100].argmax(-1),
        lambda logits: logits.gather(-1, torch.zeros(4, 512, 1, dtype=torch.int64)),
        lambda logits: (logits[:, -1].argmax(-1), logits.amax()),
    ],
    ids=["returned", "returned-view", "shifted", "columns", "gathered", "read-twice"],
)
def test_silent(read):
    assert not list(logits_kept(examined(head(read))))
