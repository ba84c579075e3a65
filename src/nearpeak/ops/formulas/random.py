"""Random numbers: what is drawn is written; distributions given as tensors are read; dropout reads its input.

Generators work with integers and are charged no floating-point operation.
"""

from __future__ import annotations

from nearpeak.ops.cost import Cost, accesses, formula
from nearpeak.ops.formulas.pointwise import arithmetic, distinct, kept_part, read
from nearpeak.ops.op import Op


@formula(
    *(
        f"aten.{name}"
        for name in """
        _cudnn_init_dropout_state _fill_mem_eff_dropout_mask_ _philox_key_fold_in _philox_key_split _philox_normal
        _philox_normal_ _philox_uniform _philox_uniform_ bernoulli.float_out bernoulli.p bernoulli_.float cauchy
        cauchy_ exponential
        exponential_ geometric geometric_ log_normal log_normal_ normal.float_float normal.float_float_out
        normal.out normal_ normal_functional
        rand rand_like randint randint_like randn randn_like random random_ randperm uniform uniform_
        """.split()
    )
)
def drawn(op: Op) -> Cost:
    """Writes the numbers and reads nothing: a tensor argument only gives the shape, or is overwritten."""
    return Cost(family="random", writes=accesses(*op.written))


@formula("aten.bernoulli.Tensor", "aten.bernoulli.Tensor_out", "aten.bernoulli_.Tensor")
def drawn_like(op: Op) -> Cost:
    """Reads the probabilities `p`; `self` only gives the shape, or is overwritten."""
    return Cost(family="random", reads=accesses(*read(op, unread=("self",))), writes=accesses(*op.written))


@formula(
    *(
        f"aten.{name}"
        for name in """
        _sample_dirichlet _standard_gamma bernoulli.default bernoulli.out binomial multinomial normal.Tensor_Tensor
        normal.Tensor_Tensor_out normal.Tensor_float normal.Tensor_float_out normal.float_Tensor normal.float_Tensor_out
        poisson
        """.split()
    )
)
def drawn_from(op: Op) -> Cost:
    """Reads the parameters of the distribution, writes what is drawn. Unnormalized weights must all be read."""
    return Cost(family="random", reads=accesses(*read(op)), writes=accesses(*op.written))


@formula("aten.native_dropout", "aten._fused_dropout")
def dropout(op: Op) -> Cost:
    """Reads the input, writes the output and the mask; one multiplication per element that is kept.

    Where nothing is dropped there is nothing to multiply. `_fused_dropout` takes the probability to keep,
    `native_dropout` that to drop.
    """
    probability = float(op.arguments["p"])
    keep = probability if op.packet == "aten._fused_dropout" else 1 - probability
    if op.arguments.get("train") is False:
        keep = 1.0
    inputs, outputs = (read(op) if keep else ()), op.written
    scaled = keep * sum(distinct(tensor) for tensor in inputs) if keep < 1 else 0.0
    return Cost(
        family="random",
        reads=accesses(*(kept_part(tensor, keep) for tensor in inputs)),
        writes=accesses(*outputs),
        vector_flops=arithmetic(inputs, (), scaled),
    )


@formula("aten.native_dropout_backward", "aten._masked_scale")
def dropout_backward(op: Op) -> Cost:
    """Reads the mask and the gradient where it is kept, writes the gradient; one multiplication for each kept element.

    The scale is one over the probability to keep.
    """
    keep = 1 / max(1.0, float(op.arguments["scale"]))
    gradients = tuple(tensor for tensor in op.tensors("grad_output", "self") if tensor.shape)
    return Cost(
        family="random",
        reads=accesses(*op.tensors("mask"), *(kept_part(tensor, keep) for tensor in gradients)),
        writes=accesses(*op.written),
        vector_flops=arithmetic(gradients, (), keep * sum(distinct(tensor) for tensor in gradients)),
    )


@formula("aten.rrelu_with_noise", "aten.rrelu_with_noise_", "aten.rrelu_with_noise_functional")
def leaky_with_noise(op: Op) -> Cost:
    """Reads `self`, writes the result and, in training, the slopes that were drawn."""
    unwritten = () if op.arguments.get("training") else ("noise",)
    kept = {value.storage for name in unwritten if (value := op.arguments.get(name)) is not None}
    inputs = read(op, unread=("noise",))
    return Cost(
        family="random",
        reads=accesses(*inputs),
        writes=accesses(*(tensor for tensor in op.written if tensor.storage not in kept)),
        vector_flops=arithmetic(inputs, (), sum(distinct(tensor) for tensor in inputs)),
    )
