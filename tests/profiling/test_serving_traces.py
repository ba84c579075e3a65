"""Made trace files with operators of vLLM, SGLang, FlashInfer and FlashAttention, which are not installed here."""

from pathlib import Path
from typing import Any

import pytest

from nearpeak.profiles.profile import Profile, ProfiledOp
from nearpeak.profiling.load import profile_trace
from nearpeak.render.views.verdict import sentences
from nearpeak.trace.kineto.read import read_trace
from tests.made_traces import MadeTrace, T

TOKENS, WIDTH, HEADS, KV_HEADS, HEAD = 512, 4096, 32, 8, 128
HIDDEN = T(TOKENS, WIDTH)
RESIDUAL = T(TOKENS, WIDTH, strides=(2 * WIDTH, 1))
SIZE = TOKENS * WIDTH
WEIGHT = T(WIDTH)
FP8 = "float8_e4m3fn"
ONE = T(1, dtype="float32")
QUERY, KEY = T(TOKENS, HEADS * HEAD), T(TOKENS, KV_HEADS * HEAD)
ROWS = T(TOKENS, KV_HEADS, HEAD)
VALUES = T(TOKENS, KV_HEADS, HEAD, strides=(2 * KV_HEADS * HEAD, HEAD, 1))
CACHE = T(1000, 16, KV_HEADS, HEAD)
VALUE_CACHE = T(1000, 16, KV_HEADS, HEAD, strides=(2 * 16 * KV_HEADS * HEAD, KV_HEADS * HEAD, HEAD, 1))
SLOTS = T(TOKENS, dtype="int64")
KV = TOKENS * KV_HEADS * HEAD
EXPERTS, TOP, INNER = 64, 8, 1024
W1, W2 = T(EXPERTS, 2 * INNER, WIDTH), T(EXPERTS, WIDTH, INNER)
CHOICES, CHOICE_WEIGHTS = T(TOKENS, TOP, dtype="int32"), T(TOKENS, TOP, dtype="float32")
A8, B8 = T(TOKENS, WIDTH, dtype=FP8), T(WIDTH, 1024, dtype=FP8, strides=(1, WIDTH))
GEMM_FLOPS = 2.0 * TOKENS * WIDTH * 1024
SCALES = T(TOKENS, 1, dtype="float32"), T(1, 1024, dtype="float32")

