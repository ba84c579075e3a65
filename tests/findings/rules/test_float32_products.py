import dataclasses
import inspect

import pytest
import torch
from gpu_steps import H200, examined, found_in
from planted import load, planted

from nearpeak.findings.rules.float32_products import float32_products


def products(dtype=torch.float32):
    x, weight = torch.randn(1024, 1024, dtype=dtype), torch.randn(1024, 1024, dtype=dtype, requires_grad=True)
    return lambda: (x @ weight).sum().backward()


@pytest.fixture
def precision():
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision("highest")


def test_the_corpus(precision):
    module = load("float32_products")
    (finding,) = found_in(examined(lambda: module.waste("cpu")), "float32-products")
    assert finding.source == planted("float32_products")
    assert 0.6 < finding.share < 1.0
    assert not found_in(examined(lambda: module.clean("cpu")))


def test_forward_and_backward_are_one_finding():
    step = examined(products)
    (waste,) = float32_products(step)
    assert [step.ops[index].packet for index in waste.gains] == ["aten.mm", "aten.mm"]
    assert 0.6 * step.seconds(waste.gains) < waste.saving_s < step.seconds(waste.gains)
    assert "set_float32_matmul_precision" in waste.remedy and "cudnn.allow_tf32" not in waste.remedy


def test_a_slower_kernel_leaves_more_to_gain():
    (usual,) = float32_products(examined(products))
    (slow,) = float32_products(examined(products, times=lambda op, expected: 2 * expected))
    assert slow.saving_s > 2 * usual.saving_s


def test_silent_with_tf32(precision):
    precision("high")
    assert not list(float32_products(examined(products)))


def test_silent_in_bfloat16_and_where_there_is_no_engine():
    assert not list(float32_products(examined(lambda: products(torch.bfloat16))))
    volta = dataclasses.replace(H200, achievable=dataclasses.replace(H200.achievable, matrix={"float16": 1e14}))
    assert not list(float32_products(examined(products, machine=volta)))
    assert not list(float32_products(examined(products, machine=dataclasses.replace(H200, kind="cpu"))))


def test_convolutions_have_their_own_switch():
    def build():
        layer, x = torch.nn.Conv2d(64, 64, 3), torch.randn(8, 64, 64, 64)
        return lambda: layer(x)

    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        (waste,) = float32_products(examined(build))
    finally:
        torch.backends.cudnn.allow_tf32 = before
    assert "cudnn.allow_tf32" in waste.remedy and "matmul_precision" not in waste.remedy


def test_a_call_without_the_autocast_of_the_others_has_its_line():
    """The same module is called twice: its lines are those of both, the line of the call is what differs."""

    def build():
        model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512))
        x = torch.randn(512, 512)

        def play():
            with torch.no_grad():
                return model(x)

        def step():
            played = play()
            with torch.autocast("cpu", torch.bfloat16):
                return model(played).float().sum().backward()

        return step

    step = examined(build, live=True, times=lambda op, expected: 4 * expected)
    (waste,) = float32_products(step)
    first = next(op for op in step.ops if op.packet == "aten.addmm")
    assert first.inputs[1].dtype == "float32" and len(waste.gains) == 2
    called = inspect.getsourcelines(build)[1] + next(
        number for number, line in enumerate(inspect.getsource(build).splitlines()) if "played = play()" in line
    )
    assert waste.source == f"test_float32_products.py:{called}"
    assert "autocast" in waste.remedy
