"""`from_config`: a `Model` from a Hugging Face `config.json`, given as a path or as a dict.

A family of models is one function with `@config_reader(model_type, ...)`: it reads the fields of a config and returns
those of `Model`. To add a family, add a function.

>>> tiny = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
...         "intermediate_size": 128, "vocab_size": 100}
>>> from_config(tiny).parameters
95040
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nearpeak._files import read_json
from nearpeak._records import brief
from nearpeak.errors import FileProblem, UsageError, did_you_mean
from nearpeak.plan.legal import largest_divisor
from nearpeak.plan.models.model import LARGEST_SIZE, MOST_LAYERS, Model

ModelFields = dict[str, Any]
ConfigReader = Callable[["ConfigFields"], ModelFields]
CONFIG_READERS: dict[str, ConfigReader] = {}
"""By `model_type`."""
LARGEST_CONFIG = 2**24
"""Bytes. A config has some kilobytes, and up to a megabyte where it lists quantized layers."""
_LAYER_TYPES = {
    "full_attention": "A",
    "attention": "A",
    "sliding_attention": "W",
    "chunked_attention": "C",
    "linear_attention": "M",
    "mamba": "M",
}


def from_config(config: str | Path | Mapping[str, Any], *, name: str = "", source: str = "") -> Model:
    """The model that a `config.json` describes; UsageError names the field that is missing or contradictory."""
    if isinstance(config, Mapping):
        data, label = dict(config), name or str(config.get("_name_or_path") or config.get("model_type") or "the config")
        where = label
    else:
        path = Path(config)
        if path.is_dir():
            path = path / "config.json"
        data, label, where = _read_config(path), name or path.parent.name or path.stem, str(path)
        source = source or str(path)
    for inner in ("text_config", "llm_config", "language_config"):
        if isinstance(data.get(inner), Mapping):  # the language model of a multimodal one
            data = {"tie_word_embeddings": data.get("tie_word_embeddings", False), **data[inner]}
    kind = data.get("model_type")
    if not isinstance(kind, str):
        raise UsageError(f"{where}: the config has no `model_type`. {did_you_mean('', CONFIG_READERS)}")
    reader = CONFIG_READERS.get(kind)
    if reader is None:
        raise UsageError(
            f"{where}: the model_type {brief(kind)} is not supported. {did_you_mean(kind, CONFIG_READERS)}"
        )
    values = reader(ConfigFields(data, where))
    return Model(name=name or label, source=source or f"config of {label}", **values)


def _read_config(path: Path) -> dict[str, Any]:
    data = read_json(path, largest=LARGEST_CONFIG)
    if not isinstance(data, dict):
        raise FileProblem(path, "it is no config of a model: it is not a JSON object")
    return data


def config_reader(*kinds: str) -> Callable[[ConfigReader], ConfigReader]:
    """Register the function that reads configs of these model types."""

    def register(reader: ConfigReader) -> ConfigReader:
        for kind in kinds:
            assert kind not in CONFIG_READERS, kind
            CONFIG_READERS[kind] = reader
        return reader

    return register


class ConfigFields:
    """The fields of one config, read by type; errors name the field."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def has(self, *names: str) -> bool:
        """Whether any of the fields exists and is not null."""
        return any(self.data.get(name) is not None for name in names)

    def integer(self, *names: str, default: int | None = None) -> int:
        """The first of the fields that exists, an integer of at least 0; else `default`."""
        for name in names:
            value = self.data.get(name)
            if value is None:
                continue
            return self._whole_number(name, value)
        if default is None:
            also = f" (or `{'`, `'.join(names[1:])}`)" if len(names) > 1 else ""
            raise UsageError(f"{self.where}: the config has no `{names[0]}`{also}, which this model needs.")
        return default

    def _whole_number(self, name: str, value: Any, most: int = LARGEST_SIZE) -> int:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= most or value != int(value):
            raise UsageError(
                f"{self.where}: `{name}` must be a whole number that is not negative and at most {most:,}; given "
                f"{brief(value)}."
            )
        return int(value)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean; `default` where the field is missing or null."""
        value = self.data.get(name)
        if value is None:
            return default
        if not isinstance(value, (bool, int)):
            raise UsageError(f"{self.where}: `{name}` must be true or false; given {brief(value)}.")
        return bool(value)

    def text(self, name: str, default: str = "") -> str:
        """A text; `default` where the field is missing or null."""
        value = self.data.get(name)
        return value if isinstance(value, str) else default

    def inner(self, name: str) -> ConfigFields:
        """The fields of a nested object; none where it is missing."""
        value = self.data.get(name)
        return ConfigFields(value if isinstance(value, Mapping) else {}, f"{self.where}, {name}")

    def texts(self, name: str) -> list[str] | None:
        """A list of texts, or None where the field is missing."""
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise UsageError(f"{self.where}: `{name}` must be a list of texts; given {brief(value)}.")
        return list(value)

    def numbers(self, name: str) -> list[int] | None:
        """A list of whole numbers, or None where the field is missing."""
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)):
            raise UsageError(f"{self.where}: `{name}` must be a list of whole numbers; given {brief(value)}.")
        return [self._whole_number(name, item) for item in value]

    def period(self, *names: str, default: int) -> int:
        """After how many layers a pattern repeats: from 1 to `MOST_LAYERS`."""
        value = self.integer(*names, default=default)
        if not 1 <= value <= MOST_LAYERS:
            raise UsageError(f"{self.where}: `{names[0]}` must be from 1 to {MOST_LAYERS:,}; given {value:,}.")
        return value

    def layers(self) -> int:
        """Number of layers."""
        count = self.integer("num_hidden_layers", "n_layer", "n_layers", "num_layers")
        if not 1 <= count <= MOST_LAYERS:
            raise UsageError(f"{self.where}: `num_hidden_layers` must be from 1 to {MOST_LAYERS:,}; given {count:,}.")
        return count

    def mixers(self, pattern: str) -> str:
        """One letter per layer, from `layer_types`; where the config has none, `pattern` repeated."""
        layers = self.layers()
        named = self.texts("layer_types")
        if named is None:
            return (pattern * layers)[:layers]
        if len(named) != layers:
            raise UsageError(
                f"{self.where}: `layer_types` has {len(named)} entries and `num_hidden_layers` is {layers}; "
                "they must agree."
            )
        unknown = sorted(set(named) - set(_LAYER_TYPES))
        if unknown:
            raise UsageError(f"{self.where}: `layer_types` has {unknown[0]!r}; valid: {', '.join(_LAYER_TYPES)}.")
        return "".join(_LAYER_TYPES[name] for name in named)

    def head_dim(self, hidden: int, heads: int) -> int:
        """Channels of a head: `head_dim`, else the hidden width over the heads."""
        if self.has("head_dim"):
            return self.integer("head_dim")
        if not heads or hidden % heads:
            near = largest_divisor(hidden, max(heads, 1))
            raise UsageError(
                f"{self.where}: `num_attention_heads` must divide `hidden_size` {hidden} where there is no `head_dim`; "
                f"given {heads}, nearest {near}."
            )
        return hidden // heads


def _decoder(fields: ConfigFields, pattern: str = "A") -> ModelFields:
    """The fields that most decoders share; without a sliding window, layers W of `pattern` are full attention."""
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    window = fields.integer("sliding_window", default=0)
    mixers = fields.mixers(pattern)
    if not window:
        mixers = mixers.replace("W", "A")
    return {
        "mixers": mixers,
        "feeds": "D" * len(mixers),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": fields.integer("num_key_value_heads", default=heads),
        "head_dim": fields.head_dim(hidden, heads),
        "window": window if "W" in mixers else 0,
        "intermediate": fields.integer("intermediate_size", default=0),
        "vocabulary": fields.integer("vocab_size"),
        "tied": fields.flag("tie_word_embeddings", False),
        "qkv_bias": fields.flag("attention_bias", False),
        "output_bias": fields.flag("attention_bias", False),
        "feed_bias": fields.flag("mlp_bias", False),
    }


@config_reader("llama", "phi3", "mistral", "ministral")
def _llama(fields: ConfigFields) -> ModelFields:
    values = _decoder(fields, "W" if fields.text("model_type") != "llama" else "A")
    if fields.text("model_type") == "phi3":
        values |= {"qkv_bias": False, "output_bias": False}
    return values


@config_reader("qwen2")
def _qwen2(fields: ConfigFields) -> ModelFields:
    return _decoder(fields, _qwen_pattern(fields)) | {"qkv_bias": True, "output_bias": False}


@config_reader("qwen3")
def _qwen3(fields: ConfigFields) -> ModelFields:
    values = _decoder(fields, _qwen_pattern(fields))
    return values | {"qk_norm": 2 * values["head_dim"]}


def _qwen_pattern(fields: ConfigFields) -> str:
    return "W" if fields.flag("use_sliding_window", False) else "A"


@config_reader("qwen2_moe")
def _qwen2_moe(fields: ConfigFields) -> ModelFields:
    values = _qwen2(fields) | _experts(fields, "num_experts")
    return values | {"shared_intermediate": fields.integer("shared_expert_intermediate_size"), "shared_gate": True}


@config_reader("qwen3_moe")
def _qwen3_moe(fields: ConfigFields) -> ModelFields:
    values = _qwen3(fields) | _experts(fields, "num_experts")
    step, dense = fields.period("decoder_sparse_step", default=1), fields.numbers("mlp_only_layers") or []
    return values | {
        "feeds": "".join("D" if layer in dense or (layer + 1) % step else "E" for layer in range(len(values["mixers"])))
    }


@config_reader("mixtral")
def _mixtral(fields: ConfigFields) -> ModelFields:
    values = _decoder(fields, "W") | _experts(fields, "num_local_experts")
    return values | {"expert_intermediate": values["intermediate"], "intermediate": 0}


@config_reader("grok-1", "grok")
def _grok(fields: ConfigFields) -> ModelFields:
    values = _mixtral(fields)
    return values | {"norms_per_block": 2}


@config_reader("olmoe")
def _olmoe(fields: ConfigFields) -> ModelFields:
    values = _mixtral(fields) | {"experts": fields.integer("num_experts")}
    return values | {"qk_norm": (values["heads"] + values["kv_heads"]) * values["head_dim"]}


def _experts(fields: ConfigFields, *count: str) -> ModelFields:
    """Experts in every layer; the caller replaces `feeds` where some layers are dense."""
    return {
        "feeds": "E" * fields.layers(),
        "experts": fields.integer(*count, "num_experts", "num_local_experts"),
        "active_experts": fields.integer("num_experts_per_tok", "num_selected_experts", "experts_per_token"),
        "expert_intermediate": fields.integer("moe_intermediate_size", "intermediate_size"),
    }


@config_reader("gpt_oss")
def _gpt_oss(fields: ConfigFields) -> ModelFields:
    values = _decoder(fields, "WA") | _experts(fields, "num_local_experts")
    return values | {
        "intermediate": 0,
        "expert_bias": True,
        "router_bias": True,
        "sinks": True,
        "qkv_bias": fields.flag("attention_bias", True),
        "output_bias": fields.flag("attention_bias", True),
    }


@config_reader("gemma")
def _gemma(fields: ConfigFields) -> ModelFields:
    return _decoder(fields) | {"tied": fields.flag("tie_word_embeddings", True)}


@config_reader("gemma2")
def _gemma2(fields: ConfigFields) -> ModelFields:
    values = _decoder(fields, "WA")
    return values | {"tied": fields.flag("tie_word_embeddings", True), "norms_per_block": 2}


@config_reader("gemma3_text", "gemma3")
def _gemma3(fields: ConfigFields) -> ModelFields:
    period = fields.period("sliding_window_pattern", "_sliding_window_pattern", default=6)
    values = _decoder(fields, "W" * (period - 1) + "A")
    return values | {
        "tied": fields.flag("tie_word_embeddings", True),
        "norms_per_block": 2,
        "qk_norm": 2 * values["head_dim"],
    }


@config_reader("llama4_text", "llama4")
def _llama4(fields: ConfigFields) -> ModelFields:
    chunk = fields.integer("attention_chunk_size", default=0)
    values = _decoder(fields, "CCCA" if chunk else "A")
    layers, step = len(values["mixers"]), fields.period("interleave_moe_layer_step", default=1)
    listed = fields.numbers("moe_layers")
    sparse = set(listed) if listed is not None else set(range(step - 1, layers, step))
    expert = fields.integer("intermediate_size")
    return values | {
        "feeds": "".join("E" if layer in sparse else "D" for layer in range(layers)),
        "window": chunk,
        "intermediate": fields.integer("intermediate_size_mlp", "intermediate_size"),
        "experts": fields.integer("num_local_experts"),
        "active_experts": fields.integer("num_experts_per_tok"),
        "expert_intermediate": expert,
        "shared_intermediate": expert,
    }


@config_reader("deepseek_v2", "deepseek_v3", "kimi_k2")
def _deepseek(fields: ConfigFields) -> ModelFields:
    values = _latent(fields)
    layers = fields.layers()
    dense = fields.integer("first_k_dense_replace", default=0)
    every = fields.period("moe_layer_freq", default=1)
    expert = fields.integer("moe_intermediate_size")
    if dense > layers:
        raise UsageError(
            f"{fields.where}: `first_k_dense_replace` is {dense}, more than the {layers} layers; nearest {layers}."
        )
    return values | {
        "feeds": "".join("E" if layer >= dense and layer % every == 0 else "D" for layer in range(layers)),
        "intermediate": fields.integer("intermediate_size"),
        "experts": fields.integer("n_routed_experts"),
        "active_experts": fields.integer("num_experts_per_tok"),
        "expert_intermediate": expert,
        "shared_intermediate": fields.integer("n_shared_experts", default=0) * expert,
    }


def _latent(fields: ConfigFields) -> ModelFields:
    """Multi-head latent attention."""
    layers = fields.layers()
    rope = fields.integer("qk_rope_head_dim")
    bias = fields.flag("attention_bias", False)
    heads = fields.integer("num_attention_heads")
    return {
        "mixers": "A" * layers,
        "hidden": fields.integer("hidden_size"),
        "heads": heads,
        "kv_heads": heads,
        "head_dim": fields.integer("qk_nope_head_dim") + rope,
        "v_head_dim": fields.integer("v_head_dim"),
        "q_rank": fields.integer("q_lora_rank", default=0),
        "kv_rank": fields.integer("kv_lora_rank"),
        "rope_dim": rope,
        "vocabulary": fields.integer("vocab_size"),
        "tied": fields.flag("tie_word_embeddings", False),
        "qkv_bias": bias,
        "output_bias": bias,
    }


@config_reader("glm4_moe")
def _glm4_moe(fields: ConfigFields) -> ModelFields:
    values = _decoder(fields)
    dense, expert = fields.integer("first_k_dense_replace", default=0), fields.integer("moe_intermediate_size")
    layers = len(values["mixers"])
    return values | {
        "feeds": "D" * min(dense, layers) + "E" * max(0, layers - dense),
        "experts": fields.integer("n_routed_experts"),
        "active_experts": fields.integer("num_experts_per_tok"),
        "expert_intermediate": expert,
        "shared_intermediate": fields.integer("n_shared_experts", default=0) * expert,
        "output_bias": False,
        "qk_norm": 2 * values["head_dim"] if fields.flag("use_qk_norm", False) else 0,
    }


_HYBRID = {"M": ("M", "-"), "*": ("A", "-"), "-": ("-", "D"), "E": ("-", "E")}
_HYBRID_NAMES = {
    "mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E",
}  # fmt: skip


def _plain(
    fields: ConfigFields, hidden: int, heads: int, *, bias: bool = False, vocabulary: int | None = None
) -> ModelFields:
    """A transformer with LayerNorm and an ungated feed, and with or without biases: GPT-2 and its kin."""
    layers = fields.layers()
    return {
        "mixers": "A" * layers,
        "feeds": "D" * layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": fields.head_dim(hidden, heads),
        "gated": False,
        "feed_bias": bias,
        "qkv_bias": bias,
        "output_bias": bias,
        "norm_width": 2,
        "vocabulary": fields.integer("vocab_size") if vocabulary is None else vocabulary,
        "tied": fields.flag("tie_word_embeddings", False),
    }


@config_reader("gpt2")
def _gpt2(fields: ConfigFields) -> ModelFields:
    hidden, heads = fields.integer("n_embd", "hidden_size"), fields.integer("n_head", "num_attention_heads")
    return _plain(fields, hidden, heads, bias=True) | {
        "intermediate": fields.integer("n_inner", default=4 * hidden),
        "positions": fields.integer("n_positions", "n_ctx", "max_position_embeddings"),
        "tied": fields.flag("tie_word_embeddings", True),
    }


@config_reader("gpt_neox")
def _gpt_neox(fields: ConfigFields) -> ModelFields:
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    values = _plain(fields, hidden, heads, bias=fields.flag("attention_bias", True))
    return values | {"intermediate": fields.integer("intermediate_size"), "feed_bias": True}


@config_reader("opt")
def _opt(fields: ConfigFields) -> ModelFields:
    values = _gpt_neox(ConfigFields({"intermediate_size": fields.integer("ffn_dim"), **fields.data}, fields.where))
    hidden = values["hidden"]
    if fields.integer("word_embed_proj_dim", default=hidden) != hidden:
        raise UsageError(
            f"{fields.where}: a `word_embed_proj_dim` other than `hidden_size` is not supported; nearest {hidden}."
        )
    bias = fields.flag("enable_bias", True)
    return values | {
        "feed_bias": bias,
        "qkv_bias": bias,
        "output_bias": bias,
        "positions": fields.integer("max_position_embeddings") + 2,  # the first two rows are for padding
        "tied": fields.flag("tie_word_embeddings", True),
    }


@config_reader("mpt")
def _mpt(fields: ConfigFields) -> ModelFields:
    hidden, heads = fields.integer("d_model"), fields.integer("n_heads")
    attention = fields.inner("attn_config")
    return _plain(fields, hidden, heads) | {
        "kv_heads": attention.integer("kv_n_heads", default=heads),
        "intermediate": fields.integer("expansion_ratio", default=4) * hidden,
        "norm_width": 1,
        "positions": 0 if attention.flag("alibi", True) else fields.integer("max_seq_len"),
        "tied": True,
    }


@config_reader("nemotron")
def _nemotron(fields: ConfigFields) -> ModelFields:
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    return _plain(fields, hidden, heads, bias=fields.flag("attention_bias", False)) | {
        "kv_heads": fields.integer("num_key_value_heads", default=heads),
        "intermediate": fields.integer("intermediate_size"),
        "feed_bias": fields.flag("mlp_bias", False),
    }


@config_reader("nemotron_h")
def _nemotron_h(fields: ConfigFields) -> ModelFields:
    named = fields.texts("layers_block_type")
    pattern = (
        "".join(_HYBRID_NAMES.get(name, "?") for name in named) if named else fields.text("hybrid_override_pattern")
    )
    unknown = sorted(set(pattern) - set(_HYBRID))
    if not pattern or unknown:
        raise UsageError(
            f"{fields.where}: `hybrid_override_pattern` must be made of {', '.join(_HYBRID)}; given {pattern!r}."
        )
    values: ModelFields = {
        "mixers": "".join(_HYBRID[letter][0] for letter in pattern),
        "feeds": "".join(_HYBRID[letter][1] for letter in pattern),
        "hidden": fields.integer("hidden_size"),
        "heads": fields.integer("num_attention_heads"),
        "kv_heads": fields.integer("num_key_value_heads"),
        "head_dim": fields.integer("head_dim", "attention_head_dim"),
        "intermediate": fields.integer("intermediate_size", default=0),
        "gated": False,
        "vocabulary": fields.integer("vocab_size"),
        "tied": fields.flag("tie_word_embeddings", False),
        "ssm_heads": fields.integer("mamba_num_heads"),
        "ssm_head_dim": fields.integer("mamba_head_dim"),
        "ssm_state": fields.integer("ssm_state_size"),
        "ssm_groups": fields.integer("n_groups", "mamba_n_groups"),
        "ssm_kernel": fields.integer("conv_kernel", default=4),
        "predictions": fields.integer("num_nextn_predict_layers", default=0),
    }
    if "E" in pattern:
        values |= {
            "experts": fields.integer("n_routed_experts"),
            "active_experts": fields.integer("num_experts_per_tok"),
            "expert_intermediate": fields.integer("moe_intermediate_size"),
            "shared_intermediate": fields.integer("moe_shared_expert_intermediate_size", default=0)
            if fields.integer("n_shared_experts", default=1)
            else 0,
            "latent": fields.integer("moe_latent_size", default=0),
        }
    return values


@config_reader("dbrx")
def _dbrx(fields: ConfigFields) -> ModelFields:
    hidden, heads = fields.integer("d_model"), fields.integer("n_heads")
    attention, feed = fields.inner("attn_config"), fields.inner("ffn_config")
    return _plain(fields, hidden, heads) | {
        "feeds": "E" * fields.layers(),
        "kv_heads": attention.integer("kv_n_heads", default=heads),
        "gated": True,
        "norm_width": 1,
        "experts": feed.integer("moe_num_experts"),
        "active_experts": feed.integer("moe_top_k"),
        "expert_intermediate": feed.integer("ffn_hidden_size"),
    }


@config_reader("vit")
def _vit(fields: ConfigFields) -> ModelFields:
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    image, patch = fields.integer("image_size"), fields.integer("patch_size")
    if not patch or image % patch:
        near = largest_divisor(image, max(patch, 1))
        raise UsageError(
            f"{fields.where}: `patch_size` must divide `image_size` {image}; given {patch}, nearest {near}."
        )
    tokens = (image // patch) ** 2 + 1
    classes = fields.integer("num_labels", default=1000)
    return _plain(fields, hidden, heads, bias=True, vocabulary=classes) | {
        "intermediate": fields.integer("intermediate_size"),
        "qkv_bias": fields.flag("qkv_bias", True),
        "tied": False,
        "output_layer_bias": True,
        "positions": tokens,
        "causal": False,
        "patch_values": fields.integer("num_channels", default=3) * patch * patch,
        "image_tokens": tokens,
    }
