"""`trace`: the ops of any PyTorch callable, from running it on fake tensors or live."""

from __future__ import annotations

import contextvars
import dataclasses
import dis
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from nearpeak.errors import NearpeakError, UsageError, message_of
from nearpeak.ops.op import Trace
from nearpeak.trace import memo, objects, schema, state_snapshot, storages
from nearpeak.trace.cuda_ops.lower import emulate_target
from nearpeak.trace.cuda_ops.target import Target
from nearpeak.trace.fake import PythonMode, allow_building, fake_mode, fresh_conversions
from nearpeak.trace.graphs import record_replays
from nearpeak.trace.interrupts import defer_signals
from nearpeak.trace.modules import ReachableModules
from nearpeak.trace.objects import named_tensors
from nearpeak.trace.patches.assigned_data import follow_assigned_data
from nearpeak.trace.patches.backward_passes import keep_graphs, note_passes
from nearpeak.trace.patches.ctc_loss import ctc_loss_by_lists, ctc_loss_by_tensors
from nearpeak.trace.patches.cuda_on_cpu import cuda_on_cpu
from nearpeak.trace.patches.flex_attention import count_mask_pairs
from nearpeak.trace.patches.hidden_fakes import hide_fake_tensors
from nearpeak.trace.patches.inductor_cpp import see_cpp_kernels
from nearpeak.trace.patches.inductor_kernels import record_inductor_kernels
from nearpeak.trace.patches.module_calls import encoder_fast_path, track_functional_calls
from nearpeak.trace.patches.no_compile import no_compile, python_control_flow
from nearpeak.trace.patches.real_imports import real_imports
from nearpeak.trace.patches.shape_inference import skip_shape_inference
from nearpeak.trace.patches.shared_patch import Since
from nearpeak.trace.patches.triton_kernels import record_triton_kernels
from nearpeak.trace.recorder import LimitReached, Recorder, without_tf32
from nearpeak.trace.source import failing_line, is_user_file
from nearpeak.trace.state_snapshot import StateSnapshot, restore_grad_scalers
from nearpeak.trace.storages import tensors_in

MAX_OPS = 2_000_000
"""Ops after which a trace stops."""
MAX_FLIPPED = 4
"""Assumed truth values that are tried the other way if the code fails: it may have refused what was assumed."""
MAX_SHOWN_ASSUMPTIONS = 8

_MEMORY_ERRORS = (
    "Cannot access data pointer of Tensor",
    ".numpy() is not supported for tensor subclasses",
    "The tensor has a non-zero number of elements, but its data is not allocated yet",
)
"""How torch's errors begin if code accesses the memory of a fake tensor."""


class UnrecordedOps(UsageError):
    """The code ran live, and something in it cannot be recorded."""


def trace(
    fn: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    grad: bool | None = None,
    live: bool = False,
    keep_compiled: bool = False,
    next_step: bool = False,
    limit: int = MAX_OPS,
    target: Target | None = None,
) -> Trace:
    """The ops that `fn(*args, **kwargs)` runs, in order. Nothing is computed and no memory is used.

    Everything that the code changed is restored afterwards; see `state_snapshot`.

    >>> [op.name for op in trace(torch.mm, torch.empty(8, 4), torch.empty(4, 2)).ops]
    ['aten.mm.default']

    Args:
        fn: A function, a module, or a whole training step that calls `backward()` and `optimizer.step()` itself.
        *args: Its arguments, with real or fake tensors.
        kwargs: Its keyword arguments.
        grad: True also runs the backward pass from all results that require gradients; False runs without autograd;
            None runs `fn` as it is.
        live: Run on the real tensors, for code that reads values. Then everything that `fn` does happens.
        keep_compiled: With `live`: compiled code stays compiled, and its kernels are the ops.
        next_step: With `live`: call it a second time, for what both calls compute from the same values.
        limit: The number of ops after which the trace ends, with a note.
        target: The machine to trace for, as `cuda_ops.target.target_of(machine)` gives it: for a GPU, fake CPU tensors
            run the operators that torch's CUDA build runs on it. None is this machine. Not with `live`.
    """
    traced = _Traced(fn, args, dict(kwargs or {}), grad, live, keep_compiled, next_step, limit, target)
    flipped: frozenset[int] = frozenset()
    first_error: Exception | None = None
    while True:
        guesses: list[str] = []
        try:
            return _trace_once(traced, flipped, guesses)
        except NearpeakError:
            raise
        except Exception as error:
            first_error = first_error or error
            untried = [place for place in range(len(guesses)) if place not in flipped]
            if not untried or len(flipped) >= MAX_FLIPPED:
                raise first_error from None
            flipped |= {untried[-1]}


