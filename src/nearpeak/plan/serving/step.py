"""The time of one forward pass of a served model, by part: decode, prefill, or both in one step.

Every GEMM takes the p-norm (p = 3) of the time to read its weights and the time to multiply: with one token it streams
its weights, with thousands it multiplies. Experts add which of them a batch visits, the busiest GPU, and the exchange.
Fixed costs of layers, and the host, come from the engine's constants.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache, lru_cache
from statistics import NormalDist

from nearpeak.errors import UsageError
from nearpeak.plan.models.model import Model, attention_matrices, count_parameters, keys_seen, state_space_matrices
from nearpeak.plan.provenance import Provenance, weakest
from nearpeak.plan.serving.constants import (
    ServingConstants,
    compute_share,
    generation_constants,
    load_serving_constants,
)
from nearpeak.plan.serving.deployment import Deployment

NORM_POWER = 3.0
"""Of the p-norm. Products of A100 to GB200 with 128, 512 and 4096 tokens lie on it within 10 %."""
ELEMENTWISE_SHARE = 0.6
"""Share of the memory bandwidth that norms, activations and the like reach. Assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRates:
    """Bytes/s and FLOP/s that a deployment reaches."""

    stream: float
    rest_stream: float
    expert_stream: float
    plain: float
    """Bytes/s of 16-bit weights."""
    cache: float
    elementwise: float
    rest_compute: float
    expert_compute: float
    half_compute: float
    attention: float
    gap: float
    """Fixed cost of a layer, against other generations."""
    provenance: Provenance


def serving_rates(here: Deployment, constants: ServingConstants) -> ServingRates:
    """What the GPUs of `here` reach in its precision."""
    machine, chosen = here.cluster.machine, here.precision
    ceilings = machine.theoretical
    if ceilings is None:
        raise UsageError(f"{machine.name} has no datasheet figures. Name a machine of the catalogue.")
    found, provenance = generation_constants(machine, constants)
    half, _ = compute_share(found, "bfloat16", constants)
    expert, of_expert = compute_share(found, chosen.compute, constants)
    rest, of_rest = compute_share(found, chosen.rest_compute, constants)
    stream = ceilings.bandwidth * found.stream
    narrow = constants.narrow.get(chosen.name, 1.0) if chosen.weight_only else 1.0
    widened = constants.narrow_compute if chosen.weight_only else 1.0
    seen = constants.engines[here.engine].rows
    of_engine = Provenance(kind="fitted", text=f"{here.engine}: {seen} rows")
    if not seen:
        of_engine = Provenance(kind="transferred", text=f"{here.engine} has no rows: what servers have in common")
    grouped = constants.engines[here.engine].grouped
    peak = ceilings.peak
    return ServingRates(
        stream=stream * narrow,
        rest_stream=stream * (narrow if chosen.rest_bytes < 2 else 1.0),
        expert_stream=stream * narrow * (constants.expert_stream if grouped else 1.0),
        plain=stream,
        cache=stream * constants.cache,
        elementwise=ceilings.bandwidth * ELEMENTWISE_SHARE,
        rest_compute=peak(chosen.rest_compute) * rest * (widened if chosen.rest_bytes < 2 else 1.0),
        expert_compute=peak(chosen.compute) * expert * (constants.expert_compute if grouped else 1.0) * widened,
        half_compute=peak("bfloat16") * half,
        attention=peak("bfloat16") * constants.attention * (constants.attention_narrow if chosen.kv_bytes < 2 else 1.0),
        gap=found.gap,
        provenance=weakest(provenance, of_expert, of_rest, of_engine),
    )


def p_norm(memory: float, compute: float) -> float:
    """Both at once: near the larger one, above it where they are alike."""
    return float((memory**NORM_POWER + compute**NORM_POWER) ** (1 / NORM_POWER))


CUSTOM_ALL_REDUCE_BYTES = 2.0**21
"""Message size at which engines go over from their own all-reduce to NCCL's."""


def experts_hit(model: Model, tokens: float, variety: float = 1.0) -> float:
    """How many of a layer's experts at least one of `tokens` tokens visits.

    With a `variety` of 1 all experts are as likely for every token. Real tokens are alike, and so are their experts:
    a batch counts as `tokens ** variety` independent ones.
    """
    if model.active_experts >= model.experts:
        return float(model.experts)
    independent = tokens**variety if tokens > 1 else tokens
    return float(model.experts * -math.expm1(independent * math.log1p(-model.active_experts / model.experts)))


