"""Which backend of an operation runs: choices from a table, what may be forced, and the results of torch's backends."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernel_checks import DEVICE, assert_kernel_is_exact
from torch.nn import functional

from benchmarks.kernels.fit_choices import Cell, chosen_losses, describe, read_cells, table_cell
from nearpeak import kernels
from nearpeak.errors import KernelUnavailable, UsageError
from nearpeak.kernels._runtime import capability as capability_of
from nearpeak.kernels._runtime import choice
from nearpeak.kernels._runtime.choice import Chooser, choose, read_model
from nearpeak.kernels._runtime.replay import ReplayCache
from nearpeak.kernels.attention import backends
from nearpeak.kernels.attention.reference import attention_backward, attention_forward
from nearpeak.kernels.gemm import triton as gemm
from nearpeak.kernels.norms import library as norms

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TABLE = Path(choice.__file__).parents[1] / "tables" / "sm90_choices.json"
FEATURES = {"rows": 0.5, "gated": 1.0}
FEW_ROWS = {"torch": 1.0, "gluon": 1.5, "triton": 1.2}
MANY_ROWS = {"torch": 1.1, "gluon": 1.0, "triton": 1.3}
MADE = read_model(
    [
        {"features": {"rows": rows}, "relative": FEW_ROWS if rows <= 64 else MANY_ROWS}
        for rows in (16, 32, 64, 128, 512, 4096)
    ],
    FEATURES,
)
ALL = ("torch", "gluon", "triton")


@pytest.fixture(autouse=True)
def _free_choice_on_this_device():
    """Nothing is forced, as in other tests of kernels on a GPU, and tensors are on the GPU if there is one."""
    before = choice.forced_backend()
    choice.force_backend(None)
    if DEVICE == "cpu":
        yield
    else:
        with torch.device(DEVICE):
            yield
    choice.force_backend(before)


def chosen(rows, candidates=ALL, model=MADE, forced=None, gated=0):
    return choose("product", candidates, FEATURES, (rows, gated), model, forced)


def test_the_fastest_candidate_by_size():
    assert chosen(32).backend == "torch"
    assert chosen(150).backend == "gluon"
    assert chosen(150, ("torch", "triton")).backend == "torch"
    assert chosen(32, ("gluon", "triton")).backend == "triton"
    one = chosen(512)
    assert one.basis == "measured"
    assert one.relative == pytest.approx(MANY_ROWS, rel=0.02)
    assert one.features == {"rows": 512, "gated": 0}
    assert chosen(100, ("triton",)).basis == "only"


def test_a_call_that_was_measured_takes_what_was_fastest():
    odd = {"features": {"rows": 600}, "relative": {"torch": 1.0, "gluon": 1.2, "triton": 0.7}}
    model = [*MADE, *read_model([odd], FEATURES)]
    assert chosen(600, model=model).backend == "triton"
    assert chosen(3000, model=model).backend == "gluon"


def test_the_first_candidate_where_nothing_was_measured():
    one = chosen(32, model=())
    assert (one.backend, one.basis, one.relative) == ("torch", "not measured", {})
    assert chosen(100, ("cudnn", "gluon")).backend == "cudnn"  # the other one was measured, and this was not
    assert chosen(6000).backend == "gluon"  # little beyond what was measured
    far = chosen(10**7)
    assert (far.backend, far.basis, far.relative) == ("torch", "not measured", {})


def test_a_gain_within_the_noise_changes_nothing():
    alike = read_model([{"features": {"rows": 32}, "relative": {"torch": 1.004, "gluon": 1.0}}], FEATURES)
    assert chosen(32, model=alike).backend == "torch"


def test_a_backend_that_is_forced():
    assert chosen(100, forced="triton").backend == "triton"
    assert chosen(100, forced="triton").basis == "forced"
    assert chosen(100, forced="torch").backend == "torch"
    assert chosen(32, forced="nearpeak").backend == "triton"
    assert chosen(32, ("cudnn", "flash", "triton"), forced="torch").backend == "cudnn"
    with pytest.raises(KernelUnavailable, match=r"product has no backend 'gluon' .* It has 'torch', 'triton'"):
        chosen(100, ("torch", "triton"), forced="gluon")


def test_a_choice_is_remembered_by_its_key(monkeypatch):
    asked = []
    monkeypatch.setattr(choice, "_model", lambda chooser, device: asked.append(chooser.operation) or MADE)
    monkeypatch.setattr(choice, "_choosers", [])
    chooser = Chooser("product", FEATURES)
    assert chooser.known("small") is None
    assert chooser.choose("small", ALL, (32, 0), torch.device("cpu")) == "torch"
    assert chooser.known("small") == "torch"
    with kernels.using(backend="triton"):
        assert chooser.known("small") is None
        assert chooser.choose("small", ALL, (32, 0), torch.device("cpu")) == "triton"
    assert chooser.known("small") == "torch"
    assert [one.backend for one in kernels.choices()] == ["torch"]
    assert asked == ["product", "product"]


def python_calls(function):
    """The functions of this package that a call enters."""
    names = []
    before = sys.getprofile()

    def watch(frame, event, _):
        if event == "call" and "nearpeak" in frame.f_globals.get("__name__", ""):
            names.append(frame.f_code.co_name)

    sys.setprofile(watch)
    try:
        function()
    finally:
        sys.setprofile(before)
    return [name for name in names if name != "<genexpr>"]


def test_a_choice_that_was_made_costs_three_calls_of_python():
    x, weight = torch.ones(4, 16), torch.ones(8, 16)
    result, epilogue = torch.empty(4, 8), gemm.Epilogue()
    problem = backends.AttentionProblem(
        *(torch.ones(1, 2, 8, 16),) * 3, *(None,) * 6, 0, 0, -1, -1, True, 0.25, 0.0, 0.0
    )

    def choose_product():
        gemm._choose(x, weight, result, epilogue, None)

    def choose_attention():
        backends.choose(problem)

    for call, name in ((choose_product, "_choose"), (choose_attention, "choose")):
        call()
        assert python_calls(call) == [name, "known", "active_recording"]


def test_using_takes_backends_by_name():
    with pytest.raises(UsageError, match="no backend 'cublas'"), kernels.using(backend="cublas"):
        pass
    x, weight = torch.ones(4, 16), torch.ones(8, 16)
    with kernels.using(backend="gluon"), pytest.raises(KernelUnavailable, match="'gluon'"):
        kernels.gemm(x, weight)
    with kernels.using("auto", backend="triton"):
        assert torch.equal(kernels.gemm(x, weight), torch.full((4, 8), 16.0))
    assert choice.forced_backend() is None


def test_what_supports_says_of_a_choice(monkeypatch):
    x, weight = torch.ones(4, 16), torch.ones(8, 16)
    monkeypatch.setattr(gemm, "launch", None)  # nothing may be launched
    answer = kernels.supports(kernels.gemm, x, weight)
    assert answer
    assert answer.choice.backend == ("triton" if DEVICE == "cpu" else "torch")
    monkeypatch.setattr(gemm, "torch_runs_on", lambda device: True)
    answer = kernels.supports(kernels.gemm, x, weight, activation="silu", gated=True).choice
    assert (answer.backend, answer.candidates, answer.basis) == ("torch", ("torch", "triton"), "not measured")
    assert answer.features["columns"] == 4
    q = torch.ones(1, 2, 8, 16)
    assert kernels.supports(kernels.attention, q, q, q).choice.operation == "attention"
    assert kernels.supports(kernels.softmax, x).choice is None
    assert kernels.supports(kernels.gemm, x.double(), weight.double()).choice is None


# torch's backends, against the references


@pytest.fixture
def on_cpu(monkeypatch):
    """Backends of torch are candidates for tensors on the CPU too."""
    for module in (gemm, backends, norms):
        monkeypatch.setattr(module, "torch_runs_on", lambda device: True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation": "relu"},
        {"activation": "gelu_tanh"},
        {"activation": "silu", "gated": True},
        {"activation": "silu", "gated": True, "recompute": True},
    ],
)
@pytest.mark.parametrize("extra", ["", "bias", "residual", "bias, residual"])
def test_products_by_torch(on_cpu, options, extra, dtype):
    torch.manual_seed(0)
    columns = 12
    x, weight = torch.randn(3, 5, 16).to(dtype), torch.randn(columns, 16).to(dtype)
    tensors = {}
    if "bias" in extra:
        tensors["bias"] = torch.randn(columns).to(dtype)
    if "residual" in extra:
        tensors["residual"] = torch.randn(3, 5, columns // (2 if options.get("gated") else 1)).to(dtype)

    def run(function):
        return lambda x, weight, *rest: function(x, weight, **dict(zip(tensors, rest, strict=True)), **options)

    with kernels.using("require", backend="torch"):
        kernel, reference = run(kernels.gemm), run(kernels.gemm.reference)
        assert kernels.supports(kernels.gemm, x, weight, **tensors, **options).choice.basis == "forced"
        assert_kernel_is_exact(kernel, reference, [x, weight, *tensors.values()])


@pytest.mark.parametrize("block", ["tensor", "row"])
def test_fp8_products_by_torch(on_cpu, block):
    torch.manual_seed(0)
    x, scale_x = kernels.quantize(torch.randn(32, 64), block=block)
    weight, scale_weight = kernels.quantize(torch.randn(48, 64), block=block)
    scales = {"scale_x": scale_x, "scale_weight": scale_weight}
    with kernels.using("require", backend="torch"):
        result = kernels.gemm(x, weight, **scales)
    exact = kernels.gemm.reference(x, weight, **scales, out_dtype=torch.float32)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.float(), exact, atol=0.0, rtol=2**-7)


def test_fp8_products_that_torch_has_no_kernel_for(on_cpu, monkeypatch):
    monkeypatch.setattr(gemm, "_SCALES_BLOCKS", True)
    x, scale_x = kernels.quantize(torch.randn(32, 256), block="row")
    weight, scale_weight = kernels.quantize(torch.randn(128, 256), block="row")

    def candidates(x=x, weight=weight, scale_x=scale_x, scale_weight=scale_weight, **options):
        scales = {"scale_x": scale_x, "scale_weight": scale_weight}
        return kernels.supports(kernels.gemm, x, weight, **scales, **options).choice.candidates

    assert candidates() == ("torch", "triton")
    assert candidates(activation="relu") == ("triton",)
    assert candidates(out_dtype=torch.float32) == ("triton",)
    assert candidates(scale_weight=torch.tensor(1.0)) == ("triton",)  # one scale of a tensor, and one of rows
    assert candidates(x=x[:, :40], weight=weight[:, :40]) == ("triton",)
    blocks = {"scale_x": torch.ones(32, 2), "scale_weight": torch.ones(1, 2)}
    assert candidates(**blocks) == ("torch", "triton")
    portable = gemm.takes_sm90
    monkeypatch.setattr(gemm, "takes_sm90", lambda *arguments: True)
    assert candidates(**blocks) == ("torch", "gluon", "triton")  # which may copy the scales into its layout
    monkeypatch.setattr(gemm, "takes_sm90", portable)
    monkeypatch.setattr(gemm, "_SCALES_BLOCKS", False)
    assert candidates(**blocks) == ("triton",)


def rms_norm_backward(gradient, x, shape, rstd, weight, wanted):
    """`_fused_rms_norm_backward`, which torch has for GPUs only."""
    scaled, normal = gradient if weight is None else gradient * weight, x * rstd
    by_x = (scaled - normal * (scaled * normal).mean(-1, keepdim=True)) * rstd
    return by_x, (gradient * normal).sum((0, 1)) if wanted[1] else None


@pytest.fixture
def rms_norm_backward_on_cpu():
    implementations = torch.library.Library("aten", "IMPL")
    implementations.impl("_fused_rms_norm_backward", rms_norm_backward, "CPU")
    yield
    implementations._destroy()


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_norms_by_torch(on_cpu, rms_norm_backward_on_cpu, name, weighted):
    torch.manual_seed(0)
    kernel = getattr(kernels, name)
    inputs = [torch.randn(3, 5, 24)]
    if weighted:
        inputs += [torch.randn(24)] * (1 if name == "rms_norm" else 2)
    with kernels.using("require", backend="torch"):
        assert_kernel_is_exact(kernel, kernel.reference, inputs)


def test_norms_that_torch_has_no_kernel_for(on_cpu):
    x, weight = torch.randn(4, 8), torch.randn(8)
    for options in ({"offset": 1.0}, {"bias": weight}):
        assert kernels.supports(kernels.rms_norm, x, weight, **options).choice.candidates == ("triton",)
    assert kernels.supports(kernels.rms_norm, x, weight.half()).choice.candidates == ("triton",)
    assert kernels.supports(kernels.rms_norm, x.t(), weight[:4]).choice.candidates == ("triton",)
    assert kernels.supports(kernels.rms_norm, x, weight).choice.candidates == ("torch", "triton")


@pytest.mark.skipif(DEVICE != "cpu", reason="tensors of the CPU stand for those of a GPU")
@pytest.mark.parametrize("name", ["gemm", "gemm with a bias", "rms_norm", "layer_norm"])
def test_the_third_call_without_gradients_is_one_of_torch(on_cpu, monkeypatch, name):
    monkeypatch.setattr(ReplayCache, "enabled", True)
    monkeypatch.setattr(ReplayCache, "device", "cpu")
    x, weight, bias = torch.randn(6, 40), torch.randn(40, 40), torch.randn(40)
    call = {
        "gemm": lambda: kernels.gemm(x, weight),
        "gemm with a bias": lambda: kernels.gemm(x, weight, bias=bias),
        "rms_norm": lambda: kernels.rms_norm(x, bias, eps=1e-3),
        "layer_norm": lambda: kernels.layer_norm(x, weight[0], bias),
    }[name]
    with torch.no_grad():
        first, second, third = (call() for _ in range(3))
        assert python_calls(call) == ["call", "call", "_call_signature", "<lambda>"]
        torch.testing.assert_close(first, third)
        torch.testing.assert_close(second, third)
        with kernels.using(backend="triton"):
            torch.testing.assert_close(call(), third)
    x.requires_grad_()
    assert "_launch" in python_calls(call)  # and not torch's linear: a backward pass chooses for itself


class AttentionOfTorch:
    """Implementations of torch's attention operators on a CPU, from the reference: what a GPU's kernels exchange."""

    def __init__(self):
        self.calls = []

    def arguments(self, query, key, value, causal, scale):
        return query, key, value, *(None,) * 6, 0, 0, -1, 0 if causal else -1, True, scale, 0.0, 0.0

    def cudnn(self, query, key, value, bias, with_lse, dropout=0.0, causal=False, debug=False, *, scale=None):
        assert bias is None
        assert with_lse
        self.calls.append("cudnn")
        result, lse = attention_forward(*self.arguments(query, key, value, causal, scale))
        number = torch.empty((), dtype=torch.int64)
        return result, lse.unsqueeze(-1), None, None, query.shape[2], key.shape[2], number, number, None

    def flash(self, query, key, value, dropout=0.0, causal=False, debug=False, *, scale=None):
        self.calls.append("flash")
        result, lse = attention_forward(*self.arguments(query, key, value, causal, scale))
        number = torch.empty((), dtype=torch.int64)
        return result, lse, None, None, query.shape[2], key.shape[2], number, number, None

    def backward(self, gradient, query, key, value, result, lse, causal, scale):
        arguments = self.arguments(query, key, value, causal, scale)
        return attention_backward(gradient, None, result, lse, *arguments, True, True, False, False)[:3]

    def cudnn_backward(
        self, gradient, query, key, value, result, lse, seed, offset, bias, query_starts, key_starts, queries, keys,
        dropout, causal, *, scale=None,
    ):  # fmt: skip
        assert lse.shape == (*query.shape[:3], 1)
        assert (queries, keys, dropout) == (query.shape[2], key.shape[2], 0.0)
        self.calls.append("cudnn backward")
        return self.backward(gradient, query, key, value, result, lse.squeeze(-1), causal, scale)

    def flash_backward(
        self, gradient, query, key, value, result, lse, query_starts, key_starts, queries, keys, dropout, causal, seed,
        offset, *, scale=None,
    ):  # fmt: skip
        assert lse.shape == query.shape[:3]
        assert (queries, keys, dropout) == (query.shape[2], key.shape[2], 0.0)
        self.calls.append("flash backward")
        return self.backward(gradient, query, key, value, result, lse, causal, scale)

    def packed(self, query, key, value, query_starts, key_starts, longest_query, longest_key, causal, scale):
        """The arguments of the reference, after checks of what FlashAttention takes."""
        assert query_starts.dtype == key_starts.dtype == torch.int32
        assert query.dim() == key.dim() == value.dim() == 3
        assert query.stride(2) == 1
        inputs = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        starts = (query_starts, key_starts, longest_query, longest_key)
        return *inputs, *(None,) * 4, *starts, -1, 0 if causal else -1, True, scale, 0.0, 0.0

    def packed_flash(
        self, query, key, value, query_starts, key_starts, longest_query, longest_key, dropout, causal, debug, *,
        scale=None, **options,
    ):  # fmt: skip
        self.calls.append("packed flash")
        arguments = self.packed(query, key, value, query_starts, key_starts, longest_query, longest_key, causal, scale)
        result, lse = attention_forward(*arguments)
        result, lse = result.squeeze(0).transpose(0, 1), lse.squeeze(0)
        lse[lse == float("-inf")] = float("inf")  # of queries that see no key
        end = int(query_starts[-1])
        result[end:], lse[:, end:] = float("nan"), float("nan")  # uninitialized
        number = torch.empty((), dtype=torch.uint64)
        return result.contiguous(), lse.contiguous(), number, number, torch.empty(0)

    def packed_flash_backward(
        self, gradient, query, key, value, result, lse, query_starts, key_starts, longest_query, longest_key, dropout,
        causal, state, unused, *, scale=None, **options,
    ):  # fmt: skip
        self.calls.append("packed flash backward")
        assert lse.shape == (query.shape[1], query.shape[0])
        assert not bool((lse[:, : int(query_starts[-1])] == float("-inf")).any())
        arguments = self.packed(query, key, value, query_starts, key_starts, longest_query, longest_key, causal, scale)
        gradient, result = (x.transpose(0, 1).unsqueeze(0) for x in (gradient, result))
        lse = lse.masked_fill(lse == float("inf"), float("-inf")).unsqueeze(0)
        gradients = attention_backward(gradient, None, result, lse, *arguments, True, True, False, False)[:3]
        packed = [x.squeeze(0).transpose(0, 1).contiguous() for x in gradients]
        for x, starts in zip(packed, (query_starts, key_starts, key_starts), strict=True):
            x[int(starts[-1]) :] = float("nan")
        return tuple(packed)


@pytest.fixture
def attention_of_torch(on_cpu, monkeypatch):
    """What was called of it; None on a GPU, where it is torch's. The dispatcher holds arguments against schemas."""
    if DEVICE != "cpu":
        yield None
        return
    made = AttentionOfTorch()
    implementations = torch.library.Library("aten", "IMPL")
    for name in ("cudnn", "flash"):
        operator = f"_scaled_dot_product_{name}_attention"
        implementations.impl(operator, getattr(made, name), "CPU")
        implementations.impl(f"{operator}_backward", getattr(made, f"{name}_backward"), "CPU")
        monkeypatch.setattr(torch.backends.cuda, f"can_use_{name}_attention", lambda params, debug=False: True)
    implementations.impl("_flash_attention_forward", made.packed_flash, "CPU")
    implementations.impl("_flash_attention_backward", made.packed_flash_backward, "CPU")
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(backends, "_HAS_PACKED_FLASH", True)
    yield made.calls
    implementations._destroy()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["cudnn", "flash"])
