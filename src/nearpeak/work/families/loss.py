"""Losses: predictions and targets are read once; a loss over class indices gathers one element per row."""

from __future__ import annotations

from nearpeak.work.cost import Cost, accesses, formula
from nearpeak.work.families.pointwise import arithmetic, distinct, read
from nearpeak.work.op import Op
from nearpeak.work.tensor import Tensor


def _streamed(op: Op, operations_per_element: int) -> Cost:
    inputs, outputs = read(op), op.written
    elements = max((distinct(tensor) for tensor in inputs), default=0.0)
    return Cost(
        family="loss",
        reads=accesses(*inputs),
        writes=accesses(*outputs),
        vector_flops=arithmetic(inputs, (), operations_per_element * elements),
    )


@formula(
    "aten.mse_loss",
    "aten.smooth_l1_loss",
    "aten.huber_loss",
    "aten.binary_cross_entropy",
    "aten.binary_cross_entropy_with_logits",
    "aten.kl_div",
    "aten.soft_margin_loss",
)
def elementwise_loss(op: Op) -> Cost:
    """Reads predictions, targets and weights once, writes the loss (one number, or all): two operations per element."""
    return _streamed(op, 2)


@formula(
    "aten.mse_loss_backward",
    "aten.smooth_l1_loss_backward",
    "aten.huber_loss_backward",
    "aten.binary_cross_entropy_backward",
    "aten.soft_margin_loss_backward",
)
def elementwise_loss_backward(op: Op) -> Cost:
    """Reads predictions, targets and what gradient there is, writes a gradient per element: two operations each."""
    return _streamed(op, 2)


@formula("aten.nll_loss_forward", "aten.nll_loss2d_forward")
def negative_log_likelihood(op: Op) -> Cost:
    """Reads the targets and, for each, one element of the log-probabilities: not all the logits.

    Of the class weights one element at the least, as all targets may be equal. Writes the loss and the total weight.
    """
    target, scores = op.tensor("target"), op.tensor("self")
    return Cost(
        family="loss",
        reads=accesses(target, _gathered(scores, target.elements), *_one_weight(op)),
        writes=accesses(*op.written),
    )


@formula("aten.nll_loss_backward", "aten.nll_loss2d_backward")
def negative_log_likelihood_backward(op: Op) -> Cost:
    """Reads targets and the gradient of the loss, not the log-probabilities; writes the whole gradient, zeros too."""
    return Cost(
        family="loss",
        reads=accesses(*read(op, unread=("self", "weight", "total_weight")), *_one_weight(op)),
        writes=accesses(*op.written),
    )


def _gathered(tensor: Tensor, count: int) -> tuple[Tensor, float]:
    return tensor, min(count * tensor.item_bytes, tensor.bytes)


def _one_weight(op: Op) -> tuple[tuple[Tensor, float], ...]:
    weight = op.arguments.get("weight")
    return (_gathered(weight, 1),) if isinstance(weight, Tensor) else ()


@formula("aten.cross_entropy_loss")
def cross_entropy(op: Op) -> Cost:
    """Reads all logits and the targets (indices or probabilities), writes the loss; nothing between is stored.

    An exponential and a sum per logit.
    """
    logits = op.tensor("self")
    return Cost(
        family="loss",
        reads=accesses(logits, op.tensor("target"), *_one_weight(op)),
        writes=accesses(*op.written),
        vector_flops=arithmetic((logits,), (), 2 * distinct(logits)),
    )


@formula("aten.multi_margin_loss", "aten.multi_margin_loss_backward")
def multi_margin(op: Op) -> Cost:
    """Reads all scores, targets and what gradient there is; one element of the class weights at the least."""
    inputs = read(op, unread=("weight",))
    return Cost(
        family="loss",
        reads=accesses(*inputs, *_one_weight(op)),
        writes=accesses(*op.written),
        vector_flops=arithmetic(inputs, (), distinct(op.tensor("self"))),
    )


@formula("aten._ctc_loss", "aten._ctc_loss_backward")
def connectionist_temporal_classification(op: Op) -> Cost:
    """What the lengths leave no way around: the labels, the blank's log-probability per step, the table of alphas.

    The alphas are written forward and read backward, up to each sequence's lengths; lengths that are not known from
    the arguments charge none of these. The gradient is written in full.
    """
    scores, targets = op.tensor("log_probs"), op.tensor("targets")
    backward = op.packet.endswith("backward")
    steps, labels = op.arguments["input_lengths"], op.arguments["target_lengths"]
    if not isinstance(steps, tuple) or not isinstance(labels, tuple):
        return Cost(family="loss", writes=accesses(op.outputs[0]))
    alphas = op.tensor("log_alpha") if backward else op.outputs[1]
    cells = sum(step * (2 * label + 1) for step, label in zip(steps, labels, strict=True))
    table = (alphas, min(cells * alphas.item_bytes, alphas.bytes))
    reads = [_gathered(scores, sum(steps)), _gathered(targets, sum(labels))]
    if backward:
        return Cost(
            family="loss",
            reads=accesses(*reads, table, op.tensor("grad"), op.tensor("neg_log_likelihood")),
            writes=accesses(*op.written),
        )
    return Cost(family="loss", reads=accesses(*reads), writes=accesses(op.outputs[0], table))
