"""What `torch.func` wraps tensors in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor below the wrappers of `grad`, `vmap` and `jvp`: it has the memory."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


@contextmanager
def below_transforms() -> Iterator[None]:
    """Inside, tensors are made and converted as if no transform ran: else they come out wrapped."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        yield
        return
    with temporarily_clear_interpreter_stack():
        yield
