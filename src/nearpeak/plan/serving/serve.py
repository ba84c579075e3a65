"""What users of a served model see: time to the first token, time per token, throughput, at a given concurrency.

With continuous batching, a prompt is worked on in the same steps in which others decode. In a closed loop of `b`
requests per group, `b` prompts come along every `output` steps, so a share `f` of the steps carries a piece of one:

    TPOT = (1 - f) x step(b) + f x step(b with a piece of a prompt)
    TTFT = first + half a step + pieces of the own prompt + prompts that came at the same time + waiting for room

`serve_disaggregated` has prefill and decode on replicas of their own, `speculate` decodes with speculative tokens.

>>> from nearpeak.plan.models.catalogue import get_model
>>> from nearpeak.plan.cluster.cluster import Cluster
>>> from nearpeak.plan.serving.deployment import ServingLayout
>>> llama = Deployment.of(get_model("llama-3-70b"), Cluster.of("h200-sxm x 2"), ServingLayout(tp=2), "fp8")
>>> answer = serve(llama, prompt=1024, output=1024, concurrency=32)
>>> answer.limiter, answer.prefill.limiter, answer.running
('memory', 'compute', 32.0)
>>> round(expected_tokens(3, 0.7), 3)
2.533
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.plan.legal import require_positive
from nearpeak.plan.provenance import Provenance, weakest
from nearpeak.plan.serving.constants import ServingConstants, load_serving_constants
from nearpeak.plan.serving.deployment import MEMORY_SHARE, Deployment, ServingLayout, require_room
from nearpeak.plan.serving.step import ServingRates, StepTime, serving_rates, step_time

Batching = Literal["continuous", "static"]
BATCHINGS: tuple[str, ...] = get_args(Batching)
CHUNK = 8192
"""Most tokens of prompts in one step: the default of vLLM's and TensorRT-LLM's servers."""
MOST_SEQUENCES = 2048
"""Most sequences that an engine runs at once in one group: TensorRT-LLM's default."""
LINK_SHARE = 0.7
"""Share of the network bandwidth at which a KV cache moves between machines. Assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """One replica under one load; times are means over requests."""

    concurrency: float
    """Requests in flight in the replica."""
    running: float
    """Requests that fit into the KV cache."""
    ttft: float
    tpot: float
    """Seconds between tokens of one request."""
    queue_seconds: float
    """Part of `ttft`: waiting for space in the KV cache."""
    decode: StepTime
    """A step in which all running requests decode."""
    prefill: StepTime
    """A step with one prompt alone."""
    mixed_share: float
    """Share of the steps with a chunk of a prompt."""
    tokens_per_second: float
    """Output tokens per second of the replica."""
    gpus: int
    spread: Mapping[str, tuple[float, float]]
    """10th and 90th percentile of measured over predicted times in published runs of other sources: "ttft", "tpot"."""
    provenance: Provenance

    @property
    def ttft_range(self) -> tuple[float, float]:
        """80 % interval of the time to first token."""
        low, high = self.spread.get("ttft", (1.0, 1.0))
        return self.ttft * low, self.ttft * high

    @property
    def tpot_range(self) -> tuple[float, float]:
        """80 % interval of the time per output token."""
        low, high = self.spread.get("tpot", (1.0, 1.0))
        return self.tpot * low, self.tpot * high

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Output tokens per second over all GPUs of the replica."""
        return self.tokens_per_second / self.gpus

    @property
    def tokens_per_second_per_user(self) -> float:
        """Output tokens per second of one user."""
        return 1.0 / self.tpot

    @property
    def limiter(self) -> str:
        """What limits a decode step."""
        return self.decode.limiter


