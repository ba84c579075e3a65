"""A live trace looks at tensors of the program without being seen by the program's own modes, or by its compiler."""

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nearpeak.trace.recorder import Recorder
from nearpeak.trace.trace import trace


class CountingOps(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


class CountingFunctions(TorchFunctionMode):
    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def training_step():
    """Attention to a padded batch, whose values are looked at, and an optimizer, whose gradients are."""
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(8, 32, 16)
    batch[:, 16:] = 0

    def step():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def test_a_program_that_counts_its_ops_or_functions_counts_the_same_in_a_traced_step():
    for kind in (CountingOps, CountingFunctions):
        step = training_step()
        step()
        with kind() as alone:
            step()
        with kind() as traced:
            trace(step, live=True)
        assert traced.count == alone.count > 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_functions_that_torch_itself_calls_are_not_counted_in_a_traced_step():
    sequences = [torch.randn(3, 4), torch.randn(5, 4)]  # made into one tensor by ops that no function is asked for

    def step():
        return torch.nested.to_padded_tensor(torch.nested.nested_tensor(sequences, layout=torch.strided), 0.0).mean()

    with CountingFunctions() as alone:
        step()
    with CountingFunctions() as traced:
        trace(step, live=True)
    assert traced.count == alone.count > 0


@torch.library.custom_op("nearpeak_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return torch.add(x, x)


def test_functions_that_an_operator_in_python_calls_are_counted_in_a_traced_step():
    def step():
        return torch.sigmoid(doubled(torch.ones(4)))

    with CountingFunctions() as alone:
        step()
    with CountingFunctions() as traced:
        trace(step, live=True)
    assert traced.count == alone.count > 0


def test_a_step_that_resets_the_compiler_makes_it_compile_none_of_the_trace():
    def step():
        torch._dynamo.reset()  # forgets which code is skipped
        return torch.ones(2) + 1

    trace(step, live=True)
    assert torch._dynamo.trace_rules.check(Recorder.__torch_dispatch__.__code__)
    assert not torch._dynamo.trace_rules.check(step.__code__)
