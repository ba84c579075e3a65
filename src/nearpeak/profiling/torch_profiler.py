"""What torch reports about running steps: its profiler, GPU events between steps, and the graphs of torch.compile."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from types import CodeType
from typing import Any, ClassVar

import torch
from torch.profiler import profile as torch_profile
from torch.profiler import record_function
from torch.utils._python_dispatch import _disable_current_modes

from nearpeak._stage_times import stage
from nearpeak.devices.backends import gpu_in_use, gpu_visible, profiler_activities
from nearpeak.devices.host_load import ThreadSeconds, thread_seconds
from nearpeak.profiles.profile import CompilerFacts, GraphBreak
from nearpeak.trace.guard import OwnThread
from nearpeak.trace.kineto.host import STEP_END_WAIT
from nearpeak.trace.kineto.markers import MarkerPlanter
from nearpeak.trace.kineto.marks import (
    mark_communication_waits,
    mark_data_loading,
    mark_garbage_collections,
    mark_replays,
    mark_unseen_ops,
)
from nearpeak.trace.kineto.read import KinetoTrace, read_trace
from nearpeak.trace.modules import compiled_graph_count
from nearpeak.trace.patches.inductor_cpp import see_cpp_kernels
from nearpeak.trace.patches.shared_patch import no_warnings

MAX_REASON_LENGTH = 200
_KINETO_LOG_LEVEL = "KINETO_LOG_LEVEL"


class Profiler:
    """torch's profiler around consecutive steps. Its trace goes through a temporary file."""

    running: ClassVar[bool] = False
    """Whether an instance has been started and not stopped."""

    def __init__(self) -> None:
        self._profiler = torch_profile(activities=profiler_activities(), record_shapes=True)
        self._patches = ExitStack()
        self._markers = MarkerPlanter()
        self.number = -1
        """Of the step that began last."""
        self.thread_seconds: dict[int, ThreadSeconds] = {}
        """Of this thread, by step; empty if they are not counted."""
        self._seconds_before: ThreadSeconds | None = None
        self._step = ExitStack()
        self._thread = OwnThread()
        self._at_thread_end = threading.local()
        self._is_enabled = False
        try:
            with stage("profiler: start"), no_warnings(), _no_kineto_log():  # about the profiler's own cycles
                self._profiler.start()
            Profiler.running = True
            self._is_enabled = True
            self._at_thread_end.call = _CallAtEnd(self._disable)
            _let_forked_children_exit()
            self._patches.enter_context(mark_garbage_collections())
            self._patches.enter_context(mark_data_loading())
            self._patches.enter_context(mark_communication_waits())
            self._patches.enter_context(mark_unseen_ops(constructors=not compiled_graph_count()))
            self._patches.enter_context(see_cpp_kernels())
            self._patches.enter_context(mark_replays())
            self._patches.enter_context(self._markers.watch_streams())
            self.next_step()
        except BaseException:
            self.discard()  # a profiler that nobody stops ends with the process, and takes it along
            raise

    def next_step(self) -> None:
        """Begins a step, before its first op."""
        self.end_step()
        self.number += 1
        self._markers.plant(self.number)
        with _disable_current_modes():  # a range is an operator, which a mode of the program's would see
            self._step.enter_context(record_function(f"ProfilerStep#{self.number}"))
        self._seconds_before = thread_seconds()

    def end_step(self) -> None:
        """Ends the step. What runs until `next_step` belongs to no step."""
        seconds, before = thread_seconds(), self._seconds_before
        if seconds is not None and before is not None:
            self.thread_seconds[self.number] = seconds.since(before)
        self._seconds_before = None
        with _disable_current_modes():
            self._step.close()

    def discard(self) -> None:
        """Stops without reading the trace."""
        with no_warnings():
            self._stop()

    def stop(self, among: Collection[int] = (), also: Callable[[Path], object] = lambda file: None) -> KinetoTrace:
        """Stops, and reads the median one of these steps; the last step if none are given or no kernel ran.

        `also` is called with the file of all steps.
        """
        with no_warnings(), _disable_current_modes(), tempfile.TemporaryDirectory() as folder:
            if self._thread:
                self.end_step()
                self._markers.plant(self.number + 1)
            file = Path(folder) / "step.json"
            with stage("profiler: stop"):
                self._stop()
                self._profiler.export_chrome_trace(str(file))
            with stage("profiler: read its trace"):
                also(file)
                return read_trace(file, among=among, markers=self._markers.planted)

    def _stop(self) -> None:
        with suppress(Exception):
            self._patches.close()
        Profiler.running = False
        # Ended by another thread, ranges and profiler would corrupt memory: it runs until its own thread ends.
        if self._thread:
            try:
                self.end_step()
                self._profiler.stop()
                self._is_enabled = False
            except BaseException:
                self._disable()
                raise

    def _disable(self) -> None:
        """Disables it after an error, or when its thread ends: enabled at the end of a thread, it crashes."""
        if self._is_enabled and torch._C._autograd._profiler_enabled():
            self._is_enabled = False
            with suppress(Exception):
                self._step.close()
                torch._C._autograd._disable_profiler()


