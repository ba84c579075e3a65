"""What the tests of the examples share: each of them predicted for an H100, and run on a CPU with made-up ceilings."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest

from nearpeak.gallery import run
from nearpeak.gallery.parts import ExampleResult, Part, Prose
from nearpeak.gallery.run import Context
from nearpeak.machines.machine import Achievable, LaunchCost, Machine
from nearpeak.measure.options import options_from

CPU = Machine(
    id="made-up-cpu",
    name="made-up CPU",
    kind="cpu",
    vendor="nobody",
    architecture="none",
    processors=2,
    memory_bytes=8e9,
    cache_bytes=8e6,
    achievable=Achievable(
        how="measured",
        note="made up",
        bandwidth=2e10,
        matrix={},
        vector={"float64": 5e10, "float32": 1e11, "bfloat16": 1e11},
        launch=LaunchCost(host_call=2e-6),
    ),
)
"""About what two cores do, so that nothing needs to be calibrated."""


@pytest.fixture(scope="session")
def predicting() -> Callable[[str], ExampleResult]:
    """An example predicted for an H100; each is run once for all tests."""
    on_h100 = run.make_context("h100-sxm")
    return functools.cache(lambda name: run.run_example(name, on_h100))


@pytest.fixture(scope="session")
def predicting_cpu() -> Callable[[str], ExampleResult]:
    """An example predicted for the made-up CPU, and not run there."""
    return functools.cache(lambda name: run.run_example(name, Context(machine=CPU, device="cpu", measures=False)))


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ExampleResult]:
    """An example run on the CPU of the tests, each call once: that it runs, whatever the times are."""

    def once(self: Context, fn: Callable[..., Any], *args: Any, **options: Any) -> float:
        options_from(options)  # an option that `bench` does not have is an error
        start = time.perf_counter()
        fn(*args)
        return time.perf_counter() - start

    monkeypatch.setattr(Context, "measure", once)
    return lambda name: run.run_example(name, Context(machine=CPU, device="cpu"))


@pytest.fixture(scope="session")
def only() -> Callable[..., list[Part]]:
    """The parts of one type."""
    return lambda result, kind: [part for part in result.parts if isinstance(part, kind)]


@pytest.fixture(scope="session")
def said() -> Callable[[ExampleResult], str]:
    """All prose."""
    return lambda result: "\n".join(part.text for part in result.parts if isinstance(part, Prose))
