"""Cases to time: `nearpeak bench examples/cases.py:softmax`.

A case is a function that builds its inputs and returns the callable to time. Its parameters have defaults, and are
what a sweep varies. Inputs are on the GPU when there is one.

`work` is the least that the operation must do, from which nearpeak computes the bound: here every operand crosses
memory once, and a multiply-add counts as 2 FLOP.
"""

from __future__ import annotations

import torch

import nearpeak
from nearpeak.measure import inputs


def softmax(rows: int = 4096, columns: int = 4096, dtype: str = "float32") -> nearpeak.Case:
    """Softmax over the rows of a matrix: limited by memory."""
    x = inputs.activations(rows, columns, dtype=dtype)
    work = nearpeak.Work(bytes_read=x.nbytes, bytes_written=x.nbytes)
    return nearpeak.Case(torch.softmax, x, -1, work=work)


def matmul(m: int = 1024, n: int = 1024, k: int = 1024, dtype: str = "float32") -> nearpeak.Case:
    """The product of an m x k and a k x n matrix: limited by compute once all three are large."""
    a = inputs.activations(m, k, dtype=dtype, seed=0)
    b = inputs.activations(k, n, dtype=dtype, seed=1)
    work = nearpeak.Work(
        flops={dtype: 2.0 * m * n * k},
        bytes_read=a.nbytes + b.nbytes,
        bytes_written=m * n * a.element_size(),
    )
    return nearpeak.Case(torch.matmul, a, b, work=work)


def rms_norm(tokens: int = 4096, width: int = 4096, dtype: str = "float32") -> nearpeak.Case:
    """RMSNorm written in plain torch: several passes over memory where one would do."""
    x = inputs.activations(tokens, width, dtype=dtype, seed=0)
    weight = inputs.activations(width, dtype=dtype, seed=1)

    def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        return (x.float() * scale).to(x.dtype) * weight

    work = nearpeak.Work(bytes_read=x.nbytes + weight.nbytes, bytes_written=x.nbytes)
    return nearpeak.Case(plain, x, weight, work=work)


def copy(mebibytes: int = 256, dtype: str = "float32") -> nearpeak.Case:
    """A copy into memory that is already there: what the memory can do."""
    source = inputs.activations(mebibytes * 2**20 // getattr(torch, dtype).itemsize, dtype=dtype)
    destination = torch.empty_like(source)
    work = nearpeak.Work(bytes_read=source.nbytes, bytes_written=source.nbytes)
    return nearpeak.Case(torch.Tensor.copy_, destination, source, work=work)


class TransformerLayer(torch.nn.Module):
    """A pre-norm transformer layer; `fused` uses torch's attention, otherwise it is written out op by op."""

    def __init__(self, hidden: int, heads: int, dropout: float, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.attention_norm = torch.nn.LayerNorm(hidden)
        self.qkv = torch.nn.Linear(hidden, 3 * hidden)
        self.projection = torch.nn.Linear(hidden, hidden)
        self.mlp_norm = torch.nn.LayerNorm(hidden)
        self.up = torch.nn.Linear(hidden, 4 * hidden)
        self.gelu = torch.nn.GELU()
        self.down = torch.nn.Linear(4 * hidden, hidden)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.projection(self.attention(self.qkv(self.attention_norm(x)))))
        return x + self.dropout(self.down(self.gelu(self.up(self.mlp_norm(x)))))

    def attention(self, qkv: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = qkv.shape
        head = width // 3 // self.heads
        q, k, v = qkv.view(batch, tokens, 3, self.heads, head).permute(2, 0, 3, 1, 4)
        if self.fused:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            out = torch.softmax(q @ k.transpose(-1, -2) * head**-0.5, -1) @ v
        return out.transpose(1, 2).reshape(batch, tokens, width // 3)


def transformer_layer(
    hidden: int = 4096,
    heads: int = 32,
    tokens: int = 2048,
    batch: int = 8,
    dropout: float = 0.1,
    dtype: str = "bfloat16",
) -> nearpeak.Case:
    """The forward pass of a transformer layer in training: some ops limited by memory, some by compute."""
    return _layer(hidden, heads, tokens, batch, dropout, dtype, fused=True)


def transformer_layer_written_out(
    hidden: int = 4096,
    heads: int = 32,
    tokens: int = 2048,
    batch: int = 8,
    dropout: float = 0.1,
    dtype: str = "bfloat16",
) -> nearpeak.Case:
    """The same layer with its attention as product, softmax and product: what fusion would save."""
    return _layer(hidden, heads, tokens, batch, dropout, dtype, fused=False)


def _layer(
    hidden: int, heads: int, tokens: int, batch: int, dropout: float, dtype: str, *, fused: bool
) -> nearpeak.Case:
    x = inputs.activations(batch, tokens, hidden, dtype=dtype)
    layer = TransformerLayer(hidden, heads, dropout, fused).to(device=x.device, dtype=x.dtype)
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    return nearpeak.Case(layer, x)
