import pytest

from nearpeak.ops.cost import cost_of
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor

ROWS, COLUMNS, DEPTH = 64, 32, 128
HALF = ROWS * COLUMNS * DEPTH
"""FLOPs: a multiply-add for every second element of the depth."""


def tensor(storage, rows, columns, dtype="bfloat16"):
    return Tensor(shape=(rows, columns), strides=(columns, 1), dtype=dtype, storage=storage)


STORED, PLACES = tensor(0, ROWS, DEPTH // 2), tensor(1, ROWS, DEPTH // 16, "int16")
DENSE, RESULT = tensor(2, DEPTH, COLUMNS), tensor(3, ROWS, COLUMNS)
BYTES = STORED.bytes + PLACES.bytes + DENSE.bytes


def test_half_is_multiplied():
    arguments = {"mat1": STORED, "mat1_meta": PLACES, "mat2": DENSE}
    cost = cost_of(Op(name="aten._sparse_semi_structured_mm.default", arguments=arguments, outputs=(RESULT,)))
    assert (cost.family, cost.flops) == ("matrix", {"bfloat16": HALF})
    assert (cost.work.bytes_read, cost.work.bytes_written) == (BYTES, RESULT.bytes)


@pytest.mark.parametrize(("beta", "added"), [(1, RESULT.bytes), (0, 0)])
def test_an_addend_is_read_unless_it_counts_nothing(beta, added):
    arguments = {"input": tensor(4, ROWS, COLUMNS), "mat1": STORED, "mat1_meta": PLACES, "mat2": DENSE, "beta": beta}
    cost = cost_of(Op(name="aten._sparse_semi_structured_addmm.default", arguments=arguments, outputs=(RESULT,)))
    assert cost.work.bytes_read == BYTES + added


def test_one_piece_of_numbers_and_places():
    whole = tensor(5, ROWS, DEPTH // 2 + DEPTH // 16)
    arguments = {"compressed_A": whole, "dense_B": DENSE, "bias": None}
    cost = cost_of(Op(name="aten._cslt_sparse_mm.default", arguments=arguments, outputs=(RESULT,)))
    assert cost.flops == {"bfloat16": HALF}
    assert cost.work.bytes_read == whole.bytes + DENSE.bytes


def test_a_layer():
    data, out = tensor(6, COLUMNS, DEPTH, "float32"), tensor(7, COLUMNS, ROWS, "float32")
    arguments = {"input": data, "weight": tensor(8, ROWS, DEPTH // 2, "float32"), "meta": PLACES, "bias": None}
    cost = cost_of(Op(name="aten._sparse_semi_structured_linear.default", arguments=arguments, outputs=(out,)))
    assert cost.flops == {"tfloat32": HALF}


def test_compressing_reads_all():
    op = Op(name="aten._to_sparse_semi_structured.default", arguments={"dense": DENSE}, outputs=(STORED, PLACES))
    assert (cost_of(op).work.bytes_read, cost_of(op).work.bytes_written) == (DENSE.bytes, STORED.bytes + PLACES.bytes)