CASES: dict[str, tuple[tuple[Any, ...], float, float]] = {
    # name: arguments, bytes (of all that is read and written), FLOPs of products
    "_C::rms_norm": ((HIDDEN, HIDDEN, WEIGHT, 1e-6), 4 * SIZE + 2 * WIDTH, 0),
    "_C::fused_add_rms_norm": ((HIDDEN, HIDDEN, WEIGHT, 1e-6), 8 * SIZE + 2 * WIDTH, 0),
    "_C::rms_norm_static_fp8_quant": (
        (T(TOKENS, WIDTH, dtype=FP8), HIDDEN, WEIGHT, ONE, 1e-6),
        3 * SIZE + 2 * WIDTH + 4,
        0,
    ),
    "sgl_kernel::rmsnorm": ((HIDDEN, HIDDEN, WEIGHT, 1e-6, False), 4 * SIZE + 2 * WIDTH, 0),
    "sgl_kernel::fused_add_rmsnorm": ((HIDDEN, HIDDEN, WEIGHT, 1e-6, False), 8 * SIZE + 2 * WIDTH, 0),
    "flashinfer::rmsnorm": ((HIDDEN, HIDDEN, WEIGHT, 1e-6, None), 4 * SIZE + 2 * WIDTH, 0),
    "flashinfer::fused_add_rmsnorm": ((HIDDEN, HIDDEN, WEIGHT, 1e-6, True), 8 * SIZE + 2 * WIDTH, 0),
    "aiter::rmsnorm2d_fwd": ((HIDDEN, WEIGHT, 1e-6, 0), 4 * SIZE + 2 * WIDTH, 0),
    "aiter::add_rmsnorm": ((HIDDEN, HIDDEN, RESIDUAL, HIDDEN, WEIGHT, 1e-6, False), 8 * SIZE + 2 * WIDTH, 0),
    "_rocm_C::wvSplitK": ((T(1024, WIDTH), T(4, WIDTH), None, 304), 2 * (1028 * WIDTH + 4096), 8.0 * WIDTH * 1024),
    "_C::silu_and_mul": ((HIDDEN, T(TOKENS, 2 * WIDTH)), 6 * SIZE, 0),
    "sgl_kernel::silu_and_mul": ((HIDDEN, T(TOKENS, 2 * WIDTH)), 6 * SIZE, 0),
    "_C::static_scaled_fp8_quant": ((A8, HIDDEN, ONE), 3 * SIZE + 4, 0),
    "_C::dynamic_scaled_fp8_quant": ((A8, HIDDEN, ONE), 3 * SIZE + 4, 0),
    "_C::dynamic_per_token_scaled_fp8_quant": (
        (A8, HIDDEN, T(TOKENS, 1, dtype="float32"), None),
        3 * SIZE + 4 * TOKENS,
        0,
    ),
    "sgl_kernel::sgl_per_token_group_quant_fp8": (
        (HIDDEN, A8, T(TOKENS, 32, dtype="float32"), 128, 1e-10, -448.0, 448.0, False),
        3 * SIZE + 128 * TOKENS,
        0,
    ),
    "sgl_kernel::sgl_per_token_quant_fp8": ((HIDDEN, A8, T(TOKENS, dtype="float32")), 3 * SIZE + 4 * TOKENS, 0),
    "_C::rotary_embedding": (
        (SLOTS, QUERY, KEY, HEAD, T(4096, HEAD), True),
        4 * TOKENS * (HEADS + KV_HEADS) * HEAD + 8 * TOKENS + 2 * HEAD,
        0,
    ),
    "_C_cache_ops::reshape_and_cache_flash": (
        (ROWS, VALUES, CACHE, VALUE_CACHE, SLOTS, "auto", ONE, ONE),
        8 * KV + 8 * TOKENS,
        0,
    ),
    "_C_cache_ops::reshape_and_cache": (
        (ROWS, VALUES, CACHE, VALUE_CACHE, SLOTS, "auto", ONE, ONE),
        8 * KV + 8 * TOKENS,
        0,
    ),
    "sgl_kernel::store_kv_cache": ((CACHE, VALUE_CACHE, SLOTS, ROWS, VALUES), 8 * KV + 8 * TOKENS, 0),
    "_moe_C::topk_softmax": (
        (CHOICE_WEIGHTS, CHOICES, CHOICES, T(TOKENS, EXPERTS, dtype="float32")),
        12 * TOKENS * TOP + 4 * TOKENS * EXPERTS,
        0,
    ),
    "_moe_C::moe_align_block_size": (
        (CHOICES, EXPERTS, 64, T(8192, dtype="int32"), T(128, dtype="int32"), T(1, dtype="int32")),
        8 * TOKENS * TOP,
        0,
    ),
    "_moe_C::moe_sum": ((T(TOKENS, TOP, WIDTH), HIDDEN), 2 * SIZE * (TOP + 1), 0),
    "_C::cutlass_scaled_mm": (
        (T(TOKENS, 1024), A8, B8, *SCALES, None),
        SIZE + WIDTH * 1024 + 2 * TOKENS * 1024 + 4 * (TOKENS + 1024),
        GEMM_FLOPS,
    ),
    "sgl_kernel::fp8_scaled_mm": (
        (A8, B8, *SCALES, 15, None),
        SIZE + WIDTH * 1024 + 2 * TOKENS * 1024 + 4 * (TOKENS + 1024),
        GEMM_FLOPS,
    ),
    "vllm::outplace_fused_experts": (
        (HIDDEN, W1, W2, CHOICE_WEIGHTS, CHOICES, "silu", False, False, False, -1, None, None, None),
        4 * SIZE + 2 * TOP * 3 * INNER * WIDTH + 8 * TOKENS * TOP,
        2.0 * TOKENS * TOP * WIDTH * 3 * INNER,
    ),
    "flash_attn::_flash_attn_forward": (
        (
            T(2, 1024, 16, HEAD),
            T(2, 1024, 4, HEAD),
            T(2, 1024, 4, HEAD, strides=(10**6, 8 * HEAD, HEAD, 1)),
            0.0,
            0.1,
            True,
            -1,
            -1,
            0.0,
            None,
            False,
        ),
        2 * 2 * 1024 * HEAD * (16 + 16 + 8) + 4 * 2 * 16 * 1024,
        4.0 * 2 * 16 * HEAD * 1024 * 1025 / 2,
    ),
    "flash_attn::_flash_attn_varlen_forward": (
        (
            T(1024, 16, HEAD),
            T(1024, 4, HEAD),
            T(1024, 4, HEAD, strides=(8 * HEAD, HEAD, 1)),
            *(
                T(5, dtype="int32"),
                T(5, dtype="int32"),
                512,
                512,
                0.0,
                0.1,
                True,
                -1,
                -1,
                0.0,
                None,
                False,
                None,
                None,
                None,
            ),
        ),
        2 * 1024 * HEAD * (16 + 16 + 8),
        4.0 * 16 * HEAD * 4 * 256 * 257 / 2,
    ),
}


