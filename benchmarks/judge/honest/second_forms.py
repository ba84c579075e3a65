"""More honest candidates of unusual form: other algorithms, other libraries, and habits of ordinary programs."""

import concurrent.futures
import gc
import logging
import threading
import time
import warnings

import torch
from torch.nn import functional as F  # noqa: N812


def _wide(x):
    return x if x.dtype == torch.float64 else x.float()


def product__strassen(a, b):
    """One level of Strassen's seven products, in float64; odd sizes are padded."""
    rows, depth, columns = (size + size % 2 for size in (*a.shape, b.shape[1]))
    if not (rows and depth and columns and a.isfinite().all() and b.isfinite().all()):
        return a @ b  # the differences of blocks would spread what is not finite
    x = F.pad(a.double(), (0, depth - a.shape[1], 0, rows - a.shape[0]))
    y = F.pad(b.double(), (0, columns - b.shape[1], 0, depth - b.shape[0]))
    (a11, a12), (a21, a22) = (part.chunk(2, 1) for part in x.chunk(2, 0))
    (b11, b12), (b21, b22) = (part.chunk(2, 1) for part in y.chunk(2, 0))
    m1, m2, m3 = (a11 + a22) @ (b11 + b22), (a21 + a22) @ b11, a11 @ (b12 - b22)
    m4, m5, m6, m7 = a22 @ (b21 - b11), (a11 + a12) @ b22, (a21 - a11) @ (b11 + b12), (a12 - a22) @ (b21 + b22)
    top = torch.cat((m1 + m4 - m5 + m7, m3 + m5), 1)
    bottom = torch.cat((m2 + m4, m1 - m2 + m3 + m6), 1)
    return torch.cat((top, bottom))[: a.shape[0], : b.shape[1]].to(a.dtype).contiguous()


def softmax__online(x):
    """The maximum and the sum in one pass over blocks of columns, as in fused attention."""
    if not x.numel():
        return torch.softmax(x, -1)
    wide = _wide(x)
    largest = torch.full_like(wide[..., :1], float("-inf"))
    total = torch.zeros_like(largest)
    for block in wide.split(300, -1):
        new = torch.maximum(largest, block.amax(-1, keepdim=True))
        keep = torch.where(largest == new, torch.ones_like(new), (largest - new).exp())
        total = total * keep + torch.where(new.isneginf(), 0.0, (block - new).exp()).sum(-1, keepdim=True)
        largest = new
    return ((wide - largest).exp() / total).to(x.dtype)


_pool = concurrent.futures.ThreadPoolExecutor(2)


def row_sum__threads(x):
    """Threads that stay, and that each call waits for."""
    parts = x.tensor_split(4) if len(x) >= 4 else [x]
    stream = torch.cuda.current_stream() if x.is_cuda else None

    def part_of(part):
        with torch.cuda.stream(stream) if stream is not None else torch.no_grad():
            wide = _wide(part)
            return ((wide * wide).mean(-1)).to(x.dtype)

    return torch.cat(list(_pool.map(part_of, parts)))


def matmul__numpy(a, b, bias):
    """NumPy multiplies, where it can."""
    if a.is_cuda or a.dtype not in (torch.float32, torch.float64):
        return F.gelu(a @ b + bias)
    return F.gelu(torch.from_numpy(a.detach().numpy() @ b.detach().numpy()) + bias)


def attention__online(q, k, v):
    """Blocks of keys with a running maximum."""
    wide, scale = _wide(q), 1 / max(q.shape[-1], 1) ** 0.5
    largest = wide.new_full((*q.shape[:-1], 1), float("-inf"))
    total, result = torch.zeros_like(largest), wide.new_zeros((*q.shape[:-1], v.shape[-1]))
    rows = torch.arange(q.shape[-2], device=q.device)[:, None]
    for start in range(0, k.shape[-2], 48):
        keys = _wide(k[..., start : start + 48, :])
        columns = torch.arange(start, start + keys.shape[-2], device=q.device)
        scores = (wide @ keys.transpose(-1, -2) * scale).masked_fill(columns > rows, float("-inf"))
        new = torch.maximum(largest, scores.amax(-1, keepdim=True))
        safe = torch.where(new.isneginf(), 0.0, new)
        weights, keep = (scores - safe).exp(), (largest - safe).exp()
        total = total * keep + weights.sum(-1, keepdim=True)
        result = result * keep + weights @ _wide(v[..., start : start + 48, :])
        largest = new
    return (result / total).to(q.dtype)


_log = logging.getLogger("kernel")
_log.addHandler(logging.NullHandler())
_log.setLevel(logging.DEBUG)
_seconds = []
_lock = threading.Lock()


def rms_norm__telemetry(x, weight):
    """Takes its own times, and logs and warns as services do."""
    start = time.perf_counter()
    with torch.profiler.record_function("rms_norm"), _lock:
        wide = _wide(x)
        result = (F.rms_norm(wide, (x.shape[-1],), _wide(weight), eps=1e-6)).to(x.dtype)
    _seconds.append(time.perf_counter() - start)
    del _seconds[:-100]
    _log.info("rms_norm of %s in %.0f us", tuple(x.shape), 1e6 * _seconds[-1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.warn("rms_norm is experimental", stacklevel=2)
    return result


def cumulative_sum__doubling(x):
    """Hillis and Steele: steps of one, two, four elements."""
    total, step = _wide(x).clone(), 1
    while step < x.shape[-1]:
        total = torch.cat((total[..., :step], total[..., step:] + total[..., :-step]), -1)
        step *= 2
    return total.to(x.dtype)


@torch.library.custom_op("second_forms::add_gelu", mutates_args=())
def _add_gelu(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.gelu(x + y)


def add_gelu__custom_op(x, y):
    """An operator of its own in torch's dispatcher."""
    return _add_gelu(x, y)


def layer_norm__merged(x, weight, bias):
    """Means and squares of blocks, merged as Chan does."""
    wide = _wide(x)
    count, mean, squares = 0, torch.zeros_like(wide[..., :1]), torch.zeros_like(wide[..., :1])
    for block in wide.split(200, -1):
        size = block.shape[-1]
        if not size:
            continue
        own = block.mean(-1, keepdim=True)
        delta = own - mean
        squares = (
            squares + (block - own).square().sum(-1, keepdim=True) + delta.square() * count * size / (count + size)
        )
        mean = mean + delta * size / (count + size)
        count += size
    return ((wide - mean) * torch.rsqrt(squares / max(count, 1) + 1e-5) * _wide(weight) + _wide(bias)).to(x.dtype)


def transpose__tiles(x):
    """Tile by tile into memory of its own."""
    result = torch.empty((*x.shape[:-2], x.shape[-1], x.shape[-2]), dtype=x.dtype, device=x.device)
    for row in range(0, x.shape[-2], 96):
        for column in range(0, x.shape[-1], 96):
            tile = x[..., row : row + 96, column : column + 96]
            result[..., column : column + 96, row : row + 96] = tile.transpose(-1, -2)
    return result


def row_max__tournament(x):
    """Pairs, pairs of pairs, and so on."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        winners = torch.maximum(x[..., :half], x[..., half : 2 * half])
        x = torch.cat((winners, x[..., 2 * half :]), -1) if x.shape[-1] % 2 else winners
    return x[..., 0].clone()


_calls = 0


def swiglu__collector(gate, up):
    """Collects garbage now and then, as programs that run for long do."""
    global _calls
    _calls += 1
    if _calls % 50 == 0:
        gc.collect()
    return (F.silu(_wide(gate)) * _wide(up)).to(gate.dtype)
