"""A served model under requests, step by step: the scheduler of an engine, simulated on the planner's step times.

The formulas of `serve` describe a steady mean. This is the queue itself: requests arrive (in a closed loop, at a mean
rate, or from a file), wait for room in the KV cache, have their prompts computed in chunks, decode together, are
preempted where the cache is full, and finish. Requests of equal length therefore run in waves, as they do on a server.

Steps in which nobody arrives or finishes are taken in one go, so that a thousand requests take some milliseconds.

>>> from nearpeak.plan.models.catalogue import get_model
>>> from nearpeak.plan.cluster.cluster import Cluster
>>> from nearpeak.plan.serving.deployment import ServingLayout
>>> llama = Deployment.of(get_model("llama-3-70b"), Cluster.of("h200-sxm x 2"), ServingLayout(tp=2), "fp8")
>>> burst = simulate(llama, closed_loop(prompt=1024, output=256, concurrency=32, requests=32))
>>> loop = simulate(llama, closed_loop(prompt=1024, output=256, concurrency=32, requests=320))
>>> burst.ttft.p90 > 1.2 * loop.ttft.p90  # all prompts at once wait for each other
True
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from nearpeak._files import read_csv
from nearpeak.errors import UsageError
from nearpeak.plan.legal import require_positive
from nearpeak.plan.provenance import Provenance, weakest
from nearpeak.plan.serving.constants import ServingConstants, load_serving_constants
from nearpeak.plan.serving.deployment import MEMORY_SHARE, Deployment, require_room
from nearpeak.plan.serving.serve import CHUNK, MOST_SEQUENCES, speculate, transfer_seconds
from nearpeak.plan.serving.step import serving_rates, step_time

REQUESTS_PER_SLOT = 10
"""Requests of a closed loop per request in flight: published benchmarks send about ten, the first wave at once."""
MOST_REQUESTS = 4000
"""Requests that a plan simulates at most."""
LARGEST_WORKLOAD, MOST_REPLICAS = 1_000_000, 100_000
"""Requests that are drawn for a workload, and replicas that serve it, at most: more take hours."""
LATEST_ARRIVAL = 1e9
"""Seconds after the start, thirty years: later times have no room for microseconds."""
PREFILL_FIRST = frozenset({"sglang"})
"""Engines that by default compute waiting prompts in steps of their own and decode afterwards. The others put a chunk
of a prompt into a step in which requests decode."""
ARRIVAL_COLUMNS = ("arrival_s", "prompt", "output")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request; `arrival` in seconds after the start."""

    arrival: float
    prompt: int
    output: int
    cached: int = 0
    """Tokens of the prompt whose keys and values are in the prefix cache: neither computed nor stored again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests in order. With a `concurrency`, each is sent when one of so many slots is free (a closed loop)."""

    requests: tuple[Request, ...]
    concurrency: int | None = None
    about: str = ""

    def __post_init__(self) -> None:
        if not self.requests:
            raise UsageError("A workload needs at least one request.")
        if self.concurrency is not None:
            require_positive(concurrency=self.concurrency)
        for request in self.requests:
            require_positive(prompt=request.prompt, output=request.output)
            if not 0 <= request.arrival <= LATEST_ARRIVAL:
                raise UsageError(
                    f"arrival={request.arrival!r} must be from 0 to {LATEST_ARRIVAL:g} seconds. Fewer requests, or a "
                    "higher rate, arrive earlier."
                )
            if not 0 <= request.cached <= request.prompt:
                raise UsageError(
                    f"cached={request.cached} must lie between 0 and the {request.prompt} tokens of the prompt."
                )


def closed_loop(
    *, prompt: int, output: int, concurrency: int, requests: int | None = None, prefix: int = 0, spread: float = 0.0
) -> Workload:
    """`concurrency` clients, each of which sends its next request when the last is answered; all start at once.

    `prefix` tokens are shared by all prompts. `spread`: lengths vary by this share about the mean.
    """
    _require_few(LARGEST_WORKLOAD, concurrency=concurrency, **({} if requests is None else {"requests": requests}))
    number = requests if requests is not None else max(concurrency, min(MOST_REQUESTS, REQUESTS_PER_SLOT * concurrency))
    about = f"a closed loop of {concurrency} clients, {number} requests, the first of all clients at once"
    return Workload(
        requests=_drawn([0.0] * number, prompt, output, prefix, spread), concurrency=concurrency, about=about
    )


