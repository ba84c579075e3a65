"""What a fix is, and what it is shown: the registry of fixes, `Site`, and `observe`, which runs a model once.

A fix is a function that looks at a `ModelRun` and yields the places where it applies:

    @fix("rms-norm", "RMS norms as one kernel")
    def rms_norm(run: ModelRun) -> Iterator[Site]:
        for call in run.calls:
            graph = call.graph()                       # torch.fx: aten ops with their arguments, parameters by name
            if graph is not None and (eps := match_rms_norm(graph)) is not None:
                yield Site(call=call, what=f"RMS norm of {n}", change=lambda edits: edits.set_forward(call.module, ...))

Sites are known by what is computed there, and never by the name of a class. A change that is wrong, or not faster, is
rolled back by the engine, so a fix need not prove anything by itself; where it knows that it cannot apply, the site has
`skip` with the reason, and is listed.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from nearpeak.devices.process_state import preserve_random_state
from nearpeak.errors import UsageError, did_you_mean
from nearpeak.fixes.arguments import preserve_module_state
from nearpeak.fixes.edits import Edits, code_objects

OPTIMIZER = "optimizer"
"""The path of the optimizer, as a site."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Site:
    """A place where a fix applies."""

    what: str
    """What is computed there, with its sizes: "RMS norm of 2048, eps 1e-06"."""
    change: Callable[[Edits], object]
    """Makes the change. It may raise `UsageError`: the site is then skipped for that reason."""
    call: ModuleCall | None = None
    """The call of the module that is changed; None for what is no module, such as an optimizer."""
    path: str = ""
    """Where it is, such as `OPTIMIZER`; "" for the path of the module."""
    source: str = ""
    """The line of the code, "model.py:41"; "" for that of the module's forward."""
    skip: str = ""
    """Why it cannot be replaced; "" if it can."""
    loop: Callable[[Any], Tensor] | None = None
    """Runs a model as the change is meant for, where one call does not show it: many tokens one after the other. What
    it returns must be the same in float32, and the loop is what is timed, with everything that is kept beside it."""
    loop_calls: int = 1
    """Calls of the model in the loop: times are those of one."""
    in_step: bool = False
    """Whether what the change saves is elsewhere in the step: the module may be at its bound."""
    signature: str = ""
    """What is computed, exactly: a certificate applies to a site with the same signature alone. "" for the ops of the
    module."""

    @property
    def place(self) -> str:
        """The path of the module, or what else was given."""
        return self.path or ("" if self.call is None else self.call.path)

    @property
    def line(self) -> str:
        """The line of the code."""
        return self.source or ("" if self.call is None else self.call.source)

    @property
    def computes(self) -> str:
        """What a certificate checks."""
        return self.signature or (self.what if self.call is None else self.call.signature)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A registered fix."""

    id: str
    """Words with hyphens: "rms-norm"."""
    title: str
    """What it does, as a clause: "RMS norms as one kernel"."""
    sites: Callable[[ModelRun], Iterable[Site]]
    changes_numerics: bool = False
    """Whether results differ by more than rounding; such a fix applies only if it is asked for by its id."""
    order: int = 0
    """Fixes of a lower order are tried first."""
    omits: tuple[str, ...] = ()
    """Names of outputs of the model that it leaves out, such as "logits"."""
    series: int = 1
    """Calls in a row that are compared, of a change that does what it does after some calls."""
    compiles: bool = False
    """Whether code is compiled for the sizes of the batch: it is compared on that, in full."""
    launches: bool = False
    """Whether it saves launches alone: the other fixes are measured with it in force."""


_FIXES: dict[str, Fix] = {}
SitesFunction = Callable[["ModelRun"], Iterable[Site]]


def fix(
    id: str,
    title: str,
    *,
    changes_numerics: bool = False,
    order: int = 0,
    omits: tuple[str, ...] = (),
    series: int = 1,
    compiles: bool = False,
    launches: bool = False,
) -> Callable[[SitesFunction], SitesFunction]:
    """Registers a function that yields the sites of a fix."""
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", id):
        raise UsageError(f"{id!r} is not a valid id of a fix. Use lowercase letters, digits and hyphens.")

    def register(sites: SitesFunction) -> SitesFunction:
        if id in _FIXES:
            raise UsageError(f"There is a fix called {id!r} already.")
        _FIXES[id] = Fix(
            id=id,
            title=title,
            sites=sites,
            changes_numerics=changes_numerics,
            order=order,
            omits=omits,
            series=series,
            compiles=compiles,
            launches=launches,
        )
        return sites

    return register


def forget_fix(id: str) -> None:
    """Removes a fix from the registry."""
    _FIXES.pop(id, None)


def all_fixes() -> list[Fix]:
    """All fixes, in their order."""
    from nearpeak.fixes import patterns as _  # noqa: F401  # importing a pattern registers it

    return sorted(_FIXES.values(), key=lambda each: each.order)


def fixes(only: Iterable[str] = (), without: Iterable[str] = ()) -> list[Fix]:
    """The fixes to try, in their order: all that keep the numerics, or those of `only`, less those of `without`."""
    known = all_fixes()
    only, without = list(only), list(without)
    for id in (*only, *without):
        if id not in _FIXES:
            raise UsageError(f"There is no fix {id!r}. {did_you_mean(id, _FIXES)}")
    return [
        each for each in known if (each.id in only if only else not each.changes_numerics) and each.id not in without
    ]


@dataclass(slots=True, kw_only=True, eq=False)
class FunctionCall:
    """A call of a Python function that a forward finds by a global name, as `Edits.set_functions` can replace it."""

    name: str
    """The global name, "apply_rotary_pos_emb"."""
    function: Callable[..., Any]
    arguments: dict[str, Any]
    """By parameter; tensors are fake ones."""
    output: Any = None

    def graph(self) -> fx.GraphModule | None:
        """Its ops on its arguments as a graph; see `ModuleCall.graph`. Arguments that are no tensors are constants."""
        return _graph_of(self.function, (), self.arguments, None)


@dataclass(slots=True, kw_only=True, eq=False)
class ModuleCall:
    """One call of a module in the run of a model: the first, if it was called several times."""

    path: str
    """Its path in the model; "" for the model itself."""
    module: nn.Module
    args: tuple[Any, ...]
    """Its arguments. Tensors are fake ones with the same shape, strides, dtype, device and `requires_grad`; a tensor
    that is passed on from one module to the next is the same fake one."""
    kwargs: dict[str, Any]
    output: Any = None
    ops: list[str] = field(default_factory=list)
    """The names of the operators that ran in it, submodules included: "aten.mm.default"."""
    constants: list[float] = field(default_factory=list)
    """The floating-point constants that its operators were given, in order: an eps, a scale, a probability."""
    functions: list[FunctionCall] = field(default_factory=list)
    """The functions that its forward itself called, by global names."""
    children: list[str] = field(default_factory=list)
    """The paths of the modules that it called directly, in order."""
    calls: int = 1
    """How often it was called."""
    autocast: torch.dtype | None = None
    """The dtype of autocast on its device, if that was on."""
    source: str = ""
    """The line of its forward: "model.py:41"."""
    _graph: fx.GraphModule | bool | None = False

    def graph(self) -> fx.GraphModule | None:
        """Its ops on its arguments as a graph of torch.fx; None where that cannot be traced without values.

        Placeholders have `meta["input"]`: a position in `args` or the name of a keyword argument, with the path inside
        of it where that is a list or dictionary, as in "0", "hidden_states", "position_embeddings.1"; parameters and
        buffers have `meta["parameter"]`, the name in the module. Every node has `meta["val"]`, a fake tensor. Views,
        casts and constants are nodes and arguments as aten has them.
        """
        if self._graph is False:
            self._graph = _graph_of(self.module, self.args, self.kwargs, self.autocast)
        assert not isinstance(self._graph, bool)
        return self._graph

    @property
    def signature(self) -> str:
        """What it computes: its operators with their constants, in order, and the last sizes and dtypes of inputs."""
        tensors = [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]
        inputs = ", ".join(
            f"{str(x.dtype).removeprefix('torch.')}[..., {x.shape[-1] if x.dim() else ''}]" for x in tensors
        )
        constants = " ".join(f"{value:.6g}" for value in self.constants)
        return f"({inputs}) {' '.join(name.removeprefix('aten.') for name in self.ops)}; {constants}"


@dataclass(slots=True, kw_only=True, eq=False)
class ModelRun:
    """What one run of a model on its batch showed."""

    model: nn.Module
    args: tuple[Any, ...]
    """The real batch."""
    kwargs: dict[str, Any]
    calls: list[ModuleCall]
    """The calls of all modules in the order in which they began: the model itself is the first."""
    output: Any
    """With fake tensors."""
    trains: bool
    """Whether gradients are needed: there is a loss or an optimizer."""
    optimizer: torch.optim.Optimizer | None = None
    loss: Callable[..., Any] | None = None
    """The scalar to differentiate, of the model's output; None for the output's own `loss`."""
    argument_changes: str = ""
    """What a call changes in the objects among its arguments, as a clause: "DynamicLayer.keys grows from ..."; ""
    if nothing."""

    def call(self, path: str) -> ModuleCall:
        """The call of the module at a path."""
        return next(call for call in self.calls if call.path == path)

    @property
    def device(self) -> torch.device:
        """That of the model's parameters, or of the batch."""
        for tensor in (*self.model.parameters(), *pytree.tree_leaves((self.args, self.kwargs))):
            if isinstance(tensor, Tensor):
                return tensor.device
        return torch.device("cpu")


