"""What code computes, as graphs: the names of ops, however they are written, and the graph of a module's own forward.

There are two kinds of graphs. `ModuleCall.graph` has the aten ops of a module and everything in it. `trace_forward`
runs the forward of one module with its children as single nodes, so that a part of it can be replaced by a kernel while
children are called as before, with their hooks and whatever wraps them; `Rewrite` makes a forward of the changed graph.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from nearpeak.errors import UsageError
from nearpeak.fixes.arguments import ModuleState, attributes_held_by
from nearpeak.fixes.edits import Edits
from nearpeak.fixes.patterns.confirm import Forward, Settings, current_forward
from nearpeak.fixes.registry import ModelRun, ModuleCall

_ALIASES = {
    **dict.fromkeys(("truediv", "true_divide", "divide"), "div"),
    **dict.fromkeys(("_to_copy", "float", "half", "bfloat16", "double", "type", "type_as"), "to"),
    **dict.fromkeys(("mT", "swapaxes", "t"), "transpose"),
    **dict.fromkeys(("mm", "bmm"), "matmul"),
    **dict.fromkeys(("_unsafe_view", "reshape"), "view"),
    "multiply": "mul",
    "subtract": "sub",
    "_softmax": "softmax",
    "square": "pow",
    "native_dropout": "dropout",
}
CASTS = ("to", "contiguous", "clone")


def op_name(node: Any) -> str:
    """The name of an op as torch's function has it, "add" for +, torch.add, Tensor.add and aten.add.Tensor.

    Ops that write into their first argument keep the underscore, "add_". Anything else is "".
    """
    if not isinstance(node, fx.Node):
        return ""
    target = node.target
    if node.op == "call_method":
        name = str(target)
    elif node.op != "call_function":
        return ""
    elif isinstance(target, OpOverload):
        name = target._schema.name.partition("::")[2]
    else:
        name = getattr(target, "__name__", "")
        if getattr(target, "__module__", "") == "_operator" and name.startswith("i") and name[1:] in _OPERATORS:
            return name[1:] + "_"
        if target is getattr:
            name = str(node.args[1])
    return _ALIASES.get(name, name)


_OPERATORS = ("add", "mul", "sub", "truediv", "matmul", "pow")


def op_names(graph: fx.Graph) -> list[str]:
    return [op_name(node) for node in graph.nodes if node.op in ("call_function", "call_method")]


def numbers_of(graph: fx.Graph) -> list[float]:
    """The floats that ops of a graph have as arguments, each once."""
    found: dict[float, None] = {}
    for node in graph.nodes:
        for argument in (*node.args, *node.kwargs.values()):
            if isinstance(argument, float) and math.isfinite(argument):
                found[argument] = None
    return list(found)


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of an op, given by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def without_casts(node: Any) -> Any:
    """The node before casts and copies."""
    while op_name(node) in CASTS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def tensor_of(node: Any) -> Tensor | None:
    """The fake tensor that a node stands for, where it is known."""
    value = node.meta.get("val", node.meta.get("example_value")) if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def traceable(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is one node in graphs of `trace_forward`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for value in args:
            if isinstance(value, fx.Proxy):
                return value.tracer.create_proxy("call_function", call, args, kwargs)
        return function(*args, **kwargs)

    return call


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnForward:
    """The forward of a module, with the arguments that it was called with."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: dict[str, Any]
    """What its children returned, by path."""


def own_forward(run: ModelRun, call: ModuleCall) -> OwnForward:
    children = {child_name(call, child): child.output for child in own_children(run, call)}
    return OwnForward(module=call.module, args=call.args, kwargs=call.kwargs, outputs=children)


def own_children(run: ModelRun, call: ModuleCall) -> Iterator[ModuleCall]:
    """The modules that a forward calls itself, if they belong to it."""
    for path in dict.fromkeys(call.children):
        if path.startswith(f"{call.path}." if call.path else ""):
            yield run.call(path)


def child_name(call: ModuleCall, child: ModuleCall) -> str:
    """The path of a child in the module."""
    return child.path[len(call.path) + 1 if call.path else 0 :]