def test_attention_by_torch(attention_of_torch, name, causal):
    torch.manual_seed(0)
    query = torch.randn(2, 9, 4, 8).half().transpose(1, 2)  # tokens before heads
    key, value = (torch.randn(2, 2, 9, 8).half() for _ in "kv")

    def run(function):
        return lambda *tensors: function(*tensors, causal=causal)

    with kernels.using("require", backend=name):
        assert_kernel_is_exact(run(kernels.attention), run(kernels.attention.reference), [query, key, value])
    assert attention_of_torch in (None, [name, f"{name} backward"])


def test_passes_of_attention_may_have_different_backends(attention_of_torch):
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, 9, 8).half().requires_grad_() for _ in "qkv"]
    with kernels.using(backend="cudnn"):
        result = kernels.attention(*tensors)
    with kernels.using(backend="triton"):
        own = torch.autograd.grad(result.float().square().sum(), tensors)
    with kernels.using(backend="triton"):
        result = kernels.attention(*tensors)
    with kernels.using(backend="flash"):
        of_torch = torch.autograd.grad(result.float().square().sum(), tensors)
    assert attention_of_torch in (None, ["cudnn", "flash backward"])
    for one, other in zip(own, of_torch, strict=True):
        torch.testing.assert_close(one, other, atol=4e-3, rtol=4e-3)