def initialize_kineto() -> None:
    """Starts and stops torch's profiler once, on the thread that imported torch.

    If another thread is the first to start it, its library complains on stderr. Not where a GPU is visible: the library
    would query the driver, after which a script cannot choose its GPUs, and slow all launches down.
    """
    here = threading.current_thread() is threading.main_thread()
    if here and not gpu_visible() and not torch._C._autograd._profiler_enabled():
        with (
            no_warnings(),
            _no_kineto_log(),
            _disable_current_modes(),
            torch._C.DisableTorchFunction(),
            suppress(RuntimeError),
            torch_profile(activities=profiler_activities()),
        ):
            _let_forked_children_exit()


class _CallAtEnd:
    """Calls a function when it is deleted: in a variable of a thread, at the end of that thread."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def __del__(self) -> None:
        self._function()


@contextmanager
def _no_kineto_log() -> Iterator[None]:
    """Inside, a profiler that is started for the first time in this process learns not to log to stderr.

    The variable is set for the library alone: neither `os.environ` nor a child process of the program has it.
    """
    if _KINETO_LOG_LEVEL in os.environ:
        yield
        return
    os.putenv(_KINETO_LOG_LEVEL, "99")
    try:
        yield
    finally:
        os.unsetenv(_KINETO_LOG_LEVEL)


@functools.cache
def _let_forked_children_exit() -> None:
    """Keeps children that the program forks from now on from waiting for ever when they exit.

    libkineto starts a thread with the first profiler, and its destructor at the exit of the process waits for that
    thread, which a child does not have. A child therefore exits without destructors of static objects; everything of
    Python's, exit functions included, has run by then, and the streams of the C library are flushed.
    """
    try:
        libc = ctypes.CDLL(None)
        exit_now, flush = (ctypes.cast(function, ctypes.c_void_p) for function in (libc._exit, libc.fflush))
        on_exit, at_exit = libc.on_exit, libc.__cxa_atexit
    except (AttributeError, OSError, TypeError):  # not glibc
        return

    def in_child() -> None:
        on_exit(exit_now, None)  # called with the status
        at_exit(flush, None, None)  # the last one that was registered is called first

    os.register_at_fork(after_in_child=in_child)


class StepEvents:
    """CUDA events at the ends of steps: step times on the GPU's clock, without a synchronization between steps.

    Without a GPU in use there are no events.
    """

    def __init__(self) -> None:
        self._recorded: list[Any] = []
        self._spare: list[Any] = []

    def prepare(self, count: int) -> None:
        """Creates events ahead of time: creating one takes longer than recording it."""
        self._spare = _events(count)

    def clear(self) -> None:
        """Forgets all recorded events."""
        self._recorded.clear()

    def record(self) -> None:
        """Records an event on the current stream."""
        if self._spare:
            self._spare[-1].record()
            self._recorded.append(self._spare.pop())

    def seconds(self) -> list[float]:
        """The time between consecutive events. The GPU must have reached the last one."""
        return [start.elapsed_time(end) / 1e3 for start, end in pairwise(self._recorded)]


def synchronize() -> None:
    """Waits for the GPU if one is in use; a profiler that is running sees the wait as nearpeak's own."""
    backend = gpu_in_use()
    if backend is not None:
        with ExitStack() as stack:
            if Profiler.running:
                stack.enter_context(_disable_current_modes())
                stack.enter_context(record_function(STEP_END_WAIT))
            backend.synchronize()


