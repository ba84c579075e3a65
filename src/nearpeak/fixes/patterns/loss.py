"""The last linear layer and the cross-entropy of its result, in one: the logits are not written to memory.

The layer is in the model, and the loss in another function or in the user's loop. So the layer returns its result as
`DeferredLogits`: a tensor that is computed when something reads it. Selected or regrouped rows, and casts to a wider
dtype, are deferred logits again, and `torch.nn.functional.cross_entropy` on them computes the loss from the hidden
states. Everything else gets the logits as the layer would have returned them, computed once and with their gradients.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map

from nearpeak import kernels
from nearpeak.devices.process_state import preserve_random_state
from nearpeak.fixes.arguments import preserve_module_state, version_of
from nearpeak.fixes.edits import Edits
from nearpeak.fixes.patterns.confirm import Draws, Forward, Memo, Settings, agree, bare_copy, current_forward, kind_of
from nearpeak.fixes.registry import ModelRun, ModuleCall, Site, fix
from nearpeak.kernels._runtime.policy import autocast, autocast_dtype

_FEWEST_CLASSES = 32
"""The logits of fewer classes are small beside the hidden states."""
_LINEARS = Memo()
RowFunction = Callable[[Tensor], Tensor]


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class _Layer:
    """One call of the linear layer."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    records: bool
    """Whether gradients were recorded when it was called."""
    losses: list[str]
    """Gets a word for the first loss that was computed from the hidden states."""
    has_loss: bool = False
    """Whether a loss was computed from the hidden states: it does not depend on the logits."""
    logits: Tensor | None = None
    versions: list[Any] = field(default_factory=list)
    """What shows whether the inputs are those of the call."""

    def __post_init__(self) -> None:
        self.versions = self._versions()
        if self.records:
            _watch_optimizers(self)

    def _versions(self) -> list[Any]:
        tensors = (each for each in (self.hidden, self.weight, self.bias) if each is not None)
        return [(version_of(each), 0 if isinstance(each, FakeTensor) else each.data_ptr()) for each in tensors]

    def keep_weights(self) -> None:
        """The weights are about to change: from now on the layer has copies of its own."""
        self.check()
        self.weight = self.weight.detach().clone()
        self.bias = None if self.bias is None else self.bias.detach().clone()
        self.versions = self._versions()

    def check(self) -> None:
        """RuntimeError if inputs were changed by something that was not announced."""
        if self.versions != self._versions():
            raise RuntimeError(
                "Logits are read that nearpeak has not computed yet, and the input or the weight of their layer was "
                "changed since. Read them before, or leave out the fix linear-cross-entropy."
            )

    def compute(self) -> Tensor:
        """What the layer returns, once."""
        if self.logits is None:
            self.check()
            with torch.set_grad_enabled(self.records), torch.autocast(self.hidden.device.type, enabled=False):
                self.logits = functional.linear(self.hidden, self.weight, self.bias)
        return self.logits


_live: weakref.WeakSet[_Layer] = weakref.WeakSet()
"""The layers whose results the program has."""


@functools.cache
def _watch_all_optimizers() -> None:
    register_optimizer_step_pre_hook(_keep_weights)


def _watch_optimizers(layer: _Layer) -> None:
    """Before an optimizer changes the weights of a layer, they are copied, if its result can still be read."""
    _watch_all_optimizers()
    _live.add(layer)


