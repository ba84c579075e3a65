"""Other ways to serve: prefill and decode on machines of their own, and guesses that the model verifies.

>>> round(expected_tokens(3, 0.7), 3)
2.533
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nearpeak.errors import UsageError
from nearpeak.plan.provenance import Provenance, weakest
from nearpeak.plan.serving.constants import ServingConstants, load_serving_constants
from nearpeak.plan.serving.deployment import Deployment
from nearpeak.plan.serving.kv_cache import MEMORY_SHARE, require_room
from nearpeak.plan.serving.serve import CHUNK, held_context
from nearpeak.plan.serving.step import step_time

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
    bandwidth = link_bandwidth if link_bandwidth is not None else _bandwidth(prefill)
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


def _bandwidth(here: Deployment) -> float:
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
