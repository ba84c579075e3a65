"""How each family of models writes its shape in a Hugging Face config: one function per layout of fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nearpeak.errors import UsageError
from nearpeak.plan.models.config_fields import Fields

Values = dict[str, Any]
FAMILIES: dict[str, Callable[[Fields], Values]] = {}
"""The function for each `model_type`."""


def family(*kinds: str) -> Callable[[Callable[[Fields], Values]], Callable[[Fields], Values]]:
    def register(function: Callable[[Fields], Values]) -> Callable[[Fields], Values]:
        for kind in kinds:
            assert kind not in FAMILIES, kind
            FAMILIES[kind] = function
        return function

    return register


def _decoder(fields: Fields, pattern: str = "A") -> Values:
    """The fields that most decoders share; a window that is given makes every layer of `pattern` W a windowed one."""
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


@family("llama", "phi3", "mistral", "ministral")
def _llama(fields: Fields) -> Values:
    values = _decoder(fields, "W" if fields.text("model_type") != "llama" else "A")
    if fields.text("model_type") == "phi3":
        values |= {"qkv_bias": False, "output_bias": False}
    return values


@family("qwen2")
def _qwen2(fields: Fields) -> Values:
    return _decoder(fields, _qwen_pattern(fields)) | {"qkv_bias": True, "output_bias": False}


@family("qwen3")
def _qwen3(fields: Fields) -> Values:
    values = _decoder(fields, _qwen_pattern(fields))
    return values | {"qk_norm": 2 * values["head_dim"]}


def _qwen_pattern(fields: Fields) -> str:
    return "W" if fields.flag("use_sliding_window", False) else "A"


@family("qwen2_moe")
def _qwen2_moe(fields: Fields) -> Values:
    values = _qwen2(fields) | _experts(fields, "num_experts")
    return values | {"shared_intermediate": fields.integer("shared_expert_intermediate_size"), "shared_gate": True}


@family("qwen3_moe")
def _qwen3_moe(fields: Fields) -> Values:
    values = _qwen3(fields) | _experts(fields, "num_experts")
    step, dense = fields.integer("decoder_sparse_step", default=1), fields.numbers("mlp_only_layers") or []
    return values | {
        "feeds": "".join("D" if layer in dense or (layer + 1) % step else "E" for layer in range(len(values["mixers"])))
    }


@family("mixtral")
def _mixtral(fields: Fields) -> Values:
    values = _decoder(fields, "W") | _experts(fields, "num_local_experts")
    return values | {"expert_intermediate": values["intermediate"], "intermediate": 0}


@family("grok-1", "grok")
def _grok(fields: Fields) -> Values:
    values = _mixtral(fields)
    return values | {"norms_per_block": 2}


@family("olmoe")
def _olmoe(fields: Fields) -> Values:
    values = _mixtral(fields) | {"experts": fields.integer("num_experts")}
    return values | {"qk_norm": (values["heads"] + values["kv_heads"]) * values["head_dim"]}


def _experts(fields: Fields, *count: str) -> Values:
    """Experts in every layer; the caller says otherwise where some layers are dense."""
    return {
        "feeds": "E" * fields.layers(),
        "experts": fields.integer(*count, "num_experts", "num_local_experts"),
        "active_experts": fields.integer("num_experts_per_tok", "num_selected_experts", "experts_per_token"),
        "expert_intermediate": fields.integer("moe_intermediate_size", "intermediate_size"),
    }


@family("gpt_oss")
def _gpt_oss(fields: Fields) -> Values:
    values = _decoder(fields, "WA") | _experts(fields, "num_local_experts")
    return values | {
        "intermediate": 0,
        "expert_bias": True,
        "router_bias": True,
        "sinks": True,
        "qkv_bias": fields.flag("attention_bias", True),
        "output_bias": fields.flag("attention_bias", True),
    }


@family("gemma")
def _gemma(fields: Fields) -> Values:
    return _decoder(fields) | {"tied": fields.flag("tie_word_embeddings", True)}


@family("gemma2")
def _gemma2(fields: Fields) -> Values:
    values = _decoder(fields, "WA")
    return values | {"tied": fields.flag("tie_word_embeddings", True), "norms_per_block": 2}


@family("gemma3_text", "gemma3")
def _gemma3(fields: Fields) -> Values:
    period = fields.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
    values = _decoder(fields, "W" * (period - 1) + "A")
    return values | {
        "tied": fields.flag("tie_word_embeddings", True),
        "norms_per_block": 2,
        "qk_norm": 2 * values["head_dim"],
    }


@family("llama4_text", "llama4")
def _llama4(fields: Fields) -> Values:
    chunk = fields.integer("attention_chunk_size", default=0)
    values = _decoder(fields, "CCCA" if chunk else "A")
    layers, step = len(values["mixers"]), fields.integer("interleave_moe_layer_step", default=1)
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


@family("deepseek_v2", "deepseek_v3", "kimi_k2")
def _deepseek(fields: Fields) -> Values:
    values = _latent(fields)
    layers = fields.layers()
    dense = fields.integer("first_k_dense_replace", default=0)
    every = fields.integer("moe_layer_freq", default=1)
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


def _latent(fields: Fields) -> Values:
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


@family("glm4_moe")
def _glm4_moe(fields: Fields) -> Values:
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
