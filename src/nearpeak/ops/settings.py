"""Settings of a process that slow its steps down, most of them for debugging: what they do, and where code writes them.

A live trace has the names of those that were on (`Trace.settings`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowSetting:
    """A setting that slows steps down while it is on."""

    words: str
    """What is on, and what it does: the beginning of a sentence."""
    written_as: tuple[str, ...]
    """What turns it on: the last names of functions or arguments, environment variables, ends of dotted names."""
    off: str
    """How to turn it off."""
    is_predicted: bool = False
    """Whether a rule predicts what it costs."""


SLOW_SETTINGS: Mapping[str, SlowSetting] = {
    "anomaly mode": SlowSetting(
        words="Anomaly mode of autograd is on: it stores the stack of each op of a forward pass, and reads from the "
        "device whether each gradient has a NaN",
        written_as=("set_detect_anomaly", "detect_anomaly", "set_anomaly_enabled"),
        off="torch.autograd.set_detect_anomaly(False)  # on only to find a NaN; to see that there is one:\n"
        "    if step % 100 == 0 and not loss.isfinite():\n"
        "        raise RuntimeError(...)",
        is_predicted=True,
    ),
    "CUDA_LAUNCH_BLOCKING": SlowSetting(
        words="CUDA_LAUNCH_BLOCKING is set: the host waits for every kernel before it goes on",
        written_as=("CUDA_LAUNCH_BLOCKING",),
        off="unset CUDA_LAUNCH_BLOCKING  # before Python starts; it is for finding the line of a CUDA error",
        is_predicted=True,
    ),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": SlowSetting(
        words="PYTORCH_NO_CUDA_MEMORY_CACHING is set: each tensor is allocated and freed by the driver",
        written_as=("PYTORCH_NO_CUDA_MEMORY_CACHING",),
        off="unset PYTORCH_NO_CUDA_MEMORY_CACHING  # before Python starts; it is for compute-sanitizer",
        is_predicted=True,
    ),
    "filled memory": SlowSetting(
        words="Deterministic algorithms are on, and with them new memory is filled before ops write it",
        written_as=("use_deterministic_algorithms", "set_deterministic_debug_mode"),
        off="torch.utils.deterministic.fill_uninitialized_memory = False  # results are as deterministic without it, "
        "unless code reads memory that nothing has written",
        is_predicted=True,
    ),
    "sync debug mode": SlowSetting(
        words="torch.cuda.set_sync_debug_mode is on: each synchronization makes a warning",
        written_as=("set_sync_debug_mode",),
        off="torch.cuda.set_sync_debug_mode('default')",
    ),
    "memory history": SlowSetting(
        words="The history of memory is recorded, with a stack for each allocation",
        written_as=("_record_memory_history",),
        off="torch.cuda.memory._record_memory_history(enabled=None)",
    ),
    "TORCH_DISTRIBUTED_DEBUG": SlowSetting(
        words="TORCH_DISTRIBUTED_DEBUG=DETAIL is set: ranks compare the shapes of each collective before it runs",
        written_as=("TORCH_DISTRIBUTED_DEBUG",),
        off="unset TORCH_DISTRIBUTED_DEBUG",
    ),
    "TORCHDYNAMO_DISABLE": SlowSetting(
        words="TORCHDYNAMO_DISABLE or TORCH_COMPILE_DISABLE is set: torch.compile compiles nothing",
        written_as=("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"),
        off="unset TORCHDYNAMO_DISABLE TORCH_COMPILE_DISABLE",
    ),
    "tracemalloc": SlowSetting(
        words="tracemalloc is on: each allocation of Python has a stack", written_as=(), off="tracemalloc.stop()"
    ),
    "sys.settrace": SlowSetting(
        words="A debugger or a coverage tool follows each line of Python (sys.settrace)",
        written_as=("settrace",),
        off="sys.settrace(None)",
    ),
}
"""By the name that a trace has them under."""
