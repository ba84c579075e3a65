import pytest
import torch

from nearpeak.ops.cost import cost_of, registered
from nearpeak.ops.formulas.matrix import engines

aten = torch.ops.aten


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def own_names(module):
    return [name for name, function in registered().items() if function.__module__ == module.__name__]


def test_mm(call):
    cost = cost_of(call(torch.mm, empty(8, 16), empty(16, 4)))
    assert (cost.family, cost.model) == ("matrix", "formula")
    assert cost.flops == {"bfloat16": 2 * 8 * 16 * 4}
    assert cost.vector_flops == {}
    assert cost.work.bytes_read == 2 * (8 * 16 + 16 * 4)
    assert cost.work.bytes_written == 2 * 8 * 4


def test_out_is_written_and_not_read(call):
    a = torch.zeros(4, 4)
    cost = cost_of(call(torch.mm, a, torch.zeros(4, 4), out=torch.empty(4, 4)))
    assert (cost.work.bytes_read, cost.work.bytes_written) == (128, 64)


def test_the_same_tensor_twice_is_read_once(call):
    a = torch.zeros(4, 4)
    assert cost_of(call(torch.mm, a, a)).work.bytes_read == 64


def test_an_expanded_factor_is_read_once(call):
    cost = cost_of(call(torch.bmm, torch.zeros(1, 4, 4).expand(8, 4, 4), torch.zeros(8, 4, 4)))
    assert cost.work.bytes_read == 64 + 8 * 64
    assert cost.vector_flops == {"float32": 2 * 8 * 64}


@pytest.mark.parametrize("beta, read", [(1, 4 * (3 + 8 + 6)), (0, 4 * (8 + 6)), (0.0, 4 * (8 + 6))])
def test_addmm_reads_the_bias_unless_beta_is_zero(call, beta, read):
    cost = cost_of(call(torch.addmm, torch.zeros(3), torch.zeros(4, 2), torch.zeros(2, 3), beta=beta))
    assert cost.work.bytes_read == read


def test_alpha_zero_multiplies_nothing(call):
    cost = cost_of(call(torch.addmm, torch.zeros(3), torch.zeros(4, 2), torch.zeros(2, 3), alpha=0))
    assert cost.work.bytes_read == 12
    assert cost.vector_flops == {}


def test_in_place_addmm_reads_and_writes_self(call):
    target = torch.zeros(4, 3)
    cost = cost_of(call(target.addmm_, torch.zeros(4, 2), torch.zeros(2, 3)))
    assert cost.work.bytes_read == 4 * (12 + 8 + 6)
    assert cost.work.bytes_written == 4 * 12
    cost = cost_of(call(target.addmm_, torch.zeros(4, 2), torch.zeros(2, 3), beta=0))
    assert cost.work.bytes_read == 4 * (8 + 6)


@pytest.mark.parametrize(
    "function, arguments, flops",
    [
        (torch.mv, ((5, 7), (7,)), 2 * 5 * 7),
        (torch.dot, ((7,), (7,)), 2 * 7),
        (torch.vdot, ((7,), (7,)), 2 * 7),
        (torch.addmv, ((5,), (5, 7), (7,)), 2 * 5 * 7),
        (torch.baddbmm, ((3, 2, 4), (3, 2, 5), (3, 5, 4)), 2 * 3 * 2 * 5 * 4),
        (torch.addbmm, ((2, 4), (3, 2, 5), (3, 5, 4)), 2 * 3 * 2 * 5 * 4),
        (aten._addmm_activation, ((4,), (2, 5), (5, 4)), 2 * 2 * 5 * 4 + 8),
    ],
)
def test_each_product(call, function, arguments, flops):
    op = call(function, *(torch.zeros(shape) for shape in arguments))
    cost = cost_of(op)
    assert cost.vector_flops == {"float32": flops}
    assert cost.work.bytes_read == sum(tensor.bytes for tensor in op.inputs)
    assert cost.work.bytes_written == op.outputs[0].bytes


