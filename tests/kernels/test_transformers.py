"""Models of transformers with the attention of this package, beside their own."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch

from nearpeak import kernels
from nearpeak.errors import UsageError
from nearpeak.kernels import transformers as kernels_transformers
from nearpeak.kernels.transformers import Pattern, PatternMask, make_mask

pytest.importorskip("triton")
transformers = pytest.importorskip("transformers", minversion="5.17")
masking = pytest.importorskip("transformers.masking_utils")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 4},
    "Gemma2": {"sliding_window": 4, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 16},
    "GptOss": {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1},
}
TOKENS = 9
OTHER_KINDS = ("padded", "static")


@pytest.fixture(autouse=True)
def registered() -> Any:
    kernels.register_transformers()
    torch.manual_seed(0)
    with kernels.using("require"):  # a reference that runs in place of a kernel is an error
        yield
    torch.compiler.reset()


def build_model(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **MODELS[name], **more})
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(DEVICE, dtype).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model


def logits(model: Any, implementation: str, **inputs: Any) -> torch.Tensor:
    model.set_attn_implementation(implementation)
    actual: torch.Tensor = model(**inputs, use_cache=False).logits
    return actual


def tokens(batch: int = 2, count: int = TOKENS) -> torch.Tensor:
    return torch.randint(1, SMALL["vocab_size"], (batch, count), device=DEVICE)


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Two sequences, of which one has three tokens of padding."""
    ids, mask = tokens(), torch.ones(2, TOKENS, dtype=torch.int64, device=DEVICE)
    place = slice(0, 3) if side == "left" else slice(-3, None)
    ids[1, place], mask[1, place] = 0, 0
    return ids, mask


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_eager(name):
    model, ids = build_model(name), tokens()
    with torch.no_grad():
        expected, actual = (logits(model, one, input_ids=ids) for one in ("eager", "nearpeak"))
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    assert expected.std() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name, side", [*((name, "left") for name in MODELS), ("Llama", "right"), ("GptOss", "right")])
def test_a_padded_batch(name, side, monkeypatch):
    model = build_model(name)
    ids, mask = padded(side)
    with torch.no_grad():
        expected = logits(model, "eager", input_ids=ids, attention_mask=mask)
        monkeypatch.setattr(masking, "sdpa_mask", lambda **rest: pytest.fail("a mask was materialized"))
        actual = logits(model, "nearpeak", input_ids=ids, attention_mask=mask)
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], atol=1e-4, rtol=1e-4)
    assert actual.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss"])
def test_gradients_are_those_of_eager(name):
    model = build_model(name)
    ids, mask = padded("right")
    actual = []
    for implementation in ("eager", "nearpeak"):
        model.zero_grad()
        result = logits(model, implementation, input_ids=ids, attention_mask=mask)
        torch.nn.functional.cross_entropy(result[mask.bool()], ids[mask.bool()]).backward()
        actual.append({key: one.grad.clone() for key, one in model.named_parameters() if one.grad is not None})
    assert actual[0].keys() == actual[1].keys()
    for key, expected in actual[0].items():
        torch.testing.assert_close(actual[1][key], expected, atol=1e-5, rtol=1e-3, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, kind",
    [*((name, "plain") for name in MODELS), *((name, kind) for name in ("Llama", "GptOss") for kind in OTHER_KINDS)],
)
def test_generated_tokens_are_those_of_eager(name, kind, monkeypatch):
    model = build_model(name)
    ids, mask = padded("left") if kind == "padded" else (tokens(), torch.ones(2, TOKENS, device=DEVICE).long())
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "disable_compile": True, "eos_token_id": None}
    if kind == "static":
        options["cache_implementation"] = "static"
    decoded = []
    original = kernels_transformers.decode_attention
    monkeypatch.setattr(
        kernels_transformers, "decode_attention", lambda *a, **k: decoded.append(1) or original(*a, **k)
    )
    actual = []
    for implementation in ("eager", "nearpeak"):
        model.set_attn_implementation(implementation)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of transformers about its own caches
            actual.append(model.generate(ids, attention_mask=mask, **options))
    assert torch.equal(*actual)
    if kind == "plain":
        assert len(decoded) == 2 * (options["max_new_tokens"] - 1)
    elif name == "Llama":
        assert not decoded  # it has a mask


