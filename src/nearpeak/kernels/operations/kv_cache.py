"""`KVCache`: the keys and values of one layer, for as many tokens as they have room for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nearpeak.errors import UsageError
from nearpeak.kernels.operations.cache_append import append
from nearpeak.kernels.operations.decode import decode_attention


class KVCache:
    """Keys and values of the tokens that a layer has seen, of several sequences.

    >>> cache = KVCache.create(batch=2, capacity=8, key_heads=1, dim=4)
    >>> key = torch.randn(2, 1, 3, 4)
    >>> cache.append(key, key)
    >>> cache.attend(torch.randn(2, 2, 3, 4)).shape, cache.lengths.tolist(), cache.fits(6)
    (torch.Size([2, 2, 3, 4]), [3, 3], False)

    The lengths are on the device and never read from there. The host counts along how many tokens were appended, at
    most: that is what says whether more fit. It does not see the replays of a CUDA graph, in which tokens without a
    place are dropped: there, the caller counts.

    Args:
        keys, values: [batch, key_heads, capacity, dim], or with `pages` [pages, page_size, key_heads, dim].
        pages: [batch, most_pages] in int32, which pages the tokens of each sequence are in.
        key_scale, value_scale: What is kept is divided by this: numbers or [key_heads]. For float8.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, *, batch: int, pages: Tensor | None = None,
        key_scale: float | Tensor | None = None, value_scale: float | Tensor | None = None,
    ) -> None:  # fmt: skip
        self.keys, self.values, self.pages = keys, values, pages
        self.key_scale, self.value_scale = key_scale, value_scale
        self.capacity = keys.shape[2] if pages is None else pages.shape[1] * keys.shape[1]
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=keys.device)
        """[batch], how many tokens each sequence has."""
        # one number changes with each token, and not one for each sequence: compiled code looks at what changes
        self._longest = 0
        self._shorter = [0] * batch

    @classmethod
    def create(
        cls, batch: int, capacity: int, key_heads: int, dim: int, dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu", page_size: int | None = None, *, value_dim: int | None = None,
        key_scale: float | Tensor | None = None, value_scale: float | Tensor | None = None,
    ) -> KVCache:  # fmt: skip
        """An empty cache. With `page_size` in pages, of which each sequence has its own, one after the other.

        Other tables may be written to `pages`, so that sequences share what they begin with.
        """
        if min(batch, capacity, key_heads, dim) < 1 or (page_size is not None and page_size < 1):
            raise UsageError(
                f"A cache needs a batch, capacity, key_heads, dim and page_size of 1 or more, and these are {batch},"
                f" {capacity}, {key_heads}, {dim} and {page_size}."
            )
        sizes, pages = (dim, dim if value_dim is None else value_dim), None
        shape: tuple[int, ...] = (batch, key_heads, capacity)
        if page_size is not None:
            each = -(-capacity // page_size)
            shape = (batch * each, page_size, key_heads)
            pages = torch.arange(batch * each, dtype=torch.int32, device=device).view(batch, each)
        keys, values = (torch.empty((*shape, size), dtype=dtype, device=device) for size in sizes)
        return cls(keys, values, batch=batch, pages=pages, key_scale=key_scale, value_scale=value_scale)

    @property
    def most(self) -> list[int]:
        """How many tokens each sequence has, at most: what the host knows."""
        return [self._longest - shorter for shorter in self._shorter]

    def fits(self, new: int) -> bool:
        """Whether there is room for so many more tokens of each sequence."""
        return self._longest + new <= self.capacity

    def append(
        self, key: Tensor, value: Tensor, *, cosines: Tensor | None = None, sines: Tensor | None = None,
        interleaved: bool = False, rotary_dim: int | None = None, query: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Adds the tokens of `key` and `value`, [batch, key_heads, new, dim], to all sequences.

        With cosines and sines, keys are rotated by their positions, and the query too: it is returned. See `append` of
        this package.
        """
        new = key.shape[2] if key.dim() == 4 else 0
        if not self.fits(new):
            raise UsageError(
                f"The cache is full: it has room for {self.capacity} tokens of a sequence, up to"
                f" {self._longest} are there, and {new} are to come. Create it with more capacity, or reset() or"
                " truncate() it."
            )
        rotated = append(
            self.keys, self.values, key, value, self.lengths, pages=self.pages, cosines=cosines, sines=sines,
            interleaved=interleaved, rotary_dim=rotary_dim, key_scale=self.key_scale, value_scale=self.value_scale,
            query=query,
        )  # fmt: skip
        self.lengths.add_(new)
        self._longest += new
        return rotated

    def attend(
        self, query: Tensor, *, scale: float | None = None, window: int | None = None, softcap: float | None = None,
        sinks: Tensor | None = None, return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """The attention of the tokens that were appended last to all tokens: `decode_attention` with this cache."""
        return decode_attention(
            query, self.keys, self.values, self.lengths, pages=self.pages, scale=scale, window=window, softcap=softcap,
            sinks=sinks, key_scale=self.key_scale, value_scale=self.value_scale, return_lse=return_lse,
        )  # fmt: skip

    def truncate(self, lengths: Tensor | Sequence[int]) -> None:
        """Keeps at most so many tokens of each sequence: after prompts with padding, or tokens that were rejected.

        Of a tensor on a GPU the host learns nothing, so that `fits` stays as it was.
        """
        if len(lengths) != len(self._shorter):
            raise UsageError(f"There are {len(self._shorter)} sequences, and lengths for {len(lengths)}.")
        if not isinstance(lengths, Tensor):
            self._count([min(most, length) for most, length in zip(self.most, lengths, strict=True)])
            lengths = torch.tensor(lengths, dtype=torch.int32)
        torch.minimum(self.lengths, lengths.to(self.lengths), out=self.lengths)

    def reset(self, sequences: Sequence[int] | None = None) -> None:
        """Empties the cache, or these sequences of it, by their numbers."""
        chosen = range(len(self._shorter)) if sequences is None else sequences
        self._count([0 if number in chosen else most for number, most in enumerate(self.most)])
        if sequences is None:
            self.lengths.zero_()
        else:
            self.lengths[torch.tensor(sequences, dtype=torch.int64, device=self.lengths.device)] = 0

    def _count(self, most: list[int]) -> None:
        """From now on sequences have at most so many tokens."""
        self._longest = max(most)
        self._shorter = [self._longest - one for one in most]
