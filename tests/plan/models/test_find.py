import json

import pytest

from nearpeak.errors import UsageError
from nearpeak.plan.models.catalogue import get_model
from nearpeak.plan.models.find import NUMBERS, find_model, from_numbers, size_in_name


def test_a_name_a_path_and_a_dict_are_the_same_model(tmp_path):
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 100,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert find_model(path).parameters == find_model(str(path)).parameters == find_model(config).parameters
    assert find_model("llama-3-8b") is get_model("llama-3-8b")
    assert find_model(get_model("llama-3-8b")) is get_model("llama-3-8b")


def test_numbers_give_the_weights_of_the_model_that_they_describe():
    assert from_numbers(NUMBERS).parameters == get_model("llama-3-8b").parameters
    spaced = "layers=32 hidden=4k heads=32 kv_heads=8 intermediate=14336 vocabulary=128256"
    assert from_numbers(spaced).parameters == get_model("llama-3-8b").parameters


def test_numbers_with_experts():
    mixtral = from_numbers(
        "layers=32,hidden=4096,heads=32,kv_heads=8,vocabulary=32000,experts=8,active_experts=2,expert_intermediate=14336"
    )
    assert mixtral.parameters == get_model("mixtral-8x7b").parameters
    assert mixtral.active_parameters == get_model("mixtral-8x7b").active_parameters


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lama-3-8b", "Did you mean 'llama-3-8b'"),
        ("layers=2,hiden=64", "Did you mean 'hidden'"),
        ("layers=2,hidden=64,heads=4", "needs vocabulary"),
        ("layers=2,hidden=65,heads=4,vocabulary=10", "Nearest: heads=5"),
        ("layers=0,hidden=64,heads=4,vocabulary=10", "Nearest: layers=1"),
        ("layers=two,hidden=64", "layers='two' must be a whole number"),
        ("layers=2,layers=3", "given twice"),
        ("layers=2,hidden=64,heads=4,kv_heads=3,intermediate=8,vocabulary=10", "kv_heads"),
        ("missing/config.json", "there is no such file"),
    ],
)
def test_what_cannot_be_a_model_says_what_is_near(text, said):
    with pytest.raises(UsageError) as caught:
        find_model(text)
    assert said in str(caught.value)


def test_a_size_in_a_name():
    assert size_in_name("llama-2-7b") == 7e9
    assert size_in_name("qwen3-30b-a3b") == 30e9
    assert size_in_name("deepseek-v3") is None
