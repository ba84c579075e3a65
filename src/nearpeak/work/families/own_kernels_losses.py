"""The losses of `nearpeak.kernels`: cross-entropy from logits, and from what the last layer is given.

Of a row whose target is ignored `cross_entropy` reads nothing, and ignored targets are common: as in `loss`, one row of
logits is certain and not all of them. Gradients are written in full, zeros too. `linear_cross_entropy` multiplies
all tokens whatever their targets are; it could leave out those that are ignored, and assumed is that there are none.
"""

from __future__ import annotations

from nearpeak.work.cost import Cost, accesses, formula
from nearpeak.work.families.indexing import least_bytes
from nearpeak.work.families.matrix import engines, vector_dtype
from nearpeak.work.families.pointwise import arithmetic
from nearpeak.work.op import Op
from nearpeak.work.tensor import Tensor

Part = Tensor | tuple[Tensor, float]
"""A tensor, or so many bytes of it."""


@formula(
    "nearpeak.cross_entropy",
    "nearpeak.cross_entropy_",
    "nearpeak.cross_entropy_backward",
    "nearpeak.cross_entropy_backward_",
)
def cross_entropy(op: Op) -> Cost:
    """Reads the targets and one row of logits; writes the loss and the statistics of the rows, or the gradient, or all.

    An exponential and a sum for each logit of that row; forward and backward alike.
    """
    logits, target = op.tensor("logits"), op.tensor("target")
    if not target.elements:
        return Cost(family="loss", writes=accesses(*op.written))
    row = least_bytes(logits, range(len(logits.shape) - 1))
    reads: list[Part] = [target, (logits, row), *_class_weights(op, "weight")]
    return Cost(
        family="loss",
        reads=accesses(*reads),
        writes=accesses(*op.written),
        vector_flops=arithmetic((logits,), (), 2 * row / logits.item_bytes),
    )


def _class_weights(op: Op, name: str) -> list[Part]:
    """Of the weights of classes one element, as all targets may be equal; all where targets are smoothed."""
    smoothed = bool(op.arguments.get("label_smoothing"))
    return [(weight, weight.bytes if smoothed else weight.item_bytes) for weight in op.tensors(name)]


@formula("nearpeak.scale_gradient_")
def scale_gradient(op: Op) -> Cost:
    """Reads the factor. Where that is 1, as for a loss on which `backward()` is called, the gradient stays as it is."""
    return Cost(family="pointwise", reads=accesses(op.tensor("factor")))


@formula("nearpeak.linear_cross_entropy", "nearpeak.linear_cross_entropy_backward")
def linear_cross_entropy(op: Op) -> Cost:
    """A product for the logits and one for each gradient that is wanted, of hidden states and of the weight.

    Logits are not in memory: the backward pass computes them again. Reads hidden states, weight, bias and targets
    (backward: and the statistics of the rows); writes the loss, what is kept of each row, and gradients. For each logit
    an exponential and a sum; a product and a difference more for its gradient, a sum for that of the bias.
    """
    hidden, weight, target = op.tensor("hidden"), op.tensor("weight"), op.tensor("target")
    wanted = [bool(op.arguments[f"for_{name}"]) for name in ("hidden", "weight", "bias")]
    backward = op.packet.endswith("backward")
    if not target.elements or (backward and not any(wanted)):
        return Cost(family="matrix", writes=accesses(*op.outputs))
    logits = float(target.elements * weight.shape[0])
    products = 2.0 * logits * weight.shape[1] * (1 + wanted[0] + wanted[1])
    flops, vector_flops = engines(hidden.dtype, products, tf32=op.tf32_products)
    direct = dict(flops or vector_flops)
    dtype = vector_dtype(hidden.dtype)
    beside = logits * (2 + (2 if any(wanted) else 0) + (1 if wanted[2] else 0))
    return Cost(
        family="matrix",
        reads=accesses(hidden, weight, target, *op.tensors("bias", "statistics"), *_class_weights(op, "class_weight")),
        writes=accesses(*op.outputs),
        flops=flops,
        vector_flops={**vector_flops, dtype: vector_flops.get(dtype, 0.0) + beside},
        products=direct,
    )
