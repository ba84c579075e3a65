"""What a program sees of itself, its process and torch, written to a file: run inside of every program of the corpus.

The program runs the text of this file in a dictionary of its own, and calls `look` where it ends; an `atexit` handler
looks once more. Everything that is needed later is bound at the start, since the program may replace it.
"""

from __future__ import annotations

import atexit
import builtins
import faulthandler
import gc
import hashlib
import io
import json
import logging
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
import threading
import tracemalloc
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn

FOLDER: str = globals()["FOLDER"]
"""Where to write to; set by the program before it runs this file."""

MOST = 60
DEEPEST = 4
MAIN = os.getpid()
STDOUT = sys.stdout
(OPEN, WRITE, CLOSE, LISTDIR, READLINK, GETPID) = os.open, os.write, os.close, os.listdir, os.readlink, os.getpid
DUMPS, REPR, SORTED, TYPE, LEN, STR = json.dumps, repr, sorted, type, len, str
notes: dict[str, Any] = {}
"""What the harness wants to know besides: how often a callable ran, why there is no profile."""


def fingerprint(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def tensor(value: torch.Tensor) -> Any:
    """Type, dtype, shape and content of a tensor; of one without storage the first three."""
    known: list[Any] = [TYPE(value).__name__]
    try:
        known += [STR(value.dtype), list(value.shape), value.requires_grad]
        plain = torch.Tensor.detach(value)
        if plain.device.type == "meta":
            known.append("meta")
        elif plain.layout != torch.strided or plain.is_quantized or plain.is_nested:
            buffer = io.BytesIO()
            torch.save(plain, buffer)
            known.append(LEN(buffer.getvalue()))
            known.append(REPR(plain)[:400])
        elif TYPE(plain) is torch.Tensor:
            known.append(fingerprint(plain.cpu().contiguous().view(torch.uint8).numpy().tobytes()))
        else:
            known.append(fingerprint(REPR(plain).encode()))
        gradient = value.grad if value.is_leaf else None
        if gradient is not None:
            known.append({"grad": tensor(gradient)})
    except Exception as error:
        known.append(TYPE(error).__name__)
    return known


def function_name(value: Any) -> str:
    function = getattr(value, "__func__", value)
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', TYPE(function).__name__)}"


def hooks(owner: Any) -> dict[str, Any]:
    return {
        name: [function_name(each) for each in value.values()]
        for name, value in SORTED(vars(owner).items())
        if "hook" in name and isinstance(value, dict) and value
    }


def module(value: nn.Module) -> Any:
    """Classes, attributes, hooks and state of a module and of all below it, found without its own methods."""
    parts: dict[str, Any] = {}
    below: list[tuple[str, nn.Module]] = [("", value)]
    while below:
        path, part = below.pop()
        if LEN(parts) > MOST:
            break
        inside = object.__getattribute__(part, "__dict__")
        parts[path] = {
            "class": TYPE(part).__qualname__,
            "attributes": SORTED(re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4,12}){4}", "_", STR(name)) for name in inside),
            "training": inside.get("training"),
            "hooks": hooks(part),
            "parameters": {
                name: tensor(each) for name, each in inside.get("_parameters", {}).items() if each is not None
            },
            "buffers": {name: tensor(each) for name, each in inside.get("_buffers", {}).items() if each is not None},
            "__call__ of the class": function_name(TYPE(part).__call__),
        }
        below += [(f"{path}.{name}", each) for name, each in inside.get("_modules", {}).items() if each is not None]
    return parts


def optimizer(value: torch.optim.Optimizer) -> Any:
    return {
        "attributes": SORTED(vars(value)),
        "hooks": hooks(value),
        "step": function_name(value.step),
        "state": digest([list(each.values()) for each in value.state.values() if isinstance(each, dict)], 1),
        "groups": digest(
            [{name: each for name, each in group.items() if name != "params"} for group in value.param_groups], 1
        ),
    }


