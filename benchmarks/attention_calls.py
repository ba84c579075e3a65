"""Calls of attention drawn at random, for `benchmarks/attention_numerics.py`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

MOST_PAIRS = 3_000_000
"""Of queries and keys of all heads: references have all of them in memory, in float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a kernel is compiled for."""

    dtype: str = "bfloat16"
    dim: int = 64
    value_dim: int = 64
    causal: bool = False
    alignment: str = "bottom right"
    window: str = ""
    """Which of its sides have a limit: "left", "right", "both" or none."""
    softcap: bool = False
    bias: str = ""
    """Its shape: "full", "keys" (of each batch, for all queries), "heads"; or "mask" of booleans."""
    slopes: bool = False
    sinks: bool = False
    dropout: bool = False
    packed: bool = False

    def described(self) -> str:
        """What is not as in others."""
        values = asdict(self)
        first = f"{self.dtype} {self.dim}" + (f"/{self.value_dim}" if self.value_dim != self.dim else "")
        rest = [name if values[name] is True else f"{name} {values[name]}" for name in list(values)[3:] if values[name]]
        return ", ".join([first, *(one for one in rest if one != "alignment bottom right")])


KINDS = (
    Kind(),
    Kind(causal=True),
    Kind(dim=128, value_dim=128),
    Kind(dim=128, value_dim=128, causal=True),
    Kind(dim=128, value_dim=128, causal=True, alignment="top left"),
    Kind(dim=128, value_dim=128, causal=True, sinks=True, window="left"),
    Kind(dim=128, value_dim=128, causal=True, softcap=True, window="left"),
    Kind(dim=128, value_dim=128, causal=True, packed=True),
    Kind(dim=64, value_dim=64, packed=True, window="both"),
    Kind(dim=64, value_dim=64, packed=True, causal=True, slopes=True, softcap=True),
    Kind(dim=64, value_dim=64, packed=True, causal=True, sinks=True, alignment="top left"),
    Kind(dim=32, value_dim=32, window="both"),
    Kind(dim=32, value_dim=32, bias="mask", sinks=True),
    Kind(dim=64, value_dim=64, bias="full"),
    Kind(dim=64, value_dim=64, bias="heads", causal=True, softcap=True),
    Kind(dim=128, value_dim=128, bias="keys"),
    Kind(dim=64, value_dim=64, slopes=True, causal=True),
    Kind(dim=64, value_dim=64, dropout=True, causal=True),
    Kind(dim=256, value_dim=256, causal=True),
    Kind(dim=192, value_dim=128, causal=True),
    Kind(dim=96, value_dim=40, window="right"),
    Kind(dtype="float16", causal=True, sinks=True),
    Kind(dtype="float16", dim=128, value_dim=128, softcap=True),
    Kind(dtype="float32", causal=True, bias="full"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A call of a kind."""

    kind: Kind
    seed: int
    batch: int
    key_heads: int
    group: int
    queries: int
    keys: int
    left: int | None
    right: int | None
    scale: float | None
    softcap: float | None
    dropout: float
    lengths: tuple[tuple[int, int], ...]
    """Of packed sequences, those of queries and of keys."""


def drawn(kind: Kind, seed: int, most_tokens: int) -> Drawn:
    at_random = random.Random(seed)
    lengths: tuple[tuple[int, int], ...] = ()
    if kind.packed:
        each = max(2, most_tokens // 3)
        lengths = tuple(
            (at_random.randint(0, each), at_random.randint(0, each)) for _ in range(at_random.randint(1, 4))
        )
    queries, keys = (at_random.randint(1, most_tokens) for _ in "qk")
    if at_random.random() < 0.5:  # as mostly
        keys = queries
    batch, key_heads, group = at_random.randint(1, 3), at_random.randint(1, 4), at_random.choice((1, 1, 2, 3, 4, 8))
    while batch * key_heads * group * queries * keys > MOST_PAIRS:
        batch, key_heads, group = max(1, batch - 1), max(1, key_heads - 1), max(1, group // 2)
    left, right = (at_random.randint(0, most_tokens) for _ in range(2))
    return Drawn(
        kind=kind,
        seed=seed,
        batch=batch,
        key_heads=key_heads,
        group=group,
        queries=queries,
        keys=keys,
        left=left if kind.window in ("left", "both") else None,
        right=right if kind.window in ("right", "both") else None,
        scale=at_random.choice((None, at_random.uniform(0.02, 0.5))),
        softcap=at_random.uniform(1.0, 30.0) if kind.softcap else None,
        dropout=at_random.uniform(0.05, 0.6) if kind.dropout else 0.0,
        lengths=lengths,
    )


def all_drawn(calls: int, most_tokens: int, kinds: Sequence[Kind] = KINDS) -> list[Drawn]:
    return [drawn(kinds[number % len(kinds)], number, most_tokens) for number in range(calls)]


def made(call: Drawn, device: str) -> tuple[list[Any], dict[str, Any]]:
    """Query, key and value, and the options of the function."""
    import torch

    kind, dtype = call.kind, getattr(torch, call.kind.dtype)
    torch.manual_seed(call.seed)
    heads = call.key_heads * call.group

    def randn(*shape: int, of: Any = dtype) -> Any:
        return torch.randn(shape, device=device).to(of)

    options: dict[str, Any] = {
        "causal": kind.causal,
        "alignment": kind.alignment,
        "window": (call.left, call.right) if kind.window else None,
        "scale": call.scale,
        "softcap": call.softcap,
        "dropout": call.dropout,
        "seed": call.seed,
        "slopes": torch.rand(heads, device=device) if kind.slopes else None,
        "sinks": randn(heads, of=torch.float32) if kind.sinks else None,
    }
    if kind.packed:
        query_tokens, key_tokens = (sum(one[place] for one in call.lengths) + 3 for place in (0, 1))
        for place, name in enumerate(("query", "key")):
            ends = torch.tensor([0, *(one[place] for one in call.lengths)]).cumsum(0)
            options[f"{name}_starts"] = ends.to(device, torch.int32)
            options[f"longest_{name}"] = max(one[place] for one in call.lengths)
        shapes = [(query_tokens, heads, kind.dim), (key_tokens, call.key_heads, kind.dim)]
        shapes.append((key_tokens, call.key_heads, kind.value_dim))
        return [randn(*shape) for shape in shapes], options
    if kind.bias:
        sizes = (call.batch, heads, call.queries, call.keys)
        kept = {"full": (0, 1, 2, 3), "mask": (0, 2, 3), "heads": (1, 2, 3), "keys": (0, 3)}[kind.bias]
        shape = [size if place in kept else 1 for place, size in enumerate(sizes)]
        wide = -(-call.keys // 16) * 16  # rows begin at multiples of 16, so that one variant serves all sizes
        bias = randn(*shape[:3], wide)[..., : call.keys]
        options["bias"] = bias > -1.0 if kind.bias == "mask" else bias
    shapes = [
        (call.batch, heads, call.queries, kind.dim),
        (call.batch, call.key_heads, call.keys, kind.dim),
        (call.batch, call.key_heads, call.keys, kind.value_dim),
    ]
    return [randn(*shape) for shape in shapes], options
