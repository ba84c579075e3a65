"""`Model`: the shape of a network as plain data, with its exact parameter counts and its FLOPs.

A layer is a mixer (attention, state space) and a feed (a dense or an expert network), each a letter in a string of one
letter per layer, so that alternating, hybrid and partly dense models need no cases of their own. `count_parameters`
counts weights by kind of layer, `forward_flops` the FLOPs of a token: a multiply-add is 2, causal attention counts what
the mask leaves, recomputation is no model FLOP.

>>> llama = Model(name="tiny", mixers="AA", feeds="DD", hidden=8, heads=2, kv_heads=1, head_dim=4, vocabulary=10,
...               intermediate=16)
>>> llama.layers, llama.parameters
(2, 1352)
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache

from nearpeak._display import Result, headline
from nearpeak.errors import UsageError
from nearpeak.plan.legal import largest_divisor

MIXERS = {
    "A": "attention over everything before",
    "W": "attention over a sliding window",
    "C": "attention inside chunks",
    "M": "state space (Mamba-2)",
    "-": "none",
}
LARGEST_SIZE = 2**40
"""Of any dimension of a model; products of a few of them are numbers that can still be computed with."""
MOST_LAYERS = 10_000
FEEDS = {"D": "dense", "E": "experts", "-": "none"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(Result):
    """The shape of a network, from which its weights, FLOPs and memory follow; 0 where it has no such part."""

    name: str
    source: str = "given by hand"
    mixers: str
    """One letter of `MIXERS` per layer."""
    feeds: str
    """One letter of `FEEDS` per layer."""
    hidden: int
    vocabulary: int
    """Outputs of the output layer: tokens, or classes of a vision model."""
    heads: int
    kv_heads: int
    head_dim: int
    """Channels of a query and a key, rotary ones included."""
    v_head_dim: int = 0
    """Channels of a value; 0: as `head_dim`."""
    q_rank: int = 0
    """Multi-head latent attention: rank of the query projection; 0: full rank."""
    kv_rank: int = 0
    """Multi-head latent attention: width of the compressed keys and values; 0: ordinary attention."""
    rope_dim: int = 0
    """Multi-head latent attention: channels of the one rotary key that all heads share."""
    window: int = 0
    """Keys that a token attends to in layers `W`; length of a chunk in layers `C`."""
    qkv_bias: bool = False
    output_bias: bool = False
    sinks: bool = False
    """One learned logit per head."""
    qk_norm: int = 0
    """Weights of the norms of queries and keys, per attention layer."""
    intermediate: int = 0
    gated: bool = True
    """A feed of three matrices (SwiGLU, GeGLU) instead of two."""
    feed_bias: bool = False
    experts: int = 0
    active_experts: int = 0
    expert_intermediate: int = 0
    expert_bias: bool = False
    shared_intermediate: int = 0
    """Intermediate width of all shared experts together."""
    shared_gate: bool = False
    router_bias: bool = False
    latent: int = 0
    """Width that tokens are projected to before the routed experts; 0: `hidden`."""
    ssm_heads: int = 0
    ssm_head_dim: int = 0
    ssm_state: int = 0
    ssm_groups: int = 0
    ssm_kernel: int = 4
    norms_per_block: int = 1
    """Norms around each mixer and each feed: 2 where the output is normalized too."""
    norm_width: int = 1
    """Weights of a norm per channel: 1 for RMS, 2 with a bias, 0 without any."""
    final_norm: bool = True
    tied: bool = False
    """The output layer is the embedding."""
    output_layer_bias: bool = False
    positions: int = 0
    """Rows of a learned table of positions."""
    causal: bool = True
    predictions: int = 0
    """Multi-token prediction: additional modules of a training step, each a layer and the output layer. Their weights
    are not counted, as serving does not need them."""
    patch_values: int = 0
    """A vision model: values of one patch, embedded by a linear layer with bias in place of a table."""
    image_tokens: int = 0
    """A vision model: tokens of one image, the class token included."""

    def __post_init__(self) -> None:
        if len(self.mixers) != len(self.feeds) or not self.mixers:
            raise UsageError(
                f"{self.name}: `mixers` and `feeds` have one letter per layer, at least one; "
                f"given {len(self.mixers)} and {len(self.feeds)}."
            )
        for field, letters, valid in (("mixers", self.mixers, MIXERS), ("feeds", self.feeds, FEEDS)):
            unknown = sorted(set(letters) - set(valid))
            if unknown:
                raise UsageError(f"{self.name}: `{field}` has {unknown[0]!r}; valid: {', '.join(valid)}.")
        needed = {"hidden": self.hidden, "vocabulary": self.vocabulary}
        if set(self.mixers) & set("AWC"):
            needed |= {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        if set(self.mixers) & set("WC"):
            needed["window"] = self.window
        if "M" in self.mixers:
            needed |= {"ssm_heads": self.ssm_heads, "ssm_head_dim": self.ssm_head_dim, "ssm_state": self.ssm_state}
        if "D" in self.feeds:
            needed["intermediate"] = self.intermediate
        if "E" in self.feeds:
            needed |= {
                "experts": self.experts,
                "active_experts": self.active_experts,
                "expert_intermediate": self.expert_intermediate,
            }
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, int) and not 0 <= value <= LARGEST_SIZE:
                raise UsageError(f"{self.name}: `{each.name}` must be from 0 to {LARGEST_SIZE:,}; given {value:.3g}.")
        for name, value in needed.items():
            if value <= 0:
                raise UsageError(f"{self.name}: `{name}` must be positive; given {value}.")
        if self.heads and (not self.kv_heads or self.heads % self.kv_heads):
            near = largest_divisor(self.heads, self.kv_heads)
            raise UsageError(
                f"{self.name}: `kv_heads` must divide the {self.heads} heads; given {self.kv_heads}, nearest {near}."
            )
        if self.rope_dim > self.head_dim:
            raise UsageError(
                f"{self.name}: `rope_dim` is {self.rope_dim}, more than the {self.head_dim} channels of a head, which "
                f"include it; nearest {self.head_dim}."
            )
        if self.active_experts > self.experts:
            raise UsageError(
                f"{self.name}: `active_experts` is {self.active_experts}, more than the {self.experts} experts; "
                f"nearest {self.experts}."
            )

    def __repr__(self) -> str:
        active = f", {self.active_parameters / 1e9:.3g} B active" if self.is_moe else ""
        weights = f"{self.parameters / 1e9:.3g} B weights{active}"
        return headline(f"Model {self.name}: {weights}, {self.layers} layers of {self.hidden}")

    def __hash__(self) -> int:
        """Hash of a few fields, which is fast; equality compares all."""
        return hash((self.name, self.mixers, self.feeds, self.hidden, self.intermediate, self.vocabulary))

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.mixers)

    @property
    def value_dim(self) -> int:
        """Channels of a value of one head."""
        return self.v_head_dim or self.head_dim

    @property
    def is_moe(self) -> bool:
        """Whether any layer has experts."""
        return "E" in self.feeds

    @property
    def attention_layers(self) -> int:
        """Number of layers with any kind of attention."""
        return sum(self.mixers.count(letter) for letter in "AWC")

    @property
    def parameters(self) -> int:
        """Number of weights."""

        return count_parameters(self).total

    @property
    def active_parameters(self) -> int:
        """Number of weights that one token uses, the whole embedding included."""

        return count_parameters(self).active

    def with_layers(self, layers: int) -> Model:
        """The model with its first `layers` layers; with more than it has, its pattern is repeated."""
        if not 1 <= layers <= MOST_LAYERS:
            raise UsageError(f"{self.name}: a model has from 1 to {MOST_LAYERS:,} layers; given {layers:,}.")
        repeats = -(-layers // self.layers)
        return replace(self, mixers=(self.mixers * repeats)[:layers], feeds=(self.feeds * repeats)[:layers])


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Number of weights of a model, by part."""

    total: int
    active: int
    """Weights that one token uses: of the routed experts only the chosen ones."""
    embedding: int
    """The table of tokens and that of positions."""
    output: int
    """The output layer; 0 where it is tied to the embedding."""
    final_norm: int
    attention: int
    """One attention layer, without its norms."""
    state_space: int
    """One state-space layer, without its norms."""
    dense: int
    """One dense feed, without its norms."""
    expert: int
    """One routed expert."""
    expert_shared: int
    """The rest of an expert layer: router, shared experts, latent projections; without its norms."""
    norm: int
    """The norms of one mixer or of one feed."""

    def experts_of(self, model: Model) -> int:
        """All routed experts of all layers."""
        return model.feeds.count("E") * model.experts * self.expert


