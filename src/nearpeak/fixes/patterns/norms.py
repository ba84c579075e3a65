"""RMSNorm and LayerNorm, however they are written, and the addition before them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from nearpeak import kernels
from nearpeak.errors import UsageError
from nearpeak.fixes.edits import Edits
from nearpeak.fixes.patterns.blocks import confirm_rewrite
from nearpeak.fixes.patterns.confirm import (
    Draws,
    Forward,
    Memo,
    Settings,
    agree,
    bare_copy,
    current_forward,
    has_hooks,
    kind_of,
)
from nearpeak.fixes.patterns.dataflow import (
    CASTS,
    argument,
    child_name,
    children_of,
    numbers_of,
    op_name,
    op_names,
    own_children,
    own_forward,
    set_rewritten_forward,
    tensor_of,
    trace_forward,
    traceable,
    without_casts,
)
from nearpeak.fixes.registry import ModelRun, ModuleCall, Site, fix
from nearpeak.kernels._runtime.policy import autocast_dtype

_OPS = frozenset(
    "to pow mul mean add rsqrt sqrt div sub var var_mean std std_mean sum native_layer_norm _fused_rms_norm"
    " linalg_vector_norm norm clone view unsqueeze reciprocal neg expand detach alias contiguous getitem abs"
    " permute transpose clamp_min maximum".split()
)
_REDUCTIONS = frozenset("mean sum var var_mean std std_mean linalg_vector_norm norm".split())
_FUSED = frozenset(("native_layer_norm", "_fused_rms_norm", "layer_norm", "rms_norm"))
_LARGEST_EPS = 0.1
_DIMS = (1, 2, 3, 4)
"""The code is tried on tensors of so many dimensions: some reduce another one than the last of some."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Norm:
    """What a module computes: x / sqrt(mean(x**2) + eps) * (offset + weight) + bias, of x less its mean if centered."""

    centered: bool
    eps: float
    offset: float
    weight: str | None
    """The name of the parameter in the module."""
    bias: str | None
    columns: int
    is_fused: bool
    """Whether it is one op of torch already."""
    dims: frozenset[int]
    """The numbers of dimensions of x for which this is so."""
    result_dtypes: dict[Any, torch.dtype] = field(default_factory=dict)
    """By the dtypes of x and weight and that of autocast: some norms return the dtype of x, some that of the product
    with the weight."""

    def __str__(self) -> str:
        name = "LayerNorm" if self.centered else "RMSNorm"
        offset = f", weight + {self.offset:g}" if self.offset else ""
        return f"{name} of {self.columns}, eps {self.eps:g}{offset}"

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        """The kernel, with the parameters that the module has now."""
        weight = None if self.weight is None else getattr(module, self.weight)
        bias = None if self.bias is None else getattr(module, self.bias)
        if self.centered:
            return kernels.layer_norm(x, weight, bias, eps=self.eps)
        return kernels.rms_norm(x, weight, bias=bias, eps=self.eps, offset=self.offset)

    def after_add(self, module: nn.Module, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of the sum, and the sum."""
        weight = None if self.weight is None else getattr(module, self.weight)
        bias = None if self.bias is None else getattr(module, self.bias)
        if self.centered:
            return kernels.add_layer_norm(x, residual, weight, bias, eps=self.eps)
        return kernels.add_rms_norm(x, residual, weight, bias=bias, eps=self.eps, offset=self.offset)

    def result_dtype(self, module: nn.Module, x: Tensor, original: Forward) -> torch.dtype | None:
        """What the module returns for such an x: asked once with a row of zeros."""
        weight = None if self.weight is None else getattr(module, self.weight)
        key = (x.dtype, None if weight is None else weight.dtype, x.device.type, autocast_dtype(x.device))
        known = self.result_dtypes.get(key)
        if known is None and not torch.compiler.is_compiling():
            row = torch.zeros((1,) * (x.dim() - 1) + (self.columns,), dtype=x.dtype, device=x.device)
            with torch.no_grad():
                known = self.result_dtypes[key] = original(module, row).dtype
        return known


def recognize_norm(call: ModuleCall) -> Norm | None:
    """The norm that a module computes, confirmed on drawn numbers; None if it computes something else."""
    own = vars(call.module).get("forward")
    for cell in getattr(own, "__closure__", None) or ():  # it has been replaced already
        if isinstance(cell.cell_contents, Norm):
            return cell.cell_contents
    tensors = [value for value in (*call.args, *call.kwargs.values()) if value is not None]
    if len(tensors) != 1 or not isinstance(tensors[0], Tensor) or call.children or not isinstance(call.output, Tensor):
        return None
    x = tensors[0]
    if not x.dim() or not x.is_floating_point() or call.output.shape != x.shape or x.shape[-1] < 2:
        return None
    names = {name.split(".")[1] for name in call.ops if name.startswith("aten.")}
    if not names & (_REDUCTIONS | _FUSED):
        return None
    kind = kind_of(call.module, x.shape[-1], x.dim(), x.dtype, call.autocast)
    found: Norm | None = _NORMS.get(kind, lambda: _recognize(call, x))
    return found


_NORMS = Memo()


def _recognize(call: ModuleCall, x: Tensor) -> Norm | None:
    module = call.module
    traced = call.graph()
    if traced is None:
        return None
    names = op_names(traced.graph)
    if not set(names) <= _OPS or not set(names) & (_REDUCTIONS | _FUSED):
        return None
    columns = x.shape[-1]
    used = [node for node in traced.graph.find_nodes(op="placeholder") if "parameter" in node.meta and node.users]
    if any(tuple(node.meta["val"].shape) != (columns,) for node in used) or len(used) > 2:
        return None
    parameters = [node.meta["parameter"] for node in used]
    if any("." in name or name not in module._parameters for name in parameters):
        return None
    is_fused = any(name in _FUSED for name in names)
    eps_values = [number for number in numbers_of(traced.graph) if 0.0 < number <= _LARGEST_EPS] + [0.0]
    orders = [(a, b) for a, b in itertools.permutations([*parameters, None, None], 2) if {a, b} >= set(parameters)]
    original = current_forward(module)
    for centered, eps, (weight, bias), offset in itertools.product(
        (False, True), eps_values, dict.fromkeys(orders), (0.0, 1.0)
    ):
        if offset and (weight is None or centered):
            continue
        norm = Norm(
            centered=centered, eps=eps, offset=offset, weight=weight, bias=bias, columns=columns, is_fused=is_fused,
            dims=frozenset((x.dim(),)),
        )  # fmt: skip
        if _confirm(module, original, norm, x.dim()):
            others = [dim for dim in _DIMS if _confirm(module, original, norm, dim)]
            return replace(norm, dims=norm.dims.union(others))
    return None


def _confirm(module: nn.Module, original: Forward, norm: Norm, ndim: int) -> bool:
    """Rows of several sizes: eps decides the result where squares are as small as it is. And in float32, for an eps
    that depends on the dtype."""
    for dtype in (torch.float64, torch.float32):
        draws = Draws()
        copy = bare_copy(module, draws, dtype)
        scales = [1.0, 1e-3, max(norm.eps, 1e-12) ** 0.5, 30.0]
        shape = (*(2, 3, 2, 2, 2)[: ndim - 1], norm.columns)
        inputs: list[Any] = [(((draws.normal(*shape, dtype=dtype) + 0.5) * scale,), {}) for scale in scales]
        parameters = [parameter for parameter in copy.parameters(recurse=False)]
        same = agree(
            lambda value, copy=copy: original(copy, value),
            lambda value, copy=copy: norm(copy, value),
            inputs,
            parameters,
            dtype=dtype,
        )
        if not same:
            return False
    return True


def norm_forward(norm: Norm, module: nn.Module) -> Forward:
    """A forward that runs the kernel for what was recognized, and the module's own forward for everything else."""
    original, settings = current_forward(module), Settings(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else next(iter(kwargs.values())) if len(kwargs) == 1 else None
        if isinstance(x, Tensor) and x.dim() in norm.dims and x.shape[-1] == norm.columns and settings.hold(self):
            dtype = norm.result_dtype(self, x, original)
            if dtype is not None:
                return norm(self, x if x.dtype == dtype else x.to(dtype))
        return original(self, *args, **kwargs)

    return forward


@fix("norm", "norms as one kernel", order=20)
def norms(run: ModelRun) -> Iterator[Site]:
    """Modules that normalize rows."""
    for call in run.calls:
        norm = recognize_norm(call)
        if norm is None or (norm.is_fused and run.device.type != "cuda"):
            continue
        yield Site(call=call, what=str(norm), change=partial(_replace, norm, call.module))


def _replace(norm: Norm, module: nn.Module, edits: Edits) -> None:
    edits.set_forward(module, norm_forward(norm, module))


class InlineNorms:
    """Rewrites x * rsqrt(mean(x ** 2) + eps) * weight in a graph."""

    def __call__(self, graph: fx.Graph) -> Iterable[str]:
        for node in list(graph.nodes):
            match = _normalized(node)
            if match is None:
                continue
            x, eps = match
            last, weight, offset = _weighted(node, x)
            result, given = tensor_of(last), tensor_of(x)
            if result is None or given is None or result.dtype != given.dtype:
                continue
            written_out = _written_out(last, (x,) if weight is None else (x, weight))
            if written_out is None:
                continue
            with graph.inserting_before(last):
                new = graph.call_function(normalizer(written_out, eps, offset), (x, weight))
            new.meta = dict(last.meta)
            last.replace_all_uses_with(new)
            graph.erase_node(last)
            yield ""


def normalizer(written_out: Callable[..., Tensor], eps: float, offset: float) -> Callable[..., Tensor]:
    """A norm that returns the dtype of the code for it, which is asked once with a row of zeros."""
    result_dtypes: dict[Any, torch.dtype] = {}

    def _normalize(x: Tensor, weight: Tensor | None) -> Tensor:
        given = (x,) if weight is None else (x, weight)
        key = (*(each.dtype for each in given), x.device.type, autocast_dtype(x.device))
        dtype = result_dtypes.get(key)
        if dtype is None:
            row = torch.zeros((1,) * (x.dim() - 1) + x.shape[-1:], dtype=x.dtype, device=x.device)
            with torch.no_grad():
                dtype = written_out(row, *given[1:]).dtype
            if not torch.compiler.is_compiling():
                result_dtypes[key] = dtype
        return kernels.rms_norm(x if x.dtype == dtype else x.to(dtype), weight, eps=eps, offset=offset)

    return traceable(_normalize)


def _written_out(last: fx.Node, given: Sequence[fx.Node]) -> Callable[..., Tensor] | None:
    """The part of a graph from given nodes to the last one, as a function; None if it needs anything else."""
    part = fx.Graph()
    copies = {node: part.placeholder(f"given_{place}") for place, node in enumerate(given)}

    def take(node: fx.Node) -> bool:
        if node in copies:
            return True
        if node.op not in ("call_function", "call_method") or not all(map(take, node.all_input_nodes)):
            return False
        copies[node] = part.node_copy(node, lambda before: copies[before])
        return True

    if not take(last):
        return None
    part.output(copies[last])
    return fx.GraphModule(nn.Module(), part)


def _normalized(node: fx.Node) -> tuple[fx.Node, float] | None:
    """x and eps, if a node is x over the root of the mean of its squares."""
    name = op_name(node)
    if name not in ("mul", "div") or len(node.args) != 2:
        return None
    orders = (node.args,) if name == "div" else (node.args, node.args[::-1])
    for rows, root in orders:
        if not isinstance(rows, fx.Node) or not isinstance(root, fx.Node):
            continue
        power = op_name(root) == "pow" and argument(root, 1, "exponent")
        is_inverse = op_name(root) == "rsqrt" or power == -0.5
        if not (is_inverse if name == "mul" else op_name(root) == "sqrt" or power == 0.5):
            continue
        total = root.args[0]
        if op_name(total) != "add" or not isinstance(total, fx.Node) or len(total.args) != 2:
            continue
        mean, eps = total.args if isinstance(total.args[0], fx.Node) else total.args[::-1]
        squares = _mean_of(mean)
        if squares is None or not isinstance(eps, float):
            continue
        squared = squares.args[0]
        is_square = op_name(squares) == "pow" and (squares.target == "square" or argument(squares, 1, "exponent") == 2)
        is_product = op_name(squares) == "mul" and squares.args[0] is squares.args[1]
        if squared is rows and (is_square or is_product):
            source = without_casts(rows)
            return (source if isinstance(source, fx.Node) else rows), eps
    return None


def _mean_of(node: Any) -> fx.Node | None:
    """What a mean over the last dimension is taken of."""
    if op_name(node) != "mean" or not argument(node, 2, "keepdim", False):
        return None
    dim = argument(node, 1, "dim")
    dims = list(dim) if isinstance(dim, (list, tuple)) else [dim]
    given = tensor_of(node.args[0])
    is_last = dims == [-1] or (given is not None and dims == [given.dim() - 1])
    return node.args[0] if is_last and isinstance(node.args[0], fx.Node) else None


def _weighted(node: fx.Node, x: fx.Node) -> tuple[fx.Node, fx.Node | None, float]:
    """The last node of a norm, with its weight, if it has one, and what is added to that."""
    end, weight, offset = node, None, 0.0
    columns = None if tensor_of(x) is None else tensor_of(x).shape[-1]  # type: ignore[union-attr]
    while len(end.users) == 1:
        user = next(iter(end.users))
        if op_name(user) in CASTS and user.args[0] is end:
            end = user
            continue
        others = [value for value in user.args if value is not end]
        if op_name(user) != "mul" or weight is not None or len(others) != 1 or len(user.args) != 2:
            break
        factor, plus = without_casts(others[0]), 0.0
        if op_name(factor) == "add" and 1.0 in factor.args:
            factor, plus = without_casts(next(value for value in factor.args if value != 1.0)), 1.0
        size = tensor_of(factor)
        if size is None or tuple(size.shape) != (columns,):
            break
        end, weight, offset = user, factor, plus
    return end, weight, offset


@fix("inline-norm", "norms inside of a forward as one kernel", order=21)
def inline_norms(run: ModelRun) -> Iterator[Site]:
    """Forwards that normalize rows among other things."""
    rewrite = InlineNorms()
    for call in run.calls:
        if not any("rsqrt" in name or "sqrt" in name or ".pow" in name for name in call.ops):
            continue
        if recognize_norm(call) is not None:
            continue
        try:
            traced = trace_forward(own_forward(run, call), call.module.training)
        except UsageError:
            continue
        count = len(list(rewrite(traced.graph)))
        if count:
            yield Site(
                call=call,
                what="RMSNorm" if count == 1 else f"{count} RMSNorms",
                skip=confirm_rewrite(run, call, rewrite, keep=()) or "",
                change=partial(set_rewritten_forward, own_forward(run, call), rewrite),
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _AddNorms:
    """Rewrites `norm(a + b)` in the graph of a forward."""

    norms: dict[str, Norm]
    """By the path of the child."""

    def __call__(self, graph: fx.Graph) -> Iterable[str]:
        for node, path in list(children_of(graph)):
            total = node.args[0] if len(node.args) == 1 and not node.kwargs else None
            if path not in self.norms or not isinstance(total, fx.Node) or not _is_plain_sum(total):
                continue
            residual, x = total.args
            with graph.inserting_after(total):
                module = graph.get_attr(path)
            with graph.inserting_after(module):
                both = graph.call_function(add_norm(self.norms[path]), (module, x, residual))
            with graph.inserting_after(both):
                normed = graph.call_function(_first, (both,))
                new_total = graph.call_function(_second, (both,))
            node.replace_all_uses_with(normed)
            graph.erase_node(node)
            total.replace_all_uses_with(new_total)
            graph.erase_node(total)
            yield path


def _first(pair: Any) -> Any:
    return pair[0]


def _second(pair: Any) -> Any:
    return pair[1]


_first, _second = traceable(_first), traceable(_second)


def _is_plain_sum(total: fx.Node) -> bool:
    return (
        op_name(total) == "add"
        and len(total.args) == 2
        and not total.kwargs
        and all(isinstance(arg, fx.Node) for arg in total.args)
    )


def _own_forward(module: nn.Module, x: Tensor) -> Any:
    return module.forward(x)


def add_norm(norm: Norm) -> Callable[..., tuple[Tensor, Tensor]]:
    """The norm of a sum, and the sum, as one kernel where both are tensors of one shape and dtype."""

    def add_and_normalize(module: nn.Module, x: Any, residual: Any) -> tuple[Tensor, Tensor]:
        same = isinstance(x, Tensor) and isinstance(residual, Tensor) and x.shape == residual.shape
        same = same and x.dim() in norm.dims
        if same and x.dtype == residual.dtype == norm.result_dtype(module, x, _own_forward):
            return norm.after_add(module, x, residual)
        total = residual + x
        return module(total), total

    return traceable(add_and_normalize)


@fix("add-norm", "additions before norms in the kernel of the norm", order=40)
def add_norms(run: ModelRun) -> Iterator[Site]:
    """Forwards that add two tensors and pass the sum to a child that normalizes."""
    for call in run.calls:
        norms = {
            child_name(call, child): norm
            for child in own_children(run, call)
            if not has_hooks(child.module) and (norm := recognize_norm(child)) is not None
        }
        if not norms:
            continue
        rewrite = _AddNorms(norms=norms)
        try:
            traced = trace_forward(own_forward(run, call), call.module.training)
        except UsageError:
            continue  # most forwards with a norm have no sum before it: not a site
        replaced = list(rewrite(traced.graph))
        if not replaced:
            continue
        what = "; ".join(f"sum, {norms[path]} ({path})" for path in replaced)
        skip = confirm_rewrite(run, call, rewrite, keep=norms) or ""
        x = torch.empty(1, norms[replaced[0]].columns, device=run.device, dtype=torch.float32)
        skip = skip or kernels.supports(kernels.add_rms_norm, x, x).reason
        yield Site(
            call=call, what=what, skip=skip,
            change=partial(set_rewritten_forward, own_forward(run, call), rewrite),
        )  # fmt: skip
