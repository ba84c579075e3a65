"""Operators of vLLM, SGLang, FlashInfer, FlashAttention and aiter, whose libraries need not be installed.

Norms, activations, quantization and the like go over their tensors once. Products count as torch's do; packed weights
are read as they are stored. What a file cannot show has no cost: the arguments of `moe_forward` and
`unified_attention` are a few tensors and the name of a layer, and the weights, the cache and the lengths of the
sequences, which decide what they do, are hidden behind the name. The same holds for attention over a paged cache, of
which at least the lengths are hidden.

Slots, positions and block tables are data. A store into a cache touches one slot for each row of the slot mapping. Rows
of rotary tables may repeat, so one counts. Experts: each token goes to `topk` different ones of this rank, so that many
have their weights read; with a map of experts, some tokens may go elsewhere, and nothing is certain.
"""

from __future__ import annotations

from collections.abc import Callable

from nearpeak.ops.cost import Cost, Family, Part, accesses
from nearpeak.ops.custom_schemas import custom, read_and_written
from nearpeak.ops.formulas.attention import SEQUENCE_FIRST, Pairs, banded, forward, packed
from nearpeak.ops.formulas.matrix import matrix_product, product_cost
from nearpeak.ops.op import Op


def _once(family: Family) -> Callable[[Op], Cost]:
    """Reads and writes tensors whole, as the schema says, and writes what it returns."""

    def cost(op: Op) -> Cost:
        read, written = read_and_written(op)
        return Cost(
            family=family,
            reads=accesses(*op.tensors(*read)),
            writes=accesses(*op.tensors(*written), *op.outputs),
        )

    return cost


def _like(name: str) -> Callable[[Op], tuple[tuple[tuple[int, ...], str], ...]]:
    return lambda op: ((op.tensor(name).shape, op.tensor(name).dtype),)


custom("""
_C::rms_norm(w result, r input, r weight, epsilon)
_C::fused_add_rms_norm(rw input, rw residual, r weight, epsilon)
_C::rms_norm_static_fp8_quant(w result, r input, r weight, r scale, epsilon)
_C::fused_add_rms_norm_static_fp8_quant(w result, r input, rw residual, r weight, r scale, epsilon)
_C::rms_norm_dynamic_per_token_quant(w result, r input, r weight, w scale, epsilon, r? scale_ub, rw? residual)
_C::rms_norm_per_block_quant(w result, r input, r weight, w scale, epsilon, r? scale_ub, rw? residual, group_size,
    is_scale_transposed)
sgl_kernel::rmsnorm(w output, r input, r weight, eps, enable_pdl)
sgl_kernel::rmsnorm(w output, r input, r weight, eps, enable_pdl, cuda_stream)
sgl_kernel::fused_add_rmsnorm(rw input, rw residual, r weight, eps, enable_pdl)
sgl_kernel::fused_add_rmsnorm(rw input, rw residual, r weight, eps)
sgl_kernel::gemma_rmsnorm(w output, r input, r weight, eps, enable_pdl)
sgl_kernel::gemma_fused_add_rmsnorm(rw input, rw residual, r weight, eps, enable_pdl)
flashinfer::rmsnorm(w out, r input, r weight, eps, enable_pdl)
flashinfer::gemma_rmsnorm(w out, r input, r weight, eps, enable_pdl)
flashinfer::fused_add_rmsnorm(rw input, rw residual, r weight, eps, enable_pdl)
flashinfer::gemma_fused_add_rmsnorm(rw input, rw residual, r weight, eps, enable_pdl)
flashinfer::rmsnorm_quant(w out, r input, r weight, scale, eps, enable_pdl)
flashinfer::fused_add_rmsnorm_quant(w out, r input, rw residual, r weight, scale, eps, enable_pdl)
aiter::rms_norm_cu(w out, r input, r weight, epsilon)
aiter::rmsnorm(w out, r input, r weight, epsilon)
aiter::rmsnorm(w out, r input, r weight, epsilon, gemma_norm)
aiter::fused_add_rms_norm_cu(rw input, rw residual_in, r weight, epsilon)
aiter::add_rmsnorm(w out, r input, r residual_in, w residual_out, r weight, epsilon)
aiter::add_rmsnorm(w out, r input, r residual_in, w residual_out, r weight, epsilon, gemma_norm)
aiter::rmsnorm2d_fwd_with_add(w out, r input, r residual_in, w residual_out, r weight, epsilon, ...)
aiter::rmsnorm_quant(w out, r input, w scale, r weight, epsilon, group_size, shuffle_scale, ...)
aiter::add_rmsnorm_quant(w out, r input, r residual_in, w residual_out, w scale, r weight, epsilon, ...)
""")(_once("normalization"))
custom(
    """
flashinfer::layernorm(r input, r gemma, r beta, eps)
aiter::rms_norm(r input, r weight, epsilon, use_model_sensitive_rmsnorm)
aiter::rmsnorm2d_fwd(r input, r weight, epsilon, use_model_sensitive_rmsnorm)
""",
    returned=_like("input"),
)(_once("normalization"))

