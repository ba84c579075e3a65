"""`tf32`: torch's flags for the precision of float32 products."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import torch

from nearpeak.work.op import Op


def _tf32_reader() -> Callable[[], tuple[bool, bool]]:
    read: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)
    if read is None:
        return lambda: (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    return lambda: (read("cuda", "matmul") == "tf32", read("cuda", "conv") == "tf32")


tf32 = _tf32_reader()
"""Whether float32 matrix products and convolutions run in tf32, by torch's flags now."""


def without_tf32(ops: Iterable[Op]) -> tuple[Op, ...]:
    """The same ops on a CPU, where these flags mean nothing."""
    return tuple(
        dataclasses.replace(op, tf32_products=False, tf32_convolutions=False)
        if op.tf32_products or op.tf32_convolutions
        else op
        for op in ops
    )
