import json
from importlib import resources

import pytest

from benchmarks.plan.error_bars import groups
from nearpeak.machines import catalogue
from nearpeak.plan.models.catalogue import get_model
from nearpeak.plan.training.plan import training_error


def test_the_file_is_that_of_a_validation():
    kept = json.loads(resources.files("nearpeak.plan.training").joinpath("training_error_bars.json").read_text())[
        "groups"
    ]
    fresh = groups()
    assert kept.keys() == fresh.keys(), "run `python -m benchmarks.plan.error_bars`"
    for name, entry in fresh.items():
        assert kept[name]["rows"] == entry["rows"]
        assert kept[name]["error"] == pytest.approx(entry["error"], abs=0.01), (
            "run `python -m benchmarks.plan.error_bars`"
        )


def test_runs_that_are_like_a_job():
    h100, a100, b200 = (catalogue.find(name) for name in ("h100-sxm", "a100-sxm-80gb", "b200"))
    dense, experts = get_model("llama-3-8b"), get_model("deepseek-v3")
    assert training_error(dense, h100).like == "dense models on hopper"
    assert training_error(experts, b200).like == "models with experts on blackwell"
    assert training_error(experts, a100).like == "models with experts"  # no run of these on an A100
    assert training_error(experts, b200).error > training_error(dense, b200).error
