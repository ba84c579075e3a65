"""Sections "attention", "attention_memory" and "decoding" of `benchmarks.kernels`.

Attention: both passes of every backend ("nearpeak", its "portable" Triton kernels, "cudnn", "flash" and "flex" of
torch), with errors. FLOPs are those of two GEMMs over the unmasked pairs of a query and a key, and of five in the
backward pass. Forward passes run without gradients, except for flex, which would be compiled again for the same kernel.

Attention memory: very long sequences, their peak memory beyond the inputs, and whether they run at all.

Decoding: one new token per sequence, with contiguous and paged caches in bfloat16 and float8, beside torch's SDPA.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels import cases
from benchmarks.kernels.cases import random_tensor
from benchmarks.kernels.jobs import without_failures
from nearpeak import kernels
from nearpeak.kernels.attention import operator_arguments

Way = Callable[[Tensor, Tensor, Tensor], Tensor]
COMPILED = ("nearpeak", "portable", "flex")
"""The ways that have to be compiled before they are timed."""


def attention_ways(causal: bool, tokens: int, device: str) -> dict[str, Way]:
    """All ways, by name; a way that does not take its inputs raises an error."""

    def own(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result: Tensor = kernels.attention(query, key, value, causal=causal)
        return result

    return {
        "nearpeak": own,
        "portable": lambda query, key, value: portable(query, key, value, causal),
        "cudnn": by_torch(SDPBackend.CUDNN_ATTENTION, causal),
        "flash": by_torch(SDPBackend.FLASH_ATTENTION, causal),
        "flex": _flex(causal, tokens, device),
    }


def by_torch(backend: SDPBackend, causal: bool, **options: Any) -> Way:
    """One backend of torch; options are further ones of `scaled_dot_product_attention`."""

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel([backend]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # why a backend does not take it: the error comes by itself
            return scaled_dot_product_attention(query, key, value, is_causal=causal, **options)

    return call


def _flex(causal: bool, tokens: int, device: str) -> Way:
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True, backend=cases.BACKEND)
    made: list[Any] = []

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if causal and not made:
            made.append(create_block_mask(lambda b, h, q, k: q >= k, None, None, tokens, tokens, device=device))
        result: Tensor = compiled(query, key, value, block_mask=made[0] if made else None)
        return result

    return call


def portable(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Attention by the kernels that run on every GPU, whatever the public function would pick here."""
    result: Tensor = _Portable.apply(query, key, value, causal)  # type: ignore[no-untyped-call]
    return result