def test_linear_and_matmul_that_are_dispatched_whole(call):
    with torch.inference_mode():
        cost = cost_of(call(torch.nn.functional.linear, torch.zeros(2, 3, 8), torch.zeros(4, 8), torch.zeros(4)))
        assert cost.vector_flops == {"float32": 2 * 6 * 8 * 4}
        assert cost.work.bytes_read == 4 * (48 + 32 + 4)
        cost = cost_of(call(torch.matmul, torch.zeros(2, 3, 8), torch.zeros(8)))
        assert cost.vector_flops == {"float32": 2 * 6 * 8}


@pytest.mark.parametrize(
    "dtype, tf32, expected",
    [
        ("float64", False, ({"float64": 6.0}, {})),
        ("float32", True, ({"tfloat32": 6.0}, {})),
        ("float32", False, ({}, {"float32": 6.0})),
        ("float16", False, ({"float16": 6.0}, {})),
        ("float8_e5m2", False, ({"float8": 6.0}, {})),
        ("float4_e2m1fn_x2", False, ({"float4": 6.0}, {})),
        ("int8", False, ({"int8": 6.0}, {})),
        ("int64", False, ({}, {})),
        ("complex64", False, ({}, {"float32": 18.0})),
        ("complex128", True, ({"float64": 18.0}, {})),
    ],
)
def test_the_engine_by_dtype(dtype, tf32, expected):
    assert engines(dtype, 6.0, tf32=tf32) == expected


def test_an_empty_result_costs_nothing(call):
    assert cost_of(call(torch.mm, torch.zeros(0, 4), torch.zeros(4, 8))).work.bytes == 0


def test_an_empty_contraction_only_writes(call):
    cost = cost_of(call(torch.mm, torch.zeros(4, 0), torch.zeros(0, 8)))
    assert (cost.vector_flops, cost.work.bytes_read, cost.work.bytes_written) == ({}, 0, 128)


def test_int_mm(call):
    cost = cost_of(call(torch._int_mm, empty(32, 16, dtype=torch.int8), empty(16, 8, dtype=torch.int8)))
    assert cost.flops == {"int8": 2 * 32 * 16 * 8}
    assert cost.work.bytes_written == 4 * 32 * 8


def test_scaled_mm_reads_its_scales(call):
    a, b = empty(32, 16, dtype=torch.float8_e4m3fn), empty(64, 16, dtype=torch.float8_e4m3fn).t()
    one = empty(dtype=torch.float32)
    cost = cost_of(call(torch._scaled_mm, a, b, one, empty(dtype=torch.float32), out_dtype=torch.bfloat16))
    assert cost.flops == {"float8": 2 * 32 * 16 * 64}
    assert cost.work.bytes_read == 32 * 16 + 16 * 64 + 4 + 4
    rows, columns = empty(32, 1, dtype=torch.float32), empty(1, 64, dtype=torch.float32)
    cost = cost_of(call(torch._scaled_mm, a, b, rows, columns, out_dtype=torch.bfloat16))
    assert cost.work.bytes_read == 32 * 16 + 16 * 64 + 4 * 32 + 4 * 64


def test_the_padding_of_block_scales_is_not_read():
    from nearpeak.ops.op import Op
    from nearpeak.ops.tensor import Tensor

    def tensor(number, shape, dtype):
        return Tensor(shape=shape, strides=(*shape[1:], 1), dtype=dtype, storage=number)

    op = Op(
        name="aten._scaled_mm.default",
        arguments={
            "self": tensor(0, (1, 32), "float4_e2m1fn_x2"),  # 64 numbers
            "mat2": tensor(1, (32, 8), "float4_e2m1fn_x2"),
            "scale_a": tensor(2, (128, 4), "float8_e4m3fn"),
            "scale_b": tensor(3, (128, 4), "float8_e4m3fn"),
            "bias": None,
        },
        outputs=(tensor(4, (1, 8), "bfloat16"),),
    )
    cost = cost_of(op)
    assert cost.flops == {"float4": 2 * 64 * 8}
    assert cost.work.bytes_read == 32 + 256 + 4 + 32


