"""Is every bound a bound? Hundreds of calls on a GPU, measured with a cold and a hot cache, against their bounds.

    PYTHONPATH=src python -m benchmarks.estimates.soundness --json benchmarks/results/soundness.json

The bound of a call is the sum over the ops that it really ran (a live trace), against the datasheet's ceilings and
against those that are measured at the start of the run. A call breaks its bound where even the upper end of its
measured interval lies below, with the error to which the events' zero is known added. The tightness of a call is its
time over its bound at the measured ceilings.

    python -m benchmarks.estimates.soundness --dry         # builds and estimates all calls on fake tensors: no GPU
    python -m benchmarks.estimates.soundness --show FILE   # prints the tables of a run
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn import functional

import nearpeak
from nearpeak.bound.cache import Residency
from nearpeak.bound.floors import as_written
from nearpeak.machines.machine import Machine
from nearpeak.measure.instrument import zero_of
from nearpeak.ops.cost import cost_of
from nearpeak.ops.op import Trace
from nearpeak.trace.trace import trace

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
HALVES, FLOATS = (BF16, FP16), (BF16, FP16, FP32, FP64)
SMALL, MEDIUM, LARGE = 2**16, 2**22, 2**26
"""Elements: launch-bound, within the cache, far larger than the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call to be measured, built when it is its turn."""

    family: str
    name: str
    dtype: str
    build: Callable[[], nearpeak.Case]


def draw(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> torch.Tensor:
    if dtype.is_complex or dtype.is_floating_point:
        wide = dtype if dtype in (*FLOATS, torch.complex64) else FP32
        return torch.randn(*shape, device="cuda", dtype=wide).to(dtype).requires_grad_(grad)
    if dtype is torch.bool:
        return torch.rand(*shape, device="cuda") < 0.5
    return torch.randint(0, 100, shape, device="cuda", dtype=dtype)


def indices(count: int, rows: int, *, same: bool = False) -> torch.Tensor:
    return torch.zeros(count, device="cuda", dtype=torch.long) if same else torch.randint(rows, (count,), device="cuda")


def backward(function: Callable[..., Any], *args: Any, **kwargs: Any) -> nearpeak.Case:
    """The backward pass of a call alone, to all arguments that require gradients."""
    result = function(*args, **kwargs)
    wanted = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.requires_grad]
    gradient = torch.randn_like(result)
    return nearpeak.Case(lambda: torch.autograd.grad(result, wanted, gradient, retain_graph=True))


def calls() -> Iterator[Call]:
    """All calls, family by family."""
    for family, cases in FAMILIES.items():
        for name, dtype, build in cases():
            yield Call(family=family, name=name, dtype=str(dtype).removeprefix("torch."), build=build)


Cases = Iterator[tuple[str, Any, Callable[[], nearpeak.Case]]]


def matrix() -> Cases:
    def product(m: int, k: int, n: int, dtype: torch.dtype, *, zeros: bool = False) -> nearpeak.Case:
        a, b = draw(m, k, dtype=dtype), draw(n, k, dtype=dtype).t()
        return nearpeak.Case(torch.mm, a.zero_() if zeros else a, b)

    shapes = ((256, 256, 256), (1024, 1024, 1024), (4096, 4096, 4096), (8192, 8192, 8192))
    thin = ((8192, 8192, 1), (8192, 8192, 16), (8192, 8192, 128), (16384, 64, 16384), (64, 65536, 64))
    odd = ((1000, 1001, 999), (4095, 4097, 4091))
    for (m, k, n), dtype in itertools.product((*shapes, *thin, *odd), HALVES):
        yield f"mm {m}x{k}x{n}", dtype, lambda m=m, k=k, n=n, dtype=dtype: product(m, k, n, dtype)
    for (m, k, n), dtype in itertools.product((*shapes[:3], thin[0], thin[2]), (FP32, FP64)):
        yield f"mm {m}x{k}x{n}", dtype, lambda m=m, k=k, n=n, dtype=dtype: product(m, k, n, dtype)
    for m, k, n in (*shapes, thin[0], thin[2]):
        yield f"mm {m}x{k}x{n}", "tfloat32", lambda m=m, k=k, n=n: with_tf32(product(m, k, n, FP32))
    yield "mm of zeros 4096", BF16, lambda: product(4096, 4096, 4096, BF16, zeros=True)
    yield "mm of zeros 8192", BF16, lambda: product(8192, 8192, 8192, BF16, zeros=True)
    yield "mm 2048", torch.complex64, lambda: product(2048, 2048, 2048, torch.complex64)
    for m, k, n in ((256, 256, 256), (4096, 4096, 4096), (8192, 8192, 8192), (128, 8192, 8192)):
        yield f"scaled mm {m}x{k}x{n}", torch.float8_e4m3fn, lambda m=m, k=k, n=n: scaled(m, k, n)
        yield f"int mm {m}x{k}x{n}", torch.int8, lambda m=m, k=k, n=n: integer(m, k, n)
    yield "scaled mm by rows 8192", torch.float8_e4m3fn, lambda: scaled(8192, 8192, 8192, rows=True)
    for batch, m, k, n in ((128, 512, 128, 512), (1024, 64, 64, 64), (32, 1, 4096, 128)):
        for dtype in (BF16, FP32):
            yield (
                f"bmm {batch}x{m}x{k}x{n}",
                dtype,
                lambda batch=batch, m=m, k=k, n=n, dtype=dtype: nearpeak.Case(
                    torch.bmm, draw(batch, m, k, dtype=dtype), draw(batch, k, n, dtype=dtype)
                ),
            )
    yield (
        "linear with bias",
        BF16,
        lambda: nearpeak.Case(functional.linear, draw(8192, 4096), draw(14336, 4096), draw(14336)),
    )
    yield (
        "linear backward",
        BF16,
        lambda: backward(functional.linear, draw(8192, 4096, grad=True), draw(4096, 4096, grad=True)),
    )
    yield "baddbmm", FP16, lambda: nearpeak.Case(torch.baddbmm, *(draw(64, 1024, 1024, dtype=FP16) for _ in range(3)))
    yield (
        "expanded factor",
        BF16,
        lambda: nearpeak.Case(torch.bmm, draw(1, 1024, 1024).expand(64, 1024, 1024), draw(64, 1024, 128)),
    )
    yield "mv", FP32, lambda: nearpeak.Case(torch.mv, draw(8192, 8192, dtype=FP32), draw(8192, dtype=FP32))
    yield "dot", FP32, lambda: nearpeak.Case(torch.dot, draw(LARGE, dtype=FP32), draw(LARGE, dtype=FP32))
    for skew in (False, True):
        yield f"grouped mm{', one expert' if skew else ''}", BF16, lambda skew=skew: grouped(skew=skew)


def with_tf32(case: nearpeak.Case) -> nearpeak.Case:
    def call(*args: Any) -> Any:
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return case.fn(*args)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False

    return nearpeak.Case(call, *case.args)


def scaled(m: int, k: int, n: int, *, rows: bool = False) -> nearpeak.Case:
    a, b = (draw(size, k).to(torch.float8_e4m3fn) for size in (m, n))
    one, other = ((m, 1), (1, n)) if rows else ((), ())
    scales = (torch.ones(one, device="cuda"), torch.ones(other, device="cuda"))
    return nearpeak.Case(lambda a, b, *scales: torch._scaled_mm(a, b.t(), *scales, out_dtype=BF16), a, b, *scales)


def integer(m: int, k: int, n: int) -> nearpeak.Case:
    a, b = draw(m, k, dtype=torch.int8), draw(n, k, dtype=torch.int8)
    return nearpeak.Case(lambda a, b: torch._int_mm(a, b.t()), a, b)


def grouped(experts: int = 32, tokens: int = 8192, *, skew: bool) -> nearpeak.Case:
    ends = torch.full((experts,), tokens, dtype=torch.int32, device="cuda")
    if not skew:
        ends = torch.arange(1, experts + 1, dtype=torch.int32, device="cuda") * (tokens // experts)
    return nearpeak.Case(
        lambda a, b, ends: torch._grouped_mm(a, b, offs=ends), draw(tokens, 2048), draw(experts, 2048, 1408), ends
    )


def attention() -> Cases:
    backends = torch.nn.attention.SDPBackend

    def sdpa(
        backend: Any, heads: int, keys: int, length: int, width: int, dtype: torch.dtype, *, causal: bool = False,
        queries: int | None = None, grad: bool = False, batch: int = 4, mask: bool = False,
    ) -> nearpeak.Case:  # fmt: skip
        q = draw(batch, heads, queries or length, width, dtype=dtype, grad=grad)
        k, v = (draw(batch, keys, length, width, dtype=dtype, grad=grad) for _ in range(2))
        bias = draw(1, 1, queries or length, length, dtype=dtype) if mask else None

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with torch.nn.attention.sdpa_kernel(backend):
                return functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=bias, is_causal=causal, enable_gqa=heads != keys
                )

        return backward(call, q, k, v) if grad else nearpeak.Case(call, q, k, v)

    for backend in (backends.FLASH_ATTENTION, backends.CUDNN_ATTENTION, backends.EFFICIENT_ATTENTION):
        label = backend.name.partition("_")[0].lower()
        for width, causal, grad in itertools.product((64, 128), (False, True), (False, True)):
            yield (
                f"{label} {width}{' causal' * causal}{' backward' * grad}",
                BF16,
                lambda backend=backend, width=width, causal=causal, grad=grad: sdpa(
                    backend, 16, 16, 4096, width, BF16, causal=causal, grad=grad
                ),
            )
        yield f"{label} short", FP16, lambda backend=backend: sdpa(backend, 16, 16, 128, 64, FP16, batch=1)
        yield f"{label} decode", BF16, lambda backend=backend: sdpa(backend, 32, 32, 8192, 128, BF16, queries=1)
    for backend in (backends.FLASH_ATTENTION, backends.CUDNN_ATTENTION):
        yield (
            f"{backend.name.partition('_')[0].lower()} grouped heads",
            BF16,
            lambda backend=backend: sdpa(backend, 32, 8, 4096, 128, BF16, causal=True),
        )
    efficient = backends.EFFICIENT_ATTENTION
    yield "efficient", FP32, lambda: sdpa(efficient, 16, 16, 2048, 64, FP32)
    yield "efficient with mask", BF16, lambda: sdpa(efficient, 16, 16, 2048, 64, BF16, mask=True)
    yield "flash 256", BF16, lambda: sdpa(backends.FLASH_ATTENTION, 8, 8, 4096, 256, BF16)
    yield "math", BF16, lambda: sdpa(backends.MATH, 16, 16, 1024, 64, BF16)


def convolution() -> Cases:
    def run(
        kernel: int, channels: tuple[int, int], size: int, dtype: torch.dtype, *, batch: int = 32, last: bool = False,
        grad: bool = False, tf32: bool = True, **options: Any,
    ) -> nearpeak.Case:  # fmt: skip
        layout = torch.channels_last if last else torch.contiguous_format
        x = draw(batch, channels[0], size, size, dtype=dtype).to(memory_format=layout).requires_grad_(grad)
        weight = draw(channels[1], channels[0] // options.get("groups", 1), kernel, kernel, dtype=dtype)
        weight = weight.to(memory_format=layout).requires_grad_(grad)

        def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            torch.backends.cudnn.allow_tf32 = tf32
            torch.backends.cudnn.benchmark = True
            return functional.conv2d(x, weight, **options)

        return backward(call, x, weight) if grad else nearpeak.Case(call, x, weight)

    for dtype, kernel, last in itertools.product((BF16, FP16, FP32), (1, 3, 5), (False, True)):
        yield (
            f"{kernel}x{kernel} 128 channels{' last' * last}",
            "tfloat32" if dtype is FP32 else dtype,
            lambda dtype=dtype, kernel=kernel, last=last: run(
                kernel, (128, 128), 56, dtype, last=last, padding=kernel // 2
            ),
        )
    for dtype in (FP16, FP32):
        yield "3x3 512 channels", dtype, lambda dtype=dtype: run(3, (512, 512), 28, dtype, tf32=False, padding=1)
        yield "3x3 backward", dtype, lambda dtype=dtype: run(3, (128, 128), 56, dtype, grad=True, tf32=False, padding=1)
    yield "1x1 stride 2", BF16, lambda: run(1, (256, 512), 56, BF16, last=True, stride=2)
    yield "7x7 depthwise", BF16, lambda: run(7, (256, 256), 56, BF16, groups=256, padding=3)
    yield "7x7 depthwise", FP32, lambda: run(7, (256, 256), 56, FP32, groups=256, padding=3)
    yield "16x16 patches", BF16, lambda: run(16, (3, 768), 224, BF16, stride=16)
    yield "3x3 dilated", FP16, lambda: run(3, (128, 128), 56, FP16, dilation=2, padding=2)
    yield "3x3 64 channels 224", FP16, lambda: run(3, (64, 64), 224, FP16, last=True, padding=1)
    yield "3x3 small", FP32, lambda: run(3, (16, 16), 16, FP32, batch=1, padding=1)
    yield (
        "1-d 4",
        BF16,
        lambda: nearpeak.Case(
            lambda x, w: functional.conv1d(x, w, groups=2048, padding=3), draw(8, 2048, 4096), draw(2048, 1, 4)
        ),
    )
    yield (
        "3-d 3",
        FP16,
        lambda: nearpeak.Case(
            lambda x, w: functional.conv3d(x, w, padding=1),
            draw(2, 64, 16, 56, 56, dtype=FP16),
            draw(64, 64, 3, 3, 3, dtype=FP16),
        ),
    )
    yield (
        "transposed 4x4",
        FP16,
        lambda: nearpeak.Case(
            lambda x, w: functional.conv_transpose2d(x, w, stride=2, padding=1),
            draw(16, 256, 32, 32, dtype=FP16),
            draw(256, 128, 4, 4, dtype=FP16),
        ),
    )


def pointwise() -> Cases:
    whole = (torch.int8, torch.int32, torch.int64)
    for size, dtype in itertools.product((SMALL, MEDIUM, LARGE), (*FLOATS, *whole)):
        yield (
            f"add {size}",
            dtype,
            lambda size=size, dtype=dtype: nearpeak.Case(torch.add, draw(size, dtype=dtype), draw(size, dtype=dtype)),
        )
    named: dict[str, Callable[..., Any]] = {
        "exp": torch.exp, "gelu": functional.gelu, "silu": functional.silu, "tanh": torch.tanh, "rsqrt": torch.rsqrt,
        "square": torch.square, "sin": torch.sin, "log": torch.log, "erf": torch.erf, "times 2": lambda x: x * 2,
        "to float32": lambda x: x.float(), "clamp": lambda x: x.clamp(-1, 1),
    }  # fmt: skip
    for (name, function), size, dtype in itertools.product(named.items(), (MEDIUM, LARGE), (BF16, FP32)):
        if name == "to float32" and dtype is FP32:
            continue
        yield (
            f"{name} {size}",
            dtype,
            lambda function=function, size=size, dtype=dtype: nearpeak.Case(function, draw(size, dtype=dtype)),
        )
    # The last-level cache of an H200 has 50 MB, of an A100 40: what fits and what does not is decided here.
    for megabytes in (16, 24, 32, 40, 48, 64, 96):
        yield (
            f"add, {3 * megabytes} MB in all",
            FP32,
            lambda megabytes=megabytes: nearpeak.Case(
                torch.add, *(draw(megabytes * 250_000, dtype=FP32) for _ in range(2))
            ),
        )
    yield (
        "expanded rows",
        FP32,
        lambda: nearpeak.Case(torch.add, draw(8192, 8192, dtype=FP32), draw(1, 8192, dtype=FP32).expand(8192, 8192)),
    )
    yield "outer sum", BF16, lambda: nearpeak.Case(torch.add, draw(8192, 1), draw(1, 8192))
    yield (
        "transposed add",
        FP32,
        lambda: nearpeak.Case(torch.add, draw(8192, 8192, dtype=FP32), draw(8192, 8192, dtype=FP32).t()),
    )
    yield "in place", BF16, lambda: nearpeak.Case(lambda x: x.mul_(1.0), draw(LARGE))
    yield "with itself", FP32, lambda: nearpeak.Case(lambda x: torch.mul(x, x), draw(LARGE, dtype=FP32))
    for share in (0.0, 0.5, 1.0):
        yield (
            f"where, {share:.0%} of the first",
            FP32,
            lambda share=share: nearpeak.Case(
                torch.where, torch.rand(LARGE, device="cuda") < share, draw(LARGE, dtype=FP32), draw(LARGE, dtype=FP32)
            ),
        )
        yield (
            f"masked fill, {share:.0%}",
            BF16,
            lambda share=share: nearpeak.Case(
                torch.masked_fill, draw(LARGE), torch.rand(LARGE, device="cuda") < share, 0.0
            ),
        )
    yield "comparison", BF16, lambda: nearpeak.Case(torch.lt, draw(LARGE), draw(LARGE))
    yield (
        "logical and",
        torch.bool,
        lambda: nearpeak.Case(torch.logical_and, draw(LARGE, dtype=torch.bool), draw(LARGE, dtype=torch.bool)),
    )
    yield "addcmul", FP32, lambda: nearpeak.Case(torch.addcmul, *(draw(LARGE, dtype=FP32) for _ in range(3)))
    yield "gelu backward", BF16, lambda: backward(functional.gelu, draw(LARGE, grad=True))
    yield "silu backward", BF16, lambda: backward(functional.silu, draw(LARGE, grad=True))
    yield (
        "complex product",
        torch.complex64,
        lambda: nearpeak.Case(torch.mul, *(draw(2**24, dtype=torch.complex64) for _ in range(2))),
    )


def reduction() -> Cases:
    for size, dtype in itertools.product((SMALL, MEDIUM, LARGE), (BF16, FP32, FP64, torch.int64)):
        yield f"sum {size}", dtype, lambda size=size, dtype=dtype: nearpeak.Case(torch.sum, draw(size, dtype=dtype))
    named: dict[str, Callable[..., Any]] = {
        "sum of rows": lambda x: x.sum(-1), "sum of columns": lambda x: x.sum(0), "mean": lambda x: x.mean(-1),
        "largest": lambda x: x.amax(-1), "where largest": lambda x: x.argmax(-1),
        "largest with index": lambda x: x.max(-1),
        "variance": lambda x: x.var(-1), "norm": lambda x: torch.linalg.vector_norm(x), "product": lambda x: x.prod(-1),
        "log sum exp": lambda x: torch.logsumexp(x, -1),
    }  # fmt: skip
    for (name, function), dtype in itertools.product(named.items(), (BF16, FP32)):
        yield (
            name,
            dtype,
            lambda function=function, dtype=dtype: nearpeak.Case(function, draw(16384, 4096, dtype=dtype)),
        )
    yield (
        "any of nothing",
        torch.bool,
        lambda: nearpeak.Case(torch.any, torch.zeros(LARGE, device="cuda", dtype=torch.bool)),
    )
    yield (
        "any of everything",
        torch.bool,
        lambda: nearpeak.Case(torch.any, torch.ones(LARGE, device="cuda", dtype=torch.bool)),
    )
    yield "all", torch.bool, lambda: nearpeak.Case(torch.all, draw(LARGE, dtype=torch.bool))
    yield "sum of an expanded", FP32, lambda: nearpeak.Case(torch.sum, draw(1, 8192, dtype=FP32).expand(8192, 8192))


def normalization() -> Cases:
    def named(dtype: torch.dtype, rows: int, width: int) -> dict[str, Callable[[bool], tuple[Any, ...]]]:
        return {
            "softmax": lambda grad: (lambda x: torch.softmax(x, -1), draw(rows, width, dtype=dtype, grad=grad)),
            "log softmax": lambda grad: (lambda x: torch.log_softmax(x, -1), draw(rows, width, dtype=dtype, grad=grad)),
            "layer norm": lambda grad: (
                lambda x, w, b: functional.layer_norm(x, (width,), w, b),
                *(draw(*shape, dtype=dtype, grad=grad) for shape in ((rows, width), (width,), (width,))),
            ),
            "rms norm": lambda grad: (
                lambda x, w: functional.rms_norm(x, (width,), w),
                *(draw(*shape, dtype=dtype, grad=grad) for shape in ((rows, width), (width,))),
            ),
        }

    for (rows, width), dtype in itertools.product(((64, 1024), (2048, 2048), (16384, 4096)), (BF16, FP32)):
        for name, make in named(dtype, rows, width).items():
            yield f"{name} {rows}x{width}", dtype, lambda make=make: nearpeak.Case(*make(False))
            if rows > 64:
                yield f"{name} {rows}x{width} backward", dtype, lambda make=make: backward(*make(True))
    for dtype in (FP16, FP32):
        yield (
            "group norm",
            dtype,
            lambda dtype=dtype: nearpeak.Case(
                lambda x: functional.group_norm(x, 32), draw(32, 256, 56, 56, dtype=dtype)
            ),
        )
        yield (
            "batch norm",
            dtype,
            lambda dtype=dtype: nearpeak.Case(
                lambda x: functional.batch_norm(x, None, None, training=True), draw(32, 256, 56, 56, dtype=dtype)
            ),
        )
        yield (
            "batch norm backward",
            dtype,
            lambda dtype=dtype: backward(
                lambda x: functional.batch_norm(x, None, None, training=True),
                draw(32, 256, 56, 56, dtype=dtype, grad=True),
            ),
        )
    yield "softmax of columns", FP32, lambda: nearpeak.Case(lambda x: torch.softmax(x, 0), draw(4096, 4096, dtype=FP32))


def loss() -> Cases:
    for dtype, vocabulary in itertools.product((BF16, FP32), (1000, 128256)):
        yield (
            f"cross entropy {vocabulary}",
            dtype,
            lambda dtype=dtype, vocabulary=vocabulary: nearpeak.Case(
                functional.cross_entropy, draw(4096, vocabulary, dtype=dtype), indices(4096, vocabulary)
            ),
        )
        yield (
            f"cross entropy {vocabulary} backward",
            dtype,
            lambda dtype=dtype, vocabulary=vocabulary: backward(
                functional.cross_entropy, draw(4096, vocabulary, dtype=dtype, grad=True), indices(4096, vocabulary)
            ),
        )
    yield "nll", FP32, lambda: nearpeak.Case(functional.nll_loss, draw(8192, 32000, dtype=FP32), indices(8192, 32000))
    named = {"mse": functional.mse_loss, "l1": functional.l1_loss, "smooth l1": functional.smooth_l1_loss}
    for name, function in named.items():
        yield (
            name,
            FP32,
            lambda function=function: nearpeak.Case(function, *(draw(2**25, dtype=FP32) for _ in range(2))),
        )
        yield (
            f"{name} backward",
            FP32,
            lambda function=function: backward(function, draw(2**25, dtype=FP32, grad=True), draw(2**25, dtype=FP32)),
        )
    yield (
        "binary cross entropy",
        BF16,
        lambda: nearpeak.Case(
            functional.binary_cross_entropy_with_logits, draw(2**25), torch.rand(2**25, device="cuda", dtype=BF16)
        ),
    )
    yield (
        "divergence",
        FP32,
        lambda: nearpeak.Case(
            lambda x, y: functional.kl_div(x, y, log_target=True), *(draw(4096, 8192, dtype=FP32) for _ in range(2))
        ),
    )


def indexing() -> Cases:
    for same, dtype in itertools.product((False, True), (BF16, FP32)):
        label = ", all the same row" if same else ""
        table = lambda dtype=dtype, grad=False: draw(32000, 2048, dtype=dtype, grad=grad)  # noqa: E731
        yield (
            f"embedding{label}",
            dtype,
            lambda table=table, same=same: nearpeak.Case(
                functional.embedding, indices(16384, 32000, same=same), table()
            ),
        )
        yield (
            f"embedding backward{label}",
            dtype,
            lambda table=table, same=same: backward(
                functional.embedding, indices(16384, 32000, same=same), table(grad=True)
            ),
        )
        yield (
            f"index select{label}",
            dtype,
            lambda table=table, same=same: nearpeak.Case(
                torch.index_select, table(), 0, indices(16384, 32000, same=same)
            ),
        )
        yield (
            f"index{label}",
            dtype,
            lambda table=table, same=same: nearpeak.Case(lambda t, i: t[i], table(), indices(16384, 32000, same=same)),
        )
        yield (
            f"gather{label}",
            dtype,
            lambda table=table, same=same: nearpeak.Case(
                lambda t, i: t.gather(0, i.view(-1, 1).expand(-1, 2048)), table(), indices(16384, 32000, same=same)
            ),
        )
        yield (
            f"gather one of each row{label}",
            dtype,
            lambda table=table, same=same: nearpeak.Case(
                lambda t, i: t.gather(1, i.view(-1, 1)), table(), indices(32000, 2048, same=same)
            ),
        )
        yield (
            f"take{label}",
            dtype,
            lambda table=table, same=same: nearpeak.Case(torch.take, table(), indices(MEDIUM, 32000 * 2048, same=same)),
        )
    for name in ("index_add_", "index_copy_"):
        yield (
            name,
            FP32,
            lambda name=name: nearpeak.Case(
                lambda t, i, s: getattr(t, name)(0, i, s),
                draw(32000, 1024, dtype=FP32),
                torch.randperm(32000, device="cuda")[:8192],
                draw(8192, 1024, dtype=FP32),
            ),
        )
    yield (
        "scatter add",
        FP32,
        lambda: nearpeak.Case(
            lambda t, i, s: t.scatter_add_(0, i, s),
            draw(8192, 1024, dtype=FP32),
            torch.randint(8192, (8192, 1024), device="cuda"),
            draw(8192, 1024, dtype=FP32),
        ),
    )
    yield (
        "index put",
        BF16,
        lambda: nearpeak.Case(
            lambda t, i, s: t.index_put_((i,), s),
            draw(32000, 1024),
            torch.randperm(32000, device="cuda")[:8192],
            draw(8192, 1024),
        ),
    )
    yield (
        "masked select of nothing",
        FP32,
        lambda: nearpeak.Case(
            torch.masked_select, draw(2**24, dtype=FP32), torch.zeros(2**24, device="cuda", dtype=torch.bool)
        ),
    )
    yield "nonzero", torch.bool, lambda: nearpeak.Case(torch.nonzero, draw(2**22, dtype=torch.bool))


def sorting() -> Cases:
    for dtype in (FP32, torch.int64):
        yield "sort 1M", dtype, lambda dtype=dtype: nearpeak.Case(torch.sort, draw(2**20, dtype=dtype))
        yield "sort rows", dtype, lambda dtype=dtype: nearpeak.Case(torch.sort, draw(8192, 1024, dtype=dtype))
    for dtype in (BF16, FP32):
        yield "top 8 of 128", dtype, lambda dtype=dtype: nearpeak.Case(torch.topk, draw(16384, 128, dtype=dtype), 8)
        yield "top 50 of 128k", dtype, lambda dtype=dtype: nearpeak.Case(torch.topk, draw(64, 128256, dtype=dtype), 50)
        yield (
            "cumulative sum",
            dtype,
            lambda dtype=dtype: nearpeak.Case(torch.cumsum, draw(8192, 4096, dtype=dtype), -1),
        )
    yield "median", FP32, lambda: nearpeak.Case(torch.median, draw(2**22, dtype=FP32))
    yield (
        "search",
        FP32,
        lambda: nearpeak.Case(torch.searchsorted, torch.linspace(-3, 3, 4096, device="cuda"), draw(2**24, dtype=FP32)),
    )
    yield "unique", torch.int64, lambda: nearpeak.Case(torch.unique, draw(2**22, dtype=torch.int64))
    yield "histogram", FP32, lambda: nearpeak.Case(torch.histc, draw(2**24, dtype=FP32), 100)
    yield "counts", torch.int64, lambda: nearpeak.Case(torch.bincount, draw(2**22, dtype=torch.int64))


def movement() -> Cases:
    named: dict[str, Callable[..., Any]] = {
        "clone": torch.clone, "transpose": lambda x: x.t().contiguous(), "cat": lambda x: torch.cat([x, x], -1),
        "stack": lambda x: torch.stack([x, x]), "pad": lambda x: functional.pad(x, (1, 1)),
        "roll": lambda x: torch.roll(x, 1, 0), "flip": lambda x: torch.flip(x, (-1,)),
        "repeat": lambda x: x.repeat(2, 1), "lower triangle": torch.tril,
        "half of the columns": lambda x: x[:, ::2].contiguous(),
        "half of the rows": lambda x: x[::2].contiguous(), "expanded": lambda x: x[:1].expand(4096, -1).contiguous(),
        "rotate halves": lambda x: torch.cat((-x[:, 2048:], x[:, :2048]), -1),
    }  # fmt: skip
    for (name, function), dtype in itertools.product(named.items(), (BF16, FP32)):
        yield name, dtype, lambda function=function, dtype=dtype: nearpeak.Case(function, draw(8192, 4096, dtype=dtype))
    for size, dtype in itertools.product((SMALL, MEDIUM), (torch.int8, FP32)):
        yield (
            f"copy {size}",
            dtype,
            lambda size=size, dtype=dtype: nearpeak.Case(
                lambda a, b: a.copy_(b), draw(size, dtype=dtype), draw(size, dtype=dtype)
            ),
        )
    yield "repeat interleave", BF16, lambda: nearpeak.Case(lambda x: x.repeat_interleave(4, 1), draw(4, 8, 4096, 128))
    yield "cast to float8", BF16, lambda: nearpeak.Case(lambda x: x.to(torch.float8_e4m3fn), draw(LARGE))
    yield "cast to float64", FP32, lambda: nearpeak.Case(lambda x: x.double(), draw(2**24, dtype=FP32))


def creation() -> Cases:
    for size, dtype in itertools.product((SMALL, MEDIUM, LARGE), (BF16, FP64)):
        yield (
            f"zeros {size}",
            dtype,
            lambda size=size, dtype=dtype: nearpeak.Case(lambda: torch.zeros(size, device="cuda", dtype=dtype)),
        )
    yield "fill", FP32, lambda: nearpeak.Case(lambda x: x.fill_(3.0), draw(LARGE, dtype=FP32))
    yield "zero in place", torch.int8, lambda: nearpeak.Case(lambda x: x.zero_(), draw(LARGE, dtype=torch.int8))
    yield "full like", BF16, lambda: nearpeak.Case(lambda x: torch.full_like(x, 2.0), draw(LARGE))
    yield "arange", torch.int64, lambda: nearpeak.Case(lambda: torch.arange(2**24, device="cuda"))
    yield "eye", FP32, lambda: nearpeak.Case(lambda: torch.eye(8192, device="cuda"))
    yield "linspace", FP32, lambda: nearpeak.Case(lambda: torch.linspace(0, 1, 2**24, device="cuda"))


def pooling() -> Cases:
    named: dict[str, Callable[..., Any]] = {
        "max pool 2": lambda x: functional.max_pool2d(x, 2),
        "max pool 3 stride 2": lambda x: functional.max_pool2d(x, 3, 2, 1),
        "average pool 2": lambda x: functional.avg_pool2d(x, 2),
        "average of all": lambda x: functional.adaptive_avg_pool2d(x, 1),
        "nearest": lambda x: functional.interpolate(x, scale_factor=2),
        "bilinear": lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"),
        "nearest down": lambda x: functional.interpolate(x, scale_factor=0.5),
    }
    for (name, function), dtype in itertools.product(named.items(), (FP16, FP32)):
        yield (
            name,
            dtype,
            lambda function=function, dtype=dtype: nearpeak.Case(function, draw(32, 128, 56, 56, dtype=dtype)),
        )
        yield (
            f"{name} backward",
            dtype,
            lambda function=function, dtype=dtype: backward(function, draw(32, 128, 56, 56, dtype=dtype, grad=True)),
        )


def fourier() -> Cases:
    yield "fft 4096", torch.complex64, lambda: nearpeak.Case(torch.fft.fft, draw(4096, 4096, dtype=torch.complex64))
    yield "fft 256", torch.complex64, lambda: nearpeak.Case(torch.fft.fft, draw(65536, 256, dtype=torch.complex64))
    yield "real fft", FP32, lambda: nearpeak.Case(torch.fft.rfft, draw(4096, 4096, dtype=FP32))
    yield (
        "fft of 2 dimensions",
        torch.complex64,
        lambda: nearpeak.Case(torch.fft.fft2, draw(64, 512, 512, dtype=torch.complex64)),
    )
    yield (
        "inverse real fft",
        torch.complex64,
        lambda: nearpeak.Case(torch.fft.irfft, draw(4096, 2049, dtype=torch.complex64)),
    )


def random() -> Cases:
    for size, dtype in itertools.product((SMALL, LARGE), (BF16, FP32)):
        yield (
            f"uniform {size}",
            dtype,
            lambda size=size, dtype=dtype: nearpeak.Case(lambda: torch.rand(size, device="cuda", dtype=dtype)),
        )
        yield (
            f"normal {size}",
            dtype,
            lambda size=size, dtype=dtype: nearpeak.Case(lambda: torch.randn(size, device="cuda", dtype=dtype)),
        )
    for dtype in (BF16, FP32):
        yield "dropout", dtype, lambda dtype=dtype: nearpeak.Case(functional.dropout, draw(LARGE, dtype=dtype), 0.1)
        yield (
            "dropout backward",
            dtype,
            lambda dtype=dtype: backward(functional.dropout, draw(LARGE, dtype=dtype, grad=True), 0.1),
        )
    yield "integers", torch.int64, lambda: nearpeak.Case(lambda: torch.randint(100, (2**24,), device="cuda"))
    yield "permutation", torch.int64, lambda: nearpeak.Case(lambda: torch.randperm(2**20, device="cuda"))
    yield "bernoulli", FP32, lambda: nearpeak.Case(torch.bernoulli, torch.rand(2**24, device="cuda"))


def optimizer() -> Cases:
    def step(make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], dtype: torch.dtype) -> nearpeak.Case:
        parameters = [torch.nn.Parameter(draw(4096, 1024, dtype=dtype)) for _ in range(8)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = make(parameters)
        optimizer.step()
        return nearpeak.Case(optimizer.step)

    kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
        "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
        "AdamW one by one": lambda p: torch.optim.AdamW(p, foreach=False),
        "SGD foreach": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, foreach=True),
        "SGD fused": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, fused=True),
    }
    for (name, make), dtype in itertools.product(kinds.items(), (BF16, FP32)):
        yield name, dtype, lambda make=make, dtype=dtype: step(make, dtype)
    yield (
        "clip of gradients",
        FP32,
        lambda: nearpeak.Case(
            lambda *grads: torch._foreach_norm(grads), *(draw(4096, 1024, dtype=FP32) for _ in range(8))
        ),
    )


def quantization() -> Cases:
    yield (
        "fake quantize",
        FP32,
        lambda: nearpeak.Case(
            lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127), draw(2**24, dtype=FP32)
        ),
    )
    yield (
        "quantize",
        FP32,
        lambda: nearpeak.Case(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), draw(2**24, dtype=FP32)),
    )
    yield (
        "fake quantize channels",
        FP32,
        lambda: nearpeak.Case(
            lambda x, s, z: torch.fake_quantize_per_channel_affine(x, s, z, 0, -128, 127),
            draw(4096, 4096, dtype=FP32),
            torch.full((4096,), 0.1, device="cuda"),
            torch.zeros(4096, device="cuda", dtype=torch.int32),
        ),
    )


FAMILIES: dict[str, Callable[[], Cases]] = {
    function.__name__: function
    for function in (
        matrix, attention, convolution, pointwise, reduction, normalization, loss, indexing, sorting, movement,
        creation, pooling, fourier, random, optimizer, quantization,
    )
}  # fmt: skip

CEILINGS: tuple[Literal["theoretical", "achievable"], ...] = ("theoretical", "achievable")
ALLOWED_SHARE, ALLOWED_EXCESS = 0.01, 0.03
HOT_BYTES = 400e6
"""Calls that move more than this see no difference between a cold and a hot cache; they are measured cold only."""
FAST = {"max_seconds": 0.06, "warmup_seconds": 0.02, "min_blocks": 8, "precision": 0.01, "other_kinds": False}


def bounds_of(recorded: Trace, machine: Machine) -> dict[str, dict[str, float]]:
    """Seconds by cache and ceilings: a first run of the trace, and one that finds the cache as the first left it."""
    costs = [cost_of(op) for op in recorded.ops]
    found: dict[str, dict[str, float]] = {"cold": {}, "hot": {}}
    for ceilings in CEILINGS:
        residency = Residency(machine.cache_bytes or 0.0)
        for cache in found:
            bounds = as_written(recorded, costs, machine, ceilings=ceilings, residency=residency)
            found[cache][ceilings] = sum(bound.seconds for bound in bounds)
    return found


def zero_error(method: str, cache: Literal["cold", "hot"]) -> float:
    """How well the zero of the events is known that a method takes off; a regression takes none off."""
    zero = zero_of(torch.cuda.current_device(), cache)
    if method.startswith("CUDA events around each call in a CUDA graph"):
        return zero.graph_uncertainty
    return zero.uncertainty if method.startswith("CUDA events") else 0.0


def measure(call: Call, machine: Machine) -> dict[str, Any]:
    """One call: its ops, its bounds, its times."""
    case = call.build()
    row: dict[str, Any] = {"family": call.family, "name": call.name, "dtype": call.dtype}
    case.call()
    recorded = trace(case.fn, *case.args, kwargs=dict(case.kwargs), live=True)
    costs = [cost_of(op) for op in recorded.ops]
    row["ops"] = [op.name for op, cost in zip(recorded.ops, costs, strict=True) if cost.family != "view"]
    row["unmodeled"] = sorted(
        {op.name for op, cost in zip(recorded.ops, costs, strict=True) if cost.model != "formula"}
    )
    row["bytes"] = sum(cost.work.bytes for cost in costs)
    row["bounds"] = bounds_of(recorded, machine)
    row["times"] = {}
    caches: tuple[Literal["cold", "hot"], ...] = ("cold", "hot") if row["bytes"] <= HOT_BYTES else ("cold",)
    for cache in caches:
        timing = nearpeak.bench(case, name=call.name, cache=cache, **FAST)
        row["times"][cache] = {
            "seconds": timing.seconds,
            "low": timing.low,
            "high": timing.high + zero_error(timing.method, cache),
            "method": timing.method,
            "flags": [flag.name for flag in timing.flags],
        }
    return row


def run(families: Sequence[str], machine: Machine, limit_seconds: float) -> list[dict[str, Any]]:
    """All calls, until the time is up."""
    rows = []
    start = time.perf_counter()
    for call in calls():
        if call.family not in families:
            continue
        if time.perf_counter() - start > limit_seconds:
            print(f"the time is up before {call.family} {call.name}", file=sys.stderr)
            break
        try:
            rows.append(measure(call, machine))
        except Exception as error:  # one call that this torch does not have must not lose the others
            rows.append({"family": call.family, "name": call.name, "dtype": call.dtype, "error": str(error)[:300]})
            print(f"{call.family} {call.name} {call.dtype}: {str(error).splitlines()[0][:150]}", file=sys.stderr)
        torch.cuda.empty_cache()
    return rows


def dry(families: Sequence[str], machine: Machine) -> None:
    """Builds every call on fake tensors and estimates it."""
    failed = unmodeled = total = 0
    for call in calls():
        if call.family not in families:
            continue
        total += 1
        try:
            with nearpeak.fake():
                case = call.build()
            estimate = nearpeak.estimate(case, on=machine)
        except Exception as error:
            failed += 1
            print(f"{call.family} {call.name} {call.dtype}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            continue
        if estimate.coverage.unmodeled:
            unmodeled += 1
            print(f"{call.family} {call.name} {call.dtype}: without a formula {dict(estimate.coverage.unmodeled)}")
    print(f"{total} calls, {failed} failed, {unmodeled} with ops that have no formula")


def ratios(
    rows: Sequence[dict[str, Any]], ceilings: str, end: str = "seconds"
) -> list[tuple[float, str, dict[str, Any]]]:
    """Time over bound with the state of the cache and the row, the smallest first."""
    pairs = [
        (row["times"][cache][end] / row["bounds"][cache][ceilings], cache, row)
        for row in rows
        for cache in row.get("times", {})
        if row["bounds"][cache][ceilings] > 0
    ]
    return sorted(pairs, key=lambda item: item[0])


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures that decide."""
    result: dict[str, Any] = {
        "calls": sum("times" in row for row in rows),
        "measurements": sum(len(row.get("times", {})) for row in rows),
        "errors": sum("error" in row for row in rows),
    }
    for ceilings in CEILINGS:
        upper = ratios(rows, ceilings, "high")
        below = [item for item in upper if item[0] < 1.0]
        result[ceilings] = {
            "below": len(below),
            "share": len(below) / len(upper) if upper else 0.0,
            "worst": upper[0][0] if upper else None,
            "names": [
                f"{row['family']} {row['name']} {row['dtype']} {cache}: {ratio:.3f}" for ratio, cache, row in below
            ],
        }
    return result


