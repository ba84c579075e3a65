"""Fixes of calls that wait for their launches: CUDA graphs, and a cache of keys that does not grow.

A call of many short kernels takes as long as the host needs to launch them, while the device idles. A CUDA graph has
the launches of one call, with the memory that they read and write, and launches all of them at once. So a call can be
replayed if it computes the same with other values: the same shapes, the same objects, nothing that it does in Python
alone. `CallGraphs` looks at a call before it records it, and runs everything else as it was. A small object, such as a
cache of keys, is recorded as a copy: its values are copied to it and back, so that the next cache has the same graph.
"""

from __future__ import annotations

import copy
import itertools
import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode

from nearpeak.errors import UsageError, message_of
from nearpeak.fixes.arguments import ArgumentState, attributes_held_by, is_plain, leaves_of, version_of
from nearpeak.fixes.edits import Edits
from nearpeak.fixes.patterns.confirm import Forward, Settings, current_forward, has_hooks, plain_attributes
from nearpeak.fixes.registry import ModelRun, Site, fix

FEWEST_OPERATORS = 20
"""Of a call that could wait for its launches."""
MOST_FORMS = 32
"""Kinds of calls that a model is watched for; the longest unused one is forgotten."""
FEWEST_REPLAYS = 3
MOST_COPIED = 0.05
"""Of the bytes of a model's parameters, all of which a call reads: objects of a call that have no more are copied."""
MOST_GRAPHS = 8
"""Of one form: a model whose fixes are switched on and off has a graph for each of its ways."""
MOST_WASTED = 3
"""Graphs that were replayed less often than that, because every call had another cache."""
SERIES = 4
"""Calls after which a graph has been recorded and replayed."""
LOOP_TOKENS = 16
PROMPT_TOKENS = 8


def can_capture(device: torch.device) -> bool:
    """Whether a device has graphs."""
    return device.type == "cuda"


def capture(call: Callable[[], Any], pool: Any) -> tuple[Callable[[], object], Any, Any]:
    """Records the launches of a call: what replays them, the output that they write, and the pool of their memory."""
    graph = torch.cuda.CUDAGraph()
    # calls of the runtime by other threads, as those of a data loader, do not end the recording
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        output = call()
    return graph.replay, output, graph.pool()