@lru_cache(maxsize=1024)
def count_parameters(model: Model) -> Parameters:
    """The weights of `model`."""
    norm = model.norms_per_block * model.norm_width * model.hidden
    attention, state_space = attention_weights(model), state_space_weights(model)
    dense = feed_weights(model.hidden, model.intermediate, model.gated, model.feed_bias)
    inner = model.latent or model.hidden
    expert = feed_weights(inner, model.expert_intermediate, model.gated, model.expert_bias)
    router = model.hidden * model.experts + (model.experts if model.router_bias else 0)
    shared = feed_weights(model.hidden, model.shared_intermediate, model.gated, model.expert_bias)
    latent = 2 * model.latent * model.hidden
    expert_shared = router + shared + latent + (model.hidden if model.shared_gate else 0)
    embedding = model.vocabulary * model.hidden
    if model.patch_values:
        embedding = (model.patch_values + 1) * model.hidden + model.hidden  # a bias, and the class token
    embedding += model.positions * model.hidden
    output = 0 if model.tied else model.vocabulary * model.hidden
    output += model.vocabulary if model.output_layer_bias else 0
    final_norm = model.norm_width * model.hidden if model.final_norm else 0
    blocks = sum(letter != "-" for letter in model.mixers + model.feeds)
    expert_layers = model.feeds.count("E")
    rest = (
        embedding
        + output
        + final_norm
        + blocks * norm
        + model.attention_layers * attention
        + model.mixers.count("M") * state_space
        + model.feeds.count("D") * dense
        + expert_layers * expert_shared
    )
    return Parameters(
        total=rest + expert_layers * model.experts * expert,
        active=rest + expert_layers * model.active_experts * expert,
        embedding=embedding,
        output=output,
        final_norm=final_norm,
        attention=attention,
        state_space=state_space,
        dense=dense,
        expert=expert,
        expert_shared=expert_shared,
        norm=norm,
    )


