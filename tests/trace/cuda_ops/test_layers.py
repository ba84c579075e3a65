import threading

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from nearpeak.errors import UnknownMachine
from nearpeak.machines.catalogue import find, machines
from nearpeak.machines.machine import Machine
from nearpeak.profiling.estimate import estimate
from nearpeak.trace.cuda_ops.lower import emulate_target
from nearpeak.trace.cuda_ops.registry import LOWERINGS, current_target, lowers, overload_of
from nearpeak.trace.cuda_ops.target import Target, target_of
from nearpeak.trace.fake import fake
from nearpeak.trace.trace import trace

H200 = Target(kind="gpu", capability=(9, 0), cudnn=91900, torch=(2, 11))
MI300X = Target(kind="gpu", vendor="amd", torch=(2, 11))
CPU = Target(kind="cpu")


def names(function, *args, phase=None, target=H200, **options):
    recorded = trace(function, *args, target=target, **options)
    return [
        op.name.removeprefix("aten.").removesuffix(".default")
        for op in recorded.ops
        if (phase is None or op.phase == phase) and "detach" not in op.name
    ]


def assert_same_results(function, *args, **options):
    """Results have the shape, strides and dtype that torch gives on the CPU."""
    found = trace(function, *args, target=H200, **options).ops[-1].outputs[0]
    expected = function(*args)
    assert (found.shape, found.strides, f"torch.{found.dtype}") == (
        tuple(expected.shape),
        expected.stride(),
        str(expected.dtype),
    )


def test_dropout_is_one_operator():
    def function(x):
        return functional.dropout(x, 0.1)

    x = torch.randn(4, 8, requires_grad=True)
    assert names(function, x, grad=True) == ["native_dropout", "native_dropout_backward"]
    assert (
        names(function, x, grad=True, target=CPU)
        == ["empty_like", "bernoulli_.float", "div_.Scalar"] + ["mul.Tensor"] * 2
    )
    assert names(lambda x: functional.dropout(x, 0.1, training=False), x) == []
    assert names(lambda x: functional.dropout(x, 1.0), x) == ["zeros", "mul.Tensor"]
    assert_same_results(function, x)


@pytest.mark.parametrize("operator", ["softmax", "log_softmax"])
def test_softmax_reads_float16_and_writes_float32(operator):
    def function(x):
        return getattr(functional, operator)(x, -1, dtype=torch.float32)

    x = torch.randn(4, 8, dtype=torch.float16, requires_grad=True)
    assert names(function, x, grad=True) == [f"_{operator}", f"_{operator}_backward_data"]
    assert_same_results(function, x)
    assert names(function, x.to(torch.bfloat16).detach()) == ["_to_copy", f"_{operator}"]
    assert names(function, x, target=CPU) == ["_to_copy", f"_{operator}"]


def test_rms_norm_is_one_operator():
    norm, x = nn.RMSNorm(8), torch.randn(4, 8, requires_grad=True)
    assert names(norm, x, grad=True) == ["_fused_rms_norm", "_fused_rms_norm_backward"]
    assert names(norm, x, grad=False) == ["_fused_rms_norm"]
    assert "rsqrt" in names(norm, x, target=CPU)
    recorded = trace(norm, x, grad=True, target=H200)
    backward = next(op for op in recorded.ops if op.name == "aten._fused_rms_norm_backward.default")
    assert [output.shape for output in backward.outputs] == [(4, 8), (8,)]
    assert backward.phase == "backward"
    assert recorded.results >= {output.storage for output in backward.outputs}


def test_rms_norm_without_weight_has_one_gradient():
    assert names(lambda x: functional.rms_norm(x, (8,)), torch.randn(4, 8, requires_grad=True), grad=True) == [
        "_fused_rms_norm",
        "_fused_rms_norm_backward",
    ]


def test_rms_norm_under_function_transforms():
    def function(x, weight):
        return torch.func.grad(lambda weight: functional.rms_norm(x, (8,), weight).sum())(weight)

    assert names(function, torch.randn(4, 8), torch.ones(8))


