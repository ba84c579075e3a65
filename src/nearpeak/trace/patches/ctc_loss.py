"""The CTC loss in a trace: lengths as lists or as tensors, whichever torch's kernels take there.

In a live trace it runs as it does without one (`ctc_loss_by_lists`). Alone, torch reads lengths that lie in the host's
memory, and hands them to its kernels as lists. Under a dispatch mode it hands the tensors to other kernels instead;
those of a GPU refuse tensors of the host.

On fake tensors (`ctc_loss_by_tensors`), torch would write lists into the memory of a tensor that has none.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nearpeak.trace.patches.shared_patch import SharedPatch, patch_attribute
from nearpeak.trace.recorder import active_recorder


@SharedPatch
@contextmanager
def ctc_loss_by_lists() -> Iterator[None]:
    """Inside, calls that a trace records get lists of lengths in place of tensors of the host."""
    original = torch.ctc_loss

    @functools.wraps(original)
    def ctc_loss(
        log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *args: Any, **kwargs: Any
    ) -> Any:
        lengths: tuple[Any, ...] = (input_lengths, target_lengths)
        if not torch.compiler.is_compiling() and active_recorder() is not None and all(map(_of_host, lengths)):
            lengths = tuple(map(_as_list, lengths))
        return original(log_probs, targets, *lengths, *args, **kwargs)

    with patch_attribute(torch, "ctc_loss", ctc_loss):
        yield


@SharedPatch
@contextmanager
def ctc_loss_by_tensors() -> Iterator[None]:
    """Inside, calls that a trace records get tensors of the host in place of lists of lengths."""
    original = torch.ctc_loss

    @functools.wraps(original)
    def ctc_loss(
        log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *args: Any, **kwargs: Any
    ) -> Any:
        lengths: tuple[Any, ...] = (input_lengths, target_lengths)
        if active_recorder() is not None:
            lengths = tuple(torch.tensor(item) if isinstance(item, (list, tuple)) else item for item in lengths)
        return original(log_probs, targets, *lengths, *args, **kwargs)

    with patch_attribute(torch, "ctc_loss", ctc_loss):
        yield


def _of_host(lengths: Any) -> bool:
    return (
        type(lengths) is torch.Tensor
        and lengths.device.type == "cpu"
        and lengths.ndim <= 1
        and not lengths.is_floating_point()
    )


def _as_list(lengths: torch.Tensor) -> list[int]:
    with torch._C.DisableTorchFunction():
        values: Any = lengths.tolist()
    return values if lengths.ndim else [values]
