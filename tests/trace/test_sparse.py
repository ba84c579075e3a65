"""Sparse tensors are known by the memory of their values, and their products cost a multiply-add for each value."""

import warnings

import pytest
import torch

from nearpeak.ops.cost import costs_of
from nearpeak.trace.trace import trace

NODES, COLUMNS = 64, 8

pytestmark = pytest.mark.filterwarnings("ignore:Sparse:UserWarning")


def adjacency(layout):
    torch.manual_seed(0)
    edges = torch.randint(NODES, (2, 500))
    coalesced = torch.sparse_coo_tensor(edges, torch.rand(500), (NODES, NODES)).coalesce()
    return coalesced if layout == "coo" else coalesced.to_sparse_csr()


def of(traced, *packets):
    costs = costs_of(traced.ops)
    return [(op, cost) for op, cost in zip(traced.ops, costs, strict=True) if op.packet in packets]


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_products_of_the_same_factor_read_the_same_memory(layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        matrix, x = adjacency(layout), torch.randn(NODES, COLUMNS)
        stored = matrix.values().numel()
        traced = trace(lambda: torch.sparse.mm(matrix, torch.sparse.mm(matrix, x)), live=True)
    products = of(traced, "aten._sparse_addmm", "aten.mm")
    assert len(products) == 2
    factors = {tensor.storage for op, _ in products for tensor in op.inputs if tensor.sparse is not None}
    assert len(factors) == 1
    for _, cost in products:
        assert cost.model == "formula"
        assert cost.vector_flops == {"float32": 2.0 * stored * COLUMNS}
        assert sum(access.bytes for access in cost.writes) == 4.0 * NODES * COLUMNS
        assert sum(access.bytes for access in cost.reads) >= 4.0 * stored


def test_what_is_joined_has_bytes():
    edges, values = torch.randint(NODES, (2, 500)), torch.rand(500)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = trace(lambda: torch.sparse_coo_tensor(edges, values, (NODES, NODES)).coalesce(), live=True)
    ((_, cost),) = of(traced, "aten._coalesce")
    assert sum(access.bytes for access in cost.reads) == 4.0 * 500


def test_an_empty_dense_factor_is_no_sparse_one():
    traced = trace(torch.mm, torch.empty(8, 0), torch.empty(0, 4))
    ((_, cost),) = of(traced, "aten.mm")
    assert not cost.flops
    assert not cost.vector_flops