custom("""
_C::silu_and_mul(w result, r input)
_C::mul_and_silu(w out, r input)
_C::gelu_and_mul(w out, r input)
_C::gelu_tanh_and_mul(w out, r input)
_C::fatrelu_and_mul(w out, r input, threshold)
_C::swigluoai_and_mul(w out, r input, alpha, limit)
_C::gelu_new(w out, r input)
_C::gelu_fast(w out, r input)
_C::gelu_quick(w out, r input)
_C::merge_attn_states(w output, w? output_lse, r prefix_output, r prefix_lse, r suffix_output, r suffix_lse)
sgl_kernel::silu_and_mul(w out, r input)
sgl_kernel::silu_and_mul(w out, r input, cuda_stream)
sgl_kernel::gelu_and_mul(w out, r input)
sgl_kernel::gelu_tanh_and_mul(w out, r input)
sgl_kernel::merge_state(r v_a, r s_a, r v_b, r s_b, w v_merged, w s_merged)
sgl_kernel::merge_state_v2(r v_a, r s_a, r v_b, r s_b, w v_merged, w s_merged)
flashinfer::silu_and_mul(w out, r input, enable_pdl)
flashinfer::gelu_and_mul(w out, r input, enable_pdl)
flashinfer::gelu_tanh_and_mul(w out, r input, enable_pdl)
_moe_C::moe_sum(r input, w output)
aiter::silu_and_mul(w out, r input)
aiter::scaled_silu_and_mul(w out, r input, r scale)
aiter::gelu_and_mul(w out, r input)
aiter::gelu_tanh_and_mul(w out, r input)
aiter::gelu_fast(w out, r input)
""")(_once("pointwise"))

