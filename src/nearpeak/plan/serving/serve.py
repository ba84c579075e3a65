"""What users of a served model see: time to the first token, time per token, throughput, at a given concurrency.

With continuous batching, a prompt is worked on in the same steps in which others decode. In a closed loop of `b`
requests per group, `b` prompts come along every `output` steps, so a share `f` of the steps carries a piece of one:

    TPOT = (1 - f) x step(b) + f x step(b with a piece of a prompt)
    TTFT = first + half a step + pieces of the own prompt + prompts that came at the same time + waiting for room

`serve_disaggregated` has prefill and decode on replicas of their own, `speculate` decodes with speculative tokens.

>>> from nearpeak.plan.models.catalogue import get_model
>>> from nearpeak.plan.cluster.cluster import Cluster
>>> llama = Deployment.of(get_model("llama-3-70b"), Cluster.of("h200-sxm x 2"), ServingLayout(tp=2), "fp8")
>>> answer = serve(llama, prompt=1024, output=1024, concurrency=32)
>>> answer.limiter, answer.prefill.limiter, answer.running
('memory', 'compute', 32.0)
>>> round(expected_tokens(3, 0.7), 3)
2.533
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.plan.provenance import Provenance, weakest
from nearpeak.plan.serving.constants import ServingConstants, load_serving_constants
from nearpeak.plan.serving.deployment import MEMORY_SHARE, Deployment, ServingLayout, require_room
from nearpeak.plan.serving.step import ServingRates, StepTime, serving_rates, step_time

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
    _require_positive(prompt=prompt, output=output, chunk=chunk, most_sequences=most_sequences)
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
    reached = serving_rates(here, constants)
    pace = _static_pace if batching == "static" else _continuous_pace
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


def _continuous_pace(
    here: Deployment,
    batch: float,
    in_flight: float,
    prompt: int,
    output: int,
    context: float,
    chunk: int,
    offline: bool,
    constants: ServingConstants,
    reached: ServingRates,
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


def _static_pace(
    here: Deployment,
    batch: float,
    in_flight: float,
    prompt: int,
    output: int,
    context: float,
    chunk: int,
    offline: bool,
    constants: ServingConstants,
    reached: ServingRates,
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


def _require_positive(**values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{name}={value!r} must be a whole number of at least 1. Nearest: {name}=1.")


LINK_SHARE = 0.7
"""Of the network's bandwidth that moving a KV cache from one machine to another reaches. Assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disaggregated:
    """Prompts on one pool of replicas, decoding on another."""

    ttft: float
    tpot: float
    transfer_seconds: float
    """To move the KV cache of one prompt; part of `ttft`."""
    requests_per_second: float
    """That both pools together can keep up with."""
    prefill_limit: float
    """Requests per second that the prefill pool can take."""
    decode_limit: float
    """Requests per second that the decode pool finishes."""
    tokens_per_second: float
    gpus: int
    balance: float
    """Prefill replicas per decode replica at which both pools are as busy."""
    provenance: Provenance

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Output tokens per second over all GPUs of both pools."""
        return self.tokens_per_second / self.gpus

    @property
    def limiter(self) -> str:
        """The pool that the other one waits for."""
        return "prefill" if self.prefill_limit < self.decode_limit else "decode"


def serve_disaggregated(
    prefill: Deployment,
    decode: Deployment,
    *,
    prompt: int,
    output: int,
    concurrency: float,
    prefill_replicas: int = 1,
    decode_replicas: int = 1,
    link_bandwidth: float | None = None,
    memory_share: float = MEMORY_SHARE,
    constants: ServingConstants | None = None,
) -> Disaggregated:
    """`concurrency` requests in flight over two pools; `link_bandwidth` is bytes/s per GPU between them.

    No prompt delays a token: TPOT is that of a pure decode step. TTFT is a prompt, what waits before it, and the way of
    its cache over the network.
    """
    for name, number in (("prefill_replicas", prefill_replicas), ("decode_replicas", decode_replicas)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise UsageError(f"{name}={number!r} must be a whole number of at least 1. Nearest: {name}=1.")
    if not (math.isfinite(concurrency) and concurrency > 0):
        raise UsageError(f"concurrency={concurrency!r} must be above 0. Nearest: concurrency=1.")
    if prefill.model != decode.model:
        raise UsageError(f"prefill serves {prefill.model.name} and decode {decode.model.name}. Give one model to both.")
    constants = constants or load_serving_constants()
    require_room(prefill, prompt, memory_share=memory_share)
    room = require_room(decode, prompt + output, memory_share=memory_share)
    groups = decode.layout.dp * decode_replicas
    held = held_context(decode, prompt, output, constants)
    running = max(1.0, min(concurrency / groups, room.sequences(held)))
    context = prompt + output / 2
    step = step_time(
        decode,
        sequences=max(1.0, running / decode.layout.pp),
        context=context,
        in_flight=min(float(decode.layout.pp), running),
        constants=constants,
    )
    pieces = math.ceil(prompt / CHUNK)
    piece = step_time(prefill, sequences=0, prompt_tokens=prompt / pieces, prompt_length=prompt, constants=constants)
    alone = pieces * piece.seconds
    prompts_at_once = prefill_replicas * prefill.layout.dp * prefill.layout.pp
    prefill_limit = prompts_at_once / alone
    decode_limit = groups * running / (output * step.seconds)
    bandwidth = link_bandwidth if link_bandwidth is not None else _transfer_bandwidth(prefill)
    moved = prefill.cache_bytes(prompt) * decode.precision.kv_bytes / prefill.precision.kv_bytes
    transfer = moved / (bandwidth * LINK_SHARE)
    rate = min(prefill_limit, decode_limit)
    busy = min(0.95, rate / prefill_limit)
    at_once = concurrency / prompts_at_once / 2
    waiting = min(at_once, busy / (2 * (1 - busy))) * alone
    first = constants.engines[prefill.engine].first + waiting + alone + transfer
    return Disaggregated(
        ttft=first,
        tpot=step.seconds,
        transfer_seconds=transfer,
        requests_per_second=rate,
        prefill_limit=prefill_limit,
        decode_limit=decode_limit,
        tokens_per_second=rate * output,
        gpus=prefill.layout.gpus * prefill_replicas + decode.layout.gpus * decode_replicas,
        balance=(decode_limit / decode_replicas) / (prefill_limit / prefill_replicas),
        provenance=weakest(
            step.provenance,
            piece.provenance,
            Provenance(kind="assumed", text=f"the KV cache moves at {LINK_SHARE:.0%} of the link's bandwidth"),
        ),
    )


def _transfer_bandwidth(here: Deployment) -> float:
    cluster = here.cluster
    bandwidth = cluster.network_bandwidth or cluster.link_bandwidth
    if not bandwidth:
        raise UsageError("The link between prefill and decode is not known. Give link_bandwidth in bytes/s per GPU.")
    return bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculative:
    """Decoding with guesses."""

    tpot: float
    plain_tpot: float
    """Without guesses."""
    tokens_per_step: float
    """That one verification yields on the average, its own included."""
    verify_seconds: float
    draft_seconds: float
    """For all guesses of one step."""
    break_even: float | None
    """The acceptance rate above which guessing pays; None where it never does."""
    provenance: Provenance

    @property
    def speedup(self) -> float:
        """Of decoding."""
        return self.plain_tpot / self.tpot


def expected_tokens(guesses: int, acceptance: float) -> float:
    """Tokens that one verification of `guesses` guesses yields, each accepted with `acceptance` if all before were."""
    if acceptance >= 1:
        return guesses + 1.0
    return float((1 - acceptance ** (guesses + 1)) / (1 - acceptance))


def speculate(
    here: Deployment,
    *,
    batch: float,
    context: float,
    guesses: int,
    acceptance: float,
    draft: Deployment | None = None,
    draft_layers: float = 1.0,
    constants: ServingConstants | None = None,
) -> Speculative:
    """`batch` sequences per group decode with `guesses` guesses per step.

    Guesses come from `draft`, a small model of its own, or from `draft_layers` more layers of the model itself and its
    output layer (multi-token prediction, EAGLE).
    """
    if isinstance(guesses, bool) or not isinstance(guesses, int) or guesses < 1:
        raise UsageError(f"guesses={guesses!r} must be a whole number of at least 1. Nearest: guesses=1.")
    if not 0 <= acceptance <= 1:
        near = min(1.0, max(0.0, acceptance))
        raise UsageError(f"acceptance={acceptance!r} must lie between 0 and 1. Nearest: acceptance={near:g}.")
    constants = constants or load_serving_constants()
    plain = step_time(here, sequences=batch, context=context, constants=constants)
    verify = step_time(here, sequences=batch, context=context, tokens_each=guesses + 1.0, constants=constants)
    if draft is not None:
        one = step_time(draft, sequences=batch, context=context, constants=constants).seconds
    else:
        head = here.model.hidden * here.model.vocabulary * 2.0 / here.layout.tp
        read = head / (here.weight_bytes * here.layout.pp)
        one = (plain.seconds - plain.host) * min(1.0, draft_layers / here.model.layers + read)
    drafted = guesses * one
    gained = expected_tokens(guesses, acceptance)
    step = verify.seconds + drafted
    return Speculative(
        tpot=step / gained,
        plain_tpot=plain.seconds,
        tokens_per_step=gained,
        verify_seconds=verify.seconds,
        draft_seconds=drafted,
        break_even=_break_even(guesses, step / plain.seconds),
        provenance=weakest(
            verify.provenance,
            Provenance(kind="assumed", text="the acceptance rate is the caller's, alike for all guesses"),
        ),
    )


def _break_even(guesses: int, cost: float) -> float | None:
    """The acceptance at which the expected tokens are worth `cost` plain steps."""
    if cost >= guesses + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if expected_tokens(guesses, middle) >= cost else (middle, high)
    return high
