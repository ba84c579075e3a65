"""Shapes, parameter counts and FLOPs of models: what transformers builds, what nearpeak traces."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from nearpeak.errors import UsageError
from nearpeak.plan.models.catalogue import catalogue_entries, catalogue_names, get_model
from nearpeak.plan.models.config import from_config
from nearpeak.plan.models.model import count_parameters, forward_flops, keys_seen, kv_bytes_per_token

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
}

BUILT = {
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
    "gemma-2-9b": 9_241_705_984,
    "phi-4": 14_659_507_200,
    "deepseek-v3": 671_026_404_352,
    "gpt-oss-120b": 116_829_156_672,
    "kimi-k2": 1_026_408_209_408,
    "vit-b-16": 86_567_656,
}
"""What transformers builds from the full configs, as `python -m benchmarks.plan.models` prints it."""


@pytest.mark.parametrize("name", BUILT)
def test_parameters_of_whole_models(name: str) -> None:
    assert get_model(name).parameters == BUILT[name]


def test_the_catalogue_has_the_families_that_people_ask_for() -> None:
    assert len(catalogue_names()) >= 40
    for family in "llama-2 llama-3 llama-4 qwen2.5 qwen3 mistral mixtral gemma phi gpt-3 mpt deepseek gpt-oss".split():
        assert any(name.startswith(family) for name in catalogue_names()), family
    assert all(entry.source.startswith("https://") for entry in catalogue_entries().values())


def test_active_parameters_leave_out_the_experts_that_a_token_does_not_visit() -> None:
    mixtral = get_model("mixtral-8x7b")
    counts = count_parameters(mixtral)
    assert counts.total - counts.active == 32 * 6 * counts.expert
    assert get_model("deepseek-v3").active_parameters == pytest.approx(37e9, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama-3.2-1b", "gemma-3-1b", "gpt-2-xl", "qwen3-30b-a3b", "deepseek-v2-lite", "vit-b-16"]
)
def test_parameters_are_those_that_transformers_builds(name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = dict(catalogue_entries()[name].config)
    for field in ("num_hidden_layers", "n_layer"):
        if field in config:
            config[field] = 6
    config.pop("sliding_window_pattern", None)
    planned = from_config(config).parameters
    settings = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    build = transformers.AutoModelForCausalLM.from_config
    if name.startswith("vit"):
        build = transformers.ViTForImageClassification
    with torch.device("meta"):
        built = build(settings)
    assert planned == sum(parameter.numel() for parameter in built.parameters())


def test_flops_are_two_per_weight_and_the_unmasked_half_of_attention() -> None:
    llama = from_config(TINY)
    counts = count_parameters(llama)
    weights = 2 * (counts.attention + counts.dense) + counts.output
    flops = forward_flops(llama, 10)
    assert flops.gemm == 2 * weights
    assert flops.scores == 2 * 2 * 2 * 4 * 16 * 5.5
    assert flops.training == 3 * flops.total


def test_flops_equal_those_of_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    import nearpeak

    # under fake tensors transformers cannot see that no sequences are packed, and builds a mask in place of the flag
    monkeypatch.setattr(transformers.masking_utils, "find_packed_sequence_indices", lambda *_: None)

    with nearpeak.fake():
        built = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**TINY)).to(torch.bfloat16)
        tokens = torch.zeros(3, 40, dtype=torch.long)
    found = nearpeak.estimate(lambda: built(input_ids=tokens, use_cache=False), on="h200-sxm")
    traced = sum(op.flops for op in found.ops if op.family in ("matrix", "attention"))
    assert 120 * forward_flops(from_config(TINY), 40).total == pytest.approx(traced, rel=1e-3)


def test_a_window_and_a_chunk_bound_what_a_token_sees() -> None:
    mistral = get_model("mistral-7b")
    assert keys_seen(mistral, "W", 4096) == 4097 / 2
    assert keys_seen(mistral, "W", 65536) == pytest.approx(4096, rel=0.04)
    scout = get_model("llama-4-scout")
    assert keys_seen(scout, "C", 16384) == 8193 / 2
    assert keys_seen(scout, "A", 16384) == 16385 / 2


def test_latent_attention_caches_one_vector_per_token() -> None:
    assert kv_bytes_per_token(get_model("deepseek-v3")) == 61 * (512 + 64) * 2
    assert kv_bytes_per_token(get_model("llama-3-8b")) == 32 * 2 * 8 * 128 * 2
    oss = get_model("gpt-oss-120b")
    assert kv_bytes_per_token(oss, layers="A") == kv_bytes_per_token(oss, layers="W") == kv_bytes_per_token(oss) / 2


def test_a_config_is_read_from_a_file_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert dataclasses.replace(from_config(tmp_path), name="", source="") == dataclasses.replace(
        from_config(TINY), name="", source=""
    )
    wrapped = {"model_type": "llava", "text_config": TINY}
    assert from_config(wrapped).parameters == from_config(TINY).parameters


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "lama"}, ["'lama'", "'llama'"]),
        ({"model_type": None}, ["model_type"]),
        ({"hidden_size": None}, ["hidden_size"]),
        ({"num_hidden_layers": -1}, ["num_hidden_layers", "-1"]),
        ({"num_attention_heads": 5}, ["num_attention_heads", "5", "nearest 4"]),
        ({"num_key_value_heads": 3}, ["kv_heads", "3", "nearest 2"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "1", "2"]),
        ({"vocab_size": "many"}, ["vocab_size", "'many'"]),
    ],
)
def test_a_bad_config_is_an_error_that_names_the_field(change: dict[str, object], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        from_config({**TINY, **change})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_more_active_experts_than_experts_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"active_experts.*nearest 8"):
        from_config({**catalogue_entries()["mixtral-8x7b"].config, "num_experts_per_tok": 9})


def test_an_unknown_name_is_an_error_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="llama-3-8b"):
        get_model("llama3-8b")


def test_heads_without_keys_and_rotary_channels_beyond_a_head_are_errors() -> None:
    hybrid = {"model_type": "nemotron_h", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 0}
    hybrid |= {"head_dim": 16, "hybrid_override_pattern": "M-M-", "intermediate_size": 128, "vocab_size": 100}
    hybrid |= {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2}
    with pytest.raises(UsageError, match=r"`kv_heads` must divide the 4 heads; given 0, nearest 1"):
        from_config(hybrid)
    with pytest.raises(UsageError, match=r"`rope_dim` is 64, more than the 32 channels .* nearest 32"):
        dataclasses.replace(get_model("deepseek-v3"), head_dim=32)