def observe(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[..., Any] | None = None,
    trains: bool = False,
) -> ModelRun:
    """Runs the model once on its batch and writes down what every module of it was given and which operators it ran.

    Random states, buffers and attributes of modules are as before afterwards. Memory is that of a forward pass: the
    tensors are not kept.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    observer = _Observer(model, mode)
    edits = Edits()
    with preserve_random_state(), preserve_module_state(model), torch.compiler.set_stance("force_eager"):
        try:
            for path, module in model.named_modules():
                edits.set(module, "forward", observer.wrap(path, module))
            with torch.set_grad_enabled(trains), observer.recording():
                output = model(*args, **kwargs)
            run = ModelRun(
                model=model,
                args=args,
                kwargs=dict(kwargs),
                calls=observer.calls,
                output=observer.fake(output),
                trains=trains,
                optimizer=optimizer,
                loss=loss,
            )
        finally:
            edits.undo()
    return run


class _Observer(TorchDispatchMode):
    """Follows the calls of modules, the operators and the functions that forwards call."""

    def __init__(self, model: nn.Module, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[ModuleCall] = []
        self._by_path: dict[str, ModuleCall] = {}
        self._mode = mode
        self._fakes: dict[int, tuple[Tensor, FakeTensor]] = {}
        """The real tensors are kept while the model runs, so that their ids stay theirs."""
        self._stack: list[tuple[ModuleCall, bool]] = []
        """The modules that run, and whether it is their first call."""
        self._codes: dict[str, Any] = {}
        self._open: dict[int, FunctionCall] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        has_profiler = sys.getprofile() is not None  # one of the program's own stays, and functions are not seen
        if not has_profiler:
            sys.setprofile(self._profile)
        try:
            with self:
                yield
        finally:
            if not has_profiler:
                sys.setprofile(None)
            self._open.clear()

    def fake(self, value: Any) -> Any:
        """A tree with fake tensors in the place of real ones."""
        return pytree.tree_map_only(Tensor, self._fake_tensor, value)

    def _fake_tensor(self, tensor: Tensor) -> FakeTensor:
        known = self._fakes.get(id(tensor))
        if known is None or known[1].shape != tensor.shape:
            known = self._fakes[id(tensor)] = tensor, _fake_like(self._mode, tensor)
        return known[1]

    def wrap(self, path: str, module: nn.Module) -> Callable[..., Any]:
        forward = module.forward
        self._codes[path] = list(code_objects(getattr(forward, "__func__", forward)))[-1:]

        def observed(*args: Any, **kwargs: Any) -> Any:
            call = self._by_path.get(path)
            is_first = call is None
            if call is None:
                with self._paused():
                    call = self._by_path[path] = ModuleCall(
                        path=path,
                        module=module,
                        args=self.fake(args),
                        kwargs=self.fake(kwargs),
                        autocast=_autocast_dtype(args, kwargs),
                        source=_line_of(forward),
                    )
                self.calls.append(call)
            else:
                call.calls += 1
            if self._stack and self._stack[-1][1]:
                self._stack[-1][0].children.append(path)
            self._stack.append((call, is_first))
            try:
                output = forward(*args, **kwargs)
            finally:
                self._stack.pop()
            if is_first:
                with self._paused():
                    call.output = self.fake(output)
            return output

        return observed

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Nothing of what the observer does is recorded, nor seen: fake tensors are thousands of calls in Python."""
        stack, self._stack = self._stack, []
        profile = sys.getprofile()
        sys.setprofile(None)
        try:
            yield
        finally:
            sys.setprofile(profile)
            self._stack = stack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        constants = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, float)]
        for call, is_first in self._stack:
            if is_first:
                call.ops.append(str(func))
                call.constants += constants
        return func(*args, **(kwargs or {}))

    def _profile(self, frame: FrameType, event: str, result: Any) -> None:
        """Sees functions that the forward of the innermost module calls itself."""
        if event == "return":
            function_call = self._open.pop(id(frame), None)
            if function_call is not None and result is not None:
                with self._paused():
                    function_call.output = self.fake(result)
            return
        if event != "call" or not self._stack or not self._stack[-1][1] or frame.f_back is None:
            return
        call = self._stack[-1][0]
        caller = frame.f_back
        if caller.f_code not in self._codes[call.path]:
            return
        function = next(
            (
                (key, value)
                for key in caller.f_code.co_names
                if callable(value := caller.f_globals.get(key)) and frame.f_code in code_objects(value)
            ),
            None,
        )
        if function is None:
            return
        with self._paused():
            arguments = {key: self.fake(value) for key, value in _arguments_of(frame).items()}
        call.functions.append(FunctionCall(name=function[0], function=function[1], arguments=arguments))
        self._open[id(frame)] = call.functions[-1]


