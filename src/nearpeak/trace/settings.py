"""`SettingsWatch`: which settings were on in a live trace that slow steps down, and what one of them costs the host."""

from __future__ import annotations

import os
import sys
import time
import traceback
from statistics import median
from types import CodeType, FrameType
from typing import Any

import torch


class SettingsWatch:
    """Is told of each op of a live trace."""

    def __init__(self, dispatch_code: CodeType) -> None:
        self._dispatch_code = dispatch_code
        """Of the function in which ops arrive: what called it is the program's."""
        self._anomaly_mode = False
        self._leaves: set[int] = set()
        """Tensors whose gradients are accumulated in the graph of this step, by id."""
        self._new_leaves = 0
        self.graph_nodes: dict[int, int] = {}
        """How many nodes of autograd's graph were made in anomaly mode, by the index of their op."""
        self._stack_seconds: list[float] = []

    def note_arguments(self, args: tuple[Any, ...]) -> None:
        """An op is about to run. For a leaf that the graph meets, it gets a node of its own, which has no number."""
        if torch.is_anomaly_enabled() and torch.is_grad_enabled():
            for value in args:
                if isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf:
                    self._new_leaves += id(value) not in self._leaves
                    self._leaves.add(id(value))

    def note_op(self, index: int, nodes: int) -> None:
        """An op has run, for which so many nodes of autograd's graph were made."""
        if not torch.is_anomaly_enabled():
            return
        self._anomaly_mode = True
        nodes, self._new_leaves = nodes + self._new_leaves, 0
        if nodes > 0:
            self.graph_nodes[index] = nodes
            self._stack_seconds.append(_stack_seconds(self._dispatch_code))

    @property
    def stack_s(self) -> float:
        """The time of one stack."""
        return median(self._stack_seconds) if self._stack_seconds else 0.0

    def names(self) -> tuple[str, ...]:
        """The settings that are on, as `SLOW_SETTINGS` names them."""
        return tuple(name for name, is_on in self._are_on().items() if is_on)

    def _are_on(self) -> dict[str, bool]:
        environment = os.environ
        cuda = torch.cuda.is_initialized()
        tracemalloc: Any = sys.modules.get("tracemalloc")
        deterministic: Any = sys.modules.get("torch.utils.deterministic")
        return {
            "anomaly mode": self._anomaly_mode,
            "CUDA_LAUNCH_BLOCKING": cuda and environment.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"),
            "PYTORCH_NO_CUDA_MEMORY_CACHING": cuda and "PYTORCH_NO_CUDA_MEMORY_CACHING" in environment,
            "filled memory": torch.are_deterministic_algorithms_enabled()
            and bool(getattr(deterministic, "fill_uninitialized_memory", True)),
            "sync debug mode": cuda and torch.cuda.get_sync_debug_mode() > 0,
            "memory history": cuda and bool(getattr(torch._C, "_cuda_isHistoryEnabled", bool)()),
            "TORCH_DISTRIBUTED_DEBUG": environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"
            and torch.distributed.is_available()
            and torch.distributed.is_initialized(),
            "TORCHDYNAMO_DISABLE": any(
                environment.get(name) == "1" for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
            ),
            "tracemalloc": tracemalloc is not None and bool(tracemalloc.is_tracing()),
            "sys.settrace": sys.gettrace() is not None,
        }


def _stack_seconds(dispatch_code: CodeType) -> float:
    """The time of a stack with the files' lines, as torch stores it for each node in anomaly mode."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not dispatch_code:
        frame = frame.f_back
    begin = time.perf_counter()
    traceback.format_stack(None if frame is None else frame.f_back)
    return time.perf_counter() - begin
