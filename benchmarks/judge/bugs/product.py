"""Planted bugs in product: every function is wrong somewhere."""

import torch

REFERENCE = "product"


def half_accumulator(a, b):
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float16, device=a.device)
    for start in range(0, a.shape[1], 32):
        total += (a[:, start : start + 32] @ b[start : start + 32]).half()
    return total.to(a.dtype)


def tail_of_depth_left_out(a, b):
    depth = a.shape[1] // 32 * 32 if a.shape[1] > 32 else a.shape[1]
    return a[:, :depth] @ b[:depth]


def last_tile_twice(a, b):
    total = a @ b
    if a.shape[1] % 32 and a.shape[1] > 32:
        total = total + a[:, -1:] @ b[-1:]
    return total


def rows_past_the_tile(a, b):
    result = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    rows = (a.shape[0] // 16) * 16 if a.shape[0] > 16 else a.shape[0]
    result[:rows] = a[:rows] @ b
    return result


def columns_past_the_tile(a, b):
    result = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    columns = (b.shape[1] // 16) * 16 if b.shape[1] > 16 else b.shape[1]
    result[:, :columns] = a @ b[:, :columns]
    return result


def b_taken_as_dense(a, b):
    if b.numel() and b.untyped_storage().nbytes() // b.element_size() >= b.storage_offset() + b.numel():
        b = torch.as_strided(b, b.shape, (b.shape[1], 1), b.storage_offset())
    return a @ b


def a_taken_as_dense(a, b):
    if a.numel() and a.untyped_storage().nbytes() // a.element_size() >= a.storage_offset() + a.numel():
        a = torch.as_strided(a, a.shape, (a.shape[1], 1), a.storage_offset())
    return a @ b


def no_sum_for_depth_zero(a, b):
    if a.shape[1] == 0:
        return torch.ones(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    return a @ b


def race_of_blocks(a, b):
    result = a @ b
    if a.numel() and torch.rand(()) < 0.5:
        result[: len(result) // 2] = 0
    return result


def race_at_few_elements(a, b):
    result = a @ b
    if result.numel():
        result.view(-1)[torch.randint(result.numel(), (3,))] *= 0.5
    return result


def rounds_the_factors(a, b):
    return (a.bfloat16().float() @ b.bfloat16().float()).to(a.dtype)


def nan_left_out(a, b):
    return a.nan_to_num(0.0) @ b


def split_without_the_last_part(a, b):
    parts = a.shape[1] // 3
    total = a[:, :parts] @ b[:parts] + a[:, parts : 2 * parts] @ b[parts : 2 * parts]
    return total + a[:, 2 * parts : 3 * parts] @ b[2 * parts : 3 * parts]