def test_what_attention_of_torch_takes(attention_of_torch):
    q = torch.empty(2, 4, 9, 8, dtype=torch.float16)

    def candidates(*tensors, **options):
        return kernels.supports(kernels.attention, *(tensors or (q, q, q)), **options).choice.candidates

    assert candidates() == ("cudnn", "flash", "triton")
    assert candidates(causal=True) == ("cudnn", "flash", "triton")
    assert candidates(q, q[:, :2], q[:, :2]) == ("cudnn", "flash", "triton")
    assert candidates(q[:, :, :5], q, q) == ("cudnn", "flash", "triton")
    for options in (
        {"window": (3, 0)}, {"softcap": 5.0}, {"bias": torch.zeros(9, 9)}, {"sinks": torch.zeros(4)}, {"dropout": 0.1},
    ):  # fmt: skip
        assert candidates(**options) == ("triton",)
    assert candidates(q[:, :, :5], q, q, causal=True) == ("triton",)  # torch aligns such masks otherwise
    assert candidates(q.float(), q.float(), q.float()) == ("triton",)
    assert candidates(q[..., :4], q[..., :4], q[..., :4]) == ("triton",)
    assert candidates(q[:, :1].expand(-1, 4, -1, -1), q, q) == ("triton",)
    rows = torch.empty(2, 4, 9, 16, dtype=torch.float16)
    assert candidates(rows[..., :8], rows[..., :8], rows[..., 8:]) == ("cudnn", "flash", "triton")
    assert candidates(q, q, rows[..., 4:12]) == ("triton",)  # begins at 8 bytes
    assert candidates(q, torch.empty(2, 4, 9, 11, dtype=torch.float16)[..., :8], q) == ("triton",)  # rows of 22 bytes