def _modes() -> tuple[Any, ...]:
    """What decides how ops run and is no part of a graph."""
    autocast = [(torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in ("cpu", "cuda")]
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    # a block that changes nothing here may change something elsewhere
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast, hooks, depth


_OF_PROXIES = (torch.ones, torch.zeros, torch.empty, torch.rand, torch.randn, torch.finfo)
"""What does not show torch.fx its arguments: sizes that are not in a list, and a dtype."""


class _OwnTracer(fx.Tracer):
    """Traces one forward: its children are nodes, arguments that are no settings are placeholders."""

    proxy_buffer_attributes = True

    def __init__(self, own: OwnForward) -> None:
        super().__init__(autowrap_functions=_OF_PROXIES)
        self._autowrap_search.append(torch)  # a forward has them by `torch.ones`
        self._own = own
        self._modes = _modes()
        self.inputs: list[int | str] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def create_proxy(self, kind: Any, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> fx.Proxy:
        if _modes() != self._modes:
            raise UsageError("a part of it runs in another mode, such as without gradients or as a checkpoint")
        proxy: fx.Proxy = super().create_proxy(kind, target, args, kwargs, *rest, **options)
        try:
            proxy.node.meta["val"] = self._value(proxy.node)
        except Exception:  # it is not known then; only `iter` asks
            proxy.node.meta.pop("val", None)
        return proxy

    def _value(self, node: fx.Node) -> Any:
        """What a node is on the fake tensors of the call."""
        if node.op == "call_module":
            return self._own.outputs[str(node.target)]
        if node.op == "get_attr":
            *path, name = str(node.target).split(".")
            module = self.root
            for child in path:  # past `__getattr__`, which makes nodes while a forward is traced
                module = module.__dict__["_modules"][child]
            own = module.__dict__
            return own["_parameters"][name] if name in own["_parameters"] else own["_buffers"][name]
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
        with torch.no_grad():
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            if node.op == "call_function":
                return node.target(*args, **kwargs)  # type: ignore[operator]
        raise UsageError("it has no value")

    def iter(self, obj: Any) -> Any:
        """A tensor that was split, or a shape, has as many parts as in the call."""
        value = obj.node.meta.get("val")
        if isinstance(value, (tuple, list)):
            if _may_have_other_count(obj.node):
                raise UsageError("it goes through the parts of a tensor, of which there may be another number")
            return iter([obj[index] for index in range(len(value))])
        return super().iter(obj)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        def proxy(key: int | str, value: Any) -> Any:
            if is_setting(value):
                return value
            self.inputs.append(key)
            name = f"argument_{key}" if isinstance(key, int) else key
            placeholder = self.create_proxy("placeholder", name, (), {})
            placeholder.node.meta["val"] = value
            return placeholder

        args = [proxy(index, value) for index, value in enumerate(self._own.args)]
        kwargs = {name: proxy(name, value) for name, value in self._own.kwargs.items()}
        return (lambda: root_fn(self.root, *args, **kwargs)), []


def _may_have_other_count(node: fx.Node) -> bool:
    """Whether another batch may have another number of parts. Rows of a module have the same size in all batches."""
    if op_name(node) not in ("split", "unbind", "tensor_split"):
        return False
    given = tensor_of(node.args[0])
    is_unbind = op_name(node) == "unbind"
    if not is_unbind and isinstance(argument(node, 1, "split_size"), (list, tuple)):
        return False
    dim = argument(node, 1 if is_unbind else 2, "dim", 0)
    return given is None or dim not in (-1, given.dim() - 1)


def form_of(value: Any, depth: int = 2) -> Any:
    """What code that is traced takes as given of an argument: which parts it has, which are tensors, which are None."""
    if isinstance(value, (Tensor, fx.Proxy)):  # a proxy if it is traced again
        return Tensor
    if depth and isinstance(value, (tuple, list)):
        return type(value), *(form_of(item, depth - 1) for item in value)
    held = attributes_held_by(value) if depth else None
    if held is None:
        return type(value)
    return type(value), *((name, form_of(item, 0)) for name, item in held.items())


def is_setting(value: Any) -> bool:
    """Whether an argument decides what runs: it is a constant of a traced forward, and another value is another
    forward."""
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))


@dataclass(slots=True, kw_only=True)
class OwnGraph:
    """The graph of a module's own forward."""

    graph: fx.Graph
    inputs: list[int | str]
    """The arguments behind placeholders, in their order."""


