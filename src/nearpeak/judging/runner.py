"""The process of a candidate: it imports the candidate, calls it when the judge says so, and writes results to files.

The judge trusts nothing that comes from here further than it can check: results are compared in its own process, times
against its own clock. Everything that this file uses is looked up before the candidate is imported, and compared with
what is there afterwards; an audit hook, which cannot be removed, sees files that the candidate opens.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import functools
import gc
import json
import math
import os
import random
import re
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NoReturn

import torch
from torch.utils._device import DeviceContext

from nearpeak.devices.backends import gpu_backend
from nearpeak.judging import channel, exchange
from nearpeak.judging.channel import RUNS, write_message
from nearpeak.judging.exchange import bytes_of, map_tensors, read_tensors, rescaled, tensors_in, write_tensors
from nearpeak.judging.models import is_model, make_module, model_like
from nearpeak.measure import case as case_files
from nearpeak.measure import gpu, instrument, kernel_times, samplers, statistics
from nearpeak.measure.bench import quiet_collector
from nearpeak.measure.case import describe_error
from nearpeak.measure.gpu import GpuInstrument, Stage, gpu_instrument
from nearpeak.measure.kernel_times import profile_calls
from nearpeak.measure.samplers import EventSampler, HostEviction, HostSampler

POISON = 0x7F
"""Fills memory that nobody wrote: a huge number in float32 and bfloat16, NaN in float16."""
M_PERTURB = -6
"""Of glibc's mallopt: fills memory when it is allocated."""
PR_SET_CHILD_SUBREAPER = 36
ESCAPE_WAIT_S = 0.03
LARGEST_BLOCK_BYTES = 512 << 20
PROBE_CALLS = 7
INSPECT_EVERY_S = 0.1
"""The least time between two looks at all functions of torch, which take some milliseconds."""
OUTSIDE = "outside of torch's operators"
"""The time of a call on a CPU in which none of them ran."""

_clock = time.perf_counter
_processor_clock = time.process_time
_sleep = time.sleep
_equal = torch.equal
_clone = torch.Tensor.clone