custom("""
_C::static_scaled_fp8_quant(w result, r input, r scale)
_C::static_scaled_fp8_quant(w result, r input, r scale, group_shape)
_C::dynamic_scaled_fp8_quant(w result, r input, w scale)
_C::dynamic_per_token_scaled_fp8_quant(w result, r input, w scale, r? scale_ub)
_C::static_scaled_int8_quant(w result, r input, r scale, r? azp)
_C::dynamic_scaled_int8_quant(w result, r input, w scale, w? azp)
_C::per_token_group_fp8_quant(r input, w output_q, w output_s, group_size, eps, fp8_min, fp8_max, scale_ue8m0)
_C::per_token_group_fp8_quant(r input, w output_q, w output_s, group_size, eps, fp8_min, fp8_max, scale_ue8m0,
    is_scale_transposed, is_tma_aligned)
_C::per_token_group_quant_int8(r input, w output_q, w output_s, group_size, eps, int8_min, int8_max)
_C::silu_and_mul_quant(w result, r input, r scale)
_C::silu_and_mul_per_block_quant(w out, r input, w scales, group_size, r? scale_ub, is_scale_transposed)
_C::scaled_fp4_quant(w output, r input, t output_scale, r input_scale)
_C::scaled_fp4_quant(w output, r input, t output_scale, r input_scale, is_sf_swizzled_layout)
sgl_kernel::sgl_per_token_group_quant_fp8(r input, w output_q, w output_s, group_size, eps, fp8_min, fp8_max,
    scale_ue8m0)
sgl_kernel::sgl_per_token_group_quant_int8(r input, w output_q, w output_s, group_size, eps, int8_min, int8_max)
sgl_kernel::sgl_per_token_group_quant_8bit(r input, w output_q, w output_s, group_size, eps, min_8bit, max_8bit,
    scale_ue8m0)
sgl_kernel::sgl_per_tensor_quant_fp8(r input, w output_q, w output_s, is_static)
sgl_kernel::sgl_per_token_quant_fp8(r input, w output_q, w output_s)
sgl_kernel::scaled_fp4_quant(w output, r input, t output_scale, r input_scale)
aiter::static_per_tensor_quant(w out, r input, r scale)
aiter::dynamic_per_tensor_quant(w out, r input, w scale)
aiter::dynamic_per_token_scaled_quant(w out, r input, w scales)
aiter::dynamic_per_token_scaled_quant(w out, r input, w scales, r? scale_ub, shuffle_scale, num_rows, num_rows_factor)
""")(_once("quantization"))

custom("""
_moe_C::topk_softmax(w topk_weights, w topk_indices, w token_expert_indices, r gating_output)
_moe_C::topk_softmax(w topk_weights, w topk_indices, w token_expert_indices, r gating_output, renormalize)
_moe_C::topk_sigmoid(w topk_weights, w topk_indices, w token_expert_indices, r gating_output, renormalize, ...)
_moe_C::grouped_topk(r scores, ...)
sgl_kernel::topk_softmax(w topk_weights, w topk_indices, r gating_output, renormalize)
sgl_kernel::moe_fused_gate(r input, r bias, num_expert_group, topk_group, topk, ...)
""")(_once("reduction"))

custom("""
_C_cache_ops::concat_mla_q(r ql_nope, r q_pe, w q_out)
sgl_kernel::concat_mla_k(w k, r k_nope, r k_rope)
sgl_kernel::copy_to_gpu_no_ce(r input, w output)
""")(_once("movement"))


@custom("""
_moe_C::moe_align_block_size(r topk_ids, num_experts, block_size, t sorted_token_ids, t experts_ids, t
    num_tokens_post_pad)
_moe_C::moe_align_block_size(r topk_ids, num_experts, block_size, t sorted_token_ids, t experts_ids, t
    num_tokens_post_pad, t? expert_map)
_moe_C::sgl_moe_align_block_size(r topk_ids, num_experts, block_size, t sorted_token_ids, t experts_ids, t
    num_tokens_post_pad)
sgl_kernel::moe_align_block_size(r topk_ids, num_experts, block_size, t sorted_token_ids, t experts_ids, t
    num_tokens_post_pad, t cumsum_buffer, pad_sorted_token_ids)
sgl_kernel::moe_align_block_size(r topk_ids, num_experts, block_size, t sorted_token_ids, t experts_ids, t
    num_tokens_post_pad, t token_cnts_buffer, t cumsum_buffer)
""")
def _align_experts(op: Op) -> Cost:
    """The choices read, and a place written for each; the buffers are as long as they may ever have to be."""
    chosen, places = op.tensor("topk_ids"), op.tensor("sorted_token_ids")
    written = min(places.bytes, chosen.elements * places.item_bytes)
    if op.arguments.get("expert_map") is not None:
        written = 0.0
    return Cost(family="sorting", reads=accesses(chosen), writes=accesses((places, written)))


