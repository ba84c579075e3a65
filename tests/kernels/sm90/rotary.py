"""Launches of rotations to compile."""

import torch

from nearpeak.kernels.rotary import triton as rotary_triton


def launches():
    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype)

    for size in (64, 128):
        q, k, table = empty(2, 256, 32, size), empty(2, 256, 8, size), empty(256, size // 2, dtype=torch.float32)
        yield (
            f"q and k of {size}",
            lambda q=q, k=k, table=table: rotary_triton.forward_pair(
                q, k, table, table, None, False, False, False, q.shape[-1]
            ),
        )
    config = rotary_triton.RotaryConfig(tokens=4, heads=4, warps=4)
    yield (
        "q and k of 128 in one program",
        lambda: rotary_triton.forward_pair(q, k, table, table, None, False, False, False, 128, config=config),
    )
    yield "interleaved", lambda: rotary_triton.forward(q, table, table, None, True, False, False, 128)
    yield "part of a head", lambda: rotary_triton.forward(q, table[:, :16], table[:, :16], None, False, True, False, 32)
    angles, where = empty(2, 256, 128), torch.arange(256)
    yield "heads first", lambda: rotary_triton.forward(q.transpose(1, 2), angles, angles, None, False, False, True, 128)
    yield "in place, by position", lambda: rotary_triton.in_place([q, k], table, table, where, False, False, 128)
    eighths, pairs = empty(2, 256, 16, 72), empty(256, 36, dtype=torch.float32)
    yield "heads of 72", lambda: rotary_triton.forward(eighths, pairs, pairs, None, True, False, False, 72)
    yield "float32", lambda: rotary_triton.forward(q.float(), table, table, None, False, False, False, 128)