def distributed_rank() -> tuple[int, int] | None:
    """The rank of this process and the number of ranks; None without a torch.distributed process group."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _events(count: int) -> list[Any]:
    backend = gpu_in_use()
    return [] if backend is None else [backend.event() for _ in range(count)]


def read_compiler_facts(warm_graphs: int) -> CompilerFacts | None:
    """What torch.compile has done so far; None if it was not used.

    `warm_graphs` is the number of graphs when warm-up ended. Graph breaks are known once a step has been profiled: see
    `graph_breaks_in`.
    """
    graphs = compiled_graph_count()
    if graphs == 0:
        return None
    return CompilerFacts(graphs=graphs, breaks=(), recompiled_in_steps=max(0, graphs - warm_graphs))


def graph_breaks_in(regions: Collection[str]) -> tuple[GraphBreak, ...]:
    """The graph breaks of compiled code that ran, whenever it was compiled; the most frequent first.

    torch keeps the breaks of all code that the process compiled, with their lines. Those count whose lines belong to
    functions behind `regions`, which are named as in the profiler: "Torch-Compiled Region: 0/1". If torch does not say
    which functions these are, all breaks count.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None or not regions:
        return ()
    codes = _code_of_regions(regions)
    lines = {(code.co_filename, line) for code in codes or () for _, _, line in code.co_lines()}
    counts = Counter(
        _reason_and_line(reason)
        for reason in getattr(utils, "graph_break_reasons", ())
        if codes is None or _compiled_line(reason.user_stack) in lines
    )
    return tuple(
        GraphBreak(reason=reason, source=source, count=count) for (reason, source), count in counts.most_common()
    )


def _code_of_regions(regions: Collection[str]) -> list[CodeType] | None:
    """The compiled functions, with their resume functions after breaks, of these regions; None if unknown."""
    tracker = getattr(sys.modules.get("torch._dynamo.convert_frame"), "input_codes", None)
    entries = getattr(sys.modules.get("torch._C._dynamo.eval_frame"), "_debug_get_cache_entry_list", None)
    if tracker is None or entries is None:
        return None
    codes = [code for reference in tracker.seen if (code := reference()) is not None]
    return [code for code in codes if any(entry.trace_annotation in regions for entry in entries(code))]


def _compiled_line(stack: Sequence[Any]) -> tuple[str, int] | None:
    """The line in the compiled function: the outermost frame of a break.

    torch compiles calls of its own modules from one function of its own; the function that such a module calls is
    compiled by itself after a break.
    """
    folder = f"{Path(str(sys.modules['torch'].__file__)).parent}/"
    frames = [frame for frame in stack if not frame.filename.startswith(folder)] or stack
    return (frames[0].filename, frames[0].lineno) if frames else None


def _reason_and_line(reason: Any) -> tuple[str, str]:
    """The first line of the reason and the innermost source line, from an entry of torch's list."""
    text = " ".join((str(reason.reason).strip().splitlines() or [""])[0].split())[:MAX_REASON_LENGTH]
    stack = reason.user_stack
    return text, f"{Path(stack[-1].filename).name}:{stack[-1].lineno}" if stack else ""
