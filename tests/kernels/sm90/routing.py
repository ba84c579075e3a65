"""Launches of `route` to compile."""

import torch

from nearpeak.kernels.moe import triton as moe_triton


def launches():
    for number, k, scores in ((128, 8, "softmax"), (256, 8, "sigmoid"), (8, 2, "softmax")):
        logits = torch.empty(4096, number, dtype=torch.bfloat16)
        experts = torch.empty(4096, k, dtype=torch.int32)
        kind = f"{number} experts, {scores}" + (", narrow" if number < 16 else "")
        yield (
            f"forward, {kind}, small result",
            lambda logits=logits, k=k, scores=scores: moe_triton.route(logits, None, k, scores, True, 1.0),
        )
        yield (
            f"backward, {kind}",
            lambda logits=logits, experts=experts, scores=scores: moe_triton.route_backward(
                experts.float(), logits, experts, scores, True, 1.0
            ),
        )
