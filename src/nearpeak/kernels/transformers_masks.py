"""Masks for models of `transformers` that are known by their pattern, and not written out.

`transformers` asks an attention implementation for a mask of each pattern once in a forward pass, and hands it on to
all layers. One of [batch, 1, queries, keys] booleans is as large as the scores of a head. What the kernels of attention
know how to compute, causality, a window to the left and padding, needs none of that: `mask_of` returns a `PatternMask`,
which says what it is, and is written out where somebody else looks at it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Which keys a query sees, by its place."""

    causal: bool
    left: int | None = None
    """How many keys before its own, at most."""
    bottom_right: bool = True
    """Whether the last query is beside the last key, or the first beside the first."""


class PatternMask(Tensor):
    """A mask of [batch, 1, queries, keys], True where a key is seen, that is written out when an op of torch needs it.

    Args:
        make: Writes it out.
        pattern: What it is without padding; None where that is known to `make` alone.
        padding: [batch, keys], False for keys that nobody sees; None where there are none.
    """

    make: Callable[[], Tensor]
    pattern: Pattern | None
    padding: Tensor | None
    _written: Tensor | None

    @staticmethod
    def __new__(
        cls, shape: tuple[int, ...], device: torch.device, make: Callable[[], Tensor], pattern: Pattern | None,
        padding: Tensor | None,
    ) -> PatternMask:  # fmt: skip
        mask: PatternMask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.make, mask.pattern, mask.padding, mask._written = make, pattern, padding, None
        return mask

    # results are plain tensors
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def written(self) -> Tensor:
        """The mask as a plain tensor; the same one each time, as all layers ask."""
        if self._written is None:
            self._written = self.make()
        return self._written

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def plain(one: Any) -> Any:
            return one.written() if isinstance(one, PatternMask) else one

        args, kwargs = tree_map(plain, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PatternMask({tuple(self.shape)}, {self.pattern}, padding={self.padding is not None})"


def mask_of(masking: Any, *, batch_size: int, q_length: int, kv_length: int, **rest: Any) -> Tensor | None:
    """What `transformers` calls for a mask: with what it gives to `sdpa_mask`, and returned by the same rules.

    None is causal attention from the top left, or full attention where the module is not causal, and for one query.
    `masking` is its module `masking_utils`.
    """
    sizes = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
    padding, at = rest.get("attention_mask"), rest.get("q_offset", 0)
    # where a token is in a cache of fixed size is known to the device: the mask of one query is small enough
    if _is_traced(padding) or _is_traced(at) or (q_length == 1 and isinstance(at, Tensor)):
        return _written(masking, sizes, rest)
    offset = int(rest.get("kv_offset", 0))
    if padding is not None:
        padding = masking.prepare_padding_mask(padding, kv_length, offset)[:, offset : offset + kv_length]
        padding = None if bool(padding.all()) else padding
    pattern = _pattern(masking, rest.get("mask_function"), q_length, kv_length, int(at) - offset)
    if pattern is not None and padding is None:
        is_free = pattern.left is None or pattern.left >= kv_length - 1
        is_all_seen = not pattern.causal and rest.get("allow_is_bidirectional_skip", False)
        is_plain = q_length in (1, kv_length) and pattern.bottom_right and rest.get("allow_is_causal_skip", True)
        if is_all_seen or (pattern.causal and is_plain and is_free):
            return None
    elif q_length == 1:
        return _written(masking, sizes, rest)
    options = {**rest, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    device = torch.device(rest.get("device", "cpu"))
    shape = (batch_size, 1, q_length, kv_length)
    return PatternMask(shape, device, partial(masking.sdpa_mask, **sizes, **options), pattern, padding)


def _written(masking: Any, sizes: dict[str, int], rest: dict[str, Any]) -> Tensor | None:
    found: Tensor | None = masking.sdpa_mask(**sizes, **rest)
    return found


def _is_traced(one: Any) -> bool:
    """Whether a tensor's numbers are not to be looked at, or code is compiled in any case."""
    return torch.compiler.is_compiling() or (isinstance(one, Tensor) and type(one) is not Tensor)


def _pattern(masking: Any, function: Any, queries: int, keys: int, shift: int) -> Pattern | None:
    """The pattern of a function of `transformers`; `shift` is the place of the first query among the keys."""
    if function is masking.bidirectional_mask_function:
        return Pattern(causal=False)
    left = None
    if function is not masking.causal_mask_function and function is not None:
        window = _window(masking, function)
        if window is None:
            return None
        left = window - 1
    if shift == keys - queries:
        return Pattern(causal=True, left=left)
    return Pattern(causal=True, left=left, bottom_right=False) if shift == 0 else None


def _window(masking: Any, function: Any) -> int | None:
    """The window of a function that is a causal one with a window and nothing else.

    These are made on the fly, so they are told by their code; of anything else nothing is known.
    """
    model = masking.sliding_window_causal_mask_function(1)
    parts, others = _parts(function), _parts(model)
    if not others or len(parts) != len(others) or _code(function) is not _code(model):
        return None
    if any(_code(one) is not _code(other) for one, other in zip(parts, others, strict=True)):
        return None
    found = [cell.cell_contents for part in parts for cell in part.__closure__ or ()]
    return found[0] if len(found) == 1 and isinstance(found[0], int) and found[0] > 0 else None


def _parts(function: Any) -> tuple[Any, ...]:
    """The functions that one is put together of."""
    found = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return found[0] if len(found) == 1 and isinstance(found[0], tuple) else ()


def _code(function: Any) -> Any:
    return getattr(function, "__code__", function)
