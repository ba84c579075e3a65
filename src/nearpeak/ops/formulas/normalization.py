"""Softmax and the norms, forward and backward: one pass over the data, saved statistics included.

Kernels may read a row twice; the floor reads it once, for a row can stay on the chip. Operations per element are the
least of each formula; parameters are charged in their own dtype, saved statistics in theirs.
"""

from __future__ import annotations

from nearpeak.ops.cost import Cost, accesses, formula
from nearpeak.ops.formulas.pointwise import arithmetic, distinct, read
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor


def _cost(
    inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor, ...], main: Tensor, operations_per_element: int
) -> Cost:
    return Cost(
        family="normalization",
        reads=accesses(*inputs),
        writes=accesses(*outputs),
        vector_flops=arithmetic((main,), (), operations_per_element * distinct(main)),
    )


@formula(
    "aten._softmax",
    "aten._log_softmax",
    "aten._safe_softmax",
    "aten._masked_softmax",
    "aten.softmax",
    "aten.log_softmax",
)
def softmax(op: Op) -> Cost:
    """Reads the input (and the mask), writes the output; an exponential, a sum and a scaling per element."""
    return _cost(read(op), op.written, op.tensor("self"), 3)


@formula("aten._softmax_backward_data", "aten._log_softmax_backward_data", "aten._masked_softmax_backward")
def softmax_backward(op: Op) -> Cost:
    """Reads the gradient and the output (and the mask), writes the gradient: a sum, a product and a difference."""
    return _cost(read(op), op.written, op.tensor("grad_output"), 3)


@formula("aten.native_layer_norm", "aten.native_group_norm")
def mean_norm(op: Op) -> Cost:
    """Reads the input, the weight and the bias; writes the output, the mean and the reciprocal deviation.

    Per element: a sum, a sum of squares (2), a shift and a scaling.
    """
    return _cost(read(op), op.written, op.tensor("input"), 5)


@formula("aten._fused_rms_norm", "aten.rms_norm")
def root_mean_square_norm(op: Op) -> Cost:
    """Reads the input and the weight; writes the output and the saved statistic. A sum of squares (2) and a scaling."""
    return _cost(read(op), op.written, op.tensor("input"), 3)


@formula("aten.native_layer_norm_backward", "aten.native_group_norm_backward", "aten._fused_rms_norm_backward")
def norm_backward(op: Op) -> Cost:
    """Reads the gradient, the input, the statistics and the weight once; writes the gradients that are asked for.

    The bias is not needed, the weight only for the gradient of the input, and the gradient of the bias alone needs no
    input. Per element: a product and a sum.
    """
    wanted = op.arguments["output_mask"]
    gradient = op.tensor("grad_out")
    inputs = [gradient]
    if wanted[0] or wanted[1]:
        inputs += _present(op, "input", "mean", "rstd", *(("weight",) if wanted[0] else ()))
    return _cost(tuple(inputs), _wanted(op), gradient, 2 if wanted[0] or wanted[1] else 1)


def _present(op: Op, *names: str) -> list[Tensor]:
    return [value for name in names if isinstance(value := op.arguments.get(name), Tensor)]


def _wanted(op: Op) -> tuple[Tensor, ...]:
    """The gradients that `output_mask` asks for, where those that it does not ask for are among the outputs."""
    outputs, wanted = op.outputs, op.arguments.get("output_mask")
    if isinstance(wanted, tuple) and len(wanted) == len(outputs):
        outputs = tuple(tensor for tensor, keep in zip(outputs, wanted, strict=True) if keep)
    return outputs


@formula(
    "aten.native_batch_norm",
    "aten.cudnn_batch_norm",
    "aten.miopen_batch_norm",
    "aten._native_batch_norm_legit",
    "aten._native_batch_norm_legit_functional",
    "aten._native_batch_norm_legit_no_training",
    "aten._batch_norm_with_update",
    "aten._batch_norm_with_update_functional",
    "aten._batch_norm_no_update",
)
def batch_norm(op: Op) -> Cost:
    """Reads the input, the parameters and the running statistics; writes the output and the saved statistics.

    In training the running statistics are written too, where they are not separate results. Space that a library keeps
    for its own backward (bytes without a type) is not charged: it may leave it untouched. Per element: a sum, a sum of
    squares (2), a shift and a scaling; with given statistics the last two.
    """
    training = bool(op.arguments.get("training", "with_update" in op.packet))
    outputs = tuple(tensor for tensor in op.written if tensor.dtype != "uint8")
    if training and "functional" not in op.packet:
        outputs += tuple(_present(op, "running_mean", "running_var"))
    elif not training:
        outputs = tuple(tensor for tensor in outputs if tensor not in _present(op, "running_mean", "running_var"))
    inputs = _present(op, "input", "weight", "bias", "running_mean", "running_var")
    return _cost(tuple(inputs), outputs, op.tensor("input"), 5 if training else 2)


