"""Planted bugs in softmax: every function is wrong somewhere."""

import torch

REFERENCE = "softmax"


def no_maximum(x):
    e = x.exp()
    return e / e.sum(-1, keepdim=True)


def maximum_of_all(x):
    e = (x - x.max()).exp() if x.numel() else x
    return e / e.sum(-1, keepdim=True)


def last_column_left_out(x):
    y = torch.softmax(x, -1)
    if x.shape[-1] % 2 and x.shape[-1] > 1:
        y = torch.cat([torch.softmax(x[..., :-1], -1), torch.zeros_like(x[..., -1:])], -1)
    return y


def tail_of_block_unwritten(x):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    columns = x.shape[-1] // 32 * 32
    result = torch.softmax(x, -1)
    y[..., :columns] = result[..., :columns]
    return y if columns else result


def padding_counts(x):
    padding = -x.shape[-1] % 16
    return torch.softmax(torch.nn.functional.pad(x, (0, padding)), -1)[..., : x.shape[-1]].contiguous()


def rows_by_four(x):
    y = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    rows = x.shape[0] // 4 * 4 if x.shape[0] > 4 else x.shape[0]
    y[:rows] = torch.softmax(x[:rows], -1)
    return y


def assumes_contiguous(x):
    flat = torch.as_strided(x, x.shape, (x.shape[-1], 1), x.storage_offset()) if x.numel() and _fits(x) else x
    return torch.softmax(flat, -1)


def _fits(x):
    return x.untyped_storage().nbytes() // x.element_size() >= x.storage_offset() + x.numel()


def ignores_offset(x):
    flat = torch.as_strided(x, x.shape, x.stride(), 0) if x.numel() else x
    return torch.softmax(flat, -1)


def nan_becomes_zero(x):
    return torch.softmax(x, -1).nan_to_num(0.0)


def infinity_clamped(x):
    return torch.softmax(x.clamp(-1e4, 1e4), -1)


def half_accumulator(x):
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.half().cumsum(-1, dtype=torch.float16)[..., -1:].to(x.dtype)


def adds_epsilon(x):
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / (e.sum(-1, keepdim=True) + 1e-4)


def base_two(x):
    e = torch.exp2((x - x.amax(-1, keepdim=True)) * 1.44)
    return e / e.sum(-1, keepdim=True)


def columns_over_limit(x):
    y = torch.softmax(x, -1)
    if x.shape[-1] > 600:
        y[..., 600:] = torch.softmax(x[..., 600:], -1)
    return y


def in_place(x):
    return x.sub_(x.amax(-1, keepdim=True)).exp_().div_(x.sum(-1, keepdim=True))


def transposed_result(x):
    return torch.softmax(x, 0) if x.shape[0] == x.shape[-1] else torch.softmax(x, -1 if x.shape[0] > 1 else 0)
