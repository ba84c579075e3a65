import pytest
import torch
from gpu_steps import examined, found_in
from planted import load, planted
from torch.nn import functional

from nearpeak.findings.rules.logits_upcast import logits_upcast

NAME = "logits-upcast"


def trained(loss_of, *, dtype=torch.bfloat16):
    def build():
        hidden = torch.randn(2, 1024, 512, dtype=dtype)
        weight = torch.randn(32768, 512, dtype=dtype, requires_grad=True)
        targets = torch.randint(32768, (2, 1024))
        return lambda: loss_of(functional.linear(hidden, weight), targets).backward()

    return build


def shifted(logits, targets):
    logits = logits.float()[:, :-1].contiguous()
    return functional.cross_entropy(logits.view(-1, 32768), targets[:, 1:].reshape(-1))


def test_the_corpus():
    module = load("logits_upcast")
    step, clean = (examined(lambda make=make: make("cuda")) for make in (module.waste, module.clean))
    (finding,) = found_in(step, NAME)
    assert finding.source == planted("logits_upcast")
    assert finding.saving_s == pytest.approx(step.profile.wall_s - clean.profile.wall_s, rel=0.05)
    assert not found_in(clean, NAME)


def test_a_shift_by_one_token_and_its_backward_are_part_of_it():
    step = examined(trained(shifted))
    (waste,) = logits_upcast(step)
    seen = [step.ops[index].packet for index in sorted(waste.gains)]
    assert seen.count("aten._to_copy") == 2 and "aten.clone" in seen and "aten._log_softmax_backward_data" in seen
    assert all(step.costs[index].family != "matrix" for index in waste.gains)


def test_a_cast_by_autocast_counts():
    def autocast(logits, targets):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return functional.nll_loss(functional.log_softmax(logits.view(-1, 32768), -1), targets.view(-1))

    assert len(list(logits_upcast(examined(trained(autocast))))) == 1


def test_silent_in_one_dtype_and_without_a_loss():
    plain = trained(lambda logits, targets: functional.cross_entropy(logits.view(-1, 32768), targets.view(-1)))
    assert not list(logits_upcast(examined(plain)))
    whole = trained(
        lambda logits, targets: functional.cross_entropy(logits.float().view(-1, 32768), targets.view(-1)),
        dtype=torch.float32,
    )
    assert not list(logits_upcast(examined(whole)))
    sampled = trained(lambda logits, targets: functional.log_softmax(logits.float(), -1).sum())
    assert not list(logits_upcast(examined(sampled)))


def test_log_probabilities_that_are_cast_for_the_loss_count():
    def cast_after(logits, targets):
        return functional.nll_loss(functional.log_softmax(logits.view(-1, 32768), -1).float(), targets.view(-1))

    step = examined(trained(cast_after))
    (waste,) = logits_upcast(step)
    seen = [step.ops[index].packet for index in sorted(waste.gains)]
    assert seen == ["aten._to_copy", "aten.nll_loss_backward", "aten._to_copy"]
    assert waste.saving_s == pytest.approx(step.seconds(waste.gains), rel=0.5) and waste.title.startswith("Log-prob")