class Guard:
    """What the candidate must leave alone, and what it was seen to do."""

    def __init__(self, folder: Path, reference: str, candidate: str) -> None:
        self.folder, self.candidate = str(folder.resolve()), candidate
        self.reference = reference
        self.seen: dict[str, str] = {}
        """By name of a charge, the first evidence."""
        self.is_own = threading.local()
        self._before = {name: self._read(owner) for name, owner in self._owners().items()}
        self._globals = {module: dict(vars(module)) for module in _OWN_MODULES}
        self._codes = [(name, space, key, self._parts(space[key])) for name, space, key in self._functions()]
        self._torch = {name: dict(space) for name, space in _torch_spaces()}
        self._kernels = _registered_kernels()
        self._handlers = _handlers()
        self.is_timed = False
        """Whether calls of the candidate are being timed."""
        self.processes_started = 0
        """In timed calls."""
        self._inspected = -math.inf
        sys.addaudithook(self._audit)

    @staticmethod
    def _owners() -> dict[str, Any]:
        owners: dict[str, Any] = {
            "time": time,
            "torch.cuda": torch.cuda,
            "torch.cuda.Event": torch.cuda.Event,
            "torch.cuda.Stream": torch.cuda.Stream,
            "torch": torch,
            "torch.Tensor": torch.Tensor,
            "torch.nn.functional": torch.nn.functional,
            "torch.testing": torch.testing,
            "builtins": builtins,
            "os": os,
            "json": json,
            "gc": gc,
            "random": random,
            "threading": threading,
        }
        if hasattr(torch, "accelerator"):
            owners["torch.accelerator"] = torch.accelerator
        return owners

    @staticmethod
    def _read(owner: Any) -> dict[str, Any]:
        """The callables of a module, or of a class and those that it inherits from."""
        names: dict[str, Any] = {}
        for each in reversed(owner.__mro__) if isinstance(owner, type) else (owner,):
            names |= vars(each)
        return {name: value for name, value in names.items() if callable(value) or hasattr(value, "__get__")}

    @staticmethod
    def _functions() -> Iterator[tuple[str, Mapping[str, Any], str]]:
        """Where the functions are that run around the calls: a name for people, and a place in a module or class."""
        for module in _OWN_MODULES:
            for name, value in vars(module).items():
                if isinstance(value, FunctionType):
                    yield f"{module.__name__}.{name}", vars(module), name
                elif isinstance(value, type) and value.__module__ == module.__name__:
                    for member, inner in vars(value).items():
                        if isinstance(inner, FunctionType):
                            yield f"{module.__name__}.{name}.{member}", vars(value), member
        for name in ("synchronize", "current_stream"):
            if isinstance(getattr(torch.cuda, name), FunctionType):
                yield f"torch.cuda.{name}", vars(torch.cuda), name

    @staticmethod
    def _parts(function: Any) -> tuple[Any, CodeType | None, Any, Any]:
        defaults = dict(getattr(function, "__kwdefaults__", None) or {})
        return function, getattr(function, "__code__", None), getattr(function, "__defaults__", None), defaults

    def _inspect_modes(self) -> None:
        """Looks for what sees every operation of this process: it could work on inputs early."""
        counts = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
        modes = [torch._C._get_dispatch_stack_at(i) for i in range(counts[0])]
        modes += [torch._C._get_function_stack_at(i) for i in range(counts[1])]
        for mode in modes:
            if type(mode) is not DeviceContext:  # which torch.set_default_device leaves
                self.saw("CHECKER_PATCHED", f"its mode {type(mode).__name__} sees every operation of the process")

    def _inspect_handlers(self) -> None:
        """Looks for functions of the candidate that the interpreter calls by itself, whatever runs then."""
        for name, functions in _handlers().items():
            for function in functions:
                code = getattr(function, "__code__", None)
                if function not in self._handlers[name] and not (code and _is_others_code(code.co_filename)):
                    self.saw("INSPECTS_CALLER", f"it has itself called {name}, in the middle of the code that calls it")

    def inspect(self) -> None:
        """Compares what there is now with what there was before the candidate was imported, after each command.

        What is replaced for a while must be there when inputs are made or clocks are read, which is between two calls.
        """
        self._inspect_modes()
        self._inspect_handlers()
        self._inspect_runner()
        if (now := time.monotonic()) > self._inspected + INSPECT_EVERY_S:
            self._inspected = now
            self.inspect_torch()

    def inspect_torch(self) -> None:
        """Compares the functions of torch and of the library that measure, copy and compare."""
        for name, kernels in _registered_kernels().items():
            if kernels - self._kernels[name]:
                self.saw("CHECKER_PATCHED", f"it registered a kernel of its own for {name}")
        for owner_name, owner in self._owners().items():
            now = self._read(owner)
            for name, value in self._before[owner_name].items():
                if name in now and (now[name] is value or _is_wrapped_by_torch(now[name], value)):
                    continue
                place = f"{owner_name}.{name}"
                self.saw(_charge_for(owner_name, name), f"{place} is no longer what it was before the import")

    def inspect_all_of_torch(self) -> None:
        """Looks for code of the candidate in place of anything that torch had: it may serve what compares calls."""
        for name, space in _torch_spaces():
            for key, value in self._torch.get(name, {}).items():
                if (new := space.get(key, value)) is value:
                    continue
                code = getattr(getattr(new, "__func__", new), "__code__", None)
                if code is not None and not _is_others_code(code.co_filename):
                    self.saw("CHECKER_PATCHED", f"{name}.{key} is a function of its own")

    def _inspect_runner(self) -> None:
        """Compares the code around the calls."""
        for module, before in self._globals.items():
            for name, value in before.items():
                if vars(module).get(name) is not value:
                    measures = module.__name__.startswith("nearpeak.measure") or "clock" in name
                    place = "runner" if module.__name__ == "__main__" else module.__name__
                    charge = "TIMER_PATCHED" if measures else "RUNNER_PATCHED"
                    self.saw(charge, f"{place}.{name} is no longer what it was before the import")
        for name, space, key, parts in self._codes:
            if self._parts(space.get(key)) != parts:
                charge = "TIMER_PATCHED" if name.startswith(("torch.cuda", "nearpeak.measure")) else "RUNNER_PATCHED"
                self.saw(charge, f"the code of {name} was changed")

    def saw(self, charge: str, evidence: str) -> None:
        """Notes the first evidence of a charge."""
        self.seen.setdefault(charge, evidence)

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """Inside, this thread opens files for the judge."""
        self.is_own.value = True
        try:
            yield
        finally:
            self.is_own.value = False

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if getattr(self.is_own, "value", False) or event not in _WATCHED:
            return
        self.is_own.value = True  # what follows must not be audited in turn
        try:
            if event in _PATH_EVENTS:
                for path in arguments[: _PATH_EVENTS[event]]:
                    self._used_path(event, path)
            elif event in _PROCESS_EVENTS:
                self.processes_started += self.is_timed
                for word in _words_in(arguments):
                    self._named_path(event, word)
            elif event in _CODE_EVENTS:
                code = arguments[_CODE_EVENTS[event]]
                file = getattr(code, "co_filename", code)
                if self._asked_by_candidate() and _is_others_code(file) and not _is_import_of(file):
                    self.saw(
                        "INSPECTS_CALLER", f"it gave code of its own the name of {Path(file).name}, to hide who asks"
                    )
            elif event == "ctypes.dlsym":
                name = str(arguments[1])
                charge = "INSPECTS_CALLER" if "Frame" in name else "READS_JUDGE" if name in _OTHERS_MEMORY else ""
                if charge and self._asked_by_candidate(through=("/ctypes/__init__.py",)):
                    self.saw(charge, f"it took {name} of the interpreter or the system")
            elif event == "object.__getattr__":
                if arguments[1] in _FRAMES and self._asked_by_candidate(through=()):
                    self.saw("INSPECTS_CALLER", f"it read {arguments[1]}")
            elif event in ("os.kill", "os.killpg"):
                if self._asked_by_candidate() and not _is_own_process(int(arguments[0])):
                    self.saw("DISTURBS_RIVAL", f"it sent signal {arguments[1]} to process {arguments[0]}")
            elif event == "object.__setattr__":
                if arguments[1] == "__code__" and isinstance(arguments[0], FunctionType):
                    self.saw("RUNNER_PATCHED", f"it set the code of {arguments[0].__qualname__}")
            elif self._asked_by_candidate():
                self.saw("INSPECTS_CALLER", f"it called {event}")
        finally:
            self.is_own.value = False

    def _used_path(self, event: str, path: Any) -> None:
        if not isinstance(path, (str, bytes)):
            return
        did = "opened" if event == "open" else f"called {event} on"
        if (inside := _IN_PROCESS.match(os.path.normpath(os.fsdecode(path)))) and not _is_own_process(int(inside[1])):
            self.saw("READS_JUDGE", f"it {did} {inside[0]}, which is in another process")
        self._named_path(event, path)

    def _named_path(self, event: str, path: Any) -> None:
        full = os.path.realpath(os.fsdecode(path))
        did = "opened" if event == "open" else f"called {event} on"
        if self.reference and (full == self.reference or _source_of(full) == self.reference):
            self.saw("CALLS_REFERENCE", f"it {did} {Path(full).name}")
        elif full == self.folder or full.startswith(self.folder + os.sep):
            self.saw("READS_JUDGE", f"it {did} {Path(full).name} in the folder of the judge")

    def _asked_by_candidate(self, through: tuple[str, ...] = ("/inspect.py", "/traceback.py")) -> bool:
        """Whether the code that asks is the candidate's own, or a text or one of these library files that it ran."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.endswith((*through, ">")):
            frame = frame.f_back
        if frame is None:
            return False
        file = os.path.realpath(frame.f_code.co_filename)
        beside = str(Path(self.candidate).parent) + os.sep
        return file == self.candidate or (file.startswith(beside) and not file.startswith(_OTHERS_CODE))


_OWN_MODULES = (
    *(sys.modules[__name__], channel, exchange, case_files),
    *(samplers, gpu, instrument, kernel_times, statistics),
)
"""Whose code runs around the calls of a candidate."""
_PATH_EVENTS = {
    **dict.fromkeys(("open", "os.listdir", "os.scandir", "os.remove", "os.rmdir", "os.truncate", "os.chmod"), 1),
    **dict.fromkeys(("os.rename", "os.link", "os.symlink"), 2),
}
"""Audit events of files, with the number of their arguments that are paths."""
_IN_PROCESS = re.compile(r"/proc/(\d+)/(?:task/\d+/)?(?:mem|maps|smaps|pagemap|environ|fd|fdinfo|map_files|root|cwd)\b")
"""Files that show or change the memory of a process, and what it has open."""
_OTHERS_MEMORY = {"process_vm_readv", "process_vm_writev", "ptrace", "pidfd_getfd"}
"""Functions of the system that reach into other processes."""
_FRAMES = {"tb_frame", "gi_frame", "cr_frame", "ag_frame"}
"""Attributes from which the frames of callers can be reached."""
_PROCESS_EVENTS = {"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"}
_CODE_EVENTS = {"compile": 1, "code.__new__": 1, "exec": 0, "function.__new__": 0}
"""Audit events of code that is made or run, with the position of its file name or of the code."""
_WATCHED = {
    *_PATH_EVENTS,
    *_PROCESS_EVENTS,
    *_CODE_EVENTS,
    *("ctypes.dlsym", "sys.monitoring.register_callback", "sys._current_exceptions"),
    *("sys._getframe", "sys._current_frames", "sys.setprofile", "sys.settrace", "object.__getattr__"),
    *("gc.get_objects", "gc.get_referrers", "gc.get_referents", "object.__setattr__", "os.kill", "os.killpg"),
}


def _words_in(arguments: Any) -> Iterator[str]:
    """The texts among the arguments of a program that is started; those of a shell's command one by one."""
    if isinstance(arguments, (str, bytes)):
        text = os.fsdecode(arguments)
        yield from {text, *text.replace("'", " ").replace('"', " ").split()}
    elif isinstance(arguments, os.PathLike):
        yield os.fsdecode(arguments)
    elif isinstance(arguments, (list, tuple)):
        for each in arguments:
            yield from _words_in(each)


