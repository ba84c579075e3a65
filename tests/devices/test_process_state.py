"""What a measurement may not change for its caller, whatever the measured code does."""

from __future__ import annotations

import gc
import os
import random
import sys
import warnings

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nearpeak.devices.process_state import preserve_process_state, preserve_random_state
from nearpeak.measure.bench import bench
from nearpeak.measure.compare import compare
from nearpeak.measure.sweep import sweep

QUICK = {"max_seconds": 0.01, "warmup_seconds": 0.0, "min_blocks": 6, "max_blocks": 8, "cache": "hot"}


def drawn() -> tuple[object, ...]:
    """What the next draws are, without drawing."""
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), str(numpy.random.get_state())


def process() -> dict[str, object]:
    return {
        "random": drawn(),
        "modes": (torch.is_grad_enabled(), torch.is_anomaly_enabled(), torch.get_default_dtype()),
        "device": torch.get_default_device(),
        "autocast": [
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ],
        "flags": (torch.backends.cudnn.benchmark, torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled),
        "attention": (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()),
        "precision": (torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.fp32_precision),
        "threads": torch.get_num_threads(),
        "collector": (gc.isenabled(), gc.get_threshold()),
        "python": (dict(os.environ), list(warnings.filters), sys.stdout, sys.stderr),
    }


CHANGES = {
    "draw": lambda: (torch.rand(3), random.random(), numpy.random.rand()),
    "seed": lambda: (torch.manual_seed(1), random.seed(1), numpy.random.seed(1)),
    "gradients": lambda: torch.set_grad_enabled(False),
    "anomalies": lambda: torch.set_anomaly_enabled(True),
    "dtype": lambda: torch.set_default_dtype(torch.float64),
    "device": lambda: torch.set_default_device("meta"),
    "no device": lambda: torch.set_default_device(None),
    "autocast": lambda: (torch.set_autocast_enabled("cpu", True), torch.set_autocast_dtype("cpu", torch.float16)),
    "cudnn": lambda: (
        setattr(torch.backends.cudnn, "benchmark", True),
        setattr(torch.backends.cudnn, "enabled", False),
    ),
    "attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "precision": lambda: torch.set_float32_matmul_precision("medium"),
    "threads": lambda: torch.set_num_threads(1 + torch.get_num_threads() % 2),
    "collector": lambda: (gc.disable(), gc.set_threshold(5, 5, 5)),
    "environment": lambda: (os.environ.pop("HOME", None), os.environ.update(NEARPEAK_TEST="1")),
    "warnings": lambda: warnings.simplefilter("ignore", ResourceWarning),
    "streams": lambda: setattr(sys, "stderr", sys.__stderr__),
    "error": lambda: 1 / 0,
}


@given(names=st.lists(st.sampled_from(sorted(CHANGES)), max_size=6))
def test_everything_is_as_before(names):
    before = process()
    try:
        with preserve_process_state():
            for name in names:
                CHANGES[name]()
    except ZeroDivisionError:
        assert "error" in names
    assert {name: value for name, value in process().items() if value != before[name]} == {}


def test_random_numbers_go_on_as_if_nothing_had_been_drawn():
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    with preserve_random_state():
        torch.rand(7)
        torch.manual_seed(9)
    assert torch.equal(torch.rand(3), expected)


def careless() -> torch.Tensor:
    """A function that draws, and leaves the settings of the process as it likes."""
    for name in ("draw", "gradients", "dtype", "collector", "environment"):
        CHANGES[name]()
    return torch.rand(8)


@pytest.mark.parametrize(
    "measure",
    [
        lambda: bench(careless, **QUICK),
        lambda: compare(careless, careless, **QUICK),
        lambda: sweep(lambda n: (careless,), {"n": [1, 2]}, **QUICK),
        lambda: bench(torch.dropout, torch.ones(8), 0.5, True, reset=careless, **QUICK),
    ],
    ids=["bench", "compare", "sweep", "reset"],
)
def test_a_measurement_leaves_the_caller_as_it_was(measure):
    before = process()
    measure()
    assert {name: value for name, value in process().items() if value != before[name]} == {}