def test_a_prompt_in_two_parts():
    """The second part comes behind keys that are there: its diagonal is at the bottom right."""
    for name in ("Llama", "Gemma2"):
        model, ids = build_model(name), tokens()
        actual = []
        for implementation in ("eager", "nearpeak"):
            model.set_attn_implementation(implementation)
            with torch.no_grad():
                cache = model(ids[:, :6], use_cache=True).past_key_values
                actual.append(model(ids[:, 6:], past_key_values=cache, use_cache=True).logits)
        torch.testing.assert_close(actual[1], actual[0], atol=1e-4, rtol=1e-4)


def test_packed_sequences():
    """By positions that start anew, and by where sequences start."""
    model, ids = build_model("Llama"), tokens(1)
    positions = torch.tensor([[*range(4), *range(5)]], device=DEVICE)
    starts = torch.tensor([0, 4, 9], dtype=torch.int32, device=DEVICE)
    given = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 5, "max_length_k": 5}
    with torch.no_grad():
        expected, actual = (logits(model, one, input_ids=ids, position_ids=positions) for one in ("eager", "nearpeak"))
        by_starts = logits(model, "nearpeak", input_ids=ids, position_ids=positions, **given)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(by_starts, expected, atol=1e-4, rtol=1e-4)


def test_masks_of_the_users_own():
    model, ids = build_model("Llama"), tokens()
    seen = torch.rand(2, 1, TOKENS, TOKENS, device=DEVICE) < 0.7
    seen |= torch.eye(TOKENS, dtype=torch.bool, device=DEVICE)
    added = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = logits(model, "eager", input_ids=ids, attention_mask=added)
        for mask in (seen, added):
            actual = logits(model, "nearpeak", input_ids=ids, attention_mask=mask)
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_an_encoder():
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48
    )
    model = transformers.BertModel(config, add_pooling_layer=False).to(DEVICE).eval()
    ids, mask = padded("right")
    actual = []
    with torch.no_grad():
        for implementation in ("eager", "nearpeak"):
            model.set_attn_implementation(implementation)
            actual.append(
                [model(ids).last_hidden_state, model(ids, attention_mask=mask).last_hidden_state[mask.bool()]]
            )
    torch.testing.assert_close(actual[1], actual[0], atol=1e-4, rtol=1e-4)


def test_dropout_in_training_alone():
    model, ids = build_model("Llama", attention_dropout=0.5), tokens()
    with torch.no_grad():
        calm = logits(model, "nearpeak", input_ids=ids)
        assert torch.equal(logits(model, "nearpeak", input_ids=ids), calm)
        assert not torch.equal(logits(model.train(), "nearpeak", input_ids=ids), calm)


@pytest.mark.slow
def test_it_compiles_without_a_graph_break():
    model, ids = build_model("Gemma2"), tokens()
    model.set_attn_implementation("nearpeak")
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        compiled = torch.compile(lambda x: model(x, use_cache=False).logits, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(ids), expected, atol=1e-4, rtol=1e-4)


# masks


def causal(queries: int, keys: int, **more: Any) -> Any:
    given = {"batch_size": 2, "q_length": queries, "kv_length": keys, "device": torch.device(DEVICE), "q_offset": 0}
    return make_mask(masking, **{**given, "mask_function": masking.causal_mask_function, **more})


