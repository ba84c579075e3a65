"""The launchers of `linear_cross_entropy`: matrix products of cuBLAS, and the kernel of `cross_entropy` in between.

Tokens are taken in chunks. The logits of a chunk are written, turned into their gradient where they are, and used up.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nearpeak.kernels.jit.cross_entropy import (
    Settings,
    denominator,
    reduced,
    weight_total,
    write_gradient,
    write_rows,
)

CHUNK_BYTES = 512 * 2**20
"""What the logits of a chunk take at most, where nobody says how many tokens it has."""
FEW_CHUNKS = 4
"""Up to so many, the gradient of the weight is added up in the weight's own dtype."""
_SLICE_BYTES = 64 * 2**20


def chunk_of(tokens: int, columns: int, itemsize: int, asked: int) -> int:
    """How many tokens a chunk has: chunks are alike, and multiples of 128, which tiles of matrix products divide."""
    if asked > 0:
        return min(asked, max(tokens, 1))
    most = CHUNK_BYTES // (columns * itemsize)
    most = max(128, most // 128 * 128)
    chunks = max(1, -(-tokens // most))
    even = -(-tokens // chunks)
    return max(1, min(tokens, -(-even // 128) * 128))


class _Gradients:
    """The gradients by hidden, weight and bias, chunk by chunk; empty tensors for those that nobody wants."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, chunks: int, float32: bool | None,
        wanted: tuple[bool, bool, bool],
    ) -> None:  # fmt: skip
        self.weight = weight
        self.for_hidden, self.for_weight, self.for_bias = wanted
        self.any = any(wanted)
        self.by_hidden = torch.empty(hidden.shape if wanted[0] else (0,), dtype=hidden.dtype, device=hidden.device)
        dtype = torch.float32 if (chunks > FEW_CHUNKS if float32 is None else float32) else weight.dtype
        shape = weight.shape if wanted[1] else (0,)
        self.by_weight = torch.empty(shape, dtype=dtype, device=weight.device)
        if not len(hidden):
            self.by_weight.zero_()
        self.by_bias = torch.zeros(weight.shape[0] if wanted[2] else 0, dtype=torch.float32, device=weight.device)
        self.bias_dtype = weight.dtype if bias is None else bias.dtype

    def add(self, first: int, hidden: Tensor, logits: Tensor) -> None:
        """Adds what a chunk gives, whose logits are their gradient now."""
        if self.for_hidden:
            torch.mm(logits, self.weight, out=self.by_hidden[first : first + len(hidden)])
        if self.for_bias:
            self.by_bias += logits.sum(0, dtype=torch.float32)
        if not self.for_weight:
            return
        if self.by_weight.dtype == logits.dtype:
            if first == 0:
                torch.mm(logits.t(), hidden, out=self.by_weight)
            else:
                torch.addmm(self.by_weight, logits.t(), hidden, out=self.by_weight)
            return
        # a product of low precision cannot be added to float32 at once: by slices, which take little memory
        rows = max(128, _SLICE_BYTES // (hidden.shape[1] * hidden.element_size()) // 128 * 128)
        for start in range(0, len(self.weight), rows):
            share = torch.mm(logits[:, start : start + rows].t(), hidden)
            part = self.by_weight[start : start + rows]
            if first == 0:
                part.copy_(share)
            else:
                part.add_(share)

    def results(self, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
        by_hidden = self.by_hidden.view(shape) if self.for_hidden else self.by_hidden
        return by_hidden, self.by_weight.to(self.weight.dtype), self.by_bias.to(self.bias_dtype)


def _chunks(hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Of each chunk where it begins, its hidden states and its logits, which are in the same place each time."""
    buffer = torch.empty(chunk, weight.shape[0], dtype=hidden.dtype, device=hidden.device)
    for first in range(0, len(hidden), chunk):
        part = hidden[first : first + chunk]
        logits = buffer[: len(part)]
        if bias is None:
            torch.mm(part, weight.t(), out=logits)
        else:
            torch.addmm(bias, part, weight.t(), out=logits)
        yield first, part, logits


@torch.no_grad()
def forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    ignore_index: int, label_smoothing: float, softcap: float, z_loss: float, reduction: str, chunk_tokens: int,
    float32: bool | None, with_logprobs: bool, with_entropy: bool, for_hidden: bool, for_weight: bool, for_bias: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The loss; its gradients by hidden, weight and bias; a factor that these still need; logprobs; entropies; top and
    sum of each row; what a mean divides by. Empty tensors for what was not asked for.
    """
    settings = Settings(ignore_index, label_smoothing, softcap, z_loss, reduction)
    rows = hidden.reshape(-1, hidden.shape[-1])
    flat = target.reshape(-1).contiguous()
    columns, count = weight.shape[0], len(rows)
    class_weight = None if class_weight is None else class_weight.contiguous()
    parts = denominator(flat, class_weight, columns, settings)
    total = weight_total(class_weight, settings)

    def by_token(wanted: bool = True) -> Tensor:
        return torch.empty(count if wanted else 0, dtype=torch.float32, device=hidden.device)

    losses, logprobs, entropies = by_token(), by_token(with_logprobs), by_token(with_entropy)
    statistics = torch.empty(2, count, dtype=torch.float32, device=hidden.device)
    chunk = chunk_of(count, columns, hidden.element_size(), chunk_tokens)
    wanted = (for_hidden, for_weight, for_bias)
    gradients = _Gradients(rows, weight, bias, -(-count // chunk), float32, wanted)
    # in float16 the share of a row in a mean of thousands is lost: the gradient is that of the sum until the end
    late = hidden.dtype == torch.float16 and reduction == "mean"
    for first, part, logits in _chunks(rows, weight, bias, chunk):
        end = first + len(part)
        write_rows(
            logits, flat[first:end], class_weight, total, parts, losses[first:end], statistics[0, first:end],
            statistics[1, first:end], settings, gradient=logits if gradients.any else None, scaled=not late,
            logprobs=logprobs[first:end] if with_logprobs else None,
            entropies=entropies[first:end] if with_entropy else None,
        )  # fmt: skip
        if gradients.any:
            gradients.add(first, part, logits)
    factor = torch.ones((), dtype=torch.float32, device=hidden.device)
    if late:
        counted = parts.sum()
        factor = torch.where(counted > 0, 1.0 / counted, 0.0)
    return (
        reduced(losses, target.shape, settings), *gradients.results(hidden.shape), factor,
        logprobs.view(target.shape) if with_logprobs else logprobs,
        entropies.view(target.shape) if with_entropy else entropies, statistics, parts,
    )  # fmt: skip


@torch.no_grad()
def backward(
    upstream: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None,
    statistics: Tensor, parts: Tensor, ignore_index: int, label_smoothing: float, softcap: float, z_loss: float,
    reduction: str, chunk_tokens: int, float32: bool | None, for_hidden: bool, for_weight: bool, for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients by hidden, weight and bias, from logits that are computed again."""
    settings = Settings(ignore_index, label_smoothing, softcap, z_loss, reduction)
    rows = hidden.reshape(-1, hidden.shape[-1])
    flat = target.reshape(-1)
    above = upstream.reshape(-1)
    chunk = chunk_of(len(rows), weight.shape[0], hidden.element_size(), chunk_tokens)
    wanted = (for_hidden, for_weight, for_bias)
    gradients = _Gradients(rows, weight, bias, -(-len(rows) // chunk), float32, wanted)
    for first, part, logits in _chunks(rows, weight, bias, chunk):
        end = first + len(part)
        write_gradient(
            above[first:end] if upstream.dim() else upstream, logits, logits, flat[first:end], class_weight,
            statistics[0, first:end], statistics[1, first:end], parts, settings,
        )  # fmt: skip
        gradients.add(first, part, logits)
    return gradients.results(hidden.shape)
