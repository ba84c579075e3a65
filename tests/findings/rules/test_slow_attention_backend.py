import dataclasses

import pytest
import torch
from gpu_steps import H200, examined, found_in
from planted import load, planted
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nearpeak.findings.rules.slow_attention_backend import slow_attention_backend
from nearpeak.ops.tensor import Tensor

NAME = "slow-attention-backend"


def attention(backend, shape=(2, 16, 2048, 64), *, dtype=torch.bfloat16, queries=None):
    def build():
        query, key, value = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
        if queries:
            query = torch.randn(*shape[:2], queries, shape[3], dtype=dtype)

        def step():
            with sdpa_kernel(backend):
                out = scaled_dot_product_attention(query, key, value, is_causal=not queries)
            out.backward(out.detach())

        return step

    return build


def test_the_corpus():
    module = load("slow_attention_backend")
    (finding,) = found_in(examined(lambda: module.waste("cuda")), NAME)
    assert finding.source == planted("slow_attention_backend")
    assert 0.35 < finding.share < 0.6  # cuDNN is about twice as fast
    assert "SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION" in finding.remedy
    assert not found_in(examined(lambda: module.clean("cuda")))


def test_the_efficient_kernel_loses_most_of_its_time():
    step = examined(attention(SDPBackend.EFFICIENT_ATTENTION))
    gains = {}
    for waste in slow_attention_backend(step):
        gains.update(waste.gains)
    assert [step.ops[index].packet.rpartition("_")[2] for index in gains] == ["attention", "backward"]
    assert 0.6 * step.seconds(gains) < sum(gains.values()) < 0.9 * step.seconds(gains)


def test_what_was_measured_slow_gains_in_proportion():
    def slower(op, expected):
        return 3 * expected if "attention" in op.name else expected

    usual = slow_attention_backend(examined(attention(SDPBackend.FLASH_ATTENTION)))
    slow = slow_attention_backend(examined(attention(SDPBackend.FLASH_ATTENTION), times=slower))
    for one, other in zip(usual, slow, strict=True):
        assert other.saving_s == pytest.approx(3 * one.saving_s)


@pytest.mark.parametrize(
    "build",
    [
        attention(SDPBackend.CUDNN_ATTENTION),
        attention(SDPBackend.EFFICIENT_ATTENTION, dtype=torch.float32),  # no other takes it
        attention(SDPBackend.FLASH_ATTENTION, (2, 16, 2048, 256)),
        attention(SDPBackend.FLASH_ATTENTION, queries=1),
    ],
    ids=["cudnn", "float32", "wide", "one-token"],
)
def test_silent(build):
    step = examined(build)
    assert any("_scaled_dot_product_" in op.name for op in step.ops)
    assert not list(slow_attention_backend(step))


def test_a_gpu_of_which_nothing_was_measured_says_nothing():
    ampere = dataclasses.replace(H200, architecture="ampere")
    assert not list(slow_attention_backend(examined(attention(SDPBackend.FLASH_ATTENTION), machine=ampere)))
    on_cpu = dataclasses.replace(H200, kind="cpu")
    assert not list(slow_attention_backend(examined(attention(SDPBackend.FLASH_ATTENTION), machine=on_cpu)))


def masked(name, *, reads=()):
    """Attention with a mask for each of a batch, made by a compiled kernel of this name."""
    step = examined(lambda: load("causal_mask_as_tensor").waste("cuda"))
    (at,) = (index for index, op in enumerate(step.ops) if op.packet == "aten.where")
    made = step.ops[at].outputs[0]
    size = made.shape[-1]
    wide = dataclasses.replace(made, shape=(4, 1, size, size), strides=(size * size, size * size, size, 1))
    arguments = {"read": reads, "written": (wide,), "complete": True, "family": "pointwise"}
    kernel = dataclasses.replace(
        step.ops[at], name=name, origin="inductor", arguments=arguments, outputs=(), mutated=("written",)
    )
    ops = [
        dataclasses.replace(op, arguments={**op.arguments, "attn_bias": wide}) if "attn_bias" in op.arguments else op
        for op in step.ops
    ]
    ops[at] = kernel
    return dataclasses.replace(step, trace=dataclasses.replace(step.trace, ops=tuple(ops)))


def test_a_mask_that_a_compiler_makes_of_positions_is_causal():
    step = masked("inductor.triton_poi_fused_add_arange_expand_le_scalar_tensor_unsqueeze_where_6")  # of a Llama
    (waste,) = slow_attention_backend(step)
    assert waste.title.startswith("A causal mask") and waste.saving_s > 0.3 * step.profile.wall_s


@pytest.mark.parametrize(
    "name",
    [
        "triton_poi_fused_add_arange_bitwise_and_gt_le_where_1",  # a window
        "triton_poi_fused_add_arange_eq_le_where_1",
        "triton_poi_fused_arange_lt_where_1",  # nobody sees itself
        "triton_poi_fused_arange_where_1",
    ],
)
def test_other_compiled_masks_are_not(name):
    assert not list(slow_attention_backend(masked(f"inductor.{name}")))


def test_a_compiled_mask_that_reads_lengths_is_not_causal():
    lengths = Tensor(shape=(4,), strides=(1,), dtype="int64", storage=0)
    assert not list(slow_attention_backend(masked("inductor.triton_poi_fused_arange_le_where_1", reads=(lengths,))))


@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_from_before_the_step_is_causal_if_its_values_are(causal):
    def build():
        query, key, value = (torch.randn(2, 16, 2048, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        mask = torch.ones(2048, 2048, dtype=torch.bool).tril()
        return lambda: scaled_dot_product_attention(query, key, value, attn_mask=mask).sum().backward()

    step = examined(build)
    masks = {op.tensor("attn_bias").storage for op in step.ops if op.tensors("attn_bias")}
    assert masks
    seen = dataclasses.replace(step.trace, causal_masks=frozenset(masks if causal else ()))
    wastes = list(slow_attention_backend(dataclasses.replace(step, trace=seen)))
    assert [waste.title.partition(" is ")[0] for waste in wastes] == ["A causal mask"] * causal
