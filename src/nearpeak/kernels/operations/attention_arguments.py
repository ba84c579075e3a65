"""What users give to attention, looked at and put as the operator takes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.kernels.operations.dropout import seed_of

_ALIGNMENTS = ("bottom right", "top left")


def arguments(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False, alignment: str = "bottom right",
    window: tuple[int | None, int | None] | None = None, scale: float | None = None, softcap: float | None = None,
    bias: Tensor | None = None, slopes: Tensor | None = None, sinks: Tensor | None = None, dropout: float = 0.0,
    seed: Tensor | int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of the operator, of [batch, heads, tokens, dim]."""
    _check_tensors(query, key, value, "[batch, heads, tokens, dim]")
    if bias is not None:
        _check_bias(bias, (*query.shape[:3], key.shape[2]))
    options = _options(query, query.shape[0], causal, alignment, window, scale, softcap, slopes, sinks, dropout)
    seed = seed_of(seed, query.device) if dropout else None
    return query, key, value, bias, slopes, sinks, seed, None, None, 0, 0, *options


def packed_arguments(
    query: Tensor, key: Tensor, value: Tensor, query_starts: Tensor, key_starts: Tensor, longest_query: int,
    longest_key: int, *, causal: bool = False, alignment: str = "bottom right",
    window: tuple[int | None, int | None] | None = None, scale: float | None = None, softcap: float | None = None,
    slopes: Tensor | None = None, sinks: Tensor | None = None, dropout: float = 0.0,
    seed: Tensor | int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The same of [tokens, heads, dim], as one batch."""
    if not query.dim() == key.dim() == value.dim() == 3:
        raise UsageError(f"attention_packed takes [tokens, heads, dim], and {_shapes(query, key, value)}.")
    query, key, value = (one.transpose(0, 1).unsqueeze(0) for one in (query, key, value))
    _check_tensors(query, key, value, "[tokens, heads, dim], shown as [1, heads, tokens, dim]")
    for starts in (query_starts, key_starts):
        if starts.dim() != 1 or not len(starts) or starts.dtype not in (torch.int32, torch.int64):
            raise UsageError(
                "Starts are int32 of [sequences + 1], from 0 to the number of tokens, and these are"
                f" {starts.dtype} of shape {list(starts.shape)}."
            )
    if len(query_starts) != len(key_starts):
        raise UsageError(f"There are {len(query_starts) - 1} sequences of queries, and {len(key_starts) - 1} of keys.")
    options = _options(query, len(query_starts) - 1, causal, alignment, window, scale, softcap, slopes, sinks, dropout)
    if slopes is not None and slopes.dim() == 2:
        raise UsageError("attention_packed takes slopes of [heads], one for all sequences.")
    seed = seed_of(seed, query.device) if dropout else None
    tensors = (query, key, value, None, slopes, sinks, seed, query_starts, key_starts)
    return *tensors, longest_query, longest_key, *options


def _shapes(*tensors: Tensor) -> str:
    return "these have the shapes " + ", ".join(str(list(one.shape)) for one in tensors)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, form: str) -> None:
    if not query.dim() == key.dim() == value.dim() == 4:
        raise UsageError(f"attention takes query, key and value of {form}, and {_shapes(query, key, value)}.")
    if not all(one.is_floating_point() for one in (query, key, value)):
        raise UsageError(f"attention is of floats, and these are {query.dtype}, {key.dtype} and {value.dtype}.")
    batches, heads, _, dim = query.shape
    if key.shape[:3] != value.shape[:3] or key.shape[0] != batches or key.shape[3] != dim:
        raise UsageError(
            f"query, key and value of {form} have one batch, queries the dim of keys, and values the heads and tokens"
            f" of keys; {_shapes(query, key, value)}."
        )
    if not key.shape[1] or heads % key.shape[1]:
        raise UsageError(f"The {heads} heads of queries must be a multiple of the {key.shape[1]} heads of keys.")


def _check_bias(bias: Tensor, to: tuple[int, ...]) -> None:
    if bias.dtype != torch.bool and not bias.is_floating_point():
        raise UsageError(f"A bias is floats to add, or booleans, True where a key is seen; this is {bias.dtype}.")
    fits = bias.dim() <= 4 and all(
        have in (1, want) for have, want in zip(reversed(bias.shape), reversed(to), strict=False)
    )
    if not fits:
        raise UsageError(f"A bias must broadcast to the scores, {list(to)}; this has the shape {list(bias.shape)}.")


def _options(
    query: Tensor, sequences: int, causal: bool, alignment: str, window: Any, scale: float | None,
    softcap: float | None, slopes: Tensor | None, sinks: Tensor | None, dropout: float,
) -> tuple[int, int, bool, float, float, float]:  # fmt: skip
    heads, dim = query.shape[1], query.shape[3]
    if alignment not in _ALIGNMENTS:
        raise UsageError(f"There is no alignment {alignment!r}. {did_you_mean(alignment, _ALIGNMENTS)}")
    if softcap is not None and not softcap > 0.0:
        raise UsageError(f"A softcap is above 0, and this is {softcap}.")
    if not 0.0 <= dropout <= 1.0:
        raise UsageError(f"The probability of dropout is from 0 to 1, and this is {dropout}.")
    if slopes is not None and tuple(slopes.shape) not in ((heads,), (sequences, heads)):
        raise UsageError(f"Slopes are [{heads}] or [{sequences}, {heads}], and these are {list(slopes.shape)}.")
    if sinks is not None and tuple(sinks.shape) != (heads,):
        raise UsageError(f"Sinks are [{heads}], one for each head, and these are {list(sinks.shape)}.")
    left, right = _sides(window)
    if scale is None:
        scale = dim**-0.5 if dim else 1.0
    return left, 0 if causal else right, alignment == "bottom right", float(scale), float(softcap or 0.0), dropout


def _sides(window: Any) -> tuple[int, int]:
    """Both sides of a window, -1 for one without a limit."""
    if window is None:
        return -1, -1
    if len(window) != 2 or any(side is not None and side < 0 for side in window):
        raise UsageError(f"A window is (left, right), each a number of keys or None, and this is {window!r}.")
    left, right = (-1 if side is None else int(side) for side in window)
    return left, right