def profiled(tmp_path: Path, *calls: tuple[str, tuple[Any, ...]], kernel: str = "kernel") -> Profile:
    trace = MadeTrace()
    for name, arguments in calls:
        trace.op(name, *arguments, us=5000, kernel=kernel)
    return profile_trace(trace.write(tmp_path / "trace.json"))


def only_op(profile: Profile) -> ProfiledOp:
    (op,) = profile.ops
    return op


@pytest.mark.parametrize("name", CASES)
def test_the_least_of_a_custom_operator(tmp_path: Path, name: str):
    arguments, moved, flops = CASES[name]
    op = only_op(profiled(tmp_path, (name, arguments)))
    assert op.name == name.replace("::", ".") + ".default"
    assert op.modeled
    assert op.bytes == pytest.approx(moved, rel=1e-3)
    assert op.flops == pytest.approx(flops, rel=0.02)  # a FLOP of the exponential for each pair of attention


HIDDEN_WORK: dict[str, tuple[Any, ...]] = {
    "vllm::moe_forward": (HIDDEN, T(TOKENS, EXPERTS), "model.layers.0.mlp.experts"),
    "vllm::moe_forward_shared": (HIDDEN, T(TOKENS, EXPERTS), None, "model.layers.0.mlp.experts"),
    "vllm::unified_attention": (T(TOKENS, HEADS, HEAD), ROWS, ROWS, "model.layers.0.attn"),
    "vllm::unified_attention_with_output": (T(TOKENS, HEADS, HEAD), ROWS, ROWS, T(TOKENS, HEADS, HEAD), "layer"),
    "sglang::unified_attention_with_output": (QUERY, KEY, KEY, QUERY, True, 3),
    "vllm::outplace_fused_experts": (
        *(HIDDEN, W1, W2, CHOICE_WEIGHTS, CHOICES, "silu", False, -1, T(2 * EXPERTS, dtype="int32")),
    ),
    "_C::rms_norm": (HIDDEN, HIDDEN, WEIGHT, 1e-6, T(3), T(3)),  # a version that is not known
    "flash_attn::_flash_attn_varlen_forward": (
        *(T(1024, 16, HEAD), CACHE, CACHE, T(5, dtype="int32"), T(5, dtype="int32"), 512, 512, 0.0, 0.1, True, -1, -1),
        *(0.0, None, False, T(4, 64, dtype="int32"), None, None),
    ),
}