def serve(
    deployment: Deployment,
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

    `offline`: all requests are there from the start, and only throughput counts.
    """
    require_positive(prompt=prompt, output=output, chunk=chunk, most_sequences=most_sequences)
    if not (math.isfinite(concurrency) and concurrency > 0):
        raise UsageError(f"concurrency={concurrency!r} must be above 0. Nearest: concurrency=1.")
    if batching not in BATCHINGS:
        raise UsageError(f"batching={batching!r} is not known. {did_you_mean(batching, BATCHINGS)}")
    constants = constants or load_serving_constants()
    layout = deployment.layout
    context = prompt + output / 2
    room = require_room(deployment, prompt + output, memory_share=memory_share)
    requested = max(1.0, concurrency / layout.dp)
    length = cached_tokens(deployment, prompt, output, constants)
    running = max(1.0, min(requested, room.sequences(length), most_sequences))
    batch, in_flight = batch_of_step(running * layout.dp, layout)
    rates = serving_rates(deployment, constants)
    pace = _static_pace if batching == "static" else _continuous_pace
    paced = pace(deployment, batch, in_flight, prompt, output, context, chunk, offline, constants, rates)
    request = output * paced.tpot
    queue = max(0.0, requested - running) / running * request
    together = min(running * layout.dp, max(1.0, concurrency))  # with fewer requests than groups, some have none
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


def batch_of_step(running: float, layout: ServingLayout) -> tuple[float, float]:
    """Sequences of one decode step of an attention group, with `running` on the replica, and steps in flight.

    Each stage of a pipeline works on another part of the requests.
    """
    group = max(1.0, running / layout.dp)
    return max(1.0, group / layout.pp), min(float(layout.pp), group)


def most_throughput(
    deployment: Deployment,
    *,
    prompt: int,
    output: int,
    most_sequences: int = MOST_SEQUENCES,
    memory_share: float = MEMORY_SHARE,
    constants: ServingConstants | None = None,
) -> Serving:
    """The replica with as many requests as fit into its memory, all there from the start."""
    constants = constants or load_serving_constants()
    room = require_room(deployment, prompt + output, memory_share=memory_share)
    length = cached_tokens(deployment, prompt, output, constants)
    fit = max(1.0, min(float(most_sequences), room.sequences(length)))
    return serve(
        deployment,
        prompt=prompt,
        output=output,
        concurrency=fit * deployment.layout.dp,
        most_sequences=most_sequences,
        memory_share=memory_share,
        offline=True,
        constants=constants,
    )


def cached_tokens(deployment: Deployment, prompt: int, output: int, constants: ServingConstants) -> float:
    """Tokens of one request in the KV cache, on average over its life."""
    return prompt + output * (1.0 if constants.engines[deployment.engine].reserves else 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pace:
    first: float
    tpot: float
    mixed_share: float
    decode: StepTime
    prefill: StepTime


def _continuous_pace(
    deployment: Deployment,
    batch: float,
    in_flight: float,
    prompt: int,
    output: int,
    context: float,
    chunk: int,
    offline: bool,
    constants: ServingConstants,
    rates: ServingRates,
) -> _Pace:
    """Prompts in chunks of at most `chunk` tokens, in steps in which the others decode."""

    def step(sequences: float, tokens: float) -> StepTime:
        return step_time(
            deployment,
            sequences=sequences,
            context=context,
            prompt_tokens=tokens,
            prompt_length=prompt,
            in_flight=in_flight,
            constants=constants,
            rates=rates,
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
        else:  # more than a step takes: some steps have prompts alone
            mixed = step(batch, chunk).seconds + (arriving - chunk) / piece * alone.seconds
        tpot = (1 - share) * decode.seconds + share * mixed
    own = pieces * step(max(0.0, batch - 1), prompt / pieces).seconds if batch > 1 else pieces * alone.seconds
    engine = constants.engines[deployment.engine]
    wait = 0.5 * tpot if batch > 1 else 0.0
    if batch > 1:
        busy = min(0.9, share * own / pieces / tpot)
        at_once = (batch - 1) / 2
        collisions = min(at_once, busy / (2 * (1 - busy)))
        wait += ((1 - constants.burst) * collisions + constants.burst * at_once) * pieces * alone.seconds
    return _Pace(first=engine.first + wait + own, tpot=tpot, mixed_share=share, decode=decode, prefill=alone)


def _static_pace(
    deployment: Deployment,
    batch: float,
    in_flight: float,
    prompt: int,
    output: int,
    context: float,
    chunk: int,
    offline: bool,
    constants: ServingConstants,
    rates: ServingRates,
) -> _Pace:
    """All prompts first; then all requests decode together until the last is done."""
    prefill = step_time(
        deployment,
        sequences=0.0,
        prompt_tokens=batch * prompt,
        prompt_length=prompt,
        constants=constants,
        rates=rates,
    )
    decode = step_time(
        deployment, sequences=batch, context=context, in_flight=in_flight, constants=constants, rates=rates
    )
    first = constants.engines[deployment.engine].first + prefill.seconds
    tpot = decode.seconds + (prefill.seconds / output if offline else 0.0)
    return _Pace(first=first, tpot=tpot, mixed_share=0.0, decode=decode, prefill=prefill)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disaggregated:
    """Prompts on one pool of replicas, decoding on another."""

    ttft: float
    tpot: float
    transfer_seconds: float
    """Moving the KV cache of one prompt; part of `ttft`."""
    requests_per_second: float
    """Requests per second that both pools can serve."""
    prefill_limit: float
    """Requests per second of the prefill pool."""
    decode_limit: float
    """Requests per second of the decode pool."""
    tokens_per_second: float
    gpus: int
    balance: float
    """Prefill replicas per decode replica at which both pools are equally busy."""
    provenance: Provenance

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Output tokens per second over all GPUs of both pools."""
        return self.tokens_per_second / self.gpus

    @property
    def limiter(self) -> str:
        """The slower pool."""
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

    No prompt delays a token: TPOT is that of a pure decode step. TTFT is the prompt, the queue before it, and the
    transfer of its cache over the network.
    """
    require_positive(prefill_replicas=prefill_replicas, decode_replicas=decode_replicas)
    if not (math.isfinite(concurrency) and concurrency > 0):
        raise UsageError(f"concurrency={concurrency!r} must be above 0. Nearest: concurrency=1.")
    if prefill.model != decode.model:
        raise UsageError(f"prefill serves {prefill.model.name} and decode {decode.model.name}. Give one model to both.")
    constants = constants or load_serving_constants()
    require_room(prefill, prompt, memory_share=memory_share)
    room = require_room(decode, prompt + output, memory_share=memory_share)
    groups = decode.layout.dp * decode_replicas
    length = cached_tokens(decode, prompt, output, constants)
    running = max(1.0, min(concurrency / groups, room.sequences(length)))
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
    transfer = transfer_seconds(prefill, decode, prompt, link_bandwidth)
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


def transfer_seconds(prefill: Deployment, decode: Deployment, prompt: int, link_bandwidth: float | None) -> float:
    """Seconds in which the KV cache of a prompt moves to the other pool; None: over the network of `prefill`."""
    cluster = prefill.cluster
    bandwidth = link_bandwidth or cluster.network_bandwidth or cluster.link_bandwidth
    if not bandwidth:
        raise UsageError("The link between prefill and decode is not known. Give link_bandwidth in bytes/s per GPU.")
    moved = prefill.cache_bytes(prompt) * decode.precision.kv_bytes / prefill.precision.kv_bytes
    return moved / (bandwidth * LINK_SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculative:
    """Speculative decoding."""

    tpot: float
    plain_tpot: float
    """TPOT without speculation."""
    tokens_per_step: float
    """Mean number of tokens of one verification, its own included."""
    verify_seconds: float
    draft_seconds: float
    """Drafting all tokens of one step."""
    break_even: float | None
    """The acceptance rate above which speculation is faster; None where it never is."""
    provenance: Provenance

    @property
    def speedup(self) -> float:
        """Speedup of decoding."""
        return self.plain_tpot / self.tpot


def expected_tokens(guesses: int, acceptance: float) -> float:
    """Mean number of tokens of one verification of `guesses` drafted tokens, each accepted with probability
    `acceptance` if all before it were."""
    if acceptance >= 1:
        return guesses + 1.0
    return float((1 - acceptance ** (guesses + 1)) / (1 - acceptance))


def speculate(
    deployment: Deployment,
    *,
    batch: float,
    context: float,
    guesses: int,
    acceptance: float,
    draft: Deployment | None = None,
    draft_layers: float = 1.0,
    in_flight: float = 1.0,
    constants: ServingConstants | None = None,
) -> Speculative:
    """`batch` sequences per group decode with `guesses` drafted tokens per step; `in_flight` as in `step_time`.

    The draft comes from `draft`, a small model, or from `draft_layers` more layers of the model itself and its output
    layer (multi-token prediction, EAGLE).
    """
    require_positive(guesses=guesses)
    if not 0 <= acceptance <= 1:
        near = min(1.0, max(0.0, acceptance))
        raise UsageError(f"acceptance={acceptance!r} must lie between 0 and 1. Nearest: acceptance={near:g}.")
    constants = constants or load_serving_constants()
    plain = step_time(deployment, sequences=batch, context=context, in_flight=in_flight, constants=constants)
    verify = step_time(
        deployment,
        sequences=batch,
        context=context,
        tokens_each=guesses + 1.0,
        in_flight=in_flight,
        constants=constants,
    )
    if draft is not None:
        drafted = step_time(draft, sequences=batch, context=context, constants=constants).seconds
    else:
        head = deployment.model.hidden * deployment.model.vocabulary * 2.0 / deployment.layout.tp
        read = head / (deployment.weight_bytes * deployment.layout.pp)
        drafted = (plain.seconds - plain.host) * min(1.0, draft_layers / deployment.model.layers + read)
    draft_seconds = guesses * drafted
    tokens = expected_tokens(guesses, acceptance)
    step = verify.seconds + draft_seconds
    return Speculative(
        tpot=step / tokens,
        plain_tpot=plain.seconds,
        tokens_per_step=tokens,
        verify_seconds=verify.seconds,
        draft_seconds=draft_seconds,
        break_even=_break_even(guesses, step / plain.seconds),
        provenance=weakest(
            verify.provenance,
            Provenance(kind="assumed", text="the given acceptance rate, the same for all drafted tokens"),
        ),
    )


def _break_even(guesses: int, cost: float) -> float | None:
    """The acceptance rate at which the expected tokens make up for `cost` plain steps."""
    if cost >= guesses + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if expected_tokens(guesses, middle) >= cost else (middle, high)
    return high
