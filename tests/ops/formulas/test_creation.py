import pytest
import torch

from nearpeak.ops.work import Work

X = torch.randn(8, 16)


@pytest.mark.parametrize(
    ("call", "size"),
    [
        (lambda: torch.zeros(8, 16), 512),
        (lambda: torch.ones(8, 16, dtype=torch.bfloat16), 256),
        (lambda: torch.full((8,), 2.0, dtype=torch.float64), 64),
        (lambda: torch.zeros_like(X), 512),
        (lambda: torch.ones_like(X, dtype=torch.bool), 128),
        (lambda: torch.full_like(X, 1.0), 512),
        (lambda: X.new_zeros(4), 16),
        (lambda: X.new_ones(4), 16),
        (lambda: X.new_full((4,), 1.0), 16),
        (lambda: torch.arange(10), 80),
        (lambda: torch.arange(0, 10, 2), 40),
        (lambda: torch.linspace(0, 1, 5), 20),
        (lambda: torch.eye(4), 64),
        (lambda: torch.scalar_tensor(1.0), 4),
        (lambda: torch.ops.aten.zero(X), 512),
        (lambda: torch.ops.aten.fill.Scalar(X, 1.0), 512),
        (lambda: torch.tril_indices(2, 2), 48),
        (lambda: torch.zeros(0, 4), 0),
    ],
)
def test_creation_writes_the_result_and_reads_nothing(cost, call, size):
    found = cost(call)
    assert found.work == Work(bytes_written=size)
    assert found.family == "creation"


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.empty(8, 16),
        lambda: torch.empty_like(X),
        lambda: torch.empty_strided((4, 4), (4, 1)),
        lambda: torch.empty_permuted((4, 4), (1, 0)),
        lambda: X.new_empty(4),
        lambda: X.new_empty_strided((4,), (1,)),
    ],
)
def test_reserved_memory_costs_nothing(cost, call):
    assert cost(call).work == Work()


def test_filling_does_not_read_what_was_there(cost):
    assert cost(torch.zeros(8, 16).zero_).work == Work(bytes_written=512)
    assert cost(torch.zeros(8, 16).fill_, 3.0).work == Work(bytes_written=512)


def test_filling_with_a_tensor_reads_its_one_element(cost):
    value = torch.tensor(2.0)
    assert cost(torch.ops.aten.fill_.Tensor, torch.zeros(8, 16), value).work == Work(bytes_read=4, bytes_written=512)


def test_a_slice_is_filled_as_a_slice(cost):
    assert cost(torch.zeros(8, 16)[:, :4].zero_).work == Work(bytes_written=128)


def test_out_is_written_not_read(cost):
    out = torch.zeros(10, dtype=torch.int64)
    assert cost(lambda: torch.arange(0, 10, 1, out=out)).work == Work(bytes_written=80)


def test_a_diagonal_is_filled_alone(cost):
    from nearpeak.ops.formulas.creation import fill_diagonal
    from nearpeak.ops.op import Op
    from nearpeak.ops.tensor import Tensor

    matrix = Tensor(shape=(8, 16), strides=(16, 1), dtype="float32", storage=0)
    op = Op(name="aten.fill_diagonal_.default", arguments={"self": matrix, "fill_value": 0}, outputs=(matrix,))
    assert fill_diagonal(op).work == Work(bytes_written=32)