def expert_imbalance(tokens: float, model: Model, parts: int, skew: float) -> float:
    """Load of the busiest of `parts` parts of the experts against the mean: chance, and lasting skew."""
    if parts == 1:
        return 1.0
    mean = max(tokens * model.active_experts / parts, 1e-9)
    return min(float(parts), 1.0 + expected_maximum(parts) / math.sqrt(mean) + skew * (1 - 1 / parts))


@cache
def expected_maximum(parts: int) -> float:
    """How many standard deviations the largest of `parts` equal chances lies above the mean (Blom)."""
    return NormalDist().inv_cdf((parts - 0.375) / (parts + 0.25)) if parts > 1 else 0.0


def expert_seconds(
    here: Deployment, constants: ServingConstants, reached: ServingRates, tokens: float
) -> tuple[float, float, float]:
    model, layout, chosen = here.model, here.layout, here.precision
    everywhere = tokens * layout.dp
    share = experts_hit(model, everywhere, constants.variety) / model.experts
    here_too = model.experts / layout.ep
    hit = here_too * share  # and on the GPU that happens to have most, which the others wait for:
    hit = min(here_too, hit + expected_maximum(layout.ep) * math.sqrt(hit * (1.0 - share)))
    visits = everywhere * model.active_experts / layout.ep
    if layout.ep > 1:
        visits *= expert_imbalance(everywhere, model, layout.ep, constants.skew)
    weights = count_parameters(model).expert / layout.expert_tp_used
    inner = model.latent or model.hidden
    moved = hit * weights * chosen.weight_bytes
    moved += visits * (
        inner * (chosen.activation_bytes + 2.0) + 3.0 * model.expert_intermediate / layout.expert_tp_used
    )
    memory = moved / reached.expert_stream
    width = model.expert_intermediate / layout.expert_tp_used
    narrow = width / (width + constants.expert_width)
    compute = 2.0 * (visits + constants.expert_rows * hit) * weights / (reached.expert_compute * narrow)
    return p_norm(memory, compute), memory, compute


def link_seconds(here: Deployment, own: float, op: str, bytes: float, ranks: int, stride: int = 1) -> float:
    """Seconds of a collective, where `own` is the latency of the engine's own kernels against NCCL's."""
    found = here.links(op, max(bytes, 1.0), ranks, stride)
    share = own + (1.0 - own) * bytes / (bytes + CUSTOM_ALL_REDUCE_BYTES)
    return found.bandwidth_seconds + share * found.latency_seconds


def communication_seconds(here: Deployment, own: float, mixer: str, feed: str, tokens: float) -> float:
    layout, hidden = here.layout, here.model.hidden
    size = tokens * hidden * 2.0
    reductions = 0
    if layout.tp > 1:
        reductions = (mixer != "-") + (feed == "D" or (feed == "E" and layout.dp == 1))
    seconds = reductions * link_seconds(here, own, "all_reduce", size, layout.tp) if reductions else 0.0
    if feed == "E" and layout.dp > 1:
        seconds += exchange_seconds(here, own, tokens)
    return seconds


def exchange_seconds(here: Deployment, own: float, tokens: float) -> float:
    """Seconds to bring tokens to their experts and back, between attention data parallel groups.

    The better of two ways: every group gets all tokens (all-gather, reduce-scatter), or each token goes to the parts
    that hold its experts (all-to-all, twice).
    """
    model, layout = here.model, here.layout
    stride, width = layout.tp, here.model.latent or here.model.hidden
    there = tokens * width * min(2.0, here.precision.activation_bytes)
    back = tokens * width * 2.0
    gathered = link_seconds(here, own, "all_gather", there * layout.dp, layout.dp, stride)
    gathered += link_seconds(here, own, "reduce_scatter", back * layout.dp, layout.dp, stride)
    if layout.ep == 1:
        return gathered
    parts = min(layout.ep, layout.dp)
    copies = parts * (1.0 - (1.0 - 1.0 / parts) ** model.active_experts)
    sent = link_seconds(here, own, "all_to_all", there * copies, layout.dp, stride)
    sent += link_seconds(here, own, "all_to_all", back * copies, layout.dp, stride)
    return min(gathered, sent)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step; the parts sum to `seconds`."""

    products: float
    """Attention's projections, dense layers and the output layer."""
    experts: float
    attention: float
    """Reading the KV cache, and scores over prompts."""
    elementwise: float
    communication: float
    layers: float
    """Fixed cost of layers: gaps between kernels, or launching them one by one."""
    host: float
    """What the device waits for the host between steps."""
    memory_seconds: float
    """What reading weights and cache alone would take."""
    compute_seconds: float
    """What multiplying alone would take."""
    provenance: Provenance

    @property
    def seconds(self) -> float:
        """The whole step."""
        return (
            self.products
            + self.experts
            + self.attention
            + self.elementwise
            + self.communication
            + self.layers
            + self.host
        )

    @property
    def limiter(self) -> str:
        """What the largest part of the step waits for."""
        parts = {
            "memory" if self.memory_seconds > self.compute_seconds else "compute": self.products
            + self.experts
            + self.attention
            + self.elementwise,
            "communication": self.communication,
            "launches": self.layers + self.host,
        }
        return max(parts, key=lambda name: parts[name])


