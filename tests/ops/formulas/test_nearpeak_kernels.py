"""Every operator of `nearpeak.kernels` has a formula, with figures by hand, and estimates see it."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import nearpeak
from nearpeak import kernels
from nearpeak.kernels._runtime import policy
from nearpeak.machines.catalogue import find
from nearpeak.ops.cost import cost_of, registered
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor
from nearpeak.trace.cuda_ops.target import target_of
from nearpeak.trace.trace import trace

H200 = "h200-sxm"


def operators():
    names = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    return {f"nearpeak.{name.partition('.')[0]}" for namespace, _, name in names if namespace == "nearpeak"}


def made(*shape, dtype=torch.bfloat16, grad=True):
    return torch.empty(*shape, dtype=dtype, device="cuda", requires_grad=grad and dtype.is_floating_point)


def ints(*shape, dtype=torch.int64):
    return made(*shape, dtype=dtype)


def summed(*results):
    sum(result.sum() for result in results if result.requires_grad).backward()


def softmaxes():
    x = made(4, 8, 8)
    summed(kernels.softmax(x, causal=True), kernels.log_softmax(x, mask=ints(8, 8).bool()))


def norms():
    x, residual, weight, bias = made(8, 64), made(8, 64), made(64), made(64)
    summed(kernels.rms_norm(x, weight), kernels.layer_norm(x, weight, bias))
    summed(*kernels.add_rms_norm(x, residual, weight), *kernels.add_layer_norm(x, residual, weight, bias))


def pointwise():
    x, y, bias = made(8, 64), made(8, 64), made(64)
    summed(kernels.add(x, y), kernels.bias_gelu(x, bias), kernels.bias_silu(x), kernels.swiglu(x, y))
    summed(kernels.geglu_packed(x), kernels.transpose_copy(x), kernels.dropout_add(x, y, 0.1))


def rotary():
    q, k, cos, sin = made(2, 8, 4, 32), made(2, 8, 2, 32), made(8, 16, grad=False), made(8, 16, grad=False)
    summed(kernels.rotary(q, cos, sin), *kernels.rotary_pair(q, k, cos, sin))
    kernels.rotary(q.detach(), cos, sin, inplace=True)


def losses():
    target, weight = ints(16), made(32, 64)
    for reduction in ("mean", "none"):
        hidden = made(16, 64)
        summed(kernels.cross_entropy(made(16, 32), target, reduction=reduction))
        summed(kernels.cross_entropy(made(16, 32) * 1, target, reduction=reduction, inplace=True))
        summed(*kernels.linear_cross_entropy(hidden, weight, target, reduction=reduction, return_entropy=True))


def optimizer():
    parameter = torch.nn.Parameter(made(8, 64))
    parameter.grad = made(8, 64, grad=False)
    kernels.AdamW([parameter], master_weights=True).step()


def quantization():
    values, scales = kernels.quantize(made(8, 128), block="row")
    kernels.dequantize(values, scales, block="row")


def experts():
    x = made(16, 64)
    rows, _, row_map = kernels.permute_tokens(x, ints(16, 2), number_of_experts=4)
    summed(kernels.unpermute_tokens(rows, row_map, made(16, 2)))
    summed(kernels.MoE(64, 32, 4, 2, device="cuda", dtype=torch.bfloat16)(x))
    eight, weight = (made(*shape).to(torch.float8_e4m3fn) for shape in ((32, 64), (4, 64, 64)))
    scales = {"row_scales": made(32, dtype=torch.float32), "weight_scales": made(4, dtype=torch.float32)}
    kernels.grouped_gemm(eight.detach(), weight.detach(), ints(4), **scales)
    summed(kernels.grouped_gemm(made(32, 64), made(4, 64, 64), ints(4), activation="silu"))


def products():
    x, weight, bias, residual = made(8, 64), made(32, 64), made(32), made(8, 16)
    summed(kernels.gemm(x, weight, bias=bias, activation="silu", gated=True, residual=residual))
    summed(kernels.gemm(x, weight, activation="gelu", recompute=True))
    eight, other = (one.detach().to(torch.float8_e4m3fn) for one in (x, weight))
    kernels.gemm(eight, other, scale_x=made(8, dtype=torch.float32, grad=False))


def caches():
    keys, values, new, lengths = made(2, 2, 8, 32), made(2, 2, 8, 16), 2, ints(2, dtype=torch.int32)
    query, key, value = made(2, 4, new, 32), made(2, 2, new, 32), made(2, 2, new, 16)
    with torch.no_grad():
        kernels.append(keys, values, key, value, lengths)
        tables = {"cosines": made(8, 16), "sines": made(8, 16)}
        kernels.append(keys, values, key, value, lengths, query=query, **tables)
        kernels.decode_attention(query, keys, values, lengths)


def attentions():
    query, key, value, starts = made(2, 4, 8, 32), made(2, 2, 8, 32), made(2, 2, 8, 16), ints(3, dtype=torch.int32)
    summed(kernels.attention(query, key, value, causal=True, sinks=made(4)))
    summed(kernels.attention_packed(made(8, 4, 32), made(8, 2, 32), made(8, 2, 16), starts, starts, 4, 4))
    summed(kernels.linear_attention(query, key, value))
    with torch.no_grad():
        kernels.attention_fp8(made(2, 4, 8, 64), made(2, 2, 8, 64), made(2, 2, 8, 64), causal=True)


CASES = (attentions, caches, softmaxes, norms, pointwise, rotary, losses, optimizer, quantization, experts, products)


@pytest.fixture(scope="module")
def ran():
    """The operators of the namespace that the cases run, forward and backward, as on a GPU."""
    with nearpeak.fake():
        traces = [trace(case, target=target_of(find(H200))) for case in CASES]
    return [op for one in traces for op in one.ops if op.name.startswith("nearpeak.")]


def test_every_operator_has_a_formula():
    names = {name for name in registered() if name.startswith("nearpeak.")}
    assert operators() == names


@pytest.mark.slow
def test_every_operator_runs_in_an_estimate_and_has_a_cost(ran):
    assert {op.packet for op in ran} == operators()
    for op in ran:
        assert cost_of(op).model == "formula", op.name


@pytest.mark.slow
def test_no_more_is_charged_than_reading_all_and_writing_all(ran):
    for op in ran:
        cost = cost_of(op)
        for bytes_moved, tensors in ((cost.reads, op.inputs), (cost.writes, op.written)):
            most = {}
            for tensor in {*tensors}:
                most[tensor.storage] = most.get(tensor.storage, 0.0) + tensor.bytes
            for access in bytes_moved:
                assert access.bytes <= most[access.storage], op.name
        if cost.family != "matrix":  # memory is the limit, whatever an operation is charged
            assert sum(cost.vector_flops.values()) <= 7 * cost.work.bytes, op.name


def cost_on_fakes(name, function):
    """The cost of the one operator of that name that the function runs."""
    with nearpeak.fake():
        found = trace(function, target=target_of(find(H200)))
    (op,) = [op for op in found.ops if op.name == f"nearpeak.{name}.default"]
    return cost_of(op)


def test_a_norm_reads_and_writes_rows_once_and_keeps_a_number_for_each():
    cost = cost_on_fakes("rms_norm", lambda: kernels.rms_norm(made(32, 128), made(128)))
    assert cost.work.bytes_read == 2 * (32 * 128 + 128)
    assert cost.work.bytes_written == 2 * 32 * 128 + 4 * 32
    assert cost.vector_flops == {"float32": 3 * 32 * 128}
    assert cost.family == "normalization"


@pytest.mark.parametrize(
    ("wants", "read", "written"),
    [
        ((True, False, True, False), 2 * (2 * 32 * 128 + 128) + 4 * 32, 2 * (32 * 128 + 128)),
        ((False, False, True, False), 2 * 2 * 32 * 128 + 4 * 32, 2 * 128),
        ((False, False, False, True), 2 * 32 * 128, 2 * 128),
        ((False, False, False, False), 0, 0),
    ],
)
def test_a_backward_of_a_norm_reads_what_the_wanted_gradients_need(wants, read, written):
    x, weight, statistics = made_up(32, 128), made_up(128), made_up(1, 32, dtype="float32")
    shapes = ((32, 128), (32, 128), (128,), (128,))
    outputs = [made_up(*shape) if wanted else made_up(0) for shape, wanted in zip(shapes, wants, strict=True)]
    arguments = {"gradient": made_up(32, 128), "x": x, "sum_gradient": None, "statistics": statistics}
    arguments |= {"weight": weight, "bias": made_up(128), "offset": 0.0, "centered": False, "wants": wants}
    cost = cost_of(Op(name="nearpeak.norm_backward.default", arguments=arguments, outputs=tuple(outputs)))
    assert (cost.work.bytes_read, cost.work.bytes_written) == (read, written)


def made_up(*shape, dtype="bfloat16"):
    made_up.storages += 1
    strides = tuple(torch.empty(shape, device="meta").stride())
    return Tensor(shape=shape, strides=strides, dtype=dtype, storage=made_up.storages)


made_up.storages = 0


def test_a_causal_softmax_reads_what_is_seen_and_writes_all():
    cost = cost_on_fakes("softmax", lambda: kernels.softmax(made(2, 16, 16), causal=True))
    assert cost.work.bytes_read == 2 * 2 * 16 * 17 // 2
    assert cost.work.bytes_written == 2 * 2 * 16 * 16
    assert cost.vector_flops == {"float32": 3 * 2 * 16 * 17 / 2}


def test_more_keys_than_queries_are_seen_by_causal_queries_at_the_end():
    cost = cost_on_fakes("softmax", lambda: kernels.softmax(made(2, 5), causal=True))
    assert cost.work.bytes_read == 2 * (4 + 5)


def test_a_mask_may_hide_all_scores():
    cost = cost_on_fakes("softmax", lambda: kernels.softmax(made(2, 16, 16), mask=ints(16).bool()))
    assert cost.work.bytes_read == 16


def test_a_gated_activation_moves_three_tensors_and_its_backward_five():
    gate, up = made_up(32, 128), made_up(32, 128)
    forward = Op(name="nearpeak.gated.default", arguments={"gate": gate, "up": up}, outputs=(made_up(32, 128),))
    backward = Op(
        name="nearpeak.gated_backward.default",
        arguments={"gradient": made_up(32, 128), "gate": gate, "up": up, "activation": "silu"},
        outputs=(made_up(32, 128), made_up(32, 128)),
    )
    assert cost_of(forward).work.bytes == 3 * 2 * 32 * 128
    assert cost_of(backward).work.bytes == 5 * 2 * 32 * 128
    assert cost_of(backward).vector_flops == {"float32": 4 * 32 * 128}


@pytest.mark.parametrize(("columns", "rotary_dim"), [(16, 32), (32, 32), (8, 16)])
def test_rotary_reads_each_angle_once_and_no_row_without_a_token(columns, rotary_dim):
    def run():
        kernels.rotary(
            made(2, 8, 4, 32),
            *(made(64, columns, dtype=torch.float32, grad=False) for _ in "cs"),
            rotary_dim=rotary_dim,
        )

    cost = cost_on_fakes("rotary", run)
    heads = 2 * 8 * 4
    assert cost.work.bytes_read == 2 * heads * 32 + 2 * 4 * 8 * rotary_dim // 2
    assert cost.work.bytes_written == 2 * heads * 32
    assert cost.vector_flops == {"float32": 3 * heads * rotary_dim}


def test_rotary_in_place_leaves_what_is_not_rotated():
    def run():
        tables = [made(8, 8, grad=False) for _ in "cs"]
        kernels.rotary(made(8, 4, 32, grad=False), *tables, rotary_dim=16, inplace=True, positions=ints(8))

    cost = cost_on_fakes("rotary_", run)
    assert cost.work.bytes_written == 2 * 8 * 4 * 16
    assert cost.work.bytes_read == 2 * 8 * 4 * 16 + 8 * 8 + 2 * 2 * 8  # positions, and one row of each table


def test_dropout_reads_the_residual_and_what_is_kept():
    cost = cost_on_fakes("dropout_add", lambda: kernels.dropout_add(made(64, 128), made(64, 128), 1.0))
    assert cost.work.bytes == 2 * 2 * 64 * 128
    cost = cost_on_fakes("dropout_add", lambda: kernels.dropout_add(made(64, 128), made(64, 128), 0.5))
    assert cost.work.bytes == pytest.approx(3 * 2 * 64 * 128, rel=1e-4)
    assert cost.vector_flops == {"float32": 64 * 128}


@pytest.mark.parametrize(("master", "read", "written"), [(True, 14, 14), (False, 2 + 2 + 4 + 4, 2 + 4 + 4)])
def test_a_step_of_adamw_by_the_bytes_of_a_parameter(master, read, written):
    def run():
        parameter = torch.nn.Parameter(made(64, 32))
        parameter.grad = made(64, 32, grad=False)
        kernels.AdamW([parameter], master_weights=master, state_dtype=torch.float32).step()

    cost = cost_on_fakes("adamw_step", run)
    assert (cost.work.bytes_read, cost.work.bytes_written) == (64 * 32 * read, 64 * 32 * written)
    assert cost.vector_flops == {"float32": 14 * 64 * 32}
    assert cost.family == "optimizer"


def test_a_number_of_16_bits_is_quantized_for_3_bytes():
    cost = cost_on_fakes("quantize", lambda: kernels.quantize(made(64, 256), block=(1, 128)))
    assert cost.work.bytes == 64 * 256 * 3 + 4 * 64 * 2


@pytest.mark.parametrize("paged", [False, True])
def test_of_a_cache_the_new_tokens_are_certain(paged):
    def run():
        cache, lengths = made(*(64, 16, 2, 128) if paged else (4, 2, 1024, 128)), ints(4, dtype=torch.int32)
        pages = {"pages": ints(4, 16, dtype=torch.int32)} if paged else {}
        with torch.no_grad():
            kernels.decode_attention(made(4, 8, 2, 128), cache, made(*cache.shape), lengths, **pages)

    cost = cost_on_fakes("decode_attention", run)
    pairs, result = 4 * 8 * 3, 4 * 8 * 2 * 128
    assert cost.flops == {"bfloat16": 4 * 128 * pairs}
    assert cost.vector_flops == {"float32": pairs}
    assert cost.work.bytes_read == 2 * result + 4 * 4 + 2 * 2 * (1 if paged else 4) * 2 * 2 * 128
    assert cost.work.bytes_written == 2 * result + 4 * 4 * 8 * 2


@pytest.mark.slow
def test_what_is_appended_is_read_and_written_once_and_rotated():
    def run():
        caches, tables = [made(4, 2, 64, 32) for _ in "kv"], [made(64, 16, dtype=torch.float32) for _ in "cs"]
        new, lengths = [made(4, 2, 3, 32) for _ in "kv"], ints(4, dtype=torch.int32)
        with torch.no_grad():
            kernels.append(*caches, *new, lengths, cosines=tables[0], sines=tables[1], query=made(4, 8, 3, 32))

    cost = cost_on_fakes("append_with_query_", run)
    moved = 2 * 4 * (2 + 2 + 8) * 3 * 32
    assert cost.work.bytes_read == moved + 4 * 4 + 2 * 3 * 16 * 4
    assert cost.work.bytes_written == moved
    assert cost.vector_flops == {"float32": 3 * 4 * (2 + 8) * 3 * 32}


def test_of_tokens_one_is_certain_and_rows_are_written_in_full():
    cost = cost_on_fakes("permute_rows", lambda: kernels.permute_tokens(made(16, 64), ints(16, 2), number_of_experts=4))
    assert cost.work.bytes_read == 4 * 16 * 2 + 2 * 64
    assert cost.work.bytes_written == 2 * 32 * 64


def test_each_row_meets_one_matrix_of_which_one_is_certain():
    rows, experts, columns, depth = 96, 8, 32, 64

    def run():
        given = made(rows, depth), made(experts, columns, depth)
        kernels.grouped_gemm(*given, ints(experts, dtype=torch.int32)).sum().backward()

    with nearpeak.fake():
        found = trace(run, target=target_of(find(H200)))
    forward, by_rows = (cost_of(op) for op in found.ops if op.name == "nearpeak.grouped_gemm.default")
    (by_weight,) = (cost_of(op) for op in found.ops if op.name == "nearpeak.grouped_weight_gradient.default")
    for cost in (forward, by_rows, by_weight):
        assert cost.flops == {"bfloat16": 2 * rows * columns * depth}
    assert forward.work.bytes_read == 2 * (rows * depth + columns * depth)
    assert forward.work.bytes_written == 2 * rows * columns
    assert by_weight.work.bytes_written == 2 * experts * columns * depth


def test_a_product_writes_what_it_keeps_and_its_gradients_are_two_products():
    rows, columns, depth = 96, 32, 64

    def run():
        given = made(rows, depth), made(columns, depth)
        kernels.gemm(*given, bias=made(columns), activation="silu", gated=True).sum().backward()

    with nearpeak.fake():
        found = trace(run, target=target_of(find(H200)))
    forward, backward = (
        cost_of(op) for name in ("gemm", "gemm_backward") for op in found.ops if op.packet == f"nearpeak.{name}"
    )
    assert forward.flops == {"bfloat16": 2 * rows * columns * depth}
    assert forward.vector_flops == {"float32": rows * columns + 4 * rows * columns // 2}
    assert forward.work.bytes_read == 2 * (rows * depth + columns * depth + columns)
    assert forward.work.bytes_written == 2 * rows * (columns + columns // 2)
    assert backward.flops == {"bfloat16": 4 * rows * columns * depth}
    assert backward.work.bytes_written == 2 * (rows * depth + columns * depth + columns)


def linear_attention_costs(tokens, wanted="qkv", causal=True):
    """Those of both passes, for 4 heads of queries of 32 numbers, and 2 of keys with values of 16."""
    shapes = {"q": (2, 4, tokens, 32), "k": (2, 2, tokens, 32), "v": (2, 2, tokens, 16)}

    def run():
        given = [made(*shape, grad=name in wanted) for name, shape in shapes.items()]
        result = kernels.linear_attention(*given, causal=causal)
        result.backward(torch.empty_like(result))

    with nearpeak.fake():
        found = trace(run, target=target_of(find(H200)))
    return [cost_of(op) for op in found.ops if op.packet.startswith("nearpeak.linear_attention")]


@pytest.mark.slow
def test_linear_attention_costs_a_state_for_each_token_and_short_sequences_pairs():
    tokens = 1024
    queries, keys = 2 * 4 * tokens, 2 * 2 * tokens
    forward, backward = linear_attention_costs(tokens)
    assert forward.flops == {"bfloat16": 2 * 32 * 16 * (queries + keys)}
    assert forward.vector_flops == {"float32": 32 * (queries + keys) + 16 * queries}
    assert forward.work.bytes_read == 2 * (32 * queries + (32 + 16) * keys)
    assert forward.work.bytes_written == 2 * 16 * queries + 4 * queries
    assert backward.flops == {"bfloat16": 2 * 32 * 16 * (2 * queries + 3 * keys)}
    assert backward.work.bytes_read == 2 * ((32 + 16 + 16) * queries + (32 + 16) * keys) + 4 * queries
    assert backward.work.bytes_written == 2 * (32 * queries + (32 + 16) * keys)
    few = 6
    pairs = 2 * 4 * few * (few + 1) // 2
    forward, backward = linear_attention_costs(few)
    assert forward.flops == {"bfloat16": 2 * (32 + 16) * pairs}
    assert backward.flops == {"bfloat16": 2 * (16 + 3 * 32 + 16) * pairs}
    assert forward.family == "attention"


@pytest.mark.parametrize(
    ("wanted", "by_query", "by_key", "reads_values"),
    [("q", 1, 1, True), ("k", 1, 1, True), ("v", 1, 1, False), ("kv", 1, 2, True), ("qv", 2, 2, True)],
)
def test_linear_attention_does_what_the_wanted_gradients_need(wanted, by_query, by_key, reads_values):
    tokens = 1024
    queries, keys = 2 * 4 * tokens, 2 * 2 * tokens
    _, backward = linear_attention_costs(tokens, wanted, causal=False)
    assert backward.flops == {"bfloat16": 2 * 32 * 16 * (by_query * queries + by_key * keys)}
    read = 2 * ((32 + 16) * queries + 32 * keys) + 4 * queries
    assert backward.work.bytes_read == read + (2 * 16 * (queries + keys) if reads_values else 0)


def test_gated_experts_write_what_they_keep():
    def run():
        kernels.grouped_gemm(made(96, 64), made(8, 32, 64), ints(8), activation="silu")

    cost = cost_on_fakes("grouped_gemm_gated", run)
    assert cost.flops == {"bfloat16": 2 * 96 * 64 * 32}
    assert cost.vector_flops == {"float32": 3 * 96 * 16}
    assert cost.work.bytes_written == 2 * 96 * (16 + 32)


TOKENS, CHOICES, EXPERTS, WIDTH, INNER = 48, 2, 8, 64, 32


def layer_of_experts(dtype=torch.bfloat16, grad=True):
    """The operators of a layer of experts with their costs, in order; with `grad` of both passes."""
    shapes = {"x": (TOKENS, WIDTH), "gate_up": (EXPERTS, 2 * INNER, WIDTH), "down": (EXPERTS, WIDTH, INNER)}

    def run():
        given = {name: made(*shape, dtype=dtype, grad=grad) for name, shape in shapes.items()}
        given["weights"] = made(TOKENS, CHOICES, dtype=torch.float32, grad=grad)
        result = kernels.moe(experts=ints(TOKENS, CHOICES), **given)
        if grad:
            result.backward(torch.empty_like(result))

    with nearpeak.fake():
        found = trace(run, target=target_of(find(H200)))
    return [(op.packet.removeprefix("nearpeak."), cost_of(op)) for op in found.ops if op.name.startswith("nearpeak.")]


@pytest.mark.slow
@pytest.mark.parametrize("grad", [True, False])
def test_a_layer_of_experts_reads_tokens_and_one_expert_and_writes_tokens_and_what_it_keeps(grad):
    rows = TOKENS * CHOICES
    cost = dict(layer_of_experts(grad=grad))["moe"]
    assert cost.family == "matrix"
    assert cost.flops == {"bfloat16": 2 * rows * WIDTH * 3 * INNER}
    assert cost.vector_flops == {"float32": 3 * rows * INNER}
    assert cost.work.bytes_read == 2 * (TOKENS * WIDTH + 3 * INNER * WIDTH) + (4 + 4) * rows
    assert cost.work.bytes_written == 2 * (TOKENS * WIDTH + (rows * 2 * INNER if grad else 0))


@pytest.mark.slow
def test_the_backward_pass_of_a_layer_of_experts_reads_each_token_once():
    rows = TOKENS * CHOICES
    found = layer_of_experts()
    assert [name for name, _ in found] == [
        *("sort_tokens", "group_rows", "moe", "gathered_gemm", "moe_gate_backward"),
        *("gathered_weight_gradient", "gathered_weight_gradient", "grouped_gemm", "unpermute_rows"),
    ]
    upstream, gate, by_down, by_gate_up, by_rows = (cost for _, cost in found[3:8])
    for cost, columns in ((upstream, INNER), (by_down, INNER), (by_gate_up, 2 * INNER), (by_rows, 2 * INNER)):
        assert cost.flops == {"bfloat16": 2 * rows * WIDTH * columns}
    assert upstream.work.bytes_read == 2 * (TOKENS * WIDTH + INNER * WIDTH) + 4 * rows
    assert upstream.work.bytes_written == 2 * rows * INNER
    assert by_down.work.bytes_read == 2 * (TOKENS * WIDTH + rows * INNER) + 4 * rows
    assert by_gate_up.work.bytes_read == 2 * (TOKENS * WIDTH + rows * 2 * INNER) + 4 * rows
    assert by_gate_up.work.bytes_written == 2 * EXPERTS * 2 * INNER * WIDTH
    assert gate.work.bytes_read == 2 * rows * 3 * INNER + (4 + 4) * rows
    assert gate.work.bytes_written == 2 * rows * 3 * INNER + 4 * rows
    assert gate.vector_flops == {"float32": 9 * rows * INNER}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_of_experts_has_the_products_of_its_parts_and_moves_less(dtype):
    def parts():
        x, gate_up, down = (
            made(*shape, dtype=dtype)
            for shape in ((TOKENS, WIDTH), (EXPERTS, 2 * INNER, WIDTH), (EXPERTS, WIDTH, INNER))
        )
        rows, counts, row_map = kernels.permute_tokens(x, ints(TOKENS, CHOICES), number_of_experts=EXPERTS)
        inner = kernels.grouped_gemm(rows, gate_up, counts, activation="silu")
        kernels.unpermute_tokens(kernels.grouped_gemm(inner, down, counts), row_map, made(TOKENS, CHOICES))

    with nearpeak.fake():
        found = trace(parts, target=target_of(find(H200)))
    costs = [cost_of(op) for op in found.ops if op.packet in ("nearpeak.grouped_gemm_gated", "nearpeak.grouped_gemm")]
    layer = dict(layer_of_experts(dtype))["moe"]
    for field in ("flops", "vector_flops", "product_flops"):
        assert getattr(layer, field) == {
            name: sum(getattr(cost, field).get(name, 0.0) for cost in costs) for name in getattr(layer, field)
        }
    assert layer.work.bytes < sum(cost.work.bytes for cost in costs)


def test_a_layer_of_experts_without_choices_reads_nothing():
    shapes = {"weights": (4, 0), "gate_up": (2, 8, 16), "down": (2, 16, 4), "row_map": (4, 0), "sources": (0,)}
    arguments = {"x": made_up(4, 16), **{name: made_up(*shape) for name, shape in shapes.items()}}
    outputs = made_up(4, 16), made_up(0, 8)
    cost = cost_of(Op(name="nearpeak.moe.default", arguments=arguments, outputs=outputs))
    assert (cost.work.bytes_read, cost.work.bytes_written, cost.flops) == (0, 2 * 4 * 16, {})
    given = {"gradient": made_up(4, 16), "rows": made_up(0, 4), "sources": made_up(0)}
    name = "nearpeak.gathered_weight_gradient.default"
    cost = cost_of(Op(name=name, arguments=given, outputs=(made_up(2, 16, 4),)))
    assert (cost.work.bytes_read, cost.work.bytes_written, cost.flops) == (0, 2 * 2 * 16 * 4, {})


@pytest.mark.parametrize("grad", [True, False])
def test_the_gradient_of_logits_is_written_and_one_row_of_them_certain(grad):
    cost = cost_on_fakes("cross_entropy", lambda: kernels.cross_entropy(made(16, 1000, grad=grad), ints(16)))
    assert cost.work.bytes_read == 8 * 16 + 2 * 1000
    kept = 4 + 4 * 2 * 16 + 4 * 128
    assert cost.work.bytes_written == kept + (2 * 16 * 1000 if grad else 0)
    assert cost.family == "loss"


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "engine"), [(torch.bfloat16, "bfloat16"), (torch.float32, "float32")])
@pytest.mark.parametrize(("for_hidden", "for_weight"), [(True, True), (True, False), (False, False)])
def test_products_of_the_last_layer_by_engine(dtype, engine, for_hidden, for_weight):
    tokens, classes, width = 48, 500, 64

    def run():
        hidden, weight = made(tokens, width, dtype=dtype, grad=for_hidden), made(classes, width, dtype=dtype)
        kernels.linear_cross_entropy(hidden, weight if for_weight else weight.detach(), ints(tokens))

    cost = cost_on_fakes("linear_cross_entropy", run)
    products = 2 * tokens * classes * width * (1 + for_hidden + for_weight)
    assert cost.product_flops == {engine: products}
    beside = tokens * classes * (4 if for_hidden or for_weight else 2)
    if engine == "bfloat16":
        assert (cost.flops, cost.vector_flops) == ({engine: products}, {"float32": beside})
    else:
        assert (cost.flops, cost.vector_flops) == ({}, {engine: products + beside})
    item = 2 if engine == "bfloat16" else 4
    assert cost.work.bytes_read == item * (tokens + classes) * width + 8 * tokens


@pytest.mark.slow
def test_the_backward_of_a_loss_by_rows_computes_the_logits_again():
    def run():
        loss = kernels.linear_cross_entropy(made(48, 64), made(500, 64), ints(48), reduction="none")
        loss.sum().backward()

    assert cost_on_fakes("linear_cross_entropy", run).flops == {"bfloat16": 2 * 48 * 500 * 64}
    assert cost_on_fakes("linear_cross_entropy_backward", run).flops == {"bfloat16": 3 * 2 * 48 * 500 * 64}


def normalized(x, weight):
    return kernels.rms_norm(x, weight)


def gated(gate, up):
    return kernels.swiglu(gate, up)


def loss_of_logits(logits, target):
    return kernels.cross_entropy(logits, target)


def loss_of_hidden(hidden, weight, target):
    return kernels.linear_cross_entropy(hidden, weight, target)


ROWS, COLUMNS, CLASSES = 2048, 4096, 32000
SHAPES = {
    normalized: ((ROWS, COLUMNS), (COLUMNS,)),
    gated: ((ROWS, COLUMNS), (ROWS, COLUMNS)),
    loss_of_logits: ((ROWS, CLASSES),),
    loss_of_hidden: ((ROWS, COLUMNS), (CLASSES, COLUMNS)),
}


def estimated(function, *, grad=True, on=H200):
    """The estimate of a function, and of its backward pass."""
    with nearpeak.fake():
        args = [made(*shape, grad=grad) for shape in SHAPES[function]]
        args += [ints(ROWS)] if function in (loss_of_logits, loss_of_hidden) else []

    def step(*args):
        result = function(*args)
        if grad:
            result.backward(torch.empty_like(result))
        return result

    return nearpeak.estimate(step, *args, on=on)


def moved_when_fused(found):
    return sum(access.bytes for group in found.groups for access in (*group.reads, *group.writes))


def own(found):
    return [op for op in found.ops if op.name.startswith("nearpeak.")]


@pytest.fixture
def as_installed(monkeypatch):
    """As a user without a GPU has it: no kernel runs on this machine."""
    monkeypatch.setattr(policy, "INTERPRETED", False)
    monkeypatch.setattr(policy, "_HAS_TRITON", False)


@pytest.mark.usefixtures("as_installed")
@pytest.mark.parametrize(
    ("function", "names"),
    [
        (normalized, ["rms_norm", "norm_backward"]),
        (gated, ["gated", "gated_backward"]),
        (loss_of_logits, ["cross_entropy", "scale_gradient_"]),
        (loss_of_hidden, ["linear_cross_entropy", "scale_gradient_", "scale_gradient_"]),
    ],
)
def test_an_estimate_for_a_gpu_sees_the_kernels(function, names):
    found = estimated(function)
    assert [op.name for op in own(found)] == [f"nearpeak.{name}.default" for name in names]
    assert all(op.seconds > 0 for op in own(found) if op.name != "nearpeak.scale_gradient_.default")
    assert found.coverage.unmodeled == {}
    assert found.coverage.seconds_share == 1.0


@pytest.mark.parametrize("function", [normalized, gated])
def test_a_kernel_moves_what_plain_torch_does_once_it_is_fused(function):
    found = estimated(function, grad=False)
    with kernels.using("off"):
        plain = estimated(function, grad=False)
    assert found.bytes < plain.bytes
    assert found.bytes == pytest.approx(moved_when_fused(plain), rel=0.01)


@pytest.mark.parametrize(
    ("function", "elements"),
    [
        (normalized, (2 + 3) * ROWS * COLUMNS),
        (gated, (3 + 5) * ROWS * COLUMNS),
        (loss_of_logits, ROWS * CLASSES),
        (loss_of_hidden, 2 * (ROWS + CLASSES) * COLUMNS),
    ],
)
def test_a_step_moves_each_tensor_once(function, elements):
    """Forward and backward; of logits, the gradient alone is certain."""
    found = estimated(function)
    with kernels.using("off"):
        plain = estimated(function)
    moved = sum(op.bytes_read + op.bytes_written for op in own(found))
    assert moved == pytest.approx(2 * elements, rel=0.01)
    assert moved < moved_when_fused(plain)
    assert found.fused_s <= plain.fused_s


def test_the_products_of_the_last_layer_are_those_of_plain_torch():
    found = estimated(loss_of_hidden)
    with kernels.using("off"):
        plain = estimated(loss_of_hidden)
    products = 3 * 2 * ROWS * COLUMNS * CLASSES
    assert found.work.flops == {"bfloat16": products}
    assert plain.work.flops == {"bfloat16": products}


@pytest.mark.usefixtures("as_installed")
@pytest.mark.parametrize(
    ("machine", "norm", "eight_bits"),
    [(H200, True, True), ("a100-pcie-80gb", True, False), ("v100-sxm-16gb", False, False)],
)
def test_an_estimate_sees_the_kernels_that_the_gpu_can_run(machine, norm, eight_bits):
    assert bool(own(estimated(normalized, on=machine))) == norm
    assert bool(own(nearpeak.estimate(lambda: kernels.quantize(made(8, 128), block="row"), on=machine))) == eight_bits


@pytest.mark.usefixtures("as_installed")
def test_tensors_of_the_cpu_stand_for_a_gpu_s_in_a_trace_for_one_and_nowhere_else():
    x = torch.randn(4, 8)
    assert not kernels.supports(kernels.rms_norm, x)
    with policy.simulate_gpu((9, 0)):
        assert not kernels.supports(kernels.rms_norm, x)  # it has data: a kernel would run
        with nearpeak.fake():
            assert kernels.supports(kernels.rms_norm, torch.empty(4, 8))
    with nearpeak.fake():
        assert not kernels.supports(kernels.rms_norm, torch.empty(4, 8, device="cpu"))


def test_a_mode_that_looks_on_sees_what_runs_without_it(calls):
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits, target = torch.randn(4, 8, device=device, requires_grad=True), torch.tensor([1, -100, 3, 0], device=device)
    ops = calls(lambda: (kernels.cross_entropy(logits, target) * 3).backward())
    assert "nearpeak.scale_gradient_.default" in [op.name for op in ops]
    plain = logits.detach().clone().requires_grad_()
    (torch.nn.functional.cross_entropy(plain, target) * 3).backward()
    torch.testing.assert_close(logits.grad, plain.grad)


def test_a_graph_that_is_made_of_a_backward_pass_writes_over_nothing():
    def gradient(logits, target):
        logits = logits.detach().requires_grad_()
        return torch.autograd.grad(kernels.cross_entropy(logits, target), logits)[0]

    device = "cuda" if torch.cuda.is_available() else "cpu"
    graph = make_fx(gradient)(torch.randn(4, 8, device=device), torch.tensor([1, 2, 3, 0], device=device))
    assert "cross_entropy" in graph.code
    assert "scale_gradient_" not in graph.code