def test_patterns_of_mask_functions():
    window = masking.sliding_window_causal_mask_function(3)
    chunks = masking.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64, device=DEVICE))
    assert causal(8, 8) is None
    assert causal(8, 8, mask_function=masking.sliding_window_causal_mask_function(8), local_size=8) is None
    assert causal(8, 8, mask_function=window).pattern == Pattern(causal=True, left=2)
    assert causal(4, 8, mask_function=window, q_offset=4).pattern == Pattern(causal=True, left=2)
    assert causal(4, 8).pattern == Pattern(causal=True, bottom_right=False)
    assert causal(4, 8, q_offset=4).pattern == Pattern(causal=True)
    assert causal(4, 12, q_offset=4).pattern is None  # a cache with room for more
    assert causal(8, 8, mask_function=chunks).pattern is None
    assert causal(8, 8, mask_function=masking.or_masks(window, chunks)).pattern is None
    assert causal(8, 8, mask_function=masking.and_masks(window, masking.causal_mask_function)).pattern is None
    full = causal(8, 8, mask_function=masking.bidirectional_mask_function)
    assert full.pattern == Pattern(causal=False)
    assert causal(1, 8, q_offset=7) is None
    assert causal(1, 8, q_offset=7, mask_function=window).pattern == Pattern(causal=True, left=2)
    one = causal(1, 8, q_offset=5, mask_function=window, local_size=3)  # with room for more
    assert not isinstance(one, PatternMask)
    assert one[0, 0, 0].tolist() == [False] * 3 + [True] * 3 + [False] * 2
    padding = torch.tensor([[True] * 8, [False] + [True] * 7], device=DEVICE)
    one = causal(1, 8, q_offset=7, attention_mask=padding)
    assert torch.equal(one[:, 0, 0], padding)


def test_a_mask_is_materialized_when_an_op_reads_it():
    padding = torch.ones(2, 8, dtype=torch.bool, device=DEVICE)
    assert causal(8, 8, attention_mask=padding) is None
    padding[0, :2] = False
    mask = causal(8, 8, attention_mask=padding)
    assert isinstance(mask, PatternMask)
    assert mask.shape == (2, 1, 8, 8)
    assert torch.equal(mask.padding, padding)
    expected = torch.ones(8, 8, dtype=torch.bool, device=DEVICE).tril() & padding[:, None, None]
    assert type(mask[:, :, 1:]) is torch.Tensor
    assert torch.equal(mask[:, :, 1:], expected[:, :, 1:])
    assert torch.equal(mask & True, expected)
    assert torch.where(mask, 0.0, 1.0).sum() == (~expected).sum()
    assert mask.materialize() is mask.materialize()
    assert "padding=True" in repr(mask)


def test_unsupported_options_raise(monkeypatch):
    query = torch.randn(1, 1, 4, 16, device=DEVICE)
    layer = torch.nn.Module()
    with pytest.raises(UsageError, match="no weights to return"):
        kernels_transformers.attention_forward(layer, query, query, query, None, output_attentions=True)
    with pytest.raises(UsageError, match="no continuous batching"):
        kernels_transformers.attention_forward(layer, query, query, query, None, cache=object())
    monkeypatch.setattr(masking, "sdpa_mask", lambda batch_size, cache_position: None)
    with pytest.raises(UsageError, match=r"5\.17 or newer: masks of .* do not know the position"):
        kernels.register_transformers()
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    with pytest.raises(UsageError, match=r"5\.17 or newer: .* no attribute"):
        kernels.register_transformers()


@pytest.mark.parametrize("mask", [None, "booleans", "numbers"])
def test_a_bias_by_position(mask):
    query, key, value = torch.randn(3, 1, 2, 6, 16, device=DEVICE).unbind(0)
    bias = torch.randn(1, 2, 6, 6, device=DEVICE)
    seen = torch.ones(6, 6, dtype=torch.bool, device=DEVICE).tril()
    given = {None: None, "booleans": seen[None, None], "numbers": torch.where(seen, 0.0, -1e30)[None, None]}[mask]
    layer = torch.nn.Module()
    layer.is_causal = True  # type: ignore[assignment]
    actual, _ = kernels_transformers.attention_forward(layer, query, key, value, given, position_bias=bias)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, bias.masked_fill(~seen, -torch.inf))
    torch.testing.assert_close(actual, expected.transpose(1, 2), atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_at_the_size_of_a_model(name):
    more = {"hidden_size": 512, "head_dim": 64, "num_attention_heads": 8, "max_position_embeddings": 2048}
    model = build_model(
        name, torch.bfloat16, **more, **({"sliding_window": 412} if "sliding_window" in MODELS[name] else {})
    )
    ids = tokens(2, 2048)
    with torch.no_grad():
        expected, actual = (logits(model, one, input_ids=ids) for one in ("eager", "nearpeak"))
        exact = logits(model.float(), "eager", input_ids=ids)
    error, allowed = ((one.float() - exact).abs().max() for one in (actual, expected))
    assert error <= 2 * allowed
