"""Rotary embeddings in functions that forwards call, attention written out in a forward, and attention that a registry
of transformers chooses."""

from __future__ import annotations

import inspect
import itertools
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, fx, nn

from nearpeak import kernels
from nearpeak.errors import UsageError
from nearpeak.fixes.arguments import version_of
from nearpeak.fixes.edits import Edits
from nearpeak.fixes.patterns.blocks import confirm_rewrite, draw_arguments
from nearpeak.fixes.patterns.confirm import Draws, Memo, agree, bare_copy, has_hooks
from nearpeak.fixes.patterns.dataflow import (
    argument,
    child_name,
    op_name,
    own_children,
    own_forward,
    rewritten_forward,
    set_rewritten_forward,
    trace_forward,
    traceable,
    without_casts,
)
from nearpeak.fixes.registry import FunctionCall, ModelRun, ModuleCall, Site, fix

_ROTARY = Memo()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """What a function computes: rotated heads, `rotary` of `nearpeak.kernels` with these arguments."""

    heads: tuple[str, ...]
    """The parameters that are rotated: q and k, or one tensor."""
    cos: str
    sin: str
    interleaved: bool
    seq_dim: int
    repeated: bool
    """Whether cos and sin have each angle twice."""
    dims: tuple[int, int]
    """The numbers of dimensions of heads and of tables."""
    others: tuple[tuple[str, Any], ...]
    """The other parameters with their values."""

    def __str__(self) -> str:
        return f"rotary embedding of {' and '.join(self.heads)}{', interleaved' if self.interleaved else ''}"

    def __call__(self, arguments: dict[str, Any]) -> Any:
        cos, sin = (_as_table(arguments[name]) for name in (self.cos, self.sin))
        tensors = [arguments[name] for name in self.heads]
        width = cos.shape[-1] if self.repeated else 2 * cos.shape[-1]
        options: dict[str, Any] = {"interleaved": self.interleaved, "seq_dim": self.seq_dim, "rotary_dim": width}
        if len(tensors) == 1:
            return kernels.rotary(tensors[0], cos, sin, **options)
        return kernels.rotary_pair(tensors[0], tensors[1], cos, sin, **options)


def _as_table(table: Tensor) -> Tensor:
    """[seq, columns] or [batch, seq, columns], without the dimension of heads."""
    while table.dim() > 2 and 1 in table.shape[:-1] and (table.dim() > 3 or table.shape[0] == 1):
        table = table.squeeze(table.shape.index(1))
    return table


def recognize_rotary(function: FunctionCall) -> Rotary | None:
    """By hypotheses about which argument is what, on drawn angles."""
    tensors = {name: value for name, value in function.arguments.items() if isinstance(value, Tensor)}
    rest = {name: value for name, value in function.arguments.items() if name not in tensors}
    if len(tensors) not in (3, 4) or not all(isinstance(value, (int, str, type(None))) for value in rest.values()):
        return None
    if not all(value.is_floating_point() for value in tensors.values()):
        return None
    shapes = tuple((name, tuple(value.shape)) for name, value in tensors.items())
    key = (function.function, shapes, tuple(rest.items()))
    found: Rotary | None = _ROTARY.get(key, lambda: _recognize_rotary(function, tensors, rest))
    return found


def _recognize_rotary(function: FunctionCall, tensors: dict[str, Tensor], rest: dict[str, Any]) -> Rotary | None:
    count = len(tensors) - 2
    outputs = function.output if isinstance(function.output, tuple) else (function.output,)
    if len(outputs) != count or not all(isinstance(output, Tensor) for output in outputs):
        return None
    for names in itertools.permutations(tensors):
        heads, (cos, sin) = names[:count], names[count:]
        x, table = tensors[heads[0]], tensors[cos]
        if x.dim() not in (3, 4) or tensors[sin].shape != table.shape or table.shape[-1] > x.shape[-1]:
            continue
        if any(tensors[name].shape != output.shape for name, output in zip(heads, outputs, strict=True)):
            continue
        for interleaved, seq_dim, repeated in itertools.product((False, True), (-2, -3), (True, False)):
            rotary = Rotary(
                heads=heads, cos=cos, sin=sin, interleaved=interleaved, seq_dim=seq_dim, repeated=repeated,
                dims=(x.dim(), table.dim()),
                others=tuple(rest.items()),
            )  # fmt: skip
            if _confirm_rotary(function, rotary, tensors, rest):
                return rotary
    return None


