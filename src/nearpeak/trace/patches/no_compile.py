"""Compiled functions and control-flow operators run as Python inside a trace.

`no_compile`: what `torch.compile` returned runs the code that it was given. `python_control_flow`: `torch.cond`,
`while_loop`, `scan` and `map` run as the branches and loops that they stand for. As operators they would hide what
they run from a trace, and on fake tensors torch looks at both branches and at one iteration of a loop. Run as Python,
before autograd and transforms see them, every op inside is recorded, with its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch._higher_order_ops
from torch._dynamo import eval_frame
from torch._dynamo.backends.debugging import eager
from torch._subclasses.fake_tensor import DataDependentOutputException

from nearpeak.errors import UsageError
from nearpeak.trace.patches.shared_patch import SharedPatch, Since, ThreadCounter, patch_attribute
from nearpeak.trace.recorder import active_recorder
from nearpeak.trace.source import user_line

_compiled_calls = ThreadCounter()
"""How often something compiled was called, and ran uncompiled."""


@contextmanager
def no_compile() -> Iterator[Since]:
    """Compiled functions and modules run their Python code instead, on all threads.

    A compiled graph runs kernels that no dispatcher sees, and on fake tensors it would read memory that is not there.
    """
    with _force_eager():
        yield _compiled_calls.since()


@SharedPatch
@contextmanager
def _force_eager() -> Iterator[None]:
    original = eval_frame._callback_from_stance

    def count_compiled(callback: Any) -> Any:
        if callable(callback) and not _is_eager_backend(callback):
            _compiled_calls.count += 1
        return original(callback)

    with (
        torch.compiler.set_stance("force_eager"),
        patch_attribute(eval_frame, "_callback_from_stance", count_compiled),
    ):
        yield


def _is_eager_backend(callback: Any) -> bool:
    """Whether nothing is compiled: `cond` and flex attention call themselves with an eager backend."""
    backend = eval_frame.innermost_backend(callback)
    return getattr(backend, "compiler_name", None) == "eager" or backend.__module__ == eager.__module__


_DENSE_KEY = torch._C.DispatchKey.CompositeExplicitAutograd


@SharedPatch
@contextmanager
def python_control_flow() -> Iterator[None]:
    """Inside, control-flow operators run as Python on threads that record."""
    with ExitStack() as stack:
        for name, python in _PYTHON_CONTROL_FLOW.items():
            operator = getattr(torch.ops.higher_order, name, None)
            if operator is not None:
                stack.enter_context(
                    patch_attribute(type(operator), "__call__", _python_when_recording(operator, python))
                )
        yield


def _python_when_recording(operator: Any, python: Callable[..., Any]) -> Callable[..., Any]:
    original = type(operator).__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if active_recorder() is None:
            return original(self, *args, **kwargs)
        return python(*args, **kwargs)

    return call


def _cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any]) -> Any:
    return (true_fn if _predicate_value(pred, "cond") else false_fn)(*operands)


def _while_loop(
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried_inputs: Sequence[Any],
    additional_inputs: Sequence[Any],
    **_: Any,  # the indices of mutated inputs
) -> tuple[Any, ...]:
    iterations, carried = 0, carried_inputs
    while _predicate_value(cond_fn(*carried, *additional_inputs), "while_loop"):
        carried = body_fn(*carried, *additional_inputs)
        iterations += 1
    if iterations:
        return tuple(carried)
    return tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in carried)


def _scan(
    combine_fn: Callable[..., Any], init: Sequence[Any], xs: Sequence[torch.Tensor], additional_inputs: Sequence[Any]
) -> tuple[Any, ...]:
    """Applies `combine_fn` to slices of `xs` one after the other, with the carried values of the slice before."""
    carried = tuple(init)
    outputs: list[Sequence[torch.Tensor]] = []
    for index in range(xs[0].shape[0]):
        results = combine_fn(*carried, *(tensor.select(0, index) for tensor in xs), *additional_inputs)
        carried = tuple(results[: len(init)])
        outputs.append(results[len(init) :])
    return (*carried, *(torch.stack(list(column)) for column in zip(*outputs, strict=True)))


def _map(*args: Any, **kwargs: Any) -> Any:
    return torch.ops.higher_order.map_impl.py_kernels[_DENSE_KEY](*args, **kwargs)


def _associative_scan(*args: Any, **kwargs: Any) -> Any:
    return torch.ops.higher_order.associative_scan.py_kernels[_DENSE_KEY](*args, **kwargs)


def _invoke_subgraph(subgraph: Callable[..., Any], _identifier: Any, *operands: Any) -> Any:
    return subgraph(*operands)


_PYTHON_CONTROL_FLOW: dict[str, Callable[..., Any]] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "scan": _scan,
    "map_impl": _map,
    "associative_scan": _associative_scan,
    "invoke_subgraph": _invoke_subgraph,
}


def _predicate_value(predicate: Any, name: str) -> bool:
    """The value of a predicate, if it has one; a fake tensor computed from numbers alone does."""
    try:
        return bool(predicate)
    except DataDependentOutputException:
        line, _ = user_line()
        remedies = {
            "cond": "Pass a Python bool as its predicate for the branch to count",
            "while_loop": "Count iterations in a tensor that begins as torch.tensor(0), or write the loop in Python",
        }
        raise UsageError(
            f"{line}: torch.{name} asks for a value to decide what runs, and fake tensors have none. {remedies[name]}, "
            "or pass live=True to run on real tensors."
        ) from None
