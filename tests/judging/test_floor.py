"""Only what nobody can leave out is in the floor."""

from __future__ import annotations

import pytest
import torch

from nearpeak.judging.floor import needed_bytes, product_flops
from nearpeak.judging.variants import Inputs

A, B, BIAS = torch.randn(16, 24), torch.randn(24, 8), torch.randn(8)
DENSE = 2.0 * 16 * 24 * 8


def inputs(*args):
    return Inputs(args=args, kwargs={})


DENSE_PRODUCTS = {
    "plain": lambda a, b: a @ b,
    "an epilogue": lambda a, b: torch.nn.functional.gelu(a @ b + 1.0),
    "ReLU, which is flat where it is negative": lambda a, b: (a @ b).relu(),
    "a transposed result": lambda a, b: (a @ b).t().contiguous(),
}
OTHER_WAYS = {
    "summed up: the sum of one factor is enough": lambda a, b: (a @ b).sum(-1),
    "a chain: the other order may be shorter": lambda a, b: (a @ b) @ b.t(),
    "softmax mixes the elements": lambda a, b: (a @ b).softmax(-1),
    "a known matrix: a running sum does it": lambda a, b: torch.ones(16, 16, dtype=a.dtype).tril() @ a,
    "a symmetric result": lambda a, b: a @ a.t(),
    "zeros": lambda a, b: a.relu() @ b,
    "no product": lambda a, b: a * 2,
}


@pytest.mark.parametrize("name", DENSE_PRODUCTS)
def test_a_dense_product_counts(name):
    assert product_flops(DENSE_PRODUCTS[name], inputs(A, B)) == pytest.approx(DENSE)


@pytest.mark.parametrize("name", OTHER_WAYS)
def test_a_product_with_a_shorter_way_does_not_count(name):
    assert product_flops(OTHER_WAYS[name], inputs(A, B)) == 0


def test_a_mask_leaves_the_elements_that_are_seen():
    square = torch.randn(24, 16)
    assert product_flops(lambda a, b: (a @ b).tril(), inputs(A, square)) == pytest.approx(2.0 * 24 * 16 * 17 / 2)


def test_inputs_that_move_no_result_need_not_be_read():
    assert needed_bytes(lambda a, b: a * 2, inputs(A, B)) == A.numel() * 4
    assert needed_bytes(lambda a, b: a[::2] @ b, inputs(A, B)) == (A.numel() / 2 + B.numel()) * 4
    assert needed_bytes(lambda a, b: torch.nn.functional.softmax(a, -1), inputs(A, B)) == A.numel() * 4
    assert needed_bytes(lambda a, b: a.argmax(-1), inputs(A, B)) == 0


def test_what_a_causal_mask_hides_need_not_be_read():
    def attention(q, k, v):
        scores = (q @ k.t()).masked_fill(~torch.ones(4, 8, dtype=torch.bool).tril(), float("-inf"))
        return scores.softmax(-1) @ v

    torch.manual_seed(0)  # with other values, a gradient may round to nothing by chance
    q, k, v = torch.randn(4, 16), torch.randn(8, 16), torch.randn(8, 16)
    # The first row of scores has one element, whose weight is 1 whatever it is: that row of q moves nothing.
    assert needed_bytes(attention, inputs(q, k, v)) == (3 + 4 + 4) * 16 * 4
