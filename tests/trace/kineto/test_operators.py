import pytest
import torch

from nearpeak.trace.kineto.arguments import UNKNOWN, Argument, RecordedTensor, Scalar, TensorList
from nearpeak.trace.kineto.operators import find_operator, infer_results


def seen(*shape: int, dtype: str = "float32") -> RecordedTensor:
    return RecordedTensor(shape, torch.empty(shape, device="meta").stride(), dtype)


@pytest.mark.parametrize(
    ("event", "arguments", "name"),
    [
        ("aten::mm", (seen(4, 3), seen(3, 2)), "aten.mm.default"),
        ("aten::mm", (seen(4, 3), seen(3, 2), seen(4, 2)), "aten.mm.out"),
        ("aten::mul", (seen(4), seen(4)), "aten.mul.Tensor"),
        ("aten::mul", (seen(4), Scalar(2.0)), "aten.mul.Scalar"),
        ("aten::sum", (seen(4), None), "aten.sum.default"),
        ("aten::sum", (seen(4, 2), Scalar((0,)), Scalar(True), None), "aten.sum.dim_IntList"),
        ("aten::pow", (seen(4), Scalar(2)), "aten.pow.Tensor_Scalar"),
        ("aten::to", (seen(4), Scalar(15), Scalar(False), Scalar(False), None), "aten.to.dtype"),
        ("aten::cat", (TensorList((seen(4), seen(4))), Scalar(0)), "aten.cat.default"),
        ("aten::zeros", (Scalar((2, 2)), Scalar(6), Scalar(0), None, None), "aten.zeros.default"),
        ("aten::max", (seen(4, 2), Scalar(1), Scalar(False)), "aten.max.dim"),
        ("aten::max", (seen(4, 2),), "aten.max.default"),
        ("aten::std", (seen(4, 2), Scalar((-1,)), Scalar(True), Scalar(False)), "aten.std.dim"),
        ("aten::std", (seen(4, 2), Scalar((-1,)), Scalar(1), Scalar(False)), "aten.std.correction"),
        ("aten::where", (seen(4, dtype="bool"), Scalar(0), seen(4)), "aten.where.ScalarSelf"),
    ],
)
def test_the_overload_is_the_one_that_takes_the_arguments(event: str, arguments: tuple[Argument, ...], name: str):
    operator = find_operator(event, arguments)
    assert operator is not None
    assert operator.name == name


def test_no_operator():
    assert find_operator("aten::mm", (seen(4, 3),)) is None
    assert find_operator("nobody::knows", (seen(4, 3),)) is None
    assert find_operator("not_a_namespace", ()) is None


def test_composite_operators_are_known_as_such():
    linear = find_operator("aten::linear", (seen(4, 3), seen(2, 3), None))
    copy = find_operator("aten::_to_copy", (seen(4), Scalar(15), None, None, None, Scalar(False), None))
    assert linear is not None and linear.composite
    assert copy is not None and not copy.composite
    for event in ("aten::silu_backward", "aten::mul"):  # the first has parts and a kernel
        both = find_operator(event, (seen(4), seen(4)))
        assert both is not None and not both.composite
    norm = (seen(2, 3, 4), None, None, None, None, Scalar(True), Scalar(0.1), Scalar(1e-5))
    batch_norm = find_operator("aten::native_batch_norm", norm)
    assert batch_norm is not None and not batch_norm.composite  # it is taken apart in Python only
    assert copy.mutated == ()


def shapes(event: str, *arguments: Argument) -> list[tuple[tuple[int, ...], str, int]] | None:
    operator = find_operator(event, arguments)
    assert operator is not None
    results = infer_results(operator, arguments)
    return None if results is None else [(item.shape, item.dtype, item.memory) for item in results]


def test_results_with_memory_of_their_own():
    assert shapes("aten::mm", seen(4, 3), seen(3, 2)) == [((4, 2), "float32", 2)]
    assert shapes("aten::_to_copy", seen(4), Scalar(15), None, None, None, Scalar(False), None) == [
        ((4,), "bfloat16", 1)
    ]
    assert shapes("aten::zeros", Scalar((2, 2)), Scalar(15), Scalar(0), None, None) == [((2, 2), "bfloat16", 0)]
    two = shapes("aten::max", seen(4, 2), Scalar(1), Scalar(False))
    assert two is not None and [item[:2] for item in two] == [((4,), "float32"), ((4,), "int64")]
    assert len({item[2] for item in two} | {0}) == 3


def test_views_and_in_place_operators_have_the_memory_of_their_argument():
    assert shapes("aten::transpose", seen(4, 3), Scalar(0), Scalar(1)) == [((3, 4), "float32", 0)]
    assert shapes("aten::add_", seen(4), seen(4), Scalar(1)) == [((4,), "float32", 0)]
    assert shapes("aten::mm", seen(4, 3), seen(3, 2), seen(4, 2)) == [((4, 2), "float32", 2)]


def test_a_number_of_the_users_does_not_change_the_dtype():
    assert shapes("aten::mul", seen(4, dtype="int64"), seen(dtype="float64")) == [((4,), "float32", 1)]
    assert shapes("aten::mul", seen(4, dtype="bfloat16"), seen(dtype="float64")) == [((4,), "bfloat16", 1)]


def test_tensors_that_are_not_there_and_strings_that_are_not_written():
    assert shapes("aten::gelu", seen(4), None) == [((4,), "float32", 1)]
    q, lse, word = seen(1, 2, 8, 64, dtype="bfloat16"), seen(1, 2, 8, 1), seen(dtype="int64")
    backward = (q, q, q, q, q, lse, word, word, None, None, None, Scalar(8), Scalar(8), Scalar(0.0), Scalar(True))
    found = shapes("aten::_scaled_dot_product_cudnn_attention_backward", *backward, Scalar(0.125))
    assert found is not None
    assert [item[0] for item in found] == [(1, 2, 8, 64)] * 3


def test_what_depends_on_values_or_is_not_shown_is_not_known():
    assert shapes("aten::nonzero", seen(4)) is None
    assert shapes("aten::_foreach_add_", UNKNOWN, Scalar(1)) is None
    assert shapes("aten::cat", TensorList((RecordedTensor((4,), (1,), None),)), Scalar(0)) is None


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("aten::unbind", (Scalar(0),)),
        ("aten::split", (Scalar(1), Scalar(0))),
        ("aten::chunk", (Scalar(10**9), Scalar(0))),
        ("aten::tensor_split", (Scalar(10**9), Scalar(0))),
    ],
)
def test_an_op_that_makes_too_many_tensors_has_unknown_results(name, arguments):
    whole = (RecordedTensor((2**40,), (1,), "float32"), *arguments)
    assert infer_results(find_operator(name, whole), whole) is None


@pytest.mark.parametrize("name", ["aten::__class__", "aten::", "::", "a.b::c\x1b", "aten::\ud800", "_dir::append"])
def test_what_is_no_name_of_an_operator_is_none(name):
    assert find_operator(name, (RecordedTensor((2,), (1,), "float32"),)) is None