class _Portable(torch.autograd.Function):
    """Their launchers, past what selects among several."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        from nearpeak.kernels.attention import triton as attention_triton
        from nearpeak.kernels.attention.triton import AttentionProblem

        ctx.problem = AttentionProblem(*operator_arguments(query, key, value, causal=causal))
        result, lse = attention_triton.forward(ctx.problem)
        ctx.save_for_backward(result, lse)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from nearpeak.kernels.attention import triton as attention_triton

        result, lse = ctx.saved_tensors
        by_query, by_key, by_value, _, _ = attention_triton.backward(
            ctx.problem, gradients[0], None, result, lse, ctx.needs_input_grad[0], ctx.needs_input_grad[1], False, False
        )
        return *(one if one.numel() else None for one in (by_query, by_key, by_value)), None


Call = Callable[[], Any]
Gradients = tuple[Tensor, ...]
BACKWARD_FLOPS = 2.5
"""Of the backward pass, as a multiple of the forward pass: five products of matrices for two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """Of all cases."""

    together: int = 16384
    """Tokens of all sequences of a batch."""
    tokens: Sequence[int] = (2048, 4096, 8192, 16384)
    heads: Mapping[int, int] = field(default_factory=lambda: {128: 16, 64: 32})
    """Their number by their size."""
    repeats: int = 100
    """How often both passes are run for results that are to be the same to the last bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """Attention of one size."""

    batch: int
    heads: int
    tokens: int
    dim: int
    causal: bool
    device: str
    repeats: int
    operation: str = "attention"

    @property
    def name(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{self.batch} x {self.heads} x {self.tokens} x {self.dim} {mask}"

    @property
    def flops(self) -> float:
        """Of the forward pass."""
        pairs = self.tokens * self.tokens / (2 if self.causal else 1)
        return 4.0 * self.batch * self.heads * pairs * self.dim

    def inputs(self) -> list[Tensor]:
        torch.manual_seed(0)
        shape = (self.batch, self.heads, self.tokens, self.dim)
        return [random_tensor(*shape, device=self.device) for _ in "qkv"]

    def passes(self) -> dict[str, dict[str, Call]]:
        """By pass and name of the way, calls on the same inputs."""
        inputs, ways = self.inputs(), attention_ways(self.causal, self.tokens, self.device)
        above = torch.randn_like(inputs[0])
        return {
            "forward": {name: _forward(way, inputs, name == "flex") for name, way in ways.items()},
            "backward": {name: _backward(way, inputs, above) for name, way in ways.items()},
        }

    def steps(self) -> dict[str, Call]:
        """What has to be compiled, by name."""
        passes = self.passes()
        return {name: lambda name=name: [one[name]() for one in passes.values()] for name in COMPILED}  # type: ignore[misc]

    def rows(self, setting: Any, job: str) -> list[dict[str, Any]]:
        """One for each pass."""
        from benchmarks.kernels.timing import in_turns

        rows = []
        errors = self.errors() if setting.check else {}
        repeated = self.repeated()
        for (name, ways), flops in zip(self.passes().items(), (self.flops, BACKWARD_FLOPS * self.flops), strict=True):
            allowed, late = setting.allowed(ways, job)
            running, failed = without_failures(allowed)
            waiting: list[str] = []
            row = {
                "operation": self.operation,
                "pass": name,
                "batch": self.batch,
                "heads": self.heads,
                "tokens": self.tokens,
                "dim": self.dim,
                "causal": self.causal,
                "flops": flops,
                "seconds": in_turns(running, waiting=waiting),
                "errors": errors.get(name, {}),
                "repeated": repeated,
                "waiting": waiting,
                "failed": {**late, **failed},
            }
            rows.append(row)
        return rows

    def errors(self) -> dict[str, dict[str, float]]:
        """By pass and way, the largest error of one head against float64, relative to the largest value."""
        inputs = self.inputs()
        above = torch.randn_like(inputs[0])
        wide = [one[:1, :1].detach().double().requires_grad_() for one in inputs]
        scores = wide[0] @ wide[1].mT * self.dim**-0.5
        if self.causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        result = torch.softmax(scores, -1) @ wide[2]
        gradients = torch.autograd.grad(result, wide, above[:1, :1].double())
        errors: dict[str, dict[str, float]] = {"forward": {}, "backward": {}}
        for name, way in attention_ways(self.causal, self.tokens, self.device).items():
            if name == "flex":  # compiled where it is timed
                continue
            try:
                own = way(*inputs)
                own_gradients = torch.autograd.grad(own, inputs, above)
            except Exception:  # said where it is timed
                continue
            errors["forward"][name] = _error(own, result)
            errors["backward"][name] = max(map(_error, own_gradients, gradients))
        return errors

    def repeated(self) -> dict[str, int]:
        """How many runs of both passes were made, and how many had a result or gradient that was not the first."""
        inputs = self.inputs()
        above = torch.randn_like(inputs[0])
        first: Sequence[Tensor] = ()
        different = torch.zeros((), dtype=torch.int64, device=self.device)
        for _ in range(self.repeats):
            result = kernels.attention(*inputs, causal=self.causal)
            tensors = [result.detach(), *torch.autograd.grad(result, inputs, above)]
            first = first or tensors
            changed = [(one != other).any() for one, other in zip(first, tensors, strict=True)]
            different += torch.stack(changed).any()
        return {"runs": self.repeats, "different": int(different)}


def attention_cases(sizes: AttentionSizes | None = None, device: str = "cuda") -> Iterator[AttentionCase]:
    sizes = sizes or AttentionSizes()
    for dim, heads in sizes.heads.items():
        for causal in (False, True):
            for tokens in sizes.tokens:
                batch = max(1, sizes.together // tokens)
                yield AttentionCase(
                    batch=batch,
                    heads=heads,
                    tokens=tokens,
                    dim=dim,
                    causal=causal,
                    device=device,
                    repeats=sizes.repeats,
                )


def _forward(way: Way, inputs: Sequence[Tensor], with_gradients: bool) -> Call:
    def call() -> Tensor:
        with torch.set_grad_enabled(with_gradients):
            return way(*inputs)

    return call


def _backward(way: Way, inputs: Sequence[Tensor], above: Tensor) -> Call:
    kept: list[Tensor] = []

    def call() -> Gradients:
        if not kept:
            kept.append(way(*inputs))
        return torch.autograd.grad(kept[0], inputs, above, retain_graph=True)

    return call


def _error(result: Tensor, exact: Tensor) -> float:
    result = result[:1, :1].detach().double()
    return float((result - exact.detach()).abs().max() / exact.detach().abs().max())


CHECKED_TOKENS = 8
"""Queries whose results are compared with float64, from the first to the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySizes:
    """Tokens of one head."""

    dim: int = 128
    beside_others: int = 2**16
    alone: int = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCase:
    """Causal attention of one head."""

    tokens: int
    dim: int
    backward: bool
    others: bool
    device: str
    operation: str = "attention_memory"

    @property
    def name(self) -> str:
        return f"{self.tokens} tokens, {'both passes' if self.backward else 'forward'}"

    def ways(self) -> dict[str, Call]:
        torch.manual_seed(0)
        shape = (1, 1, self.tokens, self.dim)
        inputs = [random_tensor(*shape, device=self.device, grad=self.backward) for _ in "qkv"]
        above = torch.randn_like(inputs[0])
        ways = attention_ways(True, self.tokens, self.device)
        if self.others:
            del ways["flex"]  # its block mask is made from all pairs, if only once
            ways["written out"] = by_torch(SDPBackend.MATH, True)
        else:
            ways = {"nearpeak": ways["nearpeak"]}
        return {name: self._call(way, inputs, above) for name, way in ways.items()}

    def _call(self, way: Way, inputs: Sequence[Tensor], above: Tensor) -> Call:
        def forward() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return (way(inputs[0], inputs[1], inputs[2]), *inputs)

        def both() -> tuple[Tensor, ...]:
            result = way(inputs[0], inputs[1], inputs[2])
            torch.autograd.grad(result, inputs, above)
            return (result.detach(), *inputs)

        return both if self.backward else forward

    def steps(self) -> dict[str, Call]:
        return {name: way for name, way in self.ways().items() if name in ("nearpeak", "portable")}

    def rows(self, setting: Any, job: str) -> list[dict[str, Any]]:
        allowed, late = setting.allowed(self.ways(), job)
        ways, failed = without_failures(allowed)
        extra, seconds, errors = {}, {}, {}
        for name, way in ways.items():
            result, extra[name], seconds[name] = _once(way)
            if setting.check:
                errors[name] = self.error(result)
            del result
        row = {
            "operation": self.operation,
            "pass": "both" if self.backward else "forward",
            "tokens": self.tokens,
            "dim": self.dim,
            "pair_bytes": self.tokens**2,
            "extra_bytes": extra,
            "seconds": seconds,
            "errors": errors,
            "failed": {**late, **failed},
        }
        return [row]

    def error(self, results: tuple[Tensor, ...]) -> float:
        """The largest of some queries against float64, relative to the largest value."""
        result, query, key, value = (one.detach()[0, 0] for one in results)
        worst = 0.0
        for place in torch.linspace(0, self.tokens - 1, CHECKED_TOKENS).long().tolist():
            keys, values = key[: place + 1].double(), value[: place + 1].double()
            exact = torch.softmax(keys @ query[place].double() * self.dim**-0.5, 0) @ values
            worst = max(worst, float((result[place].double() - exact).abs().max() / exact.abs().max()))
        return worst


