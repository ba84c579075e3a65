"""The time of one forward pass of a served model, by part: decode, prefill, or both in one step.

Every GEMM takes the p-norm (p = 3) of the time to read its weights and the time to multiply: with one token it streams
its weights, with thousands it multiplies. Experts add which of them a batch visits, the busiest GPU, and the exchange.
Fixed costs of layers, and the host, come from the engine's constants.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
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
"""Power of the p-norm. GEMMs of A100 to GB200 with 128, 512 and 4096 tokens lie on it within 10 %."""
ELEMENTWISE_SHARE = 0.6
"""Share of the memory bandwidth that norms, activations and the like reach. Assumed."""
CUSTOM_ALL_REDUCE_BYTES = 2.0**21
"""Message size at which engines switch from their custom all-reduce kernels to NCCL. Assumed."""

GRAPH_TOKENS: Mapping[str, float] = {"vllm": 512.0}
"""Largest steps with prompts that run as CUDA graphs: vLLM captures pieces of a step for up to 512 tokens; the others
capture decode steps alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one forward pass; the parts sum to `seconds`."""

    gemm: float
    """Projections of attention, dense layers and the output layer."""
    experts: float
    attention: float
    """Reading the KV cache, and attention of prompts."""
    elementwise: float
    communication: float
    layers: float
    """Fixed cost of layers: gaps between kernels, or launches one by one."""
    host: float
    """Time that the device waits for the host between steps."""
    memory_seconds: float
    """Reading weights and cache alone."""
    compute_seconds: float
    """Multiplying alone."""
    provenance: Provenance

    @property
    def seconds(self) -> float:
        """The whole step."""
        return (
            self.gemm + self.experts + self.attention + self.elementwise + self.communication + self.layers + self.host
        )

    @property
    def limiter(self) -> str:
        """What limits the largest part: memory, compute, communication or launches."""
        parts = {
            "memory" if self.memory_seconds > self.compute_seconds else "compute": self.gemm
            + self.experts
            + self.attention
            + self.elementwise,
            "communication": self.communication,
            "launches": self.layers + self.host,
        }
        return max(parts, key=lambda name: parts[name])


def step_time(
    deployment: Deployment,
    *,
    sequences: float,
    context: float = 0.0,
    prompt_tokens: float = 0.0,
    prompt_length: float = 0.0,
    tokens_each: float = 1.0,
    in_flight: float = 1.0,
    constants: ServingConstants | None = None,
    rates: ServingRates | None = None,
) -> StepTime:
    """One pass over all layers, on each attention data parallel group.

    `sequences` decode `tokens_each` tokens each (more than one in speculative decoding) after `context` tokens;
    `prompt_tokens` tokens of prompts of `prompt_length` tokens are part of the pass. `in_flight` batches like this one
    are in the pipeline at once: all stages then take as long as the last one, which has the output layer.
    """
    constants = constants or load_serving_constants()
    rates = rates or serving_rates(deployment, constants)
    engine = constants.engines[deployment.engine]
    model, layout, precision = deployment.model, deployment.layout, deployment.precision
    decoded = sequences * tokens_each
    tokens = decoded + prompt_tokens
    gemm = experts = attention = communication = memory_all = compute_all = usual_layers = 0.0
    values = elementwise_bytes(deployment)
    mixers: dict[str, tuple[float, float, float]] = {}
    for mixer, feed, layers in layer_kinds(model):
        if mixer not in mixers:
            mixers[mixer] = _mixer_seconds(
                deployment, rates, mixer, sequences, decoded, context, prompt_tokens, prompt_length
            )
        seconds, memory, compute = mixers[mixer]
        attention += layers * seconds
        memory_all += layers * memory
        compute_all += layers * compute
        pairs = _matrices(model, mixer, feed, layout.tp)
        usual_layers += layers * (len(pairs) + 2) / 6  # a usual layer has four GEMMs, attention and the rest
        for inputs, outputs in pairs:
            size = inputs * outputs
            moved = size * precision.rest_bytes + tokens * (inputs * precision.activation_bytes + 2.0 * outputs)
            memory, compute = moved / rates.rest_stream, 2.0 * tokens * size / rates.rest_compute
            gemm += layers * p_norm(memory, compute)
            memory_all += layers * memory
            compute_all += layers * compute
        if feed == "E":
            seconds, memory, compute = expert_seconds(deployment, constants, rates, tokens)
            experts += layers * seconds
            memory_all += layers * memory
            compute_all += layers * compute
        communication += layers * communication_seconds(deployment, engine.collective, mixer, feed, tokens)
    rows = decoded + (prompt_tokens / prompt_length if prompt_length else 0.0)
    size = model.hidden * model.vocabulary / layout.tp
    memory = (2.0 * size + rows * (model.hidden + model.vocabulary / layout.tp) * 2.0) / rates.half_stream
    compute = 2.0 * rows * size / rates.half_compute
    gemm += in_flight * p_norm(memory, compute)
    memory_all += memory
    compute_all += compute
    if layout.tp > 1:
        communication += link_seconds(
            deployment, engine.collective, "all_gather", rows * model.vocabulary * 2.0, layout.tp
        )
    if layout.pp > 1:
        hop = deployment.collectives("send_recv", max(1.0, tokens) * model.hidden * 2.0, 2, layout.stage_gpus)
        communication += (layout.pp - 1) * hop
    elementwise = tokens * values / rates.elementwise
    if layout.overlap:
        busy = gemm + experts + attention + elementwise
        communication = p_norm(busy, communication) - busy
    device = gemm + experts + attention + communication
    fixed = rates.gap * (usual_layers * engine.layer + model.feeds.count("E") * engine.expert_layer)
    eager = prompt_tokens and tokens > GRAPH_TOKENS.get(deployment.engine, 0.0)
    if eager or not deployment.graphs:
        launching = usual_layers * engine.launch + model.feeds.count("E") * engine.expert_launch
        fixed = max(fixed, p_norm(device + elementwise + fixed, launching) - device - elementwise)
    host = layout.pp * (engine.step + engine.sequence * sequences)  # every stage prepares its own inputs
    if engine.overlaps and layout.pp == 1:  # in a pipeline, the first stage waits for the last one's tokens
        busy = device + elementwise + fixed
        host = p_norm(busy, host) - busy
    return StepTime(
        gemm=gemm,
        experts=experts,
        attention=attention,
        elementwise=elementwise,
        communication=communication,
        layers=fixed,
        host=host,
        memory_seconds=memory_all,
        compute_seconds=compute_all,
        provenance=weakest(rates.provenance, *_collective_provenances(deployment)),
    )


@lru_cache(maxsize=256)
def layer_kinds(model: Model) -> tuple[tuple[str, str, int], ...]:
    """Mixer, feed and number of each kind of layer."""
    return tuple((mixer, feed, n) for (mixer, feed), n in Counter(zip(model.mixers, model.feeds, strict=True)).items())


def _collective_provenances(deployment: Deployment) -> Iterator[Provenance]:
    """Provenance of the collectives between the GPUs of a deployment, as far as it uses them."""
    layout = deployment.layout
    for ranks, stride in ((layout.tp, 1), (layout.dp, layout.tp), (2, layout.stage_gpus if layout.pp > 1 else 0)):
        provenance = deployment.collectives.provenance(ranks, stride)
        if provenance is not None:
            yield provenance


@lru_cache(maxsize=4096)
def _matrices(model: Model, mixer: str, feed: str, tp: int) -> tuple[tuple[float, float], ...]:
    """Inputs and outputs, on one GPU, of the GEMMs of one layer without its routed experts."""
    pairs: list[tuple[float, float]] = []
    if mixer in "AWC":
        for name, inputs, outputs in attention_matrices(model):
            if name == "output":
                pairs.append((inputs / tp, outputs))
            elif name in ("q down", "kv down"):
                pairs.append((inputs, outputs))  # every GPU needs the whole compressed vector
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


def elementwise_bytes(deployment: Deployment) -> float:
    """Bytes per token of norms, rotary embeddings, activations and permutations, in all layers."""
    return _elementwise_bytes(deployment.model, deployment.layout.tp, deployment.layout.ep)


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


def _mixer_seconds(
    deployment: Deployment,
    rates: ServingRates,
    kind: str,
    sequences: float,
    decoded: float,
    context: float,
    prompt_tokens: float,
    prompt_length: float,
) -> tuple[float, float, float]:
    """Seconds of attention (or scan) in one layer, and those of memory and compute alone."""
    model, tp = deployment.model, deployment.layout.tp
    if kind == "M":
        state = model.ssm_heads * model.ssm_head_dim * model.ssm_state * 4.0 / tp
        memory = 2.0 * sequences * state / rates.cache
        compute = (decoded + prompt_tokens) * 6.0 * state / 4.0 / rates.half_compute
        return p_norm(memory, compute), memory, compute
    if kind == "-":
        return 0.0, 0.0, 0.0
    heads = model.heads / tp
    seen = context if kind == "A" else min(context, float(model.window))
    memory = sequences * seen * deployment.cache_values() * deployment.precision.kv_bytes / rates.cache
    wide = 2.0 * model.kv_rank + model.rope_dim if model.kv_rank else model.head_dim + model.value_dim
    compute = 2.0 * decoded * seen * heads * wide / rates.attention
    total = p_norm(memory, compute)
    if prompt_tokens:
        keys = keys_seen(model, kind, max(1, round(prompt_length)))
        scores = 2.0 * prompt_tokens * keys * heads * (model.head_dim + model.value_dim) / rates.attention
        return total + scores, memory, compute + scores
    return total, memory, compute


def expert_seconds(
    deployment: Deployment, constants: ServingConstants, rates: ServingRates, tokens: float
) -> tuple[float, float, float]:
    """Seconds of the routed experts of one layer, and those of memory and compute alone."""
    model, layout, precision = deployment.model, deployment.layout, deployment.precision
    everywhere = tokens * layout.dp
    share = experts_hit(model, everywhere, constants.variety) / model.experts
    local = (model.experts + layout.redundant) / layout.ep
    hit = local * share
    # the others wait for the GPU where the most experts are hit
    hit = min(local, hit + expected_maximum(layout.ep) * math.sqrt(hit * (1.0 - share)))
    visits = everywhere * model.active_experts / layout.ep
    if layout.ep > 1:
        # a copy on each GPU of an expert that is busy elsewhere leaves chance alone to differ
        lasting = constants.skew * max(0.0, 1.0 - layout.redundant / layout.ep)
        visits *= expert_imbalance(everywhere, model, layout.ep, lasting)
    weights = count_parameters(model).expert / layout.expert_tp_used
    inner = model.latent or model.hidden
    moved = hit * weights * precision.weight_bytes
    moved += visits * (
        inner * (precision.activation_bytes + 2.0) + 3.0 * model.expert_intermediate / layout.expert_tp_used
    )
    memory = moved / rates.expert_stream
    width = model.expert_intermediate / layout.expert_tp_used
    narrow = width / (width + constants.expert_width)
    compute = 2.0 * (visits + constants.expert_rows * hit) * weights / (rates.expert_compute * narrow)
    return p_norm(memory, compute), memory, compute


def experts_hit(model: Model, tokens: float, variety: float = 1.0) -> float:
    """Expected number of a layer's experts that at least one of `tokens` tokens visits.

    With a `variety` of 1 tokens choose independently, all experts with equal probability. Real tokens resemble each
    other: a batch counts as `tokens ** variety` independent ones.
    """
    if model.active_experts >= model.experts:
        return float(model.experts)
    independent = tokens**variety if tokens > 1 else tokens
    return float(model.experts * -math.expm1(independent * math.log1p(-model.active_experts / model.experts)))


def expert_imbalance(tokens: float, model: Model, parts: int, skew: float) -> float:
    """Load of the busiest of `parts` groups of experts over the mean: chance, and lasting skew."""
    if parts == 1:
        return 1.0
    mean = max(tokens * model.active_experts / parts, 1e-9)
    return min(float(parts), 1.0 + expected_maximum(parts) / math.sqrt(mean) + skew * (1 - 1 / parts))


@cache
def expected_maximum(parts: int) -> float:
    """Expected maximum of `parts` standard normal variables (Blom's approximation)."""
    return NormalDist().inv_cdf((parts - 0.375) / (parts + 0.25)) if parts > 1 else 0.0


def communication_seconds(deployment: Deployment, own: float, mixer: str, feed: str, tokens: float) -> float:
    """Seconds of tensor-parallel reductions and of the exchange of experts in one layer."""
    layout, hidden = deployment.layout, deployment.model.hidden
    size = tokens * hidden * 2.0
    reductions = 0
    if layout.tp > 1:
        reductions = (mixer != "-") + (feed == "D" or (feed == "E" and layout.dp == 1))
    seconds = reductions * link_seconds(deployment, own, "all_reduce", size, layout.tp) if reductions else 0.0
    if feed == "E" and layout.dp > 1:
        seconds += exchange_seconds(deployment, own, tokens)
    return seconds


def exchange_seconds(deployment: Deployment, own: float, tokens: float) -> float:
    """Seconds of dispatch and combine between attention data parallel groups.

    The faster of two ways: every group gets all tokens (all-gather, reduce-scatter), or each token goes to the GPUs
    that have its experts (two all-to-alls).
    """
    model, layout = deployment.model, deployment.layout
    stride, width = layout.tp, deployment.model.latent or deployment.model.hidden
    there = tokens * width * min(2.0, deployment.precision.activation_bytes)
    back = tokens * width * 2.0
    gathered = link_seconds(deployment, own, "all_gather", there * layout.dp, layout.dp, stride)
    gathered += link_seconds(deployment, own, "reduce_scatter", back * layout.dp, layout.dp, stride)
    if layout.ep == 1:
        return gathered
    parts = min(layout.ep, layout.dp)
    copies = parts * (1.0 - (1.0 - 1.0 / parts) ** model.active_experts)
    sent = link_seconds(deployment, own, "all_to_all", there * copies, layout.dp, stride)
    sent += link_seconds(deployment, own, "all_to_all", back * copies, layout.dp, stride)
    return min(gathered, sent)


def link_seconds(deployment: Deployment, own: float, op: str, bytes: float, ranks: int, stride: int = 1) -> float:
    """Seconds of a collective; `own` is the latency of the engine's custom kernels relative to NCCL's."""
    collective = deployment.collectives.collective(op, max(bytes, 1.0), ranks, stride)
    share = own + (1.0 - own) * bytes / (bytes + CUSTOM_ALL_REDUCE_BYTES)
    return collective.bandwidth_seconds + share * collective.latency_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRates:
    """Bytes/s at which memory is read, and FLOP/s of GEMMs and attention, that a deployment reaches.

    `expert_*` are of routed experts, `rest_*` of the other weights, `half_*` of weights and GEMMs in 16 bits.
    """

    rest_stream: float
    expert_stream: float
    half_stream: float
    cache: float
    elementwise: float
    rest_compute: float
    expert_compute: float
    half_compute: float
    attention: float
    gap: float
    """Fixed cost of a layer, relative to other generations of GPUs."""
    provenance: Provenance


def serving_rates(deployment: Deployment, constants: ServingConstants) -> ServingRates:
    """Rates of the GPUs of `deployment` in its precision."""
    machine, precision = deployment.cluster.machine, deployment.precision
    ceilings = machine.theoretical
    if ceilings is None:
        raise UsageError(f"{machine.name} has no datasheet figures. Name a machine of the catalogue.")
    generation, provenance = generation_constants(machine, constants)
    half, _ = compute_share(generation, "bfloat16", constants)
    expert, expert_provenance = compute_share(generation, precision.compute, constants)
    rest, rest_provenance = compute_share(generation, precision.rest_compute, constants)
    stream = ceilings.bandwidth * generation.stream
    narrow = constants.narrow.get(precision.name, 1.0) if precision.weight_only else 1.0
    widened = constants.narrow_compute if precision.weight_only else 1.0
    engine = constants.engines[deployment.engine]
    engine_provenance = Provenance(kind="fitted", text=f"{deployment.engine}: {engine.rows} rows")
    if not engine.rows:
        text = f"{deployment.engine} has no rows: what servers have in common"
        engine_provenance = Provenance(kind="transferred", text=text)
    grouped = engine.grouped
    peak = ceilings.peak
    return ServingRates(
        rest_stream=stream * (narrow if precision.rest_bytes < 2 else 1.0),
        expert_stream=stream * narrow * (constants.expert_stream if grouped else 1.0),
        half_stream=stream,
        cache=stream * constants.cache,
        elementwise=ceilings.bandwidth * ELEMENTWISE_SHARE,
        rest_compute=peak(precision.rest_compute) * rest * (widened if precision.rest_bytes < 2 else 1.0),
        expert_compute=peak(precision.compute) * expert * (constants.expert_compute if grouped else 1.0) * widened,
        half_compute=peak("bfloat16") * half,
        attention=peak("bfloat16")
        * constants.attention
        * (constants.attention_narrow if precision.kv_bytes < 2 else 1.0),
        gap=generation.gap,
        provenance=weakest(provenance, expert_provenance, rest_provenance, engine_provenance),
    )


def p_norm(memory: float, compute: float) -> float:
    """The p-norm of two times: the larger one, and more where they are near each other."""
    return float((memory**NORM_POWER + compute**NORM_POWER) ** (1 / NORM_POWER))
