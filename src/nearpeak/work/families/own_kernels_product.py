"""The matrix product of `nearpeak.kernels` with what follows it: see `own_kernels`."""

from __future__ import annotations

from nearpeak.work.cost import Cost, accesses, formula
from nearpeak.work.families.matrix import engines, vector_dtype
from nearpeak.work.op import Op


@formula("nearpeak.product", "nearpeak.product_scaled")
def product(op: Op) -> Cost:
    """One product. Three operations a result for an activation, one each for a gate, a bias, a residual and scales.

    Reads both factors and what is added, and writes the result and what is kept of the product.
    """
    x, weight = op.tensor("x"), op.tensor("weight")
    result = op.outputs[0]
    if not result.elements:
        return Cost(family="matrix")
    before = x.elements // x.shape[-1] * weight.shape[0] if x.elements else 0
    beside = float(result.elements) * (len(op.tensors("residual")) + (1 if op.arguments["gated"] else 0))
    beside += float(before) * len(op.tensors("bias", "scale_x", "scale_weight"))
    if op.arguments["activation"]:
        beside += 3.0 * result.elements
    flops, vector_flops = engines(x.dtype, 2.0 * x.elements * weight.shape[0], tf32=op.tf32_products)
    dtype = vector_dtype(x.dtype)
    if beside:
        vector_flops = {**vector_flops, dtype: vector_flops.get(dtype, 0.0) + beside}
    return Cost(
        family="matrix",
        reads=accesses(x, weight, *op.tensors("bias", "residual", "scale_x", "scale_weight")),
        writes=accesses(*op.outputs),
        flops=flops,
        vector_flops=vector_flops,
    )


@formula("nearpeak.product_backward")
def product_backward(op: Op) -> Cost:
    """A product for each wanted gradient of the two factors, and one more where the forward pass kept nothing.

    Four operations for each element that the activation was of, and a sum for the bias.
    """
    gradient, x, weight = op.tensor("gradient"), op.tensor("x"), op.tensor("weight")
    for_x, for_weight, for_bias = (bool(op.arguments[f"for_{name}"]) for name in ("x", "weight", "bias"))
    if not (for_x or for_weight or for_bias) or not x.elements:
        return Cost(family="matrix", writes=accesses(*op.outputs))
    activation = bool(op.arguments["activation"])
    again = activation and not op.tensors("before")
    before = x.elements // x.shape[-1] * weight.shape[0]
    beside = float(before) * ((4 if activation else 0) + (1 if for_bias else 0))
    products = 2.0 * x.elements * weight.shape[0] * (for_x + for_weight + again)
    flops, vector_flops = engines(x.dtype, products, tf32=op.tf32_products)
    dtype = vector_dtype(x.dtype)
    if beside:
        vector_flops = {**vector_flops, dtype: vector_flops.get(dtype, 0.0) + beside}
    reads = [gradient, *op.tensors("before")]
    reads += [x] if for_weight or again else []
    reads += [weight] if for_x or again else []
    reads += list(op.tensors("bias")) if again else []
    return Cost(
        family="matrix",
        reads=accesses(*reads),
        writes=accesses(*op.outputs),
        flops=flops,
        vector_flops=vector_flops,
    )