def digest(value: Any, depth: int = 0) -> Any:
    """A value as JSON that is equal where the values are."""
    if value is None or isinstance(value, (bool, int, float, complex)):
        return REPR(value)
    if isinstance(value, str):
        return value[:200]
    if isinstance(value, bytes):
        return fingerprint(value)
    if isinstance(value, nn.Module):
        return module(value)
    if isinstance(value, torch.Tensor):
        return tensor(value)
    if isinstance(value, torch.optim.Optimizer):
        return optimizer(value)
    if isinstance(value, np.ndarray):
        return fingerprint(value.tobytes())
    if depth < DEEPEST and isinstance(value, dict):
        return {STR(key)[:60]: digest(each, depth + 1) for key, each in list(value.items())[:MOST]}
    if depth < DEEPEST and isinstance(value, (list, tuple)):
        return [digest(each, depth + 1) for each in list(value)[:MOST]]
    if depth < DEEPEST and TYPE(value).__module__ in ("__main__", "__mp_main__") and not isinstance(value, TYPE):
        return {TYPE(value).__qualname__: digest(getattr(value, "__dict__", {}), depth + 1)}
    return TYPE(value).__qualname__


def random_states() -> dict[str, Any]:
    return {
        # Python seeds it anew in a fork
        "python": fingerprint(REPR(random.getstate()).encode()) if GETPID() == MAIN else None,
        "numpy": fingerprint(REPR(np.random.get_state(legacy=False)).encode()),
        "torch": fingerprint(torch.default_generator.get_state().cpu().numpy().tobytes()),
    }


def torch_settings() -> dict[str, Any]:
    global_hooks, optimizers = nn.modules.module, sys.modules["torch.optim.optimizer"]
    dynamo = sys.modules.get("torch._dynamo.callback")
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": [torch.is_autocast_enabled("cpu"), STR(torch.get_autocast_dtype("cpu"))],
        "dtype": STR(torch.get_default_dtype()),
        "device": STR(torch.get_default_device()),
        "deterministic": [
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ],
        "anomaly": torch.is_anomaly_enabled(),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "precision": torch.get_float32_matmul_precision(),
        "flush denormal": (torch.tensor([1e-40]) * 1).item() if torch.get_default_device().type == "cpu" else None,
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "profiler": torch._C._autograd._profiler_enabled(),
        "multithreading": torch.autograd.is_multithreading_enabled(),
        "sdp": [torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()],
        "mha fastpath": torch.backends.mha.get_fastpath_enabled(),
        "mkldnn": torch.backends.mkldnn.flags.__module__ and torch._C._get_mkldnn_enabled(),
        "global hooks": {
            name: LEN(value)
            for name, value in SORTED(vars(global_hooks).items())
            if name.startswith("_global") and isinstance(value, dict)
        },
        "optimizer hooks": [
            LEN(optimizers._global_optimizer_pre_hooks),
            LEN(optimizers._global_optimizer_post_hooks),
        ],
        "nn.Module.__call__": function_name(nn.Module.__call__),
        "Optimizer.__init__": function_name(torch.optim.Optimizer.__init__),
        "Tensor.backward": function_name(torch.Tensor.backward),
        "autograd.backward": function_name(torch.autograd.backward),
        "compile callbacks": None
        if dynamo is None
        else [
            LEN(dynamo.callback_handler.start_callbacks),
            LEN(dynamo.callback_handler.end_callbacks),
        ],
    }


