import dataclasses
import math

import pytest
import torch
from gpu_steps import H200, examined, found_in
from planted import load, planted
from torch.nn import functional

from nearpeak.bound.expected import OpExpectations
from nearpeak.bound.roofline import KernelStream
from nearpeak.bound.tiles import product_sizes
from nearpeak.findings.rules.ragged_products import ragged_products
from nearpeak.findings.what_if import gemm_op
from nearpeak.ops.cost import cost_of
from nearpeak.ops.op import Trace


def when_padded(op, expected):
    """What a good kernel takes for an op; for a product with an odd size, for the same product without."""
    sizes = product_sizes(op)
    if sizes is None or not any(size % 8 for size in sizes[1:]):
        return expected
    batch, *edges = sizes
    padded = gemm_op(batch, *(math.ceil(size / 64) * 64 for size in edges), dtype=op.inputs[-1].dtype)
    cost = cost_of(padded)
    stream = KernelStream(Trace(ops=(padded,), storages={}), H200, "achievable")
    times = stream.seconds(cost.reads, cost.writes, cost.flops, cost.vector_flops, launches=True, op=0)
    return OpExpectations(H200).seconds(padded, cost, times)


def ragged_is_slow(factor):
    """Products with an odd size take so many times what they would take without."""

    def times(op, expected):
        odd = any(size % 8 for tensor in (*op.inputs, *op.outputs) for size in tensor.shape)
        return factor * when_padded(op, expected) if odd else expected

    return times


def head(words, *, dtype=torch.bfloat16, layers=0, tokens=2048):
    def build():
        x = torch.randn(tokens, 1024, dtype=dtype)
        weight, inner = torch.randn(words, 1024, dtype=dtype), torch.randn(1024, 1024, dtype=dtype)

        def step():
            hidden = x
            for _ in range(layers):
                hidden = functional.linear(hidden, inner)
            return functional.linear(hidden, weight)

        return step

    return build


def test_the_corpus():
    module = load("ragged_products")
    step = examined(lambda: module.waste("cuda"), times=ragged_is_slow(2.0))
    (finding,) = found_in(step, "ragged-product")
    assert finding.source == planted("ragged_products")
    assert finding.places == 3  # forward, and two products backward
    assert 0.4 < finding.share <= 0.5
    assert "50257 to 50304" in finding.remedy
    assert not found_in(examined(lambda: module.clean("cuda"), times=ragged_is_slow(2.0)))


def test_what_is_slow_anyway_is_not_blamed_on_sizes():
    slow = examined(head(50257, layers=3), times=lambda op, expected: 2 * when_padded(op, expected))
    assert not list(ragged_products(slow))
    half = examined(head(50257), times=ragged_is_slow(1.05))
    assert not list(ragged_products(half))


def test_other_products_set_the_measure():
    def times(op, expected):
        return (3 if any(50257 in tensor.shape for tensor in op.outputs) else 1.5) * when_padded(op, expected)

    step = examined(head(50257, layers=3), times=times)
    (waste,) = ragged_products(step)
    assert waste.saving_s == pytest.approx(0.5 * step.measured[waste.op].measured_s, rel=0.02)


@pytest.mark.parametrize(
    "build",
    [head(50304), head(50256), head(50257, dtype=torch.float32), head(50257, tokens=1)],
    ids=["padded", "multiple of 8", "float32", "one row"],
)
def test_silent(build):
    assert not list(ragged_products(examined(build, times=lambda op, expected: 3 * expected)))


def test_silent_on_a_cpu():
    on_cpu = dataclasses.replace(H200, kind="cpu")
    assert not list(ragged_products(examined(head(50257), times=ragged_is_slow(2.0), machine=on_cpu)))
