import dataclasses

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from nearpeak.trace.cuda_ops.attention import AttentionCall, choose_backend
from nearpeak.trace.cuda_ops.target import Target
from nearpeak.trace.trace import trace

H200 = Target(kind="gpu", capability=(9, 0), cudnn=91900, torch=(2, 11))
A100 = dataclasses.replace(H200, capability=(8, 0))
L4 = dataclasses.replace(H200, capability=(8, 9))
T4 = dataclasses.replace(H200, capability=(7, 5))
B200 = dataclasses.replace(H200, capability=(10, 0))
MI300X = Target(kind="gpu", vendor="amd", torch=(2, 11))
OLDER = dataclasses.replace(H200, cudnn=91002, torch=(2, 10))
NEWER = dataclasses.replace(H200, cudnn=92300, torch=(2, 14))


def call(
    *, dtype=torch.bfloat16, heads=(4, 4, 4), tokens=(16, 16), widths=(64, 64), mask=None, gradient=True, **options
):
    shapes = [
        (2, heads[0], tokens[0], widths[0]),
        (2, heads[1], tokens[1], widths[0]),
        (2, heads[2], tokens[1], widths[1]),
    ]
    query, key, value = (torch.empty(shape, dtype=dtype, device="meta", requires_grad=gradient) for shape in shapes)
    options = {"dropout": 0.0, "causal": False, "grouped": False, **options}
    return AttentionCall(query=query, key=key, value=value, mask=mask, **options)


def mask_of(*shape, dtype=torch.bool, **options):
    return torch.empty(shape, dtype=dtype, device="meta", **options)


@pytest.mark.parametrize(
    ("facts", "target", "backend"),
    [
        ({}, H200, "cudnn"),
        ({}, B200, "cudnn"),
        ({}, OLDER, "flash"),
        ({}, A100, "flash"),
        ({}, L4, "flash"),
        ({}, MI300X, "flash"),
        ({"dtype": torch.float16}, T4, "efficient"),
        ({}, T4, "math"),
        ({"dtype": torch.float32}, H200, "efficient"),
        ({"dtype": torch.float32, "widths": (30, 30)}, H200, "math"),
        ({"dtype": torch.float64}, H200, "math"),
        ({"widths": (60, 60)}, H200, "flash"),
        ({"widths": (256, 256)}, H200, "cudnn"),
        ({"widths": (256, 256)}, A100, "flash"),
        ({"widths": (320, 320)}, H200, "efficient"),
        ({"widths": (192, 128)}, H200, "cudnn"),
        ({"widths": (192, 128)}, B200, "cudnn"),
        ({"widths": (192, 128)}, A100, "efficient"),
        ({"widths": (192, 128)}, MI300X, "math"),
        ({"widths": (200, 200)}, NEWER, "flash"),
        ({"widths": (200, 200), "gradient": False}, NEWER, "cudnn"),
        ({"widths": (200, 200)}, L4, "efficient"),
        ({"widths": (200, 200), "gradient": False}, L4, "flash"),
        ({"dropout": 0.1}, H200, "cudnn"),
        ({"dropout": 0.1}, dataclasses.replace(H200, torch=(2, 12)), "flash"),
        ({"dropout": 0.125}, dataclasses.replace(H200, torch=(2, 12)), "cudnn"),
        ({"mask": mask_of(16, 16)}, H200, "cudnn"),
        ({"mask": mask_of(2, 1, 16, 16)}, H200, "cudnn"),
        ({"mask": mask_of(1, 16, 16)}, H200, "efficient"),
        ({"mask": mask_of(16, 16)}, A100, "efficient"),
        ({"mask": mask_of(16, 16, dtype=torch.bfloat16, requires_grad=True)}, H200, "efficient"),
        ({"mask": mask_of(16, 32)[:, ::2]}, H200, "math"),
        ({"heads": (4, 2, 2), "grouped": True}, H200, "cudnn"),
        ({"heads": (4, 2, 2), "grouped": True}, A100, "flash"),
        ({"heads": (4, 2, 2)}, A100, "math"),
        ({"heads": (4, 2, 2), "grouped": True, "dtype": torch.float32}, H200, "math"),
        ({"heads": (4, 2, 2), "grouped": True, "dtype": torch.float32}, NEWER, "efficient"),
        ({"heads": (4, 2, 1), "grouped": True}, A100, "math"),
        ({"heads": (4, 2, 1), "grouped": True}, H200, "cudnn"),
        ({"tokens": (8, 16), "causal": True}, A100, "efficient"),
        ({"tokens": (8, 16), "causal": True}, H200, "cudnn"),
        ({"tokens": (1, 16)}, H200, "cudnn"),
        ({"tokens": (16, 1)}, H200, "flash"),
        ({"tokens": (16, 0)}, H200, "math"),
    ],
)
def test_the_kernel_is_the_one_that_torch_takes(facts, target, backend):
    assert choose_backend(call(**facts), target) == backend