def _confirm_rotary(function: FunctionCall, rotary: Rotary, tensors: dict[str, Tensor], rest: dict[str, Any]) -> bool:
    draws = Draws()
    drawn = {name: draws.like(tensors[name]) for name in tensors}
    for name in (rotary.cos, rotary.sin):  # no angles: a wrong hypothesis must not hold because of cos² + sin² = 1
        table = drawn[name]
        if rotary.repeated:
            half = table[..., : table.shape[-1] // 2]
            drawn[name] = half.repeat_interleave(2, -1) if rotary.interleaved else torch.cat((half, half), -1)
    return agree(
        lambda **given: function.function(**given, **rest),
        lambda **given: rotary(given),
        [((), drawn)],
        gradients=False,
    )


def rotary_function(rotary: Rotary, original: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the kernel; other arguments go to the original."""
    signature = inspect.signature(original)
    others = dict(rotary.others)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        arguments = given.arguments
        if all(arguments.get(name) == value for name, value in others.items()) and all(
            isinstance(arguments[name], Tensor) for name in (*rotary.heads, rotary.cos, rotary.sin)
        ):
            heads = [arguments[name] for name in rotary.heads]
            cos = arguments[rotary.cos]
            if all(x.dtype == cos.dtype and (x.dim(), cos.dim()) == rotary.dims for x in heads):
                return rotary(arguments)
        return original(*args, **kwargs)

    return traceable(call)


def _replace_rotary(rotary: Rotary, module: nn.Module, function: FunctionCall, edits: Edits) -> None:
    edits.set_functions(module, {function.name: rotary_function(rotary, function.function)})


@fix("rotary", "rotary embeddings as one kernel", order=8)  # a forward that is rewritten no longer calls functions
def rotaries(run: ModelRun) -> Iterator[Site]:
    """Functions that rotate heads."""
    for call in run.calls:
        done = set()
        for function in call.functions:
            rotary = recognize_rotary(function) if function.name not in done else None
            if rotary is None:
                continue
            done.add(function.name)
            x = torch.empty(1, 1, 1, 2, device=run.device)
            yield Site(
                call=call, what=f"{rotary} in {function.name}()",
                skip=kernels.supports(kernels.rotary, x, x[0, 0, :, :1], x[0, 0, :, :1]).reason,
                change=partial(_replace_rotary, rotary, call.module, function),
            )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WrittenAttention:
    """Rewrites softmax(q @ k^T * scale + mask) @ v in the graph of a forward."""

    dropouts: Mapping[str, nn.Module]
    """The children that are dropouts, by path."""
    causal_up_to: int = 0
    """Up to as many tokens the masks are causal ones, which the kernel makes itself."""

    def __call__(self, graph: fx.Graph) -> Iterable[str]:
        for node in list(graph.nodes):
            if op_name(node) != "matmul" or len(node.args) != 2:
                continue
            weights, value = node.args
            dropout: Any = 0.0
            weights = without_casts(weights)
            dropped = ""
            if isinstance(weights, fx.Node) and weights.op == "call_module" and str(weights.target) in self.dropouts:
                dropped = str(weights.target)
                weights = without_casts(weights.args[0])
            elif op_name(weights) == "dropout":
                if argument(weights, 2, "training", True):
                    dropout = argument(weights, 1, "p", 0.5)
                weights = without_casts(weights.args[0])
            if op_name(weights) != "softmax" or argument(weights, 1, "dim") not in (-1, 3):
                continue
            match = _scores(weights.args[0])
            if match is None or not _is_used_once(node, weights):
                continue
            query, key, scale, masks = match
            with graph.inserting_before(node):
                module = graph.get_attr(dropped) if dropped else None
                buffers = tuple(_buffers_of(masks)) if self.causal_up_to else ()
                new = graph.call_function(
                    attend, (query, key, value, scale, tuple(masks), self.causal_up_to, dropout, module, buffers)
                )
            node.replace_all_uses_with(new)
            _erase(graph, node)
            yield dropped


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Removes a node, and what it alone used, of the ops of attention."""
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for before in inputs:
        if not before.users and (before.op == "call_module" or op_name(before) in _REMOVABLE):
            _erase(graph, before)


_REMOVABLE = ("softmax", "dropout", "masked_fill", "add", "mul", "div", "matmul", "transpose", "to", "sub")


def _is_used_once(product: fx.Node, weights: fx.Node) -> bool:
    """Whether the weights serve the product alone: some forwards return them."""
    node = weights
    while True:
        users = list(node.users)
        if len(users) != 1:
            return False
        if users[0] is product:
            return True
        node = users[0]


def _scores(node: Any) -> tuple[fx.Node, fx.Node, Any, list[tuple[str, Any, Any]]] | None:
    """Query, key before its transposition, the factor, and the masks of scores, from the product on."""
    masks: list[tuple[str, Any, Any]] = []
    scales: list[Any] = []
    for _ in range(8):
        node = without_casts(node)
        name = op_name(node)
        if name in ("masked_fill", "add") and scales:
            return None  # the factor would apply to the mask too
        if name == "masked_fill":
            masks.append(("fill", argument(node, 1, "mask"), argument(node, 2, "value")))
            node = node.args[0]
        elif name == "add" and len(node.args) == 2 and not node.kwargs:
            scores, bias = node.args if _leads_to_product(node.args[0]) else node.args[::-1]
            if not isinstance(bias, fx.Node):
                return None
            masks.append(("add", bias, None))
            node = scores
        elif name in ("mul", "div") and len(node.args) == 2:
            number = node.args[1]
            if name == "mul" and isinstance(node.args[0], (int, float)):
                number, node = node.args[0], node.args[1]
            else:
                node = node.args[0]
            scales.append((name, number))
        elif name == "matmul" and len(node.args) == 2:
            key = _transposed(node.args[1])
            return None if key is None else (node.args[0], key, tuple(scales), masks)
        else:
            return None
    return None


def _leads_to_product(node: Any) -> bool:
    for _ in range(8):
        node = without_casts(node)
        if op_name(node) == "matmul":
            return True
        if op_name(node) not in ("mul", "div", "masked_fill", "add"):
            return False
        node = next((value for value in node.args if isinstance(value, fx.Node)), None)
    return False


def _transposed(node: Any) -> fx.Node | None:
    """The tensor that was transposed in its last two dimensions."""
    if op_name(node) == "transpose" and isinstance(node.args[0], fx.Node):
        dims = set(node.args[1:3])
        if node.target == "mT" or (len(node.args) == 2 and node.args[1] == "mT") or dims in ({-1, -2}, {2, 3}):
            return node.args[0]
    return None


class _Probe:
    """While it is set, attention notes its masks as biases and returns zeros."""

    masks: list[Tensor | None] | None = None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scales: Sequence[tuple[str, Any]], masks: Sequence[tuple[str, Any, Any]],
    causal_up_to: int, dropout: float, module: nn.Dropout | None, buffers: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    """Attention as one op: that of `nearpeak.kernels` where it runs, torch's elsewhere."""
    if _Probe.masks is not None:
        _Probe.masks.append(_bias(masks, query.dtype, query.device))
        return query.new_zeros((*query.shape[:-1], value.shape[-1]))
    scale = 1.0
    for name, number in scales:
        scale = scale * float(number) if name == "mul" else scale / float(number)
    if module is not None:
        dropout = module.p if module.training else 0.0
    causal = query.shape[-2] == key.shape[-2] <= causal_up_to and _are_causal(masks, buffers, query.shape[-2])
    bias = None if causal else _bias(masks, query.dtype, query.device)
    return kernels.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, dropout_p=dropout, is_causal=causal, scale=scale
    )


attend = traceable(_attend)


_SEEN: dict[tuple[Any, ...], tuple[bool, list[weakref.ref[Tensor]]]] = {}
_MOST_SEEN = 1000


def _are_causal(masks: Sequence[tuple[str, Any, Any]], buffers: Sequence[Tensor], tokens: int) -> bool:
    """Whether masks are still causal ones: looked at once for each value of the buffers that they are made of."""
    if any(type(each) not in (Tensor, nn.Parameter) for each in buffers):  # of a trace, which has no values
        return True
    if not buffers:
        return True
    if torch.compiler.is_compiling():
        return False
    key = (tokens, *((id(each), version_of(each), each.data_ptr()) for each in buffers))
    known = _SEEN.get(key)
    if known is None or any(ref() is not each for ref, each in zip(known[1], buffers, strict=True)):
        if len(_SEEN) >= _MOST_SEEN:
            _SEEN.clear()
        mask = _bias(masks, torch.float32, buffers[0].device)
        known = _SEEN[key] = _causal_size(mask) == tokens, [weakref.ref(each) for each in buffers]
    return known[0]


def _buffers_of(masks: Sequence[tuple[str, Any, Any]]) -> Iterator[fx.Node]:
    """The nodes of the module's tensors that masks are made of."""
    nodes = [mask for _, mask, _ in masks if isinstance(mask, fx.Node)]
    found: dict[fx.Node, None] = {}
    while nodes:
        node = nodes.pop()
        if node not in found:
            found[node] = None
            nodes += node.all_input_nodes
    return (node for node in found if node.op == "get_attr")


def _bias(masks: Sequence[tuple[str, Any, Any]], dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """All masks as one: booleans, True for visible keys, or numbers to add."""
    if masks and all(kind == "fill" and fill == -math.inf for kind, _, fill in masks):
        hidden: Tensor = masks[0][1].bool()
        for _, mask, _ in masks[1:]:
            hidden = hidden | mask.bool()
        return ~hidden
    bias: Tensor | None = None
    for kind, mask, fill in reversed(masks):  # from the product on
        if kind == "add":
            bias = mask.to(dtype) if bias is None else bias + mask.to(dtype)
        else:
            zero = torch.zeros((), dtype=dtype, device=device) if bias is None else bias
            bias = torch.where(mask.bool(), torch.as_tensor(fill, dtype=dtype, device=device), zero)
    return bias


@fix("attention", "attention as one kernel", order=10)
def attentions(run: ModelRun) -> Iterator[Site]:
    """Forwards that write attention out."""
    for call in run.calls:
        if not any("softmax" in name for name in call.ops):
            continue
        dropouts = {
            child_name(call, child): child.module
            for child in own_children(run, call)
            if isinstance(child.module, nn.Dropout) and not has_hooks(child.module)
        }
        try:
            traced = trace_forward(own_forward(run, call), call.module.training)
        except UsageError:
            continue
        rewrite = WrittenAttention(dropouts=dropouts)
        if not list(rewrite(traced.graph)):
            continue
        tokens = _causal_tokens(run, call, rewrite)
        rewrite = WrittenAttention(dropouts=dropouts, causal_up_to=tokens)
        yield Site(
            call=call, what=f"attention written out{', causal' if tokens else ''}",
            skip=confirm_rewrite(run, call, rewrite, keep=dropouts) or "",
            change=partial(set_rewritten_forward, own_forward(run, call), rewrite),
        )  # fmt: skip


def _causal_tokens(run: ModelRun, call: ModuleCall, rewrite: WrittenAttention) -> int:
    """The number of tokens for which masks were seen to be causal; 0 if they are not, or depend on arguments."""
    traced = trace_forward(own_forward(run, call), call.module.training)
    list(rewrite(traced.graph))
    masks = [
        mask
        for node in traced.graph.nodes
        if node.target is attend
        for _, mask, _ in node.args[4]
        if isinstance(mask, fx.Node)
    ]
    if not masks or any(_depends_on_arguments(mask) for mask in masks):
        return 0
    draws = Draws(run.device)
    try:
        _, function = rewritten_forward(own_forward(run, call), rewrite)
        copy = bare_copy(call.module, draws)
        args, kwargs = draw_arguments(call, draws, shrink=False)
        _Probe.masks = []
        with torch.no_grad():
            function(copy, *args, **kwargs)
        seen = _Probe.masks
    except Exception:  # of the user's code on drawn numbers
        return 0
    finally:
        _Probe.masks = None
    return min((_causal_size(mask) for mask in seen), default=0)


def _depends_on_arguments(node: fx.Node) -> bool:
    """Whether values of tensors decide, and not only their shapes."""
    if node.op in ("placeholder", "call_module"):
        return True
    if op_name(node) in ("size", "shape", "device", "dtype", "dim", "ndim"):
        return False
    inputs = node.all_input_nodes
    if op_name(node) in _LIKE:
        inputs = [before for before in inputs if before is not node.args[0]]
    return any(map(_depends_on_arguments, inputs))


_LIKE = ("new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like")
"""Ops that take shape, dtype and device of their first argument."""


def _causal_size(mask: Tensor | None) -> int:
    if mask is None or mask.dim() < 2 or mask.shape[-1] != mask.shape[-2]:
        return 0
    size = mask.shape[-1]
    visible = torch.ones(size, size, dtype=torch.bool, device=mask.device).tril()
    if mask.dtype == torch.bool:
        same = bool((mask == visible).all())
    else:
        same = bool(((mask == 0) == visible).all()) and bool((mask.masked_fill(visible, -1e30) <= -1e4).all())
    return size if same else 0


_REGISTERED = "nearpeak"


@fix("attention-implementation", "another attention implementation of transformers", order=10)
def attention_implementations(run: ModelRun) -> Iterator[Site]:
    """Models whose attention a registry of transformers chooses by their configuration."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return
    target = "sdpa" if run.device.type == "cpu" else _REGISTERED
    configurations: dict[int, tuple[str, Any, Any]] = {}
    for path, module in run.model.named_modules():
        if isinstance(module, transformers.PreTrainedModel):
            configurations.setdefault(id(module.config), (path, module, module.config))
    for path, module, configuration in configurations.values():
        before = configuration._attn_implementation
        if before == target or before not in ("eager", "sdpa") or (before == "sdpa" and target == "sdpa"):
            continue
        prefix = f"{path}." if path else ""
        users = [
            call
            for call in run.calls
            if call.path.startswith(prefix) and vars(call.module).get("config") is configuration and _attends(run, call)
        ]
        if not users:
            continue
        skip = "" if module._can_set_attn_implementation() else "its attention is not chosen by the registry"
        if target == "sdpa" and not module._supports_sdpa:
            skip = "its class does not support sdpa"
        yield Site(
            what=f"attention of {len(users)} modules, {before!r} in transformers",
            path=path or type(module).__name__,
            source=users[0].source,
            signature=f"attention of transformers, {before!r}", skip=skip,
            change=partial(_set_implementation, configuration, target),
        )  # fmt: skip


def _attends(run: ModelRun, call: ModuleCall) -> bool:
    """Whether a module itself attends, and not one in it."""
    return _has_attention(call) and not any(_has_attention(run.call(path)) for path in call.children)


def _has_attention(call: ModuleCall) -> bool:
    return any("attention" in name or "softmax" in name for name in call.ops)


def _set_implementation(configuration: Any, name: str, edits: Edits) -> None:
    if name == _REGISTERED:
        from nearpeak.kernels.transformers import attention_forward, make_mask

        transformers, masking = import_module("transformers"), import_module("transformers.masking_utils")
        for registry, function in (
            (transformers.AttentionInterface, attention_forward),
            (transformers.AttentionMaskInterface, partial(make_mask, masking)),
        ):
            if name not in registry._global_mapping:
                edits.set_item(registry._global_mapping, name, function)
    edits.set(configuration, "_attn_implementation_internal", name)