_TIMERS = ("time", "torch.cuda", "torch.cuda.Event", "torch.cuda.Stream", "torch.accelerator", "threading")


def _charge_for(owner: str, name: str) -> str:
    if owner in _TIMERS:
        return "TIMER_PATCHED"
    return "CHECKER_PATCHED" if owner.startswith("torch") or owner == "random" else "RUNNER_PATCHED"


_SIGNALS = {each.name: each for each in signal.Signals if each in signal.valid_signals()}


def _handlers() -> dict[str, tuple[Any, ...]]:
    """What the interpreter calls by itself: handlers of signals, and functions around a collection of garbage."""
    handlers = {f"at {name}": (signal.getsignal(number),) for name, number in _SIGNALS.items()}
    return {**handlers, "at a collection of garbage": tuple(gc.callbacks)}


def _is_others_code(file: Any) -> bool:
    return isinstance(file, (str, bytes)) and os.path.realpath(os.fsdecode(file)).startswith(_OTHERS_CODE)


def _is_import_of(file: Any) -> bool:
    """Whether it is Python's import that makes or runs the code of this file, as an `import` of the candidate does."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        loader = frame.f_locals.get("self")
        if frame.f_code.co_name == "exec_module" and type(loader) is SourceFileLoader:
            return bool(loader.path == file)
        frame = frame.f_back
    return False


def _is_wrapped_by_torch(new: Any, old: Any) -> bool:
    """Whether torch itself replaced one of its functions, as torch.compile does: by its own code around the old one."""
    inner = new
    while isinstance(inner, FunctionType) and inner.__code__.co_filename.startswith(_TORCH):
        if getattr(sys.modules.get(inner.__globals__.get("__name__", "")), "__dict__", None) is not inner.__globals__:
            return False  # it only says that it is of torch
        if (wrapped := getattr(inner, "__wrapped__", None)) is None:
            return inner.__name__ == getattr(old, "__name__", None)
        inner = wrapped
    return inner is old


def _registered_kernels() -> dict[str, set[str]]:
    """The kernels behind the operators that the runner uses, as torch's dispatcher lists them."""
    return {
        name: {line for line in torch._C._dispatch_dump(name).splitlines() if line.startswith(_DISPATCH_KEYS)}
        for name in _OPERATORS
    }