def open_loop(
    *, prompt: int, output: int, rate: float, requests: int = 1000, prefix: int = 0, spread: float = 0.0, seed: int = 0
) -> Workload:
    """Requests that arrive independently of each other, `rate` per second on average (a Poisson process)."""
    if not (math.isfinite(rate) and rate > 0):
        raise UsageError(f"rate={rate!r} must be above 0 requests per second.")
    _require_few(LARGEST_WORKLOAD, requests=requests)
    draw = random.Random(seed)
    arrivals = list(itertools.accumulate(draw.expovariate(rate) for _ in range(requests)))
    about = f"{requests} requests that arrive at random, {rate:g} per second"
    return Workload(requests=_drawn(arrivals, prompt, output, prefix, spread), about=about)


def _require_few(most: int, **counts: int) -> None:
    """UsageError for the first count that is no whole number from 1 to `most`."""
    require_positive(**counts)
    for name, value in counts.items():
        if value > most:
            raise UsageError(f"{name}={value:.4g} is more than can be simulated. Nearest: {name}={most}.")


def read_arrivals(path: Path) -> Workload:
    """Requests of a CSV file with the columns arrival_s, prompt, output, and optionally cached; in order of arrival."""
    columns, rows = read_csv(path)
    missing = [name for name in ARRIVAL_COLUMNS if name not in columns]
    if missing:
        raise UsageError(f"{path}: the column {missing[0]!r} is missing. Columns: {', '.join(columns) or 'none'}.")
    requests = []
    for line, row in enumerate(rows, start=2):
        try:
            requests.append(
                Request(
                    arrival=float(row["arrival_s"]),
                    prompt=int(row["prompt"]),
                    output=int(row["output"]),
                    cached=int(row.get("cached") or 0),
                )
            )
        except (TypeError, ValueError) as problem:
            raise UsageError(f"{path}, line {line}: {problem}.") from None
    requests.sort(key=lambda request: request.arrival)
    return Workload(requests=tuple(requests), about=f"{len(requests)} requests of {path.name}")