@pytest.mark.gpu
@pytest.mark.parametrize("between", [0, 1, 3, 8])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("tokens", "dim"), [(64, 64), (100, 96), (1024, 128)])
def test_attention_of_rows_that_are_not_aligned(tokens, dim, causal, between):
    """Operands, and gradients of the result, with elements between rows."""
    torch.manual_seed(0)
    rows = [torch.randn(2, 4, tokens, dim + between).to(torch.bfloat16)[..., :dim] for _ in range(4)]
    *tensors, upstream = rows
    tensors = [x.requires_grad_() for x in tensors]
    result = kernels.attention(*tensors, causal=causal)
    gradients = torch.autograd.grad(result, tensors, upstream)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    exact = functional.scaled_dot_product_attention(*wide, is_causal=causal)
    exact_gradients = torch.autograd.grad(exact, wide, upstream.double())
    for one, other in zip((result, *gradients), (exact, *exact_gradients), strict=True):
        torch.testing.assert_close(one.double(), other, atol=0.02, rtol=0.02)


def packed_tensors(query_lengths, key_lengths=None, dim=8, after=0, dtype=torch.float16):
    """Query, key and value of heads (4, 2, 2), and the places of sequences: one tensor of starts if lengths agree."""
    starts = torch.tensor([0, *query_lengths]).cumsum(0).to(torch.int32)
    key_starts = starts if key_lengths is None else torch.tensor([0, *key_lengths]).cumsum(0).to(torch.int32)
    queries, keys = int(starts[-1]) + after, int(key_starts[-1]) + after
    tensors = [torch.randn(tokens, heads, dim).to(dtype) for tokens, heads in ((queries, 4), (keys, 2), (keys, 2))]
    longest = max(query_lengths), max(key_lengths or query_lengths)
    return tensors, (starts, key_starts, *longest)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key_lengths", [None, [9, 3, 33, 0, 5]])
