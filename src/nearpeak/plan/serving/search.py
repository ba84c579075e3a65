"""The search over all legal serving layouts, and the Pareto front of throughput against speed per user.

>>> from nearpeak.plan.models.catalogue import get_model
>>> from nearpeak.plan.cluster.cluster import Cluster
>>> result = search_serving(get_model("llama-3-70b"), Cluster.of("h100-sxm x 8"), "fp8", prompt=1024, output=512)
>>> result.tried, str(result.front[0].layout)
(10, 'tp 8')
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nearpeak.errors import UsageError
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.cluster.collectives import CollectiveTimes
from nearpeak.plan.models.model import Model
from nearpeak.plan.serving.deployment import MEMORY_SHARE, Deployment, ServingLayout
from nearpeak.plan.serving.serve import CHUNK, MOST_SEQUENCES, Batching, Serving, serve

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Requests in flight per attention data parallel group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOption:
    """One layout under one load."""

    layout: ServingLayout
    replicas: int
    """Replicas of this layout on the cluster."""
    serving: Serving

    @property
    def per_gpu(self) -> float:
        """Output tokens per second and GPU."""
        return self.serving.tokens_per_second_per_gpu

    @property
    def per_user(self) -> float:
        """Output tokens per second of one user."""
        return self.serving.tokens_per_second_per_user


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSearch:
    """Result of a search over serving layouts."""

    tried: int
    """Legal layouts."""
    fitting: int
    """Legal layouts whose weights and cache fit."""
    front: tuple[ServingOption, ...]
    """The Pareto front of throughput per GPU against speed per user, fastest for users first."""
    within: tuple[ServingOption, ...]
    """The options within the limits, the most throughput per GPU first."""
    reason: str
    """Why the best option wins; without one, the options nearest to the limits."""

    @property
    def best(self) -> ServingOption | None:
        """The most throughput per GPU within the limits; None where no option is within them."""
        return self.within[0] if self.within else None


def serving_layouts(model: Model, gpus: int, *, domain: int | None = None) -> Iterable[ServingLayout]:
    """All layouts of one replica with powers of two, up to `gpus`; attention's tensor parallel stays in one domain."""
    powers = [1 << n for n in range(gpus.bit_length()) if 1 << n <= gpus]
    for tp, pp, dp in itertools.product(powers, powers, powers):
        if tp * pp * dp > gpus or (domain and tp > domain) or (model.heads and model.heads % tp) or pp > model.layers:
            continue
        if not model.is_moe:
            if dp == 1:  # more groups are more replicas
                yield ServingLayout(tp=tp, pp=pp)
            continue
        for ep in powers:
            if (tp * dp) % ep == 0 and model.experts % ep == 0:
                yield ServingLayout(tp=tp, pp=pp, dp=dp, ep=ep)


def search_serving(
    model: Model,
    cluster: Cluster,
    precision: str = "bf16",
    *,
    prompt: int,
    output: int,
    kv: str | None = None,
    engine: str = "vllm",
    graphs: bool = True,
    batching: Batching = "continuous",
    chunk: int = CHUNK,
    most_sequences: int = MOST_SEQUENCES,
    memory_share: float = MEMORY_SHARE,
    most_ttft: float | None = None,
    most_tpot: float | None = None,
    concurrencies: Sequence[int] = CONCURRENCIES,
) -> ServingSearch:
    """The layouts of one replica on `cluster` that serve `model` best, within `most_ttft` and `most_tpot` seconds."""
    for name, limit in (("most_ttft", most_ttft), ("most_tpot", most_tpot)):
        if limit is not None and not limit > 0:
            raise UsageError(f"{name}={limit!r} must be above 0.")
    options: list[ServingOption] = []
    tried = fitting = 0
    problem = ""
    collectives = CollectiveTimes(cluster)
    for layout in serving_layouts(model, cluster.gpus, domain=cluster.domain):
        tried += 1
        deployment = Deployment.of(
            model, cluster, layout, precision, kv=kv, engine=engine, graphs=graphs, collectives=collectives
        )
        try:
            for number in concurrencies:
                answer = serve(
                    deployment,
                    prompt=prompt,
                    output=output,
                    concurrency=number * layout.dp,
                    batching=batching,
                    chunk=chunk,
                    most_sequences=most_sequences,
                    memory_share=memory_share,
                )
                options.append(ServingOption(layout=layout, replicas=cluster.gpus // layout.gpus, serving=answer))
                if answer.queue_seconds:
                    break
            fitting += 1
        except UsageError as refused:
            problem = problem or str(refused)
    if not options:
        raise UsageError(f"No layout of {model.name} fits on {cluster.gpus} GPUs. {problem}")
    within = [
        option
        for option in options
        if (most_ttft is None or option.serving.ttft <= most_ttft)
        and (most_tpot is None or option.serving.tpot <= most_tpot)
    ]
    within.sort(key=lambda option: -option.per_gpu)
    return ServingSearch(
        tried=tried,
        fitting=fitting,
        front=front(options),
        within=tuple(within),
        reason=_reason(within[0]) if within else _missed_limits(options, most_ttft, most_tpot),
    )


def front(options: Iterable[ServingOption]) -> tuple[ServingOption, ...]:
    """The options that no other one beats both per GPU and per user."""
    best: list[ServingOption] = []
    for option in sorted(options, key=lambda item: (-item.per_user, -item.per_gpu)):
        if not best or option.per_gpu > best[-1].per_gpu:
            best.append(option)
    return tuple(best)


def _reason(best: ServingOption) -> str:
    step = best.serving.decode
    return (
        f"{best.layout} runs {best.serving.running:.0f} requests at once; its decode step is limited by "
        f"{step.limiter}, {step.communication / step.seconds:.0%} of it communication"
    )


def _missed_limits(options: Sequence[ServingOption], most_ttft: float | None, most_tpot: float | None) -> str:
    sentences = []
    if most_tpot is not None:
        quickest = min(options, key=lambda option: option.serving.tpot)
        sentences.append(f"the smallest TPOT is {quickest.serving.tpot * 1e3:.1f} ms ({quickest.layout})")
    if most_ttft is not None:
        quickest = min(options, key=lambda option: option.serving.ttft)
        sentences.append(f"the smallest TTFT is {quickest.serving.ttft * 1e3:.0f} ms ({quickest.layout})")
    return "No option is within the limits: " + ", ".join(sentences) + "."