@custom("""
_C_cache_ops::reshape_and_cache(t key, t value, t key_cache, t value_cache, r slot_mapping, kv_cache_dtype, t k_scale,
    t v_scale)
_C_cache_ops::reshape_and_cache(t key, t value, t key_cache, t value_cache, r slot_mapping, kv_cache_dtype, k_scale,
    v_scale)
_C_cache_ops::reshape_and_cache_flash(t key, t value, t key_cache, t value_cache, r slot_mapping, kv_cache_dtype, t
    k_scale, t v_scale)
_C_cache_ops::reshape_and_cache_flash(t key, t value, t key_cache, t value_cache, r slot_mapping, kv_cache_dtype,
    k_scale, v_scale)
aiter::reshape_and_cache(t key, t value, t key_cache, t value_cache, r slot_mapping, kv_cache_dtype, t? k_scale,
    t? v_scale, asm_layout)
aiter::reshape_and_cache_flash(t key, t value, t key_cache, t value_cache, r slot_mapping, kv_cache_dtype, t k_scale,
    t v_scale)
sgl_kernel::store_kv_cache(t key_cache, t value_cache, r slot_mapping, t key, t value)
""")
def _store_in_cache(op: Op) -> Cost:
    """A row of keys and of values into the cache for each slot; there may be more rows than slots, for padding."""
    slots = op.tensor("slot_mapping")
    parts = []
    for name in ("key", "value"):
        rows, cache = op.tensor(name), op.tensor(f"{name}_cache")
        count = min(slots.elements, rows.shape[0])
        size = rows.elements // max(rows.shape[0], 1)
        parts.append((rows, count * size * rows.item_bytes, cache, count * size * cache.item_bytes))
    return Cost(
        family="movement",
        reads=accesses(slots, *((rows, read) for rows, read, _, _ in parts)),
        writes=accesses(*((cache, written) for _, _, cache, written in parts)),
    )


