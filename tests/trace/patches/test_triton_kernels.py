"""Traces of Triton kernels: behind an operator of torch, and launched by the code itself."""

from __future__ import annotations

import pytest
import torch

import nearpeak
from nearpeak.errors import UsageError
from nearpeak.trace.trace import trace

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from torch.library import triton_op, wrap_triton  # noqa: E402

with triton.knobs.runtime.scope():
    triton.knobs.runtime.interpret = False  # it is traced, and not run

    @triton.jit
    def add_kernel(x, y, out, n, BLOCK: tl.constexpr):  # noqa: N803
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


def never(*_args, **_kwargs):
    raise AssertionError("tuned inside a trace")


tuned_kernel = triton.autotune(
    configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["n"], do_bench=never
)(add_kernel)
guessed_kernel = triton.heuristics({"BLOCK": lambda arguments: 64})(add_kernel)


@triton_op("nearpeak_tests::triton_add", mutates_args=())
def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    wrap_triton(add_kernel)[(4,)](x, y, out, x.numel(), BLOCK=64)
    return out


def launched(kernel, **settings):
    def call(x, y):
        out = torch.empty_like(x)
        kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, out, x.numel(), **settings)
        return out.relu()

    return call


LAUNCHES = pytest.mark.parametrize(
    "call",
    [
        launched(add_kernel, BLOCK=64, num_warps=4),
        launched(tuned_kernel),
        launched(guessed_kernel),
        launched(wrap_triton(add_kernel), BLOCK=64),
    ],
    ids=["plain", "tuned", "heuristics", "wrapped"],
)


def test_an_operator_keeps_its_name_and_is_whole():
    x = torch.randn(256)
    recorded = trace(lambda: add(x, x + 1))
    assert [op.name for op in recorded.ops] == ["aten.add.Tensor", "nearpeak_tests.triton_add.default"]
    nearpeak.declare_cost("nearpeak_tests::triton_add", vector_flops=lambda op: op.tensor("x").elements)
    try:
        result = nearpeak.estimate(add, x, x + 1, on="h200-sxm")
        assert (result.bytes, result.flops) == (3 * 4 * 256, 256)
    finally:
        nearpeak.forget_cost("nearpeak_tests::triton_add")


@LAUNCHES
def test_a_launch_is_an_op(call):
    recorded = trace(call, torch.randn(256), torch.randn(256))
    assert [op.name for op in recorded.ops] == ["aten.empty_like.default", "triton.add_kernel", "aten.relu.default"]
    kernel = recorded.ops[1]
    assert list(kernel.arguments)[:4] == ["x", "y", "out", "n"]
    assert kernel.arguments["n"] == 256
    assert kernel.tensor("out").storage == recorded.ops[0].outputs[0].storage == recorded.ops[2].inputs[0].storage
    assert set(kernel.mutated) == {"x", "y", "out"}  # each may be
    assert kernel.source.startswith("test_triton_kernels.py:")


@LAUNCHES
def test_a_launch_without_a_declaration_is_charged_nothing_and_named(call):
    result = nearpeak.estimate(call, torch.randn(256), torch.randn(256), on="h200-sxm")
    assert result.ops[1].flops == result.ops[1].bytes_read == result.ops[1].bytes_written == 0
    assert set(result.coverage.unmodeled) == {"triton.add_kernel"}


def test_a_launch_with_a_declaration():
    nearpeak.declare_cost("triton::add_kernel", reads=("x", "y"), writes=("out",), vector_flops=256)
    try:
        result = nearpeak.estimate(launched(tuned_kernel), torch.randn(256), torch.randn(256), on="h200-sxm")
    finally:
        nearpeak.forget_cost("triton::add_kernel")
    kernel = result.ops[1]
    assert (kernel.bytes_read, kernel.bytes_written, kernel.flops) == (2 * 4 * 256, 4 * 256, 256)
    assert not result.coverage.unmodeled


def test_a_declaration_says_what_a_kernel_writes():
    with pytest.raises(UsageError, match=r"triton\.add_kernel writes is not known: give writes="):
        nearpeak.declare_cost("triton::add_kernel", reads=("x", "y"))


def test_outside_of_a_trace_kernels_are_triton_s_own():
    before = triton.runtime.jit.JITFunction.run
    trace(launched(add_kernel, BLOCK=64), torch.randn(256), torch.randn(256))
    assert triton.runtime.jit.JITFunction.run is before


def test_live_launches_follow(monkeypatch):
    seen = []
    monkeypatch.setattr(
        triton.runtime.jit.JITFunction, "run", lambda self, *args, **kwargs: seen.append((args, kwargs))
    )
    recorded = trace(launched(add_kernel, BLOCK=64), torch.ones(256), torch.ones(256), live=True)
    assert [op.name for op in recorded.ops][1] == "triton.add_kernel"
    ((args, kwargs),) = seen
    assert isinstance(args[0], torch.Tensor)
    assert "grid" in kwargs
    assert args[3] == 256