def memory_cases(sizes: MemorySizes | None = None, device: str = "cuda") -> Iterator[MemoryCase]:
    sizes = sizes or MemorySizes()
    for tokens, backward in ((sizes.beside_others, True), (sizes.alone, False), (sizes.alone, True)):
        yield MemoryCase(
            tokens=tokens,
            dim=sizes.dim,
            backward=backward,
            others=tokens == sizes.beside_others,
            device=device,
        )


def _once(way: Call) -> tuple[Any, int | None, float]:
    """The result of a call, how much more memory it takes at its highest than before, and its seconds."""
    is_gpu = torch.cuda.is_available()
    before = 0
    if is_gpu:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    result = way()
    if is_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return result, torch.cuda.max_memory_allocated() - before if is_gpu else None, seconds


FLOAT8 = torch.float8_e4m3fn
OWN: dict[str, tuple[torch.dtype, int | None]] = {
    "nearpeak": (torch.bfloat16, None),
    "pages of 1": (torch.bfloat16, 1),
    "pages of 16": (torch.bfloat16, 16),
    "pages of 256": (torch.bfloat16, 256),
    "float8": (FLOAT8, None),
    "float8, pages of 1": (FLOAT8, 1),
    "float8, pages of 16": (FLOAT8, 16),
    "float8, pages of 256": (FLOAT8, 256),
}
"""The caches of nearpeak: their dtypes, and tokens of a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingSizes:
    """Of all cases."""

    sequences: Sequence[tuple[int, int]] = ((1, 32768), (1, 131072), (16, 8192), (64, 4096))
    """How many there are, and tokens of each."""
    heads: int = 32
    key_heads: int = 8
    dim: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingCase:
    """So many sequences of so many tokens."""

    batch: int
    tokens: int
    heads: int
    key_heads: int
    dim: int
    device: str
    operation: str = "decoding"

    @property
    def name(self) -> str:
        return f"{self.batch} x {self.tokens}"

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        shape = (self.batch, self.key_heads, self.tokens, self.dim)
        query = random_tensor(self.batch, self.heads, 1, self.dim, device=self.device, grad=False)
        key, value = (random_tensor(*shape, device=self.device, grad=False) for _ in "kv")
        return query, key, value

    def ways(self, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Call]:
        def sdpa() -> Tensor:
            return scaled_dot_product_attention(query, key, value, enable_gqa=True)

        ways: dict[str, Call] = {}
        for name, (dtype, page_size) in OWN.items():
            cache = self.filled(key, value, dtype, page_size)
            ways[name] = lambda cache=cache: cache.attend(query)
        return {**ways, "sdpa": sdpa}

    def filled(self, key: Tensor, value: Tensor, dtype: torch.dtype, page_size: int | None) -> kernels.KVCache:
        cache = kernels.KVCache.create(self.batch, self.tokens, self.key_heads, self.dim, dtype, self.device, page_size)
        if cache.pages is not None:
            order = torch.randperm(cache.pages.numel(), device=self.device)
            cache.pages.copy_(order.view(cache.pages.shape))
        cache.append(key, value)
        return cache

    def cache_bytes(self, way: str) -> int:
        dtype, _ = OWN.get(way, OWN["nearpeak"])
        return 2 * self.batch * self.tokens * self.key_heads * self.dim * dtype.itemsize

    def steps(self) -> dict[str, Call]:
        """What has to be compiled: all of nearpeak's, as one step."""
        ways = self.ways(*self.inputs())

        def own() -> None:
            for name in OWN:
                ways[name]()

        return {"nearpeak": own}

    def rows(self, setting: Any, job: str) -> list[dict[str, Any]]:
        from benchmarks.kernels.timing import in_turns

        inputs = self.inputs()
        allowed, late = setting.allowed(self.ways(*inputs), job)
        ways, failed = without_failures(allowed)
        waiting: list[str] = []
        seconds = in_turns(ways, waiting=waiting)
        moved = {name: self.cache_bytes(name) for name in seconds}
        row = {
            "operation": self.operation,
            "batch": self.batch,
            "tokens": self.tokens,
            "heads": self.heads,
            "key_heads": self.key_heads,
            "dim": self.dim,
            "bytes": moved,
            "seconds": seconds,
            "of_copy": {name: moved[name] / one / setting.copy_rate for name, one in seconds.items()},
            "errors": {name: _decoding_error(way(), *inputs) for name, way in ways.items()} if setting.check else {},
            "waiting": waiting,
            "failed": {**late, **failed},
        }
        return [row]


def decoding_cases(sizes: DecodingSizes | None = None, device: str = "cuda") -> Iterator[DecodingCase]:
    sizes = sizes or DecodingSizes()
    for batch, tokens in sizes.sequences:
        yield DecodingCase(
            batch=batch,
            tokens=tokens,
            heads=sizes.heads,
            key_heads=sizes.key_heads,
            dim=sizes.dim,
            device=device,
        )


def _decoding_error(result: Tensor, query: Tensor, key: Tensor, value: Tensor) -> float:
    """The largest of the last sequence against float64, relative to the largest value."""
    rows, keys, values = (one[-1].double() for one in (query, key, value))
    rows = rows.reshape(len(keys), -1, rows.shape[-1])
    exact = torch.softmax(rows @ keys.mT * rows.shape[-1] ** -0.5, -1) @ values
    return float((result[-1].double().reshape(exact.shape) - exact).abs().max() / exact.abs().max())
