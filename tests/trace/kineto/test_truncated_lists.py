import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nearpeak
from nearpeak.bound.estimate import estimate_trace
from nearpeak.trace.kineto.arguments import UNKNOWN, RecordedTensor, Scalar, TensorList
from nearpeak.trace.kineto.operators import RecordedOperator, find_operator
from nearpeak.trace.kineto.read import read_trace
from nearpeak.trace.kineto.truncated_lists import KernelLaunch, has_truncated_lists, restore_lists

Write = Callable[..., Path]
ADAM = "FusedOptimizerTensorListMetadata<4>, at::native::FusedAdamMathFunctor<{}, 4, (at::native::ADAM_MODE)1, false>"
ADD = "TensorListMetadata<1>, at::native::(anonymous namespace)::BinaryOpScalarFunctor<{}, 1, 1, 0>, std::plus<float>"
SCALED = "TensorListScalarListMetadata<float, 2>, at::native::BinaryOpScalarListFunctor<{}, 2, 1, 1>, std::plus<float>"
LARGE = "TensorListMetadata<1, true>, at::native::UnaryOpFunctor<{}, 1, 1, 0, true>"


def kernel_name(form: str, dtype: str = "float") -> str:
    return f"void at::native::multi_tensor_apply_kernel<at::native::(anonymous namespace)::{form.format(dtype)}>(...)"