def test_grouped_mm_reads_one_expert_at_the_least(call):
    offs = torch.empty(4, dtype=torch.int32, device="meta")
    cost = cost_of(call(torch._grouped_mm, empty(32, 16), empty(4, 16, 8), offs=offs))
    assert cost.flops == {"bfloat16": 2 * 32 * 16 * 8}
    assert cost.work.bytes_read == 2 * (32 * 16 + 16 * 8) + 16
    cost = cost_of(call(torch._grouped_mm, empty(4, 8, 16), empty(16, 32), offs=offs))
    assert cost.flops == {"bfloat16": 2 * 32 * 16 * 8}
    assert cost.work.bytes_read == 2 * (8 * 16 + 16 * 32) + 16


def test_grouped_mm_with_a_cut_contraction_writes_every_group(call):
    offs = torch.empty(4, dtype=torch.int32, device="meta")
    cost = cost_of(call(torch._grouped_mm, empty(8, 32), empty(32, 16), offs=offs))
    assert cost.flops == {"bfloat16": 2 * 8 * 32 * 16}
    assert cost.work.bytes_read == 2 * (8 * 32 + 32 * 16) + 16
    assert cost.work.bytes_written == 2 * 4 * 8 * 16


def test_grouped_mm_of_stacks_is_batched(call):
    cost = cost_of(call(torch._grouped_mm, empty(4, 8, 16), empty(4, 16, 32)))
    assert cost.flops == {"bfloat16": 2 * 4 * 8 * 16 * 32}
    assert cost.work.bytes_read == 2 * (4 * 8 * 16 + 4 * 16 * 32)


def test_scaled_grouped_mm(call):
    a, b = empty(32, 16, dtype=torch.float8_e4m3fn), empty(4, 16, 16, dtype=torch.float8_e4m3fn).transpose(1, 2)
    scales = empty(32, dtype=torch.float32), empty(4, 16, dtype=torch.float32)
    offs = torch.empty(4, dtype=torch.int32, device="meta")
    cost = cost_of(call(torch._scaled_grouped_mm, a, b, *scales, offs=offs, out_dtype=torch.bfloat16))
    assert cost.flops == {"float8": 2 * 32 * 16 * 16}
    assert cost.work.bytes_read == 32 * 16 + 16 * 16 + 4 * 32 + 4 * 16 + 16


def test_an_outer_product_with_an_addend(call):
    added, left, right = torch.zeros(6, 4), torch.zeros(6), torch.zeros(4)
    cost = cost_of(call(torch.addr, added, left, right))
    assert (cost.family, cost.vector_flops) == ("pointwise", {"float32": 2 * 24})
    assert (cost.work.bytes_read, cost.work.bytes_written) == (4 * 34, 4 * 24)
    alone = cost_of(call(torch.addr, added, left, right, beta=0))
    assert (alone.work.bytes_read, alone.vector_flops) == (4 * 10, {"float32": 24})


def test_three_factors_are_charged_their_bytes(call):
    bilinear = torch.nn.Bilinear(3, 4, 5, bias=False)
    with torch.no_grad():
        op = call(torch.ops.aten._trilinear, torch.zeros(2, 3), bilinear.weight, torch.zeros(2, 4),
                  [1, 3], [0], [1, 2], [2, 3])  # fmt: skip
    cost = cost_of(op)
    assert (cost.flops, cost.vector_flops) == ({}, {})
    assert (cost.work.bytes_read, cost.work.bytes_written) == (4 * (6 + 60 + 8), 4 * 10)


def test_a_sparse_factor_is_not_known(call):
    from dataclasses import replace

    op = call(torch.mm, empty(8, 16), empty(16, 4))
    sparse = replace(op.tensor("mat2"), shape=(0,), strides=(1,))
    assert cost_of(replace(op, arguments={**op.arguments, "mat2": sparse})).flops == {}


@pytest.mark.skipif(not hasattr(torch, "_foreach_mm"), reason="this torch has none")
def test_products_of_lists(call):
    left, right = [torch.zeros(8, 16), torch.zeros(2, 3)], [torch.zeros(16, 4), torch.zeros(3, 5)]
    cost = cost_of(call(torch._foreach_mm, left, right))
    assert cost.vector_flops == {"float32": 2 * (8 * 16 * 4 + 2 * 3 * 5)}
    assert (cost.work.bytes_read, cost.work.bytes_written) == (4 * (128 + 64 + 6 + 15), 4 * (32 + 10))