@custom("""
_C_cache_ops::concat_and_cache_mla(t kv_c, t k_pe, t kv_cache, r slot_mapping, kv_cache_dtype, t scale)
aiter::concat_and_cache_mla(t kv_c, t k_pe, t kv_cache, r slot_mapping, kv_cache_dtype, t scale)
""")
def _store_latent(op: Op) -> Cost:
    slots, cache = op.tensor("slot_mapping"), op.tensor("kv_cache")
    both = [op.tensor("kv_c"), op.tensor("k_pe")]
    count = min(slots.elements, both[0].shape[0])
    sizes = [count * tensor.elements // max(tensor.shape[0], 1) for tensor in both]
    return Cost(
        family="movement",
        reads=accesses(slots, *((tensor, size * tensor.item_bytes) for tensor, size in zip(both, sizes, strict=True))),
        writes=accesses((cache, sum(sizes) * cache.item_bytes)),
    )


@custom("""
_C::rotary_embedding(r positions, t query, t? key, head_size, t cos_sin_cache, is_neox)
_C::rotary_embedding(r positions, t query, t? key, head_size, t cos_sin_cache, is_neox, rope_dim_offset, inverse)
""")
def _rotary(op: Op) -> Cost:
    """The rotated part of each head read and written in place, and one row of the table."""
    table = op.tensor("cos_sin_cache")
    rotated = min(1.0, table.shape[-1] / op.arguments["head_size"])
    heads = [(tensor, tensor.bytes * rotated) for tensor in op.tensors("query", "key")]
    row = (table, table.shape[-1] * table.item_bytes)
    return Cost(family="pointwise", reads=accesses(op.tensor("positions"), row, *heads), writes=accesses(*heads))


@custom("""
sgl_kernel::apply_rope_pos_ids_cos_sin_cache(t q, t k, t q_rope, t k_rope, t cos_sin_cache, r pos_ids, interleave, ...)
flashinfer::apply_rope_pos_ids_cos_sin_cache(t q, t k, t q_rope, t k_rope, t cos_sin_cache, r pos_ids, interleave, ...)
""")
def _rotary_out(op: Op) -> Cost:
    """As above, into other tensors or in place; queries and keys are (tokens, heads, head)."""
    table = op.tensor("cos_sin_cache")
    tensors = [op.tensor(name) for name in ("q", "k", "q_rope", "k_rope")]
    if any(len(tensor.shape) != 3 for tensor in tensors):
        return _cannot_tell("pointwise")
    parts = [(tensor, tensor.bytes * min(1.0, table.shape[-1] / tensor.shape[-1])) for tensor in tensors]
    row = (table, table.shape[-1] * table.item_bytes)
    return Cost(family="pointwise", reads=accesses(op.tensor("pos_ids"), row, *parts[:2]), writes=accesses(*parts[2:]))


@custom("""
_C::fused_qk_norm_rope(t qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, r q_weight, r k_weight, t
    cos_sin_cache, is_neox, r position_ids)
""")
def _norm_and_rotary(op: Op) -> Cost:
    """Queries and keys, normalized and rotated in place; the values beside them are left alone."""
    heads = [op.arguments[f"num_heads_{name}"] for name in "qkv"]
    part = (op.tensor("qkv"), op.tensor("qkv").bytes * (heads[0] + heads[1]) / sum(heads))
    reads = accesses(part, *op.tensors("q_weight", "k_weight", "position_ids"))
    return Cost(family="normalization", reads=reads, writes=accesses(part))


def _product_shape(left: str, right: str) -> Callable[[Op], tuple[tuple[tuple[int, ...], str], ...]]:
    def shape(op: Op) -> tuple[tuple[tuple[int, ...], str], ...]:
        a, b = op.tensor(left), op.tensor(right)
        return (((*a.shape[:-1], b.shape[-1]), op.arguments["out_dtype"]),)

    return shape


@custom("""
_C::cutlass_scaled_mm(w out, r a, r b, r a_scales, r b_scales, r? bias)
_C::cutlass_scaled_mm_azp(w out, r a, r b, r a_scales, r b_scales, r azp_adj, r? azp, r? bias)
_C::dsv3_fused_a_gemm(w out, r a, r b)
sgl_kernel::dsv3_fused_a_gemm(w out, r a, r b)
sgl_kernel::bmm_fp8(r a, r b, w out, r a_scales, r b_scales, t workspace, cublas_handle, cuda_stream)
""")
def _scaled_product(op: Op) -> Cost:
    """`a @ b` with a scale for each tensor, row, column or block of the factors."""
    return matrix_product(op, "a", "b", extra=op.tensors("a_scales", "b_scales", "azp_adj", "azp", "bias"))


@custom("sgl_kernel::dsv3_router_gemm(w out, r a, r b)")
def _router_product(op: Op) -> Cost:
    """`a @ b.T`."""
    return matrix_product(op, "a", "b")


@custom(
    """
sgl_kernel::int8_scaled_mm(r a, r b, r a_scales, r b_scales, dtype out_dtype, r? bias)
sgl_kernel::fp8_scaled_mm(r a, r b, r a_scales, r b_scales, dtype out_dtype, r? bias)
sgl_kernel::fp8_blockwise_scaled_mm(r a, r b, r a_scales, r b_scales, dtype out_dtype)
""",
    returned=_product_shape("a", "b"),
)
def _scaled_product_returned(op: Op) -> Cost:
    return _scaled_product(op)


@custom(
    """
_rocm_C::LLMM1(r weight, r a, rows_per_block)
_rocm_C::wvSplitK(r weight, r a, r? bias, CuCount)
_rocm_C::wvSplitK(r weight, r a, CuCount)
_rocm_C::wvSplitKrc(r weight, r a, r? bias, CuCount)
""",
    returned=lambda op: (((*op.tensor("a").shape[:-1], op.tensor("weight").shape[0]), op.tensor("a").dtype),),
)
def _skinny_product(op: Op) -> Cost:
    """`a @ weight.T` of few rows."""
    a = op.tensor("a")
    flops = 2.0 * op.outputs[0].elements * a.shape[-1]
    return product_cost("matrix", a.dtype, op.tensors("a", "weight", "bias"), op.outputs, flops=flops)


@custom("""
_C::cutlass_scaled_fp4_mm(w out, r a, r b, t block_scale_a, t block_scale_b, t alpha)
sgl_kernel::cutlass_scaled_fp4_mm(w out, r a, r b, t block_scale_a, t block_scale_b, t alpha)
""")
def _fp4_product(op: Op) -> Cost:
    """Two numbers in a byte of each factor. The scales have padding, which need not be read."""
    a, out = op.tensor("a"), op.tensor("out")
    flops = 2.0 * out.elements * 2 * a.shape[-1]
    return product_cost("matrix", "float4_e2m1fn_x2", (a, op.tensor("b")), (out,), flops=flops)


def _size_m_by_n(op: Op) -> tuple[tuple[tuple[int, ...], str], ...]:
    return (((op.arguments["size_m"], op.arguments["size_n"]), op.tensor("a").dtype),)


@custom(
    """
_C::marlin_gemm(r a, t? c, r b_q_weight, r? b_bias, r b_scales, r? a_scales, r? global_scale, r? b_zeros, t? g_idx, t?
    perm, t workspace, b_type_id, size_m, size_n, size_k, is_k_full, use_atomic_add, use_fp32_reduce, is_zp_float)
_C::gptq_marlin_gemm(r a, t? c, r b_q_weight, r? b_bias, r b_scales, r? global_scale, r? b_zeros, t? g_idx, t? perm, t
    workspace, b_q_type, size_m, size_n, size_k, is_k_full, use_atomic_add, use_fp32_reduce, is_zp_float)
_C::gptq_marlin_gemm(r a, t? c, r b_q_weight, r b_scales, r? global_scale, r? b_zeros, t? g_idx, t? perm, t workspace,
    b_q_type, size_m, size_n, size_k, is_k_full, use_atomic_add, use_fp32_reduce, is_zp_float)
sgl_kernel::gptq_marlin_gemm(r a, t? c, r b_q_weight, r b_scales, r? global_scale, r? b_zeros, t? g_idx, t? perm, t
    workspace, b_q_type, size_m, size_n, size_k, is_k_full, use_atomic_add, use_fp32_reduce, is_zp_float)
""",
    returned=_size_m_by_n,
)
def _marlin(op: Op) -> Cost:
    """Packed weights, unpacked on the way: a product in the dtype of the activations."""
    sizes = [op.arguments[name] for name in ("size_m", "size_n", "size_k")]
    reads = op.tensors("a", "b_q_weight", "b_bias", "b_scales", "a_scales", "global_scale", "b_zeros")
    flops = 2.0 * sizes[0] * sizes[1] * sizes[2]
    return product_cost("matrix", op.tensor("a").dtype, reads, op.outputs, flops=flops)


@custom(
    """
_C::awq_gemm(r a, r weight, r scales, r zeros, split_k_iters)
_C::gptq_gemm(r a, r weight, r zeros, r scales, t g_idx, use_exllama, bit)
_C::gptq_gemm(r a, r weight, r zeros, r scales, t g_idx, use_exllama, use_v2_format, bit)
sgl_kernel::gptq_gemm(r a, r weight, r zeros, r scales, t g_idx, use_shuffle, bit)
""",
    returned=lambda op: (((*op.tensor("a").shape[:-1], op.tensor("scales").shape[-1]), op.tensor("a").dtype),),
)
def _packed_weights(op: Op) -> Cost:
    """As above; the scales have a column for each of the result."""
    a = op.tensor("a")
    flops = 2.0 * op.outputs[0].elements * a.shape[-1]
    return product_cost("matrix", a.dtype, op.tensors("a", "weight", "scales", "zeros"), op.outputs, flops=flops)


_EXPERTS = "(r hidden_states, t w1, t w2, r topk_weights, r topk_ids, ...)"


@custom(f"vllm::outplace_fused_experts{_EXPERTS}", returned=_like("hidden_states"))
def _fused_experts(op: Op) -> Cost:
    """Two products for each token and each of its experts, with the weights of `topk` experts at the least."""
    hidden, up, down, chosen = (op.tensor(name) for name in ("hidden_states", "w1", "w2", "topk_ids"))
    mapped = any(tensor.dtype in ("int32", "int64") for tensor in op.tensors("rest"))
    known = {"bfloat16", "float16", "float8_e4m3fn", "float8_e4m3fnuz"}
    if mapped or up.dtype not in known or up.shape[-1] != hidden.shape[-1] or down.shape[1] != hidden.shape[-1]:
        return _cannot_tell("matrix")
    experts = min(up.shape[0], chosen.shape[-1]) if chosen.elements else 0
    share = experts / max(up.shape[0], 1)
    flops = 2.0 * chosen.elements * hidden.shape[-1] * (up.shape[1] + down.shape[2])
    reads: list[Part] = [hidden, (up, up.bytes * share), (down, down.bytes * share)]
    reads += op.tensors("topk_weights", "topk_ids")
    return product_cost("matrix", up.dtype, reads, op.outputs or (hidden,), flops=flops)


@custom(f"vllm::inplace_fused_experts{_EXPERTS}")
def _fused_experts_in_place(op: Op) -> Cost:
    return _fused_experts(op)


def _lengths(window: object) -> int | None:
    return window if isinstance(window, int) and window >= 0 else None


@custom(
    """
flash_attn::_flash_attn_forward(t query, t key, t value, dropout_p, softmax_scale, causal, window_size_left,
    window_size_right, softcap, t? alibi_slopes, return_softmax)
flash_attn::_flash_attn_forward(t query, t key, t value, dropout_p, softmax_scale, causal, window_size_left,
    window_size_right, t? alibi_slopes, return_softmax)
""",
    returned=lambda op: (
        (op.tensor("query").shape[:-1] + op.tensor("value").shape[-1:], op.tensor("query").dtype),
        ((*op.tensor("query").shape[:1], *op.tensor("query").shape[2:0:-1]), "float32"),
    ),
)
def _flash_attention(op: Op) -> Cost:
    """(batch, sequence, heads, head), aligned bottom right."""
    queries, keys = op.tensor("query").shape[1], op.tensor("key").shape[1]
    left, right = (_lengths(op.arguments[f"window_size_{side}"]) for side in ("left", "right"))
    right = 0 if op.arguments["causal"] else right
    return forward(op, SEQUENCE_FIRST, banded(queries, keys, left=left, right=right, offset=keys - queries))


@custom(
    """
flash_attn::_flash_attn_varlen_forward(t query, t key, t value, r cu_seqlens_q, r cu_seqlens_k, max_seqlen_q,
    max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, t? alibi_slopes,
    return_softmax, t? block_table, t? leftpad_k, t? seqused_k, ...)
""",
    returned=lambda op: ((op.tensor("query").shape[:-1] + op.tensor("value").shape[-1:], op.tensor("query").dtype),),
)
def _flash_attention_packed(op: Op) -> Cost:
    """Sequences one after the other, of the same lengths for queries and keys if these are equally many."""
    query, key = op.tensor("query"), op.tensor("key")
    if op.tensors("block_table", "leftpad_k", "seqused_k") or len(key.shape) != 3:
        return _cannot_tell("attention")
    pairs: Pairs = packed(
        query.shape[0],
        key.shape[0],
        op.tensor("cu_seqlens_q").elements - 1,
        same=query.shape[0] == key.shape[0],
        left=_lengths(op.arguments["window_size_left"]),
        right=0 if op.arguments["causal"] else _lengths(op.arguments["window_size_right"]),
    )
    return forward(op, SEQUENCE_FIRST, pairs)


def _cannot_tell(family: Family) -> Cost:
    return Cost(family=family, model="none")


@custom("""
vllm::moe_forward(t hidden_states, t router_logits, ...)
vllm::moe_forward_shared(t hidden_states, t router_logits, ...)
sglang::inplace_fused_experts(t hidden_states, t w1, t w2, t topk_weights, t topk_ids, ...)
sglang::outplace_fused_experts(t hidden_states, t w1, t w2, t topk_weights, t topk_ids, ...)
""")
def _hidden_experts(op: Op) -> Cost:
    """The weights are hidden behind the name of a layer, or how many of the choices are experts of this rank."""
    return _cannot_tell("matrix")


@custom("""
vllm::unified_attention(t query, t key, t value, ...)
vllm::unified_attention_with_output(t query, t key, t value, t output, ...)
vllm::unified_kv_cache_update(t key, t value, ...)
vllm::unified_mla_attention(t q, t kv_c_normed, t k_pe, ...)
vllm::unified_mla_attention_with_output(t q, t kv_c_normed, t k_pe, t output, ...)
sglang::unified_attention_with_output(t query, t key, t value, t output, ...)
_C::paged_attention_v1(t out, t query, t key_cache, t value_cache, ...)
_C::paged_attention_v2(t out, t exp_sums, t max_logits, t tmp_out, t query, t key_cache, t value_cache, ...)
_rocm_C::paged_attention(t out, t exp_sums, t max_logits, t tmp_out, t query, t key_cache, t value_cache, ...)
_vllm_fa2_C::varlen_fwd(t q, t k, t v, ...)
_vllm_fa3_C::fwd(t q, t k, t v, ...)
sgl_kernel::fwd(t q, t k, t v, ...)
sgl_kernel::cutlass_mla_decode(t out, t q_nope, t q_pe, t kv_c_and_k_pe_cache, t seq_lens, t page_table, ...)
""")
def _hidden_lengths(op: Op) -> Cost:
    """How many keys each query sees is in tensors, or behind the name of a layer."""
    return _cannot_tell("attention")


def _sizes_in_ranks(op: Op) -> tuple[tuple[tuple[int, ...], str], ...]:
    tensor, dim, ranks = op.tensor("tensor"), op.arguments["dim"], op.arguments["world_size"]
    shape = list(tensor.shape)
    shape[dim] = shape[dim] * ranks if "all_gather" in op.name else shape[dim] // ranks
    return ((tuple(shape), tensor.dtype),)


custom("""
_C_custom_ar::all_reduce(fa, r inp, w out, reg_buffer, reg_buffer_sz_bytes)
_C_custom_ar::qr_all_reduce(fa, r inp, w out, quant_level, cast_bf2half)
sgl_kernel::all_reduce(fa, r inp, w out, reg_buffer, reg_buffer_sz_bytes)
sgl_kernel::mscclpp_allreduce(context, r inp, w out, nthreads, nblocks)
sglang::inplace_all_reduce(rw tensor, group_name)
""")(_once("collective"))
custom(
    """
vllm::all_reduce(r tensor, group_name)
sglang::outplace_all_reduce(r tensor, group_name)
sglang::outplace_all_reduce(r tensor, group_name, outplace_all_reduce_method)
""",
    returned=_like("tensor"),
)(_once("collective"))
custom(
    """
vllm::reduce_scatter(r tensor, dim, world_size, group_name)
vllm::all_gather(r tensor, dim, world_size, group_name)
""",
    returned=_sizes_in_ranks,
)(_once("collective"))
