"""`uncompiled`: inside a trace, what `torch.compile` gave runs the ops that it was given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo import eval_frame
from torch._dynamo.backends.debugging import eager

from nearpeak.capture.counted import Counted, Since, Tally, replaced

_asked = Tally()
"""How often something compiled was called, and ran uncompiled."""


@contextmanager
def uncompiled() -> Iterator[Since]:
    """Compiled functions and modules run their Python code instead, on all threads.

    A compiled graph runs kernels that no dispatcher sees, and on fake tensors it would read memory that is not there.
    """
    with _eager():
        yield _asked.since()


@contextmanager
def _without_dynamo() -> Iterator[None]:
    chosen = eval_frame._callback_from_stance

    def counted(callback: Any) -> Any:
        if callable(callback) and not _for_eager(callback):
            _asked.times += 1
        return chosen(callback)

    with (
        torch.compiler.set_stance("force_eager"),
        replaced(eval_frame, "_callback_from_stance", counted),
    ):
        yield


_eager = Counted(_without_dynamo)


def _for_eager(callback: Any) -> bool:
    """Whether nothing is compiled: torch's own functions call themselves so, as `cond` and flex attention do."""
    backend = eval_frame.innermost_backend(callback)
    return getattr(backend, "compiler_name", None) == "eager" or backend.__module__ == eager.__module__
