"""`modules_met_first`: modules that are called with other parameters are known by their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.utils import stateless

from nearpeak.capture.active import active_recorder
from nearpeak.capture.counted import Counted, replaced


@contextmanager
def _replaced() -> Iterator[None]:
    original = stateless._functional_call

    def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorder = active_recorder()
        if recorder is not None:
            recorder.modules.meet(module)
        return original(module, *args, **kwargs)

    with replaced(stateless, "_functional_call", call):
        yield


modules_met_first = Counted(_replaced)
"""Inside, a trace meets every module of a `functional_call` before its parameters are replaced.

Met later, it would be left with the replacements, which may be wrappers of a transform that has ended.
"""
