"""Launches of `cross_entropy` to compile: memory that is never touched is never taken."""

import torch

from nearpeak.kernels.losses import triton as losses_triton

ROWS = 8192
BF16, F32 = torch.bfloat16, torch.float32


def launches():
    target = torch.empty(ROWS, dtype=torch.int64)
    parts, losses, tops, totals = torch.empty(losses_triton.PARTS), *(torch.empty(ROWS) for _ in range(3))

    def forward(columns, dtype, *, inplace=True, gradient=True, smoothing=0.0, softcap=0.0, entropy=False, config=None):
        logits = torch.empty(ROWS, columns, dtype=dtype)
        settings = losses_triton.LossSettings(-100, smoothing, softcap, 0.0, "mean")
        written = (logits if inplace else torch.empty_like(logits)) if gradient else None
        entropies = losses if entropy else None
        tensors = (logits, target, None, None, parts, losses, tops, totals)
        losses_triton.write_rows(*tensors, settings, gradient=written, entropies=entropies, config=config)

    yield "256", lambda: forward(256, BF16)
    yield "4096", lambda: forward(4096, BF16, inplace=False)
    yield "32768", lambda: forward(32768, BF16)
    yield "128256", lambda: forward(128256, BF16)
    yield (
        "128256, elsewhere, 16 warps",
        lambda: forward(128256, BF16, inplace=False, config=losses_triton.LongRowConfig(repeats=4, warps=16)),
    )
    yield "128256, float32", lambda: forward(128256, F32)
    yield "50257, rows begin anywhere", lambda: forward(50257, BF16)
    yield "256000, softcap and smoothing", lambda: forward(256000, BF16, smoothing=0.1, softcap=30.0)
    yield "128256, entropy, narrow stores", lambda: forward(128256, BF16, gradient=False, entropy=True)

    def backward(columns, dtype):
        logits = torch.empty(ROWS, columns, dtype=dtype)
        settings = losses_triton.LossSettings(-100, 0.0, 0.0, 0.0, "none")
        losses_triton.write_gradient(
            losses, logits, torch.empty_like(logits), target, None, tops, totals, parts, settings
        )

    yield "gradient, 128256, float16", lambda: backward(128256, torch.float16)
    yield "gradient, 50257", lambda: backward(50257, BF16)
    gradient = torch.empty(ROWS, 128256, dtype=BF16)
    yield "gradient times a number", lambda: losses_triton.scale_gradient_(gradient, losses)
