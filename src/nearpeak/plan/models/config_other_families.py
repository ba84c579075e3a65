"""Families whose configs do not follow the usual decoder: GPT-2's and its kin, hybrids, vision transformers."""

from __future__ import annotations

from nearpeak.errors import UsageError
from nearpeak.plan.models.config_families import Values, family
from nearpeak.plan.models.config_fields import Fields

_HYBRID = {"M": ("M", "-"), "*": ("A", "-"), "-": ("-", "D"), "E": ("-", "E")}
_HYBRID_NAMES = {
    "mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E",
}  # fmt: skip


@family("gpt2")
def _gpt2(fields: Fields) -> Values:
    hidden, heads = fields.integer("n_embd", "hidden_size"), fields.integer("n_head", "num_attention_heads")
    layers = fields.layers()
    return {
        "mixers": "A" * layers,
        "feeds": "D" * layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": fields.head_dim(hidden, heads),
        "intermediate": fields.integer("n_inner", default=4 * hidden),
        "gated": False,
        "feed_bias": True,
        "qkv_bias": True,
        "output_bias": True,
        "norm_width": 2,
        "vocabulary": fields.integer("vocab_size"),
        "positions": fields.integer("n_positions", "n_ctx", "max_position_embeddings"),
        "tied": fields.flag("tie_word_embeddings", True),
    }


@family("gpt_neox")
def _gpt_neox(fields: Fields) -> Values:
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    layers, bias = fields.layers(), fields.flag("attention_bias", True)
    return {
        "mixers": "A" * layers,
        "feeds": "D" * layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": fields.head_dim(hidden, heads),
        "intermediate": fields.integer("intermediate_size"),
        "gated": False,
        "feed_bias": True,
        "qkv_bias": bias,
        "output_bias": bias,
        "norm_width": 2,
        "vocabulary": fields.integer("vocab_size"),
        "tied": fields.flag("tie_word_embeddings", False),
    }


@family("opt")
def _opt(fields: Fields) -> Values:
    values = _gpt_neox(Fields({"intermediate_size": fields.integer("ffn_dim"), **fields.data}, fields.where))
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


@family("mpt")
def _mpt(fields: Fields) -> Values:
    hidden, heads = fields.integer("d_model"), fields.integer("n_heads")
    layers, attention = fields.layers(), fields.inner("attn_config")
    positions = 0 if attention.flag("alibi", True) else fields.integer("max_seq_len")
    return {
        "mixers": "A" * layers,
        "feeds": "D" * layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": attention.integer("kv_n_heads", default=heads),
        "head_dim": fields.head_dim(hidden, heads),
        "intermediate": fields.integer("expansion_ratio", default=4) * hidden,
        "gated": False,
        "vocabulary": fields.integer("vocab_size"),
        "positions": positions,
        "tied": True,
    }


@family("nemotron")
def _nemotron(fields: Fields) -> Values:
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    layers, bias = fields.layers(), fields.flag("attention_bias", False)
    return {
        "mixers": "A" * layers,
        "feeds": "D" * layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": fields.integer("num_key_value_heads", default=heads),
        "head_dim": fields.head_dim(hidden, heads),
        "intermediate": fields.integer("intermediate_size"),
        "gated": False,
        "feed_bias": fields.flag("mlp_bias", False),
        "qkv_bias": bias,
        "output_bias": bias,
        "norm_width": 2,
        "vocabulary": fields.integer("vocab_size"),
        "tied": fields.flag("tie_word_embeddings", False),
    }


@family("nemotron_h")
def _nemotron_h(fields: Fields) -> Values:
    named = fields.texts("layers_block_type")
    pattern = (
        "".join(_HYBRID_NAMES.get(name, "?") for name in named) if named else fields.text("hybrid_override_pattern")
    )
    unknown = sorted(set(pattern) - set(_HYBRID))
    if not pattern or unknown:
        raise UsageError(
            f"{fields.where}: `hybrid_override_pattern` must be made of {', '.join(_HYBRID)}; given {pattern!r}."
        )
    values: Values = {
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


@family("dbrx")
def _dbrx(fields: Fields) -> Values:
    hidden, heads, layers = fields.integer("d_model"), fields.integer("n_heads"), fields.layers()
    attention, feed = fields.inner("attn_config"), fields.inner("ffn_config")
    return {
        "mixers": "A" * layers,
        "feeds": "E" * layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": attention.integer("kv_n_heads", default=heads),
        "head_dim": fields.head_dim(hidden, heads),
        "experts": feed.integer("moe_num_experts"),
        "active_experts": feed.integer("moe_top_k"),
        "expert_intermediate": feed.integer("ffn_hidden_size"),
        "vocabulary": fields.integer("vocab_size"),
        "tied": fields.flag("tie_word_embeddings", False),
    }


@family("vit")
def _vit(fields: Fields) -> Values:
    hidden, heads, layers = fields.integer("hidden_size"), fields.integer("num_attention_heads"), fields.layers()
    image, patch = fields.integer("image_size"), fields.integer("patch_size")
    if not patch or image % patch:
        near = max((n for n in range(1, image + 1) if image % n == 0 and n <= max(patch, 1)), default=1)
        raise UsageError(
            f"{fields.where}: `patch_size` must divide `image_size` {image}; given {patch}, nearest {near}."
        )
    tokens = (image // patch) ** 2 + 1
    bias = fields.flag("qkv_bias", True)
    return {
        "mixers": "A" * layers,
        "feeds": "D" * layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": fields.head_dim(hidden, heads),
        "intermediate": fields.integer("intermediate_size"),
        "gated": False,
        "feed_bias": True,
        "qkv_bias": bias,
        "output_bias": True,
        "norm_width": 2,
        "vocabulary": fields.integer("num_labels", default=1000),
        "output_layer_bias": True,
        "positions": tokens,
        "causal": False,
        "patch_values": fields.integer("num_channels", default=3) * patch * patch,
        "image_tokens": tokens,
    }
