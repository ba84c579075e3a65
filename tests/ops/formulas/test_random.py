import pytest
import torch

from nearpeak.ops.cost import cost_of
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor


def work(op):
    return cost_of(op).work


def of(op):
    assert cost_of(op).family == "random", op.name
    return work(op).bytes_read, work(op).bytes_written


@pytest.mark.parametrize(
    "function", [torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.exponential_, torch.Tensor.bernoulli_]
)
def test_filling_in_place_reads_nothing(call, function):
    assert of(call(function, torch.zeros(100))) == (0, 400)


@pytest.mark.parametrize("function", [torch.rand_like, torch.randn_like])
def test_like_reads_nothing(calls, function):
    op = calls(function, torch.zeros(100))[0]
    assert of(op) == (0, 400)


def test_new_numbers_are_written(calls):
    assert of(calls(torch.rand, 100)[0]) == (0, 400)
    assert of(calls(torch.randint, 10, (100,))[0]) == (0, 800)
    assert of(calls(torch.randperm, 100)[0]) == (0, 800)


def test_probabilities_are_read(call):
    p = torch.full((100,), 0.5)
    assert of(call(torch.bernoulli, p)) == (400, 400)
    assert of(call(torch.Tensor.bernoulli_, torch.zeros(100, dtype=torch.bfloat16), p)) == (400, 200)
    assert of(call(torch.normal, p, p)) == (400, 400)
    assert of(call(torch.multinomial, p, 1)) == (400, 8)


def test_dropout_writes_its_mask(call):
    op = call(torch.native_dropout, torch.zeros(100), 0.1, True)
    assert of(op) == (pytest.approx(400 * (1 - 0.1**8)), 500)
    assert work(op).vector_flops == {"float32": pytest.approx(90)}


def dropout(p, train):
    x, y, mask = (
        Tensor(shape=(100,), strides=(1,), dtype=dtype, storage=number)
        for number, dtype in enumerate(("bfloat16", "bfloat16", "bool"))
    )
    return Op(name="aten.native_dropout.default", arguments={"input": x, "p": p, "train": train}, outputs=(y, mask))


def test_dropout_by_its_arguments():
    assert of(dropout(0.1, True)) == (pytest.approx(200), 300)
    assert of(dropout(0.9, True)) == (pytest.approx(200 * (1 - 0.9**16)), 300)  # whole pieces are dropped
    assert of(dropout(1.0, True)) == (0, 300)  # all is dropped: the input is not needed
    assert work(dropout(1.0, True)).vector_flops == {}
    assert of(dropout(1.0, False)) == (200, 300)
    assert work(dropout(0.0, True)).vector_flops == {}


def test_dropout_backward_reads_gradient_and_mask(call):
    mask = torch.ones(100, dtype=torch.bool)
    op = call(torch.ops.aten.native_dropout_backward, torch.zeros(100), mask, 2.0)
    assert of(op) == (100 + 400 * (1 - 0.5**8), 400)
    assert work(op).vector_flops == {"float32": 50}


@pytest.mark.parametrize(("training", "written"), [(True, 800), (False, 400)])
def test_noise_is_written_in_training(call, training, written):
    x, noise = torch.zeros(100), torch.zeros(100)
    assert of(call(torch.ops.aten.rrelu_with_noise, x, noise, 0.1, 0.3, training)) == (400, written)