def _drawn(arrivals: Sequence[float], prompt: int, output: int, prefix: int, spread: float) -> tuple[Request, ...]:
    require_positive(prompt=prompt, output=output)
    if not 0 <= spread < 1:
        raise UsageError(f"spread={spread!r} must lie between 0 and 1. Nearest: spread=0.")
    if not 0 <= prefix <= prompt:
        raise UsageError(f"prefix={prefix} must lie between 0 and the {prompt} tokens of a prompt.")
    draw = random.Random(len(arrivals))

    def length(mean: int) -> int:
        return max(1, round(mean * (1 + spread * (2 * draw.random() - 1)))) if spread else mean

    requests = []
    for place, arrival in enumerate(arrivals):
        tokens = max(length(prompt), prefix, 1)
        shared = prefix if place else 0  # the first request computes what the others find
        requests.append(Request(arrival=arrival, prompt=tokens, output=length(output), cached=shared))
    return tuple(requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Seconds over all requests."""

    mean: float
    median: float
    p90: float
    p99: float

    @staticmethod
    def of(values: Sequence[float]) -> Distribution:
        """The distribution of `values`; nearest-rank percentiles."""
        ranked = sorted(values)

        def rank(share: float) -> float:
            return ranked[max(0, math.ceil(share * len(ranked)) - 1)]

        return Distribution(mean=fmean(ranked), median=rank(0.5), p90=rank(0.9), p99=rank(0.99))


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What clients saw, and what the GPUs did."""

    workload: str
    requests: int
    seconds: float
    """From the first arrival to the last token."""
    ttft: Distribution
    """From the arrival of a request to its first token."""
    tpot: Distribution
    """Of a request: seconds from its first to its last token, per further token. Requests with one token have none."""
    latency: Distribution
    """From the arrival of a request to its last token."""
    queue: Distribution
    """From the arrival of a request to the first step that works on it."""
    tokens_per_second: float
    """Output tokens of all requests over `seconds`."""
    gpus: int
    preemptions: int
    """Requests that were put back because the cache was full, and computed again."""
    cache_peak: float
    """The largest share of the KV cache that was in use in one group."""
    busy: float
    """Share of the time in which groups were in a step, on average."""
    events: int
    """Steps and runs of equal steps that were simulated."""
    provenance: Provenance


def simulate(
    deployment: Deployment,
    workload: Workload,
    *,
    replicas: int = 1,
    prefill: Deployment | None = None,
    prefill_replicas: int = 1,
    link_bandwidth: float | None = None,
    guesses: int = 0,
    acceptance: float = 0.0,
    chunk: int = CHUNK,
    most_sequences: int = MOST_SEQUENCES,
    memory_share: float = MEMORY_SHARE,
    static: bool = False,
    constants: ServingConstants | None = None,
) -> Simulation:
    """`replicas` of `deployment` under `workload`; a request goes to the group with the fewest requests.

    With `prefill`, prompts run on `prefill_replicas` of their own, and the KV cache then moves to a group of
    `deployment` (disaggregated serving). `guesses` drafted tokens per step, each accepted with probability
    `acceptance`, are speculative decoding. `static`: a group takes requests in only when it has none.
    """
    require_positive(chunk=chunk, most_sequences=most_sequences)
    _require_few(MOST_REPLICAS, replicas=replicas, prefill_replicas=prefill_replicas)
    constants = constants or load_serving_constants()
    prompts = [request.prompt for request in workload.requests]
    outputs = [request.output for request in workload.requests]
    longest = max(request.prompt + request.output for request in workload.requests)
    typical = fmean(prompts), fmean(prompts) + fmean(outputs)

    def groups(of: Deployment, copies: int, role: str) -> list[_Group]:
        room = require_room(of, longest if role != "prefill" else max(prompts), memory_share=memory_share)
        per_token = of.cache_bytes(typical[1]) / typical[1]
        # the batches that are in a pipeline at the same time share its cache: no more than it has room for
        tokens = room.cache_bytes / per_token
        batches = max(1, min(of.layout.pp, int(tokens / longest)))
        tokens /= batches
        times = _StepTimes(of, constants, typical, batches, guesses=guesses, acceptance=acceptance)
        number = copies * of.layout.dp * batches
        settings = _Settings(
            role=role,
            chunk=chunk,
            most_sequences=most_sequences,
            capacity=max(tokens, float(longest)),
            reserves=constants.engines[of.engine].reserves,
            prefill_first=static or of.engine in PREFILL_FIRST,
            static=static,
        )
        return [_Group(settings, times) for _ in range(number)]

    if prefill is None:
        front = back = groups(deployment, replicas, "both")
        moving: Callable[[int], float] = lambda tokens: 0.0  # noqa: E731
    else:
        if prefill.model != deployment.model:
            raise UsageError(
                f"prefill serves {prefill.model.name} and decode {deployment.model.name}. Give one model to both."
            )
        front, back = groups(prefill, prefill_replicas, "prefill"), groups(deployment, replicas, "decode")
        source = prefill

        def moving(tokens: int) -> float:
            return transfer_seconds(source, deployment, tokens, link_bandwidth)

    overhead = constants.engines[(prefill or deployment).engine].first
    clients = _run(workload, front, back, overhead, moving)
    everyone = front if front is back else front + back
    first_arrival = min(client.sent for client in clients)
    seconds = max(client.finish for client in clients) - first_arrival
    rates = [
        (client.finish - client.first) / (client.request.output - 1) for client in clients if client.request.output > 1
    ]
    gpus = deployment.layout.gpus * replicas + (prefill.layout.gpus * prefill_replicas if prefill else 0)
    return Simulation(
        workload=workload.about or f"{len(clients)} requests",
        requests=len(clients),
        seconds=seconds,
        ttft=Distribution.of([client.first - client.sent for client in clients]),
        tpot=Distribution.of(rates or [0.0]),
        latency=Distribution.of([client.finish - client.sent for client in clients]),
        queue=Distribution.of([client.begin - client.sent for client in clients]),
        tokens_per_second=sum(outputs) / seconds,
        gpus=gpus,
        preemptions=sum(group.preemptions for group in everyone),
        cache_peak=max(group.peak / group.settings.capacity for group in everyone),
        busy=fmean(group.busy for group in everyone) / seconds,
        events=sum(group.events for group in everyone),
        provenance=weakest(*(group.times.provenance for group in everyone)),
    )


@dataclass(slots=True, eq=False)
class _Client:
    """A request on its way."""

    request: Request
    sent: float
    begin: float = math.nan
    first: float = math.nan
    finish: float = math.nan
    to_compute: int = 0
    """Tokens of the prompt that are not computed yet."""
    generated: float = 0.0
    """Tokens so far; those before a preemption are computed again."""
    reserved: float = 0.0
    """Tokens of the cache that admission set aside."""
    last_step: int = 0

    @property
    def context(self) -> float:
        """Tokens before the next one."""
        return self.request.prompt + self.generated


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    role: str
    """ "both", "prefill" or "decode"."""
    chunk: int
    most_sequences: int
    capacity: float
    """Tokens of the KV cache."""
    reserves: bool
    prefill_first: bool
    static: bool


class _StepTimes:
    """Seconds of steps of one deployment, memoized; linear in the context, which changes at every step."""

    def __init__(
        self,
        deployment: Deployment,
        constants: ServingConstants,
        typical: tuple[float, float],
        in_flight: int,
        *,
        guesses: int,
        acceptance: float,
    ) -> None:
        self.deployment, self.constants = deployment, constants
        self.rates = serving_rates(deployment, constants)
        self.low, self.high = typical
        self.in_flight = float(in_flight)
        self.guesses, self.acceptance = guesses, acceptance
        self.tokens_per_step = 1.0
        if guesses:
            self.tokens_per_step = self._speculative(1.0, self.low)[1]
        self.lines: dict[tuple[int, int, int], tuple[float, float]] = {}
        self.provenance = step_time(
            deployment, sequences=1, context=self.low, constants=constants, rates=self.rates
        ).provenance

    def seconds(self, sequences: int, context: float, prompt_tokens: int = 0, prompt_length: int = 0) -> float:
        """A step in which `sequences` decode after `context` tokens each, with `prompt_tokens` tokens of prompts."""
        key = (_rounded(sequences), _rounded(prompt_tokens), _rounded(prompt_length))
        line = self.lines.get(key)
        if line is None:
            low = self._seconds(sequences, self.low, prompt_tokens, prompt_length)
            slope = 0.0
            if sequences:
                high = self._seconds(sequences, self.high, prompt_tokens, prompt_length)
                slope = (high - low) / (self.high - self.low)
            line = self.lines[key] = (low - slope * self.low, slope)
        return line[0] + line[1] * context

    def _seconds(self, sequences: float, context: float, prompt_tokens: float, prompt_length: float) -> float:
        if self.guesses and not prompt_tokens:
            return self._speculative(sequences, context)[0]
        return step_time(
            self.deployment,
            sequences=sequences,
            context=context,
            prompt_tokens=prompt_tokens,
            prompt_length=prompt_length,
            tokens_each=self.guesses + 1.0,
            in_flight=self.in_flight,
            constants=self.constants,
            rates=self.rates,
        ).seconds

    def _speculative(self, sequences: float, context: float) -> tuple[float, float]:
        """Seconds of drafting and verifying, and the tokens that come of it."""
        step = speculate(
            self.deployment,
            batch=sequences,
            context=context,
            guesses=self.guesses,
            acceptance=self.acceptance,
            in_flight=self.in_flight,
            constants=self.constants,
        )
        return step.verify_seconds + step.draft_seconds, step.tokens_per_step


def _rounded(number: int) -> int:
    """To six binary digits, within 2 %, so that few steps are computed."""
    shift = max(0, number.bit_length() - 6)
    return (number + (1 << shift >> 1)) >> shift << shift


@dataclass(slots=True, eq=False)
class _Group:
    """The scheduler of one attention data parallel group: its queue, its cache, and the step that it is in."""

    settings: _Settings
    times: _StepTimes
    waiting: deque[_Client] = field(default_factory=deque)
    prefilling: list[_Client] = field(default_factory=list)
    decoding: list[tuple[int, int, _Client]] = field(default_factory=list)
    """A heap by the step after which a client is done."""
    steps: int = 0
    """Decode steps so far."""
    used: float = 0.0
    """Tokens in the cache."""
    context_total: float = 0.0
    """Tokens before the next one, over all that decode."""
    running: bool = False
    start: float = 0.0
    seconds_each: float = 0.0
    steps_planned: int = 0
    """Decode steps of the current run; 0 in a step with prompts."""
    pieces: list[tuple[_Client, int]] = field(default_factory=list)
    version: int = 0
    busy: float = 0.0
    events: int = 0
    preemptions: int = 0
    peak: float = 0.0
    order: int = 0

    @property
    def load(self) -> int:
        """Requests in the group."""
        return len(self.waiting) + len(self.prefilling) + len(self.decoding)

    @property
    def end(self) -> float:
        """When the current step or run of steps ends."""
        return self.start + self.seconds_each * max(1, self.steps_planned)

    def add(self, client: _Client, now: float) -> bool:
        """Queue a client; whether the current run of steps now ends earlier."""
        self.waiting.append(client)
        if not self.running:
            return False
        if self.steps_planned > 1 and len(self.waiting) == 1 and self._has_room(client):
            done = max(1, math.ceil((now - self.start) / self.seconds_each))
            if done < self.steps_planned:
                self.steps_planned = done
                self.version += 1
                return True
        return False

    def begin(self, now: float) -> bool:
        """Start the next step; False where there is nothing to do."""
        self._admit(now)
        settings = self.settings
        decoding = len(self.decoding)
        budget = settings.chunk
        if decoding and not settings.prefill_first:
            budget = max(1, budget - decoding * (self.times.guesses + 1))
        self.pieces, tokens, weighted = [], 0, 0
        for client in self.prefilling:
            piece = min(client.to_compute, budget - tokens)
            if piece <= 0:
                break
            self.pieces.append((client, piece))
            tokens += piece
            ends = round(client.context) - client.to_compute + piece
            weighted += piece * (2 * ends - piece)  # a chunk from a to b sees (a + b) / 2 keys: those of a + b tokens
            if math.isnan(client.begin):
                client.begin = now
        if not tokens and not decoding:
            self.running = False
            return False
        context = self.context_total / decoding if decoding else 0.0
        if tokens:
            beside = 0 if settings.prefill_first else decoding
            self.seconds_each = self.times.seconds(beside, context if beside else 0.0, tokens, round(weighted / tokens))
            self.steps_planned = 0
        else:
            steps = max(1, self.decoding[0][0] - self.steps)
            growth = decoding * self.times.tokens_per_step
            if not settings.reserves:
                steps = max(1, min(steps, int((settings.capacity - self.used) / growth)))
            self.steps_planned = steps
            middle = context + steps * self.times.tokens_per_step / 2
            self.seconds_each = self.times.seconds(decoding, middle)
        self.start, self.running = now, True
        self.version += 1
        self.events += 1
        return True

    def finish(self, now: float) -> tuple[list[_Client], list[_Client]]:
        """End the current step: clients with a first token, and clients that are done."""
        self.busy += now - self.start
        firsts: list[_Client] = []
        decoded = self.steps_planned or (0 if self.settings.prefill_first else min(1, len(self.decoding)))
        done = self._advance(decoded) if decoded else []
        for client, piece in self.pieces:
            client.to_compute -= piece
            if client.to_compute:
                continue
            self.prefilling.remove(client)
            again = not math.isnan(client.first)  # it was preempted, and has its first token
            if not again:
                client.generated = 1.0
                firsts.append(client)
            if client.generated >= client.request.output or self.settings.role == "prefill":
                self.used -= client.reserved
                done.append(client)
            else:
                self._join(client)
        self.pieces = []
        self.running = False
        self.peak = max(self.peak, self.used)
        return firsts, done

    def _advance(self, steps: int) -> list[_Client]:
        """All that decode get the tokens of `steps` steps."""
        self.steps += steps
        grown = steps * self.times.tokens_per_step
        self.context_total += grown * len(self.decoding)
        if not self.settings.reserves:
            self.used += grown * len(self.decoding)
        self.peak = max(self.peak, self.used)
        done = []
        while self.decoding and self.decoding[0][0] <= self.steps:
            done.append(self._leave(heapq.heappop(self.decoding)[2]))
        return done

    def _join(self, client: _Client) -> None:
        left = math.ceil((client.request.output - client.generated) / self.times.tokens_per_step)
        client.last_step = self.steps + max(1, left)
        self.order += 1
        heapq.heappush(self.decoding, (client.last_step, self.order, client))
        self.context_total += client.context

    def _leave(self, client: _Client) -> _Client:
        steps_left = client.last_step - self.steps
        joined = math.ceil((client.request.output - client.generated) / self.times.tokens_per_step)
        grown = (max(1, joined) - steps_left) * self.times.tokens_per_step
        self.context_total -= client.context + grown
        self.used -= client.reserved + (0.0 if self.settings.reserves else grown)
        client.generated = min(float(client.request.output), client.generated + grown)
        return client

    def _needs(self, client: _Client) -> float:
        own = client.context - client.request.cached
        if self.settings.role == "prefill":
            return own
        return own + (client.request.output - client.generated if self.settings.reserves else 0.0)

    def _has_room(self, client: _Client) -> bool:
        if len(self.prefilling) + len(self.decoding) >= self.settings.most_sequences:
            return False
        empty = not self.prefilling and not self.decoding
        return empty or self.used + self._needs(client) <= self.settings.capacity

    def _admit(self, now: float) -> None:
        """Take clients in, first come, first served; put the last ones back where the next token has no room."""
        growth = len(self.decoding) * self.times.tokens_per_step
        if not self.settings.reserves:
            while len(self.decoding) > 1 and self.used + growth > self.settings.capacity:
                last = max(self.decoding, key=lambda item: item[1])
                self.decoding.remove(last)
                heapq.heapify(self.decoding)
                client = self._leave(last[2])
                client.to_compute = round(client.context)
                self.waiting.appendleft(client)
                self.preemptions += 1
                growth = len(self.decoding) * self.times.tokens_per_step
        if self.settings.static and self.decoding:
            return
        planned = sum(client.to_compute for client in self.prefilling)
        most = math.inf if self.settings.static else self.settings.chunk
        while self.waiting and planned < most and self._has_room(self.waiting[0]):
            # a step of room for those that decode already, so that nobody is taken in to be put back at once
            spare = growth if self.decoding and not self.settings.reserves else 0.0
            if spare and self.used + self._needs(self.waiting[0]) + spare > self.settings.capacity:
                break
            client = self.waiting.popleft()
            client.reserved = self._needs(client)
            self.used += client.reserved
            if self.settings.role == "decode":
                if math.isnan(client.begin):
                    client.begin = now
                self._join(client)
            else:
                self.prefilling.append(client)
                planned += client.to_compute


def _run(
    workload: Workload,
    front: Sequence[_Group],
    back: Sequence[_Group],
    overhead: float,
    moving: Callable[[int], float],
) -> list[_Client]:
    """All requests from arrival to end; `front` computes prompts and `back` decodes (the same groups, or two pools)."""
    pending = deque(workload.requests)
    clients: list[_Client] = []
    events: list[tuple[float, int, str, _Group | None, _Client | None, int]] = []
    number = itertools.count()

    def later(when: float, what: str, group: _Group | None, client: _Client | None, version: int = 0) -> None:
        heapq.heappush(events, (when, next(number), what, group, client, version))

    def send(when: float) -> None:
        request = pending.popleft()
        client = _Client(request=request, sent=when, to_compute=max(1, request.prompt - request.cached))
        clients.append(client)
        later(when + overhead, "arrival", None, client)

    def start(group: _Group, now: float) -> None:
        if group.begin(now):
            later(group.end, "step", group, None, group.version)

    if workload.concurrency is None:
        for request in list(pending):
            send(request.arrival)
    else:
        for _ in range(min(workload.concurrency, len(pending))):
            send(0.0)
    while events:
        now, _, what, group, client, version = heapq.heappop(events)
        if what != "step":
            assert client is not None
            pool = front if what == "arrival" else back
            group = min(pool, key=lambda each: each.load)
            if group.add(client, now):
                later(group.end, "step", group, None, group.version)
            if not group.running:
                # those that arrive at the same moment are in the same step
                if not (events and events[0][0] <= now and events[0][2] != "step"):
                    start(group, now)
                else:
                    later(now, "step", group, None, group.version)
            continue
        assert group is not None
        if version != group.version:
            continue
        if group.running:
            firsts, done = group.finish(now)
            for one in firsts:
                one.first = now + moving(one.request.prompt)
            for one in done:
                if group.settings.role == "prefill" and one.request.output > 1:
                    later(one.first, "moved", None, one)
                    continue
                one.finish = max(now, one.first)
                if workload.concurrency is not None and pending:
                    send(one.finish)
        # the next requests of a closed loop arrive before the next step where the host takes no time for them
        start(group, now)
    return clients
