"""The interpreter, repaired: bfloat16 as torch computes it."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from nearpeak.kernels._runtime import launch  # noqa: E402
from nearpeak.kernels._runtime.policy import INTERPRETED  # noqa: E402

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")

WORDS = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
"""All numbers of bfloat16."""


@triton.jit
def sums_kernel(x, y, result, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.arange(0, BLOCK)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(result + at, a * b + a)


@triton.jit
def cast_kernel(x, result, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.arange(0, BLOCK)
    tl.store(result + at, tl.load(x + at).to(result.dtype.element_ty))


@triton.jit
def product_kernel(x, y, result, SIZE: tl.constexpr):  # noqa: N803
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(result + at, tl.dot(tl.load(x + at), tl.load(y + at)))


def same(actual, expected):
    return torch.equal(actual.isnan(), expected.isnan()) and torch.equal(
        actual.float().nan_to_num(), expected.float().nan_to_num()
    )


def test_arithmetic_of_bfloat16_is_that_of_torch():
    torch.manual_seed(0)
    x, y = torch.randn(4096).bfloat16(), torch.randn(4096).bfloat16()
    result = torch.empty_like(x)
    launch.launch(sums_kernel, (1, 1, 1), x, y, result, 4096)
    assert torch.equal(result, x * y + x)


@pytest.mark.parametrize("source", [torch.float32, torch.float16], ids=str)
def test_casts_to_bfloat16_round_to_the_nearest(source):
    torch.manual_seed(0)
    x = torch.cat([torch.randn(4091), torch.tensor([float("inf"), float("nan"), 1.00390625, 1.01171875, -0.0])])
    x = x.to(source)
    result = torch.empty_like(x, dtype=torch.bfloat16)
    launch.launch(cast_kernel, (1, 1, 1), x, result, 4096)
    assert same(result, x.bfloat16())


@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_casts_from_bfloat16_are_those_of_torch(target):
    result = torch.empty_like(WORDS, dtype=target)
    launch.launch(cast_kernel, (1, 1, 1), WORDS, result, 2**16)
    expected = WORDS.to(target)
    kept = expected.float().isfinite()
    assert torch.equal(result.float()[kept], expected.float()[kept])


@pytest.mark.parametrize("source", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_casts_from_float8_are_those_of_torch(source, target):
    x = torch.arange(256, dtype=torch.uint8).view(source)
    result = torch.empty(256, dtype=target)
    launch.launch(cast_kernel, (1, 1, 1), x, result, 256)
    assert same(result, x.to(target))


def test_products_of_bfloat16_are_exact_sums():
    torch.manual_seed(0)
    x, y = torch.randn(32, 32).bfloat16(), torch.randn(32, 32).bfloat16()
    result = torch.empty(32, 32)
    launch.launch(product_kernel, (1, 1, 1), x, y, result, 32)
    torch.testing.assert_close(result, x.float() @ y.float())
