"""A norm inside the product that follows it, and a Llama layer by what limits it, before and after fusion.

An RMSNorm divides every row by one number. The product that follows is linear, so that the division can wait until
after it, and the weight of the norm can be part of the matrix. What is left of the norm is a sum of squares per row,
which reads the rows once and writes next to nothing: the normalized rows never reach memory. Fusion of this kind
removes time that memory limits, and none that arithmetic limits. A layer is therefore first split by limiter, which
says what fusion can win at most.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

import nearpeak
from nearpeak import kernels
from nearpeak.gallery import native
from nearpeak.gallery.examples.small_llama import Layer, shape
from nearpeak.gallery.parts import Part, Prediction, StackedBars, prediction_table, prose
from nearpeak.gallery.run import Context
from nearpeak.render.document import CodeBlock
from nearpeak.render.picture.bars import Bar
from nearpeak.units import percent, seconds

SOURCE = """
import torch
import triton
import triton.language as tl


@triton.jit
def scale_kernel(x, scales, k, eps, BLOCK: tl.constexpr):
    # One number per row: 1 / sqrt(mean(x * x) + eps)
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, k, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        part = tl.load(x + row * k + place, mask=place < k, other=0.0)
        squares += part.to(tl.float32) * part.to(tl.float32)
    tl.store(scales + row, tl.rsqrt(tl.sum(squares, 0) / k + eps))


@triton.jit
def product_kernel(x, weight, scales, result, m, n, k, NORM: tl.constexpr,
                   ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                   DEPTH: tl.constexpr):
    # result = scales[:, None] * (x @ weight): (m, k) by (k, n)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)          # (ROWS,)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, DEPTH)
    from_x = x + row[:, None] * k + step[None, :]               # (ROWS, DEPTH)
    from_weight = weight + step[:, None] * n + column[None, :]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, k, DEPTH):  # k is a multiple of DEPTH
        left = tl.load(from_x, mask=row[:, None] < m, other=0.0)
        right = tl.load(from_weight, mask=column[None, :] < n, other=0.0)
        sums = tl.dot(left, right, sums)
        from_x += DEPTH
        from_weight += DEPTH * n
    if NORM:  # one factor per row, while the result is on the chip
        sums *= tl.load(scales + row, mask=row < m, other=0.0)[:, None]
    tl.store(result + row[:, None] * n + column[None, :],
             sums.to(result.dtype.element_ty),
             mask=(row[:, None] < m) & (column[None, :] < n))


def product(x, weight, norm, rows=128, columns=128, depth=64):
    (m, k), n = x.shape, weight.shape[1]
    result = torch.empty(m, n, dtype=x.dtype, device=x.device)
    scales = torch.empty(m, dtype=torch.float32, device=x.device)
    if norm:
        scale_kernel[(m,)](x, scales, k, 1e-6, BLOCK=1024)
    grid = (triton.cdiv(n, columns), triton.cdiv(m, rows))
    product_kernel[grid](
        x, weight, scales, result, m, n, k, NORM=norm, ROWS=rows,
        COLUMNS=columns, DEPTH=depth, num_warps=8, num_stages=3)
    return result
"""
CHECK = """

