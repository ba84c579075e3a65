"""Confirms what was changed inside of a forward, with stand-ins for the children that stay as they are."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from nearpeak.errors import UsageError
from nearpeak.fixes.patterns.confirm import Draws, Memo, agree, bare_copy, current_forward, kind_of
from nearpeak.fixes.patterns.dataflow import (
    RewriteGraph,
    child_name,
    is_setting,
    own_children,
    own_forward,
    rewritten_forward,
)
from nearpeak.fixes.registry import ModelRun, ModuleCall

_MANY = 16
"""Batches and sequences that are longer are drawn shorter."""
_SHORT = 7


class _NoDropout(TorchFunctionMode):
    """Inside, nothing is dropped: two functions that draw other masks can be compared."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0]
        if func is functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


_DROPOUTS = frozenset((functional.dropout, torch.dropout, torch._VF.dropout))


class StandIn(nn.Module):
    """Returns what a child returned in form: a tensor that depends on the first tensor it is given, row by row."""

    def __init__(self, call: ModuleCall, draws: Draws) -> None:
        super().__init__()
        self._output, self._draws = call.output, draws
        self._factors: list[Tensor] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = next(
            leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_floating_point()
        )
        used = iter(range(len(pytree.tree_leaves(self._output))))

        def answer(leaf: Any) -> Any:
            index = next(used)
            if leaf.dim() != given.dim() or not leaf.is_floating_point():
                raise UsageError("a child returns tensors of another form than it is given")
            while len(self._factors) <= index:
                self._factors.append(self._draws.normal(given.shape[-1], leaf.shape[-1]) * given.shape[-1] ** -0.5)
            return torch.tanh(given) @ self._factors[index].to(given.dtype)

        return pytree.tree_map_only(Tensor, answer, self._output)


def confirm_rewrite(run: ModelRun, call: ModuleCall, rewrite: RewriteGraph, keep: Collection[str]) -> str | None:
    """Why a rewritten forward must not be used; None if it computes what the forward of the module does.

    Args:
        keep: Children that the rewriting is about; those with children of their own have stand-ins otherwise.
    """
    tensors = [x for x in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(x, Tensor)]
    kind = kind_of(call.module, type(rewrite), repr([(tuple(x.shape), x.dtype) for x in tensors]))
    reason: str | None = _CONFIRMED.get(kind, lambda: _confirm(run, call, rewrite, keep))
    return reason


_CONFIRMED = Memo()


def _confirm(run: ModelRun, call: ModuleCall, rewrite: RewriteGraph, keep: Collection[str]) -> str | None:
    draws = Draws(run.device)
    stand_ins = {}
    for child in own_children(run, call):
        name = child_name(call, child)
        if name not in keep and child.children:
            stand_ins[name] = StandIn(child, draws)
    try:
        _, changed = rewritten_forward(own_forward(run, call), rewrite)
        original = current_forward(call.module)
        for training in (False, True):
            copy = bare_copy(call.module, draws, stand_ins=stand_ins)
            copy.eval()
            copy.training = training
            inputs = [draw_arguments(call, draws), draw_arguments(call, draws, shorter=True)]
            with _NoDropout():
                same = agree(
                    lambda *args, copy=copy, **kwargs: original(copy, *args, **kwargs),
                    lambda *args, copy=copy, **kwargs: changed(copy, *args, **kwargs),
                    inputs,
                    copy.parameters(),
                )
            if not same:
                return "on drawn numbers it does not compute the same"
    except UsageError as error:
        return str(error)
    except Exception as error:  # of the user's code on drawn numbers
        return f"it cannot be run on drawn numbers: {type(error).__name__}: {str(error)[:120]}"
    return None


def draw_arguments(
    call: ModuleCall, draws: Draws, shorter: bool = False, shrink: bool = True
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Numbers of the same kind as the arguments of a call, with shorter batches and sequences."""
    first = next(
        (leaf for leaf in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor) and leaf.dim()), None
    )
    sizes: dict[int, int] = {}
    if first is not None:
        for size in first.shape[:-1]:
            if size > _MANY and shrink:
                sizes[size] = _SHORT
        if shorter and first.dim() == 3 and first.shape[1] > 2:
            sizes[first.shape[1]] = sizes.get(first.shape[1], first.shape[1]) - 1
        sizes.pop(first.shape[-1], None)

    def draw(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return draws.like(leaf, shape=[sizes.get(size, size) for size in leaf.shape])
        # a cache, for example: it may be passed on to a child, and whoever uses it fails
        return leaf if is_setting(leaf) else object()

    args, kwargs = pytree.tree_map(draw, (tuple(call.args), dict(call.kwargs)))
    return args, kwargs