def test_checkpointing_runs_the_same_operators_again():
    block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.RMSNorm(8))

    def function(x):
        checkpoint(block, x, use_reentrant=False).sum().backward()

    recorded = trace(function, torch.randn(4, 8, requires_grad=True), target=H200)
    for operator in ("native_dropout", "_fused_rms_norm"):
        phases = [op.phase for op in recorded.ops if op.name == f"aten.{operator}.default"]
        assert phases == ["forward", "backward"]


def test_batch_norm_is_of_cudnn_where_it_can():
    norm, x = nn.BatchNorm2d(8), torch.randn(2, 8, 4, 4, requires_grad=True)
    assert names(norm, x, grad=True) == ["add_.Tensor", "cudnn_batch_norm", "cudnn_batch_norm_backward"]
    assert names(norm.eval(), x, grad=True) == ["cudnn_batch_norm", "native_batch_norm_backward"]
    assert_same_results(norm, x)
    assert "cudnn_batch_norm" not in names(norm.to(torch.bfloat16), x.detach().to(torch.bfloat16))
    flat = nn.BatchNorm1d(8).eval()
    assert "cudnn_batch_norm" not in names(flat, torch.randn(4, 8))
    assert "miopen_batch_norm" in names(flat, torch.randn(4, 8, 2), target=MI300X)
    with torch.backends.cudnn.flags(enabled=False):
        assert "cudnn_batch_norm" not in names(nn.BatchNorm2d(8), x)


def test_instance_norm_goes_by_way_of_batch_norm():
    x = torch.randn(2, 8, 4, 4)
    assert "cudnn_batch_norm" in names(nn.InstanceNorm2d(8, affine=True), x)


def test_grid_sampler_is_of_cudnn_where_it_can():
    def function(x, grid, aligned=True):
        return functional.grid_sample(x, grid, align_corners=aligned)

    x, grid = torch.randn(2, 3, 8, 8, requires_grad=True), torch.rand(2, 5, 6, 2)
    assert names(function, x, grid, grad=True) == ["cudnn_grid_sampler", "cudnn_grid_sampler_backward"]
    assert_same_results(function, x, grid)
    assert names(function, x, grid, False) == ["grid_sampler_2d"]


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_one_operator(layer):
    x = torch.randn(5, 4, 8)
    module = layer(8, 16, 2, bidirectional=True)
    found = names(module, x, grad=True)
    assert found.count("_cudnn_rnn") == found.count("_cudnn_rnn_backward") == 1
    recorded = trace(module, x, grad=True, target=H200)
    output = next(op for op in recorded.ops if op.name == "aten._cudnn_rnn.default").outputs[0]
    assert output.shape == tuple(module(x)[0].shape)
    backward = next(op for op in recorded.ops if op.name == "aten._cudnn_rnn_backward.default")
    shapes = [tuple(parameter.shape) for parameter in module.parameters()]
    assert [output.shape for output in backward.outputs[-len(shapes) :]] == shapes


@pytest.mark.parametrize(("cell", "operator"), [(nn.LSTMCell, "lstm"), (nn.GRUCell, "gru")])
def test_recurrent_cells_fuse_what_is_pointwise(cell, operator):
    found = names(cell(8, 16), torch.randn(4, 8), torch.randn(4, 16) if operator == "gru" else None, grad=True)
    assert f"_thnn_fused_{operator}_cell" in found
    assert any(name.startswith(f"_thnn_fused_{operator}_cell_backward") for name in found)
    assert "sigmoid" not in found


def test_quantized_and_grouped_products_keep_their_names():
    eight = torch.zeros(32, 32, dtype=torch.float8_e4m3fn)
    scale = torch.ones(())
    assert names(lambda: torch._scaled_mm(eight, eight.t(), scale, scale, out_dtype=torch.bfloat16)) == [
        "t",
        "_scaled_mm",
    ]
    assert names(lambda: torch._int_mm(eight.to(torch.int8), eight.to(torch.int8)))[-1] == "_int_mm"
    tokens, experts = torch.zeros(64, 32, dtype=torch.bfloat16), torch.zeros(4, 32, 48, dtype=torch.bfloat16)
    offsets = torch.zeros(4, dtype=torch.int32)
    assert names(lambda: torch._grouped_mm(tokens, experts, offsets)) == ["_grouped_mm"]


