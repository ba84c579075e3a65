"""Activations written out, and gated activations: `silu(gate) * up`, also with both halves in one tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from nearpeak import kernels
from nearpeak.errors import UsageError
from nearpeak.fixes.edits import Edits
from nearpeak.fixes.patterns.blocks import confirm_rewrite
from nearpeak.fixes.patterns.confirm import Forward, Memo, Settings, current_forward, has_hooks, kind_of
from nearpeak.fixes.patterns.dataflow import (
    argument,
    child_name,
    op_name,
    op_names,
    own_children,
    own_forward,
    set_rewritten_forward,
    trace_forward,
    traceable,
)
from nearpeak.fixes.registry import FunctionCall, ModelRun, ModuleCall, Site, fix

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
"""Those that torch has as one op."""
_SHOWN = {"silu": "SiLU", "gelu": "GELU", "gelu_tanh": "GELU (tanh)"}
_POINTWISE = frozenset(
    "mul add sub div pow tanh sigmoid erf exp neg reciprocal to clone detach alias silu gelu relu contiguous sqrt"
    " clamp_min clamp rsub maximum scalar_tensor full_like ones_like lift_fresh_copy".split()
)
_EXACT = 1e-6
"""Of float32: what constants with fewer digits and casts to float32 may differ by."""
_MEMO = Memo()


def recognize_activation(call: ModuleCall) -> str | None:
    """The name of the activation that a module without parameters computes."""
    module = call.module
    tensors = [value for value in (*call.args, *call.kwargs.values()) if value is not None]
    if len(tensors) != 1 or not isinstance(tensors[0], Tensor) or call.children:
        return None
    if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
        return None
    if not _is_pointwise(
        [name.split(".")[1] for name in call.ops if name.startswith("aten.")], tensors[0], call.output
    ):
        return None
    original = current_forward(module)
    found: str | None = _MEMO.get(kind_of(module), lambda: _name_of(lambda x: original(module, x)))
    return found


def _is_pointwise(names: list[str], x: Any, output: Any) -> bool:
    return (
        isinstance(output, Tensor)
        and output.shape == x.shape
        and x.is_floating_point()
        and bool(names)
        and all(_canonical(name) in _POINTWISE for name in names)
    )


def _canonical(name: str) -> str:
    return {"_to_copy": "to", "square": "pow"}.get(name, name)


def _name_of(function: Callable[[Tensor], Tensor]) -> str | None:
    """By its values on a grid. In two orders, so that it is known to look at each number alone."""
    grid = torch.linspace(-12.0, 12.0, 4803, dtype=torch.float64)
    try:
        with torch.no_grad():
            result = function(grid)
            if not torch.allclose(function(grid.flip(0)).flip(0), result, rtol=_EXACT, atol=_EXACT):
                return None
            if function(grid.reshape(3, -1)[:, ::2]).shape != (3, 801):
                return None
    except Exception:  # of the user's code
        return None
    for name, activation in ACTIVATIONS.items():
        if result.shape == grid.shape and float((result - activation(grid)).abs().max()) < _EXACT:
            return name
    return None


def activation_forward(name: str, module: nn.Module) -> Forward:
    original, settings, activation = current_forward(module), Settings(module), ACTIVATIONS[name]
    same_dtype: dict[Any, bool] = {}

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(x, Tensor) and settings.hold(self) and _keeps_dtype(same_dtype, x, original, self):
            return activation(x)
        return original(self, *args, **kwargs)

    return forward


def _keeps_dtype(known: dict[Any, bool], x: Tensor, original: Callable[..., Any], *before: Any) -> bool:
    """Whether the code that was written out returns the dtype of x: asked once of a number for each kind of x."""
    if not x.is_floating_point():
        return False
    key = (x.dtype, x.device.type, torch.is_autocast_enabled(x.device.type))
    if key not in known:
        if torch.compiler.is_compiling():
            return False
        number = torch.ones(1, dtype=x.dtype, device=x.device)
        with torch.no_grad():
            one, other = original(*before, number), ACTIVATIONS["silu"](number)
        known[key] = one.dtype == other.dtype
    return known[key]


def activation_function(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a function that a forward calls."""
    activation = ACTIVATIONS[name]
    same_dtype: dict[Any, bool] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(x, Tensor) and _keeps_dtype(same_dtype, x, original):
            return activation(x)
        return original(*args, **kwargs)

    return traceable(call)


@fix("activation", "activations as one op", order=20)
def activations(run: ModelRun) -> Iterator[Site]:
    """Modules and functions that write out an activation that torch has as one op."""
    for call in run.calls:
        if len(call.ops) > 1 and (name := recognize_activation(call)) is not None:
            yield Site(
                call=call, what=f"{_SHOWN[name]} in {len(call.ops)} ops",
                change=partial(_replace_module, name, call.module),
            )  # fmt: skip
        for function in call.functions:
            if (name := _recognize_function(function)) is not None:
                yield Site(
                    call=call, what=f"{_SHOWN[name]} in {function.name}()",
                    change=partial(_replace_function, name, call.module, function),
                )  # fmt: skip


