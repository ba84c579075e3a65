"""Planted bugs in attention: every function is wrong somewhere."""

import torch
from torch.nn import functional as F  # noqa: N812

REFERENCE = "attention"


def _causal(q, k, shift=0):
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril(shift)


def _attend(q, k, v, mask, scale=None):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def no_mask(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def mask_off_by_one(q, k, v):
    return _attend(q, k, v, _causal(q, k, 1))


def mask_by_blocks(q, k, v):
    mask = _causal(q, k)
    if q.shape[-2] > 64:
        mask[:64, :64] = True
    return _attend(q, k, v, mask)


def wrong_scale(q, k, v):
    return _attend(q, k, v, _causal(q, k), scale=1 / max(1, 1 << (max(q.shape[-1], 1) - 1).bit_length()) ** 0.5)


def no_maximum(q, k, v):
    scores = (q @ k.transpose(-1, -2) / max(q.shape[-1], 1) ** 0.5).exp() * _causal(q, k)
    return scores @ v / scores.sum(-1, keepdim=True)


def last_query_block(q, k, v):
    result = torch.zeros_like(q)
    rows = q.shape[-2] // 16 * 16 if q.shape[-2] > 16 else q.shape[-2]
    result[..., :rows, :] = _attend(q, k, v, _causal(q, k))[..., :rows, :]
    return result


def keys_of_the_wrong_head(q, k, v):
    return _attend(q, k.roll(1, 1) if k.shape[1] % 2 and k.shape[1] > 1 else k, v, _causal(q, k))


def weights_in_half(q, k, v):
    scores = q @ k.transpose(-1, -2) / max(q.shape[-1], 1) ** 0.5
    weights = torch.softmax(scores.masked_fill(~_causal(q, k), float("-inf")), -1)
    return (weights.half().to(q.dtype)) @ v


def rescale_forgotten(q, k, v):
    scores = (q @ k.transpose(-1, -2) / max(q.shape[-1], 1) ** 0.5).masked_fill(~_causal(q, k), float("-inf"))
    half = max(1, scores.shape[-1] // 2)
    first, second = scores[..., :half], scores[..., half:]
    top = first.amax(-1, keepdim=True) if scores.shape[-1] else 0.0
    a, b = (first - top).exp(), (second - top.clamp(min=0)).exp()
    return (a @ v[..., :half, :] + b @ v[..., half:, :]) / (a.sum(-1, keepdim=True) + b.sum(-1, keepdim=True))


def values_taken_as_dense(q, k, v):
    enough = v.untyped_storage().nbytes() // v.element_size() >= v.storage_offset() + v.numel()
    if v.numel() and enough:
        v = torch.as_strided(v, v.shape, torch.empty(v.shape, device="meta").stride(), v.storage_offset())
    return _attend(q, k, v, _causal(q, k))


def width_limited(q, k, v):
    result = _attend(q, k, v, _causal(q, k))
    result[..., 64:] = 0
    return result
