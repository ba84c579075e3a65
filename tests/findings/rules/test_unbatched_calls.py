from pathlib import Path

import pytest
import torch
from gpu_steps import examined, found_in
from planted import load, planted
from torch import nn

from nearpeak.findings.rules.unbatched_calls import unbatched_calls


class Model(nn.Sequential):
    def forward(self, x):
        return super().forward(x * 2)


def steps(*, rows=64, width=512, same=True, chained=False, trains=False):
    def build():
        layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.SiLU())]
        model = Model(*layers)
        x, y = torch.randn(rows, width), torch.randn(rows if same else 2 * rows, width)

        def step():
            with torch.set_grad_enabled(trains):
                first = model(x)
                second = model(first if chained else y)
                out = first.sum() + second.sum()
            if trains:
                out.backward()
            return out

        return step

    return examined(build)


def test_calls_of_small_kernels_are_one_batch():
    (found,) = found_in(steps(), "unbatched-calls")
    lines = [number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if " = model(" in line]
    assert found.source == f"test_unbatched_calls.py:{lines[0]}"
    assert f"2 calls of 12 ops each at test_unbatched_calls.py:{lines[0]}" in found.evidence
    assert "torch.cat" in found.remedy
    assert found.share > 0.2


@pytest.mark.parametrize(
    "facts",
    [{"chained": True}, {"same": False}, {"trains": True}, {"rows": 65536, "width": 1024}],
    ids=["needs the other's result", "other shapes", "training", "kernels that fill the machine"],
)
def test_calls_that_cannot_be_one_or_gain_nothing_are_left_alone(facts):
    assert not list(unbatched_calls(steps(**facts)))


def test_the_corpus():
    module = load("unbatched_calls")
    (found,) = found_in(examined(lambda: module.waste("cpu")), "unbatched-calls")
    assert found.source == planted("unbatched_calls")
    assert not found_in(examined(lambda: module.clean("cpu")), "unbatched-calls")
