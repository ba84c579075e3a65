"""Every kernel once, forward and backward, on small tensors of odd shapes: for compute-sanitizer.

    export PYTHONPATH=src TRITON_CACHE_DIR=/tmp/sanitized
    python -m benchmarks.kernels.sanitize                                    # compiles all kernels, and keeps them
    compute-sanitizer --tool memcheck python -m benchmarks.kernels.sanitize
    compute-sanitizer --tool racecheck python -m benchmarks.kernels.sanitize
    TRITON_INSTRUMENTATION_MODE=consan python -m benchmarks.kernels.sanitize --only "attention 64"

In kernels in Gluon one thread tells other warps, by a barrier in memory, what all threads of its own have done before
another barrier. racecheck does not follow that, and reports it. The last line is Triton's own sanitizer, which knows
such kernels better, and takes minutes to compile each of them.

Each tensor has memory of its own from the driver, so that a read or write past its end is seen. Nothing is compared:
that is what the tests do.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # before torch is imported

import torch
from torch import Tensor

from nearpeak import kernels
from nearpeak.kernels import ladder as kernels_ladder
from nearpeak.kernels._runtime.choice import own_backends
from nearpeak.kernels.attention import fp8_triton
from nearpeak.kernels.gemm import grouped_triton
from nearpeak.kernels.gemm.tuning import SM90_GROUPED_CONFIGS, SM90_GROUPED_GRADIENT_CONFIGS
from nearpeak.kernels.optimizer import triton as optimizer_triton

DTYPE = torch.bfloat16
SHORT = (5, 101)
"""Rows that are held in registers. No row here begins at a multiple of 16 bytes, but for some of losses."""
MANY = (269, 101)
"""More rows than have a program each in the backward pass of a norm."""
LONG, LONG_SOFTMAX = (3, 33_001), (3, 70_001)
"""Rows that are read block by block."""
SPLIT = (2, 140_001)
"""Few rows that are long enough to be shared by several programs."""
SHARED, SHIFTED = (50, 262_136), (50, 262_137)
"""As many as are shared on Hopper by programs that keep parts of rows in shared memory."""


def backward(result: Any) -> None:
    """Through all results that have a gradient, from above a tensor that is not one number expanded."""
    results = [one for one in (result if isinstance(result, tuple) else (result,)) if one.requires_grad]
    torch.autograd.backward(results, [torch.randn_like(one) for one in results])


class Calls:
    """The calls, by name; their tensors are made when they are called."""

    def __init__(self, device: str) -> None:
        self.device = device

    def random(self, *shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype).requires_grad_()

    def both(
        self, function: Callable[..., Any], *shapes: Sequence[int], dtype: torch.dtype = DTYPE, **options: Any
    ) -> Callable[[], None]:
        """Both passes of a function of tensors of these shapes."""
        return lambda: backward(function(*(self.random(*shape, dtype=dtype) for shape in shapes), **options))

    def every(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        yield "add", self.both(kernels.add, SHORT, SHORT)
        for shape in (SHORT, LONG_SOFTMAX, SPLIT):
            yield f"softmax {shape}", self.both(kernels.softmax, shape)
            yield f"log_softmax {shape}", self.both(kernels.log_softmax, shape, scale=0.5)
        yield "softmax, causal", self.both(kernels.softmax, (3, 17, 17), causal=True)
        yield "softmax, mask", self.masked
        for shape in (SHORT, MANY, LONG):
            weight = shape[-1:]
            yield f"rms_norm {shape}", self.both(kernels.rms_norm, shape, weight)
            yield f"layer_norm {shape}", self.both(kernels.layer_norm, shape, weight, weight)
            yield f"add_rms_norm {shape}", self.both(kernels.add_rms_norm, shape, shape, weight)
            yield f"add_layer_norm {shape}", self.both(kernels.add_layer_norm, shape, shape, weight, weight)
        for shape in (SHARED, SHIFTED):
            yield f"softmax {shape}", self.both(kernels.softmax, shape)
            yield f"layer_norm {shape}", self.both(kernels.layer_norm, shape, shape[-1:], shape[-1:])
            yield f"add_rms_norm {shape}", self.both(kernels.add_rms_norm, shape, shape, shape[-1:])
        for activation in (kernels.bias_gelu, kernels.bias_silu, kernels.bias_relu_squared):
            yield activation.__name__, self.both(activation, SHORT, SHORT[-1:])
            yield f"{activation.__name__}, no bias", self.both(activation, SHORT)
        for gated in (kernels.swiglu, kernels.geglu):
            yield gated.__name__, self.both(gated, SHORT, SHORT)
        for packed in (kernels.swiglu_packed, kernels.geglu_packed):
            for interleaved in (False, True):
                yield f"{packed.__name__}, {interleaved}", self.both(packed, (5, 202), interleaved=interleaved)
        yield "dropout_add", self.both(kernels.dropout_add, SHORT, SHORT, p=0.3)
        yield from self.attentions()
        yield "rotary", self.rotary
        for page_size in (None, 1, 3, 16):
            for dtype in (DTYPE, torch.float8_e4m3fn):
                yield f"cache {page_size} {dtype}", partial(self.cache, page_size, dtype)
        yield from self.losses()
        yield from self.products()
        yield from self.experts()
        yield from self.ladder()
        yield from self.moves()

    def attentions(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        for options in ({"causal": True}, {"window": (9, 5), "softcap": 5.0}, {"dropout": 0.3}):
            shapes = [(1, 4, 37, 36), (1, 2, 70, 36), (1, 2, 70, 20)]
            yield f"attention {options}", self.both(kernels.attention, *shapes, return_lse=True, **options)
        # sizes for which a GPU may have kernels of its own, and lengths that no block divides
        for dim in (64, 128, 256):
            for causal in (False, True):
                batch = 2 if dim < 256 else 1
                shapes = [(batch, 2, 197, dim), (batch, 1, 331, dim), (batch, 1, 331, dim)]
                yield f"attention {dim}, causal {causal}", self.both(kernels.attention, *shapes, causal=causal)
        yield "attention, bias and sinks", self.biased
        yield (
            "attention, nothing seen",
            self.both(kernels.attention, *[(1, 1, 70, 64), *[(1, 1, 37, 64)] * 2], causal=True),
        )
        yield "attention_packed", self.packed
        for dim in (64, 128):
            yield f"attention_fp8, {dim}", partial(self.attention_of_eight, dim)
        yield "scaled_dot_product_attention", self.by_torchs_name
        for causal in (False, True):  # of several segments, and of heads that share keys
            shapes = [(1, 4, 301, 36), (1, 2, 301, 36), (1, 2, 301, 20)]
            yield f"linear_attention, causal {causal}", self.both(kernels.linear_attention, *shapes, causal=causal)
        shapes = [(1, 2, 301, 64)] * 3
        yield "linear_attention, float32", self.both(kernels.linear_attention, *shapes, dtype=torch.float32)

    @torch.no_grad()
    def attention_of_eight(self, dim: int) -> None:
        """On other GPUs than Hopper the quantization of operands alone."""
        tensors = [self.random(2, heads, tokens, dim) for heads, tokens in ((2, 197), (1, 331), (1, 331))]
        for causal in (False, True):
            if kernels.supports(kernels.attention_fp8, *tensors, causal=causal):
                kernels.attention_fp8(*tensors, causal=causal)
            else:
                fp8_triton.quantized(*tensors)

    def by_torchs_name(self) -> None:
        mask = torch.rand(37, 70, device=self.device) < 0.5
        tensors = [self.random(1, 2, tokens, 64) for tokens in (37, 70, 70)]
        backward(kernels.scaled_dot_product_attention(*tensors, attn_mask=mask))

    def masked(self) -> None:
        mask = torch.rand(17, 17, device=self.device) < 0.5
        backward(kernels.softmax(self.random(3, 17, 17), mask=mask))
        backward(kernels.softmax(self.random(3, 17, 17), mask=self.random(17, 17).detach()))

    def biased(self) -> None:
        tensors = [self.random(1, 2, 37, 36) for _ in "qkv"]
        for shape in ((37, 37), (2, 1, 37), (37, 1)):
            backward(kernels.attention(*tensors, bias=self.random(*shape), sinks=self.random(2)))

    def packed(self) -> None:
        starts = torch.tensor([0, 5, 5, 37], dtype=torch.int32, device=self.device)
        tensors = [self.random(37, 2, 36) for _ in "qkv"]
        backward(kernels.attention_packed(*tensors, starts, starts, 32, 32, causal=True))
        # tokens after the last sequence, and sequences of which one has no keys
        starts = torch.tensor([0, 100, 131, 290], dtype=torch.int32, device=self.device)
        key_starts = torch.tensor([0, 129, 129, 301], dtype=torch.int32, device=self.device)
        tensors = [self.random(293, 2, 128), self.random(301, 1, 128), self.random(301, 1, 128)]
        options = {"window": (60, 3), "sinks": self.random(2), "slopes": torch.rand(2, device=self.device)}
        backward(kernels.attention_packed(*tensors, starts, key_starts, 159, 172, **options))

    def rotary(self) -> None:
        angles = torch.rand(7, 18, device=self.device)
        cos, sin = angles.cos(), angles.sin()
        backward(kernels.rotary(self.random(2, 7, 3, 36), cos, sin))
        backward(kernels.rotary_pair(self.random(2, 7, 3, 36), self.random(2, 7, 1, 36), cos, sin, interleaved=True))
        backward(kernels.rotary(self.random(2, 7, 3, 40), cos, sin, rotary_dim=36))

    @torch.no_grad()
    def cache(self, page_size: int | None, dtype: torch.dtype) -> None:
        """Written to the last token, and read by one head and by several, in one part and in two."""
        angles = torch.rand(600, 18, device=self.device)
        options = {"cosines": angles.cos(), "sines": angles.sin()}
        cache = kernels.KVCache.create(1, 521, 1, 36, dtype, self.device, page_size)
        for tensor, number in ((cache.keys, 0.5), (cache.values, 0.5), (cache.lengths, 520)):
            tensor.fill_(number)
        query = cache.append(*(self.random(1, 1, 1, 36) for _ in "kv"), query=self.random(1, 3, 1, 36), **options)
        assert query is not None
        cache.attend(query, sinks=self.random(3), softcap=9.0)
        cache.attend(query[:, :1])
        cache.truncate([5])
        cache.attend(self.random(1, 3, 2, 36), window=3)

    def losses(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        for shape in ((5, 101), (3, 40_001), (5, 128), (3, 40_960)):
            for reduction in ("mean", "none"):
                yield f"cross_entropy {shape}, {reduction}", partial(self.loss, shape, reduction)
        target = torch.randint(101, (7,), device=self.device)
        for chunk in (None, 3):
            options = {"target": target, "chunk_tokens": chunk}
            yield (
                f"linear_cross_entropy, {chunk}",
                self.both(kernels.linear_cross_entropy, (7, 33), (101, 33), **options),
            )

    def loss(self, shape: tuple[int, int], reduction: Any) -> None:
        target = torch.randint(shape[1], shape[:1], device=self.device)
        target[0] = -100
        backward(kernels.cross_entropy(self.random(*shape), target, reduction=reduction))
        loss = kernels.cross_entropy(self.random(*shape) * 1, target, reduction=reduction, inplace=True)
        torch.autograd.backward([loss], [torch.randn_like(loss)])  # other than 1: multiplies what is written

    def products(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        yield "gemm", self.both(kernels.gemm, (5, 101), (37, 101))
        sizes = [(5, 18, 101)]
        if self.device == "cuda":
            # rows at multiples of 16 bytes, and more tiles than a quarter of the processors: Hopper has a kernel
            sizes.append((641, 712, 200))
        for rows, columns, depth in sizes:
            for options in ({"activation": "gelu"}, {"activation": "silu", "gated": True, "recompute": True}):
                yield f"gemm {rows}, {options}", partial(self.product, rows, columns, depth, options)
            for block in ("tensor", "row", "blocks"):
                for fast in (False, True):
                    name = f"gemm {rows} of 8 bits, {block}, {fast}"
                    yield name, partial(self.product_of_eight, rows, 24 if rows == 5 else 768, block, fast)

    def product(self, rows: int, columns: int, depth: int, options: dict[str, Any]) -> None:
        lines = 2 * columns if "gated" in options else columns
        x, weight, bias = self.random(rows, depth), self.random(lines, depth), self.random(lines)
        backward(kernels.gemm(x, weight, bias=bias, residual=self.random(rows, columns), **options))
        backward(kernels.gemm(x, weight, bias=bias, **{**options, "recompute": False}))
        by_columns = self.random(depth, columns).t()
        backward(kernels.gemm(x, by_columns, out_dtype=torch.float32))

    @torch.no_grad()
    def product_of_eight(self, rows: int, columns: int, block: str, fast: bool) -> None:
        blocks: tuple[Any, Any] = ((1, 128), (128, 128)) if block == "blocks" else (block, block)
        x, scale_x = kernels.quantize(self.random(rows, 208), block=blocks[0])
        options = {"scale_x": scale_x, "fast_accumulate": fast}
        for gate in ({}, {"activation": "silu", "gated": True}):
            lines = 2 * columns if gate else columns
            weight, scale_weight = kernels.quantize(self.random(lines, 208), block=blocks[1])
            kernels.gemm(x, weight, bias=self.random(lines), scale_weight=scale_weight, **options, **gate)

    def experts(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        for experts in (5, 8):
            yield f"route, {experts}", partial(self.route, experts)
        # tiles of 16, 64 and 128 rows; the last are for kernels of Hopper where columns are multiples of 16 bytes
        for counts in ((3, 0, 2), (30, 0, 40, 9), (301, 0, 139, 64)):
            for columns, depth in ((37, 53), (136, 72)):
                yield f"grouped_gemm {counts} {columns}", partial(self.grouped, counts, columns, depth)
            for block in (False, True):
                yield f"grouped_gemm {counts} of 8 bits, {block}", partial(self.grouped_of_eight, counts, block)
        yield "grouped_gemm, all tiles of Hopper", self.tiles_of_hopper
        for tokens, columns, inner in ((11, 37, 19), (300, 72, 136)):  # experts of few rows, and of tiles of Hopper
            yield f"mixture_of_experts, {tokens}", partial(self.layer_of_experts, tokens, columns, inner)
        for eight in (False, True):
            yield f"grouped_gemm of tokens, {8 if eight else 16} bits", partial(self.grouped_tokens, eight)

    def route(self, experts: int) -> None:
        for options in ({"renormalize": True}, {"scores": "sigmoid", "bias": torch.rand(experts, device=self.device)}):
            weights, _ = kernels.route(self.random(7, experts), 3, **options)
            backward(weights)

    def counts(self, counts: Sequence[int]) -> Tensor:
        return torch.tensor(counts, dtype=torch.int32, device=self.device)

    def grouped(self, counts: Sequence[int], columns: int, depth: int) -> None:
        rows = self.random(sum(counts) + 3, depth)  # of which the last are nobody's
        weight = self.random(len(counts), columns, depth)
        backward(kernels.grouped_gemm(rows, weight, self.counts(counts)))
        by_columns = self.random(len(counts), depth, columns).mT
        backward(kernels.grouped_gemm(rows, by_columns, self.counts(counts)))
        both = self.random(len(counts), 2 * columns, depth)
        backward(kernels.grouped_gemm(rows, both, self.counts(counts), activation="silu"))

    @torch.no_grad()
    def grouped_of_eight(self, counts: Sequence[int], blocks: bool) -> None:
        experts, columns, depth = len(counts), 256, 272
        rows, weight = (self.random(*shape) for shape in ((sum(counts), depth), (experts, columns, depth)))
        rows, row_scales = kernels.quantize(rows, block=(1, 128) if blocks else "row")
        weight, scales = kernels.quantize(weight, block=(128, 128) if blocks else "tensor")
        options = {"row_scales": row_scales, "weight_scales": scales if blocks else scales.expand(experts)}
        for activation in (None, "silu"):
            kernels.grouped_gemm(rows, weight, self.counts(counts), activation=activation, **options)

    @torch.no_grad()
    def tiles_of_hopper(self) -> None:
        """Those that no table may have chosen; elsewhere, the portable kernel."""
        counts = (301, 0, 139, 64)
        number, height = sum(counts), grouped_triton.SM90_HEIGHT
        rows, weight = self.random(number, 72), self.random(len(counts), 272, 72)
        groups = kernels.row_groups(self.counts(counts), rows=number)
        for config in SM90_GROUPED_CONFIGS:
            grouped_triton.multiply(rows, weight, groups, height, False, config=config)
            grouped_triton.multiply_gated(rows, weight, groups, height, "silu", True, config=config)
        for config in SM90_GROUPED_GRADIENT_CONFIGS:
            grouped_triton.weight_gradient(self.random(number, 136), rows, groups, len(counts), config=config)

    def layer_of_experts(self, tokens: int, columns: int, inner: int) -> None:
        layer = kernels.MoE(columns, inner, 5, 2, bias=True, device=self.device, dtype=DTYPE)
        backward(layer(self.random(tokens, columns)))

    @torch.no_grad()
    def grouped_tokens(self, eight: bool) -> None:
        """Also those of dropped choices."""
        experts = torch.randint(-1, 4, (301, 2), device=self.device)
        counts, _, sources = kernels.sort_tokens(experts, number_of_experts=4)
        tokens, weight = self.random(301, 272), self.random(4, 256, 272)
        options: dict[str, Any] = {}
        if eight:
            tokens, scales = kernels.quantize(tokens, block="row")
            weight, whole = kernels.quantize(weight, block="tensor")
            options = {"row_scales": scales, "weight_scales": whole.expand(4)}
        for activation in (None, "silu"):
            kernels.grouped_gemm(tokens, weight, counts, activation=activation, sources=sources, **options)

    def ladder(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        sizes = {kernels_ladder.TENSOR_CORES: (37, 264, 72)}
        if self.device == "cpu" or torch.cuda.get_device_capability() >= (9, 0):
            sizes[kernels_ladder.PERSISTENT] = (37, 264, 72)
        if self.device == "cuda":
            sizes |= dict.fromkeys(
                (kernels_ladder.NAIVE, kernels_ladder.LINES, kernels_ladder.TILES), (256, 256, 64)
            )  # these have no edges
        for rung, (m, n, k) in sizes.items():
            a, b = self.random(m, k).detach(), self.random(k, n).detach()
            yield f"ladder, {rung.name}", partial(rung.multiply, a, b)

    def moves(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        for dtype in (torch.int8, torch.bfloat16, torch.float32, torch.float64):
            for shape in ((2, 37, 53), (2, 38, 54)):
                yield f"transpose_copy {dtype} {shape}", partial(self.transpose, shape, dtype)
        for block in ("tensor", "row", (1, 32), (32, 32)):
            yield f"quantize {block}", partial(self.quantize, block, (5, 101))
        yield "quantize long rows", partial(self.quantize, "row", (2, 20_001))
        yield "permute_tokens", self.permute
        yield "adamw", partial(self.adamw, False)
        yield "adamw, master weights", partial(self.adamw, True)
        table = torch.empty(20, dtype=torch.int64, device=self.device)
        yield "adamw, while a graph is recorded", partial(optimizer_triton.write_table, table, range(20))

    def transpose(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        kernels.transpose_copy(torch.ones(*shape, dtype=dtype, device=self.device))

    def quantize(self, block: Any, shape: Sequence[int]) -> None:
        values, scales = kernels.quantize(self.random(*shape).detach(), block=block)
        kernels.dequantize(values, scales, block=block)

    def permute(self) -> None:
        experts = torch.randint(-1, 5, (11, 3), device=self.device)
        rows, _, row_map = kernels.permute_tokens(self.random(11, 37), experts, number_of_experts=5)
        backward(kernels.unpermute_tokens(rows, row_map, self.random(11, 3)))
        backward(kernels.unpermute_tokens(self.random(33, 37), row_map))

    def adamw(self, master_weights: bool) -> None:
        params = [self.random(3, 37), self.random(5), self.random(7, dtype=torch.float32)]
        for param in params:
            param.grad = torch.randn_like(param)
        kernels.AdamW(params, lr=1e-3, master_weights=master_weights).step()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="calls with this in their names")
    only = parser.parse_args().only
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    start = time.perf_counter()
    calls = [(name, call) for name, call in Calls(device).every() if only is None or only in name]
    if not calls:
        parser.error(f"no call has {only!r} in its name")
    if device == "cuda":  # what Triton's sanitizer knows of a kernel is in memory of ours, for this thread alone
        import triton

        torch.autograd.set_multithreading_enabled(False)
        triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    with kernels.using("require"), own_backends():
        for name, call in calls:
            print(f"{time.perf_counter() - start:6.1f} s  {name}", file=sys.stderr, flush=True)
            call()
            if device == "cuda":
                torch.cuda.synchronize()
    print(f"{len(calls)} calls in {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