@pytest.mark.parametrize("name", HIDDEN_WORK)
def test_what_a_file_hides_has_no_bound_and_is_named(tmp_path: Path, name: str):
    found = profiled(tmp_path, (name, HIDDEN_WORK[name]))
    assert only_op(found).name == f"unknown.{name}"
    assert not only_op(found).modeled
    assert (found.modeled_share, found.as_written_s) == (0.0, 0.0)
    assert any(name in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "declared"), [("vllm::moe_forward", False), ("aten::mystery", False), ("mine::fused", True)]
)
def test_only_an_operator_whose_cost_can_be_declared_is_said_to_be(tmp_path: Path, name: str, declared: bool):
    found = profiled(tmp_path, (name, (HIDDEN, T(TOKENS, EXPERTS), "layer")))
    said = sentences(found)
    assert ("declare_cost" in said["Next"]) == declared
    assert name in said["Next"]


def test_a_layer_of_a_server_is_modeled_but_for_its_attention(tmp_path: Path):
    trace = MadeTrace()
    for name in ("_C::fused_add_rms_norm", "_C::rotary_embedding", "_C_cache_ops::reshape_and_cache_flash"):
        trace.op(name, *CASES[name][0], us=30)
    trace.op("vllm::unified_attention_with_output", *HIDDEN_WORK["vllm::unified_attention_with_output"], us=60)
    for name in ("_C::dynamic_per_token_scaled_fp8_quant", "_C::cutlass_scaled_mm", "_C::silu_and_mul"):
        trace.op(name, *CASES[name][0], us=30)
    found = profile_trace(trace.write(tmp_path / "trace.json"))
    assert found.modeled_share == pytest.approx(180 / 240)
    assert found.waterfall.broken == ()


@pytest.mark.parametrize(
    ("name", "arguments", "kernel", "collective"),
    [
        ("symm_mem::multimem_all_reduce_", (HIDDEN, "sum", "tp"), "multimem_all_reduce_kernel<BFloat16>", "all_reduce"),
        ("symm_mem::two_shot_all_reduce_", (HIDDEN, "sum", "tp"), "a_kernel_of_any_name", "all_reduce"),
        ("vllm::all_reduce", (HIDDEN, "tp:0"), "triton_kernel", "all_reduce"),
        ("vllm::all_gather", (HIDDEN, 0, 8, "tp:0"), "ncclDevKernel_AllGather_RING_LL", "all_gather"),
        (
            "_C_custom_ar::all_reduce",
            (1, HIDDEN, HIDDEN, 2, 3),
            "void vllm::cross_device_reduce_1stage<bf16, 8>",
            "all_reduce",
        ),
        ("sgl_kernel::all_reduce", (1, HIDDEN, HIDDEN, 2, 3), "void cross_device_reduce_2stage<bf16, 8>", "all_reduce"),
        ("some::op", (HIDDEN,), "oneShotAllReduceKernel<__nv_bfloat16>", "all_reduce"),
        ("some::op", (HIDDEN,), "flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot", "all_reduce"),
    ],
)
def test_all_reduces_of_any_library_are_communication(
    tmp_path: Path, name: str, arguments: tuple[Any, ...], kernel: str, collective: str
):
    found = profiled(tmp_path, (name, arguments), kernel=kernel)
    assert [span.collective for span in found.timeline] == [collective]
    assert found.communication_s == pytest.approx(5e-3)
    assert found.kernel_s == 0.0
    assert found.as_written_s == 0.0
    assert found.waterfall.broken == ()


def test_reductions_of_a_warp_are_no_communication(tmp_path: Path):
    found = profiled(tmp_path, ("_C::silu_and_mul", CASES["_C::silu_and_mul"][0]), kernel="softmax<WarpAllReduce<4>>")
    assert found.communication_s == 0.0


def test_bounds_of_a_file_stay_bounds_where_arguments_may_be_one_tensor(tmp_path: Path):
    """With "least" storages, equal arguments that are only read are one tensor; what is written is another."""
    trace = MadeTrace()
    trace.op("_C::fused_add_rms_norm", HIDDEN, HIDDEN, WEIGHT, 1e-6)
    (op,) = read_trace(trace.write(tmp_path / "trace.json")).trace.ops
    assert op.mutated == ("input", "residual")
    assert len({tensor.storage for tensor in op.inputs}) == 3
