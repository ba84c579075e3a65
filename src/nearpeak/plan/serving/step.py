"""The time of one forward pass of a served model, by part: decode, prefill, or both in one step.

Reading and multiplying of each product are joined by `serving_rates.norm`; what layers cost beyond their work, and the
host, come from the engine's constants.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from nearpeak.plan.models.flops import keys_seen
from nearpeak.plan.models.model import Model
from nearpeak.plan.models.parameters import attention_matrices, state_space_matrices
from nearpeak.plan.provenance import Provenance, weakest
from nearpeak.plan.serving.constants import ServingConstants, load_serving_constants
from nearpeak.plan.serving.deployment import Deployment
from nearpeak.plan.serving.experts import experts_time, layer_communication, link_seconds
from nearpeak.plan.serving.rates import Rates, norm, rates


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
    reached: Rates | None = None,
) -> StepTime:
    """One pass over all layers, on each attention data parallel group.

    `sequences` decode `tokens_each` tokens each (more than one where guesses are verified) behind `context` tokens;
    `prompt_tokens` tokens of prompts of `prompt_length` tokens join them. `in_flight` batches like this one are in the
    pipeline at once: all its stages then take as long as the last one, which has the output layer.
    """
    constants = constants or load_serving_constants()
    reached = reached or rates(here, constants)
    engine = constants.engines[here.engine]
    model, layout, chosen = here.model, here.layout, here.precision
    decoded = sequences * tokens_each
    tokens = decoded + prompt_tokens
    products = experts = attention = communication = memory_all = compute_all = usual_layers = 0.0
    values = elementwise_values(here)
    mixers: dict[str, tuple[float, float, float]] = {}
    for mixer, feed, layers in layer_kinds(model):
        if mixer not in mixers:
            mixers[mixer] = _mixer(here, reached, mixer, sequences, decoded, context, prompt_tokens, prompt_length)
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
            products += layers * norm(memory, compute)
            memory_all += layers * memory
            compute_all += layers * compute
        if feed == "E":
            seconds, memory, compute = experts_time(here, constants, reached, tokens)
            experts += layers * seconds
            memory_all += layers * memory
            compute_all += layers * compute
        communication += layers * layer_communication(here, engine.collective, mixer, feed, tokens)
    rows = decoded + (prompt_tokens / prompt_length if prompt_length else 0.0)
    size = model.hidden * model.vocabulary / layout.tp
    memory = (2.0 * size + rows * (model.hidden + model.vocabulary / layout.tp) * 2.0) / reached.plain
    compute = 2.0 * rows * size / reached.half_compute
    products += in_flight * norm(memory, compute)
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
        fixed = max(fixed, norm(device + elementwise + fixed, launching) - device - elementwise)
    host = layout.pp * (engine.step + engine.sequence * sequences)  # every stage prepares its own inputs
    if engine.overlaps and layout.pp == 1:  # a first stage waits for the last one's tokens before it can prepare
        busy = device + elementwise + fixed
        host = norm(busy, host) - busy
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
def _elementwise(model: Model, tp: int, dense: int) -> float:
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


def elementwise_values(here: Deployment) -> float:
    """Bytes that norms, rotary embeddings, activations and permutations move per token, in all layers."""
    return _elementwise(here.model, here.layout.tp, here.layout.ep)


def _mixer(
    here: Deployment,
    reached: Rates,
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
        return norm(memory, compute), memory, compute
    if kind == "-":
        return 0.0, 0.0, 0.0
    heads = model.heads / tp
    seen = context if kind == "A" else min(context, float(model.window))
    memory = sequences * seen * here.cache_values() * here.precision.kv_bytes / reached.cache
    wide = 2.0 * model.kv_rank + model.rope_dim if model.kv_rank else model.head_dim + model.value_dim
    compute = 2.0 * decoded * seen * heads * wide / reached.attention
    total = norm(memory, compute)
    if prompt_tokens:
        keys = keys_seen(model, kind, max(1, round(prompt_length)))
        scores = 2.0 * prompt_tokens * keys * heads * (model.head_dim + model.value_dim) / reached.attention
        return total + scores, memory, compute + scores
    return total, memory, compute