class CallGraphs:
    """The graphs of a model's calls. Graphs share their memory: outputs are copied before the next one is replayed."""

    def __init__(self) -> None:
        self._forms: OrderedDict[Any, _Form] = OrderedDict()
        self._pool: Any = None

    def call(self, model: nn.Module, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the forward of the model returns: replayed, if a call of the same form was recorded."""
        leaves, spec = leaves_of((args, kwargs))
        key = _form_of(leaves, kwargs)
        if key is None or torch.is_grad_enabled() or model.training:
            return original(model, *args, **kwargs)
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = _Form(spec)
            if len(self._forms) > MOST_FORMS:
                self._forms.popitem(last=False)
            return form.watch(model, original, args, kwargs, leaves)
        self._forms.move_to_end(key)
        if form.refused or form.spec != spec:
            return original(model, *args, **kwargs)
        graph = form.find(leaves)
        if graph is not None:
            return graph.replay(leaves)
        if form.is_wasted():
            form.refuse("every call has other objects")
            return original(model, *args, **kwargs)
        try:
            graph = _CallGraph(model, original, leaves, spec, self._pool)
        except Exception as error:  # code that waits for a value, for example
            form.refuse(f"it cannot be recorded: {type(error).__name__}: {message_of(error)}")
            return original(model, *args, **kwargs)
        self._pool = graph.pool
        form.keep(graph, leaves)
        return graph.replay(leaves)

    def refusals(self) -> list[str]:
        """Why calls are not replayed."""
        return [form.refused for form in self._forms.values() if form.refused]


class _Form:
    """Calls with arguments of the same shapes and settings."""

    def __init__(self, spec: pytree.TreeSpec) -> None:
        self.spec = spec
        self.graphs: list[_CallGraph] = []
        """The one that was used last is the first."""
        self.refused = ""
        self._wasted = 0

    def refuse(self, why: str) -> None:
        self.refused = why
        self.graphs.clear()

    def find(self, leaves: Sequence[Any]) -> _CallGraph | None:
        """The graph of these objects, or of others like them, and of the model as it is."""
        for place, graph in enumerate(self.graphs):
            if graph.holds(leaves):
                if place:
                    self.graphs.insert(0, self.graphs.pop(place))
                return graph
        return None

    def is_wasted(self) -> bool:
        """Whether too many graphs were hardly replayed: the model is the same, and objects are others each time."""
        last = self.graphs[0] if self.graphs else None
        if last is not None and last.replays < FEWEST_REPLAYS and last.is_of_model():
            self._wasted += 1
        return self._wasted > MOST_WASTED

    def keep(self, graph: _CallGraph, leaves: Sequence[Any]) -> None:
        """Those of other objects and of memory that the model no longer has go."""
        rest = [each for each in self.graphs if each.has_memory() and not each.is_of_model()]
        self.graphs = [graph, *rest][:MOST_GRAPHS]
        if not graph.copies:
            self._forget_with(graph, leaves)

    def watch(self, model: nn.Module, original: Forward, args: Any, kwargs: Any, leaves: Sequence[Any]) -> Any:
        """Runs a call as it is, and sees whether it does anything that a graph would not do again."""
        state = ArgumentState(args, kwargs, values=False)
        settings = [(module, plain_attributes(module)) for module in model.modules()]
        before = [leaf.clone() for leaf in leaves if isinstance(leaf, Tensor)]
        output = original(model, *args, **kwargs)
        changes = state.changes()
        if changes:
            self.refuse(changes)
        elif any(plain_attributes(module) != attributes for module, attributes in settings):
            self.refuse("a call changes attributes of modules")
        elif not all(
            torch.equal(was, now)
            for was, now in zip(before, (leaf for leaf in leaves if isinstance(leaf, Tensor)), strict=True)
        ):
            self.refuse("a call changes its arguments")
        elif not all(
            is_plain(leaf) or isinstance(leaf, Tensor) or any(leaf is given for given in leaves)
            for leaf in _output_leaves(output, leaves)[0]
        ):
            self.refuse("a call returns new objects")
        return output

    def _forget_with(self, graph: _CallGraph, leaves: Sequence[Any]) -> None:
        """The graph goes, with the memory that it holds, when an object among the arguments does."""
        for leaf in leaves:
            if not isinstance(leaf, Tensor) and not is_plain(leaf):
                try:
                    weakref.finalize(leaf, _drop_graph, weakref.ref(self), weakref.ref(graph)).atexit = False
                except TypeError:  # it cannot be referred to weakly: the graph lives as long as the form
                    continue


def _drop_graph(form: weakref.ref[_Form], graph: weakref.ref[_CallGraph]) -> None:
    owner, last = form(), graph()
    if owner is not None and last in owner.graphs:
        owner.graphs.remove(last)


class _OwnObject:
    """A copy of an object among the arguments, such as a cache, with which a call is recorded.

    The call of another object that is like it is replayed too: the values of its tensors are copied to those of the
    copy, and back.
    """

    def __init__(self, leaf: Any) -> None:
        self.object = copy.deepcopy(leaf)
        self._state = ArgumentState((self.object,), {}, values=False)
        self._tensors = [tensor for _, tensor in self._state.tensors]
        self._remember(leaf, ArgumentState((leaf,), {}, values=False))
        if not self._state.is_like(self._given):
            raise UsageError(f"a copy of a {type(leaf).__name__} is another object")

    def _remember(self, leaf: Any, state: ArgumentState) -> None:
        """The object of the calls from now on, as long as it lives."""
        self._leaf, self._given = weakref.ref(leaf, partial(_forget_object, weakref.ref(self))), state
        self._versions: list[int | None] = []
        """Of its tensors, when they had the values that the copy has."""

    def forget(self) -> None:
        self._given, self._versions = self._state, []

    def take(self, leaf: Any) -> bool:
        """Whether the call of an object can be that of the copy."""
        if self._leaf() is leaf and self._given.holds():
            return True
        state = ArgumentState((leaf,), {}, values=False)
        if not self._state.is_like(state):
            return False
        self._remember(leaf, state)
        return True

    def read(self) -> None:
        given = self._given_tensors()
        if not self._versions or None in self._versions or self._versions != [version_of(each) for each in given]:
            _copy_all(self._tensors, given)

    def write(self) -> None:
        given = self._given_tensors()
        _copy_all(given, self._tensors)
        self._versions = [version_of(each) for each in given]

    def _given_tensors(self) -> list[Tensor]:
        return [tensor for _, tensor in self._given.tensors]


def _forget_object(own: weakref.ref[_OwnObject], _leaf: Any) -> None:
    known = own()
    if known is not None and known._leaf is _leaf:
        known.forget()


@torch.no_grad()
def _copy_all(to: list[Tensor], source: list[Tensor]) -> None:
    kinds = [(x.dtype, x.device) for x in to]
    for kind in dict.fromkeys(kinds):  # of one dtype they are one launch
        same = [each == kind for each in kinds]
        torch._foreach_copy_(list(itertools.compress(to, same)), list(itertools.compress(source, same)))


class _CallGraph:
    """The launches of one call, recorded with its objects and with copies of its tensors."""

    def __init__(
        self, model: nn.Module, original: Forward, leaves: Sequence[Any], spec: pytree.TreeSpec, pool: Any
    ) -> None:
        self.replays = 0
        self._model = _ModelState(model)
        self._inputs = [
            torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device).copy_(leaf)
            if isinstance(leaf, Tensor)
            else None
            for leaf in leaves
        ]
        places = [place for place, leaf in enumerate(leaves) if not isinstance(leaf, Tensor) and not is_plain(leaf)]
        self.copies = _own_objects(model, {place: leaves[place] for place in places})
        """By the place of the object, if they are copied."""
        self._objects = [
            (place, id(leaves[place]), ArgumentState((leaves[place],), {}, values=False))
            for place in places
            if place not in self.copies
        ]
        given = [leaf if own is None else own for leaf, own in zip(leaves, self._inputs, strict=True)]
        for place, each in self.copies.items():
            given[place] = each.object
        args, kwargs = pytree.tree_unflatten(given, spec)
        self._launch, output, self.pool = capture(lambda: original(model, *args, **kwargs), pool)
        results, self._output_spec = _output_leaves(output, given)
        by_id = {id(leaf): place for place, leaf in enumerate(given) if not is_plain(leaf)}
        # The place of an argument that is returned, or else the tensor or plain value: no object is held.
        self._results = [
            (by_id[id(leaf)], None) if id(leaf) in by_id and not is_plain(leaf) else (None, leaf) for leaf in results
        ]

    def holds(self, leaves: Sequence[Any]) -> bool:
        """Whether the objects are those that were recorded, with the same memory, or are copied, and the model has not
        changed."""
        return (
            all(id(leaves[place]) == number and state.holds() for place, number, state in self._objects)
            and self._model.holds()
            and all(each.take(leaves[place]) for place, each in self.copies.items())
        )

    def is_of_model(self) -> bool:
        return self._model.holds()

    def has_memory(self) -> bool:
        return self._model.has_memory()

    def replay(self, leaves: Sequence[Any]) -> Any:
        for own, leaf in zip(self._inputs, leaves, strict=True):
            if own is not None:
                own.copy_(leaf)
        for each in self.copies.values():
            each.read()
        self._launch()
        for each in self.copies.values():
            each.write()
        self.replays += 1
        results = [
            leaves[place] if place is not None else value.clone() if isinstance(value, Tensor) else value
            for place, value in self._results
        ]
        return pytree.tree_unflatten(results, self._output_spec)


def _own_objects(model: nn.Module, objects: dict[int, Any]) -> dict[int, _OwnObject]:
    """Copies of the objects of a call, if they are small; none if one of them is not, or is no such object."""
    states = (ArgumentState((each,), {}, values=False) for each in objects.values())
    held = sum(tensor.nbytes for state in states for _, tensor in state.tensors)
    if not objects or held > MOST_COPIED * sum(each.nbytes for each in model.parameters()):
        return {}
    try:
        return {place: _OwnObject(leaf) for place, leaf in objects.items()}
    except Exception:  # of objects that cannot be copied
        return {}


class _ModelState:
    """What a graph has of a model: its modules with their settings, the memory of parameters and buffers, its code, and
    that there are no hooks."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors = [
            (owner, name, tensor, tensor.data_ptr())
            for module in model.modules()
            for owner in (module._parameters, module._buffers)
            for name, tensor in owner.items()
            if tensor is not None
        ]
        self._modules = [
            (module, vars(module).get("forward"), list(module._modules.values()), Settings(module))
            for module in model.modules()
        ]
        self._dictionaries: list[dict[Any, Any]] = []
        """The attributes of modules and of what these hold."""
        self._empty: list[dict[Any, Any]] = []
        """Those that have none, as the hooks of most modules."""
        self._objects: list[Any] = []
        """What the dictionaries had when all was found to be the same."""

    def holds(self) -> bool:
        now = self._all_objects()
        is_same = len(now) == len(self._objects) and all(map(operator.is_, now, self._objects))
        if not now or any(self._empty) or not is_same:
            if not self._is_same():
                return False
            own = [vars(module) for module, *_ in self._modules]
            held = (attributes_held_by(value) for each in own for value in each.values())
            distinct = [*own, *{id(each): each for each in held if each is not None}.values()]
            self._dictionaries = [each for each in distinct if each]
            self._empty = [each for each in distinct if not each]
            self._objects = self._all_objects()
        return self.has_memory()

    def has_memory(self) -> bool:
        """Whether parameters and buffers are where they were."""
        return all(
            owner.get(name) is tensor and tensor.data_ptr() == pointer for owner, name, tensor, pointer in self._tensors
        )

    def _all_objects(self) -> list[Any]:
        return [*itertools.chain.from_iterable(map(dict.values, self._dictionaries))]

    def _is_same(self) -> bool:
        for module, forward, children, settings in self._modules:
            own, now = vars(module), list(module._modules.values())
            if own.get("forward") is not forward or own["training"] or not settings.hold(module):
                return False
            if own["_forward_hooks"] or own["_forward_pre_hooks"]:
                return False
            if len(now) != len(children) or not all(map(operator.is_, now, children)):
                return False
        return True


