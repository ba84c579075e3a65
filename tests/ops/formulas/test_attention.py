import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nearpeak.ops.cost import cost_of
from nearpeak.ops.formulas.attention import banded, packed

aten = torch.ops.aten
sizes = st.integers(0, 12)
limits = st.none() | st.integers(0, 6)


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


@given(queries=sizes, keys=sizes, left=limits, right=limits, offset=st.integers(-12, 12))
def test_pairs_equal_the_ones_of_a_mask(queries, keys, left, right, offset):
    seen = [
        (i, j)
        for i in range(queries)
        for j in range(keys)
        if (left is None or j >= i + offset - left) and (right is None or j <= i + offset + right)
    ]
    pairs = banded(queries, keys, left=left, right=right, offset=offset)
    assert pairs.count == len(seen)
    if seen:
        for found, used in ((pairs.queries, {i for i, _ in seen}), (pairs.keys, {j for _, j in seen})):
            assert found == (min(used), len(used))


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5), left=limits, right=limits)
def test_packed_sequences_have_at_least_the_charged_pairs(lengths, left, right):
    real = sum(banded(n, n, left=left, right=right).count for n in lengths)
    assert packed(sum(lengths), sum(lengths), len(lengths), same=True, left=left, right=right).count <= real


@given(lengths=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4), causal=st.booleans())
def test_packed_sequences_of_two_lengths_have_at_least_a_pair_for_each_key(lengths, causal):
    right = 0 if causal else None
    real = sum(banded(q, k, right=right, offset=k - q).count for q, k in lengths)
    queries, keys = sum(q for q, _ in lengths), sum(k for _, k in lengths)
    assert packed(queries, keys, len(lengths), same=False, right=right).count <= real


def test_flash_forward(call):
    q, k, v = empty(2, 4, 8, 16), empty(2, 4, 8, 16), empty(2, 4, 8, 16)
    cost = cost_of(call(aten._scaled_dot_product_flash_attention, q, k, v))
    assert cost.family == "attention"
    assert cost.flops == {"bfloat16": 4 * 2 * 4 * 64 * 16}
    assert cost.vector_flops == {"float32": 2 * 4 * 64}
    assert cost.work.bytes_read == 3 * 2 * 2 * 4 * 8 * 16
    assert cost.work.bytes_written == 2 * 2 * 4 * 8 * 16 + 4 * 2 * 4 * 8


def test_one_tensor_for_all_three_is_read_once(call):
    q = empty(2, 4, 8, 16)
    assert cost_of(call(aten._scaled_dot_product_flash_attention, q, q, q)).work.bytes_read == 2 * 2 * 4 * 8 * 16


def test_causal_counts_the_triangle_exactly(call):
    q = empty(1, 1, 8, 16)
    cost = cost_of(call(aten._scaled_dot_product_flash_attention, q, q, q, 0.0, True))
    assert cost.flops == {"bfloat16": 4 * 36 * 16}


def test_causal_from_the_top_left_does_not_read_keys_past_the_last_query(call):
    q, k, v = empty(1, 2, 4, 16), empty(1, 2, 10, 16), empty(1, 2, 10, 16)
    operator = aten._scaled_dot_product_efficient_attention
    cost = cost_of(call(operator, q, k, v, None, False, 0.0, True))
    assert cost.flops == {"bfloat16": 4 * 2 * 10 * 16}
    assert cost.work.bytes_read == 3 * 2 * 2 * 4 * 16
    assert cost.work.bytes_written == 2 * 2 * 4 * 16  # no log-sum-exp


def test_the_padding_of_the_log_sum_exp_is_not_charged(call):
    q = empty(1, 2, 4, 16)
    cost = cost_of(call(aten._scaled_dot_product_efficient_attention, q, q, q, None, True))
    assert cost.work.bytes_written == 2 * 2 * 4 * 16 + 4 * 2 * 4


