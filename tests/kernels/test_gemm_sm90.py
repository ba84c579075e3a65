"""Products by the kernel for Hopper: what it takes, its tiles, its logic on a CPU, and its results on such a GPU."""

from __future__ import annotations

import pytest
import torch
from emulated_hopper import emulated
from kernel_checks import DEVICE

pytest.importorskip("triton.experimental.gluon")

from nearpeak import kernels
from nearpeak.kernels._runtime import gluon
from nearpeak.kernels.gemm import _activate, dequantize_operand, epilogue_reference
from nearpeak.kernels.gemm import triton as gemm_triton
from nearpeak.kernels.gemm.triton import Epilogue, Scales
from nearpeak.kernels.gemm.tuning import sm90_candidates, sm90_heuristic

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(gluon, "runs_on", lambda device: True)


def takes(a, b, epilogue=None, dtype=None, scales=None):
    epilogue = epilogue or Epilogue()
    columns = b.shape[0] // (2 if epilogue.gated else 1)
    result = torch.empty(a.shape[0], columns, dtype=dtype or a.dtype)
    return gemm_triton.takes_sm90(a, b, result, epilogue, scales)


def test_what_it_takes(on_hopper):
    a, b = torch.empty(100, 72, dtype=BF16), torch.empty(48, 72, dtype=BF16)
    assert takes(a, b)
    assert takes(a.half(), b.half())
    assert takes(a, b, dtype=torch.float32)
    assert takes(torch.empty(72, 104, dtype=BF16).t(), torch.empty(72, 48, dtype=BF16).t())
    assert takes(torch.empty(100, 200, dtype=BF16)[:, 8:80], b)
    assert takes(a, b, Epilogue(activation="silu", gated=True, residual=torch.empty(100, 24, dtype=BF16)))
    assert takes(a[:1], b)
    assert takes(torch.empty(100, 64, dtype=E4M3), torch.empty(48, 64, dtype=E4M3), dtype=BF16)


def test_what_is_left_to_the_portable_kernel(on_hopper):
    a, b = torch.empty(100, 72, dtype=BF16), torch.empty(48, 72, dtype=BF16)
    assert not takes(a.float(), b.float())
    assert not takes(torch.empty(100, 71, dtype=BF16), torch.empty(48, 71, dtype=BF16))
    assert not takes(torch.empty(100, 80, dtype=BF16)[:, 1:73], b)
    assert not takes(torch.empty(1, 72, dtype=BF16).expand(100, 72), b)
    assert not takes(torch.empty(72, 101, dtype=BF16).t(), b)
    assert not takes(a, b[:47])
    assert not takes(a[:, :0], b[:, :0])
    assert not takes(a, b, Epilogue(residual=torch.empty(100, 48)))
    assert not takes(a, b, Epilogue(activation="silu", keep=True), torch.float32)
    assert not takes(a[:1], b[:44], Epilogue(activation="silu", gated=True, keep=True))  # the second half: no multiple
    assert not takes(a, torch.empty(72, 48, dtype=BF16).t(), Epilogue(activation="silu", gated=True))
    fp8 = torch.empty(64, 64, dtype=E4M3)
    assert not takes(fp8.t(), fp8, dtype=BF16)


@pytest.mark.parametrize("kind", ["16_bits", "16_bits_gated", "8_bits", "8_bits_gated", "8_bits_fast"])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_configurations_fit(kind, has_residual, keep, itemsize):
    found = sm90_candidates(kind, itemsize, has_residual, keep)
    assert found
    for config in found:
        assert config.shared_bytes(kind.endswith("gated"), itemsize) <= 232_448
        assert config.block_n // config.slices * itemsize % 128 == 0  # as wide as what is swizzled
        assert config.buffers == 1 or not has_residual


def test_a_table_is_asked_where_what_was_measured_fits():
    def name(itemsize=2, **options):
        return gemm_triton.sm90_table_name(itemsize, Epilogue(**options), None)

    assert name() == "gemm_sm90_16_bits"
    assert name(activation="silu", gated=True) == "gemm_sm90_16_bits_gated"
    assert name(activation="silu", gated=True, keep=True) == "gemm_sm90_16_bits_gated_kept"
    assert name(itemsize=4) is None
    assert name(residual=torch.empty(1, 1)) is None
    wide = [config for config in sm90_candidates() if config.slices == 1]
    assert any(config.shared_bytes(False, 4) > 232_448 for config in wide)  # why it is None


def test_tiles_are_chosen_by_what_is_left_to_wait_for():
    def chosen(rows, columns):
        found = sm90_heuristic(torch.empty(rows, columns, dtype=BF16, device="meta"))
        return found.block_m, found.block_n

    assert chosen(8192, 8192) == (128, 256)
    assert chosen(1024, 2048) == (128, 128)  # 128 tiles for 132 processors, and not 64


def test_results_of_few_tiles_are_left_to_smaller_ones():
    fills = gemm_triton.fills_gpu
    assert fills(torch.empty(8192, 8192, device="meta"))
    assert fills(torch.empty(64, 8192, device="meta"))
    assert not fills(torch.empty(64, 2048, device="meta"))


