"""Layers of gated experts with all matrices in two parameters, as one grouped GEMM each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nearpeak import kernels
from nearpeak.fixes.edits import Edits
from nearpeak.fixes.patterns.confirm import Draws, Forward, Memo, Settings, agree, bare_copy, current_forward, kind_of
from nearpeak.fixes.patterns.dataflow import given_arguments
from nearpeak.fixes.registry import ModelRun, ModuleCall, Site, fix

_MEMO = Memo()
_TOKENS = 9
_DTYPES = (torch.float64, torch.float32, torch.bfloat16)
"""In the first that the module runs in: grouped products may not exist in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """What a module computes: `nearpeak.kernels.moe` with these arguments and parameters."""

    x: int | str
    weights: int | str
    experts: int | str
    """The arguments, by position or name."""
    gate_up: str
    down: str
    activation: Literal["silu", "gelu", "gelu_tanh"]

    def __call__(self, module: nn.Module, given: dict[int | str, Any]) -> Tensor:
        gate_up, down = getattr(module, self.gate_up), getattr(module, self.down)
        return kernels.moe(
            given[self.x], given[self.weights], given[self.experts], gate_up, down, activation=self.activation
        )


def recognize_experts(call: ModuleCall) -> Experts | None:
    """By hypotheses about arguments and parameters, on drawn tokens."""
    given: dict[int | str, Any] = given_arguments(call.args, call.kwargs)
    tensors = {key: value for key, value in given.items() if isinstance(value, Tensor)}
    parameters: dict[str, Tensor] = {name: each for name, each in call.module._parameters.items() if each is not None}
    if len(tensors) != 3 or len(given) != 3 or len(parameters) != 2 or any(x.dim() != 2 for x in tensors.values()):
        return None
    if any(parameter.dim() != 3 for parameter in parameters.values()) or not isinstance(call.output, Tensor):
        return None
    shapes = tuple((key, tuple(value.shape[1:]), value.dtype) for key, value in tensors.items())
    found: Experts | None = _MEMO.get(
        kind_of(call.module, shapes), lambda: _recognize(call.module, tensors, parameters)
    )
    return found


def _recognize(module: nn.Module, tensors: dict[int | str, Tensor], parameters: dict[str, Tensor]) -> Experts | None:
    original = current_forward(module)
    for experts in (key for key, value in tensors.items() if not value.is_floating_point()):
        for x, weights in itertools.permutations([key for key in tensors if key != experts]):
            choices = tensors[experts].shape[1]
            if tensors[weights].shape[1] != choices:
                continue
            for gate_up, down in itertools.permutations(parameters):
                (count, inner2, columns), second = parameters[gate_up].shape, tuple(parameters[down].shape)
                if second != (count, columns, inner2 // 2) or tensors[x].shape[1] != columns or choices > count:
                    continue
                for activation in ("silu", "gelu", "gelu_tanh"):
                    match = Experts(
                        x=x, weights=weights, experts=experts, gate_up=gate_up, down=down, activation=activation
                    )  # fmt: skip
                    if _confirm(module, original, match, tensors):
                        return match
    return None


def _confirm(module: nn.Module, original: Forward, match: Experts, tensors: dict[int | str, Tensor]) -> bool:
    gate_up = module._parameters[match.gate_up]
    assert gate_up is not None
    (count, _, columns), choices = gate_up.shape, tensors[match.experts].shape[1]
    draws = Draws(gate_up.device)
    for dtype in _DTYPES:
        copy = bare_copy(module, draws, dtype)
        drawn: dict[int | str, Any] = {
            match.x: draws.normal(_TOKENS, columns, dtype=dtype),
            match.weights: draws.normal(_TOKENS, choices, dtype=dtype).sigmoid(),
            match.experts: draws.permutations(_TOKENS, count, choices),
        }
        args = tuple(drawn[key] for key in sorted(key for key in drawn if isinstance(key, int)))
        kwargs = {key: value for key, value in drawn.items() if isinstance(key, str)}
        own = partial(original, copy)
        if not agree(own, own, [(args, kwargs)], gradients=False, dtype=dtype):
            continue  # it does not run in this dtype
        return agree(
            own,
            lambda *args, copy=copy, **kwargs: match(copy, given_arguments(args, kwargs)),
            [(args, kwargs)],
            copy.parameters(),
            dtype=dtype,
        )
    return False


def experts_forward(match: Experts, module: nn.Module) -> Forward:
    # its children, such as the activation, are not called any more
    original, settings = current_forward(module), Settings(module, [name for name, _ in module.named_children()])
    expected = {match.x, match.weights, match.experts}

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given: dict[int | str, Any] = given_arguments(args, kwargs)
        if given.keys() == expected and all(isinstance(x, Tensor) for x in given.values()) and settings.hold(self):
            x, chosen = given[match.x], given[match.experts]
            if x.dim() == chosen.dim() == 2 and x.is_floating_point():
                return match(self, given)
        return original(self, *args, **kwargs)

    return forward


def _replace(match: Experts, module: nn.Module, edits: Edits) -> None:
    edits.set_forward(module, experts_forward(match, module))


@fix("experts", "experts as grouped GEMMs", order=20)
def experts(run: ModelRun) -> Iterator[Site]:
    """Modules with the matrices of all experts."""
    for call in run.calls:
        match = recognize_experts(call)
        if match is None:
            continue
        count, inner2, columns = call.module._parameters[match.gate_up].shape  # type: ignore[union-attr]
        x = torch.empty(1, 2, device=run.device)
        yield Site(
            call=call, what=f"{count} experts of {columns} x {inner2 // 2}, {match.activation}",
            skip=kernels.supports(kernels.swiglu, x, x).reason,
            change=partial(_replace, match, call.module),
        )  # fmt: skip
