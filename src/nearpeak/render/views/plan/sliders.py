"""`Sliders`: the data that `assets/plan*.js` needs to recompute a plan when a slider moves.

The page repeats the planner's arithmetic for a few choices. What depends on more than those is sent as numbers:
activation bytes per token, for each degree and kind of recomputation. Of serving, the page has the planner's own step
times for all batches and contexts that can be chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from nearpeak.errors import UsageError
from nearpeak.plan.models.model import count_parameters
from nearpeak.plan.serving.deployment import Deployment
from nearpeak.plan.serving.plan import ServingPlan
from nearpeak.plan.serving.step import step_time
from nearpeak.plan.training import memory as arithmetic
from nearpeak.plan.training.job import Job
from nearpeak.plan.training.layout import output_layers
from nearpeak.plan.training.memory import EAGER_LOGITS, EAGER_RUNNING, LOGITS, UNFUSED_LOGITS, layer_bytes
from nearpeak.plan.training.plan import MemoryPlan

STEP_PARTS = ("gemm", "experts", "attention", "elementwise", "communication", "layers", "host")
RECOMPUTES = {"none": (), "parts": ("norm", "feed_activation"), "full": ("layer",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sliders:
    """The arithmetic that the page knows, and the numbers that it needs."""

    kind: Literal["memory", "decode"]
    title: str
    note: str
    data: Mapping[str, Any]


def memory_sliders(plan: MemoryPlan) -> Sliders | None:
    """Memory against degrees, microbatch, sequence, sharding and recomputation; None where something is offloaded."""
    job, layout, model = plan.job, plan.job.layout, plan.job.model
    if layout.offload != "none" or layout.sharding in ("hsdp", "shard_grad_op") or layout.virtual > 1 or layout.split:
        plain = replace(
            layout, offload="none", sharding=_plain_sharding(layout.sharding), shard_group=0, virtual=1, split=()
        )
        job = replace(job, layout=plain)
        layout = job.layout
    numbers = count_parameters(model)
    degrees = [tp for tp in _powers(64) if _legal_tp(job, tp)]
    activations = {
        name: {str(tp): values for tp in degrees if (values := _activation_bytes(job, tp, modules)) is not None}
        for name, modules in RECOMPUTES.items()
    }
    started = next((name for name, modules in RECOMPUTES.items() if set(modules) == set(layout.recompute)), None)
    if started is None:
        started = "as planned"
        activations[started] = {
            str(tp): values for tp in degrees if (values := _activation_bytes(job, tp, layout.recompute)) is not None
        }
    precision, eager = job.precision, job.software == "eager"
    trained = job.trainable >= 0.5
    data = {
        "mixers": model.mixers,
        "feeds": model.feeds,
        "output_layers": output_layers(model),
        "weights": {
            **dict.fromkeys("AWC", numbers.attention),
            "M": numbers.state_space,
            "D": numbers.dense,
            "E": numbers.expert_shared,
        },
        "norm": numbers.norm,
        "embedding": numbers.embedding,
        "output": numbers.output,
        "tied_copy": numbers.embedding if model.tied else 0,
        "final_norm": numbers.final_norm,
        "expert": numbers.expert,
        "experts": model.experts,
        "bytes": {
            "parameters": precision.parameters,
            "gradients": precision.gradients,
            "optimizer": precision.optimizer,
        },
        "trainable": job.trainable,
        "cp": layout.cp,
        "etp": layout.etp,
        "sequence_parallel": layout.sequence_parallel,
        "logits": 0.0
        if model.image_tokens
        else {"eager": EAGER_LOGITS, "unfused": UNFUSED_LOGITS}.get(job.software, LOGITS) * model.vocabulary,
        "gathered": 2.0 * model.hidden,
        "dispatched": 2.0 * model.active_experts * (model.latent or model.hidden),
        "buckets": 0.2e9,
        "copied_buckets": eager,
        "workspace": arithmetic.WORKSPACE,
        "placeholders": trained and job.software == "fused",
        "output_placeholder": model.vocabulary * model.hidden
        if trained and (precision.gradients > 2 or job.software == "fused")
        else 0,
        "running": EAGER_RUNNING * model.hidden if trained and eager else 0.0,
        "slack": arithmetic.SLACK,
        "context": [arithmetic.CONTEXT, arithmetic.CONTEXT + arithmetic.COMMUNICATORS],
        "kept": activations,
        "capacity": plan.capacity,
        "choices": {
            "gpus": _including([1 << n for n in range(15)], layout.gpus),
            "tp": degrees,
            "pp": _including([pp for pp in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if pp <= model.layers], layout.pp),
            "ep": _including([ep for ep in _powers(256) if model.experts % ep == 0], layout.ep)
            if model.is_moe
            else [1],
            "microbatch": _including([1, 2, 4, 8, 16], layout.microbatch),
            "microbatches": _including([1, 2, 4, 8, 16, 32, 64, 128], layout.microbatches),
            "sequence": _including([1 << n for n in range(9, 18)], job.sequence),
        },
        "start": {
            "gpus": layout.gpus,
            "tp": layout.tp,
            "pp": layout.pp,
            "ep": layout.ep,
            "microbatch": layout.microbatch,
            "microbatches": layout.microbatches,
            "sequence": job.sequence,
            "sharding": layout.sharding,
            "recompute": started,
        },
    }
    if layout.tp not in degrees:
        return None
    return Sliders(
        kind="memory",
        title="What if",
        note="The sliders compute memory again, in this page: states, activations, logits and buffers of the "
        "fullest pipeline stage, for a plain 1F1B schedule without offload. The tables below, and "
        "times, stay as planned.",
        data=data,
    )


def decode_sliders(plan: ServingPlan) -> Sliders:
    """A decode step of the planner for each batch and context: the page looks up what the planner computed."""
    layout = plan.layout
    deployment = Deployment.of(plan.model, plan.cluster, layout, plan.precision, engine=plan.engine)
    batch = max(1, round(plan.replica.running / layout.dp))
    context = plan.load.prompt + plan.load.output // 2
    batches = _including([1 << n for n in range(12)], batch)
    contexts = _including([1 << n for n in range(7, 18)], context)
    steps = [
        [
            step_time(
                deployment,
                sequences=max(1.0, sequences / layout.pp),
                context=tokens,
                in_flight=min(float(layout.pp), sequences),
            )
            for tokens in contexts
        ]
        for sequences in batches
    ]
    data = {
        "parts": list(STEP_PARTS),
        "steps": [[[getattr(step, name) for name in STEP_PARTS] for step in row] for row in steps],
        "limits": [[step.limiter for step in row] for row in steps],
        "cache": [deployment.cache_bytes(tokens) for tokens in contexts],
        "cache_room": plan.memory.cache,
        "choices": {"batch": batches, "context": contexts},
        "start": {"batch": batch, "context": context},
    }
    return Sliders(
        kind="decode",
        title="What if",
        note="The sliders show one decode step of an attention group, as the planner computed it for each batch and "
        "context. The tables below stay as planned.",
        data=data,
    )


def _plain_sharding(sharding: str) -> Any:
    return {"hsdp": "zero3", "shard_grad_op": "zero2"}.get(sharding, sharding)


def _powers(limit: int) -> list[int]:
    return [1 << n for n in range(limit.bit_length()) if 1 << n <= limit]


def _including(values: Sequence[int], value: int) -> list[int]:
    return sorted({*values, value})


def _legal_tp(job: Job, tp: int) -> bool:
    return _job(job, tp, ()) is not None


def _job(job: Job, tp: int, recompute: tuple[str, ...]) -> Job | None:
    """One GPU of each kind and one sequence: what a token leaves behind at this degree."""
    layout = job.layout
    try:
        tried = replace(
            layout,
            gpus=tp * layout.cp * max(1, layout.ep * layout.etp),
            global_batch=max(1, layout.ep * layout.etp),
            microbatch=1,
            tp=tp,
            pp=1,
            virtual=1,
            split=(),
            sharding="none",
            shard_group=0,
            recompute=recompute,
            offload="none",
        )
        return replace(job, layout=tried)
    except UsageError:
        return None


def _activation_bytes(job: Job, tp: int, recompute: tuple[str, ...]) -> dict[str, Any] | None:
    """Activation bytes of a token, in one mixer and one feed of each kind: those kept, and those recomputed at once."""
    alone = _job(job, tp, recompute)
    if alone is None:
        return None
    mixers, feeds = ("".join(sorted(set(letters) - {"-"})) for letters in (job.model.mixers, job.model.feeds))

    def bytes_by_kind(whole: bool) -> dict[str, float]:
        sizes = {letter: layer_bytes(alone, letter, "-", whole=whole)[1] for letter in mixers}
        return sizes | {letter: layer_bytes(alone, "", letter, whole=whole)[1] for letter in feeds}

    return {"held": bytes_by_kind(False), "again": bytes_by_kind(True) if "layer" in recompute else None}