def test_strides_and_dimensions_decide_too():
    usual = call()
    spread = torch.empty(2, 4, 16, 128, dtype=torch.bfloat16, device="meta")[..., ::2]
    assert choose_backend(dataclasses.replace(usual, value=spread), H200) == "math"
    flat = {name: getattr(usual, name)[0] for name in ("query", "key", "value")}
    assert choose_backend(dataclasses.replace(usual, **flat), H200) == "math"


def test_the_users_choice_is_kept(monkeypatch):
    with sdpa_kernel([SDPBackend.MATH]):
        assert choose_backend(call(), H200) == "math"
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        assert choose_backend(call(), H200) == "flash"
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION], set_priority=True):
        assert choose_backend(call(), H200) == "efficient"
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]), pytest.raises(RuntimeError, match="No available kernel"):
        choose_backend(call(dtype=torch.float32), H200)
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert choose_backend(call(), H200) == "flash"


def test_determinism_keeps_cudnn_out():
    torch.use_deterministic_algorithms(True)
    try:
        assert choose_backend(call(), H200) == "flash"
    finally:
        torch.use_deterministic_algorithms(False)


def ops(function, *args, target=H200):
    recorded = trace(function, *args, target=target, grad=True)
    return [op for op in recorded.ops if "detach" not in op.name]


def attention(query, key, value, mask=None, **options):
    return functional.scaled_dot_product_attention(query, key, value, mask, **options)


def inputs(width=64, dtype=torch.bfloat16, heads=4, groups=4, tokens=16):
    shapes = [(2, tokens, count, width) for count in (heads, groups, groups)]
    return [torch.zeros(shape, dtype=dtype, requires_grad=True).transpose(1, 2) for shape in shapes]


@pytest.mark.parametrize(
    ("target", "dtype", "operator"),
    [(H200, torch.bfloat16, "cudnn"), (A100, torch.bfloat16, "flash"), (H200, torch.float32, "efficient")],
)
def test_forward_and_backward_are_one_operator_each(target, dtype, operator):
    names = [op.name for op in ops(attention, *inputs(dtype=dtype), target=target)]
    fused = [name for name in names if "attention" in name]
    assert fused == [
        f"aten._scaled_dot_product_{operator}_attention.default",
        f"aten._scaled_dot_product_{operator}_attention_backward.default",
    ]
    assert not any("bmm" in name for name in names)


@pytest.mark.parametrize("target", [H200, A100])
def test_the_result_has_the_layout_of_the_queries(target):
    query, key, value = inputs()
    output = next(op for op in ops(attention, query, key, value, target=target) if "attention" in op.name).outputs[0]
    assert (output.shape, output.strides, output.dtype) == (tuple(query.shape), query.stride(), "bfloat16")


def test_heads_are_padded_to_eight_for_flash():
    found = ops(lambda *args: attention(*args, is_causal=True), *inputs(width=60))
    padded = [op for op in found if op.name == "aten.constant_pad_nd.default" and op.phase == "forward"]
    assert [op.outputs[0].shape[-1] for op in padded] == [64, 64, 64]
    fused = next(op for op in found if "flash_attention" in op.name)
    assert fused.arguments["scale"] == pytest.approx(60**-0.5)
    assert fused.arguments["is_causal"] is True
    assert found[[op.name for op in found].index("aten.slice.Tensor")].outputs[0].shape[-1] == 60


def test_boolean_masks_become_numbers():
    mask = torch.ones(16, 16, dtype=torch.bool)
    found = ops(attention, *inputs(), mask)
    filled = next(op for op in found if op.name == "aten.where.self")
    assert filled.outputs[0].dtype == "bfloat16"
    fused = next(op for op in found if "cudnn_attention" in op.name)
    assert fused.tensor("attn_bias").storage == filled.outputs[0].storage


@pytest.mark.parametrize(("tokens", "padded"), [(16, False), (20, True)])
def test_the_rows_of_a_mask_are_aligned(tokens, padded):
    mask = torch.zeros(tokens, tokens)
    found = ops(attention, *inputs(dtype=torch.float32, tokens=tokens), mask)
    fused = next(op for op in found if "efficient_attention" in op.name)
    assert fused.tensor("attn_bias").shape == (2, 4, tokens, tokens)
    assert all(stride % 8 == 0 for stride in fused.tensor("attn_bias").strides[:-1])
    assert ("aten.constant_pad_nd.default" in [op.name for op in found]) is padded


def test_groups_of_heads_are_not_copied():
    found = ops(lambda *args: attention(*args, enable_gqa=True), *inputs(groups=2))
    fused = next(op for op in found if "cudnn_attention" in op.name)
    assert fused.tensor("key").shape[1] == 2
    assert "aten.clone.default" not in [op.name for op in found]


def test_the_way_by_products_drops_as_a_gpu_does():
    names = [op.name for op in ops(lambda *args: attention(*args, dropout_p=0.1), *inputs(dtype=torch.float64))]
    assert "aten.native_dropout.default" in names
    assert "aten.native_dropout_backward.default" in names
    assert names.count("aten.bmm.default") == 6