def _arguments_of(frame: FrameType) -> dict[str, Any]:
    """The arguments of a call that has just begun, by parameter; those of `**kwargs` among them."""
    code, values = frame.f_code, frame.f_locals
    count = code.co_argcount + code.co_kwonlyargcount
    arguments = {name: values[name] for name in code.co_varnames[:count] if name in values}
    names = list(code.co_varnames[count:])
    if code.co_flags & inspect.CO_VARARGS:
        names.pop(0)
    if code.co_flags & inspect.CO_VARKEYWORDS and names[0] in values:
        arguments |= values[names[0]]
    return arguments


def _fake_like(mode: FakeTensorMode, tensor: Tensor) -> FakeTensor:
    with mode, torch.no_grad():
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    if tensor.requires_grad:
        fake.requires_grad_()
    assert isinstance(fake, FakeTensor)
    return fake


def _autocast_dtype(args: Any, kwargs: Any) -> torch.dtype | None:
    devices = [leaf.device.type for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    device = devices[0] if devices else "cpu"
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _line_of(forward: Callable[..., Any]) -> str:
    code = list(code_objects(getattr(forward, "__func__", forward)))[-1:]
    return f"{Path(code[0].co_filename).name}:{code[0].co_firstlineno}" if code else ""


def _graph_of(function: Any, args: Any, kwargs: Any, autocast: torch.dtype | None) -> fx.GraphModule | None:
    """The ops of a call as a graph; None where it cannot be traced on fake tensors."""
    leaves, spec = pytree.tree_flatten_with_path((list(args), dict(kwargs)))
    tensors = [(path, leaf) for path, leaf in leaves if isinstance(leaf, FakeTensor)]
    state: dict[str, Tensor] = {}
    if isinstance(function, nn.Module):
        state = {**dict(function.named_parameters()), **dict(function.named_buffers())}
    mode = next((leaf.fake_mode for _, leaf in tensors), None)
    if mode is None:
        return None
    inputs = [leaf for _, leaf in tensors] + [_fake_like(mode, tensor) for tensor in state.values()]

    def traced(*values: Tensor) -> Any:
        given = iter(values)
        filled = [next(given) if isinstance(leaf, FakeTensor) else leaf for _, leaf in leaves]
        args, kwargs = pytree.tree_unflatten(filled, spec)
        if not isinstance(function, nn.Module):
            return function(*args, **kwargs)
        return torch.func.functional_call(function, dict(zip(state, given, strict=True)), tuple(args), kwargs)

    device = inputs[0].device.type
    try:
        with (
            preserve_random_state(),
            torch.compiler.set_stance("force_eager"),
            torch.no_grad(),
            torch.autocast(device, autocast or torch.bfloat16, enabled=autocast is not None),
        ):
            module = make_fx(traced, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    except Exception:  # code of the user's, which may refuse tensors without values in any way
        return None
    names = [*(_path_text(path) for path, _ in tensors), *state]
    for node, name, is_input in zip(
        module.graph.find_nodes(op="placeholder"), names, [True] * len(tensors) + [False] * len(state), strict=True
    ):
        node.meta["input" if is_input else "parameter"] = name
    return module


def _path_text(path: tuple[Any, ...]) -> str:
    """The path of a leaf of (args, kwargs), as in "0" or "position_embeddings.1"."""
    parts = [str(getattr(key, "idx", getattr(key, "key", getattr(key, "name", key)))) for key in path[1:]]
    return ".".join(parts)
