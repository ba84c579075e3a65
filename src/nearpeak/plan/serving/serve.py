"""What users of a served model see: time to the first token, time per token, throughput, at a given concurrency.

With continuous batching, a prompt is worked on in the same steps in which others decode. In a closed loop of `b`
requests per group, `b` prompts come along every `output` steps, so a share `f` of the steps carries a piece of one:

    TPOT = (1 - f) x step(b) + f x step(b with a piece of a prompt)
    TTFT = first + half a step + pieces of the own prompt + prompts that came at the same time + waiting for room

>>> from nearpeak.plan.models.catalogue import model
>>> from nearpeak.plan.network.cluster import Cluster
>>> here = Deployment.of(model("llama-3-70b"), Cluster.of("h200-sxm x 2"), ServingLayout(tp=2), "fp8")
>>> answer = serve(here, prompt=1024, output=1024, concurrency=32)
>>> answer.limiter, answer.prefill.limiter, answer.running
('memory', 'compute', 32.0)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.plan.provenance import Provenance, weakest
from nearpeak.plan.serving.constants import ServingConstants, load_serving_constants
from nearpeak.plan.serving.deployment import Deployment
from nearpeak.plan.serving.kv_cache import MEMORY_SHARE, require_room
from nearpeak.plan.serving.layout import ServingLayout
from nearpeak.plan.serving.rates import Rates, rates
from nearpeak.plan.serving.step import StepTime, step_time

__all__ = ["Deployment", "Serving", "ServingLayout", "most_throughput", "serve", "serve_many"]

Batching = Literal["continuous", "static"]
BATCHINGS: tuple[str, ...] = get_args(Batching)
CHUNK = 8192
"""Tokens of prompts that one step takes at most: the default of vLLM's and TensorRT-LLM's servers."""
MOST_SEQUENCES = 2048
"""That an engine runs at once in one group: TensorRT-LLM's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """One replica under one load; times are means over requests."""

    concurrency: float
    """Requests in flight, over all groups of the replica."""
    running: float
    """Of them, those that the KV cache has room for."""
    ttft: float
    tpot: float
    """Seconds between tokens of one request."""
    queue_seconds: float
    """Of `ttft`, waiting for room in the KV cache."""
    decode: StepTime
    """A step in which all running requests decode."""
    prefill: StepTime
    """One prompt alone."""
    mixed_share: float
    """Share of the steps that carry a piece of a prompt."""
    tokens_per_second: float
    """Output tokens of the replica."""
    gpus: int
    spread: Mapping[str, tuple[float, float]]
    """Measured over predicted in published runs of other sources, the 10th and 90th percentile: "ttft", "tpot"."""
    provenance: Provenance

    @property
    def ttft_range(self) -> tuple[float, float]:
        """Where eight of ten measured times to the first token would lie."""
        low, high = self.spread.get("ttft", (1.0, 1.0))
        return self.ttft * low, self.ttft * high

    @property
    def tpot_range(self) -> tuple[float, float]:
        """Where eight of ten measured times per token would lie."""
        low, high = self.spread.get("tpot", (1.0, 1.0))
        return self.tpot * low, self.tpot * high

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Output tokens per second over all GPUs of the replica."""
        return self.tokens_per_second / self.gpus

    @property
    def tokens_per_second_per_user(self) -> float:
        """What one user sees."""
        return 1.0 / self.tpot

    @property
    def limiter(self) -> str:
        """What most of a decode step waits for."""
        return self.decode.limiter


def serve(
    here: Deployment,
    *,
    prompt: int,
    output: int,
    concurrency: float,
    batching: Batching = "continuous",
    chunk: int = CHUNK,
    most_sequences: int = MOST_SEQUENCES,
    memory_share: float = MEMORY_SHARE,
    offline: bool = False,
    constants: ServingConstants | None = None,
) -> Serving:
    """Requests of `prompt` tokens in and `output` tokens out, `concurrency` of them in flight in the replica.

    `offline`: the requests are all there from the start, and only throughput counts.
    """
    _check(prompt=prompt, output=output, chunk=chunk, most_sequences=most_sequences)
    if not (math.isfinite(concurrency) and concurrency > 0):
        raise UsageError(f"concurrency={concurrency!r} must be above 0. Nearest: concurrency=1.")
    if batching not in BATCHINGS:
        raise UsageError(f"batching={batching!r} is not known. {did_you_mean(batching, BATCHINGS)}")
    constants = constants or load_serving_constants()
    layout = here.layout
    context = prompt + output / 2
    room = require_room(here, prompt + output, memory_share=memory_share)
    asked = max(1.0, concurrency / layout.dp)
    held = held_context(here, prompt, output, constants)
    running = max(1.0, min(asked, room.sequences(held), most_sequences))
    batch = max(1.0, running / layout.pp)  # each stage works on another part of the requests
    reached = rates(here, constants)
    pace = _static if batching == "static" else _continuous
    in_flight = min(float(layout.pp), running)
    paced = pace(here, batch, in_flight, prompt, output, context, chunk, offline, constants, reached)
    request = output * paced.tpot
    queue = max(0.0, asked - running) / running * request
    together = running * layout.dp
    rate = constants.occupancy * together / paced.tpot
    if not offline:
        rate = together * output / (paced.first + (output - 1) * paced.tpot)
    return Serving(
        concurrency=concurrency,
        running=together,
        ttft=paced.first + queue,
        tpot=paced.tpot,
        queue_seconds=queue,
        decode=paced.decode,
        prefill=paced.prefill,
        mixed_share=paced.mixed_share,
        tokens_per_second=rate,
        gpus=layout.gpus,
        spread=constants.spread,
        provenance=weakest(paced.decode.provenance, paced.prefill.provenance),
    )


def serve_many(here: Deployment, *, prompt: int, output: int, concurrencies: Iterable[float]) -> tuple[Serving, ...]:
    """Latency and throughput against concurrency, one answer for each."""
    return tuple(serve(here, prompt=prompt, output=output, concurrency=number) for number in concurrencies)


def most_throughput(
    here: Deployment,
    *,
    prompt: int,
    output: int,
    most_sequences: int = MOST_SEQUENCES,
    memory_share: float = MEMORY_SHARE,
    constants: ServingConstants | None = None,
) -> Serving:
    """The replica with as many requests as its memory holds, all of them waiting from the start."""
    constants = constants or load_serving_constants()
    room = require_room(here, prompt + output, memory_share=memory_share)
    held = held_context(here, prompt, output, constants)
    fit = max(1.0, min(float(most_sequences), room.sequences(held)))
    return serve(
        here,
        prompt=prompt,
        output=output,
        concurrency=fit * here.layout.dp,
        most_sequences=most_sequences,
        memory_share=memory_share,
        offline=True,
        constants=constants,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pace:
    first: float
    tpot: float
    mixed_share: float
    decode: StepTime
    prefill: StepTime


def _continuous(
    here: Deployment,
    batch: float,
    in_flight: float,
    prompt: int,
    output: int,
    context: float,
    chunk: int,
    offline: bool,
    constants: ServingConstants,
    reached: Rates,
) -> _Pace:
    """Prompts in pieces of at most `chunk` tokens, in steps in which the others decode."""

    def step(sequences: float, tokens: float) -> StepTime:
        return step_time(
            here,
            sequences=sequences,
            context=context,
            prompt_tokens=tokens,
            prompt_length=prompt,
            in_flight=in_flight,
            constants=constants,
            reached=reached,
        )

    decode = step(batch, 0.0)
    pieces = math.ceil(prompt / chunk)
    alone = step(0.0, prompt / pieces)
    others = batch if offline else batch - 1
    share, tpot = 0.0, decode.seconds
    if others > 0:
        arriving = others * prompt / output  # tokens of prompts per step
        piece = prompt / pieces
        share = min(1.0, arriving / piece)
        if share < 1:
            mixed = step(batch - 1, piece).seconds
        elif arriving <= chunk:
            mixed = step(batch, arriving).seconds
        else:  # more than a step takes: steps of prompts alone come between
            mixed = step(batch, chunk).seconds + (arriving - chunk) / piece * alone.seconds
        tpot = (1 - share) * decode.seconds + share * mixed
    own = pieces * step(max(0.0, batch - 1), prompt / pieces).seconds if batch > 1 else pieces * alone.seconds
    engine = constants.engines[here.engine]
    wait = 0.5 * tpot if batch > 1 else 0.0
    if batch > 1:
        busy = min(0.9, share * own / pieces / tpot)
        at_once = (batch - 1) / 2
        collisions = min(at_once, busy / (2 * (1 - busy)))
        wait += ((1 - constants.burst) * collisions + constants.burst * at_once) * pieces * alone.seconds
    return _Pace(first=engine.first + wait + own, tpot=tpot, mixed_share=share, decode=decode, prefill=alone)


def held_context(here: Deployment, prompt: int, output: int, constants: ServingConstants) -> float:
    """Tokens for which one request holds room in the KV cache, on the average over its life."""
    return prompt + output * (1.0 if constants.engines[here.engine].reserves else 0.5)


def _static(
    here: Deployment,
    batch: float,
    in_flight: float,
    prompt: int,
    output: int,
    context: float,
    chunk: int,
    offline: bool,
    constants: ServingConstants,
    reached: Rates,
) -> _Pace:
    """All prompts first, then all decode together until the last is done."""
    prefill = step_time(
        here,
        sequences=0.0,
        prompt_tokens=batch * prompt,
        prompt_length=prompt,
        constants=constants,
        reached=reached,
    )
    decode = step_time(
        here, sequences=batch, context=context, in_flight=in_flight, constants=constants, reached=reached
    )
    first = constants.engines[here.engine].first + prefill.seconds
    tpot = decode.seconds + (prefill.seconds / output if offline else 0.0)
    return _Pace(first=first, tpot=tpot, mixed_share=0.0, decode=decode, prefill=prefill)


def _check(**values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{name}={value!r} must be a whole number of at least 1. Nearest: {name}=1.")
