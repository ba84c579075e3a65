"""`tf32`: torch's flags for the precision of float32 products."""

from __future__ import annotations

from collections.abc import Callable

import torch


def _tf32_reader() -> Callable[[], tuple[bool, bool]]:
    read: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)
    if read is None:
        return lambda: (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    return lambda: (read("cuda", "matmul") == "tf32", read("cuda", "conv") == "tf32")


tf32 = _tf32_reader()
"""Whether float32 matrix products and convolutions run in tf32, by torch's flags now."""