torch.manual_seed(0)
x, weight = torch.randn(20, 64), torch.randn(64, 24)
right = torch.nn.functional.rms_norm(x.double(), (64,), eps=1e-6) @ weight.double()
print((product(x, weight, True, rows=16, columns=16, depth=16) - right).abs().max().item())
"""


def norm_then_product(x: Tensor, weight: Tensor) -> Tensor:
    """Two ops: the norm writes its result, and the product reads it."""
    return functional.rms_norm(x, x.shape[-1:], eps=1e-6) @ weight


def example(context: Context) -> Iterator[Part]:
    """The norm inside the product, then the layer."""
    yield from _norm(context)
    yield from _layer(context)


def _norm(context: Context) -> Iterator[Part]:
    tokens, width, columns = context.pick(gpu=(8192, 4096, 4096), cpu=(512, 256, 256))
    dtype = context.pick(gpu=torch.bfloat16, cpu=torch.float32)
    x = torch.randn(tokens, width, dtype=dtype, device=context.tensors)
    weight = torch.randn(width, columns, dtype=dtype, device=context.tensors) / width**0.5
    yield CodeBlock(text=SOURCE.strip())
    ceilings = context.machine.achievable or context.machine.theoretical
    assert ceilings is not None
    bandwidth = ceilings.bandwidth
    alone, both = context.predict(torch.mm, x, weight), context.predict(norm_then_product, x, weight)
    rows = [
        context.row("torch: product", torch.mm, x, weight, predicted=alone),
        context.row("torch: norm, then product", norm_then_product, x, weight, predicted=both),
    ]
    fused: list[Prediction] = []
    if context.gpu and context.measures:
        product = native.load_triton(SOURCE)["product"]
        plain = context.row(
            "these lines: product", lambda a, b: product(a, b, False), x, weight, predicted=alone, band=(0.9, 3.0)
        )
        fused = [
            plain,
            context.row(
                "these lines: norm inside",
                lambda a, b: product(a, b, True),
                x,
                weight,
                predicted=plain.measured + x.nbytes / bandwidth if plain.measured else None,
                band=(0.9, 1.2),
            ),
        ]
    elif context.gpu:
        fused = [
            Prediction(what="these lines: product", predicted=alone, measured=None),
            Prediction(what="these lines: norm inside", predicted=alone + x.nbytes / bandwidth, measured=None),
        ]
    yield prediction_table(
        f"{tokens} rows of {width}, a product with {width} x {columns}",
        [*rows, *fused],
        note="Predicted for the norm inside: what the same lines take without it, and one read of the rows."
        if fused
        else "",
    )
    first, second = (row.measured or row.predicted or 1.0 for row in rows)
    text = f"As two ops the norm adds {percent(second / first - 1)} to the product"
    if fused and fused[0].measured and fused[1].measured:
        text += f", inside of it {percent(fused[1].measured / fused[0].measured - 1)}"
    yield from prose(f"{text}. {_exact(context)}")


def _exact(context: Context) -> str:
    if not context.measures:
        return ""
    if not context.gpu:
        problem = native.triton_problem()
        if problem:
            return f"The kernel was not run here, as {problem}."
        error = float(native.interpret_triton(SOURCE, CHECK))
        return f"The kernel in Triton's interpreter is within {error:.1g} of float64."
    product = native.load_triton(SOURCE)["product"]
    x, weight = (torch.randn(256, 256, dtype=torch.float16, device=context.device) for _ in range(2))
    right = norm_then_product(x.double(), weight.double())
    error = ((product(x, weight, True) - right).abs().max() / right.abs().max()).item()
    return f"The largest error of these lines in float16 is {error:.1g} of the largest result."


class FusedLayer(nn.Module):
    """The same layer with one product for queries, keys and values, fused norms with residual adds, and SwiGLU."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.heads = layer.heads
        self.first, self.second = layer.first_norm.weight, layer.second_norm.weight
        self.inner = nn.Parameter(torch.cat([one.weight for one in layer.products]))
        self.gate_up = nn.Parameter(torch.cat([layer.gate.weight, layer.up.weight]))
        self.out, self.down = layer.out, layer.down

    def forward(self, x: Tensor) -> Tensor:
        """As `Layer.forward`."""
        y = kernels.rms_norm(x, self.first, eps=torch.finfo(x.dtype).eps)
        q, k, v = (
            one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in functional.linear(y, self.inner).chunk(3, -1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y, x = kernels.add_rms_norm(
            self.out(attended.transpose(1, 2).flatten(2)), x, self.second, eps=torch.finfo(x.dtype).eps
        )
        gate, up = functional.linear(y, self.gate_up).chunk(2, -1)
        result: Tensor = x + self.down(kernels.swiglu(gate, up))
        return result


def _layer(context: Context) -> Iterator[Part]:
    model = context.pick(
        gpu=shape(layers=1, hidden=4096, heads=32, intermediate=11008, vocabulary=32),
        cpu=shape(layers=1, hidden=256, heads=4, intermediate=688, vocabulary=32),
    )
    batch, tokens = context.pick(gpu=(2, 2048), cpu=(2, 128))
    dtype = context.pick(gpu=torch.bfloat16, cpu=torch.float32)
    with context.building(), torch.device(context.device if context.measures else "cpu"):
        layer = Layer(model).to(dtype)
        layers = {"as written": layer, "fused": FusedLayer(layer)}
        x = torch.randn(batch, tokens, model.hidden, dtype=dtype)
    with torch.no_grad():
        estimates = {name: nearpeak.estimate(one, x, on=context.machine) for name, one in layers.items()}
        yield from prose(
            f"A Llama layer of width {model.hidden}, {batch} x {tokens} tokens, forward. Each op has a limiter; their"
            " expected times are added up by it. Fused: one product for queries, keys and values and one for gate and"
            " up, norms that add the residual, SwiGLU in one pass."
        )
        bars = {name: _by_limiter(name, one) for name, one in estimates.items()}
        yield StackedBars(
            title="A layer by what limits it", subtitle="expected times of its ops", bars=tuple(bars.values())
        )
        rows = [
            context.row(name, one, x, predicted=estimates[name].expected_device_s or estimates[name].as_written_s)
            for name, one in layers.items()
        ]
    yield prediction_table("A layer, forward", rows)
    before, after = (dict(bar.pieces) for bar in bars.values())
    whole = sum(before.values())
    yield from prose(
        f"Compute is {percent(before['compute'] / whole, 0)} of the layer as written, and fusion leaves it about as it"
        f" is: {seconds(before['compute'])} before, {seconds(after['compute'])} after. Memory falls from"
        f" {seconds(before['memory'])} to {seconds(after['memory'])}. However much is fused, the layer takes at least"
        f" {percent(before['compute'] / whole, 0)} of its time."
    )


def _by_limiter(name: str, estimate: nearpeak.Estimate) -> Bar:
    pieces = {"compute": 0.0, "memory": 0.0, "launch": 0.0}
    for op in estimate.ops:
        limiter = op.limiter if op.limiter in ("compute", "launch") else "memory"
        pieces[limiter] += op.seconds if op.expected_seconds is None else op.expected_seconds
    if estimate.expected_device_s is not None:  # gaps between kernels
        pieces["launch"] += max(0.0, estimate.expected_device_s - sum(pieces.values()))
    return Bar(name=name, pieces=tuple(pieces.items()))
