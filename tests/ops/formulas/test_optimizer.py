import dataclasses

import pytest
import torch

from nearpeak.ops.cost import cost_of, registered

aten = torch.ops.aten
PARAMETERS = 100 + 64
ELSEWHERE = {"aten._foreach_mm"}  # a matrix product


def work(op):
    return cost_of(op).work


def of(op):
    assert cost_of(op).family == "optimizer", op.name
    return work(op).bytes_read, work(op).bytes_written


def tensors():
    return [torch.zeros(100), torch.zeros(8, 8)]


def test_every_foreach_operator_of_torch_has_a_formula(checked_torch):
    qualified = [name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()]
    in_torch = {name.replace("::", ".") for name in qualified if name.startswith("aten::_foreach_")}
    assert {name for name in registered() if name.startswith("aten._foreach_")} - ELSEWHERE == in_torch - ELSEWHERE


def test_in_place_over_lists_reads_self(call):
    x, y = tensors(), tensors()
    op = call(torch._foreach_add_, x, y)
    assert of(op) == (2 * PARAMETERS * 4, PARAMETERS * 4)
    assert work(op).vector_flops == {"float32": PARAMETERS}
    assert of(call(torch._foreach_mul_, x, 0.9)) == (PARAMETERS * 4, PARAMETERS * 4)


def test_functional_over_lists_writes_new_ones(call):
    op = call(torch._foreach_addcmul, tensors(), tensors(), tensors(), 1.0)
    assert of(op) == (3 * PARAMETERS * 4, PARAMETERS * 4)
    assert work(op).vector_flops == {"float32": PARAMETERS}


def test_a_number_for_all_is_free(call):
    assert of(call(torch._foreach_mul_, tensors(), torch.tensor(2.0))) == (PARAMETERS * 4, PARAMETERS * 4)


def test_the_same_list_twice_is_read_once(call):
    x = tensors()
    assert of(call(torch._foreach_mul, x, x)) == (PARAMETERS * 4, PARAMETERS * 4)


def test_zero_and_copy_do_not_read_self(call):
    assert of(call(torch._foreach_zero_, tensors())) == (0, PARAMETERS * 4)
    half = [tensor.bfloat16() for tensor in tensors()]
    assert of(call(torch._foreach_copy_, tensors(), half)) == (PARAMETERS * 2, PARAMETERS * 4)


def test_steps_without_dimensions_are_written(call):
    assert of(call(torch._foreach_add_, [torch.tensor(1.0), torch.tensor(1.0)], 1)) == (0, 8)


def test_mixed_dtypes_are_counted_apart(call):
    op = call(torch._foreach_exp, [torch.zeros(100), torch.zeros(64, dtype=torch.float64)])
    assert work(op).vector_flops == {"float32": 100, "float64": 64}


def test_a_norm_of_each_is_a_reduction(call):
    op = call(torch._foreach_norm, tensors())
    assert cost_of(op).family == "reduction"
    assert (work(op).bytes_read, work(op).bytes_written) == (PARAMETERS * 4, 8)
    assert work(op).vector_flops == {"float32": PARAMETERS - 2}


def fused(calls, create, **options):
    """The fused op of one step."""
    parameters = [torch.nn.Parameter(tensor) for tensor in tensors()]
    steps = create(parameters, fused=True, **options)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    steps.step()  # creates the state
    (op,) = [op for op in calls(steps.step) if op.packet.startswith("aten._fused_")]
    return op


@pytest.mark.parametrize("create", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_reads_four_and_writes_three(calls, create):
    op = fused(calls, create, weight_decay=0.0)
    assert of(op) == (4 * PARAMETERS * 4, 3 * PARAMETERS * 4)
    assert work(op).vector_flops == {"float32": 12 * PARAMETERS}


def test_amsgrad_has_one_more_state(calls):
    op = fused(calls, torch.optim.AdamW, amsgrad=True)
    assert of(op) == (5 * PARAMETERS * 4, 4 * PARAMETERS * 4)
    assert work(op).vector_flops == {"float32": 15 * PARAMETERS}


def test_gradients_are_stored_where_they_are_unscaled(calls):
    op = fused(calls, torch.optim.Adam)
    scale = op.arguments["state_steps"][0]
    op = dataclasses.replace(op, arguments={**op.arguments, "grad_scale": scale})
    assert of(op) == (4 * PARAMETERS * 4, 4 * PARAMETERS * 4)


def test_sgd(calls):
    assert of(fused(calls, torch.optim.SGD, lr=0.1)) == (2 * PARAMETERS * 4, PARAMETERS * 4)
    op = fused(calls, torch.optim.SGD, lr=0.1, momentum=0.9)
    assert of(op) == (3 * PARAMETERS * 4, 2 * PARAMETERS * 4)
    assert work(op).vector_flops == {"float32": 4 * PARAMETERS}
    first = dataclasses.replace(op, arguments={**op.arguments, "is_first_step": True})
    assert of(first) == (2 * PARAMETERS * 4, 2 * PARAMETERS * 4)


def test_adagrad(calls):
    assert of(fused(calls, torch.optim.Adagrad)) == (3 * PARAMETERS * 4, 2 * PARAMETERS * 4)


def test_the_functional_step_writes_all_results(call):
    lists = [tensors() for _ in range(4)]
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    steps = [torch.ones(()) for _ in range(2)]
    op = call(aten._fused_adam, *lists, [], steps, **options, amsgrad=False, maximize=False)
    assert of(op) == (4 * PARAMETERS * 4, 4 * PARAMETERS * 4)


def test_unscaling_reads_and_writes_the_gradients(call):
    op = call(aten._amp_foreach_non_finite_check_and_unscale_, tensors(), torch.zeros(1), torch.ones(1))
    assert of(op) == (PARAMETERS * 4, PARAMETERS * 4 + 4)
    assert work(op).vector_flops == {"float32": PARAMETERS}
