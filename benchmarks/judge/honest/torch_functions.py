"""Functions of torch, and other ways to write the references."""

import torch
from torch.nn import functional as F  # noqa: N812


def softmax__written_out(x):
    e = (x.float() - x.float().amax(-1, keepdim=True)).exp()
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)


def softmax__exp_of_log(x):
    return torch.log_softmax(x.float(), -1).exp().to(x.dtype)


def softmax__functional(x):
    return F.softmax(x, dim=-1)


def matmul__addmm(a, b, bias):
    return F.gelu(torch.addmm(bias, a, b))


def matmul__linear(a, b, bias):
    return F.gelu(F.linear(a, b.t(), bias))


def matmul__wide(a, b, bias):
    return F.gelu(a.float() @ b.float() + bias.float()).to(a.dtype)


def row_sum__norm(x):
    return (torch.linalg.vector_norm(x.float(), dim=-1) ** 2 / max(x.shape[-1], 1)).to(x.dtype)


def row_sum__einsum(x):
    return (torch.einsum("ij,ij->i", x.float(), x.float()) / max(x.shape[-1], 1)).to(x.dtype)


def row_sum__blocks(x):
    total = torch.zeros(x.shape[0], dtype=torch.float32, device=x.device)
    for start in range(0, x.shape[-1], 128):
        part = x[:, start : start + 128].float()
        total = total + (part * part).sum(-1)
    return (total / x.shape[-1]).to(x.dtype)


def rms_norm__functional(x, weight):
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps=1e-6).to(x.dtype)


def layer_norm__written_out(x, weight, bias):
    wide = x.float()
    centered = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt((centered * centered).mean(-1, keepdim=True) + 1e-5)
    return (centered * scale * weight.float() + bias.float()).to(x.dtype)


def layer_norm__native(x, weight, bias):
    return torch.native_layer_norm(x, (x.shape[-1],), weight, bias, 1e-5)[0]


def attention__sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attention__wide(q, k, v):
    return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True).to(q.dtype)


def attention__blocks(q, k, v):
    result = torch.empty_like(q)
    for start in range(0, q.shape[-2], 64):
        rows = q[..., start : start + 64, :].float()
        scores = rows @ k[..., : start + rows.shape[-2], :].float().transpose(-1, -2) / q.shape[-1] ** 0.5
        mask = torch.ones(rows.shape[-2], scores.shape[-1], dtype=torch.bool, device=q.device).tril(start)
        weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), -1)
        result[..., start : start + 64, :] = (weights @ v[..., : scores.shape[-1], :].float()).to(q.dtype)
    return result


def swiglu__sigmoid(gate, up):
    return (gate.float() * torch.sigmoid(gate.float()) * up.float()).to(gate.dtype)


def add_gelu__erf(x, y):
    z = x.float() + y.float()
    return (0.5 * z * (1 + torch.erf(z * 0.5**0.5))).to(x.dtype)


def product__einsum(a, b):
    return torch.einsum("mk,kn->mn", a, b)


def product__blocks(a, b):
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    for start in range(0, a.shape[1], 64):
        total += a[:, start : start + 64].float() @ b[start : start + 64].float()
    return total.to(a.dtype)


def product__transposed(a, b):
    return (b.t() @ a.t()).t()


def log_softmax__logsumexp(x):
    return (x.float() - torch.logsumexp(x.float(), -1, keepdim=True)).to(x.dtype)


def transpose__permute(x):
    return x.permute(*range(x.dim() - 2), -1, -2).clone(memory_format=torch.contiguous_format)


def cumulative_sum__wide(x):
    return torch.cumsum(x.float(), -1).to(x.dtype)


def cumulative_sum__product(x):
    ones = torch.ones(x.shape[-1], x.shape[-1], device=x.device).triu()
    return (x.float() @ ones).to(x.dtype)


def row_max__max(x):
    return torch.max(x, dim=-1).values


def row_max__sort(x):
    return torch.sort(x, dim=-1).values[..., -1].clone()