def launches(sizes: list[int], most_tensors: int, most_blocks: int = 320) -> list[int]:
    """The grids of the kernels for tensors of these sizes."""
    grids = []
    blocks = tensors = 0
    for size in sizes:
        chunks = -(-size // 65536)
        tensors += 1
        for chunk in range(chunks):
            blocks += 1
            last = chunk == chunks - 1
            if blocks == most_blocks or (tensors == most_tensors and last):
                grids.append(blocks)
                blocks, tensors = 0, 0 if last else 1
    return [*grids, blocks] if blocks else grids


def operator(name: str, *arguments: Any) -> tuple[RecordedOperator, tuple[Any, ...]]:
    found = find_operator(name, arguments)
    assert found is not None
    assert has_truncated_lists(found, arguments)
    return found, arguments


def adam() -> tuple[RecordedOperator, tuple[Any, ...]]:
    numbers = (Scalar(0.001), Scalar(0.9), Scalar(0.999), Scalar(0.01), Scalar(1e-8), Scalar(False), Scalar(False))
    return operator("aten::_fused_adamw_", *[UNKNOWN] * 6, *numbers, None, None)


def seen(size: int, dtype: str = "float32") -> RecordedTensor:
    return RecordedTensor((size,), (1,), dtype)


@given(st.lists(st.integers(min_value=1, max_value=3_000_000), min_size=31, max_size=200))
def test_the_least_number_of_elements_is_never_more_than_there_are(sizes: list[int]):
    for form, name, most_tensors, most_blocks in (
        (ADD, "aten::_foreach_add_", 110, 320),
        (LARGE, "aten::_foreach_sqrt_", 770, 2240),
    ):
        grids = launches(sizes, most_tensors, most_blocks)
        given_ = (UNKNOWN, Scalar(1)) if name.endswith("add_") else (UNKNOWN,)
        found = restore_lists(*operator(name, *given_), [KernelLaunch(kernel_name(form), grid) for grid in grids], ())
        assert found is not None
        assert not found.exact
        assert isinstance(found.arguments[0], TensorList)
        (flat,) = found.arguments[0].tensors
        chunks = sum(-(-size // 65536) for size in sizes)
        assert chunks - len(sizes) - most_tensors * len(grids) <= math.prod(flat.shape) / 65536
        assert len(sizes) <= math.prod(flat.shape) <= sum(sizes)


def test_gradients_that_make_as_many_chunks_are_the_members():
    sizes = [1_000_000, 70_000, 300, *[2_000_000] * 40]
    blocks = [KernelLaunch(kernel_name(ADAM, "c10::BFloat16"), grid) for grid in launches(sizes, 36)]
    gradients = [seen(size, "bfloat16") for size in sizes]
    found = restore_lists(*adam(), blocks, gradients * 3)  # three passes before the step
    assert found is not None
    assert found.exact
    parameters, grads, first, second, largest, steps = found.arguments[:6]
    assert parameters == grads == first == second
    assert isinstance(parameters, TensorList)
    assert sorted(math.prod(item.shape) for item in parameters.tensors) == sorted(sizes)
    assert {item.dtype for item in parameters.tensors} == {"bfloat16"}
    assert largest == TensorList(())
    assert isinstance(steps, TensorList)
    assert len(steps.tensors) == len(sizes)
    for other in (gradients[:-1], [*gradients, seen(70_000, "bfloat16")], [seen(size) for size in sizes], ()):
        least = restore_lists(*adam(), blocks, other)
        assert least is not None
        assert not least.exact


def test_kernels_that_do_not_tell():
    assert restore_lists(*adam(), [], [seen(5)]) is None
    assert restore_lists(*adam(), [KernelLaunch("elementwise_kernel", 5)], [seen(5)]) is None
    assert restore_lists(*adam(), [KernelLaunch(kernel_name(ADAM), None)], [seen(5)]) is None
    assert restore_lists(*adam(), [KernelLaunch(kernel_name(ADAM, "Odd"), 5)], [seen(5)]) is None
    assert (
        restore_lists(*adam(), [KernelLaunch(kernel_name(ADAM), 5), KernelLaunch(kernel_name(ADAM, "double"), 5)], ())
        is None
    )


def test_a_metadata_with_a_type_before_the_number_of_lists():
    given_ = operator("aten::_foreach_add.ScalarList".partition(".")[0], UNKNOWN, Scalar(1))
    found = restore_lists(*given_, [KernelLaunch(kernel_name(SCALED), 320)], ())
    assert found is not None
    assert found.arguments[0] == TensorList((seen((320 - 64) * 65536 + 64),))


@pytest.mark.parametrize("shown", [True, False])
def test_a_step_of_an_optimizer_in_a_file(write_trace: Write, make: Any, shown: bool):
    shape = [512, 512]
    events = [make.tensor_op("aten::exp", 0, 10, shape)]
    if shown:
        events += [make.tensor_op("torch::autograd::AccumulateGrad", 20 + n, 0.5, shape) for n in range(40)]
    lists = {
        "Input Dims": [[]] * 15,
        "Input Strides": [[]] * 15,
        "Input type": [*["TensorList"] * 6, *["Scalar"] * 7, "", ""],
        "Concrete Inputs": [*[""] * 6, "0.001", "0.9", "0.999", "0.01", "1e-08", "False", "False", "", ""],
    }
    events += [
        make.span("Optimizer.step#AdamW.step", 100, 50, "user_annotation"),
        make.span("aten::_fused_adamw_", 110, 30, **lists, **{"External id": 9}),
        make.kernel(kernel_name(ADAM), 200, 100, **{"External id": 9, "grid": [40 * 4, 1, 1]}),
    ]
    found = read_trace(write_trace(*events))
    assert sum("long lists" in note for note in found.notes) == 1
    machine = replace(nearpeak.machine("h100-sxm"), cache_bytes=1e6)
    op = estimate_trace(found.trace, machine, ceilings="theoretical").ops[-1]
    if shown:
        assert (op.name, op.model) == ("aten._fused_adamw_.default", "formula")
        assert op.bytes_read == 4 * 4 * 40 * 512 * 512
    else:
        assert (op.name, op.model) == ("least.aten::_fused_adamw_", "operands")
        assert (op.bytes_read, op.bytes_written) == (0, 4 * 4 * ((160 - 36) * 65536 + 36))
    assert 0 < op.seconds < 4 * 7 * 40 * 512 * 512 / 3.35e12


def test_the_result_of_indexing_has_as_many_elements_as_its_kernel_has_blocks_for(write_trace: Write, make: Any):
    kernel = "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::{}<x> >"
    events = []
    for number, name in enumerate(("index_kernel_impl", "index_put_kernel_impl")):
        start, key = 100 * number, {"External id": number + 1}
        events.append(make.tensor_op("aten::index", start, 50, [64, 64], **key))
        events.append(make.kernel(kernel.format(name), start + 60, 10, **key, grid=[5, 1, 1]))
    for event in events[::2]:
        event["args"]["Input type"].append("")
        event["args"]["Input Dims"].append([])
    found = read_trace(write_trace(*events))
    assert [op.name for op in found.trace.ops] == ["least.aten::index", "unknown.aten::index"]
    (touched,) = found.trace.ops[0].tensors("touched")
    assert (touched.elements, touched.dtype) == (4 * 512 + 1, "float32")
    bound = estimate_trace(found.trace, nearpeak.machine("h100-sxm"), ceilings="theoretical")
    assert bound.ops[0].bytes_written == 4 * (4 * 512 + 1)