def test_fewer_key_heads_are_fewer_bytes_and_not_fewer_flops(call):
    q, k, v = empty(1, 8, 4, 16), empty(1, 2, 4, 16), empty(1, 2, 4, 16)
    cost = cost_of(call(aten._scaled_dot_product_flash_attention, q, k, v))
    assert cost.flops == {"bfloat16": 4 * 8 * 16 * 16}
    assert cost.work.bytes_read == 2 * 4 * 16 * (8 + 2 + 2)


def test_values_of_another_width(call):
    q, k, v = empty(1, 2, 4, 16), empty(1, 2, 4, 16), empty(1, 2, 4, 8)
    cost = cost_of(call(aten._scaled_dot_product_cudnn_attention, q, k, v, None, True))
    assert cost.flops == {"bfloat16": 2 * 2 * 16 * (16 + 8)}


def test_a_mask_is_read_once_and_takes_no_pairs_away(call):
    q = empty(2, 4, 8, 16)
    mask = empty(1, 1, 8, 8).expand(2, 4, 8, 8)
    cost = cost_of(call(aten._scaled_dot_product_efficient_attention, q, q, q, mask, False))
    assert cost.flops == {"bfloat16": 4 * 2 * 4 * 64 * 16}
    assert cost.work.bytes_read == 2 * 2 * 4 * 8 * 16 + 2 * 64


@pytest.mark.parametrize("causal, pairs", [(False, 64), (True, 36)])
def test_cpu_forward_and_backward_of_real_code(calls, causal, pairs):
    q, k, v = (torch.zeros(2, 3, 8, 4, requires_grad=True) for _ in range(3))

    def step():
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).sum().backward()

    costs = {op.packet: cost_of(op) for op in calls(step) if "scaled_dot" in op.name}
    forward = costs["aten._scaled_dot_product_flash_attention_for_cpu"]
    backward = costs["aten._scaled_dot_product_flash_attention_for_cpu_backward"]
    assert forward.vector_flops == {"float32": 6 * pairs * (4 * 4 + 1)}
    assert backward.vector_flops == {"float32": 6 * pairs * (10 * 4 + 1)}
    tensor = 4 * 2 * 3 * 8 * 4
    assert forward.work.bytes_read == 3 * tensor
    assert forward.work.bytes_written == tensor + 4 * 6 * 8
    assert backward.work.bytes_read == 4 * tensor + 4 + 4 * 6 * 8  # the gradient is one expanded number
    assert backward.work.bytes_written == 3 * tensor


def test_float32_in_the_efficient_kernels_is_tf32_work(call):
    q = empty(1, 1, 8, 4, dtype=torch.float32)
    cost = cost_of(call(aten._scaled_dot_product_efficient_attention, q, q, q, None, False))
    assert (cost.flops, cost.vector_flops) == ({"tfloat32": 4 * 64 * 4}, {"float32": 64})


@pytest.mark.parametrize(
    "wanted, widths",
    [
        ((True, True, True, False), 5),
        ((True, True, True, True), 5),
        ((False, False, True, False), 2),
        ((True, False, False, False), 3),
    ],
)
def test_backward_of_some_gradients(call, wanted, widths):
    q, k, v = empty(1, 2, 8, 16), empty(1, 2, 8, 16), empty(1, 2, 8, 16)
    mask, grad, out, statistics = empty(1, 2, 8, 8), empty(1, 2, 8, 16), empty(1, 2, 8, 16), torch.empty(1, 2, 32)
    seed = torch.empty((), dtype=torch.int64, device="meta")
    operator = aten._scaled_dot_product_efficient_attention_backward
    arguments = grad, q, k, v, mask, out, statistics.to("meta"), seed, seed, 0.0, wanted
    cost = cost_of(call(operator, *arguments))
    assert cost.flops == {"bfloat16": 2 * widths * 2 * 64 * 16}
    read = 5 if any((wanted[0], wanted[1], wanted[3])) else 3
    assert cost.work.bytes_read == read * 2 * 2 * 8 * 16 + 2 * 2 * 64 + 4 * 2 * 8
    assert cost.work.bytes_written == sum(wanted[:3]) * 2 * 2 * 8 * 16 + wanted[3] * 2 * 2 * 64