def _form_of(leaves: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What two calls have in common that may be one graph; None for a call that cannot be."""
    parts: list[Any] = [*kwargs]
    devices = set()
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.layout != torch.strided or type(leaf) not in (Tensor, nn.Parameter):
                return None
            devices.add(leaf.device)
            parts.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.device))
        else:
            parts.append((type(leaf), leaf if is_plain(leaf) else None))
    device = next(iter(devices), None)
    # a tensor of the host is read by Python, and its values would be those of the call that was recorded
    if len(devices) != 1 or device is None or not can_capture(device) or torch.is_autocast_enabled(device.type):
        return None
    return (*parts, torch.is_inference_mode_enabled())


def _output_leaves(output: Any, given: Sequence[Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of an output; objects among the arguments are returned as they are."""
    objects = {id(leaf) for leaf in given if not isinstance(leaf, Tensor) and not is_plain(leaf)}
    return pytree.tree_flatten(output, is_leaf=lambda value: id(value) in objects)


def graphed_forward(model: nn.Module) -> Forward:
    """A forward that replays calls without gradients in evaluation mode."""
    original = current_forward(model)
    graphs: weakref.WeakKeyDictionary[nn.Module, CallGraphs] = weakref.WeakKeyDictionary()  # a copy has its own

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:  # it is traced, as by a profiler
            return original(self, *args, **kwargs)
        own = graphs.get(self)
        if own is None:
            own = graphs[self] = CallGraphs()
        return own.call(self, original, args, kwargs)

    forward.__dict__["graphs"] = graphs
    return forward


@fix("cuda-graphs", "calls without gradients as CUDA graphs", order=85, series=SERIES, launches=True)
def cuda_graphs(run: ModelRun) -> Iterator[Site]:
    """Models whose calls are many short launches."""
    count = len(run.calls[0].ops)
    if run.trains or not can_capture(run.device) or count < FEWEST_OPERATORS:
        return
    skip = _why_not(run)
    if not skip and run.argument_changes:
        skip = f"a call does in Python what a graph would not do again: {run.argument_changes}"
    yield Site(
        call=run.calls[0],
        what=f"{count} operators",
        skip=skip,
        change=lambda edits: edits.set_forward(run.model, graphed_forward(run.model)),
        signature="the model",
    )


def _why_not(run: ModelRun) -> str:
    if run.model.training:
        return "the model is in training mode"
    if any(has_hooks(module) for module in run.model.modules()):
        return "modules have hooks, which a graph would not call"
    if any(type(parameter) is not nn.Parameter for parameter in run.model.parameters()):
        return "its parameters are distributed"
    return ""


@fix("static-cache", "generation with a cache of fixed size, and its steps as CUDA graphs", order=86, launches=True)
def static_cache(run: ModelRun) -> Iterator[Site]:
    """Models that generate tokens with a cache that grows, and have a setting for one that does not."""
    model: Any = run.model
    config = getattr(model, "generation_config", None)
    tokens = next((leaf for leaf in leaves_of((run.args, run.kwargs))[0] if _is_tokens(leaf)), None)
    if run.trains or "grows" not in run.argument_changes or tokens is None:
        return
    if getattr(config, "cache_implementation", "absent") is not None or not hasattr(model, "generate"):
        return
    yield Site(
        call=run.calls[0],
        what="a cache that grows with each token",
        skip=_why_not(run),
        change=partial(_set_static_cache, model),
        loop=partial(_generate, tokens),
        loop_calls=LOOP_TOKENS,
        signature="the model",
    )


def _is_tokens(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype == torch.int64 and leaf.dim() == 2


def _set_static_cache(model: Any, edits: Edits) -> None:
    edits.set(model.generation_config, "cache_implementation", "static")
    edits.set(model.generation_config, "disable_compile", True)
    if can_capture(next(model.parameters()).device):
        edits.set_forward(model, graphed_forward(model))


def _generate(tokens: Tensor, model: Any) -> Tensor:
    """Tokens after a prompt of given ones, each the likeliest."""
    rows = tokens.shape[0]
    prompt = tokens.flatten().repeat(PROMPT_TOKENS * rows)[: PROMPT_TOKENS * rows].view(rows, PROMPT_TOKENS)
    own = dict(vars(model))
    try:
        with torch.no_grad():
            result: Tensor = model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=LOOP_TOKENS,
                min_new_tokens=LOOP_TOKENS,
                do_sample=False,
            )
    finally:
        for name in [name for name, value in vars(model).items() if name not in own and is_plain(value)]:
            del vars(model)[name]  # sizes that were noted for the next call
    return result