@pytest.mark.parametrize("target", [H200, CPU, None])
def test_encoder_layers_are_one_operator_in_evaluation(target):
    layer, x = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval(), torch.zeros(2, 4, 16)
    assert names(layer, x, grad=False, target=target) == ["_transformer_encoder_layer_fwd"]
    recorded = trace(layer, x, grad=False, target=target)
    assert recorded.ops[0].outputs[0].shape == tuple(layer(x).shape)
    assert "addmm" in names(layer, x, target=target)  # with gradients the parts run
    assert torch.overrides.has_torch_function.__module__ != "nearpeak.trace.patches.module_calls"


@pytest.mark.parametrize("options", [{}, {"need_weights": False}, {"average_attn_weights": False}])
def test_attention_layers_are_one_operator_in_evaluation(options):
    layer, x = nn.MultiheadAttention(16, 2, batch_first=True).eval(), torch.zeros(2, 4, 16)

    def function(x):
        with torch.no_grad():
            return layer(x, x, x, **options)

    recorded = trace(function, x, target=H200)
    (op,) = recorded.ops
    assert op.name == "aten._native_multi_head_attention.default"
    expected = [tuple(tensor.shape) for tensor in function(x) if tensor is not None]
    assert [output.shape for output in op.outputs] == expected


def test_an_encoder_with_padding_keeps_it():
    with fake():
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 2).eval()
        x, padding = torch.zeros(2, 4, 16), torch.zeros(2, 4, dtype=torch.bool)
    found = names(lambda: model(x, src_key_padding_mask=padding), grad=False)
    assert found.count("_transformer_encoder_layer_fwd") == 2


def test_inference_mode_is_lowered_too():
    def function(x, norm):
        with torch.inference_mode():
            y = norm(functional.scaled_dot_product_attention(x, x, x))
            return functional.dropout(y, 0.5)

    x = torch.zeros(1, 2, 16, 64, dtype=torch.bfloat16)
    assert names(function, x, nn.RMSNorm(64, dtype=torch.bfloat16)) == [
        "_scaled_dot_product_cudnn_attention",
        "_fused_rms_norm",
        "native_dropout",
    ]