def test_raw_flash_aligns_bottom_right(call):
    q, k, v = empty(1, 4, 2, 16), empty(1, 10, 2, 16), empty(1, 10, 2, 16)
    cost = cost_of(call(aten._flash_attention_forward, q, k, v, None, None, 4, 10, 0.0, True, False))
    assert cost.flops == {"bfloat16": 4 * 2 * (4 * 6 + 10) * 16}
    assert cost.work.bytes_read == 2 * 2 * 16 * (4 + 10 + 10)


def test_a_window_limits_pairs_and_keys(call):
    q, k, v = empty(1, 4, 2, 16), empty(1, 10, 2, 16), empty(1, 10, 2, 16)
    operator = aten._flash_attention_forward
    cost = cost_of(call(operator, q, k, v, None, None, 4, 10, 0.0, True, False, window_size_left=2))
    assert cost.flops == {"bfloat16": 4 * 2 * (4 * 3) * 16}
    assert cost.work.bytes_read == 2 * 2 * 16 * (4 + 6 + 6)
    cost = cost_of(call(operator, q, k, v, None, None, 4, 10, 0.0, False, False, window_size_left=-1))
    assert cost.flops == {"bfloat16": 4 * 2 * 40 * 16}


def test_packed_sequences_are_charged_as_if_of_equal_lengths(call):
    q, k, v = empty(10, 2, 16), empty(10, 2, 16), empty(10, 2, 16)
    ends = torch.empty(4, dtype=torch.int32, device="meta")
    cost = cost_of(call(aten._flash_attention_forward, q, k, v, ends, ends, 5, 5, 0.0, False, False))
    assert cost.flops == {"bfloat16": 4 * 2 * (9 + 9 + 16) * 16}
    assert cost.work.bytes_read == 3 * 2 * 10 * 2 * 16


def test_a_cache_of_unknown_filling_is_not_charged(call):
    q, k, v = empty(2, 1, 2, 16), empty(2, 99, 2, 16), empty(2, 99, 2, 16)
    used = torch.empty(2, dtype=torch.int32, device="meta")
    operator = aten._flash_attention_forward
    cost = cost_of(call(operator, q, k, v, None, None, 1, 99, 0.0, False, False, seqused_k=used))
    assert (cost.flops, cost.work.bytes_read) == ({}, 0)
    assert cost.work.bytes_written == 2 * 2 * 2 * 16 + 4 * 2 * 2


@pytest.mark.parametrize("kind, pairs", [(0, 40), (1, 10), (2, 34)])
def test_raw_efficient_masks(call, kind, pairs):
    q, k, v = empty(1, 4, 2, 16), empty(1, 10, 2, 16), empty(1, 10, 2, 16)
    cost = cost_of(call(aten._efficient_attention_forward, q, k, v, None, None, None, None, None, 0.0, kind, True))
    assert cost.flops == {"bfloat16": 4 * 2 * pairs * 16}
    assert cost.work.bytes_written == 2 * 2 * 4 * 16 + 4 * 2 * 4


def test_raw_efficient_window_counts_its_keys(call):
    q = empty(1, 8, 2, 16)
    arguments = q, q, q, None, None, None, None, None, 0.0, 1, False
    cost = cost_of(call(aten._efficient_attention_forward, *arguments, window_size=3))
    assert cost.flops == {"bfloat16": 4 * 2 * (1 + 2 + 6 * 3) * 16}


def test_whole_attention_writes_only_its_output(call):
    with torch.inference_mode():
        q = torch.zeros(2, 3, 8, 4)
        cost = cost_of(call(torch.nn.functional.scaled_dot_product_attention, q, q, q))
    assert cost.vector_flops == {"float32": 6 * 64 * 17}
    assert cost.work.bytes_written == 4 * 2 * 3 * 8 * 4