class _Traced(NamedTuple):
    """The arguments of `trace`."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad: bool | None
    live: bool
    keep_compiled: bool
    next_step: bool
    limit: int
    target: Target | None


def _trace_once(traced: _Traced, flipped: frozenset[int], guesses: list[str]) -> Trace:
    """A trace. Guesses of truth values that `flipped` names are the other way; all are added to `guesses`."""
    fn, args, named, grad, live, keep_compiled, next_step, limit, target = traced
    reachable = ReachableModules(fn, args, named)
    snapshot = StateSnapshot(live=live)
    mode = None if live else _find_fake_mode(args, named, reachable)
    recorder = Recorder(mode=mode, limit=limit, snapshot=snapshot)
    if recorder.known is not None:
        recorder.known.flipped, recorder.known.guesses = flipped, guesses
    truncated = False
    cuda_requests: Since | None = None
    compiled: Since | None = None
    with ExitStack() as stack:
        if mode is not None:
            stack.enter_context(defer_signals())
            originals = (args, named)
            if any(not tensor.is_leaf for tensor in tensors_in(originals)):
                args, named = pytree.tree_map_only(torch.Tensor, _without_history, originals)
            stack.enter_context(fresh_conversions(mode))
            stack.enter_context(snapshot.restoring())
            snapshot.meet(fn, originals)
            stack.enter_context(real_imports())
            stack.enter_context(follow_assigned_data())
            stack.enter_context(skip_shape_inference())
            stack.enter_context(hide_fake_tensors())
            if snapshot.met_graph:
                stack.enter_context(keep_graphs())
            stack.enter_context(mode)
            stack.enter_context(PythonMode(recorder.known))
            # or scripted code leaves out ops from some call on
            stack.enter_context(torch.jit.optimized_execution(False))  # type: ignore[attr-defined]
            stack.enter_context(allow_building())
            stack.enter_context(_no_duplicate_error_logs())
            cuda_requests = stack.enter_context(cuda_on_cpu())
            stack.enter_context(emulate_target(target))
            stack.enter_context(encoder_fast_path())
            stack.enter_context(restore_grad_scalers(snapshot))
        if keep_compiled:
            stack.enter_context(record_inductor_kernels(recorder))
            stack.enter_context(see_cpp_kernels())
            stack.enter_context(record_replays())
        else:
            compiled = stack.enter_context(no_compile())
            stack.enter_context(python_control_flow())
            stack.enter_context(count_mask_pairs())
        stack.enter_context(record_triton_kernels())
        if live:
            stack.enter_context(ctc_loss_by_lists())
            stack.enter_context(note_passes())
        else:
            stack.enter_context(ctc_loss_by_tensors())
        stack.enter_context(track_functional_calls())
        if not live or grad is not None:  # a live call that leaves it changed does so alone too
            stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled() if grad is None else grad))
        stack.enter_context(_as_usage_errors(snapshot, live=live))
        with torch._C.DisableTorchFunction():  # a mode of the program's sees what the call does, and no more
            for name, module in reachable.roots():
                recorder.modules.add_root(module, name)
            for optimizer in reachable.optimizers:
                snapshot.optimizer(optimizer)
        stack.enter_context(recorder.modules.watching())
        stack.enter_context(_watch_optimizers(recorder))
        returned: Any = None
        try:
            with recorder, recorder.running_live() if live else nullcontext():
                returned = fn(*args, **named) if live else contextvars.copy_context().run(fn, *args, **named)
            if grad:
                _backward(recorder, returned)
        except LimitReached:
            truncated = True
        if recorder.failure is not None:
            failure = f"{type(recorder.failure).__name__}: {message_of(recorder.failure)}"
            raise UnrecordedOps(f"The call ran, but its ops could not be recorded: {failure}") from recorder.failure
        truncated = truncated or recorder.truncated
        assumptions = {} if recorder.known is None else recorder.known.assumptions
        notes = tuple(_trace_notes(truncated, limit, cuda_requests, target, compiled, assumptions))
        with torch._C.DisableTorchFunction():  # before states are restored
            finished = recorder.finish(tensors_in(returned), truncated=truncated, notes=notes)
        del returned
    if live and next_step and not truncated:
        finished = _add_next_step(finished, recorder, traced)
    if target is not None and target.kind == "cpu":  # where torch's flags for tf32 mean nothing
        finished = dataclasses.replace(finished, ops=without_tf32(recorder.ops))
    return finished


def _add_next_step(trace: Trace, recorder: Recorder, traced: _Traced) -> Trace:
    """The trace of a live call with the ops of a second one, if all of these could be recorded."""
    snapshot = StateSnapshot(live=True)
    following = Recorder(mode=None, limit=traced.limit, snapshot=snapshot, reads_values=False)  # the first call's tell
    with (
        record_inductor_kernels(following) if traced.keep_compiled else no_compile(),
        see_cpp_kernels(),
        record_replays(),
        record_triton_kernels(),
        ctc_loss_by_lists(),
        track_functional_calls(),
        following.modules.watching(),
        _watch_optimizers(following),
        following,
    ):
        traced.fn(*traced.args, **traced.kwargs)
    if following.failure is not None or following.truncated:
        return trace
    return recorder.add_next_step(trace, following)


def _find_fake_mode(args: tuple[Any, ...], kwargs: Mapping[str, Any], reachable: ReachableModules) -> FakeTensorMode:
    """The fake mode of the fake tensors among the arguments, or the shared one."""
    tensors = tensors_in((args, kwargs))
    places: tuple[Literal["_parameters", "_buffers"], ...] = ("_parameters", "_buffers")
    for _, module in reachable.modules:
        tensors += [tensor for where in places for _, tensor in named_tensors(module, where)]
    modes = {id(tensor.fake_mode): tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)}
    if len(modes) > 1:
        raise UsageError(
            f"The fake tensors among the arguments come from {len(modes)} different fake modes. Build all of them "
            "inside nearpeak.fake()."
        )
    return next(iter(modes.values()), None) or fake_mode()


def _without_history(tensor: torch.Tensor) -> torch.Tensor:
    """A computed argument as a leaf: its graph is not part of the call."""
    return tensor if tensor.is_leaf else tensor.detach().requires_grad_()


def _backward(recorder: Recorder, returned: Any) -> None:
    outputs = [tensor for tensor in tensors_in(returned) if tensor.requires_grad]
    if not outputs:
        raise UsageError(
            "grad=True asks for the backward pass, and no result of the call requires gradients. Let an argument or a "
            "parameter require them, or leave grad out."
        )
    gradients = [torch.ones_like(tensor) for tensor in outputs]  # not an op of the call
    with recorder:
        torch.autograd.backward(outputs, gradients)


@contextmanager
def _watch_optimizers(recorder: Recorder) -> Iterator[None]:
    def after(_optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        recorder.optimizer_ends()

    handles = (register_optimizer_step_pre_hook(recorder.optimizer_begins), register_optimizer_step_post_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _no_duplicate_error_logs() -> Iterator[None]:
    """Inside, torch does not log errors of fake tensors with a stack trace before it raises them."""
    logger = logging.getLogger(FakeTensor.__module__)
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


_FAKE_TENSORS = str(Path(fake_tensor.__file__).parent)
_BOOKKEEPING = tuple(str(module.__file__) for module in (memo, objects, schema, state_snapshot, storages))
"""Files whose code runs beside an op: an error there is none of the user's."""
_LIMITS = ("'Meta' backend", "INTERNAL ASSERT FAILED", "python object of type FakeTensor")
"""Parts of what torch says where its own code does not expect fake tensors."""
_LIVE = "pass live=True to run on real tensors"