def _replace_module(name: str, module: nn.Module, edits: Edits) -> None:
    edits.set_forward(module, activation_forward(name, module))


def _replace_function(name: str, module: nn.Module, function: FunctionCall, edits: Edits) -> None:
    edits.set_functions(module, {function.name: activation_function(name, function.function)})


def _recognize_function(function: FunctionCall) -> str | None:
    values = [value for value in function.arguments.values() if value is not None]
    if len(values) != 1 or not isinstance(values[0], Tensor) or len(function.arguments) != 1:
        return None
    traced = function.graph()
    if traced is None:
        return None
    names = op_names(traced.graph)
    if len(names) < 2 or not _is_pointwise(names, values[0], function.output):
        return None
    return _name_of(function.function)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gates:
    """Rewrites `activation(gate) * up` in the graph of a forward."""

    children: dict[str, str]
    """The activations of children, by their paths."""

    def __call__(self, graph: fx.Graph) -> Iterable[str]:
        for node in list(graph.nodes):
            match = self._match(node) if op_name(node) == "mul" else None
            if match is None:
                continue
            activated, gate, up, name = match
            packed = _packed(gate, up)
            with graph.inserting_before(node):
                if packed is not None:
                    new = graph.call_function(GATED_PACKED[name], (packed,))
                else:
                    new = graph.call_function(GATED[name], (gate, up))
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            if activated.op == "call_module":
                yield str(activated.target)
            else:
                yield ""
            if not activated.users:
                graph.erase_node(activated)

    def _match(self, node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, str] | None:
        if len(node.args) != 2 or not all(isinstance(arg, fx.Node) for arg in node.args):
            return None
        for activated, up in (node.args, node.args[::-1]):
            name = self._activation(activated)
            if name is not None and len(activated.users) == 1 and up is not activated.args[0]:  # type: ignore[union-attr]
                return activated, activated.args[0], up, name  # type: ignore[return-value,union-attr]
        return None

    def _activation(self, node: Any) -> str | None:
        if not isinstance(node, fx.Node) or not node.args or not isinstance(node.args[0], fx.Node):
            return None
        if node.op == "call_module":
            return self.children.get(str(node.target)) if len(node.args) == 1 and not node.kwargs else None
        name = op_name(node)
        if name == "gelu":
            return "gelu_tanh" if argument(node, 1, "approximate", "none") == "tanh" else "gelu"
        return name if name == "silu" and not argument(node, 1, "inplace", False) else None


def _packed(gate: fx.Node, up: fx.Node) -> fx.Node | None:
    """The tensor whose first half is the gate and whose second half is up."""
    if op_name(gate) != "getitem" or op_name(up) != "getitem" or gate.args[0] is not up.args[0]:
        return None
    halves = gate.args[0]
    if op_name(halves) != "chunk" or (gate.args[1], up.args[1]) != (0, 1) or len(halves.users) != 2:  # type: ignore[union-attr]
        return None
    if argument(halves, 1, "chunks") != 2 or argument(halves, 2, "dim", 0) != -1:  # type: ignore[arg-type]
        return None
    return halves.args[0]  # type: ignore[union-attr,return-value]


def _gated(function: Callable[..., Tensor], **options: Any) -> Callable[..., Any]:
    def gated(*tensors: Tensor) -> Tensor:
        return function(*tensors, **options)

    gated.__name__ = function.__name__
    return traceable(gated)


GATED = {
    "silu": _gated(kernels.swiglu),
    "gelu": _gated(kernels.geglu),
    "gelu_tanh": _gated(kernels.geglu, approximate="tanh"),
}
GATED_PACKED = {
    "silu": _gated(kernels.swiglu_packed),
    "gelu": _gated(kernels.geglu_packed),
    "gelu_tanh": _gated(kernels.geglu_packed, approximate="tanh"),
}


@fix("gated-activation", "gated activations as one kernel", order=30)
def gated_activations(run: ModelRun) -> Iterator[Site]:
    """Forwards that multiply an activation by another tensor."""
    for call in run.calls:
        if not any(".mul" in name for name in call.ops):
            continue
        children = {
            child_name(call, child): name
            for child in own_children(run, call)
            if not has_hooks(child.module) and (name := recognize_activation(child)) is not None
        }
        rewrite = Gates(children=children)
        try:
            traced = trace_forward(own_forward(run, call), call.module.training)
        except UsageError:
            continue
        count = len(list(rewrite(traced.graph)))
        if not count:
            continue
        x = torch.empty(2, device=run.device)
        yield Site(
            call=call, what="gated activation" if count == 1 else f"{count} gated activations",
            skip=confirm_rewrite(run, call, rewrite, keep=children) or kernels.supports(kernels.swiglu, x, x).reason,
            change=partial(set_rewritten_forward, own_forward(run, call), rewrite),
        )  # fmt: skip