def process_state() -> dict[str, Any]:
    mask = os.umask(0)
    os.umask(mask)
    try:
        folder = os.getcwd()  # noqa: PTH109 - bound before the program changes anything
    except OSError as error:
        folder = TYPE(error).__name__
    descriptors = {}
    for number in LISTDIR("/proc/self/fd"):
        try:
            target = READLINK(f"/proc/self/fd/{number}")
        except OSError:
            continue  # the one that listed them
        target = re.sub(r"^(\w+:)\[\d+\]|^(/dev/shm/\w+?_)[\w.-]+", r"\1\2", target)  # numbers by chance
        if not target.startswith(
            "/dev/nvidia"
        ):  # torch's profiler opens the GPU, also for a program that does not use it
            descriptors[number] = target
    handlers = {}
    for number in SORTED(signal.valid_signals()):
        handler = signal.getsignal(number)
        handlers[int(number)] = function_name(handler) if callable(handler) else REPR(handler)
    return {
        "environment": dict(os.environ),
        "folder": folder,
        "umask": mask,
        "descriptors": descriptors,
        "signals": handlers,
        "blocked signals": SORTED(int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "wakeup descriptor": signal.set_wakeup_fd(-1)
        if threading.current_thread() is threading.main_thread()
        else None,
        "timers": [
            signal.getitimer(which)[1] for which in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
        ],
        "limits": {
            name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")
        },
        "children": LEN(multiprocessing.active_children()),
        "nice": os.nice(0),
        "affinity": LEN(os.sched_getaffinity(0)),
    }


def interpreter_state() -> dict[str, Any]:
    return {
        "argv": list(sys.argv),
        "path": list(sys.path),
        "flags": STR(sys.flags),
        "main": [getattr(sys.modules.get("__main__"), name, None) for name in ("__name__", "__package__")],
        "main is this": sys.modules.get("__main__") is not None
        and vars(sys.modules["__main__"]) is notes.get("globals"),
        "hooks": {
            name: function_name(getattr(sys, name))
            for name in ("excepthook", "displayhook", "unraisablehook", "breakpointhook")
        },
        "thread hook": function_name(threading.excepthook),
        "streams": [TYPE(stream).__qualname__ for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "streams closed": [getattr(stream, "closed", None) for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "trace": [function_name(sys.gettrace()), function_name(sys.getprofile()), function_name(threading.gettrace())],
        "monitoring": [sys.monitoring.get_tool(number) for number in range(6)] if hasattr(sys, "monitoring") else None,
        "recursion": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "threads": SORTED(thread.name for thread in threading.enumerate()),
        "filters": [REPR(each) for each in warnings.filters],
        "showwarning": function_name(warnings.showwarning),
        "logging": [
            logging.root.level,
            [TYPE(each).__name__ for each in logging.root.handlers],
            logging.root.manager.disable,
        ],
        "gc": [
            gc.isenabled(),
            gc.get_threshold(),
            gc.get_debug(),
            [function_name(each) for each in gc.callbacks],
            gc.get_freeze_count() > 0,
        ],
        "builtins": {
            name: function_name(each) for name, each in vars(builtins).items() if isinstance(each, FunctionType)
        },
        "start method": multiprocessing.get_start_method(allow_none=True),
        "faulthandler": faulthandler.is_enabled(),
        "tracemalloc": tracemalloc.is_tracing(),
        "number limit": sys.get_int_max_str_digits(),
    }


SECTIONS = {
    "random": random_states,
    "torch": torch_settings,
    "process": process_state,
    "interpreter": interpreter_state,
}


def look(moment: str, variables: dict[str, Any] | None = None) -> None:
    """Writes the state of now as `<who>.<moment>.json`. A section that cannot be read is its error."""
    role = "main" if GETPID() == MAIN else f"child-{GETPID()}"
    if variables is not None:
        notes["globals"] = variables
    state: dict[str, Any] = {}
    for name, section in SECTIONS.items():  # random numbers first: nothing here draws any
        try:
            state[name] = section()
        except Exception as error:
            state[name] = f"{TYPE(error).__name__}: {error}"
    with torch.no_grad():
        state["results"] = {
            name: digest(value)
            for name, value in SORTED((variables or notes.get("globals") or {}).items())
            if not name.startswith("_") and TYPE(value).__name__ not in ("module", "function", "type")
        }
    state["notes"] = {name: value for name, value in notes.items() if name != "globals"}
    descriptor = OPEN(f"{FOLDER}/{role}.{moment}.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    WRITE(descriptor, DUMPS(state, default=REPR, sort_keys=True).encode())
    CLOSE(descriptor)


def attempt(name: str, function: Callable[[], Any]) -> None:
    """Calls a function of nearpeak, and notes whether it gave a result or said why there is none."""
    from nearpeak.errors import NearpeakError

    try:
        function()
    except NearpeakError as error:
        notes[name] = f"{TYPE(error).__name__}: {error}"
    else:
        notes[name] = "a result"


def repeat(step: Callable[[], Any], count: int) -> None:
    """What `profile_callable` does with a step, without it."""
    for _ in range(count):
        step()


def profile_callable(step: Callable[[], Any], on: str | None) -> None:
    """Profiles a step as a callable, and notes how often it ran."""
    import nearpeak

    notes["calls"] = 0

    def counted() -> Any:
        notes["calls"] += 1
        return step()

    attempt("profile", lambda: nearpeak.profile(counted, on=on))


atexit.register(look, "exit")
