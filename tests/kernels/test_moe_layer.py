"""`MoE`: against blocks of transformers, and as a layer of a model."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import DEVICE
from torch import nn

from nearpeak import kernels
from nearpeak.errors import UsageError

pytest.importorskip("triton")

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # of CPUs without products in bfloat16


def mixtral(**changed):
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock

    given = {"hidden_size": 24, "intermediate_size": 40, "num_local_experts": 6, "num_experts_per_tok": 2, **changed}
    return MixtralSparseMoeBlock(MixtralConfig(**given))


def qwen(**changed):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

    given = {"hidden_size": 24, "moe_intermediate_size": 16, "num_experts": 12, "num_experts_per_tok": 4, **changed}
    return Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**given))


BLOCKS = {
    "mixtral": mixtral,
    "qwen": qwen,
    "qwen, renormalized": lambda: qwen(norm_topk_prob=True),
    "mixtral, gelu": lambda: mixtral(hidden_act="gelu"),
}


def filled(make):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    block = make()
    for weight in block.parameters():
        nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return block.to(DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["require", "off"])
@pytest.mark.parametrize("make", BLOCKS.values(), ids=BLOCKS)
def test_blocks_of_transformers(make, mode):
    block = filled(make)
    layer = kernels.MoE.from_transformers(block)
    assert {id(one) for one in layer.parameters()} == {id(one) for one in block.parameters()}
    x = torch.randn(2, 9, 24, device=DEVICE, requires_grad=True)
    upstream = torch.randn(2, 9, 24, device=DEVICE)
    leaves = [x, *block.parameters()]
    expected = block(x)
    wanted = torch.autograd.grad(expected, leaves, upstream)
    with kernels.using(mode):
        actual = layer(x)
        found = torch.autograd.grad(actual, leaves, upstream)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("make", [mixtral, qwen])
def test_states_of_transformers_fit(make):
    block = filled(make)
    same = kernels.MoE.from_transformers(block)
    inner = block.experts.down_proj.shape[2]
    layer = kernels.MoE(24, inner, len(block.experts.down_proj), same.k, renormalize=same.renormalize).to(DEVICE)
    layer.load_state_dict(block.state_dict())
    x = torch.randn(1, 5, 24, device=DEVICE)
    torch.testing.assert_close(layer(x), block(x), rtol=1e-4, atol=1e-5)


def test_blocks_that_are_something_else():
    with pytest.raises(UsageError, match="Linear"):
        kernels.MoE.from_transformers(nn.Linear(3, 4))
    block = filled(mixtral)
    block.jitter_noise = 0.1
    with pytest.raises(UsageError, match="jitter_noise"):
        kernels.MoE.from_transformers(block)
    block = filled(qwen)
    block.shared_expert = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="shared_expert"):
        kernels.MoE.from_transformers(block)
    block = filled(qwen)
    block.experts.act_fn = nn.Tanh()
    with pytest.raises(UsageError, match="Tanh"):
        kernels.MoE.from_transformers(block)


def test_a_layer_with_sigmoids_and_a_bias():
    torch.manual_seed(0)
    layer = kernels.MoE(16, 8, 6, 2, scores="sigmoid", scale=2.5, bias=True, device=DEVICE)
    layer.bias.normal_()
    x = torch.randn(11, 16, device=DEVICE)
    with kernels.using("require"):
        actual, logits = layer(x, return_logits=True)
    torch.testing.assert_close(logits, layer.gate(x))
    scores = logits.sigmoid()
    experts = (scores + layer.bias).topk(2).indices
    weights = scores.gather(1, experts)
    weights = 2.5 * weights / weights.sum(1, keepdim=True)
    with kernels.using("off"):
        expected = kernels.moe(x, weights, experts, *layer.experts.parameters())
    torch.testing.assert_close(actual, expected)
    assert "experts=6, k=2" in repr(layer)


def test_inside_of_autocast():
    torch.manual_seed(0)
    layer = kernels.MoE(16, 8, 6, 2, device=DEVICE)
    x = torch.randn(11, 16, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE, torch.bfloat16), kernels.using("require"):
        result = layer(x)
    assert result.dtype == torch.bfloat16
    result.float().sum().backward()
    assert x.grad.dtype == layer.experts.down_proj.grad.dtype == layer.gate.weight.grad.dtype == torch.float32
    torch.testing.assert_close(result.float(), layer(x), atol=0.02, rtol=0.02)


@pytest.mark.slow
def test_it_compiles_without_a_graph_break():
    torch.manual_seed(0)
    layer = kernels.MoE(16, 8, 4, 2, device=DEVICE)
    x = torch.randn(6, 16, device=DEVICE, requires_grad=True)
    leaves = [x, *layer.parameters()]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    actual = torch.autograd.grad(compiled(x).sin().sum(), leaves)
    torch.testing.assert_close(actual, torch.autograd.grad(layer(x).sin().sum(), leaves))


def test_layers_that_make_no_sense():
    with pytest.raises(UsageError, match="k is 5"):
        kernels.MoE(8, 8, 4, 5)
    with pytest.raises(UsageError, match="softmax"):
        kernels.MoE(8, 8, 4, 2, scores="softmin")
    with pytest.raises(UsageError, match="silu"):
        kernels.MoE(8, 8, 4, 2, activation="selu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_large_layer(dtype):
    torch.manual_seed(0)
    layer = kernels.MoE(2048, 768, 64, 8, device=DEVICE, dtype=dtype)
    x = torch.randn(2048, 2048, device=DEVICE, dtype=dtype, requires_grad=True)
    upstream = torch.randn(2048, 2048, device=DEVICE, dtype=dtype)
    leaves = [x, *layer.parameters()]

    def both():
        result = layer(x)
        return result.detach(), *torch.autograd.grad(result, leaves, upstream)

    with kernels.using("require"):
        first = both()
    with kernels.using("off"):
        expected = both()
    for one, right in zip(first, expected, strict=True):
        assert (one.double() - right.double()).abs().max() < 0.02 * right.abs().max()
    for _ in range(20):
        assert all(map(torch.equal, first, both()))


@pytest.mark.gpu
def test_recorded_and_compiled():
    torch.manual_seed(0)
    layer = kernels.MoE(512, 256, 16, 4, device=DEVICE, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(1024, 512, device=DEVICE, dtype=torch.bfloat16)
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = layer(x)
    x.normal_()
    graph.replay()
    assert torch.equal(recorded, layer(x))
    assert torch.equal(torch.compile(layer, fullgraph=True)(x), layer(x))
