"""Memory of a 7B model: 84 GB before activations.

A model of 7 billion weights is 14 GB in bfloat16, and does not train on a GPU of 80 GB. This accounts for the bytes:
weights, gradients and what the optimizer keeps, then activations; shows what sharding over GPUs (ZeRO 1, 2, 3) and
computing activations again (checkpointing) take off; and holds the same plan against a small model of the same kind,
trained here, whose bytes are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from nearpeak import plan
from nearpeak.gallery.examples.small_llama import Llama, shape
from nearpeak.gallery.parts import Part, Prediction, StackedBars, prediction_table, prose
from nearpeak.gallery.run import Context
from nearpeak.plan.training.memory import StageMemory
from nearpeak.render.document import Table
from nearpeak.render.picture.bars import Bar
from nearpeak.units import quantity

SEQUENCE = 4096
PRECISIONS = {
    "bf16": "weights and gradients in 16 bits",
    "bf16-master": "and a float32 copy of the weights",
    "bf16-fp32-grads": "and gradients in float32",
    "fp32": "all in float32",
}
EXACT = (0.99, 1.01)
"""Of what is a count of tensors: their sizes are known."""


def example(context: Context) -> Iterator[Part]:
    """The accounting, the ways out, and a small model."""
    cluster = context.cluster(8)
    model = plan.find_model("llama-2-7b")
    yield from _states(model)
    yield from _ways_out(model, cluster)
    yield from _small(context)


def _memory(model: plan.Model, *, gpus: int, sharding: str, recompute: str = "none") -> StageMemory:
    """On each GPU: one sequence at a time, kernels that keep little."""
    layout = plan.Layout(gpus=gpus, global_batch=gpus, sharding=sharding, recompute=(recompute,))  # type: ignore[arg-type]
    job = plan.Job(model=model, layout=layout, sequence=SEQUENCE, precision=plan.precision_named("bf16"))
    return plan.memory_plan(job).fullest


def _states(model: plan.Model) -> Iterator[Part]:
    rows = []
    for name, what in PRECISIONS.items():
        one = plan.precision_named(name)
        each = one.parameters + one.gradients + one.optimizer
        parts = [f"{size:g}" for size in (one.parameters, one.gradients, one.master, one.moments) if size]
        rows.append((what, " + ".join(parts), f"{7 * each:.0f} GB", quantity(model.parameters * each, "B")))
    yield Table(
        title="Weights, gradients and AdamW",
        headers=("", "bytes a weight", "7 billion", model.name),
        rows=tuple(rows),
        note="bytes a weight: weights + gradients (+ float32 copy) + both moments of AdamW, which are in float32.",
    )
    one = plan.precision_named("bf16")
    sizes = [7 * size for size in (one.parameters, one.gradients, one.optimizer)]
    yield from prose(
        f"In the leanest of them 7 billion weights take {sizes[0]:g} GB, their gradients {sizes[1]:g} GB and the"
        f" moments {sizes[2]:g} GB: {sum(sizes):g} GB, {sum(sizes) / sizes[0]:.0f} times the weights alone, before a"
        f" single activation. {sizes[2] / sum(sizes):.0%} of it are the optimizer's."
    )


def _ways_out(model: plan.Model, cluster: plan.Cluster) -> Iterator[Part]:
    capacity = cluster.machine.memory_bytes or 80e9
    ways = {
        "1 GPU": _memory(model, gpus=1, sharding="none"),
        "1 GPU, checkpoint": _memory(model, gpus=1, sharding="none", recompute="full"),
        "8 GPUs, ZeRO 1": _memory(model, gpus=8, sharding="zero1"),
        "8 GPUs, ZeRO 2": _memory(model, gpus=8, sharding="zero2"),
        "8 GPUs, ZeRO 3": _memory(model, gpus=8, sharding="zero3"),
        "ZeRO 3, checkpoint": _memory(model, gpus=8, sharding="zero3", recompute="full"),
    }
    bars = [
        Bar(
            name=name,
            pieces=(
                ("weights", one.parameters),
                ("gradients", one.gradients),
                ("optimizer", one.optimizer),
                ("activations", one.activation + one.recomputed + one.logits),
                ("rest", one.communication + one.workspace + one.slack + one.context),
            ),
        )
        for name, one in ways.items()
    ]
    yield StackedBars(
        title=f"{model.name} on each GPU, one sequence of {SEQUENCE} tokens at a time",
        subtitle="rest: buffers of communication, workspaces, allocator slack, CUDA context",
        bars=tuple(bars),
        unit="B",
        limit=capacity,
        limit_name=f"{cluster.machine.name}: {quantity(capacity, 'B')}",
    )
    fit = [name for name, one in ways.items() if one.total <= capacity]
    whole, sharded, least = ways["1 GPU"], ways["8 GPUs, ZeRO 3"], ways["ZeRO 3, checkpoint"]
    yield from prose(
        "ZeRO spreads what all ranks hold alike: 1 the optimizer, 2 the gradients too, 3 the weights as well. The"
        f" states of {quantity(whole.states, 'B')} become {quantity(sharded.states, 'B')} on each of 8 GPUs. It does"
        " nothing for activations, which belong to each rank's own tokens. Checkpointing keeps the input of each layer"
        f" alone and computes the rest again: {quantity(whole.activation, 'B')} of activations become"
        f" {quantity(least.activation, 'B')}, and {quantity(least.recomputed, 'B')} while one layer is computed again.",
        f"On {cluster.machine.name} fit: {'; '.join(fit)}." if fit else f"On {cluster.machine.name} none of them fits.",
    )


def _small(context: Context) -> Iterator[Part]:
    model = context.pick(
        gpu=shape(layers=12, hidden=1024, heads=16, intermediate=2816, vocabulary=32000),
        cpu=shape(layers=4, hidden=256, heads=4, intermediate=704, vocabulary=4096),
    )
    batch, sequence = context.pick(gpu=(4, 2048), cpu=(2, 256))
    dtype = context.pick(gpu=torch.bfloat16, cpu=torch.float32)
    given = replace(plan.precision_named("bf16"), name="torch's", moments=4)  # AdamW's moments are as its weights
    wider = dtype.itemsize / 2  # of float32, all is twice as large
    layout = plan.Layout(gpus=1, global_batch=batch, microbatch=batch, sharding="none")
    job = plan.Job(model=model, layout=layout, sequence=sequence, precision=given, software="eager")
    expected = plan.memory_plan(job).fullest
    again = plan.memory_plan(job.with_layout(replace(layout, recompute=("full",)))).fullest
    counted = _counted(context, model, dtype, batch, sequence) if context.measures else {}
    rows = [
        _row("weights", wider * expected.parameters, counted, EXACT),
        _row("gradients", wider * expected.gradients, counted, EXACT),
        _row("optimizer", wider * expected.optimizer, counted, EXACT),
        _row("activations of layers", wider * _layers_keep(context, expected), counted, context.band),
        _row("the same, checkpointed", wider * again.activation, counted, context.band),
    ]
    if context.gpu:
        rows.append(
            _row("peak of the allocator", expected.allocated - expected.activations["eager"], counted, context.band)
        )
    yield prediction_table(
        f"A model of {model.parameters / 1e6:.0f} million weights, {batch} x {sequence} tokens", rows, unit="B"
    )
    yield from prose(
        "The plan's figures are for kernels of one operator each, as torch runs them without a compiler. Of activations"
        " the plan adds what published models keep around each block, rotated queries and keys and copies in float32;"
        " this one has neither, and they are left out. "
        + (
            "Its norm is one kernel, which keeps its input and a number for each row."
            if context.gpu
            else "Its norm is several kernels here, which keep a tensor of its size besides its input and its output."
        ),
        "torch's AdamW"
        f" keeps its moments in the dtype of the weights, here {str(dtype).removeprefix('torch.')}: with bfloat16"
        " weights that is 4 bytes a weight and not 8, and the moments round as coarsely as the weights do.",
    )
    if counted:
        share = counted["the same, checkpointed"] / counted["activations of layers"]
        yield from prose(f"Checkpointing left {share:.1%} of the activations that the layers keep.")


def _layers_keep(context: Context, planned: StageMemory) -> float:
    """Bytes of activations without those that the small model has not; a norm of several kernels keeps one more."""
    kept = planned.activation - planned.activations["eager"]
    return kept if context.gpu else kept + planned.activations["norm"]


def _row(name: str, predicted: float, counted: dict[str, float], band: tuple[float, float]) -> Prediction:
    return Prediction(what=name, predicted=predicted, measured=counted.get(name), low=band[0], high=band[1])


def _counted(context: Context, model: plan.Model, dtype: torch.dtype, batch: int, sequence: int) -> dict[str, float]:
    """Bytes of the tensors that a training step leaves, those that its layers keep, and the peak of a GPU."""
    context.progress("a small model")
    at_first = torch.cuda.memory_allocated() if context.gpu else 0
    tokens = torch.randint(model.vocabulary, (batch, sequence + 1), device=context.tensors)
    network = Llama(model).to(context.tensors, dtype)
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    for _ in range(2):
        if context.gpu:
            torch.cuda.reset_peak_memory_stats()
        network(tokens).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # gradients stay, as where several batches add to them
    weights = list(network.parameters())
    states = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    counted = {
        "weights": sum(weight.nbytes for weight in weights),
        "gradients": sum(weight.grad.nbytes for weight in weights if weight.grad is not None),
        "optimizer": sum(value.nbytes for value in states),
        "activations of layers": _kept(network, tokens[:, :-1]),
    }
    if context.gpu:
        counted["peak of the allocator"] = torch.cuda.max_memory_allocated() - at_first
    network.recompute = True
    counted["the same, checkpointed"] = _kept(network, tokens[:, :-1])
    return {name: float(value) for name, value in counted.items()}


def _kept(network: Llama, tokens: torch.Tensor) -> int:
    """Bytes that autograd keeps for the backward pass of the layers; what shares memory counts once."""
    own = {weight.untyped_storage().data_ptr() for weight in network.parameters()}
    own.add(tokens.untyped_storage().data_ptr())
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = network.trunk(tokens)
    kept.pop(out.untyped_storage().data_ptr(), None)  # it is kept for the output layer, if at all
    return sum(kept.values())
