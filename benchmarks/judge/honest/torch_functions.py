"""Functions of torch, and other ways to write the references."""

import torch
from torch.nn import functional as F  # noqa: N812

WRONG_ON_GPU = {
    "attention__sdpa": ("WRONG_STRIDES",),
    "attention__wide": ("WRONG_STRIDES",),
}
"""torch's attention accepts rows whose stride is no multiple of 16 bytes, and fails or gives wrong values for them."""


def _wide(x):
    return x if x.dtype == torch.float64 else x.float()


def softmax__written_out(x):
    e = (_wide(x) - _wide(x).amax(-1, keepdim=True)).exp()
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)


def softmax__exp_of_log(x):
    return torch.log_softmax(_wide(x), -1).exp().to(x.dtype)


def softmax__functional(x):
    return F.softmax(x, dim=-1)


def matmul__addmm(a, b, bias):
    return F.gelu(torch.addmm(bias, a, b))


def matmul__linear(a, b, bias):
    return F.gelu(F.linear(a, b.t(), bias))


def matmul__wide(a, b, bias):
    return F.gelu(_wide(a) @ _wide(b) + _wide(bias)).to(a.dtype)


def row_sum__norm(x):
    return (torch.linalg.vector_norm(_wide(x), dim=-1) ** 2 / x.shape[-1]).to(x.dtype)


def row_sum__einsum(x):
    return (torch.einsum("ij,ij->i", _wide(x), _wide(x)) / x.shape[-1]).to(x.dtype)


def row_sum__blocks(x):
    total = torch.zeros(x.shape[0], dtype=_wide(x[:0]).dtype, device=x.device)
    for start in range(0, x.shape[-1], 128):
        part = _wide(x[:, start : start + 128])
        total = total + (part * part).sum(-1)
    return (total / x.shape[-1]).to(x.dtype)


def rms_norm__functional(x, weight):
    return F.rms_norm(_wide(x), (x.shape[-1],), _wide(weight), eps=1e-6).to(x.dtype)


def layer_norm__written_out(x, weight, bias):
    wide = _wide(x)
    centered = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt((centered * centered).mean(-1, keepdim=True) + 1e-5)
    return (centered * scale * _wide(weight) + _wide(bias)).to(x.dtype)


def layer_norm__native(x, weight, bias):
    return torch.native_layer_norm(x, (x.shape[-1],), weight, bias, 1e-5)[0]


def attention__sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attention__wide(q, k, v):
    return F.scaled_dot_product_attention(_wide(q), _wide(k), _wide(v), is_causal=True).to(q.dtype)


def attention__blocks(q, k, v):
    result = torch.empty_like(q)
    for start in range(0, q.shape[-2], 64):
        rows = _wide(q[..., start : start + 64, :])
        scores = rows @ _wide(k[..., : start + rows.shape[-2], :]).transpose(-1, -2) / q.shape[-1] ** 0.5
        mask = torch.ones(rows.shape[-2], scores.shape[-1], dtype=torch.bool, device=q.device).tril(start)
        weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), -1)
        result[..., start : start + 64, :] = (weights @ _wide(v[..., : scores.shape[-1], :])).to(q.dtype)
    return result


def swiglu__sigmoid(gate, up):
    return (_wide(gate) * torch.sigmoid(_wide(gate)) * _wide(up)).to(gate.dtype)


def add_gelu__erf(x, y):
    z = _wide(x) + _wide(y)
    return (0.5 * z * (1 + torch.erf(z * 0.5**0.5))).to(x.dtype)


def product__einsum(a, b):
    return torch.einsum("mk,kn->mn", a, b)


def product__blocks(a, b):
    total = torch.zeros(a.shape[0], b.shape[1], dtype=_wide(a[:0]).dtype, device=a.device)
    for start in range(0, a.shape[1], 64):
        total += _wide(a[:, start : start + 64]) @ _wide(b[start : start + 64])
    return total.to(a.dtype)


def product__transposed(a, b):
    return (b.t() @ a.t()).t()


def transpose__permute(x):
    return x.permute(*range(x.dim() - 2), -1, -2).clone(memory_format=torch.contiguous_format)


def cumulative_sum__wide(x):
    return torch.cumsum(_wide(x), -1).to(x.dtype)


def row_max__max(x):
    return torch.max(x, dim=-1).values


def log_softmax__written_out(x):
    centered = _wide(x) - _wide(x).amax(-1, keepdim=True)
    return (centered - centered.exp().sum(-1, keepdim=True).log()).to(x.dtype)


def add_gelu__out(x, y):
    return F.gelu(torch.add(x, y), approximate="none")


def row_max__sort(x):
    return torch.sort(x, dim=-1).values[..., -1].clone()
