import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nearpeak.ops.cost import cost_of, registered
from nearpeak.ops.formulas import pointwise

aten = torch.ops.aten

ELSEWHERE = {
    "clone": "movement",
    "equal": "ends at the first difference, and gives no tensor",
    "native_dropout_backward": "random",
    "max": "its other overloads are reductions",
    "min": "its other overloads are reductions",
}


def work(op):
    return cost_of(op).work


def tagged():
    """All operators and overloads of aten that torch tags as pointwise."""
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, name = qualified.partition("::")
        packet, _, overload = name.partition(".")
        if namespace == "aten" and torch.Tag.pointwise in getattr(getattr(aten, packet), overload or "default").tags:
            yield packet, overload


def test_the_list_is_what_torch_tags(checked_torch):
    assert {packet for packet, _ in tagged()} == {*pointwise.TAGGED, *ELSEWHERE}
    overloads = {f"{packet}.{overload}" for packet, overload in tagged() if packet in ("max", "min")}
    assert overloads == set(pointwise.TAGGED_OVERLOADS)


def test_all_other_names_exist_in_torch():
    for name in (*pointwise.UNTAGGED, *(name for name in pointwise.WITHOUT_ARITHMETIC)):
        assert getattr(aten, name).overloads(), name
    assert {*pointwise.WITHOUT_ARITHMETIC} <= {*pointwise.TAGGED, *pointwise.UNTAGGED}
    assert {f"aten.{name}" for name in pointwise.TAGGED} <= {*registered()}


def test_an_addition_reads_two_and_writes_one(call):
    found = work(call(torch.add, torch.zeros(2048, 4096), torch.zeros(2048, 4096)))
    assert (found.bytes_read, found.bytes_written) == (2 * 2048 * 4096 * 4, 2048 * 4096 * 4)
    assert found.vector_flops == {"float32": 2048 * 4096}
    assert found.flops == {}


def test_the_same_tensor_twice_is_read_once(call):
    x = torch.zeros(100)
    found = work(call(torch.mul, x, x))
    assert (found.bytes_read, found.bytes_written) == (400, 400)
    assert found.vector_flops == {"float32": 100}


def test_a_broadcast_operand_is_read_at_its_own_size(call):
    found = work(call(torch.mul, torch.zeros(64, 100), torch.zeros(100)))
    assert (found.bytes_read, found.bytes_written) == (64 * 400 + 400, 64 * 400)


def test_an_expanded_operand_is_read_and_computed_once(call):
    found = work(call(torch.exp, torch.zeros(100).expand(64, 100)))
    assert found.bytes_read == 400
    assert found.bytes_written == 64 * 400
    assert found.vector_flops == {"float32": 100}


def test_a_slice_is_a_slice(call):
    found = work(call(torch.neg, torch.zeros(64, 100)[:, :50]))
    assert (found.bytes_read, found.bytes_written) == (64 * 200, 64 * 200)


def test_in_place_reads_and_writes_self(call):
    x, y = torch.zeros(100), torch.zeros(100)
    assert (work(call(x.add_, y)).bytes_read, work(call(x.add_, y)).bytes_written) == (800, 400)
    assert (work(call(x.mul_, 2.0)).bytes_read, work(call(x.mul_, 2.0)).bytes_written) == (400, 400)


def test_out_is_written_and_not_read(call):
    x, out = torch.zeros(100), torch.zeros(100)
    found = work(call(torch.exp, x, out=out))
    assert (found.bytes_read, found.bytes_written) == (400, 400)


def test_an_out_that_was_resized_counts_its_new_size(call):
    found = work(call(torch.exp, torch.zeros(100), out=torch.empty(0)))
    assert found.bytes_written == 400


def test_numbers_are_free(call):
    assert work(call(torch.mul, torch.zeros(100), torch.tensor(2.0))).bytes_read == 400
    assert work(call(torch.mul, torch.zeros(100), torch.tensor(2.0, dtype=torch.float64))).vector_flops == {
        "float32": 100
    }


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float64, {"float64": 10}),
        (torch.float32, {"float32": 10}),
        (torch.bfloat16, {"float32": 10}),
        (torch.float16, {"float32": 10}),
        (torch.complex64, {"float32": 10}),
        (torch.int64, {}),
        (torch.bool, {}),
    ],
)
def test_arithmetic_is_counted_in_the_dtype_it_runs_in(call, dtype, expected):
    x = torch.zeros(10, dtype=dtype)
    assert work(call(torch.mul, x, x)).vector_flops == expected