@contextmanager
def _as_usage_errors(snapshot: StateSnapshot, *, live: bool) -> Iterator[None]:
    """Says of what fake tensors cannot do on which line it is, and what to do. Errors of the code itself pass."""
    try:
        yield
    except Exception as error:
        if isinstance(error, DataDependentOutputException):
            message = f"{error.func} asks for a value (.item(), .tolist(), a branch on a tensor), and {_WITHOUT_VALUES}"
        elif isinstance(error, DynamicOutputShapeException):
            message = f"{error.func} gives a result whose shape depends on values, and {_WITHOUT_VALUES}"
        elif isinstance(error, UnsupportedOperatorException):
            message = (
                f"{error.func} has no implementation for fake tensors. Register one with torch.library.register_fake, "
                f"or {_LIVE}."
            )
        elif live or isinstance(error, NearpeakError):
            raise
        elif (reason := _why_not_traced(error, snapshot.unusual_tensors)) is not None:
            message = reason
        else:
            raise
        line = failing_line(error.__traceback__)
        raise UsageError(f"{line}: {message}" if line else message) from None


_WITHOUT_VALUES = (
    "fake tensors have none. Pass live=True to run on real tensors, or replace that line by one whose result depends "
    "on shapes alone."
)


def _why_not_traced(error: Exception, unusual: Sequence[str]) -> str | None:
    """Why code cannot be traced on fake tensors that may well run on real ones; None for an error of its own."""
    text = message_of(error).rstrip(".")
    if isinstance(error, RuntimeError) and text.startswith(_MEMORY_ERRORS):
        return (
            "the code asks for the memory of a tensor (.numpy(), .data_ptr(), packed sequences, a kernel that torch "
            "does not know), and fake ones have none. Make kernels operators with torch.library.custom_op and "
            f"register_fake, or {_LIVE}."
        )
    if isinstance(error, TypeError) and "FakeTensor.__format__" in text:
        return f"a value is written as text, and fake tensors have none: {_LIVE}."
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return None
    code = traceback.tb_frame.f_code
    if code.co_filename.startswith((_FAKE_TENSORS, *_BOOKKEEPING)) or any(sign in text for sign in _LIMITS):
        return f"fake tensors do not support this, so {_LIVE}. {type(error).__name__}: {text}."
    raised = dis.opname[code.co_code[traceback.tb_lasti]] == "RAISE_VARARGS"
    if unusual and not (raised and is_user_file(code.co_filename)):
        kinds = ", ".join(unusual)
        return f"fake tensors may not stand for these: {kinds}. Then {_LIVE}. {type(error).__name__}: {text}."
    return None


def _trace_notes(
    truncated: bool,
    limit: int,
    cuda_requests: Since | None,
    target: Target | None,
    compiled: Since | None,
    assumptions: Mapping[str, str],
) -> Iterator[str]:
    if truncated:
        yield f"Stopped at the limit of {limit} ops; what follows is not in the trace."
    if compiled is not None and compiled.happened:
        yield "Code that torch.compile was given is traced uncompiled: the ops are those of eager mode."
    if assumptions:
        shown = [f"{line or 'a line of torch'}: {text}" for line, text in assumptions.items()][:MAX_SHOWN_ASSUMPTIONS]
        more = len(assumptions) - len(shown)
        yield (
            "The code asks for values that fake tensors do not have; assumed: "
            + "; ".join(shown)
            + (f"; and on {more} more lines." if more else ".")
        )
    for_gpu = target is not None and target.kind == "gpu"
    if cuda_requests is not None and cuda_requests.happened and not for_gpu:
        yield "The code asks for CUDA; it is traced for a CPU, so the ops are those of the CPU."
    if cuda_requests is None and for_gpu and not torch.cuda.is_available():
        yield "The code ran live on this CPU, so the ops are those of the CPU."
