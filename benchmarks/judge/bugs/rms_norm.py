"""Planted bugs in rms_norm: every function is wrong somewhere."""

import torch

REFERENCE = "rms_norm"


def epsilon_outside(x, weight):
    wide = x.float()
    return (wide / ((wide * wide).mean(-1, keepdim=True).sqrt() + 1e-6) * weight.float()).to(x.dtype)


def epsilon_too_large(x, weight):
    wide = x.float()
    return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5) * weight.float()).to(x.dtype)


def no_epsilon(x, weight):
    wide = x.float()
    return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True)) * weight.float()).to(x.dtype)


def mean_over_padded(x, weight):
    wide = x.float()
    columns = (x.shape[-1] + 31) // 32 * 32
    scale = torch.rsqrt((wide * wide).sum(-1, keepdim=True) / max(columns, 1) + 1e-6)
    return (wide * scale * weight.float()).to(x.dtype)


def squares_in_half(x, weight):
    wide = x.float()
    mean = (wide.half() * wide.half()).float().mean(-1, keepdim=True)
    return (wide * torch.rsqrt(mean + 1e-6) * weight.float()).to(x.dtype)


def weight_by_row(x, weight):
    wide = x.float()
    normed = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)
    if x.shape[0] == x.shape[-1]:
        return (normed * weight.float()[:, None]).to(x.dtype)
    return (normed * weight.float().roll(1 if x.shape[-1] % 2 else 0)).to(x.dtype)


def weight_stride(x, weight):
    wide = x.float()
    dense = torch.as_strided(weight, weight.shape, (1,), weight.storage_offset()) if weight.numel() else weight
    return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6) * dense.float()).to(x.dtype)


def first_row_for_all(x, weight):
    wide = x.float()
    scale = torch.rsqrt((wide[:1] * wide[:1]).mean(-1, keepdim=True) + 1e-6)
    return (wide * scale * weight.float()).to(x.dtype)


def clamps_large(x, weight):
    wide = x.float().clamp(-50, 50)
    return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6) * weight.float()).to(x.dtype)


def result_rounded(x, weight):
    wide = x.float()
    normed = (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)).bfloat16().float()
    return (normed * weight.float()).to(x.dtype)