def test_packed_attention_by_torch(attention_of_torch, key_lengths, causal):
    torch.manual_seed(0)
    tensors, places = packed_tensors([7, 0, 40, 1, 5], key_lengths, after=4)

    def run(function):
        return lambda *tensors: function(*tensors, *places, causal=causal)

    call, reference = run(kernels.attention_packed), run(kernels.attention_packed.reference)
    with kernels.using("require", backend="flash"):
        assert_kernel_is_exact(call, reference, tensors)
        result, lse = kernels.attention_packed(*tensors, *places, causal=causal, return_lse=True)
    _, exact_lse = kernels.attention_packed.reference(*tensors, *places, causal=causal, return_lse=True)
    torch.testing.assert_close(lse, exact_lse, atol=1e-3, rtol=1e-3)
    assert result.is_contiguous()
    assert not bool(result[places[0][-1] :].any())
    assert attention_of_torch in (None, ["packed flash", "packed flash backward", "packed flash"])


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dim", [64, 96, 128, 192])
@pytest.mark.parametrize("backend", ["flash", "triton"])
def test_packed_attention_at_full_size(backend, dim, causal):
    torch.manual_seed(0)
    tensors, places = packed_tensors([301, 0, 1, 1000, 17, 128], dim=dim, after=37, dtype=torch.bfloat16)

    def run(function):
        return lambda *tensors: function(*tensors, *places, causal=causal)

    with kernels.using("require", backend=backend):
        assert_kernel_is_exact(run(kernels.attention_packed), run(kernels.attention_packed.reference), tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flash", "triton"])
def test_packed_sequences_of_a_cuda_graph_may_change(name):
    """Neither pass reads the starts on the host, or waits for the device."""
    tensors, (starts, *_) = packed_tensors([100, 28], dim=64, dtype=torch.bfloat16)
    tensors = [x.requires_grad_() for x in tensors]

    def both():
        result = kernels.attention_packed(*tensors, starts, starts, 128, 128, causal=True)
        gradients = torch.autograd.grad(result, tensors, torch.ones_like(result))
        return result.detach(), *gradients  # or the graph of autograd stays, with nodes of the stream that captured

    with kernels.using(backend=name):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            both()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = both()
        for lengths in ((1, 127), (64, 64), (90, 0)):  # the last ones leave tokens without a sequence
            starts.copy_(torch.tensor([0, *lengths]).cumsum(0))
            graph.replay()
            for one, other in zip(captured, both(), strict=True):
                torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("key_lengths", [None, [9, 3, 33, 0, 5]])
def test_passes_of_packed_attention_may_have_different_backends(attention_of_torch, key_lengths):
    torch.manual_seed(0)
    tensors, places = packed_tensors([7, 0, 40, 1, 5], key_lengths, after=3)
    tensors = [x.requires_grad_() for x in tensors]

    def gradients(forward, backward):
        with kernels.using(backend=forward):
            result = kernels.attention_packed(*tensors, *places, causal=True)
        with kernels.using(backend=backward):
            return torch.autograd.grad(result.float().square().sum(), tensors)

    for one, other in zip(gradients("flash", "triton"), gradients("triton", "flash"), strict=True):
        torch.testing.assert_close(one, other, atol=4e-3, rtol=4e-3)
    assert attention_of_torch in (None, ["packed flash", "packed flash backward"])


def test_what_packed_attention_of_torch_takes(attention_of_torch):
    tensors, places = packed_tensors([7, 40])
    same = [7, 40]

    def candidates(tensors=tensors, places=places, **options):
        return kernels.supports(kernels.attention_packed, *tensors, *places, **options).choice.candidates

    assert candidates() == ("flash", "triton")
    assert candidates(causal=True, alignment="top left") == ("flash", "triton")
    with_keys = packed_tensors(same, [8, 41])
    assert candidates(*with_keys, causal=True) == ("flash", "triton")
    assert candidates(*with_keys, alignment="top left") == ("flash", "triton")
    assert candidates(*with_keys, causal=True, alignment="top left") == ("triton",)
    for options in (
        {"window": (3, 0)}, {"softcap": 5.0}, {"slopes": torch.zeros(4)}, {"sinks": torch.zeros(4)}, {"dropout": 0.1},
    ):  # fmt: skip
        assert candidates(**options) == ("triton",)
    query, key, value = tensors
    assert candidates([query, key, value[..., :4].contiguous()]) == ("triton",)
    assert candidates([x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors]) == ("triton",)
    assert candidates(*packed_tensors(same, dim=12)) == ("triton",)
    assert candidates(*packed_tensors(same, dtype=torch.float32)) == ("triton",)
    assert candidates(*packed_tensors([1, 1])) == ("triton",)  # a sequence of one query has other statistics
    together = torch.randn(47, 8, 8).half()
    assert candidates(together.split((4, 2, 2), dim=1)) == ("flash", "triton")
    torch.use_deterministic_algorithms(True)
    try:
        assert candidates() == ("flash", "triton")
        assert backends.candidates(problem_of(tensors, places), backward=True) == ["triton"]
    finally:
        torch.use_deterministic_algorithms(False)


def problem_of(tensors, places):
    inputs = (x.transpose(0, 1).unsqueeze(0) for x in tensors)
    return backends.AttentionProblem(*inputs, *(None,) * 4, *places, -1, -1, True, 0.25, 0.0, 0.0)


def test_features_of_packed_sequences(attention_of_torch):
    problem = problem_of(*packed_tensors([300, 40, 100]))
    forward, backward = (
        dict(zip(names, backends.features(problem, backward=names is backends.BACKWARD_FEATURES), strict=True))
        for names in (backends.FEATURES, backends.BACKWARD_FEATURES)
    )
    assert forward["heads"] == 4 * 1  # 440 queries, 300 in the longest sequence
    assert backward["key_tiles"] == round(100 * 2 * 3 * 2 / 132)  # 2 heads and 3 sequences, of 2 tiles on average
    assert (forward["queries"], forward["packed"], forward["wide"]) == (300, True, False)


def test_deterministic_algorithms_have_no_backward_pass_of_torch(attention_of_torch):
    tensors = [torch.randn(1, 2, 9, 8).half().requires_grad_() for _ in "qkv"]
    torch.use_deterministic_algorithms(True)
    try:
        kernels.attention(*tensors).float().sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert attention_of_torch in (None, ["cudnn"])
    kernels.attention(*tensors).float().sum().backward()
    assert attention_of_torch in (None, ["cudnn", "cudnn", "cudnn backward"])


def test_a_gradient_of_the_log_sum_exp_is_left_to_the_own_kernels(attention_of_torch):
    tensors = [torch.randn(1, 2, 9, 8).half().requires_grad_() for _ in "qkv"]
    result, lse = kernels.attention(*tensors, return_lse=True)
    (result.float().sum() + lse.sum()).backward()
    assert attention_of_torch in (None, ["cudnn"])


def test_compiled_code_gets_tokens_before_heads(attention_of_torch):
    query = torch.randn(1, 2, 9, 8).half()
    arguments = (query, query, query, *(None,) * 6, 0, 0, -1, -1, True, 0.25, 0.0, 0.0)
    assert backends.forward(*arguments)[0].is_contiguous()  # as the query
    assert torch.ops.nearpeak.attention(*arguments)[0].transpose(1, 2).is_contiguous()
    assert attention_of_torch in (None, ["cudnn", "cudnn"])


# Hopper


@pytest.mark.parametrize(
    ("name", "vendor", "capability", "expected"),
    [
        ("NVIDIA H200", "nvidia", (9, 0), True),
        ("NVIDIA H100 80GB HBM3", "nvidia", (9, 0), True),
        ("NVIDIA GH200 480GB", "nvidia", (9, 0), True),
        ("NVIDIA H20", "nvidia", (9, 0), True),
        ("AMD Instinct MI250X", "amd", (9, 0), False),
        ("AMD Instinct MI250X", "nvidia", (9, 0), False),
        ("NVIDIA A100-SXM4-80GB", "nvidia", (8, 0), False),
        ("NVIDIA B200", "nvidia", (10, 0), False),
    ],
)
def test_hopper_is_known_by_vendor_and_name(monkeypatch, name, vendor, capability, expected):
    monkeypatch.setattr(capability_of, "_VENDOR", vendor)
    monkeypatch.setattr(capability_of, "cuda_capability", capability_of.cuda_capability.__wrapped__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
    assert capability_of.is_hopper.__wrapped__(0) is expected


# the fit, and its table


def made_cell(rows, **seconds):
    values = (rows, 1024, 100, 2, 1)
    return Cell(operation="rms_norm", features=dict(zip(norms.FEATURES, values, strict=True)), seconds=seconds)


def test_a_cell_of_the_table():
    assert table_cell(made_cell(64, torch=2.0, triton=3.0)) == {
        "features": {"rows": 64, "columns": 1024, "padding": 100, "itemsize": 2, "weighted": 1},
        "relative": {"torch": 1.0, "triton": 1.5},
    }


def test_cells_decide_for_one_that_was_left_out():
    cells = [made_cell(rows, torch=1.0, triton=1.4) for rows in (64, 128, 256)]
    cells += [made_cell(rows, torch=3.0, triton=2.0) for rows in (1024, 4096, 16384)]
    assert chosen_losses([made_cell(100, torch=1.0, triton=1.4)], cells) == [0.0]
    assert chosen_losses([made_cell(8000, torch=3.0, triton=2.0)], cells) == [0.0]
    assert chosen_losses([made_cell(8000, torch=2.0, triton=4.0)], cells) == [pytest.approx(0.6931, abs=1e-4)]


def test_how_good_choices_are_without_a_cell_and_without_its_seed():
    few = [replace(made_cell(rows, torch=1.0 * rows, triton=1.4 * rows), seed=1) for rows in (16, 32)]
    many = [replace(made_cell(rows, torch=3.0 * rows, triton=2.0 * rows), seed=2) for rows in (8192, 16384)]
    in_table, without_cell, without_seed = describe([*few, *many]).splitlines()
    assert "in the table     4 cells:  0.00% slower,   0% by more than 3 %, worst 1.00" in in_table
    assert "0.00% slower" in without_cell
    assert "50% by more than 3 %, worst 1.50" in without_seed  # far from all others, torch's runs


def test_the_fit_reads_random_cells(tmp_path):
    attention = {
        "operation": "attention", "pass": "backward", "dtype": "bfloat16", "backend": "gluon", "seed": 4,
        "shape": {
            "batch": 2, "heads": 32, "key_heads": 8, "queries": 100, "keys": 100, "dim": 128, "value_dim": 128,
            "causal": True, "window": None, "layout": "tokens first",
        },
        "seconds": {"nearpeak": 3.0, "nearpeak/triton": 4.0, "cudnn": 2.0, "flash": 5.0, "efficient": 1.0},
    }  # fmt: skip
    product = {
        "operation": "gemm swiglu", "pass": "forward", "dtype": "float16", "backend": "torch", "seed": 4,
        "shape": {"rows": 18, "features": 2176, "results": 12488},
        "seconds": {"nearpeak": 1.0, "nearpeak/gluon": 2.0, "eager": 3.0},
    }  # fmt: skip
    path = tmp_path / "random.json"
    gradient = {**product, "operation": "gemm backward", "pass": "backward", "backend": "gluon+torch"}
    gradient["seconds"] = {"nearpeak": 1.5, "nearpeak/gluon": 2.0, "cublas": 1.0}
    path.write_text(json.dumps({"cells": [attention, product, {**product, "operation": "rotary"}, gradient]}))
    first, second, by_x, by_weight = read_cells(path)
    assert (first.operation, first.seed) == ("attention_backward", 4)
    assert first.features["key_tiles"] == 12  # percent: 16 tiles on 132 multiprocessors
    assert first.features["group"] == 4
    assert first.features["tokens_first"] == 1
    assert first.seconds == {"triton": 4.0, "gluon": 3.0, "cudnn": 2.0, "flash": 5.0}
    assert second.features["gated"] == 1
    assert second.features["columns"] == 12488
    assert second.seconds == {"gluon": 2.0, "torch": 1.0}
    assert [by_x.features[name] for name in ("rows", "columns", "depth")] == [18, 2176, 12488]
    assert [by_weight.features[name] for name in ("rows", "columns", "depth")] == [12488, 2176, 18]
    assert (by_x.features["a_by_columns"], by_weight.features["a_by_columns"]) == (0, 1)
    assert by_x.seconds == by_weight.seconds == {"gluon": 2.0, "torch": 1.0}


def test_cells_of_attention_variants_have_the_time_of_their_fastest_configuration(tmp_path):
    row = {
        "backward": True, "dim": 192, "value_dim": 128, "causal": True, "batch": 2, "heads": 32, "key_heads": 8,
        "tokens": 8192, "window": None,
        "seconds": {"hopper, 1 heads together": 5.0, "hopper, 16 heads together": 4.0, "cudnn": 3.0, "portable": 9.0},
    }  # fmt: skip
    path = tmp_path / "variants.json"
    path.write_text(json.dumps([row]))
    (cell,) = read_cells(path)
    assert cell.operation == "attention_backward"
    assert cell.seconds == {"gluon": 4.0, "cudnn": 3.0, "triton": 9.0}
    assert [cell.features[name] for name in ("group", "tokens_first", "dim", "wide")] == [4, 1, 192, 1]


def test_the_table_has_the_cells_of_the_results_that_it_names():
    table = json.loads(TABLE.read_text())
    cells = [cell for name in table["results"] for cell in read_cells(RESULTS / name)]
    assert {cell.operation for cell in cells} == set(table["operations"])
    for name, one in table["operations"].items():
        assert [table_cell(cell) for cell in cells if cell.operation == name] == one["cells"]


def test_the_features_of_the_table_are_those_of_the_operations():
    for name, one in json.loads(TABLE.read_text())["operations"].items():
        chooser = next(chooser for chooser in choice._choosers if chooser.operation == name)
        assert {feature for cell in one["cells"] for feature in cell["features"]} <= set(chooser.features)


def test_each_operation_reads_its_own_cells_of_the_table():
    for chooser in choice._choosers:
        cells = choice._table(90).get(chooser.operation, {"cells": []})["cells"]
        assert len(chooser.measured(90)) == len(cells) > 0
        assert chooser.measured(42) == []
    alone = Chooser("rms_norm", norms.FEATURES)  # whatever else has been imported
    choice._choosers.remove(alone)
    assert alone.measured(90)
