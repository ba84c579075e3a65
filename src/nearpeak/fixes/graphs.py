"""`torch.compile(model, backend="nearpeak")`: kernels of nearpeak in captured graphs, and Inductor for the rest.

The patterns are those of `patterns`, on the graphs that torch.compile captures: attention written out, attention by
torch's function on a GPU, norms and gated activations. What Inductor fuses with its neighbors it does so from there on;
a kernel of nearpeak is one op in its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from nearpeak import kernels
from nearpeak.fixes.patterns.attention import WrittenAttention
from nearpeak.fixes.patterns.dataflow import remove_dead_nodes, tensor_of
from nearpeak.fixes.patterns.mlp import Gates
from nearpeak.fixes.patterns.norms import InlineNorms


def rewrite_graph(module: fx.GraphModule) -> dict[str, int]:
    """Puts kernels into a captured graph; how many of each kind."""
    graph = module.graph
    counts = {"attention": len(list(WrittenAttention(dropouts={})(graph)))}
    if any(value.is_cuda for node in graph.nodes if (value := tensor_of(node)) is not None):
        # on a CPU, torch's own ops are as good, and Inductor fuses them
        counts["attention"] += _replace_attention(graph)
        counts["norm"] = len(list(InlineNorms()(graph)))
        counts["gated activation"] = len(list(Gates(children={})(graph)))
    remove_dead_nodes(graph)
    graph.lint()
    module.recompile()
    return {name: count for name, count in counts.items() if count}


def _replace_attention(graph: fx.Graph) -> int:
    nodes = graph.find_nodes(op="call_function", target=functional.scaled_dot_product_attention)
    for node in nodes:
        node.target = kernels.scaled_dot_product_attention
    return len(nodes)


def nearpeak_backend(module: fx.GraphModule, inputs: Sequence[Tensor], **options: Any) -> Callable[..., Any]:
    """A backend of torch.compile: rewrites the graph and hands it to Inductor."""
    rewrite_graph(module)
    return torch._dynamo.lookup_backend("inductor")(module, list(inputs), **options)
