"""A small model learns the same with the kernels as with plain torch, step by step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from kernel_checks import DEVICE

from nearpeak import kernels

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
STEPS = 10


@pytest.fixture(scope="module")
def train_curves() -> ModuleType:
    from benchmarks.numerics import train_curves

    return train_curves


@pytest.fixture
def size(train_curves):
    """Odd numbers where a model may have them: heads of 6, 29 tokens to choose from, sequences of 5."""
    small = {"width": 12, "heads": 2, "layers": 1, "vocabulary": 29, "tokens": 5, "batch": 2, "lr": 1e-2, "warm_up": 1}
    return replace(train_curves.SIZES["cpu"], **small)


@pytest.mark.slow
def test_losses_are_those_of_plain_torch(train_curves, size):
    batches = train_curves.text(size, STEPS * size.batch).split(size.batch)
    eager = list(train_curves.trained(train_curves.OPERATIONS["eager"], size, batches, DEVICE))
    with kernels.using("require"):
        fused = list(train_curves.trained(train_curves.OPERATIONS["nearpeak"], size, batches, DEVICE))
    assert fused == pytest.approx(eager, abs=1e-3)
    assert sum(eager[-5:]) < sum(eager[:5])  # it learns: nothing that stands still is compared


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # of CPUs without products in bfloat16
def test_a_bfloat16_model_stays_near_too(train_curves, size):
    size = replace(size, dtype="bfloat16")
    batches = train_curves.text(size, 4 * size.batch).split(size.batch)
    eager = list(train_curves.trained(train_curves.OPERATIONS["eager"], size, batches, DEVICE))
    with kernels.using("require"):
        fused = list(train_curves.trained(train_curves.OPERATIONS["nearpeak"], size, batches, DEVICE))
    # a logit of about 1 is rounded by up to 2**-9, and a loss is the mean over 10 tokens
    assert fused == pytest.approx(eager, abs=2**-5)


def test_references_agree_to_rounding(train_curves, size):
    batches = train_curves.text(size, STEPS * size.batch).split(size.batch)
    eager = list(train_curves.trained(train_curves.OPERATIONS["eager"], size, batches, DEVICE))
    with kernels.using("off"):
        plain = list(train_curves.trained(train_curves.OPERATIONS["nearpeak"], size, batches, DEVICE))
    assert plain == pytest.approx(eager, abs=1e-5)


def test_attention_is_nearpeaks_where_nobody_asks_for_torchs(train_curves, size):
    plain = train_curves.eager_attention
    assert train_curves.operations_of("nearpeak").attention is not plain
    assert train_curves.operations_of("nearpeak", "torch").attention is plain
    assert train_curves.operations_of("nearpeak", "torch").loss is train_curves.operations_of("nearpeak").loss
    assert train_curves.operations_of("eager, nudged").attention is plain
    assert train_curves.why_not_attention(size, DEVICE) == ""
    if DEVICE == "cuda":
        wide = replace(size, width=1024)
        assert "heads of 1 to 256 dimensions" in train_curves.why_not_attention(wide, DEVICE)


def test_a_wrong_gradient_is_not_within_noise(train_curves, size):
    """The comparison sees a gradient that is 10 % too large in one operation."""
    wrong = replace(
        train_curves.OPERATIONS["eager"],
        swiglu_packed=lambda x: train_curves.eager_swiglu(x + 0.1 * (x - x.detach())),
    )
    batches = train_curves.text(size, STEPS * size.batch).split(size.batch)
    eager = list(train_curves.trained(train_curves.OPERATIONS["eager"], size, batches, DEVICE))
    off = list(train_curves.trained(wrong, size, batches, DEVICE))
    assert off != pytest.approx(eager, abs=1e-3)


def test_the_verdict_is_by_the_nearest_orders(train_curves):
    runs = {
        "eager": [3.0, 2.0],
        "nearpeak": [3.01, 2.01],
        "eager, nudged": [3.0, 2.0],
        "eager, order 1": [3.1, 2.1],
        "eager, order 2": [3.5, 2.5],
    }
    assert train_curves.is_within_noise(train_curves.differences(runs))
    assert not train_curves.is_within_noise(train_curves.differences({**runs, "nearpeak": [3.2, 2.2]}))
    assert not train_curves.is_within_noise(train_curves.differences({**runs, "nearpeak": [3.0, float("nan")]}))


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("train_curves_*.json")), ids=str)
def test_the_verdict_of_a_saved_run_is_that_of_its_curves(train_curves, path):
    content = json.loads(path.read_text(encoding="utf-8"))
    found = train_curves.differences(content["runs"])
    assert found.keys() == content["differences"].keys()
    for pair, one in content["differences"].items():  # sums of Python 3.12 and later are rounded otherwise
        assert found[pair] == pytest.approx(one, rel=1e-9, abs=1e-12), pair
    assert train_curves.is_within_noise(found) == content["within noise"]
    assert content["within noise"]


@pytest.mark.parametrize("machine", ["cpu", "h200"])
def test_the_page_has_the_differences_of_a_saved_run(machine):
    path = ROOT / "benchmarks" / "results" / f"train_curves_{machine}.json"
    own, _, *orders = json.loads(path.read_text(encoding="utf-8"))["differences"].values()
    page = " ".join((ROOT / "docs" / "kernels.md").read_text(encoding="utf-8").split())
    assert f"differ by {own['largest']:.2g} at most" in page
    assert f"nearest orders by {min(one['mean'] for one in orders):.2g} in the mean" in page


def test_the_page_has_all_operations():
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    for name in kernels.__all__:
        assert f"`{name}`" in page or name == "Support", f"docs/kernels.md says nothing of {name}"
        assert f".{name}\n" in reference, f"docs/reference.md says nothing of {name}"
