import pytest
import torch
from gpu_steps import examined, found_in
from planted import load, planted

from nearpeak.findings.rules.experts import skewed_experts

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
