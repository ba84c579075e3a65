"""All operations in compiled code whose shapes are symbols: one graph for all sizes, forward and backward."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import DEVICE
from torch import Tensor

from nearpeak import kernels

pytest.importorskip("triton")


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, requires_grad=True)


def angles(tokens: int, half: int = 2) -> tuple[Tensor, Tensor]:
    table = torch.arange(tokens * half, device=DEVICE).view(tokens, half) / 7
    return table.cos(), table.sin()


def targets(rows: int) -> Tensor:
    return torch.arange(rows, device=DEVICE) % 3


OPERATIONS = {
    "add": (kernels.add, lambda n: (random(n, 6), random(n, 6))),
    "softmax": (lambda x, mask: kernels.softmax(x, mask=mask), lambda n: (random(3, n), random(n))),
    "log_softmax": (kernels.log_softmax, lambda n: (random(n, 6),)),
    "causal": (lambda x: kernels.softmax(x, causal=True), lambda n: (random(2, n, n),)),
    "rms_norm": (kernels.rms_norm, lambda n: (random(n, 8), random(8))),
    "layer_norm": (kernels.layer_norm, lambda n: (random(n, 8), random(8), random(8))),
    "add_rms_norm": (kernels.add_rms_norm, lambda n: (random(n, 8), random(n, 8), random(8))),
    "dropout_add": (lambda x, y: kernels.dropout_add(x, y, 0.0), lambda n: (random(n, 8), random(n, 8))),
    "product": (lambda x, w: kernels.gemm(x, w, activation="gelu"), lambda n: (random(n, 8), random(6, 8))),
    "product_gated": (
        lambda x, w: kernels.gemm(x, w, activation="silu", gated=True),
        lambda n: (random(n, 8), random(6, 8)),
    ),
    "attention": (
        lambda *given: kernels.attention(*given, causal=True),
        lambda n: (random(1, 4, n, 16), random(1, 2, n, 16), random(1, 2, n, 16)),
    ),
    "bias_gelu": (kernels.bias_gelu, lambda n: (random(n, 8), random(8))),
    "swiglu": (kernels.swiglu, lambda n: (random(n, 8), random(n, 8))),
    "swiglu_packed": (kernels.swiglu_packed, lambda n: (random(n, 8),)),
    "rotary": (lambda x, cos, sin: kernels.rotary(x, cos, sin), lambda n: (random(2, n, 3, 4), *angles(n))),
    "transpose_copy": (kernels.transpose_copy, lambda n: (random(n, 6),)),
    "cross_entropy": (kernels.cross_entropy, lambda n: (random(n, 9), targets(n))),
    "linear_attention": (kernels.linear_attention, lambda n: [random(1, 2, n, 16) for _ in range(3)]),
    "linear_cross_entropy": (kernels.linear_cross_entropy, lambda n: (random(n, 4), random(9, 4), targets(n))),
    "route": (lambda x: kernels.route(x, 2, renormalize=True), lambda n: (random(n, 4),)),
    "mixture_of_experts": (
        lambda x, experts, *others: kernels.moe(x, others[0], experts, *others[1:]),
        lambda n: (random(n, 8), targets(n)[:, None], random(n, 1), random(3, 12, 8), random(3, 8, 6)),
    ),
    "permute_tokens": (
        lambda x, experts: kernels.permute_tokens(x, experts, number_of_experts=3),
        lambda n: (random(n, 8), targets(n)[:, None]),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_one_graph_for_all_sizes(name):
    function, inputs = OPERATIONS[name]
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    def loss(*given):
        result = function(*given)
        return (result[0] if isinstance(result, tuple) else result).sin().sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=backend)
    counts = []
    for size in (5, 12):
        given = inputs(size)
        wanted = [one for one in given if one.requires_grad]
        for actual, expected in zip(
            torch.autograd.grad(compiled(*given), wanted), torch.autograd.grad(loss(*given), wanted), strict=True
        ):
            torch.testing.assert_close(actual, expected)
        counts.append(len(graphs))  # of the first size there may be two: Dynamo first tries floats as symbols
    assert counts == counts[:1] * 2
