import pytest

from nearpeak.trace.kineto.arguments import UNKNOWN, RecordedTensor, Scalar, TensorList, parse_arguments
from nearpeak.trace.kineto.recording import Inputs


def one(name: str, dims: object = None, strides: object = None, value: object = "") -> object:
    [argument] = parse_arguments(Inputs([dims if dims is not None else []], [strides or []], [name], [value]))
    return argument


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float", "float32"),
        ("c10::BFloat16", "bfloat16"),
        ("c10::Half", "float16"),
        ("long int", "int64"),
        ("long", "int64"),
        ("signed char", "int8"),
        ("unsigned char", "uint8"),
        ("bool", "bool"),
        ("c10::complex<float>", "complex64"),
        ("c10::Float8_e4m3fn", "float8_e4m3fn"),
    ],
)
def test_dtypes(name: str, dtype: str):
    assert one(name, [2, 3], [3, 1]) == RecordedTensor((2, 3), (3, 1), dtype)


def test_without_strides_a_tensor_is_contiguous():
    assert parse_arguments(Inputs([[4, 2, 3]], None, ["float"], None)) == (
        RecordedTensor((4, 2, 3), (6, 3, 1), "float32"),
    )


def test_strides_that_are_there_are_kept():
    assert one("float", [4, 3], [0, 1]) == RecordedTensor((4, 3), (0, 1), "float32")
    assert one("float", [], []) == RecordedTensor((), (), "float32")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("15", 15),
        ("-1", -1),
        ("1.", 1.0),
        ("0.90000000000000002", 0.9),
        ("1e-05", 1e-5),
        ("True", True),
        ("False", False),
        ("inf", float("inf")),
    ],
)
def test_scalars(text: str, value: object):
    found = one("Scalar", value=text)
    assert found == Scalar(value)
    assert type(found.value) is type(value)  # type: ignore[attr-defined]


def test_lists_of_scalars():
    assert one("ScalarList", value="[4, 2048, -1]") == Scalar((4, 2048, -1))
    assert one("ScalarList", value="[]") == Scalar(())
    assert one("ScalarList", value="[True, False]") == Scalar((True, False))


def test_lists_of_tensors_have_no_dtype():
    assert one("TensorList", [[2, 3], []], [[3, 1], []]) == TensorList(
        (RecordedTensor((2, 3), (3, 1), None), RecordedTensor((), (), None))
    )


def test_a_list_that_was_left_out_is_unknown_and_an_empty_one_beside_others_is_empty():
    assert one("TensorList", []) is UNKNOWN
    both = parse_arguments(Inputs([[[2]], []], [[[1]], []], ["TensorList", "TensorList"], ["", ""]))
    assert both == (TensorList((RecordedTensor((2,), (1,), None),)), TensorList(()))


def test_what_is_absent_and_what_is_not_understood():
    assert one("") is None
    assert one("Scalar", value="") is UNKNOWN
    assert one("Scalar", value="__import__('os')") is UNKNOWN
    assert one("std::string") is UNKNOWN
    assert one("float", "odd") is UNKNOWN
    assert parse_arguments(Inputs(None, None, None, None)) == ()


@pytest.mark.parametrize(
    ("dims", "strides"),
    [
        ([-1], [1]),
        ([2**60], [1]),
        ([2**30, 2**30], [2**30, 1]),
        ([2, 3], [2**49, 2**49]),
        ([True], [1]),
        ([1] * 65, None),
    ],
)
def test_a_tensor_that_no_memory_holds_is_not_known(dims, strides):
    assert parse_arguments(Inputs([dims], [strides], ["float"], [""])) == (UNKNOWN,)


@pytest.mark.parametrize("value", ["9" * 30, "9" * 5000, "[1, " + "9" * 30 + "]", 10**30])
def test_an_integer_that_torch_cannot_have_is_not_known(value):
    (found,) = parse_arguments(Inputs([[]], [[]], ["Scalar"], [value]))
    assert found is UNKNOWN or found.value == float("inf")
