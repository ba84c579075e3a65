"""Losses: predictions and targets are read once; a loss over class indices gathers one element per row.

Rows whose target is the index to ignore need no score. Labels that are ignored are common (padding, prompts), so of the
log-probabilities one element is certain, not one for each row.
"""

from __future__ import annotations

from nearpeak.ops.cost import Cost, Part, accesses, formula
from nearpeak.ops.formulas.pointwise import arithmetic, distinct, read
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor

ELEMENTWISE = """
binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits huber_loss huber_loss_backward
kl_div mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward soft_margin_loss soft_margin_loss_backward
""".split()


@formula(*(f"aten.{name}" for name in ELEMENTWISE))
def elementwise_loss(op: Op) -> Cost:
    """Reads predictions, targets, weights and what gradient there is once; two operations per element.

    Writes the loss (one number, or all), or a gradient per element.
    """
    inputs = read(op)
    elements = max((distinct(tensor) for tensor in inputs), default=0.0)
    return _loss(op, inputs, operations=2 * elements, of=inputs)


def _loss(
    op: Op,
    reads: tuple[Part, ...],
    *,
    operations: float = 0.0,
    of: tuple[Tensor, ...] = (),
    writes: tuple[Part, ...] | None = None,
) -> Cost:
    """Reads and writes (all that the op writes, unless given), and operations in the dtype of the tensors `of`."""
    return Cost(
        family="loss",
        reads=accesses(*reads),
        writes=accesses(*(op.written if writes is None else writes)),
        vector_flops=arithmetic(of, (), operations),
    )


@formula("aten.nll_loss_forward", "aten.nll_loss2d_forward")
def negative_log_likelihood(op: Op) -> Cost:
    """Reads the targets, one log-probability and one class weight; writes the loss and the total weight."""
    target = op.tensor("target")
    return _loss(op, (target, _gathered(op.tensor("self"), min(1, target.elements)), *_one_weight(op)))


@formula("aten.nll_loss_backward", "aten.nll_loss2d_backward")
def negative_log_likelihood_backward(op: Op) -> Cost:
    """Reads targets and the gradient of the loss, not the log-probabilities; writes the whole gradient, zeros too."""
    return _loss(op, (*read(op, unread=("self", "weight", "total_weight")), *_one_weight(op)))


def _gathered(tensor: Tensor, count: int) -> tuple[Tensor, float]:
    return tensor, min(count * tensor.item_bytes, tensor.bytes)


def _one_weight(op: Op) -> tuple[tuple[Tensor, float], ...]:
    """Of the class weights one element, as all targets may be equal."""
    return tuple(_gathered(weight, 1) for weight in op.tensors("weight"))


@formula("aten.cross_entropy_loss")
def cross_entropy(op: Op) -> Cost:
    """Reads all logits and the targets (indices or probabilities), writes the loss; nothing between is stored.

    An exponential and a sum per logit. Unlike the parts that torch takes it apart into, it could leave out rows that
    are ignored; assumed is that there are none.
    """
    logits = op.tensor("self")
    reads: tuple[Part, ...] = (logits, op.tensor("target"), *_one_weight(op))
    return _loss(op, reads, operations=2 * distinct(logits), of=(logits,))


@formula("aten.multi_margin_loss", "aten.multi_margin_loss_backward")
def multi_margin(op: Op) -> Cost:
    """Reads all scores, targets and what gradient there is; one element of the class weights at the least."""
    inputs = read(op, unread=("weight",))
    return _loss(op, (*inputs, *_one_weight(op)), operations=distinct(op.tensor("self")), of=inputs)


@formula("aten.multilabel_margin_loss_forward", "aten.multilabel_margin_loss_backward")
def multilabel_margin(op: Op) -> Cost:
    """Reads the scores (backward: and the marks of the targets) and one target of each row: a row of targets ends at
    the first negative one."""
    scores, target = op.tensor("self"), op.tensor("target")
    rows = target.elements // max(1, target.shape[-1]) if target.shape else 1
    return _loss(op, (scores, *op.tensors("grad_output", "is_target"), _gathered(target, rows)))


@formula(
    "aten._ctc_loss",
    "aten._ctc_loss_backward",
    "aten._cudnn_ctc_loss",
    "aten.miopen_ctc_loss",
)
def connectionist_temporal_classification(op: Op) -> Cost:
    """What the lengths leave no way around: the labels, the blank's log-probability per step, the table of alphas.

    The alphas are written forward and read backward, up to each sequence's lengths; libraries give the gradient with
    the loss instead. Lengths that are not known from the arguments charge none of these. Gradients are written in full.
    """
    scores, targets = op.tensor("log_probs"), op.tensor("targets")
    library, backward = "ctc_loss" in op.packet and "aten._ctc" not in op.packet, op.packet.endswith("backward")
    steps, labels = op.arguments["input_lengths"], op.arguments["target_lengths"]
    if not isinstance(steps, tuple) or not isinstance(labels, tuple):
        return _loss(op, (), writes=op.outputs if library else op.outputs[:1])
    reads = (_gathered(scores, sum(steps)), _gathered(targets, sum(labels)))
    if library:
        return _loss(op, reads)
    alphas = op.tensor("log_alpha") if backward else op.outputs[1]
    cells = sum(step * (2 * label + 1) for step, label in zip(steps, labels, strict=True))
    table = _gathered(alphas, cells)
    if backward:
        return _loss(op, (*reads, table, op.tensor("grad"), op.tensor("neg_log_likelihood")))
    return _loss(op, reads, writes=(op.outputs[0], table))