@pytest.fixture
def emulate(on_hopper, monkeypatch):
    """Runs the kernel on this CPU, by three programs."""
    from nearpeak.kernels.gemm import sm90 as gemm_sm90

    if DEVICE != "cpu":
        pytest.skip("tensors are on a GPU")

    def run(call):
        given = {"activate": _activate, "SCALE_BLOCK": 128}
        with emulated((gemm_sm90, gemm_sm90), monkeypatch, 3, **given) as launch:
            monkeypatch.setattr(gemm_triton, "launch", launch)
            return call()

    return run


def made(*shape, seed=0, dtype=BF16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(emulate, a, b, epilogue, config=None, scales=None, dtype=BF16, wide=None):
    """The kernel's result and what it keeps, against torch in float32."""
    columns = b.shape[0] // (2 if epilogue.gated else 1)
    result = torch.full((a.shape[0], columns), float("nan"), dtype=dtype)
    kept = torch.full((a.shape[0], b.shape[0]), float("nan"), dtype=dtype) if epilogue.keep else None
    assert gemm_triton.takes_sm90(a, b, result, epilogue, scales)
    emulate(lambda: gemm_triton.multiply_sm90(a, b, result, kept, epilogue, scales, config))
    left, right = wide or (a.float(), b.float())
    before = left @ right.T + (0.0 if epilogue.bias is None else epilogue.bias.float())
    expected = epilogue_reference(before, epilogue.activation, epilogue.gated, epilogue.residual)
    torch.testing.assert_close(result.float(), expected.float(), rtol=0.01, atol=0.02)
    if kept is not None:
        torch.testing.assert_close(kept.float(), before, rtol=0.01, atol=0.02)


SIZE = (300, 520, 200)
"""Rows, columns and features: several tiles with something outside, and more steps than stages."""


@pytest.mark.slow
@pytest.mark.parametrize("config", sm90_candidates(), ids=str)
def test_the_logic_of_each_tile(emulate, config):
    rows, columns, depth = SIZE
    check(emulate, made(rows, depth), made(columns, depth, seed=1), Epilogue(), config)


def test_factors_across(emulate):
    rows, columns, depth = SIZE
    a, b = made(depth, 304)[:, :rows].t(), made(depth, columns, seed=1).t()
    check(emulate, a, b, Epilogue())
    check(emulate, made(rows, depth), b, Epilogue())


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_what_follows(emulate, gated, has_residual, keep):
    rows, columns, depth = 300, 528, 72
    residual = made(rows, columns // 2 if gated else columns, seed=2) if has_residual else None
    epilogue = Epilogue(bias=made(columns, seed=3), residual=residual, activation="silu", gated=gated, keep=keep)
    kind = gemm_triton.sm90_config_kind(epilogue, None)
    for config in sm90_candidates(kind, 2, has_residual, keep):
        check(emulate, made(rows, depth), made(columns, depth, seed=1), epilogue, config)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["row", "block"])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_fp8(emulate, gated, fast, kind):
    rows, columns, depth = 200, 512, 400
    a, b = made(rows, depth).to(E4M3), made(columns, depth, seed=1).to(E4M3)
    shapes = ((rows,), (columns,)) if kind == "row" else ((rows, 4), (4, 4))
    scale_a, scale_b = (0.5 + torch.rand(shape) for shape in shapes)
    scales = Scales(a, scale_a, b, scale_b, fast)
    wide = dequantize_operand(a, scale_a, 1), dequantize_operand(b, scale_b, 128)
    epilogue = Epilogue(activation="gelu" if gated else "", gated=gated)
    for config in sm90_candidates(gemm_triton.sm90_config_kind(epilogue, scales), 4):
        check(emulate, a, b, epilogue, config, scales, torch.float32 if gated else BF16, wide)


def on_this_gpu() -> bool:
    return torch.cuda.is_available() and gluon.runs_on(torch.device("cuda", 0))


hopper = pytest.mark.skipif(not on_this_gpu(), reason="this kernel is for Hopper")
CASES = [(256, 512, 1024), (300, 520, 200), (1, 4096, 4096), (4096, 8, 64), (1000, 3000, 4104), (129, 257 * 8, 72)]


def on_gpu(*shape, seed=0, dtype=BF16):
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def assert_near(found, exact, what=""):
    """Of sums in float32, rounded to the dtype of the result once."""
    unit = torch.finfo(found.dtype).eps
    error = (found.double() - exact).abs().max()
    assert error <= max(unit, 2.0**-18) * exact.abs().max(), f"{what}: off by {error:.3g}"


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_results_of_all_layouts(case, dtype):
    from nearpeak.kernels.gemm import triton as gemm_triton

    rows, columns, depth = case
    a, b = on_gpu(rows, depth, dtype=dtype), on_gpu(columns, depth, seed=1, dtype=dtype)
    exact = a.double() @ b.double().T
    for left in (a, a.t().contiguous().t()):
        for right in (b, b.t().contiguous().t()):
            for config in sm90_candidates():
                found, _ = gemm_triton.forward(left, right, None, None, "", False, dtype, False, False, config=config)
                assert_near(found, exact, str(config))


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("kind", ["16_bits", "16_bits_gated"])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_results_of_all_configurations(kind, has_residual, keep):
    from nearpeak.kernels.gemm import triton as gemm_triton

    gated = kind.endswith("gated")
    a, b, bias = on_gpu(1000, 600), on_gpu(1040, 600, seed=1), on_gpu(1040, seed=2)
    residual = on_gpu(1000, 520 if gated else 1040, seed=3) if has_residual else None
    before = a.double() @ b.double().T + bias.double()
    exact = epilogue_reference(before, "silu", gated, residual)
    for config in sm90_candidates(kind, 2, has_residual, keep):
        given = (a, b, bias, residual, "silu", gated, BF16, False, keep)
        found, kept = gemm_triton.forward(*given, config=config)
        assert_near(found, exact, str(config))
        if keep:
            assert_near(kept, before, str(config))
        assert all(torch.equal(found, gemm_triton.forward(*given, config=config)[0]) for _ in range(20)), config


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("blocks", ["row", "block"])
@pytest.mark.parametrize("gated", [False, True])
def test_results_of_fp8(gated, blocks):
    from nearpeak.kernels.gemm import triton as gemm_triton

    kinds = ("row", "row") if blocks == "row" else ((1, 128), (128, 128))
    (a, scale_a), (b, scale_b) = (
        kernels.quantize(on_gpu(rows, 2064, seed=rows), block=kind)
        for rows, kind in zip((1000, 1024), kinds, strict=True)
    )
    before = dequantize_operand(a, scale_a, 1).double() @ dequantize_operand(b, scale_b, 128).double().T
    exact = epilogue_reference(before, "silu" if gated else "", gated, None)
    epilogue = Epilogue(activation="silu" if gated else "", gated=gated)
    scales = Scales(a, scale_a, b, scale_b, False)
    for config in sm90_candidates(gemm_triton.sm90_config_kind(epilogue, scales), 4):
        given = (a, b, None, None, scale_a, scale_b, epilogue.activation, gated, torch.float32, False)
        found = gemm_triton.fp8_forward(*given, config=config)
        assert (found.double() - exact).abs().max() < 1e-3 * exact.abs().max(), config
        assert all(torch.equal(found, gemm_triton.fp8_forward(*given, config=config)) for _ in range(20)), config
    fast = kernels.gemm(a, b, scale_x=scale_a, scale_weight=scale_b, fast_accumulate=True, out_dtype=torch.float32)
    assert (fast.double() - before).abs().max() < 0.01 * before.abs().max()


@pytest.mark.gpu
@hopper
def test_gradients_of_a_large_product():
    x, weight, bias = on_gpu(2, 1000, 1024).requires_grad_(), on_gpu(2048, 1024, seed=1), on_gpu(2048, seed=2)
    weight, bias = (0.03 * weight).requires_grad_(), bias.requires_grad_()
    inputs = (x, weight, bias)
    upstream = on_gpu(2, 1000, 1024, seed=3)
    with kernels.using("require"):
        result = kernels.gemm(x, weight, bias=bias, activation="silu", gated=True)
    found = torch.autograd.grad(result, inputs, upstream)
    wide = [one.detach().double().requires_grad_() for one in inputs]
    exact = kernels.gemm.reference(wide[0], wide[1], bias=wide[2], activation="silu", gated=True)
    for one, right in zip(found, torch.autograd.grad(exact, wide, upstream.double()), strict=True):
        assert (one.double() - right).abs().max() < 0.02 * right.abs().max()


@pytest.mark.gpu
@hopper
def test_a_hundred_times_the_same():
    a, b = on_gpu(4096, 4096), on_gpu(4096, 4096, seed=1)
    first = kernels.gemm(a, b)
    assert_near(first, a.double() @ b.double().T)
    assert all(torch.equal(first, kernels.gemm(a, b)) for _ in range(100))


@pytest.mark.gpu
@hopper
def test_in_a_cuda_graph():
    a, b = on_gpu(1024, 1024), on_gpu(2048, 1024, seed=1)
    expected = kernels.gemm(a, b, activation="silu", gated=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernels.gemm(a, b, activation="silu", gated=True)
    found.zero_()
    graph.replay()
    assert torch.equal(found, expected)


@pytest.mark.gpu
@hopper
def test_compiled_by_inductor():
    a, b = on_gpu(512, 512).requires_grad_(), on_gpu(768, 512, seed=1).requires_grad_()

    def function(a, b):
        return kernels.gemm(a * 2, b, activation="gelu").float().sum()

    found, expected = (
        torch.autograd.grad(call(a, b), (a, b)) for call in (torch.compile(function, fullgraph=True), function)
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.5)
