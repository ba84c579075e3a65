"""Generation by a small language model with and without a KV cache.

    PYTHONPATH=src python -m benchmarks.models.generation --device cuda --dtype bfloat16 --json generation.json
    PYTHONPATH=src python -m benchmarks.models.generation --width 64 --layers 2 --heads 4 --key-heads 2 --lengths 16 32

For each length: the estimated FLOPs and the measured time of the next token. With a cache these grow by the attention
to one more token; without, all tokens are recomputed. First, both variants generate a few tokens, which must be equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (everybody's name for it)
from torch import Tensor, nn

import nearpeak
from nearpeak import kernels

REPEATS = 9


class Layer(nn.Module):
    """Attention and a gated MLP, each after a norm."""

    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.dim = heads, key_heads, width // heads
        self.first, self.second = kernels.RMSNorm(width), kernels.RMSNorm(width)
        self.inner = nn.Linear(width, (heads + 2 * key_heads) * self.dim, bias=False)
        self.outer = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 8 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor, cache: kernels.KVCache | None) -> Tensor:
        new = x.shape[1]
        sizes = [self.heads, self.key_heads, self.key_heads]
        parts = self.inner(self.first(x)).unflatten(-1, (-1, self.dim)).transpose(1, 2).split(sizes, 1)
        query, key, value = parts
        if cache is None:
            query, key = kernels.rotary_pair(query, key, cosines, sines, seq_dim=-2)
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        else:
            is_prompt = not max(cache.max_lengths)
            query = cache.append(key, value, cosines=cosines, sines=sines, query=query)
            if is_prompt:
                keys, values = cache.keys[:, :, :new], cache.values[:, :, :new]
                attended = F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)
            else:
                attended = cache.attend(query)
        x = x + self.outer(attended.transpose(1, 2).flatten(2))
        return x + self.down(kernels.swiglu_packed(self.up(self.second(x))))


class Decoder(nn.Module):
    """A decoder-only transformer."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, key_heads: int, longest: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads, key_heads) for _ in range(layers))
        self.norm, self.head = kernels.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        pairs = width // heads // 2
        angles = torch.arange(longest)[:, None] * 10000.0 ** (-torch.arange(pairs) / pairs)
        self.register_buffer("cosines", angles.cos())
        self.register_buffer("sines", angles.sin())

    def forward(self, tokens: Tensor, caches: Sequence[kernels.KVCache] | None = None) -> Tensor:
        """The logits of what follows the last of these tokens, which with caches come after those that they hold."""
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x, self.cosines, self.sines, None if caches is None else caches[number])
        logits: Tensor = self.head(self.norm(x[:, -1]))
        return logits

    def caches(self, batch: int, capacity: int) -> list[kernels.KVCache]:
        """An empty cache for each layer."""
        weight = self.head.weight
        return [
            kernels.KVCache.create(batch, capacity, layer.key_heads, layer.dim, weight.dtype, weight.device)
            for layer in self.layers
            if isinstance(layer, Layer)
        ]


def generated(model: Decoder, tokens: Tensor, new: int, *, cached: bool) -> Tensor:
    """So many tokens after these, each the likeliest."""
    caches = model.caches(len(tokens), tokens.shape[1] + new) if cached else None
    given = tokens
    for _ in range(new):
        following = model(given, caches).argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, following), 1)
        given = following if cached else tokens
    return tokens


def flops(make: Callable[[], Decoder], batch: int, length: int, machine: str, *, cached: bool) -> float:
    """The FLOPs of the token at this place, by an estimate. References show what kernels have to do."""
    with nearpeak.fake(), kernels.using("off"), torch.no_grad():
        model = make()
        if not cached:
            return nearpeak.estimate(model, torch.zeros(batch, length, dtype=torch.int64), on=machine).flops
        caches = model.caches(batch, length)  # full after this token: how many there are is on the device
        for cache in caches:
            key = cache.keys[:, :, : length - 1]
            cache.append(key, key)
        return nearpeak.estimate(model, torch.zeros(batch, 1, dtype=torch.int64), caches, on=machine).flops


def seconds(run: Callable[[], Any], restore: Callable[[], Any], device: str) -> float:
    """The median time of a call; `restore` is not timed."""
    taken = []
    for _ in range(REPEATS + 2):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
        restore()
    return statistics.median(taken[2:])


def measured(model: Decoder, batch: int, length: int, device: str) -> dict[str, float]:
    """Seconds for the token at this place, both ways."""
    tokens = torch.randint(model.embedding.num_embeddings, (batch, length), device=device)
    caches = model.caches(batch, length)
    if length > 1:
        model(tokens[:, :-1], caches)

    def restore() -> None:
        for cache in caches:
            cache.truncate([length - 1] * batch)

    return {
        "seconds_with_cache": seconds(lambda: model(tokens[:, -1:], caches), restore, device),
        "seconds_without": seconds(lambda: model(tokens), lambda: None, device),
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--machine", default="h200-sxm", help="what estimates are for")
    for name, default in (("vocabulary", 32000), ("width", 1024), ("layers", 8), ("heads", 16), ("key-heads", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--new", type=int, default=16, help="tokens that both ways generate, to be compared")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    sizes = (given.vocabulary, given.width, given.layers, given.heads, given.key_heads)
    dtype = getattr(torch, given.dtype)
    longest = max(*given.lengths, min(given.lengths) + given.new)

    def make() -> Decoder:
        return Decoder(*sizes, longest).to(dtype)

    torch.manual_seed(0)
    model = make().to(given.device)
    rows = []
    with torch.no_grad():
        prompt = torch.randint(given.vocabulary, (given.batch, min(given.lengths)), device=given.device)
        ways = [generated(model, prompt, given.new, cached=cached) for cached in (True, False)]
        same = bool(torch.equal(*ways))
        print(f"{given.new} tokens generated both ways: {'the same' if same else 'not the same'}")
        for length in given.lengths:
            row: dict[str, float] = {"length": length}
            for name, cached in (("flops_with_cache", True), ("flops_without", False)):
                row[name] = flops(make, given.batch, length, given.machine, cached=cached)
            row |= measured(model, given.batch, length, given.device)
            rows.append(row)
            print(
                f"token {length}: {row['flops_with_cache'] / 1e9:.4g} GFLOP with the cache and"
                f" {row['flops_without'] / 1e9:.4g} without, {1e3 * row['seconds_with_cache']:.3g} and"
                f" {1e3 * row['seconds_without']:.3g} ms"
            )
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()}
    result = {"settings": settings, "same_tokens": same, "rows": rows}
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
