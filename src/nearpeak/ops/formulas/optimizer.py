"""Optimizers: fused steps over lists of tensors, and the `_foreach_` operators, pointwise over lists.

A step reads parameters, gradients and states once and writes parameters and states. Steps and learning rates are
single numbers and are left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.ops.cost import Cost, accesses, formula
from nearpeak.ops.formulas.pointwise import MOSTLY_UNCHANGED, arithmetic, distinct, pointwise_flops, read, total
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor

FOREACH_POINTWISE = """
abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min cos cosh div erf erfc exp expm1 floor frac lerp lgamma
log log10 log1p log2 maximum minimum mul neg pow reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc
""".split()
"""The operators with a `_foreach_` form, functional and in place."""


@formula(*(f"aten._foreach_{name}{suffix}" for name in FOREACH_POINTWISE for suffix in ("", "_")))
def foreach_pointwise(op: Op) -> Cost:
    """As the operator of that name on each tensor: reads all lists, writes the results or the first list in place.

    Clamping in place may change nothing, as for one tensor.
    """
    inputs, outputs = read(op), op.written
    name = op.packet.removeprefix("aten._foreach_")
    columns = zip(_columns(op), outputs, strict=True)
    flops = total(pointwise_flops(name, operands, (result,)) for operands, result in columns)
    writes = () if name in MOSTLY_UNCHANGED else accesses(*outputs)
    return Cost(family="optimizer", reads=accesses(*inputs), writes=writes, vector_flops=flops)


def _columns(op: Op) -> Iterator[tuple[Tensor, ...]]:
    """The tensors of the lists that belong together: the first of each list, the second of each, ..."""
    lists = [
        value
        for name, value in op.arguments.items()
        if isinstance(value, tuple)
        and any(isinstance(item, Tensor) for item in value)
        and (name == "self" or name not in op.mutated)
    ]
    return (tuple(tensor for tensor in column if tensor.shape) for column in zip(*lists, strict=True))


@formula("aten._foreach_norm", "aten._foreach_max", "aten._foreach_powsum")
def foreach_reduction(op: Op) -> Cost:
    """Reads the list once, writes one number per tensor; n - 1 operations for n numbers."""
    inputs, outputs = read(op), op.written
    flops = total(arithmetic((tensor,), (), max(distinct(tensor) - 1, 0.0)) for tensor in inputs)
    return Cost(family="reduction", reads=accesses(*inputs), writes=accesses(*outputs), vector_flops=flops)


@formula("aten._foreach_zero", "aten._foreach_zero_")
def foreach_zero(op: Op) -> Cost:
    """Writes the list and reads nothing."""
    return Cost(family="optimizer", writes=accesses(*op.written))


@formula("aten._foreach_copy", "aten._foreach_copy_", "aten._foreach_clone")
def foreach_copy(op: Op) -> Cost:
    """Reads the sources, writes the results; what a destination held is not read."""
    unread = () if op.packet == "aten._foreach_clone" else ("self",)
    return Cost(family="optimizer", reads=accesses(*read(op, unread=unread)), writes=accesses(*op.written))


def _list(op: Op, name: str) -> tuple[Tensor, ...]:
    return tuple(item for item in op.arguments.get(name) or () if isinstance(item, Tensor))


def _step(
    op: Op,
    *,
    read_states: tuple[str, ...],
    written_states: tuple[str, ...],
    operations_per_parameter: int,
    stores_gradients: bool,
) -> Cost:
    """A fused step. The functional form writes all of its results; in place, the parameters and states are written.

    With a gradient scale the kernels of Adam and SGD store the gradients unscaled.
    """
    parameters, gradients = _list(op, "self"), _list(op, "grads")
    if op.packet.endswith("_"):
        written_lists = ["self", *written_states]
        if stores_gradients and op.arguments.get("grad_scale") is not None:
            written_lists.append("grads")
        outputs = [tensor for name in written_lists for tensor in _list(op, name)]
    else:
        outputs = list(op.written)
    states = (tensor for name in read_states for tensor in _list(op, name))
    flops = total(
        arithmetic((parameter,), (), operations_per_parameter * distinct(parameter)) for parameter in parameters
    )
    return Cost(
        family="optimizer",
        reads=accesses(*parameters, *gradients, *states),
        writes=accesses(*outputs),
        vector_flops=flops,
    )


@formula("aten._fused_adam", "aten._fused_adam_", "aten._fused_adamw", "aten._fused_adamw_")
def adam(op: Op) -> Cost:
    """Reads parameters, gradients and both moments, writes parameters and moments; the largest second moment too.

    Per parameter: the first moment (3 operations), the second (4), the root and epsilon (2), the quotient and the
    update (3); one comparison more with `amsgrad`, two operations with weight decay.
    """
    states: tuple[str, ...] = ("exp_avgs", "exp_avg_sqs")
    if op.arguments.get("amsgrad"):
        states += ("max_exp_avg_sqs",)
    operations = 12 + bool(op.arguments.get("amsgrad")) + (2 if op.arguments.get("weight_decay") else 0)
    return _step(
        op,
        read_states=states,
        written_states=states,
        operations_per_parameter=operations,
        stores_gradients=True,
    )


@formula("aten._fused_sgd", "aten._fused_sgd_")
def stochastic_gradient_descent(op: Op) -> Cost:
    """Reads parameters and gradients, writes parameters; with momentum also its buffers.

    The first step writes the buffers without reading them. Per parameter two operations, two more for momentum
    after the first step, two more for weight decay.
    """
    momentum = ("momentum_buffer_list",) if op.arguments.get("momentum") else ()
    first = bool(op.arguments.get("is_first_step"))
    operations = 2 + (2 if momentum and not first else 0) + (2 if op.arguments.get("weight_decay") else 0)
    return _step(
        op,
        read_states=() if first else momentum,
        written_states=momentum,
        operations_per_parameter=operations,
        stores_gradients=True,
    )


@formula("aten._fused_adagrad", "aten._fused_adagrad_")
def adagrad(op: Op) -> Cost:
    """Reads parameters, gradients and sums of squares, writes parameters and sums.

    Per parameter: the sum of squares (2), the root and epsilon (2), the quotient and the update (3).
    """
    return _step(
        op,
        read_states=("state_sums",),
        written_states=("state_sums",),
        operations_per_parameter=7 + (2 if op.arguments.get("weight_decay") else 0),
        stores_gradients=False,
    )


@formula("aten._amp_foreach_non_finite_check_and_unscale", "aten._amp_foreach_non_finite_check_and_unscale_")
def unscale(op: Op) -> Cost:
    """Reads the gradients, writes them scaled; one multiplication per element."""
    gradients = tuple(tensor for tensor in _list(op, "self") if tensor.shape)
    return Cost(
        family="optimizer",
        reads=accesses(*gradients),
        writes=accesses(*op.written),
        vector_flops=arithmetic(gradients, (), sum(distinct(tensor) for tensor in gradients)),
    )


@formula("aten._amp_update_scale", "aten._amp_update_scale_")
def update_scale(op: Op) -> Cost:
    """Writes the scale and the counter of its growth: single numbers."""
    return Cost(family="optimizer", writes=accesses(*op.written))