WIDTHS = (12, 9, 9, 12, 9, 9)


def tightness(rows: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """By family: the number of calls; the best, median and worst time over bound, with a cold and with a hot cache."""
    table = []
    for family in FAMILIES:
        own = [row for row in rows if row["family"] == family and "times" in row]
        figures: list[float] = []
        for cache in ("cold", "hot"):
            sorted_ratios = sorted(ratio for ratio, state, _ in ratios(own, "achievable") if state == cache)
            figures += [sorted_ratios[0], statistics.median(sorted_ratios), sorted_ratios[-1]] if sorted_ratios else []
        table.append((family, len(own), *figures))
    return table


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table of the documentation."""
    lines = ["| family | calls | cold: best | median | worst | hot: best | median | worst |", "| --- |" + " ---: |" * 7]
    for family, count, *figures in tightness(rows):
        lines.append(f"| {family} | {count} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |")
    return "\n".join(lines)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The tightness by family, what breaks its bound, and the nearest to it."""
    columns = "".join(f"{f'{cache}: best':>12}{'median':>9}{'worst':>9}" for cache in ("cold", "hot"))
    print(f"{'family':15}{'calls':>6}{columns}")
    for family, count, *figures in tightness(rows):
        print(
            f"{family:15}{count:6}"
            + "".join(f"{figure:{width}.2f}" for figure, width in zip(figures, WIDTHS, strict=False))
        )
    for row in rows:
        if row.get("unmodeled"):
            print(f"without a formula: {row['family']} {row['name']}: {', '.join(row['unmodeled'])}")
    summaries = summary(rows)
    print(
        f"\n{summaries['calls']} calls, {summaries['measurements']} measurements, {summaries['errors']} could not run"
    )
    for ceilings in CEILINGS:
        part = summaries[ceilings]
        smallest = f"smallest ratio {part['worst']:.3f}" if part["worst"] is not None else "nothing measured"
        print(f"below the bound at {ceilings} ceilings: {part['below']} ({part['share']:.2%}), {smallest}")
        for name in part["names"]:
            print(f"    {name}")
    print("nearest to the bound at achievable ceilings:")
    for ratio, cache, row in ratios(rows, "achievable")[:12]:
        print(f"    {ratio:.3f}  {row['family']} {row['name']} {row['dtype']} {cache}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", action="append", choices=tuple(FAMILIES), help="only this family (may be repeated)")
    parser.add_argument("--dry", action="store_true", help="on fake tensors, without timing")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the tables of a run")
    parser.add_argument("--markdown", action="store_true", help="with --show: the table of the documentation")
    parser.add_argument("--limit", type=float, default=540.0, metavar="SECONDS", help="stop after this time (540)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    families = arguments.family or tuple(FAMILIES)
    if arguments.show:
        rows = json.loads(arguments.show.read_text())["rows"]
        print(markdown(rows)) if arguments.markdown else show(rows)
        return 0
    if arguments.dry:
        dry(families, nearpeak.machine("h200-sxm"))
        return 0
    torch.manual_seed(0)
    machine = nearpeak.machine(calibrate=True)
    start = time.perf_counter()
    rows = run(families, machine, arguments.limit)
    if arguments.json:
        result = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine.name,
            "torch": torch.__version__,
            "bandwidth": machine.achievable.bandwidth,
            "matrix": dict(machine.achievable.matrix),
            "cache_bandwidth": machine.achievable.cache_bandwidth,
            "seconds": time.perf_counter() - start,
            "summary": summary(rows),
            "rows": rows,
        }
        arguments.json.write_text(
            json.dumps(result, indent=None, separators=(",", ":")).replace('{"family"', '\n{"family"') + "\n"
        )
    show(rows)
    summaries = summary(rows)
    sound = not summaries["theoretical"]["below"] and summaries["achievable"]["share"] <= ALLOWED_SHARE
    return 0 if sound and (summaries["achievable"]["worst"] or 1.0) >= 1 - ALLOWED_EXCESS else 1


if __name__ == "__main__":
    raise SystemExit(main())