def trace_forward(own: OwnForward, training: bool) -> OwnGraph:
    """Traces the forward that a module has now. Raises `UsageError` where that depends on values."""
    module = own.module
    clone: Any = object.__new__(
        type(type(module).__name__, (type(module),), {"forward": current_forward(module), "__module__": __name__})
    )
    clone.__dict__ = {name: value for name, value in vars(module).items() if name != "forward"}
    clone.__dict__["training"] = training
    before, state = {**clone.__dict__}, ModuleState(module, values=False)
    try:
        with torch.enable_grad():
            tracer = _OwnTracer(own)
            graph = tracer.trace(clone)
    except Exception as error:  # code of the user's, which may do anything with what is no tensor
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"its forward cannot be traced: {reason}") from None
    finally:
        is_same = state.is_same
        state.restore()
    now = clone.__dict__
    if not is_same or len(now) != len(before) or any(now.get(name) is not value for name, value in before.items()):
        raise UsageError("its forward changes attributes of modules, which a graph has not")
    for node in graph.nodes:
        node.meta.pop("is_wrapped", None)  # by which the code of a graph asks torch.fx to wrap functions for good
    return OwnGraph(graph=graph, inputs=tracer.inputs)


def children_of(graph: fx.Graph) -> Iterator[tuple[fx.Node, str]]:
    for node in graph.nodes:
        if node.op == "call_module":
            yield node, str(node.target)


_PURE = frozenset(
    "add sub mul div pow neg mean sum sqrt rsqrt reciprocal to contiguous clone matmul transpose softmax masked_fill"
    " silu gelu sigmoid tanh chunk split getitem eq ne view".split()
)


def remove_dead_nodes(graph: fx.Graph) -> None:
    """Removes ops that nothing uses any more. Calls of children stay: they may have hooks."""
    for node in reversed(graph.nodes):
        if not node.users and (node.op == "get_attr" or op_name(node) in _PURE):
            graph.erase_node(node)


RewriteGraph = Callable[[fx.Graph], Iterable[str]]
"""Changes a graph, and returns for each change the path of the child that is no longer called, or ""."""


def rewritten_forward(own: OwnForward, rewrite: RewriteGraph) -> tuple[Forward, Forward]:
    """A forward for `Edits.set_forward` with a part replaced, for training and evaluation; and the same unguarded.

    Calls with other settings or other kinds of arguments, and calls after a setting of the module has changed, run the
    forward that the module had; the second result never does. Raises `UsageError` if the forward cannot be traced.
    """
    module = own.module
    original = current_forward(module)
    functions: dict[bool, Callable[..., Any]] = {}
    bypassed: dict[str, None] = {}
    inputs: list[int | str] = []
    for training in (False, True):
        traced = trace_forward(own, training)
        bypassed |= dict.fromkeys(path for path in rewrite(traced.graph) if path)
        remove_dead_nodes(traced.graph)
        traced.graph.lint()
        code = traced.graph.python_code("self")
        exec(code.src, code.globals)  # generated by torch.fx from the graph, as torch.fx.GraphModule does
        functions[training] = code.globals["forward"]
        inputs = traced.inputs
    settings = Settings(module, tuple(bypassed))
    count, names = len(own.args), frozenset(own.kwargs)
    example = given_arguments(own.args, own.kwargs)
    constants = [(key, value) for key, value in example.items() if is_setting(value)]
    forms = [(key, form_of(value)) for key, value in example.items() if not is_setting(value)]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) == count and kwargs.keys() == names and settings.hold(self):
            given = given_arguments(args, kwargs)
            if all(type(given[key]) is type(value) and given[key] == value for key, value in constants) and all(
                isinstance(given[key], fx.Proxy) or form_of(given[key]) == form for key, form in forms
            ):
                return functions[self.training](self, *[given[key] for key in inputs])
        return original(self, *args, **kwargs)

    def unguarded(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = given_arguments(args, kwargs)
        return functions[self.training](self, *[given[key] for key in inputs])

    return forward, unguarded


def set_rewritten_forward(own: OwnForward, rewrite: RewriteGraph, edits: Edits) -> None:
    edits.set_forward(own.module, rewritten_forward(own, rewrite)[0])


def given_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int | str, Any]:
    """The arguments of a call by position or name."""
    given: dict[int | str, Any] = dict(enumerate(args))
    given.update(kwargs)
    return given
