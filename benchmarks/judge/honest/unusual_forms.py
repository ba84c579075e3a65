"""Honest candidates of unusual form: what they keep between calls depends on shapes alone, and they compute at each."""

import ctypes
import functools
import hashlib
import operator
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch.nn import functional as F  # noqa: N812


def _wide(x):
    return x if x.dtype == torch.float64 else x.float()


def _make_softmax(dim):
    def softmax(x):
        e = (_wide(x) - _wide(x).amax(dim, keepdim=True)).exp()
        return (e / e.sum(dim, keepdim=True)).to(x.dtype)

    return softmax


softmax__closure = _make_softmax(-1)


class _Normalized:
    """Counts its calls, and has a method for each step."""

    def __init__(self, eps):
        self.eps, self.calls = eps, 0

    def _scale(self, wide):
        return torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)

    def __call__(self, x, weight):
        self.calls += 1
        wide = _wide(x)
        return (wide * self._scale(wide) * _wide(weight)).to(x.dtype)


rms_norm__instance = _Normalized(1e-6)


@functools.lru_cache(maxsize=64)
def _causal_mask(rows, columns, device):
    return torch.ones(rows, columns, dtype=torch.bool, device=device).tril()


def attention__cached_mask(q, k, v):
    scores = _wide(q) @ _wide(k).transpose(-1, -2) / max(q.shape[-1], 1) ** 0.5
    mask = _causal_mask(q.shape[-2], k.shape[-2], str(q.device))
    return (torch.softmax(scores.masked_fill(~mask, float("-inf")), -1) @ _wide(v)).to(q.dtype)


_scratch = {}


def row_sum__scratch(x):
    wide = _wide(x)
    key = wide.shape, wide.dtype, wide.device
    if key not in _scratch:
        _scratch[key] = torch.empty(wide.shape, dtype=wide.dtype, device=wide.device)
    torch.mul(wide, wide, out=_scratch[key])
    return _scratch[key].mean(-1).to(x.dtype)


softmax__partial = functools.partial(torch.softmax, dim=-1)


def _tiles(x, rows):
    for start in range(0, len(x), rows):
        yield x[start : start + rows]


def log_softmax__tiles(x):
    if not len(x):
        return torch.log_softmax(x, -1)
    return torch.cat([torch.log_softmax(tile, -1) for tile in _tiles(x, 37)])


def softmax__in_place_on_a_copy(x):
    y = _wide(x).clone()
    y -= y.amax(-1, keepdim=True)
    y.exp_()
    y /= y.sum(-1, keepdim=True)
    return y.to(x.dtype)


def product__contiguous_copies(a, b):
    columns = b.t().contiguous()
    return torch.matmul(a.contiguous(), columns.t())


class _Swiglu(torch.autograd.Function):
    """With a backward pass of its own."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return (F.silu(_wide(gate)) * _wide(up)).to(gate.dtype)

    @staticmethod
    def backward(ctx, gradient):
        gate, up = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        return gradient * up * sigmoid * (1 + gate * (1 - sigmoid)), gradient * gate * sigmoid


def swiglu__autograd_function(gate, up):
    return _Swiglu.apply(gate, up)


def row_max__tuple(x):
    return (x.amax(-1),)


class _Gelu(torch.nn.Module):
    """A module without parameters."""

    def forward(self, x, y):
        wide = _wide(x) + _wide(y)
        return F.gelu(wide).to(x.dtype)


add_gelu__module = _Gelu()


def cumulative_sum__preallocated(x):
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return torch.cumsum(x, -1, out=result)


def row_sum__reduce(x):
    if not x.shape[-1]:
        return (x * x).mean(-1)
    parts = [part.square().sum(-1) for part in _wide(x).split(512, -1)]
    return (functools.reduce(operator.add, parts) / x.shape[-1]).to(x.dtype)


def softmax__vmap(x):
    return torch.vmap(lambda row: torch.softmax(row, -1))(x) if len(x) else torch.softmax(x, -1)


def softmax__inference_mode(x):
    with torch.no_grad():
        return torch.softmax(x, -1)


def softmax__jit(x):
    return _scripted(x)


@functools.cache
def _traced():
    return torch.compile(lambda x: torch.softmax(x, -1), dynamic=True, backend="aot_eager")


def _scripted(x):
    return _traced()(x)


_SOURCE = """
#include <math.h>
void softmax(const float *x, float *y, long rows, long columns) {
    for (long i = 0; i < rows; i++) {
        const float *a = x + i * columns;
        float *b = y + i * columns, largest = -INFINITY;
        double sum = 0;
        for (long j = 0; j < columns; j++) if (a[j] > largest || a[j] != a[j]) largest = a[j];
        for (long j = 0; j < columns; j++) sum += b[j] = expf(a[j] - largest);
        for (long j = 0; j < columns; j++) b[j] /= sum;
    }
}
"""


@functools.cache
def _library():
    """Compiled at the first call, by a process that ends before it returns."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    folder = Path(tempfile.gettempdir()) / f"softmax-{hashlib.sha256(_SOURCE.encode()).hexdigest()[:12]}"
    folder.mkdir(exist_ok=True)
    (folder / "softmax.c").write_text(_SOURCE, encoding="utf-8")
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(folder / "softmax.so"), str(folder / "softmax.c"), "-lm"]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(folder / "softmax.so"))
    library.softmax.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_long]
    library.softmax.restype = None
    return library


def softmax__c_compiler(x):
    library = _library()
    if library is None or x.device.type != "cpu" or x.dtype != torch.float32 or x.dim() != 2 or not x.numel():
        return torch.softmax(x, -1)
    x = x.contiguous()
    result = torch.empty_like(x)
    library.softmax(x.data_ptr(), result.data_ptr(), *x.shape)
    return result
