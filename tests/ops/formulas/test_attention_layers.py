import torch

from nearpeak.ops.cost import cost_of

BATCH, LENGTH, WIDTH, HEADS, WIDE = 2, 5, 8, 2, 16


def test_multi_head_attention(call):
    x = torch.randn(BATCH, LENGTH, WIDTH)
    weights = [torch.randn(3 * WIDTH, WIDTH), torch.randn(3 * WIDTH), torch.randn(WIDTH, WIDTH), torch.randn(WIDTH)]
    with torch.no_grad():
        op = call(torch.ops.aten._native_multi_head_attention, x, x, x, WIDTH, HEADS, *weights, None, False)
    cost = cost_of(op)
    assert (cost.family, cost.model) == ("attention", "formula")
    products = 2 * BATCH * LENGTH * 4 * WIDTH**2 + 4 * BATCH * LENGTH**2 * WIDTH
    assert cost.vector_flops == {"float32": products + BATCH * HEADS * LENGTH**2}
    assert cost.work.bytes_read == 4 * (x.numel() + 4 * WIDTH**2 + 4 * WIDTH)
    assert cost.work.bytes_written == 4 * x.numel()


def test_the_encoder_layer_of_the_fast_path(calls):
    layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, WIDE, batch_first=True).eval()
    x = torch.randn(BATCH, LENGTH, WIDTH)
    with torch.no_grad():
        (op,) = [op for op in calls(layer, x) if "encoder_layer" in op.name]
    cost = cost_of(op)
    parameters = sum(parameter.numel() for parameter in layer.parameters())
    products = 2 * BATCH * LENGTH * (4 * WIDTH**2 + 2 * WIDTH * WIDE) + 4 * BATCH * LENGTH**2 * WIDTH
    assert cost.vector_flops == {"float32": products + BATCH * HEADS * LENGTH**2}
    assert cost.work.bytes_read == 4 * (x.numel() + parameters)
    assert cost.work.bytes_written == 4 * x.numel()