def attention_matrices(model: Model) -> list[tuple[str, int, int]]:
    """The GEMMs of one attention layer: name, inputs and outputs of each."""
    queries, values = model.heads * model.head_dim, model.heads * model.value_dim
    if not model.kv_rank:
        keys = model.kv_heads * (model.head_dim + model.value_dim)
        return [("qkv", model.hidden, queries + keys), ("output", values, model.hidden)]
    down = [("q down", model.hidden, model.q_rank), ("q up", model.q_rank, queries)]
    if not model.q_rank:
        down = [("q", model.hidden, queries)]
    return [
        *down,
        ("kv down", model.hidden, model.kv_rank + model.rope_dim),
        ("kv up", model.kv_rank, model.heads * (model.head_dim - model.rope_dim + model.value_dim)),
        ("output", values, model.hidden),
    ]


def attention_weights(model: Model) -> int:
    """Weights of one attention layer, without the norms around it."""
    if not model.heads:
        return 0
    matrices = attention_matrices(model)
    weights = sum(inputs * outputs for _, inputs, outputs in matrices)
    if model.qkv_bias:
        weights += sum(outputs for name, _, outputs in matrices if name in ("qkv", "q", "q down", "kv down"))
    weights += model.hidden if model.output_bias else 0
    weights += model.q_rank + model.kv_rank  # the norms of the compressed queries, keys and values
    return weights + model.qk_norm + (model.heads if model.sinks else 0)


def state_space_matrices(model: Model) -> list[tuple[str, int, int]]:
    """The GEMMs of one Mamba-2 layer: the joint projection of gate, inputs, B, C and steps; and the output."""
    inner = model.ssm_heads * model.ssm_head_dim
    joint = 2 * inner + 2 * model.ssm_groups * model.ssm_state + model.ssm_heads
    return [("in", model.hidden, joint), ("out", inner, model.hidden)]


def state_space_weights(model: Model) -> int:
    """Weights of one Mamba-2 layer: matrices, convolution with bias, A, D, the steps' bias, and the gated norm."""
    if not model.ssm_heads:
        return 0
    inner = model.ssm_heads * model.ssm_head_dim
    channels = inner + 2 * model.ssm_groups * model.ssm_state
    matrices = sum(inputs * outputs for _, inputs, outputs in state_space_matrices(model))
    return matrices + channels * (model.ssm_kernel + 1) + 3 * model.ssm_heads + inner


def feed_weights(hidden: int, intermediate: int, gated: bool, bias: bool) -> int:
    """Weights of one feed; a gated one has two up-projections."""
    ups = 2 if gated else 1
    weights = (ups + 1) * hidden * intermediate
    return weights + (ups * intermediate + hidden if bias and intermediate else 0)


