"""Linear layers of one tensor, such as those of queries, keys and values: its gradient as one sum.

autograd has each layer write a gradient of the tensor, and adds them up in kernels of their own. Here the products
after the first add to its result, which cuBLAS does while it writes. The layers are called as before: the first
computes the results of all, and each of the others returns its own if it is given the same tensor. Weights stay where
they are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nearpeak.fixes.edits import Edits
from nearpeak.fixes.patterns.dataflow import child_name, own_children
from nearpeak.fixes.registry import ModelRun, ModuleCall, Site, fix


class _Linears(torch.autograd.Function):
    """`linear(x, weight, bias)` for each weight and bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *pairs: Any) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *pairs[::2])
        ctx.set_materialize_grads(False)
        rows, shape = x.reshape(-1, x.shape[-1]), x.shape[:-1]
        results = (functional.linear(rows, *pair) for pair in zip(pairs[::2], pairs[1::2], strict=True))
        # a plain view, as `linear` returns one, may not be changed in place among several results
        return tuple(torch.ops.aten._unsafe_view.default(each, (*shape, each.shape[-1])) for each in results)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        for_x, *for_pairs = ctx.needs_input_grad
        rows = x.reshape(-1, x.shape[-1])
        by_x: Any = None
        gradients: list[Tensor | None] = [None] * len(for_pairs)
        for place, (gradient, weight) in enumerate(zip(upstream, weights, strict=True)):
            if gradient is None:
                continue
            above = gradient.reshape(-1, gradient.shape[-1])
            if for_x and by_x is None:
                by_x = above @ weight
            elif for_x:  # in place, unless this is differentiated again
                by_x = torch.addmm(by_x, above, weight) if torch.is_grad_enabled() else by_x.addmm_(above, weight)
            if for_pairs[2 * place]:
                gradients[2 * place] = above.t() @ rows
            if for_pairs[2 * place + 1]:
                gradients[2 * place + 1] = above.sum(0)
        return (None if by_x is None else by_x.view(x.shape), *gradients)


class _Group:
    """Linear layers that are given the same tensor. No attributes of its own: what it holds is not the module's."""

    __slots__ = ("_last", "members")

    def __init__(self, members: Sequence[nn.Linear]) -> None:
        self.members = list(members)
        self._last: tuple[tuple[Any, ...], list[Tensor | None]] | None = None
        """What results were computed from, and those that nobody has taken yet."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.members,)  # without results, which may be leaves of no copy's graph

    def __deepcopy__(self, memo: dict[int, Any]) -> _Group:
        memo[id(self)] = copied = type(self)([])
        copied.members += [copy.deepcopy(member, memo) for member in self.members]
        return copied

    def result(self, member: nn.Linear, x: Tensor) -> Tensor:
        """What a member computes of x."""
        place = next((place for place, each in enumerate(self.members) if each is member), None)  # None in a replica
        pairs = [tensor for each in self.members for tensor in (each.weight, each.bias)]
        tensors = [x, *(each for each in pairs if each is not None)]
        if place is None or torch.compiler.is_compiling() or not self._may_share(tensors):
            return functional.linear(x, member.weight, member.bias)
        key = (x, *pairs, *(each._version for each in tensors))
        last = self._last  # read once: another thread may write another one
        if last is None or not _is_same(last[0], key) or last[1][place] is None:
            results: list[Tensor | None] = list(_Linears.apply(x, *pairs))  # type: ignore[no-untyped-call]
            self._last = last = key, results
        result = last[1][place]
        assert result is not None
        last[1][place] = None
        if not any(each is not None for each in last[1]):
            self._last = None  # holds no memory
        return result

    def _may_share(self, tensors: Sequence[Tensor]) -> bool:
        x = tensors[0]
        return (
            torch.is_grad_enabled()
            and x.requires_grad
            and not torch.is_autocast_enabled(x.device.type)
            and torch._C._functorch.peek_interpreter_stack() is None
            and not any(is_traceable_wrapper_subclass(each) for each in tensors)
            and all((each.dtype, each.device) == (x.dtype, x.device) for each in tensors)
            and all(type(each) is nn.Linear and not each._forward_pre_hooks for each in self.members)
        )


def _is_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two keys have the same tensors in the same versions."""
    return len(one) == len(other) and all(
        a is b or (isinstance(a, int) and a == b) for a, b in zip(one, other, strict=True)
    )


def _shared_forward(self: Any, input: Tensor) -> Tensor:
    result: Tensor = self._group_of_linears.result(self, input)
    return result


@fix("shared-linear", "linear layers of one tensor add up its gradient in their products", order=50)
def shared_linears(run: ModelRun) -> Iterator[Site]:
    """Linear layers that get one tensor from a forward, where gradients are needed.

    On a CPU the additions are too small a part of the products to be measured.
    """
    if run.trains and run.device.type != "cpu":
        yield from linears_of_one_tensor(run)


def linears_of_one_tensor(run: ModelRun) -> Iterator[Site]:
    """These layers, on any device."""
    for call in run.calls:
        groups: dict[int, list[ModuleCall]] = {}
        for child in own_children(run, call):
            if _is_linear(child):
                groups.setdefault(id(child.args[0]), []).append(child)
        for group in groups.values():
            if len(group) > 1:
                yield Site(
                    call=call,
                    what=f"linear layers of one tensor ({', '.join(child_name(call, child) for child in group)})",
                    change=partial(_share, [child.module for child in group]),
                )


def _share(linears: Sequence[Any], edits: Edits) -> None:
    group = _Group(linears)
    for linear in linears:
        edits.set(linear, "_group_of_linears", group)
        edits.set_forward(linear, _shared_forward)


def _is_linear(call: ModuleCall) -> bool:
    """Whether a module is torch's own linear layer, with its own code, and was called once with one tensor."""
    module, args = call.module, call.args
    is_plain = type(module) is nn.Linear and "forward" not in vars(module) and not module._forward_pre_hooks
    is_called_once = call.calls == 1 and len(args) == 1 and not call.kwargs
    return is_plain and is_called_once and isinstance(args[0], Tensor) and args[0].requires_grad
