"""`as_compiled`: inside a live trace, compiled code runs as it is, and each kernel that it launches is an op.

Compiled code passes by torch's dispatcher, all but the operators that Inductor leaves to libraries. What a kernel reads
and writes follows from its code (`compiled_code.py`); of templates, which have another manner, a part is known
(`kineto/inductor.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.callback import callback_handler

from nearpeak.capture.active import active_recorder
from nearpeak.capture.compiled_code import Touched, touched_by
from nearpeak.capture.counted import Counted, replaced
from nearpeak.capture.kineto.inductor import least_moved
from nearpeak.capture.kineto.tensors import Argument, Scalar, Seen
from nearpeak.capture.recorder import Recorder
from nearpeak.capture.schema import Schema
from nearpeak.capture.values import dtype_name
from nearpeak.work.tensor import Tensor

_HEURISTICS = "torch._inductor.runtime.triton_heuristics"
_REDUCTIONS = ("triton_red_", "triton_per_")


@contextmanager
def _replaced() -> Iterator[None]:
    """Nothing is imported for it: where kernels were compiled, Inductor is there."""
    kind = getattr(sys.modules.get(_HEURISTICS), "CachingAutotuner", None)
    if kind is None:
        yield
        return
    with replaced(kind, "run", _seen(kind.run)):
        yield


_compiled_seen = Counted(_replaced)


@contextmanager
def as_compiled(recorder: Recorder) -> Iterator[None]:
    """Inside, the recorder sees compiled kernels, and nothing of a compiler that has to work once more."""

    def pause(_: Any) -> None:
        recorder.paused = True

    def go_on(_: Any) -> None:
        recorder.paused = False

    callbacks = ((callback_handler.start_callbacks, pause), (callback_handler.end_callbacks, go_on))
    for register, callback in callbacks:
        register.append(callback)
    try:
        with _compiled_seen():
            yield
    finally:
        for register, callback in callbacks:
            if callback in register:  # torch._dynamo.reset() forgets them all
                register.remove(callback)


def _seen(launch: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = active_recorder()
        if recorder is not None and not recorder.paused and not kwargs.get("benchmark_run"):
            _record(recorder, self, args)
        return launch(self, *args, **kwargs)

    return run


def _record(recorder: Recorder, kernel: Any, args: Sequence[Any]) -> None:
    name = str(kernel.inductor_meta.get("kernel_name") or kernel.fn.__name__)
    given = dict(zip(kernel.fn.arg_names, args, strict=False))
    tensors = {key: value for key, value in given.items() if isinstance(value, torch.Tensor)}
    sizes = tuple((key, value) for key, value in given.items() if type(value) is int)
    touched = touched_by(kernel.fn.src, sizes) if name.startswith("triton_") else None
    if touched is None or not (touched.read or touched.written):
        arguments = _template(recorder, name, list(given.values()), tensors)
    else:
        arguments = _known(recorder, touched, tensors)
    arguments["family"] = "reduction" if name.startswith(_REDUCTIONS) else "pointwise"
    schema = Schema(
        name=f"inductor.{name}",
        arguments=tuple(arguments),
        defaults={},
        mutated=("written",),
        query=False,
        lift=False,
        composite=False,
        follows_from_form=False,
        by_rows=False,
    )
    recorder.recorded(schema, arguments)


def _known(recorder: Recorder, touched: Touched, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What is written and was never seen before, the compiled code has made itself."""
    read = [_part(recorder, tensors[name], count, "input") for name, count in touched.read.items() if name in tensors]
    written = [
        _part(recorder, tensors[name], count, "intermediate")
        for name, count in touched.written.items()
        if name in tensors
    ]
    return {"read": tuple(read), "written": tuple(written), "complete": touched.complete}


def _part(recorder: Recorder, tensor: torch.Tensor, count: int, kind: Any) -> Tensor:
    whole = recorder.storages.tensor(tensor, kind)
    count = min(count, whole.elements)
    return Tensor(shape=(count,), strides=(1,), dtype=whole.dtype, storage=whole.storage, offset=whole.offset)


def _template(recorder: Recorder, name: str, values: Sequence[Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A matrix product with what is fused into it; the last tensor is its result."""
    seen: list[Argument] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            seen.append(Seen(tuple(value.shape), value.stride(), dtype_name(value.dtype)))
        elif isinstance(value, int):
            seen.append(Scalar(value))
    least = least_moved(name, seen, {})
    *inputs, out = tensors.values() if tensors else (None,)
    plain = [recorder.storages.tensor(tensor, "input") for tensor in inputs if tensor is not None]
    arguments: dict[str, Any] = {"read": (), "written": (), "complete": False}
    if out is not None and least.written is not None:
        arguments["written"] = (recorder.storages.tensor(out, "intermediate"),)
    if least.product is not None:
        arguments |= {"inner": least.product.inner, "product": least.product.dtype}
        arguments["read"] = tuple(plain[place] for place in least.product.operands if place < len(plain))
    return arguments
