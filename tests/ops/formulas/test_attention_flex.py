import pytest

from nearpeak.ops.cost import cost_of
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor

BATCH, HEADS, KEY_HEADS, QUERIES, KEYS, HEAD = 2, 8, 2, 256, 512, 64
WHOLE = 1 << 30


def tensor(storage, *shape, dtype="bfloat16"):
    strides, step = [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return Tensor(shape=shape, strides=tuple(strides), dtype=dtype, storage=storage)


QUERY = tensor(0, BATCH, HEADS, QUERIES, HEAD)
KEY, VALUE = (tensor(number, BATCH, KEY_HEADS, KEYS, HEAD) for number in (1, 2))
OUT, STATISTICS = tensor(3, BATCH, HEADS, QUERIES, HEAD), tensor(4, BATCH, HEADS, QUERIES, dtype="float32")


def mask(size):
    blocks = tensor(5, 1, 1, 2, dtype="int32")
    return (
        QUERIES,
        KEYS,
        blocks,
        None,
        None,
        None,
        None,
        None,
        None,
        None,
        None,
        None,
        None,
        None,
        size,
        size,
        "function",
    )


def forward(size):
    values = (QUERY, KEY, VALUE, "function", mask(size), 0.125, "dict", (), ())
    arguments = {str(place): value for place, value in enumerate(values)}
    return Op(name="higher_order.flex_attention", arguments=arguments, outputs=(OUT, STATISTICS, STATISTICS))


GRADIENT = tensor(10, *OUT.shape)


def backward(size, gradient=GRADIENT):
    values = (QUERY, KEY, VALUE, OUT, STATISTICS, gradient, None, "function", "GraphModule", mask(size), 0.125, "dict")
    arguments = {str(place): value for place, value in enumerate(values)}
    gradients = (tensor(6, *QUERY.shape), tensor(7, *KEY.shape), tensor(8, *KEY.shape), tensor(9, HEADS))
    return Op(name="higher_order.flex_attention_backward", arguments=arguments, outputs=gradients)


def test_without_a_mask_all_pairs_are_computed():
    cost = cost_of(forward(WHOLE))
    assert (cost.family, cost.model) == ("attention", "formula")
    assert cost.flops == {"bfloat16": 4 * BATCH * HEADS * QUERIES * KEYS * HEAD}
    assert cost.work.bytes_read == QUERY.bytes + KEY.bytes + VALUE.bytes
    assert cost.work.bytes_written == OUT.bytes


def test_with_a_mask_one_key_for_each_query_is_certain():
    cost = cost_of(forward(128))
    assert (cost.family, cost.model) == ("attention", "operands")
    assert cost.flops == {"bfloat16": 4 * BATCH * HEADS * QUERIES * HEAD}
    assert cost.work.bytes_read == QUERY.bytes + 2 * BATCH * KEY_HEADS * HEAD * 2
    assert cost.work.bytes_written == OUT.bytes


@pytest.mark.parametrize(("size", "pairs", "model"), [(WHOLE, QUERIES * KEYS, "formula"), (128, QUERIES, "operands")])
def test_backward_writes_all_gradients(size, pairs, model):
    cost = cost_of(backward(size))
    assert cost.model == model
    assert cost.flops == {"bfloat16": 10 * BATCH * HEADS * pairs * HEAD}
    assert cost.work.bytes_written == QUERY.bytes + 2 * KEY.bytes + 2 * HEADS
    keys = KEYS if model == "formula" else 1
    read = 3 * QUERY.bytes + 2 * BATCH * KEY_HEADS * keys * HEAD * 2 + STATISTICS.bytes
    assert cost.work.bytes_read == read


def test_a_gradient_of_the_statistics_alone_charges_the_results():
    cost = cost_of(backward(WHOLE, gradient=None))
    assert (cost.flops, cost.work.bytes_read, cost.model) == ({}, 0, "operands")
