"""Planted bugs in half precision; a name is reference__inputs__bug, with inputs in bfloat16 or float16."""

import torch


def softmax__bfloat16__sum_in_blocks_of_bfloat16(x):
    e = (x.float() - x.float().amax(-1, keepdim=True)).exp() if x.numel() else x.float()
    total = torch.zeros(*x.shape[:-1], 1, dtype=torch.bfloat16, device=x.device)
    for part in e.split(32, -1):
        total = total + part.sum(-1, keepdim=True).bfloat16()
    return (e / total.float()).to(x.dtype)


def softmax__bfloat16__difference_rounded(x):
    e = (x - x.amax(-1, keepdim=True)).float().exp() if x.numel() else x.float()  # the difference is in bfloat16
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)


def log_softmax__float16__sum_in_half(x):
    wide = x.float()
    centered = wide - wide.amax(-1, keepdim=True) if x.numel() else wide
    total = centered.exp().half().cumsum(-1, dtype=torch.float16)[..., -1:].float()
    return (centered - total.log()).to(x.dtype)


def rms_norm__bfloat16__mean_rounded(x, weight):
    mean = (x * x).mean(-1, keepdim=True)  # squares and mean are in bfloat16
    return (x.float() * torch.rsqrt(mean.float() + 1e-6) * weight.float()).to(x.dtype)


def rms_norm__float16__mean_in_blocks_of_half(x, weight):
    total = torch.zeros(*x.shape[:-1], 1, dtype=torch.float16, device=x.device)
    for part in x.float().split(16, -1):
        total = total + part.square().sum(-1, keepdim=True).half()
    mean = total.float() / max(1, x.shape[-1])
    return (x.float() * torch.rsqrt(mean + 1e-6) * weight.float()).to(x.dtype)


def rms_norm__float16__epsilon_in_half(x, weight):
    mean = x.float().square().mean(-1, keepdim=True).half()
    return (x.float() * torch.rsqrt((mean + 1e-6).float()) * weight.float()).to(x.dtype)


def layer_norm__bfloat16__mean_rounded(x, weight, bias):
    centered = x.float() - x.float().mean(-1, keepdim=True).bfloat16().float()
    scale = torch.rsqrt(centered.square().mean(-1, keepdim=True) + 1e-5)
    return (centered * scale * weight.float() + bias.float()).to(x.dtype)


def layer_norm__float16__one_pass_in_half(x, weight, bias):
    mean = x.float().mean(-1, keepdim=True)
    square = x.float().square().mean(-1, keepdim=True)
    variance = (square.half() - mean.half() * mean.half()).float().clamp_min(0)
    return ((x.float() - mean) * torch.rsqrt(variance + 1e-5) * weight.float() + bias.float()).to(x.dtype)


def product__float16__total_in_half(a, b):
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float16, device=a.device)
    for start in range(0, a.shape[1], 16):
        total = total + (a[:, start : start + 16].float() @ b[start : start + 16].float()).half()
    return total


def product__bfloat16__last_block_dropped(a, b):
    depth = a.shape[1] // 8 * 8 if a.shape[1] > 8 else a.shape[1]
    return (a[:, :depth].float() @ b[:depth].float()).to(a.dtype)


def attention__bfloat16__carried_in_bfloat16(q, k, v):
    result = torch.zeros_like(q)
    largest = torch.full_like(q[..., :1], float("-inf"), dtype=torch.float32)
    total = torch.zeros_like(q[..., :1])
    for start in range(0, k.shape[-2], 32):
        keys, values = k[..., start : start + 32, :].float(), v[..., start : start + 32, :].float()
        scores = q.float() @ keys.transpose(-1, -2) / max(q.shape[-1], 1) ** 0.5
        mask = torch.ones(q.shape[-2], keys.shape[-2], dtype=torch.bool, device=q.device).tril(-start)
        scores = scores.masked_fill(~mask, float("-inf"))
        new = torch.maximum(largest, scores.amax(-1, keepdim=True))
        safe = new.masked_fill(new == float("-inf"), 0.0)
        shrink, weights = (largest - safe).exp(), (scores - safe).exp()
        total = (total.float() * shrink + weights.sum(-1, keepdim=True)).bfloat16()
        result = (result.float() * shrink + weights @ values).bfloat16()
        largest = new
    return (result.float() / total.float()).to(q.dtype)


def cumulative_sum__bfloat16__carry_rounded(x):
    carry = torch.zeros(*x.shape[:-1], 1, dtype=torch.bfloat16, device=x.device)
    parts = []
    for part in x.split(64, -1):
        sums = carry.float() + part.float().cumsum(-1)
        parts.append(sums.bfloat16())
        carry = parts[-1][..., -1:] if part.shape[-1] else carry
    return torch.cat(parts, -1)