def _torch_spaces() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The names in the modules of torch that are loaded, and in the classes that they define."""
    for name, module in list(sys.modules.items()):
        if name == "torch" or name.startswith("torch."):
            space = getattr(module, "__dict__", {})
            yield name, space
            for value in list(space.values()):
                # Some objects warn where they are asked for their class.
                if issubclass(type(value), type) and value.__module__ == name:
                    yield f"{name}.{value.__name__}", vars(value)


_OPERATORS = tuple(
    f"aten::{name}"
    for name in ("clone", "copy_", "zeros", "empty.memory_format", "as_strided", "mul.Tensor", "equal", "view.dtype")
)
_DISPATCH_KEYS = ("CPU:", "CUDA:", "BackendSelect:", "ADInplaceOrView:", "AutogradCPU:", "AutogradCUDA:", "Composite")


def _is_own_process(pid: int) -> bool:
    """Whether it is this process, or one that it started."""
    try:
        return pid in (0, os.getpid()) or Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] == str(
            os.getpid()
        )
    except (OSError, IndexError):
        return True  # there is no such process


_TORCH = str(Path(torch.__file__).parent) + os.sep
_OTHERS_CODE = tuple(
    {os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("purelib", "platlib", "stdlib", "platstdlib")}
    | {str(Path(channel.__file__).parents[1]) + os.sep}
)
"""Folders of code that is not the candidate's, even where the candidate's folder contains them."""


def _source_of(path: str) -> str:
    """The .py file of a compiled one."""
    file = Path(path)
    if file.suffix != ".pyc" or file.parent.name != "__pycache__":
        return path
    return str(file.parent.parent / (file.name.partition(".")[0] + ".py"))


class Runner:
    """The candidate, and the commands that the judge may give."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder = folder
        self.device = torch.device(device)
        self.guard: Guard | None = None
        self.functions: dict[str, Callable[..., Any]] = {}
        self.sets: list[Any] = []
        """Arguments for timed calls, as the judge drew them; calls get scaled copies."""
        self.staged: list[Any] = []
        self.outputs: list[Any] = []
        self.last: Any = None
        """The result of the last checked call."""
        self.libc = ctypes.CDLL(None)
        self._evict: HostEviction | None = None
        self._estimates: dict[str, tuple[float, float]] = {}
        self.memory_bytes: int | None = None
        """What a checked call of the candidate may allocate; None is no limit."""

    @property
    def instrument(self) -> GpuInstrument | None:
        """The GPU's, where the inputs are on one."""
        return None if self.device.type == "cpu" else gpu_instrument(self.device.index or 0)

    def synchronize(self) -> None:
        """Waits for all streams."""
        if self.instrument is not None:
            self.instrument.synchronize()

    def is_device_lost(self) -> bool:
        """Whether nothing runs on the device any more, as after an illegal address; other errors are reported once."""
        with contextlib.suppress(Exception):
            self.synchronize()
        try:
            self.synchronize()
        except Exception:
            return True
        return False

    # What the judge can ask for.

    def do_import(self, message: dict[str, Any]) -> dict[str, Any]:
        """Imports a file, and finds the function, or makes a module of the class."""
        self.memory_bytes = message.get("memory_bytes")
        if message["guarded"]:
            self._warm_up_torch()
            path = os.path.realpath(message["file"])
            self.guard = Guard(self.folder, message["reference"], path)
            self.settings = _settings()
        sys.path.append(str(Path(message["file"]).resolve().parent))  # for modules that it imports when it is called
        start = _clock()
        function: Any = case_files.load(f"{message['file']}:{message['function']}").function
        has_same_weights = True
        if is_model(function) and message.get("model"):
            content = read_own(self, message["model"])
            function, has_same_weights = model_like(content, function, self.device)
        elif is_model(function):
            function = make_module(function, (), 0, self.device)
        if message.get("keys"):
            function = _in_order(function, message["keys"])
        self.functions["candidate" if message["guarded"] else "reference"] = function
        return {"seconds": _clock() - start, "same_weights": has_same_weights}

    def _warm_up_torch(self) -> None:
        """What torch sets up at the first use of a thing is not the candidate's doing."""
        if self.device.type != "cpu":
            assert self.instrument is not None
            x = torch.ones(8, device=self.device)
            profile_calls(lambda: x * 2, 1, synchronize=self.synchronize)
        (torch.ones(2, 2, requires_grad=True) @ torch.ones(2, 2)).sum().backward()

    def do_compile(self, message: dict[str, Any]) -> dict[str, Any]:
        """torch.compile of the reference, tried on one input."""
        compiled = torch.compile(self.functions["reference"], dynamic=False)
        args, kwargs = self._arguments(message["inputs"])
        compiled(*args, **kwargs)
        self.synchronize()
        self.functions["torch.compile"] = compiled
        return {}

    def do_match(self, message: dict[str, Any]) -> dict[str, Any]:
        """The function of nearpeak.kernels that gives what the reference gives, where there is one."""
        from nearpeak import kernels

        drawn = [self._arguments(file) for file in message["inputs"]]
        names = [name for name in kernels.__all__ if name.islower() and callable(getattr(kernels, name))]
        variants: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in names] + [("attention", {"causal": True})]
        for name, extra in variants:
            function = functools.partial(getattr(kernels, name), **extra)
            if all(self._agrees(function, args, kwargs) for args, kwargs in drawn):
                self.functions["nearpeak"] = function
                shown = "".join(f", {key}={value}" for key, value in extra.items())
                return {"kernel": f"kernels.{name}{shown and '(...' + shown + ')'}"}
        return {"kernel": None}

    def _agrees(self, function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
        try:
            copies = map_tensors(args, lambda tensor: tensor.detach().clone())
            expected = tensors_in(self.functions["reference"](*copies, **kwargs))
            found = tensors_in(function(*map_tensors(args, lambda tensor: tensor.detach().clone()), **kwargs))
        except Exception:  # any error says that it is for other arguments
            return False
        if not expected or len(found) != len(expected):
            return False
        for a, b in zip(expected, found, strict=True):
            if a.shape != b.shape or a.dtype != b.dtype or not a.is_floating_point():
                return False
            scale = float(a.double().abs().mean()) + 1e-30
            if not float((a.double() - b.double()).abs().max()) < 64 * torch.finfo(a.dtype).eps * scale + 1e-12:
                return False
        return True

    def do_once(self, message: dict[str, Any]) -> dict[str, Any]:
        """Calls and nothing else, for a tool that watches them."""
        for file in message["inputs"]:
            args, kwargs = self._arguments(file)
            self.functions["reference"](*args, **kwargs)
            self.synchronize()
        return {}

    def do_call(self, message: dict[str, Any]) -> dict[str, Any]:
        """One call on given inputs: its results right after it returned, and later; its gradients."""
        args, kwargs = self._arguments(message["inputs"])
        seeds = read_own(self, message["gradients"]) if message.get("gradients") else None
        before = map_tensors((args, kwargs), lambda tensor: tensor.detach().clone())
        with self._surroundings(message):
            self._poison(args)
            if message.get("graph"):
                result = self._captured(args, kwargs)
            else:
                result = self._delayed_call(args, kwargs) if message.get("delayed") else self._call(args, kwargs)
            reply = self._form(result)
            if "charge" in reply:
                return reply
            snapshot = [_clone(tensor.detach()) for tensor in tensors_in(result)]
            if message.get("stream"):
                torch.cuda.current_stream().synchronize()
        self._no_poison()
        if seeds is not None:
            # What the gradients need belongs to the result: a call in between must not change it.
            self._call(*rescaled((args, kwargs), 1))
        gradients = None if seeds is None else self._gradients(result, (args, kwargs), seeds)
        if message.get("patient"):
            self.synchronize()
            _sleep(ESCAPE_WAIT_S)
        self.synchronize()
        self.last = result
        later = [tensor.detach() for tensor in tensors_in(result)]
        changed = [_same_bits(a, b) is False for a, b in zip(snapshot, later, strict=True)]
        inputs_now = tensors_in((args, kwargs))
        mutated = [
            i for i, (a, b) in enumerate(zip(tensors_in(before), inputs_now, strict=True)) if not _same_bits(a, b)
        ]
        content = {
            "results": snapshot,
            "later": later if any(changed) else None,
            "gradients": gradients,
            "inputs": [tensor.detach() for tensor in inputs_now] if mutated else None,
        }
        self._write(message["outputs"], content)
        return {**reply, "mutated": mutated}

    def do_look(self, message: dict[str, Any]) -> dict[str, Any]:
        """The result of the last checked call as it is now."""
        self._write(message["outputs"], {"results": [tensor.detach() for tensor in tensors_in(self.last)]})
        return {}

    def do_sequence(self, message: dict[str, Any]) -> dict[str, Any]:
        """Inputs A, then B in the same memory, B again, and A in new memory: what is kept between calls shows."""
        args, kwargs = self._arguments(message["first"])
        others = tensors_in(self._arguments(message["second"]))
        snapshots = []
        self._poison(args)
        first = self._call(args, kwargs)
        reply = self._form(first)
        if "charge" in reply:
            return reply
        mutated = message["mutated"]
        snapshots.append(self._snapshot(first, (args, kwargs), mutated))
        with torch.no_grad():
            for tensor, new in zip(tensors_in((args, kwargs)), others, strict=True):
                if 0 not in tensor.stride():
                    tensor.copy_(new)
        self._shuffle_allocator()
        for _ in range(2):
            self._poison(args)
            result = self._call(args, kwargs)
            snapshots.append(self._snapshot(result, (args, kwargs), mutated))
        self.synchronize()
        results = tensors_in(first)
        overwritten = [_same_bits(a, b) is False for a, b in zip(snapshots[0][: len(results)], results, strict=True)]
        fresh = self._arguments(message["first"])
        self._poison(args)
        last = self._call(*fresh)
        snapshots.append(self._snapshot(last, fresh, mutated))
        self._no_poison()
        self.synchronize()
        repeated = all(_same_bits(a, b) for a, b in zip(snapshots[1], snapshots[2], strict=True))
        self._write(message["outputs"], {"snapshots": snapshots})
        return {**reply, "overwritten": any(overwritten), "deterministic": repeated}

    def do_probe(self, message: dict[str, Any]) -> dict[str, Any]:
        """The time of calls on inputs that stay the same, and on the same tensors with one element changed.

        On a CPU it is processor time, which other processes do not lengthen.
        """
        clock = _processor_clock if self.device.type == "cpu" else _clock
        args, kwargs = self._arguments(message["inputs"])
        tensors = changeable(tensors_in((args, kwargs)))
        originals = [tensor.detach().clone() for tensor in tensors]
        for _ in range(2):
            self._call(args, kwargs)
        same: list[float] = []
        changed: list[float] = []
        result: Any = None
        with quiet_collector():
            for i in range(message["calls"]):
                for times, changes in ((same, False), (changed, True)):
                    if changes:
                        change_one(tensors, i, message["seed"])
                    else:
                        with torch.no_grad():
                            for tensor, values in zip(tensors, originals, strict=True):
                                tensor.copy_(values)
                        self._call(args, kwargs)  # so that the timed call is a repetition
                    del result
                    self.synchronize()
                    start = clock()
                    result = self.functions["candidate"](*args, **kwargs)
                    self.synchronize()
                    times.append(clock() - start)
        self._write(
            message["outputs"], {"results": [t.detach() for t in tensors_in(result)], "arguments": (args, kwargs)}
        )
        return {"same": same, "changed": changed}

    def do_work(self, message: dict[str, Any]) -> dict[str, Any]:
        """The kernels or operators of calls on inputs that came just before, and on the same a little changed.

        Unlike times they have no noise, and say it too where launches or copies take longer than the work.
        """
        args, kwargs = self._arguments(message["inputs"])
        tensors = changeable(tensors_in((args, kwargs)))
        originals = [tensor.detach().clone() for tensor in tensors]

        def call() -> Any:
            return self.functions["candidate"](*args, **kwargs)

        position = 0

        def prepare() -> None:
            nonlocal position
            turn, is_changed = divmod(position, 2)
            if is_changed:
                disturb(tensors, turn, message["seed"])
            else:
                with torch.no_grad():
                    for tensor, values in zip(tensors, originals, strict=True):
                        tensor.copy_(values)
                call()  # so that the listed call is a repetition
            position += 1

        works = self._works(call, 2 * message["turns"], prepare)
        turns = [{"same": same, "changed": changed} for same, changed in zip(works[::2], works[1::2], strict=True)]
        self.synchronize()
        # The last change stays, and the call is a repetition: what is kept must be the result of these values.
        result = self._call(args, kwargs)
        self._write(
            message["outputs"], {"results": [t.detach() for t in tensors_in(result)], "arguments": (args, kwargs)}
        )
        return {"turns": turns}

    def _works(
        self, call: Callable[[], Any], calls: int = 1, before: Callable[[], Any] | None = None
    ) -> list[dict[str, list[float]]]:
        """Of each call: by name, the number and the seconds of its kernels on a GPU, or of its operators on a CPU."""
        if self.instrument is not None:
            works = []
            for kernels in profile_calls(call, calls, before=before, synchronize=self.synchronize):
                totals: dict[str, list[float]] = {}
                for kernel in kernels:
                    entry = totals.setdefault(kernel.name, [0, 0.0])
                    entry[0] += 1
                    entry[1] += kernel.seconds
                works.append(totals)
            return works
        return [self._operators(call, before) for _ in range(calls)]

    def _operators(self, call: Callable[[], Any], before: Callable[[], Any] | None) -> dict[str, list[float]]:
        if before is not None:
            before()
        with torch.autograd.profiler.profile(use_kineto=True) as profiler:
            start = _clock()
            call()
            wall = _clock() - start
        totals: dict[str, list[float]] = {
            event.key: [event.count, event.self_cpu_time_total * 1e-6]
            for event in profiler.key_averages()
            if not event.key.startswith("[memory]")
        }
        rest = wall - sum(seconds for _, seconds in totals.values())
        totals[OUTSIDE] = [1, max(0.0, rest)]
        return totals

    def do_sets(self, message: dict[str, Any]) -> dict[str, Any]:
        """Loads the arguments that timed calls are made of."""
        self.sets = [self._arguments(file) for file in message["inputs"]]
        self._estimates = {}
        self.staged, self.outputs = [], []
        return {}

    def do_block(self, message: dict[str, Any]) -> dict[str, Any]:
        """One block of timed calls, each on inputs that it has not seen; the results are kept until the next block."""
        name, cache = message["name"], message["cache"]
        function = self.functions[name]
        self.outputs = []
        self._stage(message["seed"], message["calls"])
        position = 0

        def call() -> None:
            nonlocal position
            args, kwargs = self.staged[position % len(self.staged)]
            self.outputs.append(function(*args, **kwargs))
            position += 1

        def touch() -> None:
            if cache == "hot":
                for tensor in tensors_in(self.staged[position % len(self.staged)]):
                    if tensor.is_floating_point() and tensor.element_size() > 1:
                        tensor.detach().sum()

        calls = len(self.staged)
        if self.guard is not None:
            self.guard.is_timed, self.guard.processes_started = True, 0
        with quiet_collector():
            device = self.instrument
            if device is None:
                # All inputs of a block are in memory of their own: one sweep evicts those of every call.
                if cache == "cold":
                    self._evict = self._evict or HostEviction()
                    self._evict()
                block = HostSampler(call, cache, call_seconds=0.0, reset=touch, calls=calls).block()
                method = f"host clock around each of {calls} calls on new inputs"
            else:
                seconds, enqueue = self._estimate(name)
                zero = float(message["zero"])
                stage = Stage(device, cache, reset=touch, pace_seconds=min(2e-3, 2 * seconds))
                sampler = EventSampler(
                    device, call, stage, call_seconds=seconds, enqueue_seconds=enqueue, zero_seconds=zero, calls=calls
                )
                block, method = sampler.block(), f"{sampler.method}; new inputs for each call"
            if self.guard is not None:
                self.guard.is_timed = False
            if name == "candidate":
                # At once, and the last first: a thread that has not finished is too late.
                for i in reversed(range(len(self.outputs))):
                    changed = [self.staged[i % len(self.staged)]] if message["mutated"] else []
                    self.outputs[i] = self._snapshot(self.outputs[i], changed, message["mutated"])
        return {
            "seconds": block.seconds,
            "readings": list(block.readings),
            "launch_hidden": block.launch_hidden,
            "method": method,
            "processes": 0 if self.guard is None else self.guard.processes_started,
        }

    def _estimate(self, name: str) -> tuple[float, float]:
        """Seconds of a call, and of the host until it returns."""
        if name not in self._estimates:
            args, kwargs = self.staged[0]
            for _ in range(2):
                self.synchronize()
                start = _clock()
                self.functions[name](*args, **kwargs)
                enqueued = _clock() - start
                self.synchronize()
                self._estimates[name] = _clock() - start, enqueued
        return self._estimates[name]

    def do_kept(self, message: dict[str, Any]) -> dict[str, Any]:
        """Writes the results of the calls of the last block that the judge has chosen."""
        self.synchronize()
        kept = self.outputs[-message["calls"] :]
        self._write(message["outputs"], {"results": [tensors_in(kept[i]) for i in message["chosen"]]})
        return {}

    def do_stage(self, message: dict[str, Any]) -> dict[str, Any]:
        """Makes the inputs of the next `do_run`."""
        self.outputs = []
        self._stage(message["seed"], message["calls"])
        self.synchronize()
        return {}

    def do_run(self, message: dict[str, Any]) -> dict[str, Any]:
        """Calls in a row and one synchronization, which the judge times too."""
        function = self.functions[message["name"]]
        start = _clock()
        enqueue = 0.0
        for i in range(message["calls"]):
            args, kwargs = self.staged[i % len(self.staged)]
            self.outputs = [function(*args, **kwargs)]
        enqueue = _clock() - start
        self.synchronize()
        return {"seconds": _clock() - start, "enqueue": enqueue}

    def do_latency(self, message: dict[str, Any]) -> dict[str, Any]:
        """On a GPU: the time until the current stream is done, and until the whole device is."""
        device = self.instrument
        assert device is not None
        function = self.functions["candidate"]
        args, kwargs = self.sets[0]
        stream_times, device_times = [], []
        end = device.backend.event()
        for _ in range(PROBE_CALLS):
            device.synchronize()
            start = _clock()
            function(*args, **kwargs)
            end.record()
            end.synchronize()
            stream_times.append(_clock() - start)
            device.synchronize()
            device_times.append(_clock() - start)
        return {"stream": min(stream_times), "device": min(device_times)}

    def do_kernels(self, message: dict[str, Any]) -> dict[str, Any]:
        """The kernels of a call on a GPU, or the operators of torch on a CPU, with their time."""
        args, kwargs = self.sets[0]
        function = self.functions["candidate"]
        is_interpreted = _runs_in_interpreter(lambda: function(*args, **kwargs))
        (totals,) = self._works(lambda: function(*args, **kwargs))
        return {
            "kernels": [[name, int(calls), seconds] for name, (calls, seconds) in totals.items() if seconds > 0],
            "interpreted": is_interpreted,
        }

    def do_held(self, message: dict[str, Any]) -> dict[str, Any]:
        """Bytes of tensors that live now, and after some calls on new inputs whose results were dropped."""
        function = self.functions["candidate"]
        self.staged, self.outputs = [], []
        sizes = [self._live_bytes()]
        for i in range(message["calls"]):
            args, kwargs = self._scaled(random.Random(message["seed"] + i))
            function(*args, **kwargs)
            del args, kwargs
            sizes.append(self._live_bytes())
        return {"bytes": sizes}

    def do_results(self, message: dict[str, Any]) -> dict[str, Any]:
        """Times of calls, and of the first and the second reading of their results; whether the first result stays."""
        clock = _processor_clock if self.device.type == "cpu" else _clock
        self.staged, self.outputs = [], []
        self._stage(message["seed"], message["staged"])
        times: dict[str, list[float]] = {"call": [], "first": [], "second": []}
        kept: Any = None
        snapshot: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        end = _clock() + message["seconds"]
        for i in range(message["calls"]):
            # The inputs of the first call do not come again: the same values would leave its result as it is.
            args, kwargs = self.staged[i % (len(self.staged) - 1) + 1 if i else 0]
            is_read = i < PROBE_CALLS
            self.synchronize()
            start = clock()
            result = self.functions["candidate"](*args, **kwargs)
            self.synchronize()
            times["call"].append(clock() - start)
            if is_read:
                tensors = [tensor.detach() for tensor in tensors_in(result)]
                targets = targets or [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in tensors]
                for reading in ("first", "second"):
                    start = clock()
                    for target, tensor in zip(targets, tensors, strict=True):
                        target.copy_(tensor)
                    self.synchronize()
                    times[reading].append(clock() - start)
            if kept is None:
                kept = result
                snapshot = [_clone(tensor.detach()) for tensor in tensors_in(kept)]
            del result
            if _clock() > end and i >= 2:
                break
        same = all(_same_bits(a, b) for a, b in zip(snapshot, tensors_in(kept), strict=True))
        return {**times, "overwritten": not same}

    def do_rest(self, message: dict[str, Any]) -> dict[str, Any]:
        """Nothing, when all that earlier commands left to do is done."""
        return {}

    def do_integrity(self, message: dict[str, Any]) -> dict[str, Any]:
        """What the candidate was seen to do to this process."""
        assert self.guard is not None
        self.guard.inspect()
        self.guard.inspect_torch()
        self.guard.inspect_all_of_torch()
        changed = [name for name, value in _settings().items() if self.settings[name] != value]
        return {"charges": self.guard.seen, "settings": changed}

    # How it does that.

    def _arguments(self, file: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = read_own(self, file)
        return tuple(args), kwargs

    def _write(self, file: str, tree: Any) -> None:
        self.synchronize()
        with self.guard.own() if self.guard is not None else contextlib.nullcontext():
            write_tensors(self.folder / Path(file).name, tree)

    def _call(self, args: Any, kwargs: Any) -> Any:
        with self._limited_memory():
            return self.functions["candidate"](*args, **kwargs)

    @contextlib.contextmanager
    def _limited_memory(self) -> Iterator[None]:
        """Inside, no more than the limit is allocated beyond what there is: by the process, or by torch on its GPU."""
        if self.memory_bytes is None:
            yield
        elif self.device.type == "cpu":
            import resource

            with self.guard.own() if self.guard is not None else contextlib.nullcontext():
                pages = int(Path("/proc/self/statm").read_text().split()[5])
            limits = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (pages * resource.getpagesize() + self.memory_bytes, limits[1]))
            try:
                yield
            finally:
                resource.setrlimit(resource.RLIMIT_DATA, limits)
        else:
            total = torch.cuda.get_device_properties(self.device).total_memory
            share = (torch.cuda.memory_allocated(self.device) + self.memory_bytes) / total
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(min(1.0, share), self.device)
            try:
                yield
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    def _delayed_call(self, args: Any, kwargs: Any) -> Any:
        """A call whose inputs get their values late on the current stream: other streams read what was before."""
        device = self.instrument
        if device is None:
            return self._call(args, kwargs)
        values = map_tensors((args, kwargs), lambda tensor: tensor.detach().clone())
        with torch.no_grad():
            for tensor in tensors_in((args, kwargs)):
                if tensor.is_floating_point() and tensor.element_size() > 1 and 0 not in tensor.stride():
                    tensor.zero_()
            device.synchronize()
            device.spin(2e-3)
            for tensor, value in zip(tensors_in((args, kwargs)), tensors_in(values), strict=True):
                if 0 not in tensor.stride():
                    tensor.copy_(value)
        return self._call(args, kwargs)

    def _captured(self, args: Any, kwargs: Any) -> Any:
        """The result of a CUDA graph of the call, replayed on values that were not there when it was captured.

        Nor were those of the capture there before it: who keeps results has none to return, and computes in the graph.
        """
        device = self.instrument
        assert device is not None
        values = map_tensors((args, kwargs), lambda tensor: tensor.detach().clone())
        halve(tensors_in((args, kwargs)))
        for _ in range(2):
            self._call(args, kwargs)
        halve(tensors_in((args, kwargs)))
        device.synchronize()
        results: list[Any] = []
        try:
            graph = device.backend.capture(lambda: results.append(self._call(args, kwargs)))
        except RuntimeError:
            device.recover_from_capture()
            raise
        with torch.no_grad():
            for tensor, value in zip(tensors_in((args, kwargs)), tensors_in(values), strict=True):
                tensor.copy_(value)
        graph.replay()
        device.synchronize()
        self.outputs = [graph]
        return results[-1]

    @contextlib.contextmanager
    def _surroundings(self, message: dict[str, Any]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if message.get("stream"):
                device = self.instrument
                assert device is not None
                device.synchronize()
                stack.enter_context(device.backend.on_stream(device.backend.new_stream()))
            if message.get("autocast"):
                dtype = getattr(torch, message["autocast"])
                stack.enter_context(torch.autocast(self.device.type, dtype=dtype))
            yield

    def _gradients(self, result: Any, arguments: Any, seeds: Any) -> list[Any]:
        outputs = [tensor for tensor in tensors_in(result) if tensor.is_floating_point()]
        inputs = [tensor for tensor in tensors_in(arguments) if tensor.requires_grad]
        pairs = [(output, seed) for output, seed in zip(outputs, seeds, strict=True) if output.requires_grad]
        if not pairs:
            return [None for _ in inputs]
        return list(
            torch.autograd.grad(
                [output for output, _ in pairs],
                inputs,
                [seed.to(output.dtype) for output, seed in pairs],
                allow_unused=True,
            )
        )

    def _snapshot(self, result: Any, arguments: Any, mutated: list[int]) -> list[torch.Tensor]:
        """Copies of the tensors of a result, and of the inputs that the reference changes."""
        inputs = tensors_in(arguments) if mutated else []
        return [_clone(tensor.detach()) for tensor in (*tensors_in(result), *(inputs[i] for i in mutated))]

    def _form(self, result: Any) -> dict[str, Any]:
        for tensor in tensors_in(result):
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                return {"charge": "LAZY_RESULT", "evidence": f"it returned a {type(tensor).__name__}"}
            if tensor.layout != torch.strided:
                return {"charge": "WRONG_FORM", "evidence": f"it returned a tensor of layout {tensor.layout}"}
            if _is_copied_on_write(tensor):
                return {"charge": "LAZY_RESULT", "evidence": "it returned a copy that is made at the first write"}
        if not tensors_in(result) and result is not None:
            return {"charge": "WRONG_FORM", "evidence": f"it returned a {type(result).__name__} without tensors"}
        return {
            "form": [
                [list(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.device.type]
                for tensor in tensors_in(result)
            ]
        }

    def _poison(self, args: Any) -> None:
        """Memory that will be allocated next holds `POISON`."""
        if self.device.type == "cpu":
            self.libc.mallopt(M_PERTURB, POISON ^ 0xFF)
            return
        sizes = {1 << k for k in range(9, 24, 2)}
        sizes |= {tensor.numel() * tensor.element_size() for tensor in tensors_in(args)}
        blocks = [
            torch.full((size,), POISON, dtype=torch.uint8, device=self.device)
            for size in sorted(sizes)
            for _ in range(2)
            if size <= LARGEST_BLOCK_BYTES
        ]
        del blocks

    def _no_poison(self) -> None:
        if self.device.type == "cpu":
            self.libc.mallopt(M_PERTURB, 0)

    def _shuffle_allocator(self) -> None:
        """Allocates and frees blocks in another order, so that results do not get the memory of earlier ones."""
        blocks = [torch.empty(1 << k, dtype=torch.uint8, device=self.device) for k in (9, 12, 16, 20, 22, 9, 14, 21)]
        random.Random(len(self.outputs)).shuffle(blocks)
        self._ballast = blocks[:3]

    def _scaled(self, draws: random.Random) -> tuple[Any, Any]:
        args, kwargs = self.sets[draws.randrange(len(self.sets))]
        seed = draws.getrandbits(48)
        return rescaled(args, seed), rescaled(kwargs, seed)

    def _stage(self, seed: int, calls: int) -> None:
        draws = random.Random(seed)
        self.staged = [self._scaled(draws) for _ in range(calls)]

    def _live_bytes(self) -> int:
        if self.device.type != "cpu":
            self.synchronize()
            return int(torch.cuda.memory_allocated(self.device))
        storages = {}
        for thing in gc.get_objects():
            if type(thing) in (torch.Tensor, torch.nn.Parameter):
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())


def _runs_in_interpreter(call: Callable[[], Any]) -> bool:
    """Whether Triton's interpreter runs kernels of a call."""
    seen = False

    def watch(frame: Any, event: str, argument: Any) -> None:
        nonlocal seen
        seen = seen or frame.f_code.co_filename.endswith("triton/runtime/interpreter.py")

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def read_own(runner: Runner, file: str) -> Any:
    """The tensors of a file in the judge's folder."""
    with runner.guard.own() if runner.guard is not None else contextlib.nullcontext():
        return read_tensors(runner.folder / Path(file).name, runner.device)


def _in_order(function: Callable[..., Any], keys: list[str]) -> Callable[..., Any]:
    """A function whose dictionaries have the reference's keys in the reference's order."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return {key: result[key] for key in keys} if isinstance(result, dict) and set(result) == set(keys) else result

    return call


_is_copied_on_write: Callable[[torch.Tensor], bool] = getattr(torch._C, "_is_cow_tensor", lambda tensor: False)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(_equal(bytes_of(a), bytes_of(b)))


def changeable(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Those of which one element can be changed alone."""
    return [tensor for tensor in tensors if tensor.numel() > 1 and 0 not in tensor.stride()]


def change_one(tensors: list[torch.Tensor], turn: int, seed: int) -> None:
    """Gives one element of each floating-point tensor another value."""
    draws = random.Random(seed + turn)
    with torch.no_grad():
        for tensor in tensors:
            index = tuple(draws.randrange(size) for size in tensor.shape)
            if tensor.is_floating_point() and tensor.element_size() > 1:
                tensor[index] = draws.uniform(2.0, 4.0) * draws.choice((-1, 1))
            elif not tensor.is_floating_point():
                tensor[index] = tensor[tuple(draws.randrange(size) for size in tensor.shape)].clone()


def halve(tensors: list[torch.Tensor]) -> None:
    """Halves the values of floating-point tensors, as they are before a call is captured in a graph."""
    with torch.no_grad():
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.element_size() > 1:
                tensor.mul_(0.5)


def disturb(tensors: list[torch.Tensor], turn: int, seed: int) -> None:
    """Changes floating-point tensors so little that no honest call takes another way: nothing leaves its range.

    In even turns an element gets its neighbor in its dtype, which tells those that compare all bits; in odd ones two
    elements are exchanged, which tells those that allow for a tolerance.
    """
    draws = random.Random(seed + turn)
    with torch.no_grad():
        for tensor in tensors:
            if not tensor.is_floating_point() or tensor.element_size() == 1:
                continue
            index, other = (tuple(draws.randrange(size) for size in tensor.shape) for _ in range(2))
            if turn % 2:
                first, second = tensor[index].clone(), tensor[other].clone()
                tensor[index], tensor[other] = second, first
            else:
                tensor[index] *= 1 + 2 * torch.finfo(tensor.dtype).eps


def _settings() -> dict[str, Any]:
    return {
        "torch.get_num_threads": torch.get_num_threads(),
        "torch.get_float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.get_default_dtype": str(torch.get_default_dtype()),
        "torch.is_grad_enabled": torch.is_grad_enabled(),
        "torch.are_deterministic_algorithms_enabled": torch.are_deterministic_algorithms_enabled(),
        "torch.backends.cuda.matmul.allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "torch.backends.cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
    }


def adopt_orphans() -> None:
    """Makes this process the parent of what its children leave behind: the judge sees all that the candidate starts."""
    with contextlib.suppress(AttributeError):  # another system than Linux
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def main(arguments: list[str]) -> None:
    """Reads commands from one descriptor and replies to another, until the first ends."""
    commands, replies = int(arguments[0]), int(arguments[1])
    adopt_orphans()
    runner = Runner(Path(arguments[2]), arguments[3])
    if gpu_backend() is not None and runner.device.type != "cpu":
        assert runner.instrument is not None
    write_message(replies, {"token": "", "ready": True})
    with os.fdopen(commands, "rb", buffering=1 << 16) as lines:
        for line in lines:
            message = json.loads(line)
            reply = _obey(runner, message)
            runner._no_poison()
            write_message(replies, {**reply, "token": message["token"]})
            if runner.guard is not None and message["do"] != "rest":
                runner.guard.inspect()  # while the judge goes on: what it times does not contain this


def _obey(runner: Runner, message: dict[str, Any]) -> dict[str, Any]:
    try:
        reply: dict[str, Any] = getattr(runner, f"do_{message['do']}")(message)
        return reply
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # an exit too: what the candidate raises is for the judge to name
        cause = error.__cause__ or error
        return {
            "error": describe_error(cause),
            "kind": type(cause).__name__,
            "device_lost": runner.is_device_lost(),
        }


def serve(descriptor: int) -> None:
    """Forks runners on request, until the judge has gone; see `channel`."""
    server = socket.socket(fileno=descriptor)
    while True:
        content, descriptors, _, _ = socket.recv_fds(server, 1 << 16, 3)
        if not content:
            return
        message = json.loads(content)
        if message["do"] != "start":
            pid, status = os.waitpid(message["pid"], os.WNOHANG if message["do"] == "poll" else 0)
            server.send(b"%d" % (os.waitstatus_to_exitcode(status) if pid else RUNS))
            continue
        pid = os.fork()
        if not pid:
            server.close()
            _become_runner(message, descriptors)
        for each in descriptors:
            os.close(each)
        server.send(b"%d" % pid)


def _become_runner(message: dict[str, Any], descriptors: list[int]) -> NoReturn:
    commands, replies, log = descriptors
    code = 1
    try:
        os.setsid()
        os.chdir(message["folder"])
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        arguments = [str(commands), str(replies), *message["arguments"]]
        if torch.cuda._is_in_bad_fork() and message["arguments"][1] != "cpu":
            # Something that the server imported has used the GPU: this process starts from the beginning.
            for descriptor in (commands, replies):
                os.set_inheritable(descriptor, True)
            os.execv(sys.executable, [sys.executable, "-m", "nearpeak.judging.runner", *arguments])
        main(arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "--server":
        serve(int(sys.argv[2]))
    else:
        main(sys.argv[1:])