def real_ops():
    """What torch does to real tensors on the CPU."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 16, 8, requires_grad=True)
    attention = functional.scaled_dot_product_attention(x, x, x)
    dropped = functional.dropout(x, 0.5)
    norm = functional.rms_norm(x, (8,))
    with torch.inference_mode():
        whole = functional.scaled_dot_product_attention(x, x, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = x @ x.transpose(-1, -2)
        spectrum = torch.fft.rfft(product)
    kinds = [type(tensor.grad_fn).__name__ for tensor in (attention, dropped, norm)]
    return kinds, [tensor.detach() for tensor in (attention, dropped, norm, whole, product, spectrum)]


def assert_nothing_is_registered(before):
    kinds, values = real_ops()
    assert kinds == before[0]
    for value, expected in zip(values, before[1], strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=0)
    assert current_target() is None


def compositions():
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return {name: overload_of(name).py_kernels.get(key) for name in LOWERINGS if overload_of(name) is not None}


def test_nothing_is_left_after_a_trace_or_an_error():
    before, composed = real_ops(), compositions()

    def failing(x):
        functional.dropout(x, 0.5)
        raise ValueError("from the user's code")

    trace(lambda x: functional.dropout(x, 0.5), torch.randn(4), target=H200)
    assert_nothing_is_registered(before)
    with pytest.raises(ValueError, match="user's code"):
        trace(failing, torch.randn(4), target=H200)
    assert_nothing_is_registered(before)
    assert compositions() == composed


def test_traces_can_be_nested():
    def function(x):
        inner = names(lambda y: functional.dropout(y, 0.5), torch.zeros(4))
        assert inner == ["native_dropout"]
        return functional.dropout(x, 0.5)

    before = real_ops()
    assert "native_dropout" in names(function, torch.zeros(4))
    assert_nothing_is_registered(before)


def test_other_threads_are_left_alone():
    before, errors = real_ops(), []

    def elsewhere():
        try:
            assert_nothing_is_registered(before)
        except BaseException as error:
            errors.append(error)

    with emulate_target(H200):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert not errors


def test_overlapping_traces_of_two_threads_restore_what_was():
    before = real_ops()
    first_entered, second_entered, first_left = threading.Event(), threading.Event(), threading.Event()

    def first():
        with fake(), emulate_target(H200):
            first_entered.set()
            second_entered.wait(10)
        first_left.set()

    def second():
        first_entered.wait(10)
        with fake(), emulate_target(H200):
            second_entered.set()
            first_left.wait(10)

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_nothing_is_registered(before)
    assert torch.nn.Module._apply.__module__ == "torch.nn.modules.module"
    assert torch.amp.autocast.__init__.__module__ == "torch.amp.autocast_mode"


def test_an_operator_has_one_lowering():
    with pytest.raises(ValueError, match="two lowerings"):
        lowers("dropout")(lambda target: None)


@pytest.mark.parametrize(
    ("machine", "capability"),
    [
        ("h200-sxm", (9, 0)),
        ("a100-sxm-80gb", (8, 0)),
        ("a10", (8, 6)),
        ("l4", (8, 9)),
        ("b200", (10, 0)),
        ("t4", (7, 5)),
    ],
)
def test_targets_of_the_catalogue(machine, capability):
    target = target_of(find(machine))
    assert (target.kind, target.vendor, target.capability) == ("gpu", "nvidia", capability)
    assert target.cudnn >= 90000


def test_targets_of_other_machines():
    assert target_of(find("mi300x")).vendor == "amd"
    assert target_of(find("mi300x")).cudnn == 0
    facts = {"id": "x", "name": "X", "vendor": "nvidia", "processors": None, "memory_bytes": None}
    known_by_torch = Machine(kind="gpu", architecture="compute capability 12.1", **facts)
    assert target_of(known_by_torch).capability == (12, 1)
    assert target_of(Machine(kind="cpu", architecture="x86_64", **facts)).kind == "cpu"


def test_every_gpu_of_the_catalogue_is_a_target_and_only_nvidia_has_capabilities():
    for machine in machines():
        target = target_of(machine)
        assert (target.capability is not None) == (machine.vendor == "nvidia")
        assert target.hopper == (machine.vendor == "nvidia" and machine.architecture == "hopper")


@pytest.mark.parametrize(("vendor", "architecture"), [("nvidia", "rubin"), ("amd", "rdna4"), ("intel", "xe2")])
def test_an_unknown_architecture_is_an_error_and_no_hopper(vendor, architecture):
    machine = Machine(
        id="x", name="X", kind="gpu", vendor=vendor, architecture=architecture, processors=None, memory_bytes=None
    )
    with pytest.raises(UnknownMachine, match=architecture):
        target_of(machine)


def test_an_amd_gpu_known_by_its_driver_alone_is_a_target():
    machine = Machine(
        id="x", name="X", kind="gpu", vendor="amd", architecture="gfx90a", processors=None, memory_bytes=None
    )
    assert target_of(machine).capability is None


def test_an_estimate_is_for_its_machine():
    x = torch.zeros(1, 2, 16, 64, dtype=torch.float16, requires_grad=True)
    for machine, operator in (("h200-sxm", "cudnn_attention"), ("a100-sxm-80gb", "flash_attention")):
        found = estimate(lambda: functional.scaled_dot_product_attention(x, x, x), on=machine)
        expected = operator if target_of(find(machine)).torch >= (2, 11) else "flash_attention"
        assert f"aten._scaled_dot_product_{expected}.default" in [op.name for op in found.ops]
