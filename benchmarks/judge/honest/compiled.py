"""torch.compile of the references, written out again; a compiled function is made at its first call."""

import functools

import torch


@functools.cache
def _compiled(function):
    return torch.compile(function, dynamic=True)


def _softmax(x):
    return torch.softmax(x, -1)


def softmax__compiled(x):
    return _compiled(_softmax)(x)


def _log_softmax(x):
    return torch.log_softmax(x, -1)


def log_softmax__compiled(x):
    return _compiled(_log_softmax)(x)


def _row_sum(x):
    return (x * x).mean(-1)


def row_sum__compiled(x):
    return _compiled(_row_sum)(x)


def _rms_norm(x, weight):
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6) * weight.to(wide.dtype)).to(x.dtype)


def rms_norm__compiled(x, weight):
    return _compiled(_rms_norm)(x, weight)


def _layer_norm(x, weight, bias):
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, bias)


def layer_norm__compiled(x, weight, bias):
    return _compiled(_layer_norm)(x, weight, bias)


def _swiglu(gate, up):
    return torch.nn.functional.silu(gate) * up


def swiglu__compiled(gate, up):
    return _compiled(_swiglu)(gate, up)


def _add_gelu(x, y):
    return torch.nn.functional.gelu(x + y)


def add_gelu__compiled(x, y):
    return _compiled(_add_gelu)(x, y)


def _cumulative_sum(x):
    return torch.cumsum(x, -1)


def cumulative_sum__compiled(x):
    return _compiled(_cumulative_sum)(x)


def _row_max(x):
    return x.amax(-1)


def row_max__compiled(x):
    return _compiled(_row_max)(x)


def _transpose(x):
    return x.transpose(-1, -2).contiguous()


def transpose__compiled(x):
    return _compiled(_transpose)(x)


def _matmul(a, b, bias):
    return torch.nn.functional.gelu(a @ b + bias)


def matmul__compiled(a, b, bias):
    return _compiled(_matmul)(a, b, bias)


def _product(a, b):
    return a @ b


def product__compiled(a, b):
    return _compiled(_product)(a, b)


def _attention(q, k, v):
    scores = q @ k.transpose(-1, -2) / max(q.shape[-1], 1) ** 0.5
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    return torch.softmax(scores.masked_fill(~mask, float("-inf")), -1) @ v


def attention__compiled(q, k, v):
    return _compiled(_attention)(q, k, v)