def _keep_weights(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    layers = [layer for layer in _live if layer.logits is None]
    if not layers:
        return
    changed = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for layer in layers:
        if {id(layer.weight), id(layer.bias)} & changed:
            layer.keep_weights()


class DeferredLogits(Tensor):
    """The result of a linear layer, of [..., classes], that is computed when something reads it."""

    layer: _Layer
    rows: tuple[RowFunction, ...]
    """What was done to the rows since, on the hidden states as on the logits."""
    value: Tensor | None
    """The logits, once they were computed: what is then written to them stays."""

    @staticmethod
    def __new__(
        cls, layer: _Layer, rows: tuple[RowFunction, ...], shape: torch.Size, dtype: torch.dtype
    ) -> DeferredLogits:
        self: DeferredLogits = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=layer.hidden.device)
        self.layer, self.rows, self.value = layer, rows, None
        return self

    def compute(self) -> Tensor:
        """The logits as a plain tensor."""
        if self.value is None:
            logits = self.layer.compute()
            with torch.set_grad_enabled(self.layer.records):
                for change in self.rows:
                    logits = change(logits)
                self.value = logits.to(self.dtype)
        return self.value

    def hidden_rows(self) -> Tensor:
        """What the layer would compute these logits from."""
        self.layer.check()
        hidden = self.layer.hidden
        for change in self.rows:
            hidden = change(hidden)
        return hidden

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = args[0] if args and isinstance(args[0], DeferredLogits) else None
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if own is not None and own.layer.logits is None and not torch.compiler.is_compiling():
            result = None
            if func is functional.cross_entropy:
                result = _cross_entropy(own, *args[1:], **kwargs)
            elif func in _VIEWS:
                result = _view(own, _VIEWS[func], args[1:], kwargs)
            if result is not None:
                return result

        def plain(value: Any) -> Any:
            return value.compute() if isinstance(value, DeferredLogits) else value

        wanted = _flat((kwargs.get("inputs", args[1:2]),)) if func is torch.autograd.grad else args[:1]
        if func in _OF_GRADIENTS and any(isinstance(each, DeferredLogits) and each.layer.has_loss for each in wanted):
            raise RuntimeError(
                "The gradient of logits is wanted, and nearpeak has computed their loss without them. Ask for it "
                "before the loss, or leave out the fix linear-cross-entropy."
            )
        return func(*tree_map(plain, args), **tree_map(plain, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """What reaches this has passed autograd, which follows the tensor itself: see `_Defer`."""

        def plain(value: Any) -> Any:
            return value.compute().detach() if isinstance(value, DeferredLogits) else value

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.compute())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.compute().__reduce_ex__(protocol)


class _Defer(torch.autograd.Function):
    """Gives deferred logits a history, for code below Python that takes them as they are, such as another
    `autograd.Function`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, layer: _Layer, rows: tuple[RowFunction, ...],
        dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(hidden, weight)
        ctx.has_bias = bias is not None
        return DeferredLogits(layer, rows, torch.Size((*hidden.shape[:-1], weight.shape[0])), dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        needed = ctx.needs_input_grad
        gradient = gradient.to(hidden.dtype)  # [..., classes]
        rows = gradient.reshape(-1, gradient.shape[-1])  # [tokens, classes]
        return (
            gradient @ weight if needed[0] else None,
            rows.t() @ hidden.reshape(-1, hidden.shape[-1]) if needed[1] else None,
            rows.sum(0) if ctx.has_bias and needed[2] else None,
            None, None, None,
        )  # fmt: skip


def defer(layer: _Layer, rows: tuple[RowFunction, ...], dtype: torch.dtype) -> Tensor:
    hidden = layer.hidden
    with torch.set_grad_enabled(layer.records):
        for change in rows:
            hidden = change(hidden)
        result: Tensor = _Defer.apply(hidden, layer.weight, layer.bias, layer, rows, dtype)  # type: ignore[no-untyped-call]
    return result


def _view(own: DeferredLogits, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Deferred logits after a view of rows or a cast; None for what touches the classes."""
    if name == "contiguous":
        if args or kwargs:
            return None
        return defer(own.layer, (*own.rows, Tensor.contiguous), own.dtype) if own.rows else own
    if name in ("float", "to"):
        dtype = torch.float32 if name == "float" else args[0] if len(args) == 1 and not kwargs else kwargs.get("dtype")
        if not isinstance(dtype, torch.dtype) or torch.promote_types(own.dtype, dtype) != dtype:
            return None
        if len(args) + len(kwargs) != (name == "to"):
            return None
        return own if dtype == own.dtype else defer(own.layer, own.rows, dtype)
    if kwargs or any(isinstance(leaf, Tensor) for leaf in _flat(args)):
        return None
    classes = own.shape[-1]
    change = _row_function(name, args, own.shape)
    if change is None:
        return None
    # the same on one more class: what depends on their number, or selects some, has another shape
    try:
        shapes = [change(torch.empty((*own.shape[:-1], size), device="meta")).shape for size in (classes, classes + 1)]
    except (RuntimeError, IndexError, TypeError):
        return None
    if not all(shapes) or shapes[0][-1] != classes or shapes[1] != (*shapes[0][:-1], classes + 1):
        return None
    return defer(own.layer, (*own.rows, change), own.dtype)


def _flat(args: Any) -> Iterator[Any]:
    for value in args:
        if isinstance(value, (tuple, list)):
            yield from _flat(value)
        else:
            yield value


def _row_function(name: str, args: tuple[Any, ...], shape: torch.Size) -> RowFunction | None:
    if name == "getitem":
        (index,) = args
        return lambda x: x[index]
    if name == "flatten":
        start = args[0] if args else 0
        end = args[1] if len(args) > 1 else -1
        if end % len(shape) == len(shape) - 1:
            return None
        return lambda x: x.flatten(start, end)
    sizes = tuple(_flat(args))
    if not sizes or not all(isinstance(size, int) for size in sizes):
        return None
    full = torch.empty(shape, device="meta").reshape(sizes).shape
    if full[-1] != shape[-1]:
        return None
    return lambda x: x.reshape(*full[:-1], x.shape[-1])


_VIEWS = {
    Tensor.view: "view",
    Tensor.reshape: "view",
    torch.reshape: "view",
    Tensor.flatten: "flatten",
    torch.flatten: "flatten",
    Tensor.__getitem__: "getitem",
    Tensor.contiguous: "contiguous",
    Tensor.float: "float",
    Tensor.to: "to",
}
_METADATA = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "requires_grad", "grad_fn", "is_leaf")),
    *(getattr(Tensor, name).__get__ for name in ("ndim", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse")),
    *(Tensor.size, Tensor.stride, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.__len__),
    *(Tensor.is_floating_point, Tensor.is_complex, torch.is_floating_point, torch.numel),
}
"""What is known of logits that were not computed."""
_OF_GRADIENTS = {torch.autograd.grad, Tensor.retain_grad, Tensor.register_hook}


def _cross_entropy(
    own: DeferredLogits, target: Tensor, weight: Tensor | None = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor | None:  # fmt: skip
    """The loss from hidden states; None for what the kernel does not have."""
    if own.dim() != 2 or target.dim() != 1 or target.is_floating_point() or size_average is not None:
        return None
    if reduce is not None or reduction not in ("mean", "sum", "none") or len(target) != len(own):
        return None
    layer = own.layer
    loss: Tensor = kernels.linear_cross_entropy(
        own.hidden_rows(), layer.weight, target, bias=layer.bias, class_weight=weight, ignore_index=ignore_index,
        reduction=reduction, label_smoothing=label_smoothing,  # type: ignore[arg-type]
    )  # fmt: skip
    layer.has_loss = True
    if not layer.losses:
        layer.losses.append(reduction)
    return loss.to(own.dtype if autocast_dtype(own.device) is None else torch.promote_types(own.dtype, torch.float32))


def recognize_linear(call: ModuleCall) -> tuple[str, str | None] | None:
    """The names of weight and bias of a module that is a linear layer of rows."""
    tensors = [value for value in (*call.args, *call.kwargs.values()) if value is not None]
    if len(tensors) != 1 or not isinstance(tensors[0], Tensor) or call.children or not isinstance(call.output, Tensor):
        return None
    x, parameters = tensors[0], {name: each for name, each in call.module._parameters.items() if each is not None}
    if x.dim() < 2 or not x.is_floating_point() or call.output.shape[:-1] != x.shape[:-1] or len(parameters) > 2:
        return None
    weights = [name for name, each in parameters.items() if tuple(each.shape) == (call.output.shape[-1], x.shape[-1])]
    biases = [name for name, each in parameters.items() if tuple(each.shape) == (call.output.shape[-1],)]
    if len(weights) != 1 or len(weights) + len(biases) != len(parameters):
        return None
    names = weights[0], biases[0] if biases else None
    is_linear: bool = _LINEARS.get(kind_of(call.module), lambda: _confirm_linear(call.module, *names))
    return names if is_linear else None


def _confirm_linear(module: nn.Module, weight: str, bias: str | None) -> bool:
    draws, original = Draws(module._parameters[weight].device), current_forward(module)  # type: ignore[union-attr]
    copy = bare_copy(module, draws)
    features = copy._parameters[weight].shape[1]  # type: ignore[union-attr]
    return agree(
        lambda x: original(copy, x),
        lambda x: functional.linear(x, getattr(copy, weight), None if bias is None else getattr(copy, bias)),
        [((draws.normal(2, 3, features),), {})],
        gradients=False,
    )


_PLAIN = (Tensor, nn.Parameter, FakeTensor)
"""Tensors that compute what they are asked for, or nothing, in an estimate."""


def deferred_forward(module: nn.Module, weight: str, bias: str | None, losses: list[str]) -> Forward:
    original, settings = current_forward(module), Settings(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        matrix = getattr(self, weight)
        if (
            isinstance(x, Tensor)
            and type(x) in _PLAIN
            and x.dim() > 1
            and not torch.compiler.is_compiling()
            and settings.hold(self)
        ):
            offsets = None if bias is None else getattr(self, bias)
            hidden, matrix = autocast(x, matrix)
            offsets = None if offsets is None else autocast(offsets)[0]
            if hidden.dtype == matrix.dtype and type(matrix) in _PLAIN:
                records = torch.is_grad_enabled()
                layer = _Layer(hidden=hidden, weight=matrix, bias=offsets, records=records, losses=losses)
                return defer(layer, (), hidden.dtype)
        return original(self, *args, **kwargs)

    return forward


@fix("linear-cross-entropy", "the loss without its logits", order=5)
def linear_cross_entropies(run: ModelRun) -> Iterator[Site]:
    """Linear layers whose result goes into a cross-entropy: found by a run in which they defer it."""
    if not run.trains:
        return
    candidates = [
        (call, names, list[str]())
        for call in run.calls
        if isinstance(call.output, Tensor)
        and call.output.dim() > 1
        and call.output.shape[-1] >= _FEWEST_CLASSES
        and (names := recognize_linear(call)) is not None
    ]
    if not candidates or not _probe(run, candidates):
        return
    for call, (weight, bias), losses in candidates:
        if not losses:
            continue
        tokens = call.output.numel() // call.output.shape[-1]
        x, target = torch.empty(1, 2, device=run.device), torch.zeros(1, dtype=torch.int64, device=run.device)
        yield Site(
            call=call, what=f"cross-entropy of {tokens} tokens and {call.output.shape[-1]} classes", in_step=True,
            skip=kernels.supports(kernels.linear_cross_entropy, x, x, target).reason,
            change=partial(_replace, call.module, weight, bias),
        )  # fmt: skip


def _replace(module: nn.Module, weight: str, bias: str | None, edits: Edits) -> None:
    edits.set_forward(module, deferred_forward(module, weight, bias, []))


def _probe(run: ModelRun, candidates: list[tuple[ModuleCall, tuple[str, str | None], list[str]]]) -> bool:
    """Runs the model with its loss; whether it ran."""
    edits = Edits()
    try:
        for call, (weight, bias), losses in candidates:
            edits.set_forward(call.module, deferred_forward(call.module, weight, bias, losses))
        with preserve_random_state(), preserve_module_state(run.model), torch.no_grad():
            output = run.model(*run.args, **run.kwargs)
            if run.loss is not None:
                run.loss(output)
    except Exception:  # of the user's code
        return False
    finally:
        edits.undo()
    return True