@lru_cache(maxsize=256)
def layer_kinds(model: Model) -> tuple[tuple[str, str, int], ...]:
    """Mixer, feed and number of each kind of layer."""
    return tuple((mixer, feed, n) for (mixer, feed), n in Counter(zip(model.mixers, model.feeds, strict=True)).items())


def step_time(
    here: Deployment,
    *,
    sequences: float,
    context: float = 0.0,
    prompt_tokens: float = 0.0,
    prompt_length: float = 0.0,
    tokens_each: float = 1.0,
    in_flight: float = 1.0,
    constants: ServingConstants | None = None,
    reached: ServingRates | None = None,
) -> StepTime:
    """One pass over all layers, on each attention data parallel group.

    `sequences` decode `tokens_each` tokens each (more than one where guesses are verified) behind `context` tokens;
    `prompt_tokens` tokens of prompts of `prompt_length` tokens join them. `in_flight` batches like this one are in the
    pipeline at once: all its stages then take as long as the last one, which has the output layer.
    """
    constants = constants or load_serving_constants()
    reached = reached or serving_rates(here, constants)
    engine = constants.engines[here.engine]
    model, layout, chosen = here.model, here.layout, here.precision
    decoded = sequences * tokens_each
    tokens = decoded + prompt_tokens
    products = experts = attention = communication = memory_all = compute_all = usual_layers = 0.0
    values = elementwise_bytes(here)
    mixers: dict[str, tuple[float, float, float]] = {}
    for mixer, feed, layers in layer_kinds(model):
        if mixer not in mixers:
            mixers[mixer] = _mixer_seconds(
                here, reached, mixer, sequences, decoded, context, prompt_tokens, prompt_length
            )
        seconds, memory, compute = mixers[mixer]
        attention += layers * seconds
        memory_all += layers * memory
        compute_all += layers * compute
        pairs = _matrices(model, mixer, feed, layout.tp)
        usual_layers += layers * (len(pairs) + 2) / 6  # a usual layer: four products, attention, and what lies between
        for inputs, outputs in pairs:
            size = inputs * outputs
            moved = size * chosen.rest_bytes + tokens * (inputs * chosen.activation_bytes + 2.0 * outputs)
            memory, compute = moved / reached.rest_stream, 2.0 * tokens * size / reached.rest_compute
            products += layers * p_norm(memory, compute)
            memory_all += layers * memory
            compute_all += layers * compute
        if feed == "E":
            seconds, memory, compute = expert_seconds(here, constants, reached, tokens)
            experts += layers * seconds
            memory_all += layers * memory
            compute_all += layers * compute
        communication += layers * communication_seconds(here, engine.collective, mixer, feed, tokens)
    rows = decoded + (prompt_tokens / prompt_length if prompt_length else 0.0)
    size = model.hidden * model.vocabulary / layout.tp
    memory = (2.0 * size + rows * (model.hidden + model.vocabulary / layout.tp) * 2.0) / reached.plain
    compute = 2.0 * rows * size / reached.half_compute
    products += in_flight * p_norm(memory, compute)
    memory_all += memory
    compute_all += compute
    if layout.tp > 1:
        communication += link_seconds(here, engine.collective, "all_gather", rows * model.vocabulary * 2.0, layout.tp)
    if layout.pp > 1:
        hop = here.links("send_recv", max(1.0, tokens) * model.hidden * 2.0, 2, layout.stage_gpus).seconds
        communication += (layout.pp - 1) * hop
    device = products + experts + attention + communication
    fixed = reached.gap * (usual_layers * engine.layer + model.feeds.count("E") * engine.expert_layer)
    elementwise = tokens * values / reached.elementwise
    if prompt_tokens or not here.graphs:
        launching = usual_layers * engine.launch + model.feeds.count("E") * engine.expert_launch
        fixed = max(fixed, p_norm(device + elementwise + fixed, launching) - device - elementwise)
    host = layout.pp * (engine.step + engine.sequence * sequences)  # every stage prepares its own inputs
    if engine.overlaps and layout.pp == 1:  # a first stage waits for the last one's tokens before it can prepare
        busy = device + elementwise + fixed
        host = p_norm(busy, host) - busy
    return StepTime(
        products=products,
        experts=experts,
        attention=attention,
        elementwise=elementwise,
        communication=communication,
        layers=fixed,
        host=host,
        memory_seconds=memory_all,
        compute_seconds=compute_all,
        provenance=weakest(reached.provenance, *here.links.provenance(layout)),
    )