def test_integers_that_become_fractions_are_computed(call):
    x = torch.ones(10, dtype=torch.int64)
    found = work(call(torch.true_divide, x, 2))
    assert (found.bytes_read, found.bytes_written, found.vector_flops) == (80, 40, {"float32": 10})


def test_comparisons_write_one_byte_per_element(call):
    found = work(call(torch.gt, torch.zeros(100), 0.0))
    assert (found.bytes_read, found.bytes_written) == (400, 100)


def test_where_reads_the_condition_and_one_branch_for_each_element(call):
    found = work(call(torch.where, torch.zeros(100, dtype=torch.bool), torch.zeros(100), torch.ones(100)))
    assert (found.bytes_read, found.bytes_written, found.vector_flops) == (500, 400, {})


def test_where_with_a_number_or_a_row_may_need_nothing_else(call):
    condition, x = torch.zeros(10, 10, dtype=torch.bool), torch.zeros(10, 10)
    assert work(call(torch.where, condition, x, torch.tensor(1.0))).bytes_read == 100
    assert work(call(torch.where, condition, x, torch.zeros(10))).bytes_read == 140
    assert work(call(torch.where, condition, torch.zeros(10).expand(10, 10), x)).bytes_read == 140


def test_masked_fill_needs_only_the_mask(call):
    x, mask = torch.zeros(100), torch.zeros(100, dtype=torch.bool)
    copy = work(call(x.masked_fill, mask, 1.0))
    assert (copy.bytes_read, copy.bytes_written) == (100, 400)
    found = work(call(x.masked_fill_, mask, 1.0))
    assert (found.bytes_read, found.bytes_written, found.vector_flops) == (100, 0, {})


def test_a_power_of_zero_reads_nothing(call):
    x = torch.zeros(100)
    assert work(call(torch.pow, x, 2)).bytes_read == 400
    assert work(call(torch.pow, x, 0)).bytes_read == 0
    assert work(call(torch.pow, x, 0)).bytes_written == 400


def test_pointwise_maximum_is_no_reduction(call):
    op = call(torch.max, torch.zeros(100), torch.zeros(100))  # composite: torch runs maximum
    assert op.name == "aten.maximum.default"
    op = dataclasses.replace(op, name="aten.max.other")
    assert (cost_of(op).family, work(op).bytes_read, work(op).bytes_written) == ("pointwise", 800, 400)


def test_gradients_read_the_gradient_and_the_input(calls):
    x = torch.zeros(100, dtype=torch.bfloat16, requires_grad=True)
    ops = calls(lambda: torch.nn.functional.gelu(x).backward(torch.ones(100, dtype=torch.bfloat16)))
    (op,) = [op for op in ops if op.packet == "aten.gelu_backward"]
    assert (work(op).bytes_read, work(op).bytes_written) == (400, 200)


def test_glu_writes_half(call):
    found = work(call(torch.nn.functional.glu, torch.zeros(4, 100)))
    assert (found.bytes_read, found.bytes_written) == (1600, 800)


shapes = st.lists(st.integers(0, 7), min_size=1, max_size=3)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes, st.sampled_from([torch.float32, torch.bfloat16, torch.int32]))
def test_nothing_is_charged_beyond_the_operands(call, shape, dtype):
    x = torch.zeros(shape, dtype=dtype)
    found = work(call(torch.add, x, torch.zeros_like(x)))
    assert found.bytes == 3 * x.nbytes
    assert sum(found.vector_flops.values()) == (x.numel() if dtype.is_floating_point else 0)


def test_a_sparse_operand_is_not_known(call):
    dense = call(torch.add, torch.zeros(10, 10), torch.zeros(10, 10))
    empty = dataclasses.replace(dense.tensor("other"), shape=(0,), strides=(1,))
    op = dataclasses.replace(dense, arguments={**dense.arguments, "other": empty})
    cost = cost_of(op)
    assert (cost.model, cost.work.bytes_read, cost.work.bytes_written) == ("operands", 0, 400)
    in_place = dataclasses.replace(op, name="aten.add_.Tensor", outputs=(op.tensor("self"),), mutated=("self",))
    assert cost_of(in_place).work.bytes == 0


@pytest.mark.parametrize("change", [lambda x: x.clamp_(-1, 1), lambda x: x.nan_to_num_(), lambda x: x.clamp_min_(0)])
def test_what_leaves_usual_data_as_they_are_need_not_write_them(call, change):
    found = work(call(change, torch.zeros(100)))
    assert (found.bytes_read, found.bytes_written) == (400, 0)
    assert work(call(torch.relu_, torch.zeros(100))).bytes_written == 400
    assert work(call(torch.clamp, torch.zeros(100), -1, 1)).bytes_written == 400
