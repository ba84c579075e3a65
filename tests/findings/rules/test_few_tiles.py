import dataclasses

import torch
from gpu_steps import H200, examined, found_in
from planted import load, planted
from torch.nn import functional

from nearpeak.findings.rules.few_tiles import few_tiles


def draw(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16)


def projections(count, rows, columns, *, same_input=True):
    def build():
        inputs = [draw(rows, 2048) for _ in range(count)]
        weights = [draw(columns, 2048) for _ in range(count)]

        def step():
            return [functional.linear(inputs[0] if same_input else x, w) for x, w in zip(inputs, weights, strict=True)]

        return step

    return build


def slow(factor):
    return lambda op, expected: factor * expected


def test_the_corpus():
    module = load("few_tiles")
    (finding,) = found_in(examined(lambda: module.waste("cuda")), "few-tiles")
    assert finding.source == planted("few_tiles") and finding.places == module.LAYERS
    assert 0.2 < finding.share < 0.7
    assert not found_in(examined(lambda: module.clean("cuda")))


def test_products_of_one_input_become_one():
    step = examined(projections(4, 256, 512))
    (waste,) = few_tiles(step)
    assert len(waste.gains) == 4
    assert "2048 x 2048" in waste.remedy and "[512, 512, 512, 512]" in waste.remedy
    assert 0.0 < waste.saving_s < step.seconds(waste.gains)


def test_products_of_different_inputs_stay():
    assert not list(few_tiles(examined(projections(4, 256, 512, same_input=False))))


def test_enough_tiles_stay():
    assert not list(few_tiles(examined(projections(4, 8192, 4096))))


def test_silent_on_a_cpu():
    on_cpu = dataclasses.replace(H200, kind="cpu")
    assert not list(few_tiles(examined(projections(4, 256, 512), machine=on_cpu, times=slow(3))))