@lru_cache(maxsize=4096)
def _matrices(model: Model, mixer: str, feed: str, tp: int) -> tuple[tuple[float, float], ...]:
    """Inputs and outputs, on one GPU, of the products of one layer but for its routed experts."""
    pairs: list[tuple[float, float]] = []
    if mixer in "AWC":
        for name, inputs, outputs in attention_matrices(model):
            if name == "output":
                pairs.append((inputs / tp, outputs))
            elif name in ("q down", "kv down"):
                pairs.append((inputs, outputs))  # every GPU needs the whole of what is compressed
            else:
                pairs.append((inputs, outputs / tp))
    elif mixer == "M":
        into, out = state_space_matrices(model)
        pairs += [(into[1], into[2] / tp), (out[1] / tp, out[2])]
    ups = 2 if model.gated else 1
    width = model.intermediate if feed == "D" else model.shared_intermediate if feed == "E" else 0
    if width:
        pairs += [(model.hidden, ups * width / tp), (width / tp, model.hidden)]
    if feed == "E":
        pairs.append((model.hidden, model.experts))
        if model.latent:
            pairs += [(model.hidden, model.latent), (model.latent, model.hidden)]
    return tuple(pairs)


@lru_cache(maxsize=4096)
def _elementwise_bytes(model: Model, tp: int, dense: int) -> float:
    total = 0.0
    for mixer, feed, layers in layer_kinds(model):
        values = 8.0 * model.hidden
        if mixer in "AWC":
            values += 3.0 * model.heads * model.head_dim / tp
        elif mixer == "M":
            values += 8.0 * model.ssm_heads * model.ssm_head_dim / tp
        if feed == "D":
            values += 3.0 * model.intermediate / tp
        elif feed == "E":
            routed = model.active_experts * (
                3.0 * model.expert_intermediate / tp + (model.latent or model.hidden) / dense
            )
            values += 3.0 * model.shared_intermediate / tp + routed
        total += layers * values * 2.0
    return total


def elementwise_bytes(here: Deployment) -> float:
    """Bytes that norms, rotary embeddings, activations and permutations move per token, in all layers."""
    return _elementwise_bytes(here.model, here.layout.tp, here.layout.ep)


def _mixer_seconds(
    here: Deployment,
    reached: ServingRates,
    kind: str,
    sequences: float,
    decoded: float,
    context: float,
    prompt_tokens: float,
    prompt_length: float,
) -> tuple[float, float, float]:
    """Seconds of one layer's attention itself (or scan), and those of its memory and compute alone."""
    model, tp = here.model, here.layout.tp
    if kind == "M":
        state = model.ssm_heads * model.ssm_head_dim * model.ssm_state * 4.0 / tp
        memory = 2.0 * sequences * state / reached.cache
        compute = (decoded + prompt_tokens) * 6.0 * state / 4.0 / reached.half_compute
        return p_norm(memory, compute), memory, compute
    if kind == "-":
        return 0.0, 0.0, 0.0
    heads = model.heads / tp
    seen = context if kind == "A" else min(context, float(model.window))
    memory = sequences * seen * here.cache_values() * here.precision.kv_bytes / reached.cache
    wide = 2.0 * model.kv_rank + model.rope_dim if model.kv_rank else model.head_dim + model.value_dim
    compute = 2.0 * decoded * seen * heads * wide / reached.attention
    total = p_norm(memory, compute)
    if prompt_tokens:
        keys = keys_seen(model, kind, max(1, round(prompt_length)))
        scores = 2.0 * prompt_tokens * keys * heads * (model.head_dim + model.value_dim) / reached.attention
        return total + scores, memory, compute + scores
    return total, memory, compute
