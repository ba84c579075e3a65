"""`preserve_process_state`: what belongs to the whole process is as before, whatever code did that ran in between.

Random generators, settings of torch, the environment: code that is measured or traced is run more often than its
author asked for, or in another way, and the caller must not notice.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


@contextmanager
def preserve_process_state() -> Iterator[None]:
    """At the end, also by an error, random generators, settings of torch and of Python, and the environment are as
    before."""
    values = [(setting, setting.read()) for setting in _SETTINGS]
    environment = dict(os.environ)
    with preserve_random_state():
        try:
            yield
        finally:
            for setting, value in values:
                if setting.read() != value:
                    setting.write(value)
            for name in [name for name in os.environ if name not in environment]:
                del os.environ[name]
            os.environ.update({name: text for name, text in environment.items() if os.environ.get(name) != text})


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """At the end, also by an error, the random generators are as before: Python's, torch's and NumPy's if it is used.

    Seeding inside is undone as well. Generators of GPUs are looked at if torch has initialized them.

    >>> before = torch.initial_seed(), random.getstate()
    >>> with preserve_random_state():
    ...     torch.manual_seed(3), random.seed(3)
    (<torch._C.Generator object at 0x...>, None)
    >>> (torch.initial_seed(), random.getstate()) == before
    True
    """
    numpy: Any = sys.modules.get("numpy.random")
    python_state = random.getstate()
    numpy_state = None if numpy is None else numpy.get_state()
    states = [(generator, generator.get_state()) for generator in _torch_generators()]
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.set_state(numpy_state)
        for generator, state in states:
            generator.set_state(state)
        known = {id(generator) for generator, _ in states}
        for generator in _torch_generators():
            if id(generator) not in known:  # of a GPU that was first used inside: nothing was drawn before
                generator.set_offset(0)


def _torch_generators() -> list[Any]:
    on_gpus = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [torch.default_generator, *on_gpus]


_SIGNAL_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGCHLD")


class _Setting(NamedTuple):
    """A setting of the process."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _torch_setting(read: str, write: str) -> list[_Setting]:
    """A setting by the names of torch's functions; none if this torch does not have them."""
    reader, writer = getattr(torch._C, read, None), getattr(torch._C, write, None)
    return [] if reader is None or writer is None else [_Setting(reader, writer)]


_FLAGS = """
    cudnn_enabled cudnn_benchmark cudnn_deterministic cublas_allow_fp16_reduced_precision_reduction
    cublas_allow_bf16_reduced_precision_reduction cublas_allow_fp16_accumulation mkldnn_enabled mkldnn_deterministic
    nnpack_enabled deterministic_fill_uninitialized_memory math_sdp_allow_fp16_bf16_reduction warnAlways
    cpu_allow_fp16_reduced_precision_reduction
""".split()
"""Settings that torch reads and writes by functions of these names after `_get_` and `_set_`."""
_PRECISIONS = [
    ("generic", "all"),
    *((library, op) for library in ("cuda", "mkldnn") for op in ("matmul", "conv", "rnn")),
]


def _matmul_precision() -> str | None:
    """torch's setting for all libraries; None while they differ in a way that has no name."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _set_matmul_precision(precision: str | None) -> None:
    if precision is not None:
        torch.set_float32_matmul_precision(precision)


def _precision_settings() -> list[_Setting]:
    read, write = (getattr(torch._C, f"_{verb}et_fp32_precision_{verb}etter", None) for verb in "gs")
    if read is None or write is None:  # before torch 2.9
        return [
            *_torch_setting("_get_cudnn_allow_tf32", "_set_cudnn_allow_tf32"),
            *_torch_setting("_get_cublas_allow_tf32", "_set_cublas_allow_tf32"),
        ]
    return [
        _Setting(functools.partial(read, library, op), functools.partial(write, library, op))
        for library, op in _PRECISIONS
    ]


def _autocast_settings(device: str) -> list[_Setting]:
    return [
        _Setting(
            functools.partial(torch.is_autocast_enabled, device), functools.partial(torch.set_autocast_enabled, device)
        ),
        _Setting(
            functools.partial(torch.get_autocast_dtype, device), functools.partial(torch.set_autocast_dtype, device)
        ),
    ]


def _default_device() -> Any:
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _set_warning_filters(filters: list[Any]) -> None:
    warnings.filters[:] = filters  # type: ignore[index]
    with warnings.catch_warnings():  # which tells Python that the filters have changed
        pass


def _set_streams(streams: tuple[Any, Any]) -> None:
    sys.stdout, sys.stderr = streams


def _gpu_stream() -> Any:
    """The current stream of the current GPU; None if torch has not initialized any."""
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None


def _set_gpu_stream(stream: Any) -> None:
    if stream is not None:
        torch.cuda.set_stream(stream)


def _signal_handlers() -> dict[int, Any]:
    """The handlers that Python code may have set; only the main thread can set them."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    return {number: handler for number, handler in handlers.items() if handler is not None}


def _set_signal_handlers(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)


_SIGNALS = [number for name in _SIGNAL_NAMES if (number := getattr(signal, name, None)) is not None]
_SETTINGS: list[_Setting] = [
    _Setting(torch.is_grad_enabled, torch._C._set_grad_enabled),
    _Setting(torch.get_default_dtype, torch.set_default_dtype),
    *(setting for name in _FLAGS for setting in _torch_setting(f"_get_{name}", f"_set_{name}")),
    *(
        setting
        for name in ("flash", "math", "mem_efficient", "cudnn")
        for setting in _torch_setting(f"_get_{name}_sdp_enabled", f"_set_sdp_use_{name}")
    ),
    _Setting(_matmul_precision, _set_matmul_precision),
    *_precision_settings(),  # after it, since it sets them too
    *(setting for device in ("cpu", "cuda") for setting in _autocast_settings(device)),
    _Setting(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    _Setting(torch.get_num_threads, torch.set_num_threads),
    _Setting(
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    _Setting(
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
    ),
    _Setting(_default_device, torch.set_default_device),
    _Setting(gc.isenabled, lambda enabled: gc.enable() if enabled else gc.disable()),
    _Setting(gc.get_threshold, lambda thresholds: gc.set_threshold(*thresholds)),
    _Setting(lambda: list(warnings.filters), _set_warning_filters),
    _Setting(lambda: (sys.stdout, sys.stderr), _set_streams),
    _Setting(sys.getrecursionlimit, sys.setrecursionlimit),
    _Setting(_gpu_stream, _set_gpu_stream),
    _Setting(_signal_handlers, _set_signal_handlers),
]