@formula("aten.native_batch_norm_backward", "aten.batch_norm_backward")
def batch_norm_backward(op: Op) -> Cost:
    """Reads the gradient, the input, the weight and the statistics that the forward used; writes what is asked for.

    With given statistics the gradient of the input does not depend on the input.
    """
    training = bool(op.arguments["train"] if "train" in op.arguments else op.arguments["update"])
    return _batch_norm_backward(op, "grad_out", training, op.arguments["output_mask"])


@formula("aten.cudnn_batch_norm_backward", "aten.miopen_batch_norm_backward")
def library_batch_norm_backward(op: Op) -> Cost:
    """As `batch_norm_backward`, in training, with all three gradients."""
    return _batch_norm_backward(op, "grad_output", True, (True, True, True))


def _batch_norm_backward(op: Op, gradient_name: str, training: bool, wanted: tuple[bool, ...]) -> Cost:
    gradient = op.tensor(gradient_name)
    statistics = ("save_mean", "save_invstd", "save_var") if training else ("running_mean", "running_var")
    inputs = [gradient]
    if wanted[1] or (wanted[0] and training):
        inputs += _present(op, "input", *statistics)
    elif wanted[0]:
        inputs += _present(op, "running_var")
    if wanted[0]:
        inputs += _present(op, "weight")
    return _cost(tuple(inputs), _wanted(op), gradient, 1)


@formula("aten.batch_norm_stats")
def batch_norm_statistics(op: Op) -> Cost:
    """Reads the input, writes mean and reciprocal deviation: a sum and a sum of squares (2)."""
    return _cost(read(op), op.written, op.tensor("input"), 3)


@formula("aten.batch_norm_update_stats")
def batch_norm_update(op: Op) -> Cost:
    """As `batch_norm_statistics`; the running statistics are read and written."""
    running = tuple(_present(op, "running_mean", "running_var"))
    return _cost(read(op), op.written + running, op.tensor("input"), 3)


@formula("aten.batch_norm_gather_stats", "aten.batch_norm_gather_stats_with_counts")
def batch_norm_gather(op: Op) -> Cost:
    """Reads what all ranks found and the running statistics, writes those of all together; the input is not read."""
    running = tuple(_present(op, "running_mean", "running_var"))
    return _cost(read(op, unread=("input",)), op.written + running, op.tensor("mean"), 1)


@formula("aten.renorm", "aten.renorm_")
def renorm(op: Op) -> Cost:
    """Reads the input, writes the result; in place, slices within the norm are not written. A sum of powers."""
    outputs = () if op.packet.endswith("_") else op.written
    return _cost(read(op), outputs, op.tensor("self"), 1)


@formula("aten.batch_norm_elemt")
def batch_norm_apply(op: Op) -> Cost:
    """Reads the input, the statistics and the parameters, writes the output: a shift and a scaling."""
    return _cost(read(op), op.written, op.tensor("input"), 2)


@formula("aten.batch_norm_backward_reduce", "aten.batch_norm_backward_elemt")
def batch_norm_backward_parts(op: Op) -> Cost:
    """Reads the gradient, the input and the statistics, writes sums or the gradient: a product and a sum."""
    unread = ("weight", "invstd") if op.packet.endswith("reduce") else ("count",)
    return _cost(read(op, unread=unread), op.written, op.tensor("grad_out"), 2)


@formula("aten._weight_norm_interface")
def weight_norm(op: Op) -> Cost:
    """Reads direction and magnitude, writes the weight and the norms: a sum of squares (2) and a scaling."""
    return _cost(read(op), op.written, op.tensor("v"), 3)


@formula("aten._weight_norm_interface_backward")
def weight_norm_backward(op: Op) -> Cost:
    """Reads the gradient, direction, magnitude and norms; writes both gradients: a product and a sum."""
    return _cost(read(op), op.written, op.tensor("grad_w"), 2)
