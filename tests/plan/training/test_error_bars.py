import json
from importlib import resources

import pytest

from benchmarks.plan.error_bars import groups
from nearpeak.machines import catalogue
from nearpeak.plan.models.catalogue import get_model
from nearpeak.plan.training.plan import training_error


@pytest.fixture(scope="module")
def fresh() -> dict[str, dict[str, float]]:
    return groups()


def test_the_file_is_that_of_a_validation(fresh):
    text = resources.files("nearpeak.plan.training").joinpath("training_error_bars.json").read_text()
    kept = json.loads(text)["groups"]
    assert kept.keys() == fresh.keys(), "run `python -m benchmarks.plan.error_bars`"
    for name, entry in fresh.items():
        for field, value in entry.items():
            assert kept[name][field] == pytest.approx(value, abs=0.01), "run `python -m benchmarks.plan.error_bars`"


def test_a_range_holds_eight_of_ten_runs_of_sources_that_it_was_not_made_from(fresh):
    for entry in fresh.values():
        assert 0.7 <= entry["coverage"] <= 0.9
        assert entry["low"] < 1 < entry["high"]


def test_the_range_is_wider_for_experts_and_for_gpus_without_runs():
    h100, mi300x, rtx = (catalogue.find(name) for name in ("h100-sxm", "mi300x", "rtx-4090"))
    dense, experts = get_model("llama-3-8b"), get_model("deepseek-v3")

    def width(model, machine):
        bar = training_error(model, machine)
        return bar.high / bar.low

    assert width(dense, h100) < width(experts, h100)
    assert training_error(dense, h100).seen
    for machine in (mi300x, rtx):
        assert width(dense, machine) > width(dense, h100) and not training_error(dense, machine).seen