BACKWARD_ATTENTION = 2.5
"""Backward over forward FLOPs of fused attention: 5 GEMMs, as scores are recomputed, to 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """Forward FLOPs of one token in all layers."""

    attention_gemm: float
    scores: float
    """Queries times keys, and probabilities times values."""
    state_space_gemm: float
    scan: float
    dense: float
    experts: float
    shared: float
    """Shared experts, latent projections and routers."""
    output: float
    embedding: float
    """Patches of a vision model; a table lookup has no FLOPs."""

    @property
    def gemm(self) -> float:
        """GEMMs: all but the scores of attention and the scan."""
        return self.total - self.scores - self.scan

    @property
    def total(self) -> float:
        """Forward FLOPs of one token."""
        return (
            self.attention_gemm
            + self.scores
            + self.state_space_gemm
            + self.scan
            + self.dense
            + self.experts
            + self.shared
            + self.output
            + self.embedding
        )

    @property
    def training(self) -> float:
        """Forward and backward FLOPs, three times forward by convention: recomputed scores do not count."""
        return 3 * self.total


def forward_flops(model: Model, sequence: int) -> Flops:
    """Forward FLOPs of one token, averaged over a sequence."""
    matrices = attention_matrices(model) if model.heads else []
    projections = sum(2.0 * inputs * outputs for _, inputs, outputs in matrices)
    spaces = sum(2.0 * inputs * outputs for _, inputs, outputs in state_space_matrices(model))
    feed = 2.0 * (3 if model.gated else 2)
    expert_layers = model.feeds.count("E")
    inner = model.latent or model.hidden
    shared = feed * model.hidden * model.shared_intermediate + 4.0 * model.latent * model.hidden
    shared += 2.0 * model.hidden * (model.experts + model.shared_gate)
    output_share = 1.0 if not model.image_tokens else 1.0 / model.image_tokens
    return Flops(
        attention_gemm=model.attention_layers * projections,
        scores=sum(model.mixers.count(kind) * score_flops(model, kind, sequence) for kind in "AWC"),
        state_space_gemm=model.mixers.count("M") * spaces,
        scan=model.mixers.count("M") * scan_flops(model),
        dense=model.feeds.count("D") * feed * model.hidden * model.intermediate,
        experts=expert_layers * model.active_experts * feed * inner * model.expert_intermediate,
        shared=expert_layers * shared,
        output=2.0 * model.hidden * model.vocabulary * output_share,
        embedding=2.0 * model.patch_values * model.hidden * (1 - output_share) if model.patch_values else 0.0,
    )


def keys_seen(model: Model, kind: str, sequence: int) -> float:
    """Mean number of keys that a token of a sequence attends to in a layer of this kind."""
    if not model.causal:
        return float(sequence)
    if kind == "A" or not model.window or sequence <= model.window:
        return (sequence + 1) / 2
    if kind == "W":
        window = model.window
        return (window * (window + 1) / 2 + (sequence - window) * window) / sequence
    whole, rest = divmod(sequence, model.window)
    return (whole * model.window * (model.window + 1) / 2 + rest * (rest + 1) / 2) / sequence


def score_flops(model: Model, kind: str, sequence: int) -> float:
    """FLOPs of attention itself, for one token in one layer of this kind."""
    return 2.0 * model.heads * (model.head_dim + model.value_dim) * keys_seen(model, kind, sequence)


def scan_flops(model: Model) -> float:
    """FLOPs of the chunked state-space scan for one token in one layer, with chunks of 256 (Mamba-2's kernel)."""
    if not model.ssm_heads:
        return 0.0
    chunk = 256
    inside = chunk / 2 * (model.ssm_groups * model.ssm_state + model.ssm_heads * model.ssm_head_dim)
    across = 2 * model.ssm_heads * model.ssm_head_dim * model.ssm_state
    return 2.0 * (inside + across)


def kv_bytes_per_token(model: Model, bytes_per_value: float = 2.0, *, layers: str = "AWC") -> float:
    """Bytes of one token in the KV cache, over all attention layers of these kinds.

    Latent attention stores the compressed vector and the rotary key, whatever the number of heads. The cache of layers
    with a window stops growing at its length: call this for `layers="A"` and `layers="W"` separately.
    """
    count = sum(model.mixers.count(kind) for kind in layers)
    values = model.kv_rank + model.rope_dim if model.kv_rank else model.kv_heads * (model.head_dim + model.value_dim)
    return count * values * bytes_per_value
