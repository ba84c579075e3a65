"""`marking_loaders`: batches of data loaders as ranges that name the user's line, in what torch's profiler records."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd.profiler import record_function

from nearpeak.capture.kineto.host import INPUT, MARKED_AT
from nearpeak.capture.source import user_line


@contextmanager
def marking_loaders() -> Iterator[None]:
    """Inside, each batch that a DataLoader gives is a range around torch's own one, with the line that asked for it."""
    module = sys.modules.get("torch.utils.data.dataloader")
    if module is None:  # then nobody has a loader
        yield
        return
    loader_iterator: Any = module._BaseDataLoaderIter
    original = loader_iterator.__next__

    def marked(self: Any) -> Any:
        line = user_line(sys._getframe(1))[0]
        with record_function(f"{INPUT}{type(self).__name__}.__next__" + (f"{MARKED_AT}{line}" if line else "")):
            return original(self)

    loader_iterator.__next__ = marked
    try:
        yield
    finally:
        loader_iterator.__next__ = original
