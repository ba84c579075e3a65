"""`Model`: the shape of a network as plain data, and what its weights, FLOPs and cache follow from.

A layer is a mixer (attention, state space) and a feed (a dense or an expert network), each a letter in a string of one
letter per layer, so that alternating, hybrid and partly dense models need no cases of their own.

>>> llama = Model(name="tiny", mixers="AA", feeds="DD", hidden=8, heads=2, kv_heads=1, head_dim=4, vocabulary=10,
...               intermediate=16)
>>> llama.layers, llama.parameters
(2, 1352)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nearpeak.errors import UsageError

MIXERS = {
    "A": "attention over everything before",
    "W": "attention over a sliding window",
    "C": "attention inside chunks",
    "M": "state space (Mamba-2)",
    "-": "none",
}
FEEDS = {"D": "dense", "E": "experts", "-": "none"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The numbers that a network's weights, FLOPs and memory follow from; 0 means that it has no such part."""

    name: str
    source: str = "given by hand"
    mixers: str
    """One letter of `MIXERS` per layer."""
    feeds: str
    """One letter of `FEEDS` per layer."""
    hidden: int
    vocabulary: int
    """Rows of the output layer; classes, for a vision model."""
    heads: int
    kv_heads: int
    head_dim: int
    """Channels of a query and a key, rotary ones included."""
    v_head_dim: int = 0
    """Channels of a value; 0: as `head_dim`."""
    q_rank: int = 0
    """Multi-head latent attention: rank of the queries' projection; 0: a full one."""
    kv_rank: int = 0
    """Multi-head latent attention: width of the compressed keys and values; 0: ordinary attention."""
    rope_dim: int = 0
    """Multi-head latent attention: channels of the one rotary key that all heads share."""
    window: int = 0
    """Keys that a token sees in layers `W`, and the length of a chunk in layers `C`."""
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
    """Intermediate width of all experts that every token visits, together."""
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
    """Norms around each mixer and each feed: 2 where the output is normalised too."""
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
    """Multi-token prediction: modules that a training step runs besides, each one more layer and the output layer.
    Their weights are not counted: serving does without them."""
    patch_values: int = 0
    """A vision model: values of one patch, which a biased product embeds in place of a table."""
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
        for field, value in needed.items():
            if value <= 0:
                raise UsageError(f"{self.name}: `{field}` must be positive; given {value}.")
        if self.heads and self.heads % self.kv_heads:
            near = max(n for n in range(1, self.heads + 1) if self.heads % n == 0 and n <= self.kv_heads)
            raise UsageError(
                f"{self.name}: `kv_heads` must divide the {self.heads} heads; given {self.kv_heads}, nearest {near}."
            )
        if self.active_experts > self.experts:
            raise UsageError(
                f"{self.name}: `active_experts` is {self.active_experts}, more than the {self.experts} experts; "
                f"nearest {self.experts}."
            )

    def __hash__(self) -> int:
        """Few fields, so that a search can look things up by model; equality compares all."""
        return hash((self.name, self.mixers, self.feeds, self.hidden, self.intermediate, self.vocabulary))

    @property
    def layers(self) -> int:
        """How many layers there are."""
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
        """Layers with any kind of attention."""
        return sum(self.mixers.count(letter) for letter in "AWC")

    @property
    def parameters(self) -> int:
        """All weights."""
        from nearpeak.plan.models.parameters import count

        return count(self).total

    @property
    def active_parameters(self) -> int:
        """Weights that one token meets; all of the embedding counts."""
        from nearpeak.plan.models.parameters import count

        return count(self).active

    def with_layers(self, layers: int) -> Model:
        """The model with its first `layers` layers, or with its pattern repeated."""
        repeats = -(-layers // self.layers)
        return replace(self, mixers=(self.mixers * repeats)[:layers], feeds=(self.feeds * repeats)[:layers])
