"""The search over all legal serving layouts: which are on the front of throughput against speed per user.

>>> from nearpeak.plan.models.catalogue import get_model
>>> from nearpeak.plan.cluster.cluster import Cluster
>>> found = search_serving(get_model("llama-3-70b"), Cluster.of("h100-sxm x 8"), "fp8", prompt=1024, output=512)
>>> found.tried, str(found.front[0].layout)
(10, 'tp 8')
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nearpeak.errors import UsageError
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.models.model import Model
from nearpeak.plan.serving.deployment import Deployment, Links, ServingLayout
from nearpeak.plan.serving.serve import Serving, serve

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Requests in flight per attention data parallel group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOption:
    """One layout under one load."""

    layout: ServingLayout
    replicas: int
    """Of this layout that the cluster has room for."""
    serving: Serving

    @property
    def per_gpu(self) -> float:
        """Output tokens per second and GPU of the whole cluster."""
        return self.serving.tokens_per_second_per_gpu

    @property
    def per_user(self) -> float:
        """Output tokens per second that one user sees."""
        return self.serving.tokens_per_second_per_user


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSearch:
    """What a search found."""

    tried: int
    """Layouts that are legal."""
    fitting: int
    """Of them, those whose weights and cache fit."""
    front: tuple[ServingOption, ...]
    """Options that none beats in both throughput per GPU and speed per user, the fastest for users first."""
    best: ServingOption | None
    """The most throughput per GPU within the limits; None where nothing keeps them."""
    nearest: str
    """What keeps options from the limits, where nothing does; otherwise why the best one wins."""


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
    links = Links(cluster)
    for layout in serving_layouts(model, cluster.gpus, domain=cluster.domain):
        tried += 1
        here = Deployment.of(model, cluster, layout, precision, kv=kv, engine=engine, links=links)
        try:
            for number in concurrencies:
                answer = serve(here, prompt=prompt, output=output, concurrency=number * layout.dp)
                options.append(ServingOption(layout=layout, replicas=cluster.gpus // layout.gpus, serving=answer))
                if answer.queue_seconds:
                    break
            fitting += 1
        except UsageError as refused:
            problem = problem or str(refused)
    if not options:
        raise UsageError(f"No layout of {model.name} fits on {cluster.gpus} GPUs. {problem}")
    kept = [
        option
        for option in options
        if (most_ttft is None or option.serving.ttft <= most_ttft)
        and (most_tpot is None or option.serving.tpot <= most_tpot)
    ]
    best = max(kept, key=lambda option: option.per_gpu, default=None)
    return ServingSearch(
        tried=tried,
        fitting=fitting,
        front=front(options),
        best=best,
        nearest=_missed(options, most_ttft, most_tpot) if best is None else _reason(best),
    )


def front(options: Iterable[ServingOption]) -> tuple[ServingOption, ...]:
    """Those that no other beats both per GPU and per user."""
    found: list[ServingOption] = []
    for option in sorted(options, key=lambda item: (-item.per_user, -item.per_gpu)):
        if not found or option.per_gpu > found[-1].per_gpu:
            found.append(option)
    return tuple(found)


def _reason(best: ServingOption) -> str:
    step = best.serving.decode
    return (
        f"{best.layout} runs {best.serving.running:.0f} requests at once; its decode step is limited by "
        f"{step.limiter}, {step.communication / step.seconds:.0%} of it communication"
    )


def _missed(options: Sequence[ServingOption], most_ttft: float | None, most_tpot: float | None) -> str:
    sentences = []
    if most_tpot is not None:
        quickest = min(options, key=lambda option: option.serving.tpot)
        sentences.append(f"the smallest TPOT is {quickest.serving.tpot * 1e3:.1f} ms ({quickest.layout})")
    if most_ttft is not None:
        quickest = min(options, key=lambda option: option.serving.ttft)
        sentences.append(f"the smallest TTFT is {quickest.serving.ttft * 1e3:.0f} ms ({quickest.layout})")
    return "Nothing keeps the limits: " + ", ".join(sentences) + "."
