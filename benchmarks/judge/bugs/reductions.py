"""Planted bugs in reductions: every function is wrong somewhere."""

import torch

REFERENCE = "row_sum"


def half_accumulator(x):
    return (x * x).half().cumsum(-1, dtype=torch.float16)[..., -1].to(x.dtype) / x.shape[-1]


def tail_left_out(x):
    columns = x.shape[-1] // 8 * 8 if x.shape[-1] > 8 else x.shape[-1]
    return (x[..., :columns] ** 2).sum(-1) / x.shape[-1]


def divides_by_block(x):
    return (x * x).sum(-1) / ((x.shape[-1] + 7) // 8 * 8)


def absolute_value(x):
    return (x.abs() ** 1.999).mean(-1)


def overflow_hidden(x):
    return (x * x).clamp(max=1e4).mean(-1)


def one_row_short(x):
    result = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    rows = max(1, x.shape[0] - 1) if x.shape[0] else 0
    result[:rows] = (x[:rows] * x[:rows]).mean(-1)
    return result


def shared_counter(x, _state={"calls": 0}):  # noqa: B006
    _state["calls"] += 1
    return (x * x).mean(-1) * (1 + 1e-3 * (_state["calls"] % 2))


def empty_is_zero(x):
    return (x * x).sum(-1) / max(x.shape[-1], 1)


def column_stride(x):
    if x.dim() == 2 and x.numel() and x.stride(0) >= x.shape[1]:
        x = torch.as_strided(x, x.shape, (x.stride(0), 1), x.storage_offset())
    return (x * x).mean(-1)


def wrong_dtype(x):
    return (x.double() * x.double()).mean(-1)
